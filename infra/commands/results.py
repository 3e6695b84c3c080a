"""`gpufleet results`: downloads a run's files from its bucket to results/<stack>/<run>/."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

from gpufleet.infra import progress
from gpufleet.infra.account import aws, results, stages
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import project_root
from gpufleet.job import atomic
from gpufleet.job.contract.workdir import RECEIPT
from gpufleet.job.supervisor import receipt


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser, earlier_runs=True)
    parser.add_argument("--to", type=Path, metavar="DIR", help="default: results/STACK/RUN of the project")
    progress.argument(parser)
    models = parser.add_mutually_exclusive_group()
    models.add_argument(
        "--exports", action="store_true", help="download the weights of every phase too, not only final/"
    )
    models.add_argument("--light", action="store_true", help="do not download the final weights")


def run(args: argparse.Namespace) -> int:
    """Downloads the files. Returns 1 if some are missing that a run with this kind of end always has."""
    definition, root = stack.definition_of(args, staged=True), project_root(Path.cwd())
    target = args.to or root / "results" / definition.name / definition.run.id
    s3, ec2 = (aws.client(service, definition.fleet.region) for service in ("s3", "ec2"))
    say = progress.say(args)
    fetch = partial(results.fetch, light=args.light, exports=args.exports, say=say)
    if not definition.stages:
        code = fetch(definition, s3, ec2, target)
    else:
        begun = [seen.stage for seen in stages.begun(definition, s3) if not seen.is_called_off]
        code = max(fetch(stage, s3, ec2, target / stage.stage) for stage in begun)
        if (whole := stages.combine(definition, target)) is not None:
            atomic.write_json(target / RECEIPT, whole.to_json())
            say(receipt.text(whole))
    if (target / RECEIPT).is_file():
        say(results.keep(definition, s3, target / RECEIPT, root))
    return code
