"""What every run config shares: bounded fields, checkpoint cadence, log interval, and the decoder's shape.

A field's `metadata` holds its allowed values (`minimum`, `maximum`), so that the loader of the definition file and the
job check the same bounds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Deliver = Literal[
    "best", "last"
]  # whose weights final/ holds: of the last phase's best evaluation, or after the last step
BELOW_ONE = 0.99999  # the largest that a share of what was before may be: at 1 it would never change


def bounded(default: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A field with a default and a closed range, in the field's own unit."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """Cadence is time, not steps. `heartbeat_s` is the supervisor's, here because both read this file."""

    interval_s: float = bounded(300.0, 0.5, 86400.0)
    heartbeat_s: float = bounded(60.0, 0.5, 3600.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Console and metrics.jsonl; TensorBoard scalars of the same keys when asked."""

    every: int = bounded(10, 1, 1_000_000)  # steps
    tensorboard: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """When a run counts as lost (NaN and infinity always are), and how often it then goes on from before."""

    divergence: bool = True  # False: a loss that rises and stays up is nobody's business
    rise: float = bounded(1.0, 0.001, 1000.0)  # nats above the lowest upper tenth that `window` logged losses had
    window: int = bounded(50, 10, 10_000)  # logged losses
    in_a_row: int = bounded(10, 2, 10_000)  # logged losses that high, then the validation loss is asked
    retries: int = bounded(2, 0, 100)  # from the last good checkpoint, before the run ends as failed
    lr_factor: float = bounded(0.5, 0.01, 1.0)  # of every rate, at each retry


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The dtype of the matmuls; master weights, gradients and moments are fp32."""

    compute: Literal["bf16", "fp32"] = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Decoder:
    """A Llama- or Qwen-class causal decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases.

    `qwen3` adds a norm per head to q and k, `qwen2` biases to q, k and v. The default is Llama-3.1-8B.
    """

    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    vocab: int = bounded(128_256, 2, 1_000_000)
    layers: int = bounded(32, 1, 200)
    width: int = bounded(4096, 8, 65536)
    heads: int = bounded(32, 1, 512)
    kv_heads: int = bounded(8, 1, 512)
    head_dim: int = bounded(128, 2, 1024)
    ffn: int = bounded(14_336, 8, 262144)
    tied: bool = False  # head and embedding are one table
    norm_eps: float = bounded(1e-5, 1e-9, 1e-2)
    rope_theta: float = bounded(500_000.0, 1.0, 1e9)
    rope_scaling: Literal["none", "llama3"] = "llama3"


QWEN3_8B = Decoder(
    family="qwen3",
    vocab=151_936,
    layers=36,
    width=4096,
    heads=32,
    kv_heads=8,
    head_dim=128,
    ffn=12_288,
    tied=False,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling="none",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CosineAdamW:
    """AdamW with linear warm-up and a cosine to `floor` x lr at the last step."""

    lr: float = bounded(2e-4, 1e-9, 1.0)
    warmup: int = bounded(100, 0, 1_000_000)  # steps
    floor: float = bounded(0.0, 0.0, 1.0)
    weight_decay: float = bounded(0.0, 0.0, 1.0)
    betas: tuple[float, ...] = bounded((0.9, 0.95), 0.0, BELOW_ONE)
    eps: float = bounded(1e-8, 1e-16, 1e-2)  # at 0 a row without gradient is 0 / 0
    clip: float = bounded(1.0, 0.0, 1e6)


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenBatch:
    """Packed tokens per optimizer step over all GPUs. `micro_tokens` per GPU and forward; None = the largest rung of
    the ladder that fits.
    """

    tokens: int = bounded(16_384, 8, 100_000_000)
    micro_tokens: int | None = bounded(None, 8, 10_000_000)
