"""`gpufleet doctor` against the embedded AWS, with one thing wrong at a time."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpufleet.infra.account import doctor, quotas
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import Fleet
from gpufleet.rehearsal.account import ami_id
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import AMI, account, definition, pinned, project

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
    assert "small-growth in us-east-2: everything is in place. Next: `pulumi preview`, then `pulumi up`.\n" in said
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
    assert "1 problem to put right first: with them `pulumi up` would leave you without a node." in said


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
            no_rights,
            0,
            "warning not checked: AWS does not let you call",
            "nothing that was checked stands",
            id="no rights",
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
    assert fix in out


def test_a_stack_that_is_up_needs_no_more_vpcs(cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pinned(stack)
    no_vpc_left(cloud)
    ec2 = cloud.client("ec2")
    last = ec2.describe_vpcs()["Vpcs"][-1]["VpcId"]
    ec2.create_tags(Resources=[last], Tags=[{"Key": "gpufleet:stack", "Value": "small-growth"}])
    assert main(["doctor", "small-growth", "--all"]) == 0
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
    assert [line[:9] for line in lines[2:]] == ["  ok     "]  # checks that need no credentials


def test_a_withdrawn_tag_is_a_sentence_not_a_traceback(
    cloud: Cloud, stack: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stack.write_text(stack.read_text().replace("pytorch:2.13-cu133", "pytorch:0.1"))
    assert main(["doctor", "small-growth", "--pin"]) == 2
    assert "its tag may have been withdrawn" in capsys.readouterr().err
    assert "unpinned" in stack.read_text()


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
    assert main(["doctor", "small-growth", "--pin", "--all"]) == 0
    assert re.search(rf"image: {image}:1@sha256:[0-9a-f]{{64}}", stack.read_text())
    assert "a node logs in by its role" in capsys.readouterr().out

    sts = Sts("444455556666" if foreign else cloud.account)
    assert [check.state for check in doctor.images(definition(stack), sts)] == states

    stack.write_text(stack.read_text().replace(f"{image}:1@", f"{image}-gone:1@"))
    (check,) = doctor.images(definition(stack), sts)
    assert (check.state, "the registry has no" in check.found) == ("problem", True)


class Sts:
    """Answers which account this is."""

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
        ("c7i.4xlarge", "L-34B43A08", "L-1216C47A"),
        ("im4gn.large", "L-34B43A08", "L-1216C47A"),
        ("inf2.xlarge", None, None),
        ("trn1.2xlarge", None, None),
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
    (need,), unknown = quotas.needs(fleet, "spot")
    assert (need.least, need.vcpu, need.recommended) == (4, 16, 32)
    assert unknown == ["p6-b200.48xlarge"]
    (need,), _ = quotas.needs(replace(fleet, nodes=3), "spot")
    assert (need.least, need.vcpu, need.recommended) == (12, 48, 64)


def test_a_fallback_is_held_against_the_quotas_of_both_markets(cloud: Cloud, stack: Path) -> None:
    late = definition(stack)
    late = replace(late, fleet=replace(late.fleet, fallback="on-demand"))
    cloud.quotas["L-DB2E81BA"] = 0
    spot, other = quotas.vcpu_quotas(late, cloud.client("service-quotas"), cloud.client("ec2"))
    assert (spot.state, other.state) == ("ok", "problem")
    assert "L-DB2E81BA" in other.found


@pytest.mark.parametrize(
    ("vcpus", "code", "said"),
    [
        (0, 1, "takes 4 to 8\n"),
        (4, 0, "takes 4 to 8: the larger types cannot launch\n"),
        (8, 0, "the vCPUs of two nodes"),
    ],
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
        pytest.param(28, [("g5.4xlarge", False, {})], "warning", "the vCPUs of two nodes", id="one node is left"),
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
