"""A dataset of any kind: written whole, named by hash, kept when it is the same."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gpufleet.job.contract.inputs import DatasetManifest, verify
from gpufleet.job.experiments.dataset.prepare import describe, publish, read_manifest

FACTS = {"train_characters": 1200, "validation_characters": 12, "vocab": 17}


def published(folder: Path, content: bytes = b"abc") -> DatasetManifest:
    def write(temporary: Path) -> None:
        (temporary / "rows").mkdir()
        (temporary / "rows" / "train.bin").write_bytes(content)

    return publish(
        folder,
        kind="characters",
        source="pairs.jsonl",
        facts=FACTS,
        write=write,
        train=("rows/train.bin",),
    )


def test_a_published_folder_reads_back_with_kind_facts_and_hashes(tmp_path: Path) -> None:
    manifest = published(tmp_path / "data")
    assert read_manifest(tmp_path / "data") == manifest
    assert (manifest.kind, manifest.facts, manifest.train) == ("characters", FACTS, ("rows/train.bin",))
    assert [file.name for file in manifest.files] == ["rows/train.bin", "dataset.json"]
    verify(tmp_path / "data", manifest)


def test_the_same_dataset_again_leaves_the_folder_alone(tmp_path: Path) -> None:
    published(tmp_path / "data")
    before = (tmp_path / "data").stat().st_ino
    published(tmp_path / "data")
    assert (tmp_path / "data").stat().st_ino == before


@pytest.mark.parametrize("there", [True, False])
def test_a_link_to_another_disk_stays_a_link(there: bool, tmp_path: Path) -> None:
    place, link = tmp_path / "large" / "sets" / "data", tmp_path / "data"
    if there:
        published(place, b"before")
    link.symlink_to(place)
    published(link)
    assert link.readlink() == place
    assert (place / "rows" / "train.bin").read_bytes() == b"abc"
    assert [path.name for path in place.parent.iterdir()] == ["data"]


def test_a_failure_while_writing_leaves_nothing(tmp_path: Path) -> None:
    def fail(temporary: Path) -> None:
        (temporary / "half").write_bytes(b"x")
        raise ValueError("row 7 has no answer")

    with pytest.raises(ValueError, match="row 7"):
        publish(tmp_path / "data", kind="characters", source="x", facts={}, write=fail)
    assert list(tmp_path.iterdir()) == []


def test_an_unknown_kind_is_refused_with_the_kinds_there_are(tmp_path: Path) -> None:
    published(tmp_path / "data")
    path = tmp_path / "data" / "dataset.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "kind": "pictures"}))
    with pytest.raises(ValueError, match="windows, packed, characters, ranking"):
        read_manifest(tmp_path / "data")


def test_a_manifest_written_before_there_were_kinds_is_one_of_windows(tmp_path: Path) -> None:
    old = {
        "schema": 1,
        "source": "tales.txt",
        "tokenizer": {"kind": "bytes", "vocab": 257, "id": "bytes"},
        "train": ["train_00000.bin"],
        "validation": ["validation_00000.bin"],
        "tokens": {"train": 10, "validation": 2},
        "stories": {"train": 3, "validation": 1},
        "files": [{"name": f"{name}_00000.bin", "bytes": 1, "sha256": "0"} for name in ("train", "validation")],
    }
    (tmp_path / "dataset.json").write_text(json.dumps(old))
    manifest = read_manifest(tmp_path)
    facts = manifest.facts
    assert (manifest.kind, facts["tokenizer"]["vocab"], facts["tokens"]["train"]) == ("windows", 257, 10)


def test_one_line_says_what_a_dataset_is(tmp_path: Path) -> None:
    assert describe(published(tmp_path / "data")).startswith("characters from pairs.jsonl: train_characters 1,200, ")
    long = replace(
        published(tmp_path / "data"), source=f"text: sha256 {'0a' * 32}, by words", facts={"by": "words", "n": 2}
    )
    assert describe(long).startswith("characters from text: sha256 0a0a0a0a0a0a, by words: n 2; 0.0 MB")
