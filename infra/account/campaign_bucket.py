"""The bucket that holds a campaign's ledger and records. The bucket belongs to no stack, because it outlives all of its
runs.

The bucket's name follows from the campaign's name and the account's number, so that every machine that drives the
campaign finds the same bucket, whatever Pulumi state it has.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

from botocore.exceptions import ClientError

from gpufleet.infra.account import refusals
from gpufleet.infra.account.campaign_ledger import LedgerObject
from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.program.resources.tags import OWNER_TAG
from gpufleet.job.supervisor.store import S3Store

CAMPAIGN_TAG = (
    "gpufleet:campaign"  # not a stack's tag: a stack with the campaign's name must not take the bucket for its own
)


def bucket_name(campaign: str, account: str) -> str:
    return f"gpufleet-{campaign}-ledger-{hashlib.sha256(account.encode()).hexdigest()[:12]}"


def find_ledger(client: Callable[[str, str], Any], campaign: str, region: str) -> LedgerObject | None:
    """The campaign's ledger in its bucket; None if the bucket does not exist."""
    s3 = client("s3", region)
    name = bucket_name(campaign, client("sts", region).get_caller_identity()["Account"])
    if refusals.absent(lambda: s3.head_bucket(Bucket=name), "404", "NoSuchBucket") is None:
        return None
    return LedgerObject(store=S3Store(f"s3://{name}", s3))


def make_bucket(client: Callable[[str, str], Any], campaign: str, region: str, owner: str) -> LedgerObject:
    """Makes the bucket, or completes what an earlier try began, and returns its ledger. Raises AwsRefused if another
    account has a bucket of that name.
    """
    s3, name = client("s3", region), bucket_name(campaign, client("sts", region).get_caller_identity()["Account"])
    place = {} if region == "us-east-1" else {"CreateBucketConfiguration": {"LocationConstraint": region}}
    try:
        s3.create_bucket(Bucket=name, **place)
    except ClientError as error:
        if refusals.code(error) == "BucketAlreadyExists":
            raise AwsRefused(f"another account owns the bucket {name}: give the campaign another name") from None
        if refusals.code(error) != "BucketAlreadyOwnedByYou":
            raise
    names = ("BlockPublicAcls", "IgnorePublicAcls", "BlockPublicPolicy", "RestrictPublicBuckets")
    s3.put_public_access_block(Bucket=name, PublicAccessBlockConfiguration=dict.fromkeys(names, True))
    tags = {CAMPAIGN_TAG: campaign, OWNER_TAG: owner}
    s3.put_bucket_tagging(Bucket=name, Tagging={"TagSet": [{"Key": key, "Value": tags[key]} for key in tags]})
    return LedgerObject(store=S3Store(f"s3://{name}", s3))


def delete_bucket(client: Callable[[str, str], Any], campaign: str, region: str) -> None:
    """Deletes the bucket with the ledger and everything else in it."""
    s3, name = client("s3", region), bucket_name(campaign, client("sts", region).get_caller_identity()["Account"])
    store = S3Store(f"s3://{name}", s3)
    store.delete([entry.key for entry in store.entries("")])
    s3.delete_bucket(Bucket=name)
