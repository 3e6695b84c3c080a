"""Llama-, Qwen2- and Qwen3-class causal decoders: what sft-h100 and kernel-sft fine-tune.

Unusual here:
- rows are packed: several examples lie in one row, and `documents` says to which example each token belongs. No example
  attends to another, and positions restart in each example (block-diagonal causal attention: a mask, or torch's varlen
  kernel on CUDA in bf16);
- the loss never holds the logits of the whole batch (linear_loss.py);
- each product casts its own weight to the activations' dtype: weights may be wider (fp32 master weights) or narrower
  (a frozen bf16 base computed in fp32). There is no autocast, and there are no buffers.

The module knows nothing of training, adapters (lora.py) or files (hf.py). Legend: R rows, T tokens of a row, N = R x T,
S tokens attended to, H heads, D head_dim, d width, V vocabulary.

| parameter                                      | initialisation                  | group    |
| ---------------------------------------------- | ------------------------------- | -------- |
| embed.weight, head.weight (absent when tied)   | normal, 0.02                    | no decay |
| q, k, v, gate, up weights                      | normal, 0.02                    | decay    |
| o, down weights (write to the residual stream) | normal, 0.02 / sqrt(2 x layers) | decay    |
| q, k, v biases (qwen2)                         | 0                               | no decay |
| norm weights                                   | 1                               | no decay |
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import varlen
from torch.utils.checkpoint import checkpoint, noop_context_fn

from gpufleet.job.experiments.models.blocks import Linear, rotate, turns
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.hf_config import LLAMA3_CONTEXT, LLAMA3_FACTOR, LLAMA3_HIGH, LLAMA3_LOW
from gpufleet.job.experiments.models.linear_loss import chunk_loss, linear_loss
from gpufleet.job.experiments.models.selective import Checkpointed, keep_products

INIT_STD = 0.02


class DecoderOutput(NamedTuple):
    """The result of a forward pass."""

    # [R, T, V] in the compute dtype, only without targets; with a cache [R, 1, V], of the last token
    logits: Tensor | None
    loss_sum: Tensor | None  # scalar, fp32 or wider: cross-entropy, summed over all targets that are not ignored
    aux_loss: Tensor | None
    aux: dict[str, Tensor]


class Layout(NamedTuple):
    """The position of each token, and the tokens to which it may attend. This object is the same for every block."""

    cos: Tensor  # cosines of the rotary positions, [R, T, 1, D / 2]
    sin: Tensor
    # [R, 1, T, S], True = attends; if it and `starts` are None, attention is causal over the whole row
    mask: Tensor | None
    starts: Tensor | None  # [K] int32, for the varlen kernel: the first token of each example in the flat batch, then N
    longest: int  # the largest number of tokens between two starts


class Cache:
    """Keys and values of the tokens read so far, with room for `length` tokens of each row."""

    def __init__(self, module: Decoder, rows: int, length: int) -> None:
        weight, s = module.embed.weight, module.shape
        size = (s.layers, rows, length, s.kv_heads, s.head_dim)
        self.keys, self.values = (torch.zeros(size, dtype=module.compute_dtype, device=weight.device) for _ in "kv")
        self.at = 0

    def append(self, layer: int, k_RTHD: Tensor, v_RTHD: Tensor) -> tuple[Tensor, Tensor]:
        """Stores a layer's new keys and values at `at`. Returns all keys and values of this layer so far, [R,
        S, H, D].
        """
        end = self.at + k_RTHD.shape[1]
        self.keys[layer, :, self.at : end] = k_RTHD
        self.values[layer, :, self.at : end] = v_RTHD
        return self.keys[layer, :, :end], self.values[layer, :, :end]


def build(
    shape: Shape,
    *,
    compute: torch.dtype,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    generator: torch.Generator | None = None,
) -> Decoder:
    """A model with parameters of `dtype`. If there is a `generator` (on the CPU), the parameters are initialised with
    its numbers, which are the same on every device; otherwise their memory is uninitialised. On the device "meta", no
    memory is allocated. Raises ValueError.
    """
    with torch.device("meta"):
        module = Decoder(shape, compute).to(dtype)
    if torch.device(device).type != "meta":
        module = module.to_empty(device=device)
        if generator is not None:
            initialise(module, generator)
    return module


@torch.no_grad()
def initialise(
    module: Decoder, generator: torch.Generator, fill: Callable[[Tensor, Tensor], object] = Tensor.copy_
) -> None:
    """Fills the parameters as the table at the top of this file says, with random numbers that are made on the CPU in
    fp32. `fill` writes a whole tensor into a parameter. The parameters of adapters stay unchanged.
    """
    for name, parameter in module.named_parameters():
        if not name.endswith(("weight", "bias")):
            continue
        whole = torch.zeros(parameter.shape)
        if "norm" in name:
            whole.fill_(1.0)
        elif not name.endswith("bias"):
            residual = name.endswith(("o.weight", "down.weight"))
            std = INIT_STD / math.sqrt(2 * module.shape.layers) if residual else INIT_STD
            whole.normal_(0.0, std, generator=generator)
        fill(parameter, whole)


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter: to the matrices of the blocks."""
    return "blocks." in name and name.endswith("weight") and "norm" not in name


