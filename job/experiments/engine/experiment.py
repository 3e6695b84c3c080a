"""The interface between the loop and an experiment."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job.experiments.engine import optimizer
from gpufleet.job.experiments.engine.checkpoint import Checkpoints
from gpufleet.job.experiments.engine.device import Device
from gpufleet.job.experiments.engine.metrics import MetricsFile
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.requests import Requests
from gpufleet.job.experiments.spec import ExperimentConfig
from gpufleet.job.kind.common import PhaseSize, Rung

IGNORED = -100  # a target that the loss ignores, as in F.cross_entropy
# seconds between two lines of an evaluation: a trainer that prints nothing for a long time is taken to be stuck
SPOKEN_S = 60.0


class Stopped(Exception):
    """Raised after a stop request. `ends`: see messages.Stop."""

    def __init__(self, reason: str, *, ends: bool = False) -> None:
        super().__init__(reason)
        self.ends = ends


class LostError(ValueError):
    """The current weights cannot be used any more; an earlier checkpoint may be good."""


class LossNotFiniteError(LostError):
    """Loss, gradients or weights became NaN or infinite. The last committed checkpoint is from an earlier step, and is
    good.
    """


class ForwardOutput(Protocol):
    """The fields that every module's forward pass returns."""

    @property
    def loss_sum(self) -> Tensor | None:
        """Scalar, fp32 or wider: the loss summed over this micro-batch's tokens."""

    @property
    def aux(self) -> dict[str, Tensor]:
        """Detached metric values to log, by name. Integers are summed over all ranks; other values are averaged over
        all ranks, weighted by tokens.
        """

    @property
    def aux_loss(self) -> Tensor | None:
        """Scalar mean over the micro-batch, without its coefficient (`Experiment.aux_weight`)."""


class Micro(NamedTuple):
    """One forward and backward pass: `module(*inputs)`."""

    inputs: tuple[Any, ...]  # tensors and constants; a graph is made for each value of a constant
    tokens: int  # tokens over which the loss is summed
    place: int = 0  # the place of the micro-batch's first row in the global batch; (seed, step, place) seeds dropout


class Work(NamedTuple):
    """This rank's share of one global batch. `total` is the number of loss tokens on all ranks, so that the split of a
    batch does not change the loss or the gradient.
    """

    micros: Iterable[Micro]
    total: int
    full: float = 1.0  # the share of a full step's rows: the last step of all epochs may have fewer


class Weights(NamedTuple):
    """The weights after `step` steps. `val_loss`: the loss of exactly these weights; None if they were not
    evaluated.
    """

    step: int
    val_loss: float | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """At most `steps` optimizer steps with one model. `first` is the number of steps before the phase."""

    index: int
    name: str
    first: int
    steps: int
    flops_per_token: float  # FLOPs of training: forward and backward
    tokens_per_step: int  # in the global batch, for tok/s and MFU
    validation: str | None = "val"  # the name of the validation loss in the console line; None if no data are held out

    @classmethod
    def from_size(cls, size: PhaseSize, *, index: int = 0, first: int = 0, steps: int | None = None) -> Phase:
        """The phase with this size. `steps` replaces the number of steps in the size, if it depends on the data."""
        return cls(
            index=index,
            name=size.name,
            first=first,
            steps=size.steps if steps is None else steps,
            flops_per_token=size.flops_per_token,
            tokens_per_step=size.tokens_per_step,
            validation=size.validation,
        )

    @classmethod
    def chain(cls, sizes: Iterable[PhaseSize]) -> list[Phase]:
        """The phases of the sizes, one after another."""
        phases: list[Phase] = []
        for index, size in enumerate(sizes):
            phases.append(cls.from_size(size, index=index, first=phases[-1].last if phases else 0))
        return phases

    @property
    def last(self) -> int:
        """The number of steps at the phase's end."""
        return self.first + self.steps


@dataclass(frozen=True, kw_only=True, slots=True)
class Session:
    """One start of the trainer on one rank: its arguments and surroundings."""

    workdir: Path
    config: ExperimentConfig
    config_sha256: str
    device: Device
    world: World
    data: Path  # the prepared dataset
    inputs: Path | None  # the base weights; None if the experiment uses none
    checkpoints: Checkpoints
    metrics: MetricsFile
    requests: Requests
    rung: int  # the highest allowed rung; a lower one is used if the predicted memory requires it
    predicted: Sequence[dict[str, Any]]  # the bill's predictions for each phase; may be empty
    say: Callable[[str], None]  # prints a line on rank 0, and nothing on other ranks

    def prediction(self, phase: str) -> dict[str, Any] | None:
        """The bill's predictions for the phase of this name."""
        return next((figures for figures in self.predicted if figures.get("phase") == phase), None)

    def evaluation(self, work: Work) -> Iterator[Micro]:
        """The micro-batches of an evaluation; prints its progress once a minute. Raises Stopped between two of them."""
        spoke_at, seen = time.monotonic(), 0
        for number, micro in enumerate(work.micros):
            if number:
                self.check_stop()
            if number and time.monotonic() >= spoke_at + SPOKEN_S:
                spoke_at = time.monotonic()
                self.say(f"evaluation: {seen * self.world.size / work.total:.0%} of its tokens")
            seen += micro.tokens
            yield micro

    def check_stop(self) -> None:
        """Raises Stopped on all ranks together if a stop was requested; To be called between parts of work that has no
        steps.
        """
        stop = self.requests.stop() if self.world.first else None
        agreed = self.world.agree(None if stop is None else (stop.reason, stop.ends))
        if agreed is not None:
            raise Stopped(agreed[0], ends=agreed[1])


