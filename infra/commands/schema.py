"""`gpufleet schema`: the JSON Schema of the definition file, for editors and other programs."""

from __future__ import annotations

import argparse
import sys

from gpufleet.infra.definition import json_schema


def arguments(parser: argparse.ArgumentParser) -> None:
    """None."""


def run(args: argparse.Namespace) -> int:
    """Prints it, as the shipped file has it."""
    sys.stdout.write(json_schema.text())
    return 0
