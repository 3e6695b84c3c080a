"""Numbers with their nouns, for people."""

from __future__ import annotations


def counted(number: object, noun: str) -> str:
    """`1 node-hour`, `2.5 node-hours`, `8 processes`."""
    many = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if str(number) == '1' else many}"
