"""A document is read by the types of its dataclass's fields."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any, Literal

import pytest

from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields, Seconds, Step

Colour = Literal["red", "green"]


@dataclass(frozen=True)
class FilledPart:
    name: str
    weight: float = 1.0


@dataclass(frozen=True)
class Whole:
    step: Step
    usd: Decimal | None = None
    took_s: Seconds = 0.0
    colour: Colour = "red"
    parts: tuple[FilledPart, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    private: str = "own"


def whole_of(tree: dict[str, Any]) -> Whole:
    return reading.filled(Whole, Fields(tree), but=("private",))


def test_every_field_is_read_by_its_type_and_what_is_missing_or_null_keeps_its_default() -> None:
    tree = {"step": 3, "usd": "1.25", "took_s": "2.5", "colour": "green", "parts": [{"name": "a"}], "counts": {"b": 2}}
    assert whole_of({**tree, "private": "another's"}) == Whole(
        3, Decimal("1.25"), 2.5, "green", (FilledPart("a"),), {"b": 2}
    )
    assert whole_of({"step": 3, "usd": None}) == Whole(3)
    assert reading.filled(Whole, Fields({"usd": "1"}), step=7) == Whole(7, Decimal(1))


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"step": 10**8}, "step is 100000000, not a number of steps"),
        ({"step": None}, "step is None, not a number of steps"),
        ({"colour": "blue"}, "colour is 'blue', not one of red, green"),
        ({"usd": "-1"}, "usd is '-1', less than 0"),
        ({"parts": [{"name": "a"}, {}]}, "parts[1].name is missing"),
        ({"counts": {"b": 0.5}}, f"counts is 0.5, not a whole number from 0 to {2**53}"),
    ],
)
def test_a_value_of_another_kind_is_told_with_its_place(wrong: dict[str, Any], told: str) -> None:
    with pytest.raises(DoubtError) as error:
        whole_of({"step": 3, **wrong})
    assert str(error.value) == told
    with pytest.raises(DoubtError, match="step is missing"):
        whole_of({})


def test_a_doubtful_value_is_set_aside_where_somebody_is_told() -> None:
    aside = list[str]()
    found = reading.filled(Whole, Fields({"step": 3, "usd": "much"}, aside=aside.append))
    assert (found, aside) == (Whole(3), ["usd is 'much', not an amount"])
