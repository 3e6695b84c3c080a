"""The program without the engine (`python -m gpufleet.rehearsal.inprocess`), forked from one process that has imported
it and the SDK, whose modules are lazy: a start of its own takes three seconds. The garbage collector leaves alone what
was there before the fork: to look through all of it again takes as long as the program itself.
"""

from __future__ import annotations

import atexit
import functools
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from gpufleet.rehearsal import engine
from tests.repository import ROOT

PROGRAMS_USE = """# forked
import gc, json, os, runpy, sys
gc.disable()
import tests.descriptions
import boto3, numpy, pulumi_aws as aws, yaml
import encodings.idna, numpy.random
import gpufleet._program, gpufleet.infra.account.all_runs, gpufleet.infra.account.unknown_fleets
import gpufleet.infra.bill.table, gpufleet.infra.evidence.receipts, gpufleet.job.experiments.growth.data
import gpufleet.infra.program.plan, gpufleet.infra.program.previous, gpufleet.infra.program.resources.declare
import gpufleet.rehearsal.handlers
for service in ("ec2", "iam", "logs", "s3", "sts"):
    boto3.client(service, "us-east-2", aws_access_key_id="-", aws_secret_access_key="-")  # its description is read once
aws.ec2.Fleet, aws.iam.Role, aws.s3.Bucket, aws.vpc.SecurityGroupEgressRule, aws.cloudwatch.LogGroup
aws.scheduler.Schedule
gc.freeze()
"""
SERVER = f"""{PROGRAMS_USE}
for line in sys.stdin:
    argv, environment, printed = json.loads(line)
    child = os.fork()
    if not child:
        output = os.open(printed, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
        sys.exit()
    print(child, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


def run(arguments: list[str], environment: Mapping[str, str], printed: Path, *, begun: Callable[[int], None]) -> int:
    """The exit code of one program, what it says in `printed`; `begun` hears its process's number."""
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps([arguments, dict(environment), str(printed)]) + "\n")
    server.stdin.flush()
    begun(int(server.stdout.readline()))
    return int(server.stdout.readline())


@contextmanager
def programs(folder: Path) -> Iterator[None]:
    """The in-process runner's programs are forks."""

    def forked(
        command: list[str], *, folder: Path | None, environment: Mapping[str, str], say: Callable[[str], None]
    ) -> tuple[int, str]:
        assert command[:2] == [sys.executable, "-m"]
        code = run(command[2:], environment, printed, begun=lambda _: None)
        text = printed.read_text()
        for line in text.splitlines():
            say(line)
        return code, text

    printed = folder / "printed.txt"
    with mock.patch.object(engine, "streamed", forked):
        yield


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One for all programs of this process; it ends when its input does."""
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    atexit.register(server.communicate)
    return server
