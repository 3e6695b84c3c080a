"""Checks what a rehearsal must show: every promise about the run, with a measured value or a fact. This module reads
only files that a user gets too: the results folder, the receipt, the timeline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.prepared import as_prepared
from gpufleet.job import ledger
from gpufleet.job.contract import bucket
from gpufleet.job.contract.aws import SWITCH
from gpufleet.job.contract.done import FINISHED, Done
from gpufleet.job.contract.messages import Observed
from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.contract.workdir import METRICS, RECEIPT, RESULTS, STAGES
from gpufleet.job.kind import batch
from gpufleet.job.kind.common import PhaseSize
from gpufleet.rehearsal import account
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine
from gpufleet.rehearsal.node import NodeRunner
from gpufleet.rehearsal.timeline import Timeline
from gpufleet.rehearsal.watch import NodeView, Watch


@dataclass(kw_only=True, slots=True)
class Rehearsal:
    """One rehearsal: its folders, its definition, and what it has observed."""

    definition: StackDefinition  # the definition, or one of its stages, in its form for the rehearsal
    folder: Path  # rehearsals/<stack>/<run>.unfinished
    project: Path  # the scratch project
    root: Path  # the user's project
    timeline: Timeline
    cloud: Cloud
    engine: Engine
    runner: NodeRunner
    watch: Watch | None = None
    stand_in: bool = False  # whether a stand-in replaces a command's script
    until: str | None = None  # for a run without interruptions: whether its own end or a limit should end it
    torch_s: float = 0.0  # seconds that a new process takes to import torch on this machine

    @property
    def name(self) -> str:
        return self.definition.name

    @property
    def parts(self) -> list[Rehearsal]:
        """The rehearsal of each stage, or this one alone."""
        return [replace(self, definition=part) for part in self.definition.parts]


NOTICE_SEEN_S = 5.0  # the supervisor's polling interval
STAGE_KEYS = ("row", "candidate", "name", "what", "index")  # keys that identify a result of a stage after training
LEFT = "left after destroy"
RECOVERY_S = 10.0  # the most seconds that a restart may take, without the import of torch (bench/results/bars.md)


@dataclass(frozen=True, kw_only=True, slots=True)
class Promise:
    """One promise, whether it held, and the value or fact that shows this (`figure`). If `required` is False, a broken
    promise is reported, but does not fail the rehearsal. If `shown` is False, it is unknown whether the promise holds,
    and `figure` says what would show it.
    """

    name: str
    figure: str
    held: bool
    required: bool = True
    shown: bool = True

    @property
    def is_broken(self) -> bool:
        """Whether the promise fails the rehearsal."""
        return self.required and self.shown and not self.held


@dataclass(frozen=True, kw_only=True, slots=True)
class Resumption:
    """The change from one node to the next: what was lost, and how long the next node took."""

    kind: str  # the kind of interruption: notice or loss
    last_step: int
    resumed_step: int
    started_s: float | None  # seconds from the next node's launch to its first step
    signalled: bool  # whether a signal was sent to the user's command
    reason: str  # why the restored checkpoint was made; empty if there is none
    is_between: bool = False  # whether the node was lost between two stages that stay on one node
    observed: Observed = field(default_factory=Observed)  # the next node's observations of a command
    doubt: str = ""  # why the last checkpoint of the interrupted node is not valid; empty if it is valid

    def saved(self, every: int | None) -> bool | None:
        """Whether the next node resumes from what a command has saved after its signal. None if this was not shown,
        because no signal was sent, or because the save may be one of those that come at fixed numbers of steps.
        """
        if self.signalled and self.reason != "stop":
            return False
        off = min(self.resumed_step % every, -self.resumed_step % every) if every else 2
        as_usual = every is not None and off <= max(
            1, every // 10
        )  # if a file's name has no {step}, the checkpoint has the step of the last line
        return None if not self.signalled or as_usual else True

    @property
    def lost(self) -> int:
        return max(0, self.last_step - self.resumed_step)


class Evidence:
    """The run's files and what the rehearsal has observed, read once."""

    def __init__(self, rehearsal: Rehearsal) -> None:
        folder = rehearsal.folder / "results" / rehearsal.definition.stage
        self.rehearsal = rehearsal
        self.folder = folder
        self.receipt = Receipt.from_json(_document(folder / RECEIPT))
        # the receipt of the stage from which this one takes the node
        self.before = None
        if rehearsal.definition.fleet_of:
            self.before = Receipt.from_json(_document(folder.parent / rehearsal.definition.before[-1] / RECEIPT))
        self.done = Done.from_json(_document(folder / bucket.DONE))
        if rehearsal.until != "limit":
            _document(folder / RESULTS)  # raises if the file is missing
        report = folder / "growth_report.json"
        self.growths: list[dict[str, Any]] = _document(report).get("boundaries", []) if report.exists() else []
        self.stages = {path.name: _lines(path) for path in sorted((folder / STAGES).glob("*.jsonl"))}
        self.metrics = _lines(folder / METRICS)
        config = as_prepared(rehearsal.definition, rehearsal.project).job.parameters
        self.phases = config.phases()
        self.total_steps = batch.total_steps(config)

    def spans(self) -> Iterator[tuple[PhaseSize, int, int]]:
        """Each phase that has steps, with its first and last step in the whole run."""
        first = 1
        for phase in self.phases:
            if phase.steps:
                yield phase, first, first + phase.steps - 1
                first += phase.steps

    def steps_done(self) -> dict[str, int]:
        """Steps done in each phase that has steps, by name; fewer than planned if the phase ended early."""
        steps = {}
        for phase, first, last in self.spans():
            own = [int(line["step"]) for line in self.metrics if first <= int(line["step"]) <= last]
            steps[phase.name] = max(own, default=first - 1) - first + 1
        return steps

    def resumptions(self) -> list[Resumption]:
        """One resumption for each interruption, in order."""
        watch = self.rehearsal.watch
        assert watch is not None
        if self.rehearsal.definition.fleet.is_gang:
            return [self._of_several(view, before) for view, before in watch.taken if before + 1 in watch.generations]
        by_instance = {attempt.instance: attempt for attempt in self.receipt.attempts}
        resumptions = []
        for before, after in pairwise(watch.views.values()):
            if before.interrupted is None:
                continue
            # a node that is lost between two stages may have no record in the second
            lost, taken = by_instance.get(before.node.instance.id), by_instance[after.node.instance.id]
            resumptions.append(
                Resumption(
                    kind=before.interrupted.kind,
                    is_between=before.interrupted.place == "hand_over",
                    last_step=max(lost.last_step if lost else 0, before.last_step),
                    resumed_step=taken.resumed_step,
                    started_s=None if taken.started_s is None else float(taken.started_s),
                    signalled=bool(before.signalled),
                    reason=watch.manifests.get(taken.resumed_step, ""),
                    observed=after.observed,
                    doubt=before.observed.doubt,
                )
            )
        return resumptions

    def _of_several(self, view: NodeView, before: int) -> Resumption:
        """How a run with several nodes went on after generation `before`. If one node's command ends at its signal, the
        commands of the other nodes end before their signals.
        """
        watch = self.rehearsal.watch
        assert watch is not None
        begun = watch.generations[before + 1]
        assert view.interrupted is not None
        return Resumption(
            kind=view.interrupted.kind,
            last_step=begun.reached,
            resumed_step=max(begun.step, 0),
            started_s=None,
            signalled=any(before in other.signalled for other in watch.views.values()),
            reason=watch.manifests.get(begun.step, ""),
            observed=begun.leader.observed if begun.leader else Observed(),
            doubt=view.observed.doubt,
        )


