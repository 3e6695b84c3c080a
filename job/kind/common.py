"""The parts that kinds of jobs share: sections of parameters with their bounds, and the classes for a job's work,
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

Say = Callable[[str], None]  # a function that shows one line of text to people
GB = 1e9
PART_BYTES = 64 * 1024 * 1024  # bytes of one part of an upload to S3; each part is a billed request
# an estimate of the memory for CUDA context, cuBLAS workspace and fragmentation, in addition to what torch allocates
DEVICE_RESERVE_GB = 1.0
# Which weights final/ contains: those of the last phase's best evaluation, or those after the last step.
Deliver = Literal["best", "last"]
EVALUATIONS_PROBED = 3  # the least number of evaluations in a phase of a shortened job, if the job evaluates
# the least number of lines of metrics.jsonl in a phase of a shortened job, because each line is one sample
LINES_PROBED = 10
ENDLESS_S = 10 * 365 * 24 * 3600  # stands for the steps of a run without a declared length, which trains until a limit
F = TypeVar("F", bound=Callable[..., Any])
_KEPT = 4096  # number of cached results


def remembered(function: F) -> F:
    """The function with a cache. A comparison calls such a function with the same frozen parameters thousands of times.
    Objects are found by identity first, because hashing the parameters takes longer than the lookup.
    """
    of_equal, cached = lru_cache(maxsize=_KEPT)(function), dict[tuple[Any, ...], tuple[Any, Any]]()

    @wraps(function)
    def answer(config: Any, *rest: Any, **named: Any) -> Any:
        key = (id(config), *rest, *named.items())
        if key not in cached:
            if len(cached) >= _KEPT:
                cached.clear()
            # While the cache keeps the object, no other object can have the same identity.
            cached[key] = config, of_equal(config, *rest, **named)
        return cached[key][1]

    return cast(F, answer)


def bounded(default: Any, minimum: float | None = None, maximum: float | None = None) -> Any:
    """A field with a default and a closed range, in the field's own unit."""
    return field(default=default, metadata={"minimum": minimum, "maximum": maximum})


def added_later(
    default: Any, minimum: float | None = None, maximum: float | None = None, *, version: str = "0.2.0"
) -> Any:
    """A field that older versions do not have, with its range. For an older run the field has its default. The digest
    by which runs are distinguished (infra/program/run_guard.py) omits the field while it has this default.
    """
    return field(default=default, metadata={"added": version, "minimum": minimum, "maximum": maximum})


