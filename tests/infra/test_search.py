"""Which runs lose, and which values are tried next, from what the runs have told."""

from __future__ import annotations

import json
from dataclasses import replace
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra import search
from gpufleet.infra.definition.campaign import CampaignFile, DrawnRange
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.search import TrialProgress, draw, find_losers, simulate_shares
from gpufleet.job.contract import metrics
from gpufleet.job.contract.done import FINISHED, MAX_USD, STOPPED

RANGES = {
    "--lr": DrawnRange(low=Decimal("1e-5"), high=Decimal("1e-2"), log=True),
    "--depth": DrawnRange(low=Decimal(2), high=Decimal(8), step=Decimal(2)),
    "--norm": DrawnRange(choices=("rms", "layer")),
}


def night(**more: Any) -> CampaignFile:
    given = {"metric": "val_loss", "direction": "minimize", "pruner": "asha", "every": 100, "reduction": 2, **more}
    return CampaignFile(name="night", files=("mine",), max_usd=Decimal(9), **given)


def make_run(
    name: str, *figures: float, began: float = 0.0, ended: str | None = None, every: int = 50, **values: str
) -> TrialProgress:
    """A run with these figures, one each `every` steps and as many seconds."""
    lines = [
        metrics.write({"ts": began + at * every, "phase": "p", "step": at * every, "loss": 9.0, "val_loss": figure})
        for at, figure in enumerate(figures, start=1)
    ]
    return TrialProgress.read(name, "val_loss", b"".join(lines), ended=ended, values=values or None)


def test_of_two_runs_at_a_rung_the_worse_loses() -> None:
    better, worse = make_run("a", 3.0, 2.0), make_run("b", 3.0, 2.5, began=1.0)
    assert find_losers(night(), [better, worse]) == ["b"]
    assert find_losers(night(direction="maximize"), [better, worse]) == []  # "a" was the only one when it was judged
    assert find_losers(night(direction="maximize"), [worse, make_run("c", 3.0, 2.0, began=2.0)]) == ["c"]


def test_nothing_loses_before_the_first_rung_or_without_a_figure_of_the_metric() -> None:
    assert find_losers(night(every=101), [make_run("a", 3.0, 2.0), make_run("b", 9.0, 9.0, began=1.0)]) == []
    other = replace(night(), metric="accuracy")
    lines = metrics.write({"ts": 1.0, "phase": "p", "step": 100, "val_loss": 1.0})
    assert find_losers(other, [TrialProgress.read("a", "accuracy", lines, ended=None)]) == []


def test_the_figures_that_a_run_tells_have_their_names() -> None:
    lines = metrics.write({"ts": 1.0, "phase": "p", "step": 100, "val_loss": 1.0, "loss": 2, "acc": 0.5})
    assert search.list_metrics(lines + b"{torn") == ["acc", "loss", "val_loss"]


def test_a_run_that_has_ended_counts_and_is_not_stopped_again() -> None:
    runs = [make_run("a", 3.0, 2.0, ended=FINISHED), make_run("b", 3.0, 2.5, began=1.0, ended=STOPPED)]
    assert find_losers(night(), runs) == []
    assert find_losers(night(), [*runs, make_run("c", 9.0, 9.0, began=500.0)]) == ["c"]


def test_runs_that_log_at_other_steps_are_compared_at_the_same_multiples() -> None:
    assert [each[1:] for each in make_run("a", 5.0, 4.0, 3.0, every=70).judged(100)] == [(1, 4.0), (2, 3.0)]
    assert find_losers(night(), [make_run("a", 3.0, 2.0), make_run("b", 4.0, 3.0, began=1.0, every=70)]) == ["b"]


def test_the_median_stops_who_is_behind_the_median_of_those_that_are_whole() -> None:
    whole = [make_run(f"w{at}", 5.0, float(at), began=at * 1000.0, ended=FINISHED) for at in range(5)]
    behind, ahead = make_run("b", 9.0, 2.5, began=9000.0), make_run("g", 9.0, 1.5, began=9000.0)
    median = night(pruner="median")
    assert find_losers(median, [*whole, behind, ahead]) == ["b"]
    cut = [replace(each, ended=MAX_USD) for each in whole]
    assert find_losers(median, [*cut, behind]) == []  # none is whole, so there is no median


def test_each_look_decides_what_one_that_was_killed_would_have_decided() -> None:
    """Told in pieces as they come, or all at once: the same runs lose, in whatever order the runs are listed."""
    runs = [make_run(f"t{at}", *(9.0 - step + (at * 7) % 5 for step in range(8)), began=at * 30.0) for at in range(6)]
    at_once = set(find_losers(night(), runs))
    assert at_once
    assert at_once < {each.name for each in runs}
    assert set(find_losers(night(), runs[::-1])) == at_once
    for moment in (100.0, 250.0, 400.0):
        seen = [replace(each, figures=tuple(f for f in each.figures if f.at <= moment)) for each in runs]
        assert set(find_losers(night(), seen)) <= at_once


def test_what_is_drawn_is_new_and_within_its_range() -> None:
    described, runs = night(sampler="tpe", draw=RANGES, trials=30), list[TrialProgress]()
    for number in range(15):
        values = draw(described, runs)
        assert values is not None
        assert 1e-5 <= float(values["--lr"]) <= 1e-2
        assert values["--depth"] in ("2", "4", "6", "8")
        assert values["--norm"] in ("rms", "layer")
        assert draw(described, runs) == values  # as another driver would
        runs.append(
            replace(make_run(f"t{number}", 1.0, abs(float(values["--lr"]) - 1e-3), ended=FINISHED), values=values)
        )
    assert len({json.dumps(each.values) for each in runs}) == 15


def test_tpe_draws_nearer_to_what_was_good_than_chance() -> None:
    ranges = {"--lr": DrawnRange(low=Decimal("0.0"), high=Decimal("1.0"))}
    distance = {}
    for sampler in ("tpe", "random"):
        described, runs = night(sampler=sampler, draw=ranges, trials=40, pruner=None), list[TrialProgress]()
        for number in range(40):
            values = draw(described, runs)
            assert values is not None
            figure = abs(float(values["--lr"]) - 0.7)
            runs.append(replace(make_run(f"t{number}", figure, ended=FINISHED), values=values))
        distance[sampler] = sum(abs(float((each.values or {})["--lr"]) - 0.7) for each in runs[20:])
    assert distance["tpe"] < distance["random"] / 2


def test_when_all_choices_were_drawn_nothing_is_left() -> None:
    described = night(sampler="random", draw={"--norm": RANGES["--norm"]}, trials=9)
    runs = [replace(make_run(name, 1.0), values={"--norm": name}) for name in ("rms", "layer")]
    assert draw(described, runs) is None
    assert draw(described, runs[:1]) == {"--norm": "layer"}


@pytest.mark.parametrize("pruner", ["asha", "median"])
def test_simulated_runs_do_a_share_of_their_work(pruner: str) -> None:
    shares = simulate_shares(night(pruner=pruner, at_once=3), [16] * 20, orders=4)
    assert all(len(each) == 20 and min(each) >= 1 / 16 and max(each) == 1 for each in shares)
    mean = sum(map(sum, shares)) / 80
    assert mean < 0.8
    assert simulate_shares(night(pruner=pruner), [1] * 20, orders=1) == [[1.0] * 20]  # never judged before their end


def test_without_optuna_the_campaign_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "find_spec", lambda _: None)
    with pytest.raises(GpufleetError, match=r"pip install 'gpufleet\[search\]'"):
        find_losers(night(), [make_run("a", 1.0)])
