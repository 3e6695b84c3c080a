"""The argument STACK of most commands, and the definition that it names."""

from __future__ import annotations

import argparse
import re
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.definition.model import Run, StackDefinition
from gpufleet.infra.definition.rules import RULES
from gpufleet.infra.definition.selected import Selected, selected
from gpufleet.infra.definition.stages import NAME
from gpufleet.infra.errors import GpufleetError


def argument(parser: argparse.ArgumentParser, *, earlier_runs: bool = False) -> None:
    """Adds STACK; for commands that can also look at an earlier run of the stack, also --run."""
    parser.add_argument("stack", metavar="STACK", help="a file of stacks/ without its .yaml, or a path")
    if earlier_runs:
        parser.add_argument(
            "--run", dest="run_id", metavar="ID", type=_id, help="a run of this stack; default: the file's own run.id"
        )


def _id(text: str) -> str:
    """The run id. An empty id is refused, because it usually comes from an unset shell variable."""
    rule, (run, slash, stage) = RULES[Run, "id"], text.partition("/")
    if not re.fullmatch(rule.pattern, run) or (slash and not NAME.fullmatch(stage)):
        raise argparse.ArgumentTypeError(f"{text!r} is not accepted; allowed: {rule.allowed}")
    return text


def path_of(args: argparse.Namespace) -> Path:
    """The definition file that STACK names."""
    return _chosen(args).path


def definition_of(args: argparse.Namespace, *, past_deadline: bool = True, staged: bool = False) -> StackDefinition:
    """The definition that the stack runs, or that of a stage with --run ID/STAGE. If the stack runs a scenario, it is
    named on standard error. `staged`: whether the command also accepts a run with several stages as a whole.
    `past_deadline`: whether the deadline may have passed, as for commands that look at a run or sweep it.
    """
    chosen = _chosen(args)
    run = getattr(args, "run_id", None) or ""
    definition = chosen.load(now=datetime.now(UTC), past_deadline=past_deadline, staged=staged or "/" in run)
    if chosen.scenario:
        print(f"gpufleet: {definition.name}'s scenario {chosen.scenario}, as `pulumi config` says", file=sys.stderr)
    if "/" in run:
        return _stage_of(definition, run)
    stages = tuple(_as_run(stage, f"{run}/{stage.stage}") for stage in definition.stages)
    return replace(_as_run(definition, run), stages=stages) if run else definition


def _as_run(definition: StackDefinition, run: str) -> StackDefinition:
    return replace(definition, run=replace(definition.run, id=run))


def _stage_of(definition: StackDefinition, run: str) -> StackDefinition:
    """The stage that --run names. Raises GpufleetError if there is none."""
    for stage in definition.stages:
        if stage.stage == run.partition("/")[2]:
            return _as_run(stage, run)
    named = ", ".join(stage.stage for stage in definition.stages)
    raise GpufleetError(f"{definition.source} has no stage {run.partition('/')[2]}; it has {named or 'none'}")


def _chosen(args: argparse.Namespace) -> Selected:
    """The file and scenario that STACK names. Warns if the file belongs to a project other than that of the current
    folder.
    """
    root = project_root(Path.cwd())
    chosen = selected(args.stack, root)
    home = project_root(chosen.path.resolve().parent)
    if (home / "stacks").is_dir() and not (root / "stacks").is_dir():
        print(
            f"gpufleet: {chosen.path} belongs to the project in {home}, but this runs outside of it: data is looked for"
            f" in {root}, and the project's prices, measurements, traces and policy.yaml are not used. cd there.",
            file=sys.stderr,
        )
    return chosen
