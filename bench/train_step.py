"""Measures the trainer's speed on an otherwise idle GPU: `python bench/train_step.py [--sequences 8]` prints a page.

The page has tokens/s and MFU of each full-size phase at that many times 256 tokens, with a CUDA graph; the least time
that this GPU's data sheet allows (FLOPs over its peak, and the optimizer's traffic over its bandwidth); the time with
kernels launched one by one; and how long the first step compiles on a node without a cache, and on that node's
replacement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path

from torch._inductor.utils import fresh_cache

from gpufleet.job.contract.run import Task
from gpufleet.job.experiments.dataset import prepare, sources
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.engine.compile_cache import CompileCache
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.requests import Requests
from gpufleet.job.experiments.engine.step import compiled, recorded, update
from gpufleet.job.experiments.growth.model import build
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.kind.common import PhaseSize, Rung

STEPS = 20
BAR = 2  # a step may take this many times the least that the data sheet allows


def main() -> None:
    """The tables for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8, help="of a step (default: %(default)s)")
    sequences = parser.parse_args().sequences
    found = device.choose("cuda", bf16=True)
    say("# Trainer\n")
    say(
        f"{datetime.now(UTC):%Y-%m-%d}, {found.banner()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before "
        f"it began, Python {platform.python_version()}.\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        full_size(Path(scratch), found, sequences)


def full_size(scratch: Path, found: device.Device, sequences: int) -> None:
    """Each phase alone, with new weights."""
    config = replace(GrowthConfig(), batch=replace(GrowthConfig().batch, sequences=sequences))
    prepare.prepare(scratch / "data", sources.Generated(count=5000, seed=1), model_vocab=config.model.vocab)
    tree = {"schema": 1, "job": {"experiment": "tinystories-growth", "parameters": asdict(config)}}
    (scratch / "run.json").write_text(json.dumps(tree))
    experiment, _ = trainer.start(Task.read(scratch), scratch, 0, Requests(scratch), World())
    whole = Rung(micro=config.batch.sequences)
    say(f"\n{sequences} x {config.data.sequence} tokens a step.\n")
    say(
        "| phase | ms/step | least ms | of it | launched singly, ms | tok/s | MFU | peak GB | predicted GB | no cache "
        "| an earlier node's |"
    )
    say("|---|---|---|---|---|---|---|---|---|---|---|")
    for index, size in enumerate(config.phases()):
        phase = experiment.phases[index]
        found.tidy()  # the previous phase is still in memory because of reference cycles
        module = build(config, index, device=found.torch)
        opt = experiment.optimizer(phase, module)
        experiment.schedule(phase, opt, phase.first)
        compiling, timed = [], []
        # A first node, then its replacement twice: its kernels launched one by one, and as a CUDA graph.
        for steps, graph in ((1, False), (2 * STEPS, False), (2 * STEPS, True)):
            with (
                fresh_cache(),
                compiled(module, found.torch),
                recorded(opt, found.torch, say, wanted=graph) as passes,
            ):
                graphs = CompileCache(experiment.session, phase, whole)
                for step in range(steps):
                    if step == STEPS:
                        found.synchronize()
                        began = time.perf_counter()
                    update(experiment, module, opt, experiment.batch(phase, step, whole), step, recorded=passes)
                    if step == 0:
                        compiling.append(graphs.keep() or "nothing compiled")
                found.synchronize()
                if steps > STEPS:
                    timed.append((time.perf_counter() - began) / STEPS)
                used_gb = found.used_gb()
        launched, seconds = timed
        tok_s = size.tokens_per_step / seconds
        mfu = "-" if not found.peak_tflops else f"{tok_s * size.flops_per_token / found.peak_tflops / 1e12:.1%}"
        predicted = config.memory(index, Rung(micro=config.batch.sequences)).total_gb
        least = least_s(found, size)
        limits = f"{least * 1000:.1f} | {seconds / least:.2f} x" if least else "- | -"
        say(
            f"| {size.name} | {seconds * 1000:.1f} | {limits} | {launched * 1000:.1f} | {tok_s:,.0f} | {mfu} | "
            f"{used_gb:.1f} | {predicted:.1f} | {' | '.join(compiling[:2])} |"
        )
        del module, opt
    say(f"\nThe bar: at most {BAR} x the least.")


def least_s(found: device.Device, size: PhaseSize) -> float | None:
    """The fewest seconds that a step can take, by the GPU's data sheet; None where it is not known."""
    bandwidth = device.bandwidth_gb_s(found.name)
    if not found.peak_tflops or not bandwidth:
        return None
    compute = size.flops_per_token * size.tokens_per_step / (found.peak_tflops * 1e12)
    return compute + size.optimizer_traffic_bytes_per_param * size.params_trained / (bandwidth * 1e9)


def say(text: str) -> None:
    """A line of the page."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
