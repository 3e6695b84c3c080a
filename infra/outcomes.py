"""What finished runs came to, from results/<stack>/<run>/ as `gpufleet results` brings it: the matrix's accuracy.

A run counts for a scenario when it trained with exactly the scenario's job parameters, on its type, to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from infra.cost import compare
from infra.cost.compare_rows import Outcome, Row
from job.contract import metrics, reading
from job.contract.reading import Fields
from job.contract.workdir import METRICS, RECEIPT, RUN
from job.spec import from_json

FOLDER = "results"


def read(root: Path, stack: str) -> list[Outcome]:
    """Of every finished run under `root` (the project), oldest first; what is damaged or unfinished is left out."""
    found = [_outcome(path.parent) for path in (root / FOLDER / stack).glob(f"*/{RECEIPT}")]
    return sorted((outcome for outcome in found if outcome is not None), key=lambda outcome: outcome.at)


def of(row: Row, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The newest that is the row's."""
    own = {path: value for path, value in row.settings.items() if path.startswith("job.parameters.")}
    return next((o for o in reversed(outcomes) if o.settings == own and row.type in o.types), None)


def _outcome(folder: Path) -> Outcome | None:
    try:
        run, receipt = (Fields(reading.parse((folder / name).read_bytes())) for name in (RUN, RECEIPT))
        if receipt.need("reason", reading.text) != "finished":
            return None
        records = metrics.records((folder / METRICS).read_bytes().split(b"\n"))
        last = [record for record in records if None not in (record["val_loss"], record["tokens"])][-1]
        job = run.section("job")
        parameters = from_json(job.need("experiment", reading.text), job.section("parameters").tree)
        dataset = run.section("inputs").section("dataset").need("sha256", reading.text)
        return Outcome(
            run=run.section("run").need("id", reading.text),
            at=receipt.need("counted_until", reading.text),
            types=tuple(attempt.need("type", reading.text) for attempt in receipt.sections("attempts")),
            settings=dict(compare.flat(asdict(parameters), "job.parameters")),
            data_seed=(dataset, parameters.seed),
            tokens=int(last["tokens"]),
            val_loss=float(last["val_loss"]),
        )
    except (OSError, ValueError, IndexError):
        return None
