"""TrainingRun for Pulumi programs of any language, hosted as a provider. docs/api.md says how a program adds it.

The SDK evaluates the annotations below, so none may be text: no `from __future__ import annotations` here.
"""

import importlib.metadata
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, NotRequired, TypedDict, cast

import pulumi
from pulumi.provider import main
from pulumi.provider.experimental.component import ComponentProvider
from pulumi.provider.server import ComponentInitError

from gpufleet import _bill, _training_run


class Figures(TypedDict):
    """Quantiles and mean of one quantity over the simulated runs."""

    p10: float
    """A tenth of them stay below."""
    p50: float
    """Half of them stay below."""
    p90: float
    """Nine tenths of them stay below."""
    mean: float
    """The mean of the runs."""


class RunBill(TypedDict):
    """What one run costs, with the interruptions that it may meet and the limits of its definition."""

    usd: Figures
    """USD of the whole run, stopped at the limits."""
    hours: Figures
    """Node-hours, over all nodes and attempts."""
    wall_hours: Figures
    """Hours by the clock, with waits for capacity."""
    usd_to_finish: Figures
    """USD without limits."""
    kept_usd_per_month: float
    """USD a month for what stays in the bucket after `pulumi destroy`."""


class TrainingRunArgs(TypedDict):
    """The definition of a run, and where to run it."""

    definition: Any
    """The path of a definition file, the name of one in stacks/, or an object of its sections."""
    scenario: NotRequired[str]
    """The name of one of the definition's scenarios."""
    project: NotRequired[str]
    """The folder of the definition's inputs; by default that of Pulumi.yaml."""
    vpc_id: NotRequired[pulumi.Input[str]]
    """An existing VPC, together with `subnets`."""
    subnets: NotRequired[dict[str, pulumi.Input[str]]]
    """One of its subnets for each of fleet.zones: ids by zone."""
    permissions_boundary: NotRequired[pulumi.Input[str]]
    """The ARN of a permissions boundary for the node's role."""
    tags: NotRequired[dict[str, str]]
    """Tags for every resource, beside the definition's own."""


class TrainingRun(_training_run.TrainingRun):
    """One definition's run: network, bucket, role, launch template and a fleet of one node on rented AWS GPUs. The
    project's Pulumi.yaml needs `options: {refresh: always}`: because a run ends its own fleet.
    """

    fleet_id: pulumi.Output[str | None]
    """The EC2 Fleet's id; none once the run is over."""
    bucket: pulumi.Output[str]
    """The bucket's name."""
    run_prefix: pulumi.Output[str]
    """The address of the run's files: s3://BUCKET/RUN/."""
    log_group: pulumi.Output[str]
    """The log group's name."""
    bill: pulumi.Output[RunBill]  # type: ignore[assignment]  # in numbers: an object crosses no process
    """The run's cost in USD and hours."""

    def __init__(self, name: str, args: TrainingRunArgs, opts: pulumi.ResourceOptions | None = None) -> None:
        inputs = cast("Mapping[str, Any]", args)
        super().__init__(
            name,
            _with_whole_numbers(inputs["definition"]),
            scenario=inputs.get("scenario", ""),
            project=inputs.get("project") or _project(Path.cwd()),
            vpc_id=inputs.get("vpc_id"),
            subnets=inputs.get("subnets"),
            permissions_boundary=inputs.get("permissions_boundary"),
            tags=inputs.get("tags"),
            opts=opts,
        )
        bill = cast("_bill.Bill", self.bill)
        self.bill = pulumi.Output.from_input(
            cast("RunBill", {name: _plain(getattr(bill, name)) for name in RunBill.__annotations__})
        )


def _project(folder: Path) -> Path:
    """The folder of Pulumi.yaml, at or above the program's folder: which is searched for, because a hosted component is
    not told it.
    """
    return next((candidate for candidate in (folder, *folder.parents) if (candidate / "Pulumi.yaml").is_file()), folder)


def _plain(value: object) -> object:
    return asdict(value) if isinstance(value, _bill.Figures) else value


def _with_whole_numbers(value: Any) -> Any:
    """The value with its whole numbers as integers, because between processes all numbers are floats."""
    if isinstance(value, dict):
        return {key: _with_whole_numbers(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_with_whole_numbers(entry) for entry in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


class Host(ComponentProvider):
    """The provider. It reports a definition's problems without the SDK's traceback."""

    def construct(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().construct(*args, **kwargs)
        except ComponentInitError as error:
            if isinstance(error.inner, pulumi.RunError):
                raise pulumi.InputPropertyError("definition", str(error.inner)) from None
            raise


def host() -> None:
    """Serves the engine until it ends."""
    main(Host([TrainingRun], "gpufleet", version=importlib.metadata.version("gpufleet")), sys.argv[1:])
