"""The checks of `gpufleet doctor` in their order: everything in the account that would fail silently after `pulumi up`.

The checks change nothing in AWS. `pin` writes the newest AMI and the image's digest into the definition file, because a
fleet that replaces nodes cannot look up the newest AMI, and a tag may stand for another image later in the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from botocore.exceptions import BotoCoreError, ClientError

from gpufleet.infra.account import checks, network_and_boundary, quotas, refusals, registry, rights
from gpufleet.infra.account.checks import Check
from gpufleet.infra.definition import pin as pins
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.inputs.readiness import code_problems, not_ready
from gpufleet.infra.program import ecr

# Deep Learning Base AMI with the open Nvidia driver, Amazon Linux 2023, x86_64. The name is the one that public code
# used on 2026-11-21, for example for the build of 2026-09-25. The AMI has driver, container toolkit and docker.
AMI_PARAMETER = "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
SKIPPED = "not checked"  # the name of a check that AWS did not answer


def pin(definition: StackDefinition, ssm: Any, say: Callable[[str], None] = print) -> None:
    """Writes AMI and digest into the definition file, and prints what changed. Raises AwsRefused."""
    newest = refusals.absent(lambda: ssm.get_parameter(Name=AMI_PARAMETER), "ParameterNotFound")
    if newest is None:
        raise AwsRefused(
            f"{definition.fleet.region} has no parameter {AMI_PARAMETER}. Choose another region, or write an AMI with "
            "the Nvidia driver, docker and the Nvidia container toolkit into fleet.ami by hand."
        )
    ami = str(newest["Parameter"]["Value"])
    images = {"image": _pinned(definition.job.image, definition.job.parameters.demands.login)}
    if definition.job.supervisor_image is not None:
        images["supervisor_image"] = _pinned(definition.job.supervisor_image)
    pins.pin(definition.source, ami=ami, **images)
    before = {"fleet.ami": definition.fleet.ami, **{f"job.{key}": getattr(definition.job, key) for key in images}}
    for key, value in {"fleet.ami": ami, **{f"job.{key}": image for key, image in images.items()}}.items():
        say(f"  pinned  {key}: {value}" if before[key] != value else f"  pinned  {key}: {value} (as before)")
    if definition.fleet.ami not in ("unpinned", ami):
        say("          A running run keeps the old values: give run.id a new value before the next `pulumi up`.")


def _pinned(image: str, login: str | None = None) -> str:
    """The image with the digest of its tag. An image behind a `login` is returned unchanged, because only nodes can ask
    its registry.
    """
    if login is not None and not ecr.repository(image):
        if "@" in image:
            return image
        raise AwsRefused(
            f"{image}: its registry needs the login of job.registry; write its digest by hand: @sha256:..."
        )
    tagged = image.partition("@")[0]
    return f"{tagged}@{registry.digest(tagged)}"


def examine(definition: StackDefinition, root: Path, client: Callable[[str, str], Any]) -> Iterator[Check]:
    """Makes every check in turn; if the credentials do not work, only the first."""
    region = definition.fleet.region
    ec2, iam, kms, service_quotas = (client(service, region) for service in ("ec2", "iam", "kms", "service-quotas"))
    who = checks.identity(client("sts", region))
    yield who
    if who.state == "problem":
        return
    groups: tuple[Callable[[], Iterator[Check]], ...] = (
        lambda: rights.check(definition, client("sts", region), iam),
        lambda: checks.service_roles(definition, iam),
        lambda: quotas.vcpu_quotas(definition, service_quotas, ec2),
        lambda: quotas.vpc_quota(definition, ec2, service_quotas),
        lambda: network_and_boundary.network(definition, ec2),
        lambda: network_and_boundary.boundary(definition, iam),
        lambda: checks.offerings(definition, ec2),
        lambda: checks.block(definition, ec2),
        lambda: checks.ami(definition, ec2),
        lambda: checks.disk_key(definition, ec2, kms, iam),
        lambda: checks.inputs(definition, client("s3", region), ec2, kms),
        lambda: images(definition, client("sts", region)),
        lambda: checks.secrets(definition, client),
        lambda: readiness(definition, root),
    )
    for group in groups:
        yield from guarded(group)


def guarded(group: Callable[[], Iterator[Check]]) -> Iterator[Check]:
    """The checks of a group. If AWS does not answer a check, the check becomes a warning, and the others still run."""
    try:
        yield from group()
    except (ClientError, BotoCoreError) as error:
        sentence = refusals.refusal(error)
        if sentence is None:
            raise
        yield Check(SKIPPED, str(sentence), "warning")


def images(definition: StackDefinition, sts: Any) -> Iterator[Check]:
    """Whether a node could pull its container images."""
    for name in definition.job.images:
        yield from _image(name, definition, sts)


def _image(name: str, definition: StackDefinition, sts: Any) -> Iterator[Check]:
    """Whether a node could pull the container image. Raises botocore's errors for a private ECR repository."""
    login = definition.job.parameters.demands.login
    if login is not None and name == definition.job.image and not ecr.repository(name):
        pinned = "@" in name
        yield Check(
            "image",
            f"{name.partition('@')[0]} is behind job.registry's login, which only nodes can read, so it was not "
            "checked",
            "warning" if pinned else "problem",
            "" if pinned else "Write its digest by hand: @sha256:...",
        )
        return
    try:
        digest = registry.digest(name)
    except AwsRefused as error:
        yield Check("image", str(error), "problem")
        return
    private = ecr.repository(name)
    if "@" in name:
        how = "exists, and a node logs in by its role" if private else "can be pulled without a login"
        yield Check("image", f"{name.partition('@')[0]} at {digest[:19]}... {how}")
    else:
        yield Check(
            "image",
            f"{name} exists but is not pinned: a replacement node may pull another image under the same tag",
            "problem",
            f"gpufleet doctor {definition.argument} --pin",
        )
    if private and private.account != (own := sts.get_caller_identity()["Account"]):
        yield Check(
            "image",
            f"{private.name} belongs to account {private.account}; cannot tell whether nodes of {own} may pull it",
            "warning",
            f"In that account, the repository's policy must allow {own} ecr:BatchGetImage and "
            "ecr:GetDownloadUrlForLayer.",
        )
    if abroad := ecr.abroad(name, definition.fleet.region):
        yield Check("image", abroad, "warning")


def readiness(definition: StackDefinition, root: Path) -> Iterator[Check]:
    """The check of everything else that `up` needs. AMI and image have checks of their own."""
    for sentence in [*map(str, code_problems(definition, root)), *not_ready(definition, root)]:
        if sentence.startswith("storage.") or ".code." in sentence:
            finding, _, fix = sentence.partition(": ")
            yield Check("inputs", finding, "problem", fix[:1].upper() + fix[1:])
