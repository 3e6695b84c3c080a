"""Every way an attempt can end: exit code, markers, what is in the store."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.job import atomic
from gpufleet.job.contract.attempt import AttemptRecord, Exit
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.supervisor import attempts
from gpufleet.job.supervisor.store import StoreError
from tests.job.supervisor_world import (
    STEPS,
    Bench,
    FakeTrainer,
    FaultyStore,
    NodeDeath,
    interrupted,
    notice_at,
    outage,
    state,
)


def hang(trainer: FakeTrainer) -> None:
    trainer.hangs = True


def test_a_finished_run_leaves_results_receipt_and_done_marker(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt().run() == 0
    assert bench.json("done.json")["reason"] == "finished"
    assert bench.store.get_bytes("final/model.safetensors") == state(STEPS)
    assert bench.json("results.json")["steps"] == STEPS
    assert bench.json("receipt.json")["reason"] == "finished"
    assert bench.json("attempts/i-1.json")["exit"]["code"] == 0
    assert b"the run ends: finished" in (bench.store.get_bytes("job.log") or b"")
    assert len((bench.store.get_bytes("metrics.jsonl") or b"").splitlines()) == STEPS


def test_the_done_marker_is_the_last_object_written(tmp_path: Path) -> None:
    bench, keys = Bench(tmp_path), []
    store = FaultyStore(bench.store, lambda _, key: keys.append(key))
    bench.attempt(store=store).run()
    assert keys[-1] == "done.json"
    assert keys.index("receipt.json") > keys.index("results.json")


def test_a_run_that_is_over_is_not_started_again(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.attempt().run()
    assert bench.attempt("i-2").run() == 0
    assert len(bench.trainers) == 1
    bench.store.put_bytes(b'{"reason": "failed"}', "done.json")
    assert bench.attempt("i-3").run() == 70


def test_a_notice_saves_the_step_under_way_and_exits_75(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt(script={5: notice_at(bench, 120)}).run() == 75
    assert bench.manifests()[-1] == bench.trainers[0].step == 5  # no optimizer step is lost
    ended = bench.json("attempts/i-1.json")["exit"]
    assert (ended["code"], ended["reason"], ended["notice"]) == (75, "notice", True)
    assert ended["ends_at"] > ended["at"]
    assert bench.store.get_bytes("done.json") is None


def test_a_node_that_is_lost_before_its_next_heartbeat_has_said_where_it_went_on(tmp_path: Path) -> None:
    bench, seen = Bench(tmp_path), list[object]()
    bench.attempt(script={5: notice_at(bench, 120)}).run()
    bench.answers.clear()

    def look(_: FakeTrainer) -> None:
        seen.append(bench.json("attempts/i-2.json").get("resumed_step"))

    bench.attempt("i-2", script={6: look}).run()
    assert seen == [5]


def test_a_store_that_refuses_to_note_where_a_node_went_on_stops_nothing(tmp_path: Path) -> None:
    bench = interrupted(tmp_path)
    refused: list[int] = []

    def refuse_once(put: int, key: str) -> StoreError | None:
        if key != "attempts/i-2.json" or refused or "resuming from step 5" not in bench.said:
            return None
        refused.append(put)
        return StoreError("503 slow down")

    assert bench.attempt("i-2", store=FaultyStore(bench.store, refuse_once)).run() == 0
    assert refused
    assert bench.json("attempts/i-2.json")["resumed_step"] == 5


def test_the_next_attempt_resumes_where_the_notice_stopped(tmp_path: Path) -> None:
    bench = interrupted(tmp_path)
    assert bench.attempt("i-2").run() == 0
    assert bench.trainers[1].began_at == 5
    assert bench.json("attempts/i-2.json")["resumed_step"] == 5
    steps = [json.loads(line)["step"] for line in (bench.store.get_bytes("metrics.jsonl") or b"").splitlines()]
    assert steps == list(range(1, STEPS + 1))


def test_steps_that_a_phase_left_out_are_not_taken_again(tmp_path: Path) -> None:
    bench = interrupted(tmp_path)
    (key,) = (entry.key for entry in bench.store.entries("ckpt/step_00000005") if entry.key.endswith("manifest.json"))
    bench.store.put_bytes(atomic.json_bytes({**bench.json(key), "goes_on_from": 9}), key)
    assert bench.attempt("i-2").run() == 0
    assert bench.trainers[1].began_at == 5
    assert bench.json("attempts/i-2.json")["resumed_step"] == 9


def test_a_notice_too_short_to_save_saves_nothing_and_keeps_the_last_manifest(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt(script={5: notice_at(bench, 11)}).run() == 75  # the bill says 7 s, and 5 s are spared
    assert atomic.read_object(tmp_path / "i-1" / "stop.json") == {
        "reason": "notice",
        "deadline": bench.metadata.notice,
        "save": False,
        "ends": False,
    }
    assert bench.manifests() == [3]


def test_a_slower_upload_than_billed_decides_against_saving(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    supervisor = bench.attempt(script={5: notice_at(bench, 60)})
    supervisor.forecast.learn((50_000_000, 50.0))  # 1 MB/s; a checkpoint is 0.4 MB
    assert supervisor.forecast.stop_s(0, None) == pytest.approx(7.0, abs=0.1)
    supervisor.forecast.learn((50_000_000, 50_000.0))
    assert supervisor.run() == 75
    assert bench.manifests() == [3]


def test_a_trainer_deaf_to_a_notice_is_killed_at_the_deadline(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def deaf(trainer: FakeTrainer) -> None:
        bench.notice(30)
        trainer.hangs = True

    assert bench.attempt(script={5: deaf}).run() == 75
    assert bench.trainers[0].killed
    assert "did not stop in time" in bench.said


def test_a_machine_taken_away_amid_its_last_upload_was_told_so(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    store = FaultyStore(bench.store, lambda _, key: NodeDeath() if key.startswith("ckpt/step_00000005") else None)
    with pytest.raises(NodeDeath):
        bench.attempt(store=store, script={5: notice_at(bench, 120)}).run()
    assert bench.json("attempts/i-1.json")["exit"]["notice"] is True  # the node script does not count it as a crash


def test_a_notice_before_training_starts_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    supervisor = bench.attempt()
    bench.notice(120)
    assert supervisor.run() == 75
    assert bench.trainers == []
    assert bench.json("attempts/i-1.json")["exit"]["notice"] is True


def test_sigterm_stops_like_a_notice_but_is_none(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def terminate(_: FakeTrainer) -> None:
        bench.terminated = bench.clock.now

    assert bench.attempt(script={4: terminate}).run() == 75
    assert bench.manifests()[-1] == 4
    ended = bench.json("attempts/i-1.json")["exit"]
    assert (ended["reason"], ended["notice"]) == ("sigterm", False)
    assert "ends_at" not in ended


def test_after_a_sigterm_nothing_is_tried_longer_than_docker_waits(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def terminate(_: FakeTrainer) -> None:
        bench.terminated = bench.clock.now

    refused = FaultyStore(bench.store, lambda _, key: StoreError("503") if key.startswith("ckpt/") else None)
    assert bench.attempt(store=refused, script={4: terminate}).run() == 75
    assert bench.terminated is not None
    assert bench.clock.now - bench.terminated < 115


@pytest.mark.parametrize("trouble", ["an outage", "a notice"])
def test_the_best_checkpoint_is_kept_when_staging_it_is_cut_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    monkeypatch.setattr(GrowthConfig, "delivers_best", True)
    bench = Bench(tmp_path)
    script = {2: lambda t: t.commit("best", val_loss=0.5), 10: lambda t: 1}
    assert bench.attempt(script=script).run() == 1
    assert bench.manifests() == [2, 6, 9]

    class Cut(FaultyStore):
        def get_file(self, key: str, path: Path) -> None:
            if "step_00000002" in key:
                if trouble == "an outage":
                    raise StoreError("503 slow down")
                bench.notice(110)
            self.inner.get_file(key, path)

    assert bench.attempt("i-2", store=Cut(bench.store, lambda _, key: None)).run() == (
        1 if trouble == "an outage" else 75
    )
    assert bench.manifests() == [2, 6, 9]
    assert bench.json("best.json")["step"] == 2


def test_a_machine_that_is_taken_later_than_it_was_said_goes_on_publishing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def refuse_until_gone(_: int, key: str) -> StoreError | None:
        notice = bench.metadata.notice
        there = notice is not None and bench.clock.now >= notice + 20
        return None if there or not key.startswith("ckpt/") else StoreError("503")

    assert (
        bench.attempt(store=FaultyStore(bench.store, refuse_until_gone), script={5: notice_at(bench, 120)}).run() == 75
    )
    assert bench.manifests() == [5]


def test_with_no_time_for_another_save_the_newest_commit_goes_first(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def commit_then_notice(trainer: FakeTrainer) -> None:
        trainer.commit("boundary")
        bench.notice(1)

    def refuse_before_notice(_: int, key: str) -> StoreError | None:
        return StoreError("503") if bench.metadata.notice is None and key.startswith("ckpt/") else None

    script = {4: lambda t: t.commit("boundary"), 5: commit_then_notice}
    assert (
        bench.attempt(store=FaultyStore(bench.store, refuse_before_notice), script=script, commit_every=99).run() == 75
    )
    assert bench.manifests() == [5]


def test_a_notice_during_the_last_uploads_does_not_turn_the_end_into_an_interruption(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def late(_: int, key: str) -> StoreError | None:
        if key == "receipt.json" and bench.metadata.notice is None:
            bench.notice(120)
            return StoreError("503")
        return None

    assert bench.attempt(store=FaultyStore(bench.store, late)).run() == 0
    assert bench.metadata.notice is not None
    assert bench.json("done.json")["reason"] == bench.json("attempts/i-1.json")["exit"]["reason"] == "finished"


def test_a_fatal_trainer_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def fail(trainer: FakeTrainer) -> int:
        atomic.write_json(trainer.workdir / "fatal.json", {"error": "GrowthCheckFailed", "detail": "logits moved"})
        return 65

    assert bench.attempt(script={4: fail}).run() == 70
    done = bench.json("done.json")
    assert (done["reason"], done["detail"]) == ("failed", "GrowthCheckFailed: logits moved")
    assert bench.json("receipt.json")["reason"] == "failed"


def test_a_fatal_trainer_whose_reason_no_disk_took_points_to_its_log(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt(script={4: lambda trainer: 65}).run() == 70
    done = bench.json("done.json")
    assert (done["reason"], done["detail"]) == ("failed", "the reason is in job.log; fatal.json could not be written")


@pytest.mark.parametrize("code", [1, -9, 75])
def test_a_crash_publishes_what_was_committed_and_leaves_the_run_open(tmp_path: Path, code: int) -> None:
    bench = Bench(tmp_path)

    def crash(trainer: FakeTrainer) -> int:
        trainer.commit("timed")
        return code

    assert bench.attempt(script={4: crash}).run() == 1
    assert bench.manifests() == [3, 4]
    assert bench.store.get_bytes("done.json") is None
    assert bench.json("attempts/i-1.json")["exit"]["code"] == 1
    assert b"the trainer ended with" in (bench.store.get_bytes("job.log") or b"")


@pytest.mark.parametrize(
    ("settings", "step", "patience_s"),
    [
        ({}, 4, 900),
        ({"log": {"every": 10_000}, "checkpoint": {"interval_s": 7200.0}}, 1, 3000),  # steps of 0.1 s by the bill
    ],
    ids=["at its pace", "told to write a line every thousand seconds"],
)
def test_a_silent_trainer_is_killed_as_a_crash_when_its_time_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], step: int, patience_s: int
) -> None:
    monkeypatch.setattr("gpufleet.job.supervisor.attempt.TICK_S", 10.0)
    bench = Bench(tmp_path)
    for section, changed in settings.items():
        bench.tree["job"]["parameters"][section].update(changed)
    began = bench.clock.now
    assert bench.attempt(script={step: hang}).run() == 1
    assert bench.trainers[0].killed
    assert patience_s <= bench.clock.now - began <= patience_s + 60
    assert bench.json("attempts/i-1.json")["exit"]["reason"].startswith("no sign of progress for ")


def test_output_alone_is_a_sign_of_life(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    quiet: list[float] = []

    class Talking(FakeTrainer):
        def poll(self) -> int | None:
            if self.hangs:
                self.output_at = self.clock.now
                quiet.append(self.clock.now)
                self.hangs = len(quiet) < 4000  # 1000 s
            return super().poll()

    supervisor = bench.attempt()
    object.__setattr__(
        supervisor.world,
        "start",
        lambda rung: Talking(tmp_path / "i-1", bench.config_sha256, bench.clock, script={4: hang}),
    )
    assert supervisor.run() == 0
    assert len(quiet) == 4000


def test_what_the_fleet_s_history_said_of_a_node_is_kept_for_later_attempts(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for instance, step in (("i-1", 3), ("i-2", 6)):
        assert bench.attempt(instance, script={step: notice_at(bench, 120)}).run() == 75
        bench.answers.clear()
        bench.clock.sleep(300)
    bench.history = None  # AWS forgets after two days, or does not answer
    assert bench.attempt("i-3").run() == 0
    assert bench.json("attempts/i-3.json")["reclaimed"] == {"i-1": True}
    first, second, _ = bench.json("receipt.json")["attempts"]
    assert (first["reclaimed"], second["reclaimed"]) == (True, None)
    assert float(first["free_usd"]) > 0
    assert float(second["free_usd"]) == 0


def test_a_missing_dataset_fails_for_good(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (bench.bucket / "inputs" / bench.tree["inputs"]["dataset"]["sha256"] / "dataset.json").unlink()
    assert bench.attempt().run() == 70
    assert "the dataset is not at the place that the run names" in bench.json("done.json")["detail"]


def test_a_dataset_that_arrives_damaged_on_three_nodes_fails_for_good(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    (bench.bucket / "inputs" / bench.tree["inputs"]["dataset"]["sha256"] / "dataset.json").write_bytes(b"other")
    assert [bench.attempt(f"i-{number}").run() for number in (1, 2)] == [71, 71]  # it may be the node's fault
    last = bench.attempt("i-3")
    assert last.run() == 70
    # What arrives wrong uses up none of the nodes that may be refused for what they are.
    assert not attempts.accepts(last.others.attempts)
    assert "sha256 is" in bench.json("done.json")["detail"]
    assert bench.trainers == []


def test_a_node_is_doubted_for_what_not_two_others_have_received_wrong() -> None:
    wrong = [Exit(71, f"{attempts.WRONG}: {key}: sha256 is 0") for key in ("w.bin", "w.bin", "v.bin")]
    earlier: Any = [SimpleNamespace(record=AttemptRecord(exit=each)) for each in wrong]
    assert [attempts.doubts(earlier, key) for key in ("w.bin", "v.bin", "u.bin")] == [False, True, True]


def test_an_outage_delays_uploads_and_stops_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt(store=FaultyStore(bench.store, outage(3, 12))).run() == 0
    assert bench.manifests()[-1] == STEPS
    assert "again in 2 s" in bench.said


def test_a_store_that_stutters_while_a_node_arrives_costs_no_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(GrowthConfig, "delivers_best", True)  # best.json is read twice
    bench = interrupted(tmp_path)
    asked: Counter[str] = Counter()

    class Stuttering(FaultyStore):
        def get_bytes(self, key: str) -> bytes | None:
            asked[key] += 1
            if asked[key] % 2 and "/" not in key:
                raise StoreError("503 slow down")
            return self.inner.get_bytes(key)

    assert bench.attempt("i-2", store=Stuttering(bench.store, lambda _, key: None)).run() == 0
    assert {"done.json", "job.log", "best.json", "metrics.jsonl"} <= asked.keys()


def test_a_store_that_refuses_the_end_is_a_crash_not_a_finish(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    refuse = FaultyStore(bench.store, lambda _, key: StoreError("403") if key.startswith("final/") else None)
    assert bench.attempt(store=refuse).run() == 1
    assert bench.store.get_bytes("done.json") is None
    assert bench.json("attempts/i-1.json")["exit"]["code"] == 1
    assert bench.attempt("i-2").run() == 0
    assert bench.trainers[1].began_at == STEPS  # nothing is trained twice


def test_whoever_was_first_has_said_how_the_run_ended(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    said = b'{"reason": "stopped", "instance": "i-0", "at": "2027-01-15T08:00:00Z"}'
    code = bench.attempt(script={STEPS: lambda _: bench.store.put_bytes(said, "done.json")}).run()
    assert code == 0
    assert bench.store.get_bytes("done.json") == said


def test_a_supervisor_that_dies_in_the_middle_takes_its_trainer_along(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    dying = FaultyStore(bench.store, lambda _, key: NodeDeath() if key.endswith("manifest.json") else None)
    with pytest.raises(NodeDeath):
        bench.attempt(store=dying).run()
    assert bench.trainers[0].killed
