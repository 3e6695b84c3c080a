"""pretrain-d64's run config: a depth-parameterised character-level GPT on the GPUs of one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from job.spec.common import BELOW_ONE, Checkpoint, Compute, Deliver, Guard, Log, bounded


@dataclass(frozen=True, kw_only=True, slots=True)
class CharModel:
    """Pre-norm RMSNorm without gain, RoPE, QK-norm, ReLU-squared FFN of 4 x width, untied head, no biases."""

    layers: int = bounded(44, 1, 200)
    width: int = bounded(2816, 8, 65536)
    head_dim: int = bounded(128, 2, 1024)
    kv_heads: int | None = bounded(None, 1, 512)  # None = as many as heads
    vocab: int = bounded(32, 18, 1_000_000)  # 17 symbols and <|bos|>, padded
    logit_cap: float = bounded(15.0, 0.0, 1000.0)  # logits = cap x tanh(x / cap); 0 = none


@dataclass(frozen=True, kw_only=True, slots=True)
class CharData:
    """Characters cut into rows of `sequence` + 1; every row once per epoch, permuted by (seed, epoch)."""

    source: Literal["text", "generated-sums"] = "text"  # what `gpufleet prepare` reads or makes
    characters: int = bounded(350_000_000, 1000, 100_000_000_000)  # expected; the prepared dataset's count replaces it
    sequence: int = bounded(2048, 8, 131072)
    held_out: float = bounded(0.05, 0.001, 0.5)  # the last characters


@dataclass(frozen=True, kw_only=True, slots=True)
class RowBatch:
    """Rows per optimizer step over all GPUs; `micro` rows per GPU and forward."""

    rows: int = bounded(256, 1, 1_000_000)
    micro: int | None = bounded(None, 1, 65536)


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonAdamW:
    """Muon on hidden matrices, AdamW on embedding and head; `kind: adamw` is the fallback for every matrix, and wants
    a smaller `lr` (about 3e-4): this one is Muon's.
    """

    kind: Literal["muon", "adamw"] = "muon"
    lr: float = bounded(0.02, 1e-9, 1.0)  # hidden matrices
    momentum: tuple[float, ...] = bounded((0.85, 0.95), 0.0, BELOW_ONE)  # from, to
    momentum_steps: int = bounded(300, 0, 1_000_000)
    embedding_lr: float = bounded(0.3, 1e-9, 10.0)  # x (width / 768) ** -0.5, as head_lr
    head_lr: float = bounded(0.004, 1e-9, 10.0)
    betas: tuple[float, ...] = bounded((0.8, 0.95), 0.0, BELOW_ONE)
    weight_decay: float = bounded(0.0, 0.0, 1.0)
    warmup: int = bounded(0, 0, 1_000_000)
    cooldown: float = bounded(0.4, 0.0, 1.0)  # share of the steps over which every rate falls to 0
    clip: float = bounded(0.0, 0.0, 1e6)  # 0 = none


@dataclass(frozen=True, kw_only=True, slots=True)
class EarlyStop:
    """Stops when `patience` evaluations in a row improve by less than `min_delta`."""

    patience: int = bounded(4, 1, 1000)
    min_delta: float = bounded(0.0005, 0.0, 10.0)  # nats
    after: int = bounded(1000, 0, 10_000_000)  # steps


@dataclass(frozen=True, kw_only=True, slots=True)
class CharEval:
    """Nats per character on fixed windows summed over ranks, and a few continuations."""

    every: int = bounded(250, 1, 1_000_000)
    windows: int = bounded(160, 1, 65536)
    prompts: tuple[str, ...] = ("123+456", "999-111", "HB+123", "0+0")
    sample_tokens: int = bounded(32, 0, 2048)


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """pretrain-d64: as deep as the budget allows, stopped when validation stops improving, then served."""

    steps: int = bounded(5000, 1, 10_000_000)  # planned; the rate schedule belongs to them
    seed: int = bounded(1337, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int | None = bounded(None, 1, 8)
    model: CharModel = CharModel()
    data: CharData = CharData()
    batch: RowBatch = RowBatch()
    optim: MuonAdamW = MuonAdamW()
    precision: Compute = Compute()
    early_stop: EarlyStop = EarlyStop()
    reshard_after_forward: bool = False  # False = ZeRO-2, True = ZeRO-3
    deliver: Deliver = "best"
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    eval: CharEval = CharEval()
    log: Log = Log()
