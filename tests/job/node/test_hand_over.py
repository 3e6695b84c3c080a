"""The hour at which AWS begins on demand, under clocks and words of the job that go as they like."""

from __future__ import annotations

import random
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.job.contract.messages import Spent
from gpufleet.job.node.fallback import MOVE_S, SOON_S, HandOver

HOUR = 3600.0


class KeptSchedule:
    """The switch, as AWS keeps it; it takes no moment that has passed."""

    def __init__(self, at: float) -> None:
        self.at, self.enabled, self.refuses, self.asked = at, True, False, list[float]()
        self.now = 0.0  # AWS's own clock

    def stands(self) -> tuple[float, bool]:
        return self.at, self.enabled

    def change(self, at: float, *, enabled: bool) -> bool:
        self.asked.append(at)
        if self.refuses or at <= self.now:
            return False
        self.at, self.enabled = at, enabled
        return True


def node(tmp_path: Path, schedule: KeptSchedule, clock: Any) -> HandOver:
    settings: Any = SimpleNamespace(schedule="g/stop", fallback="1", folder=tmp_path)
    made = HandOver(settings, SimpleNamespace(), SimpleNamespace(), clock)  # type: ignore[arg-type]
    made._schedule = schedule  # type: ignore[assignment]
    return made


def spent_now(switch_at: float, trained_at: float, *, paid: bool = True) -> Spent:
    return Spent(
        spent_usd=Decimal(1),
        spent_s=Decimal(1),
        at=0.0,
        trained_at=trained_at,
        switch_at=switch_at,
        switch_is_paid=paid,
    )


@pytest.mark.parametrize("seed", range(20))
def test_whatever_clock_and_job_say_no_push_goes_back_nor_into_the_past(tmp_path: Path, seed: int) -> None:
    drawn = random.Random(seed)
    schedule, now = KeptSchedule(at=2 * HOUR), [0.0]
    part = node(tmp_path, schedule, lambda: now[0])
    for _ in range(300):
        now[0] += drawn.choice([-HOUR, 0, 10, 10, 10, MOVE_S, HOUR])  # a machine's clock may jump either way
        schedule.now, before = now[0], schedule.at
        schedule.refuses = drawn.random() < 0.2
        part.look(spent_now(drawn.uniform(-HOUR, 30 * HOUR), drawn.uniform(0, 400), paid=drawn.random() < 0.8))
        assert schedule.at >= before
        assert all(each >= now[0] + SOON_S for each in schedule.asked)
        schedule.asked.clear()


def test_pushes_are_five_minutes_apart_and_five_minutes_long_at_least(tmp_path: Path) -> None:
    schedule, now = KeptSchedule(at=HOUR), [0.0]
    part = node(tmp_path, schedule, lambda: now[0])
    for _ in range(360):
        now[0] += 10
        part.look(spent_now(HOUR + now[0], now[0]))
    assert len(schedule.asked) == 3600 // MOVE_S
    assert schedule.at > 2 * HOUR - MOVE_S - 10


def test_after_the_end_nothing_is_pushed(tmp_path: Path) -> None:
    schedule = KeptSchedule(at=HOUR)
    part = node(tmp_path, schedule, lambda: 0.0)
    part.end()
    assert not schedule.enabled
    part.look(spent_now(9 * HOUR, 1.0))
    assert not schedule.enabled
