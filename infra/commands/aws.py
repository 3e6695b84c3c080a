"""What the commands share about AWS: clients, finding what carries a run's tags, refusals turned into sentences."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from functools import cache
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import boto3
from botocore import exceptions
from botocore.config import Config
from botocore.parsers import ResponseParserError

from infra.commands import removal
from infra.definition import StackDefinition
from infra.errors import AwsRefused
from infra.resources.tags import OWNER_TAG, RUN_TAG, STACK_TAG
from job import atomic
from job.contract.bucket import GRAPHS, INPUTS
from job.text import stamp

ENDED = ("deleted", "deleted_running", "deleted_terminating")  # fleet states that launch nothing more
ENDING_S = 300.0  # from done.json to a fleet at 0, or to a node's last try
NO_RUN = (INPUTS, GRAPHS)  # folders of a stack's bucket that are no run's
_CONFIG = Config(
    connect_timeout=5,
    read_timeout=60,
    retries={"mode": "standard", "total_max_attempts": 4},
    user_agent_extra="gpufleet",
)
# What decides who we are; the rest of the environment is read for each client.
_IDENTITY = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip
_DENIED = ("AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthorizationError", "403")
_BAD_KEYS = (
    "AuthFailure", "InvalidClientTokenId", "InvalidAccessKeyId", "UnrecognizedClientException",
    "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException", "RequestExpired",
    "InvalidSignatureException", "RequestTimeTooSkewed", "RequestInTheFuture",
)  # fmt: skip
_SKEW = timedelta(minutes=5)  # AWS refuses a signature that is older or newer (S3 and IAM, 15 min)


def client(service: str, region: str) -> Any:
    """A boto3 client with bounded waits. The environment counts as it is now: AWS_ENDPOINT_URL too."""
    try:
        made = _session(*map(os.environ.get, _IDENTITY)).client(service, region_name=region, config=_CONFIG)
        urlsplit(made.meta.endpoint_url).port  # noqa: B018 - else a wrong one is found out within the first request
        return made
    except ValueError as error:  # botocore's own, for an address that is none
        raise AwsRefused(
            f"AWS could not be asked: {error}. Check AWS_ENDPOINT_URL and endpoint_url in AWS's configuration file: "
            "http:// or https://, a host and a port, as `gpufleet cloud` prints it; unset for real AWS."
        ) from error


@cache
def _session(*identity: str | None) -> boto3.session.Session:
    """A session per identity: it caches credentials for good, and reading a service's description takes time."""
    return boto3.session.Session()


def refusal(error: Exception) -> AwsRefused | None:
    """The sentence for a botocore error: what was refused, and what to do. None for any other error."""
    if isinstance(error, exceptions.NoCredentialsError | exceptions.PartialCredentialsError):
        return AwsRefused(
            "there are no AWS credentials. Run `aws configure sso` or `aws configure`, or set AWS_PROFILE; "
            "without an account, `make rehearse` and `gpufleet cost` still work."
        )
    if isinstance(error, exceptions.ProfileNotFound | exceptions.ConfigNotFound):
        return AwsRefused(f"{error}. `aws configure list-profiles` shows what there is; AWS_PROFILE chooses.")
    if isinstance(
        error, exceptions.TokenRetrievalError | exceptions.SSOTokenLoadError | exceptions.UnauthorizedSSOTokenError
    ):
        return AwsRefused(f"the sign-in has expired ({error}). Run `aws sso login`.")
    if isinstance(error, exceptions.ConnectionError | exceptions.HTTPClientError):
        return AwsRefused(
            f"AWS cannot be reached ({error}). Check the network, a proxy (HTTPS_PROXY), and AWS_ENDPOINT_URL: "
            "it must be unset for real AWS, and `gpufleet cloud` must be running where it is set."
        )
    if isinstance(error, ResponseParserError):
        return AwsRefused(
            "what answered is not AWS: its answer is not XML or JSON. Check HTTPS_PROXY and AWS_ENDPOINT_URL."
        )
    if isinstance(error, exceptions.ClientError):
        return _client_refusal(error)
    ours = exceptions.ParamValidationError | exceptions.OperationNotPageableError  # a mistake of this program
    if isinstance(error, exceptions.BotoCoreError) and not isinstance(error, ours):
        return AwsRefused(f"AWS could not be asked: {error}")
    return None


