"""How a trainer ends, what it leaves, and what it says."""

from __future__ import annotations

import csv
import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from gpufleet.job import atomic
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.messages import Stop, await_start
from gpufleet.job.contract.metrics import KEYS
from gpufleet.job.contract.workdir import ACCEPT, PREFLIGHT, START
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import export, rungs, step
from gpufleet.job.experiments.engine.experiment import LossNotFiniteError, Stopped
from gpufleet.job.experiments.engine.loop import Loop
from gpufleet.job.experiments.engine.requests import Requests
from gpufleet.job.experiments.growth import growing
from gpufleet.job.experiments.growth.run import TinystoriesGrowth
from gpufleet.job.kind import from_json
from tests.job import train_world as world
from tests.job.train_world import STEPS, StopAt


def fatal(workdir: Path) -> str:
    record = atomic.read_object(workdir / "fatal.json")
    assert record is not None
    return f"{record['error']}: {record['detail']}"


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = world.make(tmp_path_factory.mktemp("finished"), batch={"micro": 3})
    assert world.train(workdir) == 0
    return workdir


def test_a_finished_run_leaves_weights_at_each_phase_start_and_end(finished: Path) -> None:
    assert sorted(path.name for path in (finished / "exports").iterdir()) == [
        "phase1_end",
        "phase2_end",
        "phase2_start",
        "phase3_end",
        "phase3_start",
    ]
    for folder in (finished / "exports").iterdir():
        meta = atomic.read_object(folder / "meta.json")
        assert meta is not None
        count = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
        assert count == meta["params_total"]
        assert meta["tokens"] == meta["step"] * 4 * 16


def test_a_routers_load_is_that_of_its_busiest_expert_over_the_mean(tmp_path: Path) -> None:
    aux = {"load": torch.tensor([[1, 3], [2, 2]]), "entropy": torch.tensor([0.5, 0.25])}
    found = world.experiment(world.make(tmp_path)).logged(aux)
    assert found == {"router_load": [1.5, 1.0], "router_entropy": [0.5, 0.25]}


def test_the_final_model_is_the_last_phases(finished: Path) -> None:
    end = finished / "exports" / "phase3_end" / "model.safetensors"
    assert (finished / "final" / "model.safetensors").read_bytes() == end.read_bytes()
    found, sized = world.export_bytes(finished)
    assert found == sized
    assert world.committed(finished)[-1] == 3 * STEPS


def test_results_put_predicted_and_measured_side_by_side(finished: Path) -> None:
    results = json.loads((finished / "results.json").read_text())
    assert [phase["name"] for phase in results["phases"]] == ["dense", "moe", "grown"]
    assert {"predicted", "measured", "samples", "val_loss"} <= results["phases"][2].keys()
    assert results["phases"][2]["loss_last"] < results["phases"][0]["loss_first"]
    assert results["weights_sha256"] == world.final_hash(finished)


def test_the_growth_report_holds_both_boundaries_before_and_after_a_round_trip(finished: Path) -> None:
    boundaries = json.loads((finished / "growth_report.json").read_text())["boundaries"]
    assert [b["phase"] for b in boundaries] == ["moe", "grown"]
    assert all(b[when]["verdict"] == "pass" for b in boundaries for when in ("before", "after_round_trip"))


def test_the_loss_curve_has_a_row_per_logged_step(finished: Path) -> None:
    with (finished / "loss.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 3 * STEPS + 1))


def test_every_metrics_line_has_every_key(finished: Path) -> None:
    assert all(tuple(record) == KEYS for record in world.records(finished))


def test_routing_is_logged_only_where_there_are_experts(finished: Path) -> None:
    for record in world.records(finished):
        assert (record["router_load"] is None) == (record["phase"] == "dense")


def test_a_checkpoint_requires_the_exports_of_the_boundaries_behind_it(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 2 * (STEPS + 2) + 2)) == 75
    commit = atomic.read_object(workdir / "ckpt" / f"step_{2 * STEPS + 2:08d}" / "commit.json")
    assert commit is not None
    assert commit["requires"] == [f"exports/phase{n}" for n in ("1_end", "2_start", "2_end", "3_start")]
    assert all((workdir / name / "meta.json").exists() for name in commit["requires"])


def test_a_stop_without_a_save_commits_nothing(tmp_path: Path) -> None:
    workdir = world.make(tmp_path, eval={"every": 100})
    assert world.train(workdir, StopAt(workdir, 2, save=False)) == 75
    assert world.committed(workdir) == []


