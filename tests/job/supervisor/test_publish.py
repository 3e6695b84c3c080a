"""Uploads that die or fail anywhere: a checkpoint without a valid manifest never counts, one with it always does."""

from __future__ import annotations

import itertools
import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from gpufleet.job import atomic
from gpufleet.job.contract import bucket
from gpufleet.job.contract.bucket import CheckpointPlace, checkpoint_place
from gpufleet.job.contract.commit import Manifest
from gpufleet.job.contract.workdir import START
from gpufleet.job.experiments.engine.checkpoint import Checkpoints
from gpufleet.job.supervisor.publish import commits
from gpufleet.job.supervisor.store import ANY, GivenUpError, StoreError
from tests.job.supervisor_world import STEPS, Bench, FakeClock, FaultyStore, NodeDeath, commit, publisher, state

MANIFEST_3 = "ckpt/step_00000003/manifest.json"


def death_at(put: int, number: int, _: str) -> NodeDeath | None:
    return NodeDeath() if number == put else None


def test_a_node_that_dies_at_any_put_costs_nothing_but_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.fsync", lambda descriptor: None)  # a dead process, not a dead disk
    for put in itertools.count(1):
        bench = Bench(tmp_path / str(put))
        dying = FaultyStore(bench.store, partial(death_at, put))
        try:
            bench.attempt(store=dying, commit_every=4).run()
        except NodeDeath:
            before = bench.manifests()
            assert bench.store.get_bytes("done.json") is None
            assert bench.attempt("i-2").run() == 0
            assert bench.trainers[-1].began_at == max(before, default=0)
            assert bench.store.get_bytes("final/model.safetensors") == state(STEPS)
            assert bench.json("done.json")["reason"] == "finished"
        else:
            break
    assert put > 20  # three checkpoints, the exports, the end: each put was the last one once


def test_the_manifest_is_written_after_every_file_and_export_it_names(tmp_path: Path) -> None:
    bench, keys = Bench(tmp_path), []
    commit(tmp_path / "w", 3, "c", requires=("exports/phase1_end",))
    (tmp_path / "w" / "exports" / "phase1_end").mkdir(parents=True)
    (tmp_path / "w" / "exports" / "phase1_end" / "model.safetensors").write_bytes(b"weights")
    made = publisher(bench, FaultyStore(bench.store, lambda _, key: keys.append(key)))
    made.publish(made.pending()[0])
    assert keys[0] == "exports/phase1_end/model.safetensors"
    assert set(keys[1:3]) == {"ckpt/step_00000003/.metadata", "ckpt/step_00000003/w.bin"}
    assert keys[3] == "ckpt/step_00000003/manifest.json"
    manifest = bench.json("ckpt/step_00000003/manifest.json")
    assert manifest["required_files"] == [{"name": "exports/phase1_end/model.safetensors", "bytes": 7}]