def code(error: exceptions.ClientError) -> str:
    """NoSuchKey, UnauthorizedOperation, ..."""
    return str(error.response.get("Error", {}).get("Code", ""))


def denied(error: exceptions.ClientError) -> bool:
    """Whether the caller's own rights are what is missing."""
    return code(error) in _DENIED


def _client_refusal(error: exceptions.ClientError) -> AwsRefused:
    message = str(error.response.get("Error", {}).get("Message", "")).strip()
    action = error.operation_name
    if denied(error):
        return AwsRefused(
            f"AWS does not let you call {action}: {message} Ask for that action for your user or role; "
            "`aws sts get-caller-identity` says who you are."
        )
    if code(error) in _BAD_KEYS and (times := _clocks(error, message)):
        ours, theirs = times
        side = "behind" if ours < theirs else "ahead"
        return AwsRefused(
            f"this computer's clock is {abs(ours - theirs)} {side}: it says {stamp(ours)}, AWS says {stamp(theirs)}. "
            "Set it: `sudo hwclock -s` in WSL, which loses time while Windows sleeps; elsewhere in the system's "
            "settings (`sudo timedatectl set-ntp true`)."
        )
    if code(error) in _BAD_KEYS:
        return AwsRefused(
            f"AWS does not accept the credentials ({code(error)}: {message}) Sign in again (`aws sso login`) or set "
            "AWS_PROFILE; with AWS_ENDPOINT_URL set, use the keys that `gpufleet cloud` printed."
        )
    return AwsRefused(f"AWS answered {code(error)} to {action}: {message}")


def _clocks(error: exceptions.ClientError, message: str) -> tuple[datetime, datetime] | None:
    """(this computer's time, AWS's) where they are too far apart: as the message names them ("expired: OURS is now
    earlier than LIMIT (THEIRS - 15 min.)"), else by the date of the answer.
    """
    named = [datetime.strptime(each, "%Y%m%dT%H%M%S%z") for each in re.findall(r"\d{8}T\d{6}Z", message)]
    answered = error.response.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if len(named) == 3:
        ours, _, theirs = named
    elif answered:
        ours, theirs = datetime.now(UTC).replace(microsecond=0), parsedate_to_datetime(answered)
    else:
        return None
    return (ours, theirs) if abs(ours - theirs) > _SKEW else None


def tags_of(resource: dict[str, Any]) -> dict[str, str]:
    """Tags as a dict, whichever of AWS's spellings the resource uses."""
    tags = resource.get("Tags") or resource.get("TagSet") or resource.get("tags") or []
    if isinstance(tags, dict):
        return {str(key): str(value) for key, value in tags.items()}
    return {tag["Key"]: tag["Value"] for tag in tags}


