"""`gpufleet run` that is killed at each of its steps and started again ends like one that was not killed. It makes
nothing without the hash of the present bill.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from gpufleet.infra.commands import results, stack, sweep
from gpufleet.infra.commands import run as command
from gpufleet.infra.commands.campaign import Campaign, opened_ledger
from gpufleet.infra.commands.trials import StackTrial
from gpufleet.infra.compare import cheaper
from gpufleet.infra.definition.campaign import CampaignFile, DefinedTrial
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval, plan, pulumi_cli
from gpufleet.infra.program.run_guard import Previous
from gpufleet.job.text import stamp
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, InProcess, Pulumi
from tests import forked
from tests.receipt_tree import receipt
from tests.rehearsal.engine_world import STACK, edit, pinned, project
from tests.repository import ROOT

# The moments of a whole run, each before or after what it names.
STEPS = ("up", "wait", "results", "destroy", "sweep")
MOMENTS = [f"{when} {step}" for step in STEPS for when in ("before", "after")][:-1]


class KilledError(BaseException):
    """The end of the process, as a closed laptop would bring it."""


@dataclass
class InProcessStack:
    """The stack of `gpufleet run` on the in-process runner."""

    engine: InProcess
    approved: list[str] = field(default_factory=list)

    def select(self) -> None: ...

    def outputs(self) -> dict[str, Any]:
        return self.engine.outputs()

    def up(self, approved: str) -> None:
        self.approved.append(approved)
        self.engine._environment = {**self.engine._environment, approval.VARIABLE: approved}
        if not (made := self.engine.up()).ok:
            raise GpufleetError(made.diagnostics)

    def destroy(self) -> None:
        assert self.engine.destroy().ok


@dataclass
class RunWorld:
    cloud: Cloud
    file: Path
    engine: command.RunEngine

    def whole_run(self, approve: str | None = None) -> command.WholeRun:
        args = argparse.Namespace(stack=self.file.stem, approve=approve, begin=False)
        return command.WholeRun(
            args=args,
            definition=stack.definition_of(args, staged=True),
            root=self.file.parents[1],
            engine=self.engine,
            sleep=lambda _: self.pass_time(),
        )

    def run(self, *, approve: str | None = None, killed: str = "") -> int:
        """The command's exit code. Raises KilledError at that moment."""
        whole = self.whole_run(approve)
        parts = {
            "up": (type(self.engine), "up"),
            "wait": (command.WholeRun, "_wait"),
            "results": (results, "run"),
            "destroy": (type(self.engine), "destroy"),
            "sweep": (sweep, "run"),
        }
        when, _, step = killed.partition(" ")
        if not step:
            return whole.carry_out()
        owner, name = parts[step]
        with mock.patch.object(owner, name, _killed(getattr(owner, name), when)):
            return whole.carry_out()

    def approval(self) -> str:
        """The hash of the bill as it is now."""
        made = plan.make(
            self.file.parents[1], self.file.stem, now=datetime.now(UTC), previous=Previous(outputs={}), preview=True
        )
        return approval.approval(made)

    def pass_time(self) -> None:
        """Lets the node come, train to its end, write a run's results, and end its fleet."""
        self.cloud.tick()
        outputs, s3 = self.engine.outputs(), self.cloud.client("s3")
        left: dict[str, bytes] = {
            "results.json": b"{}",
            "receipt.json": json.dumps(receipt("0.25", stack=STACK)).encode(),
            "done.json": json.dumps(
                {"schema": 1, "reason": "finished", "detail": "", "instance": "i-1", "at": stamp(datetime.now(UTC))}
            ).encode(),
        }
        for name, content in left.items():
            s3.put_object(Bucket=outputs["bucket"], Key=f"r1/{name}", Body=content)
        self.cloud.client("ec2").delete_fleets(FleetIds=[outputs["fleet_id"]], TerminateInstances=True)
        self.cloud.tick()

    def fleets(self) -> int:
        """The number of fleets that were ever made."""
        return len(self.cloud.fleets.fleets)


def _killed(part: Callable[..., Any], when: str) -> Callable[..., Any]:
    def do(*words: Any, **named: Any) -> Any:
        if when == "after":
            part(*words, **named)
        raise KilledError

    return do


@dataclass
class InProcessWorld(RunWorld):
    """A world without the engine."""

    engine: InProcessStack


