"""Asks the instance metadata service whether EC2 is about to take this machine away.

EC2 sends no signal into a container, so this must be polled. An answer that is late, missing or malformed changes
nothing: it does not end the watch, and is not taken for a notice. A well-formed notice with an impossible time is not
believed. Like a rebalance recommendation, it only leads to an extra checkpoint.
"""

from __future__ import annotations

import http.client
import json
import socket
import threading
import urllib.parse
from collections.abc import Callable
from typing import Any

from gpufleet.job.contract import aws
from gpufleet.job.contract.reading import epoch

DEFAULT_BASE = "http://169.254.169.254"
TOKEN_S = 21600  # the time to live that AWS's own samples ask for (EC2 User Guide, spot instance termination notices)
TOKEN_MARGIN_S = 60.0
# seconds between two polls; with the two timeouts below, a notice is seen within 5 s even if a new token is needed
POLL_S = 1.5
TIMEOUT_S = 1.5
MAX_BYTES = 65536
PAST_S, AHEAD_S = 600.0, 900.0  # a notice comes 120 s ahead; a time outside this window is not a notice
ACTIONS = ("terminate", "stop", "hibernate")
NOTICE_PATH = f"/latest/{aws.NOTICE_PATH}"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"

# a function from method, path and headers to status and body; may raise OSError
Fetch = Callable[[str, str, dict[str, str]], tuple[int, bytes]]


class Metadata:
    """Notice and recommendation, from IMDSv2. Call `poll` once per interval; any thread may read the attributes."""

    def __init__(self, *, fetch: Fetch, clock: Callable[[], float], say: Callable[[str], None]) -> None:
        self.notice: float | None = None  # the time at which EC2 ends the machine (epoch seconds); once known, it stays
        self.save_wanted: str | None = None  # a text that changes with each new recommendation or doubtful notice
        self._fetch, self._clock, self._say = fetch, clock, say
        self._token: str | None = None
        self._token_until = 0.0
        self._complaint = ""
        self._turn = 0

    def poll(self) -> None:
        """Asks for a notice, and every other time for a recommendation. Never raises."""
        complaint = ""
        self._turn += 1
        try:
            if self.notice is None:
                self._take_notice(self._get(NOTICE_PATH))
            if self._turn % 2:
                self._take_recommendation(self._get(REBALANCE_PATH))
        except _DoubtError as error:
            complaint = str(error)
        # the worst failure: the system has no thread left
        except (OSError, http.client.HTTPException, ValueError, RuntimeError) as error:
            complaint = f"metadata: {type(error).__name__}: {error}"
        if complaint and complaint != self._complaint:  # a failure is reported once, not at every poll
            self._say(complaint)
        if complaint or self._turn % 2:  # True if all answers of this turn were good
            self._complaint = complaint

    def _take_notice(self, body: bytes | None) -> None:
        if body is None:
            return
        document = _object(body)
        action = document.get("action")
        if action not in ACTIONS:
            raise _DoubtError(f"metadata: an instance-action without an action is ignored: {body[:80]!r}")
        now = self._clock()
        at = epoch(document.get("time"))
        if at is None or not now - PAST_S <= at <= now + AHEAD_S:
            self.save_wanted = f"doubtful notice {document.get('time')!r}"[:100]
            raise _DoubtError(
                f"metadata: {action} at the impossible time {str(document.get('time'))[:40]!r}: saving, not stopping"
            )
        self.notice = at
        self._say(f"spot notice: {action} in {at - now:.0f} s")

    def _take_recommendation(self, body: bytes | None) -> None:
        if body is None:
            return
        time = _object(body).get("noticeTime")
        if not isinstance(time, str) or epoch(time) is None:
            raise _DoubtError(f"metadata: a recommendation without a time is ignored: {body[:80]!r}")
        if self.save_wanted != time:
            self._say(f"rebalance recommendation of {time}: saving, not stopping")
            self.save_wanted = time

    def _get(self, path: str) -> bytes | None:
        """The body of a 200; None for a 404. After a 401 the request is tried once more with a new token."""
        for last in (False, True):
            status, body = self._fetch("GET", path, {"X-aws-ec2-metadata-token": self._valid_token()})
            if status == 200:
                return body
            if status == 404:
                return None
            self._token = None if status == 401 else self._token
            if last or status != 401:
                raise _DoubtError(f"metadata: {path} answers {status}")
        raise AssertionError

    def _valid_token(self) -> str:
        now = self._clock()
        if self._token is None or now >= self._token_until:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_S)}
            status, body = self._fetch("PUT", "/latest/api/token", headers)
            token = body.decode("ascii", "replace").strip()
            if status != 200 or not token.isprintable() or not token.isascii():
                raise _DoubtError(f"metadata: no token, answer {status}")
            self._token, self._token_until = token, now + TOKEN_S - TOKEN_MARGIN_S
        return self._token


class MetadataThread:
    """Polls in a separate thread, so that a slow answer does not delay other work."""

    def __init__(self, metadata: Metadata, interval_s: float = POLL_S) -> None:
        self.metadata = metadata
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="metadata", daemon=True)

    def __enter__(self) -> Metadata:
        self._thread.start()
        return self.metadata

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(timeout=3 * TIMEOUT_S)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.metadata.poll()
            self._stop.wait(self._interval_s)


def http_fetch(base: str, timeout_s: float = TIMEOUT_S) -> Fetch:
    """Requests to the metadata service at `base`.

    A request ends after `timeout_s`, even if the answer arrives byte by byte.
    """
    parts = urllib.parse.urlsplit(base or DEFAULT_BASE)
    prefix = parts.path.rstrip("/")

    def fetch(method: str, path: str, headers: dict[str, str]) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
        try:
            connection.connect()
            # a timeout per read does not limit an answer that comes byte by byte
            limit = threading.Timer(timeout_s, _cut, [connection.sock])
            limit.daemon = True
            limit.start()
            try:
                connection.request(method, prefix + path, headers=headers)
                answer = connection.getresponse()
                return answer.status, answer.read(MAX_BYTES)
            finally:
                limit.cancel()
        finally:
            connection.close()

    return fetch


class _DoubtError(Exception):
    """An answer that cannot be believed."""


def _cut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the thread is already closed


def _object(body: bytes) -> dict[str, Any]:
    try:
        document = json.loads(body)
    except (ValueError, RecursionError):
        document = None
    if not isinstance(document, dict):
        raise _DoubtError(f"metadata: an answer that is not an object is ignored: {body[:80]!r}")
    return document
