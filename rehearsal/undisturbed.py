"""Runs a user's script once more without interruptions: to its end, to compare the interrupted run with it
(`gpufleet rehearse --exact`), or until it meets a limit midway (`--limit`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Literal, cast

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.yaml_tree import Mapping, merge, read
from gpufleet.job import ledger
from gpufleet.job.contract.done import MAX_HOURS
from gpufleet.job.contract.workdir import FINAL, METRICS
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.supervisor.forecast import LATENCY_S, RESERVE_S
from gpufleet.job.text import counted
from gpufleet.rehearsal import pace
from gpufleet.rehearsal.evidence import Evidence, Promise

Until = Literal["end", "limit"]
MIDWAY = 0.5  # share of the training after which the run should meet the limit


def without_interruptions(definition: StackDefinition) -> StackDefinition:
    return replace(definition, interruptions=replace(definition.interruptions, with_notice=0, without_notice=0))


def limited(definition: StackDefinition, held: Path, changed: pace.Change | None) -> pace.Change:
    """Sets a limit that a run meets midway, if it is as fast as the run in `held`. Raises GpufleetError."""
    config = cast(CommandConfig, definition.job.parameters)
    moments = [json.loads(line) for line in (held / "timeline.jsonl").read_text(encoding="utf-8").splitlines()]
    launched, trains = (
        next(moment["t"] for moment in moments if moment["what"] == event) for event in ("launched", "training")
    )
    lines = (held / "results" / METRICS).read_bytes().splitlines()
    last = max((int(line["step"]) for line in ledger.read(held / "results" / METRICS)), default=0)
    trains_s = last * pace.step_ms(lines, 0.0) / 1000
    # the same formula as in the supervisor's prediction of an end (job/supervisor/forecast.py)
    seconds = trains - launched + MIDWAY * trains_s + RESERVE_S + LATENCY_S + config.grace_s
    overlay = read(json.dumps({"limits": {"max_hours": round(seconds / 3600, 4)}}))
    return lambda tree: cast(Mapping, merge(changed(tree) if changed else tree, overlay))


def limit_checks(evidence: Evidence) -> Iterator[Promise]:
    """The promises about a run that has met its limit."""
    watch = evidence.rehearsal.watch
    assert watch is not None
    reason = evidence.done.reason
    yield Promise(name="ended by its limit", figure=reason, held=reason == MAX_HOURS)
    last = max((int(line["step"]) for line in evidence.metrics), default=0)
    newest = max(watch.manifests, default=0)
    figure = f"of step {newest}, at step {last} of {evidence.total_steps}" if newest else "none"
    yield Promise(name="a whole checkpoint in the bucket", figure=figure, held=newest > 0)
    files = [path for path in (evidence.folder / FINAL).rglob("*") if path.is_file()]
    yield Promise(name="downloaded by results", figure=counted(len(files), "file"), held=bool(files))
    # The receipt was read above; if it could not be read, this line is not reached.
    yield Promise(name="receipt", figure=f"{evidence.receipt.actual} USD", held=True)


def compare(interrupted: Path, undisturbed: Path, out: Callable[[str], None]) -> None:
    """Prints how far apart the results of the two runs are; a difference is not a failure."""
    ends = [_last_loss(folder / "results" / METRICS) for folder in (interrupted, undisturbed)]
    if None in ends:
        return out("exact: not shown: the script's lines contain no loss")
    (step, loss), (other_step, other) = (cast(tuple[int, float], end) for end in ends)
    if step != other_step:
        return out(f"exact: not shown: its last losses are of step {step:,} and of step {other_step:,}")
    how = f"loss of step {step:,}: {loss:.6g} interrupted, {other:.6g} undisturbed"
    if loss == other:
        return out(f"exact: {how}: as far as its output shows, your script resumes bit for bit")
    return out(f"exact: {how}, differs by {abs(loss - other):.2g}: your script does not resume bit for bit")


def _last_loss(path: Path) -> tuple[int, float] | None:
    losses = [(int(line["step"]), float(line["loss"])) for line in ledger.read(path) if line.get("loss") is not None]
    return max(losses, key=lambda pair: pair[0], default=None)
