"""`gpufleet prepare STACK [TEXT]`: prepares a run's data. The command makes the dataset of storage.dataset from its
source or from a text, or it lists and hashes the files of storage.inputs.
"""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra import progress
from gpufleet.infra.account import aws
from gpufleet.infra.bill.prediction import predict
from gpufleet.infra.commands import stack
from gpufleet.infra.definition.loader import load, project_root
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.prepare import prepare_folders, prepare_inputs, repeated, require_another_folder


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    progress.argument(parser)
    parser.add_argument(
        "text",
        metavar="TEXT",
        nargs="?",
        type=Path,
        help="a text or JSONL file, or a folder of queries and labels, instead of the source",
    )
    parser.add_argument("--rehearsal", action="store_true", help="the dataset of the definition's rehearsal section")
    parser.add_argument(
        "--tokenizer",
        metavar="FILE",
        type=Path,
        help="a tokenizer.json: that of the base weights, or of GPT-2 where it cannot be fetched",
    )


def run(args: argparse.Namespace) -> int:
    """Prepares the data, unless they are prepared already, and prints the cost of a run with them."""
    root, now = project_root(Path.cwd()), datetime.now(UTC)
    say = progress.say(args, _say)
    if args.rehearsal:
        definition = load(stack.path_of(args), now=now, rehearsal=True, past_deadline=True, staged=True)
        require_another_folder(load(definition.source, now=now, past_deadline=True, staged=True), definition, root)
    else:
        definition = stack.definition_of(args, staged=True)
    trained = [part for part in definition.parts if part.job.parameters.dataset_kind]
    if not trained and (args.text or args.tokenizer):
        raise GpufleetError("a command reads its data from storage.inputs: leave out TEXT and --tokenizer")
    often = list[str]()
    for part in definition.parts:
        if part in trained:
            made = prepare_inputs(part, root, text=args.text, tokenizer=args.tokenizer, say=say)
            often.append(repeated(part.job.parameters, made))
        if part not in trained or part.storage.inputs:
            prepare_folders(part, root, aws.client("s3", part.fleet.region), say)
    if args.rehearsal:
        return 0
    for warning in filter(None, often):
        say(warning)
    if definition.stages:
        say(f"What it costs: `gpufleet cost {definition.argument}`")
    else:
        predict(definition, root, datetime.now(UTC), say)
    return 0


def _say(line: str) -> None:
    print(line, flush=True)
