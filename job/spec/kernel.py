"""kernel-sft's run config: fine-tune a code model, generate Triton kernels, judge them in a funnel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from job.spec.common import QWEN3_8B, Checkpoint, Compute, CosineAdamW, Decoder, Guard, Log, TokenBatch, bounded


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelData:
    """PyTorch-to-Triton pairs; the loss is on the answer."""

    source: Literal["jsonl", "generated-kernels"] = "jsonl"
    samples: int = bounded(1000, 1, 10_000_000)
    tokens_per_sample: float = bounded(8192.0, 1.0, 131072.0)  # expected; the prepared dataset's own replaces it
    row: int = bounded(8192, 8, 131072)
    curriculum: Literal["off", "on", "compare"] = "off"  # later epochs draw more of what is half mastered; or both ways


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """`candidates` per task, sampled with seeds by (seed, task, candidate)."""

    tasks: int = bounded(20, 1, 20)  # job/kernels/catalog.py has no more
    candidates: int = bounded(10, 1, 10_000)
    max_tokens: int = bounded(2048, 1, 131072)
    temperature: float = bounded(0.8, 0.0, 10.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Funnel:
    """Limits of the verification funnel. Each candidate runs in its own process."""

    planted: int = bounded(0, 0, 200)  # known candidates judged beside the generated ones; planted.py has no more
    workers: int | None = bounded(None, 1, 1024)  # None = one per GPU, or one per CPU core without GPUs
    candidate_s: float = bounded(60.0, 0.1, 3600.0)  # wall-clock of one candidate in one stage
    memory_gb: float = bounded(16.0, 0.1, 1024.0)
    inputs: int = bounded(5, 1, 1000)  # random inputs of the full run, beside the adversarial ones
    trials: int = bounded(100, 1, 100_000)  # of the timing
    suspicious: float = bounded(2.0, 1.0, 1000.0)  # a speed-up above this is run again with fresh inputs
    ablations: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelConfig:
    """kernel-sft: all weights of a 7-8 B code model, 20 tasks x 10 candidates, judged on the node's GPUs and CPUs."""

    epochs: int = bounded(1, 1, 1000)
    seed: int = bounded(1337, 0, 2**31 - 1)
    device: Literal["cuda", "cpu"] = "cuda"
    gpus: int | None = bounded(None, 1, 8)
    model: Decoder = QWEN3_8B
    data: KernelData = KernelData()
    batch: TokenBatch = TokenBatch(tokens=524_288)
    optim: CosineAdamW = CosineAdamW(lr=1e-5, warmup=2)
    precision: Compute = Compute()
    reshard_after_forward: bool = True
    generate: Generation = Generation()
    funnel: Funnel = Funnel()
    checkpoint: Checkpoint = Checkpoint()
    guard: Guard = Guard()
    log: Log = Log()
