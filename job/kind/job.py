"""A kind of job before it runs: its parameters, and everything that can be computed from them. The module uses neither
torch nor AWS.

A kind is a frozen dataclass with the base `JobConfig`, whose three parts are the questions that it answers: what its
work is, which data it needs, and how it saves. The module `batch` uses only these answers. Speed is not decided here:
the bill computes it from a peak and an efficiency, or from a calibration.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import Field, replace
from importlib import import_module
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, cast

from gpufleet.job.contract.inputs import Checks
from gpufleet.job.kind import variables
from gpufleet.job.kind.common import Demands, Log, Memory, NodeParts, PhaseSize, Rung, Sizes, ToldSpeed, processes
from gpufleet.job.kind.dataset import Dataset, NoDataset

Processes = Literal["one", "per GPU", "own"]
Config = TypeVar("Config", bound="JobConfig")
Self = TypeVar("Self", bound="Workload")


def named(place: str) -> Any:
    """The object that `place` names, a text such as `package.module:Name`. Imports its module."""
    module, _, name = place.partition(":")
    return getattr(import_module(module), name)


class Probed(NamedTuple):
    """The shortened job that a probe runs."""

    config: JobConfig
    stop_at: int | None = None  # the step at which the probe stops the job; None if the job ends by itself
    save_wait_s: float = 0.0  # seconds to wait for a save that cannot be requested


class Alternative(NamedTuple):
    """Other parameters, with which the result is as good, with the same data."""

    setting: str  # the setting by which a user chooses them: `batch.tokens 131,072`
    config: JobConfig
    # whether they are the same batch with half the bytes of state; if not, they are a larger batch in fewer steps
    narrower: bool = False


class Workload(ABC):
    """What a job answers about its work."""

    __slots__ = ()

    device: Literal["cuda", "cpu"]
    gpus: int | None = None  # GPUs of the node; None for all of them
    log: Log

    path: ClassVar[str] = "job.parameters"  # the path of the parameters in a definition
    module: ClassVar[str]  # the trainer's module: `python -m MODULE WORKDIR`
    # Which processes a node runs: a single one, on any device; one per GPU, which gpufleet starts; or the user's
    # command, which gpufleet's host starts.
    processes: ClassVar[Processes] = "one"
    demands: ClassVar[Demands] = Demands()
    # Settings of this kind that do not change the time of a step, an evaluation or a save, in addition to SPEED_LEFT.
    leaves_speed: ClassVar[tuple[str, ...]] = ()

    @classmethod
    def code_folders(cls) -> tuple[str, ...]:
        """The folders of job/ whose files decide how long a step takes. If there are none, the user's code decides it.
        A measurement of different code is then still used, with a warning.
        """
        return ()

    @abstractmethod
    def phases(self) -> tuple[PhaseSize, ...]:
        """Every phase in order. The last one may have no optimizer steps, but only work after training."""

    @abstractmethod
    def memory(self, phase_index: int, rung: Rung, ranks: int = 1) -> Memory | None:
        """Predicted bytes on one GPU; None if unknown. Assumes that gradients are freed between optimizer steps, and
        that all activations of eager autograd are kept, except where compiled steps were seen to keep fewer
        (bench/results/gpu.md).
        """

    @abstractmethod
    def sizes(self) -> Sizes:
        """The bytes of the job's checkpoints, exports and data."""

    @abstractmethod
    def rows(self) -> int | None:
        """Rows of a step over all ranks, in the unit of micro-batches: windows, packed rows or queries. None if
        unknown.
        """

    @abstractmethod
    def ladder(self, ranks: int = 1) -> tuple[Rung, ...]:
        """Ways to split the batch: first without activation checkpointing, the largest first, then with it. The global
        batch, and with it the result, never changes. If the parameters have a micro-batch, it comes first.
        """

    def ranks(self, gpu_count: int, nodes: int = 1) -> int:
        """Processes on a node with `gpu_count` GPUs, one per GPU used; on a CPU as many as the parameters ask for. Each
        of several `nodes` has the same number, and together they have at most as many as a step has rows.
        """
        if self.processes == "one":
            return 1
        rows = self.rows() or 1
        per_node = processes(self.device, self.gpus, gpu_count, rows)
        return min(per_node * nodes, max(per_node, rows))

    def gpus_needed(self, there: int = 1) -> int:
        """The least number of GPUs that the job needs on a node with `there` GPUs. If `there` is 1, the result is the
        least on any node. The result is 0 on a CPU.
        """
        return 0 if self.device == "cpu" else self.gpus or self.ranks(there)

    def products(self) -> str:
        """The dtype of matrix products on a GPU: `bf16`, `fp32` or `tf32`."""
        return "fp32"

    def problems(self) -> list[tuple[str, str]]:
        """Problems other than a field out of range: (key path, sentence)."""
        return []

    def doubts(self, steps: int) -> Iterator[str]:
        """Settings that would make a run worthless, with a sentence for each. `steps` is the number of steps of its
        longest phase with the prepared data.
        """
        yield from ()

    @property
    def told_speed(self) -> ToldSpeed | None:
        """How long a step takes, as the parameters declare it. None if it follows from the work of its phases."""
        return None

    @abstractmethod
    def probed(self, steps: int) -> Probed:
        """A job of about `steps` optimizer steps of the same work, in every phase that has any, without timed saves. If
        the length depends on the data, it is the whole job, which the probe then stops.
        """

    def completed(
        self: Self,
        *,
        hours: float = 0.0,
        save_bytes: int | None = None,
        save_steps: int | None = None,
        saves_on_stop: bool = False,
    ) -> Self:
        """The parameters, in which measured values replace those that they only declare or omit: the `hours` of work,
        the bytes of a save, the steps between two saves, and whether the job saved on a stop.
        """
        return self

    def variants(self) -> Iterator[Alternative]:
        """Alternatives, the smallest change first; none if the number of steps is given, or the batch is unknown."""
        yield from ()


