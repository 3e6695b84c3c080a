"""Trained models of the rehearsal's size for the growth tests: real enough that a wrong rule shows."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from torch import Tensor

from gpufleet.job.experiments.engine.optimizer import groups
from gpufleet.job.experiments.growth.growing import State, upcycle
from gpufleet.job.experiments.growth.model import Growth, build, decays, load
from gpufleet.job.experiments.growth.spec import Batch, GrowthConfig, GrowthModel, Precision, TextData
from gpufleet.job.experiments.models.blocks import Experts

CONFIG = replace(
    GrowthConfig(),
    device="cpu",
    model=GrowthModel(vocab=512, layers=3, width=64, heads=4, ffn=256, new_layers=2),
    data=TextData(sequence=64, source="generated-stories", stories=2000),
    batch=Batch(sequences=8),
    precision=Precision(compute="fp32", phase3_state="fp32"),
)


def text(windows: int, seed: int, length: int = 65) -> Tensor:
    """Windows [windows, length] of a language one can learn: most words follow from the one before."""
    g = torch.Generator().manual_seed(seed)
    follow = torch.randperm(512, generator=torch.Generator().manual_seed(0))
    tokens = torch.randint(512, (windows, length), generator=g)
    leap = torch.rand(windows, length, generator=g) < 0.2
    for t in range(1, length):
        tokens[:, t] = torch.where(leap[:, t], tokens[:, t], follow[tokens[:, t - 1]] % 64)
    return tokens


PROBE = text(8, seed=99, length=64)


def train(module: Growth, steps: int, lr: float, seed: int) -> None:
    """A few AdamW steps; leaves the module in eval mode."""
    optimizer = torch.optim.AdamW(groups(module, decays, CONFIG.optim.weight_decay), lr=lr, betas=(0.9, 0.95))
    module.train()
    for step in range(steps):
        batch = text(8, seed=seed + step)
        out = module(batch[:, :-1], batch[:, 1:])
        assert out.loss_sum is not None
        loss = out.loss_sum / batch[:, 1:].numel()
        (loss if out.aux_loss is None else loss + 0.01 * out.aux_loss).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    module.eval()


def experts(module: Growth) -> list[Experts]:
    """Each layer's."""
    found = [block.ffn for block in module.blocks]
    return [ffn for ffn in found if isinstance(ffn, Experts)]


def generator(seed: int = 5) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@functools.cache
def _dense() -> State:
    module = build(CONFIG, 0)
    train(module, steps=30, lr=3e-3, seed=0)
    return module.state_dict()


@functools.cache
def _moe() -> State:
    module = load(CONFIG, 1, upcycle(_dense(), experts=8, router_std=0.02, generator=generator()))
    train(module, steps=32, lr=2e-3, seed=1000)
    return module.state_dict()


def dense(dtype: torch.dtype) -> State:
    """The end of phase 1."""
    return {name: tensor.detach().to(dtype, copy=True) for name, tensor in _dense().items()}


def moe(dtype: torch.dtype) -> State:
    """The end of phase 2: experts that have parted."""
    return {name: tensor.detach().to(dtype, copy=True) for name, tensor in _moe().items()}
