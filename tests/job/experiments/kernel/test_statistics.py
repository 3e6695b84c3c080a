"""pass@k, fast_p, intervals, and the curriculum, against figures worked out by hand."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.experiments.kernel.judge import curriculum, figures
from gpufleet.job.experiments.kernel.judge.funnel import digest
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.statistics import (
    fast_p,
    interval,
    paired_interval,
    pass_at_k,
    share_interval,
)
from gpufleet.job.experiments.kernel.judge.verdict import Course, Verdict
from gpufleet.job.ledger import Ledger


def test_pass_at_k_is_the_hand_computed_chance() -> None:
    # Two of ten correct: 1 - C(8,1)/C(10,1) = 0.2; for five drawn 1 - C(8,5)/C(10,5) = 1 - 56/252.
    assert pass_at_k([(10, 2)], 1) == pytest.approx(0.2)
    assert pass_at_k([(10, 2)], 5) == pytest.approx(1 - 56 / 252)
    assert pass_at_k([(10, 2)], 10) == 1.0
    # Tasks with 0, 1 and 4 of four: (0 + 1/4 + 1) / 3; for two drawn (0 + (1 - 3/6) + 1) / 3.
    assert pass_at_k([(4, 0), (4, 1), (4, 4)], 1) == pytest.approx(5 / 12)
    assert pass_at_k([(4, 0), (4, 1), (4, 4)], 2) == pytest.approx(0.5)


def test_pass_at_k_needs_k_candidates_of_every_task() -> None:
    assert pass_at_k([(10, 2), (9, 9)], 10) is None
    assert pass_at_k([], 1) is None


def test_fast_p_counts_correct_and_faster_than_p() -> None:
    speedups = [[1.1, 1.3, None, 0.5], [1.0, 1.2, 1.21, None]]
    # Above 1.0: 2 of 4 and 2 of 4; above 1.2: 1 of 4 and 1 of 4. Exactly p is not faster.
    assert fast_p(speedups, 1.0) == pytest.approx(0.5)
    assert fast_p(speedups, 1.2) == pytest.approx(0.25)
    assert fast_p([], 1.0) is None
    assert fast_p([[2.0], []], 1.0) is None  # a task without candidates


def test_the_interval_holds_the_mean_and_is_a_function_of_the_seed() -> None:
    values = [0.0, 0.1, 0.2, 0.5, 0.9] * 4
    low, high = interval(values, seed=1)
    assert low < 0.34 < high
    assert high - low == pytest.approx(4 * 0.3261 / 20**0.5, rel=0.15)  # 1.96 standard errors to each side
    assert interval(values, seed=1) == (low, high)
    assert interval([-value for value in values], seed=1) == (-high, -low)  # as much is cut off above as below
    assert interval([0.3] * 5, seed=1) == pytest.approx((0.3, 0.3))
    with pytest.raises(ValueError, match="no tasks"):
        interval([], seed=1)


def test_none_correct_is_no_certainty_and_tasks_that_differ_are_worth_less() -> None:
    # Wilson by hand, z^2 = 3.8415: none of 20 is at most z^2 / (20 + z^2); half of 40 is 1/2 -+ z / 2 / sqrt(40 + z^2).
    assert share_interval([(10, 0)] * 20) == pytest.approx((0.0, 0.16113), abs=1e-5)
    assert share_interval([(10, 10)] * 20) == pytest.approx((1 - 0.16113, 1.0), abs=1e-5)
    assert share_interval([(2, 1)] * 20) == pytest.approx((0.5 - 0.14801, 0.5 + 0.14801), abs=1e-5)
    # All of ten tasks and none of ten: the 200 are worth 19, and what 20 tasks tell of that (1.9600 / 2.0930)^2 of it.
    assert share_interval([(10, 0), (10, 10)] * 10) == pytest.approx((0.5 - 0.21643, 0.5 + 0.21643), abs=1e-4)
    # Four tasks tell less: of 3 left (1.9600 / 3.1824)^2.
    assert share_interval([(10, 0), (10, 10)] * 2) == pytest.approx((0.5 - 0.43917, 0.5 + 0.43917), abs=2e-4)
    # Tasks more alike than chance would have them are worth no more than the 200 candidates there are.
    assert share_interval([(10, 5), (10, 6)] * 10) == pytest.approx((0.480756, 0.617365), abs=1e-5)
    assert share_interval([(5, 3)]) == share_interval([(1000, 600)])
    with pytest.raises(ValueError, match="no tasks"):
        share_interval([])


def test_pairing_tasks_narrows_the_interval_of_a_difference() -> None:
    one = [0.0, 0.5, 1.0, 0.2, 0.8]
    other = [value + 0.1 for value in one]
    low, high = paired_interval(other, [*one[:4], 0.7], seed=1)
    assert (low, high) == pytest.approx((0.1, 0.16))  # three of five draws, at most, are the last
    with pytest.raises(ValueError, match="shorter"):
        paired_interval(one, other[:3], seed=1)


def test_tasks_that_differ_alike_are_no_certainty() -> None:
    # None of twenty shows another difference: at most z^2 / (20 + z^2) = 0.16113 of all tasks do, by one at most.
    assert paired_interval([0.0] * 20, [0.0] * 20, seed=1) == pytest.approx((-0.16113, 0.16113), abs=1e-5)
    one = [0.1, 0.3, 0.7, 0.9] * 5
    alike = paired_interval([value + 0.1 for value in one], one, seed=1)
    assert alike == pytest.approx((0.1 - 0.16113, 0.1 + 0.16113), abs=1e-5)
    assert paired_interval([1.0], [0.0], seed=1) == pytest.approx((1 - 0.79346, 1.0), abs=1e-5)


def verdict(candidate: str, stage: int, *, task: str = "relu", **more: object) -> Verdict:
    made = Verdict(
        row="full",
        candidate=candidate,
        task=task,
        origin="generated",
        label=candidate,
        source_sha256="",
        passed=stage == 6,
        stage=stage,
        reason="",
        seconds={"rules": 0.5, "compile": 1.5},
        cpu_s=0.0,
        isolated=True,
    )
    return replace(made, **more)  # type: ignore[arg-type]


def test_the_figures_of_a_training_by_hand() -> None:
    judged = [
        verdict("a", 6, speedup=1.5),
        verdict("b", 3, speedup=2.0),  # wrong, however fast
        verdict("c", 6, task="add"),  # untimed
        verdict("d", 6, task="add", speedup=1.1),
    ]
    found = figures.figures("sft", judged)
    assert (found["candidates"], found["tasks"]) == (4, 2)
    assert (found["pass@1"], found["pass@10"]) == (0.75, None)
    assert (found["fast_1"], found["fast_1.2"]) == (0.5, 0.25)
    assert (found["untimed"], found["seconds_per_candidate"]) == (1, 2.0)
    assert figures.figures("sft", judged[::-1]) == found  # in whatever order the verdicts come
    assert [" ".join(line.split()) for line in figures.text([found])] == [
        "row pass@1 gained candidates pass@1 pass@10 fast 1.0 fast 1.2 s/candidate untimed",
        "sft - 4 0.750 - 0.500 0.250 2.000 1",
    ]


def test_half_mastered_tasks_are_drawn_three_times_as_often() -> None:
    names = [{"never"}, {"half"}, {"always"}, {"unknown"}] * 1500
    weights = curriculum.weights(names, {"never": 0.1, "half": 0.5, "always": 0.9})
    drawn = Counter(min(names[index]) for index in curriculum.order(weights, seed=1, epoch=1))
    assert drawn["half"] == pytest.approx(3000, rel=0.1)
    assert all(drawn[name] == pytest.approx(1000, rel=0.15) for name in ("never", "always", "unknown"))
    assert curriculum.weights([{"a"}, {"b"}], {"a": 0.2, "b": 0.8}) == [3.0, 3.0]  # the ends belong to it
    assert curriculum.weights([{"a", "b"}, set()], {"a": 0.0, "b": 0.5}) == [3.0, 1.0]  # one of several is enough


def test_the_drawn_order_is_a_function_of_seed_and_epoch_with_the_heavier_first() -> None:
    weights = [1.0, 3.0] * 10
    drawn = curriculum.order(weights, seed=1, epoch=1)
    assert drawn == curriculum.order(weights, seed=1, epoch=1)
    assert drawn not in (curriculum.order(weights, seed=2, epoch=1), curriculum.order(weights, seed=1, epoch=2))
    assert [weights[index] for index in drawn] == sorted((weights[index] for index in drawn), reverse=True)


def test_two_trainings_are_compared_task_by_task() -> None:
    def judged(*stages: tuple[int, int]) -> list[Verdict]:
        """Two candidates of each of two tasks."""
        return [
            verdict(f"{task} {number}", stage, task=task, speedup=1.1 if stage == 6 else None)
            for task, pair in zip(("add", "relu"), stages, strict=True)
            for number, stage in enumerate(pair)
        ]

    table = figures.compared({"uniform": judged((3, 6), (3, 3)), "adaptive": judged((6, 6), (6, 3))}, seed=1)
    assert [(row["row"], row["pass@1"], row["fast_1"], row["fast_1.2"]) for row in table] == [
        ("uniform", 0.25, 0.25, 0.0),
        ("adaptive", 0.75, 0.75, 0.0),
    ]
    assert set(table[0]["minus_first"].values()) == {None}
    unseen = 0.65762  # both tasks gain one half, and none shows what a third may: z^2 / (2 + z^2)
    gained = table[1]["minus_first"]
    assert gained["pass@1"] == gained["fast_1"] == pytest.approx((0.5 - unseen, 1.0), abs=1e-5)
    assert (gained["pass@10"], gained["fast_1.2"]) == (None, pytest.approx((-unseen, unseen), abs=1e-5))
    low, high = table[1]["pass@1_interval"]
    assert (low, high) == share_interval([(2, 2), (2, 1)])
    said = [" ".join(line.split()) for line in figures.text(table)]
    assert said[0] == "row pass@1 gained candidates pass@1 pass@10 fast 1.0 fast 1.2 s/candidate untimed"
    assert said[1] == "uniform - 4 0.250 - 0.250 0.000 2.000 0"
    assert said[2] == "adaptive -0.158 to +1.000 4 0.750 - 0.750 0.000 2.000 0"


def test_verdicts_of_another_source_under_a_name_are_not_counted_as_judged(tmp_path: Path) -> None:
    """An evaluation that is made anew gives its candidates the names of the one before."""

    class Judge:
        def all(self, candidates: list[Candidate], done: Any, check: Any) -> None:
            for one in candidates:
                done(Course(one, digest(one.source), stage=1).verdict("nothing"))

    said: list[str] = []
    ledger = Ledger(tmp_path / "verdicts.jsonl")
    for text in ("one", "two"):
        tried = [
            Candidate(name=str(number), task="relu", source=text * number, origin="generated", label="")
            for number in (1, 2)
        ]
        figures.verify(Judge(), tried, ledger, check=lambda: None, say=said.append)  # type: ignore[arg-type]
    assert said == ["funnel: 2 of 2 judged"] * 2
