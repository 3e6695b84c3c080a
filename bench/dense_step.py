"""Times one eager training step (forward, backward, fused AdamW), in fp32 on the CPU or bf16 on a GPU, for pairs of
models in turn.

    python bench/dense_step.py [--nanogpt PATH_OF_A_CHECKOUT] [--layers 7] [--sequences N] [--pairs 7] [--device cpu]

N sequences of 256 tokens: 2, or 32 on a GPU, where launching the kernels of 2 would take longer than running them.

- our dense model against nanoGPT of the same shape (nanoGPT has learned positions and a fused q, k, v; ours rotates);
- the mixture's forward pass, loss and backward pass against those of a dense model with as many active parameters,
  without the optimizer, because a mixture has more weights to update;
- only the mixture's FFN with its routing, against a dense FFN of equal active size.

The ratio is the median over pairs. The two models of a pair are timed one after the other, and each goes first in turn,
so that a noisy machine disturbs both alike. The brackets hold 95 % of such medians.
"""

from __future__ import annotations

import argparse
import importlib
import math
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from gpufleet.job.experiments.engine import device
from gpufleet.job.experiments.engine.optimizer import groups
from gpufleet.job.experiments.growth.model import build, decays
from gpufleet.job.experiments.growth.spec import GrowthConfig, GrowthModel, Precision, shape
from gpufleet.job.experiments.models.blocks import Experts, FeedForward


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nanogpt", type=Path)
    parser.add_argument("--layers", type=int, default=7)
    parser.add_argument("--sequences", type=int, help="of 256 tokens; default 2, on a GPU 32")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--device", default="cpu")
    a = parser.parse_args()
    found = device.choose(a.device, bf16=True)
    compute = "bf16" if found.is_cuda else "fp32"
    sequences = a.sequences or (32 if found.is_cuda else 2)
    config = replace(
        GrowthConfig(),
        model=replace(GrowthModel(), layers=a.layers),
        precision=Precision(compute=compute, phase3_state="fp32"),  # type: ignore[arg-type]
    )
    print(  # noqa: T201
        f"{found.name}, torch {torch.__version__}, {torch.get_num_threads()} threads, {compute}, "
        f"{sequences} x 256 tokens"
    )
    tokens = torch.randint(config.model.vocab, (sequences, 257), device=found.torch)
    if a.nanogpt:
        ours = our_step(config, tokens)
        report("dense step / nanoGPT's", *paired(ours, nanogpt_step(a.nanogpt, config, tokens), a.pairs, found))
    steps = passes_of_models(config, tokens)
    report("mixture's step / dense model's of equal active size", *paired(*steps, a.pairs, found))
    x = torch.randn(sequences, 256, config.model.width, device=found.torch)
    x = x if compute == "fp32" else x.bfloat16()
    for dispatch in ("grouped", "padded"):
        report(f"experts ({dispatch}) / dense FFN", *paired(*ffns(config, x, dispatch), a.pairs, found))
    return 0


def our_step(config: GrowthConfig, tokens: Tensor) -> Callable[[], None]:
    """Our dense model's whole step."""
    module = build(config, 0, device=tokens.device)
    optimizer = torch.optim.AdamW(groups(module, decays, config.optim.weight_decay), lr=1e-4, fused=True)

    def step() -> None:
        out = module(tokens[:, :-1], tokens[:, 1:])
        (out.loss_sum / tokens[:, 1:].numel()).backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def nanogpt_step(folder: Path, config: GrowthConfig, tokens: Tensor) -> Callable[[], None]:
    """A step of nanoGPT's model, with autocast on a GPU as in its train.py. The model is read from the checkout's
    model.py, which is not installed.
    """
    sys.path.insert(0, str(folder))
    theirs, m = importlib.import_module("model"), config.model
    module = theirs.GPT(
        theirs.GPTConfig(block_size=256, vocab_size=m.vocab, n_layer=m.layers, n_head=m.heads, n_embd=m.width)
    ).to(tokens.device)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-4, fused=True)
    x, y, cuda = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), tokens.device.type == "cuda"

    def step() -> None:
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=cuda):
            _, loss = module(x, y)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


def passes_of_models(config: GrowthConfig, tokens: Tensor) -> tuple[Callable[[], None], Callable[[], None]]:
    """Forward, loss and backward of phase 2's mixture, and of a dense model as wide as its active experts."""
    wide = replace(config, model=replace(config.model, ffn=config.model.top_k * config.model.ffn))
    modules = build(config, 1, device=tokens.device), build(wide, 0, device=tokens.device)

    def passes(module: nn.Module) -> Callable[[], None]:
        for p in module.parameters():
            p.grad = torch.zeros_like(p)  # as between two micro-batches: no memory is asked for in the timed part

        def run() -> None:
            out = module(tokens[:, :-1], tokens[:, 1:])
            loss = out.loss_sum / tokens[:, 1:].numel()
            (loss if out.aux_loss is None else loss + config.optim.load_balance * out.aux_loss).backward()

        return run

    return passes(modules[0]), passes(modules[1])


def ffns(config: GrowthConfig, x_BTd: Tensor, dispatch: str) -> tuple[Callable[[], None], Callable[[], None]]:
    """A mixture's FFN, and a dense one with as many active parameters."""
    mixture = shape(config.model, 1)
    dense = replace(shape(config.model, 0), ffn=mixture.top_k * mixture.ffn)
    modules = Experts(mixture).to(x_BTd.device), FeedForward(dense).to(x_BTd.device)
    for p in [*modules[0].parameters(), *modules[1].parameters()]:
        nn.init.normal_(p, 0.0, 0.02)
    modules[0].dispatch = dispatch  # type: ignore[assignment]

    def passes(module: nn.Module) -> Callable[[], None]:
        def run() -> None:
            leaf = x_BTd.clone().requires_grad_()
            y, _ = module(leaf)
            y.backward(torch.ones_like(y))
            module.zero_grad(set_to_none=True)

        return run

    return passes(modules[0]), passes(modules[1])


def paired(
    first: Callable[[], None], second: Callable[[], None], pairs: int, found: device.Device
) -> tuple[list[float], list[float]]:
    """The milliseconds of each call of `first` and of `second`, called in turn, after one unmeasured pair."""
    times: tuple[list[float], list[float]] = ([], [])
    for pair in range(pairs + 1):
        for run, seen in list(zip((first, second), times, strict=True))[:: 1 if pair % 2 else -1]:
            start = time.perf_counter()
            run()
            found.synchronize()
            if pair:
                seen.append((time.perf_counter() - start) * 1e3)
    return times


def report(name: str, ours: list[float], theirs: list[float]) -> None:
    ratios = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    # Ranks of the sorted pairs between which the median lies, by the sign test's normal approximation.
    low = max(0, math.floor(len(ratios) / 2 - 0.98 * math.sqrt(len(ratios))))
    print(  # noqa: T201
        f"{name}: {statistics.median(ratios):.3f} ({ratios[low]:.3f} to {ratios[-1 - low]:.3f}, {len(ratios)} pairs; "
        f"{statistics.median(ours):.1f} against {statistics.median(theirs):.1f} ms)"
    )


if __name__ == "__main__":
    sys.exit(main())
