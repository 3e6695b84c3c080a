"""Describes how a leftover is removed. Each step is written once, and serves both as a command for people and as a call
of `sweep --delete`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from botocore import xform_name
from botocore.exceptions import ClientError

Client = Callable[[str], Any]  # boto3's client of a service, in the stack's region


class Step(Protocol):
    """One step of a removal."""

    @property
    def command(self) -> str: ...

    def do(self, client: Client) -> None: ...


@dataclass(frozen=True, slots=True)
class Call:
    """One call of AWS's API."""

    service: str
    operation: str  # the operation's name in boto3, such as delete_vpc
    arguments: Mapping[str, Any]

    @property
    def command(self) -> str:
        """The call as a command of the AWS CLI, which names commands and options after the API; without the region."""
        words = ["aws", self.service, self.operation.replace("_", "-")]
        for name, value in self.arguments.items():
            values = [] if value is True else value if isinstance(value, list) else [value]
            words += [f"--{xform_name(name, '-')}", *values]
        return shlex.join(words)

    def do(self, client: Client) -> None:
        """Makes the call. Raises ClientError, even if AWS refuses only some of several resources."""
        answer = getattr(client(self.service), self.operation)(**self.arguments)
        for refused in answer.get("UnsuccessfulFleetDeletions") or answer.get("Unsuccessful") or []:
            raise ClientError({"Error": refused["Error"]}, "".join(map(str.title, self.operation.split("_"))))


@dataclass(frozen=True, kw_only=True, slots=True)
class Bucket:
    """The removal of a bucket with everything in it."""

    name: str

    @property
    def command(self) -> str:
        return shlex.join(["aws", "s3", "rb", "--force", f"s3://{self.name}"])

    def do(self, client: Client) -> None:
        s3 = client("s3")
        # a page has at most 1000 objects, which is also the limit of one deletion
        for page in s3.get_paginator("list_objects_v2").paginate(Bucket=self.name):
            if keys := [{"Key": item["Key"]} for item in page.get("Contents", [])]:
                s3.delete_objects(Bucket=self.name, Delete={"Objects": keys, "Quiet": True})
        s3.delete_bucket(Bucket=self.name)


@dataclass(frozen=True, kw_only=True, slots=True)
class UnfinishedUpload:
    """The removal of an unfinished multipart upload."""

    bucket: str
    key: str
    id: str

    @property
    def command(self) -> str:
        named = ["--bucket", self.bucket, "--key", self.key, "--upload-id", self.id]
        return shlex.join(["aws", "s3api", "abort-multipart-upload", *named])

    def do(self, client: Client) -> None:
        client("s3").abort_multipart_upload(Bucket=self.bucket, Key=self.key, UploadId=self.id)


def ec2(operation: str, **arguments: Any) -> Call:
    return Call("ec2", operation, arguments)


def iam(operation: str, **arguments: Any) -> Call:
    return Call("iam", operation, arguments)


def end_fleet(fleet: str) -> Call:
    """The call that ends a fleet and its nodes."""
    return ec2("delete_fleets", TerminateInstances=True, FleetIds=[fleet])
