"""The embedded AWS as an account: who may come in, what is there from the start, what is left at the end."""

from __future__ import annotations

import json
import os
import urllib.error
import urllib.request
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path

import boto3
import moto
import pytest
from botocore.exceptions import ClientError

from gpufleet.rehearsal import registry
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from tests.rehearsal.declared import AMI, as_node, fleet, living, role, template


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with Cloud(tmp_path, clock=ManualClock()) as cloud:
        yield cloud


@pytest.mark.parametrize(
    ("service", "method"),
    [
        ("s3", "list_buckets"),
        ("ec2", "describe_vpcs"),
        ("iam", "list_roles"),
        ("sts", "get_caller_identity"),
        ("logs", "describe_log_groups"),
        ("ssm", "describe_parameters"),
    ],
)
def test_any_other_access_key_is_refused_in_words(cloud: Cloud, service: str, method: str) -> None:
    stranger = boto3.client(
        service,
        region_name="us-east-2",
        endpoint_url=cloud.endpoint,
        aws_access_key_id="AKIAIOSFODNN7EXAMPLE",
        aws_secret_access_key="x",
    )
    with pytest.raises(ClientError, match="not of this embedded AWS"):
        getattr(stranger, method)()


def test_an_unsigned_request_is_refused(cloud: Cloud) -> None:
    with pytest.raises(urllib.error.HTTPError) as refused:
        urllib.request.urlopen(f"{cloud.endpoint}/some-bucket/key")
    refused.value.close()
    assert refused.value.code == 403


def test_it_listens_on_loopback_only(cloud: Cloud) -> None:
    assert cloud.endpoint.startswith("http://127.0.0.1:")


def test_the_environment_is_all_that_an_sdk_needs(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in cloud.environment().items():
        monkeypatch.setenv(name, value)
    identity = boto3.session.Session().client("sts").get_caller_identity()
    assert identity["Account"] == cloud.account


def test_an_action_can_be_refused_to_the_nodes_alone(cloud: Cloud) -> None:
    role(cloud, [{"Effect": "Allow", "Action": "ec2:ModifyFleet", "Resource": "*"}])
    fleet_id = fleet(cloud, template(cloud, IamInstanceProfile={"Name": "node"}))
    cloud.tick()
    cloud.deny("ModifyFleet", node=True)
    node = as_node(cloud, "ec2")
    zero = {"TotalTargetCapacity": 0}
    with pytest.raises(ClientError, match="UnauthorizedOperation"):
        node.modify_fleet(FleetId=fleet_id, TargetCapacitySpecification=zero)
    cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification=zero)
    cloud.allow("ModifyFleet")
    node.modify_fleet(FleetId=fleet_id, TargetCapacitySpecification=zero)
    assert cloud.calls("ModifyFleet") == 3


def test_the_public_parameter_names_an_image_that_exists(cloud: Cloud) -> None:
    image = cloud.client("ssm").get_parameter(Name=AMI)["Parameter"]["Value"]
    found = cloud.client("ec2").describe_images(ImageIds=[image])["Images"][0]
    assert found["Name"].startswith("Deep Learning Base OSS Nvidia Driver GPU AMI")
    assert found["RootDeviceName"] == "/dev/xvda"


def test_another_region_has_its_own_image(cloud: Cloud) -> None:
    here, there = (
        cloud.client("ssm", region).get_parameter(Name=AMI)["Parameter"]["Value"]
        for region in ("us-east-2", "us-west-2")
    )
    assert here != there
    assert cloud.client("ec2", "us-west-2").describe_images(ImageIds=[there])["Images"]


def test_quotas_can_be_read_and_set(cloud: Cloud) -> None:
    cloud.quotas["L-3819A6DF"] = 8
    quotas = cloud.client("service-quotas")
    quota = quotas.get_service_quota(ServiceCode="ec2", QuotaCode="L-3819A6DF")["Quota"]
    assert (quota["QuotaName"], quota["Value"]) == ("All G and VT Spot Instance Requests", 8.0)
    listed = quotas.list_service_quotas(ServiceCode="ec2")["Quotas"]
    assert {q["QuotaCode"] for q in listed} == set(cloud.quotas)


