"""A node of the embedded AWS may do what the program's role lets it, and S3 tells it no more than AWS would."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from gpufleet.infra.account.iam_policy import AccessRequest
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import Account, StackDefinition
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.infra.program.resources.tags import tags
from gpufleet.job.contract.spent import History
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.supervisor.fleet import history, of_node
from gpufleet.job.supervisor.store import MissingError, RefusedError, S3Store
from gpufleet.rehearsal import gate
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.fleet import Event
from gpufleet.rehearsal.habits import Habits
from tests.rehearsal.declared import as_node, fleet, living, role, template
from tests.repository import ROOT

RUN = load(ROOT / "stacks" / "tinystories-growth.yaml", now=datetime(2026, 11, 21, tzinfo=UTC))
BUCKET, GROUP = "own", "gpufleet-logs"


def _statements(account: str, run: StackDefinition = RUN) -> list[dict[str, Any]]:
    logs = f"arn:aws:logs:us-east-2:{account}:log-group:{GROUP}"
    schedule, stop = f"arn:aws:scheduler:us-east-2:{account}:schedule/g/stop", f"arn:aws:iam::{account}:role/stop"
    return node_statements(run, f"arn:aws:s3:::{BUCKET}", logs, schedule, stop)


def owned_fleet(cloud: Cloud, **changed: str) -> str:
    """A fleet of nodes with the program's role and tags; `changed` by key."""
    owned = [{"Key": key, "Value": value} for key, value in {**tags(RUN), **changed}.items()]
    made = template(
        cloud,
        IamInstanceProfile={"Name": "node"},
        TagSpecifications=[{"ResourceType": "instance", "Tags": owned}],
    )
    return fleet(cloud, made, TagSpecifications=[{"ResourceType": "fleet", "Tags": owned}])


@pytest.fixture(scope="module")
def cloud(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cloud]:
    """With one node, whose role is the program's."""
    with Cloud(tmp_path_factory.mktemp("cloud"), clock=ManualClock()) as cloud:
        role(cloud, _statements(cloud.account))
        for bucket in (BUCKET, "theirs"):
            place = {"LocationConstraint": cloud.region}
            cloud.client("s3").create_bucket(Bucket=bucket, CreateBucketConfiguration=place)
        for group in (GROUP, "other"):
            cloud.client("logs").create_log_group(logGroupName=group)
        owned_fleet(cloud)
        cloud.tick()
        yield cloud


@pytest.fixture
def s3(cloud: Cloud) -> Any:
    return as_node(cloud, "s3")


def test_a_node_reads_and_writes_its_own_run(s3: Any) -> None:
    store = S3Store(f"s3://{BUCKET}/r1", client=s3)
    store.put_bytes(b"x", "ckpt/step_1/manifest.json")
    assert store.get_bytes("ckpt/step_1/manifest.json") == b"x"
    assert [entry.key for entry in store.entries("ckpt/")] == ["ckpt/step_1/manifest.json"]
    store.delete(["ckpt/step_1/manifest.json"])
    assert store.entries("") == []


def test_an_object_that_is_not_there_is_refused_and_the_listing_tells(s3: Any, tmp_path: Path) -> None:
    with pytest.raises(ClientError, match="AccessDenied"):
        s3.get_object(Bucket=BUCKET, Key="r1/none")
    with pytest.raises(ClientError, match="403"):
        s3.head_object(Bucket=BUCKET, Key="r1/none")
    store = S3Store(f"s3://{BUCKET}/r1", client=s3)
    assert store.get_bytes("none") is None
    with pytest.raises(MissingError):
        store.get_file("none", tmp_path / "none")


