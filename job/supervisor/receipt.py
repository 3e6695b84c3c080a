"""Makes the receipt: the run's cost, line by line next to its bill, and why cost and bill differ.

The actual cost is the metered time at the prices of the hours, and the cost of the objects in the run's prefix at its
end, which are stored as long as the bill says and downloaded once; the logs are sent once. The cost of requests is
taken from the bill, because AWS reports it only a day later. A first hour that AWS interrupted has no compute charge;
the receipt deducts that charge and says so. If the owner ended the node by a change of the fleet, the hour is charged.
The hour is also charged if it is unknown who ended the node.

Causes, which add up to the difference exactly: *price*: the hours used, at another price than estimated;
*interruptions*: restarts, repeated steps, idling because of AWS and the minimum charge of each start, minus the free
hours, compared with the bill's line; *runtime*: all other hours compared with the estimate; *other*: the rest, with
storage and transfer, to the last digit.

A receipt also keeps the run's measured speed, for the next bill of this job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

from gpufleet.job import measured
from gpufleet.job.contract import bucket, environment, goal, metrics
from gpufleet.job.contract.attempt import AttemptRecord, Hardware
from gpufleet.job.contract.aws import FREE_S
from gpufleet.job.contract.done import FINISHED, LIMITS, Done
from gpufleet.job.contract.reading import epoch
from gpufleet.job.contract.receipt import CAUSES, AttemptCost, Receipt, ReceiptLine, money, network, seconds, start_up
from gpufleet.job.contract.run import RunFile
from gpufleet.job.contract.spent import CENT_100, MINIMUM_S, Attempt, hours, least_s
from gpufleet.job.contract.workdir import LOG, METRICS
from gpufleet.job.kind import batch

GB, MONTH_H = Decimal(10**9), 730  # hours in a month, as in the bill
UNKEPT_DAYS = 1  # the assumed number of days for which a bucket exists that is deleted with its stack


def build(
    run: RunFile,
    attempts: Sequence[Attempt],
    done: Done,
    *,
    objects: Mapping[str, int] | None = None,
    measurement: Mapping[str, Any] | None = None,
    results: goal.Results = lambda name: None,
) -> Receipt:
    """The content of receipt.json. `attempts`: the oldest first; the last one ends the run. `done`: how the run ended,
    and the time until which costs are included. `objects`: bytes of the run's objects by key; None if unknown.
    `measurement`: the result of `measure`. `results` returns the values for which there are goals.
    """
    estimate, lines = run.estimate, _lines(run, attempts, objects)
    actual = _total(line.actual for line in lines)
    return Receipt(
        run=run.run,
        stack=run.stack,
        owner=run.owner,
        reason=done.reason,
        detail=done.detail,
        at=done.at,
        device=run.config.device,
        rehearsal=environment.is_rehearsed(os.environ),
        capacity=run.capacity,
        estimate=estimate.p50,
        actual=actual,
        p10=estimate.p10,
        p90=estimate.p90,
        estimate_h=estimate.hours,
        actual_h=_total(hours(attempt.seconds) for attempt in attempts),
        lines=lines,
        causes=causes(run, attempts, actual - estimate.p50),
        free_usd=_total(attempt.free_usd for attempt in attempts),
        expected=estimate.interruptions,
        with_notice=sum(attempt.interrupted for attempt in attempts),
        without_notice=sum(attempt.record.exit is None for attempt in attempts[:-1]),
        attempts=tuple(_cost(attempt, last=attempt is attempts[-1]) for attempt in attempts),
        goals=goal.grade(
            run.goal, usd=actual, hours=_elapsed(attempts, done), done=_did_all(run, done), results=results
        ),
        measured=measurement,
    )


def _elapsed(attempts: Sequence[Attempt], done: Done) -> Decimal:
    """Hours from the first node's launch to the run's end."""
    begin = min((attempt.record.launched for attempt in attempts), default=epoch(done.at) or 0.0)
    return Decimal(f"{max(0.0, (epoch(done.at) or begin) - begin) / 3600:.4f}")


def _did_all(run: RunFile, done: Done) -> bool:
    """Whether the run did its work. Work without a declared length is done when a limit ends it."""
    return done.reason == FINISHED or (batch.is_endless(run.config) and done.reason in LIMITS)


def measure(
    run: RunFile, attempts: Sequence[Attempt], workdir: Path, node: AttemptRecord, *, at: str
) -> dict[str, Any] | None:
    """The run's own speed, from `attempts` and the work folder. `node`: the record of the node that ends the run. None
    if metrics.jsonl has no times, or if the attempts ran on more than one type of node.
    """
    try:
        lines = (workdir / METRICS).read_bytes()
    except OSError:
        return None
    phases = measured.phases(metrics.records(lines.split(b"\n")))
    if not phases or len({attempt.record.type for attempt in attempts}) != 1:
        return None
    # a node that stayed from an earlier stage has set up nothing
    fresh = [attempt.record for attempt in attempts if not attempt.record.older_s]
    started = [float(record.started_s) for record in fresh if record.started_s is not None]
    machine = node.machine or Hardware()
    # The packages of a user's command are in its image, which this process cannot see.
    ours = {} if not run.config.code_folders() else {**machine.versions, "python": machine.python}
    code = None if run.config.code_folders() else (run.code.sha256 if run.code else "")
    document = measured.document(
        experiment=run.experiment,
        parameters=run.parameters,
        device={
            "kind": run.config.device,
            "name": machine.gpu or attempts[0].record.type,  # a speed without a GPU is valid only for this type
            "count": machine.gpu_count,
            "ranks": node.ranks,
            "memory_gb": machine.gpu_memory_gb,
            "cpus": machine.cpus,
        },
        versions={**ours, "driver": machine.driver},
        source=f"receipt of run {run.run}",
        at=at,
        measured=phases,
        setup_s=round(median(started), 3) if started else None,
        code=code,
    )
    return {**document, "image": run.image} if run.image else document


def causes(run: RunFile, attempts: Sequence[Attempt], difference: Decimal) -> dict[str, Decimal]:
    """Why actual and estimate differ, in USD; the sum is `difference`."""
    (compute,) = run.estimate.of_kind("compute")
    estimated = _total(line.amount for line in run.estimate.of_kind("interruptions"))
    price, estimated_h = compute.unit_price, compute.quantity
    extras = _total(run.hourly.values())
    used_h = _total(hours(attempt.seconds) for attempt in attempts)
    lost_h = hours(_lost(attempts))
    free = _total(attempt.free_usd for attempt in attempts)
    paid = _total(attempt.compute_usd for attempt in attempts)
    exact_usd = (
        paid - used_h * price,
        (used_h - lost_h - estimated_h) * (price + extras),
        lost_h * (price + extras) - free - estimated,
    )
    rounded = [usd.quantize(CENT_100) for usd in exact_usd]
    return dict(zip(CAUSES, (*rounded, difference - _total(rounded)), strict=True))


def text(receipt: Receipt) -> str:
    """The receipt for people: a dozen lines."""
    error = f" ({receipt.error_percent:+.1f} %)" if receipt.estimate else ""
    detail = f", {receipt.detail}" if receipt.detail else ""
    lines = [
        f"receipt of {receipt.stack} {receipt.run}: {receipt.reason}{detail}",
        f"  ${money(receipt.actual)} against ${money(receipt.estimate)} estimated{error}, {receipt.grade} "
        f"(${money(receipt.p10)} to ${money(receipt.p90)}); "
        f"{receipt.actual_h:.4f} h against {receipt.estimate_h} h",
    ]
    for line in receipt.lines:
        note = f"  {line.note}" if line.note else ""
        lines.append(f"  {line.name:<34} {money(line.estimate):>10} {money(line.actual):>10}{note}")
    named = ", ".join(f"{name} {_signed(usd)}" for name, usd in receipt.causes.items())
    lines.append(f"  difference {_signed(receipt.difference)} = {named}")
    if receipt.trained_h and receipt.actual_h:
        share, usd = receipt.trained_h / receipt.actual_h, receipt.actual / receipt.trained_h
        lines.append(
            f"  the steps took {receipt.trained_h} of {receipt.actual_h:.4f} billed node-hours ({share:.0%}):"
            f" ${usd:.2f} for a node-hour that trains"
        )
    lines += [f"  goal {graded.text}" for graded in receipt.goals]
    for attempt in receipt.attempts:
        end = attempt.exit.reason if attempt.exit else "gone without notice"
        if attempt.reclaimed is False:
            end += ", because the fleet was changed, deleted or expired"
        paid = f"{seconds(attempt.seconds)} s ${money(attempt.usd)}"
        paid = ", ".join(filter(None, (paid, start_up(attempt.started_s, attempt.pulled_s), attempt.network)))
        kind = f"{attempt.type} {attempt.capacity}".rstrip()
        lines.append(f"  {attempt.instance} {kind} {paid}: {end}{attempt.alarm and f'; warned: {attempt.alarm}'}")
    return "\n".join(lines)


def _lines(run: RunFile, attempts: Sequence[Attempt], objects: Mapping[str, int] | None) -> tuple[ReceiptLine, ...]:
    """Every line of the bill with its actual amount."""
    used = _total(hours(attempt.seconds) for attempt in attempts)
    at_ceiling = _total(hours(attempt.ceiling_s) for attempt in attempts)
    note = f"{at_ceiling:.4f} h at the on-demand price: AWS gave no spot price" if at_ceiling else ""
    compute = _total(attempt.compute_usd for attempt in attempts)
    lines = [_line(line.name, line.amount, compute, note) for line in run.estimate.of_kind("compute")]
    hourly = run.estimate.of_kind("hourly")
    actual = {line.name: (used * run.hourly[line.name]).quantize(CENT_100) for line in hourly}
    if hourly:  # the meter rounds the sum for each node, so the remainder is added to the first hourly line
        first = hourly[0].name
        actual[first] += _total(attempt.usd - attempt.compute_usd for attempt in attempts) - _total(actual.values())
    lines += [_line(line.name, line.amount, actual[line.name]) for line in hourly]
    seen = {} if objects is None else _quantities(run, objects)
    for line in run.estimate.of_kind("fixed"):
        quantity = seen.get(line.item)
        if quantity is None:
            lines.append(_line(line.name, line.amount, line.amount, "as in the bill"))
        else:
            usd, note = (quantity * line.unit_price).quantize(CENT_100), f"{quantity:.4f} of {line.quantity:.4f}"
            lines.append(_line(line.name, line.amount, usd, note))
    note = "first hours that AWS does not charge; the rest is in compute"
    doubtful = sum(attempt.noticed and attempt.reclaimed is None and attempt.seconds < FREE_S for attempt in attempts)
    if doubtful:
        note += f"; {doubtful} more counted: the fleet's history did not say that AWS took the node"
    free = _total(attempt.free_usd for attempt in attempts)
    estimated = _total(line.amount for line in run.estimate.of_kind("interruptions"))
    return (*lines, _line("interruptions", estimated, -free, note))


def _quantities(run: RunFile, objects: Mapping[str, int]) -> dict[str, Decimal]:
    """The measured quantities of the bill's lines that do not depend on hours, by item: GB-months of storage, GB that
    `gpufleet results` downloads, GB of logs.
    """
    inputs = (run.dataset, run.weights, run.code, *run.folders.values())
    own = sum(file.bytes for data in inputs if data is not None and data.uri is None for file in data.files)
    brought = sum(size for key, size in objects.items() if not key.startswith((bucket.CHECKPOINTS, bucket.EXPORTS)))
    logs = sum(size for key, size in objects.items() if key == LOG or key.startswith(bucket.BOOT_LOGS))
    months = Decimal(max(run.estimate.kept_days, UNKEPT_DAYS) * 24) / MONTH_H
    return {
        "s3_storage": (own + sum(objects.values())) / GB * months,
        "transfer_out": brought / GB,
        "logs_ingestion": logs / GB,
    }


def _line(name: str, estimate: Decimal, actual: Decimal, note: str = "") -> ReceiptLine:
    return ReceiptLine(name=name, estimate=estimate, actual=actual, note=note)


def _lost(attempts: Sequence[Attempt]) -> Decimal:
    """Billed seconds that only interruptions caused."""
    total, reached = Decimal(0), 0
    for index, attempt in enumerate(attempts):
        seconds = attempt.idle_s
        if index:
            started_s, resumed_step = attempt.record.started_s, attempt.record.resumed_step or 0
            seconds += attempt.lived_s if started_s is None else started_s
            repeated = max(0, min(attempt.last_step, reached) - resumed_step)
            seconds += Decimal(f"{repeated * (attempt.beat.step_s or 0.0):.3f}")
        reached = max(reached, attempt.last_step)
        total += min(seconds, attempt.lived_s)
    lived = _total(attempt.lived_s for attempt in attempts)
    billed = _total(attempt.seconds for attempt in attempts)
    least = least_s(attempts[0].record.older_s or Decimal(0)) if attempts else MINIMUM_S
    return total + billed - max(lived, least)  # a start without an interruption has the minimum charge too


# Fields that the node writes.
LEFT = ("instance", "type", "zone", "capacity", "started_s", "pulled_s", "older_s", "rung", "exit", "alarm")
PAID = ("seconds", "lived_s", "usd", "ceiling_s", "free_usd", "reclaimed", "last_step")


def _cost(attempt: Attempt, *, last: bool) -> AttemptCost:
    return AttemptCost(
        **{name: getattr(attempt.record, name) for name in LEFT},
        **{name: getattr(attempt, name) for name in PAID},
        interrupted=attempt.interrupted or (attempt.record.exit is None and not last),
        resumed_step=attempt.record.resumed_step or 0,
        network=network(attempt.record.preflight),
    )


def _total(amounts: Iterable[Decimal]) -> Decimal:
    return sum(amounts, Decimal(0))


def _signed(usd: Decimal) -> str:
    return f"{Decimal(money(usd)):+}"
