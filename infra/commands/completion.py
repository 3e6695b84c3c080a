"""`gpufleet completion SHELL`: the lines that make a shell complete commands, options, stacks, scenarios and runs."""

from __future__ import annotations

import argparse

SHELLS = ("bash", "zsh", "fish")


def arguments(parser: argparse.ArgumentParser) -> None:
    """SHELL."""
    parser.add_argument("shell", metavar="SHELL", choices=SHELLS, help=", ".join(SHELLS))


def run(args: argparse.Namespace) -> int:
    """Prints them, to be read by the shell when it starts."""
    import argcomplete

    print(argcomplete.shellcode(["gpufleet"], shell=args.shell))
    return 0
