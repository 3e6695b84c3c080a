"""What a node's role may do: each request of a node, held against the statements of its inline policies as IAM does.

A condition that cannot be judged is an error, never ignored.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qs
from xml.etree import ElementTree

from infra.account import iam_policy
from infra.account.iam_policy import AccessRequest, Statement

FREE = ("sts:GetCallerIdentity",)  # needs no right
UNNARROWED = ("DescribeFleets", "DescribeInstances")  # these know no resource (IAM service authorization reference)


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A request as far as rights are concerned. `action` is the API's own name, empty for S3."""

    service: str
    region: str
    account: str
    action: str
    method: str
    path: str
    query: str
    body: bytes = b""


def asked(
    request: Request, tags: Callable[[str], Mapping[str, str]], key_of: Callable[[str], str | None]
) -> list[AccessRequest]:
    """Everything that the request needs. `tags`: those of a fleet or an instance, by its id; `key_of`: the customer's
    key that encrypts a bucket, by its name.
    """
    if request.service == "s3":
        wishes = list(_of_s3(request))
        return [*wishes, *_of_key(request, wishes, key_of)]
    action, place = f"{request.service}:{request.action}", f"{request.region}:{request.account}"
    if request.service == "logs":
        names = json.loads(request.body or b"{}")
        stream = f"log-group:{names.get('logGroupName')}:log-stream:{names.get('logStreamName')}"
        return [AccessRequest(action=action, resource=f"arn:aws:logs:{place}:{stream}")]
    if request.service != "ec2" or request.action in UNNARROWED:
        return [AccessRequest(action=action)]
    fields = parse_qs(request.body.decode("utf-8", "replace"))
    named = {
        f"arn:aws:ec2:{place}:{kind.lower()}/{values[0]}": values[0]
        for name, values in fields.items()
        for kind in re.findall(r"^(Fleet|Instance)Id(?:\.\d+)?$", name)
    }
    wishes = [
        AccessRequest(
            action=action,
            resource=arn,
            context={f"aws:ResourceTag/{key}": value for key, value in tags(name).items()},
        )
        for arn, name in named.items()
    ]
    if request.action == "DeleteFleets" and fields.get("TerminateInstances") != ["false"]:  # true by default
        wishes.append(
            AccessRequest(action="ec2:TerminateInstances")
        )  # with no tag, to be strict: AWS's page names no resource
    return wishes or [AccessRequest(action=action)]


def listing(request: Request) -> AccessRequest:
    """The right without which S3 says 403 of an object that is not there. It is asked without a prefix."""
    bucket = request.path.lstrip("/").partition("/")[0]
    return AccessRequest(action="s3:ListBucket", resource=f"arn:aws:s3:::{bucket}")


def allowed(statements: Iterable[Statement], wish: AccessRequest) -> bool:
    """Whether a statement allows it and none denies it."""
    answer = iam_policy.allowed(statements, wish)
    if answer is None:
        raise ValueError(f"the embedded AWS cannot tell from the role's policy whether it allows {wish.action}")
    return wish.action in FREE or answer


def _of_key(
    request: Request, wishes: Iterable[AccessRequest], key_of: Callable[[str], str | None]
) -> Iterator[AccessRequest]:
    """What S3 asks of the bucket's key in the name of whoever reads or writes; of each part of an upload both."""
    needs = {
        "s3:GetObject": ["Decrypt"],
        "s3:PutObject": ["GenerateDataKey", *(["Decrypt"] * ("uploadId=" in request.query))],
    }
    context = {"kms:ViaService": f"s3.{request.region}.amazonaws.com"}
    for wish in wishes:
        if (actions := needs.get(wish.action)) and (key := key_of(wish.resource.split(":::")[1].partition("/")[0])):
            yield from (AccessRequest(action=f"kms:{action}", resource=key, context=context) for action in actions)


def _of_s3(request: Request) -> Iterator[AccessRequest]:
    bucket, _, key = request.path.lstrip("/").partition("/")
    query = parse_qs(request.query, keep_blank_values=True)
    arn = f"arn:aws:s3:::{bucket}"
    reading = request.method in ("GET", "HEAD")
    if not key and "delete" in query:
        for entry in ElementTree.fromstring(request.body).iter():
            if entry.tag.rpartition("}")[2] == "Key":
                yield AccessRequest(action="s3:DeleteObject", resource=f"{arn}/{entry.text}")
    elif not key:
        settings = set(query) - {"list-type", "prefix", "delimiter", "encoding-type", "max-keys", "start-after"}
        settings -= {"continuation-token", "marker", "fetch-owner"}
        action = "ListBucket" if reading and not settings else f"{request.method}:{','.join(sorted(settings))}"
        context = {"s3:prefix": query["prefix"][0]} if "prefix" in query else {}
        yield AccessRequest(action=f"s3:{action}", resource=arn, context=context)
    else:
        of = "Tagging" if "tagging" in query else "Acl" if "acl" in query else ""
        if reading:
            action = "ListMultipartUploadParts" if "uploadId" in query else f"GetObject{of}"
        elif request.method == "DELETE":
            action = "AbortMultipartUpload" if "uploadId" in query else f"DeleteObject{of}"
        else:
            action = f"PutObject{of}"
        yield AccessRequest(action=f"s3:{action}", resource=f"{arn}/{key}")
