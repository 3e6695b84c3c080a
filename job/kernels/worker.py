"""The judge's side of a candidate's process: started, asked within limits, watched, ended with all its offspring."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from job.kernels import wire

START_S = 120.0  # to import torch and triton
GREET_S = 120.0  # for a process to be ready: a spawned one has all to import
PASSED_ON = ("PATH", "PYTHONPATH", "LD_LIBRARY_PATH", "LANG", "CUDA_HOME", "NVIDIA_VISIBLE_DEVICES")  # no credentials


class Lost(Exception):
    """The candidate's process is over: it hung, took too much, did what is forbidden, or ended."""


class Workers:
    """Starts processes: forked from a server that has imported everything, or new ones for GPUs."""

    def __init__(self, folder: Path, *, gpus: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._gpus = folder.resolve(), gpus
        self._lock = threading.Lock()
        self._live: set[int] = set()
        self._server: subprocess.Popen[bytes] | None = None
        self._spawned: dict[int, subprocess.Popen[bytes]] = {}
        self._control: socket.socket | None = None

    def __enter__(self) -> Workers:
        """Starts the server now, so that no candidate waits for it."""
        if not self._gpus:
            with self._lock:
                self._serve()
        return self

    def __exit__(self, *error: object) -> None:
        if self._control is not None:
            self._control.close()
        if self._server is not None:
            for pid in [*_offspring(self._server.pid), self._server.pid]:
                _kill(pid)
            self._server.wait()

    @contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Where its body raises, ends every process that is at work; whoever asks one of them next gets Lost."""
        try:
            yield
        except BaseException:
            for pid in list(self._live):
                for offspring in [*_offspring(pid), pid]:
                    _kill(offspring)
            raise

    def start(self, *, memory_bytes: float, gpu: int = 0, confined: bool = True, guarded: bool = True) -> Process:
        """A new process. Our own reference needs neither confinement nor guard (job/kernels/sandbox.py)."""
        scratch = Path(tempfile.mkdtemp(dir=self.folder))
        ours, theirs = socket.socketpair()
        device = "cuda" if self._gpus else "cpu"
        asked = json.dumps({"scratch": str(scratch), "device": device, "confined": confined, "guarded": guarded})
        try:
            pid = self._spawn(theirs, asked, gpu) if self._gpus else self._fork(theirs, asked)
        finally:
            theirs.close()
        return Process(pid, ours, scratch, memory_bytes, self._ended)

    @property
    def server_pid(self) -> int | None:
        """Of the fork server, once it runs."""
        return None if self._server is None else self._server.pid

    def _fork(self, theirs: socket.socket, asked: str) -> int:
        with self._lock:
            for attempt in range(2):
                if self._server is None or self._server.poll() is not None:
                    self._serve()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [asked.encode()], [theirs.fileno()])
                    self._control.settimeout(START_S)
                    reply = self._control.recv(64)
                    if reply:
                        pid = int(reply)
                        self._live.add(pid)  # before anybody may take it for a stray
                        return pid
                except OSError:
                    if attempt:
                        raise
        raise RuntimeError("the fork server of the funnel ended twice; see stderr")

    def _serve(self) -> None:
        ours, theirs = socket.socketpair()
        self._server = _python(theirs, ["serve"], {"TRITON_INTERPRET": "1"})
        theirs.close()
        ours.settimeout(START_S)
        if ours.recv(1) != b"!":
            raise RuntimeError("the fork server of the funnel did not start; see stderr")
        self._control = ours

    def _spawn(self, theirs: socket.socket, asked: str, gpu: int) -> int:
        """A whole new process. Compiled kernels are kept under the hash of their source by Triton itself."""
        interpret = "0" if self._gpus else "1"
        environment = {"CUDA_VISIBLE_DEVICES": str(gpu), "TRITON_INTERPRET": interpret}
        process = _python(theirs, ["one", asked], environment)
        self._spawned[process.pid] = process
        self._live.add(process.pid)
        return process.pid

    def _ended(self, pid: int) -> None:
        """Also ends what got away from its parent: children of the server that nobody asked for."""
        self._live.discard(pid)
        if (spawned := self._spawned.pop(pid, None)) is not None:
            spawned.wait()
        if self._server is not None:
            with self._lock:
                for stray in set(_children(self._server.pid)) - self._live:
                    for offspring in [*_offspring(stray), stray]:
                        _kill(offspring)


class Process:
    """One candidate's process."""

    def __init__(self, pid: int, dialogue: socket.socket, scratch: Path, memory_bytes: float, ended: Any) -> None:
        self.pid, self._dialogue, self.scratch = pid, dialogue, scratch
        self.cpu_s = 0.0  # as it last said
        self._memory, self._ended = memory_bytes, ended
        self._looked_at = 0.0
        try:
            head, _ = self._receive(GREET_S, 0)
            self.isolated = bool(head.get("isolated"))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(
        self, head: dict[str, Any], blobs: Sequence[bytes] = (), *, limit_s: float, most_bytes: int = 0
    ) -> tuple[dict[str, Any], list[bytes]]:
        """One question and its answer. Raises Lost with the reason."""
        try:
            self._dialogue.settimeout(limit_s)
            wire.send(self._dialogue, head, blobs)
        except wire.Closed:
            pass  # it may have left a word before it went
        return self._receive(limit_s, most_bytes)

    def _receive(self, limit_s: float, most_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
        try:
            head, blobs = wire.receive(
                self._dialogue, until=time.monotonic() + limit_s, most_bytes=most_bytes, watch=self._watch
            )
        except wire.Late:
            raise Lost(f"no answer within {limit_s:g} s") from None
        except wire.Closed as error:
            raise Lost(f"the process ended: {error}") from None
        if "violation" in head:
            raise Lost(f"forbidden: {str(head['violation'])[:200]}")
        if isinstance(head.get("cpu_s"), float):
            self.cpu_s = head["cpu_s"]
        return head, blobs

    def _watch(self) -> None:
        now = time.monotonic()
        if now < self._looked_at + wire.WATCH_S:
            return
        self._looked_at = now
        used = sum(_resident(pid) for pid in (self.pid, *_offspring(self.pid)))
        if used > self._memory:
            raise Lost(f"{used / 1e9:.1f} GB of memory, {self._memory / 1e9:.1f} are allowed")

    def close(self) -> None:
        """Ends it and whatever it started."""
        self._dialogue.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGSTOP)  # so that nothing new is started while the rest is listed
        for pid in [*_offspring(self.pid), self.pid]:
            _kill(pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._ended(self.pid)
        shutil.rmtree(self.scratch, ignore_errors=True)


def _python(theirs: socket.socket, arguments: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    kept = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    root = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(filter(None, (root, kept.get("PYTHONPATH"))))
    fixed = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1", "PYTHONPATH": path}
    return subprocess.Popen(
        [sys.executable, "-m", "job.kernels.child", str(theirs.fileno()), *arguments],
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        env={**kept, **fixed, **environment},
        start_new_session=True,
    )


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    with suppress(OSError, ValueError):
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return []


def _offspring(pid: int) -> Iterator[int]:
    for child in _children(pid):
        yield child
        yield from _offspring(child)


def _resident(pid: int) -> int:
    with suppress(OSError, ValueError, IndexError):
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0