def test_the_supervisors_stop_file_is_heeded_after_the_step_under_way(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    (workdir / "stop.json").write_text('{"reason": "notice", "deadline": 1.0, "save": true}')
    assert world.train(workdir, Requests(workdir)) == 75
    assert world.committed(workdir) == [0]


def test_a_trainer_told_to_wait_begins_at_the_rung_it_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        if len(looks) == 3:
            atomic.write_json(tmp_path / START, {"rung": 2})

    monkeypatch.setattr("gpufleet.job.contract.messages.time.sleep", sleep)
    assert await_start(tmp_path) == 2
    assert len(looks) == 3


def test_a_trainer_that_waits_ends_with_whoever_started_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parents = iter([7, 7, 1])
    monkeypatch.setattr("gpufleet.job.contract.messages.os.getppid", lambda: next(parents))
    with pytest.raises(SystemExit, match="start it has ended"):
        await_start(tmp_path)


def test_the_supervisors_save_file_is_taken_once(tmp_path: Path) -> None:
    (tmp_path / "save.json").touch()
    requests = Requests(tmp_path)
    assert [requests.save(), requests.save()] == [True, False]


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        (b'{"reason": "max_usd", "save": true, "ends": true}', Stop(reason="max_usd", save=True, ends=True)),
        (b'{"reason": "notice", "deadline": 1.0, "save": false}', Stop(reason="notice", save=False, deadline=1.0)),
        (b'{"reason": "max_usd", "deadline": null}', Stop(reason="max_usd", ends=False)),  # said, not inferred
        (b"{}", Stop(reason="asked to", save=True, ends=False)),
        (b"stop", Stop(reason="asked to", save=True, ends=False)),  # whatever it says, somebody wants a stop
    ],
)
def test_a_stop_says_whether_to_save_and_whether_the_run_ends(tmp_path: Path, written: bytes, wanted: Stop) -> None:
    (tmp_path / "stop.json").write_bytes(written)
    assert Requests(tmp_path).stop() == wanted


def test_sigterm_is_a_stop_with_a_save(tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    requests = Requests(tmp_path)
    try:
        requests.heed_signals()
        assert requests.stop() is None
        os.kill(os.getpid(), signal.SIGTERM)
        stop = requests.stop()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    assert stop is not None
    assert (stop.reason, stop.save) == ("SIGTERM", True)


def test_cuda_without_a_cuda_device_refuses_the_node_and_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    workdir = world.make(tmp_path, device="cuda")
    assert world.train(workdir) == 71
    (problem,) = json.loads((workdir / "preflight.json").read_text())["problems"]
    assert "there is no CUDA device" in problem
    assert not (workdir / "fatal.json").exists()
    assert not (workdir / "metrics.jsonl").exists()


def test_cuda_that_starts_on_no_node_is_fatal_and_every_rank_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    workdir = world.make(tmp_path, device="cuda")
    assert world.train(workdir) == 71
    assert json.loads((workdir / "ended.json").read_text())["code"] == 71
    (workdir / "accept.json").write_text("{}")
    assert world.train(workdir) == 65
    assert "there is no CUDA device" in fatal(workdir)


def test_a_vocabulary_smaller_than_the_datasets_is_fatal(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    tree = json.loads((workdir / "run.json").read_text())
    tree["job"]["parameters"]["model"]["vocab"] = 100
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == 65
    assert "raise it to at least 132" in fatal(workdir)


def test_a_loss_that_is_not_finite_stops_the_run_with_the_last_good_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = step.update

    def broken(*given: Any) -> step.StepResult:
        result = real(*given)
        return result._replace(grad_norm=result.grad_norm * float("nan")) if given[4] == 2 else result

    monkeypatch.setattr(step, "update", broken)
    workdir = world.make(tmp_path, log={"every": 100}, eval={"every": 100})  # it is seen before a save, without a log
    assert world.train(workdir, StopAt(workdir, saves=(1, 3))) == 65
    detail = fatal(workdir)
    assert "LossNotFiniteError: loss, gradients or weights are not finite at step" in detail
    assert "the checkpoint of step 1 is from before" in detail
    assert world.committed(workdir) == [1]


def test_a_reason_that_a_full_disk_does_not_take_is_said_and_the_run_ends_no_other_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real, write_bytes = step.update, atomic.write_bytes
    full: list[bool] = []

    def broken(*given: Any) -> step.StepResult:
        full.append(True)
        result = real(*given)
        return result._replace(loss=result.loss * float("nan"))

    def written(path: Path, content: bytes) -> None:
        if full:
            raise OSError(28, "No space left on device")
        write_bytes(path, content)

    monkeypatch.setattr(step, "update", broken)
    monkeypatch.setattr(atomic, "write_bytes", written)
    workdir = world.make(tmp_path)
    assert world.train(workdir) == 65
    said = capsys.readouterr().out
    assert "fatal: loss, gradients or weights are not finite at step 1" in said
    assert "warning: fatal.json could not be written: [Errno 28] No space left on device" in said


@pytest.mark.parametrize(
    ("error", "again", "code"),
    [
        (OSError(28, "No space left on device"), False, 71),
        (OSError(28, "No space left on device"), True, 65),  # after nodes that were refused
        (SafetensorError("I/O error"), False, 65),
    ],
)
def test_what_a_library_or_disk_refuses_at_an_export_is_no_crash_that_every_node_repeats(
    error: Exception, again: bool, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*given: Any, **named: Any) -> None:
        raise error

    monkeypatch.setattr(export, "save_file", refused)
    workdir = world.make(tmp_path)
    if again:
        (workdir / ACCEPT).touch()
    assert world.train(workdir) == code
    told = workdir / ("fatal.json" if code == 65 else PREFLIGHT)
    assert str(error) in told.read_text()


def test_a_logged_loss_that_is_not_finite_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.update

    def broken(*given: Any) -> step.StepResult:
        result = real(*given)
        return result._replace(loss=result.loss * float("nan")) if given[4] == 2 else result

    monkeypatch.setattr(step, "update", broken)
    workdir = world.make(tmp_path)
    assert world.train(workdir) == 65
    assert "LossNotFiniteError: loss, gradients or weights are not finite at step 3;" in fatal(workdir)


def test_weights_that_an_update_made_nan_are_never_committed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = step.update

    def broken(*given: Any) -> step.StepResult:
        result = real(*given)  # finite, as its gradients are
        if given[4] == STEPS - 1:
            with torch.no_grad():
                next(given[1].parameters())[0, 0] = float("nan")
        return result

    monkeypatch.setattr(step, "update", broken)
    monkeypatch.setattr(TinystoriesGrowth, "evaluate", lambda *_: 1.0)
    monkeypatch.setattr(TinystoriesGrowth, "saves_improvements", False)
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, saves=(1,))) == 65
    assert f"weights are not finite at step {STEPS}; the checkpoint of step 1 is from before" in fatal(workdir)
    assert world.committed(workdir) == [1]