REFUSED: dict[str, Callable[[Any], Any]] = {
    "another run": lambda s3: s3.put_object(Bucket=BUCKET, Key="r2/done.json", Body=b""),
    "another bucket": lambda s3: s3.get_object(Bucket="theirs", Key="r1/done.json"),
    "an input, written": lambda s3: s3.put_object(Bucket=BUCKET, Key="inputs/1/job.tar.gz", Body=b""),
    "an input, deleted": lambda s3: s3.delete_objects(
        Bucket=BUCKET, Delete={"Objects": [{"Key": "r1/a"}, {"Key": "inputs/1/job.tar.gz"}]}
    ),
    "what a node has spent, deleted": lambda s3: s3.delete_objects(
        Bucket=BUCKET, Delete={"Objects": [{"Key": "r1/attempts/i-1.json"}, {"Key": "r1/heartbeat/i-1.jsonl"}]}
    ),
    "the limits, written anew": lambda s3: s3.put_object(Bucket=BUCKET, Key="r1/run.json", Body=b"{}"),
    "a fleet, named as known": lambda s3: s3.put_object(Bucket=BUCKET, Key="r1/known_fleet/fleet-1", Body=b""),
    "the end of the run, deleted": lambda s3: s3.delete_object(Bucket=BUCKET, Key="r1/done.json"),
    "compiled graphs, deleted": lambda s3: s3.delete_object(Bucket=BUCKET, Key="compile_cache/a"),
    "the whole listing": lambda s3: s3.list_objects_v2(Bucket=BUCKET),
    "another run's listing": lambda s3: s3.list_objects_v2(Bucket=BUCKET, Prefix="r10/"),
    "the bucket's policy": lambda s3: s3.delete_bucket_policy(Bucket=BUCKET),
    "all buckets": lambda s3: s3.list_buckets(),
}


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED.keys())
def test_what_the_role_does_not_say_is_refused(s3: Any, ask: Callable[[Any], Any]) -> None:
    with pytest.raises(ClientError, match="AccessDenied"):
        ask(s3)


def test_of_an_input_that_is_gone_a_node_learns_only_that_it_may_not(s3: Any) -> None:
    with pytest.raises(RefusedError):
        S3Store(f"s3://{BUCKET}", client=s3).get_bytes("inputs/1/train.bin")


def test_a_node_ends_its_own_fleet_and_itself_and_changes_or_ends_no_other(tmp_path: Path) -> None:
    clock = ManualClock()
    with Cloud(tmp_path, clock=clock) as cloud:
        role(cloud, _statements(cloud.account))
        own, *others = [owned_fleet(cloud, **changed) for changed in ({}, *({key: "other"} for key in tags(RUN)))]
        cloud.tick()
        nodes = {node.fleet_id: node.id for node in cloud.instances()}
        ec2 = as_node(cloud, "ec2")
        refused = [
            *(
                lambda n=n: ec2.modify_fleet(FleetId=own, TargetCapacitySpecification={"TotalTargetCapacity": n})
                for n in (0, 40)
            ),
            *(lambda each=each: ec2.delete_fleets(FleetIds=[own, each], TerminateInstances=False) for each in others),
            *(lambda each=each: ec2.terminate_instances(InstanceIds=[nodes[each]]) for each in others),
            lambda: ec2.delete_fleets(FleetIds=[own], TerminateInstances=True),
            lambda: ec2.create_tags(Resources=[others[0]], Tags=[{"Key": "a", "Value": "b"}]),
            lambda: ec2.run_instances(ImageId="ami-0", MinCount=1, MaxCount=1),
            ec2.describe_fleets,
        ]
        for ask in refused:
            with pytest.raises(ClientError, match="UnauthorizedOperation"):
                ask()
        assert len(cloud.instances()) == len(nodes)

        ec2.delete_fleets(FleetIds=[own], TerminateInstances=False)
        assert nodes[own] in living(cloud)
        ec2.terminate_instances(InstanceIds=[nodes[own]])
        clock.advance(3600)
        cloud.tick()
        assert not cloud.fleets.living(own)
        assert set(living(cloud)) == {nodes[each] for each in others}


def test_a_node_writes_to_its_own_log_group(cloud: Cloud) -> None:
    logs = as_node(cloud, "logs")
    logs.create_log_stream(logGroupName=GROUP, logStreamName="r1/i-1")
    with pytest.raises(ClientError, match="AccessDenied"):
        logs.create_log_stream(logGroupName="other", logStreamName="r1/i-1")


def test_a_condition_that_is_not_known_is_an_error() -> None:
    condition = {"NumericLessThan": {"s3:max-keys": "10"}}
    statement = {"Effect": "Allow", "Action": "*", "Resource": "*", "Condition": condition}
    with pytest.raises(ValueError, match="cannot tell from the role's policy whether it allows s3:GetObject"):
        gate.allowed([statement], AccessRequest(action="s3:GetObject"))


def test_a_denial_counts_for_more_than_a_permission() -> None:
    statements = [{"Effect": effect, "Action": "s3:Get*", "Resource": "*"} for effect in ("Allow", "Deny")]
    assert gate.allowed(statements[:1], AccessRequest(action="s3:GetObject"))
    assert not gate.allowed(statements, AccessRequest(action="s3:GetObject"))


