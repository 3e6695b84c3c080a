"""The common parameters of sft-h100 and kernel-sft, which fine-tune a published decoder on packed rows; and the numbers
of such a decoder: parameters, FLOPs, activations.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from gpufleet.job.experiments.models.config import DecoderConfig
from gpufleet.job.experiments.spec import ExperimentConfig, cuts, halves
from gpufleet.job.kind.batch import rows_per_rank
from gpufleet.job.kind.common import Rung, bounded
from gpufleet.job.kind.job import Alternative, Processes, changed

LOGIT_BYTES = 12  # bytes per token and vocabulary entry of one chunk: fp32 logits, log-probabilities and gradient
LARGER_BATCHES = 2, 4, 8  # multiples of the file's batch that a comparison shows
LOSS_CHUNK = 1024  # number of tokens whose logits exist at once, because the loss is computed in chunks
# Milliseconds that the host needs to launch the forward and backward passes of a compiled layer for a micro-batch: 60
# launches with all weights and 117 with adapters, by the compiler's own plan (torch 2.13.0 on a CPU, 2026-11-23), and
# one launch for each gradient that is summed. Each launch takes 36 us, as in growth's layers (growth/spec.py). Not
# included: the loss, FSDP2's hooks, the repeated forward pass with checkpointing. Clipping and AdamW take as long as in
# growth.
LAYER_LAUNCH_MS, LORA_LAUNCH_MS, LAUNCH_MS = 2.4, 4.7, 3.0


def parameters(m: DecoderConfig) -> int:
    """The number of all parameters; a tied head is included only once."""
    return m.layers * layer_parameters(m) + m.vocab * m.width * (1 if m.tied else 2) + m.width


def layer_parameters(m: DecoderConfig) -> int:
    """The parameters of one layer: matrices, two norms, q/k/v biases (qwen2), q/k norms (qwen3)."""
    biases = (m.heads + 2 * m.kv_heads) * m.head_dim if m.family == "qwen2" else 0
    norms = 2 * m.width + (2 * m.head_dim if m.family == "qwen3" else 0)
    return layer_matmul(m) + biases + norms


def layer_matmul(m: DecoderConfig) -> int:
    """Parameters of one layer that are matrices: q, o, k, v, and SwiGLU's three."""
    return 2 * m.width * m.heads * m.head_dim + 2 * m.width * m.kv_heads * m.head_dim + 3 * m.width * m.ffn


def matmul_parameters(m: DecoderConfig) -> int:
    """The number of parameters by which a token is multiplied: all matrices of layers, and the head, but not the
    embedding.
    """
    return m.layers * layer_matmul(m) + m.vocab * m.width


def attention_flops(m: DecoderConfig, context: float) -> int:
    """FLOPs of the attention of one token, forward and backward, in documents of `context` tokens with causal
    attention.
    """
    return int(6 * m.layers * m.heads * m.head_dim * context)


def lora_parameters(m: DecoderConfig, rank: int) -> int:
    """The number of parameters of adapters on all seven projections: rank x (in + out) for each."""
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    per_layer = 2 * (m.width + q) + 2 * (m.width + kv) + 3 * (m.width + m.ffn)
    return m.layers * rank * per_layer


def layer_activation_bytes(m: DecoderConfig, compute: int, rung: Rung, *, adapters: int = 0) -> float:
    """Bytes that autograd keeps for one token in one layer. `adapters`: the rank of LoRA, or 0. These bytes are the
    inputs and outputs of both norms, q, k, v, the result of the attention, and SwiGLU's gate, up and product. With
    checkpointing, only the results of products and attention are kept, or only the input. A frozen matrix needs no
    input, but the adapter beside it needs its input and its narrow product.
    """
    if rung.products_too:
        return compute * m.width
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    products = 2 * q + 2 * kv + 2 * m.ffn
    narrow = 7 * adapters
    if rung.checkpointing:
        return compute * (m.width + products + narrow) + 4 * m.heads
    rest = 4 * m.width + 2 * m.ffn + (q + kv if m.family == "qwen3" else 0)
    dropped = (4 * m.width + q + m.ffn) if adapters else 0  # the adapters' inputs after dropout
    return compute * (products + rest + narrow + dropped) + 4 * m.heads


def loss_bytes(m: DecoderConfig, tokens: int, *, trained: bool = False) -> int:
    """Bytes of one chunk's logits, of the hidden states, whose gradient is the sum over the chunks, and, if the head is
    `trained`, of its gradient in fp32.
    """
    head = m.vocab * m.width * 4 if trained else 0
    return min(tokens, LOSS_CHUNK) * m.vocab * LOGIT_BYTES + tokens * m.width * 4 + head


def whole_state(
    m: DecoderConfig, compute: int, ranks: int, *, reshard: bool, checkpointing: bool = False
) -> tuple[float, float, float]:
    """Bytes of weights, gradients and moments on one rank if all weights are trained: fp32 state sharded over the
    ranks, and the gathered weights of the compute dtype (two layers with ZeRO-3, all layers with ZeRO-2, and the
    tables). A single rank gathers nothing, but casts all weights; the casts stay in memory until the backward pass
    (with checkpointing, only those of a layer and of the head).
    """
    total, layer = parameters(m), layer_parameters(m) * compute
    gathered = 2 * layer if reshard else m.layers * layer
    tables = m.vocab * m.width * compute * (1 if m.tied else 2)
    cast = layer + m.vocab * m.width * compute if checkpointing else total * compute
    copies = gathered + tables if ranks > 1 else cast if compute < 4 else 0
    # the gradients of a layer, and their fp32 copy that is sent
    whole = layer_parameters(m) * (compute + 4) if ranks > 1 else 0
    return total * 4 / ranks + copies, total * 4 / ranks + whole, total * 8 / ranks


