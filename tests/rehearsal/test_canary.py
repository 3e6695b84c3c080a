"""A canary on the embedded AWS: undisturbed nothing is refuted, and what AWS does otherwise is named, and nothing else.

Each deviation is planted where AWS would have it: in an answer, in a refusal, or in what it does by itself. Most belong
to one phase, and only that phase is flown, over a stack that is up and whose node is a row of EC2's alone.
"""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import boto3
import pytest
from botocore.model import ListShape, MapShape, Shape, StructureShape

from gpufleet.infra.account.fleet import fleets_of
from gpufleet.infra.canary import notice, probes, proof, replay, stacks
from gpufleet.infra.canary.assumptions import judge
from gpufleet.infra.canary.flight import Flight
from gpufleet.infra.canary.observations import FlightFacts
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence import proofs
from gpufleet.rehearsal import canary, habits
from gpufleet.rehearsal.aws_answers import FLEETS
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.controller import FleetController
from gpufleet.rehearsal.gate import SECRET, USER_KEY
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.schedules import Schedules
from tests import forked
from tests.rehearsal.canary_program import pinned

SESSION = boto3.session.Session()
KEYS = {"aws_access_key_id": USER_KEY, "aws_secret_access_key": SECRET}


class Refuses(NamedTuple):
    """AWS refuses the first calls with this code."""

    code: str
    calls: int = 1000


class Drops(NamedTuple):
    """AWS does not heed an argument."""

    argument: str


class LateFleets:
    """AWS shows no fleet in the first answers."""

    def __init__(self, answers: int) -> None:
        self._left = answers

    def __call__(self, parsed: dict[str, Any]) -> None:
        self._left -= 1
        if self._left >= 0:
            parsed["Fleets"].clear()


How = Callable[[dict[str, Any]], Any] | Refuses | Drops  # a change of the answer, or one of these


def plant(client: Any, operation: str, how: How) -> None:
    """Makes the client hear a deviating AWS."""
    name, events = f"{client.meta.service_model.service_id.hyphenize()}.{operation}", client.meta.events
    if isinstance(how, Refuses):
        answers = itertools.repeat({"Error": {"Code": how.code, "Message": ""}, "ResponseMetadata": {}}, how.calls)

        def refuse(**_: Any) -> Any:
            answer = next(answers, None)
            return None if answer is None else (SimpleNamespace(status_code=400), answer)

        events.register(f"before-call.{name}", refuse)
    elif isinstance(how, Drops):
        events.register(f"provide-client-params.{name}", lambda params, **_: params.pop(how.argument, None) and None)
    else:
        events.register(f"after-call.{name}", lambda parsed, **_: how(parsed) and None)


@pytest.fixture(scope="module")
def flight(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flight]:
    """A flight whose first stack is up."""
    place = tmp_path_factory.mktemp("canary")
    with Cloud(place / "cloud", habits=Habits(relaunch_s=0.0)) as cloud, forked.programs(place / "project"):
        made = canary.flight(place / "project", cloud, say=lambda line: None, real=False)
        pinned(made, "prepare", stacks.RUN)
        with made.engine(stacks.RUN) as engine:
            done = engine.up()
            assert done.ok, done.diagnostics
            yield made
            engine.destroy()


def stack(flight: Flight) -> StackDefinition:
    return stacks.definition(flight.project, stacks.RUN)


def fly_account(flown: Flight) -> None:
    probes.account(flown.facts, stack(flown), flown.asked)


def fly_refusals(flown: Flight) -> None:
    probes.refusals(flown.facts, flown.asked)


def fly_bucket(flown: Flight) -> None:
    (name,) = (each["Name"] for each in flown.client("s3").list_buckets()["Buckets"])
    probes.bucket(flown.facts, flown.asked("s3"), name)


def fly_role(flown: Flight) -> None:
    (name,) = (each["Name"] for each in flown.client("s3").list_buckets()["Buckets"])
    probes.role(flown.facts, stack(flown), flown.asked, name)


def fly_stops(flown: Flight) -> None:
    stops = probes.stops_begin(flown.facts, stack(flown), flown.asked, 15)
    probes.stops_end(flown.facts, stops, flown.asked, time.sleep, 5)


