"""State machine of Step Functions, whose id is its ARN."""

from __future__ import annotations

from gpufleet.rehearsal.handlers import table
from gpufleet.rehearsal.handlers.table import Aws, Calls, Properties, UnsupportedError, absent, deleted, tagged

_GONE = "StateMachineDoesNotExist"


def _tags(tags: dict[str, str]) -> list[dict[str, str]]:
    """As this API spells them."""
    return [{"key": key, "value": value} for key, value in sorted(tags.items())]


def _create(aws: Aws, inputs: Properties) -> str:
    _validate(aws, inputs)
    made = aws.client("stepfunctions").create_state_machine(
        name=inputs["name"],
        definition=inputs["definition"],
        roleArn=inputs["roleArn"],
        tags=_tags(inputs.get("tags") or {}),
    )
    return str(made["stateMachineArn"])


def _validate(aws: Aws, inputs: Properties) -> None:
    """What the provider asks before it makes or changes one, as soon as it knows the definition."""
    answer = aws.client("stepfunctions").validate_state_machine_definition(definition=inputs["definition"])
    if answer["result"] != "OK":
        raise UnsupportedError(f"invalid Amazon States Language: {answer['diagnostics'][0]['message']}")


def _read(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    states = aws.client("stepfunctions")
    found = absent(lambda: states.describe_state_machine(stateMachineArn=resource_id), _GONE)
    if found is None:
        return None
    tags = states.list_tags_for_resource(resourceArn=resource_id)["tags"]
    kept = {key: found[key] for key in ("name", "definition", "roleArn")}
    named = [{"Key": each["key"], "Value": each["value"]} for each in tags]
    return {**kept, "arn": resource_id, "status": found["status"], **tagged(named)}


def _update(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    _validate(aws, new)
    states = aws.client("stepfunctions")
    states.update_state_machine(stateMachineArn=resource_id, definition=new["definition"], roleArn=new["roleArn"])
    gone, changed = table.tag_diff(old, new)
    if gone:
        states.untag_resource(resourceArn=resource_id, tagKeys=gone)
    if changed:
        states.tag_resource(resourceArn=resource_id, tags=_tags(changed))


CALLS = {
    "aws:sfn/stateMachine:StateMachine": Calls(
        _create, _read, deleted("stepfunctions", "delete_state_machine", "stateMachineArn"), _update
    ),
}