def test_the_service_linked_roles_are_there(cloud: Cloud) -> None:
    roles = {role["RoleName"] for role in cloud.client("iam").list_roles()["Roles"]}
    assert roles == {"AWSServiceRoleForEC2Fleet", "AWSServiceRoleForEC2Spot"}


def test_spot_prices_differ_by_zone_and_have_a_date(cloud: Cloud) -> None:
    history = cloud.client("ec2").describe_spot_price_history(
        InstanceTypes=["g5.2xlarge"], ProductDescriptions=["Linux/UNIX"], StartTime=cloud.clock.now()
    )["SpotPriceHistory"]
    prices = {entry["AvailabilityZone"]: Decimal(entry["SpotPrice"]) for entry in history}
    assert set(prices) == {"us-east-2a", "us-east-2b", "us-east-2c"}
    assert len(set(prices.values())) > 1
    assert all(entry["Timestamp"] == cloud.clock.now() for entry in history)


def _get(url: str, token: str | None = None) -> tuple[int, dict[str, str], bytes]:
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"} if token else {})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, dict(answer.headers), answer.read()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, dict(error.headers), error.read()


def test_the_registry_asks_for_a_token_and_then_gives_the_digest(cloud: Cloud) -> None:
    url = f"{cloud.endpoint}/v2/deep-learning-containers/pytorch/manifests/2.13-cu133-amzn2023"
    status, headers, _ = _get(url)
    assert status == 401
    assert headers["WWW-Authenticate"].startswith(f'Bearer realm="{cloud.endpoint}/token/"')
    token = json.loads(_get(f"{cloud.endpoint}/token/?service=public.ecr.aws&scope=aws")[2])["token"]
    status, headers, _ = _get(url, token)
    assert status == 200
    expected = registry.digest("deep-learning-containers/pytorch", "2.13-cu133-amzn2023")
    assert headers["Docker-Content-Digest"] == expected
    by_digest = url.replace("2.13-cu133-amzn2023", expected)
    assert _get(by_digest, token)[1]["Docker-Content-Digest"] == expected


def test_an_unknown_tag_is_not_found(cloud: Cloud) -> None:
    status, _, body = _get(f"{cloud.endpoint}/v2/deep-learning-containers/pytorch/manifests/2.99", "anonymous")
    assert status == 404
    assert json.loads(body)["errors"][0]["code"] == "MANIFEST_UNKNOWN"


def test_leftovers_are_empty_at_first_and_name_whatever_is_made(cloud: Cloud) -> None:
    assert cloud.leftovers() == {}
    cloud.client("s3").create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-east-2"})
    cloud.client("logs").create_log_group(logGroupName="/g", tags={"gpufleet:run": "r1"})
    cloud.client("iam").create_role(
        RoleName="r", AssumeRolePolicyDocument="{}", Tags=[{"Key": "gpufleet:run", "Value": "r2"}]
    )
    assert set(cloud.leftovers()) == {("bucket", "bucket"), ("log-group", "/g"), ("role", "r")}
    assert set(cloud.leftovers({"gpufleet:run": "r1"})) == {("log-group", "/g")}


def test_two_clouds_in_one_process_are_two_accounts(cloud: Cloud, tmp_path: Path) -> None:
    with Cloud(tmp_path, clock=ManualClock()) as other:
        fleet(other)
        other.tick()
        assert len(living(other)) == 1
        assert living(cloud) == []
        assert cloud.leftovers() == {}


def test_nobody_answers_after_the_end_and_every_node_has_ended(tmp_path: Path) -> None:
    ended = []
    with Cloud(tmp_path, clock=ManualClock(), end=lambda instance: ended.append(instance.id)) as cloud:
        fleet(cloud)
        cloud.tick()
        nodes = living(cloud)
        endpoint = cloud.endpoint
    assert ended == nodes
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(endpoint)


def test_a_request_does_not_list_motos_folder(cloud: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    listdir, listed = os.listdir, list[str]()

    def noted(path: str = ".") -> list[str]:
        listed.append(str(path))
        return listdir(path)

    cloud.client("sts").get_caller_identity()  # the first request imports the service
    monkeypatch.setattr(os, "listdir", noted)
    cloud.client("sts").get_caller_identity()
    assert str(Path(moto.__file__).parent) not in listed