def fly_node(flown: Flight) -> None:
    running = [{"Name": "instance-state-name", "Values": ["running"]}]
    for each in flown.asked("ec2").describe_instances(Filters=running)["Reservations"]:
        flown._look(stack(flown), each["Instances"][0], {}, 0)


def fly_tags(flown: Flight) -> None:
    seconds = itertools.count()
    flown.clock, flown.sleep = lambda: next(seconds), lambda _: None
    flown.wait_for("tags.fleet_s", lambda: fleets_of(flown.asked("ec2"), stack(flown)), 60)


def fly_deleted(flown: Flight) -> None:
    """Without a destroy: what AWS says of the fleet is planted. A look every 30 s, as 1,500 looks take 15 s."""
    seconds = itertools.count(step=30)
    flown.clock, flown.sleep, flown.scale = lambda: next(seconds), lambda _: None, stacks.AWS
    try:
        flown._deleted(stack(flown))
    finally:
        flown.scale = stacks.EMBEDDED


PHASES: dict[str, Callable[[Flight], None]] = {
    "account": fly_account,
    "refusals": fly_refusals,
    "bucket": fly_bucket,
    "role": fly_role,
    "stops": fly_stops,
    "node": fly_node,
    "tags": fly_tags,
    "deleted": fly_deleted,
}


def flown(flight: Flight, phase: str, planted: tuple[str, How] | None = None) -> FlightFacts:
    """The facts of one phase, with AWS answering a call so."""
    facts, whole = FlightFacts(), flight.client
    clients: dict[str, Any] = {}

    def client(service: str) -> Any:
        if service not in clients:
            of = whole(service).meta
            place: dict[str, Any] = {"region_name": of.region_name, "endpoint_url": of.endpoint_url, **KEYS}
            clients[service] = SESSION.client(service, **place)
            if planted is not None and planted[0].startswith(f"{service}."):
                plant(clients[service], planted[0].partition(".")[2], planted[1])
        return clients[service]

    flight.facts, flight.client = facts, client
    try:
        PHASES[phase](flight)
    finally:
        flight.client = whole
    return facts


def refuted(facts: FlightFacts) -> set[str]:
    return {each.assumption.id for each in judge(facts) if each.state == "refuted"}


@pytest.mark.parametrize("phase", [each for each in PHASES if each != "deleted"])
def test_undisturbed_a_phase_refutes_nothing(flight: Flight, phase: str) -> None:
    judged = judge(flown(flight, phase))
    assert [each for each in judged if each.state == "refuted"] == []
    assert any(each.state == "held" for each in judged)


def first(key: str, **values: Any) -> How:
    return lambda parsed: parsed[key][0].update(values)


def each(key: str, **values: Any) -> How:
    return lambda parsed: [item.update(values) for item in parsed[key]]


def node(**values: Any) -> How:
    return lambda parsed: [item["Instances"][0].update(values) for item in parsed["Reservations"]]


def popped(key: str, field: str) -> How:
    return lambda parsed: [item.pop(field, None) for item in parsed[key]]


def untagged(parsed: dict[str, Any]) -> None:
    for item in parsed["Reservations"]:
        made = item["Instances"][0]
        made["Tags"] = [tag for tag in made.get("Tags", []) if not tag["Key"].startswith("aws:")]


def renamed(old: str, new: str) -> How:
    def rename(parsed: dict[str, Any]) -> None:
        for item in parsed.get("UnsuccessfulFleetDeletions", []):
            item["Error"]["Code"] = item["Error"]["Code"].replace(old, new)

    return rename


def decided(action: str, decision: str) -> How:
    """What the simulator says of one action, on any resource."""

    def decide(parsed: dict[str, Any]) -> None:
        for item in parsed["EvaluationResults"]:
            if item["EvalActionName"] == action:
                item["EvalDecision"] = decision

    return decide


