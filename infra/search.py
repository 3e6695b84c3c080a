"""Which runs of a campaign lose, and which values are tried next. Optuna decides: its pruners and its samplers, by ask
and tell.

A study is made anew at each look, from what the runs have told, in the order of time. So a driver that was killed, or
another one, decides as the first would have done, and there is no file that can be lost. Figures are judged at the
multiples of `every`, as two runs may log at different steps.
"""

from __future__ import annotations

import hashlib
import heapq
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import groupby
from typing import TYPE_CHECKING, Any

from gpufleet.infra.definition.campaign import CampaignFile, DrawnRange
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.contract import metrics, reading
from gpufleet.job.contract.done import FINISHED
from gpufleet.job.contract.reading import DoubtError

if TYPE_CHECKING:
    import optuna

TRIES = 50  # of a draw that gives values which were drawn before
DIGITS = 6  # of a drawn number
JUDGED = 16  # judgements of a run in a simulated campaign with the slow median


@dataclass(frozen=True, kw_only=True, slots=True)
class ToldFigure:
    """A line of metrics.jsonl that has the metric."""

    at: float  # epoch seconds
    step: int
    figure: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProgress:
    """What a run has told. `ended` is the reason of its end; None: it goes on."""

    name: str
    figures: tuple[ToldFigure, ...] = ()
    ended: str | None = None
    values: Mapping[str, str] | None = None  # those that were drawn for it

    @classmethod
    def read(
        cls, name: str, metric: str, lines: bytes, *, ended: str | None, values: Mapping[str, str] | None = None
    ) -> TrialProgress:
        """The progress in the bytes of metrics.jsonl."""
        return cls(name=name, figures=tuple(_figures(lines, metric)), ended=ended, values=values)

    @property
    def last(self) -> float | None:
        """The newest figure."""
        return self.figures[-1].figure if self.figures else None

    def judged(self, every: int) -> Iterator[tuple[float, int, float]]:
        """The first figure at or after each multiple of `every`: its time, which multiple it is, and the figure."""
        for number, of in groupby(self.figures, lambda each: each.step // every):
            if number:
                first = next(of)
                yield first.at, number, first.figure


def _figures(lines: bytes, metric: str) -> Iterator[ToldFigure]:
    for each in metrics.records(lines.split(b"\n")):
        try:
            figure = float(reading.number(each.get(metric)))
        except DoubtError:
            continue
        yield ToldFigure(at=each["ts"], step=each["step"], figure=figure)


def told_figures(lines: bytes) -> list[str]:
    """The names of the figures in the bytes of metrics.jsonl."""
    return sorted({name for each in metrics.records(lines.split(b"\n")) for name, _ in metrics.scalars(each)})


def require_optuna() -> None:
    """Raises GpufleetError if Optuna is not installed."""
    if find_spec("optuna") is None:
        raise GpufleetError("a campaign with a pruner or a sampler needs Optuna: pip install 'gpufleet[search]'")


def losers(described: CampaignFile, told: Sequence[TrialProgress]) -> list[str]:
    """The runs that go on, and that the pruner would have stopped by now."""
    return _retold(described, told)[1] if described.pruner else []


def draw(described: CampaignFile, told: Sequence[TrialProgress]) -> dict[str, str] | None:
    """Values for the next run, as text by key; None if the sampler gives none that is new."""
    study, _ = _retold(described, told)
    taken = [each.values for each in told]
    for number in range(TRIES):
        study.sampler = _sampler(described, f"{described.name}/{len(told)}/{number}")
        params = study.ask(_distributions(described.draw)).params
        values = {key: _text(params[key], of) for key, of in described.draw.items()}
        if values not in taken:
            return values
    return None


def _retold(described: CampaignFile, told: Sequence[TrialProgress]) -> tuple[optuna.Study, list[str]]:
    """A study that was told all that the runs have told, in its order, and the runs that go on but lose."""
    study = _study(described)
    trials = [_ask(study, described.draw, each.values) for each in told]
    moments = [
        (at, False, index, number, figure)
        for index, each in enumerate(told)
        for at, number, figure in each.judged(described.every or 1)
    ]
    for index, each in enumerate(told):
        if each.ended is not None:
            moments.append((each.figures[-1].at if each.figures else 0.0, True, index, 0, 0.0))
    lost = set[str]()
    for _, is_end, index, number, figure in sorted(moments):
        if is_end:
            _tell_end(study, trials[index], told[index].last, is_whole=told[index].ended == FINISHED)
            continue
        trials[index].report(figure, number)
        if trials[index].should_prune():
            lost.add(told[index].name)
    return study, [each.name for each in told if each.name in lost and each.ended is None]


def _ask(study: optuna.Study, ranges: Mapping[str, DrawnRange], values: Mapping[str, str] | None) -> optuna.Trial:
    if not values:
        return study.ask()
    distributions = {key: each for key, each in _distributions(ranges).items() if key in values}
    study.enqueue_trial({key: _number(values[key], ranges[key]) for key in distributions})
    return study.ask(distributions)


def _tell_end(study: optuna.Study, trial: optuna.Trial, figure: float | None, *, is_whole: bool) -> None:
    """Tells the end of a run. One that ended before its work was done counts as stopped, with its newest figure."""
    from optuna.trial import TrialState

    if figure is None:
        study.tell(trial, state=TrialState.FAIL)
    elif is_whole:
        study.tell(trial, figure)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def _study(described: CampaignFile) -> optuna.Study:
    require_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if described.pruner == "asha":
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=described.reduction)
    elif described.pruner == "median":
        pruner = optuna.pruners.MedianPruner()
    sampler = _sampler(described, described.name)
    return optuna.create_study(direction=described.direction, pruner=pruner, sampler=sampler)


