"""A run with a fallback under the real engine: what a later `up`, a refresh and a destroy make of it."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.aws import SWITCH
from gpufleet.job.node.schedule import KEPT
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine
from tests.rehearsal.engine_world import STACK, pinned, project
from tests.repository import ROOT

pytestmark = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")


def test_a_later_up_leaves_the_run_in_its_market_and_destroy_leaves_nothing(tmp_path: Path) -> None:
    file = pinned(project(tmp_path / "project"))
    text = file.read_text().replace("  capacity: spot\n", "  capacity: spot\n  fallback: on-demand\n")
    file.write_text(text.replace("limits:\n", "limits:\n  deadline: in 6 h\n"))
    clock = ManualClock(datetime.now(UTC))
    with (
        Cloud(tmp_path / "cloud", clock=clock) as cloud,
        Engine.open(tmp_path / "project", {**cloud.environment(), "PYTHONPATH": str(ROOT)}, STACK, real=True) as engine,
    ):
        ec2, scheduler = cloud.client("ec2"), cloud.client("scheduler")

        def wanted() -> dict[str, list[int]]:
            """Capacities of the fleets that are there, by market."""
            cloud.tick()
            found: dict[str, list[int]] = {"spot": [], "on-demand": []}
            for each in ec2.describe_fleets()["Fleets"]:
                if each["FleetState"] == "active":
                    asked = each["TargetCapacitySpecification"]
                    found[asked["DefaultTargetCapacityType"]].append(asked["TotalTargetCapacity"])
            return found

        def switch() -> dict[str, Any]:
            (listed,) = (each for each in scheduler.list_schedules()["Schedules"] if each["Name"] == SWITCH)
            found: dict[str, Any] = scheduler.get_schedule(GroupName=listed["GroupName"], Name=SWITCH)
            return found

        assert engine.up().ok
        assert wanted() == {"spot": [1], "on-demand": [0]}
        hour = f"at({clock.now() + timedelta(hours=5):%Y-%m-%dT%H:%M:%S})"
        moved = {key: value for key, value in switch().items() if key in KEPT} | {
            "ScheduleExpression": hour,
            "State": "DISABLED",
        }
        scheduler.update_schedule(**moved)  # as a node does
        again = engine.up()
        assert set(again.changes) == {"same"}, again.changes
        assert (switch()["ScheduleExpression"], switch()["State"]) == (hour, "DISABLED")

        # The fallback has taken the run over: its node has deleted the fleet on spot.
        fleets = {
            f["TargetCapacitySpecification"]["DefaultTargetCapacityType"]: f["FleetId"]
            for f in ec2.describe_fleets()["Fleets"]
        }
        ec2.modify_fleet(FleetId=fleets["on-demand"], TargetCapacitySpecification={"TotalTargetCapacity": 1})
        ec2.delete_fleets(FleetIds=[fleets["spot"]], TerminateInstances=True)
        cloud.tick()
        later = engine.up()
        assert later.ok, later.text
        assert wanted() == {"spot": [0], "on-demand": [1]}
        assert [node.spot for node in cloud.instances() if not node.ended_at] == [False]

        destroyed = engine.destroy()
        assert destroyed.ok, destroyed.text
        assert {kind for kind, _ in cloud.leftovers()} == {"bucket"}
