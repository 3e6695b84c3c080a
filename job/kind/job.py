"""One kind of job before it runs: what its parameters are, and all that follows from them. Pure: no torch, no AWS.

A kind is a frozen dataclass with the base `JobConfig`, which answers what it does not answer itself. Speed is not
decided here: throughput comes from a peak and an efficiency, or from a calibration, and those belong to the bill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import Field, replace
from functools import lru_cache, wraps
from importlib import import_module
from typing import Any, ClassVar, Literal, Protocol, TypeVar, cast

from gpufleet.job.contract.inputs import Checks
from gpufleet.job.kind.common import (
    DEVICE_RESERVE_GB,
    Checkpoint,
    Code,
    Compute,
    Deliver,
    Guard,
    Log,
    Memory,
    PhaseSize,
    Rung,
    Sizes,
    processes,
)
from gpufleet.job.kind.dataset import Dataset

Self = TypeVar("Self", bound="JobConfig")
F = TypeVar("F", bound=Callable[..., Any])
_KEPT = 4096  # answers


def named(place: str) -> Any:
    """What `place`, module:name, stands for, imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


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


class Beating(Protocol):
    """A section `checkpoint`."""

    @property
    def heartbeat_s(self) -> float: ...


class JobConfig(ABC):
    """The parameters of a job, as job.parameters of a definition and of run.json gives them."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    seed: int
    device: Literal["cuda", "cpu"]
    gpus: int | None = None  # of the node; None: all of them
    data: Any
    optim: Any
    eval: Any = None  # None: it evaluates in a way of its own
    precision: Compute
    checkpoint: Beating
    guard: Guard
    log: Log
    deliver: Deliver = "last"  # the weights of final/

    module: ClassVar[str]  # of the trainer's process: `python -m MODULE WORKDIR`
    path: ClassVar[str] = "job.parameters"  # where a definition has them
    # Settings of its own that leave the time of a step, an evaluation or a save as it is (SPEED_LEFT has the others').
    leaves_speed: ClassVar[tuple[str, ...]] = ()
    code_may_change: ClassVar[bool] = False  # whether a measurement of other code counts, with a word about it
    save_wait_s: float = 0.0  # that a probe waits for a save that nobody can ask for
    dataset_class: ClassVar[str] = "gpufleet.job.kind.dataset:NoDataset"  # imported when it is asked for
    dataset_kind: ClassVar[str]  # of dataset.json; empty: it has none
    dataset_checks: ClassVar[Checks] = {}  # what dataset.json must say
    container_options: ClassVar[str] = ""  # words for `docker run`; {app}: the job archive's folder
    may_stop_early: ClassVar[bool] = False
    leaves_results: ClassVar[bool] = True  # results.json, at the end of a finished run
    one_node: ClassVar[str] = ""  # why several do not help it; empty: they do
    resumes_everywhere: ClassVar[bool] = False  # each of several nodes needs the checkpoint on its own disk
    leaves_parts: bool = False  # each of several nodes writes a part of a checkpoint to its own disk
    several_ranks: ClassVar[bool] = False  # one process per GPU, and not one alone wherever it runs

    @classmethod
    def code_folders(cls) -> tuple[str, ...]:
        """Folders of job/ whose own files decide how long a step takes; empty: the code that trains is the user's."""
        return ()

    @property
    def dataset(self) -> Dataset[Any]:
        """The data that it trains on, for who prepares it."""
        found: Dataset[Any] = named(self.dataset_class)(self)
        return found

    def is_of_rank(self, name: str) -> bool:
        """Whether a file of a checkpoint is read by that rank alone which has written it."""
        return False

    @property
    def delivers_best(self) -> bool:
        """Whether final/ is to hold the weights of the last phase's best evaluation, not those after the last step."""
        return self.deliver == "best"

    @abstractmethod
    def phases(self) -> tuple[PhaseSize, ...]:
        """Every phase in order. The last one may have no optimizer steps: what is done after training."""

    @abstractmethod
    def memory(self, phase_index: int, micro_batch: int, *, checkpointing: bool = False, ranks: int = 1) -> Memory:
        """Predicted bytes on one GPU. Assumes that gradients are freed between optimizer steps, and that every
        activation which eager autograd keeps is kept, but where compiled steps were seen to keep fewer
        (bench/results/gpu.md).
        """

    def memory_on(self, phase_index: int, rung: Rung, ranks: int = 1) -> Memory:
        """`memory` with the batch cut so."""
        return self.memory(phase_index, rung.micro, checkpointing=rung.checkpointing, ranks=ranks)

    @abstractmethod
    def sizes(self) -> Sizes:
        """Bytes of its checkpoints, exports and data."""

    @abstractmethod
    def rows(self) -> int:
        """The rows of a step over all ranks: windows, packed rows or queries, whatever a micro-batch counts."""

    @abstractmethod
    def ladder(self, ranks: int = 1) -> tuple[Rung, ...]:
        """Ways to cut the batch, largest first, then activation checkpointing. The global batch, and with it the
        result, never changes. A micro-batch set in the parameters starts it lower.
        """

    def problems(self) -> list[tuple[str, str]]:
        """What no field's own range can say, as (path under `path`, sentence)."""
        return []

    @property
    def shipped(self) -> Code | None:
        """The user's code that a node gets beside gpufleet's own; None: there is none."""
        return None

    def trains_apart(self) -> str:
        """What to write where each of several nodes would train alone, or none could know rank 0; empty: they train
        together, as ready-made jobs do.
        """
        return ""

    @property
    def login(self) -> str | None:
        """Where user:password for the image's registry are kept, as `secrets_named` has them; None: it needs none."""
        return None

    @property
    def secrets_named(self) -> dict[str, str]:
        """What a node may read of Parameter Store (ssm:/name) and Secrets Manager (secretsmanager:name), by what the
        parameters call it.
        """
        return {}

    @property
    def has_node_role(self) -> bool:
        """Whether the job itself may do what its node may."""
        return False

    def inputs_named(self) -> Iterator[tuple[str, str]]:
        """The entries of storage.inputs that the parameters use, as (path of the key, name)."""
        yield from ()

    @property
    def says_when_it_saves(self) -> bool:
        """Whether `save_interval_s` is more than a guess."""
        return True

    @property
    def needs_like_nodes(self) -> bool:
        """Whether a node can resume only what one with equally many GPUs has saved."""
        return False

    def with_facts(self: Self, facts: Mapping[str, Any]) -> Self:
        """The parameters with the counts of the prepared dataset, from the facts of its manifest, in place of those
        that `data` and `eval` expect.
        """
        return self

    def products(self) -> str:
        """What a GPU's matrix products are in: `bf16`, `fp32` or `tf32`."""
        return self.precision.compute

    def state_dtype(self, phase_index: int) -> str:
        """fp32 or bf16: weights, gradients and moments alike."""
        return "fp32"

    def state_in_words(self) -> str:
        """What weights, gradients and moments are kept in, and what is in fp32 besides."""
        return "fp32; loss and norms in fp32"

    @property
    def saves(self) -> bool:
        """Whether it has checkpoints: without any a loss repeats all that it has done."""
        return True

    @property
    def held_minutes(self) -> float:
        """That a node stays after its run has failed."""
        return 0.0

    def waits_for_saves(self) -> bool:
        """Whether training stands still until a save is written."""
        return False

    def save_interval_s(self, step_s: float) -> float:
        """Between two timed checkpoints, in seconds, where a step takes `step_s`."""
        return cast(Checkpoint, self.checkpoint).interval_s

    def as_measured(self: Self, *, save_bytes: int | None, save_steps: int | None, saves_on_stop: bool) -> Self:
        """The parameters with what was measured of its saves, where they only declare it: bytes, steps between two,
        whether a stop made one.
        """
        return self

    def untimed(self: Self) -> Self:
        """The parameters for a probe, which asks for its own saves: without those that a clock asks for."""
        return self.changed(checkpoint=replace(cast(Checkpoint, self.checkpoint), interval_s=86400.0))

    def gpus_named(self) -> Iterator[tuple[str, str, str]]:
        """Where its own parameters say by GPU how long a step takes: the section's path, the key in it, its GPU."""
        yield from ()

    def bounded(self: Self, hours: float) -> Self:
        """The parameters with `hours` of work, where they do not say how long the job is."""
        return self

    @property
    def is_endless(self) -> bool:
        """Whether nobody says how long it is: it trains until a limit."""
        return False

    @property
    def memory_is_predicted(self) -> bool:
        """Whether `memory` says anything."""
        return True

    @property
    def saves_on_signal(self) -> bool | None:
        """Whether a request to stop leaves a checkpoint; None: not known."""
        return True

    @property
    def grace_s(self) -> float:
        """Seconds that it is given to save, beyond what the bill predicts of a save."""
        return 0.0

    @property
    def is_users_own(self) -> bool:
        """Whether the code that trains is the user's, of which nothing is known but what the file says."""
        return False

    @property
    def installs(self) -> bool:
        """Whether it may put packages where it runs."""
        return False

    def steps_between_saves(self) -> int | None:
        """None: it saves by the clock."""
        return None

    def staged_in_host_memory(self, phase_index: int) -> int:
        """Bytes of a checkpoint that the host holds while it is written."""
        return self.sizes().checkpoints[phase_index]

    def compiles(self) -> bool:
        """Whether blocks and loss are compiled on a GPU."""
        return True

    def runs_compiled(self) -> bool:
        """Whether its steps run compiled: on a GPU, unless they are told not to."""
        return self.device == "cuda" and self.compiles()

    def narrower(self: Self) -> tuple[Self, str] | None:
        """The parameters with a state of half the bytes, and the setting that asks for it. None: there is none."""
        return None

    def doubts(self, steps: int) -> Iterator[str]:
        """Settings that make a paid run worthless, a sentence each. `steps`: of its longest phase, as prepared."""
        yield from ()

    def larger_batches(self: Self) -> Iterator[tuple[str, Self]]:
        """Batches in which the same data take fewer steps, the smallest first, as (`batch.tokens 131,072`, parameters).
        None where the parameters say how many steps there are, or nobody knows what a batch is.
        """
        yield from ()

    def shortened(self: Self, steps: int) -> Self:
        """About `steps` optimizer steps of the same work, reaching every phase that has any. The job itself where its
        data says how long it is: that one is stopped.
        """
        return self

    def changed(self: Self, **sections: Any) -> Self:
        """The parameters with other values."""
        return cast(Self, replace(cast(Any, self), **sections))

    def require(self) -> None:
        """Raises ValueError with every problem, for who is about to build the model."""
        if found := self.problems():
            raise ValueError("; ".join(f"job.parameters.{path}: {text}" for path, text in found))

    def ranks(self, gpu_count: int, nodes: int = 1) -> int:
        """Processes on a node with `gpu_count` GPUs, one per GPU used; on a CPU run as many as the parameters ask for.
        On several `nodes` as many on each, together never more than a step has rows.
        """
        if not self.several_ranks:
            return 1
        each = processes(self.device, self.gpus, gpu_count, self.rows())
        return min(each * nodes, max(each, self.rows()))

    def launched(self, ranks: int) -> int:
        """Processes that the supervisor starts where `ranks` train."""
        return ranks

    def least_gpus(self) -> int:
        """The fewest GPUs that a node must have to run the job: as many as the parameters ask for, else 1."""
        return 1 if self.gpus is None or self.device == "cpu" else self.gpus

    def gpus_used(self, gpu_count: int) -> int:
        """GPUs that it needs of a node which is said to have `gpu_count`."""
        return self.ranks(gpu_count)

    def rows_per_rank(self, ranks: int) -> int:
        """The rows that each rank takes in a step, the same number on every rank."""
        return -(-self.rows() // ranks)

    def empty_rows(self, ranks: int) -> int:
        """The empty rows of a step over all ranks, taken where its rows run out."""
        return self.rows_per_rank(ranks) * ranks - self.rows()

    def total_steps(self) -> int:
        """Optimizer steps of all phases together."""
        return sum(phase.steps for phase in self.phases())

    def micro_batches(self, rung: Rung, ranks: int) -> int:
        """That one rank runs in an optimizer step."""
        return -(-self.rows_per_rank(ranks) // rung.micro)

    def fits(self, rung: Rung, gpu_memory_gb: float, phase_index: int | None = None, ranks: int = 1) -> bool:
        """Whether the predicted peak and the reserve fit, in one phase or in all of them."""
        chosen = range(len(self.phases())) if phase_index is None else (phase_index,)
        return all(self.memory_on(i, rung, ranks).total_gb + DEVICE_RESERVE_GB <= gpu_memory_gb for i in chosen)

    @remembered
    def choose_rung(self, gpu_memory_gb: float, phase_index: int | None = None, ranks: int = 1) -> Rung | None:
        """The highest rung predicted to fit (in every phase when `phase_index` is None). None: nothing fits."""
        return next((rung for rung in self.ladder(ranks) if self.fits(rung, gpu_memory_gb, phase_index, ranks)), None)

    def lower_rung(self, rung: Rung, phase_index: int, ranks: int = 1) -> Rung | None:
        """Where to go after a real out-of-memory: the next rung that is predicted to need less, so that a cut which
        starts to accumulate, and therefore keeps gradients beside activations, is passed over. None: the end.
        """
        rungs = self.ladder(ranks)
        now = self.memory_on(phase_index, rung, ranks).total_gb
        for lower in rungs[rungs.index(rung) + 1 :]:
            if self.memory_on(phase_index, lower, ranks).total_gb < now:
                return lower
        return None
