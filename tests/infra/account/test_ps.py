"""`gpufleet ps`: every run of the account and the project."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.infra.cli import main
from gpufleet.job import atomic
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import declare_fleet
from tests.receipt_tree import receipt


@pytest.fixture
def project(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = path.parents[1]
    monkeypatch.chdir(root)
    return root


def listed(capsys: pytest.CaptureFixture[str]) -> dict[tuple[str, str], dict[str, str]]:
    assert main(["ps", "--json"]) == 0
    return {(run["run"], run["owner"]): run for run in json.loads(capsys.readouterr().out)}


def test_a_file_that_was_never_launched_is_a_run_to_come(
    cloud: Cloud, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ps"]) == 0
    first, *table = capsys.readouterr().out.splitlines()
    assert first == "0 runs in us-east-2, 1 over or not launched."
    assert table[-1].split()[:2] == ["small-growth", "r1"]
    assert table[-1].endswith("not launched")


def test_runs_of_all_owners_and_stacks_are_listed_with_what_they_have(
    cloud: Cloud, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    cloud.tick()
    fleet = declare_fleet(cloud, run="r2", owner="bob")
    declare_fleet(cloud, run="r3", owner="bob", target=0)
    found = listed(capsys)
    assert found["r1", "you"]["state"] == "1 node, g5.2xlarge"
    assert found["r2", "bob"]["state"] == "looks for a node"
    assert found["r3", "bob"]["state"] == "rests at 0 nodes"
    assert found["r1", "you"]["region"] == "us-east-2"
    assert found["r1", "you"]["since"]
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    assert listed(capsys)["r2", "bob"]["state"] == "over"


def test_a_run_that_ended_is_known_by_its_receipt(
    cloud: Cloud, project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = project / "receipts" / "small-growth" / "r0.json"
    place.parent.mkdir(parents=True)
    atomic.write_bytes(place, json.dumps(receipt("1.10") | {"stack": "small-growth", "run": "r0"}).encode())
    run = listed(capsys)["r0", ""]
    assert (run["state"], run["since"]) == ("ended: finished, 1.10 USD", "2026-11-21 18:00")


def test_outside_of_a_project_it_asks_for_a_region(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["ps"]) == 2
    assert capsys.readouterr().err.endswith("which regions to look in: name one by --region NAME\n")
