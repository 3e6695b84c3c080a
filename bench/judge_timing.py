"""Compares the kernel judge's speed-ups with those of triton's do_bench, for a right kernel of each of the 20 tasks. It
takes a minute.

    python bench/judge_timing.py [--tasks 20]

It needs a GPU. It prints a line for each task with the judge's speed-up, do_bench's (medians of the same inputs and the
same reference) and their distance, and at the end the largest distance. The judge must run as root, or where namespaces
are allowed.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import torch
from triton.testing import do_bench

from gpufleet.job.experiments.kernel.judge import catalog, child, planted, tasks
from gpufleet.job.experiments.kernel.judge.funnel import Judge
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.worker import Workers
from gpufleet.job.experiments.kernel.spec import Funnel

SEED = 1337


def main() -> None:
    """A line for each task, printed as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", type=int, default=len(catalog.TASKS))
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("no GPU: the judge then interprets kernels, which do_bench cannot")
    with tempfile.TemporaryDirectory() as folder, Workers(Path(folder), gpus=True) as workers:
        os.chdir(folder)  # because a kernel's source is read from its file
        judge, apart = Judge(Funnel(memory_gb=16.0), SEED, workers, gpus=1), list[float]()
        for task in catalog.TASKS[: arguments.tasks]:
            source = planted.source(task)
            made = Candidate(name=task.name, task=task.name, source=source, origin="planted")
            verdict, theirs = judge.verdict(made), _by_do_bench(task, source)
            if verdict.speedup is None:
                say(f"{task.name}: no speed-up: {verdict.reason}; do_bench {theirs:.3f}")
                continue
            apart.append(abs(verdict.speedup / theirs - 1))
            say(f"{task.name}: judge {verdict.speedup:.3f}, do_bench {theirs:.3f}, {100 * apart[-1]:.1f} % apart")
        say(f"{len(apart)} of {arguments.tasks} have a speed-up; at most {100 * max(apart, default=0):.1f} % apart")


def _by_do_bench(task: catalog.KernelTask, source: str) -> float:
    """The reference's median time divided by the kernel's, measured by do_bench."""
    given = [tensor.cuda() for tensor in tasks.Cases(SEED, "cuda").case(task, "timing").tensors]
    programs: list[Any] = [child._entry(name, text, {}) for name, text in (("r", task.reference_source), ("k", source))]
    reference, kernel = (do_bench(partial(each, *given), return_mode="median") for each in programs)
    return float(reference / kernel)


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
