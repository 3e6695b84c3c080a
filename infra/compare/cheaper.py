"""Lists the options that would do a bill's work for less, among all other types of the catalog, on spot and on demand.
The bill prices the fleet in the file; this module names types to list there instead. `gpufleet compare` shows all
options.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from decimal import Decimal
from operator import attrgetter
from pathlib import Path
from typing import Any

from gpufleet.infra import text
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.project import bill_basis, bill_of
from gpufleet.infra.bill.side import UNBOUND
from gpufleet.infra.catalog import Catalog
from gpufleet.infra.compare import columns, ranking
from gpufleet.infra.compare.columns import sheet
from gpufleet.infra.compare.rows import Row, Study, filled
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence.observations import observations
from gpufleet.infra.market import WAYS
from gpufleet.infra.review import policy
from gpufleet.infra.risk import simulation
from gpufleet.infra.risk.hazard import learn
from gpufleet.infra.show.sheet import plain
from gpufleet.job.text import counted

SHOWN = 3
REFINED = 6  # rows that are simulated with more runs, so that noise neither adds an option to the list nor hides one
# after this many nodes the rest of a simulated run is extrapolated; this changes the mean by less than ranking.LEAST
ATTEMPTS = 64
SURE = 0.8  # an option must be cheaper in at least this share of runs
CENT = Decimal("0.01")
LATE = 0.1  # at most this share of runs may miss the deadline, as for other limits


@dataclass(frozen=True, kw_only=True, slots=True)
class Cheaper:
    """Options that cost less than the bill in at least SURE of the runs, in the definition's region."""

    rows: tuple[Row, ...]  # the allowed options with the lowest mean, at most SHOWN
    more: int  # number of further options
    unsure: int  # number of options that have a lower mean, but are cheaper in a share of runs below SURE
    # number of cheaper options that exceed a limit or miss the deadline in more than one run in ten, or break a rule
    beyond: int
    assumed: frozenset[str]  # types of `rows` whose speed is assumed or guessed, if that of the bill is not
    command: str  # the command that shows all options
    # minutes of set-up, and the USD that half of it would save; None if these USD are too few to be shown
    half_setup: tuple[float, Decimal] | None = None

    def lines(self) -> Iterator[str]:
        """The lines of the bill's block about cheaper types."""
        yield from self._types()
        if self.half_setup is not None:
            minutes, usd = self.half_setup
            yield from text.wrap(
                f"Half the {minutes:.1f} min of set-up, by a smaller image or an AMI that holds it, takes about"
                f" {usd:.2f} USD off p50 (`gpufleet docs node`)."
            )

    @property
    def line(self) -> str:
        """The cheapest option in one line; empty if there is none."""
        for row in self.rows[:1]:
            assert row.usd is not None
            sure = "" if row.cheaper is None else f" in {row.cheaper:.0%} of runs"
            place = WAYS[row.capacity].bought
            return f"Cheaper{sure}: {row.type} {place}, about {row.usd.p50:.2f} USD; all: `{self.command}`"
        return ""

    def _types(self) -> Iterator[str]:
        beyond = f"{counted(self.beyond, 'cheaper one')} beyond a limit or rule" if self.beyond else ""
        unsure = f"{self.unsure} perhaps cheaper, in fewer than {SURE:.0%} of runs" if self.unsure else ""
        if not self.rows:
            others = "".join(f"; {note}" for note in (unsure, beyond) if note)
            yield from text.wrap(f"No other type is sure to do this work for less{others}; all: `{self.command}`.")
            return
        yield "Cheaper to finish this work; less: how likely that is:"
        assumed = [row for row in self.rows if row.type in self.assumed]
        yield from sheet(self.rows, columns.CHEAPER, assumed).text()
        if self.assumed:
            yield "* at a speed that is assumed or guessed; the bill's own is measured or declared"
        more = f"{self.more} more within the limits" if self.more else ""
        others = ", ".join(filter(None, (more, unsure, beyond)))
        yield from text.wrap(f"{f'{others}; all: ' if others else 'All: '}`{self.command}`.")

    def to_json(self) -> dict[str, Any]:
        """Keys as documented in docs/bill.md."""
        return {
            "options": [
                plain(row, "type", "capacity", "gpus", "usd", "hours", "basis")
                | {"gpus_used": row.ranks, "sure": plain(row.cheaper, digits=3)}
                for row in self.rows
            ],
            "more": self.more,
            "unsure": self.unsure,
            "beyond": self.beyond,
            "half_setup_usd": None if self.half_setup is None else float(self.half_setup[1]),
        }


