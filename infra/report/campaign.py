"""Writes the ended runs of a campaign as one page: the best run, the varied values, dollars against the metric, and the
sum of all receipts. The page is made from the documents that `gpufleet campaign` keeps for each run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet.infra.definition.campaign import VALUES, CampaignFile, read_values, show_values
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.receipts import LINES
from gpufleet.infra.report import charts, page
from gpufleet.infra.report.charts import Series
from gpufleet.infra.search import TrialProgress
from gpufleet.infra.show.html import paragraph
from gpufleet.infra.show.sheet import Column, Sheet, plain, record
from gpufleet.job.contract import done as ends
from gpufleet.job.contract.done import FINISHED
from gpufleet.job.contract.receipt import Receipt, ReceiptLine, parse
from gpufleet.job.contract.workdir import DONE, METRICS, RECEIPT
from gpufleet.job.text import counted

FIGURES = "campaign.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportedTrial:
    """One run that has ended. If it has no receipt, its dollars and hours are unknown."""

    name: str
    values: Mapping[str, str]
    progress: TrialProgress
    receipt: Receipt | None

    @property
    def usd(self) -> Decimal | None:
        return None if self.receipt is None else self.receipt.actual

    @property
    def is_whole(self) -> bool:
        """Whether the run finished its work."""
        return self.progress.ended == FINISHED


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignResults:
    """The ended runs of a campaign, the best one first. Stopped runs come last."""

    described: CampaignFile
    trials: tuple[ReportedTrial, ...]

    @property
    def best(self) -> ReportedTrial | None:
        """The best run; None if there is no metric, or no run reported it."""
        first = self.trials[0]
        return first if first.progress.last is not None else None

    @property
    def receipts(self) -> list[Receipt]:
        return [trial.receipt for trial in self.trials if trial.receipt]

    @property
    def lines(self) -> list[ReceiptLine]:
        """The lines of all receipts, with the sum of the dollars of each line."""
        sums = dict[str, ReceiptLine]()
        for line in (line for receipt in self.receipts for line in receipt.lines):
            was = sums.get(line.name, ReceiptLine(name=line.name, estimate=Decimal(0), actual=Decimal(0)))
            estimate, actual = was.estimate + line.estimate, was.actual + line.actual
            sums[line.name] = ReceiptLine(name=line.name, estimate=estimate, actual=actual)
        return [*sums.values()]

    @property
    def varied(self) -> list[str]:
        """The keys whose values differ between runs."""
        keys = dict.fromkeys(key for trial in self.trials for key in trial.values)
        return [key for key in keys if len({trial.values.get(key) for trial in self.trials}) > 1]

    def total(self, name: str) -> Decimal:
        """The sum of an amount over all receipts."""
        return sum((getattr(receipt, name) for receipt in self.receipts), Decimal(0))

    def to_json(self) -> dict[str, Any]:
        """The dollars and metric values of the runs, and the sum of all receipts, for programs. docs/report.md has the
        keys.
        """
        return {
            "schema": 1,
            "campaign": self.described.name,
            "metric": self.described.metric,
            "direction": self.described.direction,
            "best": self.best and self.best.name,
            "usd": {"estimate": str(self.total("estimate")), "actual": str(self.total("actual"))},
            "node_hours": str(self.total("actual_h")),
            "lines": [line.to_json() for line in self.lines],
            "trials": [{**record(_COLUMNS, trial), "values": plain(trial.values)} for trial in self.trials],
        }


def read(described: CampaignFile, folder: Path) -> CampaignResults:
    """The runs in the folder. Raises GpufleetError if there is none."""
    trials = [_read_trial(described, path.parent) for path in sorted(folder.glob(f"*/{VALUES}"))]
    if not trials:
        raise GpufleetError(f"{folder}: no run of {described.name} has ended; `gpufleet campaign {described.name}`")
    sign = -1.0 if described.direction == "maximize" else 1.0

    def rank(trial: ReportedTrial) -> tuple[bool, bool, float]:
        last = trial.progress.last
        return last is None, not trial.is_whole, 0.0 if last is None else sign * last

    return CampaignResults(described=described, trials=tuple(sorted(trials, key=rank)))


def _read_trial(described: CampaignFile, folder: Path) -> ReportedTrial:
    def content(name: str) -> bytes:
        path = folder / name
        return path.read_bytes() if path.is_file() else b""

    done, metric = ends.read(content(DONE) or None), described.metric or ""
    progress = TrialProgress.read(folder.name, metric, content(METRICS), ended=done.reason if done else "")
    try:
        receipt = parse(content(RECEIPT))
    except ValueError:
        receipt = None
    return ReportedTrial(name=folder.name, values=read_values(content(VALUES)), progress=progress, receipt=receipt)


def html(results: CampaignResults) -> str:
    of, best = results.described, results.best
    allowed = f"{of.max_usd:f} USD allowed, {of.at_once} at once"
    return page.page(
        f"{of.name}: {counted(len(results.trials), 'run')}",
        f"{of.direction} {of.metric}; {allowed}" if of.metric else allowed,
        (
            page.figures(list(_figures(results))),
            "" if charts.drawable() else paragraph(charts.LACKING),
            page.section("Best", paragraph(show_values(best.values) or best.name)) if best else "",
            page.section("What was varied, and what it gave", _pictures(results), _key(results)),
            page.section("Runs, the best first", page.table(_table(results))),
            page.section("All receipts as one", _lines(results)),
        ),
    )


def _figures(results: CampaignResults) -> Iterator[tuple[str, str, str]]:
    of, stopped = results.described, sum(not trial.is_whole for trial in results.trials)
    if results.best:
        best = results.best
        yield of.metric or "", f"{best.progress.last:.6g}", f"the best of {len(results.trials)}: {best.name}"
    bills = results.total("estimate")
    yield "cost", f"{results.total('actual'):.2f} USD", f"bills {bills:.2f}, of {of.max_usd:f} allowed"
    yield "node-hours", f"{results.total('actual_h'):.2f}", f"bills {results.total('estimate_h'):.2f}"
    yield "runs", str(len(results.trials)), f"{len(results.trials) - stopped} whole, {stopped} ended before"


def _colour(results: CampaignResults, trial: ReportedTrial) -> str:
    return "blue" if trial is results.best else "grey" if trial.is_whole else "orange"


def _key(results: CampaignResults) -> str:
    names = {"blue": "the best", "grey": "whole", "orange": "ended before its work was done"}
    there = {_colour(results, trial) for trial in results.trials}
    return page.key({name: colour for colour, name in names.items() if colour in there})


def _pictures(results: CampaignResults) -> str:
    of, trials = results.described, results.trials[::-1]  # the best run is drawn last, over the others
    colours = [_colour(results, trial) for trial in trials]
    axes: dict[str, Sequence[str | None]] = {}
    for key in results.varied:
        short = key.rpartition(".")[2]
        axes[key if short in axes else short] = [trial.values.get(key) for trial in trials]
    if of.metric:
        last = [trial.progress.last for trial in trials]
        axes[of.metric] = [None if figure is None else f"{figure:.4g}" for figure in last]
    dots = [
        Series(name="", points=[(float(trial.usd), trial.progress.last)], colour=colour, dots=True)
        for trial, colour in zip(trials, colours, strict=True)
        if trial.usd is not None and trial.progress.last is not None
    ]
    curves = [
        Series(name="", points=[(float(at.step), at.figure) for at in trial.progress.figures], colour=colour)
        for trial, colour in zip(trials, colours, strict=True)
    ]
    return page.charts(
        [
            ("Each run over what was varied", charts.parallel(axes, colours)),
            (f"Dollars against {of.metric}", charts.lines(dots, x="USD", y=of.metric or "")),
            (f"{of.metric} of each run", charts.lines(curves, x="step", y=of.metric or "")),
        ]
    )


_COLUMNS = (
    Column("trial", "run", of=lambda trial: trial.name),
    Column("figure", "figure", "th", "{:.6g}".format, lambda trial: trial.progress.last, 12),
    Column(
        "step",
        "step",
        "th",
        "{:,}".format,
        lambda trial: trial.progress.figures[-1].step if trial.progress.figures else None,
    ),
    Column("usd", "USD", "USD", 2, lambda trial: trial.usd),
    Column("estimate_usd", "bill", "USD", 2, lambda trial: trial.receipt and trial.receipt.estimate),
    Column("hours", None, "h", 2, lambda trial: trial.receipt and trial.receipt.actual_h),
    Column("ended", of=lambda trial: trial.progress.ended or None),
)


def _table(results: CampaignResults) -> Sheet:
    def column(key: str) -> Column:
        return Column(key, key.rpartition(".")[2], of=lambda trial: trial.values.get(key))

    name, *figures = _COLUMNS
    return Sheet.build((name, *map(column, results.varied), *figures), results.trials)


def _lines(results: CampaignResults) -> str:
    total = results.total("estimate"), results.total("actual")
    usd = (f"{total[0]:.4f}", f"{total[1]:.4f}", f"{total[1] - total[0]:+.4f}")
    without = len(results.trials) - len(results.receipts)
    lacking = f"{counted(without, 'run')} left no receipt, and counts with its whole limit under the cap."
    return page.table(Sheet.build(LINES, results.lines, ("total", *usd, "")), total=True) + (
        paragraph(lacking) if without else ""
    )
