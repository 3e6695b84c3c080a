"""Implements AWS actions that moto does not have or answers wrongly. These actions are used only for accounts that
belong to a Cloud. Each action answers in the API's own spelling, and moto's serializers write the protocol. EC2 refuses
to delete a resource in use. moto would delete it, so this module refuses such a request before moto sees it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from xml.etree import ElementTree

from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.models.amis import Ami
from moto.ec2.models.security_groups import SecurityGroupRule
from moto.ec2.responses import EC2Response
from moto.iam.access_control import IAMPolicy, PermissionResult
from moto.s3.models import FakeBucket
from moto.s3.responses import S3Response
from moto.servicequotas.responses import ServiceQuotasResponse
from moto.stepfunctions.responses import StepFunctionResponse

from gpufleet.rehearsal.account import QUOTAS, deregister_image, spot_price, zone_ids
from gpufleet.rehearsal.controller import FleetController


def _refuse_subnet(backend: Any, asked: dict[str, Any]) -> None:
    """DeleteSubnet fails while the subnet has a network interface. Its route table associations are deleted with it."""
    subnet_id = asked["SubnetId"]
    if any(interface.subnet.id == subnet_id for interface in backend.enis.values()):
        raise _violation(f"The subnet '{subnet_id}' has dependencies and cannot be deleted.")
    for table in backend.route_tables.values():
        mine = [key for key, inside in table._associations.items() if inside == subnet_id]
        for key in mine:
            del table._associations[key]


def _forget_route_table(backend: Any, asked: dict[str, Any]) -> None:
    """DeleteRouteTable also removes the table from gateway endpoints, which moto could not delete otherwise."""
    table = backend.route_tables.get(asked["RouteTableId"])
    if table is not None and not table._associations:
        for endpoint in backend.vpc_end_points.values():
            endpoint.route_table_ids = [table_id for table_id in endpoint.route_table_ids or [] if table_id != table.id]


def _forget_nat_interface(backend: Any, asked: dict[str, Any]) -> None:
    """Deletes the gateway's interface, as AWS does. moto leaves it, and its subnet would stay in use."""
    if (nat := backend.nat_gateways.get(asked["NatGatewayId"])) is not None:
        backend.enis.pop(nat._eni.id, None)


def _refuse_security_group(backend: Any, asked: dict[str, Any]) -> None:
    """DeleteSecurityGroup fails while an interface uses the group or a rule of another group names it."""
    group_id = asked.get("GroupId")
    worn = any(group.id == group_id for interface in backend.enis.values() for group in interface.group_set)
    named = any(
        (rule.source_group or {}).get("GroupId") == group_id
        for groups in backend.groups.values()
        for other in groups.values()
        if other.id != group_id
        for rule in (*other.ingress_rules, *other.egress_rules)
    )
    if worn or named:
        raise _violation(f"resource {group_id} has a dependent object")


def _refuse_gateway(backend: Any, asked: dict[str, Any]) -> None:
    """DetachInternetGateway fails while a machine in the VPC has a public address."""
    vpc_id = asked["VpcId"]
    if any(interface.subnet.vpc_id == vpc_id and interface.public_ip for interface in backend.enis.values()):
        raise _violation(
            f"Network {vpc_id} has some mapped public address(es). Please unmap those public address(es) before "
            "detaching the gateway."
        )


def _refuse_vpc(backend: Any, asked: dict[str, Any]) -> None:
    """DeleteVpc fails while the VPC contains a gateway, an endpoint or a security group that a user made. moto itself
    checks only subnets and route tables.
    """
    vpc_id = asked["VpcId"]
    inside = (
        *(gateway for gateway in backend.internet_gateways.values() if gateway.vpc and gateway.vpc.id == vpc_id),
        *(
            endpoint
            for endpoint in backend.vpc_end_points.values()
            if endpoint.vpc_id == vpc_id and endpoint.state != "deleted"
        ),
        *(group for group in backend.groups[vpc_id].values() if group.name != "default"),
    )
    if inside:
        raise _violation(f"The vpc '{vpc_id}' has dependencies and cannot be deleted.")


_REFUSALS = {
    "delete_subnet": _refuse_subnet,
    "delete_route_table": _forget_route_table,
    "delete_nat_gateway": _forget_nat_interface,
    "delete_security_group": _refuse_security_group,
    "detach_internet_gateway": _refuse_gateway,
    "delete_vpc": _refuse_vpc,
}


