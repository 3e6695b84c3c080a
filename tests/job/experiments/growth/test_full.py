"""The growth at the experiment's full size, in fp32: 100 M -> 372 M -> 2,156 M parameters. Needs about 12 GB."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gpufleet.job.experiments.growth.check import check_boundary
from gpufleet.job.experiments.growth.growing import State, grow
from gpufleet.job.experiments.growth.model import build, load
from gpufleet.job.spec import GrowthConfig, Precision

CONFIG = replace(GrowthConfig(), device="cpu", precision=Precision(compute="fp32", phase3_state="fp32"))


def lively(state: State, scale: float) -> State:
    """Weights as large as training makes them: fresh ones give logits so small that no mistake would show."""
    return {n: t if "norm" in n or n == "embed.weight" else t * scale for n, t in state.items()}


@pytest.mark.slow
def test_full_size_growth_keeps_the_function(tmp_path: Path) -> None:
    g = torch.Generator().manual_seed(0)
    probe = torch.randint(CONFIG.model.vocab, (2, 256), generator=g)
    state = lively(build(CONFIG, 0).state_dict(), 2.0)
    for phase in (1, 2):
        new = grow(CONFIG, phase, state, g)
        report = check_boundary(
            CONFIG,
            phase,
            load(CONFIG, phase - 1, state),
            load(CONFIG, phase, new),
            probe,
            export=tmp_path / "start.safetensors",
        )
        print(report)  # noqa: T201 - the figures are what this slow test is run for
        assert report.before.max_logit > 2
        assert report.before.routing_flips == report.after_round_trip.routing_flips == 0
        state = new
