"""Reads from a run's own files how fast it was, and on which settings and code this speed depends. This module imports
neither torch nor infra.

A probe (job/probe.py) and a receipt (job/supervisor/receipt.py) both leave one such *measurement*;
infra.evidence.calibration reads it and docs/calibration.md documents its keys. All values come from metrics.jsonl,
whose lines have the same form in every experiment, so this module does not depend on experiments.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from gpufleet import job
from gpufleet.job.contract import metrics
from gpufleet.job.kind import KINDS

SCHEMA = 1
# Settings that do not change the time of a step, an evaluation or a save: the amount of work, seeds, learning rates,
# intervals. Each kind of job adds its own `leaves_speed`. Every other setting is taken to change the speed, even a new
# one.
SPEED_LEFT = ("seed", "gpus", "checkpoint", "guard", "deliver", "log", "eval.every", "data.source", "optim")
_COUNTS = ("optim.kind",)  # changes the speed, although the other settings of its section do not
# number of steps after a start or a growth that are not timed, because they compile, and fill caches and the allocator
WARM_UP = 10
NEARLY = 0.995  # if a smaller share of a step's rows was full, this is not a rounding error
_BESIDE = ("timed", "best", "stop")  # kinds of saves that come between steps; a save at a phase's end delays no step


def settings(experiment: str, parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The settings that change speed, by dotted path, of `parameters` as in run.json's job.parameters."""
    free = (*SPEED_LEFT, *KINDS[experiment].leaves_speed)
    return {path: value for path, value in _flat(parameters, "") if path in _COUNTS or not _matches_any(path, free)}


def code_sha256(experiment: str, folder: Path | None = None) -> str:
    """One hash of the code that trains: every Python file of its folders, by path and bytes, under `folder` (job/)."""
    root = Path(job.__file__).parent if folder is None else folder
    digest = hashlib.sha256()
    for path in sorted({path for name in KINDS[experiment].code_folders() for path in (root / name).glob("*.py")}):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()


