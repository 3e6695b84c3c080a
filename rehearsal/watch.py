"""Follows a run from outside while it trains, and interrupts it at points that depend on the definition's seed. This
module reads only what a person could read: the fleet, the nodes' logs and metrics, and the bucket. This module changes
nothing; it only causes interruptions.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from gpufleet.infra.definition.model import Interruptions, Place, StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program.resources.tags import RUN_TAG
from gpufleet.job import atomic
from gpufleet.job.command.host import SETUP_BEGINS, SETUP_ENDS
from gpufleet.job.command.output import OF_OTHERS, CauseOfEnd
from gpufleet.job.contract import bucket
from gpufleet.job.contract.aws import SWITCH
from gpufleet.job.contract.messages import Observed
from gpufleet.job.contract.workdir import CHECKPOINTS, METRICS, STAGES, STEPS
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.imds import NOTICE_PATHS
from gpufleet.rehearsal.launch import CloudInstance
from gpufleet.rehearsal.node import NodeRunner, RehearsalNode
from gpufleet.rehearsal.timeline import Timeline

Kind = Literal["notice", "loss"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """One interruption, which comes when the job has logged `step` or a later step and is at the planned place.

    A loss also waits for the first checkpoint in the bucket.
    """

    step: int
    kind: Kind
    place: Place | Literal["hand_over"] = "step"  # hand_over: between two stages that one node does


def possible(definition: StackDefinition) -> Interruptions:
    """The definition's interruptions that AWS can cause in its market."""
    none: dict[str, Any] = dict.fromkeys(definition.fleet.market.never, 0)
    return replace(definition.interruptions, **none)


def plan(interruptions: Interruptions, phase_steps: Sequence[int], *, stays: bool = False) -> tuple[Planned, ...]:
    """The interruptions in their order, one for each node. `stays`: whether a stage begins on the node of the stage
    before; the first loss without notice then comes between the two.

    An interruption in the first phase comes in the second to fourth fifth of this phase. Interruptions at a step, or
    while saving, are spread over the other phases, so that they come after the end of a phase. Each comes in the second
    to fourth fifth of its share of the steps, so that there is work before and after it. An interruption between phases
    comes at the last step of a phase; an interruption in a phase after training comes after the last step.
    """
    seeded = random.Random(interruptions.seed)
    places: list[tuple[Kind, Place]] = [("notice", interruptions.notice_at)] * interruptions.with_notice
    between_stages = int(stays and interruptions.without_notice > 0)
    places += [("loss", interruptions.loss_at)] * (interruptions.without_notice - between_stages)
    steps = [count for count in phase_steps if count]
    total = sum(steps)
    first = steps[0] if len(steps) > 1 else 0
    drawn = [(kind, place) for kind, place in places if place in ("step", "save")]
    share = (total - first) / max(1, len(drawn))
    planned = [
        Planned(step=max(1, round(first + share * (number + seeded.uniform(0.2, 0.6)))), kind=kind, place=place)
        for number, (kind, place) in enumerate(drawn)
    ]
    early = [(kind, place) for kind, place in places if place == "first"]
    planned += [Planned(step=max(1, round(steps[0] * seeded.uniform(0.3, 0.7))), kind=k, place=p) for k, p in early]
    ends = [sum(steps[: place + 1]) for place in range(len(steps) - 1)] or [total]
    between = [(kind, place) for kind, place in places if place == "boundary"]
    planned += [
        Planned(step=ends[number % len(ends)], kind=kind, place=place) for number, (kind, place) in enumerate(between)
    ]
    planned += [Planned(step=total, kind=kind, place=place) for kind, place in places if place == "stage"]
    planned += [Planned(step=0, kind="loss", place="hand_over")] * between_stages
    return tuple(sorted(planned, key=lambda one: (one.step, one.place == "stage")))


