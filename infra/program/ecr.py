"""Images in a private repository of Amazon ECR: nodes log in to it by their role. Pure functions.

Nodes log in to no other registry, so another registry must give the image to anybody.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Repository:
    """ACCOUNT.dkr.ecr.REGION.amazonaws.com/NAME."""

    account: str
    region: str
    name: str

    @property
    def arn(self) -> str:
        return f"arn:aws:ecr:{self.region}:{self.account}:repository/{self.name}"


def repository(image: str) -> Repository | None:
    """The private ECR repository of `image`; None for an image in another registry, or in ECR's public one."""
    found = re.match(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com/([^:@]+)", image)
    return Repository(account=found[1], region=found[2], name=found[3]) if found else None


def abroad(image: str, region: str) -> str:
    """A warning about an image that nodes of `region` pull from another region; empty for every other image."""
    found = repository(image)
    if found is None or found.region == region:
        return ""
    return (
        f"job.image is in ECR of {found.region}: each node pulls it across regions, for which AWS charges by the GB; "
        f"the bill does not count that. Copy it to {region}."
    )
