"""Schedule group and schedule of EventBridge Scheduler. A schedule's id is its group's name and its own."""

from __future__ import annotations

from typing import Any

from gpufleet.rehearsal.handlers import table
from gpufleet.rehearsal.handlers.table import Aws, Calls, Properties, absent, deleted, tagged

_GONE = "ResourceNotFoundException"
_SCHEDULE = table.fields(
    "name groupName description scheduleExpression scheduleExpressionTimezone flexibleTimeWindow state target "
    "actionAfterCompletion"
)


def _create_group(aws: Aws, inputs: Properties) -> str:
    aws.client("scheduler").create_schedule_group(Name=inputs["name"], Tags=table.tag_list(inputs.get("tags") or {}))
    return str(inputs["name"])


def _read_group(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    scheduler = aws.client("scheduler")
    found = absent(lambda: scheduler.get_schedule_group(Name=resource_id), _GONE)
    if found is None:
        return None
    tags = scheduler.list_tags_for_resource(ResourceArn=found["Arn"])["Tags"]
    return {"name": resource_id, "arn": found["Arn"], "state": found["State"], **tagged(tags)}


def _update_group(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    scheduler = aws.client("scheduler")
    arn = aws.arn("scheduler", f"schedule-group/{resource_id}")
    table.retag_by(scheduler.tag_resource, scheduler.untag_resource, {"ResourceArn": arn}, old, new)


def _request(inputs: Properties) -> dict[str, Any]:
    return dict(table.to_api({key: value for key, value in inputs.items() if key in _SCHEDULE}))


def _create_schedule(aws: Aws, inputs: Properties) -> str:
    aws.client("scheduler").create_schedule(**_request(inputs))
    return f"{inputs['groupName']}/{inputs['name']}"


def _read_schedule(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    group, _, name = resource_id.partition("/")
    found = absent(lambda: aws.client("scheduler").get_schedule(GroupName=group, Name=name), _GONE)
    return None if found is None else table.from_api({key: value for key, value in found.items() if value is not None})


def _delete_schedule(aws: Aws, resource_id: str, state: Properties) -> None:
    group, _, name = resource_id.partition("/")
    absent(lambda: aws.client("scheduler").delete_schedule(GroupName=group, Name=name), _GONE)


CALLS = {
    "aws:scheduler/scheduleGroup:ScheduleGroup": Calls(
        _create_group, _read_group, deleted("scheduler", "delete_schedule_group", "Name"), _update_group
    ),
    "aws:scheduler/schedule:Schedule": Calls(
        _create_schedule,
        _read_schedule,
        _delete_schedule,
        lambda aws, resource_id, old, new: aws.client("scheduler").update_schedule(**_request(new)),
    ),
}
