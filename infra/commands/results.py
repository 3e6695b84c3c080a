"""`gpufleet results`: downloads a run's files from its bucket to results/<stack>/<run>/."""

from __future__ import annotations

import argparse
from pathlib import Path

from gpufleet.infra import progress
from gpufleet.infra.account import aws, results
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import project_root
from gpufleet.job.contract.workdir import RECEIPT


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--to", type=Path, metavar="DIR", help="default: results/STACK/RUN of the project")
    progress.argument(parser)
    models = parser.add_mutually_exclusive_group()
    models.add_argument("--exports", action="store_true", help="bring the weights of every phase too, not only final/")
    models.add_argument("--light", action="store_true", help="leave the final weights in the bucket too")


def run(args: argparse.Namespace) -> int:
    """1 if the run lacks files that its kind of end leaves."""
    definition, root = stack.definition_of(args), project_root(Path.cwd())
    target = args.to or root / "results" / definition.name / definition.run.id
    s3, ec2 = (aws.client(service, definition.fleet.region) for service in ("s3", "ec2"))
    say = progress.say(args)
    code = results.fetch(definition, s3, ec2, target, light=args.light, exports=args.exports, say=say)
    if (target / RECEIPT).is_file():
        say(results.keep(definition, s3, target / RECEIPT, root))
    return code
