"""The resources that several nodes need in addition to those of one node, argument by argument; and the refusals."""

from __future__ import annotations

import base64
import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.account import rights
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.program.plan import make
from gpufleet.infra.program.run_guard import Previous
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.handlers.table import UNKNOWN
from tests.infra.command_files import several_nodes
from tests.infra.declared_world import Declared, declare

TEMPLATE, FLEET = "aws:ec2/launchTemplate:LaunchTemplate", "aws:ec2/fleet:Fleet"
INGRESS, EGRESS = (f"aws:vpc/securityGroup{way}Rule:SecurityGroup{way}Rule" for way in ("Ingress", "Egress"))
NAT, ADDRESS, SUBNET = "aws:ec2/natGateway:NatGateway", "aws:ec2/eip:Eip", "aws:ec2/subnet:Subnet"
TABLE, ROUTE = "aws:ec2/routeTable:RouteTable", "aws:ec2/route:Route"


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Declared:
    found = declare(tmp_path_factory.mktemp("two") / "project", "pretrain-d64", several_nodes("one"))
    assert found.result.ok, found.result.text
    return found


@pytest.fixture(scope="module")
def over_all(tmp_path_factory: pytest.TempPathFactory) -> Declared:
    found = declare(tmp_path_factory.mktemp("all") / "project", "pretrain-d64", several_nodes("all"))
    assert found.result.ok, found.result.text
    return found


def test_the_fleet_keeps_both_nodes_in_one_zone_of_one_type(two: Declared) -> None:
    fleet = two.one(FLEET)
    assert fleet["targetCapacitySpecification"]["totalTargetCapacity"] == 2
    assert fleet["launchTemplateConfigs"][0]["overrides"] == [{"instanceType": "p5.48xlarge"}]  # the template's subnet
    assert (fleet["type"], fleet["terminateInstances"]) == ("maintain", True)
    assert fleet["excessCapacityTerminationPolicy"] == "termination"


def test_nodes_reach_each_other_and_nobody_else_reaches_them(two: Declared) -> None:
    (ingress,) = two.inputs(INGRESS)
    inner, outward = sorted(two.inputs(EGRESS), key=lambda each: each["ipProtocol"])
    for rule in (ingress, inner):
        assert rule["ipProtocol"] == "-1"
        assert rule["referencedSecurityGroupId"] == rule["securityGroupId"] == UNKNOWN
        assert not {"fromPort", "toPort", "cidrIpv4"} & set(rule)
    assert (outward["ipProtocol"], outward["fromPort"], outward["toPort"]) == ("tcp", 443, 443)


def test_over_one_card_a_node_has_efa_and_a_public_address(two: Declared) -> None:
    template = two.one(TEMPLATE)
    assert "vpcSecurityGroupIds" not in template  # the two exclude each other
    assert template["networkInterfaces"] == [
        {
            "deviceIndex": 0,
            "networkCardIndex": 0,
            "interfaceType": "efa",
            "subnetId": UNKNOWN,
            "securityGroups": [UNKNOWN],
            "associatePublicIpAddress": "true",
            "deleteOnTermination": "true",
        }
    ]
    assert not two.kinds & {NAT, ADDRESS}


def test_the_rights_that_up_asks_for_are_those_of_all_that_is_declared(
    two: Declared, over_all: Declared, tmp_path: Path
) -> None:
    for declared, cards in ((two, "one"), (over_all, "all")):
        path = tmp_path / "pretrain-d64.yaml"
        path.write_text(several_nodes(cards))
        definition = load(path, now=datetime.now(UTC))
        assert declared.kinds == set(rights.declared(definition))


def test_a_type_without_efa_has_a_plain_interface(tmp_path: Path) -> None:
    text = several_nodes("one").replace("[p5.48xlarge]", "[g6e.4xlarge]").replace("layers: 44", "layers: 8")
    text = text.replace("max_hours: 31", "max_hours: 80")
    found = declare(tmp_path / "project", "pretrain-d64", text)
    assert found.result.ok, found.result.text
    (interface,) = found.one(TEMPLATE)["networkInterfaces"]
    assert "interfaceType" not in interface


def test_over_all_cards_each_has_an_efa_of_its_own_and_the_node_no_public_address(over_all: Declared) -> None:
    interfaces = over_all.one(TEMPLATE)["networkInterfaces"]
    laid_out = [(each["networkCardIndex"], each["deviceIndex"], each.get("interfaceType")) for each in interfaces]
    assert laid_out == [(0, 0, None), (0, 1, "efa-only"), *((card, 0, "efa-only") for card in range(1, 32))]
    assert load_catalog().instances["p5.48xlarge"].efa_devices("all") == 32
    assert not any("associatePublicIpAddress" in each for each in interfaces)
    assert {each["subnetId"] for each in interfaces} == {UNKNOWN}


