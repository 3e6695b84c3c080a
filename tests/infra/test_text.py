"""Numbers as people read them."""

from __future__ import annotations

import os
import shutil
from decimal import Decimal

import pytest

from gpufleet.infra.text import about_hours, hours, table, wrap
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


def test_hours_of_an_answer_have_two_digits() -> None:
    assert [about_hours(Decimal(each)) for each in ("0.568", "1.82", "13.6", "150.4")] == ["0.57", "1.8", "14", "150"]


def test_a_table_leaves_out_what_a_narrow_terminal_can_spare_and_nothing_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def heads(columns: int) -> list[str]:
        monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback: os.terminal_size((columns, 24)))
        return next(table(("stack", "owner", "since"), [("a" * 20, "b" * 20, "c" * 20)], spare=(2, 1))).split()

    assert [heads(columns) for columns in (64, 63, 41)] == [["stack", "owner", "since"], ["stack", "owner"], ["stack"]]
    monkeypatch.setattr(shutil, "get_terminal_size", lambda fallback: os.terminal_size(fallback))
    rows = list(table(("stack", "owner"), [("a" * 200, "b" * 200)], spare=(1,)))
    assert rows[0].split() == ["stack", "owner"]
    assert max(map(len, wrap("word " * 100))) <= 100
