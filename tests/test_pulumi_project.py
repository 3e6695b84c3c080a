"""Pulumi.yaml and what it leads to: the settings that the program reads, and what `pulumi install` installs."""

from __future__ import annotations

import re
import tomllib

import yaml
from repository import ROOT

from gpufleet.infra.definition.selected import DEFINITION, SCENARIO

PROJECT = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
PINNED = set(re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text()))


def test_the_schema_names_the_settings_that_are_read_and_needs_none_of_them() -> None:
    assert set(PROJECT["config"]) == {DEFINITION, SCENARIO}
    assert all((each["type"], each["default"]) == ("string", "") for each in PROJECT["config"].values())
    assert set(PROJECT["template"]["config"]) <= set(PROJECT["config"])


def test_pulumi_install_finds_the_program_s_requirements_pinned_and_without_pytorch() -> None:
    lines = (ROOT / PROJECT["main"] / "requirements.txt").read_text().splitlines()
    options = [line for line in lines if line.startswith("-")]
    names = {line for line in lines if line and not line.startswith(("#", "-"))}
    assert options == ["-c ../constraints.txt", "-e .."]
    assert names <= PINNED
    assert "torch" not in names


def test_what_any_extra_names_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = [*project["dependencies"], *(each for extra in project["optional-dependencies"].values() for each in extra)]
    pinned = {name.lower().replace("_", "-") for name in PINNED}
    assert {re.split(r"[\[;]", each)[0].lower() for each in named} <= pinned
