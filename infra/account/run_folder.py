"""Finds a stack's buckets and log groups by name and tag, and a run's folder in a bucket, with its objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any, NamedTuple

from botocore import exceptions

from gpufleet.infra.account import refusals
from gpufleet.infra.account.aws import owner_of, pages, tags_of
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.program.resources.tags import STACK_TAG
from gpufleet.job.contract import done as ends
from gpufleet.job.contract.bucket import ASKED, ATTEMPTS, DONE, GRAPHS, INPUTS
from gpufleet.job.contract.done import Asked, Done

NO_RUN = (INPUTS, GRAPHS)  # folders of a stack's bucket that belong to no run


def name_prefix(stack: str) -> str:
    """The prefix of the names of the stack's resources. The provider makes up the rest of each name."""
    return f"gpufleet-{stack}-"


def find_log_groups(logs: Any, stack: str) -> Iterator[dict[str, Any]]:
    """The stack's log groups with their tags, by name prefix and tag."""
    for group in pages(logs, "describe_log_groups", "logGroups", logGroupNamePrefix=name_prefix(stack)):
        tagged = logs.list_tags_for_resource(resourceArn=group["arn"].removesuffix(":*"))
        if tags_of(tagged).get(STACK_TAG) == stack:
            yield {**group, "tags": tags_of(tagged)}


class Buckets(NamedTuple):
    """The buckets whose names have the stack's prefix."""

    # the stack's buckets with their tags, newest first; several if an earlier one was kept
    ours: list[dict[str, Any]]
    closed: dict[str, AwsRefused]  # names of buckets whose tags cannot be read, with AWS's answers
    untagged: list[str]  # buckets without tags whose names have the stack's prefix


def find_buckets(s3: Any, stack: str) -> Buckets:
    """The stack's buckets, by name prefix and tag."""
    buckets = Buckets([], {}, [])
    for bucket in pages(s3, "list_buckets", "Buckets", Prefix=name_prefix(stack), PaginationConfig={"PageSize": 1000}):
        name = str(bucket["Name"])
        of_longer_name = "-" in name.removeprefix(name_prefix(stack))
        try:
            tagged = {**bucket, "Tags": s3.get_bucket_tagging(Bucket=name)["TagSet"]}
        except exceptions.ClientError as error:
            if refusals.denied(error):
                if not of_longer_name:
                    buckets.closed[name] = refusals.client_refusal(error)
                continue
            if refusals.code(error) == "NoSuchBucket":  # AWS still lists a deleted bucket for a while
                continue
            if refusals.code(error) != "NoSuchTagSet":
                raise
            tagged = bucket
        if tags_of(tagged).get(STACK_TAG) == stack:
            buckets.ours.append(tagged)
        elif STACK_TAG not in tags_of(tagged) and not of_longer_name:
            buckets.untagged.append(name)
    buckets.ours.sort(key=lambda bucket: bucket["CreationDate"], reverse=True)
    return buckets


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredObject:
    """One object of a run."""

    name: str  # its key, below the run's folder
    bytes: int
    written: datetime


@dataclass(frozen=True, kw_only=True, slots=True)
class RunFolder:
    """The folder of one run: s3://bucket/<run>/."""

    s3: Any
    bucket: str
    run: str
    owner: str  # the owner in the bucket's tag
    others: str = ""  # a sentence that names other buckets with a run of this name

    def is_of(self, owner: str) -> bool:
        """Whether the run in the folder belongs to `owner`, as far as this can be known. If the owner's bucket no
        longer exists, the folder may be that of another owner's run with the same name. The end of that run says
        nothing about the owner's run.
        """
        return self.owner in ("", owner)

    def objects(self, prefix: str = "") -> list[StoredObject]:
        """Every object whose name starts with `prefix`."""
        start = f"{self.run}/"
        listed = pages(self.s3, "list_objects_v2", "Contents", Bucket=self.bucket, Prefix=start + prefix)
        return [
            StoredObject(name=item["Key"].removeprefix(start), bytes=int(item["Size"]), written=item["LastModified"])
            for item in listed
        ]

    def read(self, name: str, *, last_bytes: int | None = None) -> bytes | None:
        """The object's bytes; None if it does not exist."""
        limit = {"Range": f"bytes=-{last_bytes}"} if last_bytes else {}
        try:
            answer = self.s3.get_object(Bucket=self.bucket, Key=f"{self.run}/{name}", **limit)
        except exceptions.ClientError as error:
            if refusals.code(error) in ("NoSuchKey", "NoSuchBucket", "404", "InvalidRange"):
                return None
            raise
        body: bytes = answer["Body"].read()
        return body

    def read_done(self) -> Done | None:
        """How the run ended; None while it goes on."""
        return ends.read(self.read(DONE))

    def asked(self) -> Asked | None:
        """Who asked the run to end; None if nobody did."""
        return ends.read_asked(self.read(ASKED))

    def is_called_off(self) -> bool:
        """Whether somebody asked the run to end before a node of it had booted."""
        return self.asked() is not None and not self.objects(ATTEMPTS)


def find_folder(s3: Any, definition: StackDefinition) -> RunFolder | None:
    """The run's folder: in the newest of the stack's buckets that has it, and if possible in one of the file's owner.
    None if no bucket has it. (A stack has several buckets if one was kept by a destroy, or if a second person uses the
    same file.) Raises AwsRefused if the only buckets that could have it do not show their tags.
    """
    run = definition.run
    buckets, closed, _ = find_buckets(s3, definition.name)
    holds = [
        bucket
        for bucket in buckets
        if s3.list_objects_v2(Bucket=bucket["Name"], Prefix=f"{run.id}/", MaxKeys=1).get("KeyCount")
    ]
    if closed and not buckets:
        raise AwsRefused(f"cannot tell whether a bucket belongs to {definition.name}: {_closed(closed)}")
    if not holds:
        return None
    chosen, *others = sorted(holds, key=lambda bucket: owner_of(bucket) != run.owner)
    named = ", ".join(f"s3://{bucket['Name']}/{run.id}/ (owner {owner_of(bucket) or 'unknown'})" for bucket in others)
    others_said = f"{named}; this command uses the newest bucket of run.owner" if named else ""
    return RunFolder(s3=s3, bucket=chosen["Name"], run=run.id, owner=owner_of(chosen), others=others_said)


def no_run(s3: Any, definition: StackDefinition) -> AwsRefused:
    """The error for a run that does not exist, which names the runs in the stack's buckets."""
    name, run = definition.name, definition.run.id
    buckets, closed, _ = find_buckets(s3, name)
    folders = {
        item["Prefix"].removesuffix("/")
        for bucket in buckets
        for item in pages(s3, "list_objects_v2", "CommonPrefixes", Bucket=bucket["Name"], Delimiter="/")
    }
    ids = sorted(folder for folder in folders if folder not in NO_RUN)
    hint = f" `--run ID` names an earlier one: {', '.join(ids)}." if ids else ""
    hint += f" gpufleet could not look into {_closed(closed)}" if closed else ""
    return AwsRefused(f"there is no run {run} of {name} in {definition.fleet.region}: run `pulumi up` first.{hint}")


def _closed(closed: dict[str, AwsRefused]) -> str:
    """The names of the buckets that do not show their tags, and AWS's reason for the first."""
    return f"{', '.join(closed)} ({next(iter(closed.values()))})"
