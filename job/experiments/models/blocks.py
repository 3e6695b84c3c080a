"""The layers of the growth model. Legend: B batch, T sequence, N = B x T tokens, d width, H heads, D head_dim,
E experts, K experts per token.

- rotary positions are computed in forward, so there are no position parameters, and no tables that would lose precision
  when the dtype changes;
- a Linear or norm casts its weights to its input's dtype;
- the weights of a token's top-k experts are renormalised: they are the softmax over those k logits alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from gpufleet.job.experiments.models.config import CAPACITY, Shape
from gpufleet.job.experiments.models.routing import Routing, grouped_experts, padded_experts
from gpufleet.job.experiments.models.selective import keep_products

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}  # the dtypes by their names in run configs
NORM_EPS = 1e-5
ROTARY_BASE = 10_000.0
Dispatch = Literal["grouped", "padded"]


class Block(nn.Module):
    """A block with norms before its parts: y = x + attention(norm(x)), then y + ffn(norm(y)), or with experts instead
    of the FFN.
    """

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.checkpointing = False
        self.norm1 = Norm(s.width)
        self.attention = Attention(s)
        self.norm2 = Norm(s.width)
        self.ffn: Experts | FeedForward = Experts(s) if s.experts else FeedForward(s)

    def forward(self, x_BTd: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Routing | None]:
        if self.checkpointing and self.training:
            result: tuple[Tensor, Routing | None] = checkpoint(
                self._run, x_BTd, cos_TD, sin_TD, use_reentrant=False, context_fn=keep_products
            )
            return result
        return self._run(x_BTd, cos_TD, sin_TD)

    def _run(self, x_BTd: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> tuple[Tensor, Routing | None]:
        x_BTd = x_BTd + self.attention(self.norm1(x_BTd), cos_TD, sin_TD)
        y_BTd, routing = self.ffn(self.norm2(x_BTd))
        return x_BTd + y_BTd, routing


class Attention(nn.Module):
    """Causal self-attention; q, k, v and o are separate parameters."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.heads = s.heads
        self.q, self.k, self.v, self.o = (Linear(s.width, s.width) for _ in range(4))

    def forward(self, x_BTd: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        product = fused_linear(x_BTd, self.q, self.k, self.v).unflatten(-1, (3 * self.heads, -1))
        # The rotation comes before heads and positions are transposed. So the result of the attention has the layout
        # that o needs, without a copy.
        qk, v = product.split((2 * self.heads, self.heads), dim=2)
        q, k = rotate(qk, cos_TD[:, None], sin_TD[:, None]).chunk(2, dim=2)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        y_BTd: Tensor = self.o(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTd


class FeedForward(nn.Module):
    """Two Linear layers around GELU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.up, self.down = Linear(s.width, s.ffn), Linear(s.ffn, s.width)

    def forward(self, x_BTd: Tensor) -> tuple[Tensor, None]:
        return self.down(F.gelu(self.up(x_BTd))), None


class Experts(nn.Module):
    """A top-k mixture: the FFN of a token is the renormalised sum of the k experts that are chosen for it."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.top_k = s.top_k
        self.dispatch: Dispatch = "grouped"
        self.capacity = CAPACITY
        self.router = Linear(s.width, s.experts, bias=False)
        self.up, self.down = Stacked(s.experts, s.width, s.ffn), Stacked(s.experts, s.ffn, s.width)

    def forward(self, x_BTd: Tensor) -> tuple[Tensor, Routing]:
        x_Nd = x_BTd.flatten(0, 1)
        logits_NE = self.router(x_Nd.to(at_least_fp32(x_Nd.dtype)))
        top_NK, chosen_NK = logits_NE.topk(self.top_k, dim=-1)
        weights_NK = top_NK.softmax(-1).to(x_Nd.dtype)
        routing = Routing.from_logits(logits_NE, chosen_NK)
        weights = [p.to(x_Nd.dtype) for p in (self.up.weight, self.up.bias, self.down.weight, self.down.bias)]
        # Evaluation never drops tokens, and grouped_mm takes bf16 (on the CPU also fp32) and rows of whole 16 bytes
        # (torch 2.13). If grouped_mm cannot be used and nothing may be dropped, the padded product has a row for every
        # token.
        narrow = x_Nd.dtype == torch.bfloat16 or (x_Nd.dtype == torch.float32 and x_Nd.device.type == "cpu")
        whole = not any(size * x_Nd.element_size() % 16 for size in self.up.weight.shape[1:])
        if self.dispatch == "grouped" and narrow and whole:
            y_Nd = grouped_experts(x_Nd, weights_NK, chosen_NK, routing.load, weights)
        else:
            capacity = self.capacity if self.training and self.dispatch == "padded" else None
            y_Nd = padded_experts(x_Nd, weights_NK, chosen_NK, routing.load, weights, capacity)
        return y_Nd.view_as(x_BTd), routing


class Linear(nn.Linear):
    """A Linear whose weights are cast to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias)


def fused_linear(x: Tensor, *layers: Linear) -> Tensor:
    """The results of several layers for the same x, one after the other in one tensor. All results are computed by one
    product, so that fewer kernels are launched.
    """
    weight, bias = (torch.cat([getattr(layer, name) for layer in layers]) for name in ("weight", "bias"))
    return F.linear(x, weight.to(x.dtype), bias.to(x.dtype))


class Stacked(nn.Module):
    """One Linear per expert, stacked: weight [E, out, in], bias [E, out]. The module only holds the parameters."""

    def __init__(self, experts: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(experts, outputs, inputs))
        self.bias = nn.Parameter(torch.empty(experts, outputs))


class Norm(nn.LayerNorm):
    """LayerNorm with bias, weights cast to the input's dtype (statistics are fp32 inside the kernel)."""

    def __init__(self, width: int) -> None:
        super().__init__(width, eps=NORM_EPS)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.bias.to(x.dtype), self.eps)


def rotations(sequence: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """The arguments of `rotate`, [T, D] each, for positions from 0 on, on `like`'s device."""
    frequency = ROTARY_BASE ** (-torch.arange(0, head_dim, 2, device=like.device, dtype=torch.float64) / head_dim)
    return turns(torch.outer(torch.arange(sequence, device=like.device, dtype=torch.float64), frequency), like.dtype)


def turns(angle: Tensor, compute: torch.dtype) -> tuple[Tensor, Tensor]:
    """cos and sin of rotary angles. The angles are fp64 [.., D / 2], and the results fp32 or wider [.., D]. sin is
    negative in the left half.
    """
    wide = at_least_fp32(compute)
    cos, sin = angle.cos().to(wide), angle.sin().to(wide)
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x_D: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
    """x with rotary positions along the last dimension: elements i and i + D/2 are rotated together, with cos and sin
    from `turns`. The computation is in cos's dtype, the result in x's dtype.
    """
    if torch.compiler.is_compiling():  # when this is compiled, the steps of autograd become one kernel too
        return _turned(x_D, cos_D, sin_D)
    turned: Tensor = _Rotation.apply(x_D, cos_D, sin_D)  # type: ignore[no-untyped-call]
    return turned


class _Rotation(torch.autograd.Function):
    """A rotation, whose gradient is the inverse rotation. The rotation needs five kernels in each direction; with plain
    autograd it would be twenty.
    """

    @staticmethod
    def forward(ctx: Any, x_D: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
        ctx.save_for_backward(cos_D, sin_D)
        return _turned(x_D, cos_D, sin_D)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope_D: Tensor) -> tuple[Tensor, None, None]:
        cos_D, sin_D = ctx.saved_tensors
        return (slope_D * cos_D).sub_(_halves_swapped(slope_D) * sin_D).to(slope_D.dtype), None, None


def _turned(x_D: Tensor, cos_D: Tensor, sin_D: Tensor) -> Tensor:
    return (x_D * cos_D).add_(_halves_swapped(x_D) * sin_D).to(x_D.dtype)


def _halves_swapped(x_D: Tensor) -> Tensor:
    return x_D.roll(x_D.shape[-1] // 2, -1)


class _Generating:
    """Counts nested uses of the switch and stores its earlier value, because the switch is global for the process, and
    a server generates in several threads.
    """

    def __init__(self) -> None:
        self.lock, self.count, self.before = threading.Lock(), 0, True


_generating = _Generating()


@contextmanager
def any_length() -> Iterator[None]:
    """A context in which attention accepts every length without making a new plan. Generation needs this, because the
    number of keys grows with each token.

    On Hopper torch prefers cuDNN's kernels, which are faster in training but build a plan for each new shape: 0.4 s
    (torch 2.11 on a B200, modelscope/FunASR issue 3704, 2026-09; torch 2.13 itself reports that it prefers these
    kernels).
    """
    cuda: Any = torch.backends.cuda
    with _generating.lock:
        if not _generating.count:
            _generating.before = cuda.cudnn_sdp_enabled()
            cuda.enable_cudnn_sdp(False)
        _generating.count += 1
    try:
        yield
    finally:
        with _generating.lock:
            _generating.count -= 1
            if not _generating.count:
                cuda.enable_cudnn_sdp(_generating.before)


def at_least_fp32(dtype: torch.dtype) -> torch.dtype:
    """The dtype itself if it is fp64; fp32 for every narrower one."""
    return torch.promote_types(dtype, torch.float32)
