"""Compares the speed of the bill and of the comparison with the limits for them: `python bench/cost.py >
bench/results/cost.md`.

The comparison has every type of the catalog, on spot and on demand, for every scenario of a stack, and the scenarios on
their own fleets, with 10,000 runs each.

Each result is the minimum and the median of several times. On a machine that others use too, the minimum is the
program's own time, and longer times are due to the others. CPU seconds are the user and system time of this process
alone. This is not a test, because a slow machine is not a defect.
"""

from __future__ import annotations

import argparse
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import SHIPPED, load_catalog, read_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.rows import Study
from gpufleet.infra.definition.loader import find, load
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.infra.risk.simulation import simulate

ROOT = Path(__file__).parents[1]
STACKS = ("tinystories-growth", "sft-h100", "pretrain-d64", "kernel-sft", "two-tower")
# a place for byte code, so that it exists as after a first start, even if this shell forbids to write it
_BYTECODE = tempfile.TemporaryDirectory()


@dataclass(frozen=True, kw_only=True, slots=True)
class Taken:
    """Seconds of several runs of one thing."""

    least: float
    median: float
    cpu: float  # the least

    def row(self, what: str, bar: str) -> str:
        return f"| {what} | {bar} | {self.least:.3f} s | {self.median:.3f} s | {self.cpu:.3f} s |\n"


HEAD = "| What | Bar | Least | Median | CPU, least |\n|---|---|---|---|---|\n"


def seconds(work: Callable[[], object], times: int = 7) -> Taken:
    """The times of `work` in this process."""
    wall, cpu = [], []
    for _ in range(times):
        start, busy = time.perf_counter(), time.process_time()
        work()
        wall.append(time.perf_counter() - start)
        cpu.append(time.process_time() - busy)
    return Taken(least=min(wall), median=statistics.median(wall), cpu=min(cpu))


def cold(*command: str, times: int = 7) -> Taken:
    """The times of `command` as new processes, each from start to finish; a first process is not counted."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environment["PYTHONPYCACHEPREFIX"] = _BYTECODE.name
    wall, cpu = [], []
    for _ in range(times + 1):
        start, busy = time.perf_counter(), _children_s()
        subprocess.run([sys.executable, *command], cwd=ROOT, env=environment, check=True, capture_output=True)
        wall.append(time.perf_counter() - start)
        cpu.append(_children_s() - busy)
    return Taken(least=min(wall[1:]), median=statistics.median(wall[1:]), cpu=min(cpu[1:]))


def machine() -> str:
    """A line with the machine and the versions for which the figures hold."""
    return (
        f"{datetime.now(UTC):%Y-%m-%d}, {_processor()}, {platform.system()} {platform.machine()}, Python"
        f" {platform.python_version()}, numpy {np.__version__}; load average {os.getloadavg()[0]:.1f} at start, so that"
        " a busy machine can be told. `python bench/cost.py` wrote this.\n\n"
    )


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    now, catalog = datetime.now(UTC), load_catalog()
    head = machine()
    growth = load(find(STACKS[0], ROOT), now=now)
    side = price(growth, catalog).spot
    assert side is not None
    long = replace(side.exposure, phase_ends_h=(31.0,), saves_fit=(False,), max_usd=1000.0, max_hours=60.0)

    def validated() -> None:
        again = load(find(STACKS[0], ROOT), now=now)
        bill = price(again, catalog)
        problems(again, bill)
        render(bill)

    rows = [
        ("load the catalog", "0.03 s", seconds(lambda: read_catalog.__wrapped__(SHIPPED, None))),
        *((f"{stack}: bill with 10,000 simulated runs", "0.2 s", _priced(stack, now)) for stack in STACKS),
        ("load, validate, price and render, in-process", "0.5 s", seconds(validated)),
        ("10,000 runs of tinystories-growth", "0.2 s", seconds(lambda: simulate(side.exposure))),
        ("10,000 runs of a 31 h job, no save in time", "0.2 s", seconds(lambda: simulate(long))),
        ("1,000,000 runs of tinystories-growth", "10 s", seconds(lambda: simulate(side.exposure, runs=10**6), times=3)),
        ("1,000,000 runs of the 31 h job", "10 s", seconds(lambda: simulate(long, runs=10**6), times=3)),
        *(
            (f"`gpufleet cost {stack}` cold", "0.5 s", cold("-m", "gpufleet.infra.cli", "cost", stack))
            for stack in STACKS
        ),
        ("python starting and importing numpy, of that", "-", cold("-c", "import numpy")),
    ]
    sys.stdout.write("# Speed of the bill\n\n" + head + HEAD)
    sys.stdout.writelines(taken.row(what, bar) for what, bar, taken in rows)
    sys.stdout.write("\n# Speed of the comparison\n\n" + HEAD)
    for stack in STACKS:
        what, taken = _compared(stack, now)
        sys.stdout.write(taken.row(what, "3 s"))
        for words in (f"compare {stack}", f"compare {stack} --all"):
            whole = cold("-m", "gpufleet.infra.cli", *words.split(), times=5)
            sys.stdout.write(whole.row(f"`gpufleet {words}` cold", "3 s"))


def _priced(stack: str, now: datetime) -> Taken:
    plan, catalog = load(find(stack, ROOT), now=now), load_catalog()
    return seconds(lambda: price(plan, catalog))


def _compared(stack: str, now: datetime) -> tuple[str, Taken]:
    """Words about what was compared, and a function that makes the comparison in this process."""
    study, path = Study(load_catalog()), find(stack, ROOT)
    definition, variants = load(path, now=now), scenarios(path, now=now)
    rows = ranking.every_option(definition, variants, study)

    def compare_all() -> None:
        ranking.scenarios(definition, variants, study)
        ranking.refined(ranking.every_option(definition, variants, study))

    types, works = len({row.type for row in rows}), len({row.scenario for row in rows})
    counts = f"{types} types x 2 capacities x {works} pieces of work of {len(variants)} scenarios = {len(rows)} options"
    return f"{stack}: {counts}", seconds(compare_all, times=3)


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