def bill_and_cheaper(
    definition: StackDefinition,
    root: Path,
    catalog: Catalog,
    *,
    now: datetime,
    rules: policy.Policy | None,
    not_ready: Sequence[str] = (),
) -> tuple[Bill, Cheaper | None]:
    """The bill, and the cheaper options within the limits and the project's `rules`. Raises the errors of price()."""
    study = Study(
        catalog,
        hazards=learn(observations(root)),
        hours_left=definition.hours_left(now),
        today=now.date(),
        find_basis=lambda work, types: bill_basis(work, root, catalog, types),
    )
    bill = bill_of(definition, root, catalog, today=study.today, hazards=study.hazards, not_ready=not_ready)
    facts = policy.facts(definition, bill)
    if definition.variant.only_priced:  # the limits do not apply to a scenario that is only priced
        rules = None

    def allowed(row: Row) -> bool:
        usd_p90 = None if row.usd is None else row.usd.p90
        of_row = replace(facts, instance_types=(row.type,), capacity=row.capacity, usd_p90=usd_p90, usd_per_hour=None)
        return rules is None or not policy.broken(rules, of_row)

    return bill, cheaper(definition, bill, study, allowed=allowed)


def cheaper(
    definition: StackDefinition, bill: Bill, study: Study, *, allowed: Callable[[Row], bool] = lambda row: True
) -> Cheaper | None:
    """The cheaper options; None if the work cannot move to another type (several nodes, a paid block, a run elsewhere).
    `allowed`: whether the project's rules permit a row.
    """
    if not definition.fleet.market.moves_elsewhere or definition.variant.reference:
        return None
    if definition.variant.only_priced:  # the limits do not apply to a scenario that is only priced
        definition, study = replace(definition, limits=UNBOUND), replace(study, hours_left=None)
    mean = bill.chosen.needed_usd.mean
    below = mean - max(ranking.LEAST * mean, CENT)

    def able(rows: list[Row]) -> list[Row]:
        return sorted((row for row in rows if row.mean_usd < below), key=attrgetter("mean_usd"))

    def within_limits(row: Row) -> bool:
        return not row.over_limit and row.late <= LATE and allowed(row)

    # priced like the bill: in the most expensive zone
    options = ranking.every_option(definition, (definition,), study, below=below, likely=False)
    rows = able([row for row in options if row.ranked and not row.untried and not _listed(row, definition)])
    likely = [row for row in rows if within_limits(row)][:REFINED]
    closer = filled(likely, study.hours_left, runs=ranking.RUNS_SHOWN, attempts=ATTEMPTS)
    as_is = bill.chosen.exposure.unlimited
    halved = replace(as_is, setup_h=as_is.setup_h / 2, restart_h=as_is.restart_h / 2)
    own, quick = simulation.simulate_each([as_is, halved], runs=ranking.RUNS_SHOWN, attempts=ATTEMPTS)
    others = [row for row in rows if row not in likely]
    if others:
        (fewer,) = simulation.simulate_each([as_is], runs=ranking.RUNS_EACH, attempts=ranking.ATTEMPTS_EACH)
        others = _with_chance(others, fewer)
    rows = able([*_with_chance(closer, own), *others])
    within = [row for row in rows if within_limits(row)]
    chosen = [row for row in within if row.cheaper is not None and row.cheaper >= SURE]
    shown = tuple(chosen[:SHOWN])
    known = bill.chosen.runtime.speed in ("measured", "declared")
    return Cheaper(
        rows=shown,
        more=len(chosen) - len(shown),
        unsure=len(within) - len(chosen),
        beyond=len(rows) - len(within),
        assumed=frozenset(row.type for row in shown if known and row.basis not in ("measured", "declared")),
        command=f"gpufleet compare {definition.priced_argument}",
        half_setup=_half_setup(as_is.setup_h * 60, own, quick),
    )


def _with_chance(rows: Sequence[Row], own: simulation.SimulatedRuns) -> list[Row]:
    """The rows with their probabilities of costing less than the bill's `own` runs. Both have the same number of runs
    and the same random draws.
    """
    return [replace(row, cheaper=float((row.side.needed.usd < own.usd).mean())) for row in rows if row.side]


def _half_setup(
    minutes: float, own: simulation.SimulatedRuns, quick: simulation.SimulatedRuns
) -> tuple[float, Decimal] | None:
    """The minutes of the bill's set-up, and by how many USD p50 would fall if each set-up took half as long; None if
    this is below LEAST.
    """
    p50, less = (Decimal(simulation.quantiles(outcome.usd)[1]) for outcome in (own, quick))
    return (minutes, (p50 - less).quantize(CENT)) if p50 - less >= max(ranking.LEAST * p50, CENT) else None


def _listed(row: Row, definition: StackDefinition) -> bool:
    """Whether the fleet may already pick the row's type."""
    return row.type in definition.fleet.instance_types and definition.fleet.market.name == row.capacity
