"""What must hold for the fleets of a file with stages: one for each, all but the first at 0, and all of them expire."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.account import rights
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.stages import MOST_ON_NODE
from gpufleet.infra.program.resources.identity import node_statements
from tests.infra.declared_world import declare
from tests.infra.shared_files import SHARED
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


def test_stages_on_one_node_have_one_fleet_and_each_run_json_names_the_next(tmp_path: Path) -> None:
    project = tmp_path / "project"
    (project / "code").mkdir(parents=True)
    (project / "code" / "trial.py").write_text("print(1)\n")
    found = declare(project, "staged", SHARED)
    assert found.result.ok, found.result.text
    definition = load(project / "stacks" / "staged.yaml", now=datetime.now(UTC), staged=True)
    assert found.kinds == set(rights.declared(definition))
    (fleet,), (template,) = found.inputs(FLEET), found.inputs(TEMPLATE)
    assert fleet["tags"]["gpufleet:run"] == "r1/t1"
    assert fleet["targetCapacitySpecification"]["totalTargetCapacity"] == 1
    texts = {
        each["key"]: each["content"]
        for each in found.inputs("aws:s3/bucketObjectv2:BucketObjectv2")
        if "content" in each
    }
    runs = [texts[f"r1/{trial}/run.json"] for trial in ("t1", "t2", "t3")]
    hashes = [hashlib.sha256(text.encode()).hexdigest() for text in runs]
    assert f"RUN_CONFIG_SHA256={hashes[0]}\n" in base64.b64decode(template["userData"]).decode()
    following = [json.loads(text).get("following") for text in runs]
    assert following == [{"stage": "t2", "sha256": hashes[1]}, {"stage": "t3", "sha256": hashes[2]}, None]
    limits = [(json.loads(text)["limits"]["max_usd"], json.loads(text)["own"]["max_usd"]) for text in runs]
    assert limits == [("8", "2")] * 3


def test_the_rights_of_a_node_with_as_many_stages_as_allowed_fit_into_a_role(tmp_path: Path) -> None:
    """AWS takes 10,240 letters; the rest is for private images, secrets, a key and messages."""
    job = "    job: {command: 'python trial.py {checkpoints} {outputs} --x=1'}\n"
    listed = "".join(
        f"  - name: t{number:08}\n{'    stays: true' * bool(number)}\n{job}" for number in range(MOST_ON_NODE)
    )
    text = SHARED.partition("stages:\n")[0].replace("id: r1", f"id: {'r' * 32}")
    path = tmp_path / f"{'s' * 40}.yaml"
    path.write_text(f"{text}stages:\n{listed}")
    made = f"gpufleet-{path.stem}-1234567"
    arns = (
        f"arn:aws:s3:::{made}",
        f"arn:aws:logs:us-east-2:111122223333:log-group:{made}",
        f"arn:aws:scheduler:us-east-2:111122223333:schedule/{made}/{made}",
        f"arn:aws:iam::111122223333:role/{made}",
    )
    statements = node_statements(load(path, now=datetime.now(UTC), staged=True), *arns)
    assert len(json.dumps({"Version": "2012-10-17", "Statement": statements}, separators=(",", ":"))) < 9_000


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
