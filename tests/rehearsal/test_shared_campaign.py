"""A campaign whose trials share nodes, on the embedded AWS: driver, program, user-data and job are the real ones."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import aws, campaign_bucket
from gpufleet.infra.account.campaign_ledger import CampaignLedger
from gpufleet.infra.bill import record
from gpufleet.infra.bill.limits import least_usd
from gpufleet.infra.commands import campaign as command
from gpufleet.infra.commands.trials import StackTrial, whole_run
from gpufleet.infra.definition.campaign import DefinedTrial, load, trials, write
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval, pulumi_cli
from gpufleet.job.contract.reading import epoch
from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.contract.workdir import METRICS
from gpufleet.job.supervisor.store import S3Store
from gpufleet.rehearsal import provider, scratch
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import InProcess, settings, write_project
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.node import NodeRunner
from tests import forked
from tests.infra.commands.test_campaign_command import DriverKilledError
from tests.infra.shared_files import ONE
from tests.rehearsal.test_shared_node import SCRIPT
from tests.waiting import wait_for


class Night:
    """The project, its account and its nodes. `look` is what the driver waits for between two looks."""

    def __init__(self, root: Path, cloud: Cloud, runner: NodeRunner, hold: Path) -> None:
        self.root, self.cloud, self.runner, self.hold = root, cloud, runner, hold
        self.stacks: dict[str, InProcess] = {}
        self.look: Callable[[], Any] = lambda: not self.living()

    def stack(self, name: str, approved: str = "") -> InProcess:
        if approved:
            environment = {**self.cloud.environment(), approval.VARIABLE: approved}
            folder = self.root.parent / name
            folder.mkdir()
            made = InProcess(self.root, environment, name, lambda _: None)
            made._state = folder / "in-process.json"
            self.stacks[name] = made
        return self.stacks[name]

    def up(self, name: str, approved: str) -> None:
        made = self.stack(name, approved).up()
        assert made.ok, made.diagnostics

    def living(self) -> list[str]:
        return [each.id for each in self.cloud.instances() if each.ended_at is None]

    def wait(self, _: float) -> None:
        wait_for("what the driver waits for", lambda: self.look(), log=self.logs)

    def logs(self) -> str:
        return "\n".join(node.log.read_text()[-3000:] for node in self.runner.nodes.values())

    def has_reported(self, x: str) -> Callable[[], Any]:
        """A look that waits for the trial's loss, and later for the nodes' end."""
        looks = [lambda: not self.living()]

        def look() -> Any:
            (bucket,) = (name for kind, name in self.cloud.leftovers() if kind == "bucket" and "ledger" not in name)
            stage = next(each.stage for each in self.members() if each.values["--x"] == x)
            store = S3Store(f"s3://{bucket}/r1/{stage}", client=self.cloud.client("s3"))
            lines = (store.get_bytes(METRICS) or b"").splitlines()
            if seen := any(b"loss" in line for line in lines):
                self.look = looks[0]
            return seen

        return look

    def members(self) -> list[DefinedTrial]:
        return [member for run in trials(load("night", self.root), self.root) for member in run.members]

    def ledger(self) -> CampaignLedger:
        found = campaign_bucket.find_ledger(aws.client, "night", "us-east-2")
        assert found is not None
        return found.read()

    def drive(self, text: str) -> int:
        (self.root / "campaigns" / "night.yaml").write_text(f"files: [staged]\nshare_node: true\n{text}")
        given = {"approve": None, "take_over": None, "forget": False, "look": False}
        return command.run(argparse.Namespace(campaign="night", **given))

    def receipts(self) -> dict[str, Receipt]:
        """The receipt of each trial, by the value of its argument."""
        listed = trials(load("night", self.root), self.root)
        folder = self.root / "results"
        paths = {
            member.values["--x"]: folder / run.name / "r1" / member.stage / "receipt.json"
            for run in listed
            for member in run.members
        }
        return {x: Receipt.from_json(json.loads(path.read_bytes())) for x, path in paths.items() if path.is_file()}


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Night]:
    with opened(tmp_path, monkeypatch) as made:
        yield made


@contextmanager
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch, *, real: bool = False) -> Iterator[Night]:
    """`real`: whether the driver runs the `pulumi` on PATH, instead of the program in this process."""
    root = scratch.make(folder / "project", {"staged": ONE})
    write_project(root)
    hold, programs = folder / "hold", folder / "programs"
    for each in (hold, programs, root / "code", root / "campaigns"):
        each.mkdir()
    (programs / "python").symlink_to(sys.executable)
    (root / "code" / "trial.py").write_text(SCRIPT.replace("HOLD", repr(str(hold))))
    monkeypatch.chdir(root)
    habits = Habits(notice_s=20.0, relaunch_s=1.0)
    with ExitStack() as stack:
        stack.enter_context(forked.programs(folder))
        cloud = stack.enter_context(Cloud(root, habits=habits))
        engine = settings(root, stack.enter_context(provider.serve(cloud.environment()))) if real else {}
        for name, value in {**cloud.environment(), **engine}.items():
            monkeypatch.setenv(name, value)
        runner = NodeRunner(cloud, folder / "nodes", lambda _: programs)
        world = Night(root, cloud, runner, hold)
        if not real:
            in_process(world, monkeypatch)
        monkeypatch.setattr(command, "Campaign", partial(command.Campaign, sleep=lambda _: world.wait(_)))
        monkeypatch.setattr("builtins.input", lambda _: "yes")
        try:
            yield world
        finally:
            runner.close()


def in_process(world: Night, monkeypatch: pytest.MonkeyPatch) -> None:
    stacks = pulumi_cli.PulumiStack
    monkeypatch.setattr(stacks, "select", lambda _: None)
    monkeypatch.setattr(
        stacks, "outputs", lambda stack: world.stacks[stack.name].outputs() if stack.name in world.stacks else {}
    )
    monkeypatch.setattr(stacks, "up", lambda stack, approved: world.up(stack.name, approved))
    monkeypatch.setattr(stacks, "destroy", lambda stack: world.stack(stack.name).destroy())


def kill(_: float = 0) -> None:
    raise DriverKilledError


def test_three_trials_of_a_campaign_share_a_node_also_without_a_driver(
    night: Night, capsys: pytest.CaptureFixture[str]
) -> None:
    wait, night.wait = night.wait, kill  # type: ignore[method-assign]
    with pytest.raises(DriverKilledError):
        night.drive("grid: {--x: [1, 2, 3]}\nmax_usd: 9\n")
    assert "The runs share 1 node: the bill has one set-up of 8 minutes for each" in capsys.readouterr().out
    wait(0)
    assert night.drive("grid: {--x: [1, 2, 3]}\nmax_usd: 9\n") == 0
    (node,) = night.cloud.instances()
    receipts = night.receipts()
    assert {x: receipt.reason for x, receipt in receipts.items()} == dict.fromkeys("123", "finished")
    (entry,) = night.ledger().runs.values()
    assert entry.ended
    assert entry.usd == sum(receipt.actual for receipt in receipts.values())
    lived = sum(cost.lived_s for receipt in receipts.values() for cost in receipt.attempts)
    last = max(epoch(receipt.at) or 0.0 for receipt in receipts.values())
    assert float(lived) == pytest.approx(last - node.launched_at.replace(microsecond=0).timestamp(), abs=2.0)
    with pytest.raises(GpufleetError, match="has dealt other runs to its nodes"):
        night.drive("grid: {--x: [1, 2, 3, 4]}\nmax_usd: 9\n")


def test_a_trial_that_loses_is_asked_to_end_and_the_next_begins(
    night: Night, capsys: pytest.CaptureFixture[str]
) -> None:
    (night.hold / "t2").touch()  # the second one, which reports a high loss, would never end
    night.look = night.has_reported("2")
    search = "metric: loss\ndirection: minimize\npruner: asha\nevery: 1\nreduction: 2\n"
    night.drive(f"grid: {{--x: [1, 2, 3]}}\nmax_usd: 9\n{search}")
    assert {x: receipt.reason for x, receipt in night.receipts().items()} == {
        "1": "finished",
        "2": "stopped",
        "3": "finished",
    }
    assert len(night.cloud.instances()) == 1
    assert "loses, and is asked to end" in capsys.readouterr().out


def test_where_the_cap_does_not_pay_for_the_third_it_does_not_begin(
    night: Night, capsys: pytest.CaptureFixture[str]
) -> None:
    stack = night.root / "stacks" / "staged.yaml"
    stack.write_text(stack.read_text().replace("size_gb: 0.001", "size_gb: 5"))  # each trial has a cost that is sure
    listed = "grid: {--x: [1, 2, 3]}\nmax_usd: "
    (night.root / "campaigns" / "night.yaml").write_text(f"files: [staged]\nshare_node: true\n{listed}9\n")
    (run,) = trials(load("night", night.root), night.root)
    write([run], night.root)
    second = StackTrial.plan(run, whole_run(run.name, night.root)).whole.plan().parts[1]
    fixed, least = Decimal(record.extras(second.bill)["fixed_usd"]), least_usd(second.definition, second.bill)
    assert fixed > Decimal("0.1")
    cap = (least + fixed * Decimal("1.5")).quantize(Decimal("0.01"))
    assert night.drive(f"{listed}{cap}\n") == 1
    said = capsys.readouterr().out
    receipts = night.receipts()
    assert {x: receipt.reason for x, receipt in receipts.items()} == {"1": "finished", "2": "finished", "3": "max_usd"}
    assert receipts["3"].detail.startswith("it did not begin: ")
    assert "2 runs ended;" in said
    assert "; what was left of their node's dollars" in said
    assert sum(receipt.actual for receipt in receipts.values()) <= cap


@pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
def test_the_real_engine_makes_one_fleet_for_two_trials_and_takes_all_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with opened(tmp_path, monkeypatch, real=True) as night:
        assert night.drive("grid: {--x: [1, 2]}\nmax_usd: 9\n") == 0
        assert {x: receipt.reason for x, receipt in night.receipts().items()} == dict.fromkeys("12", "finished")
        assert len(night.cloud.instances()) == len(night.cloud.fleets.fleets) == 1
        (run,) = trials(load("night", night.root), night.root)
        assert pulumi_cli.PulumiStack(root=night.root, name=run.name).outputs() == {}
