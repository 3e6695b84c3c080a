"""`gpufleet doctor` against the embedded AWS, with one thing wrong at a time."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.stub import Stubber
from commands_world import AMI, account, definition, pinned, project

from infra.cli import main
from infra.commands import account as checks
from infra.commands import doctor, quotas, registry
from infra.commands.account import Check
from infra.definition import Account, Fleet, StackDefinition
from infra.errors import AwsRefused
from rehearsal.account import ami_id
from rehearsal.cloud import Cloud

MEDIA = "application/vnd.docker.distribution.manifest.v2+json"
IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return project(tmp_path, monkeypatch)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    with account(tmp_path, monkeypatch) as cloud:
        s3 = cloud.client("s3")
        s3.create_bucket(Bucket="elsewhere", CreateBucketConfiguration={"LocationConstraint": cloud.region})
        s3.put_object(Bucket="elsewhere", Key="tokens/dataset.json", Body=b"{}")
        yield cloud


def test_pin_writes_ami_and_digest_and_then_everything_is_in_place(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = stack.read_text()
    assert main(["doctor", "small-growth", "--pin"]) == 0
    said = capsys.readouterr().out
    assert "PROBLEM" not in said
    assert said.endswith("Everything is in place. Next: `pulumi preview`, then `pulumi up`.\n")
    loaded = definition(stack)
    assert loaded.fleet.ami == ami_id("us-east-2", AMI)
    assert loaded.job.image.startswith(f"{IMAGE}@sha256:")
    assert stack.read_text() == before.replace("unpinned", loaded.fleet.ami).replace(IMAGE, loaded.job.image)


def test_a_dataset_that_is_not_there_is_a_problem_since_up_refuses(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.write_text(stack.read_text().replace("s3://elsewhere/tokens", "data/mine"))
    assert main(["doctor", "small-growth", "--pin"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM inputs: storage.dataset, data/mine, is not prepared\n          Run `gpufleet prepare " in said
    assert said.endswith("with them `pulumi up` would leave you without a node.\n")


def test_unpinned_files_are_a_problem_with_the_command_that_solves_it(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "small-growth"]) == 1
    said = capsys.readouterr().out
    assert "PROBLEM AMI: fleet.ami is unpinned\n          gpufleet doctor small-growth --pin" in said
    assert (
        "PROBLEM image: public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023 exists but is not pinned"
        in said
    )


def test_pinning_again_changes_nothing_and_says_so(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = pinned(stack).read_bytes()
    assert main(["doctor", "small-growth", "--pin"]) == 0
    assert capsys.readouterr().out.count("(as before)") == 2
    assert stack.read_bytes() == first


def no_quota(cloud: Cloud) -> None:
    cloud.quotas["L-3819A6DF"] = 0


def small_quota(cloud: Cloud) -> None:
    cloud.quotas["L-3819A6DF"] = 8


def no_vpc_left(cloud: Cloud) -> None:
    ec2 = cloud.client("ec2")
    for _ in range(5 - len(ec2.describe_vpcs()["Vpcs"])):
        ec2.create_vpc(CidrBlock="10.0.0.0/16")


def no_fleet_role(cloud: Cloud) -> None:
    cloud.client("iam").delete_role(RoleName="AWSServiceRoleForEC2Fleet")


def no_ami(cloud: Cloud) -> None:
    cloud.deregister_ami(ami_id("us-east-2", AMI))


def no_dataset(cloud: Cloud) -> None:
    cloud.client("s3").delete_object(Bucket="elsewhere", Key="tokens/dataset.json")


def like_named(cloud: Cloud) -> None:
    no_dataset(cloud)
    cloud.client("s3").put_object(Bucket="elsewhere", Key="tokens-old/dataset.json", Body=b"{}")


def own_key(cloud: Cloud) -> None:
    cloud.client("s3").put_object(
        Bucket="elsewhere",
        Key="tokens/dataset.json",
        Body=b"{}",
        ServerSideEncryption="aws:kms",
        SSEKMSKeyId="arn:aws:kms:us-east-2:123456789012:key/mine",
    )


def no_rights(cloud: Cloud) -> None:
    cloud.deny("DescribeInstanceTypeOfferings")


@pytest.mark.parametrize(
    ("break_it", "code", "said", "fix"),
    [
        pytest.param(no_quota, 1, "PROBLEM quota: All G and VT", "--desired-value 16", id="quota 0"),
        pytest.param(small_quota, 0, "warning quota: All G and VT", "--desired-value 16", id="quota of one node"),
        pytest.param(no_vpc_left, 1, "PROBLEM network: VPCs per Region", "--desired-value 10", id="VPCs"),
        pytest.param(no_fleet_role, 1, "PROBLEM role: AWSServiceRoleForEC2Fleet", "ec2fleet.amazonaws.com", id="role"),
        pytest.param(no_ami, 1, "PROBLEM AMI: ami-", "gpufleet doctor small-growth --pin", id="AMI withdrawn"),
        pytest.param(no_dataset, 1, "PROBLEM dataset: s3://elsewhere/tokens", "storage.dataset", id="empty dataset"),
        pytest.param(
            like_named, 1, "PROBLEM dataset: s3://elsewhere/tokens/dataset.json", "gpufleet prepare", id="alike"
        ),
        pytest.param(own_key, 0, "is encrypted with arn:aws:kms", "--sse AES256 s3://elsewhere/tokens", id="a key"),
        pytest.param(
            no_rights, 0, "warning not checked: AWS does not let you call", "not all of it was", id="no rights"
        ),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(
    cloud: Cloud,
    stack: Path,
    capsys: pytest.CaptureFixture[str],
    break_it: Callable[[Cloud], None],
    code: int,
    said: str,
    fix: str,
) -> None:
    pinned(stack)
    break_it(cloud)
    assert main(["doctor", "small-growth"]) == code
    out = capsys.readouterr().out
    assert said in out
    assert fix in out[out.index(said) :]


def test_a_stack_that_is_up_needs_no_more_vpcs(cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pinned(stack)
    no_vpc_left(cloud)
    ec2 = cloud.client("ec2")
    last = ec2.describe_vpcs()["Vpcs"][-1]["VpcId"]
    ec2.create_tags(Resources=[last], Tags=[{"Key": "gpufleet:stack", "Value": "small-growth"}])
    assert main(["doctor", "small-growth"]) == 0
    assert "ok      network: VPCs per Region (L-F678F1CE) is 5; 5 in us-east-2, this stack's among them\n" in (
        capsys.readouterr().out
    )


def test_wrong_credentials_stop_at_the_first_line(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    assert main(["doctor", "small-growth"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("  PROBLEM credentials: AWS does not accept the credentials")
    assert len(lines) == 3


def test_a_withdrawn_tag_is_a_sentence_not_a_traceback(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.write_text(stack.read_text().replace("pytorch:2.13-cu133", "pytorch:0.1"))
    assert main(["doctor", "small-growth", "--pin"]) == 2
    assert "its tag may have been withdrawn" in capsys.readouterr().err
    assert "unpinned" in stack.read_text()


def test_an_unreachable_registry_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_REGISTRY_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AwsRefused, match=r"cannot be asked"):
        registry.digest(IMAGE)


def test_a_digest_that_is_gone_is_noticed(cloud: Cloud) -> None:
    with pytest.raises(AwsRefused, match=r"the registry has no .*@sha256:00"):
        registry.digest(f"{IMAGE}@sha256:" + "00" * 32)


@pytest.mark.parametrize(
    ("without_token", "with_token", "words"),
    [
        (404, 0, "the registry has no ghcr.io/us/job:1"),
        (401, 404, "the registry has no ghcr.io/us/job:1"),
        (401, 401, "is not public, and a node has no login"),
        (401, 403, "is not public, and a node has no login"),
        (401, 500, "cannot be asked"),
        (429, 0, "answered too many that have no login"),
        (401, 429, "answered too many that have no login"),
        (403, 0, "cannot be asked"),
    ],
)
def test_what_a_registry_refuses_with_and_without_a_token_is_said(
    without_token: int, with_token: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(url: str, headers: dict[str, str]) -> tuple[Message, bytes]:
        if url.startswith("https://token"):
            return Message(), b'{"token": "t"}'
        code = with_token if headers.get("Authorization") == "Bearer t" else without_token
        challenge = Message()
        challenge["WWW-Authenticate"] = 'Bearer realm="https://token",service="ghcr.io",scope="pull"'
        raise HTTPError(url, code, "refused", challenge, io.BytesIO())

    monkeypatch.setattr(registry, "_get", get)
    with pytest.raises(AwsRefused, match=words):
        registry.digest("ghcr.io/us/job:1")


@pytest.mark.parametrize(
    ("challenge", "of_token_service", "words"),
    [
        ('Basic realm="https://registry",service="ecr"', 200, "is not public, and a node has no login"),
        ('Bearer realm="https://token",scope="pull"', 401, "is not public, and a node has no login"),
        ('Bearer realm="https://token",scope="pull"', 403, "is not public, and a node has no login"),
        ('Bearer realm="https://token",scope="pull"', 500, "cannot be asked"),
    ],
)
def test_an_image_that_wants_a_login_is_private_however_the_registry_says_so(
    challenge: str, of_token_service: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(url: str, headers: dict[str, str]) -> tuple[Message, bytes]:
        said = Message()
        said["WWW-Authenticate"] = challenge
        raise HTTPError(url, of_token_service if url.startswith("https://token") else 401, "no", said, io.BytesIO())

    monkeypatch.setattr(registry, "_get", get)
    with pytest.raises(AwsRefused, match=words):
        registry.digest("ghcr.io/us/job:1")


@pytest.mark.parametrize(
    ("region", "foreign", "states"),
    [("us-east-2", False, ["ok"]), ("eu-west-1", False, ["ok", "warning"]), ("us-east-2", True, ["ok", "warning"])],
    ids=["own", "abroad", "another account's"],
)
def test_an_image_in_a_private_ecr_is_pinned_and_checked_by_ecr_itself(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str], region: str, foreign: bool, states: list[str]
) -> None:
    ecr = cloud.client("ecr", region)
    ecr.create_repository(repositoryName="team/train")
    manifest = '{"schemaVersion": 2, "config": {"digest": "sha256:1"}, "layers": []}'
    ecr.put_image(repositoryName="team/train", imageManifest=manifest, imageManifestMediaType=MEDIA, imageTag="1")
    image = f"{cloud.account}.dkr.ecr.{region}.amazonaws.com/team/train"
    stack.write_text(stack.read_text().replace(IMAGE, f"{image}:1"))
    assert main(["doctor", "small-growth", "--pin"]) == 0
    assert re.search(rf"image: {image}:1@sha256:[0-9a-f]{{64}}", stack.read_text())
    assert "a node logs in by its role" in capsys.readouterr().out

    sts = Sts("444455556666" if foreign else cloud.account)
    assert [check.state for check in doctor.image(definition(stack), sts)] == states

    stack.write_text(stack.read_text().replace(f"{image}:1@", f"{image}-gone:1@"))
    (check,) = doctor.image(definition(stack), sts)
    assert (check.state, "the registry has no" in check.found) == ("problem", True)


class Sts:
    """Says whose account this is."""

    def __init__(self, account: str) -> None:
        self._account = account

    def get_caller_identity(self) -> dict[str, str]:
        return {"Account": self._account}


@pytest.mark.parametrize(
    ("instance_type", "spot", "on_demand"),
    [
        ("g5.2xlarge", "L-3819A6DF", "L-DB2E81BA"),
        ("g6e.xlarge", "L-3819A6DF", "L-DB2E81BA"),
        ("gr6.4xlarge", "L-3819A6DF", "L-DB2E81BA"),
        ("p3dn.24xlarge", "L-7212CCBC", "L-417A185B"),
        ("p4de.24xlarge", "L-7212CCBC", "L-417A185B"),
        ("p5en.48xlarge", "L-C4BD4855", "L-417A185B"),
        ("p6-b200.48xlarge", None, None),
    ],
)
def test_each_family_counts_against_its_own_quota(instance_type: str, spot: str | None, on_demand: str | None) -> None:
    assert quotas.quota_code(instance_type, "spot") == spot
    assert quotas.quota_code(instance_type, "on-demand") == on_demand


def test_a_fleet_needs_its_largest_type_and_better_two_of_it() -> None:
    fleet = Fleet(
        region="us-east-2", zones=("us-east-2a",), instance_types=("g5.xlarge", "g6.4xlarge", "p6-b200.48xlarge")
    )
    (need,), unknown = quotas.needs(fleet)
    assert (need.least, need.vcpu, need.recommended) == (4, 16, 32)
    assert unknown == ["p6-b200.48xlarge"]


@pytest.mark.parametrize(
    ("vcpus", "code", "said"),
    [(0, 1, "takes 4 to 8\n"), (4, 0, "takes 4 to 8: the larger types cannot launch\n"), (8, 0, "two nodes' worth")],
)
def test_a_quota_for_the_smaller_of_two_types_is_no_problem(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str], vcpus: int, code: int, said: str
) -> None:
    """A fleet needs one type that can launch, whichever quotas count them."""
    stack.write_text(stack.read_text().replace("[g5.2xlarge]", "[g5.xlarge, g5.2xlarge]"))
    pinned(stack)
    cloud.quotas["L-3819A6DF"] = vcpus
    assert main(["doctor", "small-growth"]) == code
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("quota", "others", "state", "said"),
    [
        pytest.param(16, [("g5.4xlarge", False, {})], "problem", "16 of them in use by i-", id="all of it"),
        pytest.param(32, [("g5.4xlarge", False, {})], "ok", "16 of them in use by i-", id="enough is left"),
        pytest.param(28, [("g5.4xlarge", False, {})], "warning", "two nodes' worth", id="one node is left"),
        pytest.param(16, [("g5.4xlarge", True, {})], "ok", "is 16 vCPUs; one node", id="a spot one counts apart"),
        pytest.param(16, [("m5.4xlarge", False, {})], "ok", "is 16 vCPUs; one node", id="so does another family"),
        pytest.param(
            16, [("g5.4xlarge", False, {"gpufleet:stack": "small-growth"})], "ok", "is 16 vCPUs; one node", id="ours"
        ),
        pytest.param(48, [("g4dn.xlarge", False, {})] * 5, "ok", "20 of them in use by", id="several"),
    ],
)
def test_a_quota_is_held_against_what_other_machines_leave_free(
    cloud: Cloud, stack: Path, quota: int, others: list[tuple[str, bool, dict[str, str]]], state: str, said: str
) -> None:
    stack.write_text(stack.read_text().replace("ami: unpinned", "capacity: on-demand\n  ami: unpinned"))
    cloud.quotas["L-DB2E81BA"] = quota
    ec2 = cloud.client("ec2")
    for kind, spot, tags in others:
        ec2.run_instances(
            ImageId=ami_id("us-east-2", AMI),
            InstanceType=kind,
            MinCount=1,
            MaxCount=1,
            InstanceMarketOptions={"MarketType": "spot"} if spot else {},
            TagSpecifications=[{"ResourceType": "instance", "Tags": [{"Key": k, "Value": v} for k, v in tags.items()]}]
            if tags
            else [],
        )
    (check,) = quotas.vcpu_quotas(definition(stack), cloud.client("service-quotas"))
    assert (check.state, said in check.found) == (state, True), check.found
    assert check.found.count("(g4dn.xlarge)") == (3 if len(others) > 1 else 0)
    if state == "problem":
        assert "--desired-value 32\n          or wait until a machine above has ended" in check.fix


class Answers:
    """A client that gives recorded answers, each checked against the service's own model."""

    def __init__(self, service: str, *answers: tuple[str, dict[str, Any]]) -> None:
        self.client = boto3.client(service, region_name="us-east-2", aws_access_key_id="x", aws_secret_access_key="x")
        stub = Stubber(self.client)
        for operation, answer in answers:
            stub.add_response(operation, answer, {"KeyId": KEY} if operation in ("list_grants",) else None)
        stub.activate()


