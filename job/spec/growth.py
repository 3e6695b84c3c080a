"""tinystories-growth's run config."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from job.spec.common import BELOW_ONE, Checkpoint, Deliver, Guard, Log, bounded


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthModel:
    """The dense model of phase 1 and how it grows: experts in phase 2, width x2 and new layers in phase 3."""

    vocab: int = bounded(50257, 2, 1_000_000)
    layers: int = bounded(7, 1, 200)
    width: int = bounded(832, 8, 65536)
    heads: int = bounded(8, 1, 512)
    ffn: int = bounded(3328, 8, 262144)
    experts: int = bounded(8, 2, 256)
    top_k: int = bounded(2, 1, 64)
    new_layers: int = bounded(4, 0, 200)  # appended in phase 3
    router_std: float = bounded(0.02, 1e-6, 1.0)  # at 0 every token ties to the same experts
    symmetry_noise: float = bounded(0.1, 0.0, 1.0)  # x each matrix's own std, antisymmetric over the input halves


@dataclass(frozen=True, kw_only=True, slots=True)
class TextData:
    """Token windows drawn by (seed, step). The prepared dataset itself is named by storage.dataset."""

    sequence: int = bounded(256, 8, 131072)  # tokens per window
    source: Literal["tinystories", "generated-stories"] = "tinystories"  # what `gpufleet prepare` fetches or makes
    stories: int = bounded(50_000, 100, 3_000_000)


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Windows per optimizer step. `micro` None = the largest rung of the ladder that fits."""

    sequences: int = bounded(16, 1, 65536)
    micro: int | None = bounded(None, 1, 65536)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamW:
    """AdamW, one learning rate per phase, constant after a linear re-warm-up at the start of each grown phase."""

    lr: tuple[float, ...] = bounded((3e-4, 1e-4, 8e-5), 1e-9, 1.0)
    weight_decay: float = bounded(0.01, 0.0, 1.0)
    betas: tuple[float, ...] = bounded((0.9, 0.95), 0.0, BELOW_ONE)
    eps: float = bounded(1e-8, 1e-16, 1e-2)  # at 0 a row without gradient is 0 / 0
    clip: float = bounded(1.0, 0.0, 1e6)
    warmup_after_growth: int = bounded(20, 0, 100_000)
    load_balance: float = bounded(0.01, 0.0, 10.0)  # coefficient of the router's load-balance term, phases 2 and 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Precision:
    """`compute` is the dtype of the matmuls; `phase3_state` that of weights, gradients and moments in phase 3."""

    compute: Literal["bf16", "fp32"] = "bf16"
    phase3_state: Literal["bf16", "fp32"] = "bf16"  # bf16 for any fleet with a 24 GB type


@dataclass(frozen=True, kw_only=True, slots=True)
class Eval:
    """Validation on the same fixed windows every time; greedy samples at each phase end."""

    every: int = bounded(50, 1, 1_000_000)  # steps
    windows: int = bounded(32, 1, 65536)
    prompts: tuple[str, ...] = ("Once upon a time", "The little girl", "One day, a dog")
    sample_tokens: int = bounded(40, 0, 4096)


@dataclass(frozen=True, kw_only=True, slots=True)
class GrowthConfig:
    """tinystories-growth: train dense, upcycle to experts, grow width and depth; verified at each boundary."""

    steps_per_phase: int = bounded(1000, 1, 10_000_000)
    seed: int = bounded(1337, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"  # cuda without a CUDA device is an error, never a silent CPU run
    model: GrowthModel = GrowthModel()
    data: TextData = TextData()
    batch: Batch = Batch()
    optim: AdamW = AdamW()
    precision: Precision = Precision()
    deliver: Deliver = "last"
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    eval: Eval = Eval()
    log: Log = Log()
