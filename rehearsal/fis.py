"""Carries out interruptions of spot nodes by Fault Injection Service, because moto only stores templates and
experiments.

An experiment sends AWS's notice to each spot instance that its target names, if its role has the right to do so and
trusts FIS.
"""

from __future__ import annotations

import json
from typing import Any

from moto.fis.models import fis_backends
from moto.fis.responses import FISResponse
from moto.iam.models import iam_backends

from gpufleet.infra.account import iam_policy
from gpufleet.infra.account.iam_policy import AccessRequest
from gpufleet.rehearsal import account
from gpufleet.rehearsal.aws_answers import FLEETS

ACTION = "aws:ec2:send-spot-instance-interruptions"
_moto_start = FISResponse.start_experiment


def _start(response: Any) -> str:
    """StartExperiment: calls moto's action, and sends the notices."""
    answer: str = _moto_start(response)
    if (fleets := FLEETS.get(response.current_account)) is None:
        return answer
    begun = json.loads(answer)["experiment"]
    for action in begun["actions"].values():
        target = begun["targets"][action["targets"]["SpotInstances"]]
        for arn in target["resourceArns"]:
            node = fleets.instances.get(arn.rpartition("/")[2])
            wrong = "no such instance" if node is None or not node.spot else _refused(response, begun["roleArn"], arn)
            if action["actionId"] != ACTION or wrong:
                backend = fis_backends[response.current_account][response.region]
                backend.experiments[begun["id"]].status = "failed"
            elif node is not None:
                fleets.notice(node.id)
    return answer


def _refused(response: Any, role_arn: str, arn: str) -> str:
    """Why the experiment's role may not interrupt the instance; empty if it may."""
    roles = iam_backends[response.current_account]["aws"].roles.values()
    role = next((candidate for candidate in roles if candidate.arn == role_arn), None)
    if role is None or "fis.amazonaws.com" not in role.assume_role_policy_document:
        return f"{role_arn} does not trust fis.amazonaws.com"
    tags = FLEETS[response.current_account].instances[arn.rpartition("/")[2]].tags
    context = {f"aws:ResourceTag/{key}": value for key, value in tags.items()}
    wish = AccessRequest(action="ec2:SendSpotInstanceInterruptions", resource=arn, context=context)
    return "" if iam_policy.allowed(account.role_statements(role), wish) else "the role may not interrupt it"


FISResponse.start_experiment = _start  # type: ignore[method-assign,assignment]
