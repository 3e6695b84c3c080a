"""Other ways to run the same work, in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet._bill import Figures, in_numbers
from gpufleet.infra.compare import columns, plot
from gpufleet.infra.compare import comparison as _comparison
from gpufleet.infra.compare.columns import sheet
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.show import html

SHOWN = 40  # rows of a table


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to do a piece of work: a scenario of the file, or an instance type and capacity for the same work."""

    scenario: str  # every scenario with this work
    instance_type: str
    capacity: str  # spot or on-demand
    region: str
    nodes: int
    gpus_used: int  # GPUs used, on all nodes together
    usd: Figures | None  # USD to finish, with everything in the bill; None if unknown, for the reason in `why`
    hours: Figures | None  # node-hours
    wall_hours: Figures | None  # hours by the clock, with waits for capacity
    late: float  # probability of missing the deadline
    over_limit: bool  # whether p90 passes limits.max_usd or limits.max_hours
    runnable: bool  # whether the option could be run without a change
    measured: bool  # whether its speed was measured; if not, it is assumed
    why: str  # why the option cannot be run, or is not the first one
    _row: Row = field(repr=False, compare=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Frontier:
    """The options that no other option beats in both mean USD and hours. A notebook shows it as a picture."""

    options: tuple[Option, ...]
    title: str
    _others: tuple[Option, ...] = field(repr=False, compare=False)

    def save(self, path: Path | str) -> None:
        """Draws USD against hours to a .png or .svg file. Raises OSError; GpufleetError if matplotlib is missing."""
        if Path(path).suffix not in plot.KINDS:
            raise GpufleetError(f"{path}: the file's name must end in one of {', '.join(plot.KINDS)}")
        Path(path).write_bytes(self._drawn(Path(path).suffix))

    def _repr_png_(self) -> bytes:
        return self._drawn(".png")

    def _drawn(self, kind: str) -> bytes:
        rows, edge = ([option._row for option in some] for some in (self._others, self.options))
        return plot.drawn(rows, edge, self.title, kind)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """A file's scenarios, and every instance type for their work, the cheapest mean first. A notebook shows a table."""

    stack: str
    region: str
    scenario: str  # the scenario whose work is compared
    scenarios: tuple[Option, ...]  # the scenarios of the file, in its order
    options: tuple[Option, ...]  # options in the order of their ranking
    frontier: Frontier
    runnable: bool  # whether any option could be run in time

    def _repr_html_(self) -> str:
        able = [option for option in self.options if option.runnable]
        edge = [option._row for option in self.frontier.options]
        options_table = sheet([option._row for option in able[:SHOWN]], columns.NOTEBOOK, edge)
        more, other = max(0, len(able) - SHOWN), len(self.options) - len(able)
        notes = [
            "* no other option needs both fewer mean dollars and fewer hours by the clock.",
            f"`options` has {more} more that can be run, and {other} that cannot; their `why` has the reason.",
        ]
        caption = f"{self.stack} in {self.region}: USD to finish"
        return html.table(options_table, caption=caption) + "".join(map(html.paragraph, notes))


def comparison_in_numbers(comparison: _comparison.Comparison) -> Comparison:
    """The public form of a comparison."""
    options = {id(row): _option(row) for row in (*comparison.listed, *comparison.rows)}
    own = comparison.own_rows
    return in_numbers(
        Comparison,
        comparison,
        stack=comparison.definition.name,
        region=comparison.definition.fleet.region,
        scenarios=_options_of(comparison.listed, options),
        options=_options_of(comparison.rows, options),
        frontier=Frontier(
            options=_options_of(comparison.own_frontier, options),
            title=comparison.title,
            _others=_options_of(own, options),
        ),
    )


def _options_of(rows: Sequence[Row], options: dict[int, Option]) -> tuple[Option, ...]:
    return tuple(options[id(row)] for row in rows)


def _option(row: Row) -> Option:
    known = {column.key: column.value(row) for column in columns.FIGURES}
    known |= {"instance_type": row.type, "runnable": row.ranked, "measured": row.basis == "measured"}
    return in_numbers(Option, row, **known | {"why": row.reason or row.lost, "_row": row})
