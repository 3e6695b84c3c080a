"""What must hold for the fleets of a file with stages: one for each, all but the first at 0, and all of them expire."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.account import rights
from gpufleet.infra.definition.loader import load
from gpufleet.infra.program.resources.identity import node_statements
from tests.infra.declared_world import declare
from tests.infra.staged_files import PINNED, several_in
from tests.repository import ROOT

FLEET, TEMPLATE = "aws:ec2/fleet:Fleet", "aws:ec2/launchTemplate:LaunchTemplate"
NAME = "kernel-sft-stages"


def test_each_stage_has_a_fleet_of_its_own_and_only_the_first_begins(tmp_path: Path) -> None:
    found = declare(tmp_path / "project", NAME, (ROOT / "stacks" / f"{NAME}.yaml").read_text())
    assert found.result.ok, found.result.text
    definition = load(ROOT / "stacks" / f"{NAME}.yaml", now=datetime.now(UTC), staged=True)
    assert found.kinds == set(rights.declared(definition))
    fleets, templates = found.inputs(FLEET), found.inputs(TEMPLATE)
    sizes = {
        each["tags"]["gpufleet:run"]: each["targetCapacitySpecification"]["totalTargetCapacity"] for each in fleets
    }
    assert sizes == {"r1/train": 1, "r1/judge": 0}
    for fleet in fleets:
        assert fleet["terminateInstances"] is True
        assert fleet["terminateInstancesWithExpiration"] is True
        assert fleet["validUntil"].endswith("Z")
    for template in templates:
        assert template["instanceInitiatedShutdownBehavior"] == "terminate"
        assert template["metadataOptions"]["httpTokens"] == "required"
        assert {each["ebs"]["deleteOnTermination"] for each in template["blockDeviceMappings"]} == {"true"}
    tagged = [each["tags"]["gpufleet:run"] for each in templates]
    assert sorted(tagged) == sorted(sizes)
    assert "egress" not in found.one("aws:ec2/securityGroup:SecurityGroup")
    assert not found.one("aws:ec2/securityGroup:SecurityGroup").get("ingress")
    assert not [kind for kind in found.kinds if "IngressRule" in kind]


def test_a_stage_of_several_nodes_has_what_a_run_of_several_has(tmp_path: Path) -> None:
    text = several_in("train", PINNED)
    project = tmp_path / "project"
    (project / "code").mkdir(parents=True)
    (project / "code" / "stage.py").touch()
    found = declare(project, "staged", text)
    assert found.result.ok, found.result.text
    file = tmp_path / "staged.yaml"
    file.write_text(text)
    definition = load(file, now=datetime.now(UTC), staged=True)
    assert found.kinds == set(rights.declared(definition))
    rule = found.one("aws:vpc/securityGroupIngressRule:SecurityGroupIngressRule")
    assert (rule["ipProtocol"], rule.get("cidrIpv4")) == ("-1", None)
    templates = {each["tags"]["gpufleet:run"]: each for each in found.inputs(TEMPLATE)}
    assert {run for run, each in templates.items() if "networkInterfaces" in each} == {"r1/train"}
    assert len(found.inputs("aws:ec2/subnet:Subnet")) == 2  # of the stages with one node
    machines = found.inputs("aws:sfn/stateMachine:StateMachine")
    group = "arn:aws:scheduler:us-east-2:1:schedule/gpufleet-staged-0000000/stop"
    statements = node_statements(definition, "arn:aws:s3:::b", "arn:l", group, "arn:r")
    named = {each["Sid"]: each["Resource"] for each in statements if each["Action"] == "states:StartExecution"}
    machine = "arn:aws:states:us-east-2:1:stateMachine:gpufleet-staged-0000000"
    assert named == {"AskAgain": f"{machine}_train", "BeginStages": [f"{machine}-train", f"{machine}-judge"]}
    assert len(machines) == 3


def test_a_stage_in_a_zone_of_its_own_has_a_subnet_there(tmp_path: Path) -> None:
    text = PINNED.replace(
        "fleet: {instance_types: [c7i.xlarge]}", "fleet: {instance_types: [c7i.xlarge], zones: [us-east-2c]}"
    )
    project = tmp_path / "project"
    (project / "code").mkdir(parents=True)
    (project / "code" / "stage.py").touch()
    found = declare(project, "staged", text)
    assert found.result.ok, found.result.text
    zones = {each["availabilityZone"] for each in found.inputs("aws:ec2/subnet:Subnet")}
    assert zones == {"us-east-2a", "us-east-2b", "us-east-2c"}
