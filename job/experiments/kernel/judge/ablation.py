"""The same candidates with each extension left out: five rows, and what each lets through.

A row differs from the full one only from the stage that its extension is in, so a verdict that fell earlier is carried
over with its seconds. Without the funnel nothing is alike, and everything is judged anew; and without its rules only
candidates run that are known, since isolation alone does not hold one that a model wrote. Two trainings are compared
in rows of the full funnel, over the same tasks and seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from gpufleet.job.experiments.kernel.judge import statistics
from gpufleet.job.experiments.kernel.judge.funnel import Judge, digest
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import STAGES, Switches, Verdict
from gpufleet.job.ledger import Ledger

FULL = "full"
ROWS: dict[str, Switches] = {
    FULL: Switches(),
    "without funnel": Switches(funnel=False),
    "without multi-input": Switches(multi_input=False),
    "without calibrated timing": Switches(timing=False),
    "without any": Switches(funnel=False, multi_input=False, timing=False),
}
PASSES, SPEEDS = (1, 10), (1.0, 1.2)
RATES = (*(f"pass@{k}" for k in PASSES), *(f"fast_{p:g}" for p in SPEEDS))
SHOWN = ("pass@1", "pass@10", "fast 1.0", "fast 1.2", "s/candidate")
SPOKEN = 10  # verdicts between two lines of the log


def carried(full: Verdict, row: str) -> Verdict | None:
    """The row's verdict where it cannot differ from the full one's; None when it has to be found."""
    switches = ROWS[row]
    if not switches.funnel:
        return None
    first = STAGES.index("timing" if switches.multi_input else "full") + 1
    if full.stage >= first:
        return None
    return replace(full, row=row)


def verify(
    judge: Judge,
    candidates: Sequence[Candidate],
    ledger: Ledger,
    *,
    rows: Sequence[str],
    check: Callable[[], None],
    say: Callable[[str], None],
) -> dict[str, list[Verdict]]:
    """Verdicts per row, in the order of the `candidates` that it judges. Those in the ledger are taken from it, new
    ones appended as they fall. `check` is called between candidates and may raise. `rows` begins with the full one.
    """
    known = {(v.row, v.candidate, v.source_sha256): v for v in ledger.read(Verdict.from_json)}

    def keep(verdict: Verdict) -> None:
        ledger.append(verdict.to_json())
        known[verdict.row, verdict.candidate, verdict.source_sha256] = verdict
        asked = judged_in(verdict.row, candidates)
        there = sum(key(verdict.row, candidate) in known for candidate in asked)
        if there % SPOKEN == 0 or there == len(asked):  # a silent job is taken for a stuck one
            say(f"funnel, {verdict.row}: {there} of {len(asked)} judged")

    hashes = {candidate.name: digest(candidate.source) for candidate in candidates}

    def key(row: str, candidate: Candidate) -> tuple[str, str, str]:
        return row, candidate.name, hashes[candidate.name]

    for row in rows:
        waiting = [candidate for candidate in judged_in(row, candidates) if key(row, candidate) not in known]
        if row != FULL:
            for candidate in waiting:
                if (same := carried(known[key(FULL, candidate)], row)) is not None:
                    keep(same)
        judge.all([candidate for candidate in waiting if key(row, candidate) not in known], ROWS[row], row, keep, check)
    return {row: [known[key(row, candidate)] for candidate in judged_in(row, candidates)] for row in rows}


def judged_in(row: str, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Those that a row judges: without the rules none that a model wrote."""
    return [candidate for candidate in candidates if candidate.known or ROWS[row].funnel]


def line(row: str, verdicts: Sequence[Verdict], full: Sequence[Verdict], *, seed: int) -> dict[str, Any]:
    """One row of the table: false accepts are adversarial candidates that passed, the rest is of the others. Correct
    is what the row itself takes for correct. The last interval is of pass@1 minus the full row's, over the same tasks
    and candidates; None of the full row itself.
    """
    names = {v.candidate for v in verdicts}
    full = [v for v in full if v.candidate in names]
    cheats = [v for v in verdicts if v.origin == "adversarial"]
    one, other = _rates(verdicts)["pass@1"], _rates(full)["pass@1"]
    return {
        **figures(row, verdicts, seed=seed),
        "false_accepts": sum(v.passed for v in cheats),
        "adversarial": len(cheats),
        "accepted": sorted(v.label for v in cheats if v.passed),
        "pass@1_minus_full": statistics.paired_interval(one, other, seed=seed) if one and row != FULL else None,
    }


