"""`gpufleet doctor` against the embedded AWS, with one thing wrong at a time."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import boto3
import pytest
from botocore.stub import Stubber
from commands_world import AMI, account, definition, pinned, project

from infra.cli import main
from infra.commands import account as checks
from infra.commands import quotas, registry
from infra.commands.account import Check
from infra.definition import Fleet, StackDefinition
from infra.errors import AwsRefused
from rehearsal.account import ami_id
from rehearsal.cloud import Cloud

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


class Answers:
    """A client that gives recorded answers, each checked against the service's own model."""

    def __init__(self, service: str, *answers: tuple[str, dict[str, Any]]) -> None:
        self.client = boto3.client(service, region_name="us-east-2", aws_access_key_id="x", aws_secret_access_key="x")
        stub = Stubber(self.client)
        for operation, answer in answers:
            stub.add_response(operation, answer, {"KeyId": KEY} if operation in ("list_grants",) else None)
        stub.activate()


KEY = "arn:aws:kms:us-east-2:111122223333:key/0a"
ROLE = "arn:aws:iam::111122223333:role/aws-service-role/ec2fleet.amazonaws.com/AWSServiceRoleForEC2Fleet"


def disk_key(
    definition: StackDefinition, grants: list[dict[str, str]], *, manager: str = "CUSTOMER", chosen: str = KEY
) -> list[Check]:
    metadata = {"KeyId": "0a", "Arn": KEY, "KeyManager": manager, "Enabled": True}
    role = {"RoleName": "r", "Path": "/", "RoleId": "A" * 20, "CreateDate": "2026-01-01T00:00:00Z", "Arn": ROLE}
    return list(
        checks.disk_key(
            definition,
            Answers("ec2", ("get_ebs_default_kms_key_id", {"KmsKeyId": chosen})).client,
            Answers(
                "kms",
                ("describe_key", {"KeyMetadata": metadata}),
                ("list_grants", {"Grants": grants, "Truncated": False}),
                ("get_key_policy", {"Policy": "{}"}),
            ).client,
            Answers("iam", ("get_role", {"Role": role}), ("get_role", {"Role": role})).client,
        )
    )


def test_a_disk_key_of_ones_own_needs_a_grant_for_the_fleets_roles(stack: Path) -> None:
    found = disk_key(definition(stack), [])
    assert [check.state for check in found] == ["problem", "problem"]
    assert found[0].fix.startswith(
        f"aws kms create-grant --region us-east-2 --key-id {KEY} --grantee-principal {ROLE} --operations Decrypt"
    )


def test_a_granted_disk_key_and_the_aws_one_are_fine(stack: Path) -> None:
    spot = ROLE.replace("ec2fleet", "spot").replace("EC2Fleet", "EC2Spot")
    granted = disk_key(definition(stack), [{"GranteePrincipal": ROLE}, {"GranteePrincipal": spot}])
    assert [check.state for check in granted] == ["ok", "ok"]
    assert [check.state for check in disk_key(definition(stack), [], manager="AWS")] == ["ok"]


def test_a_grant_to_a_role_of_a_longer_name_is_none(stack: Path) -> None:
    """AWS's instructions for Spot Fleet leave this one behind."""
    other = ROLE.replace("ec2fleet", "spotfleet").replace("EC2Fleet", "EC2SpotFleet")
    found = disk_key(definition(stack), [{"GranteePrincipal": ROLE}, {"GranteePrincipal": other}])
    assert [check.state for check in found] == ["ok", "problem"]
    assert "AWSServiceRoleForEC2Spot has no grant" in found[1].found


def test_a_key_that_is_chosen_by_its_alias_is_asked_for_by_its_arn(stack: Path) -> None:
    """ListGrants, GetKeyPolicy and CreateGrant take no alias."""
    found = disk_key(definition(stack), [], chosen="arn:aws:kms:us-east-2:111122223333:alias/mine")
    assert f"--key-id {KEY} " in found[0].fix


def test_the_key_of_a_snapshot_is_asked_about_as_the_default_one_is(stack: Path) -> None:
    stack.write_text(
        stack.read_text().replace("tokens}", "tokens, data: {size_gib: 50, snapshot: snap-0123456789abcdef0}}")
    )
    role = {"RoleName": "r", "Path": "/", "RoleId": "A" * 20, "CreateDate": "2026-01-01T00:00:00Z", "Arn": ROLE}
    metadata = {"KeyId": "0a", "Arn": KEY, "KeyManager": "CUSTOMER", "Enabled": True}
    ec2 = Answers(
        "ec2",
        ("get_ebs_default_kms_key_id", {"KmsKeyId": "alias/aws/ebs"}),
        ("describe_snapshots", {"Snapshots": [{"Encrypted": True, "KmsKeyId": KEY}]}),
    )
    kms = Answers(
        "kms",
        ("describe_key", {"KeyMetadata": metadata}),
        ("list_grants", {"Grants": [], "Truncated": False}),
        ("get_key_policy", {"Policy": "{}"}),
    )
    iam = Answers("iam", ("get_role", {"Role": role}), ("get_role", {"Role": role}))
    found = list(checks.disk_key(definition(stack), ec2.client, kms.client, iam.client))
    assert [check.state for check in found] == ["ok", "problem", "problem"]
    assert found[1].found.startswith("the disk of snap-0123456789abcdef0 is encrypted with your key ")
