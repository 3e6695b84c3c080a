"""One kind of job before it runs: what its parameters are, and all that follows from them. Pure: no torch, no AWS.

A kind is a frozen dataclass with the base `JobConfig`, whose three parts are the questions that it answers: what work
it is, what data it needs, how it saves. What follows from these answers alone is computed in `batch`. Speed is not
decided here: throughput comes from a peak and an efficiency, or from a calibration, and those belong to the bill.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import Field, replace
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast

from gpufleet.job.contract.inputs import Checks
from gpufleet.job.kind.common import Demands, Log, Memory, NodeParts, PhaseSize, Rung, Sizes, ToldSpeed, processes
from gpufleet.job.kind.dataset import Dataset, NoDataset

Processes = Literal["one", "per GPU", "own"]
Config = TypeVar("Config", bound="JobConfig")
Self = TypeVar("Self", bound="Workload")


def named(place: str) -> Any:
    """What `place`, module:name, stands for, imported now."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


class Probed(NamedTuple):
    """What a probe runs in place of a job."""

    config: JobConfig
    stop_at: int | None = None  # the step after which it is stopped; None: it ends by itself
    save_wait_s: float = 0.0  # how long to wait then for a save that nobody can ask for


class Alternative(NamedTuple):
    """Parameters under which the same data give as good a result."""

    setting: str  # what asks for them: `batch.tokens 131,072`
    config: JobConfig
    narrower: bool = False  # the same batch with a state of half the bytes; else a larger batch, in fewer steps


class Workload(ABC):
    """What a job answers about its work."""

    __slots__ = ()

    device: Literal["cuda", "cpu"]
    gpus: int | None = None  # of the node; None: all of them
    log: Log

    path: ClassVar[str] = "job.parameters"  # where a definition has the parameters
    module: ClassVar[str]  # of the trainer's process: `python -m MODULE WORKDIR`
    # One, wherever it runs; one per GPU, which gpufleet starts; or the user's own program, which a host of ours starts.
    processes: ClassVar[Processes] = "one"
    demands: ClassVar[Demands] = Demands()
    # Settings of its own that leave the time of a step, an evaluation or a save as it is (SPEED_LEFT has the others').
    leaves_speed: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def code_folders(cls) -> tuple[str, ...]:
        """Folders of job/ whose own files decide how long a step takes; empty: the code that trains is the user's, and
        a measurement of other code counts, with a word about it.
        """
        return ()

    @abstractmethod
    def phases(self) -> tuple[PhaseSize, ...]:
        """Every phase in order. The last one may have no optimizer steps: what is done after training."""

    @abstractmethod
    def memory(self, phase_index: int, rung: Rung, ranks: int = 1) -> Memory | None:
        """Predicted bytes on one GPU; None: nobody knows. Assumes that gradients are freed between optimizer steps, and
        that every activation which eager autograd keeps is kept, but where compiled steps were seen to keep fewer
        (bench/results/gpu.md).
        """

    @abstractmethod
    def sizes(self) -> Sizes:
        """Bytes of its checkpoints, exports and data."""

    @abstractmethod
    def rows(self) -> int | None:
        """The rows of a step over all ranks: windows, packed rows or queries, whatever a micro-batch counts. None:
        nobody knows what a batch is.
        """

    @abstractmethod
    def ladder(self, ranks: int = 1) -> tuple[Rung, ...]:
        """Ways to cut the batch, largest first, then activation checkpointing. The global batch, and with it the
        result, never changes. A micro-batch set in the parameters starts it lower.
        """

    def ranks(self, gpu_count: int, nodes: int = 1) -> int:
        """Processes on a node with `gpu_count` GPUs, one per GPU used; on a CPU run as many as the parameters ask for.
        On several `nodes` as many on each, together never more than a step has rows.
        """
        if self.processes == "one":
            return 1
        rows = self.rows() or 1
        each = processes(self.device, self.gpus, gpu_count, rows)
        return min(each * nodes, max(each, rows))

    def gpus_needed(self, there: int = 1) -> int:
        """The GPUs without which a node that has `there` of them cannot run the job; of 1, the fewest that any can."""
        return 1 if self.device == "cpu" else self.gpus or self.ranks(there)

    def products(self) -> str:
        """What a GPU's matrix products are in: `bf16`, `fp32` or `tf32`."""
        return "fp32"

    def problems(self) -> list[tuple[str, str]]:
        """What no field's own range can say, as (path under `path`, sentence)."""
        return []

    def doubts(self, steps: int) -> Iterator[str]:
        """Settings that make a paid run worthless, a sentence each. `steps`: of its longest phase, as prepared."""
        yield from ()

    @property
    def told_speed(self) -> ToldSpeed | None:
        """How long a step takes, as the parameters say it. None: that follows from what its phases compute."""
        return None

    @abstractmethod
    def probed(self, steps: int) -> Probed:
        """About `steps` optimizer steps of the same work, reaching every phase that has any, without saves that a clock
        asks for. The whole job, to be stopped, where its data say how long it is.
        """

    def completed(
        self: Self,
        *,
        hours: float = 0.0,
        save_bytes: int | None = None,
        save_steps: int | None = None,
        saves_on_stop: bool = False,
    ) -> Self:
        """The parameters with what is known from elsewhere and they only declare, or do not say: `hours` of work; bytes
        of a save, steps between two, whether a stop made one, as measured.
        """
        return self

    def variants(self) -> Iterator[Alternative]:
        """The smallest change first. None where the parameters say how many steps there are, or nobody knows what a
        batch is.
        """
        yield from ()


