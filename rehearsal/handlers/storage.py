"""The bucket, its settings and its objects."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from botocore.exceptions import ClientError

from rehearsal.handlers.table import (
    Aws,
    Properties,
    ResourceHandler,
    UnsupportedError,
    absent,
    fields,
    tag_list,
    tagged,
)

_GONE = ("NoSuchBucket", "404")


def _create_bucket(aws: Aws, inputs: Properties) -> str:
    name = inputs["bucket"]
    # us-east-1 is the one region that must not be named.
    place = {} if aws.region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": aws.region}}
    aws.s3.create_bucket(Bucket=name, **place)
    _update_bucket(aws, name, {}, inputs)
    return str(name)


def _update_bucket(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if new.get("tags") and new.get("tags") != old.get("tags"):
        aws.s3.put_bucket_tagging(Bucket=resource_id, Tagging={"TagSet": tag_list(new["tags"])})


def _read_bucket(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    if absent(lambda: aws.s3.head_bucket(Bucket=resource_id), *_GONE) is None:
        return None
    answer = absent(lambda: aws.s3.get_bucket_tagging(Bucket=resource_id), "NoSuchTagSet")
    return {
        "bucket": resource_id,
        **tagged(answer and answer["TagSet"]),
        "arn": f"arn:aws:s3:::{resource_id}",
        "bucketDomainName": f"{resource_id}.s3.amazonaws.com",
        "bucketRegionalDomainName": f"{resource_id}.s3.{aws.region}.amazonaws.com",
    }


def _delete_bucket(aws: Aws, resource_id: str, state: Properties) -> None:
    if state.get("forceDestroy"):
        # All pages first: moto goes on from the name it ended with, which is gone by then.
        for page in list(aws.s3.get_paginator("list_object_versions").paginate(Bucket=resource_id)):
            keys = [
                {"Key": item["Key"], "VersionId": item["VersionId"]}
                for item in [*page.get("Versions", []), *page.get("DeleteMarkers", [])]
            ]
            if keys:
                aws.s3.delete_objects(Bucket=resource_id, Delete={"Objects": keys})
    try:
        aws.s3.delete_bucket(Bucket=resource_id)
    except ClientError as error:
        if error.response["Error"]["Code"] == "BucketNotEmpty":
            raise UnsupportedError(
                f"bucket {resource_id} is not empty and was declared without forceDestroy"
            ) from error
        raise


def _setting(
    kind: str,
    put: Callable[[Aws, Properties], Any],
    read: Callable[[Aws, str], Properties],
    absent_code: str,
    remove: str,
    **more: Any,
) -> ResourceHandler:
    """A setting of a bucket: its id is the bucket's name, and it moves to no other."""

    def create(aws: Aws, inputs: Properties) -> str:
        put(aws, inputs)
        return str(inputs["bucket"])

    def live(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
        found = absent(lambda: read(aws, resource_id), absent_code, *_GONE)
        return None if found is None else {"bucket": resource_id, **found}

    return ResourceHandler(
        source=f"s3/{kind}",
        replaces=fields("bucket"),
        create=create,
        read=live,
        update=lambda aws, resource_id, old, new: put(aws, new),
        delete=lambda aws, resource_id, state: absent(
            lambda: getattr(aws.s3, remove)(Bucket=resource_id), absent_code, *_GONE
        ),
        **more,
    )


_FLAGS = {
    "blockPublicAcls": "BlockPublicAcls",
    "blockPublicPolicy": "BlockPublicPolicy",
    "ignorePublicAcls": "IgnorePublicAcls",
    "restrictPublicBuckets": "RestrictPublicBuckets",
}


def _put_closed(aws: Aws, inputs: Properties) -> None:
    flags = {aws_name: bool(inputs.get(name)) for name, aws_name in _FLAGS.items()}
    aws.s3.put_public_access_block(Bucket=inputs["bucket"], PublicAccessBlockConfiguration=flags)


def _read_closed(aws: Aws, bucket: str) -> Properties:
    flags = aws.s3.get_public_access_block(Bucket=bucket)["PublicAccessBlockConfiguration"]
    return {name: flags[aws_name] for name, aws_name in _FLAGS.items()}


def _put_encryption(aws: Aws, inputs: Properties) -> None:
    rules = []
    for rule in inputs["rules"]:
        default = rule["applyServerSideEncryptionByDefault"]
        key = {"KMSMasterKeyID": default["kmsMasterKeyId"]} if "kmsMasterKeyId" in default else {}
        entry: dict[str, Any] = {"ApplyServerSideEncryptionByDefault": {"SSEAlgorithm": default["sseAlgorithm"], **key}}
        if "bucketKeyEnabled" in rule:
            entry["BucketKeyEnabled"] = rule["bucketKeyEnabled"]
        rules.append(entry)
    aws.s3.put_bucket_encryption(Bucket=inputs["bucket"], ServerSideEncryptionConfiguration={"Rules": rules})


def _read_encryption(aws: Aws, bucket: str) -> Properties:
    found = []
    for rule in aws.s3.get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]["Rules"]:
        default = rule["ApplyServerSideEncryptionByDefault"]
        shown = {"sseAlgorithm": default["SSEAlgorithm"], "kmsMasterKeyId": default.get("KMSMasterKeyID")}
        found.append({"applyServerSideEncryptionByDefault": shown, "bucketKeyEnabled": rule.get("BucketKeyEnabled")})
    return {"rules": found}


