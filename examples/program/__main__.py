"""A team's program: its own network, and two training runs in it and beside it. docs/api.md explains the component."""

from pathlib import Path

import pulumi
import pulumi_aws as aws
import yaml

import gpufleet

ohio = aws.Provider("ohio", region="us-east-2")
here = pulumi.ResourceOptions(provider=ohio)

vpc = aws.ec2.Vpc("team", cidr_block="10.20.0.0/16", enable_dns_support=True, opts=here)
gateway = aws.ec2.InternetGateway("team", vpc_id=vpc.id, opts=here)
table = aws.ec2.RouteTable("team", vpc_id=vpc.id, opts=here)
aws.ec2.Route("out", route_table_id=table.id, destination_cidr_block="0.0.0.0/0", gateway_id=gateway.id, opts=here)
subnets = {}
for index, zone in enumerate(("us-east-2a", "us-east-2b")):
    subnet = aws.ec2.Subnet(
        zone,
        vpc_id=vpc.id,
        availability_zone=zone,
        cidr_block=f"10.20.{index}.0/24",
        map_public_ip_on_launch=True,
        opts=here,
    )
    aws.ec2.RouteTableAssociation(zone, subnet_id=subnet.id, route_table_id=table.id, opts=here)
    subnets[zone] = subnet.id

# A definition from a file, in the team's network, tagged as the team tags.
base = gpufleet.TrainingRun(
    "base",
    "training.yaml",
    vpc_id=vpc.id,
    subnets=subnets,
    tags={"CostCenter": "1234"},
    opts=pulumi.ResourceOptions(provider=ohio),
)

# The same as a mapping, with something else in it; this run has a network and a provider of its own.
definition = yaml.safe_load(Path("training.yaml").read_text(encoding="utf-8"))
definition["fleet"] |= {"instance_types": ["g6e.2xlarge"], "capacity": "on-demand"}
faster = gpufleet.TrainingRun("faster", definition)

# The bill is there at once, in numbers: a program can decide by it.
budget = 10.0
planned = sum(run.bill.usd.p90 for run in (base, faster))
if planned > budget:
    raise pulumi.RunError(f"the runs may cost {planned:.2f} USD, and the budget is {budget:.2f}")

for run in (base, faster):
    pulumi.export(run.bill.stack, {"fleet": run.fleet_id, "results": run.run_prefix, "usd_p90": run.bill.usd.p90})
