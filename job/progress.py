"""Reports how much of a long piece of work is done. The code that does the work reports it, and commands show it
(infra/progress.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

Advance = Callable[[int], None]


class Gauge(Protocol):
    """Shows one piece of work."""

    def advance(self, amount: int) -> None: ...
    def close(self) -> None: ...


# The arguments are: what is done, its amount (None if unknown), and the unit of the amount ("B" for bytes).
Show = Callable[[str, int | None, str], Gauge | None]
_show: list[Show] = []  # the last entry shows the work


@contextmanager
def shown_by(show: Show) -> Iterator[None]:
    """A context in which `show` shows the work."""
    _show.append(show)
    try:
        yield
    finally:
        _show.remove(show)


@contextmanager
def shown(label: str, total: int | None, unit: str = "B") -> Iterator[Advance]:
    """A context with a function that must be called with each amount that is done. Work inside of other work is not
    shown separately.
    """
    meter = _show[-1](label, total, unit) if _show else None
    if meter is None:
        yield _unseen
        return
    with shown_by(lambda name, total, unit: None):
        try:
            yield meter.advance
        finally:
            meter.close()


def _unseen(amount: int) -> None:
    """Shows nothing."""
