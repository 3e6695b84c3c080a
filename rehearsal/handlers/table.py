"""The class of a resource handler, and what all handlers share: checks, names, differences, the form of a state.

Properties are plain JSON values in the provider's own spelling (cidrBlock, tagsAll). A state contains the inputs as AWS
now has them, and properties that only AWS knows. This module does not depend on the engine: both the gRPC provider and
the in-process runner call it.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import boto3

Properties = dict[str, Any]
# the engine's mark for a value that it does not know yet (its RPC protocol)
UNKNOWN = "04da6b54-80e4-46f7-96ec-b56ff0331ba9"
SPELLED = {  # names that differ from AWS's by more than a capital letter
    "id": "ID",
    "sseAlgorithm": "SSEAlgorithm",
    "kmsMasterKeyId": "KMSMasterKeyID",
    "vpcSecurityGroupIds": "SecurityGroupIds",
    "securityGroups": "Groups",  # in a template's network interface
}
_BACK = {theirs: ours for ours, theirs in SPELLED.items()}
# These are strings in the provider, so that unset differs from false.
BOOLEANS = ("encrypted", "deleteOnTermination", "associatePublicIpAddress")


class UnsupportedError(Exception):
    """The program has declared something that this AWS does not have. This error is always reported, and never
    skipped.
    """


@dataclass(slots=True)
class Aws:
    """The boto3 clients of one account and region, each of which is made once. `environment`: the variables that a
    shell would export.
    """

    environment: Mapping[str, str]
    region: str
    _clients: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def client(self, service: str) -> Any:
        with self._lock:
            if service not in self._clients:
                self._clients[service] = boto3.client(
                    service,
                    region_name=self.region,
                    endpoint_url=self.environment["AWS_ENDPOINT_URL"],
                    aws_access_key_id=self.environment["AWS_ACCESS_KEY_ID"],
                    aws_secret_access_key=self.environment["AWS_SECRET_ACCESS_KEY"],
                )
            return self._clients[service]

    @property
    def ec2(self) -> Any:
        return self.client("ec2")

    @property
    def s3(self) -> Any:
        return self.client("s3")

    @property
    def iam(self) -> Any:
        return self.client("iam")

    def account(self) -> str:
        return str(self.client("sts").get_caller_identity()["Account"])

    def arn(self, service: str, resource: str) -> str:
        return f"arn:aws:{service}:{self.region}:{self.account()}:{resource}"


# a function of the id, the old state (or nothing) and the new inputs
Change = Callable[[Aws, str, Properties, Properties], Any]
# A function of the id and of the inputs or the state, which returns AWS's present state; None if the resource does not
# exist any more.
Read = Callable[[Aws, str, Properties], Properties | None]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResourceHandler:
    """One resource type over boto3. The resource type accepts only what our program declares; anything else is an
    error.
    """

    # the source of `replaces`: the ForceNew fields in terraform-provider-aws internal/service/, read 2026-11-21
    source: str
    create: Callable[[Aws, Properties], str]  # returns the id of the resource
    read: Read
    delete: Callable[[Aws, str, Properties], Any]
    update: Change | None = None
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()
    # properties (dotted paths for nested ones) whose change needs a new resource
    replaces: frozenset[str] = frozenset()
    computed: frozenset[str] = frozenset()  # properties that only AWS knows
    volatile: frozenset[str] = frozenset({"tagsAll"})  # computed properties that an update changes
    only_ours: frozenset[str] = frozenset()  # inputs that AWS does not keep: the state has their declared values
    # properties that our program never declares, but that the provider reads from AWS's answer
    answered: frozenset[str] = frozenset()
    allowed: Mapping[str, frozenset[str]] = field(default_factory=dict)  # enums, by property
    name: str | None = None  # the property that gets a unique name if the program gives none


def check(
    kind: str, handler: ResourceHandler, logical: str, old: Properties, new: Properties, seed: bytes
) -> tuple[Properties, list[tuple[str, str]]]:
    """The inputs with the name filled in, and their problems."""
    inputs = {key: value for key, value in new.items() if value is not None and not key.startswith("__")}
    accepted = handler.required | handler.optional
    failures = [
        (key, f"{kind} has no property {key!r} here; it has {', '.join(sorted(accepted))}")
        for key in sorted(set(inputs) - accepted)
    ]
    failures += [(key, f"{kind} needs {key!r}") for key in sorted(handler.required - set(inputs))]
    for path, values in handler.allowed.items():
        value = get(inputs, path)
        if value is not None and value != UNKNOWN and value not in values:
            failures.append((path, f"{kind}: {path} is {value!r}; allowed: {', '.join(sorted(values))}"))
    if handler.name and handler.name not in inputs:
        inputs[handler.name] = old.get(handler.name) or f"{logical}-{hashlib.sha256(seed).hexdigest()[:7]}"
    return inputs, failures


def diff(handler: ResourceHandler, state: Properties, new: Properties) -> dict[str, bool]:
    """Changed properties, each with whether the change needs a new resource. Nested properties are dotted paths."""
    changed: dict[str, bool] = {}
    known = handler.required | handler.optional | handler.answered
    for key in sorted(known & (set(state) | set(new))):
        if same(state.get(key), new.get(key)):
            continue
        nested = [path for path in handler.replaces if path.startswith(f"{key}.")]
        moved = [path for path in nested if not same(get(state, path), get(new, path))]
        if moved:
            changed.update(dict.fromkeys(moved, True))
        else:
            changed[key] = key in handler.replaces
    return changed


def state(handler: ResourceHandler, aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    """AWS's present values for the keys of `like`, in the form of `like`, and the provider's own properties. None if
    the resource does not exist any more.
    """
    live = handler.read(aws, resource_id, like)
    if live is None:
        return None
    result = {key: like[key] for key in handler.only_ours if key in like}
    for key, value in live.items():
        if key in handler.computed | handler.answered:
            result[key] = value
        elif key in like and value is not None:
            result[key] = shaped(value, like[key])
    return result


def written(kind: str, handler: ResourceHandler, aws: Aws, resource_id: str, inputs: Properties) -> Properties:
    """The state right after the inputs were written. Raises RefusedError if an input is missing in AWS. Otherwise a
    nested property that a handler ignores would look as if it had been written.
    """
    properties = state(handler, aws, resource_id, inputs)
    if properties is None:
        raise UnsupportedError(f"{kind} {resource_id} is gone right after it was written")
    if lost := [path for path in diff(handler, properties, inputs) if path.split(".")[0] in inputs]:
        raise UnsupportedError(f"{kind} {resource_id}: the embedded AWS has not taken {', '.join(lost)} as declared")
    return properties


def expected(handler: ResourceHandler, old: Properties, new: Properties) -> Properties:
    """The properties that a preview may promise: the inputs, and computed ones that the change does not affect."""
    keep = handler.computed - handler.volatile
    unknown = dict.fromkeys(handler.computed, UNKNOWN)
    return {**unknown, **{key: value for key, value in old.items() if key in keep}, **new}


def shaped(live: Any, like: Any) -> Any:
    """The part of `live` whose keys `like` has. AWS's answer has more properties, in another spelling."""
    if isinstance(like, Mapping) and isinstance(live, Mapping):
        return {key: shaped(live[key], like[key]) for key in like if live.get(key) is not None}
    if isinstance(like, list) and isinstance(live, list) and len(like) == len(live):
        return [shaped(one, other) for one, other in zip(live, like, strict=True)]
    if isinstance(like, str) and isinstance(live, str) and _same_json(like, live):
        return like
    return live