class Experiment(ABC):
    """The methods that the loop calls, on every rank and in the same order. Only rank 0 may write a file.

    `progress` is JSON that every checkpoint contains, the same on all ranks.
    """

    session: Session
    phases: Sequence[Phase]
    progress: dict[str, Any]
    outcome: Mapping[str, Any] = MappingProxyType({})  # the loop's result, for results.json and final/meta.json
    aux_weight: float = 0.0  # the weight of aux_loss in the objective
    # Whether each improvement is saved at exactly its step. If not, only the interval and stops lead to saves.
    saves_improvements: bool = True

    @abstractmethod
    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """A phase's model at its first step, on the device, sharded or replicated (parallel.py)."""

    @abstractmethod
    def blank(self, phase: Phase) -> nn.Module:
        """The module into which a checkpoint is read; tensors that are not in `weights` already have their values."""

    @abstractmethod
    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        """A new optimizer whose state already exists (by `optimizer.make`, or as zeros in its `state`)."""

    @abstractmethod
    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Sets every group's rate for the step that follows `step` steps of the run; returns the one to log."""

    @abstractmethod
    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        """This rank's part of the global batch after `step` steps: a pure function of (seed, step, rank)."""

    @abstractmethod
    def validation(self, phase: Phase, rung: Rung) -> Work:
        """This rank's part of the validation batches, which are the same every time."""

    def evaluated(self, phase: Phase, step: int) -> bool:
        """Whether the loop evaluates after `step` steps: every config.eval.every steps, and at the end of a phase."""
        evaluation = self.session.config.eval
        return step == phase.last or (evaluation is not None and (step - phase.first) % evaluation.every == 0)

    def evaluate(self, phase: Phase, step: int, module: nn.Module, rung: Rung) -> float | None:
        """The val_loss to log after `step` steps. Calls `measure`, and computes and keeps other values that the
        experiment needs. Raises Stopped as `measure` does; the next start then repeats the evaluation.
        """
        return self.measure(phase, module, rung)

    @torch.no_grad()
    def measure(self, phase: Phase, module: nn.Module, rung: Rung) -> float | None:
        """The validation loss: lower is better, and it is the same on every rank. Has no side effect. The default is
        the mean loss in nats per token. None if the phase has no held-out data. Raises Stopped on all ranks together if
        a stop was requested before it is done.
        """
        module.eval()
        work = self.validation(phase, rung)
        total = torch.zeros((), dtype=torch.float64, device=self.session.device.torch)
        for micro in self.session.evaluation(work):
            total += module(*micro.inputs).loss_sum.double()
        module.train()
        return self.session.world.sum(total).item() / work.total

    def clip(self, opt: Optimizer) -> Tensor:
        """Clips the gradients of the next step; returns the global norm before clipping, as a scalar on the device."""
        limit: float = getattr(self.session.config.optim, "clip", 0.0)
        return optimizer.clip(opt, limit)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The tensors of the module that a checkpoint contains."""
        state: dict[str, Tensor] = module.state_dict()
        return state

    def logged(self, aux: dict[str, Tensor]) -> dict[str, Any]:
        """The values for metrics.jsonl that are made from `aux` when a step is logged. Waits for the device."""
        return {name: [round(x, 4) for x in tensor.flatten().tolist()] for name, tensor in aux.items()}

    def stop_early(self, phase: Phase, step: int, val_loss: float | None) -> str | None:
        """The reason why the phase ends now; None if it goes on. The engine asks after each evaluation."""
        return None

    def requires(self, phase: Phase) -> tuple[str, ...]:
        """Files that cannot be made again after a resume from a checkpoint of this phase, as paths in the work
        folder.
        """
        return ()

    @abstractmethod
    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        """Writes exports and samples of the module, which has `weights`. This is repeated when a run resumes from the
        end of a phase. May raise Stopped.
        """

    def cut(self, step: int, weights: Weights) -> None:  # noqa: B027 - may be nothing
        """Writes the files of a run that a limit ends after `step` steps; the module has `weights`."""

    @abstractmethod
    def finish(self) -> None:
        """Does the work that follows training, and writes the files of a finished run. Raises Stopped after a stop
        request.
        """
