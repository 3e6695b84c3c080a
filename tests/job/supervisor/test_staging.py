"""Which checkpoint is resumed from, when some of what lies in the store is torn, foreign or damaged."""

from __future__ import annotations

import json
import stat
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.commit import read as commit_of
from gpufleet.job.contract.inputs import InputFile, digest
from gpufleet.job.contract.run import InputData, load
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.supervisor import staging
from gpufleet.job.supervisor.store import FolderStore, GivenUpError, MissingError, StoreError
from tests.job.supervisor_world import Bench, FaultyStore, commit, publisher, state


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    """Steps 3 and 6 are published."""
    made = Bench(tmp_path)
    publishes = publisher(made, node="first")
    for step in (3, 6):
        commit(tmp_path / "first", step, made.config_sha256)
        publishes.publish(publishes.pending()[-1])
    return made


def resume(bench: Bench, store: Any = None) -> int | None:
    """The step that a fresh node goes on from."""
    said: list[str] = []
    stage = _stage(bench, store=store or bench.store, say=said.append)
    found = staging.checkpoint(stage)
    if found is not None:
        staging.best_too(stage, found.place)
    bench.output.write("\n".join(said).encode())
    return found.commit.step if found else None


def _stage(bench: Bench, **given: Any) -> staging.Stage:
    """Of a fresh node."""
    workdir = bench.folder / "next"
    workdir.mkdir()
    (workdir / "run.json").write_text(json.dumps(bench.tree))
    run = load(workdir / "run.json")
    return staging.Stage(**{"store": bench.store, "run": run, "workdir": workdir, "say": lambda text: None, **given})


def rewrite(bench: Bench, change: Callable[[dict[str, Any]], object]) -> None:
    manifest = bench.json("ckpt/step_00000006/manifest.json")
    change(manifest)
    bench.store.put_bytes(json.dumps(manifest).encode(), "ckpt/step_00000006/manifest.json")


def test_the_highest_step_is_restored_as_a_local_commit(bench: Bench) -> None:
    assert resume(bench) == 6
    path = bench.folder / "next" / "ckpt" / "step_00000006"
    assert (path / "w.bin").read_bytes() == state(6)
    first = bench.folder / "first" / "ckpt" / "step_00000006"
    assert commit_of(path) == commit_of(first)


