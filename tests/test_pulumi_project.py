"""Pulumi.yaml and what it leads to: the settings that the program reads, and what `pulumi install` installs."""

from __future__ import annotations

import re
import tomllib

import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from gpufleet.infra.definition.selected import DEFINITION, SCENARIO
from gpufleet.infra.program.project import PROGRAM_TEXT, pulumi_yaml
from tests.repository import ROOT

PROJECT = yaml.safe_load((ROOT / "Pulumi.yaml").read_text())
PINNED = set(re.findall(r"(?m)^([\w.-]+)==", (ROOT / "constraints.txt").read_text()))


def test_it_says_what_gpufleet_init_writes_into_other_repositories() -> None:
    own = {key: value for key, value in PROJECT.items() if key != "template"}
    assert yaml.safe_load(pulumi_yaml("gpufleet", PROJECT["runtime"]["options"], main="infra")) == own
    assert (ROOT / "infra" / "__main__.py").read_text().partition("\n")[2] == PROGRAM_TEXT.partition("\n")[2]


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
    assert {re.split(r"[\[;<>]", each)[0].lower() for each in named} - {"gpufleet", "pip"} <= pinned


def test_what_users_install_has_a_lower_bound_that_the_pins_keep_and_no_pin() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    named = [
        *project["dependencies"],
        *(each for extra in ("job", "rehearsal", "report", "serve") for each in extras[extra]),
    ]
    pins = dict(re.findall(r"(?m)^([\w.-]+)==(.+)$", (ROOT / "constraints.txt").read_text()))
    versions = {canonicalize_name(name): version for name, version in pins.items()}
    for each in map(Requirement, named):
        if each.name in ("gpufleet", "pip"):  # an extra of its own; whatever pip there is
            continue
        assert {spec.operator for spec in each.specifier} <= {">=", "<"}, each
        assert ">=" in {spec.operator for spec in each.specifier}, each
        assert versions[canonicalize_name(each.name)] in each.specifier, each
