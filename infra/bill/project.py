"""Makes the bill of a definition with the data of its project: prepared dataset, calibrations, receipts, traces,
prices.

Every command and the program make their bills here, so that all of them give the same figures. Only the bill uses these
data: the run and its identity use the file as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price_of
from gpufleet.infra.bill.options import BillBasis, Calibrations
from gpufleet.infra.catalog import Catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence import own_speeds
from gpufleet.infra.evidence.calibration import Calibration, find_all
from gpufleet.infra.evidence.observations import observations
from gpufleet.infra.inputs.prepared import counted_by, prepared_dataset
from gpufleet.infra.risk.hazard import Hazards, learn


def bill_of(
    definition: StackDefinition,
    root: Path,
    catalog: Catalog,
    *,
    today: date | None = None,
    hazards: Hazards | None = None,
    not_ready: Sequence[str] = (),
    but: Sequence[Path] = (),
) -> Bill:
    """The bill, with the data under `root`. `hazards`: hazards, if the caller has already learned them. `but`: traces
    to leave out. Raises the errors of price_of().
    """
    learned = learn(observations(root, but=but)) if hazards is None else hazards
    return price_of(replace(bill_basis(definition, root, catalog), hazards=learned, today=today), not_ready=not_ready)


def bill_basis(
    definition: StackDefinition, root: Path, catalog: Catalog, types: Iterable[str] | None = None
) -> BillBasis:
    """The data in the folder `root` for this definition: the prepared dataset, and calibrations of the definition's
    types or of `types`. For a command, calibrations of all types are used, because the times on other types are guessed
    from them. A scenario that can only be priced may state the size of its data. The scenario keeps this size, because
    such a dataset does not exist.
    """
    dataset = None if definition.own_data and definition.variant.only_priced else prepared_dataset(definition, root)
    asked = catalog.instances if definition.job.parameters.told_speed else types
    calibrations = find_all(definition, catalog.instances, root, asked)
    return BillBasis(
        _as_measured(counted_by(definition, dataset), calibrations),
        catalog,
        dataset_bytes=_uploaded(definition, root) if dataset is None else sum(file.bytes for file in dataset.files),
        calibrations=calibrations,
        speeds=own_speeds.known(root, catalog.instances, definition.name),
    )


def _as_measured(definition: StackDefinition, calibrations: Calibrations) -> StackDefinition:
    """A copy of the definition in which measured values replace what the file says about saves, if there is a
    measurement.
    """
    measured = [calibration for calibration in calibrations.values() if isinstance(calibration, Calibration)]
    if not measured:
        return definition
    newest = max(measured, key=lambda calibration: calibration.at)
    parameters = definition.job.parameters.completed(
        save_bytes=newest.phases[-1].save_bytes,
        save_steps=newest.phases[-1].save_steps,
        saves_on_stop=newest.stop_s is not None,
    )
    return replace(definition, job=replace(definition.job, parameters=parameters))


def _uploaded(definition: StackDefinition, root: Path) -> int | None:
    """The bytes of a command's inputs that `up` uploads; None for a job that takes a dataset (which is not prepared
    yet).
    """
    if definition.job.parameters.dataset_kind:
        return None
    from gpufleet.infra.inputs import folders  # imported here, because ready-made jobs do not need it

    return folders.size(definition, root)
