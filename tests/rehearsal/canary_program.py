"""A canary's calls to AWS over one of its stacks, from first to last, as a program that can be killed: up, a notice and
two stops, or `gpufleet stop`; then destroy.

Its node is a row of EC2's alone, and its events are not waited for.
"""

from __future__ import annotations

import functools
import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path

import boto3

from gpufleet.infra.account import stop
from gpufleet.infra.account.fleet import nodes_of
from gpufleet.infra.canary import notice, probes, stacks
from gpufleet.infra.canary.flight import Flight
from gpufleet.infra.definition.pin import pin
from gpufleet.rehearsal import engine
from gpufleet.rehearsal.engine import Engine
from tests.rehearsal.engine_world import AMI

DIGEST = "@sha256:" + "5" * 64


def pinned(self: Flight, *words: str) -> str:
    """In the place of `gpufleet prepare` and `doctor --pin`."""
    images = {"image": stacks.PYTORCH + DIGEST, "supervisor_image": stacks.PYTHON + DIGEST}
    pin(self.project / "stacks" / f"{words[1]}.yaml", ami=AMI, **images)
    return ""


def forked(
    command: list[str], *, folder: Path | None, environment: Mapping[str, str], say: Callable[[str], None]
) -> tuple[int, str]:
    """A program of this Python's, which has imported it already."""
    child = os.fork()
    if not child:
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = command[2:]
        runpy.run_module(command[2], run_name="__main__", alter_sys=True)
        sys.exit()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), ""


def main(project: Path, name: str) -> None:
    os.setsid()  # it is killed with what it has started
    Flight.command = pinned  # type: ignore[method-assign]
    engine.streamed = forked  # type: ignore[assignment]
    client = functools.cache(lambda service: boto3.client(service))
    flown = Flight(
        project=project,
        scale=stacks.EMBEDDED,
        client=client,
        engine=lambda name: Engine.open(project, dict(os.environ), name, real=False),
        environment={},
        by_notice=True,
        say=print,
    )
    with flown.engine(name) as opened:
        stack = flown._up(name, opened)
        while not (nodes := nodes_of(client("ec2"), stack)):
            time.sleep(0.1)
        if name == stacks.RUN:
            notice.interrupt(stack, nodes[0]["InstanceId"], client, lambda _: None)
            probes.stops_begin(flown.facts, stack, client, 3600)
        else:
            stop.ask(stack, client("ec2"), client("s3"), datetime.now(UTC))
        assert opened.destroy().ok


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
