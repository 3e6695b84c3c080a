"""The shapes of models, and of adapters trained beside them. The module imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gpufleet.job.kind.common import added_later, bounded

# if the expert product is padded (on GPUs other than sm_90), the rows of each expert, as a multiple of the even share
CAPACITY = 1.25
# the compute capability from which tensor cores multiply e4m3, and compiled kernels can read it (torch 2.13)
FP8_CAPABILITY = 8.9


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """A Llama- or Qwen-class causal decoder: RMSNorm, RoPE, grouped-query attention, SwiGLU, no biases.

    `qwen3` adds a norm for each head of q and k, and `qwen2` adds biases to q, k and v. The default is Llama-3.1-8B.
    """

    family: Literal["llama", "qwen2", "qwen3"] = "llama"
    vocab: int = bounded(128_256, 2, 1_000_000)
    layers: int = bounded(32, 1, 200)
    width: int = bounded(4096, 8, 65536)
    heads: int = bounded(32, 1, 512)
    kv_heads: int = bounded(8, 1, 512)
    head_dim: int = bounded(128, 2, 1024)
    ffn: int = bounded(14_336, 8, 262144)
    tied: bool = False  # head and embedding share one table
    norm_eps: float = bounded(1e-5, 1e-9, 1e-2)
    rope_theta: float = bounded(500_000.0, 1.0, 1e9)
    rope_scaling: Literal["none", "llama3"] = "llama3"


QWEN3_8B = DecoderConfig(
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
class Lora:
    """Adapters on q, k, v, o, gate, up and down of every layer; scale = alpha / rank. With `template_tokens` the rows
    of the chat template's tokens in embedding and head are trained too, because many bases never trained these rows.
    `shard_base` is for a base that no single GPU holds.
    """

    rank: int = bounded(64, 1, 4096)
    alpha: float = bounded(16.0, 1e-3, 65536.0)  # if it were 0, nothing would be trained
    dropout: float = bounded(0.05, 0.0, 0.9)
    template_tokens: bool = added_later(False, version="0.1.0")
    # whether the base is split over the ranks; FSDP2 gathers each layer when it is used
    shard_base: bool = added_later(False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """One phase's model. `experts`: 0 for a dense FFN."""

    vocab: int
    layers: int
    width: int
    heads: int
    ffn: int
    experts: int
    top_k: int
