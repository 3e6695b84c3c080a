"""What stands before moto: nobody but the dummy account comes in, and a node does what its role allows.

The user may do everything. A node's session token is its instance's id, which leads to its role. Tests may have an
action refused to either.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import parse_qs

from infra.account.iam_policy import Statement
from rehearsal import registry, rights

USER_KEY = "AKIAREHEARSALUSER000"
NODE_KEY = "ASIAREHEARSALNODE000"
SECRET = "rehearsal-only-no-account-has-this"  # not a secret: the fake checks no signature

_CREDENTIAL = re.compile(r"Credential=([^/,\s]+)/[^/]*/([^/]*)/([^/]*)/")


class Gate:
    """WSGI middleware around moto's application."""

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        account: str,
        seed_region: Callable[[str], None],
        statements: Callable[[str], Sequence[Statement] | None],
        tags: Callable[[str], Mapping[str, str]],
        key_of: Callable[[str], str | None],
    ) -> None:
        """`statements`: of the role of a node, by its session token; None for a token that no node has. `tags` and
        `key_of` as `rights.asked` takes them.
        """
        self.app = app
        self.account = account
        self.seed_region = seed_region
        self.statements = statements
        self.tags, self.key_of = tags, key_of
        self.endpoint = ""  # set once the port is known
        self.denied: set[tuple[str, str]] = set()  # (access key, action)
        self.calls: list[tuple[str, str]] = []  # (access key, action), S3 left out

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        path = str(environ.get("PATH_INFO", ""))
        authorization = str(environ.get("HTTP_AUTHORIZATION", ""))
        if path.startswith(("/v2/", "/token")) and not authorization.startswith("AWS4"):
            return _send(start, environ, *registry.answer(path, authorization, self.endpoint))
        key, region, service = _credential(environ, authorization)
        if key not in (USER_KEY, NODE_KEY):
            return _send(start, environ, *_refusal(service, key))
        action = ""
        if service != "s3":
            self.seed_region(region)
            action = _action(environ)
            self.calls.append((key, action))
            if (key, action) in self.denied:
                return _send(start, environ, *_unauthorized(service, f"{action} (refused by the rehearsal)"))
        environ["HTTP_X_MOTO_ACCOUNT_ID"] = self.account
        if key == NODE_KEY:
            return self._of_node(environ, start, service, region, action)
        return self.app(environ, start)

    def _of_node(
        self, environ: dict[str, Any], start: Callable[..., Any], service: str, region: str, action: str
    ) -> Iterable[bytes]:
        """AWS's answer to a node's role: what it may not do is refused, and what it may not list is not told apart."""
        statements = self.statements(str(environ.get("HTTP_X_AMZ_SECURITY_TOKEN", "")))
        if statements is None:
            return _send(start, environ, *_refusal(service, NODE_KEY))
        method, query = str(environ["REQUEST_METHOD"]), str(environ.get("QUERY_STRING", ""))
        request = rights.Request(
            service=service,
            region=region,
            account=self.account,
            action=action,
            method=method,
            path=str(environ.get("PATH_INFO", "")),
            query=query,
            body=_body(environ) if service != "s3" or method == "POST" else b"",  # not a part of 64 MiB
        )
        for wish in rights.asked(request, self.tags, self.key_of):
            if not rights.allowed(statements, wish):
                return _send(start, environ, *_unauthorized(service, f"{wish.action} on {wish.resource}"))
        if service != "s3" or method not in ("GET", "HEAD") or rights.allowed(statements, rights.listing(request)):
            return self.app(environ, start)
        answer: list[Any] = []
        body = list(self.app(environ, lambda *words: answer.extend(words)))
        if str(answer[0]).startswith("404"):
            wish = rights.listing(request)
            return _send(start, environ, *_unauthorized(service, f"{wish.action} on {wish.resource}"))
        start(*answer)
        return body


def _credential(environ: dict[str, Any], authorization: str) -> tuple[str, str, str]:
    match = _CREDENTIAL.search(authorization)
    if match is not None:
        return match[1], match[2], match[3]
    query = parse_qs(str(environ.get("QUERY_STRING", "")))
    scope = query.get("X-Amz-Credential", [""])[0].split("/")
    return (scope[0], scope[2], scope[3]) if len(scope) == 5 else ("", "", "s3")


def _action(environ: dict[str, Any]) -> str:
    target = str(environ.get("HTTP_X_AMZ_TARGET", ""))
    if target:
        return target.rpartition(".")[2]
    if not str(environ.get("CONTENT_TYPE", "")).startswith("application/x-www-form-urlencoded"):
        return ""
    body = _body(environ)
    return parse_qs(body.decode("utf-8", "replace")).get("Action", [""])[0]


def _body(environ: dict[str, Any]) -> bytes:
    """The request's body, left in place for the next reader."""
    body: bytes = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
    environ["wsgi.input"] = io.BytesIO(body)
    return body


def _refusal(service: str, key: str) -> tuple[str, dict[str, str], bytes]:
    code = {
        "s3": "InvalidAccessKeyId",
        "ec2": "AuthFailure",
        "iam": "InvalidClientTokenId",
        "sts": "InvalidClientTokenId",
    }.get(service, "UnrecognizedClientException")
    who = f"The access key {key[:4]}... is" if key else "No access key was sent, and only the rehearsal's own is"
    text = (
        f"{who} not of this embedded AWS. It takes only the dummy keys that `gpufleet cloud` prints; nothing was done."
    )
    return _error(service, "403 Forbidden", code, text)


def _unauthorized(service: str, what: str) -> tuple[str, dict[str, str], bytes]:
    code = {"ec2": "UnauthorizedOperation", "logs": "AccessDeniedException"}.get(service, "AccessDenied")
    return _error(service, "403 Forbidden", code, f"You are not authorized to perform this operation: {what}")


def _error(service: str, status: str, code: str, text: str) -> tuple[str, dict[str, str], bytes]:
    """An error in the shape that the service's SDKs read."""
    error = f"<Code>{code}</Code><Message>{text}</Message>"
    if service == "ec2":
        body = f"<Response><Errors><Error>{error}</Error></Errors><RequestID>0</RequestID></Response>"
    elif service in ("iam", "sts"):
        body = f"<ErrorResponse><Error><Type>Sender</Type>{error}</Error></ErrorResponse>"
    elif service == "s3":
        body = f"<Error>{error}</Error>"
    else:
        body = json.dumps({"__type": code, "message": text})
        return status, {"Content-Type": "application/x-amz-json-1.1", "x-amzn-ErrorType": code}, body.encode()
    return status, {"Content-Type": "text/xml"}, f'<?xml version="1.0" encoding="UTF-8"?>\n{body}'.encode()


def _send(
    start: Callable[..., Any], environ: dict[str, Any], status: str, headers: dict[str, str], body: bytes
) -> Iterable[bytes]:
    start(status, [*headers.items(), ("Content-Length", str(len(body)))])
    return [b"" if environ.get("REQUEST_METHOD") == "HEAD" else body]
