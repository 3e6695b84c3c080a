"""`gpufleet doctor`: checks whether this account can run the definition; --pin first writes AMI and image digest."""

from __future__ import annotations

import argparse
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.account import aws, doctor, rights
from gpufleet.infra.canary import proof
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.envelope import tell
from gpufleet.job.text import counted

MARKS = {"ok": "ok     ", "warning": "warning", "problem": "PROBLEM"}


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument("--pin", action="store_true", help="write the newest AMI and the image's digest into the file")
    parser.add_argument("--rights", action="store_true", help="print the rights that you need, as an IAM policy")
    parser.add_argument("--all", action="store_true", help="also show the checks that passed")


def run(args: argparse.Namespace) -> int:
    """Prints the checks; returns 1 if something would make `pulumi up` fail."""
    definition = stack.definition_of(args, staged=True)
    if args.rights:
        print(rights.policy(definition))
        return 0
    if args.pin:
        doctor.pin(definition, aws.client("ssm", definition.fleet.region))
        definition = stack.definition_of(args, staged=True)
    root = project_root(Path.cwd())
    checks = [
        *dict.fromkeys(check for part in definition.parts for check in doctor.examine(part, root, aws.client)),
        proof.check(root, definition.fleet.region, datetime.now(UTC).date()),
    ]
    tell([{key: getattr(entry, key) for key in ("name", "state", "found", "fix")} for entry in checks])
    count = Counter(check.state for check in checks)
    problems, warnings = counted(count["problem"], "problem"), counted(count["warning"], "warning")
    verdict = "everything is in place. Next: `pulumi preview`, then `pulumi up`."
    if count["problem"]:
        verdict = f"{problems} to put right first: with them `pulumi up` would leave you without a node"
        verdict += f", and {warnings}." if count["warning"] else "."
    elif count["warning"]:
        skipped = any(check.name == doctor.SKIPPED for check in checks)
        verdict = f"nothing{' that was checked' if skipped else ''} stands in the way; read the {warnings}."
    print(f"{definition.name} in {definition.fleet.region}: {verdict}")
    for state in ("problem", "warning", "ok") if args.all else ("problem", "warning"):
        for check in (entry for entry in checks if entry.state == state):
            print(f"  {MARKS[check.state]} {check.name}: {check.found}")
            if check.fix:
                print(f"          {check.fix}")
    if count["ok"] and not args.all:
        print(f"  ok      {counted(count['ok'], 'check')}: `gpufleet doctor {definition.argument} --all`")
    return 1 if count["problem"] else 0
