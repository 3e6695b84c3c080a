"""The HTTP server: GET /health, GET /info, POST /generate. Answers and errors are JSON; streams are server-sent events.

The server is Starlette on uvicorn, with limits that these two do not have. At most `CONNECTIONS` connections are open,
and `AT_ONCE` of them generate; other requests get 503. A connection is closed if its request is not complete
`PATIENCE_S` after the connection was opened or the previous answer was sent, or if the client has read nothing for so
long. When all places are taken, a new client replaces the slow client that has waited longest. Non-HTTP input gets a
JSON error too.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
import traceback
from collections.abc import AsyncIterator
from http import HTTPStatus
from operator import itemgetter
from types import FrameType
from typing import Any

import h11
import uvicorn
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.concurrency import iterate_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from gpufleet.job.experiments.pretrain.serve.batch import ROWS
from gpufleet.job.experiments.pretrain.serve.model import Served
from gpufleet.job.experiments.pretrain.serve.request import GenerateRequest, Refused, parse

AT_ONCE = ROWS
CONNECTIONS = 64
BACKLOG = 128  # connections that wait to be accepted; further clients get a reset instead of an answer
PATIENCE_S = 30.0
CLOSING_S = 8.0  # seconds for all running generations; a large model may take longer for a long prompt on a CPU
BODY_BYTES = 64 * 1024  # the longest prompt is a few thousand characters
ROUTES = {"/health": "GET", "/info": "GET", "/generate": "POST"}


class Server(uvicorn.Server):
    """Serves one model from its creation until `should_exit`. If the port is 0, a free port is used; `address` has it.
    Raises OSError if the address cannot be used, OverflowError for a port beyond 65535.
    """

    def __init__(self, address: tuple[str, int], served: Served) -> None:
        self.served = served
        self.under_way = 0  # running generations
        # Otherwise asyncio does not switch Nagle's algorithm off, and a request takes 45 ms instead of 0.5.
        self.listening = socket.socket(proto=socket.IPPROTO_TCP)
        try:
            self.listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self.listening.bind(address)
        except BaseException:
            self.listening.close()
            raise
        self.listening.listen(BACKLOG)
        self.address: tuple[str, int] = self.listening.getsockname()
        super().__init__(
            uvicorn.Config(
                application(self),
                http=Connection,
                backlog=BACKLOG,
                lifespan="off",
                log_config=None,
                log_level="critical",  # a client's mistakes are not logged; `_failed` prints ours
                server_header=False,
                proxy_headers=False,
                timeout_keep_alive=int(PATIENCE_S) + 1,  # Connection keeps this time itself
                timeout_graceful_shutdown=int(CLOSING_S),
            )
        )

    def serve_forever(self) -> None:
        """Serves until `should_exit`."""
        self.run(sockets=[self.listening])

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Ends the server cleanly on SIGTERM and Ctrl-C. uvicorn itself would end the process by the signal
        afterwards.
        """
        self.should_exit = True

    def end_one(self) -> None:
        """Notes that a generation is over."""
        self.under_way -= 1

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Waits up to CLOSING_S until running generations have sent their end."""
        await super().shutdown(sockets)
        if (
            self.under_way
        ):  # raised if a generation still computes its next character, because torch cannot be stopped in the middle
            os._exit(0)


class Connection(H11Protocol):
    """One connection, with the time limits that uvicorn lacks."""

    late: asyncio.TimerHandle | None = None  # the timer that closes the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._drop_in(PATIENCE_S)
        if len(self.connections) > CONNECTIONS:
            others = (
                connection
                for connection in self.connections
                if isinstance(connection, Connection) and connection is not self
            )
            slow = [(connection.late.when(), connection) for connection in others if connection.late]
            if slow:  # a slow client must not keep others out
                min(slow, key=itemgetter(0))[1]._drop()
            else:
                self._refuse(503, f"{CONNECTIONS} connections are open already; try again in a moment")

    def connection_lost(self, exc: Exception | None) -> None:
        self._drop_in(None)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._answering() and not self.cycle.more_body:
            self._drop_in(None)  # the request is complete
            if len(self.conn.trailing_data[0]) > BODY_BYTES:
                self.transport.abort()
            else:
                # If a client has already sent its next request, uvicorn stops reading, and would not notice that the
                # client leaves.
                self.flow.resume_reading()

    def on_response_complete(self) -> None:
        self._drop_in(PATIENCE_S)
        super().on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._drop_in(PATIENCE_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._drop_in(None if self._answering() else PATIENCE_S)

    def send_400_response(self, msg: str) -> None:
        if self._answering():
            return  # the input follows an answered request, and ends the connection
        error = sys.exception()  # uvicorn calls this method where it catches the error
        status = error.error_status_hint if isinstance(error, h11.ProtocolError) else 400
        self._refuse(status, f"not an HTTP request ({error})")

    def _refuse(self, status: int, sentence: str) -> None:
        """Answers errors outside of the routes, and closes the connection."""
        answer = _answer(status, {"error": sentence}, Connection="close")
        head = b"".join(b"%b: %b\r\n" % header for header in answer.raw_headers)
        first = f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\n".encode()
        self.transport.write(first + head + b"\r\n" + bytes(answer.body))
        self.transport.close()

    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _drop_in(self, seconds: float | None) -> None:
        if self.late is not None:
            self.late.cancel()
        self.late = None if seconds is None else self.loop.call_later(seconds, self._drop)

    def _drop(self) -> None:
        self._drop_in(None)
        self.transport.abort()


def application(server: Server) -> Starlette:
    """The three routes. All errors are JSON."""

    async def health(request: Request) -> Response:
        return _answer(200, {"status": "ok"})

    async def info(request: Request) -> Response:
        return _answer(200, server.served.info())

    async def generate(request: Request) -> Response:
        asked, name = parse(await _body(request), longest=server.served.sequence), server.served.name
        if server.under_way >= AT_ONCE:
            raise Refused(503, f"{AT_ONCE} generations are under way already; try again in a moment")
        server.under_way += 1
        characters = _follow(server, asked)
        if asked.stream:
            headers = {"Content-Type": "text/event-stream", "Cache-Control": "no-store"}
            events = _events(asked.prompt, characters, name)
            return StreamingResponse(events, headers=headers, background=BackgroundTask(server.end_one))
        try:
            text = ""
            async for character in characters:
                if await request.is_disconnected():
                    raise ClientDisconnect
                text += character
        finally:
            server.end_one()
        return _answer(200, _result(asked.prompt, text, name))

    endpoints = {"/health": health, "/info": info, "/generate": generate}
    handlers: dict[Any, Any] = {Refused: _refused, HTTPException: _refused, ClientDisconnect: _gone, Exception: _failed}
    routes = [Route(path, endpoints[path], methods=[method]) for path, method in ROUTES.items()]
    app = Starlette(routes=routes, exception_handlers=handlers)
    app.router.redirect_slashes = False
    return app


async def _body(request: Request) -> bytes:
    """The whole body. Raises Refused for more than BODY_BYTES; uvicorn reads and drops the rest."""
    body = b""
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise Refused(413, f"the body is too long; at most {BODY_BYTES} bytes are allowed")
    return body


async def _follow(server: Server, asked: GenerateRequest) -> AsyncIterator[str]:
    """The generated characters. Yields the generated characters. Raises Refused if the server ends or the model
    fails.
    """
    characters = iterate_in_threadpool(server.served.generate(asked))
    while True:
        try:
            character = await anext(characters, None)
        except Exception as error:  # any error ends this generation, but not the server
            traceback.print_exc()
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise Refused(500, f"the generation failed: {reason}") from error
        if character is None:
            return
        if server.should_exit:
            raise Refused(503, "the server is ending")
        yield character


async def _events(prompt: str, characters: AsyncIterator[str], model: str) -> AsyncIterator[str]:
    """One event per character, then the whole answer with `"done": true`."""
    text = ""
    try:
        async for character in characters:
            text += character
            yield _event({"text": character})
        yield _event({**_result(prompt, text, model), "done": True})
    except Refused as refusal:  # the status was already sent
        yield _event({"error": str(refusal)})


async def _refused(request: Request, error: Refused | HTTPException) -> Response:
    path = request.scope["path"]
    if isinstance(error, Refused):
        return _answer(error.status, {"error": str(error)})
    if error.status_code == HTTPStatus.METHOD_NOT_ALLOWED:
        problem = f"{path} takes {ROUTES[path]}, not {request.method}"
        return _answer(405, {"error": problem}, Allow=ROUTES[path])
    return _answer(404, {"error": f"there is no {path[:100]}; there are {', '.join(ROUTES)}"})


async def _gone(request: Request, error: ClientDisconnect) -> Response:
    return Response()  # the client has left


async def _failed(request: Request, error: Exception) -> Response:
    traceback.print_exception(error)
    return _answer(500, {"error": f"{type(error).__name__}: {error}".partition("\n")[0]})


def _answer(status: int, value: dict[str, Any], **headers: str) -> Response:
    if status == HTTPStatus.SERVICE_UNAVAILABLE:
        headers["Retry-After"] = "1"
    return Response(_json(value), status, headers, "application/json")


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value) + "\n").encode()


def _event(value: dict[str, Any]) -> str:
    return f"data: {json.dumps(value)}\n\n"


def _result(prompt: str, text: str, model: str) -> dict[str, Any]:
    return {"prompt": prompt, "generated_text": text, "tokens_generated": len(text), "model": model}
