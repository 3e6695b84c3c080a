"""`gpufleet campaign NAME` on the embedded AWS: whole runs, a ledger in S3, a driver that is killed."""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import aws, campaign_bucket
from gpufleet.infra.account.campaign_ledger import NAME, CampaignLedger
from gpufleet.infra.commands import campaign as command
from gpufleet.infra.commands import cost, report
from gpufleet.infra.definition.loader import find, load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval, pulumi_cli
from gpufleet.job.contract import metrics
from gpufleet.job.text import stamp
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import InProcess, write_project
from tests import forked
from tests.receipt_tree import receipt
from tests.rehearsal.engine_world import STACK, pinned, project


class DriverKilledError(BaseException):
    """The end of the driver."""


@dataclass(eq=False)
class InProcessRun(InProcess):
    """A stack of one trial, beside others of the project."""

    def __init__(self, folder: Path, environment: Mapping[str, str], stack: str) -> None:
        super().__init__(folder, environment, stack, lambda _: None)
        self._state = folder / f"in-process.{stack}.json"


@dataclass(eq=False)
class NightWorld:
    """A project, an account, and the runs that have begun in it by the name of their stack."""

    root: Path
    cloud: Cloud
    usd: str = "3.0000"  # what each run costs
    runs: dict[str, InProcessRun] = field(default_factory=dict)
    kill_at: int = 0  # the number of the beginning after which the driver is killed
    curve: Callable[[StackDefinition], float] | None = None  # a run's loss; it then trains 100 steps at each look
    trained: dict[str, int] = field(default_factory=dict)  # steps by stack

    def up(self, name: str, approved: str) -> None:
        run = InProcessRun(self.root, {**self.cloud.environment(), approval.VARIABLE: approved}, name)
        assert name not in self.runs
        self.runs[name] = run
        if not (made := run.up()).ok:
            raise GpufleetError(made.diagnostics)
        if len(self.runs) == self.kill_at:
            raise DriverKilledError

    def outputs(self, name: str) -> dict[str, Any]:
        return self.runs[name].outputs() if name in self.runs else {}

    def pass_time(self, _: float = 0) -> None:
        """Each run that goes on trains to its end."""
        self.cloud.tick()
        s3 = self.cloud.client("s3")
        for name in self.runs:
            if not (outputs := self.outputs(name)):
                continue
            if (reason := self._train(name, outputs["bucket"])) is None:
                continue
            done = {"schema": 1, "reason": reason, "detail": "", "instance": "i-1", "at": stamp(datetime.now(UTC))}
            documents = {"results.json": {}, "receipt.json": receipt(self.usd, stack=name), "done.json": done}
            for key, tree in documents.items():
                s3.put_object(Bucket=outputs["bucket"], Key=f"r1/{key}", Body=json.dumps(tree).encode())
            self.cloud.client("ec2").delete_fleets(FleetIds=[outputs["fleet_id"]], TerminateInstances=True)
        self.cloud.tick()

    def _train(self, name: str, bucket: str) -> str | None:
        """Trains 100 of 400 steps, and tells the loss; the reason of the end, None before it."""
        if self.curve is None:
            return "finished"
        s3, step = self.cloud.client("s3"), self.trained.get(name, 0) + 100
        loss = self.curve(load(find(name, self.root), now=datetime.now(UTC)))
        steps, order = range(100, step + 1, 100), len(self.trained)
        records = [{"ts": at + order, "phase": "p", "step": at, "loss": loss} for at in steps]
        self.trained[name] = step
        s3.put_object(Bucket=bucket, Key="r1/metrics.jsonl", Body=b"".join(map(metrics.write, records)))
        if any(each["Key"] == "r1/stop.json" for each in s3.list_objects_v2(Bucket=bucket).get("Contents", ())):
            return "stopped"
        return "finished" if step >= 400 else None

    def ledger(self) -> CampaignLedger:
        found = campaign_bucket.find_ledger(aws.client, "night", "us-east-2")
        assert found is not None
        return found.read()


@pytest.fixture
def night(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NightWorld]:
    with opened(tmp_path, monkeypatch) as world:
        yield world


@contextmanager
def opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NightWorld]:
    root = pinned(project(folder / "project")).parents[1]
    write_project(root)
    (root / "campaigns").mkdir()
    monkeypatch.chdir(root)
    with forked.programs(folder), Cloud(folder / "cloud", clock=ManualClock()) as cloud:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        world = NightWorld(root, cloud)
        stacks = pulumi_cli.PulumiStack
        monkeypatch.setattr(stacks, "select", lambda _: None)
        monkeypatch.setattr(stacks, "outputs", lambda stack: world.outputs(stack.name))
        monkeypatch.setattr(stacks, "up", lambda stack, approved: world.up(stack.name, approved))
        monkeypatch.setattr(stacks, "destroy", lambda stack: world.runs[stack.name].destroy())
        monkeypatch.setattr(command, "Campaign", partial(command.Campaign, sleep=world.pass_time))
        monkeypatch.setattr("builtins.input", lambda _: "yes")
        yield world


