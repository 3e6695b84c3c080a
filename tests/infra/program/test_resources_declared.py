"""What must hold for every definition file: no port is open, nothing stays after a destroy, everything has a name."""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.rehearsal.handlers.table import UNKNOWN
from tests.infra.command_files import command_file
from tests.infra.declared_world import Declared, declare
from tests.repository import OF_ONE_JOB, ROOT

GROWTH = ROOT / "stacks" / "tinystories-growth.yaml"
TEMPLATE, FLEET = "aws:ec2/launchTemplate:LaunchTemplate", "aws:ec2/fleet:Fleet"


def _variant() -> str:
    """The file with the opposite value of every choice."""
    text = GROWTH.read_text()
    for old, new in {
        "capacity: spot": "capacity: on-demand",
        "  dataset: data/tinystories\n": "  dataset: s3://their-bucket/some/prefix\n"
        "  data: {size_gib: 300, iops: 4000, throughput_mibps: 500, snapshot: snap-0123456789abcdef0}\n",
        "    bucket: true": "    bucket: false",
        "size_gib: 100": "size_gib: 120",
        "max_usd: 3.00": "max_usd: 30.00\n  usd_per_hour: 2",
        "  instance_types: [g5.2xlarge]\n": "  instance_types: [g5.2xlarge, g6e.2xlarge]\n",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return f"{text}\nnotify: {{email: me@example.org, webhook: ssm:/team/hook}}\n"


FORMS = {  # each with one fleet: tests/infra/program/test_stages_declared.py has the fleets of stages
    **{path.stem: (path.stem, path.read_text()) for path in OF_ONE_JOB},
    "rehearsed": (GROWTH.stem, rehearsal_text(GROWTH)),  # this holds for the other files too, but each takes seconds
    "the other choices": ("other", _variant()),
}


@pytest.fixture(scope="module", params=list(FORMS.values()), ids=list(FORMS))
def declared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Declared:
    found = declare(tmp_path_factory.mktemp("declared") / "project", *request.param)
    assert found.result.ok, found.result.text
    return found


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Declared:
    return declare(tmp_path_factory.mktemp("other") / "project", "other", _variant())


def test_a_missing_file_of_somebody_s_bucket_can_be_told_from_a_refused_one(tmp_path: Path) -> None:
    """S3 answers 403 in both cases, and the listing shows which; only the prefix may be listed or read."""
    path = tmp_path / "other.yaml"
    path.write_text(_variant())
    definition = load(path, now=datetime(2026, 11, 21, tzinfo=UTC))

    found = [each for each in node_statements(definition, *["own"] * 4) if "their-bucket" in str(each["Resource"])]
    foreign = {each["Action"]: each for each in found}
    assert foreign["s3:GetObject"]["Resource"] == "arn:aws:s3:::their-bucket/some/prefix/*"
    assert foreign["s3:ListBucket"]["Resource"] == "arn:aws:s3:::their-bucket"
    assert foreign["s3:ListBucket"]["Condition"] == {"StringLike": {"s3:prefix": "some/prefix/*"}}
    assert len(found) == 2


def test_a_node_may_pull_its_private_image_and_no_other(tmp_path: Path) -> None:
    image = "123456789012.dkr.ecr.eu-west-1.amazonaws.com/team/train:1@sha256:" + "1" * 64
    path = tmp_path / "other.yaml"
    path.write_text(re.sub("image: .*", f"image: {image}", _variant()))
    definition = load(path, now=datetime(2026, 11, 21, tzinfo=UTC))

    rights = {each["Sid"]: each for each in node_statements(definition, *["own"] * 4)}
    assert rights["LogInToEcr"]["Action"] == "ecr:GetAuthorizationToken"
    assert rights["PrivateImage"]["Resource"] == "arn:aws:ecr:eu-west-1:123456789012:repository/team/train"
    assert rights["PrivateImage"]["Action"] == ["ecr:BatchGetImage", "ecr:GetDownloadUrlForLayer"]


def test_nothing_listens(declared: Declared) -> None:
    assert not any("ingress" in each["inputs"] for each in declared.resources)
    assert not any("Ingress" in kind for kind in declared.kinds)
    assert "keyName" not in declared.one(TEMPLATE)


def test_only_https_goes_out(declared: Declared) -> None:
    (rule,) = declared.inputs("aws:vpc/securityGroupEgressRule:SecurityGroupEgressRule")
    assert (rule["ipProtocol"], rule["fromPort"], rule["toPort"], rule["cidrIpv4"]) == ("tcp", 443, 443, "0.0.0.0/0")
    assert "egress" not in declared.one("aws:ec2/securityGroup:SecurityGroup")


def test_the_metadata_service_asks_for_a_token_and_is_no_container_s_on_a_network_of_its_own(
    declared: Declared,
) -> None:
    assert declared.one(TEMPLATE)["metadataOptions"] == {
        "httpEndpoint": "enabled",
        "httpTokens": "required",
        "httpPutResponseHopLimit": 1,
        "instanceMetadataTags": "enabled",
    }


def test_a_command_s_container_reaches_no_metadata_service_unless_the_file_says_so(tmp_path: Path) -> None:
    for hops, aws in ((1, False), (2, True)):
        path = command_file(tmp_path / str(aws), aws=aws)
        found = declare(tmp_path / str(aws) / "project", "mine", path.read_text())
        assert found.result.ok, found.result.text
        assert found.one(TEMPLATE)["metadataOptions"]["httpPutResponseHopLimit"] == hops


def test_a_command_s_code_and_folders_are_uploaded_by_their_content(tmp_path: Path) -> None:
    for name in ("mine/train.py", "text/a.txt"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text(name)
    path = command_file(tmp_path, code={"folder": "../mine"}, storage={"inputs": {"text": "../text"}})
    found = declare(tmp_path / "project", "mine", path.read_text())
    assert found.result.ok, found.result.text
    keys = {each["key"].rpartition("/")[2] for each in found.inputs("aws:s3/bucketObjectv2:BucketObjectv2")}
    assert keys == {"job.tar.gz", "run.json", "code.tar.gz", "a.txt", UNKNOWN}  # the fleet's id, which `up` writes


def test_every_disk_is_gp3_with_its_figures_and_goes_with_its_node(declared: Declared) -> None:
    for mapping in declared.one(TEMPLATE)["blockDeviceMappings"]:
        disk = mapping["ebs"]
        assert disk["volumeType"] == "gp3"
        assert disk["deleteOnTermination"] == "true"
        assert {"volumeSize", "iops", "throughput"} <= set(disk)
        assert ("snapshotId" in disk) != (disk.get("encrypted") == "true")


def test_a_node_that_shuts_down_is_gone(declared: Declared) -> None:
    assert declared.one(TEMPLATE)["instanceInitiatedShutdownBehavior"] == "terminate"


def test_the_fleet_keeps_one_node_and_leaves_none(declared: Declared) -> None:
    fleet = declared.one(FLEET)
    assert fleet["type"] == "maintain"
    assert fleet["targetCapacitySpecification"]["totalTargetCapacity"] == 1
    assert fleet["terminateInstances"] is True
    assert fleet["terminateInstancesWithExpiration"] is True
    assert fleet["excessCapacityTerminationPolicy"] == "termination"
    assert "onDemandOptions" not in fleet


def test_a_spot_fleet_takes_the_deepest_of_the_cheap_pools_and_never_rebalances(declared: Declared) -> None:
    fleet = declared.one(FLEET)
    kind = fleet["targetCapacitySpecification"]["defaultTargetCapacityType"]
    spot = {"allocationStrategy": "price-capacity-optimized", "instanceInterruptionBehavior": "terminate"}
    assert fleet.get("spotOptions") == (spot if kind == "spot" else None)


def test_the_fleet_expires(declared: Declared) -> None:
    assert declared.one(FLEET)["validUntil"] == declared.result.outputs["run"]["valid_until"]
    assert declared.one(FLEET)["validUntil"].endswith("Z")


def test_a_type_is_offered_in_every_zone_and_each_zone_has_one_subnet(declared: Declared) -> None:
    subnets = declared.inputs("aws:ec2/subnet:Subnet")
    assert len({each["availabilityZone"] for each in subnets}) == len(subnets)
    assert len({each["cidrBlock"] for each in subnets}) == len(subnets)
    overrides = declared.one(FLEET)["launchTemplateConfigs"][0]["overrides"]
    assert len(overrides) % len(subnets) == 0
    assert {key for each in overrides for key in each} == {"instanceType", "subnetId"}  # no maximum price


def test_a_fleet_goes_without_a_type_above_its_ceiling(other: Declared) -> None:
    """The types cost 1.212 and 2.24208 USD on demand, and the ceiling is 2 USD."""
    overrides = other.one(FLEET)["launchTemplateConfigs"][0]["overrides"]
    assert {each["instanceType"] for each in overrides} == {"g5.2xlarge"}


def test_everything_that_takes_tags_has_the_three(declared: Declared) -> None:
    outputs = declared.result.outputs
    wanted = {
        "gpufleet:stack": outputs["definition"],
        "gpufleet:run": outputs["run"]["id"],
        "gpufleet:owner": "you",
    }.items()
    for each in declared.resources:
        if "tagsAll" in each["state"]:
            assert wanted <= each["inputs"]["tags"].items(), each["name"]
    tagged = {each["resourceType"]: each["tags"] for each in declared.one(TEMPLATE)["tagSpecifications"]}
    assert set(tagged) == {"instance"}  # a fleet may not tag network interfaces, and would launch nothing
    assert wanted <= tagged["instance"].items()


def test_the_bucket_is_closed_and_encrypted(declared: Declared) -> None:
    closed = declared.one("aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock")
    assert [value for key, value in sorted(closed.items()) if key != "bucket"] == [True] * 4
    rules = declared.one("aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration")
    assert rules["rules"][0]["applyServerSideEncryptionByDefault"]["sseAlgorithm"] == "AES256"


def test_s3_is_reached_without_a_nat_through_an_open_endpoint(declared: Declared) -> None:
    endpoint = declared.one("aws:ec2/vpcEndpoint:VpcEndpoint")
    assert endpoint["vpcEndpointType"] == "Gateway"
    assert json.loads(endpoint["policy"])["Statement"][0]["Action"] == "*"
    assert not any("natGateway" in kind for kind in declared.kinds)


def test_kept_or_not_is_one_choice_for_the_whole_bucket(declared: Declared) -> None:
    parts = [
        each for each in declared.resources if each["type"].startswith("aws:s3/bucket") and "Object" not in each["type"]
    ]
    assert len(parts) == 5
    kept = {each["options"]["retain_on_delete"] for each in parts}
    assert kept == {not declared.one("aws:s3/bucket:Bucket")["forceDestroy"]}


def test_the_log_group_forgets(declared: Declared) -> None:
    rules = declared.one("aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration")["rules"]
    (days,) = {rule["expiration"]["days"] for rule in rules if "expiration" in rule}
    assert days <= declared.one("aws:cloudwatch/logGroup:LogGroup")["retentionInDays"] < 3 * days


def test_a_bucket_whose_lifecycle_is_others_has_no_rule_of_the_stack_s(tmp_path: Path) -> None:
    text = GROWTH.read_text().replace("    bucket: true", "    bucket: true\n    lifecycle: others")
    found = declare(tmp_path / "project", GROWTH.stem, text)
    assert found.result.ok, found.result.text
    assert FLEET in found.kinds
    assert not [kind for kind in found.kinds if "Lifecycle" in kind]
    assert "expires by the account's own rules, assumed to be after 7 days" in json.dumps(found.result.outputs["kept"])


def test_the_preview_says_what_a_destroy_will_keep(declared: Declared) -> None:
    assert declared.result.outputs["kept"]["usd_per_month"].startswith("$")
    assert "Kept after destroy" in declared.result.diagnostics


def test_the_other_choices_are_taken(other: Declared) -> None:
    assert other.one("aws:s3/bucket:Bucket")["forceDestroy"] is True
    assert other.one(FLEET)["targetCapacitySpecification"]["defaultTargetCapacityType"] == "on-demand"
    root, data = other.one(TEMPLATE)["blockDeviceMappings"]
    assert (root["deviceName"], root["ebs"]["volumeSize"]) == ("/dev/xvda", 120)
    assert data == {
        "deviceName": "/dev/sdf",
        "ebs": {
            "volumeType": "gp3",
            "volumeSize": 300,
            "iops": 4000,
            "throughput": 500,
            "deleteOnTermination": "true",
            "snapshotId": "snap-0123456789abcdef0",
        },
    }


def test_a_wrong_file_declares_nothing_in_a_first_preview(tmp_path: Path) -> None:
    wrong = GROWTH.read_text().replace("max_usd: 3.00", "max_usd: 0.50").replace("max_hours: 2", "max_hours: 0.02")
    found = declare(tmp_path / "project", "tinystories-growth", wrong)
    assert not found.result.ok
    assert found.resources == []
    assert "limits.max_usd: '0.50'" in found.result.diagnostics
    assert "limits.max_hours: '0.02'" in found.result.diagnostics
    assert "Traceback" not in found.result.text


def test_ids_of_what_does_not_exist_yet_are_unknown_in_a_preview(other: Declared) -> None:
    assert {each["vpcId"] for each in other.inputs("aws:ec2/subnet:Subnet")} == {UNKNOWN}
