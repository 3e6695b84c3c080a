"""Knows images in private repositories of Amazon ECR, to which nodes log in with their role. All functions are pure.

Nodes log in to no other registry, so images elsewhere must be public.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """The private ECR repository ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME."""

    account: str
    region: str
    name: str

    @property
    def arn(self) -> str:
        return f"arn:aws:ecr:{self.region}:{self.account}:repository/{self.name}"


def repository(image: str) -> Repository | None:
    """The private ECR repository of `image`; None if the image is in another registry, or in ECR's public one."""
    match = re.match(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([^:@]+)", image)
    return Repository(account=match[1], region=match[2], name=match[3]) if match else None


def abroad(image: str, region: str) -> str:
    """A warning if nodes of `region` pull the image from another region's ECR; otherwise empty."""
    private = repository(image)
    if private is None or private.region == region:
        return ""
    return (
        f"job.image is in ECR of {private.region}: each node pulls it across regions, for which AWS charges by the GB; "
        f"the bill does not include that. Copy it to {region}."
    )
