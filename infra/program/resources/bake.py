"""Declares what a bake keeps: an AMI of its builder's disk or a snapshot of its data volume, and the schedule that
deletes it.

These resources replace the builder in its own stack: the engine makes them first, and deletes the builder afterwards. A
destroy deletes an AMI together with its snapshot.
"""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.resources.declare import Surroundings, with_provider
from gpufleet.infra.program.resources.stop import FleetStop, one_time
from gpufleet.infra.program.resources.tags import DELETE_AFTER, named, tags

DELETE = "delete"  # the schedule's name within its group
DELETE_SNAPSHOT = "arn:aws:scheduler:::aws-sdk:ec2:deleteSnapshot"
DEREGISTER = "arn:aws:scheduler:::aws-sdk:ec2:deregisterImage"  # a universal target (Scheduler User Guide, 2026-11-27)


class BakedImage(pulumi.ComponentResource):
    """The AMI of the instance `builder`, with `until` (UTC) in a tag."""

    image: aws.ec2.AmiFromInstance

    def __init__(
        self, name: str, definition: StackDefinition, *, builder: str, until: str, opts: pulumi.ResourceOptions
    ) -> None:
        super().__init__("gpufleet:infra:BakedImage", name, None, opts)
        label = f"gpufleet-{definition.name}"
        self.image = aws.ec2.AmiFromInstance(
            label,
            name=f"{label}-{builder}",
            description="holds the images of a gpufleet job",
            source_instance_id=builder,
            # The instance is not rebooted, because a reboot would start the builder again. Nothing is lost, because its
            # command writes all buffers before it reports that it waits.
            snapshot_without_reboot=True,
            tags=named({**tags(definition), DELETE_AFTER: until}, label),
            opts=pulumi.ResourceOptions(parent=self),
        )
        self.register_outputs({})


def declare_bake(definition: StackDefinition, described: dict[str, Any]) -> dict[str, pulumi.Output[str]]:
    """Declares the AMI or snapshot that is `described`, and the schedule that deletes it; returns its outputs."""
    if volume := described.get("volume"):
        return {"snapshot": _declare_snapshot(definition, volume, described["until"]).id}
    image = _declare_image(definition, described["builder"], described["until"])
    return {"ami": image.id, "snapshot": image.root_snapshot_id}


def _declare_snapshot(definition: StackDefinition, volume: str, until: str) -> aws.ebs.Snapshot:
    options, region = with_provider(Surroundings(), definition.fleet.region), definition.fleet.region
    label = f"gpufleet-{definition.name}"
    snapshot = aws.ebs.Snapshot(
        "data",
        volume_id=volume,
        description="data of a gpufleet job",
        tags=named({**tags(definition), DELETE_AFTER: until}, label),
        opts=options,
    )
    rights = snapshot.id.apply(lambda id: [_may_delete_snapshot(region, id)])
    request = snapshot.id.apply(lambda id: json.dumps({"SnapshotId": id}))
    stop = FleetStop("stop", definition, statements=rights, opts=options)
    _delete(stop, "a snapshot of gpufleet bake", until, DELETE_SNAPSHOT, request, snapshot.id)
    return snapshot


def _may_delete_snapshot(region: str, snapshot: str) -> dict[str, Any]:
    return {
        "Sid": "DeleteOwnSnapshot",
        "Effect": "Allow",
        "Action": "ec2:DeleteSnapshot",
        "Resource": f"arn:aws:ec2:{region}::snapshot/{snapshot}",
    }


def _declare_image(definition: StackDefinition, builder: str, until: str) -> aws.ec2.AmiFromInstance:
    options, region = with_provider(Surroundings(), definition.fleet.region), definition.fleet.region
    image = BakedImage("baked", definition, builder=builder, until=until, opts=options).image
    rights = pulumi.Output.all(image.id, image.root_snapshot_id).apply(lambda ids: delete_statements(region, *ids))
    request = image.id.apply(lambda id: json.dumps({"ImageId": id, "DeleteAssociatedSnapshots": True}))
    stop = FleetStop("stop", definition, statements=rights, opts=options)
    _delete(stop, "an AMI of gpufleet bake and its snapshot", until, DEREGISTER, request, image.id)
    return image


def _delete(
    stop: FleetStop, what: str, until: str, target: str, request: pulumi.Output[str], id: pulumi.Output[str]
) -> None:
    """Declares the schedule that sends the request at `until`; a new `id` replaces the schedule."""
    one_time(
        "delete-schedule",
        name=DELETE,
        stop=stop,
        description=f"deletes {what}",
        at=datetime.fromisoformat(until),
        target=target,
        input=request,
        depends_on=stop.ready,
        trigger=id,
        parent=stop,
    )


def delete_statements(region: str, image: str, snapshot: str) -> list[dict[str, Any]]:
    """The rights of the schedule's role: to delete this AMI and its snapshot."""
    return [
        {
            "Sid": "DeleteOwnImage",
            "Effect": "Allow",
            "Action": ["ec2:DeregisterImage", "ec2:DeleteSnapshot"],
            "Resource": [f"arn:aws:ec2:{region}::image/{image}", f"arn:aws:ec2:{region}::snapshot/{snapshot}"],
        }
    ]
