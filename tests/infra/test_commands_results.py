"""`gpufleet results` and `sweep`: what a run left, on disk and on the bill."""

from __future__ import annotations

import errno
import re
import time
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from botocore.exceptions import ClientError
from commands_world import EXPIRES, TAGS, declare_bucket, declare_fleet, put

from infra.cli import main
from infra.commands import aws, leftovers, results, sweep
from infra.definition import StackDefinition
from infra.errors import AwsRefused
from rehearsal.cloud import Cloud

NOW = datetime(2026, 11, 21, 12, 10, tzinfo=UTC)

# results -------------------------------------------------------------------------------------------------------------


def finished(cloud: Cloud, run: str = "r1") -> str:
    bucket = declare_bucket(cloud)
    files: dict[str, Any] = {
        "results.json": {"loss": 2.5},
        "receipt.json": {"usd": "0.42"},
        "metrics.jsonl": b"{}\n",
        "final/model.safetensors": b"m" * 5000,
        "exports/phase1_end/model.safetensors": b"e" * 3000,
        "exports/phase1_end/meta.json": {},
        "exports/scores.npz": b"s" * 400,
        "ckpt/step_00000100/model.pt": b"c" * 9000,
        "heartbeat/i-1.jsonl": b"{}\n",
    }
    for name, content in files.items():
        put(cloud, bucket, name, content, run)
    return bucket