def test_what_another_node_has_published_of_a_step_stays_whole_until_its_successor_is(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    late = publisher(bench)
    late.publish(late.pending()[0])
    first = {entry.key: bench.store.get_bytes(entry.key) for entry in bench.store.entries("ckpt/")}
    (tmp_path / "w" / "ckpt" / "step_00000003" / "w.bin").write_bytes(state(3)[::-1])  # as on GPUs: other bytes
    for put in itertools.count(1):
        own = publisher(bench, FaultyStore(bench.store, partial(death_at, put)))
        try:
            own.publish(own.pending()[0])
        except NodeDeath:
            places = bucket.published(entry.key for entry in bench.store.entries("ckpt/"))
        else:
            break
        assert places == [CheckpointPlace(3)]
    assert put == 4
    assert bucket.published(entry.key for entry in bench.store.entries("ckpt/")) == [
        CheckpointPlace(3),
        CheckpointPlace(3, 1),
    ]
    assert (
        first.items() <= {entry.key: bench.store.get_bytes(entry.key) for entry in bench.store.entries("ckpt/")}.items()
    )
    own.prune()
    assert bucket.published(entry.key for entry in bench.store.entries("ckpt/")) == [CheckpointPlace(3, 1)]


def test_an_export_of_an_earlier_attempt_is_enough(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.put_bytes(b"weights", "exports/phase1_end/model.safetensors")
    commit(tmp_path / "w", 3, "c", requires=("exports/phase1_end",))
    made = publisher(bench)
    made.publish(made.pending()[0])
    assert bench.manifests() == [3]


def test_a_checkpoint_whose_export_is_nowhere_is_not_published(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c", requires=("exports/phase1",))
    bench.store.put_bytes(b"weights", "exports/phase1_end/model.safetensors")  # another one, with a like name
    made = publisher(bench)
    with pytest.raises(FileNotFoundError, match="exports/phase1 is required"):
        made.publish(made.pending()[0])
    assert bench.manifests() == []


def test_an_export_made_anew_replaces_that_of_a_torn_attempt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.put_bytes(b"weightz", "exports/phase1_end/model.safetensors")
    commit(tmp_path / "w", 3, "c", requires=("exports/phase1_end",))
    (tmp_path / "w" / "exports" / "phase1_end").mkdir(parents=True)
    (tmp_path / "w" / "exports" / "phase1_end" / "model.safetensors").write_bytes(b"weights")
    made = publisher(bench)
    made.publish(made.pending()[0])
    assert bench.store.get_bytes("exports/phase1_end/model.safetensors") == b"weights"


def test_a_file_that_arrives_short_gets_no_manifest(tmp_path: Path) -> None:
    class Lossy(FaultyStore):
        def put_file(self, path: Path, key: str, over: str = ANY) -> None:
            self.inner.put_bytes(path.read_bytes()[:-1], key)

    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    made = publisher(bench, Lossy(bench.store, lambda put, key: None))
    with pytest.raises(StoreError, match="arrived with"):
        made.publish(made.pending()[0])
    assert bench.manifests() == []


def test_a_torn_save_is_no_commit(tmp_path: Path) -> None:
    commit(tmp_path / "w", 3, "c")
    torn = commit(tmp_path / "w", 6, "c")
    (torn / "commit.json").unlink()
    commit(tmp_path / "w", 7, "c").rename(torn.with_name("step_00000008"))  # a copy by hand
    half = commit(tmp_path / "w", 9, "c")
    (half / "commit.json").write_text('{"schema": 1, "step": 9, "fi')
    assert [found.step for found in commits(tmp_path / "w")] == [3]


def test_only_the_newest_of_the_timed_ones_is_sent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for step, reason, loss in ((3, "timed", None), (4, "best", 1.0), (5, "boundary", None), (6, "timed", None)):
        commit(tmp_path / "w", step, "c", reason=reason, val_loss=loss)
    assert [found.step for found in publisher(bench).pending()] == [4, 5, 6]


def test_a_checkpoint_is_published_after_what_the_stages_left(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    (tmp_path / "w" / "stages").mkdir()
    (tmp_path / "w" / "stages" / "candidates.jsonl").write_text("{}\n")
    refuse = FaultyStore(bench.store, lambda _, key: StoreError("503") if key.startswith("stages/") else None)
    made = publisher(bench, refuse)
    with pytest.raises(StoreError):
        made.publish(made.pending()[0])
    assert bench.manifests() == []


def test_the_trainer_does_not_prune_what_is_being_uploaded(tmp_path: Path) -> None:
    bench, folder = Bench(tmp_path), tmp_path / "w" / "ckpt"
    for step in (3, 6, 9):
        commit(tmp_path / "w", step, "c")
    checkpoints = Checkpoints(folder, config_sha256="c")

    def prune(_: int, key: str) -> None:
        if key == "ckpt/step_00000003/.metadata":  # in the middle of its upload
            checkpoints.committed.prune(2)

    made = publisher(bench, FaultyStore(bench.store, prune))
    made.publish(commits(tmp_path / "w")[0])
    assert bench.manifests() == [3]
    assert "ckpt/step_00000003/.uploading" not in {entry.key for entry in bench.store.entries("")}
    checkpoints.committed.prune(2)
    assert [found.step for found in commits(tmp_path / "w")] == [6, 9]


def test_a_checkpoint_pruned_before_its_upload_makes_room_for_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    gone = commit(tmp_path / "w", 3, "c")
    made = publisher(bench)
    (waiting,) = made.pending()
    shutil.rmtree(gone)
    with pytest.raises(StoreError, match="pruned"):
        made.publish(waiting)
    assert made.pending() == []


def test_the_measured_pace_of_a_checkpoint_leaves_its_exports_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, clock = Bench(tmp_path), FakeClock()
    monkeypatch.setattr("gpufleet.job.supervisor.publish.time", SimpleNamespace(monotonic=clock))
    (tmp_path / "w" / "exports").mkdir(parents=True)
    (tmp_path / "w" / "exports" / "a.bin").write_bytes(b"weights")
    commit(tmp_path / "w", 3, "c", requires=("exports/a",))

    def slowly(_: int, key: str) -> None:
        clock.sleep(100 if key.startswith("exports/") else 1)

    made = publisher(bench, FaultyStore(bench.store, slowly))
    made.publish(made.pending()[0])
    assert made.measured is not None
    assert made.measured[1] == 3  # two files and the manifest


def test_a_publication_that_only_went_on_measures_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    first = iter([StoreError("503")])
    refuse = FaultyStore(bench.store, lambda _, key: next(first, None) if key == MANIFEST_3 else None)
    made = publisher(bench, refuse)
    with pytest.raises(StoreError):
        made.publish(made.pending()[0])
    made.publish(made.pending()[0])
    assert bench.manifests() == [3]
    assert made.measured is None


def test_a_publication_given_up_leaves_no_manifest_and_can_be_done_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gpufleet.job.supervisor.publish.ThreadPoolExecutor", lambda _: ThreadPoolExecutor(1)
    )  # one by one
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    made = publisher(bench)
    store = FaultyStore(bench.store, lambda _, key: made.cancel() if key.endswith(".metadata") else None)
    made._store = store
    with pytest.raises(GivenUpError):
        made.publish(made.pending()[0])
    assert bench.manifests() == []
    made._store = bench.store
    made.publish(made.pending()[0])
    assert bench.manifests() == [3]


def test_old_objects_go_only_after_the_newer_manifest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    made = publisher(bench)
    for step in (3, 6, 9):
        commit(tmp_path / "w", step, "c")
        made.publish(made.pending()[-1])
    commit(tmp_path / "w", 12, "c")
    dying = FaultyStore(bench.store, lambda _, key: NodeDeath() if key.endswith("manifest.json") else None)
    made._store = dying
    with pytest.raises(NodeDeath):
        made.publish(made.pending()[-1])
    assert bench.manifests() == [3, 6, 9]
    made._store = bench.store
    made.publish(made.pending()[-1])
    made.prune()
    assert bench.manifests() == [9, 12]


def test_pruning_sweeps_up_a_torn_upload_below_the_last_and_nothing_above_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.put_bytes(b"half", "ckpt/step_00000002/w.bin")
    bench.store.put_bytes(b"why", "ckpt/step_00000009/rejected.txt")  # kept to look at
    made = publisher(bench)
    for step in (3, 6):
        commit(tmp_path / "w", step, "c")
        made.publish(made.pending()[-1])
    made.prune()
    assert {int(entry.key.split("/")[1][-8:]) for entry in bench.store.entries("ckpt/")} == {3, 6, 9}


def test_what_a_later_generation_is_sending_is_not_swept_up_by_the_one_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    made = publisher(bench)
    made.join(2, 0, 1)
    for step in (3, 6, 9):
        commit(tmp_path / "w", step, "c")
        made.publish(made.pending()[-1])
    for generation in (1, 3):
        bench.store.put_bytes(b"half", CheckpointPlace(4, generation).prefix + "w.bin")
    made.prune()
    there = {checkpoint_place(entry.key) for entry in bench.store.entries("ckpt/")}
    assert there == {(6, 2), (9, 2), (4, 3)}


def test_a_best_value_that_is_not_a_number_is_never_the_best(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    made = publisher(bench)
    for step, loss in ((3, 2.0), (6, float("nan")), (9, 3.0)):
        commit(tmp_path / "w", step, "c", reason="best", val_loss=loss)
        made.publish(made.pending()[-1])
    assert bench.json("best.json")["step"] == 3
    assert json.loads(bench.store.get_bytes("best.json") or b"")["val_loss"] == 2.0


def test_the_best_is_named_again_when_it_could_not_be_the_first_time(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    failing = FaultyStore(bench.store, lambda _, key: StoreError("not now") if key == "best.json" else None)
    made = publisher(bench, failing)
    commit(tmp_path / "w", 3, "c", reason="best", val_loss=2.0)
    with pytest.raises(StoreError):
        made.publish(made.pending()[-1])
    made._store = bench.store
    (again,) = made.pending()
    made.publish(again)
    assert bench.json("best.json")["step"] == 3


def test_the_best_is_named_by_the_next_node_when_one_ended_just_before(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    made = publisher(bench)
    commit(tmp_path / "w", 3, "c", reason="best", val_loss=2.0)
    made.publish(made.pending()[-1])
    bench.store.delete(["best.json"])
    publisher(bench).resumed(Manifest.from_json(bench.json(MANIFEST_3)))
    assert bench.json("best.json") == {"schema": 1, "step": 3, "phase": "", "val_loss": 2.0, "manifest": MANIFEST_3}


def test_a_best_of_a_later_step_than_the_one_that_a_node_goes_on_from_is_nobodys(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    late = publisher(bench)
    for step, loss in ((3, 2.0), (6, 1.0)):
        commit(tmp_path / "w", step, "c", reason="best", val_loss=loss)
        late.publish(late.pending()[-1])
    publisher(bench).resumed(Manifest.from_json(bench.json(MANIFEST_3)))
    assert bench.json("best.json")["step"] == 3


def test_a_best_that_is_published_after_a_newer_step_is_not_the_newest(tmp_path: Path) -> None:
    made = publisher(Bench(tmp_path))
    commit(tmp_path / "w", 3, "c", reason="best", val_loss=2.0)
    commit(tmp_path / "w", 6, "c", reason="stop")
    for place in (-1, 0):  # the newest first, as before a machine goes away
        made.publish(made.pending()[place])
    assert made.newest == CheckpointPlace(6)


@pytest.mark.parametrize("how", ["its manifest is gone", "it cannot be had"])
def test_a_best_that_is_gone_is_not_the_one_to_beat(tmp_path: Path, how: str) -> None:
    """Else the best there is would be pruned for it."""
    bench = Bench(tmp_path)
    made = publisher(bench)
    for step, loss in ((3, 2.0), (6, None), (7, None)):
        commit(tmp_path / "w", step, "c", val_loss=loss)
        made.publish(made.pending()[-1])
    (tmp_path / "w").rename(tmp_path / "before")
    resumed = Manifest.from_json(bench.json("ckpt/step_00000007/manifest.json"))
    if how == "its manifest is gone":
        bench.store.delete([MANIFEST_3])
    made = publisher(bench)
    made.resumed(resumed)
    if how == "it cannot be had":
        made.forget_best(resumed)
    for step, loss in ((8, 2.1), (9, 2.3), (10, 2.4), (11, 2.5)):
        commit(tmp_path / "w", step, "c", reason="stop", val_loss=loss)
        made.publish(made.pending()[-1])
        made.prune()
    assert bench.json("best.json")["step"] == 8
    assert bench.manifests() == [8, 10, 11]
    assert [found.step for found in commits(tmp_path / "w")] == [8, 10, 11]


def test_a_checkpoint_that_was_evaluated_only_after_a_resume_goes_again_without_its_files(tmp_path: Path) -> None:
    bench, keys = Bench(tmp_path), list[str]()
    made = publisher(bench)
    for step, loss in ((3, 2.0), (6, None)):
        path = commit(tmp_path / "w", step, "c", reason="stop", val_loss=loss)
        made.publish(made.pending()[-1])
    before = bench.json("ckpt/step_00000006/manifest.json")
    made = publisher(bench, FaultyStore(bench.store, lambda _, key: keys.append(key)))
    made.resumed(Manifest.from_json(before))
    assert made.pending() == []
    atomic.write_json(path / "commit.json", {**(atomic.read_object(path / "commit.json") or {}), "val_loss": 1.0})
    made.publish(made.pending()[-1])
    assert keys == ["ckpt/step_00000006/manifest.json", "best.json"]
    assert bench.json("ckpt/step_00000006/manifest.json") == {**before, "val_loss": 1.0}
    assert (bench.json("best.json")["step"], made.newest, made.pending()) == (6, CheckpointPlace(6), [])


def test_a_checkpoint_that_was_evaluated_after_a_resume_and_is_no_better_tells_so_too(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    made = publisher(bench)
    for step, loss in ((3, 2.0), (6, None)):
        commit(tmp_path / "w", step, "c", reason="stop", val_loss=loss)
        made.publish(made.pending()[-1])
    made.resumed(Manifest.from_json(bench.json("ckpt/step_00000006/manifest.json")))
    path = tmp_path / "w" / "ckpt" / "step_00000006" / "commit.json"
    atomic.write_json(path, {**(atomic.read_object(path) or {}), "val_loss": 2.0})
    made.publish(made.pending()[-1])
    assert bench.json("ckpt/step_00000006/manifest.json")["val_loss"] == 2.0  # the next start goes by it
    assert (bench.json("best.json")["step"], made.pending()) == (3, [])


def test_a_disk_short_of_room_keeps_the_best_beside_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    made = publisher(bench)
    for step, loss in ((3, 1.0), (6, 2.0), (9, 3.0)):
        commit(tmp_path / "w", step, "c", reason="best", val_loss=loss)
        made.publish(made.pending()[-1])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=1))
    made.prune()
    assert [found.step for found in commits(tmp_path / "w")] == [3, 9]
    assert bench.manifests() == [3, 6, 9]


def test_a_try_that_failed_late_sends_again_only_what_had_not_arrived(tmp_path: Path) -> None:
    bench, keys = Bench(tmp_path), []

    def fault(_: int, key: str) -> StoreError | None:
        keys.append(key)
        return StoreError("503") if key.endswith("manifest.json") and keys.count(key) == 1 else None

    commit(tmp_path / "w", 3, "c")
    made = publisher(bench, FaultyStore(bench.store, fault))
    with pytest.raises(StoreError, match="503"):
        made.publish(made.pending()[0])
    commit(tmp_path / "w", 3, "c")  # written anew: what arrived is not this
    made.publish(made.pending()[0])
    assert keys.count("ckpt/step_00000003/w.bin") == 2
    keys.clear()
    commit(tmp_path / "w", 6, "c")
    with pytest.raises(StoreError, match="503"):
        made.publish(made.pending()[0])
    made.publish(made.pending()[0])
    assert keys.count("ckpt/step_00000006/w.bin") == 1
    assert bench.manifests() == [3, 6]


def test_what_another_node_swept_up_between_two_tries_is_sent_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    refused = FaultyStore(bench.store, lambda put, _: StoreError("503") if put == 3 else None)  # the manifest
    late = publisher(bench, refused)
    with pytest.raises(StoreError, match="503"):
        late.publish(late.pending()[0])
    commit(tmp_path / "other", 6, "c")
    other = publisher(bench, node="other")
    other.publish(other.pending()[0])
    other.prune()
    late.publish(late.pending()[0])
    for entry in bench.json("ckpt/step_00000003/manifest.json")["files"]:
        assert bench.store.size(f"ckpt/step_00000003/{entry['name']}") == entry["bytes"]


@pytest.mark.parametrize("error", [StoreError("503"), OSError("input/output error")])
def test_a_log_that_cannot_be_sent_does_not_keep_a_checkpoint_back(tmp_path: Path, error: OSError) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    (tmp_path / "w" / "metrics.jsonl").write_text('{"step": 3}\n')
    made = publisher(bench, FaultyStore(bench.store, lambda _, key: error if "metrics" in key else None))
    made.publish(made.pending()[0])
    assert bench.manifests() == [3]


def test_what_leads_out_of_the_run_s_folder_or_is_no_data_is_no_result(tmp_path: Path) -> None:
    bench, workdir = Bench(tmp_path), tmp_path / "w"
    (tmp_path / "secret").write_text("not the run's")
    for name in ("final/model.bin", "final/.git/config", "final/Makefile", "exports/a/meta.json", "results.json"):
        (workdir / name).parent.mkdir(parents=True, exist_ok=True)
        (workdir / name).write_text("{}")
    for name in ("final/link", "exports/a/link", "link.json"):
        (workdir / name).symlink_to(tmp_path / "secret")
    for name in ("final/folder", "exports/folder"):
        (workdir / name).symlink_to(tmp_path)
    for name in ("final/pipe", "pipe.json"):
        os.mkfifo(workdir / name)
    (workdir / "tb").symlink_to(tmp_path)
    (workdir / "final" / "inside").symlink_to("model.bin")
    publisher(bench).outputs()
    sent = {"final/model.bin", "final/inside", "exports/a/meta.json", "results.json"}
    assert {entry.key for entry in bench.store.entries("")} == sent


def test_a_checkpoint_with_a_file_that_leads_elsewhere_is_not_published(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    commit(tmp_path / "w", 3, "c")
    made = publisher(bench)
    (file, *_) = sorted((tmp_path / "w" / "ckpt" / "step_00000003").glob("*.bin"))
    (tmp_path / "secret").write_bytes(file.read_bytes())
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(OSError, match="leads out of its folder"):
        made.publish(made.pending()[0])
    assert bench.manifests() == []


def test_what_supervisor_and_trainer_say_to_each_other_is_no_result(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for name in (START, "stop.json", "accept.json", "results.json"):
        (tmp_path / "w").mkdir(exist_ok=True)
        (tmp_path / "w" / name).write_text("{}")
    publisher(bench).outputs()
    assert [entry.key for entry in bench.store.entries("")] == ["results.json"]
