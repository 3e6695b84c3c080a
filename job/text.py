"""Numbers with their nouns and moments, as text."""

from __future__ import annotations

from datetime import UTC, datetime


def counted(number: object, noun: str) -> str:
    """`1 node-hour`, `2.5 node-hours`, `8 processes`."""
    many = "es" if noun.endswith("s") else "s"
    return f"{number} {noun}{'' if str(number) == '1' else many}"


def stamp(moment: datetime) -> str:
    """As AWS writes it: UTC, whole seconds, Z."""
    return moment.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
