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
    write_definition(project_root(Path.cwd()), args.name, args.code, args.command)
    return 0


def write_definition(root: Path, name: str, code: Path, command: str) -> None:
    """The file of stack `name` in the project `root`, and what to know of it, printed. Raises GpufleetError."""
    path = named(root, name)
    if path.exists():
        raise GpufleetError(f"{path.relative_to(root)} is there already: choose another name, or remove it")
    folder = os.path.relpath(code.resolve(), root.resolve())
    found = look(code, command)
    made = draft(name, found, folder=folder, command=command, modeline=modeline(path.parent, root))
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
    print(f"Next: look at the lines marked CHECK, then `gpufleet cost {name}` and `gpufleet rehearse {name}`.")


def named(root: Path, name: str) -> Path:
    """Where the file of stack `name` lies. Raises GpufleetError for what is no name of one."""
    if not STACK_NAME.fullmatch(name):
        raise GpufleetError(f"{name}: a stack's name has 2 to 40 of a-z, 0-9 and inner hyphens, starting with a letter")
    return root / "stacks" / f"{name}.yaml"
