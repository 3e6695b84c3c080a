"""`gpufleet schema`: the JSON Schemas of a definition, of a campaign and of `--json`, for editors and programs."""

from __future__ import annotations

import argparse
import sys

from gpufleet.infra import envelope
from gpufleet.infra.definition import campaign, json_schema


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds which of them."""
    parser.add_argument(
        "of", nargs="?", choices=("definition", "campaign", "answers"), default="definition", help="of what"
    )


def run(args: argparse.Namespace) -> int:
    """Prints the shipped file."""
    files = {"campaign": campaign.SCHEMA_FILE, "answers": envelope.SCHEMA_FILE}
    sys.stdout.write(json_schema.text() if args.of == "definition" else files[args.of].read_text())
    return 0