QUOTA, TYPES, HISTORY = "service-quotas.GetServiceQuota", "ec2.DescribeInstanceTypes", "ec2.DescribeSpotPriceHistory"
IMAGES, INSTANCES, VOLUMES = "ec2.DescribeImages", "ec2.DescribeInstances", "ec2.DescribeVolumes"
PRICES, IN_USE, UNKNOWN = "SpotPriceHistory", "fleetNotInDeletableState", "fleetIdDoesNotExist"
PUBLIC, CLOSED = "PublicAccessBlockConfiguration", "s3.GetPublicAccessBlock"
DRY = Refuses("UnauthorizedOperation", 1)  # the first fleet is only tried
RIGHTS, SIMULATED = "EvaluationResults", "iam.SimulatePrincipalPolicy"
# By phase: what AWS does otherwise, in which call, how, and the one assumption that it refutes.
ANSWERS: dict[str, tuple[tuple[str, str, How, str], ...]] = {
    "account": (
        ("another price", HISTORY, each(PRICES, SpotPrice="9.9"), "price-below-on-demand"),
        ("no price", HISTORY, lambda it: it[PRICES].clear(), "price-told"),
        ("a price without its moment", HISTORY, popped(PRICES, "Timestamp"), "answer-prices"),
        ("a zone less", "ec2.DescribeAvailabilityZones", lambda it: it["AvailabilityZones"].pop(0), "zones-known"),
        ("an AMI with another root", IMAGES, first("Images", RootDeviceName="/dev/sda1"), "ami-root"),
        ("an AMI of somebody else", IMAGES, first("Images", OwnerId="1"), "ami-owner"),
        ("an AMI for arm64", IMAGES, first("Images", Architecture="arm64"), "ami-architecture"),
        ("an AMI that is withdrawn", IMAGES, first("Images", State="deregistered"), "ami-available"),
        ("an AMI of another system", IMAGES, first("Images", Name="Ubuntu"), "ami-parameter"),
        ("a quota of another name", QUOTA, lambda it: it["Quota"].update(QuotaName="x"), "quota-name"),
        ("more vCPUs", TYPES, each("InstanceTypes", VCpuInfo={"DefaultVCpus": 64}), "type-vcpus"),
        ("less memory", TYPES, each("InstanceTypes", MemoryInfo={"SizeInMiB": 9}), "type-memory"),
        ("a type without its GPU", TYPES, popped("InstanceTypes", "GpuInfo"), "type-gpus"),
        ("a right refused", SIMULATED, each(RIGHTS, EvalDecision="explicitDeny"), "rights-simulated"),
        ("an own key", "ec2.GetEbsDefaultKmsKeyId", lambda it: it.update(KmsKeyId="alias/own"), "disk-key"),
    ),
    "refusals": (
        ("other words for a fleet", "ec2.DescribeFleets", Refuses("InvalidParameterValue"), "no-fleet"),
        ("other words for an AMI", IMAGES, Refuses("InvalidAMIID.Unavailable"), "no-ami"),
        ("other words for a role", "iam.GetRole", Refuses("NoSuchEntityException"), "no-role"),
        ("other words for a parameter", "ssm.GetParameter", Refuses("InvalidKeyId"), "no-parameter"),
        ("other words for a quota", QUOTA, Refuses("IllegalArgumentException"), "no-quota"),
        ("other words for a bucket", "s3.GetBucketTagging", Refuses("AccessDenied"), "no-bucket"),
    ),
    "bucket": (
        ("S3 that writes over what is there", "s3.PutObject", Drops("IfNoneMatch"), "s3-absent"),
        ("S3 that heeds no IfMatch", "s3.PutObject", Drops("IfMatch"), "s3-other"),
        ("an ETag that changes", "s3.HeadObject", lambda it: it.update(ETag="x"), "s3-etag"),
        ("late listings", "s3.ListObjectsV2", lambda it: it.update(KeyCount=0), "s3-list"),
        ("hidden uploads", "s3.ListMultipartUploads", lambda it: it.pop("Uploads", None), "s3-upload-listed"),
        ("an open bucket", CLOSED, lambda it: it[PUBLIC].update(BlockPublicAcls=False), "bucket-closed"),
        ("objects in the clear", "s3.HeadObject", lambda it: it.pop("ServerSideEncryption", None), "s3-encrypted"),
    ),
    "deleted": (
        ("a fleet that lingers", "ec2.DescribeFleets", each("Fleets", FleetState="deleted_running"), "fleet-deleted"),
    ),
    "tags": (("late consistency", "ec2.DescribeFleets", LateFleets(40), "fleet-tags"),),
    "role": (
        ("a node that may launch", SIMULATED, decided("ec2:RunInstances", "allowed"), "role-may-not"),
        ("a node that may not end itself", SIMULATED, decided("ec2:DeleteFleets", "implicitDeny"), "role-may"),
    ),
    "stops": (
        ("a right that only a dry run shows", "ec2.CreateFleet", DRY, "dry-runs"),
        ("a fleet that keeps its target", "ec2.ModifyFleet", Refuses("UnsupportedOperation", 1), "fleet-resized"),
        ("other words for an ended fleet", "ec2.DeleteFleets", renamed(IN_USE, "unexpectedError"), "delete-again"),
        ("other words for no fleet", "ec2.DeleteFleets", renamed(UNKNOWN, "fleetIdMalformed"), "delete-unknown"),
        ("other words for a past hour", "scheduler.CreateSchedule", Refuses("ConflictException", 1), "schedule-past"),
    ),
    "node": (
        ("no tag of the fleet", INSTANCES, untagged, "node-fleet-tag"),
        ("a node on demand", INSTANCES, node(InstanceLifecycle="scheduled"), "node-lifecycle"),
        ("a node of another AMI", INSTANCES, node(ImageId="ami-1"), "node-image"),
        ("a node of another type", INSTANCES, node(InstanceType="g5.48xlarge"), "node-type"),
        ("a disk in the clear", VOLUMES, each("Volumes", Encrypted=False), "volume-encrypted"),
        ("a disk of another kind", VOLUMES, each("Volumes", VolumeType="gp2"), "volume-type"),
        ("a smaller disk", VOLUMES, each("Volumes", Size=8), "volume-size"),
    ),
}  # fmt: skip
SLOW = {"stops": [pytest.mark.slow]}  # each waits 15 s for a schedule and an expiry
PLANTED = [
    pytest.param(phase, *row[1:], id=row[0], marks=SLOW.get(phase, []))
    for phase, rows in ANSWERS.items()
    for row in rows
]