POLL_S = 0.05
TAIL = 15  # number of last lines of a node's log that are shown if the run fails
BUCKET_S = 1.0
HELD_S = 6.0  # seconds for which a trainer is held; more than a node may take to see a notice
PATIENCE_S = 3.0  # a node must look wrong for this many seconds before this is reported
STALLED_S = 150.0  # after this many seconds without news the run is taken to hang
QUIET_S = 30.0  # after so many seconds without news the watch says what computes: a compiler may print nothing
COMPUTES = 0.1  # a process computes if it uses this share of a CPU
# the places of the work folder (job/node/disks.py)
WORK_FOLDERS = ("opt/dlami/nvme/gpufleet/run", "scratch/run", "opt/gpufleet/run")
_TOLD = re.compile(r"attempt failed|the run is over|fleet .* deleted|starting the container|timer:")
_STEP = re.compile(r"^step \d+/\d+ \|")
_WAITS = re.compile(r"waiting for AWS to end this machine")
_BEGINS = re.compile(r" supervisor: generation \d+: ")
_ASKED = re.compile(r" host: SIG[A-Z0-9]+ to \d+ processes$")


class RunFailedError(GpufleetError):
    """The run failed, or hangs."""


class Tail:
    """Reads what was added to files since they were last read. This is possible because the nodes run on this machine.
    A file that was replaced, or has become shorter, is read from its beginning.
    """

    def __init__(self) -> None:
        self._places: dict[Path, tuple[int, int]] = {}  # inode and offset of each file

    def new(self, path: Path) -> list[str]:
        """The new complete lines."""
        try:
            file = path.open("rb")
        except FileNotFoundError:
            self._places.pop(path, None)  # the next file may get the same inode
            return []
        with file:
            look = os.fstat(file.fileno())
            inode, offset = self._places.get(path, (0, 0))
            offset = file.seek(offset if inode == look.st_ino and look.st_size >= offset else 0)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        self._places[path] = look.st_ino, offset + len(content)
        return content.decode(errors="replace").splitlines()


@dataclass(kw_only=True, slots=True)
class NodeView:
    """What has been observed of one node."""

    node: RehearsalNode
    number: int
    lines: int = 0  # lines read from the container's log
    tail: Tail = field(default_factory=Tail)
    logged_at: datetime  # the time of the newest line of metrics.jsonl
    first_step_at: datetime | None = None
    first_step: int | None = None
    last_step: int = 0
    results: int = 0  # lines of stages/*.jsonl
    stage_lines: int | None = None  # lines of stages/*.jsonl at the beginning of the node
    seen: bool = False  # whether the node's supervisor has read the notice
    ended: bool = False
    interrupted: Planned | None = None
    is_setting_up: bool = False  # whether its command's set-up is running
    # generations in which its command got a signal; 0 with a single node
    signalled: set[int] = field(default_factory=set)
    held_until: float | None = None  # the time.monotonic() at which its trainer must continue at the latest
    observed: Observed = field(default_factory=Observed)  # what the host has observed of its command
    cpu_s: dict[tuple[int, str], float] = field(default_factory=dict)  # NodeRunner.cpu_s, when it was looked at last
    doubted_at: float | None = None  # time.monotonic() at which something began to look wrong

    @property
    def name(self) -> str:
        return f"node {self.number}"

    def logged(self) -> list[bytes]:
        """The lines of its metrics.jsonl."""
        return [line for path in _job_files(self, METRICS) for line in path.read_bytes().splitlines()]

    def last_lines(self) -> list[str]:
        """The end of its container's log."""
        return _lines(self.node.container_log)[-TAIL:]

    def cause(self) -> str:
        """The exception with which its command's last start has ended; empty if there is none."""
        cause = CauseOfEnd()
        for line in _lines(self.node.container_log):
            cause = CauseOfEnd() if _BEGINS.search(line) else cause
            cause.take(line, tells_step=False)
        return cause.text


class Begun(NamedTuple):
    """How a generation of a run with several nodes began."""

    step: int  # the newest published step; -1 if there is none
    reached: int  # the last step that any node had logged
    leader: NodeView | None = None


