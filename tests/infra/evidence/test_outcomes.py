"""Finished runs fill the matrix's accuracy; whatever is not exactly the scenario's run does not."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from receipt_tree import node, receipt
from repository import ROOT

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare import table as compare_table
from gpufleet.infra.compare.rows import Row
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.infra.evidence import outcomes
from gpufleet.job.contract import metrics

STACK = ROOT / "stacks" / "sft-h100.yaml"
NOW = datetime(2026, 11, 21, tzinfo=UTC)
DEFAULT, OTHER = "h100-optimized", "zero3-4xa100"


@pytest.fixture(scope="module")
def variants() -> dict[str, StackDefinition]:
    return {variant.scenario: variant for variant in scenarios(STACK, now=NOW)}


@pytest.fixture(scope="module")
def rows(variants: dict[str, StackDefinition]) -> dict[str, Row]:
    some = [variants[name] for name in (DEFAULT, OTHER)]
    listed = ranking.scenarios(load(STACK, now=NOW, past_deadline=True), some, load_catalog(), runs=20)
    return {row.scenario: row for row in listed}


def line(tokens: int, val_loss: float | None) -> str:
    return metrics.write({"ts": 1.0, "phase": "sft", "step": 1, "tokens": tokens, "val_loss": val_loss}).decode()


def leave_results(root: Path, run: str, work: StackDefinition, loss: float, **changed: Any) -> Path:
    """results/ of a run of `work`, on the type that the scenario is priced on."""
    folder = root / "results" / "sft-h100" / run
    folder.mkdir(parents=True)
    tree = {
        "run": {"id": run},
        "job": {"experiment": "sft-h100", "parameters": asdict(work.job.parameters)},
        "inputs": {"dataset": {"sha256": "d" * 64}},
    }
    attempts = [{**node("i-1", seconds="9"), "type": work.fleet.instance_types[0]}]
    cost = receipt(run=run, counted_until=f"2026-11-2{run[-1]}T00:00:00Z", attempts=attempts)
    lines = [line(512, 9.0), line(1024, loss), line(1536, None)]
    (folder / "run.json").write_text(json.dumps(tree))
    (folder / "receipt.json").write_text(json.dumps({**cost, **changed}))
    (folder / "metrics.jsonl").write_text("".join(lines) + '{"torn')
    return folder


def accuracy(root: Path, rows: dict[str, Row]) -> dict[str, str]:
    """The matrix's cell, by scenario."""
    found = outcomes.read(root, "sft-h100")
    listed = {name: replace(row, outcome=outcomes.newest(found, row.settings, row.type)) for name, row in rows.items()}
    lines = compare_table.matrix(list(listed.values()), listed[DEFAULT]).split("\n")
    head = next(index for index, line in enumerate(lines) if "accuracy" in line)
    start, end = (lines[head].index(name) for name in ("accuracy", "complexity"))
    return {line.split()[0]: line[start:end].strip() for line in lines[head + 2 : head + 4]}


def test_without_a_run_it_is_not_measured(tmp_path: Path, rows: dict[str, Row]) -> None:
    assert accuracy(tmp_path, rows) == {DEFAULT: "not measured", OTHER: "not measured"}


@pytest.mark.parametrize(
    ("loss", "said"),
    [(1.2036, f"1.2036 (r2), +0.30% of {DEFAULT}'s"), (1.1928, f"1.1928 (r2), -0.60% of {DEFAULT}'s: DIFFERS")],
)
def test_layouts_are_held_against_each_other(
    loss: float, said: str, tmp_path: Path, rows: dict[str, Row], variants: dict[str, StackDefinition]
) -> None:
    leave_results(tmp_path, "r1", variants[DEFAULT], 1.2)
    leave_results(tmp_path, "r2", variants[OTHER], loss)
    assert accuracy(tmp_path, rows) == {DEFAULT: "1.2000 (r1)", OTHER: said}


def test_the_newest_run_counts_and_other_work_or_another_ending_does_not(
    tmp_path: Path, rows: dict[str, Row], variants: dict[str, StackDefinition]
) -> None:
    work = variants[DEFAULT]
    leave_results(tmp_path, "r2", work, 1.2)
    leave_results(tmp_path, "r1", work, 7.0)
    leave_results(tmp_path, "r3", work, 7.0, reason="failed")
    leave_results(tmp_path, "r4", work, 7.0, attempts=[{"type": "g5.2xlarge"}])
    seeded = replace(work.job.parameters, seed=work.job.parameters.seed + 1)
    leave_results(tmp_path, "r5", replace(work, job=replace(work.job, parameters=seeded)), 7.0)
    (leave_results(tmp_path, "r6", work, 7.0) / "run.json").write_text("{}")
    assert accuracy(tmp_path, rows)[DEFAULT] == "1.2000 (r2)"


def test_other_work_is_no_other_layout(tmp_path: Path, variants: dict[str, StackDefinition]) -> None:
    listed = ranking.scenarios(
        load(STACK, now=NOW, past_deadline=True),
        [variants[name] for name in (DEFAULT, "full-ft-8xh100")],
        load_catalog(),
        runs=20,
    )
    leave_results(tmp_path, "r1", variants[DEFAULT], 1.2)
    leave_results(tmp_path, "r2", variants["full-ft-8xh100"], 1.1)
    assert accuracy(tmp_path, {row.scenario: row for row in listed})["full-ft-8xh100"] == "1.1000 (r2)"


def test_losses_of_other_tokens_are_shown_and_not_compared(
    tmp_path: Path, rows: dict[str, Row], variants: dict[str, StackDefinition]
) -> None:
    leave_results(tmp_path, "r1", variants[DEFAULT], 1.2)
    folder = leave_results(tmp_path, "r2", variants[OTHER], 1.2)
    (folder / "metrics.jsonl").write_text(line(512, 1.5))
    assert accuracy(tmp_path, rows)[OTHER] == "1.5000 (r2)"
