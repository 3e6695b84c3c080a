"""TrainingRun as a Pulumi package: what it takes and gives, and programs that get it from the engine."""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import shutil
import sys
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

import gpufleet
from gpufleet._component import Host, TrainingRun
from gpufleet.infra.definition.pin import pin
from gpufleet.rehearsal import provider
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Pulumi, settings
from tests.rehearsal.engine_world import AMI, IMAGE, edit
from tests.repository import ROOT

PLUGIN = "pulumi-resource-gpufleet"


def schema() -> dict[str, Any]:
    host = Host([TrainingRun], "gpufleet", version="1.2.3")
    found: dict[str, Any] = json.loads(host.schema or "")["resources"]["gpufleet:index:TrainingRun"]
    return found


def camel(name: str) -> str:
    return re.sub("_(.)", lambda found: found[1].upper(), name)


def test_the_package_takes_and_gives_what_the_component_does() -> None:
    parameters = inspect.signature(gpufleet.TrainingRun.__init__).parameters
    found = schema()
    assert set(found["inputProperties"]) == {camel(name) for name in parameters} - {"self", "name", "opts"}
    assert found["requiredInputs"] == ["definition"]
    outputs = gpufleet.TrainingRun.__annotations__
    assert set(found["properties"]) == {camel(name) for name in outputs}
    assert all(each["description"] for each in (*found["inputProperties"].values(), *found["properties"].values()))


def test_the_plugin_that_is_installed_is_there() -> None:
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[PLUGIN].partition(":")
    assert callable(getattr(importlib.import_module(module), function))


REAL = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
REMOTE = """\
import pulumi, pulumi_aws as aws

ohio = aws.Provider("ohio", region="us-east-2")
here = pulumi.ResourceOptions(provider=ohio)
vpc = aws.ec2.Vpc("team", cidr_block="10.20.0.0/16", opts=here)
subnets = {
    zone: aws.ec2.Subnet(zone, vpc_id=vpc.id, availability_zone=zone, cidr_block=f"10.20.{index}.0/24", opts=here).id
    for index, zone in enumerate(("us-east-2a", "us-east-2b"))
}


class Run(pulumi.ComponentResource):  # as the SDKs have it that `pulumi package add` makes
    def __init__(self, name, opts, **given):
        outputs = dict.fromkeys(("bucket", "runPrefix", "logGroup", "fleetId", "bill"))
        super().__init__("gpufleet:index:TrainingRun", name, {**given, **outputs}, opts, remote=True)


run = Run(
    "base",
    pulumi.ResourceOptions(providers=[ohio]),
    definition="training.yaml",
    vpcId=vpc.id,
    subnets=subnets,
    tags={"CostCenter": "1234"},
)
pulumi.export("prefix", run.runPrefix)
pulumi.export("usd", run.bill["usd"]["p90"])
"""
NATIVE = """
import gpufleet

run = gpufleet.TrainingRun(
    "base",
    "training.yaml",
    vpc_id=vpc.id,
    subnets=subnets,
    tags={"CostCenter": "1234"},
    opts=pulumi.ResourceOptions(provider=ohio),
)
pulumi.export("prefix", run.run_prefix)
pulumi.export("usd", run.bill.usd.p90)
"""


@contextmanager
def program(folder: Path, project: dict[str, Any]) -> Iterator[tuple[Cloud, Pulumi]]:
    """A stack of a program in `folder`, beside the example's definition, with the plugin as an installation has it."""
    shutil.copytree(ROOT / "examples" / "program", folder, ignore=shutil.ignore_patterns("__main__.py", "Pulumi.yaml"))
    (folder / "Pulumi.yaml").write_text(yaml.safe_dump({"options": {"refresh": "always"}, **project}))
    pin(folder / "training.yaml", ami=AMI, image=IMAGE, supervisor_image=IMAGE)
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    module, _, function = scripts[PLUGIN].partition(":")
    plugin = folder.parent / "bin" / PLUGIN
    plugin.parent.mkdir()
    plugin.write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
    plugin.chmod(0o755)
    path = os.pathsep.join((str(plugin.parent), os.environ["PATH"]))
    with Cloud(folder.parent / "cloud", clock=ManualClock(datetime.now(UTC).replace(microsecond=0))) as cloud:
        environment = {**cloud.environment(), "PYTHONPATH": str(ROOT), "PATH": path}
        with provider.serve(environment) as port:
            yield cloud, Pulumi(folder, {**environment, **settings(folder, port)}, "dev", lambda line: None)


