"""A stage counts what earlier stages have spent, and takes what they left only as they listed it."""

from __future__ import annotations

import hashlib
import json
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.attempt import AttemptRecord, Beat, Exit
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.run import InputData, load
from gpufleet.job.contract.spent import Attempt, History
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.kind.common import Demands
from gpufleet.job.supervisor import attempts, staging
from gpufleet.job.supervisor.store import FolderStore
from tests.job import runs
from tests.job.supervisor_world import Bench


def stage_bench(folder: Path, stage: str, **changes: Any) -> Bench:
    named = {**runs.tree()["run"], "id": f"r1/{stage}"}
    bench = Bench(folder, run=named, **changes)
    bench.store = FolderStore(bench.bucket / "r1" / stage)
    bench.store.put_bytes(json.dumps(bench.tree).encode(), "run.json")
    return bench


@pytest.fixture
def prepared(tmp_path: Path) -> Bench:
    """A first stage that is done."""
    bench = stage_bench(tmp_path, "prepare")
    assert bench.attempt("i-1").run() == 0
    assert bench.json("done.json")["reason"] == "finished"
    return bench


def spent(bench: Bench, instance: str) -> Decimal:
    beats = bench.store.get_bytes(f"heartbeat/{instance}.jsonl") or b""
    return Decimal(json.loads(beats.splitlines()[-1])["spent_usd"])


def test_what_an_earlier_stage_has_spent_counts_towards_the_run_s_limits(tmp_path: Path, prepared: Bench) -> None:
    before = spent(prepared, "i-1")
    alone = stage_bench(tmp_path, "alone")
    assert alone.attempt("i-2").run() == 0
    after = stage_bench(tmp_path, "train", before=["prepare"])
    assert after.attempt("i-2").run() == 0
    assert spent(after, "i-2") == spent(alone, "i-2") + before
    assert after.json("receipt.json")["usd"]["actual"] == alone.json("receipt.json")["usd"]["actual"]  # its own alone
    limits = {"max_usd": str(before), "max_hours": "2", "deadline": None}
    poor = stage_bench(tmp_path, "poor", before=["prepare"], limits=limits)
    assert poor.attempt("i-3").run() == 0
    assert poor.json("done.json")["reason"] == "max_usd"
    assert not poor.trainers


def taken(bench: Bench, folder: Path) -> Path:
    """What a later stage gets of the bench's stage; its folder."""
    later = stage_bench(folder, "later")
    run = load(runs.place(folder / "i-9", later.tree))
    left = InputData(uri=None, sha256=None, files=(), stage="r1/prepare")
    run = replace(run, dataset=None, weights=None, folders={"prepare": left})
    staging.inputs(staging.Stage(store=later.store, run=run, workdir=folder / "i-9", say=print))
    return folder / "i-9/user/inputs/prepare"


def test_a_later_stage_gets_what_an_earlier_one_left_and_nothing_else(tmp_path: Path, prepared: Bench) -> None:
    prepared.store.put_bytes(b"of a node that was lost", "final/stray.txt")
    listed = {each["name"]: each for each in prepared.json("final/handed_on.json")["files"]}
    assert listed
    folder = taken(prepared, tmp_path)
    there = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert there == {*listed, "handed_on.json"}


def test_a_job_gets_only_the_files_that_it_takes(
    tmp_path: Path, prepared: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = prepared.json("final/handed_on.json")
    small = {"name": "small.txt", "bytes": 5, "sha256": hashlib.sha256(b"small").hexdigest()}
    prepared.store.put_bytes(b"small", "final/small.txt")
    both = {**listed, "files": [*listed["files"], small]}
    prepared.store.put_bytes(json.dumps(both).encode(), "final/handed_on.json")
    monkeypatch.setattr(GrowthConfig, "demands", Demands(takes=("small.txt",)))
    folder = taken(prepared, tmp_path)
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {"small.txt", "handed_on.json"}


def test_other_bytes_than_those_listed_are_refused(tmp_path: Path, prepared: Bench) -> None:
    name = prepared.json("final/handed_on.json")["files"][0]["name"]
    content = prepared.store.get_bytes(f"final/{name}") or b""
    prepared.store.put_bytes(b"?" + content[1:], f"final/{name}")
    with pytest.raises(staging.MismatchError, match=name):
        taken(prepared, tmp_path)


def test_a_stage_that_has_left_no_list_gives_nothing(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the input prepare is not at the place that the run names"):
        taken(stage_bench(tmp_path, "prepare"), tmp_path)


@pytest.mark.parametrize(
    ("changed_s", "reclaimed"),
    [(1.0, True), (100.0, True), (1000.0, False), (1250.0, False), (5000.0, True)],
    ids=["its own launch", "a second start", "before its notice", "after it", "after its end"],
)
def test_the_change_that_launched_a_stage_s_node_does_not_explain_its_notice(changed_s: float, reclaimed: bool) -> None:
    at = runs.LAUNCHED
    ending = Exit(75, "notice", True, iso(at + 1200), iso(at + 1320))
    record = AttemptRecord(instance="i-1", launched_at=iso(at), exit=ending)
    lived = Decimal(1320)
    node = Attempt(record=record, beat=Beat(), seconds=lived, lived_s=lived, usd=Decimal(1), compute_usd=Decimal(1))
    (found,) = attempts.judged([node], {}, History(changes=(at + changed_s,)), at + 2000)
    assert found.reclaimed is reclaimed
