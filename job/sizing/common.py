"""What the sizing of every experiment says, in one shape. 1 GB = 1e9 bytes throughout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

GB = 1e9
PART_BYTES = 64 * 1024 * 1024  # of an upload to S3: each part is a billed request
DEVICE_RESERVE_GB = 1.0  # CUDA context, cuBLAS workspace, fragmentation: an estimate, on top of what torch allocates


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSize:
    """One phase in numbers. `flops_per_token` is useful work of training: forward and backward, no recompute.

    Work beside the optimizer steps: `evaluations` of `evaluation_tokens` each and `forward_tokens` once, forward only;
    `decode_steps` tokens generated one after another in each of `decode_sequences`, which the ranks share and of which
    one takes `decode_at_once` side by side; `cpu_core_s` spread over the node's vCPUs, `gpu_s` over `workers`: where
    nobody says how many, as many as the node has GPUs.
    """

    name: str
    params_total: int
    params_active: int
    params_trained: int  # with gradients and moments
    flops_per_token: int
    state_bytes_per_param: int  # weights + gradients + two moments of a trained parameter
    optimizer_traffic_bytes_per_param: int  # read and written by one optimizer step, per trained parameter
    steps: int
    tokens_per_step: int  # over all ranks
    evaluations: int = 0
    evaluation_tokens: int = 0
    forward_tokens: int = 0
    forward_share: float = 1 / 3  # of flops_per_token: what a token costs that is only passed forward
    decode_steps: int = 0
    decode_sequences: int = 1
    decode_at_once: int = 1
    cpu_core_s: float = 0.0
    gpu_s: float = 0.0
    workers: int | None = None
    launch_ms: float = 0.0  # of the host, launching a step's kernels beside the GPU: a step takes the longer of both
    micro_launch_ms: float = 0.0  # more of it for each micro-batch, where the node decides how many of these there are
    sharded: bool = False  # trained state cut over the ranks (FSDP2), else a copy on each
    attention: Literal["causal", "full"] | None = "causal"  # as flops_per_token counts it; None: there is none
    validation: str | None = "val"  # what its validation figure, lower is better, is called; None: nothing is held out

    def evaluation_s(self, step_s: float) -> float:
        """Of one evaluation, where a step takes `step_s`."""
        return step_s / self.tokens_per_step * self.forward_share * self.evaluation_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes one GPU holds, in GB. `total_gb` is the peak, not the sum: without accumulation the gradients appear in
    backward while the activations go, so the two share room; with accumulation all of them are live at once.
    """

    weights_gb: float  # master weights, and their copy in the compute dtype where that differs
    gradients_gb: float
    moments_gb: float
    activations_gb: float
    logits_gb: float
    total_gb: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to cut the global batch: micro-batches of `micro` per rank and forward, the last one smaller if need be.

    `micro` counts windows, packed rows or queries, whatever the experiment's batch is made of.
    """

    micro: int
    checkpointing: bool = False


def in_gb(*, weights: float, gradients: float, moments: float, activations: float, logits: float) -> Memory:
    """Bytes that are all alive at the peak."""
    return Memory(
        weights_gb=weights / GB,
        gradients_gb=gradients / GB,
        moments_gb=moments / GB,
        activations_gb=activations / GB,
        logits_gb=logits / GB,
        total_gb=(weights + gradients + moments + activations + logits) / GB,
    )


def processes(device: str, gpus: int | None, gpu_count: int, most: int) -> int:
    """One per GPU used; on a CPU as many as asked for; never more than there are pieces of a batch."""
    wanted = (gpus or 1) if device == "cpu" else min(gpus or gpu_count, gpu_count)
    return max(1, min(wanted, most))


def cuts(whole: int, start: int | None, plain: list[int]) -> tuple[Rung, ...]:
    """A ladder from its micro-batches without activation checkpointing, `start` first when it is not among them; then
    checkpointing from the last of these down to one, halving.
    """
    first = min(start or whole, whole)
    kept = list(dict.fromkeys(m for m in plain if 1 <= m <= first))
    if first not in kept:
        kept.insert(0, first)
    checkpointed, micro = [], kept[-1]
    while micro >= 1:
        checkpointed.append(micro)
        micro //= 2
    return tuple([Rung(micro=m) for m in kept] + [Rung(micro=m, checkpointing=True) for m in checkpointed])
