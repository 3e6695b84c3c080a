"""The vectorised replay against an independent one, which replays one run at a time, minute by minute of the trace."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.infra.evidence.traces import Trace
from gpufleet.infra.risk import replay
from gpufleet.infra.risk.simulation import Exposure
from tests.infra.traces import markov

MINUTE_H = 1 / 60
RUN = Exposure(
    setup_h=16 * MINUTE_H,
    restart_h=22 * MINUTE_H,  # so that no run ends in the same minute in which its node is lost
    phase_ends_h=(1.0, 6.0),
    saves_fit=(True, True),
    interval_h=0.1,
    compute_usd_h=1.0,
    extras_usd_h=0.1,
    fixed_usd=0.25,
    hazard=None,
    notice_missed=0.0,
)


def one_run(run: Exposure, trace: Trace, begin: int) -> tuple[float, int]:
    """(USD, interruptions) of the run that begins at minute `begin` of a trace whose edges are whole minutes."""
    minutes = round(trace.hours * 60)
    edges = zip(trace.up_from_h, trace.up_to_h, strict=True)
    up = {minute % minutes for start, end in edges for minute in range(round(start * 60), round(end * 60))}
    left, start_up, clock = round(run.phase_ends_h[-1] * 60), round(run.setup_h * 60), begin
    usd, interruptions = run.fixed_usd, 0
    while True:
        while clock % minutes not in up:
            clock += 1
        lived = 0
        while clock % minutes in up and lived < start_up + left:
            lived, clock = lived + 1, clock + 1
        done = lived == start_up + left
        usd += lived / 60 * run.extras_usd_h
        # A node that is missing at minute 60 was taken before that minute, so within the first hour.
        usd += lived / 60 * run.compute_usd_h if done or lived > 60 else 0.0
        if done:
            return usd, interruptions
        interruptions += 1
        left -= max(0, lived - start_up - 2)  # the notice's two minutes are lost
        start_up = round(run.restart_h * 60)


@pytest.mark.parametrize("hazard", [0.2, 0.6, 1.5])
def test_both_replays_agree_on_every_single_run(hazard: float) -> None:
    trace = markov(hazard, hours=300, seed=4)  # on a grid of three minutes
    starts = 100
    found = replay.run(RUN, trace, starts=starts)
    expected = [one_run(RUN, trace, begin) for begin in range(0, 300 * 60, 300 * 60 // starts)]
    assert found.interruptions.tolist() == [count for _, count in expected]
    assert found.usd.tolist() == pytest.approx([usd for usd, _ in expected], abs=1e-4)


def test_a_missed_notice_costs_at_most_an_interval_more_than_a_handled_one() -> None:
    trace = markov(0.6, hours=300, seed=4)
    handled = replay.run(RUN, trace, starts=200)
    missed = replay.run(replace(RUN, notice_missed=1.0), trace, starts=200)
    assert missed.hours.mean() > handled.hours.mean()
    once = (handled.interruptions == 1) & (missed.interruptions == 1)
    assert once.any()
    assert (missed.hours - handled.hours)[once].max() <= RUN.interval_h
