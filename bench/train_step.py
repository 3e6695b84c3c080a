"""Speed of the trainer, on an otherwise idle machine: `python bench/train_step.py [--sequences 8]` prints a page.

On a CPU: the whole rehearsal-sized run and its step per phase; what a checkpoint costs the work beside it is
checkpoint_stall.py's. On a GPU: tokens/s and MFU of each full-size phase at that many times 256 tokens, beside the
least that this GPU's data sheet allows (FLOPs over its peak, and the optimizer's traffic over its bandwidth), and what
the first step spends compiling on a node without a cache and on its replacement.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median

import torch
from torch._inductor.utils import fresh_cache

from gpufleet.infra.definition.loader import find, load
from gpufleet.job.contract import metrics
from gpufleet.job.contract.run import Task
from gpufleet.job.experiments.dataset import prepare, sources
from gpufleet.job.experiments.engine import __main__ as trainer
from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.engine.compile_cache import CompileCache
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.requests import Requests
from gpufleet.job.experiments.engine.step import compiled, update
from gpufleet.job.experiments.growth.model import build
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.kind.common import PhaseSize, Rung

ROOT = Path(__file__).parents[1]
STEPS = 20
BAR = 2  # times the least that the data sheet allows


def main() -> None:
    """The tables for this machine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=8, help="of a step on a GPU (default: %(default)s)")
    sequences = parser.parse_args().sequences
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    found = device.choose(wanted, bf16=True)
    say("# Trainer\n")
    say(
        f"{datetime.now(UTC):%Y-%m-%d}, {found.banner()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} before "
        f"it began, Python {platform.python_version()}.\n"
    )
    with tempfile.TemporaryDirectory() as scratch:
        if found.is_cuda:
            full_size(Path(scratch), found, sequences)
        else:
            rehearsal_size(Path(scratch))


def rehearsal_size(scratch: Path) -> None:
    """The run that `make rehearse` trains, without interruptions, as a process of its own."""
    now = datetime.now(UTC)
    config = load(find("tinystories-growth", ROOT), now=now, rehearsal=True).job.parameters
    assert isinstance(config, GrowthConfig)
    parameters = asdict(config)
    source = sources.Generated(count=config.data.stories, seed=config.seed)
    prepare.prepare(scratch / "data", source, model_vocab=config.model.vocab)
    tree = {"schema": 1, "job": {"experiment": "tinystories-growth", "parameters": parameters}}
    (scratch / "run.json").write_text(json.dumps(tree))
    began = time.perf_counter()
    subprocess.run(
        [sys.executable, "-m", "gpufleet.job.experiments.engine", str(scratch)],
        check=True,
        capture_output=True,
        cwd=ROOT,
    )
    seconds = time.perf_counter() - began
    records = [json.loads(line) for line in (scratch / "metrics.jsonl").read_text().splitlines()]
    say("## The rehearsal's run, uninterrupted\n")
    say(f"{seconds:.1f} s for {records[-1]['step']} steps, imports, two verified growths and all exports included.\n")
    say("| phase | parameters | ms/step | tok/s | loss |\n|---|---|---|---|---|")
    for size in config.phases():
        own = [r for r in records if r["phase"] == size.name]
        step_ms, tok_s = (median(r[key] for r in own if r[key]) for key in ("step_ms", "tok_s"))
        say(f"| {size.name} | {size.params_total:,} | {step_ms:.1f} | {tok_s:,.0f} | {own[-1]['loss']:.3f} |")
    saves = [save.blocked_s for record in records for save in metrics.saves(record)]
    say(f"\n{len(saves)} saves beside training blocked {median(saves) * 1000:.1f} ms (median).\n")


def full_size(scratch: Path, found: device.Device, sequences: int) -> None:
    """Each phase by itself, weights fresh."""
    config = replace(GrowthConfig(), batch=replace(GrowthConfig().batch, sequences=sequences))
    prepare.prepare(scratch / "data", sources.Generated(count=5000, seed=1), model_vocab=config.model.vocab)
    tree = {"schema": 1, "job": {"experiment": "tinystories-growth", "parameters": asdict(config)}}
    (scratch / "run.json").write_text(json.dumps(tree))
    experiment, _ = trainer.start(Task.read(scratch), scratch, 0, Requests(scratch), World())
    whole = Rung(micro=config.batch.sequences)
    say(f"\n{sequences} x {config.data.sequence} tokens a step.\n")
    say("| phase | ms/step | least ms | of it | tok/s | MFU | peak GB | predicted GB | no cache | an earlier node's |")
    say("|---|---|---|---|---|---|---|---|---|---|")
    for index, size in enumerate(config.phases()):
        phase = experiment.phases[index]
        found.tidy()  # first of all: the phase before is held by cycles
        module = build(config, index, device=found.torch)
        opt = experiment.optimizer(phase, module)
        experiment.schedule(phase, opt, phase.first)
        compiling = []
        for steps in (1, 2 * STEPS):  # a first node's, then its replacement's, which is the one that is timed
            with fresh_cache(), compiled(module, found.torch):
                graphs = CompileCache(experiment.session, phase, whole)
                for step in range(steps):
                    if step == STEPS:
                        found.synchronize()
                        began = time.perf_counter()
                    update(experiment, module, opt, experiment.batch(phase, step, whole), step)
                    if step == 0:
                        compiling.append(graphs.keep() or "nothing compiled")
                found.synchronize()
        seconds = (time.perf_counter() - began) / STEPS
        tok_s = size.tokens_per_step / seconds
        mfu = "-" if not found.peak_tflops else f"{tok_s * size.flops_per_token / found.peak_tflops / 1e12:.1%}"
        predicted = config.memory(index, Rung(micro=config.batch.sequences)).total_gb
        least = least_s(found, size)
        limits = f"{least * 1000:.1f} | {seconds / least:.2f} x" if least else "- | -"
        say(
            f"| {size.name} | {seconds * 1000:.1f} | {limits} | {tok_s:,.0f} | {mfu} | {found.used_gb():.1f} | "
            f"{predicted:.1f} | {' | '.join(compiling)} |",
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
