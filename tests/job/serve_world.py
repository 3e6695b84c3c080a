"""What the tests of the inference server stand on: an export with random weights, a server of it, a client."""

from __future__ import annotations

import contextlib
import http.client
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from gpufleet.job.experiments.engine.export import export
from gpufleet.job.experiments.pretrain.model import CharGpt
from gpufleet.job.experiments.pretrain.serve.model import open_model
from gpufleet.job.experiments.pretrain.serve.server import Server
from gpufleet.job.experiments.pretrain.spec import CharModel
from tests.waiting import wait_for

SHAPE = CharModel(layers=2, width=32, head_dim=16)


def exported(folder: Path, **changed: Any) -> Path:
    """A final/ folder as a run leaves it, with random weights."""
    module = CharGpt(SHAPE)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
    meta = {"experiment": "pretrain-d64", "step": 24, "tokens": 99, "val_loss": 1.5, "sequence": 64}
    export(folder, module, {**meta, "shape": asdict(SHAPE), **changed})
    return folder


@contextmanager
def served(folder: Path) -> Iterator[Server]:
    """A server of an export made in `folder`, on a free port; ended afterwards."""
    server = Server(("127.0.0.1", 0), open_model(exported(folder)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join()


def ask(server: Server, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
    """Status and parsed JSON."""
    connection = http.client.HTTPConnection(*server.address)
    content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    try:
        connection.request(method, path, content, headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def generate(server: Server, **body: Any) -> tuple[int, Any]:
    return ask(server, "POST", "/generate", body)


def ask_until(server: Server, what: str, there: Callable[[], bool]) -> None:
    """Asks the server until `there`, which tells of `what`; a server looks after its connections when it is asked."""

    def look() -> bool:
        with contextlib.suppress(http.client.HTTPException, OSError):
            ask(server, "GET", "/health")
        return there()

    wait_for(what, look)
