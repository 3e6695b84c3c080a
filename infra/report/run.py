"""Writes a finished run as a page: its bill, its cost and its events. This module reads the files that `gpufleet
results` downloads or that a rehearsal leaves. Only the receipt is required: the page leaves out everything else that is
missing or damaged.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.infra.bill.answer import amount_within, figures_within
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.receipts import LINES
from gpufleet.infra.report import band, charts, page
from gpufleet.infra.report.charts import Bar, Mark, Point, Series
from gpufleet.infra.show.html import paragraph
from gpufleet.infra.show.sheet import Column, Sheet
from gpufleet.job.contract import metrics, reading
from gpufleet.job.contract.attempt import AttemptRecord, Beat
from gpufleet.job.contract.bucket import ATTEMPTS, heartbeat_key
from gpufleet.job.contract.reading import DoubtError, epoch
from gpufleet.job.contract.receipt import AttemptCost, Receipt, parse
from gpufleet.job.contract.workdir import METRICS, RECEIPT, RUN
from gpufleet.job.text import counted

NAME = "report.html"
SHORT_S = 0.1  # seconds; if saves delay training by less, there is no chart of them


@dataclass(frozen=True, kw_only=True, slots=True)
class RunResults:
    """The files of a run. Times are epoch seconds."""

    receipt: Receipt
    bill: Mapping[str, Any]  # the estimate in run.json (docs/bill.md has its keys); empty if there is none
    records: Sequence[Mapping[str, Any]]  # lines of metrics.jsonl
    attempts: Mapping[str, AttemptRecord]  # records of attempts, by instance
    beats: Mapping[str, Sequence[tuple[float, Beat]]]  # the heartbeats of each instance, with their times

    @property
    def launched(self) -> Mapping[str, float]:
        """The launch of each node in the receipt, if known."""
        known = {attempt.instance: self.attempts[attempt.instance] for attempt in self._nodes()}
        return {instance: record.launched for instance, record in known.items() if record.launched}

    @property
    def began(self) -> float:
        """The launch of the first node; 0 if not known."""
        return min(self.launched.values(), default=0.0)

    @property
    def lasted_s(self) -> float:
        """Seconds from the first launch to the end of the last node."""
        ends = (self.launched[attempt.instance] + float(attempt.lived_s) for attempt in self._nodes() if self.began)
        return max(ends, default=0.0) - self.began

    def _nodes(self) -> Iterator[AttemptCost]:
        return (attempt for attempt in self.receipt.attempts if attempt.instance in self.attempts)


def read(folder: Path) -> RunResults:
    """Reads a run's files. Raises GpufleetError if the receipt is missing or damaged."""
    try:
        receipt = parse((folder / RECEIPT).read_bytes())
    except FileNotFoundError:
        hint = "`gpufleet results STACK` downloads that of an ended run, `gpufleet rehearse` writes one"
        raise GpufleetError(f"{folder}: there is no {RECEIPT}; {hint}") from None
    except DoubtError as error:
        raise GpufleetError(f"{folder / RECEIPT} cannot be read: {error}") from error
    attempts = {path.stem: _attempt(path) for path in sorted((folder / ATTEMPTS).glob("*.json"))}
    return RunResults(
        receipt=receipt,
        bill=_object(folder / RUN).get("estimate") or {},
        records=metrics.records(_lines(folder / METRICS)),
        attempts=attempts,
        beats={name: list(_beats(folder / heartbeat_key(name))) for name in attempts},
    )


def html(run: RunResults) -> str:
    receipt = run.receipt
    kind = "rehearsal" if receipt.rehearsal else receipt.reason
    detail = f" ({receipt.detail})" if receipt.detail else ""
    return page.page(
        f"{receipt.stack}, run {receipt.run}",
        f"{kind}{detail}, counted until {receipt.at}, {receipt.capacity or 'capacity unknown'}",
        (
            page.figures(list(_figures(run))),
            "" if charts.drawable() else paragraph(charts.LACKING),
            page.section("Goals", *(paragraph(f"{goal.text}.") for goal in receipt.goals)),
            "" if receipt.rehearsal else page.section("Bill against receipt", _money(run), _lines_table(receipt)),
            page.section("Training", *_training(run)),
            page.section("Nodes", *_nodes(run), _attempts_table(receipt)),
            page.section("Dollars", _rehearsed_money(run))
            if receipt.rehearsal
            else page.section("Predicted and measured", _speeds(run)),
            page.section("What was turned down", _options(run.bill)),
            page.section("What the bill warned of", *map(paragraph, _texts(run.bill.get("warnings")))),
        ),
    )