def written(world: NightWorld, text: str) -> None:
    (world.root / "campaigns" / "night.yaml").write_text(f"files: [{STACK}]\n{text}")


def carried_out(*, approve: str | None = None, **more: Any) -> int:
    given = {"campaign": "night", "approve": approve, "take_over": None, "forget": False, "look": False, **more}
    return command.run(argparse.Namespace(**given))


@pytest.mark.slow
def test_thirty_trials_under_a_cap_for_eleven(night: NightWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """Each stops before 3 USD and spends them. The driver is killed after its fifth beginning."""
    written(night, f"grid: {{job.parameters.seed: {[*range(30)]}}}\nmax_usd: 33\nat_once: 4\n")
    night.kill_at = 5
    with pytest.raises(DriverKilledError):
        carried_out()
    assert len(night.ledger().open_runs()) <= 4
    assert carried_out() == 1
    assert len(night.runs) == 11
    assert night.ledger().rest == 0
    assert not night.ledger().open_runs()
    assert {kind for kind, _ in night.cloud.leftovers()} <= {"bucket"}
    assert "11 runs ended; 0.00 of 33 USD are left." in capsys.readouterr().out
    assert len([*(night.root / "results").glob("night-*/r1/receipt.json")]) == 11


def test_what_was_shown_begins_and_nothing_else(night: NightWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """Shown, approved by its hash, begun, paid, and forgotten; a campaign that changed asks again."""
    written(night, "grid: {job.parameters.seed: [1, 2]}\nmax_usd: 4\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("builtins.input", lambda _: "no")
        assert carried_out() == 1
        hash_ = capsys.readouterr().out.split("Hash of this campaign: ")[1][:16]
        written(night, "grid: {job.parameters.seed: [1, 2]}\nmax_usd: 5\n")
        assert carried_out(approve=hash_) == 1
        assert "This is not the approved campaign." in capsys.readouterr().out
        assert night.runs == {}
        written(night, "grid: {job.parameters.seed: [1, 2]}\nmax_usd: 4\n")
        night.usd = "0.2500"
        assert carried_out(approve=hash_) == 0
    ledger = night.ledger()
    assert (ledger.rest, len(ledger.runs), ledger.approved) == (Decimal("3.5"), 2, hash_)
    assert carried_out(approve=hash_) == 0
    assert len(night.runs) == 2
    capsys.readouterr()
    found = campaign_bucket.find_ledger(aws.client, "night", "us-east-2")
    assert found is not None
    found.store.put_bytes(b"{}", NAME)
    with pytest.raises(GpufleetError, match=r"cannot be read: .* nothing more begins"):
        carried_out(approve=hash_)
    found.store.put_bytes(ledger.to_bytes(), NAME)
    assert carried_out(look=True) == 0
    assert "cost 0.25 USD.\n3.50 of 4 USD are left.\n" in capsys.readouterr().out
    assert carried_out(forget=True) == 0
    assert carried_out(look=True) == 1
    assert campaign_bucket.find_ledger(aws.client, "night", "us-east-2") is None
    with pytest.raises(GpufleetError, match=r"begun, but the campaign has no ledger. It is lost"):
        carried_out(approve=hash_)


def seed_of(definition: StackDefinition) -> float:
    """The seed as the loss, so that a lower seed is better."""
    return float(definition.job.parameters.seed)  # type: ignore[attr-defined]


SEARCH = "metric: loss\ndirection: minimize\npruner: asha\nevery: 100\nreduction: 2\n"


def test_a_run_that_loses_is_stopped_with_a_receipt_and_its_rest_comes_back(
    night: NightWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two at a time; the driver is killed after its third beginning, and all that it had on its disk is lost."""
    written(night, f"grid: {{job.parameters.seed: [1, 5, 6]}}\nmax_usd: 13\nat_once: 2\n{SEARCH}")
    night.usd, night.curve, night.kill_at = "0.2500", seed_of, 3
    with pytest.raises(DriverKilledError):
        carried_out()
    for folder in (".gpufleet/trials", "results"):
        shutil.rmtree(night.root / folder, ignore_errors=True)
    assert carried_out() == 0
    assert len(night.runs) == 3
    ledger = night.ledger()
    assert (ledger.rest, ledger.open_runs()) == (Decimal("12.25"), [])
    ends, seeds = documents(night, "done.json", "reason"), documents(night, "values.json", "values")
    by_seed = {seeds[name]["job.parameters.seed"]: reason for name, reason in ends.items()}
    assert by_seed == {"1": "finished", "5": "stopped", "6": "stopped"}
    assert set(documents(night, "receipt.json", "stack")) == set(ends)
    shutil.rmtree(night.root / "results")
    assert report.run(argparse.Namespace(stack="night", of=None, to=None)) == 0
    figures = json.loads((night.root / "results" / "night" / "campaign.json").read_bytes())
    assert seeds[figures["best"]] == {"job.parameters.seed": "1"}
    assert figures["usd"]["actual"] == "0.7500"
    assert (night.root / "results" / "night" / "report.html").is_file()
    assert "loses, and is asked to end" in capsys.readouterr().out


def documents(world: NightWorld, name: str, key: str) -> dict[str, Any]:
    """A key of a kept document, by trial."""
    found = campaign_bucket.find_ledger(aws.client, "night", "us-east-2")
    assert found is not None
    keys = [each.key for each in found.store.entries("trials/") if each.key.endswith(f"/{name}")]
    return {each.split("/")[1]: json.loads(found.store.get_bytes(each) or b"{}")[key] for each in keys}


def test_a_sampler_draws_as_long_as_a_run_fits_and_another_driver_goes_on(
    night: NightWorld, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first driver is killed between two draws, and its disk is lost; the second one draws the rest."""
    draws = "sampler: tpe\ntrials: 4\ndraw: {job.parameters.seed: {low: 1, high: 99}}\n"
    written(night, f"max_usd: 13\nat_once: 2\n{SEARCH}{draws}")
    night.usd, night.curve, night.kill_at = "0.2500", seed_of, 3
    with pytest.raises(DriverKilledError):
        carried_out()
    before = {*night.runs}
    shutil.rmtree(night.root / ".gpufleet" / "trials")
    assert carried_out() == 0
    assert len(night.runs) == 4
    assert before < {*night.runs}
    assert STACK not in night.runs
    seeds = [int(each["job.parameters.seed"]) for each in documents(night, "values.json", "values").values()]
    assert len(set(seeds)) == 4
    assert set(documents(night, "done.json", "reason").values()) == {"finished", "stopped"}
    assert night.ledger().rest == 12
    assert "The campaign draws values as it goes on" in capsys.readouterr().out
    assert carried_out(forget=True) == 0
    assert len([*(night.root / "results" / "night").glob("night-*/receipt.json")]) == 4
    assert campaign_bucket.find_ledger(aws.client, "night", "us-east-2") is None


def test_the_last_dollars_begin_a_run_that_stops_before_them(night: NightWorld) -> None:
    written(night, "grid: {job.parameters.seed: [1, 2]}\nmax_usd: 4\nat_once: 2\n")
    night.usd = "0.2500"
    assert carried_out() == 0
    runs = [json.loads((night.root / "results" / name / "r1" / "run.json").read_bytes()) for name in night.runs]
    assert [each["limits"]["max_usd"] for each in runs] == ["3.00", "1.00"]


def test_an_agent_s_definition_joins_an_open_campaign(night: NightWorld, capsys: pytest.CaptureFixture[str]) -> None:
    """One that breaks a rule, or is another owner's, is left out, with the reason; so is half a file."""
    written(night, "max_usd: 7\nmax_hours: 5\nopen: true\n")
    folder, text = night.root / "campaigns" / "night", (night.root / "stacks" / f"{STACK}.yaml").read_text()
    folder.mkdir()
    night.usd = "0.2500"

    def put(_: object = None) -> None:
        (folder / "second.yaml").write_text(text)
        (folder / "stranger.yaml").write_text(text.replace("owner: you", "owner: somebody-else"))
        (folder / "half.yaml").write_text(text[:200])
        (folder / "long.yaml").write_text(text.replace("max_hours: 2", "max_hours: 9"))
        night.pass_time()

    hours = iter([0.0] * 30 + [6.0] * 1000)
    began = datetime.now(UTC).timestamp()
    campaign = partial(command.Campaign, sleep=put, clock=lambda: began + next(hours) * 3600)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(command, "Campaign", campaign)
        assert carried_out() == 1
    said = capsys.readouterr()
    assert sorted(night.runs) == ["night-second", STACK]
    assert "night-stranger is left out: run.owner is somebody-else; allowed is you" in said.err
    assert "night-half is left out" in said.err
    assert "Not begun: night-long; limits.max_hours: " in said.out


def test_cost_prices_the_campaign_without_an_account(
    night: NightWorld, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(night, "grid: {job.parameters.seed: [1, 2, 3, 4]}\nmax_usd: 7\nat_once: 2\n")
    for name in ("AWS_ENDPOINT_URL", "AWS_ACCESS_KEY_ID"):
        monkeypatch.delenv(name, raising=False)
    given: dict[str, Any] = {"stack": "night", "others": [], "times": None, "scenario": None, "all": False}
    assert cost.run(argparse.Namespace(**given, json=False)) == 0
    said = capsys.readouterr().out
    assert "all 4, speed and prices alike" in said
    assert "Under 7 USD, 2 at once: 4 of 4 begin" in said
    assert cost.run(argparse.Namespace(**given, json=True)) == 0
    tree = json.loads(capsys.readouterr().out)
    assert len(tree["trials"]) == 4
    assert float(tree["usd"]["p10"]) <= float(tree["usd"]["p50"]) <= float(tree["usd"]["p90"])
    assert float(tree["spent"]["p90"]) <= 7
