"""`pulumi config` selects what a stack runs: the program and every command get the same answer."""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.selected import selected
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program.plan import make
from gpufleet.infra.program.run_guard import Previous
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import NAME, declare_bucket, project, put

NOW = datetime(2026, 11, 21, tzinfo=UTC)
SCENARIOS = """
scenarios:
  west:
    fleet: {region: us-west-2, zones: [us-west-2a], instance_types: [g6e.2xlarge]}
  held: {hold_hours: 3}
"""


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A definition with a scenario for another region; the current directory is in its project."""
    path = project(tmp_path, monkeypatch)
    path.write_text(path.read_text() + SCENARIOS)
    return path


def configure(text: str, name: str = NAME) -> None:
    """Writes the stack's settings beside Pulumi.yaml, as `pulumi config set` does."""
    Path(f"Pulumi.{name}.yaml").write_text(text)


def region(word: str) -> str:
    return stack.definition_of(argparse.Namespace(stack=word)).fleet.region


@pytest.mark.parametrize("command", ["doctor", "wait", "status", "sweep"])
def test_a_command_looks_where_the_scenario_runs(
    command: str, path: Path, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    configure("config:\n  gpufleet:scenario: west\n")
    main([command, NAME])
    said = capsys.readouterr()
    assert f"{NAME} in us-west-2" in said.out + said.err
    assert f"{NAME}'s scenario west, as `pulumi config` says" in said.err


def test_the_bill_is_the_one_that_the_program_shows(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure("config:\n  gpufleet:scenario: west\n")
    assert main(["cost", NAME, "--json"]) == 0
    bill = json.loads(capsys.readouterr().out)
    plan = make(Path.cwd(), NAME, now=NOW, previous=Previous(outputs={}), preview=True, scenario="west")
    assert (bill["scenario"], bill["region"], bill["type"]) == ("west", "us-west-2", "g6e.2xlarge")
    assert bill["usd"]["p50"] == str(plan.bill.usd.p50)


def test_a_scenario_asked_for_goes_before_the_stacks_own(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    configure("config:\n  gpufleet:scenario: west\n")
    assert main(["cost", NAME, "--scenario", "held", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"] == "held"


@pytest.mark.parametrize("text", ["", "encryptionsalt: v1:x\n", "config:\n  pulumi:tags: {a: b}\n", "config: {}\n"])
def test_without_a_word_in_the_configuration_it_is_the_file_as_it_is(
    text: str, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    configure(text)
    assert region(NAME) == "us-east-2"
    assert capsys.readouterr().err == ""


def test_a_stack_of_another_name_runs_the_definition_it_names(path: Path) -> None:
    configure(f"config:\n  gpufleet:definition: {NAME}\n  gpufleet:scenario: west\n", "second")
    assert selected("second", Path.cwd()).path == path
    assert region("second") == "us-west-2"
    assert region(NAME) == "us-east-2"  # the file's own stack has no setting


def test_a_path_names_that_very_file(path: Path, tmp_path: Path) -> None:
    configure("config:\n  gpufleet:scenario: west\n")
    assert region(f"stacks/{NAME}.yaml") == "us-west-2"  # the stack of that name runs the file
    copy = tmp_path / f"{NAME}.yaml"
    copy.write_text(path.read_text())
    assert region(str(copy)) == "us-east-2"


def test_a_hint_names_the_stack_as_it_was_asked_for(
    path: Path, cloud: Cloud, capsys: pytest.CaptureFixture[str]
) -> None:
    """No command finds a file outside of stacks/ by its name alone."""
    elsewhere = Path("elsewhere") / path.name
    elsewhere.parent.mkdir()
    path.rename(elsewhere)
    configure(f"config:\n  gpufleet:definition: {elsewhere}\n", "second")
    put(cloud, declare_bucket(cloud), "run.json", {})
    for asked in (str(elsewhere), "second"):
        assert main(["stop", asked]) == 2
        assert f"`gpufleet results {asked}` downloads" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["gpufleet:senario", "gpufleet:region"])
def test_a_setting_that_nothing_reads_is_refused(key: str, path: Path) -> None:
    """If the scenario's key were misspelled, the file itself would run."""
    configure(f"config:\n  {key}: west\n")
    with pytest.raises(GpufleetError, match=f"{key} .*allowed: definition, scenario"):
        region(NAME)


@pytest.mark.parametrize("key", ["region", "profile", "assumeRoles", "defaultTags", "allowedAccountIds"])
def test_a_setting_of_the_provider_is_refused_and_what_to_use_is_said(key: str, path: Path) -> None:
    configure(f"config:\n  aws:{key}: x\n")
    with pytest.raises(GpufleetError, match=f"aws:{key} .*is not followed.*AWS_PROFILE.*`pulumi config rm aws:{key}`"):
        region(NAME)


def test_settings_are_under_the_project_s_own_name(path: Path) -> None:
    Path("Pulumi.yaml").write_text("name: mine\n")
    configure("config:\n  mine:scenario: west\n")
    assert region(NAME) == "us-west-2"
    configure("config:\n  mine:senario: west\n")
    with pytest.raises(GpufleetError, match=r"mine:senario .* is not a setting"):
        region(NAME)


def test_a_scenario_that_cannot_be_run_is_refused_with_the_command_that_prices_it(path: Path) -> None:
    configure("config:\n  gpufleet:scenario: held\n")
    with pytest.raises(GpufleetError, match=f"holds its node.*gpufleet cost {NAME} --scenario held"):
        region(NAME)


@pytest.mark.parametrize(
    ("text", "said"),
    [("config:\n  gpufleet:scenario:\n    secure: v1:abc\n", "is not plain text"), ("config: [\n", "cannot be read")],
)
def test_a_configuration_that_tells_no_name_is_an_error(text: str, said: str, path: Path) -> None:
    configure(text)
    with pytest.raises(GpufleetError, match=f"Pulumi.{NAME}.yaml.*{said}"):
        region(NAME)