def _figures(run: RunResults) -> Iterator[tuple[str, str, str]]:
    receipt, steps = run.receipt, max((attempt.last_step for attempt in run.receipt.attempts), default=0)
    notices, losses, rehearsed = receipt.with_notice, receipt.without_notice, receipt.rehearsal
    # p50 and not the mean, because the mean in an older bill depends on a few simulated runs
    usual = (run.bill.get("interruptions") or {}).get("p50")
    beside = "" if rehearsed or usual is None else f"bill {float(usual):.0f}; "
    interruptions = str(notices + losses), f"{beside}{notices} with a notice, {losses} without"
    if rehearsed:  # a rehearsal's time depends on this machine, so no bill predicts it
        yield "interruptions", *interruptions
        yield "steps", f"{steps:,}", counted(len(receipt.attempts), "node")
        yield "cost", "nothing", "a rehearsal rents nothing"
        return
    error = f"{receipt.error_percent:+.1f} %" if receipt.estimate else "none"
    low, middle, high = figures_within(band.of_receipt(receipt))
    yield "cost", f"{_usd(receipt)} USD", f"bill {middle}, {error}: {receipt.grade}"
    yield "range of the bill", f"{low} to {high}", "USD, in eight runs of ten"
    yield "node-hours", f"{receipt.actual_h:.2f}", f"bill {receipt.estimate_h:.2f}"
    yield "interruptions", *interruptions
    yield "steps", f"{steps:,}", counted(len(receipt.attempts), "node")


def _usd(receipt: Receipt) -> str:
    return amount_within(receipt.actual, band.of_receipt(receipt))


def _money(run: RunResults) -> str:
    """The charts about dollars: the actual cost in the bill's range, the difference by its causes, and dollars over
    hours.
    """
    receipt = run.receipt
    by_cause = {name: float(usd) for name, usd in receipt.causes.items()}
    ends = ("bill", float(receipt.estimate)), ("receipt", float(receipt.actual))
    digits = len(_usd(receipt).partition(".")[2])
    drawn = [
        ("What it cost, in the range of the bill", band.svg(band.of_receipt(receipt), receipt.actual)),
        ("Why the receipt is not the bill", charts.steps_to(ends[0], by_cause, ends[1], unit="USD", digits=digits)),
        ("Dollars spent", _spent(run)),
    ]
    return page.charts(drawn) + paragraph(
        "The meter also counts first hours that AWS interrupted and does not charge, so it may end above the receipt."
    )


def _rehearsed_money(run: RunResults) -> str:
    return page.charts([("As the meter would count", _spent(run))]) + paragraph(
        "Nothing was paid. The meter counts this machine's time at the price of the type: it shows that the count "
        "continues over interruptions, and says nothing about the cost of the real run. `gpufleet cost` does."
    )


def _spent(run: RunResults) -> str:
    """A chart of the meter's dollars over the run, with the cap if the dollars come near it."""
    begin, (unit, size) = run.began, charts.unit_of(run.lasted_s)
    counted_usd = sorted(
        ((at - begin) / size, float(beat.spent_usd))
        for beats in run.beats.values()
        for at, beat in beats
        if beat.spent_usd is not None
    )
    # A node may know only a part of the spending that another node has already reported.
    most = itertools.accumulate((usd for _, usd in counted_usd), max)
    points = [(at, usd) for (at, _), usd in zip(counted_usd, most, strict=True)]
    cap = (run.bill.get("cap") or {}).get("max_usd")
    near = cap is not None and points and float(cap) < 3 * points[-1][1]
    return charts.lines(
        [Series(name="", points=points, colour="blue")],
        x=f"{unit} since the first launch",
        y="USD, as the meter counts",
        level=(float(cap), "limits.max_usd") if near and cap else None,
        from_zero=True,
    )


def _lines_table(receipt: Receipt) -> str:
    usd = (f"{receipt.estimate:.4f}", f"{receipt.actual:.4f}", f"{receipt.difference:+.4f}")
    return page.table(Sheet.build(LINES, receipt.lines, ("total", *usd, receipt.grade)), total=True)


