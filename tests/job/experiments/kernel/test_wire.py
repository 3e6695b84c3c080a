"""Messages of a candidate's process: whole, of their types and in time, or none."""

from __future__ import annotations

import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
import torch

from gpufleet.job.experiments.kernel.judge import wire
from tests.waiting import HANG_S


def test_a_message_that_is_none_or_too_large_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(wire.Closed):
            wire.receive(ours, until=time.monotonic() + HANG_S)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(theirs, {"shape": [1]}, [b"1234"])
        with pytest.raises(wire.Closed, match="at most 3"):
            wire.receive(ours, until=time.monotonic() + HANG_S, most_bytes=3)
        with pytest.raises(wire.Late):
            wire.receive(ours, until=time.monotonic())


def test_a_large_message_goes_in_few_pieces_and_its_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    class Counted(socket.socket):
        def send(self, *asked: Any) -> int:
            calls.append("send")
            return super().send(*asked)

        def recv_into(self, *asked: Any) -> int:
            calls.append("receive")
            return super().recv_into(*asked)

    monkeypatch.setattr(wire, "WATCH_S", 30.0)  # however busy this machine is
    ours, theirs = (Counted(fileno=end.detach()) for end in socket.socketpair())
    spec, blob = wire.pack(torch.arange(6_000_000, dtype=torch.int32))
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(wire.send, theirs, {}, [blob])
        _, (found,) = wire.receive(ours, until=time.monotonic() + HANG_S, most_bytes=len(blob), watch_s=30.0)
        sent.result()
    assert found == blob
    assert calls.count("receive") == 3  # the length, the head, and the tensor
    assert calls.count("send") == 1 + -(-len(blob) // wire.PIECE_BYTES)
    assert wire.unpack(spec, found).data_ptr() == torch.frombuffer(found, dtype=torch.int32).data_ptr()


class LookedError(Exception):
    """It was looked at who keeps us waiting."""


def looks() -> None:
    raise LookedError


@pytest.mark.parametrize("sends", [True, False])
def test_who_neither_reads_nor_writes_is_late_at_the_limit_and_looked_at_meanwhile(sends: bool) -> None:
    ours, theirs = socket.socketpair()
    until = time.monotonic() + 0.3
    tries = partial(wire.send, ours, {}, [bytes(1 << 24)]) if sends else partial(wire.receive, ours)
    with ours, theirs:
        with pytest.raises(wire.Late):
            tries(until=until)
        assert time.monotonic() >= until
        if not sends:
            with pytest.raises(LookedError):
                wire.receive(ours, until=until + HANG_S, watch=looks)


@pytest.mark.parametrize("sends", [True, False])
def test_a_limit_is_kept_by_one_who_is_interrupted_all_the_time(sends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler stops each thread many times a second."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    ours, theirs = socket.socketpair()
    until = time.monotonic() + 0.3
    tries: Callable[[], object] = partial(wire.receive, ours, until=until, watch_s=10.0)
    if sends:
        monkeypatch.setattr(wire, "WATCH_S", 10.0)
        tries = partial(wire.send, ours, {}, [bytes(1 << 24)], until=until)
    caught = list[wire.Late]()

    def waits() -> None:
        try:
            tries()
        except wire.Late as error:
            caught.append(error)

    waiting = threading.Thread(target=waits)
    try:
        waiting.start()
        while waiting.is_alive():
            signal.pthread_kill(waiting.ident or 0, signal.SIGUSR1)
            waiting.join(0.02)
        assert len(caught) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
        theirs.close()  # which ends one who still waits
        waiting.join()
        ours.close()


def test_one_who_answers_a_little_at_a_time_is_late_and_one_who_ends_is_seen_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        theirs.sendall(b"\0\0\1\0")

        def dribbles() -> None:
            with suppress(OSError):
                while True:
                    theirs.sendall(b" ")
                    time.sleep(0.01)

        pool.submit(dribbles)
        with pytest.raises(wire.Late):
            wire.receive(ours, until=time.monotonic() + 0.3, watch_s=10.0)
        ours.close()
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"\0")
        theirs.close()
        with pytest.raises(wire.Closed, match="the connection ended"):
            wire.receive(ours, until=time.monotonic() + HANG_S, watch_s=2 * HANG_S)


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("seconds", 10**400), ("seconds", -1.0), ("seconds", float("nan")), ("seconds", float("inf")),
        ("seconds", True), ("seconds", "1"), ("cpu_s", []), ("cpu_s", 10**400), ("ops", [[]]), ("ops", "add"),
        ("ops", {"a": 1}),
        ("shape", 3), ("shape", [1.0]), ("shape", [True]), ("shape", [-1]), ("shape", [1 << 70]), ("dtype", None),
        ("error", {}), ("type", 1), ("problem", 0), ("alias", 0), ("changed", "no"), ("isolated", 1),
    ],
)  # fmt: skip
def test_a_part_of_an_answer_that_has_not_its_type_is_none_of_ours(part: str, value: object) -> None:
    assert wire.reply({"more": 1}) == {}
    with pytest.raises(wire.Closed, match=part):
        wire.reply({part: value})


def test_what_is_said_in_an_answer_can_be_printed() -> None:
    assert wire.reply({"error": "a\nb\x1b[2J\ud800"}) == {"error": "a b?[2J?"}


@pytest.mark.parametrize("blobs", ["[1e999]", "[1.5]", "[-1]", "[true]", "{}", "null", '"a"', "[[]]", str([10**400])])
@pytest.mark.parametrize("shown", ['{"blobs": %s}', "[%s]"])
def test_a_head_that_is_no_message_is_not_believed(blobs: str, shown: str) -> None:
    ours, theirs = socket.socketpair()
    content = (shown % blobs).encode()
    with ours, theirs:
        theirs.sendall(struct.pack("!I", len(content)) + content)
        with pytest.raises(wire.Closed):
            wire.receive(ours, until=time.monotonic() + HANG_S, most_bytes=100)


def test_json_of_any_depth_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    content = b'{"blobs": [], "shape": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    with ours, theirs:
        theirs.sendall(struct.pack("!I", len(content)) + content)
        with pytest.raises(wire.Closed):
            wire.reply(wire.receive(ours, until=time.monotonic() + HANG_S)[0])