def _sampler(described: CampaignFile, seed: str) -> optuna.samplers.BaseSampler:
    """The sampler. Each draw has a seed of its own, or a study that is made anew would repeat its first draw."""
    import optuna

    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4])
    if described.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=number)
    return optuna.samplers.RandomSampler(seed=number)


def _distributions(ranges: Mapping[str, DrawnRange]) -> dict[str, optuna.distributions.BaseDistribution]:
    from optuna import distributions as of

    found: dict[str, optuna.distributions.BaseDistribution] = {}
    for key, each in ranges.items():
        if each.choices:
            found[key] = of.CategoricalDistribution(each.choices)
        elif each.is_whole:
            found[key] = of.IntDistribution(int(each.low), int(each.high), log=each.log, step=int(each.step or 1))
        else:
            step = float(each.step) if each.step else None
            found[key] = of.FloatDistribution(float(each.low), float(each.high), log=each.log, step=step)
    return found


def _text(value: Any, of: DrawnRange) -> str:
    """The drawn value as text, a number to its sixth digit unless that leaves the range."""
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.{DIGITS}g}"
    return short if float(of.low) <= float(short) <= float(of.high) else repr(value)


def _number(text: str, of: DrawnRange) -> Any:
    return text if of.choices else int(text) if of.is_whole else float(text)


def simulated_shares(described: CampaignFile, judgements: Sequence[int], orders: int) -> list[list[float]]:
    """The share of its work that each run does before it is stopped, for so many drawn orders of how good the runs
    are. `judgements` is how often each is judged until its end. Assumed is that a run keeps its rank from its first
    figure on, and that all runs take as long from one judgement to the next.
    """
    import numpy as np

    draws = np.random.default_rng(0)
    return [_shares(described, judgements, draws.permutation(len(judgements)).tolist()) for _ in range(orders)]


def _shares(described: CampaignFile, judgements: Sequence[int], figures: Iterable[float]) -> list[float]:
    study, shares = _study(described), [1.0] * len(judgements)
    waiting = [*enumerate(figures)][::-1]
    going_on: list[tuple[int, int, float, Any, list[int]]] = []  # by when each is judged next
    now = 0
    while waiting or going_on:
        while waiting and len(going_on) < described.at_once:
            index, figure = waiting.pop()
            numbers = _numbers(described, judgements[index])
            heapq.heappush(going_on, (now + numbers[0], index, figure, study.ask(), numbers))
        now, index, figure, trial, numbers = heapq.heappop(going_on)
        number, *later = numbers
        if not later:
            _tell_end(study, trial, figure, is_whole=True)
            continue
        trial.report(figure, number)
        if trial.should_prune():
            shares[index] = number / judgements[index]
            _tell_end(study, trial, figure, is_whole=False)
        else:
            heapq.heappush(going_on, (now + later[0] - number, index, figure, trial, later))
    return shares


def _numbers(described: CampaignFile, count: int) -> list[int]:
    """The judgements of a run that can stop it, of `count` until its end, and the end."""
    if described.pruner == "median":
        return [*range(max(1, count // JUDGED), count, max(1, count // JUDGED)), count]
    rungs = [described.reduction**rung for rung in range(count.bit_length())]
    return [*(each for each in rungs if each < count), count]
