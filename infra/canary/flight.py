"""A canary's flight: the phases of its three runs, which use the same commands and engine as any run, and the facts
that they show. Whatever happens, the flight at last removes everything from the account, and asks AWS whether that is
so.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

from botocore.exceptions import ClientError

from gpufleet.infra.account import aws, leftovers, refusals, sweep
from gpufleet.infra.account.fleet import ENDED, GONE, fleets_of, nodes_of
from gpufleet.infra.account.leftovers import Left
from gpufleet.infra.account.run_folder import RunFolder, find_folder
from gpufleet.infra.account.wait import describe, explain
from gpufleet.infra.canary import notice, probes, traces
from gpufleet.infra.canary.observations import LATE, FlightFacts
from gpufleet.infra.canary.stacks import CAP, NAMES, RUN, Scale, affords_stop, definition, renew_capped
from gpufleet.infra.canary.traces import ObservedNode
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program.resources.tags import own_tags
from gpufleet.job.contract.aws import ENDED as TERMINATED
from gpufleet.job.contract.aws import FLEET_TAG, LAUNCHED
from gpufleet.job.contract.done import LIMITS, TIMER, Done
from gpufleet.job.contract.reading import epoch
from gpufleet.job.contract.receipt import Receipt, parse
from gpufleet.job.contract.workdir import RECEIPT
from gpufleet.job.supervisor.store import pages

Act = Callable[[StackDefinition, ObservedNode], None]


class EngineResult(Protocol):
    """The result of a command of the engine."""

    @property
    def ok(self) -> bool: ...
    @property
    def diagnostics(self) -> str: ...
    @property
    def text(self) -> str: ...
    def affected(self, operation: str) -> set[str]: ...


class StackEngine(Protocol):
    """One Pulumi stack of the canary's project."""

    @property
    def name(self) -> str: ...
    def preview(self) -> Any: ...
    def up(self) -> Any: ...
    def destroy(self) -> Any: ...


class PhaseError(GpufleetError):
    """A phase did not end as it must. The result of all assumptions that later phases would test is *not met*."""


