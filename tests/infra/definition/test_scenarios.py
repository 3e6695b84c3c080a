"""The `scenarios` section: each scenario is laid over the file, checked, and can be run if it describes a run."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.scenarios import scenario as one
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.program.run_guard import creation_digest
from gpufleet.job.experiments.growth.spec import GrowthConfig
from tests.repository import ROOT

GROWTH = ROOT / "stacks" / "tinystories-growth.yaml"
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def written(tmp_path: Path, section: str) -> Path:
    path = tmp_path / "growth.yaml"
    text = GROWTH.read_text()
    path.write_text(text[: text.index("\nscenarios:")] + "\n" + section)
    return path


def test_a_scenario_to_run_is_the_file_with_its_keys_laid_over() -> None:
    plain, wide = load(GROWTH, now=NOW), one(GROWTH, "g6e-1000-b8", now=NOW)
    assert wide.fleet.instance_types == ("g6e.2xlarge",)
    assert isinstance(wide.job.parameters, GrowthConfig)
    assert wide.job.parameters.batch.sequences == 8
    assert wide.fleet.zones == plain.fleet.zones
    assert wide.limits == plain.limits
    assert creation_digest(wide) != creation_digest(plain)


@pytest.mark.parametrize(
    ("stack", "scenario", "said"),
    [
        ("tinystories-growth", "mac-100-b8", "ran elsewhere"),
        ("kernel-sft", "plan-8.5h", "holds its node"),
        ("kernel-sft", "conservatve", "Nearest: conservative"),
    ],
)
def test_what_is_there_only_to_be_priced_is_not_run(stack: str, scenario: str, said: str) -> None:
    with pytest.raises(GpufleetError, match=said):
        one(ROOT / "stacks" / f"{stack}.yaml", scenario, now=NOW)


def test_scenarios_name_nodes_as_the_file_does_or_as_in_0_1_0(tmp_path: Path) -> None:
    assert one(ROOT / "stacks" / "sft-h100.yaml", "fsdp-2xh100", now=NOW).nodes == 2
    file = tmp_path / "sft-h100.yaml"
    text = (ROOT / "stacks" / "sft-h100.yaml").read_text()
    file.write_text(
        text.replace("fleet: {nodes: 2, zones: [us-east-1a]}", "fleet: {zones: [us-east-1a]}\n    nodes: 2")
    )
    assert one(file, "fsdp-2xh100", now=NOW).nodes == 2


def test_every_configuration_of_two_tower_can_be_run() -> None:
    for name in ("o", "p", "q", "r", "weak-2m", "full", "sweep"):
        assert one(ROOT / "stacks" / "two-tower.yaml", name, now=NOW).variant.only_priced == ""


def test_a_scenario_on_a_retired_type_can_be_listed_but_not_run() -> None:
    path = ROOT / "stacks" / "two-tower.yaml"
    assert any(made.scenario == "o-p3.8x" for made in scenarios(path, now=NOW))
    with pytest.raises(DefinitionError, match=r"p3\.8xlarge left EC2"):
        one(path, "o-p3.8x", now=NOW)


SECTIONS = {
    "scenarios: [a, b]": "scenarios: .*a section with one entry per scenario",
    "scenarios:\n  a: 3": "scenarios.a",
    "scenarios:\n  Upper: {}": "a name of 1 to 40",
    "scenarios:\n  a: {nodse: 2}": "Nearest: nodes",
    "scenarios:\n  a: {nodes: 0}": "from 1 to 16",
    "scenarios:\n  a: {hold_hours: -1}": "hold_hours",
    "scenarios:\n  a: {claim: {hours: many}}": "claim.hours",
    "scenarios:\n  a: {run: {id: r2}}": "note, claim",
    "scenarios:\n  a: {job: {image: docker.io/library/other:1}}": "scenarios.a.job.image: .*parameters",
    "scenarios:\n  a: {job: {parameters: {batch: {sequences: 0}}}}": "batch.sequences",
    "scenarios:\n  a: {fleet: {instance_types: [g9.huge]}}": "a GPU instance type",
}


@pytest.mark.parametrize("section", SECTIONS)
def test_a_bad_scenario_says_where_and_what_is_allowed(tmp_path: Path, section: str) -> None:
    path = written(tmp_path, section)
    with pytest.raises(DefinitionError, match=SECTIONS[section]):
        scenarios(path, now=NOW)


def test_a_typo_in_a_scenario_is_a_problem_of_the_file_whoever_loads_it(tmp_path: Path) -> None:
    path = written(tmp_path, "scenarios:\n  a: {jobb: {parameters: {batch: {sequences: 4}}}}")
    with pytest.raises(DefinitionError, match=r"scenarios\.a\.jobb: .* Nearest: job\."):
        load(path, now=NOW)


def test_claims_and_held_hours_are_money_and_hours(tmp_path: Path) -> None:
    path = written(tmp_path, "scenarios:\n  a: {claim: {hours: 3.5, usd: 12.10}, hold_hours: 4, note: so it was}")
    (made,) = scenarios(path, now=NOW)
    assert (made.variant.claim.hours, made.variant.claim.usd) == (Decimal("3.5"), Decimal("12.10"))
    assert made.variant.hold_hours == 4
    assert made.variant.note == "so it was"


def test_a_rehearsal_knows_no_scenarios(tmp_path: Path) -> None:
    path = tmp_path / "growth.yaml"
    path.write_text(rehearsal_text(GROWTH))
    assert "scenarios" not in path.read_text()
    assert scenarios(path, now=NOW) == ()
