"""cost and prepare warn of a learning rate with which a run would be wasted."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.prediction import predict
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SHIPPED = ROOT / "stacks"


def stack(name: str, **changed: Any) -> StackDefinition:
    """A shipped stack with a run config of its own."""
    plan = load(SHIPPED / f"{name}.yaml", now=NOW)
    config: Any = plan.job.parameters
    for key, value in changed.items():
        config = replace(config, **{key: replace(getattr(config, key), **value) if isinstance(value, dict) else value})
    return replace(plan, job=replace(plan.job, parameters=config))


def said(plan: StackDefinition) -> list[str]:
    return [warning for warning in price(plan, load_catalog(), runs=50).warnings if "warmup" in warning]


@pytest.mark.parametrize(
    ("name", "changed", "words"),
    [
        (
            "pretrain-d64",
            {"steps": 100, "optim": {"warmup": 500}},
            "optim.warmup is 500 steps, the whole run 100: the learning rate never reaches 0.02."
            " Lower optim.warmup, or raise steps",
        ),
        (
            "sft-h100",
            {"epochs": 1, "data": {"examples": 20}},
            "optim.warmup is 100 steps, the whole run 1: the learning rate never reaches 2e-4."
            " Lower optim.warmup, or batch.tokens",
        ),
        (
            "tinystories-growth",
            {"steps_per_phase": 10},
            "optim.warmup_after_growth is 20 steps, each grown phase 10: the learning rate never reaches 8e-5."
            " Lower optim.warmup_after_growth, or raise steps_per_phase",
        ),
    ],
)
def test_a_warm_up_longer_than_the_run_is_a_warning(name: str, changed: dict[str, Any], words: str) -> None:
    assert said(stack(name, **changed)) == [words]
    assert said(stack(name)) == []
    assert said(stack("pretrain-d64", steps=500, optim={"warmup": 500})) == []  # only the last step has the full rate


def test_prepare_warns_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = stack("sft-h100", epochs=1, data={"examples": 20})
    predict(plan, tmp_path, NOW, print)
    printed = capsys.readouterr().out
    assert "warning: optim.warmup is 100 steps, the whole run 1: the learning rate never reaches 2e-4." in printed


def test_all_weights_at_the_rate_of_an_adapter_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "method: full at an adapter's optim.lr, 2e-4, which is the default: set it, for instance to 1e-5"
    plan = stack("sft-h100", method="full")
    assert words in price(plan, load_catalog(), runs=50).warnings
    predict(stack("sft-h100", method="full", model={"layers": 2}), tmp_path, NOW, print)
    assert f"warning: {words}" in capsys.readouterr().out
    for other in (stack("sft-h100"), stack("sft-h100", method="full", optim={"lr": 1e-5})):
        assert not [warning for warning in price(other, load_catalog(), runs=50).warnings if "adapter" in warning]
