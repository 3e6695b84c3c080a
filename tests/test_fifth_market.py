"""A fifth way of buying nodes is a new file and its row in the table: nothing else knows any of them by name.

In a copy of the project `tests/fifth/plan.py` becomes a file of infra/market/. A definition that asks for it is then
accepted, priced, compared and previewed like those with the ways that are shipped.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from decimal import Decimal
from typing import Any

import pytest

from tests.infra.command_files import command_file
from tests.repository import ROOT

ROW = '    "plan": SavingsPlan,\n'
TABLE = "WAYS: dict[str, type[Market]] = {  # the market by fleet.capacity\n"
IMPORT = "from gpufleet.infra.market.plan import SavingsPlan\n"
PROGRAM = r"""
import json
from pathlib import Path
from gpufleet.infra.cli import main
from gpufleet.rehearsal.engine import InProcess

for words in (["cost", "mine", "--all"], ["cost", "mine", "--json"], ["compare", "mine", "--json"]):
    assert main(words) == 0, words
    print("\0")
runner = InProcess(Path.cwd(), {}, "mine", lambda line: None)
result = runner.preview()
assert result.ok, result.text
print(json.dumps(runner.declared()))
"""


@pytest.fixture(scope="module")
def outputs(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[str, dict[str, Any], dict[str, Any], list[dict[str, Any]]]:
    """What `cost` says as text and as JSON, and `compare`; and the resources of a preview."""
    folder = tmp_path_factory.mktemp("fifth") / "project"
    for name in ("infra", "job", "rehearsal"):
        shutil.copytree(ROOT / name, folder / name)  # with what is compiled already
    shutil.copytree(ROOT / "gpufleet", folder / "gpufleet", symlinks=True)
    for name in ("Pulumi.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    shutil.copy(ROOT / "tests" / "fifth" / "plan.py", folder / "infra" / "market")
    table = folder / "infra" / "market" / "__init__.py"
    text = table.read_text()
    assert text.count(TABLE) == 1
    table.write_text(text.replace(TABLE, IMPORT + TABLE + ROW))
    fleet = {"region": "us-east-2", "zones": ["us-east-2a"], "instance_types": ["g5.2xlarge"], "capacity": "plan"}
    command_file(folder, fleet=fleet)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    shown, bill, compared, declared = done.stdout.split("\0\n")
    return shown, json.loads(bill), json.loads(compared), json.loads(declared)


def test_it_is_priced(outputs: tuple[str, dict[str, Any], dict[str, Any], Any]) -> None:
    shown, bill, *_ = outputs
    own, full = bill["plan"], bill["on_demand"]
    assert Decimal(own["usd_per_hour"]) == Decimal("0.7") * Decimal(full["usd_per_hour"])
    assert (bill["capacity"], bill["interruptions"]["p90"], bill["hazard"]) == ("plan", "0.0000", None)
    assert "one plan node in us-east-2" in shown
    assert "Interruptions: none on the plan." in shown
    assert f"USD on demand, g5.2xlarge at {full['usd_per_hour']} USD/h" in shown


def test_it_is_compared_with_what_is_sold_by_the_hour(outputs: tuple[Any, dict[str, Any], dict[str, Any], Any]) -> None:
    *_, bill, compared, _ = outputs
    (own,) = compared["scenarios"]
    assert (own["type"], own["capacity"], own["usd"]["p50"]) == ("g5.2xlarge", "plan", bill["usd"]["p50"])
    assert {row["capacity"] for row in compared["options"]} == {"spot", "on-demand"}


def test_its_preview_declares_a_fleet_that_ec2_knows_and_a_meter_with_its_price(
    outputs: tuple[Any, dict[str, Any], Any, list[dict[str, Any]]],
) -> None:
    _, bill, _, declared = outputs
    (fleet,) = (each["inputs"] for each in declared if each["type"] == "aws:ec2/fleet:Fleet")
    assert fleet["targetCapacitySpecification"] == {
        "defaultTargetCapacityType": "on-demand",
        "totalTargetCapacity": 1,
    }
    assert (fleet["type"], "spotOptions" in fleet) == ("maintain", False)
    (run,) = (each["inputs"]["content"] for each in declared if each["name"].endswith("run-config"))
    terms = json.loads(run)
    assert terms["capacity"] == "on-demand"
    assert terms["rates"]["g5.2xlarge"]["on_demand"] == bill["plan"]["usd_per_hour"]
