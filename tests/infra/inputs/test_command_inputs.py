"""A command's inputs on the user's machine: folders are hashed once, prefixes are listed, and run.json names both."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.bill.project import bill_basis
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.pin import pin
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.inputs import folders
from gpufleet.infra.program.plan import Plan, make
from gpufleet.infra.program.resources.declare import uploads
from gpufleet.infra.program.run_guard import Previous
from gpufleet.job import atomic
from gpufleet.job.contract.run import load as read_run
from tests.infra.command_files import IMAGE, command_file

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DIGEST = "sha256:" + "5" * 64


class FakeBucket:
    """S3's listing of one prefix, in pages."""

    def __init__(self, objects: dict[str, str]) -> None:
        self.objects = objects

    def get_paginator(self, name: str) -> FakeBucket:
        assert name == "list_objects_v2"
        return self

    def paginate(self, *, Bucket: str, Prefix: str) -> list[dict[str, Any]]:
        assert (Bucket, Prefix) == ("theirs", "some/data/")
        listed = [{"Key": Prefix + key, "Size": len(text), "ETag": f'"{text}"'} for key, text in self.objects.items()]
        return [{}, {"Contents": listed[:1]}, {"Contents": listed[1:]}]


def project(root: Path, **given: Any) -> StackDefinition:
    """A project with a local input and an input in a bucket."""
    for name, text in {"train.txt": "one", "deep/val.txt": "two"}.items():
        (root / "text" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "text" / name).write_text(text)
    (root / "mine").mkdir()
    (root / "mine/train.py").write_text("1")
    places = {"text": "../text", "more": "s3://theirs/some/data"}
    path = command_file(root / "project", storage={"inputs": places}, code={"folder": "../mine"}, **given)
    return load(path, now=NOW)


def plan(root: Path, previous: Previous | None = None, *, preview: bool = True) -> Plan:
    return make(root / "project", "mine", now=NOW, previous=previous or Previous(outputs={}), preview=preview)


def test_a_file_is_hashed_once_and_again_when_it_has_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    definition, hashed = project(tmp_path), list[str]()
    own = atomic.sha256

    def counted(path: Path, advance: Callable[[int], None]) -> str:
        hashed.append(path.name)
        return own(path, advance)

    monkeypatch.setattr(atomic, "sha256", counted)

    first = folders.read(definition, tmp_path / "project")["text"]
    again = folders.read(definition, tmp_path / "project")["text"]
    (tmp_path / "text/train.txt").write_text("other")
    third = folders.read(definition, tmp_path / "project")["text"]

    assert hashed == ["val.txt", "train.txt", "train.txt"]
    assert first == again
    assert first.sha256 != third.sha256
    assert sorted(path.name for path in (tmp_path / "text").rglob("*")) == ["deep", "train.txt", "val.txt"]


def test_a_prefix_is_listed_and_another_content_is_another_input(tmp_path: Path) -> None:
    definition = project(tmp_path)
    root, uri = tmp_path / "project", "s3://theirs/some/data"
    assert list(folders.missing(definition, root)) == [
        f"storage.inputs.more, {uri}, is not listed: run `gpufleet prepare mine`."
    ]

    first = folders.listed(uri, root, FakeBucket({"a.bin": "1", "folder/": "", "folder/b.bin": "22"}))

    assert (first.count, first.bytes) == (2, 3)
    assert folders.read(definition, root)["more"] == first
    assert list(folders.missing(definition, root)) == []
    assert folders.listed(uri, root, FakeBucket({"folder/b.bin": "22", "a.bin": "1"})).sha256 == first.sha256
    assert folders.listed(uri, root, FakeBucket({"folder/b.bin": "22", "a.bin": "2"})).sha256 != first.sha256
    with pytest.raises(GpufleetError, match="has no files"):
        folders.listed(uri, root, FakeBucket({"folder/": ""}))


UNFIT = {
    "not there": (None, "is missing: there is no folder"),
    "empty": ([], "has no files"),
    "many": (
        [str(number) for number in range(folders.MOST_FILES + 1)],
        "has 1,001 files, but at most 1,000 are uploaded one by one: pack them, or copy them into a bucket",
    ),
    "name": (["a\nb"], "has a file whose name is 'a"),
}