OWN = "111122223333"
KEY = f"arn:aws:kms:us-east-2:{OWN}:key/0a"
FLEET_ROLE, SPOT_ROLE = (
    f"arn:aws:iam::{OWN}:role/aws-service-role/{service}.amazonaws.com/AWSServiceRoleFor{name}"
    for service, name in (("ec2fleet", "EC2Fleet"), ("spot", "EC2Spot"))
)
ROLES = [FLEET_ROLE, SPOT_ROLE]
ROOT = f"arn:aws:iam::{OWN}:root"
USE = ["kms:Encrypt", "kms:Decrypt", "kms:ReEncrypt*", "kms:GenerateDataKey*", "kms:DescribeKey"]


def said(principal: Any, *actions: str, effect: str = "Allow", **condition: Any) -> dict[str, Any]:
    """A statement of a key's policy; by default with all that a launch needs."""
    named = {"AWS": principal} if principal != "*" else "*"
    what = list(actions) or [*USE, "kms:CreateGrant"]
    return {"Effect": effect, "Principal": named, "Action": what, "Resource": "*", "Condition": condition}


def grants(*roles: str, operations: str = checks.GRANT_OPERATIONS, **more: Any) -> list[dict[str, Any]]:
    return [{"GranteePrincipal": role, "Operations": operations.split(), **more} for role in roles]


