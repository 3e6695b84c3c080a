"""Handlers for topic, subscription and policy of SNS, and for rule and target of EventBridge."""

from __future__ import annotations

import json

from gpufleet.infra.account.refusals import absent
from gpufleet.rehearsal.handlers.calls import OwnCalls
from gpufleet.rehearsal.handlers.table import Aws, Properties

_NO_RULE = "ResourceNotFoundException"


def _delete_policy(aws: Aws, resource_id: str, state: Properties) -> None:
    """Sets the topic's policy back to the first one, which names only the owner, as the provider does."""
    account = aws.account()
    own = {
        "Sid": "__default_statement_ID",
        "Effect": "Allow",
        "Principal": {"AWS": "*"},
        "Action": ["SNS:Publish", "SNS:Subscribe"],
        "Resource": resource_id,
        "Condition": {"StringEquals": {"AWS:SourceOwner": account}},
    }
    policy = json.dumps({"Version": "2008-10-17", "Statement": [own]})
    aws.client("sns").set_topic_attributes(TopicArn=resource_id, AttributeName="Policy", AttributeValue=policy)


def _put_target(aws: Aws, inputs: Properties) -> str:
    target = {"Id": inputs["targetId"], "Arn": inputs["arn"]}
    if transformer := inputs.get("inputTransformer"):
        target["InputTransformer"] = {
            "InputPathsMap": transformer["inputPaths"],
            "InputTemplate": transformer["inputTemplate"],
        }
    refused = aws.client("events").put_targets(Rule=inputs["rule"], Targets=[target])["FailedEntries"]
    assert not refused, refused
    return f"{inputs['rule']}-{inputs['targetId']}"


def _read_target(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    events, rule = aws.client("events"), like["rule"]
    targets = absent(lambda: events.list_targets_by_rule(Rule=rule)["Targets"], _NO_RULE) or []
    target = next((candidate for candidate in targets if f"{rule}-{candidate['Id']}" == resource_id), None)
    if target is None:
        return None
    transformer = target.get("InputTransformer")
    return {
        "rule": rule,
        "arn": target["Arn"],
        "targetId": target["Id"],
        "inputTransformer": transformer
        and {"inputPaths": transformer["InputPathsMap"], "inputTemplate": transformer["InputTemplate"]},
    }


def _delete_target(aws: Aws, resource_id: str, state: Properties) -> None:
    absent(lambda: aws.client("events").remove_targets(Rule=state["rule"], Ids=[state["targetId"]]), _NO_RULE)


OWN = {
    "aws:sns/topic:Topic": OwnCalls(seen=lambda aws, like, live, raw: {"name": live["arn"].rpartition(":")[2]}),
    "aws:sns/topicPolicy:TopicPolicy": OwnCalls(delete=_delete_policy),
    "aws:cloudwatch/eventTarget:EventTarget": OwnCalls(
        _put_target, _read_target, _delete_target, change=lambda aws, resource_id, old, new: _put_target(aws, new)
    ),
}
