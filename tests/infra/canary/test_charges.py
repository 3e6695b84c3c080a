"""A canary's charges, which Cost Explorer shows a day later, beside the canary's receipts and in its file."""

from __future__ import annotations

import json
from datetime import date
from pathlib import Path

import boto3
import pytest
from botocore.stub import Stubber

from gpufleet.infra.account import actual_bill, aws
from gpufleet.infra.canary import charges, proof
from gpufleet.infra.cli import main
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.infra.evidence import proofs
from gpufleet.infra.evidence.proofs import Proof
from gpufleet.job.contract.receipt import Receipt
from tests.infra.account.test_actual_bill import ACTIVE, EC2, day, explorer
from tests.infra.canary.test_proof import made
from tests.receipt_tree import receipt

TODAY = date(2026, 11, 30)
NODE, DISK = (EC2, "USE2-SpotUsage:g4dn.xlarge", "1.0"), (EC2, "USE2-EBS:VolumeUsage.gp3", "0.1")


@pytest.fixture
def flown(tmp_path: Path) -> Proof:
    """A canary's file with its receipt beside it."""
    path = proof.write(made(tmp_path), tmp_path / proofs.FOLDER)
    charges.keep([Receipt.from_json(receipt(stack="canary"))], path, tmp_path)
    return proofs.read(path)


def judged(flown: Proof, root: Path, *groups: tuple[str, str, str]) -> dict[str, str]:
    """The states of the assumptions on charges, with such charges."""
    ce, stub = explorer()
    stub.add_response("get_cost_and_usage", {"ResultsByTime": [day(*groups)]})
    with stub:
        list(charges.judged(flown, charges.kept_receipts(flown, root), ce, TODAY))
    rows = flown.tree["assumptions"]
    return {each["id"]: each["state"] for each in rows if each["id"].startswith("charged-")}


def test_charges_as_the_receipt_has_them_hold(flown: Proof, tmp_path: Path) -> None:
    assert set(judged(flown, tmp_path, NODE, DISK).values()) == {"held"}
    assert flown.tree["charged"] == {"canary": "1.1"}
    others = {each["id"]: each["state"] for each in flown.tree["assumptions"]}
    assert (others["notice-left"], others["node-started"]) == ("refuted", "held")  # the assumptions of this flight


@pytest.mark.parametrize(
    ("groups", "refuted"),
    [
        (((EC2, "USE2-SpotUsage:g4dn.xlarge", "1.3"), DISK), {"charged-nodes", "charged-receipt"}),
        (((EC2, "USE2-SpotUsage:g4dn.xlarge", "0.5"), DISK), {"charged-nodes"}),
        ((NODE, DISK, ("AWS Key Management Service", "us-east-2-KMS-Requests", "0.02")), {"charged-lines"}),
    ],
)
def test_charges_that_no_receipt_expects_are_refuted(
    flown: Proof, tmp_path: Path, groups: tuple[tuple[str, str, str], ...], refuted: set[str]
) -> None:
    states = judged(flown, tmp_path, *groups)
    assert {name for name, state in states.items() if state == "refuted"} == refuted


def test_a_charge_that_is_not_known_yet_leaves_the_file_as_it_is(flown: Proof, tmp_path: Path) -> None:
    with pytest.raises(AwsRefused, match="try again a day after"):
        judged(flown, tmp_path)
    assert "charged" not in flown.tree


def test_receipts_that_lie_elsewhere_are_said_to(flown: Proof, tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match="run this on the machine that ran the canary"):
        charges.kept_receipts(flown, tmp_path / "other")


def test_the_command_writes_the_charges_into_the_newest_file(
    flown: Proof, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ce = boto3.client("ce", region_name=actual_bill.REGION, aws_access_key_id="x", aws_secret_access_key="x")
    (tmp_path / "stacks").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(aws, "client", lambda service, region: ce)
    stub = Stubber(ce)
    stub.add_response("list_cost_allocation_tags", {"CostAllocationTags": ACTIVE})
    stub.add_response("get_cost_and_usage", {"ResultsByTime": [day(NODE, DISK)]})
    with stub:
        code = main(["canary", "--bill"])
    said = capsys.readouterr()
    assert code == 1, said.err  # this flight refuted the assumption on notices
    assert "notice-left" in said.out
    assert json.loads(flown.path.read_text())["charged"] == {"canary": "1.1"}


def test_without_a_canary_there_is_no_bill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "stacks").mkdir()
    monkeypatch.chdir(tmp_path)
    assert main(["canary", "--bill", "--region", "us-west-2"]) != 0
