"""The program without the engine: resources really created, options recorded, and deleted but for what is kept."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.job.contract.bucket import FLEETS, fleet_key
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, InProcess, Result
from tests import forked
from tests.rehearsal.declared import fleet
from tests.rehearsal.engine_world import DEFINITION, STACK, pinned, project

DEFINITION_DAYS = load(DEFINITION, now=datetime.now(UTC)).storage.keep.days


@dataclass
class Story:
    """One scratch project from first preview to destroy."""

    previewed: Result
    unready: Result
    created: Result
    declared: list[dict[str, Any]]
    outputs: dict[str, Any]
    lines: list[str]
    before_up: dict[Any, Any]
    instances: int
    destroyed: Result
    left: dict[Any, dict[str, str]]
    kept_settings: dict[str, Any]

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        return [resource for resource in self.declared if resource["type"] == kind]

    def one(self, kind: str, name: str | None = None) -> dict[str, Any]:
        (found,) = [resource for resource in self.of_type(kind) if name in (None, resource["name"])]
        return found

    def names_before(self, resource: dict[str, Any]) -> set[str]:
        return {urn.split("::")[-1] for urn in resource["options"]["depends_on"]}


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Story]:
    folder = tmp_path_factory.mktemp("inprocess")
    file = project(folder / "project")
    lines: list[str] = []
    with (
        forked.programs(folder),
        Cloud(folder / "cloud") as cloud,
        Engine.open(folder / "project", cloud.environment(), STACK, say=lines.append, real=False) as engine,
    ):
        assert isinstance(engine, InProcess)
        previewed, unready = engine.preview(), engine.up()
        before_up = cloud.leftovers()
        pinned(file)
        created = engine.up()
        assert created.ok, created.text
        declared, outputs = engine.declared(), engine.outputs()
        cloud.tick()
        instances = len(cloud.instances())
        destroyed = engine.destroy()
        s3, bucket = cloud.client("s3"), outputs["bucket"]
        kept = {
            "policy": json.loads(s3.get_bucket_policy(Bucket=bucket)["Policy"]),
            "lifecycle": s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"],
            "closed": s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"],
            "encryption": s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"],
            "keys": [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]],
        }
        yield Story(
            previewed=previewed,
            unready=unready,
            created=created,
            declared=declared,
            outputs=outputs,
            lines=lines,
            before_up=before_up,
            instances=instances,
            destroyed=destroyed,
            left=cloud.leftovers(),
            kept_settings=kept,
        )


def test_a_preview_shows_the_bill_and_creates_nothing(story: Story) -> None:
    assert story.previewed.ok
    assert "in eight runs of ten" in story.previewed.diagnostics
    assert story.previewed.outputs["bill"]["total"].startswith("$")
    assert story.before_up == {}


def test_what_up_still_needs_is_a_warning_in_a_preview(story: Story) -> None:
    assert (
        "warning: fleet.ami is unpinned: run `gpufleet doctor tinystories-growth --pin`." in story.previewed.diagnostics
    )


def test_an_up_of_an_unpinned_definition_fails_before_the_first_resource(story: Story) -> None:
    assert not story.unready.ok
    assert story.unready.steps == ()
    assert "fleet.ami is unpinned" in story.unready.diagnostics
    assert "Traceback" not in story.unready.text


def test_progress_is_heard_line_by_line(story: Story) -> None:
    assert any("in eight runs of ten" in line for line in story.lines)


def test_up_really_creates_and_a_node_starts(story: Story) -> None:
    assert story.created.changes == {"create": len(story.declared)}
    assert story.instances == 1


def test_the_template_waits_for_everything_a_node_needs_and_goes_before_any_of_it(story: Story) -> None:
    before = story.names_before(story.one("aws:ec2/launchTemplate:LaunchTemplate"))
    assert "gpufleet-tinystories-growth" in story.names_before(story.one("aws:ec2/fleet:Fleet"))  # the template
    zones = ("us-east-2a", "us-east-2b", "us-east-2c")
    assert before >= {"network-route-out", "network-s3", "network-node-https", *(f"network-{z}-routes" for z in zones)}
    assert before >= {"storage-closed", "storage-encryption", "storage-tls-only", "storage-expiry"}
    assert before >= {"identity-rights", "gpufleet-tinystories-growth", "run-config", "job-archive"}
    files = {each["name"] for each in story.of_type("aws:s3/bucketObjectv2:BucketObjectv2")} - {"fleet-known"}
    assert len(files) >= 5
    assert before >= files


def test_the_bucket_names_the_fleet_only_while_the_state_knows_of_it(story: Story) -> None:
    known = story.one("aws:s3/bucketObjectv2:BucketObjectv2", "fleet-known")
    assert known["inputs"]["key"] == f"r1/{fleet_key(story.outputs['fleet_id'])}"
    assert "fleet-fleet" in story.names_before(known)  # it comes after the fleet, and goes before it
    assert not known["options"]["retain_on_delete"]
    assert [key for key in story.kept_settings["keys"] if FLEETS in key] == []


def test_bucket_policy_and_lifecycle_follow_the_public_access_block(story: Story) -> None:
    for kind in ("bucketPolicy:BucketPolicy", "bucketLifecycleConfiguration:BucketLifecycleConfiguration"):
        assert "storage-closed" in story.names_before(story.one(f"aws:s3/{kind}"))


def test_the_fleet_is_replaced_by_a_new_run_id_only_and_old_one_first(story: Story) -> None:
    options = story.one("aws:ec2/fleet:Fleet")["options"]
    assert options["replacement_trigger"] == "r1"
    assert options["delete_before_replace"] is True
    assert options["delete_timeout"] == "30m"
    assert set(options["ignore_changes"]) >= {
        "validFrom",
        "validUntil",
        "spotOptions",
        "onDemandOptions",
        "targetCapacitySpecification.totalTargetCapacity",
        "launchTemplateConfigs",
        "tags",
    }


def test_the_rights_of_an_earlier_run_go_last(story: Story) -> None:
    for each in story.of_type("aws:iam/rolePolicy:RolePolicy"):
        options = each["options"]
        assert (options["replacement_trigger"], options["delete_before_replace"]) == ("r1", False)


def test_the_schedule_that_ends_the_fleet_stands_at_its_expiry_and_goes_with_it(story: Story) -> None:
    fleet, schedule = story.one("aws:ec2/fleet:Fleet"), story.one("aws:scheduler/schedule:Schedule")
    expression, zone = (schedule["inputs"][key] for key in ("scheduleExpression", "scheduleExpressionTimezone"))
    assert (expression, zone) == (f"at({fleet['inputs']['validUntil'].removesuffix('Z')})", "UTC")
    assert json.loads(schedule["inputs"]["target"]["input"]) == {"FleetIds": [fleet["id"]], "TerminateInstances": True}
    options = schedule["options"]
    assert options["replacement_trigger"] == f"r1 {fleet['id']}"
    assert options["delete_before_replace"] is True
    assert options["ignore_changes"] == ["scheduleExpression", "state"]  # a node's to move


def test_only_the_scheduler_acts_with_the_role_and_only_for_the_run_s_group(story: Story) -> None:
    role = story.one("aws:iam/role:Role", f"gpufleet-{STACK}-stop")["inputs"]
    group = story.one("aws:scheduler/scheduleGroup:ScheduleGroup")
    (statement,) = json.loads(role["assumeRolePolicy"])["Statement"]
    assert statement["Principal"] == {"Service": "scheduler.amazonaws.com"}
    assert statement["Condition"] == {"ArnEquals": {"aws:SourceArn": group["state"]["arn"]}}


def test_the_first_up_of_a_run_freezes_nothing(story: Story) -> None:
    for each in story.of_type("aws:s3/bucketObjectv2:BucketObjectv2") + story.of_type(
        "aws:ec2/launchTemplate:LaunchTemplate"
    ):
        assert each["options"]["ignore_changes"] == [], each["name"]


def test_the_job_finds_archive_and_run_config_where_the_node_script_looks(story: Story) -> None:
    keys = {each["inputs"]["key"] for each in story.of_type("aws:s3/bucketObjectv2:BucketObjectv2")}
    assert "r1/run.json" in keys
    assert f"inputs/{story.outputs['run']['code']}/job.tar.gz" in keys
    assert f"inputs/{story.outputs['run']['dataset']}/dataset.json" in keys


def test_a_node_writes_into_its_run_and_the_compiled_graphs_and_nowhere_else(story: Story) -> None:
    policy = story.one("aws:iam/rolePolicy:RolePolicy", "identity-rights")
    statements = json.loads(policy["inputs"]["policy"])["Statement"]
    written = [
        each["Resource"] for each in statements if "s3:PutObject" in each["Action"] and each["Effect"] == "Allow"
    ]
    assert {place.split("/", 1)[1] for place in written} == {"r1/*", "compile_cache/*"}
    (listing,) = [each for each in statements if each["Action"] == "s3:ListBucket"]
    assert listing["Condition"] == {"StringLike": {"s3:prefix": ["r1/*", "compile_cache/*"]}}


def test_a_destroy_keeps_the_bucket_with_its_settings_and_nothing_else(story: Story) -> None:
    assert story.destroyed.ok
    deleted, kept = story.destroyed.changes["delete"], story.destroyed.changes["kept"]
    assert (deleted + kept, kept) == (len(story.declared), 6)  # bucket, four settings of it, run.json
    assert set(story.left) == {("bucket", story.outputs["bucket"])}
    assert story.kept_settings["policy"]["Statement"][0]["Condition"] == {"Bool": {"aws:SecureTransport": "false"}}
    assert {rule["ID"]: rule.get("Expiration", {}).get("Days") for rule in story.kept_settings["lifecycle"]} == {
        "abort-unfinished-uploads": None,
        "expire-r1": DEFINITION_DAYS,
        "expire-compile_cache": DEFINITION_DAYS,
    }
    assert all(story.kept_settings["closed"].values())
    assert story.kept_settings["encryption"]["Rules"]


def test_a_destroy_passes_over_the_fleet_that_its_node_has_deleted(tmp_path: Path) -> None:
    kept: dict[str, Any] = {"region": "us-east-2", "state": {}, "options": {"retain_on_delete": False}}
    with Cloud(tmp_path / "cloud", clock=ManualClock()) as cloud:
        name = fleet(cloud)
        cloud.tick()
        cloud.client("ec2").delete_fleets(FleetIds=[name], TerminateInstances=False)
        cloud.kill(cloud.instances()[0].id)
        resource = {"type": "aws:ec2/fleet:Fleet", "name": "fleet", "id": name, **kept}
        (tmp_path / "in-process.json").write_text(json.dumps({"outputs": {}, "resources": [resource]}))
        destroyed = InProcess(tmp_path, cloud.environment(), STACK, lambda line: None).destroy()
    assert (destroyed.ok, destroyed.changes) == (True, {"delete": 0})


def test_of_the_objects_a_destroy_keeps_the_run_s_own_record(story: Story) -> None:
    assert story.kept_settings["keys"] == ["r1/run.json"]


def test_what_needs_the_engine_is_refused_not_imitated(tmp_path: Path) -> None:
    engine = InProcess(tmp_path, {}, STACK, lambda line: None)
    with pytest.raises(RuntimeError, match="needs the Pulumi engine"):
        engine.refresh()
    (tmp_path / "in-process.json").write_text("{}")
    with pytest.raises(RuntimeError, match="second up needs the Pulumi engine"):
        engine.up()
