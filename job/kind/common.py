"""What kinds of job share: sections of parameters with their bounds, and the words in which a job says its work,
memory and bytes. 1 GB = 1e9 bytes throughout.

A field's `metadata` holds its allowed values (`minimum`, `maximum`), so that the loader of the definition file and the
job check the same bounds.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache, wraps
from typing import Any, Literal, TypeVar, cast

Say = Callable[[str], None]  # one line for who watches
GB = 1e9
PART_BYTES = 64 * 1024 * 1024  # of an upload to S3: each part is a billed request
DEVICE_RESERVE_GB = 1.0  # CUDA context, cuBLAS workspace, fragmentation: an estimate, on top of what torch allocates
# Whose weights final/ holds: of the last phase's best evaluation, or those after the last step.
Deliver = Literal["best", "last"]
EVALUATIONS_PROBED = 3  # per phase of a job that is shortened to be measured, where it evaluates at all
LINES_PROBED = 10  # of metrics.jsonl per phase there, at least: each is one figure of the spread
ENDLESS_S = 10 * 365 * 24 * 3600  # of a run that declares nothing: it trains until a limit
F = TypeVar("F", bound=Callable[..., Any])
_KEPT = 4096  # answers


def remembered(function: F) -> F:
    """The function with its answers kept, for frozen parameters, which a comparison asks thousands of times: the same
    object by its identity, as hashing parameters takes longer than finding the answer.
    """
    of_equal, kept = lru_cache(maxsize=_KEPT)(function), dict[tuple[Any, ...], tuple[Any, Any]]()

    @wraps(function)
    def answer(config: Any, *rest: Any, **named: Any) -> Any:
        key = (id(config), *rest, *named.items())
        if key not in kept:
            if len(kept) >= _KEPT:
                kept.clear()
            kept[key] = config, of_equal(config, *rest, **named)  # while it stands here its identity is no other's
        return kept[key][1]

    return cast(F, answer)


def bounded(default: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A field with a default and a closed range, in the field's own unit."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def added_later(
    default: Any, minimum: float | None = None, maximum: float | None = None, *, version: str = "0.2.0"
) -> Any:
    """A field that came with this version, with its range. A run that began before has its default: what tells runs
    apart (infra/program/run_guard.py) leaves it out while it is that.
    """
    return field(default=default, metadata={"added": version, "minimum": minimum, "maximum": maximum})


def one_or_more() -> Any:
    """A field for a list of texts that a single one may stand for; empty by default."""
    return field(default=(), metadata={"one": True})


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
class Code:
    """The folder of the user's repository that is shipped, as a hashed archive."""

    folder: str = "."
    exclude: tuple[str, ...] = ()  # patterns beside what git ignores
    max_mib: int = bounded(200, 1, 5000)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSize:
    """One phase in numbers. `flops_per_token` is useful work of training: forward and backward, no recompute.

    Work beside the optimizer steps: `evaluations` of `evaluation_tokens` each and `forward_tokens` once, forward only;
    `decode_steps` tokens generated one after another in each of `decode_sequences`, which the ranks share and of which
    one takes `decode_at_once` side by side; `cpu_core_s` spread over the node's vCPUs, `gpu_s` over `workers`: where
    nobody says how many, as many as the node has GPUs.
    """

    name: str
    kind: str = ""  # whose speeds tell of its own: from scratch, all weights, adapter, mixture; empty: none of them
    params_total: int
    params_active: int
    params_trained: int  # with gradients and moments
    flops_per_token: int
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
    row_host_ms: float = 0.0  # of the host for each row that a rank takes: what nobody has prepared
    slower: float = 1.0  # times as long as work of its kind, with a setting off that makes it faster
    growth_s: float = 0.0  # before its first step: a model that changes shape there is made and checked
    sharded: bool = False  # trained state cut over the ranks (FSDP2), else a copy on each
    gathered_bytes: int = 0  # of weights that each micro-batch brings together from the ranks that they are cut over
    attention: Literal["causal", "full"] | None = "causal"  # as flops_per_token counts it; None: there is none
    counts: Literal["steps", "epochs", "seconds"] = "steps"  # seconds: of a run whose steps nobody knows, each a second
    validation: str | None = "val"  # what its validation figure, lower is better, is called; None: nothing is held out
    may_stop_early: bool = False  # by itself, before its last step
    waits_for_saves: bool = False  # training stands still until a save is written

    def evaluation_s(self, step_s: float) -> float:
        """Seconds of one evaluation, where a step takes `step_s`."""
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
class Sizes:
    """Bytes that a job reads and leaves. By phase: one entry for each, in order."""

    checkpoints: tuple[int, ...]  # by phase: trained weights and their moments, over all ranks
    phase_ends: tuple[int, ...]  # by phase: the checkpoint at its end, whose moments nobody needs any more
    exports: dict[str, int]  # weights-only files kept beside the checkpoints, in order
    final: dict[str, int]  # what a run is for and `gpufleet results` brings, in the order it is written
    final_if_cut: tuple[int, ...]  # by phase: final/ where a limit ends the run in it
    dataset: int  # of the prepared dataset, estimated before there is one
    base_weights: int = 0  # that a node stages before the first step
    staged_in_memory: bool = True  # the host holds a checkpoint in memory while it is written
    results: bool = True  # a finished run leaves results.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to cut the global batch: micro-batches of `micro` per rank and forward, the last one smaller if need be.

    `micro` counts windows, packed rows or queries, whatever the experiment's batch is made of. With `checkpointing` a
    block keeps the results of its products and makes the rest again in backward; with `products_too` it keeps its input
    alone.
    """

    micro: int
    checkpointing: bool = False
    products_too: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What a job asks of what is around it."""

    one_node: str = ""  # why several do not help it; empty: they do
    apart: str = ""  # what to write where each of several nodes would train alone; empty: they train together
    like_nodes: bool = False  # only a node with equally many GPUs resumes what one has saved
    interval: bool = False  # nobody says how often it saves, which only matters where nodes are taken away
    container_options: str = ""  # words for `docker run`; {app}: the job archive's folder
    code: Code | None = None  # the user's, that a node gets beside gpufleet's own
    installs: bool = False  # it may put packages where it runs
    inputs: tuple[tuple[str, str], ...] = ()  # entries of storage.inputs that it uses, as (path of the key, name)
    # What a node may read of Parameter Store (ssm:/name) and Secrets Manager (secretsmanager:name), by what the
    # parameters call it; and where user:password for the image's registry are kept.
    secrets: Mapping[str, str] = field(default_factory=dict)
    login: str | None = None
    node_role: bool = False  # the job itself may do what its node may
    held_minutes: float = 0.0  # that a node stays after its run has failed


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldTime:
    """How long a step, or an epoch, takes on a GPU."""

    section: str  # the path of the section that says it, and its key there
    key: str
    gpu: str
    gpus: int | None  # None: not said
    ms: float
    counts: bool  # it is of what the run counts


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldSpeed:
    """How long a step takes where the parameters say it."""

    key: str  # the path of the section in which they say it
    times: tuple[ToldTime, ...] = ()
    from_page: bool = False  # somebody's page has them, not the user
    hours: tuple[float, float, float] | None = None  # p10, p50 and p90 of the whole work; None: they are not said


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeParts:
    """What each of several nodes has of a checkpoint, beside the leader, which has all that it writes."""

    reads: bool = False  # each needs it on its own disk
    leaves: bool = False  # each writes a part of it to its own disk
    of_rank: tuple[str, ...] = ()  # regular expressions for names of files that only the rank reads which wrote them

    def is_of_rank(self, name: str) -> bool:
        """Whether a file of a checkpoint is read by that rank alone which has written it."""
        return any(re.search(f"(^|/)({pattern})$", name) for pattern in self.of_rank)


def in_gb(
    *, weights: float, gradients: float, moments: float, activations: float, logits: float, peak: float | None = None
) -> Memory:
    """Bytes, which are all alive at the peak unless that is given."""
    return Memory(
        weights_gb=weights / GB,
        gradients_gb=gradients / GB,
        moments_gb=moments / GB,
        activations_gb=activations / GB,
        logits_gb=logits / GB,
        total_gb=(weights + gradients + moments + activations + logits if peak is None else peak) / GB,
    )


def processes(device: str, gpus: int | None, gpu_count: int, most: int) -> int:
    """Processes: one per GPU used; on a CPU as many as asked for; never more than there are pieces of a batch."""
    wanted = (gpus or 1) if device == "cpu" else min(gpus or gpu_count, gpu_count)
    return max(1, min(wanted, most))
