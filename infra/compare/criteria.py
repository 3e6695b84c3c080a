"""The decision matrix: what to choose between layouts by, each criterion with a figure instead of a mark out of ten.

Accuracy is measured by runs and by nothing else: a scenario of which none has finished says so.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from infra.compare.rows import Row
from infra.evidence.outcomes import FinishedRun
from job.text import counted

Layout = Literal["one process", "replicated", "sharded"]

# The test that resumes a run of this layout from its own checkpoint, on CPU.
RESUME_TESTS: dict[Layout, str] = {
    "one process": "tests/job/test_train_resume.py",
    "replicated": "tests/job/test_train_ranks.py",
    "sharded": "tests/job/test_train_ranks.py",
}
AGREE = 0.005  # of the loss: layouts compute alike, and a difference is a bug
_SPREAD = ("gpus", "reshard_after_forward", "batch.micro", "measures", "checkpoint", "log")  # change no loss
EXPLAINED = (
    "cost and time: to the end of the job's last phase, p50 / p90. lost: mean minutes of restarts and repeated work."
    " accuracy: the last validation loss of a finished run of the scenario (its results/, as gpufleet results brings"
    " them), and where it did the default's work in another layout, how far it is from that one's: every layout"
    " computes in the same precision, so more than 0.5 % is a bug. settings: keys that differ from the file; no layout"
    " needs another package. resume: the test that continues this layout from its checkpoint on CPU."
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
    return f"{counted(row.nodes, 'node')}, {'launchable' if row.launchable and row.fits else 'NOT launchable'}"


def _accuracy(row: Row, default: Row) -> str:
    own, other = row.outcome, default.outcome
    if own is None:
        return "not measured"
    said = f"{own.val_loss:.4f} ({own.run})"
    if other is None or own is other or not _comparable(own, other):
        return said
    apart = own.val_loss / other.val_loss - 1
    return f"{said}, {apart:+.2%} of {default.scenario}'s" + (": DIFFERS" if abs(apart) > AGREE else "")


def _comparable(one: FinishedRun, other: FinishedRun) -> bool:
    """Whether they differ in nothing but how the work was spread and kept."""
    spread = tuple(f"job.parameters.{path}" for path in _SPREAD)
    differing = [path for path, value in one.settings.items() if other.settings.get(path) != value]
    same = (one.data_seed, one.tokens) == (other.data_seed, other.tokens)
    return same and all(path.startswith(spread) for path in differing)


def _complexity(row: Row, default: Row) -> str:
    start = f", {row.side.runtime.setup_s:.0f} s cold start" if row.side else ""
    extra = len([key for key, value in row.settings.items() if default.settings.get(key) != value])
    return f"{counted(max(1, row.ranks), 'process')}, {counted(extra, 'setting')}{start}"


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
