"""Base weights: listed once beside their files, believed by size, staged by hash."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from gpufleet.job.contract.inputs import read_weights
from gpufleet.job.contract.run import load
from gpufleet.job.experiments.dataset import weights
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.models import hf_config
from gpufleet.job.supervisor import staging
from tests.job.supervisor_world import Bench
from tests.repository import ROOT

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "llama"
    (made / "original").mkdir(parents=True)
    (made / ".cache").mkdir()
    halves = {"model-00001-of-00002.safetensors": b"first half", "model-00002-of-00002.safetensors": b"second half"}
    for name, content in halves.items():
        (made / name).write_bytes(content)
    (made / INDEX).write_text(json.dumps({"weight_map": dict(zip("ab", halves, strict=True))}))
    for name in ("config.json", "generation_config.json", "chat_template.jinja", "tokenizer.model", "merges.txt"):
        (made / name).write_text("{}")
    (made / "consolidated.safetensors").write_bytes(b"both halves once more")
    (made / "original" / "consolidated.00.pth").write_bytes(b"and again")
    (made / "original" / "params.json").write_text("{}")
    (made / "README.md").write_text("# Llama")
    (made / ".cache" / "lock").write_text("")
    return made


def test_what_a_run_needs_is_listed_with_its_hash(folder: Path) -> None:
    found = weights.describe(folder)
    listed = {file.name: file for file in found.files}
    assert set(listed) == {
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "merges.txt",
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.model",
        "weights.json",
    }
    assert listed["config.json"].sha256 == hashlib.sha256(b"{}").hexdigest()
    assert found.bytes == sum((folder / name).stat().st_size for name in listed)
    assert weights.describe(folder) == found  # its own list is no weight


def test_a_second_copy_of_the_weights_is_left_out_and_said(folder: Path) -> None:
    weights.describe(folder)
    assert weights.left_out(folder) == {"README.md": 7, "consolidated.safetensors": 21, "original/": 11}


def test_a_whole_file_of_weights_is_taken_alone_as_transformers_does(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"whole")
    assert [p.name for p in weights.paths(folder) if p.suffix == ".safetensors"] == ["model.safetensors"]


def test_weights_under_names_that_nobody_reads_are_refused(folder: Path) -> None:
    (folder / INDEX).unlink()
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .* rename"):
        weights.paths(folder)


def test_an_index_that_lists_nothing_is_none(folder: Path) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": ["a", "b"]}))
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor"):
        weights.paths(folder)


POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 4976698672\n"
EMPTY_LIST = b"\x02\0\0\0\0\0\0\0[]"


def with_header(whole: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """The file with another header, as other writers make one."""
    end = 8 + int.from_bytes(whole[:8], "little")
    tree = json.loads(whole[8:end])
    change(tree)
    words = json.dumps(tree).encode()
    words += b" " * (-len(words) % 8)
    return len(words).to_bytes(8, "little") + words + whole[end:]


@pytest.mark.parametrize(
    "content",
    [
        lambda whole: POINTER,
        lambda whole: b"",
        lambda whole: EMPTY_LIST,
        lambda whole: whole[:-1],
        lambda whole: whole + b"0",
        lambda whole: with_header(whole, lambda tree: tree["__metadata__"].update(step=5)),
        lambda whole: with_header(whole, lambda tree: tree["a"].update(data_offsets=[1, 49])),
        lambda whole: with_header(whole, lambda tree: tree["a"].update(shape=[4, 4])),
    ],
    ids=["pointer", "empty", "list", "cut", "longer", "number", "hole", "shape"],
)
def test_a_file_that_the_library_does_not_open_is_found_before_anything_is_paid(
    content: Callable[[bytes], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": np.ones((3, 4), np.float32), "b": np.zeros(0, np.float32)}, path, metadata={"format": "pt"})
    weights.check(tmp_path)
    path.write_bytes(content(path.read_bytes()))
    with pytest.raises(ValueError, match=r"model\.safetensors: [\d,]+ bytes, not a safetensors file .*it again"):
        weights.check(tmp_path)


def test_a_file_that_may_not_be_read_is_not_to_be_downloaded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a download by another user leaves it: 16 GB, and whole."""
    save_file({"a": np.ones(3, np.float32)}, tmp_path / "model.safetensors")

    def refused(path: Path, mode: str) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(ValueError, match=r"model\.safetensors: cannot be read \(Permission denied\)"):
        weights.check(tmp_path)


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("config.json", hf_config.read_shape),
        ("weights.json", read_weights),
        ("dataset.json", read_manifest),
    ],
)
def test_a_description_that_may_not_be_read_is_not_said_to_be_missing(
    name: str, read: Callable[[Path], object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / name).write_text("{}")

    def refused(path: Path) -> bytes:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "read_bytes", refused)
    with pytest.raises((PermissionError, ValueError), match="Permission denied") as told:  # the tests may be root's
        read(tmp_path)
    assert name in str(told.value)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.float64])  # as bitsandbytes, GPTQ and others pack
