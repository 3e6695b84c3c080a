"""The launch template and the fleet of a run's nodes: every option that could leave a GPU running is stated here.

What AWS may refuse is made before the fleet that launches nodes, but for what needs that one's id. An object of the
bucket says that a state knows of the fleet: the engine writes it last of all and deletes it before the fleet. A node
that looks for its own in vain ends its fleet (job/node), so an `up` that was refused or cut short leaves no node for
long. All that a node needs for that goes after the template: once any of it is gone, nothing launches.

Nothing updates a fleet in place: the provider's update resends capacity and template, which would relaunch a finished
run. A new run id replaces it, old one first. `on_demand_options` is left out on purpose: for a maintain fleet the
provider turns the block into settings that only instant fleets take (docs/decisions/2026-11-21-provider-arguments.md).

Into a Capacity Block only an `instant` fleet launches. It asks once, replaces no node, and has no expiry: AWS's own end
is the schedule's (stop.py), and half an hour before the block's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Capacity, Disk, StackDefinition
from gpufleet.infra.program.boot.user_data import DATA_DEVICE, ROOT_DEVICE
from gpufleet.infra.program.resources.tags import named, tags
from gpufleet.job.contract.bucket import fleet_key

# An instant fleet may stay in `deleted_terminating` for hours after its nodes have gone
# (docs/decisions/2026-11-26-capacity-block.md): waited for in vain, and the next destroy finds it gone.
BLOCK_DELETE_TIMEOUT = "10m"
DELETE_TIMEOUT = "30m"  # the provider sleeps 5 minutes, then waits for `deleted`; its default of 10 is too short


class FleetComponent(pulumi.ComponentResource):
    """The launch template, and the fleet at 0 of a run with a fallback that is not over. `declare_fleet` adds the one
    that keeps a node, or several, alive until the run is over, `declare_known` what tells its nodes that it is known.
    """

    template: aws.ec2.LaunchTemplate
    fallback: aws.ec2.Fleet | None

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
        """`pools`: (type, zone) of what each fleet may launch. `depends_on`: all a node needs at boot, and what AWS may
        refuse. Template and fleets name little of it.
        """
        super().__init__("gpufleet:infra:Fleet", name, None, opts)
        label = named(tags(definition), f"gpufleet-{definition.name}-{definition.run.id}")
        self.template = aws.ec2.LaunchTemplate(
            f"gpufleet-{definition.name}",
            image_id=definition.fleet.ami,
            user_data=user_data_base64,
            update_default_version=True,
            iam_instance_profile=aws.ec2.LaunchTemplateIamInstanceProfileArgs(arn=profile_arn),
            # One or the other: they exclude each other.
            vpc_security_group_ids=[security_group_id] if definition.nodes == 1 else None,
            network_interfaces=interfaces(definition, security_group_id) if definition.nodes > 1 else None,
            instance_initiated_shutdown_behavior="terminate",  # `stop` would leave the disks billed
            metadata_options=aws.ec2.LaunchTemplateMetadataOptionsArgs(
                http_endpoint="enabled",
                http_tokens="required",
                # A container on a bridge network is one hop further: a command's, which has no role unless it asks.
                http_put_response_hop_limit=2 if definition.job.parameters.has_node_role else 1,
                instance_metadata_tags="enabled",  # the node reads its fleet's id there
            ),
            block_device_mappings=disks(definition),
            # Nothing else: what the fleet's service-linked role may not tag, network interfaces among them, makes every
            # launch fail, and volumes of spot nodes in a maintain fleet cannot be tagged from a template.
            tag_specifications=[aws.ec2.LaunchTemplateTagSpecificationArgs(resource_type="instance", tags=label)],
            tags=label,
            **_into_block(definition),
            # A run that goes on keeps its code, and the hops that this code needs.
            opts=pulumi.ResourceOptions(
                parent=self,
                depends_on=list(depends_on),
                ignore_changes=["userData", "metadataOptions"] if frozen else None,
            ),
        )
        self._name, self._frozen, self._bucket = name, frozen, bucket
        places = {capacity: [(kind, subnets[zone]) for kind, zone in some] for capacity, some in pools.items()}
        self._spec = (definition, self.template, places, valid_until, label)
        self.fallback = None
        if definition.fleet.falls_back and not over:
            self.fallback = _fleet(f"{name}-fallback-fleet", *self._spec, "on-demand", 0, [], parent=self)
        self.register_outputs({})

    def declare_fleet(self, depends_on: Sequence[pulumi.Resource]) -> aws.ec2.Fleet:
        """The fleet that launches nodes."""
        definition, *_ = self._spec
        # Ignored on a fleet that exists. One that has to be made again for a run that has begun already (the run
        # deleted it, and a refresh has just found out) starts nothing; but into a block, which replaces no node.
        target = 0 if self._frozen and definition.fleet.block is None else definition.nodes
        capacity = definition.fleet.capacity
        return _fleet(f"{self._name}-fleet", *self._spec, capacity, target, depends_on, parent=self)

    def declare_known(self, fleet: aws.ec2.Fleet, depends_on: Sequence[pulumi.Resource]) -> None:
        """The fleets' names in the bucket, once all is there on which they depend."""
        definition, *_ = self._spec
        for part, each in ((self._name, fleet), (f"{self._name}-fallback", self.fallback)):
            if each:
                aws.s3.BucketObjectv2(
                    f"{part}-known",
                    bucket=self._bucket,
                    key=each.id.apply(lambda id: f"{definition.run.id}/{fleet_key(id)}"),
                    content="The stack's state knows of this fleet.\n",
                    tags=tags(definition),
                    opts=pulumi.ResourceOptions(parent=self, depends_on=list(depends_on)),
                )


