"""Handler for a state machine of Step Functions, whose id is its ARN."""

from __future__ import annotations

from gpufleet.rehearsal.handlers.calls import OwnCalls
from gpufleet.rehearsal.handlers.table import Aws, Properties, UnsupportedError


def _validate(aws: Aws, inputs: Properties) -> None:
    """Validates the machine's definition as soon as it is known, as the provider does before it acts."""
    answer = aws.client("stepfunctions").validate_state_machine_definition(definition=inputs["definition"])
    if answer["result"] != "OK":
        raise UnsupportedError(f"invalid Amazon States Language: {answer['diagnostics'][0]['message']}")


def _update(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    _validate(aws, new)
    changed = {"definition": new["definition"], "roleArn": new["roleArn"]}
    aws.client("stepfunctions").update_state_machine(stateMachineArn=resource_id, **changed)


OWN = {"aws:sfn/stateMachine:StateMachine": OwnCalls(before=_validate, change=_update)}
