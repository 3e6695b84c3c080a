"""Recorded answers of AWS are compared with the embedded AWS's: a missing field, or one of another kind, differs."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.infra.canary.replay import AnswerDifference, differences, documented

CALL = "ec2.DescribeFleets"
FLEET = {"FleetId": "fleet-(taken out)", "Tags": [{"Key": "a"}], "Spot": {"Price": 1.5}, "Replace": True}


def found(own: dict[str, Any], recorded: dict[str, Any]) -> list[AnswerDifference]:
    answers = ({CALL: {"Fleets": [each]}} for each in (recorded, own))
    return list(differences(*answers))


def test_equal_shapes_differ_in_nothing_whatever_their_values_are() -> None:
    assert found({**FLEET, "FleetId": "other", "Replace": False}, FLEET) == []


@pytest.mark.parametrize(
    ("change", "field", "kinds"),
    [
        ({"FleetId": None}, "Fleets[].FleetId", ("text", "nothing")),
        ({"Spot": {}}, "Fleets[].Spot.Price", ("number", "lacking")),
        ({"Spot": {"Price": "1.5"}}, "Fleets[].Spot.Price", ("number", "text")),
        ({"Replace": "true"}, "Fleets[].Replace", ("true or false", "text")),
        ({"Tags": [{"key": "a"}]}, "Fleets[].Tags[].Key", ("text", "lacking")),
    ],
)
def test_a_field_that_is_lacking_or_of_another_kind_is_named(
    change: dict[str, Any], field: str, kinds: tuple[str, str]
) -> None:
    assert found({**FLEET, **change}, FLEET) == [AnswerDifference(CALL, field, *kinds)]


def test_an_empty_list_and_a_call_that_was_not_made_tell_nothing() -> None:
    assert found({**FLEET, "Tags": []}, FLEET) == []
    assert list(differences({CALL: {"Fleets": []}}, {})) == []


def test_the_documented_examples_are_read_as_a_file_has_answers() -> None:
    told = documented(["ec2.DescribeSpotPriceHistory", "ec2.DescribeFleets", "scheduler.GetSchedule"])
    assert list(told) == ["ec2.DescribeSpotPriceHistory"]
    assert told["ec2.DescribeSpotPriceHistory"]["SpotPriceHistory"][0]["SpotPrice"]
