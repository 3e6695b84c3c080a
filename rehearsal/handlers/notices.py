"""Topic, subscription and policy of SNS, rule and target of EventBridge."""

from __future__ import annotations

import json

from gpufleet.rehearsal.handlers import table
from gpufleet.rehearsal.handlers.table import Aws, Calls, Properties, absent, deleted, tagged

_NO_TOPIC = ("NotFound", "NotFoundException")
_NO_RULE = "ResourceNotFoundException"


def _create_topic(aws: Aws, inputs: Properties) -> str:
    made = aws.client("sns").create_topic(Name=inputs["name"], Tags=table.tag_list(inputs.get("tags") or {}))
    return str(made["TopicArn"])


def _read_topic(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    sns = aws.client("sns")
    if absent(lambda: sns.get_topic_attributes(TopicArn=resource_id), *_NO_TOPIC) is None:
        return None
    tags = sns.list_tags_for_resource(ResourceArn=resource_id)["Tags"]
    return {"name": resource_id.rpartition(":")[2], "arn": resource_id, **tagged(tags)}


def _update_topic(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    sns = aws.client("sns")
    table.retag_by(sns.tag_resource, sns.untag_resource, {"ResourceArn": resource_id}, old, new)


def _put_policy(aws: Aws, inputs: Properties) -> str:
    arn, policy = str(inputs["arn"]), inputs["policy"]
    aws.client("sns").set_topic_attributes(TopicArn=arn, AttributeName="Policy", AttributeValue=policy)
    return arn


def _read_policy(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    found = absent(lambda: aws.client("sns").get_topic_attributes(TopicArn=resource_id), *_NO_TOPIC)
    return None if found is None else {"arn": resource_id, "policy": found["Attributes"]["Policy"]}


def _delete_policy(aws: Aws, resource_id: str, state: Properties) -> None:
    """As the provider does it: the owner's own is what a topic has at first."""
    account = aws.account()
    own = {
        "Sid": "__default_statement_ID",
        "Effect": "Allow",
        "Principal": {"AWS": "*"},
        "Action": ["SNS:Publish", "SNS:Subscribe"],
        "Resource": resource_id,
        "Condition": {"StringEquals": {"AWS:SourceOwner": account}},
    }
    _put_policy(aws, {"arn": resource_id, "policy": json.dumps({"Version": "2008-10-17", "Statement": [own]})})


def _subscribe(aws: Aws, inputs: Properties) -> str:
    asked = {"TopicArn": inputs["topic"], "Protocol": inputs["protocol"], "Endpoint": inputs["endpoint"]}
    return str(aws.client("sns").subscribe(**asked, ReturnSubscriptionArn=True)["SubscriptionArn"])


def _read_subscription(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    found = absent(lambda: aws.client("sns").get_subscription_attributes(SubscriptionArn=resource_id), *_NO_TOPIC)
    if found is None:
        return None
    told = found["Attributes"]
    return {"topic": told["TopicArn"], "protocol": told["Protocol"], "endpoint": told["Endpoint"], "arn": resource_id}


def _put_rule(aws: Aws, inputs: Properties) -> str:
    asked = {
        "Name": inputs["name"],
        "EventPattern": inputs["eventPattern"],
        "Tags": table.tag_list(inputs.get("tags") or {}),
    }
    aws.client("events").put_rule(**asked, Description=inputs.get("description", ""))
    return str(inputs["name"])


def _read_rule(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    events = aws.client("events")
    found = absent(lambda: events.describe_rule(Name=resource_id), _NO_RULE)
    if found is None:
        return None
    tags = events.list_tags_for_resource(ResourceARN=found["Arn"])["Tags"]
    kept = {"name": resource_id, "arn": found["Arn"], "eventPattern": found["EventPattern"]}
    return {**kept, "description": found.get("Description"), **tagged(tags)}


def _update_rule(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    _put_rule(aws, new)
    events, arn = aws.client("events"), aws.arn("events", f"rule/{resource_id}")
    table.retag_by(events.tag_resource, events.untag_resource, {"ResourceARN": arn}, old, new)


def _put_target(aws: Aws, inputs: Properties) -> str:
    target = {"Id": inputs["targetId"], "Arn": inputs["arn"]}
    if given := inputs.get("inputTransformer"):
        target["InputTransformer"] = {"InputPathsMap": given["inputPaths"], "InputTemplate": given["inputTemplate"]}
    refused = aws.client("events").put_targets(Rule=inputs["rule"], Targets=[target])["FailedEntries"]
    assert not refused, refused
    return f"{inputs['rule']}-{inputs['targetId']}"


def _read_target(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    events, rule = aws.client("events"), like["rule"]
    found = absent(lambda: events.list_targets_by_rule(Rule=rule)["Targets"], _NO_RULE) or []
    target = next((each for each in found if f"{rule}-{each['Id']}" == resource_id), None)
    if target is None:
        return None
    given = target.get("InputTransformer")
    return {
        "rule": rule,
        "arn": target["Arn"],
        "targetId": target["Id"],
        "inputTransformer": given and {"inputPaths": given["InputPathsMap"], "inputTemplate": given["InputTemplate"]},
    }


def _delete_target(aws: Aws, resource_id: str, state: Properties) -> None:
    absent(lambda: aws.client("events").remove_targets(Rule=state["rule"], Ids=[state["targetId"]]), _NO_RULE)


CALLS = {
    "aws:sns/topic:Topic": Calls(_create_topic, _read_topic, deleted("sns", "delete_topic", "TopicArn"), _update_topic),
    "aws:sns/topicPolicy:TopicPolicy": Calls(
        _put_policy, _read_policy, _delete_policy, lambda aws, resource_id, old, new: _put_policy(aws, new)
    ),
    "aws:sns/topicSubscription:TopicSubscription": Calls(
        _subscribe, _read_subscription, deleted("sns", "unsubscribe", "SubscriptionArn")
    ),
    "aws:cloudwatch/eventRule:EventRule": Calls(
        _put_rule, _read_rule, deleted("events", "delete_rule", "Name"), _update_rule
    ),
    "aws:cloudwatch/eventTarget:EventTarget": Calls(
        _put_target, _read_target, _delete_target, lambda aws, resource_id, old, new: _put_target(aws, new)
    ),
}
