"""What a rehearsal must have shown, and its closing report.

Reads only what a user gets: the results folder, the receipt, the timeline. Every promise is a Check with its figure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from infra.errors import GpufleetError
from job import receipt as receipts
from job import sizing
from rehearsal import picture
from rehearsal.account import Resource
from rehearsal.cloud import Cloud
from rehearsal.timeline import clock

if TYPE_CHECKING:
    from rehearsal.rehearse import Rehearsal

NOTICE_SEEN_S = 5.0  # issue 3, section 7
RECOVERY_S = 10.0  # beyond importing torch; design of 2026-11, section 8
TOLD = ("up", "launched", "training", "notice", "seen", "loss", "ended", "results", "destroy")


@dataclass(frozen=True, kw_only=True, slots=True)
class Check:
    """One promise: what, the figure, and whether it held. `required` False: reported, and not failed for."""

    name: str
    figure: str
    held: bool
    required: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """From one node to the next: what was lost between them, and how long the next took."""

    kind: str  # notice | loss
    last_step: int
    resumed_step: int
    started_s: float | None  # from its launch to the next node's first step

    @property
    def lost(self) -> int:
        return max(0, self.last_step - self.resumed_step)


class Evidence:
    """The run's files and what was watched, read once."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        folder = rehearsal.folder / "results"
        self.rehearsal = rehearsal
        self.folder = folder
        self.receipt = _document(folder / "receipt.json")
        self.done = _document(folder / "done.json")
        self.results = _document(folder / "results.json")
        self.growth = _document(folder / "growth_report.json")
        self.metrics = _lines(folder / "metrics.jsonl")
        self.phases = sizing.phases(rehearsal.definition.job.parameters)
        self.total_steps = sizing.total_steps(rehearsal.definition.job.parameters)

    def resumptions(self) -> list[Resumption]:
        """One per interruption, in order."""
        assert self.rehearsal.watch is not None
        by_instance = {attempt["instance"]: attempt for attempt in self.receipt["attempts"]}
        found = []
        for before, after in pairwise(self.rehearsal.watch.views.values()):
            if before.interrupted is None:
                continue
            left, taken = (by_instance[view.node.instance.id] for view in (before, after))
            started = _document(self.folder / "attempts" / f"{after.node.instance.id}.json").get("started_s")
            found.append(
                Resumption(
                    kind=before.interrupted.kind,
                    last_step=max(int(left["last_step"]), before.last_step),
                    resumed_step=int(taken["resumed_step"]),
                    started_s=None if started is None else float(started),
                )
            )
        return found


def checks(rehearsal: Rehearsal) -> list[Check]:
    """Every promise about the run. Raises GpufleetError when one did not hold."""
    evidence = Evidence(rehearsal)
    found = list(_checks(evidence))
    broken = [check for check in found if check.required and not check.held]
    if broken:
        raise GpufleetError("; ".join(f"{check.name}: {check.figure}" for check in broken))
    return found