@pytest.mark.parametrize("case", UNFIT)
def test_a_folder_that_cannot_be_uploaded_is_told(case: str, tmp_path: Path) -> None:
    names, said = UNFIT[case]
    if names is not None:
        (tmp_path / "odd").mkdir()
    for name in names or ():
        (tmp_path / "odd" / name).write_text("")
    definition = load(command_file(tmp_path / "project", storage={"inputs": {"odd": "../odd"}}), now=NOW)

    (sentence,) = folders.missing(definition, tmp_path / "project")

    assert sentence.startswith(f"storage.inputs.odd, ../odd, {said}")
    assert folders.read(definition, tmp_path / "project") == {}


def test_a_link_is_followed_and_one_that_leads_back_ends(tmp_path: Path) -> None:
    folder = tmp_path / "odd"
    (folder / "a").mkdir(parents=True)
    (tmp_path / "blob").write_text("x")
    (folder / "a/file").symlink_to(tmp_path / "blob")
    (folder / "a/back").symlink_to(folder)

    assert list(folders.files_of(folder)) == ["a/file"]


def test_the_bill_counts_what_is_uploaded(tmp_path: Path) -> None:
    assert bill_basis(project(tmp_path), tmp_path / "project", load_catalog()).dataset_bytes == 6


def test_a_run_is_told_its_code_and_inputs_and_the_stack_uploads_them(tmp_path: Path) -> None:
    definition = project(tmp_path)
    root = tmp_path / "project"
    more = folders.listed("s3://theirs/some/data", root, FakeBucket({"a.bin": "1"}))
    pin(
        definition.source, ami="ami-0123456789abcdef0", image=f"{IMAGE}@{DIGEST}", supervisor_image=f"r.io/p:3@{DIGEST}"
    )

    made = plan(tmp_path, preview=False)

    (tmp_path / "run.json").write_text(made.run_config)
    run = read_run(tmp_path / "run.json")
    assert made.warnings == ()
    assert (run.dataset, run.weights) == (None, None)
    assert run.code is not None
    assert [file.name for file in run.code.files] == ["code.tar.gz"]
    assert [file.name for file in run.folders["text"].files] == ["deep/val.txt", "train.txt"]
    assert (run.folders["more"].uri, run.folders["more"].sha256, run.folders["more"].files) == (
        more.uri,
        more.sha256,
        (),
    )
    assert json.loads(made.run_config)["inputs"]["code"]["commit"] is None
    keys = {upload.key: upload.file for upload in uploads(made, root)}
    assert keys[f"inputs/{run.code.sha256}/code.tar.gz"] == made.code.file  # type: ignore[union-attr]
    assert keys[f"inputs/{run.folders['text'].sha256}/deep/val.txt"] == root / "../text/deep/val.txt"
    assert not any("more" in upload.name for upload in uploads(made, root))


def test_other_inputs_are_refused_under_the_same_id_and_other_code_is_told(tmp_path: Path) -> None:
    definition = project(tmp_path)
    folders.listed("s3://theirs/some/data", tmp_path / "project", FakeBucket({"a.bin": "1"}))
    first = plan(tmp_path)
    begun = Previous(
        outputs={"run": asdict(first.verdict.run), "runs": ["r1"]},
        fleets=frozenset({"r1"}),
        objects=frozenset(upload.key for upload in uploads(first, tmp_path / "project")),
    )

    (tmp_path / "mine/train.py").write_text("2")
    changed = plan(tmp_path, begun)
    (tmp_path / "text/train.txt").write_text("other")

    assert any("The job code has changed since run r1 began" in warning for warning in changed.warnings)
    with pytest.raises(DefinitionError, match="Run r1 already exists with other settings"):
        plan(tmp_path, begun)
    (tmp_path / "text").rename(tmp_path / "gone")
    assert plan(tmp_path, begun).verdict.continues  # a deleted folder is no change of the run
    assert definition.storage.inputs is not None


def test_what_is_missing_stops_an_up(tmp_path: Path) -> None:
    project(tmp_path)

    with pytest.raises(
        GpufleetError, match=r"supervisor_image has a tag but no digest(.|\n)*more, s3://.*is not listed"
    ):
        plan(tmp_path, preview=False)
