"""The functions load, price, compare and receipts."""

from __future__ import annotations

import warnings
from datetime import UTC, datetime
from pathlib import Path

from gpufleet._bill import Bill, bill_in_numbers
from gpufleet._compare import Comparison, comparison_in_numbers
from gpufleet._definition import Definition, Given, folder_of, read
from gpufleet._receipt import Receipt, receipt_in_numbers
from gpufleet.infra.bill import limits
from gpufleet.infra.bill.estimate import problems
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare.comparison import compare_file
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import receipts as _receipts
from gpufleet.infra.inputs.readiness import code_problems, image_problems, not_ready


def load(definition: Given, *, scenario: str = "", name: str = "", project: Path | str | None = None) -> Definition:
    """Reads and checks a definition: the name of a file in `stacks/`, a path, or a mapping of the file's sections.

    `scenario`: one of the file's scenarios. `name`: for a mapping, which is written to
    `.gpufleet/definitions/NAME.yaml` of the project. `project`: the folder with `stacks/`, data, prices and receipts;
    None: the nearest one with `stacks/`, at or above the working folder, else the working folder.

    Raises DefinitionError, whose `problems` list everything that is wrong, each with line, path and what is allowed;
    GpufleetError if there is no such file or scenario.
    """
    return read(definition, scenario=scenario, name=name, project=project, now=datetime.now(UTC))


def price(
    definition: Given | Definition, *, scenario: str = "", name: str = "", project: Path | str | None = None
) -> Bill:
    """The bill of a run in USD and hours, with all measurements of the project. The arguments are those of `load`. If
    limits are too low, there is still a bill, whose `problems` say so. Raises the errors of `load`; DefinitionError if
    the job fits no listed type, or if none has a price; GpufleetError for a scenario that ran elsewhere, and if a price
    is missing.
    """
    now = datetime.now(UTC)
    loaded = read(definition, scenario=scenario, name=name, project=project, now=now)
    one, root = loaded._definition, loaded.project
    if one.variant.reference:
        raise GpufleetError(f"{one.name}, scenario {one.scenario}: ran elsewhere, so there is nothing to price")
    missing = [] if one.variant.only_priced else not_ready(one, root)
    bill = bill_of(one, root, load_catalog(root, day=now.date()), today=now.date(), not_ready=missing)
    own = [*code_problems(one, root), *image_problems(one)]
    return bill_in_numbers(
        bill,
        warnings=limits.deadline_warnings(one, bill, now),
        problems=[*own, *problems(one, bill), *limits.deadline_problems(one, bill, now)],
    )


def compare(
    definition: Given | Definition,
    *,
    scenario: str = "",
    within_hours: float | None = None,
    name: str = "",
    project: Path | str | None = None,
) -> Comparison:
    """The file's scenarios and every instance type for their work, ranked by mean USD; `scenario`: only for the work of
    that scenario. `within_hours`: the hours from now within which the work must end, instead of limits.deadline. The
    other arguments are those of `load`. Raises the errors of `load`; GpufleetError for a scenario whose work cannot
    move to another type, and for a deadline that has passed.
    """
    now = datetime.now(UTC)
    loaded = read(definition, scenario="", name=name, project=project, now=now)
    chosen = scenario or loaded.scenario or None
    return comparison_in_numbers(
        compare_file(loaded.path, loaded.project, now=now, scenario=chosen, within=within_hours)
    )


def receipts(stack: str | None = None, *, project: Path | str | None = None) -> list[Receipt]:
    """The receipts of every run of the project, or of one stack: by stack, the oldest first.

    They are in `receipts/` of the project, where `gpufleet results` keeps them. A damaged file is left out, with a
    warning that names it.
    """
    valid, damaged = _receipts.read(folder_of(project), stack)
    for sentence in damaged:
        warnings.warn(sentence, stacklevel=2)
    return [receipt_in_numbers(receipt) for receipt in valid]