def _violation(message: str) -> EC2ClientError:
    return EC2ClientError("DependencyViolation", message)


FLEETS: dict[str, FleetController] = {}  # the controller that answers for each account


Action = Callable[[FleetController, Any], Any]  # a function of the account's fleets and moto's response


def _of_fleets(method: Callable[[FleetController, str, dict[str, Any]], dict[str, Any]]) -> Action:
    def action(fleets: FleetController, response: Any) -> Any:
        response.error_on_dryrun()
        return ActionResult(method(fleets, response.region, _params(response)))

    return action


def _params(response: Any) -> dict[str, Any]:
    return {key: value for key, value in response.params.items() if value is not None}


def _describe_spot_price_history(fleets: FleetController, response: Any) -> Any:
    params = _params(response)
    filters = {f["Name"]: f["Values"] for f in params.get("Filters") or []}
    kinds = params.get("InstanceTypes") or filters.get("instance-type") or []
    zones = [params["AvailabilityZone"]] if params.get("AvailabilityZone") else filters.get("availability-zone")
    # The price that applies at the start of the requested time was set before this start.
    at = params.get("StartTime") or fleets.clock.now()
    wanted = {"instance-type": kinds, **({"location": zones} if zones else {})}
    offered = response.ec2_backend.describe_instance_type_offerings("availability-zone", wanted)
    history = [
        {
            "InstanceType": offer["InstanceType"],
            "AvailabilityZone": offer["Location"],
            "ProductDescription": "Linux/UNIX",
            "SpotPrice": str(spot_price(offer["InstanceType"], offer["Location"])),
            "Timestamp": at,
        }
        for offer in offered
    ]
    return ActionResult({"SpotPriceHistory": history})


def _describe_capacity_reservations(fleets: FleetController, response: Any) -> Any:
    wanted = _params(response).get("CapacityReservationIds") or []
    blocks, now = fleets.launcher.blocks, fleets.clock.now()
    if missing := [name for name in wanted if name not in blocks]:
        raise EC2ClientError(
            "InvalidCapacityReservationId.NotFound", f"The capacity reservation {missing[0]} does not exist"
        )
    described = [
        {
            "CapacityReservationId": block.id,
            "InstanceType": block.type,
            "InstancePlatform": "Linux/UNIX",
            "AvailabilityZone": block.zone,
            "AvailabilityZoneId": zone_ids(block.zone[:-1])[block.zone],
            "ReservationType": "capacity-block",
            "State": block.state(now),
            "TotalInstanceCount": block.count,
            "AvailableInstanceCount": 0 if now < block.start else block.count - fleets.launcher.in_block(block.id),
            "StartDate": block.start,
            "EndDate": block.end,
            "EndDateType": "limited",
            "InstanceMatchCriteria": "targeted",
        }
        for block in (blocks[name] for name in wanted or blocks)
    ]
    return ActionResult({"CapacityReservations": described})


def _get_ebs_default_kms_key_id(fleets: FleetController, response: Any) -> Any:
    return ActionResult({"KmsKeyId": "alias/aws/ebs"})  # AWS gives this answer for an account that never chose a key


def _terminate_instances(fleets: FleetController, response: Any) -> Any:
    result = _MOTO["terminate_instances"](response)
    fleets.tick()
    return result


def _create_image(fleets: FleetController, response: Any) -> Any:
    """CreateImage: moto's answer, with the builder's root disk as the AMI's snapshot. An instance that starts from the
    AMI then has what was on that disk.
    """
    result = _MOTO["create_image"](response)
    ec2, builder = response.ec2_backend, fleets.instances[_params(response)["InstanceId"]]
    image, source = ec2.amis[result.result["ImageId"]], ec2.amis[builder.image]
    image.root_device_name, image.root_device_type = source.root_device_name, source.root_device_type
    attached = (volume.attachment for volume in ec2.volumes.values() if volume.attachment)
    disks = {volume.device: volume.volume for volume in attached if volume.instance.id == builder.id}
    image.architecture, image.ebs_snapshot.volume = source.architecture, disks[source.root_device_name]
    fleets.on_image(image.id, builder)
    return result


def _deregister_image(fleets: FleetController, response: Any) -> Any:
    """DeregisterImage: moto would keep the snapshots even if asked to delete them."""
    asked, ec2 = _params(response), response.ec2_backend
    with_snapshots = str(asked.get("DeleteAssociatedSnapshots")).lower() == "true"
    deregister_image(ec2, asked["ImageId"], with_snapshots=with_snapshots)
    return ActionResult({"Return": True})