def disk_key(
    definition: StackDefinition,
    *statements: dict[str, Any],
    granted: list[dict[str, Any]] | None = None,
    manager: str = "CUSTOMER",
    chosen: str = KEY,
    snapshot: bool = False,
) -> list[Check]:
    metadata = {"KeyId": "0a", "Arn": KEY, "KeyManager": manager, "Enabled": True}
    policy = json.dumps({"Statement": [said(ROOT, "kms:*"), *statements]})
    role = {"RoleName": "r", "Path": "/", "RoleId": "A" * 20, "CreateDate": "2026-01-01T00:00:00Z"}
    default = "alias/aws/ebs" if snapshot else chosen
    return list(
        checks.disk_key(
            definition,
            Answers(
                "ec2",
                *([("get_ebs_default_kms_key_id", {"KmsKeyId": default})] * (not definition.account.kms_key)),
                ("describe_snapshots", {"Snapshots": [{"Encrypted": True, "KmsKeyId": KEY}]}),
            ).client,
            Answers(
                "kms",
                ("describe_key", {"KeyMetadata": metadata}),
                ("list_grants", {"Grants": granted or [], "Truncated": False}),
                ("get_key_policy", {"Policy": policy}),
                ("get_key_policy", {"Policy": policy}),
            ).client,
            Answers("iam", *(("get_role", {"Role": {**role, "Arn": arn}}) for arn in ROLES)).client,
        )
    )


