"""A registry gives the digest of an image's tag, and its refusals are explained."""

from __future__ import annotations

import io
from email.message import Message
from urllib.error import HTTPError

import pytest

from gpufleet.infra.account import registry
from gpufleet.infra.errors import AwsRefused
from gpufleet.rehearsal.cloud import Cloud

IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"


def test_an_unreachable_registry_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPUFLEET_REGISTRY_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(AwsRefused, match=r"cannot be asked"):
        registry.digest(IMAGE)


def test_a_digest_that_is_gone_is_noticed(cloud: Cloud) -> None:
    with pytest.raises(AwsRefused, match=r"the registry has no .*@sha256:00"):
        registry.digest(f"{IMAGE}@sha256:" + "00" * 32)


@pytest.mark.parametrize(
    ("without_token", "with_token", "words"),
    [
        (404, 0, "the registry has no ghcr.io/us/job:1"),
        (401, 404, "the registry has no ghcr.io/us/job:1"),
        (401, 401, "is not public, and a node has no login"),
        (401, 403, "is not public, and a node has no login"),
        (401, 500, "cannot be asked"),
        (429, 0, "limits requests without a login"),
        (401, 429, "limits requests without a login"),
        (403, 0, "cannot be asked"),
    ],
)
def test_what_a_registry_refuses_with_and_without_a_token_is_said(
    without_token: int, with_token: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(url: str, headers: dict[str, str]) -> tuple[Message, bytes]:
        if url.startswith("https://token"):
            return Message(), b'{"token": "t"}'
        code = with_token if headers.get("Authorization") == "Bearer t" else without_token
        challenge = Message()
        challenge["WWW-Authenticate"] = 'Bearer realm="https://token",service="ghcr.io",scope="pull"'
        raise HTTPError(url, code, "refused", challenge, io.BytesIO())

    monkeypatch.setattr(registry, "_get", get)
    with pytest.raises(AwsRefused, match=words):
        registry.digest("ghcr.io/us/job:1")


@pytest.mark.parametrize(
    ("challenge", "of_token_service", "words"),
    [
        ('Basic realm="https://registry",service="ecr"', 200, "is not public, and a node has no login"),
        ('Bearer realm="https://token",scope="pull"', 401, "is not public, and a node has no login"),
        ('Bearer realm="https://token",scope="pull"', 403, "is not public, and a node has no login"),
        ('Bearer realm="https://token",scope="pull"', 500, "cannot be asked"),
    ],
)
def test_an_image_that_wants_a_login_is_private_however_the_registry_says_so(
    challenge: str, of_token_service: int, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def get(url: str, headers: dict[str, str]) -> tuple[Message, bytes]:
        said = Message()
        said["WWW-Authenticate"] = challenge
        raise HTTPError(url, of_token_service if url.startswith("https://token") else 401, "no", said, io.BytesIO())

    monkeypatch.setattr(registry, "_get", get)
    with pytest.raises(AwsRefused, match=words):
        registry.digest("ghcr.io/us/job:1")
