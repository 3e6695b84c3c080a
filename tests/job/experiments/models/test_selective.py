"""Selective activation checkpointing: what backward computes a second time, seen in the operators that run."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpufleet.job.experiments.models import decoder, float8, lora
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.config import Lora

SHAPE = Shape(
    vocab=64, layers=1, width=64, heads=4, kv_heads=2, head_dim=16, ffn=96, rope_theta=1e4, rope_scaling="none"
)


class Operators(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        self.count[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_backward_repeats_neither_packed_attention_nor_a_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes alone flow here: the varlen kernel itself needs a GPU."""
    monkeypatch.setattr(decoder, "varlen_runs", lambda device, compute: True)
    found = {}
    for checkpointing in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True), Operators() as ran:
            module = decoder.Decoder(SHAPE, torch.bfloat16)
            module.checkpointing = checkpointing
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            starts = torch.zeros(5, dtype=torch.int32)
            module(tokens, tokens, torch.ones_like(tokens), starts).loss_sum.backward()
        found[checkpointing] = ran.count
    attention, product = "torch_attn._varlen_attn.default", "aten.mm.default"
    assert found[True][attention] == found[False][attention] == 1
    assert found[True][product] == found[False][product] > 0
    assert found[True]["aten.silu.default"] == 2  # cheap, so it is computed again


def test_backward_repeats_no_product_in_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float8, "multiplies", lambda x, weight: True)  # as on a GPU
    found = {}
    for checkpointing in (False, True):
        with FakeTensorMode(allow_non_fake_inputs=True), Operators() as ran:
            module = lora.attach(decoder.Decoder(SHAPE, torch.bfloat16), Lora(rank=2))
            lora.store(module, float8.DTYPE)
            module.checkpointing = checkpointing
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            module(tokens, tokens).loss_sum.backward()
        found[checkpointing] = ran.count["aten._scaled_mm.default"]
    assert found[True] == found[False] == 7  # projections of the layer