def figures(row: str, verdicts: Sequence[Verdict], *, seed: int) -> dict[str, Any]:
    """What candidates are worth that were judged alike; those meant to cheat are left out. Untimed are those that are
    correct while no speed-up is known; they do not count as fast. Suspicious are those that were run again.
    """
    own = [v for v in verdicts if v.origin != "adversarial"]
    rates = _rates(own)
    counts = [(len(task), sum(v.passed for v in task)) for task in _by_task(own)]
    return {
        "row": row,
        "candidates": len(own),
        "tasks": len(counts),
        **{key: fmean(values) if values else None for key, values in rates.items()},
        "untimed": sum(v.passed and v.speedup is None for v in own),
        "suspicious": sum(v.suspicious for v in own),
        "seconds_per_candidate": fmean(sum(v.seconds.values()) for v in own) if own else None,
        "pass@1_interval": statistics.share_interval(counts) if counts else None,
    }


def compared(trained: Mapping[str, Sequence[Verdict]], *, seed: int) -> list[dict[str, Any]]:
    """A row for each of several trainings whose candidates share tasks and seeds. `minus_first`: 95 % intervals of what
    is gained over the first, paired by task; None of the first itself, and where a task has too few candidates.
    """
    base = next(iter(trained))
    first = _rates(trained[base])
    found = []
    for row, verdicts in trained.items():
        pairs = {key: (values, first[key]) for key, values in _rates(verdicts).items()}
        gained = {
            key: statistics.paired_interval(one, other, seed=seed) if one and other and row != base else None
            for key, (one, other) in pairs.items()
        }
        found.append({**figures(row, verdicts, seed=seed), "minus_first": gained})
    return found


def text(table: Sequence[dict[str, Any]]) -> list[str]:
    """A table of `line` or of `compared` for people; nothing of an empty one."""
    if not table:
        return []
    keys = (*RATES, "seconds_per_candidate")
    own = "minus_first" if "minus_first" in table[0] else "false_accepts"
    head = ("row", "pass@1 gained" if own == "minus_first" else "false accepts", "others", *SHOWN, "untimed")
    lines = [
        (
            row["row"],
            _own(row),
            str(row["candidates"]),
            *("-" if row[key] is None else f"{row[key]:.3f}" for key in keys),
            str(row["untimed"]),
        )
        for row in table
    ]
    widths = [max(len(line[column]) for line in (head, *lines)) for column in range(len(head))]
    return [
        "  ".join(cell.ljust(width) if column == 0 else cell.rjust(width) for column, (cell, width) in enumerate(pairs))
        for pairs in (list(zip(line, widths, strict=True)) for line in (head, *lines))
    ]


def _own(row: dict[str, Any]) -> str:
    if "minus_first" not in row:
        return f"{row['false_accepts']} of {row['adversarial']}"
    gained = row["minus_first"]["pass@1"]
    return "-" if gained is None else f"{gained[0]:+.3f} to {gained[1]:+.3f}"


def _rates(verdicts: Sequence[Verdict]) -> dict[str, list[float]]:
    """Per task, in the order of their names; empty where a task has fewer than ten candidates and ten are asked of."""
    found: dict[str, list[float | None]] = {key: [] for key in RATES}
    for task in _by_task(verdicts):
        count, speeds = (len(task), sum(v.passed for v in task)), [v.speedup if v.passed else None for v in task]
        for k in PASSES:
            found[f"pass@{k}"].append(statistics.pass_at_k([count], k))
        for p in SPEEDS:
            found[f"fast_{p:g}"].append(statistics.fast_p([speeds], p))
    return {key: [] if None in values else [v for v in values if v is not None] for key, values in found.items()}


def _by_task(verdicts: Sequence[Verdict]) -> list[list[Verdict]]:
    tasks: dict[str, list[Verdict]] = {}
    for verdict in sorted(verdicts, key=lambda v: (v.task, v.candidate)):
        if verdict.origin != "adversarial":
            tasks.setdefault(verdict.task, []).append(verdict)
    return list(tasks.values())