def downloaded(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_a_full_disk_is_the_one_that_is_written_to(tmp_path: Path) -> None:
    def full(*_: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    folder: Any = SimpleNamespace(bucket="b", run="r1", s3=SimpleNamespace(download_file=full))
    weights = aws.Stored(name="final/model.safetensors", bytes=5000, written=NOW)
    with pytest.raises(OSError, match="No space left") as failed:
        results._download(folder, weights, tmp_path / "to" / weights.name)
    assert failed.value.filename == str(tmp_path / "to" / "final")


def test_results_brings_everything_but_checkpoints_and_earlier_weights(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(cloud)
    assert main(["results", "small-growth"]) == 0
    folder = path.parents[1] / "results" / "small-growth" / "r1"
    assert downloaded(folder) == [
        "exports/phase1_end/meta.json",
        "exports/scores.npz",
        "final/model.safetensors",
        "heartbeat/i-1.jsonl",
        "metrics.jsonl",
        "receipt.json",
        "results.json",
    ]
    assert (folder / "final" / "model.safetensors").read_bytes() == b"m" * 5000
    out = capsys.readouterr().out
    assert "7 files, 5.4 kB; transfer out of AWS costs about $0.00" in out
    assert "left in the bucket: 3.0 kB of weights (--exports brings them)" in out
    assert main(["results", "small-growth", "--exports"]) == 0
    assert (folder / "exports" / "phase1_end" / "model.safetensors").read_bytes() == b"e" * 3000


def test_a_second_download_leaves_the_models_alone(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(cloud)
    main(["results", "small-growth"])
    capsys.readouterr()
    assert main(["results", "small-growth"]) == 0
    assert "safetensors" not in capsys.readouterr().out


def test_models_of_another_run_with_the_same_id_are_replaced(cloud: Cloud, path: Path) -> None:
    """After a destroy nothing remembers r1, and its models have the same size."""
    first = finished(cloud)
    main(["results", "small-growth"])
    cloud.client("s3").delete_bucket_tagging(Bucket=first)  # as good as gone
    time.sleep(1.1)  # S3 tells whole seconds
    put(cloud, declare_bucket(cloud, "1b2c3d4"), "final/model.safetensors", b"n" * 5000)
    main(["results", "small-growth"])
    model = path.parents[1] / "results" / "small-growth" / "r1" / "final" / "model.safetensors"
    assert model.read_bytes() == b"n" * 5000


def test_of_two_people_with_one_file_the_owner_chooses(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mine = finished(cloud)
    theirs = declare_bucket(cloud, "1b2c3d4", owner="bob")
    put(cloud, theirs, "results.json", {"loss": 9})
    main(["results", "small-growth"])
    said = capsys.readouterr().out
    assert said.startswith(f"s3://{mine}/r1/ to ")
    assert f"lies elsewhere too: s3://{theirs}/r1/ (owner bob); used is the newest of run.owner, you.\n" in said
    path.write_text(path.read_text().replace("owner: you", "owner: bob"))
    main(["results", "small-growth"])
    assert capsys.readouterr().out.startswith(f"s3://{theirs}/r1/ to ")
    path.write_text(path.read_text().replace("owner: bob", "owner: carol"))
    main(["results", "small-growth"])  # who has none is told whose it is
    assert re.match(r"s3://[a-z0-9-]+/r1/ \(owner (you|bob)\) to ", capsys.readouterr().out)


def test_light_leaves_the_models_in_the_bucket(cloud: Cloud, path: Path, tmp_path: Path) -> None:
    finished(cloud)
    assert main(["results", "small-growth", "--light", "--to", str(tmp_path / "out")]) == 0
    assert downloaded(tmp_path / "out") == [
        "exports/phase1_end/meta.json",
        "exports/scores.npz",
        "heartbeat/i-1.jsonl",
        "metrics.jsonl",
        "receipt.json",
        "results.json",
    ]


def test_an_earlier_run_can_be_named(cloud: Cloud, path: Path) -> None:
    finished(cloud, run="r0")
    assert main(["results", "small-growth"]) == 2
    assert main(["results", "small-growth", "--run", "r0"]) == 0
    assert (path.parents[1] / "results" / "small-growth" / "r0" / "results.json").is_file()


def test_a_run_without_receipt_is_downloaded_but_not_complete(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cloud, declare_bucket(cloud), "metrics.jsonl", b"{}\n")
    assert main(["results", "small-growth"]) == 1
    assert "no results.json and no receipt.json: it is not done" in capsys.readouterr().out


@pytest.mark.parametrize(("reason", "code"), [("stopped", 0), ("deadline", 0), ("failed", 1), ("finished", 1)])
def test_a_run_ended_early_is_complete_without_results_json_and_a_failed_one_is_not(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], reason: str, code: int
) -> None:
    bucket = declare_bucket(cloud)
    put(cloud, bucket, "receipt.json", {"usd": "0.42"})
    put(cloud, bucket, "done.json", {"reason": reason})
    assert main(["results", "small-growth"]) == code
    said = capsys.readouterr().out
    assert f"ended with {reason}" in said
    assert ("It left no final/ either" in said) is (code == 0)
    put(cloud, bucket, "final/model.safetensors", b"m")
    assert main(["results", "small-growth"]) == code
    assert "no final/" not in capsys.readouterr().out


@pytest.mark.parametrize("again", [True, False])
def test_a_log_that_grew_since_it_was_listed_comes_as_it_is_now(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, again: bool
) -> None:
    bucket, listed = declare_bucket(cloud), aws.RunFolder.objects
    put(cloud, bucket, "job.log", b"step 1\n")

    def objects(folder: aws.RunFolder, prefix: str = "") -> list[aws.Stored]:
        if prefix:
            return listed(folder, prefix) if again else []
        found = listed(folder)
        put(cloud, bucket, "job.log", b"step 1\nstep 2\n")
        return found

    monkeypatch.setattr(aws.RunFolder, "objects", objects)
    if again:
        assert main(["results", "small-growth"]) == 1  # the run is not done
        assert (path.parents[1] / "results/small-growth/r1/job.log").read_text() == "step 1\nstep 2\n"
    else:
        assert main(["results", "small-growth"]) == 2
        assert "came with 14 bytes instead of 7: it changed meanwhile" in capsys.readouterr().err


def test_no_object_can_be_written_outside_the_folder(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(cloud, finished(cloud), "../../../evil", b"x")
    assert main(["results", "small-growth"]) == 0
    said = "left in the bucket: an object whose name is '../../../evil', not a file's name below its folder"
    assert said in capsys.readouterr().out
    assert not list(path.parents[1].rglob("evil"))


# sweep ---------------------------------------------------------------------------------------------------------------


def left(stack: StackDefinition, now: datetime = NOW) -> dict[str, leftovers.Left]:
    return {found.kind: found for found in leftovers.look(stack, aws.client, now)}


def test_sweep_of_an_empty_account_finds_nothing(cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "small-growth"]) == 0
    assert capsys.readouterr().out == (
        f"us-east-2, account {cloud.account} as user/moto:\nsmall-growth in us-east-2: nothing billable is left over.\n"
    )


def test_sweep_walks_from_a_running_node_to_its_untagged_disk(
    cloud: Cloud, stack: StackDefinition, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    cloud.tick()
    found = left(stack)
    assert {"fleet", "instance", "volume", "network interface", "launch template", "VPC"} <= set(found)
    assert found["volume"].usd_per_month == Decimal("8.00")
    assert found["instance"].usd_per_month >= Decimal("1.212") * 730
    assert found["fleet"].bills
    assert main(["sweep", "small-growth"]) == 1
    said = capsys.readouterr().out
    assert "Billed, and nobody asked for it:" in said
    assert re.search(r"aws ec2 terminate-instances --instance-ids i-\w+ --region us-east-2\n", said)
    assert re.search(r"aws ec2 delete-fleets .* --region us-east-2\n", said)
    assert "it can launch a node at any time" in said


def test_a_fleet_that_waits_for_a_node_is_a_leftover_though_it_costs_nothing_yet(stack: StackDefinition) -> None:
    waiting = leftovers.Left(kind="fleet", id="fleet-1", note="active, wants 1", launches=True)
    said = list(sweep.table(stack, [waiting]))
    assert said[0] == "Billed, and nobody asked for it:"
    assert said[-1].endswith(": $0.00 a month nobody asked for. A fleet can launch a node at any time.")


def test_an_expired_fleet_launches_nothing_though_aws_may_show_it_as_active(
    cloud: Cloud, stack: StackDefinition
) -> None:
    cloud.no_capacity()
    declare_fleet(cloud)
    assert left(stack)["fleet"].launches
    found = left(stack, EXPIRES)["fleet"]
    assert (found.note, found.bills) == ("active, wants 1, expired", False)


def test_sweep_does_not_take_another_owner_s_node_for_a_leftover(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud, owner="bob")
    declare_bucket(cloud, owner="bob")
    cloud.tick()
    assert main(["sweep", "small-growth"]) == 0
    _, title, *lines, last = capsys.readouterr().out.splitlines()
    assert title == "Of a stack of the same name and another owner than you: ask before removing it:"
    found = [line for line in lines if "aws " not in line]
    assert all(line.endswith(", owner bob") for line in found)
    assert {"fleet", "instance", "volume", "bucket", "VPC"} <= {line[18:].strip().split()[0] for line in found}
    theirs = r"Another owner's: \$\d+\.\d\d a month\. A fleet can launch a node at any time\."
    assert re.fullmatch(rf".*nothing billable is left over\. {theirs}", last)


def test_sweep_finds_a_node_by_its_fleet_when_its_own_tags_are_gone(cloud: Cloud, stack: StackDefinition) -> None:
    declare_fleet(cloud)
    cloud.tick()
    (node,) = cloud.instances()
    cloud.client("ec2").delete_tags(Resources=[node.id], Tags=[{"Key": key} for key in TAGS])
    assert left(stack)["instance"].id == node.id


def test_a_kept_bucket_is_no_leftover_and_shows_its_price(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished(cloud)
    assert main(["sweep", "small-growth"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[1] == "Kept on purpose (storage.keep of small-growth.yaml):"
    assert "9 objects, 0.000 GB, expiring after 30 days" in said
    path.write_text(path.read_text().replace("tokens}", "tokens, keep: {bucket: false}}"))
    assert main(["sweep", "small-growth"]) == 1
    assert "aws s3 rb --force s3://gpufleet-small-growth-0a1b2c3" in capsys.readouterr().out


def test_a_bucket_of_another_stack_with_a_like_name_is_not_ours(cloud: Cloud, stack: StackDefinition) -> None:
    s3 = cloud.client("s3")
    name = "gpufleet-small-growth-two-0a1b2c3"
    s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": cloud.region})
    assert left(stack) == {}
    s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": [{"Key": "gpufleet:stack", "Value": "small-growth-two"}]})
    assert left(stack) == {}


def test_a_bucket_that_was_just_deleted_and_is_still_listed_is_passed_over(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3 = cloud.client("s3")
    gone = {"Name": "gpufleet-small-growth-0a1b2c3", "CreationDate": datetime(2026, 11, 22, tzinfo=UTC)}
    monkeypatch.setattr(aws, "pages", lambda *asked, **how: [gone])
    assert aws.buckets(s3, stack.name) == ([], {}, [])


def closed(s3: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tags of that bucket are refused."""
    tags = s3.get_bucket_tagging

    def refusing(**asked: Any) -> Any:
        if asked["Bucket"] == name:
            raise ClientError({"Error": {"Code": "AccessDenied", "Message": "Access Denied"}}, "GetBucketTagging")
        return tags(**asked)

    monkeypatch.setattr(s3, "get_bucket_tagging", refusing)


def test_a_bucket_that_hides_its_tags_hides_none_of_ours(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, ours = cloud.client("s3"), finished(cloud)
    for name in ("gpufleet-small-growth-two-0a1b2c3", "gpufleet-small-growth-9z8y7x6"):  # a longer name, and like ours
        s3.create_bucket(Bucket=name, CreateBucketConfiguration={"LocationConstraint": cloud.region})
        closed(s3, name, monkeypatch)
    folder = aws.run_folder(s3, stack)
    assert folder is not None
    assert folder.bucket == ours
    found = [
        each for each in leftovers.look(stack, lambda service, _: cloud.client(service), NOW) if each.kind == "bucket"
    ]
    assert [(each.id, each.unseen) for each in found] == [("gpufleet-small-growth-9z8y7x6", True), (ours, False)]
    assert "let you call GetBucketTagging: Access Denied" in found[0].note


def test_where_no_bucket_shows_its_tags_nobody_says_that_there_is_no_run(
    cloud: Cloud, stack: StackDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    s3, ours = cloud.client("s3"), finished(cloud)
    closed(s3, ours, monkeypatch)
    with pytest.raises(AwsRefused, match=rf"small-growth's cannot be told: {ours} \(AWS does not let you call GetBuck"):
        aws.run_folder(s3, stack)


def test_a_right_that_is_missing_hides_no_node_and_is_not_taken_for_nothing(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for action in ("ListRoles", "DescribeVolumes"):
        cloud.deny(action)
    assert main(["sweep", "small-growth"]) == 2
    _, title, volumes, roles, last = capsys.readouterr().out.splitlines()
    assert title == "Not looked at, so it may be there and cost:"
    assert re.fullmatch(r" +volumes +AWS does not let you call DescribeVolumes: .*", volumes)
    assert re.fullmatch(r" +roles +AWS does not let you call ListRoles: .*", roles)
    assert last == "small-growth in us-east-2: nothing billable is in sight, of what could be looked at."
    declare_fleet(cloud)
    cloud.tick()
    cloud.deny("DescribeFleets")
    assert main(["sweep", "small-growth"]) == 1
    assert "aws ec2 terminate-instances --instance-ids " in capsys.readouterr().out


def test_sweep_with_keys_that_nobody_knows_stops_at_once(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAIOSFODNN7EXAMPLE")
    assert main(["sweep", "small-growth"]) == 2
    assert capsys.readouterr().out == ""


def test_a_type_without_an_on_demand_price_is_shown_at_the_dearest_known(stack: StackDefinition) -> None:
    """p5e has spot prices alone."""
    assert leftovers._hourly("p5e.48xlarge", "us-east-2") == Decimal("62.9957")
    assert leftovers._hourly("p5.48xlarge", "us-east-2") == Decimal("55.04")


def test_a_loose_disk_like_ours_is_shown_but_not_claimed(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ec2 = cloud.client("ec2")
    make = {"VolumeType": "gp3", "Iops": 3000, "Throughput": 125, "AvailabilityZone": "us-east-2a"}
    volume = ec2.create_volume(Size=100, **make)["VolumeId"]
    other = ec2.create_volume(Size=101, **make)["VolumeId"]
    assert main(["sweep", "small-growth"]) == 0
    said = capsys.readouterr().out
    assert "Perhaps ours: no tag says so:" in said
    assert volume in said
    assert other not in said


def test_after_the_fleet_is_deleted_only_what_is_free_remains(cloud: Cloud, stack: StackDefinition) -> None:
    fleet = declare_fleet(cloud)
    cloud.tick()
    cloud.client("ec2").delete_fleets(FleetIds=[fleet], TerminateInstances=True)
    cloud.tick()
    found = left(stack)
    assert {"fleet", "instance", "volume"} & set(found) == set()
    assert all(not one.usd_per_month for one in found.values())


def test_instance_profiles_and_endpoints_are_found_until_they_are_deleted(cloud: Cloud, stack: StackDefinition) -> None:
    iam, ec2 = cloud.client("iam"), cloud.client("ec2")
    tags = [{"Key": key, "Value": value} for key, value in TAGS.items()]
    iam.create_instance_profile(InstanceProfileName="gpufleet-small-growth-0a1b2c3", Tags=tags)
    iam.create_instance_profile(InstanceProfileName="gpufleet-small-growth-two")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    endpoint = ec2.create_vpc_endpoint(
        VpcId=vpc,
        VpcEndpointType="Gateway",
        RouteTableIds=[ec2.create_route_table(VpcId=vpc)["RouteTable"]["RouteTableId"]],
        ServiceName="com.amazonaws.us-east-2.s3",
        TagSpecifications=[{"ResourceType": "vpc-endpoint", "Tags": tags}],
    )["VpcEndpoint"]["VpcEndpointId"]
    found = left(stack)
    assert {kind: one.id for kind, one in found.items()} == {
        "instance profile": "gpufleet-small-growth-0a1b2c3",
        "VPC endpoint": endpoint,
    }
    ec2.delete_vpc_endpoints(VpcEndpointIds=[endpoint])  # stays listed as deleted for a while
    iam.delete_instance_profile(InstanceProfileName="gpufleet-small-growth-0a1b2c3")
    assert left(stack) == {}
