"""Keeps verdicts on candidates as they come, and computes pass@k and the speeds that the weights have reached."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from gpufleet.job.experiments.kernel.judge import statistics
from gpufleet.job.experiments.kernel.judge.funnel import Judge, digest
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import FULL, Verdict
from gpufleet.job.ledger import Ledger

PASSES, SPEEDS = (1, 10), (1.0, 1.2)
RATES = (*(f"pass@{k}" for k in PASSES), *(f"fast_{p:g}" for p in SPEEDS))
SHOWN = ("pass@1", "pass@10", "fast 1.0", "fast 1.2", "s/candidate")
SPOKEN = 10  # number of verdicts between two lines of the log


def verify(
    judge: Judge,
    candidates: Sequence[Candidate],
    ledger: Ledger,
    *,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> list[Verdict]:
    """The verdicts on the `candidates`, in their order. If the ledger already has a verdict, it is used; each new
    verdict is appended to the ledger at once. `check` is called between candidates and may raise.
    """
    known = {(v.candidate, v.source_sha256): v for v in ledger.read(Verdict.from_json) if v.row == FULL}
    keys = [(candidate.name, digest(candidate.source)) for candidate in candidates]

    def keep(verdict: Verdict) -> None:
        ledger.append(verdict.to_json())
        known[verdict.candidate, verdict.source_sha256] = verdict
        judged = sum(key in known for key in keys)
        if judged % SPOKEN == 0 or judged == len(keys):  # a job that prints nothing is taken to be stuck
            say(f"funnel: {judged} of {len(keys)} judged")

    waiting = [candidate for candidate, key in zip(candidates, keys, strict=True) if key not in known]
    judge.all(waiting, keep, check)
    return [known[key] for key in keys]


def figures(name: str, verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Pass rates and speeds of candidates that were judged in the same way. `untimed`: the number of correct candidates
    whose speed-up is not known; they are not included among the fast ones. `suspicious`: the number of candidates that
    were run again.
    """
    rates = _rates(verdicts)
    counts = [(len(task), sum(v.passed for v in task)) for task in _by_task(verdicts)]
    return {
        "row": name,
        "candidates": len(verdicts),
        "tasks": len(counts),
        **{key: fmean(values) if values else None for key, values in rates.items()},
        "untimed": sum(v.passed and v.speedup is None for v in verdicts),
        "suspicious": sum(v.suspicious for v in verdicts),
        "seconds_per_candidate": fmean(sum(v.seconds.values()) for v in verdicts) if verdicts else None,
        "pass@1_interval": statistics.share_interval(counts) if counts else None,
    }


def compared(trained: Mapping[str, Sequence[Verdict]], *, seed: int) -> list[dict[str, Any]]:
    """A row for each of several trainings, whose candidates have the same tasks and seeds. `minus_first`: the 95 %
    interval of the gain over the first training, paired by task; None for the first training itself, and if a task has
    too few candidates.
    """
    base = next(iter(trained))
    first = _rates(trained[base])
    rows = []
    for row, verdicts in trained.items():
        pairs = {key: (values, first[key]) for key, values in _rates(verdicts).items()}
        gained = {
            key: statistics.paired_interval(one, other, seed=seed) if one and other and row != base else None
            for key, (one, other) in pairs.items()
        }
        rows.append({**figures(row, verdicts), "minus_first": gained})
    return rows


def text(table: Sequence[dict[str, Any]]) -> list[str]:
    """`figures` or `compared` as a table for people."""
    keys = (*RATES, "seconds_per_candidate")
    lines = [
        (
            row["row"],
            _gained(row),
            str(row["candidates"]),
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in keys),
            str(row["untimed"]),
        )
        for row in table
    ]
    head = ("row", "pass@1 gained", "candidates", *SHOWN, "untimed")
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in (head, *lines))
    ]


def _gained(row: dict[str, Any]) -> str:
    gained = row.get("minus_first", {}).get("pass@1")
    return "-" if gained is None else f"{gained[0]:+.3f} to {gained[1]:+.3f}"


def _rates(verdicts: Sequence[Verdict]) -> dict[str, list[float]]:
    """The pass rate of each task, in the order of the tasks' names; empty if a task has fewer than ten candidates."""
    rates: dict[str, list[float | None]] = {key: [] for key in RATES}
    for task in _by_task(verdicts):
        count, speeds = (len(task), sum(v.passed for v in task)), [v.speedup if v.passed else None for v in task]
        for k in PASSES:
            rates[f"pass@{k}"].append(statistics.pass_at_k([count], k))
        for p in SPEEDS:
            rates[f"fast_{p:g}"].append(statistics.fast_p([speeds], p))
    return {key: [] if None in values else [v for v in values if v is not None] for key, values in rates.items()}


def _by_task(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    tasks: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda v: (v.task, v.candidate)):
        tasks.setdefault(verdict.task, []).append(verdict)
    return list(tasks.values())
