"""All errors that users can act on, as one tree.

GpufleetError                  shown to the user without a traceback; exit code 2
├── DefinitionError            the definition file is wrong; lists all problems
├── PriceMissing               a line of the bill has no price
└── AwsRefused                 AWS refused, or something in the account is missing
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from gpufleet.job.text import counted

SHOWN = 20  # at most this many problems of a file are printed; of the others, only the number is


def short(text: str) -> str:
    """The text, cut to 100 characters for a message, because a line of a file may have any length."""
    return text if len(text) <= 100 else f"{text[:97]}..."


class BeforeLaunch(str):
    """A warning about something to do before `pulumi up`. Other warnings are only worth knowing."""

    __slots__ = ()


class GpufleetError(Exception):
    """A mistake or a refusal that the user can act on. The message says where the mistake is, what it is, what is
    allowed, and what to do.
    """


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One problem of a definition file."""

    path: str  # such as fleet.instance_types[0]
    value: str  # the value as written in the file
    allowed: str  # the allowed values
    hint: str = ""  # the nearest valid name, or what to do
    line: int | None = None  # the line in the definition file, if known
    unknown_key: bool = False  # whether `value` is an unknown key

    def __str__(self) -> str:
        where = f"line {self.line}, {short(self.path)}" if self.line else short(self.path)
        wrong = f"{short(self.value)!r} is not accepted" if self.value else "missing"
        wrong = "unknown key" if self.unknown_key else wrong
        if self.hint and self.unknown_key:  # the hint comes before the long list of known keys
            return f"{where}: {wrong}. {self.hint} Allowed: {self.allowed}."
        hint = f" {self.hint}" if self.hint else ""
        return f"{where}: {wrong}; allowed: {self.allowed}.{hint}"


def in_order(problems: list[Problem]) -> list[Problem]:
    """The problems by line; if several forms of the file refuse the same value, only the problem of the first form."""
    first: dict[tuple[object, ...], Problem] = {}
    for problem in problems:
        first.setdefault((problem.path, problem.line, problem.value), problem)
    return sorted(first.values(), key=lambda problem: problem.line or 0)


def of_form(section: str, problems: list[Problem]) -> list[Problem]:
    """The problems of the file with the values of `section`. If the text of a problem is outside of this section, the
    problem names the section.
    """
    return [
        problem
        if problem.path.startswith(f"{section}.")
        else replace(problem, allowed=f"{problem.allowed} (with {section} laid over)")
        for problem in problems
    ]


class DefinitionError(GpufleetError):
    """The definition file is wrong. The error has all its problems, in the file's order."""

    def __init__(self, source: str, problems: Sequence[Problem]) -> None:
        self.source = source
        self.problems = tuple(problems)
        count = counted(len(self.problems), "problem")
        more = [f"  and {len(self.problems) - SHOWN} more"] if len(self.problems) > SHOWN else []
        super().__init__("\n".join([f"{source}: {count}", *(f"  - {p}" for p in self.problems[:SHOWN]), *more]))


class PriceMissing(GpufleetError):
    """A line of the bill has no price in the catalog."""


class AwsRefused(GpufleetError):
    """AWS refused, or something that a run needs does not exist. The message says what, and what to do about it."""
