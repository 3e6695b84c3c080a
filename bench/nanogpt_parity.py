"""First 100 fp32 losses of the dense model against nanoGPT's, from identical weights, data and optimizer.

    python bench/nanogpt_parity.py PATH_OF_A_NANOGPT_CHECKOUT [--shape small|wide|full] [--steps 100] [--fp64]

nanoGPT has learned positions and a fused q, k, v. Its position table is set to zero and frozen here, its c_attn is our
q, k and v stacked. What is left to differ is the rotation, so there are two comparisons:
- `rotary`: our model untouched; nanoGPT's attention gets rotary positions written independently (complex numbers);
- `none`: nanoGPT's code untouched; our rotation is replaced by nothing.
- `control`: our model against itself, every weight moved to the next representable number. Training amplifies
  rounding, the more the larger the model and the smaller the batch: a difference is ours only where it exceeds this.
nanoGPT uses its own configure_optimizers, with the embedding moved to the group without decay, as ours has it.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpufleet.job.experiments.engine.optimizer import groups
from gpufleet.job.experiments.growth.model import Growth, build, decays, load
from gpufleet.job.experiments.growth.spec import GrowthConfig, GrowthModel, Precision
from gpufleet.job.experiments.models import blocks

SHAPES = {
    "small": (GrowthModel(vocab=512, layers=3, width=64, heads=4, ffn=256), 8, 64),
    "wide": (GrowthModel(vocab=2048, layers=2), 4, 128),
    "full": (GrowthModel(), 1, 128),
}
LIMIT = 1e-4


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nanogpt", type=Path)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="small")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--against", choices=["rotary", "none", "control"], nargs="*", default=["rotary", "none"])
    parser.add_argument("--fp64", action="store_true")
    arguments = parser.parse_args()
    theirs = nanogpt(arguments.nanogpt)
    worst = 0.0
    dtype = torch.float64 if arguments.fp64 else torch.float32
    for against in arguments.against:
        start = time.perf_counter()
        ours, nano = both(theirs, arguments.shape, arguments.steps, against, dtype)
        gaps = [abs(a - b) for a, b in zip(ours, nano, strict=True)]
        worst = max([worst, *(gaps if against != "control" else [])])
        print(  # noqa: T201
            f"{arguments.shape} shape, {dtype}, {against}: {len(gaps)} steps, loss {ours[0]:.4f} -> {ours[-1]:.4f}, "
            f"largest difference {max(gaps):.1e} (limit {LIMIT:.0e}), {time.perf_counter() - start:.0f} s, "
            f"torch {torch.__version__}, {torch.get_num_threads()} threads"
        )
    return 0 if worst <= LIMIT else 1


def nanogpt(folder: Path) -> ModuleType:
    """The checkout's model.py, not installed and not copied."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", folder / "model.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["nanogpt_model"] = module
    spec.loader.exec_module(module)
    return module


def both(
    theirs: ModuleType, shape: str, steps: int, against: str, dtype: torch.dtype
) -> tuple[list[float], list[float]]:
    """The losses of our model and of the other, step by step on the same batches."""
    model, batch, sequence = SHAPES[shape]
    config = replace(GrowthConfig(), model=model, precision=Precision(compute="fp32", phase3_state="fp32"))
    ours = build(config, 0, dtype=dtype)
    ours.compute_dtype = dtype
    if against == "control":
        nudged = {name: t.nextafter(torch.full_like(t, torch.inf)) for name, t in ours.state_dict().items()}
        other: Any = load(config, 0, nudged)
        other.compute_dtype = dtype
        other_optimizer = our_optimizer(other, config)
    else:
        other = converted(theirs, ours, model, sequence).to(dtype)
        other_optimizer = nanogpt_optimizer(other, config)
        if against == "rotary":
            for block in other.transformer.h:
                block.attn.forward = rotary_attention(block.attn)

    losses: tuple[list[float], list[float]] = ([], [])
    turning = blocks.rotate if against != "none" else lambda x, cos, sin: x
    runs = ((ours, our_optimizer(ours, config), losses[0]), (other, other_optimizer, losses[1]))
    for step in range(steps):
        tokens = words(batch, sequence + 1, model.vocab, step)
        x, y = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        for module, optimizer, seen in runs:
            with mock.patch.object(blocks, "rotate", turning):
                out = module(x, y)
            loss = out.loss_sum / y.numel() if isinstance(module, Growth) else out[1]
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), config.optim.clip)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seen.append(loss.item())
    return losses


