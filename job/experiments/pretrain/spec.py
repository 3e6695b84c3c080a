"""pretrain-d64: a character-level GPT, sharded over the GPUs of one node. A micro-batch counts rows per rank.

FLOPs are `full`: 6 x matmul parameters (head included, embedding look-up not) + 12 x layers x width x sequence, as
nanochat and llm-foundry count them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from gpufleet.job.experiments.spec import BELOW_ONE, ExperimentConfig, cuts, halves, warmup_doubts
from gpufleet.job.kind import common
from gpufleet.job.kind.batch import rows_per_rank
from gpufleet.job.kind.job import Processes

# the symbols of ids 0 to 16, in the order of the public fork's tokenizer, read 2026-11-21
SYMBOLS = "0123456789+-HBL.\n"
# Bytes per token and symbol, at the peak. Not compiled: capped logits, log-probabilities and two gradients, in fp32.
# Compiled: the bf16 product and its gradient. The two figures were counted on a CPU (torch 2.13.0, 2026-11-27).
LOGIT_BYTES, COMPILED_LOGIT_BYTES = 16, 6
# The highest learning rate for hidden matrices. With AdamW, every weight changes by about this rate in each step,
# whatever the gradient is.
ADAMW_LR = 0.01
# Milliseconds that the host needs to launch a compiled block for a micro-batch: 53 launches and 6 gradient additions,
# counted and timed like a decoder's (tuning.py). Muon's own launches are not included.
LAYER_LAUNCH_MS, LAUNCH_MS = 2.1, 3.0
# number of further tensors of the model's width in the backward pass of a block (counted on a CPU, 2026-11-21)
BACKWARD = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class CharModel:
    """Pre-norm RMSNorm without gain, RoPE, QK-norm, ReLU-squared FFN of 4 x width, untied head, no biases."""

    layers: int = common.bounded(44, 1, 200)
    width: int = common.bounded(2816, 8, 65536)
    head_dim: int = common.bounded(128, 2, 1024)
    kv_heads: int | None = common.bounded(None, 1, 512)  # None = as many as heads
    vocab: int = common.bounded(32, 18, 1_000_000)  # 17 symbols and <|bos|>, padded
    logit_cap: float = common.bounded(15.0, 0.0, 1000.0)  # logits = cap x tanh(x / cap); 0 = none
    # rate of the dropout on the output of each half of a block, before it is added to the residual
    dropout: float = common.added_later(0.0, 0.0, 0.9)


@dataclass(frozen=True, kw_only=True, slots=True)
class CharData:
    """Characters cut into rows of `sequence` + 1; every row once per epoch, permuted by (seed, epoch)."""

    source: Literal["text", "generated-sums"] = "text"  # what `gpufleet prepare` reads or generates
    # the expected number, which that of the dataset replaces
    characters: int = common.bounded(350_000_000, 1000, 100_000_000_000)
    sequence: int = common.bounded(2048, 8, 131072)
    # the share of the characters, at the end, that is held out for validation
    held_out: float = common.bounded(0.05, 0.001, 0.5)


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Rows per optimizer step over all GPUs; `micro` rows per GPU and forward."""

    rows: int = common.bounded(256, 1, 1_000_000)
    micro: int | None = common.bounded(None, 1, 65536)


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonAdamW:
    """Muon for hidden matrices, AdamW for embedding and head; with `kind: adamw` AdamW takes every matrix, and needs a
    smaller `lr` (about 3e-4) than this, which is Muon's.
    """

    kind: Literal["muon", "adamw"] = "muon"
    lr: float = common.bounded(0.02, 1e-9, 1.0)  # the learning rate of hidden matrices
    momentum: tuple[float, ...] = common.bounded((0.85, 0.95), 0.0, BELOW_ONE)  # the momentum at first, and at the end
    momentum_steps: int = common.bounded(300, 0, 1_000_000)
    embedding_lr: float = common.bounded(0.3, 1e-9, 10.0)  # multiplied by (width / 768) ** -0.5, as head_lr is
    head_lr: float = common.bounded(0.004, 1e-9, 10.0)
    betas: tuple[float, ...] = common.bounded((0.8, 0.95), 0.0, BELOW_ONE)
    weight_decay: float = common.bounded(0.0, 0.0, 1.0)
    warmup: int = common.bounded(0, 0, 1_000_000)
    cooldown: float = common.bounded(0.4, 0.0, 1.0)  # share of the steps over which every rate falls to 0
    clip: float = common.bounded(0.0, 0.0, 1e6)  # 0 = none


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """Stops when `patience` evaluations in a row improve by less than `min_delta`."""

    patience: int = common.bounded(4, 1, 1000)
    min_delta: float = common.bounded(0.0005, 0.0, 10.0)  # nats
    after: int = common.bounded(1000, 0, 10_000_000)  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class CharEval:
    """Nats per character on fixed windows summed over ranks, and a few continuations."""

    every: int = common.bounded(250, 1, 1_000_000)
    windows: int = common.bounded(160, 1, 65536)
    prompts: tuple[str, ...] = ("123+456", "999-111", "HB+123", "0+0")
    sample_tokens: int = common.bounded(32, 0, 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig(ExperimentConfig):
    """pretrain-d64: as deep as the budget allows, stopped when validation stops improving, then served."""

    trainer: ClassVar[str] = "gpufleet.job.experiments.pretrain.run:Pretrain"
    dataset_class: ClassVar[str] = "gpufleet.job.experiments.pretrain.data:Characters"
    dataset_kind: ClassVar[str] = "characters"
    leaves_speed: ClassVar[tuple[str, ...]] = ("steps", "early_stop", "data.characters", "data.held_out")
    processes: ClassVar[Processes] = "per GPU"

    steps: int = common.bounded(5000, 1, 10_000_000)  # the planned number, on which the learning-rate schedule depends
    seed: int = common.bounded(1337, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int | None = common.bounded(None, 1, 8)
    model: CharModel = CharModel()
    data: CharData = CharData()
    batch: RowBatch = RowBatch()
    optim: MuonAdamW = MuonAdamW()
    precision: common.Compute = common.Compute()
    early_stop: EarlyStop = EarlyStop()
    reshard_after_forward: bool = False  # False = ZeRO-2, True = ZeRO-3
    deliver: common.Deliver = common.added_later("best", version="0.1.0")
    checkpoint: common.Checkpoint = common.Checkpoint()
    guard: common.Guard = common.added_later(common.Guard(), version="0.1.0")
    eval: CharEval = CharEval()
    log: common.Log = common.Log()

    def problems(self) -> list[tuple[str, str]]:
        m, problems = self.model, []
        if m.width % m.head_dim:
            problems.append(("model.head_dim", f"a divisor of the width, {m.width}"))
        if m.head_dim % 2:
            problems.append(("model.head_dim", f"an even number (rotary positions turn pairs), not {m.head_dim}"))
        if m.kv_heads is not None and heads(m) % m.kv_heads:
            problems.append(("model.kv_heads", f"a divisor of the number of heads, {heads(m)}"))
        if self.optim.kind == "adamw" and self.optim.lr > ADAMW_LR:
            problems.append(
                ("optim.lr", f"at most {ADAMW_LR:g} with kind: adamw, not {self.optim.lr:g}: 0.02 is Muon's, try 3e-4")
            )
        for name, values in (("optim.betas", self.optim.betas), ("optim.momentum", self.optim.momentum)):
            if len(values) != 2:
                problems.append((name, f"two numbers, not {len(values)}"))
        if not self.eval.prompts:
            problems.append(("eval.prompts", "at least one prompt; sample_tokens: 0 switches samples off"))
        for prompt in self.eval.prompts:
            if not 1 <= len(prompt) <= self.data.sequence or set(prompt) - set(SYMBOLS):
                problems.append(
                    ("eval.prompts", f"1 to {self.data.sequence} characters of {SYMBOLS!r}, not {prompt!r}")
                )
        return problems

    @common.remembered
    def phases(self) -> tuple[common.PhaseSize, ...]:
        """One phase. Early stop can only shorten it."""
        total, bf16 = parameters(self.model), self.precision.compute == "bf16"
        return (
            common.PhaseSize(
                name="train",
                kind="from scratch",
                params_total=total,
                params_active=total,
                params_trained=total,
                flops_per_token=flops_per_token(self),
                attention="full",
                optimizer_traffic_bytes_per_param=28,
                steps=self.steps,
                may_stop_early=True,
                tokens_per_step=self.batch.rows * self.data.sequence,
                evaluations=-(-self.steps // self.eval.every),
                evaluation_tokens=self.eval.windows * self.data.sequence,
                decode_steps=len(self.eval.prompts) * self.eval.sample_tokens,
                launch_ms=LAUNCH_MS,
                micro_launch_ms=self.model.layers * LAYER_LAUNCH_MS,
                sharded=True,
                gathered_bytes=total * (2 if bf16 else 4) * (1 + self.reshard_after_forward),
            ),
        )

    @common.remembered
    def memory(self, phase_index: int, rung: common.Rung, ranks: int = 1) -> common.Memory:
        """The memory needed: all characters; the fp32 weights, gradients and moments, sharded over the ranks; and the
        gathered weights in the compute dtype (all weights with ZeRO-2, two blocks with ZeRO-3). Gradients are reduced
        at every micro-step, so no gradient stays whole. If the batch is a single micro-batch, gradients are allocated
        while activations are freed, so that the peak is a little lower.
        """
        m = self.model
        compute = 2 if self.precision.compute == "bf16" else 4
        total = parameters(m)
        block = layer_matmul(m)
        copies = total * compute
        if ranks == 1:  # casts are part of a block's forward pass, and are repeated with it
            copies = 0 if compute == 4 else block * compute if rung.checkpointing else copies
        elif self.reshard_after_forward:
            copies = 2 * block * compute
        weights, gradients = total * 4 / ranks + copies, total * 4 / ranks
        moments = (self.sizes().checkpoints[phase_index] - 4 * total) / ranks
        # Data in transit: the whole gradient of one block, and the reduced part of it in fp32. If there is only one
        # rank, it is only the gradient of the largest matrix.
        reduced = block * (compute + 4) if ranks > 1 else 4 * m.width * m.width * 4
        tokens = rung.micro * self.data.sequence
        full, kept_bytes = (_layer_bytes(m, compute, checkpointing=on) for on in (False, rung.checkpointing))
        activations = tokens * (m.layers * kept_bytes + full - kept_bytes + (3 + BACKWARD) * m.width * compute)
        logits = tokens * m.vocab * (COMPILED_LOGIT_BYTES if self.runs_compiled() else LOGIT_BYTES)
        held = {"weights": weights, "gradients": gradients + reduced, "moments": moments, "activations": activations}
        return common.in_gb(**held, logits=logits, peak=sum(held.values()) + logits + self.sizes().dataset)

    @common.remembered
    def ladder(self, ranks: int = 1) -> tuple[common.Rung, ...]:
        """A rank's rows, half of them and so on down to one, then activation checkpointing."""
        whole = rows_per_rank(self, ranks)
        return cuts(whole, self.batch.micro, halves(whole))

    def with_facts(self, facts: Mapping[str, Any]) -> PretrainConfig:
        if "train_characters" not in facts:
            return self
        characters = facts["train_characters"] + facts["validation_characters"]
        return replace(self, data=replace(self.data, characters=characters))

    def doubts(self, steps: int) -> Iterator[str]:
        yield from warmup_doubts("warmup", self.optim.warmup, steps, self.optim.lr, "the whole run", "raise steps")

    def shortened(self, steps: int) -> PretrainConfig:
        stop = replace(self.early_stop, after=max(self.early_stop.after, steps))
        return replace(self, steps=min(self.steps, steps), early_stop=stop)

    def rows(self) -> int:
        return self.batch.rows

    @common.remembered
    def sizes(self) -> common.Sizes:
        """A checkpoint has fp32 weights and two moments; with Muon hidden matrices have one moment. A character of the
        data has one byte.
        """
        m, whole = self.model, 4 * parameters(self.model)
        hidden, tables = m.layers * layer_matmul(m), 2 * m.vocab * m.width
        return common.Sizes(
            checkpoints=((8 if self.optim.kind == "muon" else 12) * hidden + 12 * tables,),
            phase_ends=(whole,),
            exports={},
            final={"best": whole},
            final_if_cut=(whole,),
            dataset=self.data.characters,
        )


def heads(m: CharModel) -> int:
    return m.width // m.head_dim


def layer_matmul(m: CharModel) -> int:
    """Parameters of one block: 12 x width squared with as many KV heads as heads."""
    kv = (m.kv_heads or heads(m)) * m.head_dim
    return 2 * m.width * m.width + 2 * m.width * kv + 8 * m.width * m.width


def parameters(m: CharModel) -> int:
    """The number of all parameters. Norms have none."""
    return m.layers * layer_matmul(m) + 2 * m.vocab * m.width


def flops_per_token(config: PretrainConfig) -> int:
    """The training FLOPs of one character, with full attention."""
    m = config.model
    return 6 * (m.layers * layer_matmul(m) + m.vocab * m.width) + 12 * m.layers * m.width * config.data.sequence


def _layer_bytes(m: CharModel, compute: int, *, checkpointing: bool) -> float:
    """Bytes that autograd keeps per token and block. With checkpointing they are the block's input, products and
    attention.
    """
    kv = (m.kv_heads or heads(m)) * m.head_dim
    # the results of q, attention, k and v, and of the FFN's up-projection
    products = 2 * m.width + 2 * kv + 4 * m.width
    if checkpointing:
        return compute * (3 * m.width + products) + 4 * heads(m)  # the results of o and down are products too
    # inputs and outputs of norms, q and k before their norms, the result of ReLU^2
    rest = 4 * m.width + m.width + kv + 4 * m.width
    masks = 2 * m.width if m.dropout else 0  # a byte for each number that may be dropped
    return compute * (products + rest) + 4 * heads(m) + masks
