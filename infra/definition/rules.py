"""The allowed values of single keys of a definition file, and why. The experiments' own bounds are in job.kind.

docs/definition.md explains every key, and a test compares it with this table.
"""

from __future__ import annotations

import re
from typing import Any

from gpufleet.infra.definition.model import (
    Account,
    Claim,
    Disk,
    Estimate,
    Fleet,
    Goal,
    Interruptions,
    Job,
    Keep,
    Limits,
    Notify,
    Run,
    Variant,
    Vpc,
)
from gpufleet.infra.market.reservation import CapacityBlock
from gpufleet.job.contract.gathering import MOST_NODES
from gpufleet.job.kind import EXPERIMENTS
from gpufleet.job.kind.convert import Rule

# Docker takes the first part of an image's name for a registry, and not for a folder of Docker Hub, if it has a dot or
# a port.
_REGISTRY = r"(?=[^/]*[.:])[a-z0-9.-]+(:443)?"
_TAG = r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})"
_IMAGE_NAME = rf"(?=.{{1,255}}$){_REGISTRY}(/[a-z0-9._-]+)+{_TAG}(@sha256:[0-9a-f]{{64}})?"


def _image_hint(written: str) -> str:
    """A sentence about what the image's name lacks, and how to write it in full."""
    first, _, rest = written.partition("/")
    no_registry = not rest or not re.search("[.:]", first)
    no_tag = ":" not in written.rpartition("/")[2]
    full = f"docker.io/{'' if rest else 'library/'}{written}" if no_registry else written
    full += ":TAG" if no_tag else ""
    if not re.fullmatch(_IMAGE_NAME, full):
        return "Nodes reach a registry only at port 443; `gpufleet doctor --pin` adds the digest."
    lacks = " and ".join(["no registry"] * no_registry + ["no tag"] * no_tag)
    return f"It names {lacks}: write {full}."