@pytest.mark.parametrize(("phase", "call", "how", "named"), PLANTED)
def test_what_aws_answers_otherwise_is_named_and_nothing_else(
    flight: Flight, phase: str, call: str, how: How, named: str
) -> None:
    assert refuted(flown(flight, phase, (call, how))) == {named}


def test_fis_gives_a_notice_by_a_role_of_its_own_and_leaves_nothing(flight: Flight) -> None:
    flight.facts = FlightFacts()
    (fleets,) = FLEETS.values()
    node = next(each for each in fleets.instances.values() if not each.ended_at)
    experiment = notice.interrupt(stack(flight), node.id, flight.asked, lambda _: None)
    assert node.notice_at is not None
    assert node.terminate_at is not None
    state = flight.asked("fis").get_experiment(id=experiment)["experiment"]["state"]["status"]
    assert state in ("pending", "initiating", "running", "completed")
    notice.forget(flight.client)
    assert flight.client("fis").list_experiment_templates()["experimentTemplates"] == []
    assert notice.ROLE not in [each["RoleName"] for each in flight.client("iam").list_roles()["Roles"]]
    notice.forget(flight.client)


def misfits(shape: Shape, value: Any, path: str) -> Iterator[str]:
    """The parts of a request that botocore's model of the service does not allow: botocore itself checks kinds and
    lower bounds alone.
    """
    limits = shape.metadata
    if isinstance(shape, StructureShape):
        yield from (f"{path} lacks {name}" for name in limits.get("required", []) if name not in value)
        yield from (f"{path} has {name}" for name in value if name not in shape.members)
        for name in value.keys() & shape.members.keys():
            yield from misfits(shape.members[name], value[name], f"{path}.{name}")
    elif isinstance(shape, ListShape):
        for each in value:
            yield from misfits(shape.member, each, f"{path}[]")
    elif isinstance(shape, MapShape):
        for name, each in value.items():
            yield from misfits(shape.key, name, f"{path} key")
            yield from misfits(shape.value, each, f"{path}.{name}")
    elif isinstance(value, str):
        if not limits.get("min", 0) <= len(value) <= limits.get("max", 10**6):
            yield f"{path} has {len(value)} letters"
        if not re.fullmatch(limits.get("pattern", r"[\s\S]*"), value):
            yield f"{path} is {value!r}"
        if value not in limits.get("enum", [value]):
            yield f"{path} is {value!r}"


