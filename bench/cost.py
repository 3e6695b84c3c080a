"""Speed of the bill against the bars of the design: `python bench/cost.py > bench/results/cost.md`.

Run it on an otherwise idle machine. Not a test: a slow machine is not a defect.
"""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np

from infra.catalog import SHIPPED, load_catalog, read_catalog
from infra.cost.bill import price, problems
from infra.cost.risk import simulate
from infra.cost.table import render
from infra.loader import find, load

ROOT = Path(__file__).parents[1]
STACK = "tinystories-growth"


def seconds(work: Callable[[], object], times: int = 7) -> tuple[float, float]:
    """(median, worst)."""
    taken = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken), max(taken)


def cold(*command: str) -> Callable[[], object]:
    return lambda: subprocess.run([sys.executable, *command], cwd=ROOT, check=True, capture_output=True)


def main() -> None:
    now = datetime.now(UTC)
    definition = load(find(STACK, ROOT), now=now)
    catalog = load_catalog()
    side = price(definition, catalog).spot
    assert side is not None
    long = replace(side.exposure, phase_ends_h=(31.0,), saves_fit=(False,), max_usd=1000.0, max_hours=60.0)

    def validated() -> None:
        again = load(find(STACK, ROOT), now=now)
        bill = price(again, catalog)
        problems(again, bill)
        render(bill)

    load_average = os.getloadavg()[0]
    rows = [
        ("load the catalog", "0.03 s", seconds(lambda: read_catalog.__wrapped__(SHIPPED, None))),
        (
            "cost of a stack with 10,000 simulated runs, in-process",
            "0.2 s",
            seconds(lambda: price(definition, catalog)),
        ),
        ("load, validate, price and render, in-process", "0.5 s", seconds(validated)),
        ("10,000 runs of this stack", "-", seconds(lambda: simulate(side.exposure))),
        ("10,000 runs of a 31 h job, notice missed", "-", seconds(lambda: simulate(long))),
        ("1,000,000 runs of this stack", "10 s", seconds(lambda: simulate(side.exposure, runs=1_000_000), times=3)),
        ("1,000,000 runs of the 31 h job", "10 s", seconds(lambda: simulate(long, runs=1_000_000), times=3)),
        ("`gpufleet cost` cold, start to finish", "0.5 s", seconds(cold("-m", "infra.cli", "cost", STACK))),
        ("python starting and importing numpy, of that", "-", seconds(cold("-c", "import numpy"))),
    ]
    write = sys.stdout.write
    write("# Speed of the bill\n\n")
    write(f"{now:%Y-%m-%d}, {_processor()}, {platform.system()} {platform.machine()}, ")
    write(f"Python {platform.python_version()}, numpy {np.__version__}; load average {load_average:.1f} at start, ")
    write("so that a busy machine can be told. `python bench/cost.py` wrote this.\n\n")
    write("| What | Bar | Median | Worst |\n|---|---|---|---|\n")
    for what, bar, (median, worst) in rows:
        write(f"| {what} | {bar} | {median:.3f} s | {worst:.3f} s |\n")


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.processor()


if __name__ == "__main__":
    main()
