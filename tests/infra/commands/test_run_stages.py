"""`gpufleet run` of a file with stages: one bill, one approval, and one end, wherever the command is killed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account.fleet import fleets_of
from gpufleet.infra.account.stop import ask
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.text import stamp
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, InProcess
from tests import forked
from tests.infra.commands.test_run_command import InProcessStack, InProcessWorld, KilledError, asked
from tests.infra.staged_files import PINNED
from tests.receipt_tree import receipt
from tests.rehearsal.engine_world import edit

STAGES = ("prepare", "train", "judge")
USD = {"prepare": "0.10", "train": "0.25", "judge": "0.05"}


@dataclass
class StagedWorld(InProcessWorld):
    """Each time that the command sleeps, the run does one step more: a stage writes its results, is done, begins the
    next one, ends its fleet.
    """

    kills: bool = False  # the command dies whenever it sleeps
    steps: Iterator[None] = field(init=False)

    def __post_init__(self) -> None:
        self.steps = self._course()

    @property
    def definition(self) -> StackDefinition:
        return self.whole_run().definition

    def pass_time(self) -> None:
        next(self.steps, None)
        if self.kills:
            raise KilledError

    def stages_done(self) -> list[str]:
        """By what `gpufleet run` has brought."""
        results = self.file.parents[1] / "results" / "staged" / "r1"
        return [stage for stage in STAGES if (results / stage / "done.json").is_file()]

    def begin(self, stage: StackDefinition) -> None:
        """What the state machine does that the node of the stage before starts."""
        ec2 = self.cloud.client("ec2")
        (fleet,) = fleets_of(ec2, stage)
        ec2.modify_fleet(FleetId=fleet["FleetId"], TargetCapacitySpecification={"TotalTargetCapacity": 1})
        self.cloud.tick()

    def end(self, stage: StackDefinition) -> None:
        ec2 = self.cloud.client("ec2")
        (fleet,) = fleets_of(ec2, stage)
        ec2.delete_fleets(FleetIds=[fleet["FleetId"]], TerminateInstances=True)
        self.cloud.tick()

    def put(self, stage: StackDefinition, name: str, tree: dict[str, Any]) -> None:
        bucket, key = self.engine.outputs()["bucket"], f"{stage.run.id}/{name}"
        self.cloud.client("s3").put_object(Bucket=bucket, Key=key, Body=json.dumps(tree).encode())

    def finish(self, stage: StackDefinition) -> None:
        at = stamp(datetime.now(UTC))
        self.put(stage, "done.json", {"schema": 1, "reason": "finished", "detail": "", "instance": "i-1", "at": at})

    def _course(self) -> Iterator[None]:
        self.cloud.tick()
        stages = self.definition.stages
        for stage, later in zip(stages, (*stages[1:], None), strict=True):
            yield
            self.put(stage, "results.json", {})
            self.put(stage, "receipt.json", receipt(USD[stage.stage], run=stage.run.id, stack=self.file.stem))
            yield
            self.finish(stage)
            yield
            if later:
                self.begin(later)
                yield
            self.end(stage)


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StagedWorld]:
    root = scratch.make(tmp_path / "project", {"staged": PINNED})
    (root / "code").mkdir()
    (root / "code" / "stage.py").write_text("")
    monkeypatch.chdir(root)
    with (
        forked.programs(tmp_path),
        Cloud(tmp_path / "cloud", clock=ManualClock()) as cloud,
        Engine.open(root, cloud.environment(), "staged", real=False) as engine,
    ):
        assert isinstance(engine, InProcess)
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        yield StagedWorld(cloud, root / "stacks" / "staged.yaml", InProcessStack(engine))


def test_killed_at_each_write_within_and_between_stages_it_ends_once_with_the_sum(
    world: StagedWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(monkeypatch, None)
    approved, world.kills = world.approval(), True
    code, kills = None, 0
    while code is None:
        try:
            code = world.run(approve=approved)
        except KilledError:
            kills += 1
            assert kills < 50
    assert code == 0
    assert kills > 3 * len(STAGES)
    assert world.engine.approved == [approved]
    assert world.fleets() == len(STAGES)
    results = world.file.parents[1] / "results" / "staged" / "r1"
    assert all((results / stage / "results.json").is_file() for stage in STAGES)
    assert Receipt.from_json(json.loads((results / "receipt.json").read_text())).actual == Decimal("0.40")
    assert {kind for kind, _ in world.cloud.leftovers()} <= {"bucket"}
    assert "3 stages one after another" not in capsys.readouterr().out  # the approved bill is not shown again


def test_one_that_fails_ends_the_run_and_nothing_is_left(world: StagedWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(stage: StackDefinition) -> None:
        at = stamp(datetime.now(UTC))
        world.put(stage, "done.json", {"schema": 1, "reason": "max_usd", "detail": "", "instance": "i-1", "at": at})

    monkeypatch.setattr(world, "finish", fail)
    monkeypatch.setattr(world, "begin", lambda stage: None)
    asked(monkeypatch, "yes")
    world.run()
    assert world.stages_done() == ["prepare"]
    assert len([node for node in world.cloud.instances() if node.ended_at is None]) == 0


def test_a_run_asked_to_end_between_two_stages_is_over_before_the_next(
    world: StagedWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stop(stage: StackDefinition) -> None:
        assert stage.stage == "train"
        ec2, s3 = world.cloud.client("ec2"), world.cloud.client("s3")
        for part in world.definition.stages:
            ask(part, ec2, s3, datetime.now(UTC), say=lambda line: None)

    monkeypatch.setattr(world, "begin", stop)
    asked(monkeypatch, "yes")
    assert world.run() == 0
    assert world.stages_done() == ["prepare"]
    assert "asked to end before its stage train" in capsys.readouterr().out
    assert {kind for kind, _ in world.cloud.leftovers()} <= {"bucket"}


def test_the_approval_counts_the_bill_of_every_stage(
    world: StagedWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An estimate is no setting of a fleet, so only the bill can show that it has changed."""
    asked(monkeypatch, None)
    approved = world.approval()
    edit(world.file, "[c7i.xlarge]}\n", "[c7i.xlarge]}\n    estimate: {setup_minutes: 90}\n")
    assert world.run(approve=approved) == 1
    said = capsys.readouterr().out
    assert "3 stages one after another" in said
    assert f"{approved} is not the hash of this bill" in said
    assert world.cloud.leftovers() == {}


def test_a_rule_that_only_a_later_stage_breaks_stops_the_run(world: StagedWorld) -> None:
    (world.file.parents[1] / "policy.yaml").write_text('allowed_types: ["c7i.*"]\n')
    with pytest.raises(GpufleetError, match=r"breaks allowed_types of policy\.yaml: instance types g5\.2xlarge"):
        world.run()
    assert world.cloud.leftovers() == {}
