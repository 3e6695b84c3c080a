"""A registry on loopback that has one image and counts what is asked of it, and docker daemons with disks of their own.

The image holds one static file, which is never run.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.waiting import wait_for

MANIFEST = "application/vnd.docker.distribution.manifest.v2+json"
CONFIG, LAYER = "application/vnd.docker.container.image.v1+json", "application/vnd.docker.image.rootfs.diff.tar.gzip"


def _digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


class OwnRegistry:
    """Serves the image `image`; `asked` lists the paths of all requests."""

    def __init__(self) -> None:
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            entry = tarfile.TarInfo("weights")
            entry.size = 1000
            tar.addfile(entry, io.BytesIO(os.urandom(1000)))
        layer = gzip.compress(packed.getvalue())
        rootfs = {"type": "layers", "diff_ids": [_digest(packed.getvalue())]}
        config = json.dumps({"architecture": "amd64", "os": "linux", "config": {}, "rootfs": rootfs}).encode()

        def part(kind: str, content: bytes) -> dict[str, object]:
            return {"mediaType": kind, "size": len(content), "digest": _digest(content)}

        parts = {"config": part(CONFIG, config), "layers": [part(LAYER, layer)]}
        manifest = json.dumps({"schemaVersion": 2, "mediaType": MANIFEST, **parts}).encode()
        self.parts = {_digest(each): each for each in (layer, config, manifest)}
        self.asked: list[str] = []
        own = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                own.asked.append(self.path)
                content = own.parts.get(self.path.rpartition("/")[2], b"")
                self.send_response(200 if content or self.path == "/v2/" else 404)
                self.send_header("Content-Type", MANIFEST if "/manifests/" in self.path else "application/octet-stream")
                self.send_header("Docker-Content-Digest", _digest(content))
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content if self.command == "GET" else b"")

            do_HEAD = do_GET  # noqa: N815 - the server's name for it

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.image = f"127.0.0.1:{self._server.server_port}/mine@{_digest(manifest)}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def daemon(disk: Path, run: Path) -> Iterator[str]:
    """A docker daemon whose images lie on the `disk`; gives its address. It makes no network."""
    run.mkdir()
    address = f"unix://{run}/docker.sock"
    words = ["dockerd", "--data-root", disk, "--exec-root", run / "exec", "--pidfile", run / "pid", "-H", address]
    apart = ["--bridge", "none", "--iptables=false", "--ip6tables=false", "--storage-driver", "vfs"]
    with (run / "log").open("wb") as log:
        process = subprocess.Popen([*map(str, words), *apart], stdout=log, stderr=log)
    try:
        ask = ["docker", "-H", address, "version"]
        answers = lambda: subprocess.run(ask, capture_output=True, check=False).returncode == 0  # noqa: E731
        wait_for("the daemon", answers, process=process, log=(run / "log").read_text)
        yield address
    finally:
        process.terminate()
        process.wait()
