"""Measures one LoRA step at sft-h100's shape on packed rows: milliseconds, tokens per second, MFU and peak memory.

    python bench/sft_step.py [--layers 32] [--rows 2] [--row 4096] [--steps 20] [--device cuda] [--eager] [--mask]
        [--fp8-base]

Random weights and lengths (log-normal, mean 361, as the real data). MFU counts 4 FLOP per base parameter and token, 6
per adapter parameter, and attention within each example. `--mask`: the masked attention instead of the varlen kernel.
`--fp8-base`: the base in fp8, as with `precision.base: fp8`.
On a CPU this only shows that the program runs: give it few layers and a short row.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpufleet.job.experiments.engine import device, optimizer
from gpufleet.job.experiments.engine.step import compiled
from gpufleet.job.experiments.models import decoder, float8, lora
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.sft.spec import SftConfig, SftPrecision, flops_per_token
from gpufleet.job.kind.common import Rung

WARM = 5  # number of steps that are not timed
LONGEST = 1024  # tokens of an example, as data.longest: the kernel launches as much for each as for the longest one


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 32), ("rows", 2), ("row", 4096), ("steps", 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--mask", action="store_true")
    parser.add_argument("--fp8-base", action="store_true")
    a = parser.parse_args()
    whole = SftConfig()
    config = replace(whole, model=replace(Shape(), layers=a.layers), data=replace(whole.data, row=a.row))
    config = replace(config, precision=SftPrecision(base="fp8" if a.fp8_base else "bf16"))
    found = device.choose(a.device, bf16=True)
    where = found.torch
    drawn = torch.Generator().manual_seed(1)
    base = decoder.build(config.model, compute=torch.bfloat16, dtype=torch.bfloat16, device="meta")
    module = lora.attach(base, config.lora)
    if a.fp8_base:
        float8.require(where)
        lora.store(module, float8.DTYPE)
    module.to_empty(device=where)
    fill = lora.filling(module)
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            whole_tensor = torch.empty(parameter.shape, dtype=torch.bfloat16, device=where)
            fill(parameter, whole_tensor.fill_(1.0) if "norm" in name else whole_tensor.normal_(0.0, 0.02))
    lora.initialise(module, drawn)
    adapter = list(lora.weights(module).values())
    opt = optimizer.make([{"params": adapter, "weight_decay": 0.0}], config.optim, seed=1)
    optimizer.set_lr(opt, 1e-4)
    inputs: tuple[Any, ...] = batch(a.rows, a.row, config.model.vocab, where)
    inputs = inputs[:3] if a.mask else (*inputs, LONGEST)
    tokens, seconds = a.rows * a.row, []
    with compiled(module, where, wanted=not a.eager):
        for number in range(WARM + a.steps):
            began = time.perf_counter()
            (module(*inputs).loss_sum / tokens).backward()
            optimizer.clip(opt, 1.0)
            opt.step()
            opt.zero_grad(set_to_none=True)
            found.synchronize()
            if number >= WARM:
                seconds.append(time.perf_counter() - began)
    step_s = statistics.median(seconds)
    peak = found.peak_tflops
    mfu = f"{tokens / step_s * flops_per_token(config) / (peak * 1e12):.1%}" if peak else "unknown, no peak"
    memory = torch.cuda.max_memory_allocated() / 1e9 if where.type == "cuda" else 0.0
    print(  # noqa: T201
        f"{found.name}, torch {torch.__version__}, {a.layers} layers, {a.rows} x {a.row} tokens, "
        f"{'eager' if a.eager else 'compiled'}, {'mask' if a.mask else 'varlen'}{', fp8 base' * a.fp8_base}: "
        f"{step_s * 1e3:.1f} ms (from {min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f}), "
        f"{tokens / step_s:,.0f} tok/s, MFU {mfu}, {memory:.1f} GB, "
        f"predicted {config.memory(0, Rung(micro=a.rows)).total_gb:.1f}"
    )
    return 0


def batch(rows: int, row: int, vocab: int, where: torch.device) -> tuple[Tensor, ...]:
    """(tokens, targets, documents, starts): rows filled with examples one after the other, the last one cut."""
    source = np.random.default_rng(1)
    documents = np.zeros((rows, row), dtype=np.int64)
    starts: list[int] = []
    for r in range(rows):
        at = number = 0
        while at < row:
            length = int(np.clip(source.lognormal(np.log(361) - 0.245, 0.7), 8, LONGEST))
            number += 1
            documents[r, at : at + length] = number
            starts.append(r * row + at)
            at += length
    tokens = torch.from_numpy(source.integers(0, vocab, (rows, row)))
    first = torch.tensor([*starts, rows * row], dtype=torch.int32)
    return tuple(x.to(where) for x in (tokens, tokens.roll(-1, 1), torch.from_numpy(documents), first))


if __name__ == "__main__":
    sys.exit(main())
