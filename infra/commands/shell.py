"""`gpufleet shell STACK`: opens a shell in the training container by Session Manager, so that no port of a node has to
be open. The command asks AWS for a session, as the AWS CLI does. AWS's plugin uses this session to connect to the node.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from botocore.exceptions import ClientError

from gpufleet.infra.account import aws, refusals
from gpufleet.infra.account.fleet import nodes_of
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused, GpufleetError

PLUGIN = "session-manager-plugin"
DOCUMENT = "AWS-StartInteractiveCommand"
INSTALL = (
    "https://docs.aws.amazon.com/systems-manager/latest/userguide/session-manager-working-with-install-plugin.html"
)
# Once training has begun, the newest of gpufleet's containers is the training container.
INSIDE = 'sudo docker exec -it "$(sudo docker ps -q --filter name=gpufleet- | head -1)" sh -c "bash || sh"'
# runs a program with this environment and returns its exit code
Start = Callable[[Sequence[str], Mapping[str, str]], int]


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--node", action="store_true", help="open it on the node itself, not in the container")


def run(args: argparse.Namespace) -> int:
    """Opens the shell, and returns its exit code."""
    definition = stack.definition_of(args)
    ec2, ssm = (aws.client(service, definition.fleet.region) for service in ("ec2", "ssm"))
    return open_shell(definition, ec2, ssm, on_node=args.node, start=_start)


def open_shell(definition: StackDefinition, ec2: Any, ssm: Any, *, on_node: bool, start: Start) -> int:
    """Opens a shell in the job's container on the newest node, or on the node itself (`on_node`), and returns the
    shell's exit code. Raises GpufleetError if the plugin, a node, or its SSM agent is missing.
    """
    if shutil.which(PLUGIN) is None:
        raise GpufleetError(f"a shell needs AWS's {PLUGIN}, which is not installed on this machine: {INSTALL}")
    instance = _newest(definition, ec2)
    asked = {"Target": instance}
    if not on_node:
        asked |= {"DocumentName": DOCUMENT, "Parameters": {"command": [INSIDE]}}  # type: ignore[dict-item]
    try:
        session = ssm.start_session(**asked)
    except ClientError as error:
        if refusals.code(error) == "TargetNotConnected":
            raise AwsRefused(
                f"{instance} has not registered with Session Manager yet. A node registers some minutes after its boot,"
                " if its AMI has the SSM agent (as AWS's deep learning AMIs have) and its subnet a way out on port 443;"
                f" `gpufleet logs {definition.run_argument} --boot` says how far it is"
            ) from error
        raise
    answer = {key: session[key] for key in ("SessionId", "TokenValue", "StreamUrl")}
    region, profile = definition.fleet.region, os.environ.get("AWS_PROFILE", "")
    # The session is passed in this variable, and not as an argument, which everybody on this machine could see.
    variable = "AWS_SSM_START_SESSION_RESPONSE"
    words = (PLUGIN, variable, region, "StartSession", profile, json.dumps(asked), ssm.meta.endpoint_url)
    return start(words, {variable: json.dumps(answer)})


def _newest(definition: StackDefinition, ec2: Any) -> str:
    running = [node for node in nodes_of(ec2, definition) if node["State"]["Name"] == "running"]
    if not running:
        raise AwsRefused(
            f"no node of {definition.name}, run {definition.run.id}, is running: `gpufleet wait {definition.argument}`"
            " says why"
        )
    return str(running[-1]["InstanceId"])


def _start(words: Sequence[str], environment: Mapping[str, str]) -> int:
    """Runs the program on this terminal. Ctrl-C goes to the shell on the node, and does not end this process."""
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return subprocess.run(words, env={**os.environ, **environment}, check=False).returncode
    finally:
        signal.signal(signal.SIGINT, before)
