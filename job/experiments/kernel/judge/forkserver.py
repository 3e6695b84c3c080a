"""Controls, for the judge, a process that has imported everything and forks the processes of candidates (child.py)."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpufleet.job.experiments.kernel.judge.wire import Closed, Late, receive

START_S = 120.0  # seconds to import torch and triton
PASSED_ON = (  # the environment variables that the process gets; they contain no credentials
    "PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "CUDA_HOME", "CUDA_DEVICE_ORDER", "NVIDIA_VISIBLE_DEVICES",
)  # fmt: skip


class ForkServer:
    """One fork server. The server is started again if it ends. `said`: the server's first message."""

    def __init__(self, arguments: Sequence[str], environment: dict[str, str]) -> None:
        self._arguments, self._environment = list(arguments), environment
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self.live: set[int] = set()
        self.said: dict[str, Any] = {}
        self._ready = False
        self._begin()

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def _begin(self) -> None:
        """Starts the server without waiting until the server can fork."""
        if self._control is not None:
            self._control.close()
        ours, theirs = socket.socketpair()
        self._server = python(theirs, self._arguments, self._environment)
        theirs.close()
        self._control, self._ready = ours, False

    def ready(self) -> None:
        """Waits until the server can fork. Raises RuntimeError."""
        with self._lock:
            self._greeted()

    def _greeted(self) -> socket.socket:
        assert self._control is not None
        if not self._ready:
            try:
                self.said, _ = receive(self._control, until=time.monotonic() + START_S)
            except (Closed, Late):
                raise RuntimeError("the fork server of the funnel did not start; see stderr") from None
            self._ready = True
            self._control.settimeout(START_S)
        return self._control

    def fork(self, theirs: socket.socket, asked: str) -> int:
        """Forks a new process that communicates through the socket `theirs`; returns the process's id."""
        with self._lock:
            for _ in range(2):
                assert self._server is not None
                if self._server.poll() is not None:
                    self._begin()
                with suppress(OSError):
                    control = self._greeted()
                    socket.send_fds(control, [asked.encode()], [theirs.fileno()])
                    reply = control.recv(64)
                    if reply:
                        pid = int(reply)
                        self.live.add(pid)  # added at once, so that the process is not taken for a stray
                        return pid
                self._server.kill()  # the server does not answer; it may have ended already
                self._server.wait()
        raise RuntimeError("the fork server of the funnel ended twice; see stderr")

    def ended(self, pid: int) -> None:
        """Notes the end of a process, and kills its strays, which are children of the server that were not
        requested.
        """
        self.live.discard(pid)
        with self._lock:
            for stray in set(children(self.pid)) - self.live:
                kill_all(stray)

    def close(self) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            kill_all(self._server.pid)
            self._server.wait()


def python(theirs: socket.socket, arguments: Sequence[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    """Runs child.py in a new process, which has the socket `theirs` and no credentials."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.Popen(
        [sys.executable, "-m", "gpufleet.job.experiments.kernel.judge.child", str(theirs.fileno()), *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**passed_on, **fixed, **environment},
        start_new_session=True,
    )


def kill_all(pid: int) -> None:
    """Kills a process after its descendants, until two looks in a row find no new descendant."""
    killed, quiet = set[int](), 0
    while quiet < 2:
        fresh = set(offspring(pid)) - killed
        quiet = 0 if fresh else quiet + 1
        for one in fresh:
            _kill(one)
        killed |= fresh
    _kill(pid)


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def children(pid: int) -> list[int]:
    with suppress(OSError, ValueError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def offspring(pid: int) -> Iterator[int]:
    pending = [pid]
    while pending:
        child_ids = children(pending.pop())
        pending += child_ids
        yield from child_ids
