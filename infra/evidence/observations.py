"""Observed interruptions: one observation per zone, from the receipts of runs and from availability traces."""

from __future__ import annotations

from collections.abc import Collection
from datetime import date
from pathlib import Path

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import receipts
from gpufleet.infra.evidence.observation import Observation
from gpufleet.infra.market import INTERRUPTED

TRACES = "traces"


def observations(root: Path, *, but: Collection[Path] = ()) -> list[Observation]:
    """The observations for infra.risk.hazard.learn: one for each spot run, type and zone, and one for each trace in
    `traces/` (docs/risk.md), without the traces in the files `but`. Raises GpufleetError if a file in traces/ is not a
    trace, or names no type of the catalog.
    """
    rows = _of_traces(root / TRACES, {path.resolve() for path in but})
    for receipt in receipts.read(root)[0]:
        if receipt.rehearsal:
            continue
        on_spot = [node for node in receipt.attempts if (node.capacity or receipt.capacity) in INTERRUPTED]
        for place in dict.fromkeys((node.type, node.zone) for node in on_spot):
            own = [node for node in on_spot if (node.type, node.zone) == place]
            hours = sum(float(node.lived_s) / 3600 for node in own)
            if hours > 0:
                rows.append(
                    Observation(
                        type=place[0],
                        zone=place[1] or None,
                        node_hours=hours,
                        interruptions=sum(node.interrupted for node in own),
                        source=f"receipt of {receipt.stack} {receipt.run}",
                        as_of=date.fromisoformat(receipt.at[:10]),
                        gpus=_gpus(place[0], root),
                    )
                )
    return rows


def _of_traces(folder: Path, but: Collection[Path]) -> list[Observation]:
    rows = []
    for path in sorted(path for path in folder.glob("[!.]*") if path.suffix in (".csv", ".json")):
        if path.is_dir() or path.resolve() in but:
            continue
        # imported here, because most projects have no traces, and reading them needs numpy
        from gpufleet.infra.catalog import load_catalog
        from gpufleet.infra.evidence import traces

        trace, catalog = traces.read(path), load_catalog(folder.parent)
        if not trace.type:
            raise GpufleetError(f"{path}: it names no type, but bills learn a type's hazard from {TRACES}/; add `type`")
        if trace.type not in catalog.instances:  # an unknown type is an error, because no bill would ever use its trace
            raise GpufleetError(f"{path}: {catalog.unknown_type(trace.type)}. Correct its type, or move the file away")
        rows.append(trace.observation()._replace(gpus=catalog.instances[trace.type].gpu_count))
    return rows


def _gpus(type_: str, root: Path) -> int:
    """The number of GPUs of a node of this type; 1 if the type is not in the catalog."""
    from gpufleet.infra.catalog import load_catalog

    known = load_catalog(root).instances.get(type_)
    return known.gpu_count if known else 1
