"""A node's instance metadata service, version 2 only, with the faults that a supervisor must survive.

imds = Imds(instance)               # for a fleet's instance; Imds() is for one that no fleet launched
imds.notice(at)                     # spot/instance-action from now on
imds.fault = "500"                  # on the notice paths; see Fault
imds.endpoint                       # for AWS_EC2_METADATA_SERVICE_ENDPOINT
imds.close()
"""

from __future__ import annotations

import json
import threading
import uuid
from datetime import datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Literal

from gpufleet.job.text import stamp
from gpufleet.rehearsal.clock import Clock, SystemClock
from gpufleet.rehearsal.launch import CloudInstance

Fault = Literal["500", "garbage", "bad-time", "slow", "silent", "401"]
TOKEN_S = 21600  # the longest life of a token (EC2 User Guide, instance metadata options, read 2026-11-21)
NOTICE_PATHS = ("spot/instance-action", "events/recommendations/rebalance")


class Imds:
    """One metadata service on a loopback port, from construction to `close()`."""

    def __init__(
        self,
        instance: CloudInstance | None = None,
        *,
        account: str = "111122223333",
        access_key: str = "ASIA",
        secret_key: str = "secret",
        clock: Clock | None = None,
        address: str = "127.0.0.1",
    ) -> None:
        self.clock: Clock = clock or SystemClock()
        self.address = address  # the address of the machine itself
        self.instance = instance or _standalone_instance(self.clock.now())
        self.account, self.access_key, self.secret_key = account, access_key, secret_key
        self.fault: Fault | None = None  # the fault, on the two notice paths only, so that credentials still arrive
        self.faults = 0  # how many answers the fault has spoiled
        self.slow_s = 30.0  # how long a slow answer takes
        self.token_s = 0.0  # how long a token takes
        self.requests: list[tuple[datetime, str, int]] = []  # time, path and status of each request
        self._tokens: dict[str, datetime] = {}  # the time until which each token is valid
        self._closed = threading.Event()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def notice(self, at: datetime) -> None:
        """Makes the service report from now on that the instance will be terminated at `at`."""
        self.instance.notice_at, self.instance.terminate_at = self.clock.now(), at

    def rebalance(self, at: datetime) -> None:
        """Makes the service report from now on a rebalance recommendation made at `at`."""
        self.instance.rebalance_at = at

    def close(self) -> None:
        """Ends the service; a second call does nothing."""
        if not self._closed.is_set():
            self._closed.set()
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()

    def __enter__(self) -> Imds:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def new_token(self, seconds: str | None) -> str | None:
        """A new token; None if AWS would answer 400: a time to live of 1 s to 6 h is required."""
        if seconds is None or not seconds.isascii() or not seconds.isdigit() or not 1 <= int(seconds) <= TOKEN_S:
            return None
        self._closed.wait(self.token_s)
        token = uuid.uuid4().hex
        self._tokens[token] = self.clock.now() + timedelta(seconds=int(seconds))
        return token

    def read(self, path: str, token: str | None) -> tuple[int, str]:
        """Status and body of the answer to a GET."""
        self.faults += self.fault is not None
        if token not in self._tokens or self.clock.now() >= self._tokens[token] or self.fault == "401":
            return 401, "401 - Unauthorized"
        if self.fault is not None and path.removeprefix("/latest/meta-data/") in NOTICE_PATHS:
            if self.fault in ("slow", "silent"):
                self._closed.wait(self.slow_s)
            return {
                "500": (500, "500 - Internal Server Error"),
                "garbage": (200, "<html>\x00 not what you asked for"),
                "bad-time": (200, json.dumps({"action": "terminate", "time": "soon", "noticeTime": "soon"})),
            }.get(self.fault, (404, "404 - Not Found"))
        body = self._document(path.removeprefix("/latest/"))
        return (404, "404 - Not Found") if body is None else (200, body)

    def _document(self, path: str) -> str | None:
        node = self.instance
        notice, rebalance = node.terminate_at if node.notice_at else None, node.rebalance_at
        tags = node.tags if node.tags_in_metadata else {}
        fixed: dict[str, str | None] = {
            "meta-data/instance-id": node.id,
            "meta-data/instance-type": node.type,
            "meta-data/instance-life-cycle": "spot" if node.spot else "on-demand",
            "meta-data/ami-id": node.image,
            "meta-data/local-ipv4": self.address,
            "meta-data/placement/availability-zone": node.zone,
            "meta-data/placement/region": node.region,
            "meta-data/tags/instance": "\n".join(tags) if tags else None,
            "meta-data/iam/security-credentials": node.profile,
            "meta-data/spot/instance-action": None
            if notice is None
            else json.dumps({"action": "terminate", "time": stamp(notice)}),
            "meta-data/spot/termination-time": None if notice is None else stamp(notice),
            "meta-data/events/recommendations/rebalance": (
                None if rebalance is None else json.dumps({"noticeTime": stamp(rebalance)})
            ),
            "dynamic/instance-identity/document": json.dumps(
                {
                    "accountId": self.account,
                    "architecture": "x86_64",
                    "availabilityZone": node.zone,
                    "imageId": node.image,
                    "instanceId": node.id,
                    "instanceType": node.type,
                    "pendingTime": stamp(node.launched_at),
                    "region": node.region,
                    "version": "2017-09-30",
                },
                indent=2,
            ),
        }
        fixed.update({f"meta-data/tags/instance/{key}": value for key, value in tags.items()})
        if node.profile:
            fixed[f"meta-data/iam/security-credentials/{node.profile}"] = json.dumps(
                {
                    "Code": "Success",
                    "Type": "AWS-HMAC",
                    "LastUpdated": stamp(node.launched_at),
                    "AccessKeyId": self.access_key,
                    "SecretAccessKey": self.secret_key,
                    "Token": node.id,  # the embedded AWS finds the role by this token
                    "Expiration": stamp(max(self.clock.now(), SystemClock().now()) + timedelta(hours=6)),
                }
            )
        return fixed.get(path.rstrip("/"))


def _standalone_instance(now: datetime) -> CloudInstance:
    """An instance that no fleet launched."""
    return CloudInstance(
        id="i-0123456789abcdef0",
        fleet_id="",
        region="us-east-2",
        type="g5.2xlarge",
        zone="us-east-2a",
        image="ami-00000000000000000",
        spot=True,
        block="",
        spot_request=None,
        user_data="",
        profile="node",
        shutdown_behavior="terminate",
        launched_at=now,
    )


def _handler(imds: Imds) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            asked = self.path == "/latest/api/token"
            token = imds.new_token(self.headers.get("X-aws-ec2-metadata-token-ttl-seconds")) if asked else None
            self._answer(*((200, token) if token else (400, "400 - Bad Request")))

        def do_GET(self) -> None:
            self._answer(*imds.read(self.path, self.headers.get("X-aws-ec2-metadata-token")))

        def _answer(self, status: int, body: str) -> None:
            imds.requests.append((imds.clock.now(), self.path, status))
            if imds.fault == "silent" and self.command == "GET":
                return  # closes the connection without an answer
            data = body.encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            try:
                self.wfile.write(data)
            except (BrokenPipeError, ConnectionResetError):
                return  # the reader has stopped waiting, as it should

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing."""

    return Handler