THROUGH_EC2 = {"kms:ViaService": "ec2.us-east-2.amazonaws.com"}
ORG = {"aws:PrincipalOrgID": "o-1"}
FOR_AWS = {"kms:GrantIsForAWSResource": "true"}
OTHER = FLEET_ROLE.replace("ec2fleet", "spotfleet").replace("EC2Fleet", "EC2SpotFleet")


@pytest.mark.parametrize(
    ("statements", "granted", "state"),
    [
        pytest.param([], [], "problem", id="the account alone: the roles have no policy that allows it"),
        pytest.param([said(ROLES)], [], "ok", id="both roles by name"),
        pytest.param([said("*", StringEquals={**THROUGH_EC2, "kms:CallerAccount": OWN})], [], "ok", id="through EC2"),
        pytest.param([said("*", ArnLike={"aws:PrincipalArn": f"arn:aws:iam::{OWN}:role/aws-*"})], [], "ok", id="ARN"),
        pytest.param([said(ROLES, *USE), said(ROLES, "kms:CreateGrant", Bool=FOR_AWS)], [], "ok", id="as AWS says"),
        pytest.param([said(ROLES, Bool=FOR_AWS)], [], "problem", id="a condition that only a grant meets"),
        pytest.param([said(ROLES, Bool={"kms:GrantIsForAWSResource": True})], grants(*ROLES), "ok", id="granted too"),
        pytest.param([], grants(*ROLES), "ok", id="grants"),
        pytest.param([], grants(*ROLES, operations="Decrypt"), "problem", id="a grant that is too small"),
        pytest.param([], grants(OTHER), "problem", id="a grant to a role of a longer name"),
        pytest.param(
            [],
            grants(*ROLES, Constraints={"EncryptionContextSubset": {"aws:ebs:id": "vol-1"}}),
            "warning",
            id="a grant for some disks",
        ),
        pytest.param([said(ROLES, effect="Deny")], grants(*ROLES), "problem", id="a denial outweighs grants"),
        pytest.param([said(ROOT, effect="Deny")], grants(*ROLES), "problem", id="a denial of the whole account"),
        pytest.param(
            [said(ROLES), said("*", effect="Deny", StringNotEquals=ORG)], [], "warning", id="a denial not judged"
        ),
        pytest.param([said("*", StringEquals=ORG)], [], "warning", id="an organisation"),
        pytest.param([said("*", StringEqualsIfExists={"kms:ViaService": "rds"})], [], "problem", id="another service"),
        pytest.param([said(ROLES, StringNotLike={"kms:ViaService": "ec2.*"})], [], "problem", id="all but EC2"),
        pytest.param(
            [said(ROLES, StringEquals={"kms:ViaService": f"ec2.{OWN}.amazonaws.com"})], [], "problem", id="misspelled"
        ),
        pytest.param([said(ROLES, "kms:Decrypt", "kms:CreateGrant", "kms:Gen*")], [], "warning", id="most of it"),
        pytest.param([said(ROLES, "kms:DescribeKey")], [], "problem", id="named, and nothing allowed"),
    ],
)
def test_a_disk_key_of_ones_own_is_judged_as_far_as_its_policy_and_grants_are_certain(
    stack: Path, statements: list[dict[str, Any]], granted: list[dict[str, Any]], state: str
) -> None:
    found = disk_key(definition(stack), *statements, granted=granted)
    assert [check.state for check in found] == [state, state]


