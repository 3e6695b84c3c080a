"""`gpufleet completion SHELL`: prints lines with which a shell completes commands, options, stacks, scenarios, runs and
regions. argcomplete calls the functions below.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gpufleet.infra.definition.loader import find, names_of, project_root
from gpufleet.infra.errors import GpufleetError

SHELLS = ("bash", "zsh", "fish")


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Prints the lines that the shell reads when it starts."""
    from argcomplete.shell_integration import shellcode

    print(shellcode(["gpufleet"], shell=args.shell))
    return 0


def answer(commands: Mapping[str, str], line: str) -> None:
    """Writes the possible continuations of the command `line` and ends the process, as the shell's function expects. To
    be quick, it loads only the arguments of the typed command.
    """
    import argcomplete

    argcomplete.autocomplete(command_line(commands, line), append_space=False)


def command_line(commands: Mapping[str, str], line: str) -> argparse.ArgumentParser:
    """A parser with the arguments of the command in `line`, and their completers."""
    whole = argparse.ArgumentParser(prog="gpufleet")
    typed = next(iter(line.split()[1:]), "")
    below = whole.add_subparsers()
    for name in commands:
        command = below.add_parser(name)
        if name == typed:
            importlib.import_module(f"gpufleet.infra.commands.{name}").arguments(command)
            for action in command._actions:
                if (completer := COMPLETERS.get(action.dest)) is not None:
                    action.completer = completer  # type: ignore[attr-defined]  # argcomplete looks for it there
    return whole


def stacks(prefix: str, **_: object) -> Iterable[str]:
    """The project's stacks, or files if the user has begun to type a path."""
    if "/" not in prefix:
        return names_of(project_root(Path.cwd()))
    from argcomplete.completers import FilesCompleter

    files: list[str] = FilesCompleter(("yaml",))(prefix)
    return files


def scenarios(parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """The scenarios of the stack that the command line names."""
    import yaml

    try:
        tree = yaml.safe_load(find(parsed_args.stack, project_root(Path.cwd())).read_bytes())
        return list(map(str, tree["scenarios"]))
    except (GpufleetError, yaml.YAMLError, LookupError, TypeError, AttributeError, OSError):
        return ()  # the command itself will report the error


def runs(parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """The ids of the runs that have files in the project."""
    root = project_root(Path.cwd())
    places = (root / "results" / str(parsed_args.stack), root / "receipts" / str(parsed_args.stack))
    return {path.stem for place in places if place.is_dir() for path in place.iterdir()}


def regions(**_: object) -> Iterable[str]:
    """The regions that have prices."""
    from gpufleet.infra.catalog.regions import known_regions

    return known_regions()


COMPLETERS: dict[str, Callable[..., Iterable[str]]] = {
    "stack": stacks,
    "scenario": scenarios,
    "run_id": runs,
    "region": regions,
}