def checks(evidence: Evidence) -> Iterator[Promise]:
    """Every promise about the run."""
    rehearsal, definition = evidence.rehearsal, evidence.rehearsal.definition
    assert rehearsal.watch is not None
    views = list(rehearsal.watch.views.values())
    reason = evidence.done.reason
    yield Promise(name="the run's own end", figure=reason, held=reason == FINISHED)
    last = max((int(line["step"]) for line in evidence.metrics), default=0)
    yield _steps(evidence, last)
    planned = definition.interruptions
    counted = (evidence.receipt.with_notice, evidence.receipt.without_notice)
    recorded = {attempt.instance for attempt in evidence.receipt.attempts}
    # a node that is lost between two stages may have no record in the second
    unrecorded = sum(1 for view in views if _is_between(view) and view.node.instance.id not in recorded)
    yield Promise(
        name="interruptions in the receipt",
        figure=f"{counted[0]} with notice, {counted[1]} without",
        held=counted == (planned.with_notice, planned.without_notice - unrecorded),
    )
    lost = planned.with_notice + planned.without_notice
    nodes = lost + definition.nodes
    if evidence.before is not None:
        yield _stays(evidence, evidence.before, views[0])
    launched = f"{len(views) - 1} launched, and the one before" if definition.fleet_of else f"{len(views)} launched"
    yield Promise(name="nodes", figure=launched, held=len(views) == nodes)
    noticed = [
        moment
        for moment in rehearsal.timeline.select("seen")
        if (noticed_view := rehearsal.watch.views.get(moment.facts["node"])) and noticed_view.interrupted
    ]
    for moment in noticed:
        seconds = float(moment.facts["seconds"])
        yield Promise(
            name="notice seen",
            figure=f"after {seconds:.1f} s (limit {NOTICE_SEEN_S:.0f})",
            held=seconds <= NOTICE_SEEN_S,
        )
    if len(noticed) != planned.with_notice:
        yield Promise(name="notices seen", figure=f"{len(noticed)} of {planned.with_notice}", held=False)
    for resumption in evidence.resumptions():
        yield from _resumed(evidence, resumption)
    if definition.fleet.is_gang:
        for view, generation in rehearsal.watch.taken:
            if generation + 1 not in rehearsal.watch.generations:
                yield Promise(name="went on together", figure=f"no node did after {view.name} was gone", held=False)
    for boundary in evidence.growths:
        yield Promise(name=f"growth into {boundary['phase']}", figure=_figures(boundary), held=_passed(boundary))
    for name, lines in evidence.stages.items():
        kinds = {json.dumps({key: line[key] for key in STAGE_KEYS if key in line} or line) for line in lines}
        figure = f"{len(lines)} results, {len(lines) - len(kinds)} of them twice"
        yield Promise(name=f"nothing of {name} done twice", figure=figure, held=len(lines) == len(kinds))
    logged = _logged(rehearsal)
    begun = having_begun(views)
    silent = [view.name for view in begun if f"{definition.run.id}/{view.node.instance.id}" not in logged]
    if definition.notify.email:
        yield _messages(rehearsal)
    if definition.fleet.market.stands_by and lost:
        yield _fallback(evidence)
    yield Promise(
        name="container logs in CloudWatch", figure=f"{len(begun) - len(silent)} of {len(begun)} nodes", held=not silent
    )


