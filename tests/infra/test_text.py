"""Numbers as people read them."""

from __future__ import annotations

from gpufleet.infra.text import hours
from gpufleet.job.text import counted


def test_hours_keep_the_digits_that_tell_them_apart() -> None:
    assert [hours(each) for each in (150.4, 77.68, 0.1, 0.0123)] == ["150.40", "77.68", "0.10", "0.012"]


def test_one_of_a_thing_has_no_plural() -> None:
    assert [counted(each, "node-hour") for each in (1, "1", 1.5, 0)] == [
        "1 node-hour",
        "1 node-hour",
        "1.5 node-hours",
        "0 node-hours",
    ]
    assert [counted(each, "process") for each in (1, 8)] == ["1 process", "8 processes"]
