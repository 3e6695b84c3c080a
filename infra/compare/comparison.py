"""Compares the ways to run a definition file's work, with all data of its project, and ranks them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path

from gpufleet.infra.bill.project import bill_basis
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.rows import Row, Study
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition, deadline_text
from gpufleet.infra.definition.scenarios import chosen, scenarios
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.observations import observations
from gpufleet.infra.review import policy
from gpufleet.infra.risk import deadline
from gpufleet.infra.risk.hazard import learn


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The scenarios of a file, and every option for their work."""

    definition: StackDefinition  # the file, or the chosen scenario; all options are compared in its region
    scenario: str  # the name of the chosen scenario; if none was chosen, of the scenario that equals the file
    listed: list[Row]  # the file's scenarios, in order
    rows: list[Row]  # the ranked options
    frontier: list[Row]  # the best options
    study: Study  # the data for rows that are simulated only if they are shown
    # if there is a deadline: the plan that uses spot first and on demand later, and its type
    policy: tuple[deadline.DeadlinePlan, str] | None

    @property
    def runnable(self) -> bool:
        """Whether any option can be run in time."""
        return any(row.ranked and row.late <= ranking.SURE for row in self.rows)

    @property
    def own_rows(self) -> list[Row]:
        """The options for the chosen scenario's work, which the picture shows."""
        return [row for row in self.rows if self.scenario in row.scenario.split(", ")]

    @property
    def own_frontier(self) -> list[Row]:
        """The options that no other option beats in both mean dollars and hours."""
        return ranking.frontier(self.own_rows)

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
    definition = policy.held_to(load(path, now=now, past_deadline=True, staged=True), rules)
    # the work of each stage is ranked separately, like the work of a scenario
    stages = tuple(replace(stage, scenario=stage.stage) for stage in definition.stages)
    variants = tuple(policy.held_to(variant, rules) for variant in stages or scenarios(path, now=now))
    asked = chosen(path, variants, scenario)
    whose = asked[0] if scenario else definition
    study = Study(
        catalog,
        hazards=learn(observations(root)),
        hours_left=_hours_left(within, whose, now),
        today=now.date(),
        find_basis=lambda work, types: bill_basis(work, root, catalog, types),
    )
    rows = ranking.refined(ranking.every_option(whose, asked, study), hours_left=study.hours_left)
    name = scenario or ranking.default_scenario(definition, variants)
    return Comparison(
        definition=whose,
        scenario=name,
        listed=ranking.scenarios(definition, variants, study),
        rows=rows,
        frontier=ranking.frontier(rows),
        study=study,
        policy=ranking.deadline_policy(rows, name, study.hours_left),
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