def test_what_puts_a_disk_key_right_is_a_grant_unless_its_policy_denies(stack: Path) -> None:
    """ListGrants, GetKeyPolicy and CreateGrant take no alias."""
    alias = f"arn:aws:kms:us-east-2:{OWN}:alias/mine"
    bare, denied = (
        disk_key(definition(stack), *policy, chosen=alias)[0] for policy in ([], [said("*", effect="Deny")])
    )
    assert bare.fix.startswith(
        f"aws kms create-grant --region us-east-2 --key-id {KEY} --grantee-principal {FLEET_ROLE} --operations Decrypt"
    )
    assert denied.fix.endswith(f"aws kms get-key-policy --region us-east-2 --key-id {KEY} --policy-name default")


def test_one_role_may_and_the_other_may_not(stack: Path) -> None:
    found = disk_key(definition(stack), granted=grants(FLEET_ROLE))
    assert [check.state for check in found] == ["ok", "problem"]
    assert "which AWSServiceRoleForEC2Spot may not use (CreateGrant, Decrypt, GenerateData" in found[1].found


def test_aws_s_own_key_is_fine(stack: Path) -> None:
    assert [check.state for check in disk_key(definition(stack), manager="AWS")] == ["ok"]


@pytest.mark.parametrize(
    ("statements", "states"),
    [
        ([said(ROLES)], ["ok", "ok", "ok"]),
        ([said(ROLES), said("*", "kms:GenerateDataKey", effect="Deny")], ["ok", "ok", "warning"]),
    ],
)
def test_the_file_s_key_stands_for_the_default_one_and_must_be_left_to_iam_for_the_nodes(
    stack: Path, statements: list[dict[str, Any]], states: list[str]
) -> None:
    found = disk_key(with_key(definition(stack)), *statements, chosen="alias/aws/ebs")
    assert [check.state for check in found] == states
    assert (found[0].name, found[-1].name) == ("disk key", "bucket key")


