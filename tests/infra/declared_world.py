"""Runs the program for a definition file, without AWS and without the engine, and looks at what it declared."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

from rehearsal import engine, scratch
from rehearsal.engine import InProcess, Result

ROOT = Path(__file__).parents[2]

# Runs `python -m rehearsal.inprocess ...` for each line it reads, in a fork that has imported the program and the SDK,
# whose modules are lazy: touching one takes a second.
SERVER = """
import json, os, runpy, sys
import boto3, numpy, pulumi_aws as aws, yaml
import infra.bill.table, infra.evidence.receipts
import infra.program.plan, infra.program.previous, infra.program.resources.declare
aws.ec2.Fleet, aws.iam.Role, aws.s3.Bucket, aws.vpc.SecurityGroupEgressRule, aws.cloudwatch.LogGroup
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
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@dataclass(frozen=True)
class Declared:
    """One preview."""

    result: Result
    resources: list[dict[str, Any]]

    def inputs(self, kind: str) -> list[dict[str, Any]]:
        return [each["inputs"] for each in self.resources if each["type"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = self.inputs(kind)
        return found

    @property
    def kinds(self) -> set[str]:
        return {each["type"] for each in self.resources}


def declare(folder: Path, name: str, text: str) -> Declared:
    scratch.make(folder, {name: text})

    def forked(command: list[str], *, environment: Mapping[str, str], **_: object) -> tuple[int, str]:
        printed, server = folder / "printed.txt", _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps([command[2:], dict(environment), str(printed)]) + "\n")
        server.stdin.flush()
        return int(server.stdout.readline()), printed.read_text()

    with mock.patch.object(engine, "streamed", forked):
        runner = InProcess(folder, {}, name, lambda line: None)
        result = runner.preview()
    return Declared(result=result, resources=runner.declared())


@functools.cache
def _server() -> subprocess.Popen[str]:
    """One for all previews of this process; it ends when its input does."""
    return subprocess.Popen(
        [sys.executable, "-c", SERVER], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
