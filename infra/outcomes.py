"""What finished runs came to, from results/<stack>/<run>/ as `gpufleet results` brings it: the matrix's accuracy.

A run counts for a scenario when it trained with exactly the scenario's job parameters, on its type, to the end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from infra.cost import compare
from infra.cost.compare_rows import Outcome, Row
from job import atomic
from job.config import from_json

FOLDER = "results"


def read(root: Path, stack: str) -> list[Outcome]:
    """Of every finished run under `root` (the project), oldest first; what is damaged or unfinished is left out."""
    found = [_outcome(path.parent) for path in (root / FOLDER / stack).glob("*/receipt.json")]
    return sorted((outcome for outcome in found if outcome is not None), key=lambda outcome: outcome.at)


def of(row: Row, outcomes: Sequence[Outcome]) -> Outcome | None:
    """The newest that is the row's."""
    own = {path: value for path, value in row.settings.items() if path.startswith("job.parameters.")}
    return next((o for o in reversed(outcomes) if o.settings == own and row.type in o.types), None)


def _outcome(folder: Path) -> Outcome | None:
    run, receipt = atomic.read_object(folder / "run.json"), atomic.read_object(folder / "receipt.json")
    try:
        if run is None or receipt is None or receipt["reason"] != "finished":
            return None
        records = atomic.objects((folder / "metrics.jsonl").read_bytes())
        last = [record for record in records if record.get("val_loss") is not None][-1]
        parameters = from_json(run["job"]["experiment"], run["job"]["parameters"])
        return Outcome(
            run=str(run["run"]["id"]),
            at=str(receipt["counted_until"]),
            types=tuple(str(attempt["type"]) for attempt in receipt["attempts"]),
            settings=dict(compare.flat(asdict(parameters), "job.parameters")),
            data_seed=(str(run["inputs"]["dataset"]["sha256"]), parameters.seed),
            tokens=int(last["tokens"]),
            val_loss=float(last["val_loss"]),
        )
    except (OSError, KeyError, TypeError, ValueError, IndexError):
        return None