def with_key(definition: StackDefinition) -> StackDefinition:
    return replace(definition, account=Account(kms_key=KEY))


@pytest.mark.parametrize(
    ("manager", "own", "state"),
    [("AWS", False, "ok"), ("CUSTOMER", False, "problem"), ("CUSTOMER", True, "ok"), ("", False, "warning")],
)
def test_an_input_under_a_key_is_readable_if_the_key_is_aws_s_or_the_file_s(
    stack: Path, manager: str, own: bool, state: str
) -> None:
    found = definition(stack)
    s3 = Answers("s3", ("head_object", {"SSEKMSKeyId": KEY})).client
    kms = Answers("kms", ("describe_key", {"KeyMetadata": {"KeyId": "0a", "KeyManager": manager}})).client
    if not manager:
        kms.describe_key = refused
    (check,) = checks.inputs(with_key(found) if own else found, s3, None, kms)
    assert check.state == state


def refused(**_: Any) -> Any:
    raise ClientError({"Error": {"Code": "AccessDeniedException"}}, "DescribeKey")


def test_the_key_of_a_snapshot_is_asked_about_as_the_default_one_is(stack: Path) -> None:
    stack.write_text(
        stack.read_text().replace("tokens}", "tokens, data: {size_gib: 50, snapshot: snap-0123456789abcdef0}}")
    )
    found = disk_key(definition(stack), snapshot=True)
    assert [check.state for check in found] == ["ok", "problem", "problem"]
    assert found[1].found.startswith("the disk of snap-0123456789abcdef0 is encrypted with your key ")
