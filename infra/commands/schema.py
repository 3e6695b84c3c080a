"""`gpufleet schema`: prints the JSON Schema of a definition, a campaign or `--json`, for editors and programs."""

from __future__ import annotations

import argparse
import sys

from gpufleet.infra import envelope
from gpufleet.infra.definition import campaign, json_schema


def arguments(parser: argparse.ArgumentParser) -> None:
    of = ("definition", "campaign", "answers")
    parser.add_argument("of", nargs="?", choices=of, default="definition", help="of what")


def run(args: argparse.Namespace) -> int:
    """Prints the schema's file as shipped."""
    files = {"campaign": campaign.SCHEMA_FILE, "answers": envelope.SCHEMA_FILE}
    sys.stdout.write(json_schema.text() if args.of == "definition" else files[args.of].read_text())
    return 0
