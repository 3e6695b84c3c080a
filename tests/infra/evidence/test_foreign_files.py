"""Files of other runs and other people in a project: whatever they contain, no command ends with a traceback."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.account import results
from gpufleet.infra.commands.receipts import table
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import calibration, observations, receipts, traces
from gpufleet.infra.risk import hazard
from gpufleet.job.contract.receipt import CAUSES
from tests import mutations
from tests.infra.calibration_world import find, measurement
from tests.receipt_tree import receipt


def a_receipt(content: bytes, root: Path) -> None:
    place(root, "receipts/small-growth/r1.json", content)
    found, _ = receipts.read(root)
    list(table(found, CAUSES))
    receipts.grade(found)
    hazard.learn(observations.observations(root))


def a_measurement(content: bytes, root: Path) -> None:
    place(root, "calibrations/tinystories-growth/a.json", content)
    found = find(root)
    assert found is None or (found.why if isinstance(found, calibration.RefusedCalibration) else found.basis)


def a_trace(content: bytes, root: Path) -> None:
    place(root, "traces/a.json", content)
    traces.read(root / "traces" / "a.json").observation()


def an_earlier_receipt(content: bytes, root: Path) -> None:
    place(root, "receipt.json", content)
    results.earlier_receipt(root / "receipt.json")


def place(root: Path, name: str, content: bytes) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(content)


TRACE = {"gap_s": 60, "available": [1, 0, 1], "type": "g5.2xlarge", "zone": "us-east-2a", "start": "2026-11-01"}
PUBLIC = {"metadata": {"gap_seconds": 60}, "data": [1, 0, 1]}
FILES: dict[str, tuple[Any, Any]] = {
    "receipt": (receipt(), a_receipt),
    "measurement": (measurement(), a_measurement),
    "trace": (TRACE, a_trace),
    "public trace": (PUBLIC, a_trace),
    "receipt made before": (receipt(), an_earlier_receipt),
}


@pytest.mark.parametrize("name", FILES)
def test_no_file_of_a_project_ends_a_command_with_a_traceback(name: str, tmp_path: Path) -> None:
    tree, read = FILES[name]
    for content in mutations.mutations(tree):
        said = ""
        try:
            read(content, tmp_path)
        except GpufleetError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(content[:2000]) from error
        assert not said or "trace" in name, (content[:500], said)
        assert len(said) < 500, said
