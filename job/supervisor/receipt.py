"""The receipt: what the run cost, line by line against its bill, and why the two differ.

Actual money is metered time at the hour's prices; S3, logs and transfer are as in the bill, because AWS reports them a
day later. A first hour that AWS interrupted is not charged for compute; the receipt credits it and says so. One that
the owner ended, by a change of the fleet, is charged; where nobody knows whose hand it was, it is counted too.

Causes, which add up to the difference exactly: *price*, the hours used at another price than estimated;
*interruptions*, restarts, repeated steps, idling for AWS and the minute that each start costs at least, less what was
free, against the bill's line; *runtime*, all other hours against the estimated ones; *other*, the rest, to the last
digit.

A receipt also keeps what the run measured of its own speed, so that the next bill of this job can stand on it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from statistics import median
from typing import Any

from job import measured
from job.contract import metrics
from job.contract.aws import FREE_S
from job.contract.done import Done
from job.contract.run import RunFile
from job.contract.workdir import METRICS
from job.supervisor.attempts import Attempt
from job.supervisor.meter import CENT_100, MINIMUM_S, hours

SCHEMA = 1


def build(
    run: RunFile,
    attempts: Sequence[Attempt],
    done: Done,
    *,
    measurement: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """receipt.json; money and hours as decimal strings. `attempts` oldest first, the one that ends the run last.
    `done` says how and until when it is counted; `measurement` as `measure` gives it.
    """
    estimate = run.estimate
    usd = {key: Decimal(estimate["usd"][key]) for key in ("p10", "p50", "p90")}
    rows = _rows(run, attempts)
    total = _total(row.actual for row in rows)
    used = _total(hours(attempt.seconds) for attempt in attempts)
    difference = total - usd["p50"]
    return {
        "schema": SCHEMA,
        "run": run.run,
        "stack": run.tree["run"]["stack"],
        "reason": done.reason,
        "detail": done.detail,
        "counted_until": done.at,
        "device": run.config.device,
        "capacity": run.tree["capacity"],
        "usd": {"estimate": _money(usd["p50"]), "actual": _money(total), "difference": _money(difference)},
        "error_percent": f"{difference / usd['p50'] * 100:.1f}" if usd["p50"] else None,
        "range_usd": {"p10": _money(usd["p10"]), "p90": _money(usd["p90"])},
        "grade": grade(total, usd["p10"], usd["p90"]),
        "inside_range": None if usd["p10"] == usd["p90"] else usd["p10"] <= total <= usd["p90"],
        "hours": {"estimate": estimate["hours"]["p50"], "actual": f"{used:.4f}"},
        "lines": [
            {"name": row.name, "estimate": _money(row.estimate), "actual": _money(row.actual), "note": row.note}
            for row in rows
        ],
        "causes": {name: _money(amount) for name, amount in causes(run, attempts, difference).items()},
        "free_first_hour_usd": _money(_total(attempt.free_usd for attempt in attempts)),
        "interruptions": {
            "expected": estimate.get("interruptions_expected"),
            "with_notice": sum(attempt.interrupted for attempt in attempts),
            "without_notice": sum(attempt.exit is None for attempt in attempts[:-1]),
        },
        "attempts": [_attempt(attempt, last=attempt is attempts[-1]) for attempt in attempts],
        "measured": None if measurement is None else dict(measurement),
    }


def measure(
    run: RunFile, attempts: Sequence[Attempt], workdir: Path, node: Mapping[str, Any], *, at: str
) -> dict[str, Any] | None:
    """What the run's metrics say about its speed (job/measured.py); `node` as in attempts/<instance>.json.

    None where they say nothing, or were written on more than one type of node.
    """
    try:
        lines = (workdir / METRICS).read_bytes()
    except OSError:
        return None
    phases = measured.phases(metrics.records(lines.split(b"\n")))
    if not phases or len({attempt.type for attempt in attempts}) != 1:
        return None
    started = [float(attempt.started_s) for attempt in attempts if attempt.started_s is not None]
    return measured.document(
        experiment=run.tree["job"]["experiment"],
        parameters=run.tree["job"]["parameters"],
        device={
            "kind": run.config.device,
            "name": node.get("gpu") or "CPU",
            "count": int(node.get("gpu_count") or 0),
            "ranks": node["ranks"],
            "memory_gb": node.get("gpu_memory_gb"),
            "cpus": node.get("cpus"),
        },
        versions={**(node.get("versions") or {}), "python": node.get("python"), "driver": node.get("driver")},
        source=f"receipt of run {run.run}",
        at=at,
        measured=phases,
        setup_s=round(median(started), 3) if started else None,
    )


def grade(actual: Decimal, p10: Decimal, p90: Decimal) -> str:
    """Where the run ended in the range that eight runs in ten were promised to end in.

    On demand, and where eight runs in ten meet no interruption, the bill has one figure, to a hundredth of a cent.
    """
    if p10 == p90:
        return "no range to be inside of"
    return "below p10" if actual < p10 else "above p90" if actual > p90 else "inside p10-p90"


def causes(run: RunFile, attempts: Sequence[Attempt], difference: Decimal) -> dict[str, Decimal]:
    """Why actual and estimate differ, in USD; the sum is `difference`."""
    compute, estimated = _of_kind(run, "compute")[0], _amount(_of_kind(run, "interruptions"))
    price, estimated_h = Decimal(compute["unit_price"]), Decimal(compute["quantity"])
    extras = _total(run.hourly.values())
    used_h = _total(hours(attempt.seconds) for attempt in attempts)
    lost_h = hours(_lost(attempts))
    free = _total(attempt.free_usd for attempt in attempts)
    paid = _total(attempt.compute_usd for attempt in attempts)
    found = {
        "price": (paid - used_h * price).quantize(CENT_100),
        "runtime": ((used_h - lost_h - estimated_h) * (price + extras)).quantize(CENT_100),
        "interruptions": (lost_h * (price + extras) - free - estimated).quantize(CENT_100),
    }
    return {**found, "other": difference - _total(found.values())}


def text(receipt: dict[str, Any]) -> str:
    """The receipt for people: a dozen lines."""
    usd, used = receipt["usd"], receipt["hours"]
    error = "" if receipt["error_percent"] is None else f" ({float(receipt['error_percent']):+.1f} %)"
    said = [
        f"receipt of {receipt['stack']} {receipt['run']}: {receipt['reason']}"
        + (f", {receipt['detail']}" if receipt["detail"] else ""),
        f"  ${usd['actual']} against ${usd['estimate']} estimated{error}, {receipt['grade']} "
        f"(${receipt['range_usd']['p10']} to ${receipt['range_usd']['p90']}); "
        f"{used['actual']} h against {used['estimate']} h",
    ]
    for line in receipt["lines"]:
        note = f"  {line['note']}" if line["note"] else ""
        said.append(f"  {line['name']:<34} {line['estimate']:>10} {line['actual']:>10}{note}")
    named = ", ".join(f"{name} {Decimal(amount):+}" for name, amount in receipt["causes"].items())
    said.append(f"  difference {Decimal(usd['difference']):+} = {named}")
    for attempt in receipt["attempts"]:
        end = attempt["exit"]["reason"] if attempt["exit"] else "gone without notice"
        if attempt["reclaimed"] is False:
            end += ", as the fleet was changed, deleted or expired"
        said.append(f"  {attempt['instance']} {attempt['type']} {attempt['seconds']} s ${attempt['usd']}: {end}")
    return "\n".join(said)


@dataclass(frozen=True, slots=True)
class _Row:
    name: str
    estimate: Decimal
    actual: Decimal
    note: str = ""


def _rows(run: RunFile, attempts: Sequence[Attempt]) -> list[_Row]:
    """Every line of the bill with what became of it."""
    used = _total(hours(attempt.seconds) for attempt in attempts)
    at_ceiling = _total(hours(attempt.ceiling_s) for attempt in attempts)
    note = f"{at_ceiling:.4f} h at the on-demand price: AWS told no spot price" if at_ceiling else ""
    compute = _total(attempt.compute_usd for attempt in attempts)
    rows = [_Row(line["name"], Decimal(line["amount"]), compute, note) for line in _of_kind(run, "compute")]
    hourly = _of_kind(run, "hourly")
    actual = {line["name"]: (used * run.hourly[line["name"]]).quantize(CENT_100) for line in hourly}
    if hourly:  # the meter rounds each node's sum, so what is left of it goes to the first
        first = hourly[0]["name"]
        actual[first] += _total(each.usd - each.compute_usd for each in attempts) - _total(actual.values())
    rows += [_Row(line["name"], Decimal(line["amount"]), actual[line["name"]]) for line in hourly]
    for line in _of_kind(run, "fixed"):
        rows.append(_Row(line["name"], Decimal(line["amount"]), Decimal(line["amount"]), "as in the bill"))
    note = "first hours that AWS does not charge; the rest is in compute"
    doubtful = sum(attempt.noticed and attempt.reclaimed is None and attempt.seconds < FREE_S for attempt in attempts)
    if doubtful:
        note += f"; {doubtful} more counted: the fleet's history did not say that AWS took the node"
    free = _total(attempt.free_usd for attempt in attempts)
    return [*rows, _Row("interruptions", _amount(_of_kind(run, "interruptions")), -free, note)]


def _of_kind(run: RunFile, kind: str) -> list[dict[str, Any]]:
    """Lines of the bill that the meter counts so."""
    return [line for line in run.estimate["lines"] if line["kind"] == kind]


def _amount(lines: Iterable[Mapping[str, Any]]) -> Decimal:
    return _total(Decimal(line["amount"]) for line in lines)


def _lost(attempts: Sequence[Attempt]) -> Decimal:
    """Billed seconds that only interruptions explain."""
    total, reached = Decimal(0), 0
    for index, attempt in enumerate(attempts):
        seconds = attempt.idle_s
        if index:
            seconds += attempt.lived_s if attempt.started_s is None else attempt.started_s
            repeated = max(0, min(attempt.last_step, reached) - attempt.resumed_step)
            seconds += Decimal(f"{repeated * attempt.step_s:.3f}")
        reached = max(reached, attempt.last_step)
        total += min(seconds, attempt.lived_s)
    lived = _total(attempt.lived_s for attempt in attempts)
    billed = _total(attempt.seconds for attempt in attempts)
    return total + billed - max(lived, MINIMUM_S)  # one start in one piece has its minimum too


def _attempt(attempt: Attempt, *, last: bool) -> dict[str, Any]:
    return {
        "instance": attempt.instance,
        "type": attempt.type,
        "zone": attempt.zone,
        "seconds": f"{attempt.seconds:.3f}",
        "lived_s": f"{attempt.lived_s:.3f}",
        "started_s": None if attempt.started_s is None else f"{attempt.started_s:.3f}",
        "interrupted": attempt.interrupted or (attempt.exit is None and not last),
        "reclaimed": attempt.reclaimed,
        "usd": _money(attempt.usd),
        "ceiling_s": f"{attempt.ceiling_s:.3f}",
        "free_usd": _money(attempt.free_usd),
        "resumed_step": attempt.resumed_step,
        "last_step": attempt.last_step,
        "rung": attempt.rung,
        "exit": attempt.exit,
    }


def _total(amounts: Iterable[Decimal]) -> Decimal:
    return sum(amounts, Decimal(0))


def _money(amount: Decimal) -> str:
    return f"{amount.quantize(CENT_100) + 0:f}"  # + 0: no minus zero
