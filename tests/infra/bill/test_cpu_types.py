"""A job that needs no GPU is priced on types without a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.rows import Study
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence import calibration
from gpufleet.infra.risk.hazard import prior
from gpufleet.job import measured
from tests.infra.command_files import FLEET, command_file

NOW = datetime(2026, 11, 27, tzinfo=UTC)
STEP = {"stdout": "step (?P<step>[0-9]+)"}
STEPS = {"steps": 36000, "step_ms": {"c7i.4xlarge": 100}}


def prepares(tmp_path: Path, work: dict[str, Any], types: str = "c7i.4xlarge") -> StackDefinition:
    """A command without a GPU on these types, in us-east-2."""
    fleet = {**FLEET, "instance_types": types.split()}
    file = command_file(tmp_path, device="cpu", checkpoint="none", progress=STEP, fleet=fleet, work=work)
    return load(file, now=NOW)


def test_its_bill_has_hours_a_price_and_the_hazard_of_one_gpus_node_and_speaks_of_no_gpu(tmp_path: Path) -> None:
    bill = bill_of(prepares(tmp_path, STEPS), tmp_path, load_catalog())
    said = " ".join(render(bill).split())

    assert bill.chosen.runtime.compute_s == 3600
    assert [str(line.unit_price) for line in bill.lines if line.name == "compute"] == ["0.2896"]
    assert bill.usd.p90 > bill.usd.p10
    assert prior(0).median == prior(1).median > 0
    assert "16 vCPUs in use" in said
    assert "an assumption for a node without" in said
    assert "one GPU in use" not in said


def test_a_step_on_one_type_says_nothing_of_another(tmp_path: Path) -> None:
    """A type with 64 vCPUs has no known peak speed, from which the speed of a type with 16 would follow."""
    listed = ["c7i.4xlarge", "c7i.16xlarge", "g6.xlarge"]
    rows = ranking.every_option(prepares(tmp_path, STEPS), (), Study(load_catalog()), types=listed, runs=50)

    assert {row.type for row in rows if row.ranked} == {"c7i.4xlarge"}
    (other,) = {row.reason for row in rows if row.type == "c7i.16xlarge"}
    assert "write job.work.step_ms: {c7i.16xlarge: ...}" in other


def test_hours_of_its_own_are_compared_on_types_with_and_without_gpus(tmp_path: Path) -> None:
    plan = prepares(tmp_path, {"hours": {"low": 1, "likely": 1.5, "high": 2}}, "c7i.4xlarge m7i.4xlarge g6.xlarge")
    rows = ranking.every_option(plan, (), Study(load_catalog()), types=list(plan.fleet.instance_types), runs=50)

    assert {row.type for row in rows if row.ranked} == {"c7i.4xlarge", "m7i.4xlarge", "g6.xlarge"}


@pytest.mark.parametrize(("name", "counts"), [("c7i.4xlarge", True), ("c7i.16xlarge", False), ("CPU", False)])
def test_a_measurement_without_a_gpu_counts_for_the_type_that_it_names(name: str, counts: bool, tmp_path: Path) -> None:
    plan = prepares(tmp_path, STEPS)
    phase = {"name": "train", "steps": 9, "step_ms": {"median": 50.0, "q1": 50.0, "q3": 50.0}, "save": None}
    config = plan.job.parameters
    tree = measured.document(
        experiment=plan.job.experiment,
        parameters=asdict(config),
        device={"kind": "cpu", "name": name, "count": 0, "ranks": 1, "memory_gb": None, "cpus": 16},
        versions={},
        source="a test",
        at="2026-11-27T00:00:00Z",
        measured=[phase],
        setup_s=None,
        code="",
    )
    kept = tmp_path / calibration.FOLDER / "mine" / "node.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(tree))
    found = calibration.find(plan, load_catalog().instances["c7i.4xlarge"], tmp_path)
    assert isinstance(found, calibration.Calibration) is counts
