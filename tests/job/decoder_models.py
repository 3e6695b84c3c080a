"""Small decoders of each family, and packed rows to feed them."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpufleet.job.experiments.engine.experiment import IGNORED
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.decoder import GROUPS, Decoder, build

FAMILIES: dict[str, Shape] = {
    "llama": Shape(
        family="llama", vocab=96, layers=2, width=32, heads=4, kv_heads=2, head_dim=8, ffn=48, rope_theta=500_000.0
    ),
    "qwen2": Shape(
        family="qwen2",
        vocab=96,
        layers=2,
        width=32,
        heads=4,
        kv_heads=1,
        head_dim=8,
        ffn=40,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling="none",
    ),
    "qwen3": Shape(
        family="qwen3",
        vocab=96,
        layers=2,
        width=32,
        heads=4,
        kv_heads=2,
        head_dim=16,
        ffn=48,
        tied=True,
        norm_eps=1e-6,
        rope_theta=1e6,
        rope_scaling="none",
    ),
}


def generator(seed: int = 7) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def model(family: str, dtype: torch.dtype = torch.float32, seed: int = 7) -> Decoder:
    """Weights a good deal larger than at initialisation, so that attention is not uniform; computes in `dtype`."""
    module = build(FAMILIES[family], compute=dtype, dtype=dtype, generator=generator(seed))
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(torch.randn(parameter.shape, generator=generator(seed)))
            elif "norm" not in name:
                parameter.mul_(8)
    return module


def packed(lengths: list[list[int]], row: int, vocab: int = 96) -> dict[str, Tensor]:
    """Rows of examples of these lengths, padding at the end, every second target counted."""
    source = generator(11)
    tokens = torch.zeros(len(lengths), row, dtype=torch.int64)
    targets = torch.full_like(tokens, IGNORED)
    documents = torch.zeros_like(tokens)
    for r, examples in enumerate(lengths):
        at = 0
        for number, length in enumerate(examples, 1):
            ids = torch.randint(vocab, (length,), generator=source)
            tokens[r, at : at + length], documents[r, at : at + length] = ids, number
            targets[r, at : at + length - 1] = ids[1:]
            targets[r, at : at + length : 2] = IGNORED
            at += length
    return {"tokens": tokens, "targets": targets, "documents": documents}


def examples(rows: dict[str, Tensor]) -> list[tuple[Tensor, Tensor]]:
    """(tokens, targets) of each example alone, [1, length]."""
    found: list[tuple[Tensor, Tensor]] = []
    for r in range(rows["tokens"].shape[0]):
        for number in range(1, int(rows["documents"][r].max()) + 1):
            own = rows["documents"][r] == number
            found.append((rows["tokens"][r, own][None], rows["targets"][r, own][None]))
    return found


def as_arguments(rows: dict[str, Tensor]) -> tuple[Any, ...]:
    return rows["tokens"], rows["targets"], rows["documents"]


def slow_varlen(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, *longest: int, **options: Any) -> Tensor:
    """What the varlen kernel computes, example by example: [N, H, D]."""
    assert options == {"window_size": (-1, 0), **GROUPS}
    assert torch.equal(cu_q, cu_k)
    assert cu_q.dtype == torch.int32
    out = torch.empty_like(q)
    for start, end in itertools.pairwise(cu_q.tolist()):
        if start == end:
            continue  # the end is repeated
        assert end - start <= min(longest)
        q1, k1, v1 = (x[start:end].transpose(0, 1)[None] for x in (q, k, v))
        out[start:end] = F.scaled_dot_product_attention(q1, k1, v1, is_causal=True, enable_gqa=True)[0].transpose(0, 1)
    return out