def test_weights_of_other_dtypes_are_refused_before_anything_is_paid(dtype: type, tmp_path: Path) -> None:
    save_file({"norm": np.ones(3, np.float16), "q.weight": np.ones((4, 1), dtype)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"q\.weight is [IUF]\d+; only BF16, F16, F32 are read: instead of quantised"):
        weights.check(tmp_path)


def test_a_part_that_the_index_names_and_is_not_there_is_said(folder: Path) -> None:
    (folder / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ValueError, match=r"index\.json names model-00002-of-00002\.safetensors, which is not there"):
        weights.paths(folder)


def test_a_tensor_that_two_files_hold_is_refused(folder: Path) -> None:
    for path in folder.glob("model-*.safetensors"):
        save_file({"norm": np.ones(3, np.float32)}, path)
    with pytest.raises(ValueError, match=r"norm is in model-00001-of-00002\.safetensors too; keep one"):
        weights.check(folder)


@pytest.mark.parametrize("name", [".part.safetensors", "../part.safetensors", "weights.json", ""])
def test_an_index_that_names_what_is_no_part_of_the_weights_is_refused(folder: Path, name: str) -> None:
    (folder / ".part.safetensors").write_bytes(b"")
    (folder / "weights.json").write_text("{}")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"norm": name}}))
    with pytest.raises(ValueError, match=r"index\.json names .*, which is not there"):
        weights.paths(folder)


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "meta-llama/Llama-3.1-8B-Instruct"),
        ("/fsx/llama", "llama"),
        ("../llama-8b", "llama"),
        (None, "llama"),
    ],
)
def test_weights_are_called_by_their_hub_id_else_by_their_folder(folder: Path, said: str | None, name: str) -> None:
    (folder / "config.json").write_text(json.dumps({"_name_or_path": said}))  # perhaps a path on another machine
    weights.describe(folder)
    assert weights.name_of(folder.rename(folder.with_name("inputs"))) == name  # as a node names it


def test_weights_that_nobody_named_have_no_name(tmp_path: Path) -> None:
    assert weights.name_of(None) is weights.name_of(tmp_path) is None


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
        read_weights(folder)


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("llama-3.1-8b-instruct", "hf download meta-llama/Llama-3.1-8B-Instruct --exclude 'original/*' --local-dir "),
        ("qwen3-8b", "hf download Qwen/Qwen3-8B --exclude 'original/*' --local-dir "),
        ("mine", "those of job.parameters.model, as published"),
    ],
)
def test_a_missing_folder_says_how_to_come_by_its_weights(tmp_path: Path, name: str, command: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}: no such folder; .*{re.escape(command)}"):
        weights.paths(tmp_path / name)


def test_every_folder_of_base_weights_in_stacks_has_its_command() -> None:
    text = "".join(path.read_text() for path in (ROOT / "stacks").glob("*.yaml"))
    folders = set(re.findall(r"base_weights: data/([\w.-]+)", text))
    assert folders == set(weights._PUBLISHED)


def test_a_folder_without_weights_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no such folder; download the base weights into it"):
        weights.describe(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"neither model\.safetensors nor .* download"):
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
    assert not (workdir / "inputs" / "original").exists()
    assert (workdir / "data" / "dataset.json").is_file()
