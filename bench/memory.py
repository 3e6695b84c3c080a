"""Prints the memory of a step, as predicted and as counted, and its speed, with random weights and batches of the
user's choice:

    python bench/memory.py STACK [--rows 32] [--micro 4 2] [--layers 24 --width 1536] [--eager] [--steps 4]

STACK is tinystories-growth or pretrain-d64; each phase runs at each micro-batch. `--rows` is the number of rows in a
step on this one GPU; for pretrain-d64 the rows of one of eight GPUs. The update is timed separately, because ranks
share it. On a CPU the program takes the rehearsal's shape, only to show that it runs: there it counts the memory of the
whole process.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from gpufleet.infra.definition.loader import find, load
from gpufleet.job.contract.run import Task
from gpufleet.job.contract.workdir import PREFLIGHT, RUN
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.engine.experiment import Experiment, Phase
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.requests import Requests
from gpufleet.job.experiments.engine.step import compiled, update
from gpufleet.job.kind import JobConfig, batch
from gpufleet.job.kind.common import DEVICE_RESERVE_GB, Rung
from gpufleet.job.kind.dataset import Given

ROOT = Path(__file__).parents[1]
WARM = 2  # number of steps that are not timed, because they compile and allocate
DATA: Mapping[str, Mapping[str, Any]] = {
    "tinystories-growth": {"source": "generated-stories", "stories": 5000},
    "pretrain-d64": {"source": "generated-sums", "characters": 2_000_000},
}
ROWS = {"tinystories-growth": "sequences", "pretrain-d64": "rows"}


def main() -> None:
    """The table for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stack", choices=DATA)
    parser.add_argument("--rows", type=int)
    parser.add_argument("--micro", type=int, nargs="+", help="default: all rows at once")
    for name in ("layers", "width"):
        parser.add_argument(f"--{name}", type=int)
    parser.add_argument("--phases", nargs="+", help="default: all")
    parser.add_argument("--steps", type=int, default=4, help="timed, after two that are not (default: %(default)s)")
    parser.add_argument("--eager", action="store_true")
    a = parser.parse_args()
    cuda = torch.cuda.is_available()
    whole: Any = load(find(a.stack, ROOT), now=datetime.now(UTC), rehearsal=not cuda, past_deadline=True).job.parameters
    shape = {key: value for key in ("layers", "width") if (value := getattr(a, key)) is not None}
    rows = {} if a.rows is None else {ROWS[a.stack]: a.rows, "micro": None}
    config = replace(
        whole,
        data=replace(whole.data, **(DATA[a.stack] if cuda else {})),
        batch=replace(whole.batch, **rows),
        model=replace(whole.model, **shape),
    )
    with tempfile.TemporaryDirectory() as scratch:
        experiment = opened(Path(scratch), a.stack, config)
        found = experiment.session.device
        say(f"{datetime.now(UTC):%Y-%m-%d}, {found.banner()}\n")
        say("| phase | rows | micro | | predicted GB | counted GB | ms a step | of it the update | tok/s | MFU |")
        say("|---|---|---|---|---|---|---|---|---|---|")
        for phase in experiment.phases:
            for micro in a.micro or [config.rows()]:
                if not a.phases or phase.name in a.phases:
                    say(line(experiment, phase, Rung(micro=micro), steps=a.steps, eager=a.eager))


def opened(scratch: Path, name: str, config: JobConfig) -> Experiment:
    """The experiment on generated data. It runs no checks of this machine, because other programs may use it too."""
    config.dataset.prepare(scratch / "data", Given())
    (scratch / RUN).write_text(json.dumps({"schema": 1, "job": {"experiment": name, "parameters": asdict(config)}}))
    (scratch / PREFLIGHT).touch()
    experiment, session = trainer.start(Task.read(scratch), scratch, 0, Requests(scratch), World())
    experiment.session = replace(session, say=lambda line: None)
    return experiment


def line(experiment: Experiment, phase: Phase, rung: Rung, *, steps: int, eager: bool) -> str:
    """One row of the table."""
    found, config = experiment.session.device, experiment.session.config
    predicted = batch.peak_gb(config, phase.index, Rung(micro=rung.micro)) - DEVICE_RESERVE_GB
    how = "eager" if eager else "compiled"
    begun = f"| {phase.name} | {config.rows()} | {rung.micro} | {how} | {predicted:.1f}"
    found.tidy()
    try:
        step_s, update_s = timed(experiment, phase, rung, steps=steps, eager=eager)
    except torch.OutOfMemoryError:
        return f"{begun} | out of memory | - | - | - | - |"
    tok_s = phase.tokens_per_step / step_s
    mfu = f"{tok_s * phase.flops_per_token / found.peak_tflops / 1e12:.1%}" if found.peak_tflops else "-"
    return f"{begun} | {found.used_gb():.1f} | {step_s * 1e3:.1f} | {update_s * 1e3:.1f} | {tok_s:,.0f} | {mfu} |"


@dataclass(slots=True)
class Updates:
    """The seconds of an optimizer's updates. It waits for the device before and after each of them."""

    found: device.Device
    seconds: float = 0.0
    _began: float = 0.0

    def begin(self, *_: object) -> None:
        self.found.synchronize()
        self._began = time.perf_counter()

    def end(self, *_: object) -> None:
        self.found.synchronize()
        self.seconds += time.perf_counter() - self._began


def timed(experiment: Experiment, phase: Phase, rung: Rung, *, steps: int, eager: bool) -> tuple[float, float]:
    """The seconds of a step, and those of its update. Raises OutOfMemoryError."""
    found = experiment.session.device
    module = experiment.blank(phase)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)
    opt = experiment.optimizer(phase, module)
    experiment.schedule(phase, opt, phase.first)
    updates = Updates(found)
    opt.register_step_pre_hook(updates.begin)
    opt.register_step_post_hook(updates.end)
    module.train()
    with compiled(module, found.torch, wanted=not eager):
        for number in range(WARM + steps):
            if number == WARM:
                found.synchronize()
                began, updates.seconds = time.perf_counter(), 0.0
            update(experiment, module, opt, experiment.batch(phase, number, rung), number)
        found.synchronize()
    return (time.perf_counter() - began) / steps, updates.seconds / steps


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
