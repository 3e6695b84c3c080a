"""What another process wrote is read with doubt: no name leads out of its folder, no value ends a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import runs
from supervisor_world import Bench

from job.contract.commit import Commit, Manifest
from job.dataset import prepare, weights
from job.run_file import load
from job.supervisor import staging

OUTSIDE = ["/usr/x", "../run.json", "a/../../x", "", ".", "a//b", "a/", "./a", "a\0b", "a\x1b[2Jb", "\ud800", "x" * 256]


def listing(name: Any) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": 1, "sha256": "0" * 64}]


def of_manifest(name: Any, folder: Path) -> object:
    return Manifest.from_json({"schema": 1, "step": 3, "run": "r1", "config_sha256": "c", "files": listing(name)})


def of_commit(name: Any, folder: Path) -> object:
    return Commit.from_json({"schema": 1, "step": 3, "config_sha256": "c", "files": listing(name)})


def of_requirement(name: Any, folder: Path) -> object:
    tree = {"schema": 1, "step": 3, "config_sha256": "c", "files": listing("w.bin"), "requires": [name]}
    return Commit.from_json(tree)


def of_dataset(name: Any, folder: Path) -> object:
    facts = {"train_characters": 9, "validation_characters": 1, "vocab": 17}
    tree = {"schema": 1, "kind": "characters", "source": "x", "facts": facts, "files": listing(name)}
    (folder / prepare.MANIFEST).write_text(json.dumps(tree))
    return prepare.read_manifest(folder)


def of_a_shard(name: Any, folder: Path) -> object:
    facts = {"train_characters": 9, "validation_characters": 1, "vocab": 17}
    tree = {"schema": 1, "kind": "characters", "source": "x", "facts": facts, "files": listing("a"), "train": [name]}
    (folder / prepare.MANIFEST).write_text(json.dumps(tree))
    return prepare.read_manifest(folder)


def of_weights(name: Any, folder: Path) -> object:
    (folder / weights.MANIFEST).write_text(json.dumps({"schema": 1, "name": "w", "files": listing(name)}))
    return weights.read(folder)


def of_run_json(name: Any, folder: Path) -> object:
    tree = runs.tree()
    tree["inputs"]["dataset"]["files"] = listing(name)
    return load(runs.place(folder, tree))


def of_a_prefix(manifest: str) -> Any:
    def read(name: Any, folder: Path) -> None:
        bench = Bench(folder)
        place = bench.bucket / "inputs" / bench.tree["inputs"]["dataset"]["sha256"]
        given = {"uri": str(place), "sha256": None, "files": []}
        bench.tree["inputs"]["dataset" if manifest == staging.DATASET else "base_weights"] = given
        (place / manifest).write_text(json.dumps({"schema": 1, "files": listing(name)}))
        run = load(runs.place(folder / "next", bench.tree))
        before = sorted(folder.rglob("*"))
        try:
            staging.inputs(staging.Stage(store=bench.store, run=run, workdir=folder / "next", say=lambda text: None))
        finally:
            added = set(folder.rglob("*")) - set(before)
            assert all(path.is_relative_to(folder / "next") for path in added)

    return read


PLACES = {
    "manifest.json": of_manifest,
    "commit.json": of_commit,
    "what a commit requires": of_requirement,
    "dataset.json": of_dataset,
    "a shard of dataset.json": of_a_shard,
    "weights.json": of_weights,
    "run.json": of_run_json,
    "dataset.json of a prefix": of_a_prefix(staging.DATASET),
    "weights.json of a prefix": of_a_prefix(staging.WEIGHTS),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", [*OUTSIDE, 7, None], ids=ascii)
def test_no_name_leads_out_of_its_folder(name: Any, place: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"(name|requires|train)[^ ]* (is|names) .*(name|text|longer|one of)"):
        PLACES[place](name, tmp_path)
