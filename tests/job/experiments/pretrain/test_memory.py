"""What a step holds at its peak, counted on the CPU, against what the bill predicts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from gpufleet.job.kind.common import Rung
from tests.job.memory_count import SHAPES, one_rank, small
from tests.repository import ROOT

HERE = ROOT / "tests" / "job"


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("compute", ["fp32", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_peak_of_a_step_is_the_predicted_one(shape: dict[str, Any], compute: str, checkpointing: bool) -> None:
    config = small(model=shape, precision={"compute": compute})
    peak = one_rank(config, 4, checkpointing=checkpointing)
    memory = config.memory(0, Rung(micro=4, checkpointing=checkpointing))
    held = 8e-9 * config.phases()[0].params_total  # weights and gradients, there before
    assert peak * 1e-9 == pytest.approx(memory.total_gb - memory.moments_gb - held, rel=0.1)


@pytest.mark.slow
def test_a_steps_peak_on_eight_gpus_is_the_predicted_one() -> None:
    # In a process of its own: eight ranks are pretended, and a process group is global.
    found = subprocess.run(
        [sys.executable, "-m", "tests.job.memory_count"],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    for line in found.stdout.splitlines():
        row = json.loads(line)
        assert row["measured_gb"] == pytest.approx(row["predicted_gb"], rel=0.1), row