def _unless_in_use(name: str, refuse: Callable[[Any, dict[str, Any]], None]) -> Action:
    """Calls moto's own action, unless `refuse` raises an error."""

    def action(fleets: FleetController, response: Any) -> Any:
        refuse(response.ec2_backend, _params(response))
        return _MOTO[name](response)

    return action


def _create_launch_template(fleets: FleetController, response: Any) -> Any:
    """CreateLaunchTemplate: moto would also put the template's own tags on what it launches."""
    result = _MOTO["create_launch_template"](response)
    data = response.ec2_backend.get_launch_template_by_name(_params(response)["LaunchTemplateName"]).versions[0].data
    launched = [entry for entry in data.get("TagSpecifications", []) if entry["ResourceType"] != "launch-template"]
    data["TagSpecifications"] = launched
    return result


def _describe_launch_templates(fleets: FleetController, response: Any) -> Any:
    """DescribeLaunchTemplates: moto would show only the tags that a template had when it was created."""
    for template in response.ec2_backend.launch_templates.values():
        template.tags = template.get_tags()
    return _MOTO["describe_launch_templates"](response)


def _describe_tags(fleets: FleetController, response: Any) -> Any:
    """DescribeTags: moto's answer and the tags of fleets, which moto does not know."""
    wanted = {criterion["Name"]: set(criterion["Values"]) for criterion in _params(response).get("Filters") or []}
    if wanted.get("resource-type") != {"fleet"}:
        return _MOTO["describe_tags"](response)
    tags = [
        tag
        for tag in fleets.described_tags(response.region)
        if all(tag["Value"] in values for name, values in wanted.items() if name == f"tag:{tag['Key']}")
        and all(tag["Key"] == name[4:] for name in wanted if name.startswith("tag:"))
    ]
    return ActionResult({"Tags": tags})


def _modify_security_group_rules(fleets: FleetController, response: Any) -> Any:
    """ModifySecurityGroupRules: AWS accepts a rule for all protocols without ports, but moto requires ports."""
    for rule in _params(response).get("SecurityGroupRules") or []:
        if rule["SecurityGroupRule"].get("IpProtocol") == "-1":
            rule["SecurityGroupRule"].setdefault("FromPort", -1)
            rule["SecurityGroupRule"].setdefault("ToPort", -1)
    return _MOTO["modify_security_group_rules"](response)


def _validate_state_machine(fleets: FleetController, response: Any) -> Any:
    """ValidateStateMachineDefinition: checks that it is JSON and that its first state exists."""
    try:
        machine = json.loads(response._get_param("definition"))
        wrong = "" if machine["StartAt"] in machine["States"] else f"no state is called {machine['StartAt']}"
    except (ValueError, TypeError, KeyError) as error:
        wrong = str(error)
    diagnostic = {"severity": "ERROR", "code": "SCHEMA_VALIDATION_FAILED", "message": wrong}
    return ActionResult(
        {"result": "FAIL" if wrong else "OK", "diagnostics": [diagnostic] if wrong else [], "truncated": False}
    )


def _list_state_machine_versions(fleets: FleetController, response: Any) -> Any:
    machine = response.stepfunction_backend.describe_state_machine(response._get_param("stateMachineArn"))
    versions = [
        {"stateMachineVersionArn": version.arn, "creationDate": version.creation_date}
        for version in machine.versions.values()
    ]
    return ActionResult({"stateMachineVersions": versions})


def _quota(fleets: FleetController, code: str) -> dict[str, Any]:
    name = QUOTAS[code]
    return {
        "ServiceCode": "ec2",
        "QuotaCode": code,
        "QuotaName": name,
        "Value": fleets.launcher.quotas[code],
        "Unit": "None",
        "Adjustable": True,
    }


def _get_service_quota(fleets: FleetController, response: Any) -> Any:
    asked = json.loads(response.body)
    if asked.get("ServiceCode") != "ec2" or asked.get("QuotaCode") not in fleets.launcher.quotas:
        return _MOTO["get_service_quota"](response)
    return json.dumps({"Quota": _quota(fleets, asked["QuotaCode"])})


def _list_service_quotas(fleets: FleetController, response: Any) -> Any:
    asked = json.loads(response.body)
    codes = fleets.launcher.quotas if asked.get("ServiceCode") == "ec2" else ()
    return json.dumps({"Quotas": [_quota(fleets, code) for code in codes]})


