"""The inference server when clients come all at once or leave, and when the model fails."""

from __future__ import annotations

import contextlib
import http.client
import json
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.experiments.pretrain.serve import server as serving
from gpufleet.job.experiments.pretrain.serve.batch import TextWriter
from gpufleet.job.experiments.pretrain.serve.model import open_model
from gpufleet.job.experiments.pretrain.serve.server import Server
from tests.job.serve_world import ask_until, exported, generate, served
from tests.waiting import HANG_S, wait_for

REAL = TextWriter.write


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with served(tmp_path_factory.mktemp("run") / "final") as server:
        yield server


def test_thirty_clients_at_once_are_all_answered(tmp_path: Path) -> None:
    body = json.dumps({"prompt": "1", "max_tokens": 50}).encode()
    request = b"POST /generate HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )
    server = Server(("127.0.0.1", 0), open_model(exported(tmp_path / "final")))
    clients = [socket.create_connection(server.address, timeout=HANG_S) for _ in range(30)]  # none is accepted yet
    for client in clients:
        client.sendall(request)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    answers = []
    for client in clients:
        with client:
            answers.append(b"".join(iter(partial(client.recv, 4096), b"")))
    server.should_exit = True
    thread.join()
    assert {answer.split()[1] for answer in answers} <= {b"200", b"503"}
    assert sum(answer.startswith(b"HTTP/1.1 200") for answer in answers) >= serving.AT_ONCE


def failing(error: Exception) -> Callable[..., Iterator[int]]:
    """Two characters, then an exception."""

    def made(*args: Any, **settings: Any) -> Iterator[int]:
        yield 1
        yield 2
        raise error

    return made


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory.\nTried to allocate"), AssertionError("ours")])
def test_a_model_that_fails_is_answered_and_the_server_lives_on(
    error: Exception, running: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = {"error": f"the generation failed: {type(error).__name__}: {error}".partition("\n")[0]}
    monkeypatch.setattr(TextWriter, "write", failing(error))
    for _ in range(serving.AT_ONCE + 1):  # it keeps no slot
        assert generate(running, prompt="1") == (500, said)
    connection = http.client.HTTPConnection(*running.address, timeout=HANG_S)
    with closing(connection):
        connection.request("POST", "/generate", json.dumps({"prompt": "1", "stream": True}))
        events = connection.getresponse().read().decode().strip().split("\n\n")
        assert [json.loads(event.removeprefix("data: ")) for event in events] == [{"text": "1"}, {"text": "2"}, said]
        monkeypatch.setattr(TextWriter, "write", REAL)
        connection.request("POST", "/generate", json.dumps({"prompt": "1", "max_tokens": 3}))
        assert connection.getresponse().status == 200
    assert "Traceback" in capsys.readouterr().err  # for whoever runs it


@pytest.mark.parametrize(
    ("stream", "more"), [(False, b""), (True, b""), (False, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")]
)
def test_the_generation_of_a_client_that_left_ends(
    stream: bool, more: bytes, running: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    began = threading.Semaphore(0)

    def endless(*args: Any, **settings: Any) -> Iterator[int]:
        began.release()
        while True:
            yield 1

    monkeypatch.setattr(TextWriter, "write", endless)
    body = json.dumps({"prompt": "1", "stream": stream}).encode()
    for _ in range(serving.AT_ONCE):
        with socket.create_connection(running.address, timeout=HANG_S) as client:
            client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))
            assert began.acquire(timeout=HANG_S)
            client.sendall(more)
    ask_until(running, "no generation under way", lambda: running.under_way == 0)


@pytest.mark.parametrize(
    "begun", [b"GET /health HTTP/1.1\r\nX: ", b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"]
)
def test_a_request_that_comes_byte_by_byte_is_dropped(
    begun: bytes, running: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "PATIENCE_S", 0.3)
    with socket.create_connection(running.address, timeout=0.05) as client:
        client.sendall(begun)

        def dropped() -> bool:
            with contextlib.suppress(TimeoutError):
                client.sendall(b"1")
                return client.recv(1) == b""
            return False

        with contextlib.suppress(ConnectionError):
            wait_for("the end of the connection", dropped)


def test_a_request_has_its_time_until_it_is_whole_and_the_next_has_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float | None] = []

    def noted(connection: serving.Connection, seconds: float | None) -> None:
        allowed.append(seconds)

    monkeypatch.setattr(serving.Connection, "_drop_in", noted)
    with (
        served(tmp_path / "final") as server,
        closing(http.client.HTTPConnection(*server.address, timeout=HANG_S)) as connection,
    ):
        for _ in range(3):
            connection.request("GET", "/health")
            assert connection.getresponse().read()
        assert allowed[:5] == [serving.PATIENCE_S, None, serving.PATIENCE_S, None, serving.PATIENCE_S]


def ask_for_stream() -> bytes:
    body = b'{"prompt": "1", "stream": true}'
    return b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body)


@pytest.mark.parametrize(
    "begun",
    [b"", b"GET /health HTTP/1.1\r\nX: ", b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 9999\r\n\r\n"],
)
def test_clients_that_are_slow_keep_no_other_out(
    begun: bytes, running: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many as there are places, each byte by byte, and each again as soon as it is dropped."""
    monkeypatch.setattr(serving, "PATIENCE_S", 10 * HANG_S)  # so that none goes by itself
    over, dropped = threading.Event(), list[int]()

    def slow() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError), socket.create_connection(running.address, timeout=HANG_S) as client:
                client.sendall(begun)
                client.settimeout(0.2)
                while not over.is_set():
                    with contextlib.suppress(TimeoutError):
                        if not client.recv(1):
                            break
                    client.sendall(b"1" if begun else b"")
            dropped.append(1)

    threads = [threading.Thread(target=slow) for _ in range(serving.CONNECTIONS)]
    for thread in threads:
        thread.start()
    try:
        ask_until(running, "all places", lambda: len(running.server_state.connections) >= serving.CONNECTIONS)
        for number in range(10):
            assert generate(running, prompt="1", max_tokens=3)[0] == 200, number
        wait_for("the end of one that is slow for each of ours", lambda: len(dropped) >= 10)
    finally:
        over.set()
        for thread in threads:
            thread.join()
    ask_until(running, "the end of all others", lambda: len(running.server_state.connections) <= 1)


def test_connections_beyond_the_room_are_told_to_come_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serving, "CONNECTIONS", 2)
    go = threading.Event()

    def waiting(*args: Any, **settings: Any) -> Iterator[int]:
        yield 1
        go.wait(HANG_S)

    monkeypatch.setattr(TextWriter, "write", waiting)
    with served(tmp_path / "final") as server:
        answered = [socket.create_connection(server.address, timeout=HANG_S) for _ in range(2)]
        for client in answered:
            client.sendall(ask_for_stream())
            assert client.recv(1)
        for _ in range(3):
            with socket.create_connection(server.address, timeout=HANG_S) as client:
                head, _, content = b"".join(iter(lambda: client.recv(4096), b"")).partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 503 ")
            assert b"retry-after: 1" in head
            assert f"content-length: {len(content)}".encode() in head
            assert json.loads(content) == {"error": "2 connections are open already; try again in a moment"}
        go.set()
        for client in answered:
            client.close()
        ask_until(server, "the end of all connections", lambda: not server.server_state.connections)
    assert capsys.readouterr().err == ""