def _checks(evidence: Evidence) -> Iterator[Check]:
    rehearsal, definition = evidence.rehearsal, evidence.rehearsal.definition
    assert rehearsal.watch is not None
    views = list(rehearsal.watch.views.values())
    reason = str(evidence.done.get("reason"))
    yield Check(name="the run's own end", figure=reason, held=reason == "finished")
    last = max((int(line["step"]) for line in evidence.metrics), default=0)
    yield Check(name="steps", figure=f"{last} of {evidence.total_steps}", held=last == evidence.total_steps)
    planned = definition.interruptions
    counted = evidence.receipt["interruptions"]
    yield Check(
        name="interruptions in the receipt",
        figure=f"{counted['with_notice']} with notice, {counted['without_notice']} without",
        held=(counted["with_notice"], counted["without_notice"]) == (planned.with_notice, planned.without_notice),
    )
    nodes = planned.with_notice + planned.without_notice + 1
    yield Check(name="nodes", figure=f"{len(views)} launched", held=len(views) == nodes)
    for moment in rehearsal.timeline.of("seen"):
        seconds = float(moment.facts["seconds"])
        yield Check(
            name="notice seen",
            figure=f"after {seconds:.1f} s (limit {NOTICE_SEEN_S:.0f})",
            held=seconds <= NOTICE_SEEN_S,
        )
    seen = len(rehearsal.timeline.of("seen"))
    if seen != planned.with_notice:
        yield Check(name="notices seen", figure=f"{seen} of {planned.with_notice}", held=False)
    for resumption in evidence.resumptions():
        handled = resumption.kind == "notice"
        yield Check(
            name="steps lost on a handled notice" if handled else "steps repeated after a loss without notice",
            figure=f"{resumption.lost} (last logged {resumption.last_step}, resumed at {resumption.resumed_step})",
            held=resumption.lost == 0 if handled else 0 < resumption.resumed_step <= resumption.last_step,
        )
        if resumption.started_s is not None:
            beyond = resumption.started_s - rehearsal.torch_s
            text = f"{resumption.started_s:.1f} s, {beyond:.1f} s beyond importing torch (bar {RECOVERY_S:.0f})"
            yield Check(name="new node to first new step", figure=text, held=beyond < RECOVERY_S, required=False)
    for boundary in boundaries(evidence.growth):
        yield Check(name=f"growth into {boundary['phase']}", figure=_figures(boundary), held=_passed(boundary))
    logs = rehearsal.cloud.client("logs")
    group = str(rehearsal.engine.outputs()["log_group"])
    streams = {stream["logStreamName"] for stream in logs.describe_log_streams(logGroupName=group)["logStreams"]}
    silent = [view.name for view in views if f"{definition.run.id}/{view.node.instance.id}" not in streams]
    yield Check(
        name="container logs in CloudWatch", figure=f"{len(views) - len(silent)} of {len(views)} nodes", held=not silent
    )


