"""`gpufleet schema`: the JSON Schemas of the definition file and of `--json`, for editors and other programs."""

from __future__ import annotations

import argparse
import sys

from gpufleet.infra import envelope
from gpufleet.infra.definition import json_schema


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the choice between the two schemas."""
    parser.add_argument("of", nargs="?", choices=("definition", "answers"), default="definition", help="of what")


def run(args: argparse.Namespace) -> int:
    """Prints the schema's file as it was shipped."""
    sys.stdout.write(json_schema.text() if args.of == "definition" else envelope.SCHEMA_FILE.read_text())
    return 0