@dataclass(kw_only=True)
class Flight:
    """One canary. `client` makes boto3's clients."""

    project: Path
    scale: Scale
    client: Callable[[str], Any]
    engine: Callable[[str], AbstractContextManager[StackEngine]]
    environment: Mapping[str, str]  # for the commands that it runs
    by_notice: bool  # whether the account may have FIS interrupt a node
    say: Callable[[str], None]
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic
    facts: FlightFacts = field(default_factory=FlightFacts)
    engine_name: str = ""
    receipts: list[Receipt] = field(default_factory=list)
    prepared: set[str] = field(default_factory=set)  # names of the stacks that are prepared

    def asked(self, service: str) -> Any:
        """A client whose answers are recorded."""
        return self.facts.watched(self.client(service))

    def fly(self) -> str:
        """Runs every phase. Returns why it ended early; empty if it did not. If the user interrupts it,
        KeyboardInterrupt is raised again after everything is removed.
        """
        why = ""
        try:
            probes.account(self.facts, definition(self.project, RUN), self.asked)
            probes.refusals(self.facts, self.asked)
            self.interrupted()
            self.stopped()
            self.capped()
        except (GpufleetError, ClientError, RuntimeError, OSError, LookupError, ValueError) as error:
            why = str(error) if isinstance(error, GpufleetError) else f"{type(error).__name__}: {error}"
            self.say(f"Ended early: {why.splitlines()[0]}")
        finally:
            self.leave_nothing()
        return why

    def interrupted(self) -> None:
        """The first run: it loses a node with notice, and another that ends itself; it goes on, and ends by itself."""
        with self.engine(RUN) as engine:
            stack = self._up(RUN, engine)
            done = self._watch(stack, self._interrupt if self.by_notice else None)
            self.facts.add("end.reason", done.reason)
            # the hour may be removed, because no node of the run will read it again
            stops = probes.stops_begin(self.facts, stack, self.asked, self.scale.stop_s)
            folder = self._results(stack)
            probes.bucket(self.facts, self.asked("s3"), folder.bucket)
            probes.role(self.facts, stack, self.asked, folder.bucket)
            probes.stops_end(self.facts, stops, self.asked, self.sleep, self.scale.patience_s)
            self._destroy(stack, engine)

    def stopped(self) -> None:
        """The second run, which `gpufleet stop` asks to end."""
        asked_at = list[float]()

        def stop(stack: StackDefinition, node: ObservedNode) -> None:
            self.say(f"{stack.name}: gpufleet stop")
            self.command("stop", stack.name)
            asked_at.append(time.time())

        if not affords_stop(self.receipts[0].actual, notice=self.by_notice):
            self.say(f"{CAP}: gpufleet stop is left out, because {RUN} cost {self.receipts[0].actual:.2f} USD")
            return
        with self._renewed("stop") as engine:
            stack = self._up(CAP, engine)
            done = self._watch(stack, stop)
            if asked_at and done.reason not in LIMITS:  # otherwise the boot took so long that a limit came first
                self.facts.add("stop.reason", done.reason)
                self.facts.add("stop.ended_s", max((epoch(done.at) or time.time()) - asked_at[0], 0.0))
            self._results(stack)
            self._destroy(stack, engine)

    def capped(self) -> None:
        """The third run, which is stopped by its cap."""
        with self._renewed("cap") as engine:
            stack = self._up(CAP, engine)
            done = self._watch(stack)
            self.facts.add("cap.reason", done.reason)
            self._results(stack)
            self.facts.add("cap.hours", float(self.receipts[-1].actual_h / stack.limits.max_hours))
            self._destroy(stack, engine)

    def _renewed(self, run: str) -> AbstractContextManager[StackEngine]:
        renew_capped(self.project, run, self.scale, max(self.facts.seen.get("node.started_s", [0.0])))
        return self.engine(CAP)

    def _prepare(self, name: str) -> None:
        if name not in self.prepared:
            self.say(f"{name}: prepare, doctor --pin")
            self.command("prepare", name)
            self.command("doctor", name, "--pin")
            self.prepared.add(name)

    def _up(self, name: str, engine: StackEngine) -> StackDefinition:
        self.engine_name = engine.name
        self._prepare(name)
        self.say(f"{name}: preview, up")
        previewed = _ok(engine.preview())
        began = time.monotonic()
        made = _ok(engine.up())
        self.facts.add("up.s", time.monotonic() - began)
        self.facts.add("up.as_previewed", previewed.affected("create") == made.affected("create"))
        stack = definition(self.project, name)
        self.wait_for("tags.fleet_s", lambda: fleets_of(self.asked("ec2"), stack), self.scale.patience_s)
        return stack

    def wait_for(self, fact: str, look: Callable[[], Any], most_s: float) -> Any:
        """Waits until `look` finds something, returns it, and adds the seconds as a fact. Raises PhaseError if it never
        does.
        """
        began = self.clock()
        while not (seen := look()):
            if self.clock() - began > most_s:
                self.facts.add(fact, LATE.format(most_s))
                raise PhaseError(f"{fact}: {LATE.format(most_s)}")
            self.sleep(self.scale.poll_s)
        self.facts.add(fact, self.clock() - began)
        return seen

    def _watch(self, stack: StackDefinition, act: Act | None = None) -> Done:
        """Follows the run to its end. As soon as a node has published a checkpoint, calls `act` once with this node."""
        ec2, s3 = self.asked("ec2"), self.asked("s3")
        nodes: dict[str, ObservedNode] = {}
        news, announced = self.clock(), set[int]()
        before: tuple[frozenset[tuple[str, bool]], frozenset[int]] | None = None
        while True:
            folder = find_folder(s3, stack)
            steps = traces.published(folder) if folder else {}
            for described in nodes_of(ec2, stack):
                self._look(stack, described, nodes, max(steps, default=0))
            for step in steps.keys() - announced:
                self.say(f"{stack.name}: a checkpoint of step {step}")
                announced.add(step)
            now = (frozenset((candidate.id, candidate.gone_at > 0) for candidate in nodes.values()), frozenset(steps))
            if now != before:
                news, before = self.clock(), now
            done = folder.read_done() if folder else None
            if done is not None:
                break
            trains = (
                candidate
                for candidate in nodes.values()
                if not candidate.gone_at and max(steps, default=0) > candidate.step
            )
            if act is not None and (node := next(trains, None)):
                act(stack, node)
                act = None
            if self.clock() - news > self.scale.patience_s:
                fact = "node.launch_s" if not nodes else "run.silent_s"
                self.facts.add(fact, LATE.format(self.scale.patience_s))
                why = "nothing new" if nodes else f"no node: {self._obstacles(stack)}"
                raise PhaseError(f"{stack.name}: within {self.scale.patience_s:g} s {why}")
            self.sleep(self.scale.poll_s)
        self._ended(stack, done, nodes)
        return done

    def _look(self, stack: StackDefinition, node: dict[str, Any], nodes: dict[str, ObservedNode], step: int) -> None:
        """Adds what AWS says about one node."""
        name, state = node["InstanceId"], node["State"]["Name"]
        if state in GONE and name in nodes and not nodes[name].gone_at:
            nodes[name].gone_at = time.time()
        if name in nodes or state != "running":
            return
        gone = [other.gone_at for other in nodes.values() if other.gone_at]
        nodes[name] = ObservedNode(id=name, number=len(nodes) + 1, launched=node["LaunchTime"], step=step)
        self.say(f"{stack.name}: node {len(nodes)}, {node['InstanceType']} in {node['Placement']['AvailabilityZone']}")
        fleet = fleets_of(self.asked("ec2"), stack)[0]
        add = self.facts.add
        if gone:
            add("node.replaced_s", max(node["LaunchTime"].timestamp() - max(gone), 0.0))
        else:
            add("node.launch_s", max((node["LaunchTime"] - fleet["CreateTime"]).total_seconds(), 0.0))
        tags = aws.tags_of(node)
        add("node.fleet_tag", tags.get(FLEET_TAG) == fleet["FleetId"])
        add("node.own_tags", own_tags(stack).items() <= tags.items())
        add("node.lifecycle", node.get("InstanceLifecycle", "on-demand"))
        add("node.zone", node["Placement"]["AvailabilityZone"] in stack.fleet.zones)
        add("node.type", node["InstanceType"] in stack.fleet.instance_types)
        add("node.kind", node["InstanceType"])
        add("node.image", node["ImageId"] == stack.fleet.starts_from)
        for disk in node["BlockDeviceMappings"]:
            add("volume.goes", disk["Ebs"]["DeleteOnTermination"])
            (volume,) = self.asked("ec2").describe_volumes(VolumeIds=[disk["Ebs"]["VolumeId"]])["Volumes"]
            add("volume.encrypted", volume["Encrypted"])
            add("volume.type", volume["VolumeType"])
            add("volume.gib", volume["Size"])

    def _obstacles(self, stack: StackDefinition) -> str:
        """Reasons why the run has no node, from the history of its fleet."""
        ec2 = self.asked("ec2")
        fleet = fleets_of(ec2, stack)[0]
        causes = [
            reason.cause
            for entry in _history(ec2, fleet["FleetId"], fleet["CreateTime"])
            if (reason := explain(*describe(entry)[1:], stack)) is not None
        ]
        return "; ".join(dict.fromkeys(causes)) or "AWS gives no reason"

    def _interrupt(self, stack: StackDefinition, node: ObservedNode) -> None:
        self.say(f"{stack.name}: node {node.number} is interrupted, with notice")
        try:
            experiment = notice.interrupt(stack, node.id, self.asked, self.sleep)
            state = self.asked("fis").get_experiment(id=experiment)["experiment"]["state"]["status"]
            self.facts.add("notice.experiment", state)
            node.noticed = True
        except ClientError as error:
            self.say(f"{stack.name}: no notice: {refusals.refusal(error)}")
            self.by_notice = False
        self._prepare(CAP)  # this uses the two minutes of the notice

    def _ended(self, stack: StackDefinition, done: Done, nodes: dict[str, ObservedNode]) -> None:
        """Adds the facts about a run that is over: those of its fleet, of its nodes and of its history."""
        ec2, add, run = self.asked("ec2"), self.facts.add, stack.name
        folder = find_folder(self.asked("s3"), stack)
        assert folder is not None
        fleet = fleets_of(ec2, stack)[0]["FleetId"]
        at = epoch(done.at) or time.time()
        self.wait_for("end.fleet_s", lambda: fleets_of(ec2, stack)[0]["FleetState"] in ENDED, self.scale.patience_s)
        self.wait_for("end.nodes_s", lambda: not _running(nodes_of(ec2, stack)), self.scale.patience_s)
        self.say(f"{run}: over, {done.reason}; its node has ended the fleet")
        add("end.clock_s", abs(time.time() - at))
        since = min(node.launched for node in nodes.values()) - timedelta(minutes=10)
        events = [
            (describe(entry)[1], entry["Timestamp"], entry["EventInformation"].get("InstanceId", ""))
            for entry in _history(ec2, fleet, since)
        ]
        for node in nodes.values():
            of = {sub_type: when for sub_type, when, name in events if name == node.id}
            add("history.launched", LAUNCHED in of)
            if node.number < len(nodes):  # the last node has ended the fleet
                add("history.ended", TERMINATED in of)
            traces.add_node(self.facts, folder, node, of.get(TERMINATED))
        for instance in nodes_of(ec2, stack):
            if instance["State"]["Name"] in GONE:
                add("node.end_code", str((instance.get("StateReason") or {}).get("Code", "")))
        if done.reason == TIMER:
            add("timer.ended", True)

    def _results(self, stack: StackDefinition) -> RunFolder:
        """Downloads the results, and adds receipt, outputs, log and checkpoints to the facts."""
        add, name = self.facts.add, stack.name
        target = self.project / "results" / name
        self.command("results", name, "--to", str(target))
        receipt = parse((target / RECEIPT).read_bytes())
        self.receipts.append(receipt)
        for attempt in receipt.attempts:
            if attempt.started_s is not None:
                add("node.started_s", float(attempt.started_s))
                if not self.scale.gpus:
                    add("node.without_gpu", True)
            if attempt.pulled_s is not None:
                add("node.pulled_s", float(attempt.pulled_s))
            add("price.untold_s", float(attempt.ceiling_s))
        add("run.usd_of_bill", float(receipt.actual / receipt.p90) if receipt.p90 else 0.0)
        folder = find_folder(self.asked("s3"), stack)
        assert folder is not None
        traces.add_outputs(self.facts, target, gpu=self.scale.device == "cuda" and name == RUN)
        traces.add_log(self.facts, self.asked("logs"), stack, folder)
        return folder

    def _destroy(self, stack: StackDefinition, engine: StackEngine) -> None:
        self.say(f"{stack.name}: destroy, and a sweep that asks AWS what is left")
        began = time.monotonic()
        _ok(engine.destroy())
        self.facts.add("destroy.s", time.monotonic() - began)
        remains = [
            f"{leftover.kind} {leftover.id}"
            for leftover in self._left(stack)
            if leftover.kind != "fleet" or leftover.bills
        ]
        self.facts.add("destroy.left", ", ".join(remains) or "nothing")
        self._deleted(stack)

    def _deleted(self, stack: StackDefinition) -> None:
        """Waits until AWS calls the fleets deleted."""
        ec2 = self.asked("ec2")
        gone = lambda: all(fleet["FleetState"] == "deleted" for fleet in fleets_of(ec2, stack))  # noqa: E731
        try:
            self.wait_for("fleet.deleted_s", gone, self.scale.patience_s)
        except PhaseError as error:
            self.say(str(error))  # the flight goes on, because such a fleet launches nothing and costs nothing

    def _left(self, stack: StackDefinition) -> list[Left]:
        """The stack's unwanted leftovers, except the role of FIS, which is removed last."""
        return [leftover for leftover in self._resources(stack) if leftover.unwanted and leftover.id != notice.ROLE]

    def _resources(self, stack: StackDefinition) -> list[Left]:
        return list(leftovers.look(stack, lambda service, region: self.asked(service), datetime.now(UTC)))

    def leave_nothing(self) -> None:
        """Removes everything of both stacks, and prints whether AWS still shows something of them."""
        try:
            if self.by_notice:
                notice.forget(self.client)
        except ClientError as error:
            self.say(f"FIS: {refusals.refusal(error)}")
        remains, doubtful = list[Left](), list[Left]()
        for name in NAMES:
            if not (self.project / "stacks" / f"{name}.yaml").is_file():
                continue
            stack = definition(self.project, name)
            if self._left(stack):
                sweep.delete(lambda: self._left(stack), self.client, pause=self.sleep, say=self.say)  # noqa: B023
            remains += [leftover for leftover in self._left(stack) if leftover.kind != "fleet" or leftover.bills]
            doubtful += [leftover for leftover in self._resources(stack) if not leftover.ours]
        for leftover in doubtful:  # a canary may have been killed between CreateBucket and the bucket's tags
            self.say(f"Perhaps of a canary that was killed: {leftover.kind} {leftover.id}, which has no tags")
        if remains:
            self.say("STILL THERE: " + ", ".join(f"{leftover.kind} {leftover.id}" for leftover in remains))
            self.say(f"Look again with: cd {self.project} && gpufleet sweep {RUN} --delete, and {CAP}")
        else:
            self.say("AWS shows nothing more of the canary.")
        self.facts.add("left.at_end", len(remains))

    def command(self, *words: str) -> str:
        """Runs `gpufleet WORDS` in the project, and returns its output. Raises PhaseError if it fails."""
        done = subprocess.run(
            [sys.executable, "-m", "gpufleet.infra.cli", *words],
            cwd=self.project,
            env=dict(self.environment),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode:
            output = (done.stderr or done.stdout).strip()
            raise PhaseError(f"gpufleet {' '.join(words)}: {output}")
        return done.stdout


def _ok(result: EngineResult) -> EngineResult:
    if not result.ok:
        raise PhaseError((result.diagnostics or result.text).strip() or "the engine failed")
    return result


def _history(ec2: Any, fleet: str, since: datetime) -> Iterator[dict[str, Any]]:
    for page in pages(ec2.describe_fleet_history, FleetId=fleet, StartTime=since):
        yield from page["HistoryRecords"]


def _running(nodes: list[dict[str, Any]]) -> bool:
    return any(node["State"]["Name"] not in GONE for node in nodes)