def test_a_first_card_without_efa_is_a_plain_interface(tmp_path: Path) -> None:
    text = several_nodes("all").replace("p5.48xlarge", "p6-b300.48xlarge").replace("us-east-2", "us-west-2")
    found = declare(tmp_path / "project", "pretrain-d64", text)
    assert found.result.ok, found.result.text
    interfaces = found.one(TEMPLATE)["networkInterfaces"]
    laid_out = [(each["networkCardIndex"], each["deviceIndex"], each.get("interfaceType")) for each in interfaces]
    assert laid_out == [(0, 0, None), *((card, 0, "efa-only") for card in range(1, 17))]


def test_what_cards_reach_together_is_what_their_node_reaches() -> None:
    # the first card of a p6-b300 is a slower one without EFA, so `card_gbps` is not of the others, 400 each
    cards = {kind.type: (kind.card_gbps, kind) for kind in load_catalog().instances.values() if kind.efa_cards}
    first, b300 = cards.pop("p6-b300.48xlarge")
    assert (first, b300.network_gbps) == (350, 16 * 400)
    for name, (gbps, kind) in cards.items():
        assert gbps * kind.efa_cards == kind.network_gbps, name


def test_over_all_cards_nodes_are_in_a_private_subnet_behind_a_nat_gateway(over_all: Declared) -> None:
    public, inner = sorted(over_all.inputs(SUBNET), key=lambda each: not each.get("mapPublicIpOnLaunch"))
    assert (public["cidrBlock"], inner["cidrBlock"]) == ("10.0.0.0/20", "10.0.128.0/20")
    assert "mapPublicIpOnLaunch" not in inner
    assert over_all.one(ADDRESS)["domain"] == "vpc"
    assert set(over_all.one(NAT)) >= {"allocationId", "subnetId"}
    out, nat = sorted(over_all.inputs(ROUTE), key=lambda each: "natGatewayId" in each)
    assert ("gatewayId" in out, "gatewayId" in nat) == (True, False)
    assert len(over_all.inputs(TABLE)) == len(over_all.one("aws:ec2/vpcEndpoint:VpcEndpoint")["routeTableIds"]) == 2


def test_in_a_given_vpc_the_ways_out_of_its_subnets_are_its_owner_s(tmp_path: Path) -> None:
    given = "account: {vpc: {id: vpc-0123456789abcdef0, subnets: {us-east-2a: subnet-0123456789abcdef0}}}\n"
    found = declare(tmp_path / "project", "pretrain-d64", f"{several_nodes('all')}\n{given}")
    assert found.result.ok, found.result.text
    assert not found.kinds & {NAT, ADDRESS, SUBNET, TABLE}
    assert {each["subnetId"] for each in found.one(TEMPLATE)["networkInterfaces"]} == {"subnet-0123456789abcdef0"}
    assert found.kinds >= {INGRESS, EGRESS}


def test_a_node_reads_how_many_it_trains_with(two: Declared) -> None:
    texts = [each.get("content", "") for each in two.inputs("aws:s3/bucketObjectv2:BucketObjectv2")]
    (run,) = (json.loads(text) for text in texts if '"experiment"' in text)
    assert run["nodes"] == 2


def test_no_node_can_train_with_other_code_than_the_others(two: Declared, tmp_path: Path) -> None:
    """They boot from one version of one template, whose script names archive and run.json, and so code and inputs, by
    their hash; a node that finds other bytes ends (tests/job/node, test_staging.py).
    """
    (launched,) = two.one(FLEET)["launchTemplateConfigs"]
    assert (
        launched["launchTemplateSpecification"]["version"] == UNKNOWN
    )  # a version number, because "$Latest" can change
    root = scratch.make(tmp_path / "project", {"pretrain-d64": several_nodes("one")})
    plan = make(root, "pretrain-d64", now=datetime.now(UTC), previous=Previous(outputs={}), preview=True)
    script = base64.b64decode(plan.user_data("bucket", "log", "group/stop")).decode()
    assert f"\nARCHIVE_SHA256={plan.archive.sha256}\n" in script
    assert f"\nRUN_CONFIG_SHA256={hashlib.sha256(plan.run_config.encode()).hexdigest()}\n" in script
    assert f"\nIMAGE={plan.definition.job.image}\n" in script
