"""What this project assumes about AWS, as rows of assumptions.yaml, and what the facts of a canary say about each
assumption. A row names one fact or one call to AWS, and what is expected of it. If the canary did not see the fact, the
result is *not met*, and never *held*.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import yaml

from gpufleet.infra.canary.observations import FlightFacts

State = Literal["held", "refuted", "not met"]
FILE = Path(__file__).with_name("assumptions.yaml")


@dataclass(frozen=True, kw_only=True, slots=True)
class Assumption:
    """One row of the file. Exactly one of `seen`, `answer` and `ask` has a value."""

    id: str
    says: str  # the assumption, as a sentence
    where: str  # the file of this project that relies on it
    source: str  # the document or observation that supports it
    seen: str = ""  # the name of a fact, whose value is compared with `expected`
    answer: str = ""  # a call (SERVICE.Operation) whose answer must have the fields `has`
    has: tuple[str, ...] = ()
    ask: str = ""  # a call (SERVICE.operation) that AWS must refuse with the code `refused`
    given: Mapping[str, Any] | None = None  # the arguments of the call in `ask`
    refused: str = ""
    expected: tuple[str, Any] = ("", None)  # the expectation's name and value

    @property
    def fact(self) -> str:
        """The name of the fact that holds the answer to `ask`; for other rows, `seen`."""
        return f"refused.{self.id}" if self.ask else self.seen


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What a canary showed about one assumption."""

    assumption: Assumption
    state: State
    expected: str
    seen: str

    def to_json(self) -> dict[str, str]:
        return {"id": self.assumption.id, "state": self.state, "expected": self.expected, "seen": self.seen}


EXPECTATIONS = ("is", "at_most", "at_least", "one_of", "like", "within")


@cache
def known() -> tuple[Assumption, ...]:
    """All assumptions, in the file's order."""
    rows = yaml.safe_load(FILE.read_text(encoding="utf-8"))
    return tuple(_assumption(row) for row in rows)


def _assumption(row: dict[str, Any]) -> Assumption:
    expectations = [(name, row.pop(name)) for name in EXPECTATIONS if name in row]
    if row.get("ask"):
        expectations.append(("is", row["refused"]))
    expected = expectations[0] if expectations else ("has", row["has"])
    return Assumption(**{**row, "has": tuple(row.get("has", ()))}, expected=expected)


def judge(facts: FlightFacts) -> list[Judgement]:
    """What the facts show about each assumption."""
    return [_judged(assumption, facts) for assumption in known()]


def _judged(assumption: Assumption, facts: FlightFacts) -> Judgement:
    how, value = assumption.expected
    if assumption.answer:
        lacking = facts.lacking(assumption.answer, list(assumption.has))
        expected = f"{assumption.answer} answers with {', '.join(assumption.has)}"
        if lacking is None:
            return Judgement(assumption=assumption, state="not met", expected=expected, seen="")
        state: State = "refuted" if lacking else "held"
        return Judgement(
            assumption=assumption,
            state=state,
            expected=expected,
            seen=f"without {', '.join(lacking)}" if lacking else "all",
        )
    values = facts.seen.get(assumption.fact, [])
    expected = f"{how.replace('_', ' ')} {value}"
    wrong = [one for one in values if not _fits(how, value, one)]
    state = "not met" if not values else "refuted" if wrong else "held"
    shown = wrong or values
    return Judgement(
        assumption=assumption, state=state, expected=expected, seen=", ".join(dict.fromkeys(map(_shown, shown)))[:300]
    )


def _fits(how: str, value: Any, seen: Any) -> bool:
    if how in ("at_most", "at_least", "within"):
        if isinstance(seen, bool) or not isinstance(seen, int | float):
            return False
        low, high = value if how == "within" else (None, value) if how == "at_most" else (value, None)
        return (low is None or seen >= low) and (high is None or seen <= high)
    if how == "like":
        return re.search(str(value), str(seen)) is not None
    return bool(seen in value) if how == "one_of" else bool(seen == value)


def _shown(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
