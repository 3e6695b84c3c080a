"""Low-rank adapters on the seven projections of a decoder (Hu et al. 2021): y = W x + (alpha / rank) B A dropout(x).

W is frozen and may be bf16 (or fp8, see float8.py); only A and B, in fp32, are trained. A layer can also compute as if
there were only the base, or as if the adapter were merged. In the latter case each forward pass merges again in fp32,
and rounds to the dtype of the products. So a comparison of base, adapter and merges needs no second model. The file
format of an adapter is PEFT's: `adapter_model.safetensors` with keys `base_model.model.<name in the published
weights>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank], beside `adapter_config.json` (read in PEFT 0.17's
documentation, 2026-11-21).

Initialisation: A uniform within 1 / sqrt(in) (what nn.Linear draws), B 0, so the first step starts from the base. Rows
of embedding and head can be trained too, whole and in fp32 (PEFT's trainable_token_indices): many bases never trained
the rows of the chat template's tokens, and no adapter reaches these rows. Parameter group: one, decayed by
`optim.weight_decay`, which is 0 unless set. Legend: r rank, K trained rows.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpufleet.job.experiments.engine import parallel
from gpufleet.job.experiments.models import float8
from gpufleet.job.experiments.models.blocks import Linear
from gpufleet.job.experiments.models.config import Lora
from gpufleet.job.experiments.models.decoder import Decoder, DecoderBlock, Table

PROJECTIONS = ("q", "k", "v", "o", "gate", "up", "down")
Mode = Literal["base", "adapter", "merged"]
_TRAINED = ("lora_a", "lora_b", "trained_rows")  # the last part of the trained parameters' names


class LoraLinear(nn.Module):
    """A frozen Linear and its adapter. `mode` may be changed at any time."""

    def __init__(self, base: nn.Linear, config: Lora) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.row_scales: Tensor | None  # those of a weight in fp8
        self.register_buffer("row_scales", None, persistent=False)
        self.scale, self.dropout = config.alpha / config.rank, config.dropout
        empty = functools.partial(torch.empty, device=base.weight.device, dtype=torch.float32)
        self.lora_a = nn.Parameter(empty(config.rank, base.in_features))  # [r, in]
        self.lora_b = nn.Parameter(empty(base.out_features, config.rank))  # [out, r]
        self.mode: Mode = "adapter"

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        if self.mode == "merged":
            return F.linear(x, self.merged().to(x.dtype), bias)
        if self.row_scales is None:
            y = F.linear(x, self.weight.to(x.dtype), bias)
        else:
            y = float8.product(x, self.weight, self.row_scales)
            y = y if bias is None else y + bias
        if self.mode == "base":
            return y
        narrow = F.linear(F.dropout(x, self.dropout, self.training), self.lora_a.to(x.dtype))
        # The small matrix is scaled, because scaling the result would need one more pass over the result, and over its
        # gradient.
        return y + F.linear(narrow, (self.scale * self.lora_b).to(x.dtype))

    def merged(self) -> Tensor:
        """W + scale B A, in fp32. A quantised W is never merged."""
        assert self.row_scales is None
        return parallel.full_tensor(self.weight).float() + self.scale * (self.lora_b @ self.lora_a)

    def store(self, dtype: torch.dtype) -> None:
        """Gives the frozen weight new memory of this dtype, fp8 or wider. `filling` gives its numbers."""
        scales = torch.empty(len(self.weight), 1, dtype=torch.float32, device=self.weight.device)
        self.row_scales = scales if dtype == float8.DTYPE else None
        self.weight = nn.Parameter(torch.empty_like(self.weight, dtype=dtype), requires_grad=False)


class TrainedRows(Table):
    """A frozen Table of which the rows `ids` are trained. `mode` may be changed at any time."""

    def __init__(self, base: Table, ids: Sequence[int]) -> None:
        nn.Module.__init__(self)
        self.weight = base.weight
        self.ids: Tensor
        self.register_buffer("ids", torch.tensor(ids, device=base.weight.device), persistent=False)
        self.trained_rows = nn.Parameter(base.weight.detach()[self.ids].float())  # [K, d]
        self.mode: Mode = "adapter"

    def forward(self, tokens_RT: Tensor) -> Tensor:
        x_RTd = F.embedding(tokens_RT, self.weight)
        if self.mode == "base":
            return x_RTd
        own_RTK = tokens_RT[..., None] == self.ids
        rows_RTd = F.embedding(own_RTK.int().argmax(-1), self.trained_rows)
        return torch.where(own_RTK.any(-1, keepdim=True), rows_RTd, x_RTd.float())

    def rows(self, dtype: torch.dtype) -> Tensor:
        table_Vd = self.weight.to(dtype)
        return table_Vd if self.mode == "base" else table_Vd.index_copy(0, self.ids, self.trained_rows.to(dtype))

    def merged(self) -> Tensor:
        """The table in fp32."""
        return self.weight.float().index_copy(0, self.ids, self.trained_rows)


def attach(
    module: Decoder, config: Lora, generator: torch.Generator | None = None, rows: Sequence[int] = ()
) -> Decoder:
    """Adds adapters to the module, and returns it. Everything else is frozen, except the `rows` of the tables. If
    `generator` is None, the adapters are not initialised.
    """
    module.requires_grad_(False)
    for block in module.blocks:
        assert isinstance(block, DecoderBlock)
        for part in (block.attention, block.ffn):
            for name in PROJECTIONS:
                if isinstance(base := getattr(part, name, None), Linear):
                    setattr(part, name, LoraLinear(base, config))
    if rows:
        train_rows(module, rows)
    return module if generator is None else initialise(module, generator)


def train_rows(module: Decoder, rows: Sequence[int]) -> None:
    """Lets the `rows` of the tables, which have their values, be trained."""
    module.embed = TrainedRows(module.embed, rows)
    module.head = None if module.head is None else TrainedRows(module.head, rows)


def store(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives the frozen weights of all adapted layers new memory of this dtype."""
    for _, layer in layers(module):
        layer.store(dtype)