@contextmanager
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, *, keep: bool = True) -> Iterator[InProcessWorld]:
    file = pinned(project(folder / "project"))
    if not keep:
        edit(file, "bucket: true", "bucket: false")
    root = file.parents[1]
    monkeypatch.chdir(root)
    with (
        forked.programs(folder),
        Cloud(folder / "cloud", clock=ManualClock()) as cloud,
        Engine.open(root, cloud.environment(), STACK, real=False) as engine,
    ):
        assert isinstance(engine, InProcess)
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        yield InProcessWorld(cloud, file, InProcessStack(engine))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[InProcessWorld]:
    with opened(tmp_path, monkeypatch) as world:
        yield world


def asked(monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    """The answer at the terminal; None: there is no terminal."""

    def read(_: str) -> str:
        if answer is None:
            raise EOFError
        return answer

    monkeypatch.setattr("builtins.input", read)


@pytest.mark.parametrize("keep", [True, False], ids=["bucket kept", "bucket gone"])
def test_killed_at_each_step_in_turn_and_run_again_it_ends_as_one_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool
) -> None:
    """All kills happen in one run, one after another, so that each start continues the work of the start before."""
    with opened(tmp_path, monkeypatch, keep=keep) as world:
        asked(monkeypatch, None)
        approved = world.approval()
        for moment in MOMENTS:
            begun = world.fleets() > 0
            with pytest.raises(KilledError):
                world.run(approve=None if begun else approved, killed=moment)
            assert world.fleets() <= 1, moment
        assert world.run() == 0
        assert world.engine.approved == [approved]
        assert world.fleets() == 1
        assert (world.file.parents[1] / "results" / STACK / "r1" / "results.json").is_file()
        assert {kind for kind, _ in world.cloud.leftovers()} <= ({"bucket"} if keep else set())