_MOTO: dict[str, Any] = {}  # moto's own function of each action; None if moto has none


def _replace(cls: type[Any], name: str, action: Action) -> None:
    before: Any = getattr(cls, name, None)
    _MOTO[name] = before

    def answer(response: Any) -> Any:
        fleets = FLEETS.get(response.current_account)
        return action(fleets, response) if fleets else before(response)

    setattr(cls, name, answer)


_EC2: dict[str, Action] = {
    "create_fleet": _of_fleets(FleetController.create),
    "modify_fleet": _of_fleets(FleetController.modify),
    "delete_fleets": _of_fleets(FleetController.delete),
    "describe_fleets": _of_fleets(FleetController.describe),
    "describe_fleet_instances": _of_fleets(FleetController.describe_instances),
    "describe_fleet_history": _of_fleets(FleetController.describe_history),
    "describe_capacity_reservations": _describe_capacity_reservations,
    "describe_spot_price_history": _describe_spot_price_history,
    "get_ebs_default_kms_key_id": _get_ebs_default_kms_key_id,
    "terminate_instances": _terminate_instances,
    "create_image": _create_image,
    "deregister_image": _deregister_image,
    "create_launch_template": _create_launch_template,
    "describe_launch_templates": _describe_launch_templates,
    "describe_tags": _describe_tags,
    "modify_security_group_rules": _modify_security_group_rules,
    **{name: _unless_in_use(name, refuse) for name, refuse in _REFUSALS.items()},
}
for _name, _action in _EC2.items():
    _replace(EC2Response, _name, _action)
_replace(ServiceQuotasResponse, "get_service_quota", _get_service_quota)
_replace(ServiceQuotasResponse, "list_service_quotas", _list_service_quotas)

_replace(StepFunctionResponse, "validate_state_machine_definition", _validate_state_machine)
_replace(StepFunctionResponse, "list_state_machine_versions", _list_state_machine_versions)


def _rule_description(rule: SecurityGroupRule) -> str | None:
    """The description of a rule; moto forgets it if the rule names a group."""
    description: str | None = rule.ip_range.get("Description") or rule.source_group.get("Description")
    return description


SecurityGroupRule.description = property(_rule_description)  # type: ignore[assignment]


_moto_mappings: Any = vars(Ami)["block_device_mappings"].fget


def _mappings(image: Ami) -> Any:
    """The disks of an AMI; in moto each of them has 15 GiB."""
    (root,) = _moto_mappings(image)
    return [{**root, "Ebs": {**root["Ebs"], "VolumeSize": image.ebs_snapshot.volume.size}}]


Ami.block_device_mappings = property(_mappings)  # type: ignore[assignment]

_moto_bucket_put = S3Response._bucket_response_put


def _bucket_put(response: S3Response, request: Any, bucket: str, query: dict[str, Any]) -> Any:
    """CreateBucket, with the tags that moto ignores."""
    answer = _moto_bucket_put(response, request, bucket, query)
    if response.data.get("Action") == "CreateBucket" and response.current_account in FLEETS and response.body:
        tags = {
            tag.findtext("{*}Key", ""): tag.findtext("{*}Value", "")
            for tag in ElementTree.fromstring(response.body).iterfind("{*}Tags/{*}Tag")
        }
        if tags:
            response.backend.put_bucket_tagging(bucket, tags)
    return answer


S3Response._bucket_response_put = _bucket_put  # type: ignore[method-assign, assignment]

_moto_get_permission = FakeBucket.get_permission


def _get_permission(bucket: FakeBucket, action: str, resource: str) -> Any:
    """What a bucket policy allows, if requests over loopback are treated as encrypted. moto does not know
    aws:SecureTransport, so a policy that demands TLS would refuse everything.
    """
    if bucket.account_id not in FLEETS or bucket.policy is None:
        return _moto_get_permission(bucket, action, resource)
    policy = json.loads(bucket.policy)
    plain_http = {"Bool": {"aws:SecureTransport": "false"}}
    policy["Statement"] = [one for one in policy["Statement"] if one.get("Condition") != plain_http]
    if not policy["Statement"]:
        return PermissionResult.NEUTRAL
    return IAMPolicy(json.dumps(policy)).is_action_permitted(action, resource)


FakeBucket.get_permission = _get_permission  # type: ignore[method-assign, assignment]
