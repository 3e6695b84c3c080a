"""`notify` of a definition on the embedded AWS: who may tell, that silence is told at its hour, and nothing is left."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from botocore.exceptions import ClientError
from moto.sns.models import sns_backends

from gpufleet.job.contract.aws import SILENCE
from gpufleet.rehearsal import account
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, InProcess
from tests import forked
from tests.rehearsal.declared import as_node
from tests.rehearsal.engine_world import STACK, pinned, project

REGION = "us-east-2"


@dataclass
class ToldRun:
    """A stack with `notify` that is up, and the clock of its AWS."""

    cloud: Cloud
    clock: ManualClock
    engine: Engine
    topic: str

    def messages(self) -> list[tuple[str, str]]:
        """Subject and text of what the topic's subscribers got."""
        sent = sns_backends[self.cloud.account][REGION].topics[self.topic].sent_notifications
        return [(str(each[2]), each[1]) for each in sent]

    def passes(self, hours: float) -> None:
        self.clock.advance(hours * 3600)
        self.cloud.tick()

    def schedule(self) -> dict[str, Any]:
        """What UpdateSchedule takes of the one that tells of silence."""
        scheduler = self.cloud.client("scheduler")
        group = next(g["Name"] for g in scheduler.list_schedule_groups()["ScheduleGroups"] if g["Name"] != "default")
        found = scheduler.get_schedule(GroupName=group, Name=SILENCE)
        keys = ("GroupName", "Name", "ScheduleExpression", "FlexibleTimeWindow", "Target")
        return {key: found[key] for key in keys}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToldRun]:
    folder = tmp_path_factory.mktemp("told")
    file = pinned(project(folder / "project"))
    file.write_text(f"{file.read_text()}\nnotify:\n  email: me@example.org\n  silent_hours: 2\n")
    clock = ManualClock()
    with (
        forked.programs(folder),
        Cloud(folder / "cloud", clock=clock) as cloud,
        Engine.open(folder / "project", cloud.environment(), STACK, say=lambda line: None, real=False) as engine,
    ):
        assert isinstance(engine, InProcess)
        created = engine.up()
        assert created.ok, created.text
        topics = cloud.client("sns").list_topics()["Topics"]
        yield ToldRun(cloud=cloud, clock=clock, engine=engine, topic=topics[0]["TopicArn"])


def test_the_address_is_subscribed_and_has_to_confirm(run: ToldRun) -> None:
    found = run.cloud.client("sns").list_subscriptions_by_topic(TopicArn=run.topic)["Subscriptions"]
    assert [(each["Protocol"], each["Endpoint"]) for each in found] == [("email", "me@example.org")]


def test_the_rule_passes_on_this_fleets_events_alone(run: ToldRun) -> None:
    events = run.cloud.client("events")
    (rule,) = events.list_rules()["Rules"]
    pattern = json.loads(rule["EventPattern"])
    (fleet,) = run.cloud.client("ec2").describe_fleets()["Fleets"]
    assert pattern["source"] == ["aws.ec2fleet"]
    assert [arn.rpartition("/")[2] for arn in pattern["resources"]] == [fleet["FleetId"]]
    assert "terminated" in pattern["detail"]["sub-type"]
    (target,) = events.list_targets_by_rule(Rule=rule["Name"])["Targets"]
    assert target["Arn"] == run.topic
    policy = run.cloud.client("sns").get_topic_attributes(TopicArn=run.topic)["Attributes"]["Policy"]
    assert json.loads(policy)["Statement"][0]["Principal"] == {"Service": "events.amazonaws.com"}


def test_a_node_may_tell_here_and_nowhere_else(run: ToldRun) -> None:
    other = run.cloud.client("sns").create_topic(Name="other")["TopicArn"]
    node = as_node(run.cloud, "sns")
    node.publish(TopicArn=run.topic, Subject="a", Message="b")
    assert run.messages()[-1] == ("a", "b")
    with pytest.raises(ClientError, match="not authorized"):
        node.publish(TopicArn=other, Subject="a", Message="b")
    with pytest.raises(ClientError, match="not authorized"):
        node.subscribe(TopicArn=run.topic, Protocol="email", Endpoint="thief@example.org")
    run.cloud.client("sns").delete_topic(TopicArn=other)


def test_silence_is_told_at_its_hour_once_and_a_node_moves_the_hour(run: ToldRun) -> None:
    before = len(run.messages())
    run.passes(1.9)
    assert len(run.messages()) == before
    later = f"at({run.clock.now() + timedelta(hours=2):%Y-%m-%dT%H:%M:%S})"
    as_node(run.cloud, "scheduler").update_schedule(**{**run.schedule(), "ScheduleExpression": later})
    run.passes(1.9)
    assert len(run.messages()) == before
    run.passes(0.2)
    subject, text = run.messages()[-1]
    assert account.messages(run.cloud.account)[-1] == subject
    assert subject == f"gpufleet {STACK}, run r1: nothing trains"
    assert text.startswith("Nothing has trained for 2 hours in run")
    assert [each.refused for each in run.cloud.schedules.fired] == [""]
    run.passes(1)
    assert len(run.messages()) == before + 1


def test_destroy_leaves_nothing_of_it(run: ToldRun) -> None:
    assert run.engine.destroy().ok
    assert {kind for kind, _ in run.cloud.leftovers()} == {"bucket"}
    assert run.cloud.client("sns").list_subscriptions()["Subscriptions"] == []