class DataNeeded:
    """What a job answers about the data that it needs."""

    __slots__ = ()

    dataset_kind: ClassVar[str] = ""  # of dataset.json; empty: it has none
    dataset_checks: ClassVar[Checks] = {}  # what dataset.json must say

    @property
    def dataset(self) -> Dataset[Any]:
        """The data that it trains on, for who prepares it."""
        return NoDataset(self)

    def with_facts(self: Config, facts: Mapping[str, Any]) -> Config:  # type: ignore[misc]
        """The parameters with the counts of the prepared dataset, from the facts of its manifest, in place of those
        that they expect.
        """
        return self


class Beating(Protocol):
    """A section `checkpoint`."""

    @property
    def heartbeat_s(self) -> float: ...


class Saving(ABC):
    """What a job answers about how it saves."""

    __slots__ = ()

    checkpoint: Beating
    parts: ClassVar[NodeParts] = NodeParts()

    @property
    def saves(self) -> bool:
        """Whether the job has checkpoints. Without any a loss repeats all of its work."""
        return True

    @abstractmethod
    def save_interval_s(self, step_s: float) -> float:
        """Between two timed checkpoints, in seconds, where a step takes `step_s`."""

    def steps_between_saves(self) -> int | None:
        """Steps from one save to the next; None when the job saves by the clock."""
        return None

    @property
    def saves_on_signal(self) -> bool | None:
        """Whether a request to stop leaves a checkpoint; None: not known."""
        return True

    @property
    def grace_s(self) -> float:
        """Seconds that it is given to save, beyond what the bill predicts of a save."""
        return 0.0

    @property
    def delivers_best(self) -> bool:
        """Whether final/ is to hold the weights of the last phase's best evaluation, not those after the last step."""
        return False


class JobConfig(Workload, DataNeeded, Saving):
    """The parameters of a job, as job.parameters of a definition and of run.json gives them."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def changed(config: Config, **sections: Any) -> Config:
    """The parameters with other values."""
    return cast(Config, replace(cast(Any, config), **sections))


def require(config: JobConfig) -> None:
    """Raises ValueError with every problem, for who is about to build the model."""
    if found := config.problems():
        raise ValueError("; ".join(f"job.parameters.{path}: {text}" for path, text in found))