def test_a_validation_loss_that_is_nan_is_said_to_be_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TinystoriesGrowth, "evaluate", lambda *_: float("nan"))
    workdir = world.make(tmp_path)
    assert world.train(workdir) == 65
    detail = fatal(workdir)
    assert "LossNotFiniteError: the validation loss is nan, which is not finite at step 2; nothing is saved" in detail


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        torch.distributed.DistBackendError(
            "NCCL error in: NCCLUtils.cpp:93, unhandled cuda error, NCCL version 2.29.7\n"
            "ncclUnhandledCudaError: Call to CUDA function failed.\nLast error:\nFailed to CUDA calloc async 608 bytes"
        ),
    ],
)
def test_running_out_of_memory_has_its_own_code_and_names_the_next_rung(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: RuntimeError
) -> None:
    def full(*_: object) -> None:
        raise error

    workdir = world.make(tmp_path)
    monkeypatch.setattr(step, "update", full)
    assert world.train(workdir) == 69
    record = atomic.read_object(workdir / "rung.json")
    assert record is not None
    assert (record["rung"], record["micro"]) == (0, 4)
    assert record["lower"] > 0
    assert not (workdir / "fatal.json").exists()


def test_a_restart_without_a_checkpoint_leaves_no_step_twice_in_the_metrics(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, workdir = step.update, world.make(tmp_path)

    def full(experiment: Any, module: Any, opt: Any, work: Any, at: int, *_: object) -> step.StepResult:
        if at == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return real(experiment, module, opt, work, at)

    monkeypatch.setattr(step, "update", full)
    assert world.train(workdir) == 69
    assert [record["step"] for record in world.records(workdir)] == [1, 2]
    monkeypatch.setattr(step, "update", real)
    assert world.train(workdir, rung=1) == 0
    steps = [record["step"] for record in world.records(workdir)]
    assert steps == list(range(1, len(steps) + 1))


def test_after_running_out_of_memory_no_phase_goes_back_to_what_is_predicted_to_fit(tmp_path: Path) -> None:
    experiment = world.experiment(world.make(tmp_path))
    gpu = replace(experiment.session.device, torch=torch.device("cuda", 0), memory_gb=1000.0)
    for rung in (0, 2):
        session = replace(experiment.session, device=gpu, rung=rung)
        ladder = session.config.ladder()
        assert rungs.choose(session, experiment.phases[0]) == ladder[rung]


def test_a_made_up_evaluation_that_is_not_finite_calls_no_checkpoint_of_its_own_step_one_from_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(*_: object) -> float:
        raise Stopped("test", ends=False)

    workdir = world.make(tmp_path)
    monkeypatch.setattr(TinystoriesGrowth, "evaluate", cut)
    assert world.train(workdir, StopAt(workdir, 2)) == 75
    assert world.committed(workdir) == [2]
    monkeypatch.setattr(TinystoriesGrowth, "evaluate", lambda *_: math.nan)
    assert world.train(workdir) == 65
    said = fatal(workdir)
    assert (
        "the validation loss is nan, which is not finite at step 2; the checkpoint of step 2 holds these very" in said
    )
    assert "from before" not in said


def test_what_is_not_finite_on_one_rank_ends_all_of_them() -> None:
    loop = Loop.__new__(Loop)
    loop.step, loop._finite = 4, torch.ones((), dtype=torch.bool)
    others: Any = SimpleNamespace(sum=lambda own: own + 1.0)  # one of them has found something
    saved: Any = SimpleNamespace(checkpoints=SimpleNamespace(saved_step=3))
    loop.world, loop.session = others, saved
    with pytest.raises(LossNotFiniteError, match="not finite at step 4; the checkpoint of step 3 is from before"):
        loop._require_finite()


def test_another_error_of_the_device_is_a_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    workdir = world.make(tmp_path)
    monkeypatch.setattr(step, "update", broken)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        world.train(workdir)


def test_a_lower_rung_trains_the_same_batches_in_smaller_pieces(finished: Path, tmp_path: Path) -> None:
    workdir = world.make(tmp_path, batch={"micro": 3})
    assert world.train(workdir, rung=2) == 0
    rung = atomic.read_object(workdir / "rung.json")
    assert rung is not None
    assert rung["micro"] < 3
    for ours, theirs in zip(world.records(workdir), world.records(finished), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-3)


def test_a_growth_that_changes_the_function_is_fatal_with_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = growing.widen

    def wrong(state: growing.State, **given: object) -> growing.State:
        grown = real(state, **given)  # type: ignore[arg-type]
        return {name: 2 * t if name.startswith("norm.") else t for name, t in grown.items()}

    monkeypatch.setattr(growing, "widen", wrong)
    workdir = world.make(tmp_path)
    assert world.train(workdir) == 65
    assert "growth into phase 'grown' failed" in fatal(workdir)
    boundaries = json.loads((workdir / "growth_report.json").read_text())["boundaries"]
    assert [b["before"]["verdict"] for b in boundaries] == ["pass", "fail"]
    assert world.committed(workdir)[-1] == 2 * STEPS


def test_a_resume_says_which_facts_of_determinism_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 3)) == 75
    path = next((workdir / "ckpt").glob("step_*/commit.json"))
    commit = json.loads(path.read_text())
    commit["determinism"]["threads"], commit["world_size"] = 96, 2
    path.write_text(json.dumps(commit))
    assert world.train(workdir, StopAt(workdir, 1)) == 75
    said = capsys.readouterr().out
    threads = f"threads was 96, is {torch.get_num_threads()}"
    assert f"from here the run no longer repeats bit for bit: {threads}; ranks was 2, is 1\n" in said