def having_begun(views: Iterable[NodeView]) -> list[NodeView]:
    """The nodes except one that was lost before it began this stage."""
    return [view for view in views if not _is_between(view)]


def _is_between(view: NodeView) -> bool:
    return view.interrupted is not None and view.interrupted.place == "hand_over"


def _stays(evidence: Evidence, before: Receipt, first: NodeView) -> Promise:
    """The promise that a stage begins on the node of the stage before. If that node was lost between the two, the
    promise that the next node begins this stage, and does nothing of the stage before again.
    """
    stage, own = evidence.rehearsal.definition.before[-1], [attempt.instance for attempt in evidence.receipt.attempts]
    theirs = [attempt.instance for attempt in before.attempts]
    if not _is_between(first):
        held = own[:1] == theirs[-1:] == [first.node.instance.id]
        return Promise(name=f"stays on the node of {stage}", figure=first.name, held=held)
    new = set(own) - {first.node.instance.id}
    again = bool(new & set(theirs))
    figure = f"{first.name} was lost; the next one {'repeated' if again else 'did not repeat'} {stage}"
    return Promise(name=f"lost after {stage}", figure=figure, held=bool(new) and not again)


def _fallback(evidence: Evidence) -> Promise:
    """The promise that only the last node was on demand, and that no fleet or schedule is left to begin another."""
    cloud, markets = evidence.rehearsal.cloud, [attempt.capacity for attempt in evidence.receipt.attempts]
    fleets = [fleet.state for fleet in cloud.fleets.fleets.values() if fleet.state != "deleted" and fleet.target]
    fired = [firing.refused for firing in cloud.schedules.fired if firing.name.endswith(f"/{SWITCH}")]
    states = [
        cloud.client("scheduler").get_schedule(GroupName=schedule["GroupName"], Name=SWITCH)["State"]
        for schedule in cloud.client("scheduler").list_schedules()["Schedules"]
        if schedule["Name"] == SWITCH
    ]
    figure = f"nodes {', '.join(markets)}; schedule {', '.join(states).lower()}; {len(fleets)} fleets want a node"
    held = markets == [*["spot"] * (len(markets) - 1), "on-demand"] and fired == [""] and states == ["DISABLED"]
    return Promise(name="continues on demand", figure=figure, held=held and not fleets)


def _messages(rehearsal: Rehearsal) -> Promise:
    """The promise that messages report that the run trains and how it ended; a node that is soon lost sends none."""
    begun = f"gpufleet {rehearsal.name}, run {rehearsal.definition.run.id}: "
    messages = [message.removeprefix(begun) for message in account.messages(rehearsal.cloud.account)]
    held = all(any(message.startswith(beginning) for message in messages) for beginning in ("it trains", "it is over"))
    return Promise(name="messages to people", figure="; ".join(messages) or "nothing", held=held)


