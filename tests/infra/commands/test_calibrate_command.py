"""`gpufleet calibrate`: the real job, shortened so that every phase is reached."""

from __future__ import annotations

import errno
import json
import signal
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.cli import main
from gpufleet.infra.commands import calibrate
from gpufleet.infra.definition.loader import load, project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import calibration, measurement
from gpufleet.job import measured, probe
from gpufleet.job.kind import EXPERIMENTS, JobConfig, batch, from_json
from gpufleet.job.supervisor import machine
from gpufleet.job.supervisor.machine import DriverGpu
from gpufleet.rehearsal import scratch
from tests.infra.commands_world import definition, project
from tests.infra.cost_definitions import growth
from tests.infra.staged_files import STAGED

A10G = (DriverGpu(name="NVIDIA A10G", memory_gb=24.1, driver="580.1"),)
STEP = {"median": 50.0, "q1": 49.0, "q3": 51.0}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_probe_is_the_same_job_and_reaches_every_phase(name: str) -> None:
    config: JobConfig = EXPERIMENTS[name]()
    plan = config.probed(200)
    assert measured.settings(name, asdict(plan.config)) == measured.settings(name, asdict(config))
    lasting = [size for size in plan.config.phases() if size.steps]
    assert [size.name for size in lasting] == [size.name for size in config.phases() if size.steps]
    if plan.stop_at is None:
        assert sum(size.steps for size in lasting) <= 201
    else:
        assert plan.stop_at == min(200, lasting[0].steps)
    assert plan.config.log.every <= max(1, lasting[0].steps // 10)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_checkpoint_is_asked_for_in_the_middle_of_each_phase(name: str) -> None:
    plan = EXPERIMENTS[name]().probed(200)
    first, save_at = 0, measurement.middles(plan.config, 200)
    for size in plan.config.phases():
        if size.steps:
            assert first < save_at[size.name] < first + size.steps
            assert plan.stop_at is None or save_at[size.name] < plan.stop_at
        first += size.steps


def test_a_run_shorter_than_the_probe_stays_as_it_is() -> None:
    plan = growth(steps_per_phase=20).probed(200)
    assert batch.total_steps(plan.config) == 60


def test_the_short_config_is_one_that_the_job_accepts() -> None:
    for name, config in EXPERIMENTS.items():
        short = config().probed(200).config
        assert from_json(name, json.loads(json.dumps(asdict(short)))) == short


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = project(tmp_path, monkeypatch)
    found.write_text(found.read_text().replace("s3://elsewhere/tokens", "data/tokens"))
    folder = found.parents[1] / definition(found).storage.dataset
    folder.mkdir(parents=True, exist_ok=True)
    return found


@pytest.fixture
def probed(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments that the probe got. It measures 50 ms a step in every phase."""
    given: list[dict[str, Any]] = []

    def run(workdir: Path, *, stop_at: int | None, save_at: Mapping[str, int], **_: Any) -> probe.ProbeResult:
        tree = json.loads((workdir / "run.json").read_text())
        given.append({**tree["job"], "data": (workdir / "data").is_dir(), "stop_at": stop_at})
        phases = [
            {"name": name, "steps": 60, "step_ms": STEP, "memory_gb": 1.0, "evaluation_s": 0.1, "boundary_s": None}
            | {"save": {"bytes": 10, "blocks_s": 0.1, "write_s": 0.2}}
            for name in save_at
        ]
        return probe.ProbeResult(phases=phases, start_s=9.0, finish_s=2.0, stop_s=None, seconds=30.0, cpu_s=40.0)

    monkeypatch.setattr(probe, "run", run)
    monkeypatch.setattr(machine, "gpus", lambda: A10G)
    return given


def test_calibrate_writes_a_file_that_the_bill_accepts(
    path: Path, probed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["calibrate", "small-growth", "--steps", "90"]) == 0
    root = project_root(path.parent)
    assert "calibrations/small-growth/nvidia-a10g.json" in capsys.readouterr().out
    tree = json.loads((root / "calibrations" / "small-growth" / "nvidia-a10g.json").read_text())
    assert tree["device"]["name"] == "NVIDIA A10G"
    assert tree["versions"]["driver"] == "580.1"
    assert tree["source"] == "probe of 90 steps"
    assert probed[0]["data"]
    assert probed[0]["parameters"]["steps_per_phase"] <= 30
    found = calibration.find(definition(path), load_catalog().instances["g5.2xlarge"], root)
    assert isinstance(found, calibration.Calibration)
    assert found.phase("moe") is not None


def test_a_stage_is_measured_with_what_the_one_before_has_left(
    tmp_path: Path, probed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = STAGED.replace("work: {hours: {low: 0.1, likely: 0.2, high: 0.4}}", "work: {steps: 300}")
    root = scratch.make(tmp_path, {"staged": text})
    (root / "code").mkdir()
    (root / "code" / "stage.py").write_text("")
    monkeypatch.chdir(root)
    assert main(["calibrate", "staged", "--run", "r1/judge"]) == 2
    assert "results/staged/r1/train/final is not a folder here" in capsys.readouterr().err
    (root / "results" / "staged" / "r1" / "train" / "final").mkdir(parents=True)
    assert main(["calibrate", "staged", "--run", "r1/judge"]) == 0
    assert "stage.py judge" in probed[0]["parameters"]["command"]
    (file,) = (root / "calibrations" / "staged").iterdir()
    assert file.name.endswith(".judge.json")
    assert json.loads(file.read_text())["stage"] == "judge"


def test_a_measurement_that_cannot_be_printed_is_kept(
    path: Path, probed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Printing fails in `calibrate | head -1`, or if the log is on a full disk."""

    def full(_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(calibrate, "summary", full)
    assert main(["calibrate", "small-growth"]) == 2
    assert (path.parents[1] / "calibrations" / "small-growth" / "nvidia-a10g.json").is_file()


def test_a_measurement_that_cannot_be_kept_is_printed(
    path: Path, probed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (path.parents[1] / "calibrations" / "small-growth" / "nvidia-a10g.json").mkdir(parents=True)
    assert main(["calibrate", "small-growth"]) == 2
    assert "50.00 ms a step" in capsys.readouterr().out


def test_a_probe_of_the_whole_run_says_how_many_steps_that_is(path: Path, probed: list[dict[str, Any]]) -> None:
    config = definition(path).job.parameters
    tree = measurement.measure(definition(path), project_root(path.parent), steps=100_000, gpus=A10G)
    assert tree["source"] == f"probe of {batch.total_steps(config)} steps"
    assert probed[0]["parameters"]["steps_per_phase"] * 3 == batch.total_steps(config)


def test_a_probe_that_timed_no_step_of_a_phase_promises_no_bill(
    path: Path, probed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = probe.run

    def ends_early(*given: Any, **named: Any) -> probe.ProbeResult:
        outcome = whole(*given, **named)
        return replace(outcome, phases=outcome.phases[:2])

    monkeypatch.setattr(probe, "run", ends_early)
    assert main(["calibrate", "small-growth", "--steps", "90"]) == 0
    said = capsys.readouterr().out
    assert "the bill of small-growth ignores it, no step of phase grown was timed" in said
    assert "commit it" not in said
    root = project_root(path.parent)
    found = calibration.find(definition(path), load_catalog().instances["g5.2xlarge"], root)
    assert "did not reach phase grown" in str(found)


@pytest.mark.parametrize(
    ("extra", "gpu", "why"),
    [
        ("estimate: {step_ms: [1, 2, 3]}\n", "NVIDIA A10G", "estimate.step_ms takes precedence over a measurement"),
        ("", "NVIDIA L40S", "none of fleet.instance_types (g5.2xlarge) has whole GPUs of NVIDIA L40S"),
        ("", "NVIDIA A10G", ""),
    ],
)
def test_a_probe_that_the_bill_does_not_stand_on_says_why(
    path: Path,
    probed: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    extra: str,
    gpu: str,
    why: str,
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: tuple(replace(each, name=gpu) for each in A10G))
    path.write_text(path.read_text() + extra)
    assert main(["calibrate", "small-growth", "--steps", "90"]) == 0
    said = capsys.readouterr().out
    assert why in said
    assert ("commit it, so that the bill of small-growth uses it" in said) == (not why)


def test_a_probe_of_the_rehearsal_promises_no_bill(
    path: Path, probed: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: ())
    path.write_text(path.read_text() + "rehearsal:\n  job: {parameters: {device: cpu}}\n")
    rehearsed = load(path, now=datetime.now(UTC), rehearsal=True)
    (project_root(path.parent) / rehearsed.storage.dataset).mkdir(parents=True, exist_ok=True)
    assert main(["calibrate", "small-growth", "--rehearsal"]) == 0
    said = capsys.readouterr().out
    assert probed[0]["parameters"]["device"] == "cpu"
    assert "measured on the rehearsal section only; the bill of small-growth ignores it" in said
    assert "commit it" not in said


def test_a_place_where_the_measurement_cannot_be_kept_is_said_before_the_probe(
    path: Path, probed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    (project_root(path.parent) / "calibrations").write_text("")
    assert main(["calibrate", "small-growth", "--steps", "90"]) == 2
    assert "/calibrations is not a writable folder; correct that" in capsys.readouterr().err
    assert probed == []


def test_a_run_with_too_few_steps_is_told_that_no_probe_can_measure_it(
    path: Path, probed: list[dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    path.write_text(path.read_text().replace("amzn2023}", "amzn2023, parameters: {steps_per_phase: 10}}"))
    assert main(["calibrate", "small-growth"]) == 2
    assert "phase dense has 10 optimizer steps" in capsys.readouterr().err
    assert not probed


def test_cuda_without_a_gpu_says_where_to_run_it(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = definition(path)
    config = replace(wanted.job.parameters, device="cuda")
    wanted = replace(wanted, job=replace(wanted.job, parameters=config))
    with pytest.raises(GpufleetError, match=r"on a node .* or use --rehearsal"):
        measurement.measure(wanted, project_root(path.parent), steps=90, gpus=())


def test_a_missing_dataset_says_how_to_make_it(path: Path) -> None:
    wanted = definition(path)
    (project_root(path.parent) / wanted.storage.dataset).rmdir()
    with pytest.raises(GpufleetError, match="gpufleet prepare small-growth"):
        measurement.measure(wanted, project_root(path.parent), steps=90, gpus=A10G)


def test_a_dataset_in_s3_says_that_a_probe_needs_it_here(path: Path) -> None:
    wanted = definition(path)
    wanted = replace(wanted, storage=replace(wanted.storage, dataset="s3://elsewhere/tokens"))
    with pytest.raises(GpufleetError, match=r"trains on local files: run `gpufleet prepare .*`, with --rehearsal"):
        measurement.measure(wanted, project_root(path.parent), steps=90, gpus=A10G)


def test_a_job_that_fails_is_an_error_with_its_own_words(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*args: Any, **more: Any) -> probe.ProbeResult:
        raise probe.ProbeFailedError("ValueError: no shards")

    monkeypatch.setattr(probe, "run", run)
    with pytest.raises(GpufleetError, match=r"the probe failed\. ValueError: no shards"):
        measurement.measure(definition(path), project_root(path.parent), steps=90, gpus=A10G)


def test_a_closed_terminal_leaves_no_folder_of_the_probe_behind(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: A10G)
    monkeypatch.setattr(probe, "run", lambda *args, **more: signal.raise_signal(signal.SIGHUP))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    kept = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(
        signal.SIGHUP, lambda *_: None
    )  # whatever the handler was before, the signal must neither end the tests nor be ignored
    try:
        assert main(["calibrate", "small-growth"]) == 130
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize("steps", ["0", "59", "many", "-3", "1e3"])
def test_too_few_steps_are_refused(path: Path, steps: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["calibrate", "small-growth", f"--steps={steps}"])
    assert "from 60 to 100000" in capsys.readouterr().err