def test_each_call_to_fis_is_one_of_botocores_model(flight: Flight) -> None:
    calls, fis = list[tuple[str, Any, dict[str, Any]]](), flight.client("fis")

    def note(params: dict[str, Any], model: Any, **_: Any) -> None:
        calls.append((model.name, model.input_shape, params))

    fis.meta.events.register("provide-client-params.fis", note)
    flight.facts = FlightFacts()
    (fleets,) = FLEETS.values()
    node = next(each for each in fleets.instances.values() if not each.ended_at)
    assert notice.refused(fis) == ""
    experiment = notice.interrupt(stack(flight), node.id, flight.asked, lambda _: None)
    fis.get_experiment(id=experiment)
    notice.forget(flight.client)
    fis.meta.events.unregister("provide-client-params.fis", note)
    names = {name for name, _, _ in calls}
    assert names >= {"CreateExperimentTemplate", "StartExperiment", "GetExperiment", "DeleteExperimentTemplate"}
    assert [each for name, shape, params in calls for each in misfits(shape, params, name)] == []
    template = next(params for name, _, params in calls if name == "CreateExperimentTemplate")
    spoilt = {**template, "roleArn": "short", "description": "x" * 600, "other": 1}
    del spoilt["actions"]
    shape = next(shape for name, shape, _ in calls if name == "CreateExperimentTemplate")
    assert len(list(misfits(shape, spoilt, "it"))) == 4


def do_nothing(*_: Any, **__: Any) -> None:
    """In the place of what AWS would do."""


@pytest.mark.parametrize(
    ("of", "method", "named"),
    [(Schedules, "tick", "schedule-fires"), (FleetController, "_expire", "expiry-told")],
    ids=["a schedule that does not fire", "an expiry that does not come"],
)
def test_what_aws_does_otherwise_is_named_and_nothing_else(
    flight: Flight, of: type, method: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of, method, do_nothing)
    assert refuted(flown(flight, "stops")) == {named}


# Fields of AWS's documented answers that the embedded AWS leaves out, of which the program reads none, and those whose
# examples have a number or an object as text.
KNOWN = {
    "ec2.DescribeImages": "Images[].Hypervisor Images[].ImageLocation Images[].KernelId",
    "ec2.DescribeVolumes": "NextToken Volumes[].Attachments[].DeleteOnTermination Volumes[].SnapshotId",
    "iam.GetRole": "Role.AssumeRolePolicyDocument Role.RoleLastUsed.LastUsedDate Role.RoleLastUsed.Region",
    "s3.GetObject": "ContentLength TagCount VersionId",
    "s3.HeadObject": "ContentLength VersionId",
    "s3.ListObjectsV2": "KeyCount MaxKeys NextContinuationToken",
    "s3.PutObject": "VersionId",
}


def test_answers_have_the_documented_fields_but_for_those_that_are_known(flight: Flight) -> None:
    answers = dict[str, Any]()
    for phase in ("account", "refusals", "bucket", "node"):
        answers |= flown(flight, phase).answers
    found = replay.differences(replay.documented(answers), answers)
    assert {(each.call, each.field) for each in found} == {
        (call, field) for call, fields in KNOWN.items() for field in fields.split()
    }


def test_the_file_that_a_flight_wrote_is_imitated_and_replayed_without_a_difference(
    flight: Flight, tmp_path: Path
) -> None:
    def facts() -> FlightFacts:
        found = FlightFacts()
        for phase in ("account", "refusals", "bucket", "node", "tags"):
            one = flown(flight, phase)
            found.answers |= one.answers
            found.seen |= one.seen
        return found

    flight.facts = facts()
    made = proof.make(flight, "us-east-2", datetime.now(UTC), why="", embedded=True)
    file = proofs.read(proof.write(made, tmp_path))
    recorded = file.tree["answers"]
    assert len(recorded) > 25
    assert list(replay.differences(recorded, facts().answers)) == []
    launch_s = file.figure("node.launch_s") or 0.0
    assert habits.recorded(file) == replace(Habits(), launch_s=launch_s, shown_s=file.figure("tags.fleet_s") or -1)
