"""The decision matrix: what to choose between layouts by, each criterion with a figure instead of a mark out of ten.

Accuracy is measured by runs and by nothing else: until two have finished with equal tokens and seed the matrix says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from infra.cost.compare_rows import Row

Layout = Literal["one process", "replicated", "sharded"]

# The test that resumes a run of this layout from its own checkpoint, on CPU.
RESUME_TESTS: dict[Layout, str] = {
    "one process": "tests/job/test_train_resume.py",
    "replicated": "tests/job/test_train_ranks.py",
    "sharded": "tests/job/test_train_ranks.py",
}
EXPLAINED = (
    "cost and time: to the end of the job's last phase, p50 / p90. lost: mean minutes of restarts and repeated work."
    " accuracy: every layout computes in the same precision, so validation losses at equal tokens and seed must agree"
    " within 0.5 %; a difference is a bug. settings: keys that differ from the file; no layout needs another"
    " package. resume: the test that continues this layout from its checkpoint on CPU."
)


def layout(row: Row) -> Layout:
    """How the job is spread over processes."""
    if row.ranks <= 1:
        return "one process"
    return "sharded" if row.sharded else "replicated"


def _cost(row: Row, _: Row) -> str:
    return f"{row.usd.p50:.2f} / {row.usd.p90:.2f} USD" if row.usd else f"no figure: {row.why or 'no price'}"


def _time(row: Row, _: Row) -> str:
    return f"{row.wall_hours.p50:.2f} / {row.wall_hours.p90:.2f} h" if row.wall_hours else "-"


def _risk(row: Row, _: Row) -> str:
    if row.interrupted is None or row.lost_minutes is None:
        return "-"
    return f"P(stop) {row.interrupted:.0%}, {row.lost_minutes:.0f} min lost"


def _launch(row: Row, _: Row) -> str:
    nodes = "1 node" if row.nodes == 1 else f"{row.nodes} nodes"
    return f"{nodes}, " + ("launchable" if row.launchable and row.fits else "NOT launchable")


def _accuracy(row: Row, _: Row) -> str:
    return "not measured"


def _complexity(row: Row, default: Row) -> str:
    start = f", {row.side.runtime.setup_s:.0f} s cold start" if row.side else ""
    extra = len([key for key, value in row.settings.items() if default.settings.get(key) != value])
    return f"{max(1, row.ranks)} processes, {extra} settings{start}"


def _reliability(row: Row, _: Row) -> str:
    kind = layout(row)
    return f"{kind}: {RESUME_TESTS[kind].rpartition('/')[2]}"


CRITERIA: tuple[tuple[str, Callable[[Row, Row], str]], ...] = (
    ("cost", _cost),
    ("time", _time),
    ("risk", _risk),
    ("nodes", _launch),
    ("accuracy", _accuracy),
    ("complexity", _complexity),
    ("resume", _reliability),
)
