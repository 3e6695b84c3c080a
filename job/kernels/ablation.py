"""The same candidates with each extension left out: five rows, and what each lets through.

A row differs from the full one only from the stage that its extension is in, so a verdict that fell earlier is carried
over with its seconds. Without the funnel nothing is alike, and everything is judged anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Any

from job.kernels import statistics
from job.kernels.funnel import STAGES, Judge, Switches, Verdict, digest
from job.kernels.ledger import Ledger
from job.kernels.planted import Candidate

FULL = "full"
ROWS: dict[str, Switches] = {
    FULL: Switches(),
    "without funnel": Switches(funnel=False),
    "without multi-input": Switches(multi_input=False),
    "without calibrated timing": Switches(timing=False),
    "without any": Switches(funnel=False, multi_input=False, timing=False),
}
SPEEDS = (1.0, 1.2)
SPOKEN = 10  # verdicts between two lines of the log


def carried(full: Verdict, row: str) -> Verdict | None:
    """The row's verdict where it cannot differ from the full one's; None when it has to be found."""
    switches = ROWS[row]
    if not switches.funnel:
        return None
    first = STAGES.index("timing" if switches.multi_input else "full") + 1
    if full.stage >= first:
        return None
    return Verdict.from_json({**full.to_json(), "row": row})


def verify(
    judge: Judge,
    candidates: Sequence[Candidate],
    ledger: Ledger,
    *,
    rows: Sequence[str],
    check: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, list[Verdict]]:
    """Verdicts per row, in the order of `candidates`. Those in the ledger are taken from it, new ones appended as they
    fall. `check` is called between candidates and may raise. `rows` begins with the full one.
    """
    known = {(v.row, v.candidate, v.source_sha256): v for v in map(Verdict.from_json, ledger.entries)}

    def keep(verdict: Verdict) -> None:
        ledger.append(verdict.to_json())
        known[verdict.row, verdict.candidate, verdict.source_sha256] = verdict
        there = sum(row == verdict.row for row, _, _ in known)
        if there % SPOKEN == 0 or there == len(candidates):  # a silent job is taken for a stuck one
            say(f"funnel, {verdict.row}: {there} of {len(candidates)} judged")

    def key(row: str, candidate: Candidate) -> tuple[str, str, str]:
        return row, candidate.name, digest(candidate.source)

    for row in rows:
        waiting = [candidate for candidate in candidates if key(row, candidate) not in known]
        if row != FULL:
            for candidate in waiting:
                if (same := carried(known[key(FULL, candidate)], row)) is not None:
                    keep(same)
        judge.all([candidate for candidate in waiting if key(row, candidate) not in known], ROWS[row], row, keep, check)
    return {row: [known[key(row, candidate)] for candidate in candidates] for row in rows}


def line(row: str, verdicts: Sequence[Verdict], full: Sequence[Verdict], *, seed: int) -> dict[str, Any]:
    """One row of the table: false accepts are adversarial candidates that passed, the rest is of the others. Correct
    is what the row itself takes for correct. The interval is of pass@1 minus the full row's, over the same tasks.
    """
    cheats = [v for v in verdicts if v.origin == "adversarial"]
    tasks, own = _by_task(verdicts), _by_task(full)
    counts = [(len(task), sum(v.passed for v in task)) for task in tasks]
    speeds = [[v.speedup if v.passed else None for v in task] for task in tasks]
    rates = [c / n for n, c in counts]
    whole = [sum(v.passed for v in task) / len(task) for task in own]
    return {
        "row": row,
        "candidates": sum(n for n, _ in counts),
        "tasks": len(tasks),
        "false_accepts": sum(v.passed for v in cheats),
        "adversarial": len(cheats),
        "accepted": sorted(v.label for v in cheats if v.passed),
        "pass@1": statistics.pass_at_k(counts, 1),
        "pass@10": statistics.pass_at_k(counts, 10),
        **{f"fast_{p:g}": statistics.fast_p(speeds, p) for p in SPEEDS},
        "timing_refused": sum(v.passed and v.speedup is None for task in tasks for v in task),
        "seconds_per_candidate": fmean(sum(v.seconds.values()) for v in verdicts) if verdicts else None,
        "pass@1_interval": statistics.interval(rates, seed=seed) if rates else None,
        "pass@1_minus_full": statistics.paired_interval(rates, whole, seed=seed) if rates else None,
    }


def text(table: Sequence[dict[str, Any]]) -> list[str]:
    """The table for people."""
    head = ("row", "false accepts", "pass@1", "pass@10", "fast 1.0", "fast 1.2", "s/candidate")
    keys = ("pass@1", "pass@10", "fast_1", "fast_1.2", "seconds_per_candidate")
    lines = [
        (
            row["row"],
            f"{row['false_accepts']} of {row['adversarial']}",
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in keys),
        )
        for row in table
    ]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in (head, *lines))
    ]


def _by_task(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    tasks: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda v: (v.task, v.candidate)):
        if verdict.origin != "adversarial":
            tasks.setdefault(verdict.task, []).append(verdict)
    return list(tasks.values())
