"""What `gpufleet prepare` prints about the cost of a run with the new dataset."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from gpufleet.infra.bill import doubts, limits
from gpufleet.infra.bill.answer import headline
from gpufleet.infra.bill.estimate import problems
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.text import wrap
from gpufleet.job.kind.common import Say


def predict(definition: StackDefinition, root: Path, now: datetime, say: Say) -> None:
    """Prints the first line of the bill with this dataset. Raises DefinitionError if p50 is above a limit, or if even
    an uninterrupted run misses the deadline. The dataset stays on the disk then.
    """
    bill = bill_of(definition, root, load_catalog(root, day=now.date()), today=now.date())
    for line in wrap(f"{bill.title}: {headline(bill)} The whole bill: `gpufleet cost {definition.argument}`"):
        say(line)
    for doubt in (*doubts.schedule(definition.job.parameters, bill.chosen.runtime), doubts.cut_short(bill)):
        if doubt:
            say(f"warning: {doubt}")
    refused = [*problems(definition, bill), *limits.deadline_problems(definition, bill, now)]
    if refused:
        raise DefinitionError(str(definition.source), refused)
    for late in limits.deadline_warnings(definition, bill, now):
        say(f"warning: {late}")