def frozen_bytes(m: DecoderConfig, ranks: int) -> float:
    """Bytes on one rank of a bf16 base sharded over `ranks`: its part, two gathered layers, and the gathered tables."""
    whole = parameters(m) * 2
    if ranks == 1:
        return whole
    return whole / ranks + 2 * layer_parameters(m) * 2 + m.vocab * m.width * 2 * (1 if m.tied else 2)


def fp8_saves(m: DecoderConfig) -> int:
    """How many bytes fewer a base needs if its matrices are fp8 with an fp32 scale per output row, and not bf16."""
    outputs = (m.heads + 2 * m.kv_heads) * m.head_dim + 2 * m.width + 2 * m.ffn
    return m.layers * (layer_matmul(m) - 4 * outputs)


def gathered_bytes(m: DecoderConfig, compute: str, *, again: bool) -> int:
    """Bytes of weights that a micro-batch gathers from the ranks: once, and once `again` for backward."""
    return parameters(m) * (2 if compute == "bf16" else 4) * (1 + again)


def activations(m: DecoderConfig, tokens: int, compute: int, rung: Rung, *, adapters: int = 0) -> float:
    """Bytes that all layers keep for `tokens` tokens. With checkpointing, they are kept for one layer at a time in the
    backward pass.
    """
    layer_bytes = layer_activation_bytes(m, compute, rung, adapters=adapters)
    again = layer_activation_bytes(m, compute, Rung(micro=1), adapters=adapters) if rung.checkpointing else 0.0
    return tokens * (m.layers * layer_bytes + again + 2 * m.width * compute)


def batch_problems(batch: TokenBatch, row: int, betas: tuple[float, ...]) -> list[tuple[str, str]]:
    """Problems of batches that are not whole rows, and of AdamW's betas, as (path, sentence)."""
    wrong = []
    if batch.tokens % row:
        wrong.append(("batch.tokens", f"a multiple of data.row, {row}: a step takes whole rows"))
    micro = batch.micro_tokens
    if micro is not None and (micro % row or micro > batch.tokens):
        wrong.append(("batch.micro_tokens", f"a multiple of data.row, {row}, up to batch.tokens"))
    if len(betas) != 2:
        wrong.append(("optim.betas", "two numbers, beta1 and beta2"))
    return wrong


def ladder(config: TuningConfig, ranks: int) -> tuple[Rung, ...]:
    """The ladder: a rank's packed rows, halved down to one; then with activation checkpointing; and at last only the
    inputs of a row.
    """
    whole, tokens = rows_per_rank(config, ranks), config.batch.micro_tokens
    rungs = cuts(whole, tokens and tokens // config.data.row, halves(whole))
    return *rungs, Rung(micro=1, checkpointing=True, products_too=True)


def problems(m: DecoderConfig) -> list[tuple[str, str]]:
    """Shapes that cannot be built, as (path, sentence)."""
    wrong = []
    if m.heads % m.kv_heads:
        wrong.append(("model.kv_heads", f"a divisor of the number of heads, {m.heads}"))
    if m.head_dim % 2:
        wrong.append(("model.head_dim", f"an even number (rotary positions turn pairs), not {m.head_dim}"))
    return wrong


def steps(tokens: float, per_step: float) -> int:
    """The number of optimizer steps that read `tokens` once; the last batch is filled with tokens of the next pass."""
    return max(1, math.ceil(tokens / per_step - 1e-9))


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Packed tokens per optimizer step over all GPUs. `micro_tokens`: tokens per GPU and forward pass; None for the
    highest rung of the ladder that fits.
    """

    tokens: int = bounded(16_384, 8, 100_000_000)
    micro_tokens: int | None = bounded(None, 8, 10_000_000)


class TuningConfig(ExperimentConfig):
    """Base weights, a batch of tokens, rows that hold whole examples."""

    __slots__ = ()

    model: DecoderConfig
    batch: TokenBatch
    reshard_after_forward: bool

    processes: ClassVar[Processes] = "per GPU"
    dataset_kind: ClassVar[str] = "packed"

    @classmethod
    def code_folders(cls) -> tuple[str, ...]:
        return (*super().code_folders(), "experiments/tuning")

    def longest(self) -> int:
        """The longest example in tokens."""
        row: int = self.data.row
        return row

    def rows(self) -> int:
        """Packed rows of a step."""
        row: int = self.data.row
        return self.batch.tokens // row

    def variants(self) -> Iterator[Alternative]:
        for times in LARGER_BATCHES:
            tokens = times * self.batch.tokens
            yield Alternative(f"batch.tokens {tokens:,}", changed(self, batch=replace(self.batch, tokens=tokens)))

    def dataset_facts(self) -> dict[str, Any]:
        """The facts in dataset.json of rows that this job may train on."""
        from gpufleet.job.experiments.dataset.rendering import TEMPLATES  # imported here, because a bill reads no text

        return {"row": self.data.row, "longest": self.longest(), "template": TEMPLATES[self.model.family].name}