def boundaries(growth: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The growths that the report holds."""
    return list(growth.get("boundaries", []))


def _passed(boundary: Mapping[str, Any]) -> bool:
    verdicts = [boundary[when]["verdict"] for when in ("before", "after_round_trip")]
    return verdicts == ["pass", "pass"] and not boundary["problems"]


def _figures(boundary: Mapping[str, Any]) -> str:
    before, after = boundary["before"], boundary["after_round_trip"]
    return (
        f"logits moved by {before['max_logit_difference']:.1e} (limit {before['limit']:.1e}), "
        f"after save and load {after['max_logit_difference']:.1e}, "
        f"{before['routing_flips']} of {before['routings']} routings flipped"
    )


def leftovers(rehearsal: Rehearsal) -> dict[Resource, dict[str, str]]:
    """What exists after the destroy. Raises GpufleetError for anything that the definition did not ask to keep."""
    left = rehearsal.cloud.leftovers()
    kept = {("bucket",)} if rehearsal.definition.storage.keep.bucket else set()
    unwanted = [f"{kind} {name}" for kind, name in left if (kind,) not in kept]
    if unwanted:
        raise GpufleetError(f"left in the account: {', '.join(unwanted)}")
    if rehearsal.definition.storage.keep.bucket and not left:
        raise GpufleetError("the bucket was to be kept, and it is gone")
    return left


def write(
    rehearsal: Rehearsal,
    out: Callable[[str], None],
    *,
    checks: Sequence[Check],
    left: Mapping[Resource, Mapping[str, str]],
    swept: str,
) -> None:
    """Writes receipt.json and loss.png beside the results, and prints the report."""
    evidence = Evidence(rehearsal)
    folder = rehearsal.folder
    (folder / "receipt.json").write_bytes((folder / "results" / "receipt.json").read_bytes())
    draw(evidence, folder / "loss.png")
    out(f"\n== {rehearsal.name}, run {rehearsal.definition.run.id}, rehearsed with {rehearsal.engine.name}\n")
    for moment in rehearsal.timeline.of(*TOLD):
        out(f"{clock(moment.t)}  {moment.text}")
    out("")
    out(receipts.text(evidence.receipt))
    out("")
    for line in losses(evidence):
        out(line)
    out("")
    for check in checks:
        mark = "ok" if check.held else "slow" if not check.required else "NO"
        out(f"  {mark:<5} {check.name}: {check.figure}")
    names = ", ".join(f"{kind} {name}" for kind, name in left)
    out(f"  ok    left after destroy: {names + ' (asked for)' if names else 'nothing'}")
    out(f"        sweep: {swept.strip().splitlines()[-1]}")
    place = folder.relative_to(rehearsal.root)
    out(f"\nFiles: {place}/{{bill.json, receipt.json, timeline.jsonl, loss.png, results/}}")
    out(f"Everything held, in {rehearsal.timeline.seconds:.0f} s.")


def losses(evidence: Evidence) -> Iterator[str]:
    """First and last loss of each phase."""
    yield "phase    parameters  active       steps  loss first  last    val"
    first = 1
    for phase in evidence.phases:
        inside = [line for line in evidence.metrics if first <= int(line["step"]) < first + phase.steps]
        trained = [line["loss"] for line in inside if line.get("loss") is not None]
        held = [line["val_loss"] for line in inside if line.get("val_loss") is not None]
        shown = [
            f"{value:.4f}" if value is not None else "-" for value in (*_ends(trained), held[-1] if held else None)
        ]
        yield (
            f"{phase.name:<8} {phase.params_total:>10,}  {phase.params_active:>10,}  {phase.steps:>5}"
            f"  {shown[0]:>10}  {shown[1]:>6}  {shown[2]:>6}"
        )
        first += phase.steps


def draw(evidence: Evidence, target: Path) -> None:
    """loss.png from the run's own metrics and the timeline."""
    rehearsal = evidence.rehearsal
    assert rehearsal.watch is not None
    timeline, views = rehearsal.timeline, list(rehearsal.watch.views.values())
    first, phases = 1, []
    for phase in evidence.phases:
        name = f"{phase.name}, {phase.params_total:,} parameters"
        phases.append(picture.Phase(name=name, first=first, last=first + phase.steps - 1))
        first += phase.steps
    words = {"notice": "notice: {} lost", "loss": "gone: {} repeated"}
    marks = [
        picture.Mark(step=r.last_step, kind=r.kind, text=words[r.kind].format(f"{r.lost} step{'s' * (r.lost != 1)}"))
        for r in evidence.resumptions()
    ]
    lanes = []
    for view in views:
        instance = view.node.instance
        assert instance.ended_at is not None
        notice = instance.notice_at if view.interrupted is not None else None
        lanes.append(
            picture.Lane(
                name=view.name,
                launched=timeline.since_began(instance.launched_at.timestamp()),
                trains=None if view.first_step_at is None else timeline.since_began(view.first_step_at.timestamp()),
                notice=None if notice is None else timeline.since_began(notice.timestamp()),
                ended=timeline.since_began(instance.ended_at.timestamp()),
                how=view.interrupted.kind if view.interrupted else "done",
            )
        )
    count = len(marks)
    title = (
        f"{rehearsal.name}, run {rehearsal.definition.run.id}: rehearsed with {count} interruption{'s' * (count != 1)}"
    )
    picture.draw(
        target,
        title=title,
        metrics=evidence.metrics,
        phases=phases,
        marks=marks,
        lanes=lanes,
        checkpoints=[moment.t for moment in timeline.of("checkpoint")],
    )


def save_bucket(cloud: Cloud, folder: Path) -> None:
    """The small objects of every bucket, for whoever looks into a failure: the bucket itself dies with the process."""
    s3 = cloud.client("s3")
    for bucket in s3.list_buckets()["Buckets"]:
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=bucket["Name"]):
            for entry in page.get("Contents", []):
                if entry["Size"] < 1_000_000:
                    target = folder / entry["Key"]
                    target.parent.mkdir(parents=True, exist_ok=True)
                    s3.download_file(bucket["Name"], entry["Key"], str(target))


def _ends(values: Sequence[float]) -> tuple[float | None, float | None]:
    return (values[0], values[-1]) if values else (None, None)


def _document(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise GpufleetError(f"the run left no {path.name}") from error
    return found


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
