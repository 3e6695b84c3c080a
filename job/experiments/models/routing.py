"""Moves rows to experts and back: two ways to run the same mixture, with static shapes and without waiting for the
host.

Both move rows with `rearrange`, a gather whose gradient is a gather too, so that it is deterministic on every device.
Legend as in blocks.py; S = N x K (token, choice) pairs, sorted by expert.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(NamedTuple):
    """The result of one layer's router. All tensors are on the device, and none is copied from it."""

    load: Tensor  # [E] int64, (token, choice) pairs per expert
    # scalar: E x sum(share of pairs x mean probability), which is 1 for an even load (Switch Transformer, eq. 4)
    balance: Tensor
    entropy: Tensor  # scalar in nats: the entropy of the full softmax, as the mean over tokens

    @classmethod
    def from_logits(cls, logits_NE: Tensor, chosen_NK: Tensor) -> Routing:
        """The result from the router's logits and the chosen experts."""
        tokens, experts = logits_NE.shape
        load_E = (chosen_NK.flatten()[:, None] == torch.arange(experts, device=chosen_NK.device)).sum(0)
        probability_NE = logits_NE.softmax(-1)
        # This uses few operations, because if blocks are not compiled, a step launches each of them separately.
        balance = (load_E * probability_NE.sum(0)).sum() * (experts / (tokens * chosen_NK.numel()))
        return cls(load_E, balance, torch.special.entr(probability_NE.detach()).sum() / tokens)


def grouped_experts(x_Nd: Tensor, weights_NK: Tensor, chosen_NK: Tensor, load_E: Tensor, w: list[Tensor]) -> Tensor:
    """The experts' results, without dropped pairs. Pairs are sorted by expert, and each Linear is one grouped product.
    `w`: up weight and bias, down weight and bias.
    """
    expert_S, order_S, place_S = _sort(chosen_NK)
    rows_Sd = rearrange(_repeat(x_Nd, chosen_NK), order_S, None, place_S, None)
    ends_E = load_E.cumsum(0, dtype=torch.int32)
    # Not one_hot: its checks of the values add two kernels when compiled.
    one_SE = (expert_S[:, None] == torch.arange(len(load_E), device=expert_S.device)).to(x_Nd.dtype)
    hidden_Sh = F.gelu(grouped_linear(rows_Sd, w[0], w[1], expert_S, one_SE, ends_E))
    result_Sd = grouped_linear(hidden_Sh, w[2], w[3], expert_S, one_SE, ends_E)
    return _combine(rearrange(result_Sd, place_S, None, order_S, None), weights_NK)


def padded_experts(
    x_Nd: Tensor, weights_NK: Tensor, chosen_NK: Tensor, load_E: Tensor, w: list[Tensor], capacity: float | None
) -> Tensor:
    """Every expert gets C rows. Pairs beyond C are dropped and add nothing. If `capacity` is None, no pair is
    dropped.
    """
    _, order_S, place_S = _sort(chosen_NK)
    rows = rows_per_expert(x_Nd.shape[0], chosen_NK.shape[1], load_E.numel(), capacity)
    start_E = load_E.cumsum(0) - load_E
    within_EC = torch.arange(rows, device=x_Nd.device).expand(load_E.numel(), rows)
    filled_M = (within_EC < load_E[:, None]).flatten()
    pair_M = order_S.index_select(0, (start_E[:, None] + within_EC).flatten().clamp_max(order_S.numel() - 1))
    expert_S = chosen_NK.flatten()
    offset_S = place_S - start_E.index_select(0, expert_S)
    kept_S = offset_S < rows
    slot_S = expert_S * rows + offset_S.clamp_max(rows - 1)

    rows_ECd = rearrange(_repeat(x_Nd, chosen_NK), pair_M, filled_M, slot_S, kept_S).view(load_E.numel(), rows, -1)
    # Not baddbmm: on CUDA it first writes the bias to every row, and the product reads the bias again. Here the next
    # operation adds the bias.
    hidden_ECh = F.gelu(torch.bmm(rows_ECd, w[0].transpose(-2, -1)) + w[1][:, None])
    result_ECd = torch.bmm(hidden_ECh, w[2].transpose(-2, -1)) + w[3][:, None]
    return _combine(rearrange(result_ECd.flatten(0, 1), slot_S, kept_S, pair_M, filled_M), weights_NK)


