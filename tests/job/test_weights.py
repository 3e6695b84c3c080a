"""Base weights: listed once beside their files, believed by size, staged by hash."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
from supervisor_world import Bench

from job.dataset import weights
from job.run_file import load
from job.supervisor import staging


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama"
    (made / "original").mkdir(parents=True)
    (made / ".cache").mkdir()
    (made / "model-00001-of-00002.safetensors").write_bytes(b"first half")
    (made / "model-00002-of-00002.safetensors").write_bytes(b"second half")
    (made / "config.json").write_text("{}")
    (made / "original" / "params.json").write_text("{}")
    (made / ".cache" / "lock").write_text("")
    return made


def test_every_file_is_listed_with_its_hash_and_hidden_ones_are_not(folder: Path) -> None:
    found = weights.describe(folder)
    listed = {file.name: file for file in found.files}
    assert set(listed) == {
        "config.json",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "original/params.json",
        "weights.json",
    }
    assert listed["config.json"].sha256 == hashlib.sha256(b"{}").hexdigest()
    assert found.bytes == sum((folder / name).stat().st_size for name in listed)
    assert weights.describe(folder) == found  # its own list is no weight


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda f: (f / "weights.json").unlink(), "no weights.json; `gpufleet prepare` writes it"),
        (lambda f: (f / "weights.json").write_text("{"), "damaged"),
        (lambda f: (f / "config.json").unlink(), "not the file that weights.json names"),
        (lambda f: (f / "config.json").write_text("{ }"), "not the file that weights.json names"),
    ],
)
def test_what_is_not_as_listed_is_refused(folder: Path, damage: object, said: str) -> None:
    weights.describe(folder)
    damage(folder)  # type: ignore[operator]
    with pytest.raises(ValueError, match=said):
        weights.read(folder)


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; download the base weights into it"):
        weights.describe(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no \*\.safetensors file in it"):
        weights.describe(tmp_path)


@pytest.mark.parametrize("uploaded", [True, False], ids=["by the stack", "an s3:// prefix"])
def test_a_node_stages_them_beside_the_dataset(folder: Path, tmp_path: Path, uploaded: bool) -> None:
    bench = Bench(tmp_path / "bench")
    found = weights.describe(folder)
    place = bench.bucket / "inputs" / found.sha256 if uploaded else tmp_path / "theirs"
    for file in found.files:
        (place / file.name).parent.mkdir(parents=True, exist_ok=True)
        (place / file.name).write_bytes((folder / file.name).read_bytes())
    listed = [{"name": f.name, "bytes": f.bytes, "sha256": f.sha256} for f in found.files]
    bench.tree["inputs"]["base_weights"] = (
        {"uri": None, "sha256": found.sha256, "files": listed}
        if uploaded
        else {"uri": str(place), "sha256": None, "files": []}
    )
    workdir = tmp_path / "node"
    workdir.mkdir()
    (workdir / "run.json").write_text(json.dumps(bench.tree))
    stage = staging.Stage(store=bench.store, run=load(workdir / "run.json"), workdir=workdir, say=lambda text: None)
    staging.inputs(stage)
    assert (workdir / "inputs" / "model-00002-of-00002.safetensors").read_bytes() == b"second half"
    assert (workdir / "inputs" / "original" / "params.json").read_text() == "{}"
    assert (workdir / "data" / "dataset.json").is_file()
