"""The program under the real engine: what only an engine does, told once on one scratch project."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.bucket import FLEETS, fleet_key
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, Pulumi, Result
from tests import forked
from tests.rehearsal.engine_world import STACK, edit, pinned, project
from tests.repository import ROOT

pytestmark = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
FLEET, RIGHTS = "aws:ec2/fleet:Fleet", "aws:iam/rolePolicy:RolePolicy"


@dataclass
class RealStory:
    """What each step did."""

    steps: dict[str, Result] = field(default_factory=dict)
    outputs: dict[str, dict[str, Any]] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)

    def fleet(self, step: str) -> set[str]:
        """What the step did to the fleet."""
        return {each.operation for each in self.steps[step].steps if each.type == FLEET} - {"refresh"}


def tell(story: RealStory, cloud: Cloud, clock: ManualClock, engine: Pulumi, file: Path, code: Path) -> None:
    ec2, steps, facts = cloud.client("ec2"), story.steps, story.facts

    def fleet_id() -> str:
        return str(engine.outputs()["fleet_id"])

    def capacity() -> int:
        described = ec2.describe_fleets(FleetIds=[fleet_id()])["Fleets"][0]
        return int(described["TargetCapacitySpecification"]["TotalTargetCapacity"])

    def known() -> list[str]:
        """Of which fleets the bucket says that the state knows."""
        listed = cloud.client("s3").list_objects_v2(Bucket=engine.outputs()["bucket"])["Contents"]
        return [each["Key"] for each in listed if f"/{FLEETS}" in each["Key"]]

    pinned(file)
    steps["created"] = engine.up()
    story.outputs["created"] = engine.outputs()
    facts["inventory"] = inventory(cloud)
    facts["state"] = engine._run(["pulumi", "stack", "export", "--stack", STACK])
    facts["known"] = known()

    # A node moves the hour, and the job ends its own run; prices and job code change afterwards; ModifyFleet is denied
    # to the user, too.
    move(cloud, facts["moved_to"])
    ec2.modify_fleet(FleetId=fleet_id(), TargetCapacitySpecification={"TotalTargetCapacity": 0})
    (code / "job" / "new_module.py").write_text("# newer code\n")
    prices = code / "infra" / "catalog" / "spot.csv"
    prices.write_text(re.sub(r"(?m)^(g5\.2xlarge,us-east-2,[^,]*,)[0-9.]+", r"\g<1>1.3000", prices.read_text()))
    asked = cloud.calls("ModifyFleet")
    cloud.deny("ModifyFleet")
    steps["after_end"] = engine.up()
    cloud.allow("ModifyFleet")
    facts["modify_calls"], facts["capacity"] = cloud.calls("ModifyFleet") - asked, capacity()
    facts["schedule_after_end"] = schedule(cloud)

    edit(file, "max_hours: 2", "max_hours: 3")
    steps["bad"] = engine.preview()
    edit(file, "max_hours: 3", "max_hours: 2")

    group = ec2.describe_security_groups(Filters=[{"Name": "tag:gpufleet:run", "Values": ["r1"]}])["SecurityGroups"][0]
    opened = {"IpProtocol": "tcp", "FromPort": 22, "ToPort": 22, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
    ec2.authorize_security_group_ingress(GroupId=group["GroupId"], IpPermissions=[opened])
    cloud.client("s3").delete_bucket_lifecycle(Bucket=engine.outputs()["bucket"])
    steps["tampered"] = engine.refresh()

    facts["first_fleet"] = fleet_id()
    edit(file, "id: r1", "id: r2")
    for command in ("up", "refresh"):
        steps[f"program {command}"] = engine._command(command, "--run-program", "--yes", "--skip-preview")
    cloud.deny("CreateFleet")
    steps["refused"] = engine.up()
    cloud.allow("CreateFleet")
    edit(file, "max_hours: 2", "max_hours: 3")  # nothing has begun under r2, so its settings may still change
    steps["new_run"] = engine.up()
    story.outputs["new_run"] = engine.outputs()
    facts["old_state"] = ec2.describe_fleets(FleetIds=[facts["first_fleet"]])["Fleets"][0]["FleetState"]
    facts["new_capacity"], facts["newly_known"] = capacity(), known()
    facts["new_schedule"] = schedule(cloud)
    facts["new_tags"] = ec2.describe_fleets(FleetIds=[fleet_id()])["Fleets"][0]["Tags"]
    facts["run_configs"] = sorted(
        each["Key"]
        for each in cloud.client("s3").list_objects_v2(Bucket=engine.outputs()["bucket"])["Contents"]
        if each["Key"].endswith("run.json")
    )

    # The node may not set its fleet to 0, so it deletes it and shuts down; only the refresh inside `up` finds out.
    cloud.tick()
    nodes = len(cloud.instances())
    ec2.delete_fleets(FleetIds=[fleet_id()], TerminateInstances=False)
    cloud.shut_down(cloud.instances()[-1].id)
    steps["ended_by_node"] = engine.up()
    cloud.tick()
    facts["relaunched"] = len(cloud.instances()) - nodes
    facts["made_again"], facts["its_schedule"] = fleet_id(), schedule(cloud)

    # AWS expires the fleet, and the expiry that the stack records has passed.
    clock.advance(40 * 3600)
    cloud.tick()
    clock.advance(200)
    cloud.tick()
    rewind(engine)
    steps["over"] = engine.up()
    facts["known_when_over"] = known()
    steps["destroyed"] = engine.destroy()
    facts["left"] = cloud.leftovers()


def schedule(cloud: Cloud) -> dict[str, Any]:
    """The one that ends the fleet, as GetSchedule tells it."""
    scheduler = cloud.client("scheduler")
    names = [each["Name"] for each in scheduler.list_schedule_groups()["ScheduleGroups"] if each["Name"] != "default"]
    (found,) = [scheduler.get_schedule(GroupName=name, Name="stop") for name in names]
    return dict(found)


def move(cloud: Cloud, expression: str) -> None:
    told = schedule(cloud)
    kept = {key: told[key] for key in ("GroupName", "Name", "FlexibleTimeWindow", "State", "Target", "Description")}
    cloud.client("scheduler").update_schedule(**kept, ScheduleExpression=expression, ActionAfterCompletion="NONE")


def rewind(engine: Pulumi) -> None:
    """Moves the moment at which the run expires, as the stack recorded it, into the past."""
    state = engine._run(["pulumi", "stack", "export", "--stack", STACK])
    moved = re.sub(r'("valid_until": ")[^"]+', r"\g<1>2026-01-01T00:00:00Z", state)
    assert moved != state
    path = engine._folder / "export.json"
    path.write_text(moved)
    engine._run(["pulumi", "stack", "import", "--stack", STACK, "--file", str(path)])


def inventory(cloud: Cloud) -> list[tuple[str, str]]:
    """What exists, with the names that AWS and the provider drew taken out."""
    drawn = re.compile(r"-[0-9a-f]{7}$|(?<=-)[0-9a-f]{8,}.*")
    return sorted((kind, drawn.sub("", name)) for kind, name in cloud.leftovers())


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory) -> RealStory:
    folder = tmp_path_factory.mktemp("real")
    file = project(folder / "project")
    code = folder / "code"  # the program and the job, for this test to change
    for package in ("gpufleet", "infra", "job"):
        shutil.copytree(ROOT / package, code / package, symlinks=True)  # with what is compiled already
    clock = ManualClock(datetime.now(UTC).replace(microsecond=0) - timedelta(minutes=5))
    told = RealStory(facts={"moved_to": f"at({clock.now() + timedelta(hours=1):%Y-%m-%dT%H:%M:%S})"})
    with Cloud(folder / "cloud", clock=clock) as cloud:
        environment = {**cloud.environment(), "PYTHONPATH": str(code)}
        with Engine.open(folder / "project", environment, STACK, real=True) as engine:
            assert isinstance(engine, Pulumi)
            tell(told, cloud, clock, engine, file, code)
    return told


@pytest.mark.parametrize(
    "step",
    ["created", "after_end", "tampered", "new_run", "ended_by_node", "over", "destroyed"],
)
def test_the_command_succeeds(story: RealStory, step: str) -> None:
    assert story.steps[step].ok, story.steps[step].text


def test_the_bill_is_among_diagnostics_and_outputs(story: RealStory) -> None:
    assert "in eight runs of ten" in story.steps["created"].diagnostics
    assert story.outputs["created"]["usd"]["p50"].startswith("$")


def test_the_last_word_on_the_upload_is_that_it_is_over(story: RealStory) -> None:
    lines = [line for line in story.steps["created"].text.splitlines() if "storage" in line and "upload" in line]
    assert re.search(r"uploaded \d+\.\d MB", lines[-1]), lines
    for step in ("after_end", "bad"):  # which upload nothing
        assert not re.search(r"upload(ing:|ed \d)", story.steps[step].text)


def test_the_bucket_names_the_one_fleet_that_the_state_knows_of(story: RealStory) -> None:
    for when, run, step in (("known", "r1", "created"), ("newly_known", "r2", "new_run")):
        assert story.facts[when] == [f"{run}/{fleet_key(story.outputs[step]['fleet_id'])}"]
    assert story.facts["known_when_over"] == []


def test_an_up_leaves_the_hour_where_a_node_has_moved_it(story: RealStory) -> None:
    assert story.facts["schedule_after_end"]["ScheduleExpression"] == story.facts["moved_to"]


def test_the_schedule_goes_with_its_fleet(story: RealStory) -> None:
    for fleet, told, run in (
        (story.outputs["new_run"]["fleet_id"], story.facts["new_schedule"], story.outputs["new_run"]["run"]),
        (story.facts["made_again"], story.facts["its_schedule"], story.outputs["new_run"]["run"]),
    ):
        assert json.loads(told["Target"]["Input"]) == {"FleetIds": [fleet], "TerminateInstances": True}
        assert told["ScheduleExpression"] == f"at({run['valid_until'].removesuffix('Z')})"
    assert story.facts["made_again"] != story.outputs["new_run"]["fleet_id"]


def test_the_state_names_the_job_archive_and_holds_no_copy(story: RealStory) -> None:
    assert len(story.facts["state"]) < 300_000
    assert f"job-{story.outputs['created']['run']['code']}.tar.gz" in story.facts["state"]


def test_a_second_up_changes_nothing_and_a_finished_run_is_never_relaunched(story: RealStory) -> None:
    assert story.facts["modify_calls"] == 0
    assert story.facts["capacity"] == 0
    assert set(story.steps["after_end"].changes) == {"same"}, story.steps["after_end"].text


def test_new_job_code_waits_for_a_new_run_and_says_so(story: RealStory) -> None:
    assert "The job code has changed since run r1 began" in story.steps["after_end"].diagnostics


def test_new_prices_show_in_the_bill_of_a_run_that_has_begun(story: RealStory) -> None:
    assert "x 1.3000 USD" not in story.steps["created"].diagnostics
    assert "x 1.3000 USD" in story.steps["after_end"].diagnostics


def test_other_settings_under_the_same_run_id_are_an_error_before_the_first_resource(story: RealStory) -> None:
    bad = story.steps["bad"]
    assert not bad.ok
    assert "run.id: 'r1'" in bad.diagnostics
    assert {each.operation for each in bad.steps} <= {"same", "refresh"}
    assert "Traceback" not in bad.text
    assert "unhandled error" not in bad.text


def test_a_refresh_sees_what_was_changed_behind_the_program_s_back(story: RealStory) -> None:
    assert "storage-expiry" in story.steps["tampered"].text
    assert story.steps["tampered"].changes["delete"] == 1
    assert "network-node" in story.steps["tampered"].text


def test_an_up_after_that_declares_again_what_is_gone(story: RealStory) -> None:
    assert "storage-expiry" in story.steps["refused"].affected("create")


@pytest.mark.parametrize("command", ["up", "refresh"])
def test_a_new_run_is_refused_where_the_engine_would_not_replace_the_fleet(story: RealStory, command: str) -> None:
    """What the next plain `up` does with the rights of the run before, another test tells."""
    refused = story.steps[f"program {command}"]
    assert not refused.ok
    assert "Run r2 is new, and with --run-program or --target" in refused.diagnostics
    assert {each.name for each in refused.steps if each.operation not in ("same", "refresh")} <= {"run"}
    assert {each.name for each in refused.steps if each.type.startswith("aws:")} == set()


def test_a_refused_fleet_leaves_the_run_unbegun(story: RealStory) -> None:
    assert not story.steps["refused"].ok
    assert "CreateFleet" in story.steps["refused"].text


def test_a_new_run_id_replaces_the_fleet_and_keeps_the_bucket(story: RealStory) -> None:
    before, after = story.outputs["created"], story.outputs["new_run"]
    assert before["bucket"] == after["bucket"]
    assert before["fleet_id"] != after["fleet_id"]
    assert story.facts["old_state"] == "deleted"
    assert story.facts["new_capacity"] == 1
    assert after["runs"] == ["r1", "r2"]
    assert {"Key": "gpufleet:run", "Value": "r2"} in story.facts["new_tags"]


def test_the_old_fleet_goes_before_the_new_one_comes(story: RealStory) -> None:
    order = [each.operation for each in story.steps["refused"].steps if each.type == FLEET]
    assert order.index("delete-replaced") < order.index("create-replacement")


def test_a_node_keeps_its_rights_until_its_fleet_is_gone(story: RealStory) -> None:
    """Also where the new fleet is refused: nothing of the old rights is taken then."""
    refused, after = ([(s.type, s.operation) for s in story.steps[name].steps] for name in ("refused", "new_run"))
    assert refused.index((RIGHTS, "create-replacement")) < refused.index((FLEET, "delete-replaced"))
    assert not {(RIGHTS, "update"), (RIGHTS, "delete-replaced")} & set(refused)
    assert (RIGHTS, "delete-replaced") in after


def test_the_run_config_of_an_earlier_run_stays(story: RealStory) -> None:
    assert story.facts["run_configs"] == ["r1/run.json", "r2/run.json"]


def test_a_fleet_that_its_node_deleted_comes_back_empty_at_most(story: RealStory) -> None:
    assert story.facts["relaunched"] == 0


def test_a_run_past_its_time_declares_no_fleet_and_says_that_it_is_over(story: RealStory) -> None:
    assert "Run r2 is over (since 2026-01-01T00:00:00Z)" in story.steps["over"].diagnostics
    assert not story.fleet("over") & {"create", "update", "replace", "same"}


def test_a_destroy_leaves_the_kept_bucket_and_nothing_else(story: RealStory) -> None:
    assert {kind for kind, _ in story.facts["left"]} == {"bucket"}


def test_both_ways_to_run_the_program_end_with_the_same(story: RealStory, tmp_path: Path) -> None:
    pinned(project(tmp_path / "project"))
    with (
        forked.programs(tmp_path),
        Cloud(tmp_path / "cloud", clock=ManualClock()) as cloud,
        Engine.open(tmp_path / "project", cloud.environment(), STACK, real=False) as engine,
    ):
        result = engine.up()
        assert result.ok, result.text
        outputs, found = engine.outputs(), inventory(cloud)
    assert found == story.facts["inventory"]
    theirs = story.outputs["created"]
    assert set(outputs) == set(theirs)
    drawn = {"bucket", "log_group", "fleet_id", "run"}
    assert {key: outputs[key] for key in outputs if key not in drawn} == {
        key: theirs[key] for key in theirs if key not in drawn
    }
    assert json.dumps(outputs["run"]["digest"]) == json.dumps(theirs["run"]["digest"])
