"""Compares dense pretraining with nanochat's, in tokens/s on one card in one run: our 124M-class model and its d12.

    PYTHONPATH=. python bench/nanochat_step.py PATH_OF_A_NANOCHAT_CHECKOUT [--depth 12] [--rows 32] [--sequence 2048]
                                               [--micros 8] [--steps 8] [--window L] [--device cuda]

Depth, width (64 x depth), heads of 128, feed-forward of 4 x width, vocabulary 32,768, rows and micro-batches are the
same; every attention layer sees the whole row unless `--window SSSL`, nanochat's own pattern, is asked for. Each model
is compiled and optimised as its own trainer does it: blocks and loss with fused AdamW here, the whole model with Muon
and AdamW there. nanochat also has value embeddings and a head of its own, so FLOPs per token are printed for both
models. Steps are timed in turn. The attention kernels are those that a profile of one forward and backward pass names.
On a CPU this only shows that the program runs: `--device cpu --depth 2 --rows 1 --sequence 256 --micros 1 --steps 2`.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from gpufleet.job.experiments.engine import device, optimizer
from gpufleet.job.experiments.engine.step import compiled
from gpufleet.job.experiments.growth.model import build, decays
from gpufleet.job.experiments.growth.spec import GrowthConfig, GrowthModel, Precision, TextData

VOCAB, HEAD = 32_768, 128
KERNELS = ("flash", "fmha", "sdpa", "_attention")  # parts of attention kernels' names, cuDNN's too
WARM = 3  # number of steps that are not timed, because they compile


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanochat", type=Path)
    for name, default in (("depth", 12), ("rows", 32), ("sequence", 2048), ("micros", 8), ("steps", 8)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--window", default="L", help="nanochat's pattern of long and short windows, e.g. SSSL")
    parser.add_argument("--device", default="cuda")
    a = parser.parse_args()
    if not (a.nanochat / "nanochat" / "gpt.py").is_file():
        parser.error(f"{a.nanochat} holds no nanochat/gpt.py: name the folder of a checkout")
    sys.path.insert(0, str(a.nanochat))
    found = device.choose(a.device, bf16=True)
    tokens = torch.randint(VOCAB, (a.rows, a.sequence + 1), device=found.torch)
    per_step = a.micros * a.rows * a.sequence
    with ExitStack() as stack:
        models = {"gpufleet": ours(a, tokens, stack), "nanochat": theirs(a, tokens)}
        seconds: dict[str, list[float]] = {name: [] for name in models}
        for number in range(WARM + a.steps):
            for name, model in models.items():
                began = time.perf_counter()
                for _ in range(a.micros):
                    model.passes()
                model.update()
                found.synchronize()
                if number >= WARM:
                    seconds[name].append(time.perf_counter() - began)
        kernels = {name: attention(model.passes, found) for name, model in models.items()}
    say(f"{found.name}, torch {torch.__version__}, depth {a.depth}, {per_step:,} tokens a step, window {a.window}")
    for name, model in models.items():
        speed = [per_step / s for s in seconds[name]]
        median = statistics.median(speed)
        mfu = f"{median * model.flops / (found.peak_tflops * 1e12):.1%}" if found.peak_tflops else "unknown, no peak"
        say(
            f"{name}: {median:,.0f} tok/s (from {min(speed):,.0f} to {max(speed):,.0f}), MFU {mfu} at {model.flops:,} "
            f"FLOP per token, {model.parameters:,} parameters, attention: {kernels[name]}"
        )
    ratios = [b / o for o, b in zip(seconds["gpufleet"], seconds["nanochat"], strict=True)]
    say(f"gpufleet / nanochat, tokens/s: {statistics.median(ratios):.2f} (from {min(ratios):.2f} to {max(ratios):.2f})")
    return 0


class NanochatModel(NamedTuple):
    """One of the two models: the forward and backward pass of a micro-batch, and the update of a step."""

    parameters: int
    flops: int  # per token
    passes: Callable[[], None]
    update: Callable[[], None]


def ours(a: argparse.Namespace, tokens: Tensor, stack: ExitStack) -> NanochatModel:
    """The dense model of tinystories-growth at this shape, as its trainer compiles and updates it."""
    width = 64 * a.depth
    config = replace(
        GrowthConfig(),
        model=GrowthModel(vocab=VOCAB, layers=a.depth, width=width, heads=max(1, width // HEAD), ffn=4 * width),
        data=TextData(sequence=a.sequence),
        precision=Precision(compute="bf16" if tokens.is_cuda else "fp32"),
    )
    module = build(config, 0, device=tokens.device)
    opt = optimizer.make(optimizer.groups(module, decays, config.optim.weight_decay), config.optim, seed=1)
    optimizer.set_lr(opt, 3e-4)
    stack.enter_context(compiled(module, tokens.device))
    size = config.phases()[0]
    total = a.micros * tokens[:, 1:].numel()

    def passes() -> None:
        (module(tokens[:, :-1], tokens[:, 1:]).loss_sum / total).backward()

    def update() -> None:
        optimizer.clip(opt, 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)

    return NanochatModel(size.params_total, size.flops_per_token, passes, update)


def theirs(a: argparse.Namespace, tokens: Tensor) -> NanochatModel:
    """nanochat's model, compiled whole, with its own optimizer (scripts/base_train.py, read 2026-11-22)."""
    from nanochat import gpt  # type: ignore[import-not-found]

    width = 64 * a.depth
    heads = max(1, width // HEAD)
    shape = gpt.GPTConfig(
        sequence_len=a.sequence,
        vocab_size=VOCAB,
        n_layer=a.depth,
        n_head=heads,
        n_kv_head=heads,
        n_embd=width,
        window_pattern=a.window,
    )
    with torch.device("meta"):
        module = gpt.GPT(shape)
    module.to_empty(device=tokens.device)
    module.init_weights()
    opt: Any = module.setup_optimizer()
    run: Any = torch.compile(module, dynamic=False)
    x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def passes() -> None:
        (run(x, y) / a.micros).backward()

    def update() -> None:
        opt.step()
        module.zero_grad(set_to_none=True)

    count = sum(parameter.numel() for parameter in module.parameters())
    return NanochatModel(count, int(module.estimate_flops()), passes, update)


def attention(passes: Callable[[], None], found: device.Device) -> str:
    """Names of the attention kernels of one pass, or of operators on a CPU and where the driver shows no kernels."""
    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * found.is_cuda
    with profile(activities=activities) as seen:
        passes()
        found.synchronize()
    for kind in (found.torch.type, "cpu"):
        names = {event.key for event in seen.key_averages() if event.device_type.name.lower() == kind}
        if kernels := [name[:60] for name in names if any(part in name.lower() for part in KERNELS)]:
            return ", ".join(sorted(kernels))
    return "none named"


def say(text: str) -> None:
    print(text)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