def _training(run: RunResults) -> Iterator[str]:
    """Yields charts of loss, speed and memory over the steps, with a line per phase and marks for interruptions."""
    phases = list(dict.fromkeys(str(record["phase"]) for record in run.records))
    marks = [
        Mark(at=node.last_step, name=name, colour=colour)
        for node in run.receipt.attempts
        if node.interrupted
        for name, colour in [
            ("node taken with a notice", "orange") if _noticed(node) else ("node gone without a notice", "red")
        ]
    ] + [
        Mark(at=float(record["step"]), name=f"Xid {record['gpu_xid']}, an error of the GPU driver", colour="purple")
        for record in run.records
        if record.get("gpu_xid")
    ]

    def by_phase(key: str, words: str = "{}", *, dots: bool = False) -> list[Series]:
        return [
            Series(name=words.format(phase), points=_points(run.records, phase, key), colour=colour, dots=dots)
            for phase, colour in zip(phases, itertools.cycle(charts.COLOUR_CYCLE))
        ]

    figures = [
        ("time of a step", by_phase("step_ms"), "ms"),
        ("throughput", by_phase("tok_s"), "tokens/s"),
        ("GPU use", by_phase("gpu_util"), "%"),
        ("GPU memory, peak", by_phase("mem_gb") or by_phase("gpu_mem_gb"), "GB"),
        ("GPU temperature, hottest", by_phase("gpu_temp_c"), "°C"),
    ]
    steady = [(name, charts.steady(series), unit) for name, series, unit in figures]
    loss = [*by_phase("loss"), *by_phase("val_loss", "{}, validation", dots=True)]
    drawn = [("Loss", charts.lines(loss, x="step", y="loss", marks=marks))] + [
        (f"{name[0].upper()}{name[1:]}", charts.lines(series, x="step", y=unit, marks=marks, from_zero=True))
        for (name, series, unit), (_, figure, _) in zip(figures, steady, strict=True)
        if figure is None
    ]
    pictures = page.charts(drawn)
    yield pictures
    yield page.key({mark.name: mark.colour for mark in marks}) if pictures else ""
    same = ", ".join(f"{name} {figure:g} {unit}" for name, figure, unit in steady if figure is not None)
    yield paragraph(f"The same at every step: {same}.") if same else ""


def _points(records: Sequence[Mapping[str, Any]], phase: str, key: str) -> list[Point]:
    own = (record for record in records if record["phase"] == phase)
    return [(float(record["step"]), float(record[key])) for record in own if record.get(key) is not None]


def _nodes(run: RunResults) -> Iterator[str]:
    """Yields a chart with a lane for each node and one for the checkpoints, over the time since the first launch."""
    known = [node for node in run.receipt.attempts if node.instance in run.launched]
    if not known:
        return
    (unit, size), before, bars, marks = charts.unit_of(run.lasted_s), None, list[Bar](), list[tuple[int, float, str]]()
    for lane, node in enumerate(known):
        launched = (run.launched[node.instance] - run.began) / size
        ended = launched + float(node.lived_s) / size
        trains = ended if node.started_s is None else min(ended, launched + float(node.started_s) / size)
        noticed = ended
        if node.exit and node.exit.notice and (at := epoch(node.exit.at or "")):
            noticed = min(ended, max(trains, (at - run.began) / size))
        if before is not None and before < launched:
            bars.append(Bar(lane=lane, begin=before, end=launched, kind="waiting for a node"))
        bars += [
            Bar(lane=lane, begin=launched, end=min(trains, noticed), kind="start"),
            Bar(lane=lane, begin=trains, end=noticed, kind="training"),
        ]
        if noticed < ended:
            bars.append(Bar(lane=lane, begin=noticed, end=ended, kind="after a notice"))
        if node.interrupted and not _noticed(node):
            marks.append((lane, ended, "gone"))
        before = ended
    saves = [(float(record["ts"]), save) for record in run.records for save in metrics.saves(record)]
    marks += [(len(known), (at - run.began) / size, "save") for at, _ in saves]
    names = [*(f"{number}  {node.zone}" for number, node in enumerate(known, start=1)), *(["saves"] if saves else [])]
    series = Series(
        name="", points=[(float(save.step), save.blocked_s) for _, save in saves], colour="green", dots=True
    )
    longest = max((save.blocked_s for _, save in saves), default=0.0)
    varies = longest >= SHORT_S and charts.steady([series]) is None
    waits = charts.lines([series], x="step", y="s", from_zero=True) if varies else ""
    drawn = charts.lanes(names, bars, marks, x=f"{unit} since the first launch")
    yield page.charts([("Nodes over time", drawn), ("How long each save delayed training", waits)])
    kinds = dict.fromkeys([*(bar.kind for bar in bars), *(kind for _, _, kind in marks)])
    yield page.key({kind: charts.KINDS[kind] for kind in kinds}) if drawn else ""
    most = f"less than {SHORT_S:g} s" if longest < SHORT_S else f"{longest:.2g} s at most"
    yield paragraph(f"A save kept training waiting for {most}.") if saves and not varies else ""


