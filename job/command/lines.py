"""Reads one line of a command's output: the position of the training, and metric values. The definition's regular
expressions match a little more than they say: numbers may have thousands separators, losses may be nan or inf, totals
may be unknown (`25/?`). progress.py decides which of a script's counters is that of the training.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from gpufleet.job.kind.command import Unit

# Control sequences of a terminal: colours, cursor movements, titles, single control characters except tab.
CONTROL = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])|[\x00-\x08\x0a-\x1f\x7f]")
COUNTS, TOTALS, LOSSES = ("step", "epoch", "batch"), ("total", "batches"), ("loss", "val")
_THOUSANDS = r"[0-9]{1,3}(?:[,_'’][0-9]{3})+(?![0-9])"
_BAR = re.compile(r"(?P<words>[^|]*?)[0-9]+(?:\.[0-9]+)?%\|")  # as tqdm draws it
# Words in front of a progress bar. The words of the first pattern mark a bar of the training, those of the second
# pattern a bar of other work.
_TRAINS = re.compile(r"\b(steps?|epochs?|iter(ation)?s?|train\w*|batch(es)?|updates?|fine-?tun\w*)\b", re.IGNORECASE)
_ELSE = re.compile(
    r"\b(map|filter|load|download|fetch|tokeni[sz]|resolv|generat|extract|prepar|process|cach|shard|upload|sav|check|data"
    r"|eval|val\b|valid|test|predict|sampl|infer|sanity|comput|encod|decod|pack|shuffl|read|scan|index|convert|split)\w*",
    re.IGNORECASE,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The training's position in one line; a field is None if the line does not show it."""

    step: int | None = None
    epoch: int | None = None
    batch: int | None = None
    batches: int | None = None  # batches that are done in this epoch

    @classmethod
    def from_json(cls, tree: Any) -> Position | None:
        """The position from an object that `asdict` has made; None for any other value."""
        if not isinstance(tree, dict) or not set(tree) <= set(cls.__slots__):
            return None
        return cls(**tree) if all(count is None or type(count) is int for count in tree.values()) else None

    @property
    def is_beginning(self) -> bool:
        """Whether the count is at its beginning.

        After a resume, a bar may show the beginning before it jumps to the restored position.
        """
        counter = self.step if self.step is not None else self.batch
        return counter is not None and counter <= 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Counting:
    """How the run numbers its steps and epochs, as far as the lines have shown. This numbering is kept with each
    checkpoint.
    """

    unit: Unit
    batches: int | None = None  # steps in a whole epoch
    base: int | None = None  # the number of the first epoch, 0 or 1
    first: Position | None = None  # the first position in a start without a checkpoint
    newest: Position | None = None  # the last position before the checkpoint
    interval: int | None = None  # the usual number of steps between two lines

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, tree: Mapping[str, Any], unit: Unit, batches: int | None) -> Counting:
        """The counting that a checkpoint has kept. `batches`: the number of batches in an epoch, if the definition
        states it.
        """
        numbers = ("batches", "base", "interval")
        stored = {key: value if type(value := tree.get(key)) is int else None for key in numbers}
        return cls(
            unit=unit,
            batches=batches or stored["batches"],
            base=stored["base"],
            interval=stored["interval"],
            first=Position.from_json(tree.get("first")),
            newest=Position.from_json(tree.get("newest")),
        )

    def position(self, place: Position) -> int | None:
        """How many of `unit` are done at a position; None if that cannot be computed."""
        if self.unit == "step":
            if place.step is not None or place.epoch is None or self.batches is None:
                return place.step
            whole = place.epoch - (self.base or 0)
            return (whole + 1) * self.batches if place.batch is None else whole * self.batches + place.batch
        if place.epoch is None:
            return None if place.step is None or self.batches is None else place.step // self.batches
        is_over = place.batch is None or (self.batches is not None and place.batch >= self.batches)
        return place.epoch - (1 if self.base is None else self.base) + is_over


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputLine:
    """The content of a line. `total`: the total of the line's counter. `words`: the words in front of its
    progress bar.
    """

    text: str
    place: Position | None
    total: int | None
    figures: Mapping[str, float]
    is_other: bool = False  # whether the bar is that of something other than training
    is_doubtful: bool = False  # whether the words before the bar do not show what the bar is about

    @classmethod
    def from_groups(cls, groups: Mapping[str, Any], text: str = "") -> OutputLine:
        """The line from the groups of a pattern, or from the keys of a JSON line."""
        numbers = {name: value for name in groups if (value := number(groups[name])) is not None}
        whole = {
            name: int(value)
            for name in (*COUNTS, *TOTALS)
            if (value := numbers.pop(name, math.nan)) == value and math.isfinite(value)
        }
        total = whole.pop("total", None)
        place = Position(**whole) if whole.keys() & {"step", "epoch"} else None
        words = bar["words"] if (bar := _BAR.search(text)) else ""
        trains, other = bool(_TRAINS.search(words)), bool(_ELSE.search(words))
        return cls(
            text=text,
            place=place,
            total=total,
            figures=numbers,
            is_other=other,
            is_doubtful=not trains and bool(re.search(r"[^\W\d_]{3}", words)),
        )


class Patterns:
    """The regular expressions of a definition."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._patterns = [widened(pattern) for pattern in patterns]

    def read(self, text: str) -> OutputLine | None:
        """The content of a line without its control sequences; None if no pattern matches."""
        groups: dict[str, str] = {}
        for pattern in self._patterns:
            if (match := pattern.search(text)) is not None:
                groups |= {name: value for name, value in match.groupdict().items() if value is not None}
        return OutputLine.from_groups(groups, text) if groups else None


def widened(pattern: str) -> re.Pattern[str]:
    """The pattern with groups that match not only plain digits, but also the other forms of numbers that scripts write.
    Raises re.error.
    """
    re.compile(pattern)
    for names, more in (
        (COUNTS, _THOUSANDS),
        (TOTALS, rf"\?|{_THOUSANDS}"),
        (LOSSES, r"[-+]?(?i:nan|inf(?:inity)?)\b"),
    ):
        for name in names:
            pattern = _with_alternative(pattern, name, more)
    return re.compile(pattern)


def _with_alternative(pattern: str, name: str, more: str) -> str:
    """The pattern in which the group `name` also matches `more`, unless a comma follows the group, as in CSV."""
    start = pattern.find(mark := f"(?P<{name}>")
    if start < 0:
        return pattern
    inner, depth, place, in_class = start + len(mark), 1, start + len(mark), False
    while depth:
        letter = pattern[place]
        if letter == "\\":
            place += 1
        elif in_class:
            in_class = letter != "]" or pattern[place - 1] in "[^"
        elif letter == "[":
            in_class = True
        else:
            depth += (letter == "(") - (letter == ")")
        place += 1
    if pattern[place : place + 1] == "," and "[0-9]{3}" in more:
        return pattern
    return f"{pattern[:inner]}{more}|{pattern[inner:]}"


def number(value: Any) -> float | None:
    """The number in a text or JSON value, nan and inf included; None for anything else."""
    if isinstance(value, bool):
        return None
    try:
        made = float(re.sub(r"(?<=[0-9])[,_'’](?=[0-9])", "", value) if isinstance(value, str) else value)
    except (TypeError, ValueError, OverflowError):  # a whole number in JSON may be too long for a float
        return None
    return made if not math.isfinite(made) or abs(made) < 1e15 else None
