"""The model of pretrain-d64: a character-level GPT that is deep rather than wide.

Unusual here:
- RMSNorm without gain, before each half of a block, after the embedding, before the head, and on q and k per head;
- feed-forward of 4 x width with the square of ReLU; no biases anywhere; embedding and head are two tables;
- logits in fp32, soft-capped: cap x tanh(logits / cap);
- dropout, if any, on what each half of a block adds;
- generation keeps keys and values (`Cache`) and never yields an id that is no symbol.

The module knows nothing of training. Legend: B batch, T sequence, S positions seen so far, V vocabulary, L layers, d
width, H heads, K key and value heads, D head_dim. The parameters are in this order in the state dict;
initialisation as in nanochat (gpt.py, read 2026-11-21), because the learning rates are those of a fork of nanochat:

| parameter                                         | initialisation     | optimizer |
| ------------------------------------------------- | ------------------ | --------- |
| embed.weight [V, d]                               | normal, 1          | AdamW     |
| blocks.*.attention.{q,k,v}.weight                 | normal, see `std`  | Muon      |
| blocks.*.ffn.up.weight [4d, d]                    | normal, 1/sqrt(d)  | Muon      |
| blocks.*.attention.o.weight, blocks.*.ffn.down    | 0                  | Muon      |
| head.weight [V, d]                                | 0                  | AdamW     |
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gpufleet.job.experiments.models.blocks import Linear, any_length, at_least_fp32, rotate, rotations
from gpufleet.job.experiments.models.selective import Checkpointed, keep_products
from gpufleet.job.experiments.pretrain.spec import CharModel


class CharOutput(NamedTuple):
    """The result of a forward pass. The trainer divides `loss_sum` by the characters of the whole global batch."""

    logits: Tensor | None  # [B, T, V], fp32 or wider; only without targets
    loss_sum: Tensor | None  # scalar, fp32 or wider: cross-entropy summed over characters; only with targets
    aux: dict[str, Tensor]  # empty, because this model has no metric values to log
    aux_loss: Tensor | None  # always None


class CharCache:
    """Keys and values of earlier positions, for generation: one pair [B, K, capacity, D] per layer, and the number of
    filled positions. The caller must not append beyond the capacity.
    """

    mask = None  # a single position attends to all keys

    def __init__(self, capacity: int, layers: dict[int, tuple[Tensor, Tensor]] | None = None) -> None:
        """`layers`: the memory for keys and values; if None, it is allocated when the first positions come."""
        self.capacity, self.length = capacity, 0
        self._layers = layers or {}

    def turns(self, count: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [T, D] of the next `count` positions."""
        cos, sin = rotations(self.length + count, head_dim, like)
        return cos[self.length :], sin[self.length :]

    def advance(self, count: int) -> None:
        """Adds `count` to the length, after every layer has appended that many positions."""
        self.length += count

    def append(self, layer: int, k_BKTD: Tensor, v_BKTD: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a layer's new positions; returns keys and values of all the layer's positions, [B, K, S, D] each."""
        end = self.length + k_BKTD.shape[2]
        assert end <= self.capacity, (end, self.capacity)
        if layer not in self._layers:
            b, k, _, d = k_BKTD.shape
            self._layers[layer] = k_BKTD.new_empty(b, k, self.capacity, d), v_BKTD.new_empty(b, k, self.capacity, d)
        for stored, new in zip(self._layers[layer], (k_BKTD, v_BKTD), strict=True):
            stored[:, :, self.length : end] = new
        keys, values = self._layers[layer]
        return keys[:, :, :end], values[:, :, :end]


class CharRows:
    """The cache of a fixed number of texts that are written together, one position of each text per step. Each layer
    has [B, K, window, D], allocated once. Each row has its own length. Shapes rarely change, so that a text does not
    depend on the other texts in any bit.
    """

    STEP = 256  # positions are read in multiples of this number, up to the longest row

    def __init__(self, module: CharGpt, rows: int, window: int) -> None:
        model, like = module.model, module.embed.weight.new_empty(0, dtype=module.compute_dtype)
        heads = model.kv_heads or model.width // model.head_dim
        room = (model.layers, 2, rows, heads, window, model.head_dim)
        self.window, self._kept = window, like.new_zeros(room)
        self._cos_TD, self._sin_TD = rotations(window, model.head_dim, like)
        self._place_T = torch.arange(window, device=like.device)
        self._row_B = torch.arange(rows, device=like.device)
        self.length = 1  # the length is only used after `row` has begun a text

    def row(self, number: int) -> CharCache:
        """One row as the empty cache of a text. The prompt is read into it."""
        layers = [(keys[number, None], values[number, None]) for keys, values in self._kept]
        return CharCache(self.window, dict(enumerate(layers)))

    def place(self, lengths: Sequence[int]) -> None:
        """Sets how many positions each row has. This method must be called before the next position of each row is
        read.
        """
        self._length_B = torch.tensor(lengths, device=self._kept.device)
        self._span = min(self.window, -(-(max(lengths) + 1) // self.STEP) * self.STEP)
        self.mask = (self._place_T[: self._span] <= self._length_B[:, None])[:, None, None]

    def turns(self, count: int, head_dim: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, 1, P] of the next position of each row."""
        return self._cos_TD[self._length_B, None], self._sin_TD[self._length_B, None]

    def append(self, layer: int, k_BK1D: Tensor, v_BK1D: Tensor) -> tuple[Tensor, Tensor]:
        """Appends a position to each row; returns the layer's keys and values up to the longest row, [B, K, S, D]."""
        for stored, new in zip(self._kept[layer], (k_BK1D, v_BK1D), strict=True):
            stored[self._row_B, :, self._length_B] = new[:, :, 0]
        keys, values = self._kept[layer]
        return keys[:, :, : self._span], values[:, :, : self._span]

    def advance(self, count: int) -> None:
        """Does nothing: `place` sets the positions before the next one is read."""


Kept = CharCache | CharRows


class CharAttention(nn.Module):
    """Causal self-attention with normed q and k; several q heads may share one k and v head."""

    def __init__(self, model: CharModel, index: int) -> None:
        super().__init__()
        self.index, self.head_dim = index, model.head_dim
        shared = (model.kv_heads or model.width // model.head_dim) * model.head_dim
        self.q, self.o = Linear(model.width, model.width, bias=False), Linear(model.width, model.width, bias=False)
        self.k, self.v = Linear(model.width, shared, bias=False), Linear(model.width, shared, bias=False)

    def forward(self, x_BTd: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: Kept | None) -> Tensor:
        q, k, v = (p(x_BTd).unflatten(-1, (-1, self.head_dim)) for p in (self.q, self.k, self.v))
        # The rotation comes before heads and positions are transposed. So the result of the attention has the layout
        # that o needs, without a copy.
        cos_T1D, sin_T1D = cos_TD[..., None, :], sin_TD[..., None, :]
        q, k = rotate(norm(q), cos_T1D, sin_T1D), rotate(norm(k), cos_T1D, sin_T1D)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        seen = 0
        if cache is not None:
            seen = cache.length
            k, v = cache.append(self.index, k, v)
        gqa = k.shape[1] != q.shape[1]
        if seen == 0:
            y_BHTD = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa)
        else:
            assert q.shape[2] == 1, "after cached positions, only one position at a time"
            assert cache is not None
            y_BHTD = F.scaled_dot_product_attention(q, k, v, attn_mask=cache.mask, enable_gqa=gqa)
        y_BTd: Tensor = self.o(y_BHTD.transpose(1, 2).flatten(2))
        return y_BTd


class CharFeedForward(nn.Module):
    """Two Linear layers around ReLU squared."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = Linear(width, 4 * width, bias=False), Linear(4 * width, width, bias=False)

    def forward(self, x_BTd: Tensor) -> Tensor:
        y_BTd: Tensor = self.down(F.relu(self.up(x_BTd)).square())
        return y_BTd


class CharBlock(nn.Module):
    """A block with norms before its parts: y = x + attention(norm(x)), then y + feed_forward(norm(y))."""

    def __init__(self, model: CharModel, index: int) -> None:
        super().__init__()
        self.checkpointing = False
        self.attention, self.ffn = CharAttention(model, index), CharFeedForward(model.width)
        self.dropout = model.dropout

    def forward(self, x_BTd: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: Kept | None = None) -> Tensor:
        if self.checkpointing and self.training:
            result: Tensor = checkpoint(
                self._run, x_BTd, cos_TD, sin_TD, cache, use_reentrant=False, context_fn=keep_products
            )
            return result
        return self._run(x_BTd, cos_TD, sin_TD, cache)

    def _run(self, x_BTd: Tensor, cos_TD: Tensor, sin_TD: Tensor, cache: Kept | None) -> Tensor:
        x_BTd = x_BTd + self._dropped(self.attention(norm(x_BTd), cos_TD, sin_TD, cache))
        x_BTd = x_BTd + self._dropped(self.ffn(norm(x_BTd)))
        return x_BTd

    def _dropped(self, x_BTd: Tensor) -> Tensor:
        return F.dropout(x_BTd, self.dropout) if self.dropout and self.training else x_BTd


class CharGpt(Checkpointed):
    """The whole model. Raises ValueError for an impossible shape."""

    def __init__(self, model: CharModel, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        heads, rest = divmod(model.width, model.head_dim)
        if rest or model.head_dim % 2 or heads % (model.kv_heads or heads):
            raise ValueError(
                f"model: width {model.width}, head_dim {model.head_dim}, kv_heads {model.kv_heads}: the width must be "
                "a multiple of an even head_dim, and the heads (width / head_dim) a multiple of kv_heads"
            )
        self.model, self.compute_dtype = model, compute_dtype
        self.embed = nn.Embedding(model.vocab, model.width)
        self.blocks = nn.ModuleList(CharBlock(model, index) for index in range(model.layers))
        self.head = Linear(model.width, model.vocab, bias=False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None, cache: Kept | None = None) -> CharOutput:
        """Logits if there are no targets, otherwise the summed loss (targets of -100 are ignored). Tokens and targets
        are int64. With a cache the tokens follow the cached tokens.
        """
        x_BTd = norm(self.embed(tokens_BT).to(self.compute_dtype))
        turns, count = rotations if cache is None else cache.turns, tokens_BT.shape[1]
        cos, sin = turns(count, self.model.head_dim, x_BTd)
        for block in self.blocks:
            x_BTd = block(x_BTd, cos, sin, cache)
        if cache is not None:
            cache.advance(count)
        logits_BTV = self.head(norm(x_BTd))
        if targets_BT is None:
            return CharOutput(self._capped(logits_BTV), None, {}, None)
        return CharOutput(None, self.loss(logits_BTV.flatten(0, 1), targets_BT.flatten()), {}, None)

    def loss(self, logits_NV: Tensor, targets_N: Tensor) -> Tensor:
        """The summed cross-entropy, as a method that a trainer can compile: if it is not compiled, the logits are in
        memory four times in fp32; if it is compiled, only once in the dtype of the product, with their gradient.
        """
        return F.cross_entropy(self._capped(logits_NV), targets_N, reduction="sum")

    def _capped(self, logits: Tensor) -> Tensor:
        wide, cap = logits.to(at_least_fp32(logits.dtype)), self.model.logit_cap
        return cap * torch.tanh(wide / cap) if cap else wide


def norm(x: Tensor) -> Tensor:
    """RMSNorm over the last dimension, without gain; statistics in fp32 inside the kernel."""
    return F.rms_norm(x, (x.shape[-1],))


def std(name: str, shape: tuple[int, ...]) -> float:
    """The standard deviation of a parameter's initial values, by its name in the state dict and its shape [out, in]; 0
    if they are zeros.
    """
    if name == "embed.weight":
        return 1.0
    if name == "head.weight" or name.endswith(("o.weight", "down.weight")):
        return 0.0
    rows, columns = shape
    return float(columns**-0.5 * min(1.0, (rows / columns) ** 0.5))


def initial(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """A parameter's first values, fp32 on the CPU: a function of (seed, name, shape), so that every rank can compute
    any parameter without the others.
    """
    deviation = std(name, shape)
    if not deviation:
        return torch.zeros(shape)
    digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    return torch.empty(shape).normal_(0.0, deviation, generator=generator)


class Text:
    """A text that is being generated: its ids so far, and the ids that the model must read before it can choose the
    next one.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        *,
        allowed: int,
        max_tokens: int,
        window: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        seed: int | None = None,
        stop: Sequence[int] = (),
    ) -> None:
        """Continues `prompt` (1 to `window` ids) with ids below `allowed`, and ends after an id of `stop`.

        With temperature 0, each id is the likeliest one, and no seed is needed; otherwise the same seed gives the same
        ids on the same machine. When all `window` positions, the trained length, are used, the second half of them is
        read again.
        """
        assert 0 < len(prompt) <= window, (len(prompt), window)
        self.allowed, self.window, self.left = allowed, window, max_tokens
        self._temperature, self._top_k, self._ends = temperature, top_k, set(stop)
        self._generator = torch.Generator()
        if seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(seed)
        self._ids = list(prompt)
        self.new, self.length = self._ids, 0  # the ids to read next, and the number of ids in the cache before them

    def take(self, logits_V: Tensor) -> int:
        """Chooses the next id from the logits after the ids that were read."""
        chosen = _choose(logits_V[: self.allowed].float().cpu(), self._temperature, self._top_k, self._generator)
        self.length += len(self.new)
        self._ids.append(chosen)
        self.new, self.left = [chosen], 0 if chosen in self._ends else self.left - 1
        if self.length + 1 > self.window:
            self.new, self.length = self._ids[-max(1, self.window // 2) :], 0
        return chosen


@torch.no_grad()
def generate(module: CharGpt, text: Text) -> Iterator[int]:
    device = module.embed.weight.device
    room = min(text.window, len(text.new) + text.left)  # 1 MB a position at full size
    while text.left:
        if not text.length:
            cache, room = CharCache(room), text.window
        with any_length():
            logits = module(torch.tensor([text.new], device=device), cache=cache).logits[0, -1]
        yield text.take(logits)


def _choose(logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> int:
    if temperature == 0:
        return int(logits_V.argmax())
    if top_k is not None and top_k < len(logits_V):
        least = logits_V.topk(top_k).values[-1]
        logits_V = logits_V.masked_fill(logits_V < least, -torch.inf)
    # the largest logit is subtracted first, so that a very small temperature cannot cause an overflow
    weights = torch.softmax((logits_V - logits_V.max()).double() / temperature, -1)
    return int(torch.multinomial(weights, 1, generator=generator))
