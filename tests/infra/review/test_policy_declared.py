"""The policy pack's facts come from run.json as the engine is about to declare it.

pulumi-policy itself is installed in its own environment (docs/review.md); stand-ins replace its few names here.
"""

from __future__ import annotations

import runpy
import shutil
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.boot import run_config
from gpufleet.infra.review import policy
from gpufleet.job.contract import run as run_file
from tests.infra.cost_definitions import definition
from tests.repository import ROOT

PACK = ROOT / "policy"
INPUTS: dict[str, Any] = {
    "archive": {"sha256": "0", "bytes": 1},
    "dataset": {"uri": None, "sha256": "0", "files": []},
}
DATASET_BYTES = sum(file["bytes"] for file in INPUTS["dataset"]["files"])


class Properties(dict[str, Any]):
    """Properties of which some are unknown in a first preview: reading those is an error, as in the engine."""

    def __getitem__(self, key: str) -> Any:
        value = super().__getitem__(key)
        assert value is not None, f"{key} is unknown in a preview"
        return value


def stack() -> StackDefinition:
    return definition(types=("g6e.2xlarge", "g5.2xlarge"), max_usd="20")


def resources() -> list[SimpleNamespace]:
    """Some resources of a run on two types, in the engine's form."""
    bill = price(stack(), load_catalog(), dataset_bytes=DATASET_BYTES, runs=200)
    content = run_file.encode(run_config.run_config(stack(), bill, INPUTS, expires="2026-12-01T00:00:00Z")).decode()
    found = [
        ("aws:s3/bucket:Bucket", "gpufleet-growth", Properties(bucket=None)),
        (policy.OBJECT, "job-archive", Properties(content=None, source=None, bucket=None)),
        (policy.OBJECT, "run-config", Properties(content=content, bucket=None)),
        ("aws:ec2/fleet:Fleet", "fleet-fleet", Properties(launchTemplateConfigs=None)),
    ]
    return [SimpleNamespace(resource_type=kind, name=name, props=props) for kind, name, props in found]


def test_run_json_states_the_same_facts_as_definition_and_bill() -> None:
    found = [policy.declared(each.resource_type, each.name, each.props) for each in resources()]
    bill = price(stack(), load_catalog(), dataset_bytes=DATASET_BYTES, runs=200)
    assert found == [None, None, policy.facts(stack(), bill), None]


def test_the_name_is_the_one_under_which_the_program_declares_it() -> None:
    source = (ROOT / "infra" / "program" / "resources" / "declare.py").read_text()
    assert f'name=f"{policy.RUN_CONFIG}{{' in source


def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rules: str | None) -> dict[str, list[str]]:
    """Rule -> the pack's reports on the run above, with `rules` as the project's policy.yaml."""
    packs: list[list[Any]] = []
    module = types.ModuleType("pulumi_policy")
    names = {
        "PolicyPack": lambda name, policies: packs.append(policies),
        "ResourceValidationPolicy": lambda **arguments: SimpleNamespace(**arguments),
        "EnforcementLevel": SimpleNamespace(MANDATORY="mandatory"),
        "ReportViolation": object,
        "ResourceValidationArgs": object,
    }
    for name, value in names.items():
        setattr(module, name, value)
    monkeypatch.setitem(sys.modules, "pulumi_policy", module)
    (tmp_path / "policy").mkdir()
    shutil.copy(PACK / "__main__.py", tmp_path / "policy")
    if rules is not None:
        (tmp_path / "policy.yaml").write_text(rules)
    runpy.run_path(str(tmp_path / "policy" / "__main__.py"))
    (pack,) = packs
    assert {each.enforcement_level for each in pack} == {"mandatory"}
    said: dict[str, list[str]] = {}
    for each in pack:
        said[each.name] = []
        for resource in resources():
            each.validate(resource, said[each.name].append)
    return said


def test_the_pack_has_every_rule_and_reports_each_once_under_its_own_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = reported(tmp_path, monkeypatch, "allowed_regions: [eu-west-1]\nallowed_types: [g5.*]\nspot_only: true\n")
    assert [name.replace("-", "_") for name in found] == list(policy.RULES)
    assert found["allowed-regions"] == ["region us-east-2, allowed: eu-west-1"]
    assert found["allowed-types"] == ["instance types g6e.2xlarge, allowed: g5.*"]
    assert found["spot-only"] == found["required-owner"] == found["max-usd-per-run"] == []


def test_without_a_policy_file_the_pack_reports_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not any(reported(tmp_path, monkeypatch, None).values())


def test_a_broken_policy_file_stops_the_pack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(DefinitionError, match="Nearest: spot_only"):
        reported(tmp_path, monkeypatch, "spot_onyl: true")
