"""Handlers for the bucket, its settings and its objects."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import urlencode

from botocore.exceptions import ClientError

from gpufleet.infra.account.refusals import absent
from gpufleet.rehearsal.handlers import table
from gpufleet.rehearsal.handlers.calls import OwnCalls
from gpufleet.rehearsal.handlers.table import Aws, Properties, UnsupportedError, tagged

_GONE = ("NoSuchBucket", "404")


def _create_bucket(aws: Aws, inputs: Properties) -> str:
    name = inputs["bucket"]
    # The region us-east-1 must not be named; this is so for no other region.
    place = {} if aws.region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": aws.region}}
    aws.s3.create_bucket(Bucket=name, **place)
    _update_bucket(aws, name, {}, inputs)
    return str(name)


def _update_bucket(aws: Aws, resource_id: str, old: Properties, new: Properties) -> None:
    if new.get("tags") and new.get("tags") != old.get("tags"):
        aws.s3.put_bucket_tagging(Bucket=resource_id, Tagging={"TagSet": table.tag_list(new["tags"])})


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
        # All pages are read first: moto continues a listing from the name at which it stopped, and that name would be
        # deleted by then.
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
        tagging = {"TagSet": table.tag_list(new.get("tags") or {})}
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


OWN = {
    "aws:s3/bucket:Bucket": OwnCalls(_create_bucket, _read_bucket, _delete_bucket, change=_update_bucket),
    "aws:s3/bucketObjectv2:BucketObjectv2": OwnCalls(
        _put_object,
        _read_object,
        lambda aws, resource_id, state: aws.s3.delete_object(Bucket=state["bucket"], Key=state["key"]),
        change=_update_object,
    ),
}
