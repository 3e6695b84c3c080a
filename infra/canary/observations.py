"""What a canary has seen: the values of each fact, and the first answer of each call to AWS.

Nothing that identifies an account, a machine, a person or a key leaves this module (`redacted`), because strangers may
read the file.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from datetime import datetime
from typing import Any

LATE = "not within {:g} s"  # the value in place of a time that was not reached
LONGEST = 2  # most items of a list in a recorded answer
TAKEN_OUT = "(taken out)"
# Keys in AWS's answers whose values are taken out, because they identify a person, an account or a machine, or because
# they are keys, tokens or passwords.
_PRIVATE = {
    "accountid", "arn", "clienttoken", "displayname", "hostid", "keyname", "nexttoken", "ownerid", "principalid",
    "privatednsname", "publicdnsname", "requestid", "reservationid", "secretaccesskey", "sessiontoken", "userdata",
    "userid", "username", "id",
}  # fmt: skip
_PATTERNS = (
    (re.compile(r"arn:aws[\w-]*:[^\s\"',]+"), "arn:(taken out)"),
    (re.compile(r"\b(?:AKIA|ASIA|AIDA|AROA|ANPA|AGPA)[A-Z0-9]{12,}\b"), TAKEN_OUT),
    (re.compile(r"(?i)((?:x-amz-)?(?:signature|security-token|credential)=)[^&\s\"']+"), r"\1(taken out)"),
    (re.compile(r"[\w.+-]+@[\w-]+\.[\w.-]+"), TAKEN_OUT),
    (re.compile(r"\b([a-z]{1,10})-(?:[0-9a-f]{8}-[0-9a-f-]{27}|[0-9a-f]{17}|[0-9a-f]{8})\b"), r"\1-(taken out)"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b"), TAKEN_OUT),
    (re.compile(r"\bip-\d+-\d+-\d+-\d+[\w.-]*"), TAKEN_OUT),
    (re.compile(r"(?i)\b(?:[0-9a-f]{0,4}:){3,7}[0-9a-f]{0,4}\b"), TAKEN_OUT),  # IPv6 and MAC addresses
    (re.compile(r"\b\d{12}\b"), TAKEN_OUT),
    (re.compile(r"\b(gpufleet-canary(?:-cap)?(?:-stop|-fis)?)-[0-9a-z]+\b"), r"\1-(taken out)"),
    (re.compile(r"\b[0-9a-f]{32,64}\b"), TAKEN_OUT),
    (re.compile(r"\b[A-Za-z0-9+/]{40,}={0,2}"), TAKEN_OUT),
)
_KEPT = re.compile(r"sha256:[0-9a-f]{64}")  # digests of public images


def redacted(value: Any) -> Any:
    """The value in JSON's types, without anything that identifies an account, a machine or a person, and without keys
    and signatures. Lists are cut to LONGEST.
    """
    if isinstance(value, Mapping):
        return {
            key: TAKEN_OUT if key.lower() in _PRIVATE and not isinstance(item, Mapping | list) else redacted(item)
            for key, item in value.items()
            if key != "ResponseMetadata"
        }
    if isinstance(value, list | tuple):
        return [redacted(item) for item in value[:LONGEST]]
    if isinstance(value, datetime):
        return value.isoformat()
    if value is None or isinstance(value, bool | int | float):
        return value
    text = str(value)
    if _KEPT.fullmatch(text):
        return text
    for pattern, instead in _PATTERNS:
        text = pattern.sub(instead, text)
    return text


class FlightFacts:
    """The facts seen so far. All methods may be called from any thread."""

    def __init__(self) -> None:
        self.seen: dict[str, list[Any]] = {}
        self.answers: dict[str, Any] = {}  # redacted, by SERVICE.Operation
        self._raw: dict[str, list[Any]] = {}  # not redacted, by SERVICE.Operation, for `lacking`
        self._watched: set[int] = set()
        self._lock = threading.Lock()

    def add(self, name: str, value: Any) -> None:
        with self._lock:
            self.seen.setdefault(name, []).append(value)

    def watched(self, client: Any) -> Any:
        """Records the answers to all later calls of this client, and returns the client."""
        if id(client) not in self._watched:
            self._watched.add(id(client))
            client.meta.events.register("after-call", self._answered)
        return client

    def _answered(self, http_response: Any, parsed: dict[str, Any], model: Any, **_: Any) -> None:
        name = f"{model.service_model.service_name}.{model.name}"
        with self._lock:
            if "Error" in parsed and http_response.status_code >= 300:
                name += f" {parsed['Error'].get('Code')}"
                self.answers.setdefault(name, {"Error": redacted(parsed["Error"])})
                return
            raw = self._raw.setdefault(name, [])
            if len(raw) < 200:
                raw.append(parsed)
            answer = redacted({key: item for key, item in parsed.items() if key not in ("ResponseMetadata", "Body")})
            if name not in self.answers or (not any(self.answers[name].values()) and any(answer.values())):
                self.answers[name] = answer

    def lacking(self, call: str, paths: list[str]) -> list[str] | None:
        """Those of the paths (such as Fleets[].FleetId) that are missing in all answers; None if no answer had
        items.
        """
        presence = [{path: _has(answer, path.split(".")) for path in paths} for answer in self._raw.get(call, [])]
        known = [by_path for by_path in presence if all(has is not None for has in by_path.values())]
        if not known:
            return None
        return [path for path in paths if any(by_path[path] is False for by_path in known)]


def _has(answer: Any, path: list[str]) -> bool | None:
    """Whether the path leads to a value in each item of every list on it; None if one of these lists is empty."""
    if not path:
        return answer is not None
    name = path[0].removesuffix("[]")
    if not isinstance(answer, Mapping) or name not in answer:
        return None if path[0].endswith("[]") else False  # S3 leaves out empty lists
    if not path[0].endswith("[]"):
        return _has(answer[name], path[1:])
    inside = [_has(item, path[1:]) for item in answer[name]]
    return None if not inside or None in inside else all(inside)
