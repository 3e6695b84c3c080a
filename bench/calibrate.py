"""How far a run's hours are from what a probe predicted: `python bench/calibrate.py > bench/results/calibration.md`.

The growth rehearsal's model with more steps, as a whole run of some minutes and as probes of 200 steps before and after
it, each a process of its own. Predicted is what the bill says, from the trainer's start to its end, without what a
laptop does not do: boot, hash and upload. On a busy machine wall-clock says as much about the neighbours as about the
prediction, so the same is done on the processor time of the trainer's main thread: it does not pass while others run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from gpufleet.infra.bill import runtime
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import find, load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence import calibration, measurement
from gpufleet.infra.inputs.prepare import prepared
from gpufleet.job import atomic, measured, probe
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.kind import JobConfig
from gpufleet.job.supervisor import machine
from gpufleet.job.supervisor.child import Child, GroupedProcess, JobLog, trainer

ROOT = Path(__file__).parents[1]
TICK_S = 0.005


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredRun:
    """A probe or a whole run, in wall-clock and in processor time of the trainer's main thread."""

    wall: dict[str, Any]
    cpu: dict[str, Any]
    wall_s: float
    cpu_s: float


def main() -> None:
    """The table for this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--steps-per-phase", type=int, default=150)
    args = parser.parse_args()
    load_before = os.getloadavg()[0]
    definition = scaled(args.steps_per_phase)
    with contextlib.redirect_stdout(sys.stderr):
        prepared(definition, ROOT)
    rows = []
    for number in range(args.rounds):
        before = train(definition, 200)
        whole = train(definition, None)
        after = train(definition, 200)
        for name, seen in (("probe before", before), ("run itself", whole), ("probe after", after)):
            wall, cpu = predict(definition, seen.wall), predict(definition, seen.cpu)
            rows.append((f"{number + 1}, {name}", wall, whole.wall_s, cpu, whole.cpu_s))
            sys.stderr.write(f"{rows[-1]} steps {[p['step_ms']['median'] for p in seen.cpu['phases']]}\n")
    name = measurement.name_of((), definition.job.parameters)
    say("# Calibration\n")
    say(
        f"{datetime.now(UTC):%Y-%m-%d}, {name}, {os.cpu_count()} cores, load {load_before:.1f} before it began and "
        f"{os.getloadavg()[0]:.1f} at its end, torch {machine.describe(()).versions['torch']}, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}.\n"
    )
    say(f"tinystories-growth's rehearsal model, {args.steps_per_phase} steps per phase; probes of 200 steps in all.\n")
    say("| round | predicted s | actual s | error | predicted cpu s | actual cpu s | error |")
    say("|---|---|---|---|---|---|---|")
    for label, wall, wall_s, cpu, cpu_s in rows:
        clock = f"{wall:.1f} | {wall_s:.1f} | {error(wall, wall_s)}"
        say(f"| {label} | {clock} | {cpu:.1f} | {cpu_s:.1f} | {error(cpu, cpu_s)} |")
    probes = [row for row in rows if "probe" in row[0]]
    walls, cpus = [abs(w / a - 1) for _, w, a, _, _ in probes], [abs(c / a - 1) for _, _, _, c, a in probes]
    say(
        "\n*Run itself*: predicted from the whole run's own measurement, so what is left is what the accounting misses."
    )
    say(
        f"Median absolute error of the probes: wall-clock {median(walls):.1%}, processor time {median(cpus):.1%}; "
        "the bar is 5 %."
    )


def scaled(steps: int) -> StackDefinition:
    """The rehearsal's definition without its typed step times, so that the bill needs a measurement."""
    found = load(find("tinystories-growth", ROOT), now=datetime.now(UTC), rehearsal=True, past_deadline=True)
    config = found.job.parameters
    assert isinstance(config, GrowthConfig)
    longer = replace(
        config, steps_per_phase=steps, eval=replace(config.eval, every=25), log=replace(config.log, every=5),
        checkpoint=replace(config.checkpoint, interval_s=30.0),
    )  # fmt: skip
    return replace(
        found,
        job=replace(found.job, parameters=longer),
        estimate=replace(found.estimate, step_ms=None, setup_minutes=None),
    )