def filling(module: nn.Module) -> Callable[[Tensor, Tensor], object]:
    """A function that writes a whole tensor into a parameter of the module, as `parallel.fill` does. It quantises the
    bf16 values of weights that are stored in fp8.
    """
    narrow = {layer.weight: layer.row_scales for _, layer in layers(module) if layer.row_scales is not None}

    @torch.no_grad()
    def fill(parameter: Tensor, whole: Tensor) -> None:
        if (scales := narrow.get(parameter)) is None:
            parallel.fill(parameter, whole)
        else:
            weight, row_scales = float8.quantise(whole.to(scales.device, torch.bfloat16))
            parameter.copy_(weight)
            scales.copy_(row_scales)

    return fill


@torch.no_grad()
def initialise(module: Decoder, generator: torch.Generator) -> Decoder:
    """Initialises the adapters of the module with random numbers that are made on the CPU."""
    for _, layer in layers(module):
        bound = 1 / math.sqrt(layer.lora_a.shape[1])
        layer.lora_a.copy_(torch.empty(layer.lora_a.shape).uniform_(-bound, bound, generator=generator))
        layer.lora_b.zero_()
    return module


def tables(module: nn.Module) -> Iterator[tuple[str, TrainedRows]]:
    for name, part in module.named_modules():
        if isinstance(part, TrainedRows):
            yield name, part


def layers(module: nn.Module) -> Iterator[tuple[str, LoraLinear]]:
    """Every adapted layer with its name, in the order of the state dict."""
    for name, part in module.named_modules():
        if isinstance(part, LoraLinear):
            yield name, part


def weights(module: nn.Module) -> dict[str, Tensor]:
    """The trained tensors of the module, which are not copied. These tensors are the content of a checkpoint."""
    return {name: parameter for name, parameter in module.named_parameters() if name.endswith(_TRAINED)}


def set_mode(module: nn.Module, mode: Mode) -> None:
    """Sets how every adapted layer and table computes its result."""
    for _, part in _adapted(module):
        part.mode = mode


@torch.no_grad()
def merged_weights(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every weight of the plain decoder by name, one at a time. Adapted weights are merged in fp32; the module stays
    unchanged. If the base is sharded, every rank must iterate.
    """
    adapted = dict(_adapted(module))
    for name, parameter in module.named_parameters():
        owner, _, leaf = name.rpartition(".")
        if leaf in _TRAINED:
            continue
        is_merged = owner in adapted and leaf == "weight"
        yield name, adapted[owner].merged() if is_merged else parallel.full_tensor(parameter.detach())


def _adapted(module: nn.Module) -> Iterator[tuple[str, LoraLinear | TrainedRows]]:
    for name, part in module.named_modules():
        if isinstance(part, LoraLinear | TrainedRows):
            yield name, part
