"""The bucket of a stack, and the objects that `up` puts into it: job archive, run config, dataset.

A destroy keeps or deletes bucket, public-access block, encryption, policy and lifecycle together: if it kept only the
bucket, it would silently remove the bucket's policy and expiry.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pulumi
import pulumi_aws as aws

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.program.engine import lines
from gpufleet.infra.program.resources.tags import tags
from gpufleet.infra.progress import Lines
from gpufleet.job.contract import bucket

# Parts of an aborted upload do not appear in listings, but are billed like objects.
ABORT_UPLOADS_AFTER_DAYS = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Upload:
    """A local file, or a small text, that becomes an object. `name`: the resource's name. `key`: the object's key."""

    name: str
    # Earlier names of the resource. They must be stated, because they do not follow from the name of its parent.
    earlier: tuple[str, ...] = ()
    key: str
    file: Path | None = None
    text: str | None = None
    # Whether the object is a record of the run. A record stays in a kept bucket and expires with the run's other
    # objects.
    belongs_to_run: bool = False


class StorageComponent(pulumi.ComponentResource):
    """The bucket and its objects. `ready`: resources that must exist before a node boots."""

    bucket: aws.s3.Bucket
    ready: list[pulumi.Resource]

    def __init__(
        self,
        name: str,
        definition: StackDefinition,
        *,
        uploads: Sequence[Upload],
        runs: Sequence[str],
        frozen: bool,
        opts: pulumi.ResourceOptions | None = None,
    ) -> None:
        """`runs`: every run id whose objects must expire. `frozen`: whether the run has begun; if so, uploads do not
        change.
        """
        super().__init__("gpufleet:infra:Storage", name, None, opts)
        keep = definition.storage.keep
        labels = tags(definition)
        retained = pulumi.ResourceOptions(parent=self, retain_on_delete=keep.bucket)
        self.bucket = aws.s3.Bucket(
            f"gpufleet-{definition.name}",  # the provider appends a random suffix, because bucket names are global
            force_destroy=not keep.bucket,
            tags=labels,
            opts=retained,
        )
        closed = aws.s3.BucketPublicAccessBlock(
            f"{name}-closed",
            bucket=self.bucket.bucket,
            block_public_acls=True,
            block_public_policy=True,
            ignore_public_acls=True,
            restrict_public_buckets=True,
            opts=retained,
        )
        # S3 answers 409 if settings are written at the same time, so the other two settings are written after the
        # public-access block.
        follows = pulumi.ResourceOptions.merge(retained, pulumi.ResourceOptions(depends_on=[closed]))
        encryption = aws.s3.BucketServerSideEncryptionConfiguration(
            f"{name}-encryption",
            bucket=self.bucket.bucket,
            rules=[
                aws.s3.BucketServerSideEncryptionConfigurationRuleArgs(
                    apply_server_side_encryption_by_default=aws.s3.BucketServerSideEncryptionConfigurationRuleApplyServerSideEncryptionByDefaultArgs(
                        sse_algorithm="aws:kms" if definition.account.kms_key else "AES256",
                        kms_master_key_id=definition.account.kms_key,
                    ),
                    bucket_key_enabled=True
                    if definition.account.kms_key
                    else None,  # with this option, the provider deletes many objects with one request
                )
            ],
            opts=retained,
        )
        policy = aws.s3.BucketPolicy(
            f"{name}-tls-only",
            bucket=self.bucket.bucket,
            policy=pulumi.Output.json_dumps(tls_only(self.bucket.arn)),
            opts=follows,
        )
        settings: list[pulumi.Resource] = [closed, encryption, policy]
        # If the bucket also had rules of somebody else, the provider would wait in vain until the bucket has exactly
        # the declared rules.
        if keep.lifecycle == "own":
            expiry = aws.s3.BucketLifecycleConfiguration(
                f"{name}-expiry",
                bucket=self.bucket.bucket,
                rules=[_abort_uploads(), *(_expire(folder, keep.days) for folder in (*runs, bucket.GRAPHS))],
                opts=follows,
            )
            settings.append(expiry)
        objects = [self._upload(upload, labels, frozen=frozen) for upload in uploads]
        if not frozen and not pulumi.runtime.is_dry_run():
            self._show(uploads, objects)
        self.ready = [*settings, *objects]
        self.register_outputs({"bucket": self.bucket.bucket})

    def _show(self, uploads: Sequence[Upload], objects: Sequence[aws.s3.BucketObjectv2]) -> None:
        """Shows the upload's progress as objects are created; the engine itself only reports each object. The last
        line, which stays on the screen, says that the upload is done.
        """
        sizes = [upload.file.stat().st_size if upload.file else 0 for upload in uploads]
        say = lines(self)
        shown = Lines("uploading", sum(sizes), "B", say)
        for stored, size in zip(objects, sizes, strict=True):
            stored.etag.apply(partial(_count, shown, size))
        pulumi.Output.all(*(stored.etag for stored in objects)).apply(
            lambda _: say(f"uploaded {sum(sizes) / 1e6:.1f} MB")
        )

    def _upload(self, upload: Upload, labels: dict[str, str], *, frozen: bool) -> aws.s3.BucketObjectv2:
        return aws.s3.BucketObjectv2(
            upload.name,
            bucket=self.bucket.bucket,
            key=upload.key,
            source=pulumi.FileAsset(str(upload.file)) if upload.file else None,
            content=upload.text,
            tags=labels,
            opts=pulumi.ResourceOptions(
                parent=self,
                aliases=[pulumi.Alias(name=name) for name in upload.earlier],
                retain_on_delete=upload.belongs_to_run,
                # Nodes check the hashes of these objects at every boot, so that new code or new prices are used only
                # after the run id is changed. contentBase64 is listed because older versions declared the archive by
                # it.
                ignore_changes=["key", "source", "contentBase64", "content"] if frozen else None,
            ),
        )


def _count(shown: Lines, size: int, etag: str) -> None:
    shown.advance(size)


def tls_only(bucket_arn: pulumi.Input[str]) -> dict[str, object]:
    """A policy that denies everyone, even the owner, requests that are not encrypted in transit."""
    return {
        "Version": "2012-10-17",
        "Statement": [
            {
                "Sid": "TlsOnly",
                "Effect": "Deny",
                "Principal": "*",
                "Action": "s3:*",
                "Resource": [bucket_arn, pulumi.Output.concat(bucket_arn, "/*")],
                "Condition": {"Bool": {"aws:SecureTransport": "false"}},
            }
        ],
    }


def _abort_uploads() -> aws.s3.BucketLifecycleConfigurationRuleArgs:
    return aws.s3.BucketLifecycleConfigurationRuleArgs(
        id="abort-unfinished-uploads",
        status="Enabled",
        filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=""),
        abort_incomplete_multipart_upload=aws.s3.BucketLifecycleConfigurationRuleAbortIncompleteMultipartUploadArgs(
            days_after_initiation=ABORT_UPLOADS_AFTER_DAYS
        ),
    )


def _expire(folder: str, days: int) -> aws.s3.BucketLifecycleConfigurationRuleArgs:
    """The rule by which a folder's objects expire. Each run has such a rule. The bucket as a whole has none, because
    inputs that a stack has declared must not expire while the stack exists. Compiled graphs may expire, since they can
    be compiled again.
    """
    return aws.s3.BucketLifecycleConfigurationRuleArgs(
        id=f"expire-{folder}",
        status="Enabled",
        filter=aws.s3.BucketLifecycleConfigurationRuleFilterArgs(prefix=f"{folder}/"),
        expiration=aws.s3.BucketLifecycleConfigurationRuleExpirationArgs(days=days),
    )