class Decoder(Checkpointed):
    """The whole model. `compute_dtype` and `checkpointing` may be changed at any time."""

    def __init__(self, shape: Shape, compute: torch.dtype) -> None:
        super().__init__()
        if shape.heads % shape.kv_heads:
            raise ValueError(
                f"model.kv_heads: {shape.kv_heads} does not divide model.heads, {shape.heads}; each key-value head "
                "serves the same number of query heads"
            )
        if shape.head_dim % 2:
            raise ValueError(f"model.head_dim: {shape.head_dim} is odd; rotary positions turn pairs of dimensions")
        self.shape, self.compute_dtype = shape, compute
        self.embed = Table(shape.vocab, shape.width)
        self.blocks = nn.ModuleList(DecoderBlock(shape, layer) for layer in range(shape.layers))
        self.norm = DecoderNorm(shape.width, shape.norm_eps)
        self.head = None if shape.tied else Table(shape.vocab, shape.width)

    def forward(
        self,
        tokens_RT: Tensor,
        targets_RT: Tensor | None = None,
        documents_RT: Tensor | None = None,
        starts_K: Tensor | None = None,
        longest: int | None = None,
        *,
        cache: Cache | None = None,
        padding_R: Tensor | None = None,
    ) -> DecoderOutput:
        """Logits if there are no targets, otherwise the summed loss (targets that are IGNORED, -100, are not included).
        `documents`: the number of each token's example in its row; None if each row is one example. `starts`: the first
        positions of the examples in the flat batch, [K] int32. The last entries are N, so that K stays constant. Two
        neighbouring entries are at most `longest` apart (a row, if it is None). If there are `starts`, the varlen
        kernel is used on CUDA in bf16; otherwise a mask is used. If there is a `cache`, the tokens follow the cached
        tokens, of which the first `padding` are only padding; the new tokens are added to the cache.
        """
        x_RTd = self.embed(tokens_RT).to(self.compute_dtype)
        if cache is None:
            layout = self._packed(tokens_RT, documents_RT, starts_K, longest)
        else:
            layout = self._continued(tokens_RT, cache, padding_R)
        for block in self.blocks:
            x_RTd = block(x_RTd, layout, cache)
        if cache is not None:
            cache.at += tokens_RT.shape[1]
            x_RTd = x_RTd[:, -1:]
        x_RTd = self.norm(x_RTd)
        weight_Vd = (self.embed if self.head is None else self.head).rows(x_RTd.dtype)
        if targets_RT is None:
            return DecoderOutput(F.linear(x_RTd, weight_Vd), None, None, {})
        loss_sum = linear_loss(x_RTd.flatten(0, 1), weight_Vd, targets_RT.flatten(), self.loss)
        return DecoderOutput(None, loss_sum, None, {})

    def loss(self, logits_CV: Tensor, targets_C: Tensor, grad: bool) -> tuple[Tensor, Tensor | None]:
        """`chunk_loss` as a method, so that a trainer can compile it."""
        return chunk_loss(logits_CV, targets_C, grad)

    def _packed(
        self, tokens_RT: Tensor, documents_RT: Tensor | None, starts_K: Tensor | None, longest: int | None
    ) -> Layout:
        length = tokens_RT.shape[1]
        places_T = torch.arange(length, device=tokens_RT.device)
        if documents_RT is None:
            return Layout(*self._turns(places_T[None]), None, None, length)
        cos, sin = self._turns(positions(documents_RT))
        if starts_K is not None and varlen_runs(tokens_RT.device, self.compute_dtype):
            return Layout(cos, sin, None, starts_K, length if longest is None else longest)
        same_RTT = documents_RT[:, :, None] == documents_RT[:, None, :]
        mask_RTT = same_RTT & (places_T[:, None] >= places_T[None, :])
        return Layout(cos, sin, mask_RTT[:, None], None, length)

    def _continued(self, tokens_RT: Tensor, cache: Cache, padding_R: Tensor | None) -> Layout:
        """The layout of tokens after cached ones. A padding token attends to itself, because a softmax needs at least
        one number.
        """
        end = cache.at + tokens_RT.shape[1]
        own_T = torch.arange(cache.at, end, device=tokens_RT.device)
        padding_R1 = torch.zeros_like(tokens_RT[:, :1]) if padding_R is None else padding_R[:, None]
        seen_S = torch.arange(end, device=tokens_RT.device)
        before_TS = seen_S[None, :] <= own_T[:, None]
        mask_RTS = before_TS[None] & (seen_S >= padding_R1)[:, None, :]
        mask_RTS = mask_RTS | (seen_S[None, :] == own_T[:, None])[None]
        return Layout(*self._turns((own_T[None] - padding_R1).clamp(min=0)), mask_RTS[:, None], None, end)

    def _turns(self, positions_RT: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [R, T, 1, D / 2], fp32 or wider."""
        angle = positions_RT[..., None, None].to(torch.float64) * frequencies(self.shape, positions_RT.device)
        return turns(angle, self.compute_dtype)


class Table(nn.Embedding):
    """A table with a row for each id: the embedding of its token, or the vector whose product with the last activations
    is its logit.
    """

    def rows(self, dtype: torch.dtype) -> Tensor:
        """All rows, [V, d]."""
        return self.weight.to(dtype)


class DecoderBlock(nn.Module):
    """A block with norms before its parts: y = x + attention(norm1(x)), then y + ffn(norm2(y))."""

    def __init__(self, s: Shape, layer: int) -> None:
        super().__init__()
        self.checkpointing = self.products_too = False
        self.norm1, self.norm2 = DecoderNorm(s.width, s.norm_eps), DecoderNorm(s.width, s.norm_eps)
        self.attention, self.ffn = DecoderAttention(s, layer), DecoderFeedForward(s)

    def forward(self, x_RTd: Tensor, layout: Layout, cache: Cache | None = None) -> Tensor:
        if self.checkpointing and self.training:
            context = noop_context_fn if self.products_too else keep_products
            result: Tensor = checkpoint(self._run, x_RTd, layout, cache, use_reentrant=False, context_fn=context)
            return result
        return self._run(x_RTd, layout, cache)

    def _run(self, x_RTd: Tensor, layout: Layout, cache: Cache | None) -> Tensor:
        x_RTd = x_RTd + self.attention(self.norm1(x_RTd), layout, cache)
        y_RTd: Tensor = self.ffn(self.norm2(x_RTd))
        return x_RTd + y_RTd


class DecoderAttention(nn.Module):
    """Grouped-query attention with rotary positions; biases on q, k, v for qwen2, a norm of each head for qwen3."""

    def __init__(self, s: Shape, layer: int) -> None:
        super().__init__()
        self.layer, self.head_dim, self.group = layer, s.head_dim, s.heads // s.kv_heads
        biased = s.family == "qwen2"
        self.q = Linear(s.width, s.heads * s.head_dim, bias=biased)
        self.k = Linear(s.width, s.kv_heads * s.head_dim, bias=biased)
        self.v = Linear(s.width, s.kv_heads * s.head_dim, bias=biased)
        self.o = Linear(s.heads * s.head_dim, s.width, bias=False)
        self.q_norm = DecoderNorm(s.head_dim, s.norm_eps) if s.family == "qwen3" else None
        self.k_norm = DecoderNorm(s.head_dim, s.norm_eps) if s.family == "qwen3" else None

    def forward(self, x_RTd: Tensor, layout: Layout, cache: Cache | None = None) -> Tensor:
        q, k, v = (product(x_RTd).unflatten(-1, (-1, self.head_dim)) for product in (self.q, self.k, self.v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = rotate(q, layout.cos, layout.sin), rotate(k, layout.cos, layout.sin)
        if cache is not None:
            k, v = cache.append(self.layer, k, v)
        y_RTd: Tensor = self.o(self._attend(q, k, v, layout).flatten(2))
        return y_RTd

    def _attend(self, q_RTHD: Tensor, k_RSHD: Tensor, v_RSHD: Tensor, layout: Layout) -> Tensor:
        """[R, T, H, D]."""
        if layout.starts is not None:
            q, k, v = (x.flatten(0, 1) for x in (q_RTHD, k_RSHD, v_RSHD))
            starts, longest = layout.starts, layout.longest
            packed = varlen.varlen_attn(q, k, v, starts, starts, longest, longest, window_size=(-1, 0), **GROUPS)
            assert isinstance(packed, Tensor)
            return packed.view_as(q_RTHD)
        q, k, v = (x.transpose(1, 2) for x in (q_RTHD, k_RSHD, v_RSHD))
        # In decoding, the heads of a group are treated as queries.
        if self.group > 1 and q.shape[2] == 1 and layout.mask is not None:
            grouped = q.view(len(q), k.shape[1], self.group, self.head_dim)
            y = F.scaled_dot_product_attention(grouped, k, v, attn_mask=layout.mask)
            # on CUDA, the heads may be the innermost dimension of the result
            return y.reshape(len(q), 1, -1, self.head_dim)
        if self.group > 1:  # kernels that accept a mask do not accept groups
            k, v = k.repeat_interleave(self.group, dim=1), v.repeat_interleave(self.group, dim=1)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=layout.mask, is_causal=layout.mask is None)
        return y.transpose(1, 2)


class DecoderFeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, s: Shape) -> None:
        super().__init__()
        self.gate, self.up = Linear(s.width, s.ffn, bias=False), Linear(s.width, s.ffn, bias=False)
        self.down = Linear(s.ffn, s.width, bias=False)

    def forward(self, x_RTd: Tensor) -> Tensor:
        y_RTd: Tensor = self.down(F.silu(self.gate(x_RTd)) * self.up(x_RTd))
        return y_RTd


class DecoderNorm(nn.RMSNorm):
    """RMSNorm, weight cast to the input's dtype (statistics are fp32 inside)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


def varlen_runs(device: torch.device, compute: torch.dtype) -> bool:
    """Whether torch has a varlen attention kernel there: CUDA from sm_80, in 16 bits (torch 2.13)."""
    return device.type == "cuda" and compute == torch.bfloat16


def groups(kernel: Callable[..., Any]) -> dict[str, Any]:
    """The arguments that tell varlen attention of the installed torch that several queries share one key head. torch
    2.11 has no such argument and needs none.
    """
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(kernel).parameters else {}


GROUPS = groups(varlen.varlen_attn)


def positions(documents_RT: Tensor) -> Tensor:
    """[R, T] int64: the place of each token in its example. The tokens of an example are adjacent."""
    places_RT = torch.arange(documents_RT.shape[1], device=documents_RT.device).expand_as(documents_RT)
    begins_RT = F.pad(documents_RT[:, 1:] != documents_RT[:, :-1], (1, 0), value=True)
    return places_RT - torch.where(begins_RT, places_RT, 0).cummax(dim=1).values


def frequencies(shape: Shape, device: torch.device | str = "cpu") -> Tensor:
    """[D / 2] fp64, radians per position. Llama-3.1 divides slow frequencies by 8 and blends those in between."""
    pairs = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float64)
    frequency = shape.rope_theta ** (-pairs / shape.head_dim)
    if shape.rope_scaling == "none":
        return frequency
    # Rotations within the context length with which the weights were first trained.
    turns = LLAMA3_CONTEXT * frequency / (2 * math.pi)
    blend = ((turns - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW)).clamp(0.0, 1.0)
    return frequency * (blend + (1 - blend) / LLAMA3_FACTOR)
