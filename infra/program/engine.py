"""Exchanges data with the Pulumi engine, for this project's own program and for the component in other programs. Errors
are raised before the first resource. The engine shows the bill and its warnings as diagnostics.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pulumi
from pulumi.runtime.sync_await import _sync_await

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program.plan import Plan, make
from gpufleet.infra.program.previous import previous, previous_of_component
from gpufleet.infra.program.run_guard import Previous, RunDecision
from gpufleet.infra.progress import Lines
from gpufleet.job.progress import shown_by
from gpufleet.job.text import printable

# Versions before 3.208 ignore replacement triggers, so that a new run id would start nothing. In versions before 3.226
# a trigger may cause a replacement without a change, which would end a run (Pulumi's change log).
ENGINE = ">=3.226.0"
OVER = "none: the run is over"  # an output's value in place of a fleet's id


def require() -> None:
    """Raises an error if the engine is too old. (The SDK's mocks are not an engine, and have no version.)"""
    engine = pulumi.runtime.settings.get_engine()
    if not isinstance(engine, pulumi.runtime.mocks.MockEngine) or hasattr(engine, "RequirePulumiVersion"):
        pulumi.require_pulumi_version(ENGINE)


def root_directory() -> Path:
    """The folder of Pulumi.yaml."""
    return Path(pulumi.runtime.get_root_directory())


def last_update(component: tuple[str, Sequence[str]] | None = None, definition: str = "") -> Previous:
    """The last state of this Pulumi stack, or of a `component` in it (type, names) that runs a `definition`."""
    stack = f"{pulumi.get_organization()}/{pulumi.get_project()}/{pulumi.get_stack()}"

    def invoke(token: str, arguments: dict[str, Any]) -> Mapping[str, Any]:
        answer: Mapping[str, Any] = pulumi.runtime.invoke(token, arguments).value or {}
        return answer

    return previous_of_component(stack, *component, definition, invoke) if component else previous(stack, invoke)


def planned(root: Path, name: str, was: Previous, *, scenario: str, tags: Mapping[str, str] | None = None) -> Plan:
    """The plan for a run that would begin now. Raises GpufleetError."""
    preview = bool(pulumi.runtime.is_dry_run())
    say = lines()
    with shown_by(
        lambda label, total, unit: Lines(label, total, unit, say)
    ):  # shows the progress of hashing, which may take minutes
        return make(root, name, now=datetime.now(UTC), previous=was, preview=preview, scenario=scenario, tags=tags)


def begin(verdict: RunDecision, was: Previous, name: str = "run", parent: pulumi.Resource | None = None) -> None:
    """Declares a resource that keeps in the stack's state for which run all other resources are. This resource comes
    before all others. Raises GpufleetError for a new run if the engine would not replace the fleet of the previous run.

    With --run-program the engine writes each new replacement trigger into the state before it compares the old and the
    new one. So no trigger replaces anything, and the policies of a fleet that continues would change (pulumi/pulumi
    20217). This resource has a trigger too, with a new value at each attempt to begin a run. If the engine does not
    replace this resource, it would not replace the fleet either.
    """
    began = f"{verdict.run.id} {verdict.run.began}"
    stash = pulumi.Stash(name, input=began, opts=pulumi.ResourceOptions(parent=parent, replacement_trigger=began))
    if not verdict.continues and was.fleets and _sync_await(stash.output.future()) != began:
        others = " and ".join(sorted(run or "another run" for run in was.fleets))
        raise GpufleetError(
            f"Run {verdict.run.id} is new, and with --run-program or --target the engine would not replace the fleet "
            f"of {others}, but take its rights away. Omit the option (`pulumi refresh` and `pulumi destroy` need no "
            "program), or write the old run.id again."
        )


def lines(resource: pulumi.Resource | None = None) -> Callable[[str], None]:
    """A function that shows a line next to `resource` while the engine works, but not in its final output."""
    return lambda line: pulumi.log.info(printable(line), resource, ephemeral=True)


def say(plan: Plan, resource: pulumi.Resource | None = None, *, also: Iterable[str] = ()) -> None:
    """Shows the bill, the warnings, and what a destroy will leave. The destroy itself cannot show it, because it runs
    no program.
    """
    pulumi.log.info(printable("\n".join(plan.shown(datetime.now(UTC).date()))), resource)
    for warning in (*plan.warnings, *also):
        pulumi.log.warn(printable(warning), resource)
