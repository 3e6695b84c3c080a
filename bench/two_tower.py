"""Measures the speed of two-tower's joint step: `python bench/two_tower.py` prints the first table of
bench/results/two_tower.md.

It compares all ten folds at once with a loop over the same ten models, step by step in turn in one run, at 443 queries
x 1131 models, with dropout off and on. A step is forward, backward, clipping per fold and AdamW. The loop is as good as
the joint step in everything else: the same model code, the same loss, the same dropout bits, the same fused optimizer.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from statistics import median

import torch

from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.two_tower.members import Members, clip_each
from gpufleet.job.experiments.two_tower.model import Noise, draw_noise
from gpufleet.job.experiments.two_tower.spec import TwoTowerConfig

FOLDS, QUERIES = 10, 443
BAR_S = 0.35  # the most seconds of a joint step without dropout on 2 CPU cores
GPU_BAR = 8  # how many times as fast as the loop the joint step must be on a GPU


def main() -> None:
    """The page for this machine."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=12)
    args = parser.parse_args()
    found = device.choose("cuda" if torch.cuda.is_available() else "cpu", bf16=False)
    if found.is_cuda and TwoTowerConfig().products() == "tf32":
        torch.set_float32_matmul_precision("high")  # as the experiment sets it
    say("# Two-tower: one joint step\n")
    say(
        f"{datetime.now(UTC):%Y-%m-%d}, {found.banner()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, "
        f"load {os.getloadavg()[0]:.1f} before it began, Python {platform.python_version()}.\n"
    )
    say(f"{QUERIES} queries x 1131 models x {FOLDS} folds; {args.steps} steps of each, taken in turn.\n")
    say("| dropout | step | median s | min s | CPU s, median | CPU s, min |\n|---|---|---|---|---|---|")
    for dropout in (0.0, 0.18):
        steps = _steps(dropout, found.torch)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
        with device.settings(found):
            for turn in range(args.steps + 1):
                for name, step in steps.items():
                    found.synchronize()
                    began, cpu = time.perf_counter(), time.process_time()
                    step(turn)
                    found.synchronize()
                    times[name].append((time.perf_counter() - began, time.process_time() - cpu))
        for name, measured in times.items():
            wall, busy = zip(*measured[1:], strict=True)
            cells = (f"{value:.4f}" for value in (median(wall), min(wall), median(busy), min(busy)))
            say(f"| {dropout} | {name} | {' | '.join(cells)} |")
        pairs = [a[0] / b[0] for a, b in zip(times["joint"][1:], times["loop"][1:], strict=True)]
        work = [a[1] / b[1] for a, b in zip(times["joint"][1:], times["loop"][1:], strict=True)]
        say(f"| {dropout} | joint / loop, median of pairs | {median(pairs):.3f} | | {median(work):.3f} | |")
    if found.is_cuda:
        say(f"\nThe bar on a GPU: joint / loop at most {1 / GPU_BAR:.3f}, {GPU_BAR} times as fast.")
    else:
        say(f"\nThe bars on 2 idle cores: joint no slower than the loop; joint without dropout at most {BAR_S} s.")


def _steps(dropout: float, where: torch.device) -> dict[str, Callable[[int], None]]:
    config = TwoTowerConfig()
    config = replace(config, towers=replace(config.towers, dropout=dropout))
    models, width = config.data.models, config.towers.sentence
    draw = torch.Generator(where).manual_seed(0)
    x = torch.nn.functional.normalize(torch.randn(FOLDS, QUERIES, width, generator=draw, device=where), dim=-1)
    targets = torch.softmax(5 * torch.randn(FOLDS, QUERIES, models, generator=draw, device=where), -1)
    weights = torch.ones(FOLDS, QUERIES, device=where)
    joint = Members(config, FOLDS, 0, torch.float32).to(where)
    alone = [Members(config, 1, fold, torch.float32).to(where) for fold in range(FOLDS)]
    optimizers = {module: torch.optim.AdamW(module.parameters(), lr=8e-4, fused=True) for module in (joint, *alone)}

    def update(module: Members, part: slice, noise: Noise | None) -> None:
        bits = () if noise is None else (noise.query[part], noise.model[part])
        output = module(x[part], targets[part], weights[part], *bits)
        (output.loss_sum / QUERIES).backward()
        clip_each(list(module.parameters()), config.optim.clip)
        optimizers[module].step()
        optimizers[module].zero_grad(set_to_none=True)

    def bits(members: int, seed: int) -> Noise | None:
        generator = torch.Generator(where).manual_seed(seed)
        return draw_noise(config.towers, members, QUERIES, models, generator)

    def update_joint(turn: int) -> None:
        update(joint, slice(0, FOLDS), bits(FOLDS, turn))

    def one_by_one(turn: int) -> None:
        for fold, module in enumerate(alone):
            noise = bits(1, turn * FOLDS + fold)
            padded = (
                None if noise is None else Noise(noise.query.expand(FOLDS, -1, -1), noise.model.expand(FOLDS, -1, -1))
            )
            update(module, slice(fold, fold + 1), padded)

    return {"joint": update_joint, "loop": one_by_one}


def say(text: str) -> None:
    """A line of the page."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
