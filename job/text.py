"""Writes numbers with their nouns, and times, as text; and makes text from strangers safe to print."""

from __future__ import annotations

import re
from datetime import UTC, datetime

# Control characters except line feed and tab, marks that change the direction of reading, and halves of surrogate
# pairs.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def counted(number: object, noun: str) -> str:
    """`1 node-hour`, `2.5 node-hours`, `8 processes`."""
    many = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if str(number) == '1' else many}"


def stamp(moment: datetime) -> str:
    """The time as AWS writes it: in UTC, with whole seconds and Z."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def printable(text: str) -> str:
    """The text, in which characters that a terminal would obey are replaced by escapes. A lone carriage return ends a
    line.
    """
    lines = text.replace("\r\n", "\n").replace("\r", "\n")
    return _OBEYED.sub(lambda match: match[0].encode("unicode_escape").decode(), lines)
