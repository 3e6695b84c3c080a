"""What stands in the columns of a comparison, each said once: tables on a terminal, on a page and in a notebook choose
from them by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from decimal import Decimal
from typing import NamedTuple

from gpufleet.infra.bill.side import Quantiles
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.text import hours, table


class Sheet(NamedTuple):
    """A table: its columns by name, their headings, the rows, and which columns stand flush right."""

    names: tuple[str, ...]
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    right: tuple[int, ...]

    def text(self, *spare: str) -> Iterator[str]:
        """Its lines; without the first columns of `spare` where the terminal is too narrow for all."""
        return table(self.heads, self.rows, right=self.right, spare=[self.names.index(name) for name in spare])


def sheet(rows: Sequence[Row], *names: str, edge: Sequence[Row] = ()) -> Sheet:
    """The columns of these names for the rows; `*` marks those of the frontier, `edge`."""
    marked = {id(row) for row in edge}
    cells = [
        tuple(("*" if id(row) in marked else "") if name == "*" else COLUMNS[name][1](row) for name in names)
        for row in rows
    ]
    heads = tuple("" if name == "*" else COLUMNS[name][0] for name in names)
    return Sheet(names, heads, cells, tuple(at for at, name in enumerate(names) if name not in LEFT))


def number(value: Decimal | None) -> str:
    """Two decimals, or two digits of what is small; `-` for what is not known."""
    return "-" if value is None else f"{value:.2f}" if value >= Decimal("0.1") else f"{float(value):.2g}"


def number_of_hours(value: float | None) -> str:
    """Two decimals, or two digits of what is small; `-` for what is not known."""
    return "-" if value is None else hours(value)


def marks(row: Row) -> Iterator[str]:
    """What speaks against a row."""
    if row.reference:
        yield "reference"
        return
    if not row.launchable:
        yield "NOT LAUNCHABLE"
    if not row.fits:
        yield "DOES NOT FIT"
    if row.over_limit:
        yield "over limit"
    if row.late >= 0.005:
        yield f"late in {row.late:.0%}"


def _figure(values: Quantiles | None, name: str) -> str:
    return "-" if values is None else f"{getattr(values, name):.2f}"


LEFT = ("*", "scenario", "batch", "region", "type", "GPU", "capacity", "basis", "marks", "lost", "why", "nearest")
COLUMNS: dict[str, tuple[str, Callable[[Row], str]]] = {
    "scenario": ("scenario", lambda row: row.scenario),
    "batch": ("batch", lambda row: row.scenario),
    "region": ("region", lambda row: row.region),
    "type": ("type", lambda row: row.place),
    "GPU": ("GPU", lambda row: row.gpus),
    "used": ("used", lambda row: str(row.ranks) if row.ranks else "-"),
    "capacity": ("capacity", lambda row: "" if row.reference else row.capacity),
    "steps": ("steps", lambda row: f"{row.steps:,}"),
    "claim h": ("claim h", lambda row: number(row.claim.hours)),
    "claim USD": ("USD", lambda row: number(row.claim.usd)),
    "h p50": ("h p50", lambda row: _figure(row.hours, "p50")),
    "h p90": ("h p90", lambda row: _figure(row.hours, "p90")),
    "wall p50": ("hours p50", lambda row: _figure(row.wall_hours, "p50")),
    "wall p90": ("p90", lambda row: _figure(row.wall_hours, "p90")),
    "USD p50": ("USD p50", lambda row: _figure(row.usd, "p50")),
    "USD p90": ("USD p90", lambda row: _figure(row.usd, "p90")),
    "mean": ("mean", lambda row: _figure(row.usd, "mean")),
    "less": ("less", lambda row: "-" if row.cheaper is None else f"{row.cheaper:.0%}"),
    "dear": ("dear", lambda row: number(row.dearest_usd)),
    "free": ("free", lambda row: "-" if row.free_usd is None else f"{row.free_usd:.2f}"),
    "stops": ("stops", lambda row: "-" if row.interruptions is None else f"{row.interruptions.p50:.0f}"),
    "inputs": ("inputs", lambda row: f"{row.inputs_usd:.2f}" if row.inputs_usd else "-"),
    "basis": ("basis", lambda row: row.basis),
    "marks": ("", lambda row: ", ".join(marks(row))),
    "lost": ("", lambda row: "over a limit of the file" if row.over_limit else row.lost),
    "why": ("why", lambda row: row.why),
    "nearest": ("what would help", lambda row: row.nearest),
}