def same(one: Any, other: Any) -> bool:
    return bool(one == other) or (isinstance(one, str) and isinstance(other, str) and _same_json(one, other))


def get(properties: Any, path: str) -> Any:
    for part in path.split("."):
        properties = properties.get(part) if isinstance(properties, Mapping) else None
    return properties


def fields(names: str) -> frozenset[str]:
    return frozenset(names.split())


def api(name: str) -> str:
    """A property's name in AWS's spelling: cidrBlock is CidrBlock."""
    return SPELLED.get(name) or name[0].upper() + name[1:]


def to_api(value: Any, key: str = "") -> Any:
    """Properties in AWS's spelling."""
    if key == "tags":
        return tag_list(value)
    if isinstance(value, dict):
        return {api(name): to_api(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [to_api(item) for item in value]
    return value == "true" if key in BOOLEANS else value


def from_api(value: Any, key: str = "") -> Any:
    """AWS's answer in the provider's spelling."""
    if key == "tags":
        return tag_map(value)
    if isinstance(value, dict):
        named = {_BACK.get(name) or name[0].lower() + name[1:]: item for name, item in value.items()}
        return {name: from_api(item, name) for name, item in named.items()}
    if isinstance(value, list):
        return [from_api(item) for item in value]
    return str(value).lower() if isinstance(value, bool) and key in BOOLEANS else value


def tag_specification(kind: str, inputs: Properties) -> list[dict[str, Any]]:
    """TagSpecifications of a create call."""
    tags = inputs.get("tags")
    return [{"ResourceType": kind, "Tags": tag_list(tags)}] if tags else []


def tag_list(tags: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"Key": key, "Value": value} for key, value in sorted(tags.items())]


def tag_diff(old: Properties, new: Properties) -> tuple[list[str], dict[str, str]]:
    """The keys that were removed, and the tags that are new or changed."""
    before, after = old.get("tags") or {}, new.get("tags") or {}
    changed = {key: value for key, value in after.items() if before.get(key) != value}
    return [key for key in before if key not in after], changed


def tagged(tags: list[dict[str, str]] | None) -> Properties:
    """A state's properties for tags that AWS lists."""
    mapped = tag_map(tags)
    return {"tags": mapped, "tagsAll": mapped}


def tag_map(tags: list[dict[str, str]] | None) -> dict[str, str]:
    """The tags, without those that AWS itself adds, in the provider's form."""
    return {tag["Key"]: tag["Value"] for tag in tags or [] if not tag["Key"].startswith("aws:")}


def _same_json(one: str, other: str) -> bool:
    if not (one.startswith(("{", "[")) and other.startswith(("{", "["))):
        return False
    try:
        return bool(json.loads(one) == json.loads(other))
    except ValueError:
        return False
