"""Compares the ways to run a definition file's work, with all data of its project, and ranks them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from functools import cached_property
from pathlib import Path

from gpufleet.infra.bill.project import bill_basis
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.rows import Row, Study
from gpufleet.infra.definition.loader import load_all
from gpufleet.infra.definition.model import StackDefinition, deadline_text
from gpufleet.infra.definition.scenarios import chosen
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.observations import observations
from gpufleet.infra.review import policy
from gpufleet.infra.risk import deadline
from gpufleet.infra.risk.hazard import learn


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The scenarios of a file, and every option for their work. What needs simulated runs is computed when an output
    first needs it, because an answer shows the options for one scenario's work alone.
    """

    definition: StackDefinition  # the file, or the chosen scenario; all options are compared in its region
    scenario: str  # the name of the chosen scenario; if none was chosen, of the scenario that equals the file
    compared: tuple[StackDefinition, ...]  # the scenarios for whose work there are options; empty for the file itself
    study: Study
    file: StackDefinition
    variants: tuple[StackDefinition, ...]  # all scenarios of the file, or its stages

    @cached_property
    def listed(self) -> list[Row]:
        """The file's scenarios, in order."""
        return ranking.scenarios(self.file, self.variants, self.study)

    def variant(self, name: str) -> StackDefinition:
        """The scenario of this name, or the file if it has none."""
        return next((work for work in self.variants if work.scenario == name), self.file)

    def as_listed(self, work: StackDefinition) -> Row:
        """The row of `listed` for one scenario, or for the file if it has none."""
        return ranking.scenarios(self.file, [work], self.study)[0]

    @cached_property
    def works(self) -> list[str]:
        """Every distinct piece of work, by the names of its scenarios."""
        return [names for _, names in ranking.works(self.definition, self.compared)]

    @cached_property
    def own_rows(self) -> list[Row]:
        """The ranked options for the chosen scenario's work, which an answer and a picture show."""
        return self._ranked([names for names in self.works if self.scenario in names.split(", ")])

    @cached_property
    def rows(self) -> list[Row]:
        """The ranked options for every work."""
        others = self._ranked([names for names in self.works if self.scenario not in names.split(", ")])
        return ranking.in_order(sorted([*self.own_rows, *others], key=lambda row: self.works.index(row.scenario)))

    def _ranked(self, works: list[str]) -> list[Row]:
        rows = ranking.every_option(self.definition, self.compared, self.study, only=works)
        return ranking.refined(rows, works=len(self.works), hours_left=self.study.hours_left)

    @property
    def frontier(self) -> list[Row]:
        """The options of each work that no other option beats in both mean dollars and hours."""
        return ranking.frontier(self.rows)

    @property
    def own_frontier(self) -> list[Row]:
        """The part of `frontier` that is for the chosen scenario's work."""
        return ranking.frontier(self.own_rows)

    @property
    def policy(self) -> tuple[deadline.DeadlinePlan, str] | None:
        """If there is a deadline: the plan that uses spot first and on demand later, and its type."""
        return ranking.deadline_policy(self.own_rows, self.scenario, self.study.hours_left)

    @property
    def runnable(self) -> bool:
        """Whether any option can be run in time."""

        def is_any(rows: list[Row]) -> bool:
            return any(row.ranked and row.late <= ranking.SURE for row in rows)

        return is_any(self.own_rows) or is_any(self.rows)

    @property
    def regions(self) -> list[Row]:
        """The work in each region, the cheapest first. The work is simulated only when an output needs it, because few
        outputs show it.
        """
        return ranking.every_region(self.definition, self.study)

    @property
    def batches(self) -> list[Row]:
        """The work with the file's batch, then with larger batches; empty if no larger batch is possible. It is
        simulated only when it is needed.
        """
        return ranking.every_batch(self.definition, self.study)

    @property
    def title(self) -> str:
        """The heading of a picture."""
        names = dict.fromkeys([self.definition.name, self.scenario])  # both are equal if the file has no scenarios
        return f"{', '.join(names)}: cost against time in {self.definition.fleet.region}"


def compare_file(path: Path, root: Path, *, now: datetime, scenario: str | None, within: float | None) -> Comparison:
    """The comparison for a file's work, or for that of one scenario, with the measurements in the project `root`.
    `within`: hours from now, in place of the file's deadline. Raises GpufleetError.
    """
    catalog = load_catalog(root, day=now.date())
    rules = policy.find_policy(root)
    loaded, of_scenarios = load_all(path, now=now, past_deadline=True, staged=True)
    definition = policy.held_to(loaded, rules)
    # the work of each stage is ranked separately, like the work of a scenario
    stages = tuple(replace(stage, scenario=stage.stage) for stage in definition.stages)
    variants = tuple(policy.held_to(variant, rules) for variant in stages or of_scenarios)
    asked = chosen(path, variants, scenario)
    whose = asked[0] if scenario else definition
    study = Study(
        catalog,
        hazards=learn(observations(root)),
        hours_left=_hours_left(within, whose, now),
        today=now.date(),
        find_basis=lambda work, types: bill_basis(work, root, catalog, types),
    )
    return Comparison(
        definition=whose,
        scenario=scenario or ranking.default_scenario(definition, variants),
        compared=asked,
        study=study,
        file=definition,
        variants=variants,
    )


def _hours_left(within: float | None, definition: StackDefinition, now: datetime) -> float | None:
    if within is not None:
        return within
    due = definition.limits.due(now)  # the end of a Capacity Block does not limit other ways to run the work
    if due is None:
        return None
    if due <= now:
        raise GpufleetError(f"limits.deadline, {deadline_text(due)}, has passed; write a later one")
    return (due - now).total_seconds() / 3600
