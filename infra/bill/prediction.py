"""What `gpufleet prepare` prints about the run with the dataset that it has made."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from gpufleet.infra.bill import doubts, limits
from gpufleet.infra.bill.estimate import problems
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.job.kind.common import Say
from gpufleet.job.text import counted


def predict(definition: StackDefinition, root: Path, now: datetime, say: Say) -> None:
    """Prints how long the run takes with this dataset, and what it costs. Raises DefinitionError when the bill's p50 is
    above a limit or the uninterrupted run misses the deadline; the dataset stays.
    """
    bill = bill_of(definition, root, load_catalog(root, day=now.date()), today=now.date())
    usd, hours = bill.chosen.needed_usd, bill.chosen.needed_hours
    steps = sum(phase.steps for phase in bill.chosen.runtime.phases)
    counts = all(phase.counts == "steps" for phase in definition.job.parameters.phases())
    say(
        f"predicted on {bill.chosen.type}, {bill.capacity}:"
        + (f" {counted(f'{steps:,}', 'optimizer step')}," if counts else "")
        + f" {hours.p50:.2f} node-hours and {usd.p50:.2f} USD at p50, {hours.p90:.2f} and {usd.p90:.2f} at p90;"
        f" see gpufleet cost {definition.argument}"
    )
    for doubt in (*doubts.schedule(definition.job.parameters, bill.chosen.runtime), doubts.cut_short(bill)):
        if doubt:
            say(f"warning: {doubt}")
    refused = [*problems(definition, bill), *limits.deadline_problems(definition, bill, now)]
    if refused:
        raise DefinitionError(str(definition.source), refused)
    for late in limits.deadline_warnings(definition, bill, now):
        say(f"warning: {late}")
