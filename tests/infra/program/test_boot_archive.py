"""The job archive: the same sources give the same bytes, and it has only the files that a run needs."""

from __future__ import annotations

import hashlib
import io
import os
import tarfile
from pathlib import Path

import pytest

from gpufleet import job
from gpufleet.infra.inputs import archive


def package(folder: Path, *, backwards: bool = False, size: int = 100_000) -> Path:
    """A job package; `backwards` creates the same files in another order, with other times and modes."""
    files = {
        "__init__.py": b"",
        "config.py": b"x = 1\n",
        "train/loop.py": b"pass\n",
        "big.py": b"#" * size,
        "requirements.txt": b"safetensors\n",
    }
    for number, name in enumerate(sorted(files, reverse=backwards)):
        path = folder / "job" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(files[name])
        path.chmod(0o600 if backwards else 0o755)
        os.utime(path, (number, number))
    return folder / "job"


def names(packed: bytes) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:gz") as tar:
        return tar.getnames()


def test_order_times_and_modes_do_not_change_the_bytes(tmp_path: Path) -> None:
    one = archive.build(package(tmp_path / "one"))
    other = archive.build(package(tmp_path / "other", backwards=True))

    assert one == other
    assert one.sha256 == hashlib.sha256(one.content).hexdigest()


def test_the_bytes_are_the_same_on_every_machine(tmp_path: Path) -> None:
    """The hash was computed once on Linux with CPython 3.11. The archive is not compressed, so none matters."""
    expected = "fe9a205dc0569f33a65deadd7c938343c37212febd5b7d01cb7123dffb687e6d"

    assert archive.build(package(tmp_path)).sha256 == expected


def test_one_changed_character_is_another_archive(tmp_path: Path) -> None:
    folder = package(tmp_path)
    before = archive.build(folder)
    (folder / "config.py").write_text("x = 2\n")

    assert archive.build(folder).sha256 != before.sha256


def test_it_unpacks_to_the_package_with_its_contents(tmp_path: Path) -> None:
    packed = archive.build(package(tmp_path / "from"))
    with tarfile.open(fileobj=io.BytesIO(packed.content), mode="r:gz") as tar:
        tar.extractall(tmp_path / "to", filter="data")

    assert (tmp_path / "to/gpufleet/job/big.py").read_bytes() == b"#" * 100_000
    assert (tmp_path / "to/gpufleet/job/train/loop.py").read_text() == "pass\n"


def test_caches_tests_and_hidden_files_are_left_out(tmp_path: Path) -> None:
    folder = package(tmp_path)
    before = archive.build(folder)
    for name in ("__pycache__/config.cpython-312.pyc", "tests/test_config.py", ".env", "stray.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("anything")

    assert archive.build(folder) == before


def test_the_real_package_brings_its_code_and_its_requirements() -> None:
    packed = archive.build(Path(job.__file__).parent)

    brought = set(names(packed.content))
    assert {
        f"gpufleet/job/{name}" for name in ("kind/command.py", "experiments/sft/spec.py", "requirements.txt")
    } <= brought
    assert {name.split("/")[1] for name in brought} == {"__init__.py", "job"}


def test_a_folder_without_files_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no job package"):
        archive.build(tmp_path / "nowhere")


def test_it_is_written_into_the_project_once_and_again_where_it_was_cut_short(tmp_path: Path) -> None:
    packed = archive.build(package(tmp_path / "from"))
    path = packed.file(tmp_path)
    assert path.read_bytes() == packed.content
    assert packed.sha256 in path.name
    before = path.stat().st_mtime_ns
    assert packed.file(tmp_path).stat().st_mtime_ns == before
    path.write_bytes(b"")
    assert packed.file(tmp_path).read_bytes() == packed.content
