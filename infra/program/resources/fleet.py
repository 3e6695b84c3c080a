"""The launch template and the fleet of a run's nodes. Every option that could leave a GPU running is stated here.

Resources that AWS may refuse are made before the fleet that launches nodes, unless they need its id. An object in the
bucket shows that Pulumi's state has the fleet: the engine writes this object last, and deletes it before the fleet. If
a node does not find the object of its fleet, it ends the fleet (job/node), so that an `up` that failed or was
interrupted leaves no node for long. Everything that a node needs for this check is deleted after the launch template,
so that no node can be launched once a part of it is missing.

A fleet is never updated in place, because the provider's update sends capacity and template again, and this would
launch nodes for a finished run. A new run id replaces the fleet: the old one is deleted first. `on_demand_options` is
left out on purpose: for a maintain fleet, the provider turns it into settings that only instant fleets accept
(docs/decisions/2026-11-21-provider-arguments.md). Differences between markets are in infra/market.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Capacity, Disk, StackDefinition
from gpufleet.infra.market import WAYS
from gpufleet.infra.market.market import Market
from gpufleet.infra.program.boot.user_data import DATA_DEVICE, ROOT_DEVICE
from gpufleet.infra.program.resources.tags import named, tags
from gpufleet.job.contract.bucket import fleet_key


class FleetComponent(pulumi.ComponentResource):
    """The launch template and, if the run is not over, the standby fleet of size 0. `declare_fleet` adds the fleet that
    keeps one or more nodes alive until the run is over. `declare_known` adds the object by which nodes see that
    Pulumi's state has their fleet.
    """

    template: aws.ec2.LaunchTemplate
    standing_by: list[aws.ec2.Fleet]

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        subnets: dict[str, pulumi.Input[str]],
        pools: Mapping[Capacity, Sequence[tuple[str, str]]],
        security_group_id: pulumi.Input[str],
        bucket: pulumi.Input[str],
        profile_arn: pulumi.Input[str],
        user_data_base64: pulumi.Input[str],
        valid_until: str,
        frozen: bool,
        over: bool,
        depends_on: Sequence[pulumi.Resource],
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`pools`: by market, each (type, zone) that a fleet may launch. `depends_on`: everything that a node needs at
        boot or that AWS may refuse. These resources must be listed, because the launch template and the fleets refer to
        only a few of these resources.
        """
        super().__init__("gpufleet:infra:Fleet", name, None, opts)
        label = named(tags(definition), f"gpufleet-{definition.name}-{definition.run.id}")
        self.template = aws.ec2.LaunchTemplate(
            f"gpufleet-{definition.name}{definition.stage and '-'}{definition.stage}",
            image_id=definition.fleet.starts_from,
            user_data=user_data_base64,
            update_default_version=True,
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=profile_arn),
            **_attached(definition, security_group_id, subnets),
            instance_initiated_shutdown_behavior="terminate",  # with `stop`, the disks would remain and be billed
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                # A container on a bridge network, such as that of a command, is one hop further away; so it has the
                # node's role only if the command asks for it.
                http_put_response_hop_limit=2 if definition.job.parameters.demands.node_role else 1,
                instance_metadata_tags="enabled",  # the node reads its fleet's id from its tags
            ),
            block_device_mappings=disks(definition),
            # Only the instance gets tags. If another resource were listed that the fleet's service-linked role may not
            # tag, such as a network interface, every launch would fail. And a template cannot tag the volumes of spot
            # nodes of a maintain fleet.
            tag_specifications=[aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type="instance", tags=label)],
            tags=label,
            **definition.fleet.market.template_arguments(),
            # a run that continues keeps its code, and so keeps the number of hops that this code needs
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(depends_on),
                ignore_changes=["userData", "metadataOptions"] if frozen else None,
            ),
        )
        self._name, self._definition, self._frozen, self._bucket = name, definition, frozen, bucket
        # AWS takes the subnet from the network interfaces; if there are none, from the override.
        chosen = {} if definition.fleet.is_gang else subnets
        self._places = {market: [(kind, chosen.get(zone)) for kind, zone in some] for market, some in pools.items()}
        self._valid_until, self._label = valid_until, label
        others = [] if over else definition.fleet.market.stands_by
        self.standing_by = [self._fleet(f"{name}-fallback-fleet", WAYS[capacity](), 0, []) for capacity in others]
        self.register_outputs({})

    def declare_fleet(self, depends_on: Sequence[pulumi.Resource]) -> aws.ec2.Fleet:
        """Declares the fleet that launches nodes."""
        # The provider ignores this value on an existing fleet. If the fleet is made again for a run that has begun (the
        # run deleted the old one, and a refresh has just noticed), it launches nothing, except in a market whose fleets
        # do not replace nodes.
        market = self._definition.fleet.market
        # the fleet then waits for the state machine that the stage before starts (resources/stages.py)
        waits = bool(self._definition.before)
        target = 0 if waits or (self._frozen and market.replaces) else self._definition.nodes
        return self._fleet(f"{self._name}-fleet", market, target, depends_on)

    def declare_known(self, fleet: aws.ec2.Fleet, depends_on: Sequence[pulumi.Resource]) -> None:
        """Declares the objects that name the fleets, once everything exists on which the fleets depend."""
        others = [(f"{self._name}-fallback", standby) for standby in self.standing_by]
        for part, declared in ((self._name, fleet), *others):
            aws.s3.BucketObjectv2(
                f"{part}-known",
                bucket=self._bucket,
                key=declared.id.apply(lambda id: f"{self._definition.run.id}/{fleet_key(id)}"),
                content="The stack's state knows of this fleet.\n",
                tags=tags(self._definition),
                opts=pulumi.ResourceOptions(parent=self, depends_on=list(depends_on)),
            )

    def _fleet(self, name: str, market: Market, target: int, depends_on: Sequence[pulumi.Resource]) -> aws.ec2.Fleet:
        return aws.ec2.Fleet(
            name,
            launch_template_configs=[
                aws.ec2.FleetLaunchTemplateConfigArgs(
                    launch_template_specification=aws.ec2.FleetLaunchTemplateConfigLaunchTemplateSpecificationArgs(
                        launch_template_id=self.template.id,
                        version=self.template.latest_version.apply(str),
                    ),
                    overrides=[
                        aws.ec2.FleetLaunchTemplateConfigOverrideArgs(instance_type=kind, subnet_id=subnet)
                        for kind, subnet in self._places[market.name]
                    ],
                )
            ],
            target_capacity_specification=aws.ec2.FleetTargetCapacitySpecificationArgs(
                default_target_capacity_type=market.asks_for, total_target_capacity=target
            ),
            **market.fleet_arguments(self._valid_until),
            excess_capacity_termination_policy="termination",
            terminate_instances=True,  # by default a destroy would leave GPUs running
            replace_unhealthy_instances=False,
            tags=self._label,
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(depends_on),
                replacement_trigger=self._definition.run.id,
                delete_before_replace=True,  # in the other order, two nodes would work on one run
                ignore_changes=[
                    "validUntil",
                    "targetCapacitySpecification.totalTargetCapacity",
                    "launchTemplateConfigs",
                    "tags",
                    # AWS may return the time in another spelling, and a difference in this value would replace the
                    # fleet.
                    "targetCapacitySpecification",
                    "spotOptions",
                    "onDemandOptions",
                    "excessCapacityTerminationPolicy",
                    # The program does not declare this, but the provider reads it from AWS's answer, as it does with
                    # onDemandOptions.
                    "validFrom",
                ],
                custom_timeouts=pulumi.CustomTimeouts(delete=market.delete_timeout),
            ),
        )


