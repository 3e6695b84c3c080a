"""Fleets that a stack's state does not know of are named before anything is declared."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from gpufleet.infra.account.unknown_fleets import look
from gpufleet.infra.definition.loader import load
from gpufleet.infra.errors import GpufleetError
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
DEFINITION = load(ROOT / "stacks" / "tinystories-growth.yaml", now=NOW)
OWN = {"gpufleet:stack": DEFINITION.name, "gpufleet:run": DEFINITION.run.id, "gpufleet:owner": DEFINITION.run.owner}


def fleet(state: str = "active", **tags: str) -> dict[str, Any]:
    return {
        "FleetId": "fleet-1",
        "FleetState": state,
        "CreateTime": NOW,
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1},
        "Tags": [{"Key": key, "Value": value} for key, value in {**OWN, **tags}.items()],
    }


class ShownFleets:
    """Answers DescribeFleets with its fleets, and DescribeTags with nothing else."""

    def __init__(self, *fleets: dict[str, Any], refuses: Exception | None = None) -> None:
        self.fleets, self.refuses = list(fleets), refuses

    def get_paginator(self, operation: str) -> ShownFleets:
        assert operation in ("describe_fleets", "describe_tags")
        return self

    def paginate(self, Filters: Any = None) -> list[dict[str, Any]]:
        if self.refuses:
            raise self.refuses
        return [{"Fleets": self.fleets}]


def seen(ec2: ShownFleets, *, known: frozenset[str] = frozenset(), preview: bool = False) -> list[str]:
    return look(DEFINITION, known, lambda service, region: ec2, NOW, preview=preview)


def test_up_refuses_to_make_a_second_fleet_of_the_run_and_says_how_to_end_the_first() -> None:
    end = r"aws ec2 delete-fleets --terminate-instances --fleet-ids fleet-1 --region us-east-2"
    with pytest.raises(GpufleetError, match=f"{end}.*gpufleet sweep tinystories-growth --delete"):
        seen(ShownFleets(fleet()))


def test_a_preview_warns_of_it() -> None:
    (said,) = seen(ShownFleets(fleet()), preview=True)
    assert said.startswith(f"fleet-1 of run {DEFINITION.run.id} is in us-east-2, and this stack's state does not know")


def test_another_run_s_fleet_is_a_warning() -> None:
    (said,) = seen(ShownFleets(fleet(**{"gpufleet:run": "r0"})))
    assert said.startswith("fleet-1 of run r0 ")


@pytest.mark.parametrize(
    "quiet",
    [
        fleet("deleted_terminating"),
        fleet("deleted_running"),
        fleet("deleted"),
        {**fleet(), "ValidUntil": NOW - timedelta(seconds=1)},
        fleet(**{"gpufleet:owner": "somebody-else"}),
        fleet(**{"gpufleet:stack": "another"}),
    ],
    ids=["deleting", "deleted with nodes", "deleted", "expired", "another owner's", "another stack's"],
)
def test_what_ends_or_is_not_this_stack_s_is_not_mentioned(quiet: dict[str, Any]) -> None:
    assert seen(ShownFleets(quiet)) == []


def test_a_fleet_that_the_state_knows_is_not_mentioned() -> None:
    assert seen(ShownFleets(fleet()), known=frozenset({"fleet-1"})) == []


def test_what_aws_does_not_show_is_said() -> None:
    refused = ClientError({"Error": {"Code": "UnauthorizedOperation", "Message": "no"}}, "DescribeFleets")
    (said,) = seen(ShownFleets(refuses=refused))
    assert "could not check for fleets" in said
    assert "DescribeFleets" in said


def test_without_credentials_nothing_is_asked_and_nothing_can_be_made() -> None:
    assert seen(ShownFleets(refuses=NoCredentialsError())) == []
