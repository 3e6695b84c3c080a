"""What the tests of the embedded AWS declare by hand, where the program would declare it with Pulumi."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import boto3

from gpufleet.rehearsal.account import AMI_PARAMETERS, ami_id
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.gate import NODE_KEY, SECRET

AMI = next(iter(AMI_PARAMETERS))


def template(cloud: Cloud, **changes: Any) -> str:
    """A launch template like the program's; returns its id."""
    user_data = changes.pop("user_data", "#!/bin/bash\n")
    data = {
        "ImageId": ami_id(cloud.region, AMI),
        "UserData": base64.b64encode(user_data.encode()).decode(),
        "InstanceInitiatedShutdownBehavior": "terminate",
        "MetadataOptions": {"HttpTokens": "required", "InstanceMetadataTags": "enabled"},
        "TagSpecifications": [
            {"ResourceType": kind, "Tags": [{"Key": "gpufleet:run", "Value": "r1"}]} for kind in ("instance", "volume")
        ],
        "BlockDeviceMappings": [
            {
                "DeviceName": "/dev/xvda",
                "Ebs": {"VolumeSize": 100, "VolumeType": "gp3", "Encrypted": True, "DeleteOnTermination": True},
            }
        ],
        **changes,
    }
    name = f"t{len(cloud.client('ec2').describe_launch_templates()['LaunchTemplates'])}"
    made = cloud.client("ec2").create_launch_template(LaunchTemplateName=name, LaunchTemplateData=data)
    return str(made["LaunchTemplate"]["LaunchTemplateId"])


def subnets(cloud: Cloud) -> list[str]:
    """Two subnets in two zones."""
    ec2 = cloud.client("ec2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    return [
        ec2.create_subnet(VpcId=vpc, CidrBlock=f"10.0.{n}.0/24", AvailabilityZone=f"{cloud.region}{zone}")["Subnet"][
            "SubnetId"
        ]
        for n, zone in enumerate("ab")
    ]


def fleet(cloud: Cloud, template_id: str | None = None, **changes: Any) -> str:
    """A maintain fleet of one spot node in two zones; returns its id. Nothing has launched before the next tick."""
    request: dict[str, Any] = {
        "Type": "maintain",
        "TargetCapacitySpecification": {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": "spot"},
        "SpotOptions": {"AllocationStrategy": "price-capacity-optimized"},
        "ExcessCapacityTerminationPolicy": "termination",
        "TerminateInstancesWithExpiration": True,
        "LaunchTemplateConfigs": [
            {
                "LaunchTemplateSpecification": {
                    "LaunchTemplateId": template_id or template(cloud),
                    "Version": "$Latest",
                },
                "Overrides": [{"InstanceType": "g5.2xlarge", "SubnetId": subnet} for subnet in subnets(cloud)],
            }
        ],
        "TagSpecifications": [{"ResourceType": "fleet", "Tags": [{"Key": "gpufleet:run", "Value": "r1"}]}],
        **changes,
    }
    return str(cloud.client("ec2").create_fleet(**request)["FleetId"])


def describe(cloud: Cloud, fleet_id: str) -> dict[str, Any]:
    """DescribeFleets of one."""
    found: dict[str, Any] = cloud.client("ec2").describe_fleets(FleetIds=[fleet_id])["Fleets"][0]
    return found


def events(cloud: Cloud, fleet_id: str) -> list[tuple[str, str]]:
    """(type, sub-type) of everything in the fleet's history."""
    start = "2020-01-01T00:00:00Z"
    records = cloud.client("ec2").describe_fleet_history(FleetId=fleet_id, StartTime=start)["HistoryRecords"]
    return [(record["EventType"], record["EventInformation"]["EventSubType"]) for record in records]


def living(cloud: Cloud) -> list[str]:
    """Ids of the instances that EC2 says are running."""
    filters = [{"Name": "instance-state-name", "Values": ["running"]}]
    found = cloud.client("ec2").describe_instances(Filters=filters)["Reservations"]
    return [instance["InstanceId"] for reservation in found for instance in reservation["Instances"]]


def role(cloud: Cloud, statements: Sequence[dict[str, Any]]) -> None:
    """An instance profile "node" whose role has these statements."""
    iam = cloud.client("iam")
    policy = {"Version": "2012-10-17", "Statement": list(statements)}
    iam.create_role(RoleName="node", AssumeRolePolicyDocument="{}")
    iam.put_role_policy(RoleName="node", PolicyName="rights", PolicyDocument=json.dumps(policy))
    iam.create_instance_profile(InstanceProfileName="node")
    iam.add_role_to_instance_profile(InstanceProfileName="node", RoleName="node")


def as_node(cloud: Cloud, service: str, instance: str = "") -> Any:
    """A boto3 client with the credentials of a node's role, the first one's unless another is named."""
    return boto3.client(
        service,
        region_name=cloud.region,
        endpoint_url=cloud.endpoint,
        aws_access_key_id=NODE_KEY,
        aws_secret_access_key=SECRET,
        aws_session_token=instance or cloud.instances()[0].id,
    )
