"""The policy pack under the real engine: a rule stops a preview, and keeps an `up` nobody previewed from its fleet."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, Pulumi
from tests.rehearsal.engine_world import STACK, pinned, project
from tests.repository import ROOT

PACK = ROOT / "policy"

pytestmark = [
    pytest.mark.optional,
    pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH"),
    pytest.mark.skipif(not (PACK / ".venv").exists(), reason="policy/.venv is not set up (docs/review.md)"),
]


def test_a_broken_rule_stops_the_preview_and_leaves_an_unseen_up_without_a_fleet(tmp_path: Path) -> None:
    pinned(project(tmp_path / "project"))
    pack = tmp_path / "rules" / "policy"
    shutil.copytree(PACK, pack, ignore=shutil.ignore_patterns("__pycache__", ".venv"))
    (pack / ".venv").symlink_to(PACK / ".venv")
    rules = pack.parent / "policy.yaml"
    rules.write_text("allowed_regions: [eu-west-1]\nspot_only: true\n")
    with (
        Cloud(tmp_path / "cloud") as cloud,
        Engine.open(tmp_path / "project", cloud.environment(), STACK, real=True) as engine,
    ):
        assert isinstance(engine, Pulumi)
        judged = ("--policy-pack", str(pack))
        preview = engine._command("preview", *judged)
        unseen = engine._command("up", "--yes", "--skip-preview", *judged)
        for refused in (preview, unseen):
            assert not refused.ok
            assert "region us-east-2, allowed: eu-west-1" in refused.text
            assert "spot-only" not in refused.text
        assert cloud.client("ec2").describe_fleets()["Fleets"] == []
        rules.write_text("allowed_regions: [us-east-*]\nspot_only: true\n")
        assert engine._command("preview", *judged).ok
        assert engine.destroy().ok