def test_bf16_state_trains_and_resumes_bit_for_bit(tmp_path: Path) -> None:
    narrow = {"precision": {"compute": "bf16", "phase3_state": "bf16"}}
    whole, stopped = world.make(tmp_path / "whole", **narrow), world.make(tmp_path / "stopped", **narrow)
    assert world.train(whole) == 0
    assert world.train(stopped, StopAt(stopped, 2 * (STEPS + 2) + 2)) == 75
    assert world.train(stopped) == 0
    assert world.final_hash(stopped) == world.final_hash(whole)
    weights = load_file(whole / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}


def test_a_second_trainer_in_the_same_folder_ends_and_touches_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = world.make(tmp_path)
    with trainer.workdir_lock(workdir):
        before = sorted(workdir.rglob("*"))
        assert world.train(workdir) == TrainerExit.CRASHED
        assert "belongs to another trainer that is still running" in capsys.readouterr().out
        assert sorted(workdir.rglob("*")) == before
    assert world.train(workdir, StopAt(workdir, 1)) == 75


def test_an_unknown_key_in_the_run_config_is_fatal(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    tree = json.loads((workdir / "run.json").read_text())
    tree["job"]["parameters"]["stepz"] = 1
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == 65
    assert "unknown keys stepz" in fatal(workdir)
    with pytest.raises(ValueError, match=r"is not one of .*tinystories-growth"):
        from_json("nothing", {})
