"""What the supervisor does beside training: rungs, advice, heartbeats, publication, pruning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.job import atomic
from gpufleet.job.supervisor.store import StoreError
from tests.job import runs
from tests.job.supervisor_world import STEPS, Bench, FakeTrainer, FaultyStore


def beats(bench: Bench, instance: str = "i-1") -> list[dict[str, object]]:
    content = bench.store.get_bytes(f"heartbeat/{instance}.jsonl") or b""
    return [json.loads(line) for line in content.splitlines()]


def test_out_of_memory_restarts_on_the_rung_that_the_trainer_names(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def full(trainer: FakeTrainer) -> int | None:
        if trainer.rung >= 2:
            return None
        atomic.write_json(trainer.workdir / "rung.json", {"rung": trainer.rung, "lower": trainer.rung + 2})
        return 69

    assert bench.attempt(script={4: full}).run() == 0
    assert [trainer.rung for trainer in bench.trainers] == [0, 2]
    assert bench.trainers[1].began_at == 3  # from the last checkpoint
    assert bench.json("attempts/i-1.json")["floor"] == 2


def test_the_next_attempt_on_the_same_type_begins_on_that_rung(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def full(trainer: FakeTrainer) -> int:
        atomic.write_json(trainer.workdir / "rung.json", {"rung": trainer.rung, "lower": trainer.rung + 1})
        return 69 if trainer.rung == 0 else 1

    bench.store.put_bytes(b'{"type": "g5.xlarge", "floor": 2}', "attempts/i-0.json")
    assert bench.attempt(script={4: full}).run() == 1
    assert bench.attempt("i-2").run() == 0
    assert [trainer.rung for trainer in bench.trainers] == [0, 1, 1]


def test_a_rung_that_an_earlier_start_left_does_not_count_for_the_next(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def full(trainer: FakeTrainer) -> int:
        if len(bench.trainers) == 1:  # the others run out of memory before they have chosen a rung
            atomic.write_json(trainer.workdir / "rung.json", {"rung": 0, "lower": 1})
        return 69

    assert bench.attempt(script=dict.fromkeys(range(1, STEPS), full)).run() == 70
    rungs = [trainer.rung for trainer in bench.trainers]
    assert rungs == list(range(len(rungs)))


def test_what_the_trainer_leaves_beside_its_metrics_is_recorded_of_the_attempt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    left = {"rung": {"rung": 1}, "preflight": {"gpus": 1}, "compiled": {"dense": {"graphs": 2}}}

    def leave(trainer: FakeTrainer) -> None:
        for name, content in left.items():
            atomic.write_json(trainer.workdir / f"{name}.json", content)

    assert bench.attempt(script={4: leave}).run() == 0
    noted = bench.json("attempts/i-1.json")
    assert (noted["rung"], noted["preflight"], noted["compiled"]) == (1, left["preflight"], left["compiled"])
    assert "results" not in noted  # no stage has left any: a node that ended here would have led nowhere
    assert bench.store.get_bytes("rung.json") is bench.store.get_bytes("compiled.json") is None  # no results


def unreadable(trainer: FakeTrainer) -> int | None:
    """Script: the checkpoint of step 5 cannot be read."""
    if trainer.began_at != 5:
        return None
    atomic.write_json(trainer.workdir / "unreadable.json", {"step": 5, "problem": "step_00000005 cannot be read"})
    return 72


def test_a_checkpoint_that_verifies_and_cannot_be_read_is_rejected_for_the_one_before_it(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    crash = {4: lambda t: t.commit("timed", val_loss=0.5), 5: lambda t: t.commit("best", val_loss=0.2), 6: lambda t: 1}
    assert bench.attempt(script=crash).run() == 1
    assert bench.manifests() == [4, 5]
    assert bench.json("best.json")["step"] == 5
    assert bench.attempt("i-2", script={6: unreadable}, commit_every=5).run() == 0
    assert [trainer.began_at for trainer in bench.trainers] == [0, 5, 4]
    assert bench.json("attempts/i-2.json")["resumed_step"] == 4
    assert bench.json("best.json")["step"] == 4
    assert bench.said.count("published step 5 ") == 2  # what was rejected is no reason not to publish that step again
    steps = [json.loads(line)["step"] for line in (bench.store.get_bytes("metrics.jsonl") or b"").splitlines()]
    assert steps[-1] == STEPS


def test_what_a_node_has_committed_is_published_before_it_falls_back(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt(script={5: lambda t: t.commit("boundary"), 6: lambda t: 1}).run() == 1

    def refusing(_: int, key: str) -> StoreError | None:
        away = not (tmp_path / "i-2" / "unreadable.json").exists()
        return StoreError("503") if away and key.startswith("ckpt/") else None

    script = {6: lambda t: t.commit("boundary"), 7: unreadable}
    assert bench.attempt("i-2", store=FaultyStore(bench.store, refusing), script=script).run() == 0
    assert [trainer.began_at for trainer in bench.trainers] == [0, 5, 6]


def test_no_checkpoint_is_rejected_for_one_that_is_not_fit(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt(script={5: lambda t: t.commit("best"), 6: lambda t: 1}).run() == 1
    bench.store.delete(["ckpt/step_00000003/w.bin"])
    assert bench.attempt("i-2", script={6: unreadable}).run() == 1
    assert bench.manifests() == [3, 5]


def test_the_only_checkpoint_is_never_rejected_for_a_beginning_from_nothing(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    assert bench.attempt(script={5: lambda t: t.commit("best"), 6: lambda t: 1}, commit_every=99).run() == 1
    assert bench.attempt("i-2", script={6: unreadable}).run() == 1
    assert bench.manifests() == [5]
    assert "cannot be read" in bench.json("attempts/i-2.json")["exit"]["reason"]


@pytest.mark.parametrize("lower", [None, 99])
def test_the_end_of_the_ladder_fails_for_good(tmp_path: Path, lower: int | None) -> None:
    bench = Bench(tmp_path)

    def full(trainer: FakeTrainer) -> int:
        atomic.write_json(trainer.workdir / "rung.json", {"rung": 4, "lower": lower})
        return 69

    assert bench.attempt(script={1: full}).run() == 70
    assert bench.json("done.json")["detail"].startswith("out of memory: at the end of the ladder")


def test_a_recommendation_asks_for_one_save_and_does_not_stop(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    asked: list[int] = []

    def advise(trainer: FakeTrainer) -> None:
        bench.answers["recommendations/rebalance"] = b'{"noticeTime": "2027-01-15T08:00:00Z"}'

    def take(trainer: FakeTrainer) -> None:
        if (trainer.workdir / "save.json").exists():
            (trainer.workdir / "save.json").unlink()
            asked.append(trainer.step)

    assert bench.attempt(script={2: advise, **dict.fromkeys(range(3, STEPS), take)}).run() == 0
    assert len(asked) == 1


def test_a_notice_with_an_impossible_time_saves_and_goes_on(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    saved: list[bool] = []

    def doubtful(trainer: FakeTrainer) -> None:
        bench.answers["spot/instance-action"] = b'{"action": "terminate", "time": "2017-09-18T08:22:00Z"}'

    def look(trainer: FakeTrainer) -> None:
        saved.append((trainer.workdir / "save.json").exists())

    assert bench.attempt(script={2: doubtful, 8: look}).run() == 0
    assert saved == [True]
    assert bench.json("done.json")["reason"] == "finished"


def test_heartbeats_carry_progress_and_money(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def minute(_: FakeTrainer) -> None:
        bench.clock.sleep(60)

    bench.attempt(script=dict.fromkeys(range(1, STEPS + 1), minute)).run()
    seen = beats(bench)
    assert len(seen) >= STEPS
    assert seen[0]["step"] == 0
    last = seen[-1]
    assert (last["step"], last["phase"], last["tok_s"]) == (STEPS, "dense", 640.0)
    hours = (120 + 12 * 60) / 3600
    assert float(str(last["attempt_usd"])) == pytest.approx(hours * (0.36 + 0.015959), abs=2e-3)
    assert float(str(last["spent_usd"])) == pytest.approx(float(str(last["attempt_usd"])) + 0.0092, abs=1e-4)
    assert bench.json("receipt.json")["attempts"][0]["usd"] == last["attempt_usd"]


def test_the_trainer_can_read_what_was_spent(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    seen: list[float] = []

    def look(trainer: FakeTrainer) -> None:
        bench.clock.sleep(6)
        spent = atomic.read_object(trainer.workdir / "control/spent.json")
        seen.append(float(spent["spent_usd"]) if spent else 0.0)

    bench.attempt(script=dict.fromkeys(range(3, 9), look)).run()
    assert seen == sorted(seen)
    assert seen[-1] > seen[0] > 0.0092


def test_best_last_and_last_but_one_stay_in_the_store_and_on_disk(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def improve(trainer: FakeTrainer) -> None:
        trainer.commit("best", val_loss=2.0)

    bench.attempt(script={2: improve}).run()
    assert bench.manifests() == [2, 9, 12]
    assert bench.json("best.json")["step"] == 2
    on_disk = sorted(path.name for path in (tmp_path / "i-1" / "ckpt").glob("step_*"))
    assert on_disk == ["step_00000002", "step_00000009", "step_00000012"]
    names = {entry.key.split("/")[1] for entry in bench.store.entries("ckpt/")}
    assert names == set(on_disk)


def test_the_manifest_names_the_code_the_money_the_attempt_and_every_hash(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.attempt().run()
    manifest = bench.json("ckpt/step_00000012/manifest.json")
    assert (manifest["run"], manifest["attempt"], manifest["instance"], manifest["step"]) == ("r1", 1, "i-1", 12)
    assert manifest["code_sha256"] == runs.tree()["inputs"]["archive"]["sha256"]
    assert float(manifest["spent_usd"]) > 0
    assert float(manifest["spent_s"]) > 120
    assert [file["name"] for file in manifest["files"]] == [".metadata", "w.bin"]
    assert all(len(file["sha256"]) == 64 for file in manifest["files"])


def test_what_the_node_script_wrote_about_the_attempt_stays(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.store.put_bytes(b'{"booted_at": "2027-01-15T07:58:30Z", "manifest_at_boot": null}', "attempts/i-1.json")
    bench.attempt().run()
    record = bench.json("attempts/i-1.json")
    assert record["booted_at"] == "2027-01-15T07:58:30Z"
    assert record["versions"]["torch"] != "missing"
    assert record["started_s"] >= 120


def test_the_job_log_goes_on_from_attempt_to_attempt(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    bench.attempt(script={4: lambda _: 1}).run()
    bench.attempt("i-2").run()
    log = (bench.store.get_bytes("job.log") or b"").decode()
    assert log.index("attempt 1 of run r1 on i-1") < log.index("attempt 2 of run r1 on i-2") < log.index("the run ends")


def test_a_full_disk_loses_notes_and_no_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = Bench(tmp_path)
    supervisor = bench.attempt()
    write = atomic.write_json

    def full(path: Path, value: object) -> None:
        if path.name == "spent.json":
            raise OSError(28, "No space left on device")
        write(path, value)

    monkeypatch.setattr(atomic, "write_json", full)
    assert supervisor.run() == 0
    assert "spent.json cannot be written" in bench.said


def test_a_used_work_folder_is_no_memory(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    supervisor = bench.attempt()
    stale = tmp_path / "i-1"
    atomic.write_json(stale / "stop.json", {"reason": "notice", "deadline": 0, "save": False})
    (stale / "metrics.jsonl").write_text('{"step": 900}\n')
    (stale / "ckpt" / "step_00000900").mkdir(parents=True)
    assert supervisor.run() == 0
    assert bench.trainers[0].began_at == 0
    assert bench.manifests()[-1] == STEPS
