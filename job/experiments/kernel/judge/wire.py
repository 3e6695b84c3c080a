"""Messages between the judge and a candidate's process: a head in JSON, and raw bytes. Pickle is never used. Messages
from a candidate's process are only data, which are compared with the question. Every part of a message must have the
type that its name has here, or the message is refused: so other code only has to check whether a part exists and is
true.
"""

from __future__ import annotations

import json
import math
import select
import socket
import struct
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32}
Blob = bytes | bytearray
Message = tuple[dict[str, Any], list[Blob]]  # head and raw bytes
HEAD_BYTES = 1 << 20
WATCH_S = 0.05  # seconds between two looks while waiting
LEAST_S = 1e-3  # the shortest wait in seconds; 0 would mean for ever
PIECE_BYTES = 1 << 22  # number of bytes that are sent at once; the time limit is checked in between
MOST_S = 1e9  # no message may contain a longer time in seconds
_LENGTH = struct.Struct("!I")
_TIME = struct.Struct("@ll")  # timeval


def _text(value: Any) -> str:
    """A text that is printable, because it ends up in logs and files. Raises TypeError."""
    if not isinstance(value, str):
        raise TypeError
    return "".join(sign if sign.isprintable() else "?" for sign in " ".join(value[:400].split()))


def _text_or_none(value: Any) -> str | None:
    return None if value is None else _text(value)


def _truth(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError
    return value


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_S:
        raise TypeError
    return float(value)


def _sizes(value: Any) -> list[int]:
    if not isinstance(value, list) or not all(type(size) is int and 0 <= size < 1 << 62 for size in value):
        raise TypeError
    return value


def _names(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError
    return [_text(name) for name in value]


PARTS: dict[str, Callable[[Any], Any]] = {
    "error": _text, "type": _text, "dtype": _text, "problem": _text_or_none, "isolated": _truth,
    "alias": _truth, "changed": _truth, "shape": _sizes, "ops": _names, "seconds": _seconds, "cpu_s": _seconds,
    "lacks": _text_or_none, "triton": _text,
}  # fmt: skip


class Closed(Exception):
    """The other side has ended, or sends something else."""


class Late(Exception):
    """The time limit has passed."""


def send(to: socket.socket, head: dict[str, Any], blobs: Sequence[Blob] = (), *, until: float = math.inf) -> None:
    """Sends a message; raises Closed, and Late after `until` (monotonic seconds)."""
    content = json.dumps({**head, "blobs": [len(blob) for blob in blobs]}).encode()
    try:
        # so that the kernel waits; with a timeout, Python would send a large message in pieces of 200 kB
        to.settimeout(None)
        for part in (_LENGTH.pack(len(content)) + content, *blobs):
            unsent = memoryview(part)
            while unsent:
                if _ready(to, select.POLLOUT, socket.SO_SNDTIMEO, WATCH_S, until):
                    with suppress(BlockingIOError):
                        unsent = unsent[to.send(unsent[:PIECE_BYTES]) :]
                if unsent and time.monotonic() > until:
                    raise Late
    except OSError as error:
        raise Closed(str(error)) from error


def receive(
    source: socket.socket,
    *,
    until: float = math.inf,
    most_bytes: int = 1 << 34,
    watch: Callable[[], None] = lambda: None,
    watch_s: float = WATCH_S,
) -> Message:
    """Receives one message, whatever its parts. `watch` is called every `watch_s` while waiting and may raise. Raises
    Late after `until` (monotonic seconds), and Closed if the other side is gone, sends more than `most_bytes`, or
    something else.
    """
    look = Look(watch, watch_s, until)
    (length,) = _LENGTH.unpack(_exactly(source, _LENGTH.size, look))
    if length > HEAD_BYTES:
        raise Closed(f"a head of {length} bytes")
    try:
        head = json.loads(_exactly(source, length, look))
        if not isinstance(head, dict):
            raise TypeError
        sizes = _sizes(head.pop("blobs", None))
    except (ValueError, TypeError, RecursionError) as error:
        raise Closed("not a message of the judge's protocol") from error
    if sum(sizes) > most_bytes:
        raise Closed(f"{sum(sizes)} bytes, but at most {most_bytes} were asked for")
    return head, [_exactly(source, size, look) for size in sizes]


def reply(head: dict[str, Any]) -> dict[str, Any]:
    """The parts that a process may answer: those in PARTS, each with its type there. Raises Closed."""
    parts = {}
    for name, part in head.items():
        if (typed := PARTS.get(name)) is not None:
            try:
                parts[name] = typed(part)
            except TypeError:
                raise Closed(f"not a message of the judge's protocol: {name}") from None
    return parts


@dataclass(frozen=True, slots=True)
class Look:
    """What a reader does while it waits for bytes."""

    watch: Callable[[], None]
    every_s: float
    until: float


def _exactly(source: socket.socket, size: int, look: Look) -> bytearray:
    """Reads exactly `size` bytes into one piece of memory, in one call if all of them have arrived."""
    content = bytearray(size)
    unread = memoryview(content)
    try:
        source.settimeout(None)
        while unread:
            if _ready(source, select.POLLIN, socket.SO_RCVTIMEO, look.every_s, look.until):
                with suppress(BlockingIOError):
                    got = source.recv_into(unread, 0, socket.MSG_WAITALL)
                    if not got:
                        raise Closed("the connection ended")
                    unread = unread[got:]
            if unread:
                look.watch()
            if time.monotonic() > look.until:
                raise Late
    except OSError as error:
        raise Closed(str(error)) from error
    return content


def _ready(end: socket.socket, event: int, timeout: int, seconds: float, until: float) -> bool:
    """Waits until a call could send or receive a byte, but at most for `seconds` seconds and until `until`; returns
    whether it could. The call itself then waits at most as long for the rest of its bytes. A call that also waited for
    its first byte would start again at every signal, and never end in a process that a profiler samples.
    """
    if until == math.inf:
        end.setsockopt(socket.SOL_SOCKET, timeout, _TIME.pack(0, 0))
        return True
    wait = min(seconds, max(LEAST_S, until - time.monotonic()))
    end.setsockopt(socket.SOL_SOCKET, timeout, _TIME.pack(int(wait), int(wait % 1 * 1e6)))
    poll = select.poll()
    poll.register(end, event)
    return bool(poll.poll(1e3 * wait))


def pack(tensor: Tensor) -> tuple[dict[str, Any], bytes]:
    """A tensor's place in its storage, and the whole storage, so that the tensor's strides survive."""
    whole = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    spec = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }
    return spec, raw(whole)


def unpack(spec: dict[str, Any], content: Blob) -> Tensor:
    """The packed tensor, with the same strides."""
    flat = torch.frombuffer(writable(content), dtype=DTYPES[spec["dtype"]])
    return flat.as_strided(spec["shape"], spec["stride"], spec["offset"])


def writable(content: Blob) -> bytearray:
    """The content in writable memory: the content itself if it was received, because such content is large; otherwise a
    copy.
    """
    return content if isinstance(content, bytearray) else bytearray(content)


def raw(tensor: Tensor) -> bytes:
    """The elements in order, as bytes."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return b"" if flat.numel() == 0 else bytes(flat.view(torch.uint8).numpy())
