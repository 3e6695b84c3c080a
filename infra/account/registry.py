"""Finds the digest of an image's tag, without docker.

For a private repository of Amazon ECR this module uses ECR's API. It asks any other registry by HTTP (OCI distribution
specification 1.1) with an anonymous token, because a node has no login there.
"""

from __future__ import annotations

import json
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from http.client import HTTPException, HTTPMessage

from gpufleet.infra.account import aws, refusals
from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.program import ecr

# Index types come first, because `docker pull` of a tag resolves to the digest of the index.
_ACCEPT = ", ".join(
    (
        "application/vnd.oci.image.index.v1+json",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.distribution.manifest.v2+json",
    )
)
_TIMEOUT_S = 20
_DOCKER_HUB = {"docker.io": "registry-1.docker.io", "index.docker.io": "registry-1.docker.io"}


def digest(image: str) -> str:
    """The digest (sha256:...) of an image. If the image's name already has a digest, the function checks that this
    digest exists.

    Asks the registry in the image's name, or the one in GPUFLEET_REGISTRY_ENDPOINT. Raises AwsRefused, and for a
    private ECR repository botocore's errors.
    """
    if private := ecr.repository(image):
        return _of_ecr(image, private)
    registry, _, path = image.partition("/")
    endpoint = os.environ.get("GPUFLEET_REGISTRY_ENDPOINT") or f"https://{_DOCKER_HUB.get(registry, registry)}"
    name, _, pinned = path.partition("@")
    repository, _, tag = name.partition(":")
    url = f"{endpoint.rstrip('/')}/v2/{repository}/manifests/{pinned or tag}"
    try:
        headers = _ask(url, image, {"Accept": _ACCEPT})
    except (OSError, HTTPException, ValueError) as error:
        raise AwsRefused(
            f"the registry of {image} cannot be asked ({error}). Check the network and the image's name."
        ) from None
    answered = headers.get("Docker-Content-Digest") or pinned
    if not re.fullmatch(r"sha256:[0-9a-f]{64}", answered):
        raise AwsRefused(f"the registry of {image} returns no digest; write it by hand: {name}@sha256:...")
    return answered


_NO_IMAGE = ("RepositoryNotFoundException", "ImageNotFoundException")


def _of_ecr(image: str, repository: ecr.Repository) -> str:
    tag, _, pinned = image.partition("/")[2].removeprefix(repository.name).removeprefix(":").partition("@")
    wanted = {"imageDigest": pinned} if pinned else {"imageTag": tag}
    named = {"registryId": repository.account, "repositoryName": repository.name, "imageIds": [wanted]}
    ask = aws.client("ecr", repository.region).describe_images
    if (answer := refusals.absent(lambda: ask(**named), *_NO_IMAGE)) is None:
        raise _missing(image)
    return str(answer["imageDetails"][0]["imageDigest"])


def _missing(image: str) -> AwsRefused:
    return AwsRefused(f"the registry has no {image}. Check job.image: its tag may have been withdrawn.")


def _private(image: str) -> AwsRefused:
    return AwsRefused(
        f"{image} is not public, and a node has no login. Copy it to a public repository, or to a private one of "
        "Amazon ECR, to which a node logs in by its role."
    )


def _ask(url: str, image: str, headers: dict[str, str]) -> HTTPMessage:
    """The headers of the registry's answer. If the registry asks for a token, the request is repeated with an anonymous
    token.
    """
    try:
        return _get(url, headers)[0]
    except urllib.error.HTTPError as error:
        challenge = error.headers.get("WWW-Authenticate", "")
        error.close()
        if error.code == 404:
            raise _missing(image) from None
        if error.code == 429:
            raise AwsRefused(
                f"the registry of {image} limits requests without a login (429). Try again later. Nodes may fail in "
                "the same way: copy the image to a repository of your own, such as Amazon ECR."
            ) from None
        wants_login = error.code == 401 and not challenge.startswith("Bearer ")
        if wants_login or ("Authorization" in headers and error.code in (401, 403)):
            raise _private(image) from None
        if "Authorization" in headers or error.code != 401:
            raise
    return _ask(url, image, {**headers, "Authorization": f"Bearer {_token(challenge, image)}"})


def _token(challenge: str, image: str) -> str:
    """An anonymous token to pull with, from the address in the registry's challenge."""
    fields = dict(re.findall(r'(\w+)="([^"]*)"', challenge))
    query = urllib.parse.urlencode({key: fields[key] for key in ("service", "scope") if key in fields})
    try:
        _, body = _get(f"{fields.get('realm', '')}?{query}", {})
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 403):
            raise _private(image) from None
        raise
    answer = json.loads(body)
    return str(answer.get("token") or answer.get("access_token") or "")


def _get(url: str, headers: dict[str, str]) -> tuple[HTTPMessage, bytes]:
    if not url.startswith(("https://", "http://")):
        raise ValueError(f"not an http address: {url}")
    request = urllib.request.Request(url, headers={"User-Agent": "gpufleet", **headers})
    with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as answer:
        return answer.headers, answer.read(4 * 1024 * 1024)
