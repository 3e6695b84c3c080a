"""What an asynchronous checkpoint costs the training beside it: `python bench/checkpoint_stall.py [MB]`, some seconds.

Work is a loop of matrix products on all cores but one, as the trainer's. It runs alone and beside a save in turn, so
that other work on the machine disturbs both alike. Stall = blocking + seconds of the save x share of pace lost.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import torch

from job.train.checkpoint import Checkpoints, Commit

CADENCE_S, SAVES, ALONE_S = 300.0, 5, 1.0


def main() -> None:
    """The table for this machine, as Markdown."""
    megabytes = float(sys.argv[1]) if len(sys.argv) > 1 else 300.0
    tensors = 30
    numbers = round(megabytes * 1e6 / 4 / 3 / tensors)
    state = {
        kind: {f"block.{index}": torch.ones(numbers) for index in range(tensors)}
        for kind in ("model", "exp_avg", "exp_avg_sq")
    }
    torch.set_num_threads(max(1, torch.get_num_threads() - 1))
    say("| save | blocked s | written in s | pace beside it | stall s | of 300 s |\n|---|---|---|---|---|---|")
    stalls = []
    with tempfile.TemporaryDirectory() as scratch:
        checkpoints = Checkpoints(Path(scratch) / "ckpt", config_sha256="bench")
        checkpoints.prepare(state)
        pace(checkpoints, ALONE_S)
        for step in range(1, SAVES + 1):
            before = pace(checkpoints, ALONE_S)
            checkpoints.save(state, commit(step), {})
            beside = pace(checkpoints, 0.0)
            (saved,) = checkpoints.wait()
            alone = (before + pace(checkpoints, ALONE_S)) / 2
            stall = saved.blocking_s + saved.seconds * max(0.0, 1 - beside / alone)
            stalls.append(stall)
            say(
                f"| {step} | {saved.blocking_s:.3f} | {saved.seconds:.2f} | {beside / alone:.0%} | {stall:.2f} | "
                f"{stall / CADENCE_S:.2%} |"
            )
        checkpoints.close()
    middle = median(stalls)
    say(f"\nMedian for {megabytes:.0f} MB: {middle:.2f} s, {middle / CADENCE_S:.2%} of {CADENCE_S:.0f} s.")


def pace(checkpoints: Checkpoints, seconds: float) -> float:
    """Products per second for `seconds`, or for as long as a save is on its way."""
    a = torch.ones(512, 512)
    began, count = time.perf_counter(), 0
    while time.perf_counter() - began < seconds or (seconds == 0 and checkpoints.busy):
        a @ a
        count += 1
    return count / (time.perf_counter() - began)


def commit(step: int) -> Commit:
    """Of nothing."""
    return Commit(
        step=step,
        phase="bench",
        tokens=0,
        val_loss=None,
        config_sha256="bench",
        determinism={},
        dataset={},
        requires=(),
        reason="timed",
    )


def say(text: str) -> None:
    """A line of the page."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