def _put_policy(aws: Aws, inputs: Properties) -> None:
    aws.s3.put_bucket_policy(Bucket=inputs["bucket"], Policy=inputs["policy"])


def _put_lifecycle(aws: Aws, inputs: Properties) -> None:
    rules = []
    for rule in inputs["rules"]:
        entry: dict[str, Any] = {
            "ID": rule["id"],
            "Status": rule["status"],
            "Filter": {"Prefix": rule["filter"]["prefix"]},
        }
        if "expiration" in rule:
            entry["Expiration"] = {"Days": rule["expiration"]["days"]}
        if "abortIncompleteMultipartUpload" in rule:
            days = rule["abortIncompleteMultipartUpload"]["daysAfterInitiation"]
            entry["AbortIncompleteMultipartUpload"] = {"DaysAfterInitiation": days}
        rules.append(entry)
    aws.s3.put_bucket_lifecycle_configuration(Bucket=inputs["bucket"], LifecycleConfiguration={"Rules": rules})


def _read_lifecycle(aws: Aws, bucket: str) -> Properties:
    rules = []
    for rule in aws.s3.get_bucket_lifecycle_configuration(Bucket=bucket)["Rules"]:
        entry: Properties = {
            "id": rule["ID"],
            "status": rule["Status"],
            "filter": {"prefix": rule.get("Filter", {}).get("Prefix", "")},
        }
        if "Expiration" in rule:
            entry["expiration"] = {"days": rule["Expiration"]["Days"]}
        if "AbortIncompleteMultipartUpload" in rule:
            days = rule["AbortIncompleteMultipartUpload"]["DaysAfterInitiation"]
            entry["abortIncompleteMultipartUpload"] = {"daysAfterInitiation": days}
        rules.append(entry)
    return {"rules": rules}


def _body(inputs: Properties) -> bytes:
    if "content" in inputs:
        return str(inputs["content"]).encode()
    return Path(inputs["source"]["path"]).read_bytes()


def _put_object(aws: Aws, inputs: Properties) -> str:
    tags = urlencode(inputs.get("tags") or {})
    aws.s3.put_object(Bucket=inputs["bucket"], Key=inputs["key"], Body=_body(inputs), Tagging=tags)
    return str(inputs["key"])


def _update_object(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if any(old.get(key) != new.get(key) for key in ("source", "content")):
        _put_object(aws, new)
    else:
        tagging = {"TagSet": tag_list(new.get("tags") or {})}
        aws.s3.put_object_tagging(Bucket=new["bucket"], Key=new["key"], Tagging=tagging)


def _read_object(aws: Aws, resource_id: str, like: Properties) -> Properties | None:
    place = {"Bucket": like["bucket"], "Key": like["key"]}
    head = absent(lambda: aws.s3.head_object(**place), "NoSuchKey", *_GONE)
    if head is None:
        return None
    return {
        "bucket": like["bucket"],
        "key": like["key"],
        **tagged(aws.s3.get_object_tagging(**place)["TagSet"]),
        "etag": head["ETag"].strip('"'),
        "arn": f"arn:aws:s3:::{like['bucket']}/{like['key']}",
    }


HANDLERS = {
    "aws:s3/bucket:Bucket": ResourceHandler(
        source="s3/bucket",
        optional=fields("bucket forceDestroy tags"),
        replaces=fields("bucket"),
        computed=fields("arn bucketDomainName bucketRegionalDomainName tagsAll"),
        only_ours=fields("forceDestroy"),
        name="bucket",
        create=_create_bucket,
        read=_read_bucket,
        update=_update_bucket,
        delete=_delete_bucket,
    ),
    "aws:s3/bucketPublicAccessBlock:BucketPublicAccessBlock": _setting(
        "bucket_public_access_block",
        _put_closed,
        _read_closed,
        "NoSuchPublicAccessBlockConfiguration",
        "delete_public_access_block",
        required=fields("bucket"),
        optional=frozenset(_FLAGS),
    ),
    "aws:s3/bucketServerSideEncryptionConfiguration:BucketServerSideEncryptionConfiguration": _setting(
        "bucket_server_side_encryption_configuration",
        _put_encryption,
        _read_encryption,
        "ServerSideEncryptionConfigurationNotFoundError",
        "delete_bucket_encryption",
        required=fields("bucket rules"),
    ),
    "aws:s3/bucketPolicy:BucketPolicy": _setting(
        "bucket_policy",
        _put_policy,
        lambda aws, bucket: {"policy": aws.s3.get_bucket_policy(Bucket=bucket)["Policy"]},
        "NoSuchBucketPolicy",
        "delete_bucket_policy",
        required=fields("bucket policy"),
    ),
    "aws:s3/bucketLifecycleConfiguration:BucketLifecycleConfiguration": _setting(
        "bucket_lifecycle_configuration",
        _put_lifecycle,
        _read_lifecycle,
        "NoSuchLifecycleConfiguration",
        "delete_bucket_lifecycle",
        required=fields("bucket rules"),
    ),
    "aws:s3/bucketObjectv2:BucketObjectv2": ResourceHandler(
        source="s3/object",
        required=fields("bucket key"),
        optional=fields("source content tags"),
        replaces=fields("bucket key"),
        computed=fields("arn etag tagsAll"),
        volatile=fields("etag tagsAll"),
        only_ours=fields("source content"),
        create=_put_object,
        read=_read_object,
        update=_update_object,
        delete=lambda aws, resource_id, state: aws.s3.delete_object(Bucket=state["bucket"], Key=state["key"]),
    ),
}