def one_or_more() -> Any:
    """A field for a list of texts, or a single text; empty by default."""
    return field(default=(), metadata={"one": True})


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """When checkpoints are saved. The interval is in time, and not in steps. `heartbeat_s` is for the supervisor; it is
    here because job and supervisor both read it.
    """

    interval_s: float = bounded(300.0, 0.5, 86400.0)
    heartbeat_s: float = bounded(60.0, 0.5, 3600.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Log:
    """Console and metrics.jsonl; on request also TensorBoard, W&B or MLflow, with the same metric values."""

    every: int = bounded(10, 1, 1_000_000)  # steps between two lines
    tensorboard: bool = False
    # the tracker that gets the metric values; see job/supervisor/tracker.py
    tracker: Literal["none", "wandb", "mlflow"] = added_later("none")
    env: dict[str, str] | None = added_later(None)  # the tracker's environment variables
    # environment variables of the tracker whose values are secrets, as NAME: ssm:/name or secretsmanager:name
    secrets: dict[str, str] | None = added_later(None)

    def __hash__(self) -> int:
        return hash(repr(self))  # it has maps, which cannot be hashed


@dataclass(frozen=True, kw_only=True, slots=True)
class Guard:
    """When a run is taken to have diverged (with NaN and infinity it always is), and how often it then resumes from an
    earlier checkpoint.
    """

    divergence: bool = True  # if False, a loss that rises and stays high has no consequence
    # nats above the lowest upper decile of all windows of `window` logged losses
    rise: float = bounded(1.0, 0.001, 1000.0)
    window: int = bounded(50, 10, 10_000)  # number of logged losses in a window
    in_a_row: int = bounded(10, 2, 10_000)  # number of high logged losses in a row that starts an evaluation
    retries: int = bounded(2, 0, 100)  # how often the run resumes from the last good checkpoint before it fails
    lr_factor: float = bounded(0.5, 0.01, 1.0)  # factor on every learning rate at each retry


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """The dtype of the matmuls; master weights, gradients and moments are fp32."""

    compute: Literal["bf16", "fp32"] = "bf16"


@dataclass(frozen=True, kw_only=True, slots=True)
class Code:
    """The folder of the user's repository to ship as a hashed archive."""

    folder: str = "."
    exclude: tuple[str, ...] = ()  # patterns in addition to git's ignored files
    max_mib: int = bounded(200, 1, 5000)


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseSize:
    """One phase in numbers. `flops_per_token` is useful work of training: forward and backward, no recompute.

    Further work is: `evaluations`, each with forward passes over `evaluation_tokens`; one forward pass over
    `forward_tokens`; and `decode_steps` tokens, which are generated one after another in each of `decode_sequences`.
    The sequences are split over the ranks, and each rank decodes `decode_at_once` of them at a time. `cpu_core_s` is
    spread over the node's vCPUs, `gpu_s` over `workers` (0: as many as the node has GPUs).
    """

    name: str
    # The kind of training whose speeds are used: from scratch, all weights, adapter, or mixture; empty if there is
    # none.
    kind: str = ""
    params_total: int
    params_active: int
    params_trained: int  # parameters with gradients and moments
    flops_per_token: int
    optimizer_traffic_bytes_per_param: int  # bytes that one optimizer step reads and writes, per trained parameter
    steps: int
    tokens_per_step: int  # over all ranks
    evaluations: int = 0
    evaluation_tokens: int = 0
    forward_tokens: int = 0
    forward_share: float = 1 / 3  # the share of flops_per_token that a forward pass alone needs
    decode_steps: int = 0
    decode_sequences: int = 1
    decode_at_once: int = 1
    cpu_core_s: float = 0.0
    gpu_s: float = 0.0
    workers: int | None = None
    # host time to launch the kernels of a step, while the GPU works; a step takes the longer of the two times
    launch_ms: float = 0.0
    micro_launch_ms: float = 0.0  # the same time per micro-batch, if the node decides the number of micro-batches
    row_host_ms: float = 0.0  # host time per row of a rank: preparation at run time
    slower: float = 1.0  # factor on the time of its kind of work if a setting that speeds it up is off
    growth_s: float = 0.0  # seconds before the phase's first step, to make and check a model that changes shape
    models: int | None = None  # models that train side by side, each on one rank; None: the ranks share each step
    sharded: bool = False  # whether the trained state is split over the ranks (FSDP2); if not, each rank has a copy
    gathered_bytes: int = 0  # bytes of split weights that each micro-batch gathers from the ranks
    # The form of attention that is assumed in flops_per_token; None if there is none.
    attention: Literal["causal", "full"] | None = "causal"
    # seconds, for a run with an unknown number of steps, in which a step stands for one second
    counts: Literal["steps", "epochs", "seconds"] = "steps"
    # the name of its validation loss, of which lower values are better; None if no data are held out
    validation: str | None = "val"
    may_stop_early: bool = False  # whether the phase may end by itself before its last step
    waits_for_saves: bool = False  # whether training waits until a save is written

    def shared_by(self, ranks: int) -> float:
        """By how many ranks the time of a step is divided: with `models`, the rank with the most models decides."""
        return ranks if self.models is None else self.models / -(-self.models // ranks)

    def evaluation_s(self, step_s: float) -> float:
        """Seconds of one evaluation, if a step takes `step_s`."""
        return step_s / self.tokens_per_step * self.forward_share * self.evaluation_tokens


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """The memory that one GPU needs, in GB. `total_gb` is the peak, not the sum: without accumulation, gradients appear
    in the backward pass while activations are freed, so the two share memory; with accumulation all of them exist at
    once.
    """

    weights_gb: float  # master weights, and their copy if the compute dtype differs
    gradients_gb: float
    moments_gb: float
    activations_gb: float
    logits_gb: float
    total_gb: float

    @property
    def parts(self) -> dict[str, float]:
        """GB of each part by its name."""
        names = ("weights", "gradients", "moments", "activations", "logits")
        return {name: getattr(self, f"{name}_gb") for name in names}


@dataclass(frozen=True, kw_only=True, slots=True)
class Sizes:
    """Bytes that a job reads and writes. A field that is said to be `by phase` has one entry for each phase, in
    order.
    """

    checkpoints: tuple[int, ...]  # by phase: trained weights and their moments, over all ranks
    # by phase: the checkpoint at the end of the phase, without moments, which are not needed any more
    phase_ends: tuple[int, ...]
    exports: dict[str, int]  # bytes of files with weights alone, which are exported beside the checkpoints, in order
    final: dict[str, int]  # bytes of the files in final/, which `gpufleet results` downloads, in the order of writing
    final_if_cut: tuple[int, ...]  # by phase: bytes of final/ if a limit ends the run in this phase
    dataset: int  # bytes of the prepared dataset, estimated before it exists
    base_weights: int = 0  # bytes of base weights that a node downloads before the first step
    inputs: int = 0  # bytes of the folder in storage.inputs that a job with a dataset reads
    staged_in_memory: bool = True  # whether the host keeps a checkpoint in memory while it is written
    results: bool = True  # whether a finished run leaves results.json


@dataclass(frozen=True, kw_only=True, slots=True)
class Rung:
    """One way to split the global batch: micro-batches of `micro` per rank and pass, the last one maybe smaller.

    `micro` counts the units of the experiment's batch: windows, packed rows or queries. If `checkpointing`, a block
    keeps the results of its matrix products, and computes all others again in the backward pass; if `products_too`, it
    keeps only its input.
    """

    micro: int
    checkpointing: bool = False
    products_too: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Demands:
    """What a job needs from its node."""

    one_node: str = ""  # why several nodes do not help; empty if they do
    apart: str = ""  # advice if each of several nodes would train alone; empty if they train together
    like_nodes: bool = False  # whether only a node with the same number of GPUs can resume its checkpoints
    # whether the interval between saves is unknown; this is a problem only if nodes are interrupted
    interval: bool = False
    container_options: str = ""  # options for `docker run`; {app}: the job archive's folder
    code: Code | None = None  # the user's code, which a node gets beside gpufleet's own
    installs: bool = False  # whether the job may install packages in its container
    inputs: tuple[tuple[str, str], ...] = ()  # entries of storage.inputs that it uses, as (path of the key, name)
    takes: tuple[str, ...] = ()  # the only files that it takes from an earlier stage's output; empty for all
    leaves: tuple[str, ...] = ()  # the files of final/ that it writes for a later stage which needs certain files
    # The secrets in Parameter Store (ssm:/name) and Secrets Manager (secretsmanager:name) that a node may read, by
    # their names in the parameters; and the secret with user:password for the image's registry.
    secrets: Mapping[str, str] = field(default_factory=dict)
    login: str | None = None
    capability: float = 0.0  # the least compute capability of a GPU that the job runs on, if it needs a newer one
    node_role: bool = False  # whether the job itself has its node's rights
    held_minutes: float = 0.0  # minutes that a node stays after its run has failed


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldTime:
    """How long a step, or an epoch, takes on a GPU, as declared."""

    section: str  # the path of the section that declares the time, and the key in this section
    key: str
    gpu: str
    gpus: int | None  # the number of GPUs; None if it is not declared
    ms: float
    counts: bool  # whether the time is that of the run's own unit


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldSpeed:
    """How long a step takes, if the parameters declare it."""

    key: str  # the path of the key that declares the speed
    times: tuple[ToldTime, ...] = ()
    from_page: bool = False  # whether the time comes from a web page, and not from the user's own measurement
    hours: tuple[float, float, float] | None = None  # p10, p50 and p90 of the whole work; None if not declared


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeParts:
    """The parts of a checkpoint that nodes other than the leader have; the leader has all files that it writes."""

    reads: bool = False  # whether each node needs the checkpoint on its own disk
    leaves: bool = False  # whether each node writes a part of the checkpoint to its own disk
    of_rank: tuple[str, ...] = ()  # regular expressions for names of files that only the writing rank reads

    def is_of_rank(self, name: str) -> bool:
        """Whether only the rank that wrote this file of a checkpoint reads it."""
        return any(re.search(f"(^|/)({pattern})$", name) for pattern in self.of_rank)


def in_gb(
    *, weights: float, gradients: float, moments: float, activations: float, logits: float, peak: float | None = None
) -> Memory:
    """A Memory that is made from bytes. If no peak is given, the peak is the sum of all bytes."""
    return Memory(
        weights_gb=weights / GB,
        gradients_gb=gradients / GB,
        moments_gb=moments / GB,
        activations_gb=activations / GB,
        logits_gb=logits / GB,
        total_gb=(weights + gradients + moments + activations + logits if peak is None else peak) / GB,
    )


def processes(device: str, gpus: int | None, gpu_count: int, most: int) -> int:
    """The number of processes: one per GPU that is used; on a CPU as many as the parameters ask for; at most `most`."""
    wanted = (gpus or 1) if device == "cpu" else min(gpus or gpu_count, gpu_count)
    return max(1, min(wanted, most))
