"""A run as a component of a Pulumi program."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import pulumi

from gpufleet._bill import Bill, bill_in_numbers
from gpufleet._definition import Given, file_of
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import engine
from gpufleet.job.text import printable

TYPE = "gpufleet:index:TrainingRun"


class TrainingRun(pulumi.ComponentResource):
    """One definition's run: network, bucket, role, launch template and a fleet of one node, as gpufleet's own `pulumi
    up` declares them. One program may have several of them, if their definitions have different names. The stack's
    Pulumi.yaml needs `options: {refresh: always}`, because a run ends its own fleet.
    """

    fleet_id: pulumi.Output[str | None]
    """The EC2 Fleet's id; None once the run is over."""
    bucket: pulumi.Output[str]
    """The bucket's name."""
    run_prefix: pulumi.Output[str]
    """The address of the run's files: `s3://BUCKET/RUN/`."""
    log_group: pulumi.Output[str]
    """The log group's name."""
    bill: Bill
    """The run's cost in USD and hours; known at once, so that a program can decide by it."""

    def __init__(
        self,
        name: str,
        definition: Given,
        *,
        scenario: str = "",
        project: Path | str | None = None,
        vpc_id: pulumi.Input[str] | None = None,
        subnets: Mapping[str, pulumi.Input[str]] | None = None,
        permissions_boundary: pulumi.Input[str] | None = None,
        tags: Mapping[str, str] | None = None,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`definition`: the path of a definition file, the name of one in `stacks/`, or a mapping of its sections,
        which is then called `name`. `scenario`: one of its scenarios. `project`: the folder of its inputs; None means
        the folder of Pulumi.yaml.

        `vpc_id` with `subnets` (ids by zone, one for each of `fleet.zones`) and `permissions_boundary` (an ARN) replace
        those of the definition's `account`; `tags` are added to its tags. The first three may be outputs of other
        resources.

        `opts`: as for any component. If they have a `provider` of AWS, it must have the definition's region; otherwise
        the component makes a provider in this region.

        Raises pulumi.RunError, which the engine shows without a traceback, before anything is declared: for mistakes in
        the definition, the run id of an earlier run, limits below the bill, missing inputs.
        """
        engine.require()
        root = Path(project).resolve() if project is not None else engine.root_directory()
        try:
            path = file_of(definition, root, name)
            if path.is_relative_to(Path.cwd()):  # this path works for other commands, on any machine
                path = path.relative_to(Path.cwd())
            earlier = _earlier_names(opts)
            was = engine.last_update((TYPE, [name, *earlier]), path.stem)
            plan = engine.planned(root, str(path), was, scenario=scenario, tags=tags)
            if plan.staged:
                raise GpufleetError(
                    f"{path} has stages, which a TrainingRun cannot declare. Make a Pulumi stack for it alone, with"
                    " gpufleet's own program."
                )
            _check_network(vpc_id, subnets, plan.definition.fleet.zones)
            _claim(plan.definition.name, name)
        except GpufleetError as error:
            raise pulumi.RunError(printable(f"{name}: {error}\nNothing of it was declared.")) from error
        super().__init__(TYPE, name, None, opts)
        try:
            engine.begin(plan.verdict, was, f"{name}-run", self)
        except GpufleetError as error:
            raise pulumi.RunError(printable(f"{name}: {error}\nNothing of it was declared.")) from error
        engine.say(plan, self)

        from gpufleet.infra.program.resources.declare import Surroundings, declare
        from gpufleet.infra.program.resources.network import GivenVpc

        provider = self.get_provider("aws:ec2/fleet:Fleet")
        if provider is not None:
            _check_region(provider, plan.definition.fleet.region)
        around = Surroundings(
            prefix=f"{name}-",
            earlier=tuple(f"{earlier_name}-" for earlier_name in earlier),
            opts=pulumi.ResourceOptions(parent=self, providers=None if provider is None else [provider]),
            vpc=GivenVpc(id=vpc_id, subnets=subnets) if vpc_id is not None and subnets is not None else None,
            permissions_boundary=permissions_boundary,
        )
        resources = declare(plan, root, around)
        run = plan.definition.run.id
        self.bill = bill_in_numbers(plan.bill, warnings=plan.warnings)
        self.fleet_id = pulumi.Output.from_input(resources.fleet_id)
        self.bucket, self.log_group = resources.bucket, resources.log_group
        self.run_prefix = resources.bucket.apply(lambda bucket: f"s3://{bucket}/{run}/")
        outputs: dict[str, Any] = {
            "fleet_id": self.fleet_id,
            "bucket": self.bucket,
            "run_prefix": self.run_prefix,
            "log_group": self.log_group,
            "bill": plan.numbers(),
            "definition": plan.definition.name,
            "region": plan.definition.fleet.region,
            **plan.record(),
        }
        self.register_outputs(outputs)


# Names of files that components have claimed, by the program's stack.
_CLAIMED: WeakKeyDictionary[pulumi.Resource, dict[str, str]] = WeakKeyDictionary()


def _claim(definition: str, name: str) -> None:
    """Raises GpufleetError if another component of this program has a definition of that name, because bucket, role and
    tags use it, and the engine would report only one of the two.
    """
    root = pulumi.runtime.get_root_resource()
    if root is None:  # true if gpufleet hosts the component for a program in another language
        return
    other = _CLAIMED.setdefault(root, {}).setdefault(definition, name)
    if other != name:
        raise GpufleetError(
            f"{other} already runs the definition {definition}, and bucket, role and tags are named after it. Give this"
            f" one a file of another name, or the file's sections as a mapping, which then has the name {name}"
        )


def _earlier_names(opts: pulumi.ResourceOptions | None) -> list[str]:
    """The names in the options' aliases, as far as they are known at once."""
    aliases = [alias.name if isinstance(alias, pulumi.Alias) else alias for alias in (opts and opts.aliases) or []]
    return [alias.rpartition("::")[2] for alias in aliases if isinstance(alias, str)]


def _check_network(
    vpc_id: pulumi.Input[str] | None, subnets: Mapping[str, pulumi.Input[str]] | None, zones: tuple[str, ...]
) -> None:
    """Raises GpufleetError if only one of `vpc_id` and `subnets` is given."""
    if (vpc_id is None) != (subnets is None):
        raise GpufleetError("vpc_id and subnets belong together: give both, or neither for a network of its own")
    if subnets is not None and set(subnets) != set(zones):
        raise GpufleetError(
            f"subnets: a subnet for each of fleet.zones, {', '.join(zones)}; given: {', '.join(subnets)}"
        )


def _check_region(provider: pulumi.ProviderResource, region: str) -> None:
    """Raises GpufleetError if the provider has another region."""

    def check(provider_region: str | None) -> None:
        if provider_region not in (None, region):
            raise pulumi.RunError(
                f"the provider's region is {provider_region}, but fleet.region of the definition is {region}"
            )

    of_region = getattr(provider, "region", None)
    if of_region is not None:
        pulumi.Output.from_input(of_region).apply(check)