DAMAGE: dict[str, tuple[Callable[[Bench], object], str]] = {
    "no manifest": (lambda b: b.store.delete(["ckpt/step_00000006/manifest.json"]), ""),
    "torn manifest": (
        lambda b: b.store.put_bytes(b'{"schema": 1, "st', "ckpt/step_00000006/manifest.json"),
        "not JSON",
    ),
    "other schema": (lambda b: rewrite(b, lambda m: m.update(schema=2)), "schema 2, this code reads 1"),
    "other run": (lambda b: rewrite(b, lambda m: m.update(run="r2")), "to run 'r2'"),
    "other config": (lambda b: rewrite(b, lambda m: m.update(config_sha256="0")), "another config"),
    "other step": (lambda b: rewrite(b, lambda m: m.update(step=7)), "to step 7"),
    "no files": (lambda b: rewrite(b, lambda m: m.update(files=[])), "names no files"),
    "file without hash": (lambda b: rewrite(b, lambda m: m["files"][0].pop("sha256")), "files[0].sha256 is missing"),
    "path outside": (
        lambda b: rewrite(b, lambda m: m["files"][0].update(name="../../x")),
        "files[0].name is '../../x', not",
    ),
    "missing file": (lambda b: b.store.delete(["ckpt/step_00000006/w.bin"]), "None bytes"),
    "short file": (lambda b: b.store.put_bytes(b"short", "ckpt/step_00000006/w.bin"), "5 bytes"),
    "flipped bit": (lambda b: b.store.put_bytes(state(7), "ckpt/step_00000006/w.bin"), "sha256 is"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_what_does_not_verify_is_passed_over_for_the_next_lower(bench: Bench, name: str) -> None:
    damage, why = DAMAGE[name]
    damage(bench)
    assert resume(bench) == 3
    assert why in bench.said
    assert bench.manifests() == [3]  # so that the node script's newest is the one in force
    assert not (bench.folder / "next" / "ckpt" / "step_00000006").exists()
    assert not list((bench.folder / "next" / "ckpt").glob(".step*"))


def test_nothing_published_starts_from_scratch(bench: Bench) -> None:
    for step in (3, 6):
        bench.store.delete([f"ckpt/step_{step:08d}/manifest.json"])
    assert resume(bench) is None


def test_a_flaky_store_is_asked_again_before_anything_is_rejected(bench: Bench) -> None:
    class Flaky(FaultyStore):
        downloads = 0

        def get_file(self, key: str, path: Path) -> None:
            self.downloads += 1
            if self.downloads <= 2:
                raise StoreError("500")
            self.inner.get_file(key, path)

    assert resume(bench, Flaky(bench.store, lambda put, key: None)) == 6


def test_a_store_that_stays_away_rejects_nothing(bench: Bench) -> None:
    class Away(FaultyStore):
        def get_file(self, key: str, path: Path) -> None:
            raise StoreError("500")

    with pytest.raises(StoreError):
        resume(bench, Away(bench.store, lambda put, key: None))
    assert bench.manifests() == [3, 6]


def test_a_dataset_prefix_names_its_files_itself(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    digest = bench.tree["inputs"]["dataset"]["sha256"]
    bench.tree["inputs"]["dataset"] = {"uri": str(bench.bucket / "inputs" / digest), "sha256": None, "files": []}
    shard = bench.bucket / "inputs" / digest / "train.bin"
    shard.write_bytes(b"tokens")
    listed = {"name": "train.bin", "bytes": 6, "sha256": "0" * 64}
    (shard.parent / "dataset.json").write_text(json.dumps({"schema": 1, "files": [listed]}))
    with pytest.raises(staging.MismatchError, match=r"train\.bin: sha256 is"):
        staging.inputs(_stage(bench))


def test_a_list_of_files_that_is_not_the_datasets_is_refused(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    digest = bench.tree["inputs"]["dataset"]["sha256"]
    place = bench.bucket / "inputs" / digest
    bench.tree["inputs"]["dataset"] = {"uri": str(place), "sha256": digest, "files": []}
    (place / "dataset.json").write_text('{"schema": 1, "files": [], "source": "another"}')
    with pytest.raises(staging.MismatchError, match=r"dataset\.json: sha256 is"):
        staging.inputs(_stage(bench))


@pytest.mark.parametrize("error", [MissingError, GivenUpError])
def test_what_is_not_there_or_was_given_up_is_not_tried_again(bench: Bench, error: type[StoreError]) -> None:
    pauses, tries = list[float](), list[int]()

    def act() -> None:
        tries.append(1)
        raise error

    with pytest.raises(error):
        staging.retried(_stage(bench, pause=pauses.append), act, "w.bin")
    assert (len(tries), pauses) == (1, [])


def test_a_step_is_set_aside_where_another_is_fit_whatever_else_is_there(bench: Bench) -> None:
    bench.store.put_bytes(b"{}", "ckpt/step_00000001/manifest.json")
    stage = _stage(bench)
    assert [staging.set_aside(stage, step, "it cannot be read") for step in (6, 3)] == [True, False]
    assert bench.manifests() == [1, 3]


def test_a_store_that_stutters_while_a_step_is_set_aside_costs_no_node(bench: Bench) -> None:
    class Stuttering(FaultyStore):
        def get_bytes(self, key: str) -> bytes | None:
            self._count(key)
            return self.inner.get_bytes(key)

    store = Stuttering(bench.store, lambda call, _: StoreError("503") if call % 2 else None)
    assert staging.set_aside(_stage(bench, store=store), 6, "it cannot be read")
    assert bench.manifests() == [3]


def test_of_a_used_work_folder_nothing_stays_but_what_the_run_is(tmp_path: Path) -> None:
    left = ("run.json", "results.json", "metrics.jsonl", "job.log", "loss.csv")
    for name in (*left, "final/meta.json", "exports/start/meta.json", "ckpt/step_00000003/commit.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("{}")
    staging.clear(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["run.json"]


def test_a_job_that_exports_its_best_gets_the_best_checkpoint_too(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.store.put_bytes(b'{"step": 3, "val_loss": 0.5}', "best.json")
    assert resume(bench) == 6
    assert not (bench.folder / "next" / "ckpt" / "step_00000003").exists()  # this one exports its last
    monkeypatch.setattr(GrowthConfig, "delivers_best", True)
    (bench.folder / "next").rename(bench.folder / "before")
    assert resume(bench) == 6
    assert (bench.folder / "next" / "ckpt" / "step_00000003" / "w.bin").read_bytes() == state(3)


def test_a_best_checkpoint_that_is_damaged_is_missed_and_said(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthConfig, "delivers_best", True)
    bench.store.put_bytes(b'{"step": 3, "val_loss": 0.5}', "best.json")
    bench.store.put_bytes(state(7), "ckpt/step_00000003/w.bin")
    assert resume(bench) == 6
    assert "the best so far, does not verify: ckpt/step_00000003/w.bin: sha256 is" in bench.said


def test_a_best_that_is_missed_is_not_the_one_to_beat(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrowthConfig, "delivers_best", True)
    bench.store.put_bytes(b'{"step": 3, "val_loss": 0.5}', "best.json")
    bench.store.delete(["ckpt/step_00000003/w.bin"])
    assert bench.attempt(script={7: lambda trainer: trainer.commit("best", 0.6)}).run() == 0
    assert (bench.json("best.json")["step"], bench.trainers[0].began_at) == (7, 6)
    assert bench.manifests() == [7, 9, 12]


def test_bytes_that_arrive_wrong_on_a_doubted_node_reject_nothing(bench: Bench) -> None:
    bench.store.put_bytes(state(7), "ckpt/step_00000006/w.bin")
    asked: list[str] = []

    def doubts(key: str) -> bool:
        asked.append(key)
        return True

    with pytest.raises(staging.MismatchError, match="sha256 is"):
        staging.checkpoint(_stage(bench, doubts=doubts))
    assert bench.manifests() == [3, 6]
    assert asked == ["ckpt/step_00000006/w.bin"]


def command_stage(bench: Bench, **given: Any) -> staging.Stage:
    """Of a fresh node of a command; its code is a program and a link."""
    place = Path(bench.store.uri).parent / "inputs"
    (place / "abc").mkdir(parents=True)
    program = bench.folder / "run.sh"
    program.write_text("#!/bin/sh")
    program.chmod(0o700)
    with tarfile.open(place / "abc" / "code.tar.gz", "w:gz") as packed:
        packed.add(program, "deep/run.sh")
    (place / "def/deep").mkdir(parents=True)
    (place / "def/deep/a.txt").write_text("one")
    fresh = _stage(bench)
    code = InputData(uri=None, sha256="abc", files=(InputFile.from_file(place / "abc/code.tar.gz", place / "abc"),))
    text = InputData(uri=None, sha256="def", files=(InputFile.from_file(place / "def/deep/a.txt", place / "def"),))
    run = replace(fresh.run, dataset=None, weights=None, code=code, folders={"text": text, **given})
    return replace(fresh, run=run)


def test_a_command_s_code_and_inputs_are_where_its_container_sees_them_and_open_to_whoever_it_runs_as(
    bench: Bench,
) -> None:
    stage = command_stage(bench)

    staging.inputs(stage)

    user = stage.workdir / "user"
    assert (user / "inputs/text/deep/a.txt").read_text() == "one"
    assert stat.S_IMODE((user / "code/deep/run.sh").stat().st_mode) & 0o766 == 0o766
    assert stat.S_IMODE((user / "inputs/text/deep").stat().st_mode) == 0o777
    assert not (stage.workdir / "data").exists()


def test_what_an_earlier_run_on_the_node_left_among_the_inputs_goes_and_what_it_changed_is_brought_again(
    bench: Bench,
) -> None:
    stage = command_stage(bench)
    staging.inputs(stage)
    folder = stage.workdir / "user/inputs/text/deep"
    (folder / "a.txt").write_text("two")
    (folder / "cache.bin").touch()
    (folder / "link").symlink_to(bench.folder)

    staging.inputs(stage)

    assert {path.name for path in folder.iterdir()} == {"a.txt"}
    assert (folder / "a.txt").read_text() == "one"


@pytest.mark.parametrize("change", ["", "other bytes", "another file"])
def test_a_prefix_that_has_changed_since_it_was_listed_is_no_input_of_the_run(bench: Bench, change: str) -> None:
    theirs = FolderStore(bench.folder / "theirs")
    theirs.put_bytes(b"one", "deep/a.txt")
    there = [(each.key, each.bytes, each.etag) for each in theirs.entries("")]
    if change == "other bytes":
        theirs.put_bytes(b"longer", "deep/a.txt")
    elif change:
        theirs.put_bytes(b"two", "b.txt")
    stage = command_stage(bench, more=InputData(uri=theirs.uri, sha256=digest(there), files=()))

    if change:
        with pytest.raises(ValueError, match="the input more has changed since it was listed"):
            staging.inputs(stage)
    else:
        staging.inputs(stage)
        assert (stage.workdir / "user/inputs/more/deep/a.txt").read_text() == "one"