def train(definition: StackDefinition, steps: int | None) -> MeasuredRun:
    """One process: a probe of `steps`, or the whole run."""
    config = definition.job.parameters
    if steps:
        config = config.probed(steps).config
    with tempfile.TemporaryDirectory() as scratch, Path(os.devnull).open("wb") as nowhere:
        workdir = Path(scratch)
        measurement.place(definition, config, ROOT, workdir)
        log = JobLog(workdir / "job.log", stream=nowhere)
        watch = ProcessorClock(workdir)

        def start(rung: int) -> Child:
            process = GroupedProcess(
                trainer(workdir, rung, 1, GrowthConfig.module), {**os.environ, "PYTHONUNBUFFERED": "1"}
            )
            watch.begin(process.pid)
            return Child(lambda: process, log, time.time)

        outcome = probe.run(workdir, save_at=measurement.middles(config, steps) if steps else {}, start=start)
        cpu_s, records = watch.end()
        phases = measured.phases(records)
        first_s = records[0]["step"] * phases[0]["step_ms"]["median"] / 1e3
        wall = document(config, outcome.phases, outcome.start_s, outcome.finish_s)
        cpu = document(config, phases, records[0]["ts"] - first_s, cpu_s - records[-1]["ts"])
        return MeasuredRun(wall=wall, cpu=cpu, wall_s=outcome.seconds, cpu_s=cpu_s)


def document(
    config: JobConfig, phases: Sequence[dict[str, Any]], start_s: float, finish_s: float | None
) -> dict[str, Any]:
    """A measurement as `gpufleet calibrate` writes it."""
    return measured.document(
        experiment="tinystories-growth",
        parameters=asdict(config),
        device={"kind": "cpu", "name": "CPU", "ranks": 1},
        versions={},
        source="bench",
        at=f"{datetime.now(UTC):%Y-%m-%d}",
        measured=phases,
        start_s=start_s,
        finish_s=finish_s,
    )


class ProcessorClock:
    """Notes at which processor time of the trainer's main thread each line of metrics.jsonl appeared."""

    def __init__(self, workdir: Path) -> None:
        self._path, self._stop = workdir / "metrics.jsonl", threading.Event()
        self._records: list[dict[str, Any]] = []
        self._cpu_s = 0.0

    def begin(self, pid: int) -> None:
        self._thread = threading.Thread(target=self._follow, args=(pid,))
        self._thread.start()

    def end(self) -> tuple[float, list[dict[str, Any]]]:
        """Processor time at the end, and the lines with `ts` and `step_ms` in it."""
        self._stop.set()
        self._thread.join()
        lines = self._records
        for before, record in zip(reversed(lines[:-1]), reversed(lines), strict=False):
            steps = record["step"] - before["step"]
            timed = record["step_ms"] is not None and before["phase"] == record["phase"] and record["val_loss"] is None
            record["step_ms"] = (record["ts"] - before["ts"]) * 1e3 / steps if timed else None
        return self._cpu_s, lines

    def _follow(self, pid: int) -> None:
        stat, offset = Path(f"/proc/{pid}/task/{pid}/schedstat"), 0
        while not self._stop.is_set():
            with contextlib.suppress(OSError, IndexError, ValueError):  # it has just ended
                self._cpu_s = int(stat.read_text().split()[0]) / 1e9
            if self._path.exists() and self._path.stat().st_size > offset:
                content = self._path.read_bytes()[offset:]
                whole = content[: content.rfind(b"\n") + 1]
                offset += len(whole)
                for line in whole.splitlines():
                    record = atomic.parse_object(line)
                    assert record is not None
                    self._records.append({**record, "ts": self._cpu_s})
            time.sleep(TICK_S)


def predict(definition: StackDefinition, tree: dict[str, Any]) -> float:
    """Seconds from the trainer's start to its end, as the bill prices them from this measurement."""
    found = calibration.parse(json.loads(json.dumps(tree)))
    instance = load_catalog().instances["g5.2xlarge"]
    time = runtime.hours(
        definition.job.parameters, instance, definition.estimate, definition.storage.root, calibration=found
    )
    assert found.start_s is not None
    assert found.finish_s is not None
    return found.start_s + time.work_s - time.upload_s + found.finish_s


def error(predicted: float, actual: float) -> str:
    return f"{predicted / actual - 1:+.1%}"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()
