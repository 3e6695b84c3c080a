"""Finds which stage a run is in, and makes one receipt from those of all stages."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, NamedTuple

from gpufleet.infra.account import status
from gpufleet.infra.account.run_folder import RunFolder, find_folder
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job.contract import attempt, goal, reading
from gpufleet.job.contract.bucket import ATTEMPTS
from gpufleet.job.contract.done import FINISHED, LEAVES_NODE, Done
from gpufleet.job.contract.reading import epoch
from gpufleet.job.contract.receipt import CAUSES, Receipt, parse
from gpufleet.job.contract.run import load
from gpufleet.job.contract.workdir import RECEIPT, RUN


class StageSeen(NamedTuple):
    """A stage, its folder in the bucket, and how it ended; None if the run's folder or the end does not exist."""

    stage: StackDefinition
    folder: RunFolder | None
    done: Done | None

    @property
    def is_passed(self) -> bool:
        """Whether the next stage may begin."""
        reasons = LEAVES_NODE if self.stage.shared else (FINISHED,)
        return self.done is not None and self.done.reason in reasons

    @property
    def is_called_off(self) -> bool:
        """Whether the run was asked to end before this stage, which is not the first, had a node. A stage on a shared
        node without a node yet counts too, because nobody can tell whether it will have one.
        """
        if self.folder is None or not self.stage.before:
            return False
        return self.folder.is_called_off() or bool(self.stage.shared and not self.folder.objects(ATTEMPTS))


def look(whole: StackDefinition, s3: Any) -> list[StageSeen]:
    """Each stage as it is in the run's bucket, in order; a run without stages is a single stage."""
    folder, seen = find_folder(s3, whole), list[StageSeen]()
    for part in whole.parts:
        own = replace(folder, run=part.run.id) if folder else None
        seen.append(StageSeen(part, own, own.read_done() if own else None))
    return seen


def begun(whole: StackDefinition, s3: Any) -> list[StageSeen]:
    """The stages that have begun: those up to the first that is not done."""
    seen = look(whole, s3)
    done = next((index for index, seen_stage in enumerate(seen) if not seen_stage.is_passed), len(seen))
    return seen[: done + 1]


def report(whole: StackDefinition, ec2: Any, s3: Any, now: datetime, scheduler: Any = None) -> Iterator[str]:
    """A line for each stage, and the report of the current stage (or of the last one). Raises AwsRefused if the run has
    neither a fleet nor a folder.
    """
    seen = look(whole, s3)
    current = next((seen_stage.stage for seen_stage in seen if not seen_stage.is_passed), whole.parts[-1])
    first, *rest = status.report(current, ec2, s3, now, scheduler)
    yield first
    for index, seen_stage in enumerate(seen if whole.stages else ()):
        if seen_stage.done:
            state = f"{seen_stage.done.reason}, {seen_stage.done.at}"
        elif seen_stage.stage is current:
            state = "asked to end" if seen_stage.folder and seen_stage.folder.asked() else "under way"
        else:
            state = f"after {seen[index - 1].stage.stage}"
        yield f"{'' if index else 'stage':<12}{seen_stage.stage.stage}: {state}"
    yield from rest


def combine(whole: StackDefinition, folder: Path) -> Receipt | None:
    """Sums the receipts of all stages below `folder`; None if there is none. Each line names its stage. The range is
    that of the whole run's bill, or, if the run ended early, the sum of its stages' ranges.
    """
    by_stage: list[tuple[str, Receipt]] = []
    for stage in whole.stages:
        with suppress(FileNotFoundError, reading.DoubtError):
            by_stage.append((stage.stage, parse((folder / stage.stage / RECEIPT).read_bytes())))
    if not by_stage:
        return None
    receipts, (last, end) = [receipt for _, receipt in by_stage], by_stage[-1]
    low, high = sum_of(receipts, "p10"), sum_of(receipts, "p90")
    is_done = end.reason == FINISHED and last == whole.stages[-1].stage
    if is_done and (span := load(folder / last / RUN).whole_usd) is not None:
        low, high = span
    return replace(
        end,
        run=whole.run.id,
        detail=": ".join(filter(None, (last, end.detail))),
        capacity=", ".join(dict.fromkeys(receipt.capacity for receipt in receipts)),
        estimate=sum_of(receipts, "estimate"),
        actual=sum_of(receipts, "actual"),
        p10=low,
        p90=high,
        estimate_h=sum_of(receipts, "estimate_h"),
        actual_h=sum_of(receipts, "actual_h"),
        lines=tuple(replace(line, name=f"{name}: {line.name}") for name, receipt in by_stage for line in receipt.lines),
        causes={cause: sum((receipt.causes[cause] for receipt in receipts), Decimal(0)) for cause in CAUSES},
        free_usd=sum_of(receipts, "free_usd"),
        expected=sum(receipt.expected or 0.0 for receipt in receipts),
        with_notice=sum(receipt.with_notice for receipt in receipts),
        without_notice=sum(receipt.without_notice for receipt in receipts),
        attempts=tuple(node for receipt in receipts for node in receipt.attempts),
        goals=goal.grade(
            whole.goal.wanted,
            usd=sum_of(receipts, "actual"),
            hours=_elapsed_h(folder / whole.stages[0].stage / ATTEMPTS, end.at),
            done=is_done,
            results=goal.results_in(folder / last),
        ),
        measured=None,
    )


def sum_of(receipts: Sequence[Receipt], name: str) -> Decimal:
    return sum((getattr(receipt, name) for receipt in receipts), Decimal(0))


def _elapsed_h(folder: Path, end: str) -> Decimal:
    """Hours from the first node's launch to the run's end."""
    launches = [attempt.record(path.read_bytes(), lambda _: None).launched for path in folder.glob("*.json")]
    return Decimal(f"{((epoch(end) or 0.0) - min(launches)) / 3600:.4f}") if launches else Decimal(0)