def test_without_an_approval_it_shows_the_bill_and_begins_nothing(
    world: InProcessWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for answer in (None, "", "no", "y"):
        asked(monkeypatch, answer)
        assert world.run() == 1
    said = capsys.readouterr().out
    assert "in eight runs of ten" in said
    assert f"Hash of this bill: {world.approval()}." in said
    assert (world.engine.approved, world.cloud.leftovers()) == ([], {})


def test_a_yes_at_the_terminal_approves_the_bill_that_was_shown(
    world: InProcessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, "yes")
    assert world.run() == 0
    assert world.engine.approved == [world.approval()]


def test_a_bill_that_has_changed_since_asks_again(
    world: InProcessWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(monkeypatch, None)
    approved, text, real = world.approval(), world.file.read_text(), cheaper.bill_and_cheaper
    assert world.approval() == approved

    def dearer(*words: Any, **named: Any) -> Any:
        bill, options = real(*words, **named)
        return replace(bill, usd=replace(bill.usd, p50=bill.usd.p50 + Decimal("0.01"))), options

    for old, new in (("max_hours: 2", "max_hours: 3"), ("lr: [3e-3", "lr: [4e-3"), ("", "")):
        with monkeypatch.context() as patch:
            if old:
                edit(world.file, old, new)
            else:
                patch.setattr(plan, "bill_and_cheaper", dearer)
            assert world.run(approve=approved) == 1, new
        said = capsys.readouterr().out
        assert f"{approved} is not the hash of this bill" in said
        assert "Hash of this bill" not in said
        world.file.write_text(text)
    assert world.engine.approved == []
    assert world.approval() == approved


def test_the_program_itself_refuses_another_bill_than_the_approved_one(world: InProcessWorld) -> None:
    """The file is edited between the approval and `up`."""
    with pytest.raises(GpufleetError, match="0123456789abcdef was approved, but the hash is now"):
        world.engine.up("0123456789abcdef")
    assert world.cloud.leftovers() == {}


def test_what_does_not_fit_the_month_s_dollars_is_not_begun(world: InProcessWorld) -> None:
    """The run's own limit is 3."""
    root = world.file.parents[1]
    (root / "policy.yaml").write_text("max_usd_per_month: 2.99\n")
    with pytest.raises(GpufleetError, match=r"breaks max_usd_per_month of policy\.yaml: run r1 may spend 3\.00"):
        world.engine.up(world.approval())
    assert world.cloud.leftovers() == {}


def test_a_stack_that_has_another_run_up_is_not_destroyed(
    world: InProcessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, None)
    with pytest.raises(KilledError):
        world.run(approve=world.approval(), killed="after wait")
    outputs = world.engine.outputs()
    monkeypatch.setattr(InProcess, "outputs", lambda _: {**outputs, "run": {**outputs["run"], "id": "r2"}})
    before = world.cloud.leftovers()
    with pytest.raises(GpufleetError, match="the Pulumi stack has run r2"):
        world.run()
    assert world.cloud.leftovers() == before


def test_results_that_are_not_there_keep_the_stack(
    world: InProcessWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked(monkeypatch, None)
    with pytest.raises(KilledError):
        world.run(approve=world.approval(), killed="after wait")
    world.cloud.client("s3").delete_object(Bucket=world.engine.outputs()["bucket"], Key="r1/results.json")
    before = world.cloud.leftovers()
    assert world.run() == 1
    assert "Nothing was destroyed" in capsys.readouterr().out
    assert world.cloud.leftovers() == before


def test_a_fleet_that_expired_without_a_node_is_no_run_to_wait_for(
    world: InProcessWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked(monkeypatch, None)
    with pytest.raises(KilledError):
        world.run(approve=world.approval(), killed="before wait")
    assert not world.whole_run().is_over()
    fleet = world.engine.outputs()["fleet_id"]
    world.cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    world.cloud.tick()
    assert world.whole_run().is_over()


def test_a_campaign_begins_what_fits_its_cap_and_counts_the_receipt(
    world: InProcessWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    def campaign(max_usd: str) -> int:
        described = CampaignFile(name="night", files=(STACK,), max_usd=Decimal(max_usd))
        trial = StackTrial(trial=DefinedTrial(name=STACK), whole=world.whole_run())
        ledger = opened_ledger(described, [trial], max_usd, "us-east-2", "you")
        made = Campaign(name="night", trials=[trial], ledger=ledger, driver="a", approved=max_usd)
        made.sleep = lambda _: world.pass_time()
        return made.carry_out()

    assert campaign("2.99") == 1  # the run's own limit is 3
    assert (
        "Not begun: tinystories-growth; limits.max_usd: at least 3.00 USD are needed, and " in capsys.readouterr().out
    )
    assert {kind for kind, _ in world.cloud.leftovers()} <= {"bucket"}
    assert campaign("3") == 0
    assert "1 run ended; 2.75 of 3 USD are left." in capsys.readouterr().out
    assert campaign("3") == 0
    assert world.fleets() == 1


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
def test_the_engine_goes_from_the_approval_to_an_empty_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command is stopped twice on the way. `up` of a bill that nobody approved declares nothing."""
    file = pinned(project(tmp_path / "project"))
    monkeypatch.chdir(root := file.parents[1])
    with (
        Cloud(tmp_path / "cloud", clock=ManualClock()) as cloud,
        Engine.open(root, cloud.environment(), STACK, real=True) as engine,
    ):
        assert isinstance(engine, Pulumi)
        for name, value in engine._environment.items():
            monkeypatch.setenv(name, value)
        engine_of_run = pulumi_cli.PulumiStack(root=root, name=STACK)
        engine_of_run.select()
        with pytest.raises(GpufleetError, match="`pulumi up --yes --non-interactive"):
            engine_of_run.up("0123456789abcdef")
        assert cloud.leftovers() == {}
        world = RunWorld(cloud, file, engine_of_run)
        asked(monkeypatch, None)
        approved = world.approval()
        for moment in ("before wait", "after destroy"):
            with pytest.raises(KilledError):
                world.run(approve=approved, killed=moment)
        assert world.run() == 0
        assert world.fleets() == 1
        assert engine.outputs() == {}


def test_a_run_without_the_engine_says_where_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpufleetError, match="`pulumi` is not on PATH"):
        pulumi_cli.PulumiStack(root=tmp_path, name=STACK).select()


def test_a_mistyped_stack_makes_no_pulumi_stack(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[pulumi_cli.PulumiStack] = []
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(pulumi_cli.PulumiStack, "select", made.append)
    with pytest.raises(GpufleetError, match="chian"):
        command.opened(argparse.Namespace(stack="chian", approve=None, begin=False))
    assert made == []