def our_optimizer(module: Growth, config: GrowthConfig) -> torch.optim.Optimizer:
    betas: Any = config.optim.betas
    return torch.optim.AdamW(groups(module, decays, config.optim.weight_decay), lr=config.optim.lr[0], betas=betas)


def nanogpt_optimizer(module: Any, config: GrowthConfig) -> Any:
    """Its own; the embedding does not decay."""
    with mock.patch("builtins.print"):
        optimizer = module.configure_optimizers(
            config.optim.weight_decay, config.optim.lr[0], config.optim.betas, "cpu"
        )
    decayed, plain = optimizer.param_groups
    decayed["params"] = [p for p in decayed["params"] if p is not module.transformer.wte.weight]
    plain["params"].append(module.transformer.wte.weight)
    return optimizer


def converted(theirs: ModuleType, ours: Growth, model: GrowthModel, sequence: int) -> Any:
    """A nanoGPT holding our weights; positions zero and frozen."""
    settings = theirs.GPTConfig(
        block_size=sequence, vocab_size=model.vocab, n_layer=model.layers, n_head=model.heads, n_embd=model.width
    )
    with mock.patch("builtins.print"):
        nano = theirs.GPT(settings)
    state = {"transformer.wte.weight": ours.embed.weight, "lm_head.weight": ours.embed.weight}
    state["transformer.wpe.weight"] = torch.zeros(sequence, model.width)
    names = {"norm1": "ln_1", "norm2": "ln_2", "attention.o": "attn.c_proj", "ffn.up": "mlp.c_fc"}
    names["ffn.down"] = "mlp.c_proj"
    weights = dict(ours.named_parameters())
    for kind in ("weight", "bias"):
        state[f"transformer.ln_f.{kind}"] = weights[f"norm.{kind}"]
        for i in range(model.layers):
            for our_name, nano_name in names.items():
                state[f"transformer.h.{i}.{nano_name}.{kind}"] = weights[f"blocks.{i}.{our_name}.{kind}"]
            qkv: list[Tensor] = [weights[f"blocks.{i}.attention.{p}.{kind}"] for p in "qkv"]
            state[f"transformer.h.{i}.attn.c_attn.{kind}"] = torch.cat(qkv)
    nano.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()})
    nano.transformer.wpe.weight.requires_grad_(False)
    return nano


def rotary_attention(attention: Any) -> Any:
    """nanoGPT's attention with positions by complex multiplication: dimensions i and i + D/2 are one number."""

    def turn(x_BHTD: Tensor) -> Tensor:
        left, right = x_BHTD.chunk(2, dim=-1)
        t, half = x_BHTD.shape[2], left.shape[3]
        angle = torch.arange(t)[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        turned = torch.complex(left, right) * torch.polar(torch.ones_like(angle), angle).to(
            torch.promote_types(x_BHTD.dtype, torch.complex64)
        )
        return torch.cat([turned.real, turned.imag], dim=-1)

    def forward(x: Tensor) -> Tensor:
        parts = attention.c_attn(x).split(attention.n_embd, dim=2)
        q, k, v = (p.unflatten(2, (attention.n_head, -1)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)
        out: Tensor = attention.c_proj(y.transpose(1, 2).flatten(2))
        return out

    return forward


def words(batch: int, length: int, vocab: int, step: int) -> Tensor:
    """Seeded windows with something to learn: most words follow from the one before."""
    g = torch.Generator().manual_seed(step)
    tokens = torch.randint(vocab, (batch, length), generator=g)
    leap = torch.rand(batch, length, generator=g) < 0.3
    for t in range(1, length):
        tokens[:, t] = torch.where(leap[:, t], tokens[:, t], (tokens[:, t - 1] * 31 + 7) % min(vocab, 256))
    return tokens


if __name__ == "__main__":
    sys.exit(main())
