"""`gpufleet doctor`: whether this account can run the definition; with --pin it first writes AMI and image digest."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpufleet.infra.account import aws, doctor, rights
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import project_root

MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument("--pin", action="store_true", help="write the newest AMI and the image's digest into the file")
    parser.add_argument("--rights", action="store_true", help="print the rights that you need, as an IAM policy")


def run(args: argparse.Namespace) -> int:
    definition = stack.definition_of(args)
    if args.rights:
        print(rights.policy(definition))
        return 0
    print(f"{definition.name} in {definition.fleet.region}")
    if args.pin:
        doctor.pin(definition, aws.client("ssm", definition.fleet.region))
        definition = stack.definition_of(args)
    worst, skipped = "ok", False
    for check in doctor.examine(definition, project_root(Path.cwd()), aws.client):
        print(f"  {MARKS[check.state]} {check.name}: {check.found}")
        if check.fix:
            print(f"          {check.fix}")
        worst, skipped = max(worst, check.state, key=list(MARKS).index), skipped or check.name == doctor.SKIPPED
    print(
        {
            "ok": "Everything is in place. Next: `pulumi preview`, then `pulumi up`.",
            "warning": "Nothing that was checked stands in the way; not all of it was."
            if skipped
            else "Nothing stands in the way; read the warnings.",
            "problem": "Put the problems right first: with them `pulumi up` would leave you without a node.",
        }[worst]
    )
    return 1 if worst == "problem" else 0
