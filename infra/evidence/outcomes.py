"""What finished runs came to, from results/<stack>/<run>/ as `gpufleet results` brings it: the matrix's accuracy.

A run counts for a scenario when it trained with exactly the scenario's job parameters, on its type, to the end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpufleet.job.contract import metrics, reading
from gpufleet.job.contract.reading import Fields
from gpufleet.job.contract.workdir import METRICS, RECEIPT, RUN
from gpufleet.job.kind import from_json

FOLDER = "results"


@dataclass(frozen=True, kw_only=True, slots=True)
class FinishedRun:
    """What a finished run came to. `settings`: its job parameters by dotted path."""

    run: str
    at: str  # UTC
    types: tuple[str, ...]
    settings: dict[str, Any]
    data_seed: tuple[str, int]  # the dataset's sha256, the run's seed
    tokens: int  # up to the last validation
    val_loss: float


def read(root: Path, stack: str) -> list[FinishedRun]:
    """Every finished run of the stack under `root` (the project), oldest first; a damaged or unfinished one is left
    out.
    """
    found = [_finished_run(path.parent) for path in (root / FOLDER / stack).glob(f"*/{RECEIPT}")]
    return sorted((run for run in found if run is not None), key=lambda run: run.at)


def newest(finished: Sequence[FinishedRun], settings: Mapping[str, Any], type_: str) -> FinishedRun | None:
    """The newest that trained with exactly these job parameters, by dotted path, on this type; other settings do not
    matter.
    """
    own = {path: value for path, value in settings.items() if path.startswith("job.parameters.")}
    return next((run for run in reversed(finished) if run.settings == own and type_ in run.types), None)


def dotted(tree: dict[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    """Every value with its dotted path."""
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from dotted(value, f"{above}.{key}")
        else:
            yield f"{above}.{key}", value


def _finished_run(folder: Path) -> FinishedRun | None:
    from gpufleet.job.contract.done import FINISHED  # here: as in receipts.py
    from gpufleet.job.contract.receipt import parse

    try:
        run = Fields(reading.parse((folder / RUN).read_bytes()))
        receipt = parse((folder / RECEIPT).read_bytes())
        if receipt.reason != FINISHED:
            return None
        records = metrics.records((folder / METRICS).read_bytes().split(b"\n"))
        last = [record for record in records if None not in (record["val_loss"], record["tokens"])][-1]
        job = run.section("job")
        parameters = from_json(job.need("experiment", reading.text), job.section("parameters").tree)
        dataset = run.section("inputs").section("dataset").need("sha256", reading.text)
        return FinishedRun(
            run=run.section("run").need("id", reading.text),
            at=receipt.at,
            types=tuple(attempt.type for attempt in receipt.attempts),
            settings=dict(dotted(asdict(parameters), "job.parameters")),
            data_seed=(dataset, parameters.seed),
            tokens=int(last["tokens"]),
            val_loss=float(last["val_loss"]),
        )
    except (OSError, ValueError, IndexError):
        return None