def rows_per_expert(tokens: int, top_k: int, experts: int, capacity: float | None) -> int:
    """The number of rows C: the even share times `capacity`, but at most one row per token."""
    if capacity is None:
        return tokens
    return min(tokens, math.ceil(capacity * tokens * top_k / experts))


class _Rearrange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, there: Tensor, there_mask: Tensor | None, back: Tensor, back_mask: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(back, back_mask)
        return _gather(x, there, there_mask)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None, None]:
        return _gather(gradients[0], *ctx.saved_tensors), None, None, None, None


def rearrange(x: Tensor, there: Tensor, there_mask: Tensor | None, back: Tensor, back_mask: Tensor | None) -> Tensor:
    """`x[there]`, with zeros in rows where `there_mask` is False. The gradient is `g[back]`, with a mask in the same
    way: `back` must have the new place of each row of x, and `back_mask` whether the row has one.
    """
    y: Tensor = _Rearrange.apply(x, there, there_mask, back, back_mask)  # type: ignore[no-untyped-call]
    return y


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_Si: Tensor, w_Eoi: Tensor, b_Eo: Tensor, expert_S: Tensor, one_SE: Tensor, ends_E: Tensor
    ) -> Tensor:
        ctx.save_for_backward(x_Si, w_Eoi, one_SE, ends_E)
        return F.grouped_mm(x_Si, w_Eoi.mT, offs=ends_E) + b_Eo.index_select(0, expert_S)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None, None]:
        x_Si, w_Eoi, one_SE, ends_E = ctx.saved_tensors
        (g_So,) = gradients
        g_Eoi = F.grouped_mm(g_So.mT, x_Si, offs=ends_E)
        return F.grouped_mm(g_So, w_Eoi, offs=ends_E), g_Eoi, one_SE.mT @ g_So, None, None, None


def grouped_linear(
    x_Si: Tensor, w_Eoi: Tensor, b_Eo: Tensor, expert_S: Tensor, one_SE: Tensor, ends_E: Tensor
) -> Tensor:
    """Applies the Linear of its expert to each row. The rows are sorted by expert; the result is [S, o]. The bias is a
    gather, which the compiler fuses with the next operation; the bias's gradient is a product with `one_SE`, 1 at a
    row's expert, and so deterministic on every device. The function saves the weights as they are passed. The gradient
    of grouped_mm itself would save a view, of which inductor 2.13 makes a second copy with another dtype.
    """
    y: Tensor = _GroupedLinear.apply(x_Si, w_Eoi, b_Eo, expert_S, one_SE, ends_E)  # type: ignore[no-untyped-call]
    return y


def _gather(x: Tensor, index: Tensor, mask: Tensor | None) -> Tensor:
    rows = x.index_select(0, index)
    return rows if mask is None else rows.masked_fill(~mask[:, None], 0)


def _sort(chosen_NK: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The experts of the pairs in (stable) order, the numbers of these pairs, and the place of each pair in
    this order.
    """
    expert_S, order_S = chosen_NK.flatten().sort(stable=True)
    place_S = torch.empty_like(order_S).scatter_(0, order_S, torch.arange(order_S.numel(), device=order_S.device))
    return expert_S, order_S, place_S


def _repeat(x_Nd: Tensor, chosen_NK: Tensor) -> Tensor:
    """Each token's row, repeated for each of its choices: [S, d]."""
    return x_Nd[:, None].expand(-1, chosen_NK.shape[1], -1).flatten(0, 1)


def _combine(rows_Sd: Tensor, weights_NK: Tensor) -> Tensor:
    return (rows_Sd.view(*weights_NK.shape, -1) * weights_NK[..., None]).sum(1)
