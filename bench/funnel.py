"""Compares the funnel's throughput with the CPU time that its stages need: `python bench/funnel.py` prints the part of
bench/results/funnel.md below its first paragraph.

Each candidate is compiled for a GPU, and interpreted. The bar: candidates per second within 20 % of cores / (CPU
seconds of the stages per candidate). Other programs may use the same cores: their CPU time is subtracted from the
available time, so idle cores and the funnel's own overhead (forks, namespaces, clearing away) count against the funnel,
and other people's work does not.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path

import torch
import triton

from gpufleet.job.experiments.kernel.judge import catalog, planted
from gpufleet.job.experiments.kernel.judge.funnel import Judge
from gpufleet.job.experiments.kernel.judge.planted import STOPS_AT, Candidate
from gpufleet.job.experiments.kernel.judge.verdict import Verdict
from gpufleet.job.experiments.kernel.judge.worker import Workers
from gpufleet.job.experiments.kernel.spec import Funnel

LIMITS = Funnel(candidate_s=30.0, memory_gb=2.0, trials=3)
TICKS = os.sysconf("SC_CLK_TCK")
BAR = 0.8


def cpu_s(pid: int) -> float:
    """Processor seconds of a process and of the children for which this process has waited."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(field) for field in fields[11:15]) / TICKS


def servers_s(workers: Workers) -> float:
    return sum(map(cpu_s, workers.server_pids))


def busy_s() -> float:
    """CPU seconds that the whole machine has spent."""
    user, nice, system, _, _, irq, soft, *_ = Path("/proc/stat").read_text().split()[1:10]
    return sum(map(int, (user, nice, system, irq, soft))) / TICKS


def main() -> None:
    """Judges the 200 planted candidates once, and prints the result."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    cores, found = len(os.sched_getaffinity(0)), list[Verdict]()
    with tempfile.TemporaryDirectory() as folder, Workers(Path(folder) / "scratch", gpus=False) as workers:
        judge = Judge(LIMITS, 1337, workers)
        source = planted.source(catalog.BY_NAME["relu"], block=256)
        first = Candidate(name="first", task="relu", source=source, origin="planted")
        judge.all([first], lambda verdict: None)
        candidates = planted.candidates(200)
        load = os.getloadavg()[0]
        machine, server, own, began = busy_s(), servers_s(workers), time.process_time(), time.perf_counter()
        judge.all(candidates, found.append)
        wall = time.perf_counter() - began
        judged, forked = time.process_time() - own, servers_s(workers) - server
        others = max(0.0, busy_s() - machine - judged - forked)
    wrong = [f"{verdict.candidate}: {verdict.reason}" for verdict in found if verdict.stage != STOPS_AT[verdict.label]]
    children = sum(verdict.cpu_s for verdict in found)
    stages = children + judged
    available = wall * cores - others
    say(
        f"# Verification funnel\n\n{datetime.now(UTC):%Y-%m-%d}, {platform.processor() or platform.machine()}, {cores} "
    )
    say(f"cores, load {load:.1f} before it began, Python {platform.python_version()}, torch {torch.__version__}, ")
    say(f"Triton {triton.__version__}, which {judge.compilation.words} and interprets on the CPU. ")
    say(f"200 planted candidates, {LIMITS.trials} trials each; ")
    say(f"{'; '.join(wrong) or 'all'} stopped {'elsewhere than' if wrong else 'where'} they should. ")
    say(f"Namespaces: {all(verdict.isolated is not False for verdict in found)}.\n\n")
    say("| measure | value |\n|---|---|\n")
    say(f"| wall | {wall:.1f} s, {len(found) / wall:.1f} candidates/s |\n")
    say(f"| CPU of the stages: in candidates' processes, in the judge | {children:.1f} s, {judged:.1f} s |\n")
    say(f"| CPU of everything: forks and clearing away too | {judged + forked:.1f} s |\n")
    say(f"| CPU of others meanwhile | {others:.1f} s of {wall * cores:.1f} s |\n")
    share = stages / available
    say(f"| throughput / (cores left to it / CPU of its stages) | {share:.2f}, bar {BAR} |\n\n")
    totals: defaultdict[str, list[float]] = defaultdict(list)
    for verdict in found:
        for stage, seconds in verdict.seconds.items():
            totals[stage].append(seconds)
    say("| stage | candidates | wall, mean ms |\n|---|---|---|\n")
    for stage, taken in totals.items():
        say(f"| {stage} | {len(taken)} | {1e3 * sum(taken) / len(taken):.1f} |\n")


def say(text: str) -> None:
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
