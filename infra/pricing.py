"""The bill of a definition as this project knows it: its prepared dataset, calibrations, receipts, traces and prices.

One way for every command and the program, so that all of them say the same. For the bill alone: what a run is told, and
what its identity is, stays what the file says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from infra.bill.bill import Bill
from infra.bill.estimate import price
from infra.bill.options import Footing
from infra.bill.side import Hazards
from infra.catalog import Catalog
from infra.compare.cheaper import Cheaper, cheaper
from infra.compare.rows import Row
from infra.definition.model import StackDefinition
from infra.evidence.calibration import find_all
from infra.evidence.observations import observations
from infra.review import policy
from infra.risk.hazard import learn
from job.dataset.prepare import DatasetManifest, read_manifest


def bill_of(
    definition: StackDefinition,
    root: Path,
    catalog: Catalog,
    *,
    not_ready: Sequence[str] = (),
    but: Sequence[Path] = (),
) -> Bill:
    """The bill, with what lies under `root`. `but`: traces that must not teach it. Raises as price()."""
    return _priced(definition, root, catalog, learn(observations(root, but=but)), not_ready)


def bill_and_cheaper(
    definition: StackDefinition,
    root: Path,
    catalog: Catalog,
    *,
    now: datetime,
    rules: policy.Policy | None,
    not_ready: Sequence[str] = (),
) -> tuple[Bill, Cheaper | None]:
    """The bill, and what would do its work for less: within the limits and the project's `rules`. Raises as price()."""
    hazards = learn(observations(root))
    bill = _priced(definition, root, catalog, hazards, not_ready)
    facts = policy.facts(definition, bill)
    if definition.variant.only_priced:  # nor is its bill held against them
        rules = None

    def allowed(row: Row) -> bool:
        usd_p90 = None if row.usd is None else row.usd.p90
        of_row = replace(facts, instance_types=(row.type,), capacity=row.capacity, usd_p90=usd_p90)
        return rules is None or not policy.broken(rules, of_row)

    options = cheaper(
        definition,
        bill,
        catalog,
        hours_left=definition.limits.hours_left(now),
        hazards=hazards,
        found=lambda work: footing(work, root, catalog),
        allowed=allowed,
    )
    return bill, options


def _priced(
    definition: StackDefinition, root: Path, catalog: Catalog, hazards: Hazards, not_ready: Sequence[str]
) -> Bill:
    found = footing(definition, root, catalog)
    return price(
        found.definition,
        catalog,
        dataset_bytes=found.dataset_bytes,
        not_ready=not_ready,
        calibrations=found.calibrations,
        hazards=hazards,
    )


def footing(definition: StackDefinition, root: Path, catalog: Catalog) -> Footing:
    """What lies under `root` of this definition: the prepared dataset, and calibrations of its types.

    A scenario that is only priced and says what its data counts keeps its word: it is of no dataset that there is.
    """
    dataset = None if definition.own_data and definition.variant.only_priced else prepared_dataset(definition, root)
    return Footing(
        definition=_counted(definition, dataset),
        dataset_bytes=None if dataset is None else sum(file.bytes for file in dataset.files),
        calibrations=find_all(definition, catalog.instances, root),
    )


def as_prepared(definition: StackDefinition, root: Path) -> StackDefinition:
    """With what the dataset folder under `root` counts instead of what `job.parameters.data` expects; as it is where
    there is none, or the dataset lies in S3.
    """
    return _counted(definition, prepared_dataset(definition, root))


def prepared_dataset(definition: StackDefinition, root: Path) -> DatasetManifest | None:
    """What the dataset folder under `root` holds; None for one in S3, or that is not there or damaged: not_ready says
    so.
    """
    folder = definition.storage.dataset_folder(root)
    if folder is None:
        return None
    try:
        return read_manifest(folder)
    except ValueError:
        return None


def _counted(definition: StackDefinition, dataset: DatasetManifest | None) -> StackDefinition:
    if dataset is None:
        return definition
    parameters = definition.job.parameters.with_facts(dataset.facts)
    return replace(definition, job=replace(definition.job, parameters=parameters))