def phases(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What the lines of metrics.jsonl show about each phase, in order. A value is None if the lines do not show it:

    `step_ms` {median, q1, q3} over all steps except the warm-up of each start, a step with fewer rows scaled to all;
    `evaluation_s` for one evaluation; `save` {bytes, blocks_s} for one save, and `every_steps` between two scheduled
    ones; `boundary_s` from the last step before the phase to its first, less that step; `memory_gb`, the peak. A phase
    without a timed step is left out.
    """
    names = list(dict.fromkeys(str(record["phase"]) for record in records))
    saves = {save.step: save for record in records for save in metrics.saves(record) if save.reason in _BESIDE}
    rows = []
    for name in names:
        own = [record for record in records if record["phase"] == name]
        timed = list(step_times(own))
        if not timed:
            continue
        middle = _quantile(timed, 0.5)
        intervals = list(_intervals(own, middle, saves))
        evaluations = [rest for record, rest in intervals if record.get("val_loss") is not None]
        saved = [save for step, save in saves.items() if own[0]["step"] <= step <= own[-1]["step"]]
        rows.append(
            {
                "name": name,
                "steps": sum(count for _, count in timed),
                "step_ms": {"median": middle, "q1": _quantile(timed, 0.25), "q3": _quantile(timed, 0.75)},
                "memory_gb": max((gb for record in own if (gb := record.get("mem_gb")) is not None), default=None),
                "evaluation_s": round(max(0.0, median(evaluations)), 4) if evaluations else None,
                "save": _save(saved) if saved else None,
                "boundary_s": _boundary_s(records, own, middle),
            }
        )
    return rows


def _save(saved: Sequence[metrics.Save]) -> dict[str, Any]:
    """The medians of a phase's saves: bytes, seconds, and steps between two scheduled ones."""
    figures = {"bytes": saved[-1].bytes, "blocks_s": median(save.blocked_s for save in saved)}
    timed = sorted(save.step for save in saved if save.reason == "timed")
    apart = [after - before for before, after in itertools.pairwise(timed)]
    return {**figures, "every_steps": round(median(apart))} if apart else figures


def step_times(own: Sequence[Mapping[str, Any]]) -> Iterator[tuple[float, int]]:
    """For every line that has a time, the milliseconds per full step, and the number of steps."""
    before: Mapping[str, Any] = {}
    for record in own:
        if record.get("step_ms") is not None:
            count = max(1, record["step"] - before["step"] if before else 1)
            yield round(float(record["step_ms"]) / _full(record, before), 3), count
        before = record


def document(
    *,
    experiment: str,
    parameters: Mapping[str, Any],
    device: Mapping[str, Any],
    versions: Mapping[str, Any],
    source: str,
    at: str,
    measured: Sequence[Mapping[str, Any]],
    start_s: float | None = None,
    setup_s: float | None = None,
    finish_s: float | None = None,
    code: str | None = None,
) -> dict[str, Any]:
    """A measurement as JSON. `measured` is what `phases` returns; `device`: kind, name, count, ranks, memory_gb;
    `code`: the hash of a command's own code.

    `start_s`: seconds from the start of the process to the first step. `setup_s`: seconds from the launch of the node
    to the first step. `finish_s`: seconds from the last step to the end of the process. A duration is None if it was
    not seen.
    """
    return {
        "schema": SCHEMA,
        "source": source,
        "at": at,
        "experiment": experiment,
        "device": dict(device),
        "versions": dict(versions),
        "settings": settings(experiment, parameters),
        "code_sha256": code_sha256(experiment) if code is None else code,
        "start_s": start_s,
        "setup_s": setup_s,
        "finish_s": finish_s,
        "phases": [dict(phase) for phase in measured],
    }


def _flat(tree: Mapping[str, Any], above: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items():
        path = f"{above}{key}"
        if isinstance(value, Mapping):
            yield from _flat(value, f"{path}.")
        else:
            yield path, list(value) if isinstance(value, tuple) else value


def _matches_any(path: str, names: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}.") for name in names)


def _full(record: Mapping[str, Any], before: Mapping[str, Any]) -> float:
    """The number of rows in a line's steps, as a share of full steps. The last step of all epochs may have fewer rows.
    `tok_s` shows this, but `tokens` does not.
    """
    steps, tokens = ((record.get(key) or 0) - (before.get(key) or 0) for key in ("step", "tokens"))
    if not before or not record.get("tok_s") or steps <= 0 or tokens <= 0:
        return 1.0
    full: float = record["tok_s"] * record["step_ms"] / 1e3 / (tokens / steps)
    return full if full < NEARLY else 1.0


def _intervals(
    own: Sequence[Mapping[str, Any]], middle_ms: float, saves: Mapping[int, metrics.Save]
) -> Iterator[tuple[Mapping[str, Any], float]]:
    """Each line with those seconds since the previous line that were spent neither on its steps nor on a save."""
    for before, record in itertools.pairwise(own):
        if record.get("resumed") is not None:
            continue
        step_s = float(record["step_ms"] if record.get("step_ms") is not None else middle_ms) / 1e3
        blocked = sum(save.blocked_s for step, save in saves.items() if before["step"] <= step < record["step"])
        yield record, record["ts"] - before["ts"] - (record["step"] - before["step"]) * step_s - blocked


def _boundary_s(records: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]], step_ms: float) -> float | None:
    """Seconds between two phases; None for the first phase, and after an interruption between the two. A phase's first
    step always has a line, and so has the last step of the phase before, which may have ended early.
    """
    index = next(index for index, record in enumerate(records) if record is own[0])
    if index == 0 or own[0].get("resumed") is not None:
        return None
    between: float = own[0]["ts"] - records[index - 1]["ts"]
    return round(max(0.0, between - step_ms / 1e3), 4)


def _quantile(timed: Sequence[tuple[float, int]], share: float) -> float:
    """The quantile `share` over steps, in the unit of `timed`; each line has a weight of one for each step that it
    timed.
    """
    total, seen = sum(count for _, count in timed), 0
    for value, count in sorted(timed):
        seen += count
        if seen >= share * total:
            return value
    raise AssertionError("no timed step")
