"""`gpufleet new NAME`: looks at a folder of training code and writes the definition file for it."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from gpufleet.infra.definition.json_schema import modeline
from gpufleet.infra.definition.loader import STACK_NAME, project_root
from gpufleet.infra.discover.marks import checks_left
from gpufleet.infra.discover.script import ScriptFacts, look
from gpufleet.infra.discover.template import Draft, draft, loadable
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic
from gpufleet.job.text import counted


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="the stack's name: stacks/NAME.yaml is written")
    parser.add_argument("--code", metavar="DIR", type=Path, default=Path(), help="its training code (default: here)")
    parser.add_argument(
        "--command", metavar="TEXT", default="", help="the command that starts it there, as you would type it"
    )
    parser.add_argument(
        "--try", dest="tries", action="store_true", help="run the command for a minute on this CPU, and watch it"
    )


def run(args: argparse.Namespace) -> int:
    """Writes a valid stacks/NAME.yaml, and prints the facts that it found in the code. Raises GpufleetError."""
    write_definition(project_root(Path.cwd()), args.name, args.code, args.command, tries=args.tries)
    return 0


def write_definition(root: Path, name: str, code: Path, command: str, *, tries: bool = False) -> None:
    """Writes the definition file of stack `name` in the project `root`, and prints notes about it. If `tries`, it first
    runs the command in a copy of the folder and watches it. Raises GpufleetError.
    """
    path = named(root, name)
    if path.exists():
        raise GpufleetError(f"{path.relative_to(root)} exists already: choose another name, or remove the file")
    folder = os.path.relpath(code.resolve(), root.resolve())
    facts = look(code, command)
    text = modeline(path.parent, root)
    made = draft(name, facts, folder=folder, command=command, modeline=text)
    problems: list[str] = []
    if tries and made.trial is not None:
        problems = _tried(facts, made, code)
        made = draft(name, facts, folder=folder, command=command, modeline=text)
    made = loadable(made, name)
    path.parent.mkdir(exist_ok=True)
    atomic.write_bytes(path, made.text.encode())
    print(f"Wrote {path.relative_to(root)}.")
    for heading, sentences in (("Tried", problems), ("Found", made.known), ("Not known, marked CHECK", made.unknown)):
        if sentences:
            print(f"{heading}:")
            for sentence in sentences:
                print(f"  - {sentence}")
    count = counted(len(checks_left(made.text)), "line")
    print(f"Next: look at the {count} marked CHECK, then `gpufleet cost {name}` and `gpufleet rehearse {name}`.")


def _tried(facts: ScriptFacts, made: Draft, code: Path) -> list[str]:
    """Runs the draft's command, adds what it observes to `facts`, and returns problems as sentences."""
    from gpufleet.infra.discover.seen import with_seen
    from gpufleet.infra.discover.trial import trial

    trying = made.trial
    assert trying is not None
    print(f"Trying, in a copy of the folder, a minute at most for each of two starts: {trying.command}", flush=True)
    seen = trial(code, trying, say=print)
    with_seen(facts, seen, made.out, trying)
    return [*seen.problems, f"the trial took {seen.seconds:.0f} s; the observations are beside each key"]


def named(root: Path, name: str) -> Path:
    """The file of stack `name`. Raises GpufleetError for an invalid name."""
    if not STACK_NAME.fullmatch(name):
        raise GpufleetError(f"{name}: a stack's name has 2 to 40 of a-z, 0-9 and inner hyphens, starting with a letter")
    return root / "stacks" / f"{name}.yaml"
