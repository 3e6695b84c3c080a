"""Each promise that a rehearsal checks fails when it is broken, and all hold when none is."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.job.contract.aws import SWITCH
from gpufleet.job.contract.messages import Observed
from gpufleet.rehearsal import evidence
from gpufleet.rehearsal.evidence import Evidence
from gpufleet.rehearsal.watch import Begun, Planned
from tests.receipt_tree import node, receipt
from tests.repository import ROOT

STACK = ROOT / "stacks" / "tinystories-growth.yaml"
NODES = ("i-1", "i-2", "i-3")
BETWEEN = Planned(step=0, kind="loss", place="hand_over")


class CheckedWorld:
    """A run of 90 steps that held: a notice after step 30, a loss at step 50 with a checkpoint of step 40."""

    def __init__(self) -> None:
        kinds: list[Planned | None] = [Planned(step=30, kind="notice"), Planned(step=50, kind="loss"), None]
        self.views = {
            name: SimpleNamespace(
                name=name,
                node=SimpleNamespace(instance=SimpleNamespace(id=name)),
                interrupted=kind,
                first_step=1,
                observed=Observed(),
                signalled={0},
                last_step=last,
            )
            for name, kind, last in zip(NODES, kinds, (30, 50, 90), strict=True)
        }
        self.manifests = {30: "boundary", 40: "timed", 90: "final"}
        self.seen = [2.0]
        self.attempts = [
            {**node(name, seconds="60"), "last_step": last, "resumed_step": resumed, "started_s": "9.000"}
            for name, last, resumed in (("i-1", 30, 0), ("i-2", 50, 30), ("i-3", 90, 40))
        ]
        verdict = {"verdict": "pass", "max_logit_difference": 1e-6, "limit": 1e-4, "routing_flips": 0, "routings": 0}
        self.growth: dict[str, Any] = {
            "phase": "moe",
            "before": {**verdict},
            "after_round_trip": {**verdict},
            "problems": [],
        }
        self.interruptions = {"with_notice": 1, "without_notice": 1}
        self.reason = "finished"
        self.steps = [1, 30, 60, 90]
        self.stage = [{"row": 1}, {"row": 2}]
        self.events = {f"r1/{name}": ["step 1"] for name in NODES}
        self.left = {("bucket", "gpufleet-a"): {"gpufleet:stack": "a"}}

    def rehearsal(self, folder: Path) -> Any:
        results = folder / "results"
        for name, content in {
            "receipt.json": receipt(attempts=self.attempts, interruptions=self.interruptions),
            "done.json": {"reason": self.reason},
            "results.json": {},
            "growth_report.json": {"boundaries": [self.growth]},
        }.items():
            (results / name).parent.mkdir(parents=True, exist_ok=True)
            (results / name).write_text(json.dumps(content))
        (results / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in self.steps))
        (results / "stages").mkdir()
        (results / "stages" / "rows.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in self.stage))
        logs = SimpleNamespace(
            describe_log_streams=lambda **_: {"logStreams": [{"logStreamName": name} for name in self.events]},
            get_log_events=lambda logStreamName, **_: {"events": self.events[logStreamName]},
        )
        return SimpleNamespace(
            folder=folder,
            project=folder,
            definition=load(STACK, now=datetime(2026, 11, 21, tzinfo=UTC), rehearsal=True),
            watch=SimpleNamespace(views=self.views, manifests=self.manifests),
            engine=SimpleNamespace(outputs=lambda: {"log_group": "g"}),
            timeline=SimpleNamespace(
                select=lambda _: [SimpleNamespace(facts={"seconds": each, "node": "i-1"}) for each in self.seen]
            ),
            cloud=SimpleNamespace(client=lambda _: logs, leftovers=lambda: self.left),
            torch_s=2.0,
            until=None,
        )


@pytest.mark.parametrize("node", ["i-9", "i-3"])  # the next stage may have this stage's last node
def test_a_notice_to_a_node_of_another_stage_is_not_this_one_s(tmp_path: Path, node: str) -> None:
    rehearsal = CheckedWorld().rehearsal(tmp_path)
    of_another = SimpleNamespace(facts={"seconds": 9.0, "node": node})
    own = rehearsal.timeline.select("seen")
    rehearsal.timeline.select = lambda _: [*own, of_another]
    found = list(evidence.checks(Evidence(rehearsal)))
    assert all(check.held for check in found)
    assert len([check for check in found if check.name == "notice seen"]) == 1


def broken(found: Evidence) -> str:
    """What did not hold, as the last line of a rehearsal has it."""
    return "; ".join(f"{check.name}: {check.figure}" for check in evidence.checks(found) if check.is_broken)


def test_all_of_it_holds_when_nothing_is_broken(tmp_path: Path) -> None:
    found = list(evidence.checks(Evidence(CheckedWorld().rehearsal(tmp_path))))
    assert len(found) == 12
    assert all(check.held for check in found)


BROKEN: dict[str, Callable[[CheckedWorld], Any]] = {
    "the run's own end: max_usd": lambda world: setattr(world, "reason", "max_usd"),
    "steps: 89 of 90": lambda world: world.steps.__setitem__(-1, 89),
    "interruptions in the receipt: 0 with notice": lambda world: world.interruptions.update(with_notice=0),
    "nodes: 4 launched": lambda world: world.views.update(
        {"i-4": world.views["i-3"]},
    ),
    "notice seen: after 5.1 s": lambda world: world.seen.__setitem__(0, 5.1),
    "notices seen: 0 of 1": lambda world: world.seen.clear(),
    "steps lost on a handled notice: 1 ": lambda world: world.attempts[1].update(resumed_step=29),
    "steps repeated after a loss without notice: 50 ": lambda world: world.attempts[2].update(resumed_step=0),
    "growth into moe": lambda world: world.growth["before"].update(verdict="fail"),
    "growth into moe: logits": lambda world: world.growth["problems"].append("a tensor is gone"),
    "nothing of rows.jsonl done twice: 3 results, 1 of them twice": lambda world: world.stage.append({"row": 1}),
    "container logs in CloudWatch: 2 of 3": lambda world: world.events.update({"r1/i-2": []}),
}


@pytest.mark.parametrize(("said", "break_it"), BROKEN.items(), ids=BROKEN.keys())
def test_a_broken_promise_fails_by_its_name(tmp_path: Path, said: str, break_it: Callable[[CheckedWorld], Any]) -> None:
    world = CheckedWorld()
    break_it(world)
    found = broken(Evidence(world.rehearsal(tmp_path)))
    assert found.startswith(said)
    assert ";" not in found  # and nothing else


def staying(folder: Path, first: Planned | None, theirs: str, own: list[str]) -> Any:
    """That world as a stage on the node of the stage t1, which the nodes `theirs` did; `own`: those of this one's
    receipt.
    """
    world = CheckedWorld()
    world.views["i-1"].interrupted = first
    world.attempts = [each for each in world.attempts if each["instance"] in own]
    world.interruptions["with_notice"] = 0
    world.interruptions["without_notice"] = 2 if first and "i-1" in own else 1
    world.seen.clear()
    if first is None:
        del world.views["i-1"]
    else:
        world.events.pop("r1/i-1")
    found = world.rehearsal(folder)
    planned = replace(found.definition.interruptions, with_notice=0, without_notice=2 if first else 1)
    found.definition = replace(found.definition, fleet_of="t1", before=("t1",), interruptions=planned)
    (folder / "t1").mkdir()
    (folder / "t1" / "receipt.json").write_text(json.dumps(receipt(attempts=[node(theirs, seconds="60")])))
    return found


@pytest.mark.parametrize(
    ("first", "theirs", "own", "said"),
    [
        (None, "i-2", ["i-2", "i-3"], ""),
        (None, "i-1", ["i-2", "i-3"], "stays on the node of t1: i-2"),
        (BETWEEN, "i-1", ["i-2", "i-3"], ""),
        (BETWEEN, "i-1", ["i-1", "i-2", "i-3"], ""),  # it had begun to boot for this stage
        (BETWEEN, "i-2", ["i-2", "i-3"], "lost after t1: i-1 was lost; the next one repeated t1"),
    ],
)
def test_a_stage_begins_on_the_node_of_the_one_before_or_on_the_next_if_that_is_lost(
    tmp_path: Path, first: Planned | None, theirs: str, own: list[str], said: str
) -> None:
    assert broken(Evidence(staying(tmp_path, first, theirs, own))) == said


def several(folder: Path, *steps: tuple[int, int]) -> Any:
    """That world on two nodes, whose generations began from a step when another was reached."""
    world = CheckedWorld()
    world.views["i-4"] = SimpleNamespace(**{**vars(world.views["i-3"]), "name": "i-4"})
    found = world.rehearsal(folder)
    found.definition = replace(found.definition, fleet=replace(found.definition.fleet, nodes=2))
    found.watch.generations = {number: Begun(*each) for number, each in enumerate(steps, 1)}
    found.watch.taken = [(world.views["i-1"], 1), (world.views["i-2"], 2)]
    return found


def test_several_nodes_go_on_together_from_what_was_published(tmp_path: Path) -> None:
    told = {
        each.name: each.figure for each in evidence.checks(Evidence(several(tmp_path, (-1, 0), (30, 30), (40, 50))))
    }
    assert told["nodes"] == "4 launched"
    assert told["steps lost on a handled notice"] == "0 (last logged 30, resumed after step 30)"
    assert told["steps repeated after a loss without notice"] == "10 (last logged 50, resumed after step 40)"


def test_of_several_nodes_the_leader_of_the_next_generation_shows_whether_it_goes_on(tmp_path: Path) -> None:
    rehearsal = several(tmp_path, (-1, 0), (30, 30), (40, 50))
    leader = SimpleNamespace(observed=Observed(resumes="goes on", why="step 31 came first"))
    rehearsal.watch.generations[2] = rehearsal.watch.generations[2]._replace(leader=leader)
    assert [each.observed.resumes for each in Evidence(rehearsal).resumptions()] == ["goes on", ""]


def test_of_several_nodes_any_command_s_signal_in_that_generation_counts(tmp_path: Path) -> None:
    rehearsal = several(tmp_path, (-1, 0), (30, 30), (40, 50))
    for view in rehearsal.watch.views.values():
        view.signalled = set()
    rehearsal.watch.views["i-2"].signalled = {1}  # it ended first, and with it the command of i-1, which was noticed
    assert [each.signalled for each in Evidence(rehearsal).resumptions()] == [True, False]


@pytest.mark.parametrize(
    ("steps", "said"),
    [
        ([(-1, 0), (28, 30), (40, 50)], "steps lost on a handled notice: 2"),
        ([(-1, 0), (30, 30)], "went on together: no node did after i-2 was gone"),
        ([(-1, 0), (30, 30), (-1, 50)], "steps repeated after a loss without notice: 50"),
    ],
)
def test_several_nodes_that_do_not_go_on_fail(tmp_path: Path, steps: list[tuple[int, int]], said: str) -> None:
    assert said in broken(Evidence(several(tmp_path, *steps)))


def test_a_slow_start_fails_nothing(tmp_path: Path) -> None:
    rehearsal = CheckedWorld().rehearsal(tmp_path)
    rehearsal.torch_s = -60.0
    assert [check.name for check in evidence.checks(Evidence(rehearsal)) if not check.held] == [
        "new node to first new step"
    ] * 2


def test_what_is_left_must_be_what_was_asked_for(tmp_path: Path) -> None:
    world = CheckedWorld()
    rehearsal = world.rehearsal(tmp_path)
    kept = evidence.leftovers(rehearsal)
    assert (kept.figure, kept.held) == ("bucket gpufleet-a (asked for)", True)
    world.left = {**world.left, ("volume", "vol-1"): {}}
    more = evidence.leftovers(rehearsal)
    assert (more.figure, more.held) == ("bucket gpufleet-a, volume vol-1", False)
    world.left = {}
    gone = evidence.leftovers(rehearsal)
    assert (gone.figure, gone.held) == ("nothing, but the bucket should have stayed", False)


class Fallen:
    """A rehearsal whose last node was on demand, as far as its promise looks."""

    def __init__(self) -> None:
        self.markets, self.states, self.refused, self.target = ["spot", "spot", "on-demand"], ["DISABLED"], [""], 0

    def promise(self) -> evidence.Promise:
        schedules = [{"Name": SWITCH, "GroupName": f"g{number}"} for number, _ in enumerate(self.states)]
        scheduler = SimpleNamespace(
            list_schedules=lambda: {"Schedules": [*schedules, {"Name": "stop", "GroupName": "g0"}]},
            get_schedule=lambda GroupName, Name: {"State": self.states[int(GroupName[1:])]},
        )
        cloud = SimpleNamespace(
            fleets=SimpleNamespace(fleets={"f": SimpleNamespace(state="active", target=self.target)}),
            schedules=SimpleNamespace(
                fired=[SimpleNamespace(name=f"g/{SWITCH}", refused=each) for each in self.refused]
            ),
            client=lambda service: scheduler,
        )
        receipt = SimpleNamespace(attempts=[SimpleNamespace(capacity=each) for each in self.markets])
        found: Any = SimpleNamespace(rehearsal=SimpleNamespace(cloud=cloud), receipt=receipt)
        return evidence._fallback(found)


@pytest.mark.parametrize(
    "broken",
    [
        {"markets": ["spot", "spot", "spot"]},
        {"markets": ["spot", "on-demand", "on-demand"]},
        {"states": ["ENABLED"]},
        {"states": []},
        {"refused": []},
        {"refused": ["not allowed"]},
        {"target": 1},
    ],
)
def test_a_fallback_holds_where_the_last_node_alone_was_on_demand_and_nothing_begins_another(
    broken: dict[str, Any],
) -> None:
    world = Fallen()
    assert world.promise().held
    vars(world).update(broken)
    assert not world.promise().held