def test_a_node_learns_from_its_own_fleet_s_history_whose_hand_took_a_node(tmp_path: Path) -> None:
    clock = ManualClock()
    with Cloud(tmp_path, clock=clock) as cloud:
        role(cloud, _statements(cloud.account))
        own = owned_fleet(cloud)
        theirs = fleet(cloud)
        cloud.tick()
        node = next(each for each in cloud.instances() if each.fleet_id == own)
        ec2, began = as_node(cloud, "ec2"), cloud.clock.now().timestamp()
        with pytest.raises(ClientError, match="UnauthorizedOperation"):
            history(ec2, theirs, began)
        cloud.fleets.notice(node.id)
        launched, there = {node.id: began}, frozenset({node.id})
        assert of_node(node.id, ec2)(began) == History(launched=launched, there=there)  # AWS's hand
        clock.advance(60)
        cloud.client("ec2").modify_fleet(FleetId=own, TargetCapacitySpecification={"TotalTargetCapacity": 0})
        changed = History(changes=(began + 60,), launched=launched, there=there)
        assert of_node(node.id, ec2)(began) == changed
        assert of_node("i-0123456789abcdef0", ec2)(began) is None
        told = cloud.fleets.fleets[own].history  # longer than one answer
        told[:0] = [Event(cloud.clock.now(), "information", "launchSpecTemporarilyBlacklisted")] * 1000
        assert of_node(node.id, ec2)(began) == changed


def test_a_node_learns_from_its_own_fleet_s_history_when_another_ended_and_which_are_there(tmp_path: Path) -> None:
    clock = ManualClock()
    with Cloud(tmp_path, clock=clock, habits=Habits(relaunch_s=60)) as cloud:
        role(cloud, _statements(cloud.account))
        owned_fleet(cloud)
        cloud.tick()
        began, (first,) = clock.now().timestamp(), cloud.instances()
        clock.advance(600)
        cloud.kill(first.id)
        clock.advance(60)
        cloud.tick()
        _, second = cloud.instances()
        found = of_node(second.id, as_node(cloud, "ec2", second.id))(began)
        launched = {first.id: began, second.id: began + 660}
        assert found == History(launched=launched, ended={first.id: began + 600}, there=frozenset({second.id}))


SECRETS = {
    "TOKEN": "ssm:/team/token",
    "KEY": "secretsmanager:team/key",
    "OTHER": "ssm:/team/token/other",
    "LONGER": "secretsmanager:team/key-2",
}


def rights_are(cloud: Cloud, statements: list[dict[str, Any]]) -> None:
    """Of the nodes' role from now on."""
    document = json.dumps({"Version": "2012-10-17", "Statement": statements})
    cloud.client("iam").put_role_policy(RoleName="node", PolicyName="rights", PolicyDocument=document)


def test_a_node_reads_the_secrets_that_its_job_names_and_no_other(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPUFLEET_SECRET_TOKEN", "of the shell")
    cloud.has(Account(), SECRETS)
    config = CommandConfig(secrets={name: SECRETS[name] for name in ("TOKEN", "KEY")})
    rights_are(cloud, _statements(cloud.account, replace(RUN, job=replace(RUN.job, parameters=config))))
    ssm, manager = as_node(cloud, "ssm"), as_node(cloud, "secretsmanager")
    try:
        parameter = ssm.get_parameter(Name="/team/token", WithDecryption=True)["Parameter"]["Value"]
        secret = manager.get_secret_value(SecretId="team/key")["SecretString"]
        assert (parameter, secret) == ("of the shell", "rehearsal")
        with pytest.raises(ClientError, match="AccessDenied"):
            ssm.get_parameter(Name="/team/token/other")
        with pytest.raises(ClientError, match="AccessDenied"):
            manager.get_secret_value(SecretId="team/key-2")
        with pytest.raises(ClientError, match="AccessDenied"):
            ssm.describe_parameters()
    finally:
        rights_are(cloud, _statements(cloud.account))


@pytest.mark.parametrize("method", ["GET", "PUT"])
def test_an_object_that_is_overwritten_as_it_is_read_is_read_again(method: str) -> None:
    answers: list[list[bytes]] = [[], [b"the new one"]]

    def moto(environ: dict[str, Any], start: Any) -> list[bytes]:
        if not (answer := answers.pop(0)):
            raise ValueError("I/O operation on closed file.")
        return answer

    passes = gate.Gate(
        moto,
        "1",
        lambda region: None,
        lambda token: (),
        lambda arn: (),
        lambda name: {},
        lambda name: None,
        ManualClock(),
    )
    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": "/bucket/key",
        "HTTP_AUTHORIZATION": f"AWS4-HMAC-SHA256 Credential={gate.USER_KEY}/20270115/us-east-2/s3/aws4_request",
    }
    if method == "GET":
        assert list(passes(environ, lambda *words: None)) == [b"the new one"]
    else:
        with pytest.raises(ValueError, match="closed file"):
            passes(environ, lambda *words: None)
