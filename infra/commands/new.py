"""`gpufleet new NAME --code DIR`: looks at a folder of training code and writes the definition file for it."""

from __future__ import annotations

import argparse
import os
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.definition.json_schema import modeline
from gpufleet.infra.definition.loader import STACK_NAME, load, project_root
from gpufleet.infra.discover.script import look
from gpufleet.infra.discover.template import draft
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.job import atomic


def arguments(parser: argparse.ArgumentParser) -> None:
    """NAME and where the code is."""
    parser.add_argument("name", metavar="NAME", help="of the stack: stacks/NAME.yaml is written")
    parser.add_argument("--code", metavar="DIR", type=Path, required=True, help="the folder of your training code")
    parser.add_argument("--command", metavar="TEXT", default="", help="how it is started there, as you would type it")


def run(args: argparse.Namespace) -> int:
    """Writes stacks/NAME.yaml, which loads, and says what was found and what was not. Raises GpufleetError."""
    root = project_root(Path.cwd())
    if not STACK_NAME.fullmatch(args.name):
        raise GpufleetError(
            f"{args.name}: a stack's name has 2 to 40 of a-z, 0-9 and inner hyphens, starting with a letter"
        )
    path = root / "stacks" / f"{args.name}.yaml"
    if path.exists():
        raise GpufleetError(f"{path.relative_to(root)} is there already: choose another name, or remove it")
    folder = os.path.relpath(args.code.resolve(), root.resolve())
    found = look(args.code, args.command)
    made = draft(args.name, found, folder=folder, command=args.command, modeline=modeline(path.parent, root))
    path.parent.mkdir(exist_ok=True)
    atomic.write_bytes(path, made.text.encode())
    try:
        load(path, now=datetime.now(UTC))
    except DefinitionError as error:
        print(f"What it says of {folder} does not hold yet:\n{error}")
    print(f"Wrote {path.relative_to(root)}.")
    for heading, sentences in (("Found", made.known), ("Not known, marked CHECK", made.unknown)):
        if sentences:
            print(f"{heading}:")
            for sentence in sentences:
                print(f"  - {sentence}")
    print(
        f"Next: look at the lines marked CHECK, then `gpufleet cost {args.name}` and `make rehearse STACK={args.name}`."
    )
    return 0
