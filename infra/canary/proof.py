"""A canary's file and page: what the canary showed about each assumption, the spread of times and prices, and AWS's
answers without names.

Files about real accounts are in proofs/ of a project; files about the embedded AWS never are.
"""

from __future__ import annotations

import json
import platform
import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from gpufleet.infra.account.checks import Check
from gpufleet.infra.canary import replay
from gpufleet.infra.canary.assumptions import judge, known
from gpufleet.infra.canary.flight import Flight
from gpufleet.infra.canary.observations import redacted
from gpufleet.infra.evidence.proofs import SCHEMA, Proof, newest
from gpufleet.infra.text import table
from gpufleet.job import atomic
from gpufleet.job.text import counted

STATES = ("refuted", "not met", "held")  # in the order of the page
STALE_DAYS = 180
_PACKAGES = ("gpufleet", "boto3", "botocore", "pulumi", "pulumi-aws")


def make(
    flight: Flight, region: str, at: datetime, *, why: str, beside: Proof | None = None, embedded: bool = False
) -> dict[str, Any]:
    """The content of the file. `why`: why the flight ended early, or empty. `beside`: the file of a real account. The
    answers of the embedded AWS are compared with the answers in it.
    """
    judged = judge(flight.facts)
    return {
        "schema": SCHEMA,
        "at": at.isoformat(timespec="seconds"),
        "region": region,
        "embedded": embedded,
        "ended_early": redacted(why),
        "versions": {**dict(_versions()), "python": platform.python_version(), "engine": flight.engine_name},
        "types": sorted(set(flight.facts.seen.get("node.kind", []))),
        "notice": "by FIS" if flight.by_notice else "left out",
        "cost": [
            {"stack": receipt.stack, "usd": str(receipt.actual), "estimate": str(receipt.estimate)}
            for receipt in flight.receipts
        ],
        "assumptions": [{**judgement.to_json(), "seen": redacted(judgement.seen)} for judgement in judged],
        "figures": {name: spread(values) for name, values in sorted(flight.facts.seen.items()) if _numbers(values)},
        "answers": (answers := dict(sorted(flight.facts.answers.items()))),
        **(_replayed(answers, beside) if embedded else {}),
    }


def _replayed(answers: dict[str, Any], recorded: Proof | None) -> dict[str, Any]:
    """The differences between the answers of the embedded AWS and those of AWS."""
    theirs = recorded.tree["answers"] if recorded else replay.documented(answers)
    differences = [difference._asdict() for difference in replay.differences(theirs, answers)]
    return {"beside": recorded.path.name if recorded else replay.STANDS_IN, "differences": differences}


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, version(name)
        except PackageNotFoundError:
            continue


def _numbers(values: Sequence[Any]) -> list[float]:
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def spread(values: Sequence[Any]) -> dict[str, float]:
    """The number of values, the least, the median and the largest."""
    numbers = _numbers(values)
    figures = {"least": min(numbers), "median": statistics.median(numbers), "most": max(numbers)}
    return {"count": len(numbers), **{key: float(f"{figure:.4g}") for key, figure in figures.items()}}


def write(proof: dict[str, Any], folder: Path) -> Path:
    """Writes the file, and the page beside it; returns the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    file = path(proof, folder)
    atomic.write_bytes(file, (json.dumps(proof, indent=1, sort_keys=False) + "\n").encode())
    atomic.write_bytes(file.with_suffix(".md"), ("\n".join(page(proof)) + "\n").encode())
    return file


def path(proof: dict[str, Any], folder: Path) -> Path:
    return folder / f"{proof['at'][:10]}-{proof['region']}.json"


def page(proof: dict[str, Any]) -> Iterator[str]:
    says = {assumption.id: assumption for assumption in known()}
    where = "the embedded AWS, which proves nothing of AWS" if proof["embedded"] else proof["region"]
    yield f"# A canary in {where}, {proof['at'][:10]}"
    yield ""
    yield summary(proof)
    if proof["ended_early"]:
        yield f"\nIt ended early: {proof['ended_early'].splitlines()[0]}"
    yield f"\nNotice: {proof['notice']}. " + ", ".join(
        f"{cost['stack']} cost {cost['usd']} USD" for cost in proof["cost"]
    )
    for state in STATES:
        rows = [row for row in proof["assumptions"] if row["state"] == state]
        if rows:
            yield f"\n## {state.capitalize()}: {len(rows)}\n"
            yield "| | Assumption | Expected | Seen | Relies on it |"
            yield "|---|---|---|---|---|"
            for row in rows:
                own = says.get(row["id"])
                cells = (row["id"], own.says if own else "", row["expected"], row["seen"], own.where if own else "")
                yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield "\n## Figures\n"
    yield "| | Count | Least | Median | Most |"
    yield "|---|---|---|---|---|"
    for name, figure in proof["figures"].items():
        yield f"| {name} | {figure['count']} | {figure['least']} | {figure['median']} | {figure['most']} |"
    if "differences" in proof:
        yield f"\n## Answers that differ from AWS's: {len(proof['differences'])}\n"
        yield f"Beside: {proof['beside']}.\n"
        yield "| Call | Field | AWS | Embedded |"
        yield "|---|---|---|---|"
        yield from (f"| {' | '.join(difference.values())} |" for difference in proof["differences"])
    yield "\nVersions: " + ", ".join(f"{name} {release}" for name, release in proof["versions"].items())


def summary(proof: dict[str, Any]) -> str:
    """A sentence that says how many assumptions held, were refuted, and were not met."""
    count = Counter(assumption["state"] for assumption in proof["assumptions"])
    assumptions = counted(len(proof["assumptions"]), "assumption")
    return f"Of {assumptions}, {count['held']} held, {count['refuted']} refuted, {count['not met']} not met."


def lines(proof: dict[str, Any]) -> Iterator[str]:
    """The refuted assumptions, as a table for the screen."""
    where = {assumption.id: assumption.where for assumption in known()}
    wrong = [row for row in proof["assumptions"] if row["state"] == "refuted"]
    if wrong:
        rows = [(row["id"], row["expected"], row["seen"], where.get(row["id"], "")) for row in wrong]
        yield from table(("refuted", "expected", "seen", "relies on it"), rows, right=())


def check(root: Path, region: str, today: date) -> Check:
    """The line of `gpufleet doctor` about the region's newest canary."""
    if (last := newest(root, region)) is None:
        return Check(name="canary", found=f"none has run in {region}: `gpufleet canary` checks what is assumed of AWS")
    age = (today - last.day).days
    finding = f"the newest of {region} is {counted(age, 'day')} old. {summary(last.tree)}"
    if age > STALE_DAYS:
        fix = f"gpufleet canary --region {region}"
        return Check(name="canary", state="warning", found=finding, fix=fix)
    return Check(name="canary", found=finding)


def sentence(root: Path) -> str:
    """The README's sentence about whether anything has run on a real account."""
    if (last := newest(root)) is None:
        return "**Nothing here has run on a real AWS account.**"
    where = f"({last.day}, {last.tree['region']})"
    return f"**A [canary](docs/canary.md) ran on a real AWS account** {where}. {summary(last.tree)}"