class DataNeeded:
    """What a job answers about the data that it needs."""

    __slots__ = ()

    dataset_kind: ClassVar[str] = ""  # the dataset's kind in dataset.json; empty if the job has no dataset
    dataset_checks: ClassVar[Checks] = {}  # the entries that dataset.json must have

    @property
    def dataset(self) -> Dataset[Any]:
        """The data on which the job trains, for `prepare`."""
        return NoDataset(self)

    def with_facts(self: Config, facts: Mapping[str, Any]) -> Config:  # type: ignore[misc]
        """The parameters with the sizes of the prepared dataset, which come from the facts in its manifest and replace
        the expected sizes.
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
        """Whether the job has checkpoints. A job without checkpoints repeats all of its work after a node is lost."""
        return True

    @abstractmethod
    def save_interval_s(self, step_s: float) -> float:
        """Seconds between two timed checkpoints, if a step takes `step_s`."""

    def steps_between_saves(self) -> int | None:
        """Steps from one save to the next; None if the job saves by the clock."""
        return None

    @property
    def saves_on_signal(self) -> bool | None:
        """Whether a request to stop leaves a checkpoint; None if unknown."""
        return True

    @property
    def grace_s(self) -> float:
        """Seconds that the job gets for a save, in addition to the time that the bill predicts."""
        return 0.0

    @property
    def delivers_best(self) -> bool:
        """Whether final/ holds the weights of the last phase's best evaluation, and not those after the last step."""
        return False


class JobConfig(Workload, DataNeeded, Saving):
    """A job's parameters, from job.parameters of a definition or of run.json."""

    __slots__ = ()
    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]


def changed(config: Config, **sections: Any) -> Config:
    """The parameters with some values replaced."""
    return cast(Config, replace(cast(Any, config), **sections))


def secrets_needed(config: JobConfig) -> Mapping[str, str]:
    """All secrets that a node may read for the job and for its tracker, by name."""
    return {**config.demands.secrets, **(config.log.secrets or {})}


def problems_of(config: JobConfig) -> list[tuple[str, str]]:
    """The problems of this kind of job, and those that any kind may have: (key path, sentence)."""
    log = config.log
    problems = [*config.problems(), *variables.problems(f"{config.path}.log", "log.", log.env, log.secrets)]
    if log.tracker == "none" and (log.env or log.secrets):
        problems.append(("log.tracker", "wandb or mlflow, or no log.env and log.secrets: only a tracker gets them"))
    return problems


def require(config: JobConfig) -> None:
    """Raises ValueError with every problem; called before the model is built."""
    if problems := problems_of(config):
        raise ValueError("; ".join(f"job.parameters.{path}: {text}" for path, text in problems))