def _attached(
    definition: StackDefinition, group: pulumi.Input[str], subnets: Mapping[str, pulumi.Input[str]]
) -> dict[str, Any]:
    """The launch template's arguments that attach nodes to the network: either a security group or network
    interfaces.
    """
    if definition.fleet.is_gang:
        return {"network_interfaces": interfaces(definition, group, subnets[definition.fleet.zones[0]])}
    return {"vpc_security_group_ids": [group]}


def interfaces(
    definition: StackDefinition, group: pulumi.Input[str], subnet: pulumi.Input[str] | None = None
) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
    """The network interfaces of each of several nodes: either its first card with a public address, or all cards
    without one. Each interface names the `subnet`, because a launch with interfaces does not take it from anywhere else
    (RunInstances, SubnetId). With all cards they follow AWS's layout since 2026 (EC2 User Guide, efa-acc-inst-types):
    device 0 of the first card is a plain interface and device 1 its EFA; on each further card, device 0 is the EFA.
    Only a single interface can have a public address; if only one card is used, the same interface is both a plain
    interface and an EFA.
    """
    kind = load_catalog().instances[definition.fleet.instance_types[0]]
    every, on_first = definition.fleet.cards == "all", kind.efa_cards == kind.network_cards
    places: list[tuple[int, int, str | None]] = [(0, 0, "efa" if on_first and not every else None)]
    if every:
        places += [(0, 1, "efa-only")] if on_first else []
        places += [(card, 0, "efa-only") for card in range(1, kind.network_cards)]
    return [
        aws.ec2.LaunchTemplateNetworkInterfaceArgs(
            network_card_index=card,
            device_index=device,
            interface_type=efa,
            subnet_id=subnet,
            security_groups=[group],
            associate_public_ip_address=None if every else "true",
            delete_on_termination="true",
        )
        for card, device, efa in places
    ]


def disks(definition: StackDefinition) -> list[aws.ec2.LaunchTemplateBlockDeviceMappingArgs]:
    """The root disk, and the data volume if the file has one."""
    mappings = [_mapping(ROOT_DEVICE, definition.storage.root, definition.account.kms_key)]
    if definition.storage.data:
        mappings.append(_mapping(DATA_DEVICE, definition.storage.data, definition.account.kms_key))
    return mappings


def _mapping(device: str, disk: Disk, key: str | None) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name=device,
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_type="gp3",
            volume_size=disk.size_gib,
            iops=disk.iops,
            throughput=disk.throughput_mibps,
            delete_on_termination="true",
            # `encrypted` and a snapshot exclude each other: the volume is encrypted like its snapshot
            encrypted=None if disk.snapshot else "true",
            kms_key_id=None if disk.snapshot else key,  # None stands for the account's default key
            snapshot_id=disk.snapshot,
        ),
    )
