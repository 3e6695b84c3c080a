"""The HTTP server: GET /health, GET /info, POST /generate. Answers and errors are JSON; streams are server-sent events.

Each connection has a thread, `CONNECTIONS` at most; at most `AT_ONCE` of them generate. Others are told to come again
(503). A request that is not here whole `PATIENCE_S` after the connection or the answer before is dropped, and so is a
client that reads nothing for as long. The generation of one that left, or closed its side, ends at its next character.
A generation that fails is answered (500), and the server lives on.
"""

from __future__ import annotations

import io
import json
import select
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import suppress
from email.errors import MissingHeaderBodySeparatorDefect
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from job.experiments.pretrain.serve.model import Served
from job.experiments.pretrain.serve.request import Refused, parse

AT_ONCE = 4
CONNECTIONS = 64
PATIENCE_S = 30.0
CLOSING_S = 8.0  # for all generations under way; a large model may take longer for a long prompt on a CPU
BODY_BYTES = 64 * 1024  # the longest prompt is a few thousand characters
LENGTH_DIGITS = 20  # of Content-Length; int() refuses thousands of them
DRAINED_BYTES = 1024 * 1024
ROUTES = {"/health": "GET", "/info": "GET", "/generate": "POST"}


class Server(ThreadingHTTPServer):
    """Serves one model until `shutdown`. Port 0 takes a free one; `server_address` says which."""

    daemon_threads = True  # a connection that only waits does not keep us
    request_queue_size = 128  # connections not yet accepted; clients beyond them are reset, not told to come again

    def __init__(self, address: tuple[str, int], served: Served) -> None:
        self.served = served
        self.free = threading.BoundedSemaphore(AT_ONCE)
        self.room = threading.BoundedSemaphore(CONNECTIONS)
        self.ending = threading.Event()
        self.idle = True
        super().__init__(address, Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """A thread for the connection, or 503 without one."""
        if self.room.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            _turn_away(request)

    def shutdown_request(self, request: Any) -> None:
        """Ends each connection that had room, also where its thread could not start."""
        super().shutdown_request(request)
        self.room.release()

    def shutdown(self) -> None:
        self.ending.set()  # every generation ends at its next character
        super().shutdown()

    def server_close(self) -> None:
        """Closes the port and waits up to CLOSING_S until the generations under way have said that they end. `idle`
        says whether they have, or one still computes its next character.
        """
        super().server_close()
        deadline = time.monotonic() + CLOSING_S
        ended = [self.free.acquire(timeout=max(0.0, deadline - time.monotonic())) for _ in range(AT_ONCE)]
        self.idle = all(ended)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that went away is no error of ours; anything else is printed as usual."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Incoming(io.RawIOBase):
    """What a connection sends, until `deadline` (time.monotonic). A socket's timeout begins anew with each byte."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.deadline = 0.0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        """Raises TimeoutError at the deadline."""
        left_s = self.deadline - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request is not whole")
        self.connection.settimeout(left_s)
        try:
            return self.connection.recv_into(buffer)
        finally:
            self.connection.settimeout(PATIENCE_S)  # of each write


class Handler(BaseHTTPRequestHandler):
    """One connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    default_request_version = "HTTP/1.0"  # the library's, 0.9, refuses a broken first line without a status
    server_version = "gpufleet"
    timeout = PATIENCE_S
    disable_nagle_algorithm = True  # head and body are two writes: 45 ms a request over loopback with it, 2 without

    def __getattr__(self, name: str) -> Any:
        """do_GET, do_POST and whatever else a client may call a method."""
        if name.startswith("do_"):
            return self._serve
        raise AttributeError(name)

    def setup(self) -> None:
        super().setup()
        self.rfile.close()
        self.incoming = Incoming(self.connection)
        self.rfile = io.BufferedReader(self.incoming)

    def handle_one_request(self) -> None:
        self.incoming.deadline = time.monotonic() + PATIENCE_S
        super().handle_one_request()

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing per request."""

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """What the standard library refuses by itself, as JSON too."""
        self.close_connection = True
        self._answer(code, {"error": message or HTTPStatus(code).phrase})

    def _serve(self) -> None:
        try:
            path = self.path.partition("?")[0]
            body = self._body()
            if path not in ROUTES:
                raise Refused(404, f"there is no {path[:100]}; there are {', '.join(ROUTES)}")
            if self.command != ROUTES[path] and (self.command, ROUTES[path]) != ("HEAD", "GET"):
                raise Refused(405, f"{path} takes {ROUTES[path]}, not {self.command}")
            if path == "/health":
                self._answer(200, {"status": "ok"})
            elif path == "/info":
                self._answer(200, self.server.served.info())
            else:
                self._generate(body)
        except Refused as refusal:
            self._answer(refusal.status, {"error": str(refusal)}, allow=ROUTES.get(self.path.partition("?")[0]))

    def _body(self) -> bytes:
        """The whole body, so that the connection can be used again. Raises Refused, and then closes it."""
        if any(isinstance(defect, MissingHeaderBodySeparatorDefect) for defect in self.headers.defects):
            self.close_connection = True  # the headers from there on are not read: one may say that a body follows
            raise Refused(400, "a header line without a name and a colon right behind it")
        lengths = self.headers.get_all("Content-Length", [])
        if len(lengths) + ("Transfer-Encoding" in self.headers) > 1:  # two ends of one body: what follows is anyone's
            self.close_connection = True
            raise Refused(400, "more than one of Content-Length and Transfer-Encoding; send one Content-Length")
        stated = lengths[0].strip(" \t") if lengths else None  # blanks around a value are none of it (RFC 9110, 5.5)
        if stated is None:
            if self.command == "POST" or "Transfer-Encoding" in self.headers:
                self.close_connection = True
                raise Refused(411, "Content-Length is missing; send the body whole, not chunked")
            return b""
        if not stated.isascii() or not stated.isdigit():
            self.close_connection = True
            raise Refused(400, f"Content-Length: {stated[:40]!r} is not a number of bytes")
        if len(stated) > LENGTH_DIGITS or int(stated) > BODY_BYTES:
            self.close_connection = True
            raise Refused(413, f"the body is {stated[:40]} bytes; at most {BODY_BYTES} are taken")
        return self.rfile.read(int(stated))

    def _generate(self, body: bytes) -> None:
        served = self.server.served
        asked = parse(body, longest=served.sequence)
        if not self.server.free.acquire(blocking=False):
            raise Refused(503, f"{AT_ONCE} generations are under way already; try again in a moment")
        try:
            characters = self._until_the_end(served.generate(asked))
            if asked.stream:
                return self._stream(asked.prompt, characters)
            text = "".join(characters)
        finally:
            self.server.free.release()
        self._answer(200, _result(asked.prompt, text, served.name))  # whoever has it may ask again at once

    def _until_the_end(self, characters: Iterator[str]) -> Iterator[str]:
        """Raises Refused where the server ends or the model fails, ConnectionError where nobody waits any more."""
        while True:
            try:
                character = next(characters, None)
            except Exception as error:  # whatever it is, it ends this generation and not the server
                traceback.print_exc()
                said = f"{type(error).__name__}: {error}".partition("\n")[0]
                raise Refused(500, f"the generation failed: {said}") from error
            if character is None:
                return
            if self.server.ending.is_set():
                self.close_connection = True
                raise Refused(503, "the server is ending")
            if self._client_left():
                raise ConnectionAbortedError("the client left")
            yield character

    def _client_left(self) -> bool:
        """Also of a client that had sent more than its request: to `recv` that hides the end behind it."""
        waiting = select.poll()
        waiting.register(self.connection, select.POLLHUP | getattr(select, "POLLRDHUP", 0))  # the latter is Linux's
        return bool(waiting.poll(0))

    def _stream(self, prompt: str, characters: Iterator[str]) -> None:
        """One event per character, then the whole answer with `"done": true`."""
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Cache-Control", "no-store")
        chunked = self.request_version != "HTTP/1.0"
        if chunked:
            self.send_header("Transfer-Encoding", "chunked")
        else:
            self.close_connection = True
        self.end_headers()

        def event(value: dict[str, Any]) -> None:
            line = f"data: {json.dumps(value)}\n\n".encode()
            self.wfile.write(b"%x\r\n%b\r\n" % (len(line), line) if chunked else line)

        text = ""
        try:
            for character in characters:
                text += character
                event({"text": character})
            event({**_result(prompt, text, self.server.served.name), "done": True})
        except Refused as refusal:  # the status is sent already
            event({"error": str(refusal)})
        if chunked:
            self.wfile.write(b"0\r\n\r\n")

    def _answer(self, status: int, value: dict[str, Any], *, allow: str | None = None) -> None:
        content = (json.dumps(value) + "\n").encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        if status == HTTPStatus.METHOD_NOT_ALLOWED and allow:
            self.send_header("Allow", allow)
        if status == HTTPStatus.SERVICE_UNAVAILABLE:
            self.send_header("Retry-After", "1")
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        if self.close_connection and status >= HTTPStatus.BAD_REQUEST:
            self._drain()

    def _drain(self) -> None:
        """Reads what of the request is not read yet: closed before, the connection could lose our answer."""
        with suppress(OSError):  # the client left, or sends slowly
            self.connection.shutdown(socket.SHUT_WR)  # it need not wait for us
            self.rfile.read(DRAINED_BYTES)


def _turn_away(connection: socket.socket) -> None:
    """503 without waiting for anything: called by the thread that accepts connections."""
    content = json.dumps({"error": f"{CONNECTIONS} connections are open already; try again in a moment"}) + "\n"
    head = (
        "HTTP/1.1 503 Service Unavailable\r\nContent-Type: application/json\r\nRetry-After: 1\r\nConnection: close\r\n"
    )
    with connection, suppress(OSError):
        connection.setblocking(False)
        connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n{content}".encode())
        connection.shutdown(socket.SHUT_WR)
        connection.recv(BODY_BYTES)  # as Handler._drain, of what is here already


def _result(prompt: str, text: str, model: str) -> dict[str, Any]:
    return {"prompt": prompt, "generated_text": text, "tokens_generated": len(text), "model": model}
