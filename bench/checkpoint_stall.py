"""Measures what an asynchronous checkpoint costs the training beside it. It takes a minute.

    python bench/checkpoint_stall.py [MB ...] [--device cuda]

The work is a loop of matrix products on all cores but one, like the trainer's; on a GPU the state and the products
(bf16) are on the GPU, and one core queues the products. The loop runs alone and beside a save in turn, so that other
work on the machine disturbs both measurements alike. Stall = blocking + seconds of the save x share of pace lost. CPU
seconds say what a save costs whatever else runs: where no core is idle, the training loses at least as many seconds.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from gpufleet.job.contract.commit import Commit
from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.engine.checkpoint import Checkpoints

CADENCE_S, SAVES, ALONE_S = 300.0, 5, 1.0
TENSORS = 115  # tensors of each kind, as in phase 1 of tinystories-growth, whose checkpoint has 1.2 GB


def main() -> None:
    """A table per size for this machine, as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("megabytes", metavar="MB", nargs="*", type=float, default=[300.0, 1200.0], help="of each save")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    arguments = parser.parse_args()
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    found = device.choose(arguments.device, bf16=True)
    say(found.banner())
    for megabytes in arguments.megabytes:
        measure(megabytes, found)


def measure(megabytes: float, found: device.Device) -> None:
    """Measures several saves of one size."""
    numbers = round(megabytes * 1e6 / 4 / 3 / TENSORS)
    state = {
        kind: {f"block.{index}": torch.ones(numbers, device=found.torch) for index in range(TENSORS)}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    columns = ("blocked s", "written in s", "CPU s of both", "pace beside it", "stall s", "of 300 s")
    say(f"\n| {' | '.join((f'save of {megabytes:.0f} MB', *columns))} |")
    say("|---|---|---|---|---|---|---|")
    stalls = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Checkpoints(Path(scratch) / "ckpt", config_sha256="bench")
        checkpoints.prepare(state)
        pace(checkpoints, ALONE_S, found)
        for step in range(1, SAVES + 1):
            before = pace(checkpoints, ALONE_S, found)
            cpu = -writer_cpu_s(checkpoints) - time.thread_time()
            checkpoints.save(state, commit(step), {})
            cpu += time.thread_time()
            beside = pace(checkpoints, 0.0, found)
            (saved,) = checkpoints.wait()
            cpu += writer_cpu_s(checkpoints)
            alone = (before + pace(checkpoints, ALONE_S, found)) / 2
            stall = saved.blocking_s + saved.seconds * max(0.0, 1 - beside / alone)
            stalls.append(stall)
            say(
                f"| {step} | {saved.blocking_s:.3f} | {saved.seconds:.2f} | {cpu:.2f} | {beside / alone:.0%} | "
                f"{stall:.2f} | {stall / CADENCE_S:.2%} |"
            )
        checkpoints.close()
    middle = median(stalls)
    say(f"\nMedian for {megabytes:.0f} MB: {middle:.2f} s, {middle / CADENCE_S:.2%} of {CADENCE_S:.0f} s.")


def pace(checkpoints: Checkpoints, seconds: float, found: device.Device) -> float:
    """Products per second for `seconds`, or for as long as a save is being written."""
    side, dtype = (4096, torch.bfloat16) if found.is_cuda else (512, torch.float32)
    a = torch.ones(side, side, device=found.torch, dtype=dtype)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or (seconds == 0 and checkpoints.busy):
        a @ a
        found.synchronize()
        count += 1
    return count / (time.perf_counter() - began)


def writer_cpu_s(checkpoints: Checkpoints) -> float:
    """CPU time of the thread that writes, so far."""
    return checkpoints._thread.submit(time.thread_time).result()


def commit(step: int) -> Commit:
    """Makes a commit without files."""
    return Commit(
        step=step,
        phase="bench",
        goes_on_from=step,
        tokens=0,
        val_loss=None,
        config_sha256="bench",
        determinism={},
        dataset={},
        requires=(),
        reason="timed",
    )


def say(text: str) -> None:
    """Prints a line of the page."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
