"""The habits of AWS that do not depend on requests: how long its work takes, and the codes with which it refuses.

The defaults are those of the rehearsal. `recorded` returns the habits of a real account, from a canary's file.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.infra.evidence.proofs import Proof

_CODE = re.compile(r"[A-Za-z][A-Za-z.]*[A-Z][A-Za-z.]*")  # InvalidFleetId.NotFound, fleetIdDoesNotExist


@dataclass(frozen=True, kw_only=True, slots=True)
class Habits:
    """Times in seconds."""

    notice_s: float = 120.0  # seconds from a notice to the end of the node
    launch_s: float = 0.0  # from CreateFleet to the first node
    relaunch_s: float = 5.0  # seconds from a node's end to the next node
    retry_s: float = 30.0  # from a failed launch to the next try
    shown_s: float = 0.0  # seconds until lists contain a new fleet
    deleted_s: float = 0.0  # until a deleted fleet without nodes has the state deleted
    codes: Mapping[str, str] = field(default_factory=dict)  # AWS's codes of refusals, by the codes of the embedded AWS

    def sentences(self) -> Iterator[str]:
        """The habits as lines for people."""
        yield f"the first node after {self.launch_s:g} s, the next ones after {self.relaunch_s:g} s"
        yield f"a notice comes {self.notice_s:g} s before the end; AWS lists a new fleet after {self.shown_s:g} s"
        yield f"a deleted fleet has the state deleted after {self.deleted_s:g} s"
        yield from (f"{other} instead of {code}" for code, other in self.codes.items())


def recorded(proof: Proof) -> Habits:
    """The habits of a real account. The habits are the medians of the account's times; for a notice, the longest time
    that was left when a node saw it.
    """
    usual = Habits()
    return Habits(
        notice_s=proof.figure("notice.left_s", "most") or usual.notice_s,
        launch_s=proof.figure("node.launch_s") or usual.launch_s,
        relaunch_s=proof.figure("node.replaced_s") or usual.relaunch_s,
        shown_s=proof.figure("tags.fleet_s") or usual.shown_s,
        deleted_s=proof.figure("fleet.deleted_s") or usual.deleted_s,
        codes=dict(_codes(proof)),
    )


def _codes(proof: Proof) -> Iterator[tuple[str, str]]:
    """The codes of refusals that differed from the expected ones."""
    for assumption in proof.refuted():
        how, _, code = assumption["expected"].partition(" ")
        if how == "is" and _CODE.fullmatch(code) and _CODE.fullmatch(assumption["seen"]):
            yield code, assumption["seen"]


def renaming(app: Callable[..., Iterable[bytes]], codes: Mapping[str, str]) -> Callable[..., Iterable[bytes]]:
    """The WSGI application, with these codes in its refusals instead of its own."""
    if not codes:
        return app
    own = re.compile(rb"(?<![\w.])(" + b"|".join(re.escape(code.encode()) for code in codes) + rb")(?![\w.])")

    def renamed(text: bytes) -> bytes:
        return own.sub(lambda match: codes[match[1].decode()].encode(), text)

    def answer(environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        begun: list[Any] = []
        body = b"".join(app(environ, lambda *words: begun.extend(words)))
        status, headers = begun[:2]
        # This action answers with status 200, and has a separate refusal for each fleet.
        if status[0] in "45" or b"<DeleteFleetsResponse" in body:
            body = renamed(body)
            pairs = ((name, value) for name, value in headers if name.lower() != "content-length")
            headers = [(name, renamed(value.encode()).decode()) for name, value in pairs]
            headers.append(("Content-Length", str(len(body))))
        start(status, headers)
        return [body]

    return answer