@REAL
def test_a_program_that_has_it_from_the_engine_declares_the_same_as_one_that_imports_it(tmp_path: Path) -> None:
    python = {"name": "other", "main": "app", "runtime": {"name": "python", "options": {"virtualenv": sys.prefix}}}
    with program(tmp_path / "program", python) as (cloud, engine):
        main = tmp_path / "program" / "app" / "__main__.py"
        main.parent.mkdir()
        main.write_text(REMOTE)
        created = engine.up()
        assert created.ok, created.text
        assert "in eight runs of ten" in created.diagnostics
        outputs = engine.outputs()
        assert outputs["prefix"].endswith("/r1/")
        assert 0 < outputs["usd"] < 3
        networks = cloud.client("ec2").describe_vpcs(Filters=[{"Name": "tag-key", "Values": ["gpufleet:stack"]}])
        assert networks["Vpcs"] == []  # the team's is used
        main.write_text(REMOTE[: REMOTE.index("\n\nclass Run")] + NATIVE)
        native = engine.up()
        assert set(native.changes) == {"same"}, native.text
        assert engine.outputs() == outputs
        main.write_text(REMOTE)
        edit(tmp_path / "program" / "training.yaml", "max_usd: 3", "max_usd: 0.01")
        refused = engine.preview()
        assert not refused.ok
        assert "Run r1 already exists with other settings" in refused.diagnostics
        assert "_training_run.py" not in refused.text
        assert engine.destroy().ok
        assert {kind for kind, _ in cloud.leftovers()} == {"bucket"}


@REAL
@pytest.mark.skipif(shutil.which("pulumi-language-yaml") is None, reason="Pulumi's YAML runtime is not on PATH")
def test_the_yaml_program_of_the_page_runs(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "api.md").read_text()
    (text,) = re.findall(r"```yaml\n(name: .*?)```", page, re.DOTALL)
    project = yaml.safe_load(text)
    sections = yaml.safe_load((ROOT / "examples" / "program" / "training.yaml").read_text())
    sections["fleet"]["ami"] = AMI
    sections["job"] |= {"image": IMAGE, "supervisor_image": IMAGE}
    project["resources"]["second"] = {"type": "gpufleet:TrainingRun", "properties": {"definition": sections}}
    with program(tmp_path / "program", project) as (cloud, engine):
        created = engine.up()
        assert created.ok, created.text
        outputs = engine.outputs()
        assert outputs["results"].startswith("s3://gpufleet-training-")
        assert 0 < outputs["usd"] < 3
        again = engine.up()
        assert set(again.changes) == {"same"}, again.text
        assert engine.destroy().ok
        assert sorted(kind for kind, _ in cloud.leftovers()) == ["bucket", "bucket"]


@REAL
@pytest.mark.slow  # npm fetches Pulumi's SDK
@pytest.mark.skipif(not shutil.which("pulumi-language-nodejs"), reason="Pulumi's Node.js runtime is not on PATH")
def test_the_typescript_program_of_the_page_runs_with_the_sdk_that_the_engine_makes(tmp_path: Path) -> None:
    (text,) = re.findall(r"```typescript\n(.*?)```", (ROOT / "docs" / "api.md").read_text(), re.DOTALL)
    with program(tmp_path / "program", {"name": "platform", "runtime": "nodejs"}) as (cloud, engine):
        needed = {"dependencies": {"@pulumi/pulumi": "^3", "@types/node": "^20", "typescript": "^5"}}
        (tmp_path / "program" / "package.json").write_text(json.dumps(needed))
        (tmp_path / "program" / "tsconfig.json").write_text('{"compilerOptions": {"strict": true}}')
        (tmp_path / "program" / "index.ts").write_text(text)
        engine._run(["npm", "install", "--no-audit", "--no-fund"])
        engine._run(["pulumi", "package", "add", str(tmp_path / "bin" / PLUGIN)])
        created = engine.up()
        assert created.ok, created.text
        outputs = engine.outputs()
        assert outputs["results"].startswith("s3://gpufleet-training-")
        assert 0 < outputs["usd"] < 3
        again = engine.up()
        assert set(again.changes) == {"same"}, again.text
        assert engine.destroy().ok
        assert {kind for kind, _ in cloud.leftovers()} == {"bucket"}
