"""The part of the public image registry that resolves a tag to a digest (OCI distribution specification 1.1)."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping

# Existing tags of aws/deep-learning-containers (its releases, 2026-11-21). Repositories of other owners have any tag.
KNOWN_TAGS = {"deep-learning-containers/pytorch": {"2.13-cu133-amzn2023"}, "docker/library/python": {"3.13-slim"}}
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
Digests = Mapping[tuple[str, str], str]  # the digest by (name, tag) or (name, digest)
_PATH = re.compile(r"^/v2/(?P<name>.+)/manifests/(?P<reference>[^/]+)$")


def digest(name: str, tag: str) -> str:
    """The digest of name:tag in this registry."""
    return "sha256:" + hashlib.sha256(_manifest(name, tag)).hexdigest()


def answer(path: str, authorization: str, endpoint: str, real: Digests) -> tuple[str, dict[str, str], bytes]:
    """Status, headers and body for a GET or HEAD below /v2/ or /token/. `real`: digests of images that really exist."""
    if path.startswith("/token"):
        return "200 OK", {"Content-Type": "application/json"}, json.dumps({"token": "anonymous"}).encode()
    if not authorization.startswith("Bearer "):
        challenge = f'Bearer realm="{endpoint}/token/",service="public.ecr.aws",scope="aws"'
        return _error("401 Unauthorized", "UNAUTHORIZED", "Not Authorized", {"WWW-Authenticate": challenge})
    if path == "/v2/":
        return "200 OK", {"Content-Type": "application/json"}, b"{}"
    match = _PATH.match(path)
    if match is None:
        return _error("404 Not Found", "UNSUPPORTED", f"the rehearsal's registry has no {path}, only manifests")
    name, reference = match["name"], match["reference"]
    if (real_digest := real.get((name, reference))) is not None:
        return "200 OK", {"Content-Type": MANIFEST, "Docker-Content-Digest": real_digest}, _manifest(name, reference)
    known = KNOWN_TAGS.get(name)
    tags = {digest(name, tag): tag for tag in known or ()}
    tag = tags.get(reference, reference)
    if known is None and tag.startswith("sha256:"):  # every digest of this form exists
        return "200 OK", {"Content-Type": MANIFEST, "Docker-Content-Digest": tag}, _manifest(name, tag)
    if (known is not None and tag not in known) or tag.startswith("sha256:"):
        return _error("404 Not Found", "MANIFEST_UNKNOWN", f"Requested image not found: {name}:{reference}")
    body = _manifest(name, tag)
    return "200 OK", {"Content-Type": MANIFEST, "Docker-Content-Digest": digest(name, tag)}, body


def _manifest(name: str, tag: str) -> bytes:
    config = hashlib.sha256(f"{name}:{tag}".encode()).hexdigest()
    document = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": {"digest": f"sha256:{config}", "size": 0},
        "layers": [],
    }
    return json.dumps(document).encode()


def _error(
    status: str, code: str, text: str, headers: dict[str, str] | None = None
) -> tuple[str, dict[str, str], bytes]:
    body = json.dumps({"errors": [{"code": code, "message": text}]}).encode()
    return status, {"Content-Type": "application/json", **(headers or {})}, body
