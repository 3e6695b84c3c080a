"""Asks AWS: makes clients whose waits are bounded, reads whole listings, and finds the owner in a resource's tags."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any
from urllib.parse import urlsplit

import boto3
from botocore.config import Config

from gpufleet.infra.errors import AwsRefused
from gpufleet.infra.program.resources.tags import OWNER_TAG

_CONFIG = Config(
    connect_timeout=5,
    read_timeout=60,
    retries={"mode": "standard", "total_max_attempts": 4},
    user_agent_extra="gpufleet",
)
# These variables decide whose credentials are used; the rest of the environment is read for each client.
_IDENTITY = (
    "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN",
    "AWS_PROFILE", "AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE",
)  # fmt: skip


def client(service: str, region: str) -> Any:
    """A boto3 client with bounded waits, for the current environment, including AWS_ENDPOINT_URL."""
    try:
        return _client(service, region, tuple(os.environ.items()))
    except ValueError as error:  # botocore raises it for an invalid address
        raise AwsRefused(
            f"AWS could not be asked: {error}. Check AWS_ENDPOINT_URL and endpoint_url in AWS's configuration file: "
            "http:// or https://, a host and a port, as `gpufleet cloud` prints it; unset for real AWS."
        ) from error


@lru_cache(maxsize=32)
def _client(service: str, region: str, environment: tuple[tuple[str, str], ...]) -> Any:
    """A client, cached by environment. A sweep needs 20 clients each time it looks, and to make one takes 10 ms."""
    made = _session(*map(os.environ.get, _IDENTITY)).client(service, region_name=region, config=_CONFIG)
    urlsplit(made.meta.endpoint_url).port  # noqa: B018 - raises now if the port is wrong, not in the first request
    return made


@cache
def _session(*identity: str | None) -> boto3.session.Session:
    """A session, cached by identity. A new session would read the credentials again, and slowly the descriptions of
    services.
    """
    return boto3.session.Session()


def tags_of(resource: dict[str, Any]) -> dict[str, str]:
    """The resource's tags as a dict. AWS spells the keys of tags differently for different services."""
    tags = resource.get("Tags") or resource.get("TagSet") or resource.get("tags") or []
    if isinstance(tags, dict):
        return {str(key): str(value) for key, value in tags.items()}
    return {tag["Key"]: tag["Value"] for tag in tags}


def pages(api: Any, operation: str, key: str, **arguments: Any) -> Iterator[dict[str, Any]]:
    for page in api.get_paginator(operation).paginate(**arguments):
        yield from page.get(key) or []


def owner_of(resource: dict[str, Any]) -> str:
    """The owner in the resource's tag; empty if there is no such tag."""
    return tags_of(resource).get(OWNER_TAG, "")