def _fleet(
    name: str,
    definition: StackDefinition,
    template: aws.ec2.LaunchTemplate,
    places: Mapping[Capacity, Sequence[tuple[str, pulumi.Input[str]]]],
    valid_until: str,
    label: Mapping[str, str],
    capacity: Capacity,
    target: int,
    depends_on: Sequence[pulumi.Resource],
    *,
    parent: pulumi.Resource,
) -> aws.ec2.Fleet:
    block = definition.fleet.block is not None
    return aws.ec2.Fleet(
        name,
        type="instant" if block else "maintain",
        launch_template_configs=[
            aws.ec2.FleetLaunchTemplateConfigArgs(
                launch_template_specification=aws.ec2.FleetLaunchTemplateConfigLaunchTemplateSpecificationArgs(
                    launch_template_id=template.id,
                    version=template.latest_version.apply(str),
                ),
                overrides=[
                    aws.ec2.FleetLaunchTemplateConfigOverrideArgs(instance_type=kind, subnet_id=subnet)
                    for kind, subnet in places[capacity]
                ],
            )
        ],
        target_capacity_specification=aws.ec2.FleetTargetCapacitySpecificationArgs(
            default_target_capacity_type="capacity-block" if block else capacity, total_target_capacity=target
        ),
        spot_options=spot_options(capacity),
        excess_capacity_termination_policy="termination",
        terminate_instances=True,  # the default leaves GPUs running after a destroy
        terminate_instances_with_expiration=None if block else True,
        replace_unhealthy_instances=False,
        valid_until=None if block else valid_until,
        tags=label,
        opts=pulumi.ResourceOptions(
            parent=parent,
            depends_on=list(depends_on),
            replacement_trigger=definition.run.id,
            delete_before_replace=True,  # the other order runs two GPUs on one run
            ignore_changes=[
                "validUntil",
                "targetCapacitySpecification.totalTargetCapacity",
                "launchTemplateConfigs",
                "tags",
                # What AWS answers may be spelled otherwise, and a difference here would replace a fleet.
                "targetCapacitySpecification",
                "spotOptions",
                "onDemandOptions",
                "excessCapacityTerminationPolicy",
                "validFrom",  # as onDemandOptions: not declared, but the provider takes it from AWS's answer
            ],
            custom_timeouts=pulumi.CustomTimeouts(delete=BLOCK_DELETE_TIMEOUT if block else DELETE_TIMEOUT),
        ),
    )


def interfaces(
    definition: StackDefinition, group: pulumi.Input[str]
) -> list[aws.ec2.LaunchTemplateNetworkInterfaceArgs]:
    """What each of several nodes has: its first network card, with a public address, or all of them without. The subnet
    is the override's. As AWS lays them out since 2026 (EC2 User Guide, efa-acc-inst-types): device 0 of the first card
    is a plain interface and device 1 its EFA, each further card has its EFA as device 0. An address can only be given
    to one interface: over one card that is both.
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
            security_groups=[group],
            associate_public_ip_address=None if every else "true",
            delete_on_termination="true",
        )
        for card, device, efa in places
    ]


def disks(definition: StackDefinition) -> list[aws.ec2.LaunchTemplateBlockDeviceMappingArgs]:
    """Root, and the data volume when the file names one."""
    mappings = [_mapping(ROOT_DEVICE, definition.storage.root, definition.account.kms_key)]
    if definition.storage.data:
        mappings.append(_mapping(DATA_DEVICE, definition.storage.data, definition.account.kms_key))
    return mappings


def _into_block(definition: StackDefinition) -> dict[str, Any]:
    """What a template says of the block that its nodes are launched into; nothing without one."""
    block = definition.fleet.block
    if block is None:
        return {}
    target = aws.ec2.LaunchTemplateCapacityReservationSpecificationCapacityReservationTargetArgs(
        capacity_reservation_id=block.reservation
    )
    return {
        "instance_market_options": aws.ec2.LaunchTemplateInstanceMarketOptionsArgs(market_type="capacity-block"),
        "capacity_reservation_specification": aws.ec2.LaunchTemplateCapacityReservationSpecificationArgs(
            capacity_reservation_target=target
        ),
    }


def spot_options(capacity: Capacity) -> aws.ec2.FleetSpotOptionsArgs | None:
    """Stated: the provider's default strategy is lowestPrice. No maintenance strategy: rebalancing runs two nodes."""
    if capacity != "spot":
        return None
    return aws.ec2.FleetSpotOptionsArgs(
        allocation_strategy="price-capacity-optimized", instance_interruption_behavior="terminate"
    )


def _mapping(device: str, disk: Disk, key: str | None) -> aws.ec2.LaunchTemplateBlockDeviceMappingArgs:
    return aws.ec2.LaunchTemplateBlockDeviceMappingArgs(
        device_name=device,
        ebs=aws.ec2.LaunchTemplateBlockDeviceMappingEbsArgs(
            volume_type="gp3",
            volume_size=disk.size_gib,
            iops=disk.iops,
            throughput=disk.throughput_mibps,
            delete_on_termination="true",
            # `encrypted` and a snapshot exclude each other: such a volume is encrypted as its snapshot is.
            encrypted=None if disk.snapshot else "true",
            kms_key_id=None if disk.snapshot else key,  # None: the account's default
            snapshot_id=disk.snapshot,
        ),
    )