def _resumed(evidence: Evidence, resumption: Resumption) -> Iterator[Promise]:
    """The promises about one interruption: how much work it has cost, and that the next node continued from the
    restored checkpoint.
    """
    rehearsal, config = evidence.rehearsal, evidence.rehearsal.definition.job.parameters
    if resumption.is_between:  # `_stays` has its promise
        return
    ends = {last for _, _, last in evidence.spans()}
    # A phase that ended early is resumed after what would have been its last step; a command's lines may count from 0.
    last = resumption.last_step + (config.processes == "own")
    reached = resumption.resumed_step <= last or resumption.resumed_step in ends
    figure = f"{resumption.lost} (last logged {resumption.last_step}, resumed after step {resumption.resumed_step})"
    if resumption.kind == "notice" and config.processes != "own":
        yield Promise(name="steps lost on a handled notice", figure=figure, held=resumption.lost == 0)
    elif resumption.kind == "notice":
        saved = resumption.saved(config.steps_between_saves())
        usual = "saved as usual" if resumption.signalled else "no signal was sent"
        figure += ", " + {True: "saved on the signal", False: "not saved on the signal", None: usual}[saved]
        held = reached and (saved is not False or config.saves_on_signal is not True)
        yield Promise(name="steps repeated after a notice", figure=figure, held=held)
    else:
        every = config.steps_between_saves()
        figure += f", saves every {every} steps" if every else ""
        held = (resumption.resumed_step > 0 and reached) or not (config.saves and evidence.total_steps)
        yield Promise(name="steps repeated after a loss without notice", figure=figure, held=held)
    if resumption.started_s is None:
        return
    beyond, text = resumption.started_s - rehearsal.torch_s, "with the command's own start"
    if rehearsal.torch_s:  # only measured for a ready-made job
        text = f"{beyond:.1f} s beyond importing torch (bar {RECOVERY_S:.0f})"
    held, figure = not rehearsal.torch_s or beyond < RECOVERY_S, f"{resumption.started_s:.1f} s, {text}"
    yield Promise(name="new node to first new step", figure=figure, held=held, required=False)


def _logged(rehearsal: Rehearsal) -> set[str]:
    """Log streams with content.

    A container makes its stream before it prints, so an empty stream is no proof.
    """
    logs, group = rehearsal.cloud.client("logs"), str(rehearsal.engine.outputs()["log_group"])
    names = [stream["logStreamName"] for stream in logs.describe_log_streams(logGroupName=group)["logStreams"]]
    first = {"logGroupName": group, "startFromHead": True, "limit": 1}
    return {name for name in names if logs.get_log_events(logStreamName=name, **first)["events"]}


def _steps(evidence: Evidence, last: int) -> Promise:
    """The promise that all steps were done. A run that may stop early must have done the steps up to its stop and
    published the checkpoint of the last one. A command must have done the number on which the verdict on its end was
    based.
    """
    watch, total = evidence.rehearsal.watch, evidence.total_steps
    assert watch is not None
    if any(phase.may_stop_early for phase in evidence.rehearsal.definition.job.parameters.phases()):
        held = last == max(watch.manifests, default=0) <= total
        done = sum(evidence.steps_done().values())
        return Promise(name="steps", figure=f"{done} of at most {total}; it may stop early", held=held)
    config = evidence.rehearsal.definition.job.parameters
    counts = config.phases()[-1].counts
    figure = f"{last}; job.work does not say of how many" if counts == "seconds" else f"{last} of {total}"
    return Promise(
        name=counts if counts == "epochs" else "steps", figure=figure, held=config.processes == "own" or last == total
    )


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


def leftovers(rehearsal: Rehearsal) -> Promise:
    """The promise that only what the definition keeps exists after the destroy."""
    resources, keeps_bucket = rehearsal.cloud.leftovers(), rehearsal.definition.storage.keep.bucket
    names = ", ".join(f"{kind} {name}" for kind, name in resources)
    if keeps_bucket and not resources:
        return Promise(name=LEFT, figure="nothing, but the bucket should have stayed", held=False)
    unwanted = [kind for kind, _ in resources if not (keeps_bucket and kind == "bucket")]
    asked = " (asked for)" if names and not unwanted else ""
    return Promise(name=LEFT, figure=f"{names or 'nothing'}{asked}", held=not unwanted)


def _document(path: Path) -> dict[str, Any]:
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise GpufleetError(f"the run left no {path.name}") from error
    return document


def _lines(path: Path) -> list[dict[str, Any]]:
    return ledger.read(path) if path.exists() else []
