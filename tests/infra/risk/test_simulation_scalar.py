"""The vectorised simulation against an independent one, which simulates one run at a time in plain Python."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest

from gpufleet.infra.risk.simulation import Exposure, quantiles, simulate

NOTICE_H, MINUTE_H = 2 / 60, 1 / 60
BASE = Exposure(
    setup_h=0.15,
    restart_h=0.2,
    phase_ends_h=(1.0, 2.5),
    saves_fit=(True, True),
    interval_h=0.25,
    compute_usd_h=1.0,
    extras_usd_h=0.1,
    fixed_usd=0.5,
    hazard=0.8,
    wait_h=0.5,
    wait_sigma=1.2,
    notice_missed=0.2,
)


def one_run(run: Exposure, chance: random.Random) -> tuple[float, float, float, int, bool]:
    """(USD, node-hours, hours by the wall, interruptions, stopped by a limit) of one run."""
    rate = run.compute_usd_h + run.extras_usd_h
    unevenness = 1.2 if run.hazard is None else 0.0  # a figure is the same for every node
    drawn = 0.3 * math.exp(1.2 * max(-2.0, min(2.0, chance.gauss(0, 1))))
    hazard = drawn if run.hazard is None else run.hazard
    assert isinstance(hazard, float)
    work, end = 0.0, run.phase_ends_h[-1]
    compute_h = billed_h = 0.0
    mean_wait = run.wait_h * math.exp(run.wait_sigma**2 / 2)
    wall = 0.0
    if chance.random() < mean_wait / (
        mean_wait + 1 / hazard
    ):  # the run begins while there is no node, more likely in a long wait
        wall = chance.random() * chance.lognormvariate(math.log(run.wait_h) + run.wait_sigma**2, run.wait_sigma)
    interruptions, boot = 0, run.setup_h
    while True:
        shift = unevenness**2 / 2 * (1 if interruptions else -1)
        of_node = hazard * math.exp(unevenness * chance.gauss(0, 1) + shift)
        dies = chance.expovariate(of_node)  # hours after this node's launch
        done = boot + end - work
        money = float("inf") if run.max_usd is None else (run.max_usd - run.fixed_usd) / rate - billed_h
        hours = float("inf") if run.max_hours is None else run.max_hours - billed_h
        limit = max(0.0, min(money, hours))  # the meter counts every node-hour, credited or not
        lived = min(dies, done, limit)
        wall += lived
        billed_h += max(lived, MINUTE_H)
        taken_by_aws = lived == dies
        if not (taken_by_aws and lived < 1.0):
            compute_h += max(lived, MINUTE_H)
        if not taken_by_aws:
            usd = run.fixed_usd + compute_h * run.compute_usd_h + billed_h * run.extras_usd_h
            return usd, billed_h, wall, interruptions, lived == limit
        interruptions += 1
        at_notice = max(0.0, lived - NOTICE_H - boot)  # work of this attempt
        phase = min(sum(work + at_notice >= each for each in run.phase_ends_h), len(run.phase_ends_h) - 1)
        if chance.random() < run.notice_missed:
            work += max(0.0, lived - boot - chance.random() * run.interval_h)
        elif run.saves_fit[phase]:
            work += at_notice
        else:
            work += max(0.0, at_notice - chance.random() * run.interval_h)
        wall += chance.lognormvariate(math.log(run.wait_h), run.wait_sigma)
        boot = run.restart_h


@pytest.mark.parametrize(
    "run",
    [
        BASE,
        replace(BASE, hazard=None),
        replace(BASE, hazard=2.0, saves_fit=(False, False), interval_h=0.1, notice_missed=0.0),
        replace(BASE, saves_fit=(True, False), interval_h=0.6),
        replace(BASE, hazard=1.5, notice_missed=1.0),
        replace(BASE, max_usd=3.2),
        replace(BASE, hazard=2.0, max_hours=4.0),
        replace(BASE, hazard=25.0, setup_h=0.02, restart_h=0.01, phase_ends_h=(0.02, 0.05)),  # many starts of a minute
        replace(BASE, phase_ends_h=(0.1, 0.3)),  # all of it within a first hour
    ],
    ids=["usual", "drawn", "late", "late at the end", "missed", "dollars", "hours", "minutes", "short"],
)
def test_both_simulations_agree_on_dollars_hours_interruptions_and_stops(run: Exposure) -> None:
    chance = random.Random(11)
    usd, hours, wall, interruptions, stopped = zip(*(one_run(run, chance) for _ in range(20_000)), strict=True)
    found = simulate(run, runs=20_000)
    assert found.usd.mean() == pytest.approx(statistics.fmean(usd), rel=0.015)
    assert found.hours.mean() == pytest.approx(statistics.fmean(hours), rel=0.015)
    assert found.wall_hours.mean() == pytest.approx(statistics.fmean(wall), rel=0.02)
    assert found.interruptions.mean() == pytest.approx(statistics.fmean(interruptions), rel=0.03)
    assert found.stopped.mean() == pytest.approx(statistics.fmean(stopped), abs=0.01)
    p10, p50, p90, _ = quantiles(found.usd)
    tenths = statistics.quantiles(usd, n=10)
    assert (p10, p50, p90) == pytest.approx((tenths[0], tenths[4], tenths[8]), rel=0.03)