_ATTEMPT = (
    Column("instance", "node"),
    Column("type", of=lambda attempt: f"{attempt.type} {attempt.capacity}".rstrip()),
    Column("zone"),
    Column("usd", "USD", "USD", 4),
    Column("hours", None, "h", 3, lambda attempt: attempt.lived_s / 3600),
    Column("started_s", "s to first step", "s", 0),
    Column("steps", of=lambda attempt: f"{attempt.resumed_step:,} to {attempt.last_step:,}"),
    Column("end", "ended by", of=lambda attempt: _ending(attempt)),
)


def _attempts_table(receipt: Receipt) -> str:
    numbers = itertools.count(1)
    number = Column("number", "", "th", of=lambda _: next(numbers))
    return page.table(Sheet.build((number, *_ATTEMPT), receipt.attempts))


def _ending(attempt: AttemptCost) -> str:
    if attempt.exit is None:
        return "gone without a word"
    return f"{attempt.exit.reason} (exit {attempt.exit.code})"


def _noticed(attempt: AttemptCost) -> bool:
    return attempt.exit is not None and attempt.exit.notice


def _speeds(run: RunResults) -> str:
    """A table of each phase's step time and memory, in the bill and in the run."""
    measured = {phase.get("name"): phase for phase in (run.receipt.measured or {}).get("phases") or []}
    pairs = [
        (predicted, measured[name])
        for predicted in run.bill.get("phases") or []
        if (name := predicted["phase"]) in measured
    ]
    columns = (
        Column("phase", of=lambda pair: pair[0]["phase"]),
        Column("said_ms", "bill, ms a step", "ms", "{:,.2f}".format, lambda pair: float(pair[0]["step_ms"])),
        Column("own_ms", "measured", "ms", "{:,.2f}".format, lambda pair: float(pair[1]["step_ms"]["median"])),
        Column("difference", unit="share", of=_slower),
        Column("said_gb", "bill, GB", "GB", 2, lambda pair: _gb(pair[0])),
        Column("own_gb", "measured", "GB", 2, lambda pair: _gb(pair[1])),
    )
    basis = run.bill.get("basis")
    stood = paragraph(f"The bill stood on: {basis}.") if pairs and basis else ""
    return page.table(Sheet.build(columns, pairs)) + stood


def _gb(phase: Mapping[str, Any]) -> float | None:
    return float(phase.get("memory_gb") or 0) or None


def _slower(pair: tuple[Mapping[str, Any], Mapping[str, Any]]) -> str:
    """The share by which a step took longer than the bill assumed."""
    predicted, measured = float(pair[0]["step_ms"]), float(pair[1]["step_ms"]["median"])
    return f"{measured / predicted - 1:+.0%}" if predicted else ""


def _options(bill: Mapping[str, Any]) -> str:
    """The cheaper options in the bill (see docs/bill.md)."""

    def figure(head: str, name: str, share: str) -> Column:
        return Column(f"{name}_{share}", head, name, 2, lambda option: float(option[name][share]))

    figures = [
        column
        for head, name in (("USD", "usd"), ("hours", "hours"))
        for column in (figure(f"{head} p50", name, "p50"), figure("p90", name, "p90"))
    ]
    title = "cheaper, said the bill"
    name = Column("name", title, of=lambda option: f"{option['type']} {option['capacity']}, {option['gpus']}")
    return page.table(Sheet.build((name, *figures), (bill.get("cheaper") or {}).get("options") or []))


def _texts(texts: Any) -> Iterable[str]:
    return [str(text) for text in texts or []]


def _object(path: Path) -> Mapping[str, Any]:
    try:
        return reading.parse(path.read_bytes())
    except (OSError, DoubtError):
        return {}


def _lines(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines() if path.is_file() else []


def _attempt(path: Path) -> AttemptRecord:
    return AttemptRecord.from_json(dict(_object(path)), lambda _: None)


def _beats(path: Path) -> Iterator[tuple[float, Beat]]:
    for line in _lines(path):
        try:
            beat = Beat.from_json(reading.parse(line))
        except (DoubtError, json.JSONDecodeError):
            continue
        if (at := epoch(beat.ts)) is not None:
            yield at, beat
