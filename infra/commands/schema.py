"""`gpufleet schema`: the JSON Schema of the definition file, for editors and other programs."""

from __future__ import annotations

import argparse
import sys

from gpufleet.infra.definition import json_schema


def arguments(parser: argparse.ArgumentParser) -> None:
    """Adds no argument."""


def run(args: argparse.Namespace) -> int:
    """Prints the shipped file."""
    sys.stdout.write(json_schema.text())
    return 0
