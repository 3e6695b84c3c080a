"""`gpufleet rehearse STACK`: carries out the whole run on this machine, on an embedded AWS."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from gpufleet.infra import progress
from gpufleet.infra.definition.loader import names_of, project_root
from gpufleet.infra.definition.selected import selected
from gpufleet.infra.errors import GpufleetError
from gpufleet.rehearsal import environment


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("stack", metavar="STACK", nargs="?", help="a file of stacks/ without its .yaml, or a path")
    depth = parser.add_mutually_exclusive_group()
    depth.add_argument("--image", action="store_true", help="run a command in its own image, by this machine's docker")
    depth.add_argument("--plumbing", action="store_true", help="replace a command that cannot run here by a stand-in")
    once_more: dict[str, Any] = {"dest": "again", "action": "append_const", "default": []}
    parser.add_argument(
        "--exact",
        const="end",
        help="run a command a second time without interruptions: does it end the same?",
        **once_more,
    )
    parser.add_argument(
        "--limit", const="limit", help="run a command a second time, until it meets a limit midway", **once_more
    )
    progress.argument(parser)
    parser.add_argument("--all", action="store_true", help="rehearse every stack in turn, and print one table")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if all promises held, 1 if one was broken or a step failed, and 130 after Ctrl-C."""
    if args.all and args.again:
        raise GpufleetError("--exact and --limit are for one command: name its stack instead of --all")
    if args.all and args.stack:
        raise GpufleetError(f"--all rehearses every stack, but {args.stack} is one: give one of the two")
    if not args.all and not args.stack:
        names = ", ".join(names_of(project_root(Path.cwd()))) or "none in stacks/ here"
        raise GpufleetError(f"which stack is to be rehearsed? There are {names}; --all rehearses each in turn")
    if not args.all:
        # reports a misspelled stack at once, before imports that take seconds
        selected(args.stack, project_root(Path.cwd()))
    environment.forget_account()
    try:
        from gpufleet.rehearsal.rehearse import rehearse, rehearse_all
    except ImportError as error:
        raise GpufleetError(f"the rehearsal is not installed ({error}): pip install 'gpufleet[rehearsal]'") from error
    if args.all:
        return rehearse_all(quiet=args.quiet)
    return rehearse(args.stack, quiet=args.quiet, image=args.image, stand_in=args.plumbing, again=args.again)
