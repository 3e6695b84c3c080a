"""`gpufleet cost` on the stacks of this repository."""

from __future__ import annotations

import argparse
import json
import re
import shutil
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.commands import compare, cost
from gpufleet.infra.errors import DefinitionError, GpufleetError
from tests.infra.command_files import several_nodes
from tests.repository import ROOT

STACK = "tinystories-growth"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cost.arguments(parser)
    return cost.run(parser.parse_args(words))


@pytest.fixture
def every_stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder with all definitions, and nothing prepared."""
    shutil.copytree(ROOT / "stacks", tmp_path / "stacks")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the stack's definition, and no prepared dataset."""
    (tmp_path / "stacks").mkdir()
    shutil.copy(ROOT / "stacks" / f"{STACK}.yaml", tmp_path / "stacks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_answers_in_the_first_line_and_all_of_the_bill_is_under_all(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(STACK, "--json") == 0
    usd = json.loads(capsys.readouterr().out)["usd"]
    low, middle, high = (f"{Decimal(usd[key]):.2f}" for key in ("p10", "p50", "p90"))
    assert run(STACK) == 0
    assert capsys.readouterr().out.startswith(
        f"{STACK}: about {middle} USD ({low} to {high} in eight runs of ten), 0.57 h, on"
    )
    assert run(STACK, "--all") == 0
    printed = capsys.readouterr().out
    assert printed.startswith(f"{STACK}, run ")
    assert "total = p50" in printed
    assert "the size of the dataset is assumed" in printed
    assert "perhaps cheaper, in fewer than 80% of runs" in " ".join(printed.split())


def test_its_json_has_what_is_cheaper(every_stack: None, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("stacks/sft-h100.yaml")
    path.write_text(re.sub(r"max_usd: \d+", "max_usd: 1000", path.read_text(), count=1))  # whatever it costs
    assert run("sft-h100", "--json") == 0
    tree = json.loads(capsys.readouterr().out)
    first = tree["cheaper"]["options"][0]
    assert Decimal(first["usd"]["mean"]) < Decimal(tree["needed"]["usd"]["mean"])
    assert run("sft-h100", "--scenario", "fsdp-2xh100", "--json") == 0  # two nodes
    assert json.loads(capsys.readouterr().out)["cheaper"] is None


def test_a_damaged_dataset_is_said_and_does_not_stop_the_bill(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = project / "data" / "tinystories"
    folder.mkdir(parents=True)
    (folder / "dataset.json").write_text("{")
    assert run(STACK, "--all") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "storage.dataset, data/tinystories, is damaged" in printed
    assert "the size of the dataset is assumed" in printed


def test_a_broken_rule_of_policy_yaml_is_said_beside_the_bill_and_is_exit_1(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "policy.yaml").write_text("max_usd_per_run: 0.50\nspot_only: true\n")
    assert run(STACK) == 1
    said = capsys.readouterr()
    assert "in eight runs of ten" in said.out
    assert said.err.startswith("gpufleet: breaks max_usd_per_run of policy.yaml: p90 is ")
    assert "spot_only" not in said.err


def test_it_finds_the_project_from_a_folder_inside_it(
    project: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (project / "data").mkdir()
    monkeypatch.chdir(project / "data")
    assert run(STACK) == 0
    assert capsys.readouterr().out.startswith(f"{STACK}: about ")


def test_json_prints_the_same_figures_for_programs(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(STACK, "--json") == 0
    found = json.loads(capsys.readouterr().out)
    assert sum(Decimal(line["amount"]) for line in found["lines"]) == Decimal(found["usd"]["p50"])
    assert run(STACK, "--all") == 0
    assert found["usd"]["p50"] in capsys.readouterr().out


def test_what_up_still_needs_is_a_warning(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run(STACK, "--json")
    assert any("doctor" in warning for warning in json.loads(capsys.readouterr().out)["warnings"])


def test_of_several_nodes_an_image_without_its_digest_is_an_error_after_the_bill(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file, text = project / "stacks" / "pretrain-d64.yaml", several_nodes("one")
    file.write_text(text)
    with pytest.raises(DefinitionError, match="the pulls of two nodes: `gpufleet doctor pretrain-d64 --pin`") as told:
        run("pretrain-d64")
    assert capsys.readouterr().out.startswith("pretrain-d64: about ")
    (problem,) = told.value.problems
    assert problem.path == "job.image"
    assert problem.allowed == f"{problem.value}@sha256:..., its digest, where fleet.nodes is 2"
    assert problem.line == text[: text.index("  image: ")].count("\n") + 1
    file.write_text(text.replace(problem.value, f"{problem.value}@sha256:{'1' * 64}"))
    assert run("pretrain-d64") == 0


def test_a_cap_below_the_bill_shows_the_bill_and_is_then_an_error(
    project: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project / "stacks" / f"{STACK}.yaml"
    path.write_text(path.read_text().replace("max_usd: 3.00", "max_usd: 0.50"))
    with pytest.raises(DefinitionError, match=r"limits\.max_usd"):
        run(STACK)
    assert "in eight runs of ten" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("stack", "scenario", "why"),
    [
        pytest.param("pretrain-d64", "31h-p5", "it holds its node beyond its work", marks=pytest.mark.slow),
        pytest.param("sft-h100", "fsdp-2xh100", "it is several nodes, and a run is one", marks=pytest.mark.slow),
        ("kernel-sft", "ours-30-percent-more", "it adds a buffer to its work"),
    ],
)
@pytest.mark.usefixtures("every_stack")
def test_a_scenario_that_cannot_be_launched_is_priced_as_compare_prices_it(
    stack: str, scenario: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(stack, "--scenario", scenario, "--all") == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert printed.startswith(f"{stack}, scenario {scenario}, run ")
    assert f"Cannot be launched: {why}. Only priced, so no limit of the file is held against it." in printed
    assert run(stack, "--scenario", scenario, "--json") == 0
    bill = json.loads(capsys.readouterr().out)
    parser = argparse.ArgumentParser()
    compare.arguments(parser)
    compare.run(parser.parse_args([stack, "--json"]))
    (row,) = [row for row in json.loads(capsys.readouterr().out)["scenarios"] if row["scenario"] == scenario]
    assert bill["usd"] == row["usd"]
    assert bill["cap"] is None


@pytest.mark.usefixtures("every_stack")
def test_the_speed_of_a_job_on_a_node_that_is_held_anyway_costs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("kernel-sft", "--scenario", "plan-8.5h", "--json") == 0
    bill = json.loads(capsys.readouterr().out)
    assert bill["unknown"]["sigma"]["slower"] > 0
    assert bill["unknown"]["speed"] is None


@pytest.mark.usefixtures("every_stack")
def test_a_scenario_that_ran_elsewhere_has_its_plans_claim_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("pretrain-d64", "--scenario", "plan-as-written") == 0
    assert "ran elsewhere, so there is nothing to price" in (printed := capsys.readouterr().out)
    assert "claims 31 h and 992 USD" in printed
    with pytest.raises(GpufleetError, match="nothing to price"):
        run("pretrain-d64", "--scenario", "plan-as-written", "--json")


def test_a_deadline_is_held_against_the_run(every_stack: None, capsys: pytest.CaptureFixture[str]) -> None:
    file = Path("stacks/sft-h100.yaml")
    text = file.read_text()
    file.write_text(text.replace("max_hours: 17", "max_hours: 16\n  deadline: in 14.5 h"))
    assert run("sft-h100", "--all") == 0
    assert "of the assumed speed (set-up apart) limits.deadline stops" in " ".join(capsys.readouterr().out.split())
    file.write_text(text.replace("max_hours: 17", "max_hours: 16\n  deadline: in 10 h"))
    with pytest.raises(DefinitionError, match=r"limits.deadline: 'in 10 h' .* hours that p5.4xlarge needs"):
        run("sft-h100")
    assert "in eight runs of ten" in capsys.readouterr().out
