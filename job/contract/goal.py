"""Checks the section `goal` of a definition: whether a run has cost, taken and reached what it was meant to. A result
is a value that the run has written: in results.json at its path (`generated/pass@1`, `phases/0/val_loss`), or, if it is
not there, the last value with this name in metrics.jsonl.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import reduce
from pathlib import Path
from typing import Any

from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import Amount, DoubtError
from gpufleet.job.contract.workdir import METRICS, RESULTS

USD, HOURS = "usd", "hours"
# If one of these words is in the name of a metric, a lower value is better.
LESS_IS_BETTER = {USD, HOURS, "loss", "perplexity", "ppl", "error", "wer", "cer", "mse", "rmse", "mae", "seconds", "ms"}
Results = Callable[[str], Decimal | None]  # returns the value of a metric by its name; None if the run has written none


@dataclass(frozen=True, kw_only=True, slots=True)
class Grade:
    """One goal and its result. `reached` is None if the run has written no such value."""

    name: str
    wanted: Amount
    reached: Amount | None = None
    met: bool

    @property
    def text(self) -> str:
        """The goal, whether it was met, and by how much."""
        if self.reached is None:
            verdict = "missed: the run left no such value"
        elif self.met:
            verdict = f"met with {shown(self.reached)}"
        elif is_met(self.name, self.wanted, self.reached):
            verdict = f"missed: the run ended with {shown(self.reached)} before its work was done"
        else:
            verdict = f"missed by {shown(abs(self.wanted - self.reached))}: {shown(self.reached)}"
        return f"{goal_text(self.name, self.wanted)}: {verdict}"

    def to_json(self) -> dict[str, Any]:
        reached = None if self.reached is None else str(self.reached)
        return {"name": self.name, "wanted": str(self.wanted), "reached": reached, "met": self.met}


def grade(
    goal: Mapping[str, Decimal], *, usd: Decimal, hours: Decimal, done: bool, results: Results
) -> tuple[Grade, ...]:
    """The grade of each goal. Only a run whose work is `done` can meet a goal of money or hours."""
    spent = {USD: usd, HOURS: hours}
    grades = []
    for name, wanted in goal.items():
        reached = spent[name] if name in spent else results(name)
        met = reached is not None and is_met(name, wanted, reached) and (done or name not in spent)
        grades.append(Grade(name=name, wanted=wanted, reached=reached, met=met))
    return tuple(grades)


def is_met(name: str, wanted: Decimal, reached: Decimal) -> bool:
    """Whether the value is at least as good as the goal."""
    return reached <= wanted if is_at_most(name) else reached >= wanted


def is_at_most(name: str) -> bool:
    """Whether a goal of this name is an upper bound: money, hours, a loss, an error, a time."""
    return bool(LESS_IS_BETTER & set(name.rpartition("/")[2].lower().split("_")))


def goal_text(name: str, figure: Decimal) -> str:
    """The goal in words: `at most 60 USD`, `val_loss at most 0.25`."""
    bound, units = f"{'at most' if is_at_most(name) else 'at least'} {shown(figure)}", {USD: "USD", HOURS: "hours"}
    return f"{bound} {units[name]}" if name in units else f"{name} {bound}"


def shown(figure: Decimal) -> str:
    """The value with at most four decimals, without zeros at its end."""
    text = f"{figure:.4f}"
    return text.rstrip("0").rstrip(".")


def results_in(folder: Path) -> Results:
    """A function that returns a result by its name, from the files of a work folder or of downloaded results."""

    from gpufleet.job.contract import metrics  # imported here: a bill, which only names its goals, reads no metrics

    def content(name: str) -> bytes:
        path = folder / name
        return path.read_bytes() if path.is_file() else b""

    lines = metrics.records(content(METRICS).splitlines())

    def find(name: str) -> Decimal | None:
        figure: Any = None
        try:
            figure = reduce(_part, name.split("/"), reading.parse(content(RESULTS)))
        except (DoubtError, LookupError, TypeError, ValueError):
            figure = next((line[name] for line in reversed(lines) if line.get(name) is not None), None)
        try:
            return Decimal(json.dumps(reading.number(figure)))
        except DoubtError:
            return None

    return find


def _part(tree: Any, key: str) -> Any:
    return tree[int(key)] if isinstance(tree, list) else tree[key]
