"""Goals are graded by what a run left: met, or missed by how much."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.job.contract import goal, metrics
from gpufleet.job.contract.workdir import METRICS, RESULTS


def graded(folder: Path, name: str, wanted: str, *, done: bool = True) -> goal.Grade:
    known = goal.results_in(folder)
    (found,) = goal.grade({name: Decimal(wanted)}, usd=Decimal(12), hours=Decimal(3), done=done, results=known)
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tree = {"val_loss": 0.25, "generated": {"pass@1": 0.4}, "phases": [{"loss": 1.5}], "name": "x", "none": None}
    (tmp_path / RESULTS).write_text(json.dumps(tree))
    records = [{"ts": 1.0, "step": step, "phase": "a", "loss": 2.0 - step, "val_loss": 0.9} for step in (0, 1)]
    (tmp_path / METRICS).write_bytes(b"".join(map(metrics.write, records)))
    return tmp_path


@pytest.mark.parametrize(
    ("name", "wanted", "said"),
    [
        ("usd", "20", "at most 20 USD: met with 12"),
        ("usd", "10", "at most 10 USD: missed by 2: 12"),
        ("hours", "3", "at most 3 hours: met with 3"),
        ("val_loss", "0.24", "val_loss at most 0.24: missed by 0.01: 0.25"),
        ("val_loss", "0.26", "val_loss at most 0.26: met with 0.25"),
        ("generated/pass@1", "0.5", "generated/pass@1 at least 0.5: missed by 0.1: 0.4"),
        ("generated/pass@1", "0.4", "generated/pass@1 at least 0.4: met with 0.4"),
        ("phases/0/loss", "2", "phases/0/loss at most 2: met with 1.5"),
        ("loss", "1", "loss at most 1: met with 1"),  # of metrics.jsonl, the last
        ("phases/7/loss", "2", "phases/7/loss at most 2: missed: the run left no such value"),
        ("name", "2", "name at least 2: missed: the run left no such value"),
        ("none", "2", "none at least 2: missed: the run left no such value"),
    ],
)
def test_a_goal_is_met_or_missed_by_so_much(folder: Path, name: str, wanted: str, said: str) -> None:
    found = graded(folder, name, wanted)
    assert found.text == said
    assert found.met is (": met" in said)


def test_a_run_that_was_stopped_has_met_no_goal_in_money(folder: Path) -> None:
    found = graded(folder, "usd", "20", done=False)
    assert not found.met
    assert found.text == "at most 20 USD: missed: the run ended with 12 before its work was done"
    assert graded(folder, "val_loss", "0.26", done=False).met  # a figure is a figure


def test_a_run_without_files_has_reached_nothing(tmp_path: Path) -> None:
    assert graded(tmp_path, "val_loss", "1").reached is None
