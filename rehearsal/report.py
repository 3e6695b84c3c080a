"""Writes the closing report of a rehearsal, and keeps files of a failed one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from gpufleet.infra.evidence.rehearsed import SAVES, SUMMARY
from gpufleet.infra.report import run as report
from gpufleet.infra.report.run import NAME
from gpufleet.infra.text import table
from gpufleet.job.contract.receipt import Receipt, money, parse
from gpufleet.job.contract.workdir import RECEIPT
from gpufleet.job.supervisor import receipt as receipts
from gpufleet.rehearsal import own
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.evidence import Evidence, Promise, Rehearsal
from gpufleet.rehearsal.timeline import clock

BAR_S = 300.0  # seconds that a whole rehearsal may take on two idle cores, as this project demands
TOLD = ("up", "launched", "stays", "training", "notice", "seen", "loss", "ended", "results", "destroy")


def write(
    rehearsal: Rehearsal, parts: Sequence[Evidence], out: Callable[[str], None], *, checks: Sequence[Promise]
) -> None:
    """Writes a page for each part, and receipt.json and summary.json beside the results; prints the report."""
    folder = rehearsal.folder
    (folder / RECEIPT).write_bytes((folder / "results" / RECEIPT).read_bytes())
    receipt = parse((folder / RECEIPT).read_bytes())
    for part in parts:
        page = folder / part.rehearsal.definition.stage / NAME
        page.parent.mkdir(exist_ok=True)
        page.write_text(report.html(report.read(part.folder)), encoding="utf-8")
    out(f"\n== {rehearsal.name}, run {rehearsal.definition.run.id}, rehearsed with {rehearsal.engine.name}\n")
    for moment in rehearsal.timeline.select(*TOLD):
        out(f"{clock(moment.t)}  {moment.text}")
    out("")
    out(receipts.text(receipt))
    out("")
    for line in losses(parts):
        out(line)
    out("")
    checks = [*checks, duration_check(rehearsal.timeline.seconds)]
    for check in checks:
        mark = "ok" if check.held else "?" if not check.shown else "slow" if not check.required else "NO"
        out(f"  {mark:<5} {check.name}: {check.figure}")
    text = json.dumps(summary(rehearsal, parts, receipt, checks), indent=1)
    (folder / SUMMARY).write_text(text + "\n", encoding="utf-8")
    is_broken = any(check.is_broken for check in checks)
    # the folder's final name, which it gets right after this report if everything held
    place = (folder if is_broken else folder.with_suffix("")).relative_to(rehearsal.root)
    out(f"\nFiles: {place}/{{{NAME}, bill.json, receipt.json, summary.json, timeline.jsonl, results/}}")
    if not is_broken:
        out(closing(checks, rehearsal.timeline.seconds))


def duration_check(seconds: float) -> Promise:
    """The promise about how long the rehearsal takes. If it is broken, the rehearsal still succeeds, because a busy
    machine takes longer.
    """
    figure = f"{seconds:.0f} s (bar {BAR_S:.0f})"
    return Promise(name="the whole rehearsal", figure=figure, held=seconds <= BAR_S, required=False)


def closing(checks: Sequence[Promise], seconds: float) -> str:
    """The last line of a rehearsal without a broken promise. The line says what was not shown, and which times are too
    long.
    """
    if unshown := [f"{check.name}: {check.figure}" for check in checks if not check.shown]:
        return f"NOT SHOWN, after {seconds:.0f} s: {'; '.join(unshown)}. Everything else held."
    slow = [f"{check.name}, {check.figure}" for check in checks if not check.held]
    if not slow:
        return f"Everything held, in {seconds:.0f} s."
    return f"Everything held except the time, {seconds:.0f} s in all. Slower than allowed: {'; '.join(slow)}."


def summary(
    rehearsal: Rehearsal, parts: Sequence[Evidence], receipt: Receipt, checks: Sequence[Promise]
) -> dict[str, Any]:
    """A line about the rehearsal for a table."""
    resumptions = [resumption for part in parts for resumption in part.resumptions()]
    validated = [line for part in parts for line in part.metrics if line.get("val_loss") is not None]
    called = {phase.name: phase.validation for part in parts for phase in part.phases}
    saved = [own.saves(part) for part in parts]
    return {
        "stack": rehearsal.name,
        "run": rehearsal.definition.run.id,
        "engine": rehearsal.engine.name,
        "seconds": round(rehearsal.timeline.seconds, 1),
        "failed": [check.name for check in checks if check.is_broken],
        "slow": [check.name for check in checks if not check.held and not check.required],
        "steps": sum(count for part in parts for count in part.steps_done().values()),
        "nodes": len({name for part in parts if part.rehearsal.watch for name in part.rehearsal.watch.views}),
        "interruptions": [f"{r.kind} at {r.last_step}" for r in resumptions],
        "lost_on_notice": sum(r.lost for r in resumptions if r.kind == "notice"),
        "repeated_after_loss": sum(r.lost for r in resumptions if r.kind == "loss"),
        SAVES: None if None in saved else all(saved),
        "val_loss": validated[-1]["val_loss"] if validated else None,
        "validation": called[validated[-1]["phase"]] if validated else None,  # the name of val_loss
        "spent_usd": money(receipt.actual),
    }


def losses(parts: Sequence[Evidence]) -> Iterator[str]:
    """First and last loss of each phase of each part, its steps, and its newest validation loss with its name."""
    rows = [row for part in parts for row in _losses(part)]
    heads = ("phase", "parameters", "active", "steps", "loss first", "last", "validation")
    yield from table(heads, rows, right=(1, 2, 3, 4, 5))


def _losses(part: Evidence) -> Iterator[tuple[str, ...]]:
    done = part.steps_done()
    for phase, first, last in part.spans():
        inside = [line for line in part.metrics if first <= int(line["step"]) <= last]
        trained = [line["loss"] for line in inside if line.get("loss") is not None]
        held = [line["val_loss"] for line in inside if line.get("val_loss") is not None]
        yield (
            part.rehearsal.definition.stage or phase.name,
            f"{phase.params_total:,}",
            f"{phase.params_active:,}",
            str(done[phase.name]),
            *(f"{trained[end]:.4f}" if trained else "-" for end in (0, -1)),
            f"{phase.validation} {held[-1]:.4f}" if held else "-",
        )


def save_bucket(cloud: Cloud, folder: Path) -> None:
    """Saves the small objects of every bucket for somebody who looks into a failure, because the buckets do not exist
    after the process ends.
    """
    s3 = cloud.client("s3")
    for bucket in s3.list_buckets()["Buckets"]:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket["Name"]):
            for entry in page.get("Contents", []):
                if entry["Size"] < 1_000_000:
                    target = folder / entry["Key"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    s3.download_file(bucket["Name"], entry["Key"], str(target))
