"""Decides which runs of a campaign lose, and which values are tried next, by Optuna's pruners and samplers.

A new Optuna study is made for each decision, from the metric values that the runs have reported, in the order of time.
So any driver makes the same decisions as a driver that was killed, and there is no file that can be lost. Metric values
are compared at multiples of `every`, because runs may log at different steps.
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

TRIES = 50  # how often the sampler is asked again if its values were already used
DIGITS = 6  # significant digits of a number that a sampler chooses
# the most judgements of a run in a simulated campaign with the median pruner, which is limited because that pruner is
# slow
JUDGED = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class MetricFigure:
    """A line of metrics.jsonl that has the metric."""

    at: float  # epoch seconds
    step: int
    figure: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TrialProgress:
    """The metric values that a run has reported. `ended`: the reason of its end; None if it goes on."""

    name: str
    figures: tuple[MetricFigure, ...] = ()
    ended: str | None = None
    values: Mapping[str, str] | None = None  # the values that the sampler has chosen for the run

    @classmethod
    def read(
        cls, name: str, metric: str, lines: bytes, *, ended: str | None, values: Mapping[str, str] | None = None
    ) -> TrialProgress:
        """The progress in the bytes of metrics.jsonl."""
        return cls(name=name, figures=tuple(_read_figures(lines, metric)), ended=ended, values=values)

    @property
    def last(self) -> float | None:
        """The newest metric value."""
        return self.figures[-1].figure if self.figures else None

    def judged(self, every: int) -> Iterator[tuple[float, int, float]]:
        """Yields the first metric value at or after each multiple of `every`: its time, the number of the multiple, and
        the value.
        """
        for multiple, figures in groupby(self.figures, lambda line: line.step // every):
            if multiple:
                first = next(figures)
                yield first.at, multiple, first.figure


def _read_figures(lines: bytes, metric: str) -> Iterator[MetricFigure]:
    for record in metrics.records(lines.split(b"\n")):
        try:
            figure = float(reading.number(record.get(metric)))
        except DoubtError:
            continue
        yield MetricFigure(at=record["ts"], step=record["step"], figure=figure)


def list_metrics(lines: bytes) -> list[str]:
    """The names of the metrics in the bytes of metrics.jsonl."""
    records = metrics.records(lines.split(b"\n"))
    return sorted({name for record in records for name, _ in metrics.scalars(record)})


def require_optuna() -> None:
    if find_spec("optuna") is None:
        raise GpufleetError("a campaign with a pruner or a sampler needs Optuna: pip install 'gpufleet[search]'")


def find_losers(described: CampaignFile, runs: Sequence[TrialProgress]) -> list[str]:
    """The names of those running trials that the pruner would have stopped by now."""
    return _retell(described, runs)[1] if described.pruner else []


def draw(described: CampaignFile, runs: Sequence[TrialProgress]) -> dict[str, str] | None:
    """Chooses values for the next run; returns them as text by key. None if the sampler has no new values."""
    study, _ = _retell(described, runs)
    taken = [run.values for run in runs]
    for number in range(TRIES):
        study.sampler = _make_sampler(described, f"{described.name}/{len(runs)}/{number}")
        params = study.ask(_make_distributions(described.draw)).params
        values = {key: _as_text(params[key], allowed) for key, allowed in described.draw.items()}
        if values not in taken:
            return values
    return None


def _retell(described: CampaignFile, runs: Sequence[TrialProgress]) -> tuple[optuna.Study, list[str]]:
    """Returns a study that contains everything the runs have reported, in the order of time, and the running trials
    that the pruner would stop.
    """
    study = _make_study(described)
    trials = [_ask(study, described.draw, run.values) for run in runs]
    events = [
        (at, False, index, multiple, figure)
        for index, run in enumerate(runs)
        for at, multiple, figure in run.judged(described.every or 1)
    ]
    for index, run in enumerate(runs):
        if run.ended is not None:
            events.append((run.figures[-1].at if run.figures else 0.0, True, index, 0, 0.0))
    losers = set[str]()
    for _, is_end, index, multiple, figure in sorted(events):
        if is_end:
            _tell_end(study, trials[index], runs[index].last, is_whole=runs[index].ended == FINISHED)
            continue
        trials[index].report(figure, multiple)
        if trials[index].should_prune():
            losers.add(runs[index].name)
    return study, [run.name for run in runs if run.name in losers and run.ended is None]


def _ask(study: optuna.Study, ranges: Mapping[str, DrawnRange], values: Mapping[str, str] | None) -> optuna.Trial:
    if not values:
        return study.ask()
    distributions = {key: of_key for key, of_key in _make_distributions(ranges).items() if key in values}
    study.enqueue_trial({key: _as_value(values[key], ranges[key]) for key in distributions})
    return study.ask(distributions)


def _tell_end(study: optuna.Study, trial: optuna.Trial, figure: float | None, *, is_whole: bool) -> None:
    """Adds the end of a run to the study. A run that ended before its work was done is added as stopped, with its
    newest metric value.
    """
    from optuna.trial import TrialState

    if figure is None:
        study.tell(trial, state=TrialState.FAIL)
    elif is_whole:
        study.tell(trial, figure)
    else:
        study.tell(trial, state=TrialState.PRUNED)


def _make_study(described: CampaignFile) -> optuna.Study:
    require_optuna()
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
    if described.pruner == "asha":
        pruner = optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=described.reduction)
    elif described.pruner == "median":
        pruner = optuna.pruners.MedianPruner()
    sampler = _make_sampler(described, described.name)
    return optuna.create_study(direction=described.direction, pruner=pruner, sampler=sampler)


def _make_sampler(described: CampaignFile, seed: str) -> optuna.samplers.BaseSampler:
    """The sampler. Each draw needs its own seed, because a new study would otherwise repeat its first draw."""
    import optuna

    number = int.from_bytes(hashlib.sha256(seed.encode()).digest()[:4])
    if described.sampler == "tpe":
        return optuna.samplers.TPESampler(seed=number)
    return optuna.samplers.RandomSampler(seed=number)


def _make_distributions(ranges: Mapping[str, DrawnRange]) -> dict[str, optuna.distributions.BaseDistribution]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    distributions: dict[str, optuna.distributions.BaseDistribution] = {}
    for key, allowed in ranges.items():
        low, high, step, log = allowed.low, allowed.high, allowed.step, allowed.log
        if allowed.choices:
            distributions[key] = CategoricalDistribution(allowed.choices)
        elif allowed.is_whole:
            distributions[key] = IntDistribution(int(low), int(high), log=log, step=int(step or 1))
        else:
            distributions[key] = FloatDistribution(float(low), float(high), log=log, step=float(step) if step else None)
    return distributions


def _as_text(value: Any, allowed: DrawnRange) -> str:
    """The chosen value as text. A number is rounded to DIGITS digits, unless the rounded number would be outside of the
    range.
    """
    if not isinstance(value, float):
        return str(value)
    short = f"{value:.{DIGITS}g}"
    return short if float(allowed.low) <= float(short) <= float(allowed.high) else repr(value)


def _as_value(text: str, allowed: DrawnRange) -> Any:
    return text if allowed.choices else int(text) if allowed.is_whole else float(text)


def simulate_shares(described: CampaignFile, judgements: Sequence[int], orders: int) -> list[list[float]]:
    """The share of its work that each run does before it is stopped, for `orders` random rankings of the runs.
    `judgements`: how often each run is judged until its end. This assumes that a run keeps its rank from its first
    metric value on, and that all runs take the same time from one judgement to the next.
    """
    import numpy as np

    draws = np.random.default_rng(0)
    return [_play_order(described, judgements, draws.permutation(len(judgements)).tolist()) for _ in range(orders)]


def _play_order(described: CampaignFile, judgements: Sequence[int], figures: Iterable[float]) -> list[float]:
    study, shares = _make_study(described), [1.0] * len(judgements)
    waiting = [*enumerate(figures)][::-1]
    going_on: list[tuple[int, int, float, Any, list[int]]] = []  # ordered by the time at which each run is judged next
    now = 0
    while waiting or going_on:
        while waiting and len(going_on) < described.at_once:
            index, figure = waiting.pop()
            multiples = _list_judgements(described, judgements[index])
            heapq.heappush(going_on, (now + multiples[0], index, figure, study.ask(), multiples))
        now, index, figure, trial, multiples = heapq.heappop(going_on)
        multiple, *later = multiples
        if not later:
            _tell_end(study, trial, figure, is_whole=True)
            continue
        trial.report(figure, multiple)
        if trial.should_prune():
            shares[index] = multiple / judgements[index]
            _tell_end(study, trial, figure, is_whole=False)
        else:
            heapq.heappush(going_on, (now + later[0] - multiple, index, figure, trial, later))
    return shares


def _list_judgements(described: CampaignFile, count: int) -> list[int]:
    """The judgements that can stop a run, of the `count` that it has, and its end."""
    if described.pruner == "median":
        stride = max(1, count // JUDGED)
        return [*range(stride, count, stride), count]
    rungs = [described.reduction**rung for rung in range(count.bit_length())]
    return [*(rung for rung in rungs if rung < count), count]