_IMAGE = Rule(
    pattern=_IMAGE_NAME,
    allowed="registry/repository:tag, with its @sha256: digest once pinned",
    hint=_image_hint,
)
# The limits of gp3 come from botocore 1.44.5's model of EC2 (CreateVolume, EbsBlockDevice); AWS raised them in 2025-09.
RULES: dict[tuple[type[Any], str], Rule] = {
    (Run, "id"): Rule(
        pattern=r"(?!inputs$)[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?",
        allowed="1 to 32 of a-z, 0-9 and inner hyphens, and not `inputs` (it is a folder in the bucket and a tag)",
    ),
    (Run, "owner"): Rule(
        pattern=r"(?!aws:)[A-Za-z0-9_.:/=+@-]([A-Za-z0-9 _.:/=+@-]{0,126}[A-Za-z0-9_.:/=+@-])?",
        allowed="1 to 128 of A-Z a-z 0-9 space _ . : / = + - @, not starting with aws: (it is a tag)",
    ),
    (Job, "image"): _IMAGE,
    (Job, "supervisor_image"): _IMAGE,
    (Fleet, "zones"): Rule(most=6),  # us-east-1 has the most zones: six
    (Fleet, "instance_types"): Rule(most=20),  # the limit is our own, because nobody reads a longer list
    (Fleet, "nodes"): Rule(minimum=1, maximum=MOST_NODES),
    (Fleet, "gather_minutes"): Rule(minimum=5, maximum=1_440, unit="minutes"),
    (CapacityBlock, "reservation"): Rule(
        pattern=r"cr-([0-9a-f]{8}|[0-9a-f]{17})", allowed="cr-... of the fleet's region"
    ),
    (CapacityBlock, "start"): Rule(moment=True),
    (CapacityBlock, "end"): Rule(moment=True),
    (CapacityBlock, "fee_usd"): Rule(minimum=0, maximum=100_000_000, unit="USD"),
    (Fleet, "ami"): Rule(
        pattern=r"unpinned|ami-([0-9a-f]{8}|[0-9a-f]{17})",
        allowed="unpinned, or a literal ami-...",
        hint="Write unpinned, then run gpufleet doctor --pin: a maintain fleet cannot look up a parameter.",
    ),
    (Fleet, "baked_ami"): Rule(pattern=r"ami-([0-9a-f]{8}|[0-9a-f]{17})", allowed="an ami-... of `gpufleet bake`"),
    (Disk, "size_gib"): Rule(minimum=1, maximum=65_536, unit="GiB"),
    (Disk, "iops"): Rule(minimum=3_000, maximum=80_000, unit="operations/s"),
    (Disk, "throughput_mibps"): Rule(minimum=125, maximum=2_000, unit="MiB/s"),
    (Disk, "snapshot"): Rule(pattern=r"snap-([0-9a-f]{8}|[0-9a-f]{17})", allowed="snap-... of the fleet's region"),
    (Keep, "days"): Rule(minimum=1, maximum=3_650, unit="days"),
    (Limits, "max_usd"): Rule(minimum=0.01, maximum=100_000, unit="USD"),
    (Limits, "max_hours"): Rule(minimum=0.01, maximum=720, unit="hours"),
    (Limits, "usd_per_hour"): Rule(minimum=0.001, maximum=10_000, unit="USD per node-hour"),
    (Goal, "usd"): Rule(minimum=0.01, maximum=100_000, unit="USD"),
    (Goal, "hours"): Rule(minimum=0.01, maximum=10_000, unit="hours"),
    (Goal, "results"): Rule(most=10),  # the limit is our own
    (Account, "tags"): Rule(
        pattern=r"[A-Za-z0-9 _.:/=+@-]{0,256}",
        most=7,  # S3 allows 10 for an object, and the stack uses three
        allowed="a section of tags, each value up to 256 of A-Z a-z 0-9 space _ . : / = + - @",
    ),
    (Account, "permissions_boundary"): Rule(
        pattern=r"arn:aws:iam::(aws|[0-9]{12}):policy/[\w+=,.@/-]{1,512}",
        allowed="a policy's ARN, such as arn:aws:iam::111122223333:policy/boundary",
    ),
    (Account, "kms_key"): Rule(
        pattern=r"arn:aws:kms:[a-z0-9-]+:[0-9]{12}:key/[A-Za-z0-9-]+",
        allowed="a key's ARN, such as arn:aws:kms:us-east-2:111122223333:key/...",
        hint="An alias does not work, because the nodes' rights name the key itself.",
    ),
    (Vpc, "id"): Rule(pattern=r"vpc-([0-9a-f]{8}|[0-9a-f]{17})", allowed="vpc-... of the fleet's region"),
    (Vpc, "subnets"): Rule(
        pattern=r"subnet-([0-9a-f]{8}|[0-9a-f]{17})",
        allowed="a section with a subnet-... for each of fleet.zones, such as {us-east-2a: subnet-...}",
    ),
    (Notify, "email"): Rule(
        pattern=r"[^\s@,]{1,64}@[^\s@,]+\.[^\s@,]{2,}", allowed="one e-mail address, such as me@example.org"
    ),
    (Notify, "webhook"): Rule(
        pattern=r"(ssm:/|secretsmanager:)[A-Za-z0-9/_.+=@-]{1,512}",
        allowed="where its URL is kept: ssm:/name or secretsmanager:name",
        hint="A webhook's URL is a secret, because everybody who has it can post there.",
    ),
    (Notify, "silent_hours"): Rule(minimum=0.25, maximum=720, unit="hours"),
    (Estimate, "hazard_per_hour"): Rule(minimum=0, maximum=100, unit="interruptions per node-hour"),
    (Estimate, "efficiency"): Rule(minimum=0.001, maximum=1, unit="share of the roofline"),
    (Estimate, "step_ms"): Rule(minimum=0.001, maximum=3_600_000, unit="ms"),
    (Estimate, "setup_minutes"): Rule(minimum=0, maximum=240, unit="minutes"),
    (Estimate, "restart_minutes"): Rule(minimum=0, maximum=240, unit="minutes"),
    (Estimate, "capacity_wait_minutes"): Rule(minimum=0, maximum=10_080, unit="minutes"),
    (Estimate, "notice_missed"): Rule(minimum=0, maximum=1, unit="probability"),
    (Estimate, "upload_gb_per_s"): Rule(minimum=0.001, maximum=400, unit="GB/s"),
    (Estimate, "max_price_age_days"): Rule(minimum=1, maximum=3_650, unit="days"),
    (Claim, "hours"): Rule(minimum=0, maximum=100_000, unit="hours"),
    (Claim, "usd"): Rule(minimum=0, maximum=10_000_000, unit="USD"),
    (Variant, "buffer"): Rule(minimum=0, maximum=10, unit="share of the work"),
    (Variant, "hold_hours"): Rule(minimum=0.01, maximum=720, unit="hours"),
    (Interruptions, "seed"): Rule(minimum=0, maximum=2**31 - 1),
    (Interruptions, "with_notice"): Rule(minimum=0, maximum=10),
    (Interruptions, "without_notice"): Rule(minimum=0, maximum=10),
    (Interruptions, "stage_results"): Rule(minimum=1, maximum=100_000),
    (Interruptions, "notice_s"): Rule(minimum=1, maximum=120, unit="seconds"),
}

# The allowed values of a required key, if its type alone (text, a list) does not explain them.
REQUIRED: dict[tuple[type[Any], str], str] = {
    (Job, "experiment"): f"one of {', '.join(sorted(EXPERIMENTS))}; or job.command in its place, for your own script",
    (Fleet, "region"): "a region with prices in the catalog, such as us-east-2",
    (Fleet, "zones"): "a list of the region's zones, such as [us-east-2a, us-east-2b], or of their ids, [use2-az1]",
    (Fleet, "instance_types"): "a list of instance types, such as [g5.2xlarge]",
}