class Watch:
    """Watches one run, or one stage, from `up` to its end. `run` returns when the run has ended by itself."""

    def __init__(
        self,
        cloud: Cloud,
        runner: NodeRunner,
        timeline: Timeline,
        planned: Sequence[Planned],
        bucket: str,
        run_id: str,
        *,
        fleet_run: str = "",
        before: Watch | None = None,
        hands_over: bool = False,
        stage_lines: int = 1,
        falls_back: bool = False,
        saves: bool = True,
        doubts: Callable[[Observed, int], str] = lambda observed, step: "",
    ) -> None:
        """`fleet_run`: the run id in the tags of the nodes, if it is not `run_id`. `before`: the watch of the stage
        before, from which this stage takes the node; `hands_over`: whether the next stage takes this stage's node.
        `stage_lines`: the number of results of a phase after training after which a node is taken away.
        `falls_back`: whether there is no spot capacity after the last interruption, so that the run must continue on
        demand. `saves`: whether the job has checkpoints. `doubts` returns the reason why a command will fail, from its
        observations and its step; empty if it may succeed.
        """
        self.cloud = cloud
        self.runner = runner
        self.timeline = timeline
        self.planned = list(planned)
        self.bucket, self.run_id, self._fleet_run = bucket, run_id, fleet_run or run_id
        self._hands_over, self._is_handed_over = hands_over, False
        self._before = before.views if before else {}
        self._over = {instance.id for instance in cloud.instances() if before and instance.ended_at is not None}
        self._count: int = before._count if before else 0  # nodes so far
        self.stage_lines, self.falls_back, self.saves, self._doubts = stage_lines, falls_back, saves, doubts
        self.views: dict[str, NodeView] = {}
        self.manifests: dict[int, str] = {}  # the reason of the checkpoint of each step
        self.generations: dict[int, Begun] = {}  # the generations of several nodes, by number
        # Nodes and their interruptions, with the generation that each interruption has ended.
        self.taken: list[tuple[NodeView, int]] = []
        self._s3 = cloud.client("s3")
        self._news = self._looked_at = time.monotonic()
        self._bucket_at = 0.0

    def run(self, *, check: Callable[[], None] = lambda: None) -> None:
        """Watches to the end. Raises RunFailedError if a node fails or the run hangs. Interruptions that are still in
        `planned` after that did not happen.
        """
        while not self._is_handed_over and not self._all_ended():
            check()
            for instance in self.cloud.instances():
                is_known = instance.id in self.views or instance.id in self._over
                if self._is_ours(instance.tags) and not is_known and instance.id in self.runner.nodes:
                    self._launched(instance)
            for view in self.views.values():
                self._look(view)
            self._checkpoints()
            if self.cloud.trouble is not None:
                raise RunFailedError(f"a node cannot be started on this machine: {self.cloud.trouble}")
            self._computing()
            if time.monotonic() - self._news > STALLED_S:
                logs = f"; the nodes' logs are in {self.runner.folder}\n{self._last_lines()}"
                raise RunFailedError(f"nothing new for {STALLED_S:.0f} s{logs}".rstrip())
            time.sleep(POLL_S)
        self._checkpoints(at_once=True)

    def _computing(self) -> None:
        """Tells which programs of a silent node's trainer compute. While one does, the run is slow, not stuck."""
        since, is_quiet = time.monotonic() - self._looked_at, self._news <= self._looked_at
        if since < QUIET_S:
            return
        for view in self.views.values():
            before, view.cpu_s = view.cpu_s, {} if view.ended else self.runner.cpu_s(view.node.instance)
            busy = {name for (pid, name), s in view.cpu_s.items() if s - before.get((pid, name), 0) > COMPUTES * since}
            if is_quiet and busy:
                self._tell("computes", f"{view.name}: prints nothing, but {', '.join(sorted(busy))} computes")
        self._looked_at = time.monotonic()

    def _last_lines(self) -> str:
        """The last lines of each existing node, from its container or, before there is one, from its boot."""
        last = {
            view.name: view.last_lines() or _lines(view.node.log)[-TAIL:]
            for view in self.views.values()
            if not view.ended
        }
        return "\n".join(line for name, lines in last.items() for line in (f"the last lines of {name}:", *lines))

    def _all_ended(self) -> bool:
        """Whether every node has ended and no fleet will launch another."""
        fleets = [f for f in self.cloud.fleets.fleets.values() if self._is_ours(f.tags) and not f.is_gone]
        return (
            bool(self.views) and all(view.ended for view in self.views.values()) and all(f.target == 0 for f in fleets)
        )

    def _is_ours(self, tags: Mapping[str, str]) -> bool:
        """Whether these are the tags of this run's fleet. Each stage has its own fleet, or stays on another's."""
        return tags.get(RUN_TAG) == self._fleet_run

    def _launched(self, instance: CloudInstance) -> None:
        if earlier := self._before.get(instance.id):  # what the stage before has logged is not this stage's
            view = NodeView(
                node=earlier.node, number=earlier.number, tail=earlier.tail, logged_at=self.cloud.clock.now()
            )
            self.views[instance.id] = view
            return self._tell("stays", f"{view.name}: goes on with {self.run_id}", node=instance.id)
        self._count += 1
        view = NodeView(node=self.runner.nodes[instance.id], number=self._count, logged_at=instance.launched_at)
        self.views[instance.id] = view
        self._tell(
            "launched",
            f"{view.name}: {instance.type} {instance.id} launched in {instance.zone}",
            at=instance.launched_at,
            node=instance.id,
            zone=instance.zone,
        )

    def _look(self, view: NodeView) -> None:
        if view.ended:
            return
        instance = view.node.instance
        over = instance.ended_at is not None
        self._boot_log(view)
        self._container_log(view)
        self._metrics(view)
        self._observe(view)
        self._notice_seen(view)
        if view.held_until is not None and (view.seen or over or time.monotonic() > view.held_until):
            view.held_until = None
            self.runner.go(instance)
        self._written(view)
        if over:
            self._ended(view)
        elif self.planned and view.interrupted is None and self._is_at(view, self.planned[0]):
            self._interrupt(view, self.planned.pop(0))
        elif (code := view.node.process.poll()) is not None:
            time.sleep(0.3)  # the shutdown is reported a moment later
            if view.node.instance.ended_at is None:
                raise RunFailedError(f"{view.name}: the node script ended with {code} and left its machine running")

    def _is_at(self, view: NodeView, planned: Planned) -> bool:
        if planned.place == "hand_over":  # the stage before is done
            return True
        if planned.place == "stage":  # a node that resumes in a phase after training trains no step
            return self._written(view) >= self.stage_lines
        if view.first_step is None or view.last_step < planned.step:
            return False
        # If the bucket has no checkpoint, the run would begin again. A first line that any start would print does not
        # prove a resume.
        first = min((other.first_step for other in self.views.values() if other.first_step is not None), default=0)
        shown = max(self.manifests, default=0) > (first if view.observed.lines else 0)
        if planned.kind == "loss" and self.saves and not shown:
            return False
        return planned.place != "save" or self._saving(view)

    def _saving(self, view: NodeView) -> bool:
        """Whether a checkpoint is being written, or is on its way to the bucket."""
        local = {int(path.name.rpartition("_")[2]) for path in _job_files(view, f"{CHECKPOINTS}/{STEPS}")}
        return bool(local - self.manifests.keys()) or any(_job_files(view, f"{CHECKPOINTS}/.{STEPS}"))

    def _written(self, view: NodeView) -> int:
        """The number of lines that the phases after training have written on this node."""
        after = (
            path for path in _job_files(view, f"{STAGES}/*.jsonl") if "tried" not in path.name
        )  # files of a curriculum's evaluations, which are part of the training
        lines = sum(len(_lines(path)) for path in after)
        if lines != view.results:
            view.results, self._news = lines, time.monotonic()
        if view.stage_lines is None and view.lines:
            view.stage_lines = lines  # these lines come from earlier nodes
        return lines - (view.stage_lines or 0)

    def _interrupt(self, view: NodeView, planned: Planned) -> None:
        view.interrupted = planned
        self.taken.append((view, max(self.generations, default=0)))
        instance = view.node.instance
        self.cloud.launcher.no_spot = self.falls_back and not self.planned
        where = {
            "step": f"at step {view.last_step}",
            "first": f"in the first phase, at step {view.last_step}",
            "boundary": f"between phases, after step {view.last_step}",
            "save": f"while a checkpoint is written, at step {view.last_step}",
            "stage": f"after training, with {self._written(view)} results of a stage",
            "hand_over": f"between two stages, before {self.run_id}",
        }[planned.place]
        if planned.kind == "notice":
            # otherwise a tiny model on a fast machine would end its run before the interruption takes effect
            if planned.place != "stage":
                self.runner.hold(instance)
                view.held_until = time.monotonic() + HELD_S
            self.cloud.interrupt(instance.id)
            seconds = self.cloud.fleets.habits.notice_s
            self._tell(
                "notice",
                f"{view.name}: AWS will take it back in {seconds:.0f} s ({where})",
                node=instance.id,
                step=view.last_step,
            )
        else:
            self.cloud.kill(instance.id)
            self._tell("loss", f"{view.name}: lost without notice ({where})", node=instance.id, step=view.last_step)

    def _notice_seen(self, view: NodeView) -> None:
        instance = view.node.instance
        if view.seen or view.interrupted is None or instance.notice_at is None:
            return
        path = f"/latest/meta-data/{NOTICE_PATHS[0]}"
        for at, asked, status in self.cloud.metadata(instance.id).requests:
            if asked == path and status == 200 and at >= instance.notice_at:
                view.seen = True
                after = (at - instance.notice_at).total_seconds()
                self._tell(
                    "seen", f"{view.name}: notice seen after {after:.1f} s", at=at, node=instance.id, seconds=after
                )
                return

    def _ended(self, view: NodeView) -> None:
        view.ended = True
        instance = view.node.instance
        assert instance.ended_at is not None
        why = {"notice": "taken back by AWS", "loss": "gone"}.get(
            view.interrupted.kind if view.interrupted else "", "shut itself down"
        )
        self._tell("ended", f"{view.name}: {why}, last step {view.last_step}", at=instance.ended_at, node=instance.id)
        if self.cloud.launcher.no_spot and view.interrupted:
            self._tell("switch", "spot has no capacity any more, and the time to continue on demand comes")
            self.cloud.schedules.bring_forward(SWITCH)

    def _boot_log(self, view: NodeView) -> None:
        for line in view.tail.new(view.node.log):
            self._news = time.monotonic()
            message = line.partition(" ")[2]
            if "attempt failed" in message:
                raise RunFailedError(self._why_failed(view, message))
            if _WAITS.search(message) and view.node.instance.notice_at is not None:
                view.node.instance.terminate_at = self.cloud.clock.now()  # a wait would show nothing more
            if _TOLD.search(message):
                self._tell("boot", f"{view.name}: {message}", node=view.node.instance.id)

    def _why_failed(self, view: NodeView, message: str) -> str:
        """The cause of the failure, with the node's last lines. If its exception only says that another node's rank is
        gone, the other node's own exception instead.
        """
        if OF_OTHERS.search(view.cause()):
            for other in self.views.values():
                if not other.ended and (cause := other.cause()) and not OF_OTHERS.search(cause):
                    return "\n".join([f"{other.name}: {cause}", *other.last_lines()])
        why = f"{cause} ({message})" if (cause := view.cause()) else message
        return "\n".join([f"{view.name}: {why}", *view.last_lines()])

    def _container_log(self, view: NodeView) -> None:
        for line in view.tail.new(view.node.container_log):
            view.lines += 1
            self._news = time.monotonic()
            if _ASKED.search(line):
                view.signalled.add(max(self.generations, default=0))
            if _STEP.match(line):
                self._tell("step", line, quiet=False, node=view.node.instance.id)
            begins, ends = (line.endswith(f" host: {words}") for words in (SETUP_BEGINS, SETUP_ENDS))
            if view.is_setting_up or begins:
                self._tell("setup", f"{view.name}: {line.partition(' host: ')[2] if begins or ends else f'  {line}'}")
            view.is_setting_up = begins or (view.is_setting_up and not ends)
        if view.is_setting_up:  # a set-up may print nothing; the host ends it after job.progress.silence_minutes
            self._news = time.monotonic()

    def _observe(self, view: NodeView) -> None:
        """Reads what a command's host has observed. Raises RunFailedError when the run certainly fails."""
        for path in _job_files(view, Observed.FILE):
            view.observed = Observed.read(path.parent) or view.observed
        doubt, now = self._doubts(view.observed, view.last_step), time.monotonic()
        view.doubted_at = (view.doubted_at or now) if doubt else None
        if view.doubted_at is not None and now > view.doubted_at + PATIENCE_S:
            raise RunFailedError(doubt)

    def _metrics(self, view: NodeView) -> None:
        for path in _job_files(view, METRICS):
            for line in view.tail.new(path):
                try:
                    entry: dict[str, Any] = json.loads(line)
                except ValueError:
                    continue
                at = datetime.fromtimestamp(float(entry.get("ts", 0)), UTC)
                if at > view.logged_at:  # earlier lines were already read, or come from an earlier node
                    view.logged_at = at
                    self._logged_step(view, int(entry.get("step", 0)), at)

    def _logged_step(self, view: NodeView, step: int, at: datetime) -> None:
        view.last_step = max(view.last_step, step)
        if view.first_step is None:
            view.first_step, view.first_step_at = step, at
            after = (at - view.node.instance.launched_at).total_seconds()
            text = f"{view.name}: trains, first logged step {step}, {after:.1f} s after its launch"
            self._tell("training", text, at=at, node=view.node.instance.id, step=step, seconds=after)

    def _checkpoints(self, *, at_once: bool = False) -> None:
        if not at_once and time.monotonic() - self._bucket_at < BUCKET_S:
            return
        self._bucket_at = time.monotonic()
        done = {"Bucket": self.bucket, "Prefix": f"{self.run_id}/{bucket.DONE}"}
        self._is_handed_over = self._hands_over and bool(self._s3.list_objects_v2(**done).get("Contents"))
        for step, manifest in self._new_objects(bucket.CHECKPOINTS, bucket.MANIFEST_KEY, self.manifests):
            self.manifests[step] = str(manifest.get("reason", ""))
            self._tell("checkpoint", f"checkpoint of step {step} published", quiet=True, step=step)
        for number, generation in self._new_objects(bucket.GANG, bucket.GENERATION_KEY, self.generations):
            reached, leader = (
                max(view.last_step for view in self.views.values()),
                self.views.get(generation["members"][0]),
            )
            begun = self.generations[number] = Begun(step=int(generation["step"]), reached=reached, leader=leader)
            members = [self.views[instance] for instance in generation["members"] if instance in self.views]
            for view in members:
                if view.first_step is None:  # until then, lines that other nodes log are copied into its log too
                    view.logged_at = max(view.logged_at, datetime.now(UTC))
            names = [view.name for view in members]
            after = f" from step {begun.step}" if begun.step >= 0 else ""
            self._tell("together", f"{' and '.join(names)} train together{after}", number=number)

    def _new_objects(
        self, prefix: str, key: re.Pattern[str], known: Collection[int]
    ) -> Iterator[tuple[int, dict[str, Any]]]:
        """The new objects of the run below a prefix, by number, with their content."""
        listed = self._s3.list_objects_v2(Bucket=self.bucket, Prefix=f"{self.run_id}/{prefix}").get("Contents", [])
        for entry in listed:
            match = key.fullmatch(entry["Key"].removeprefix(f"{self.run_id}/"))
            if match and int(match[1]) not in known:
                content = self._s3.get_object(Bucket=self.bucket, Key=entry["Key"])["Body"].read()
                yield int(match[1]), atomic.parse_object(content) or {}

    def _tell(self, event: str, text: str, **facts: Any) -> None:
        self._news = time.monotonic()
        self.timeline.add(event, text, **facts)


def _job_files(view: NodeView, pattern: str) -> list[Path]:
    """Files in the job's work folder, in whichever place the node has put it."""
    return [path for folder in WORK_FOLDERS for path in (view.node.root / folder).glob(pattern)]


def _lines(path: Path) -> list[str]:
    """The file's complete lines."""
    return Tail().new(path)