def pages(api: Any, operation: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    """Every item of a listing."""
    for page in api.get_paginator(operation).paginate(**arguments):
        yield from page.get(key) or []


def owner(resource: dict[str, Any]) -> str:
    """Whom its tag names; empty without one."""
    return tags_of(resource).get(OWNER_TAG, "")


def fleets(ec2: Any, definition: StackDefinition, *, every_run: bool = False) -> list[dict[str, Any]]:
    """The fleets of a run, or of every run of the stack: those of the file's owner first, then those that may launch,
    newest first. DescribeFleets has no filter by tag, so all are read.
    """
    wanted = {STACK_TAG: definition.name, **({} if every_run else {RUN_TAG: definition.run.id})}
    mine = [fleet for fleet in pages(ec2, "describe_fleets", "Fleets") if wanted.items() <= tags_of(fleet).items()]

    def order(fleet: dict[str, Any]) -> tuple[bool, bool, bool, datetime]:
        ours, ended = owner(fleet) == definition.run.owner, fleet["FleetState"] in ENDED
        return ours, _wants_nodes(fleet), not ended, fleet["CreateTime"]

    return sorted(mine, key=order, reverse=True)


def may_launch(fleet: dict[str, Any], now: datetime) -> bool:
    """Whether it can launch a node at any time."""
    return _wants_nodes(fleet) and not expired(fleet, now)


def _wants_nodes(fleet: dict[str, Any]) -> bool:
    return fleet["FleetState"] in ("submitted", "active", "modifying") and wants(fleet) > 0


def wants(fleet: dict[str, Any]) -> int:
    """How many nodes it is to have."""
    return int(fleet["TargetCapacitySpecification"]["TotalTargetCapacity"])


def over(fleet: dict[str, Any], now: datetime) -> bool:
    """Whether it launches nothing more, whatever its owner asks: one at a target of 0 is not."""
    return fleet["FleetState"] in ENDED or expired(fleet, now)


def needless(fleet: dict[str, Any], done: Mapping[str, Any], now: datetime) -> str:
    """What to say of a fleet that goes on launching nodes for a run that is over; empty while its node ends it."""
    try:
        late = (now - datetime.fromisoformat(str(done.get("at")))).total_seconds() > ENDING_S
    except (ValueError, TypeError):
        late = True
    if not late or not may_launch(fleet, now):
        return ""
    return (
        f"fleet {fleet['FleetId']} still launches nodes, each billed until it finds that the run is over: they may "
        "not delete it. End it:"
    )


def ending(fleet: dict[str, Any], region: str) -> str:
    """The command that ends a fleet and its nodes."""
    return f"{removal.end_fleet(fleet['FleetId']).command} --region {region}"


def expired(fleet: dict[str, Any], now: datetime) -> bool:
    """Whether its time is over, in whatever state AWS shows it then: which one that is, is not known."""
    until: datetime | None = fleet.get("ValidUntil")
    return until is not None and until <= now


def instances(ec2: Any, filters: Iterable[tuple[str, list[str]]]) -> list[dict[str, Any]]:
    """Instances by filter, oldest first."""
    named = [{"Name": name, "Values": values} for name, values in filters]
    found = [i for r in pages(ec2, "describe_instances", "Reservations", Filters=named) for i in r["Instances"]]
    return sorted(found, key=lambda instance: instance["LaunchTime"])


def nodes(ec2: Any, definition: StackDefinition) -> list[dict[str, Any]]:
    """The run's instances that still exist or ended within the hour."""
    tags = [(f"tag:{STACK_TAG}", [definition.name]), (f"tag:{RUN_TAG}", [definition.run.id])]
    return instances(ec2, tags)


def prefix(stack: str) -> str:
    """Of every name that the provider has drawn for the stack."""
    return f"gpufleet-{stack}-"


def log_groups(logs: Any, stack: str) -> Iterator[dict[str, Any]]:
    """The stack's log groups with their tags, by name prefix and tag."""
    for group in pages(logs, "describe_log_groups", "logGroups", logGroupNamePrefix=prefix(stack)):
        tagged = logs.list_tags_for_resource(resourceArn=group["arn"].removesuffix(":*"))
        if tags_of(tagged).get(STACK_TAG) == stack:
            yield {**group, "tags": tags_of(tagged)}


class Buckets(NamedTuple):
    """The buckets whose names begin as the stack's do."""

    ours: list[dict[str, Any]]  # with their tags, newest first: more than one when a kept one was left behind
    closed: dict[str, AwsRefused]  # those that do not show their tags, and what AWS answered
    untagged: list[str]  # by their names ours


def buckets(s3: Any, stack: str) -> Buckets:
    """The stack's buckets, by name prefix and tag."""
    found = Buckets([], {}, [])
    for bucket in pages(s3, "list_buckets", "Buckets", Prefix=prefix(stack), PaginationConfig={"PageSize": 1000}):
        name = str(bucket["Name"])
        of_longer_name = "-" in name.removeprefix(prefix(stack))
        try:
            tagged = {**bucket, "Tags": s3.get_bucket_tagging(Bucket=name)["TagSet"]}
        except exceptions.ClientError as error:
            if denied(error):
                if not of_longer_name:
                    found.closed[name] = _client_refusal(error)
                continue
            if code(error) == "NoSuchBucket":  # a deleted one stays listed for a while
                continue
            if code(error) != "NoSuchTagSet":
                raise
            tagged = bucket
        if tags_of(tagged).get(STACK_TAG) == stack:
            found.ours.append(tagged)
        elif STACK_TAG not in tags_of(tagged) and not of_longer_name:
            found.untagged.append(name)
    found.ours.sort(key=lambda bucket: bucket["CreationDate"], reverse=True)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One object of a run."""

    name: str  # within the run
    bytes: int
    written: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """s3://bucket/<run>/ of one run."""

    s3: Any
    bucket: str
    run: str
    owner: str  # of the bucket, as its tag says
    others: str = ""  # where else a run of this name lies, in words

    def is_of(self, owner: str) -> bool:
        """Whether the run in it is `owner`'s, as far as anybody can tell: where its own bucket is gone, the newest one
        with a run of this name may be another's, whose end says nothing of it.
        """
        return self.owner in ("", owner)

    def objects(self, prefix: str = "") -> list[Stored]:
        """Every object whose name starts with `prefix`."""
        start = f"{self.run}/"
        listed = pages(self.s3, "list_objects_v2", "Contents", Bucket=self.bucket, Prefix=start + prefix)
        return [
            Stored(name=item["Key"].removeprefix(start), bytes=int(item["Size"]), written=item["LastModified"])
            for item in listed
        ]

    def read(self, name: str, *, last_bytes: int | None = None) -> bytes | None:
        """An object's bytes, or None when it is not there."""
        limit = {"Range": f"bytes=-{last_bytes}"} if last_bytes else {}
        try:
            answer = self.s3.get_object(Bucket=self.bucket, Key=f"{self.run}/{name}", **limit)
        except exceptions.ClientError as error:
            if code(error) in ("NoSuchKey", "NoSuchBucket", "404", "InvalidRange"):
                return None
            raise
        body: bytes = answer["Body"].read()
        return body

    def document(self, name: str) -> dict[str, Any] | None:
        """A JSON object, or None when it is not there or not (yet) JSON."""
        return atomic.parse_object(self.read(name))


def run_folder(s3: Any, definition: StackDefinition) -> RunFolder | None:
    """The run's folder in the newest of the stack's buckets that has one, of the file's owner where possible; None when
    no bucket has. A destroy, or a second person with the same file, leaves several. Raises AwsRefused where the only
    ones that could have it do not show their tags.
    """
    run = definition.run
    found, closed, _ = buckets(s3, definition.name)
    holds = [
        bucket
        for bucket in found
        if s3.list_objects_v2(Bucket=bucket["Name"], Prefix=f"{run.id}/", MaxKeys=1).get("KeyCount")
    ]
    if closed and not found:
        raise AwsRefused(f"whether a bucket is {definition.name}'s cannot be told: {_closed(closed)}")
    if not holds:
        return None
    chosen, *others = sorted(holds, key=lambda bucket: owner(bucket) != run.owner)
    named = ", ".join(f"s3://{bucket['Name']}/{run.id}/ (owner {owner(bucket) or 'unknown'})" for bucket in others)
    others_said = f"{named}; used is the newest of run.owner" if named else ""
    return RunFolder(s3=s3, bucket=chosen["Name"], run=run.id, owner=owner(chosen), others=others_said)


def no_run(s3: Any, definition: StackDefinition) -> AwsRefused:
    """There is no such run; the stack's buckets say which there are."""
    name, run = definition.name, definition.run.id
    found, closed, _ = buckets(s3, name)
    folders = {
        item["Prefix"].removesuffix("/")
        for bucket in found
        for item in pages(s3, "list_objects_v2", "CommonPrefixes", Bucket=bucket["Name"], Delimiter="/")
    }
    ids = sorted(folder for folder in folders if folder not in NO_RUN)
    hint = f" `--run ID` names an earlier one: {', '.join(ids)}." if ids else ""
    hint += f" Not looked into: {_closed(closed)}" if closed else ""
    return AwsRefused(f"there is no run {run} of {name} in {definition.fleet.region}: run `pulumi up` first.{hint}")


def _closed(closed: dict[str, AwsRefused]) -> str:
    """Buckets that do not show their tags, and the first one's reason."""
    return f"{', '.join(closed)} ({next(iter(closed.values()))})"
