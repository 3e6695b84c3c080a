"""Controls a candidate's process for the judge: starts the process, asks it questions within limits, watches it, and
ends it with its children.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from gpufleet.job.experiments.kernel.judge import sandbox, usage, wire
from gpufleet.job.experiments.kernel.judge.compiler import CACHE, CAPABILITY
from gpufleet.job.experiments.kernel.judge.forkserver import ForkServer, kill_all, offspring, python

GREET_S = 120.0  # the most seconds until a process is ready; a spawned process has to import everything
COMPILING_S = 1.0  # seconds between two looks at a compiling process, because many of them may run at once
SCRATCH_BYTES = 1 << 28  # the most bytes in the process's folder; a compiled kernel takes about 50 kB


class Lost(Exception):
    """The candidate's process was lost: it hung, used too much memory or disk, or ended."""


class OutOfTime(Lost):
    """The process did not answer in time. The process's earlier answers are still valid."""


class NotBegun(Lost):
    """The process ended, or did not answer, before it had a source, so the candidate is not the cause."""


class NoDeviceError(Exception):
    """A process had no GPU, or did not start, before it got a candidate. No candidate is the cause."""


class Workers:
    """Starts processes. Processes that compile, and on a CPU processes that interpret, are forked from servers that
    have imported everything; processes for GPUs are new.
    """

    def __init__(self, folder: Path, *, gpus: bool) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self._gpus = folder.resolve(), gpus
        major, minor = torch.cuda.get_device_capability() if gpus and torch.cuda.is_available() else CAPABILITY
        self.capability = 10 * major + minor
        self._spawned: dict[int, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Workers:
        """Starts the servers now, all at the same time, so that no candidate has to wait for them."""
        hidden = {"CUDA_VISIBLE_DEVICES": ""}
        compiling = {"TRITON_INTERPRET": "0", "TMPDIR": str(self.folder), **hidden}
        self._compiling = ForkServer(["compile", str(self.capability)], compiling)
        self._running = None if self._gpus else ForkServer(["serve"], {"TRITON_INTERPRET": "1", **hidden})
        for server in self._servers:
            server.ready()
        return self

    def __exit__(self, *error: object) -> None:
        for server in self._servers:
            server.close()

    @property
    def _servers(self) -> list[ForkServer]:
        return [server for server in (self._compiling, self._running) if server is not None]

    @property
    def server_pids(self) -> list[int]:
        return [server.pid for server in self._servers]

    @property
    def device(self) -> str:
        return "cuda" if self._gpus else "cpu"

    @property
    def lacks(self) -> str | None:
        """Why nothing can be compiled on this machine; None if compilation works."""
        lack: str | None = self._compiling.said["lacks"]
        return lack

    @property
    def triton(self) -> str:
        return str(self._compiling.said["triton"])

    def give_up(self) -> None:
        """Ends every running process; a later question to one of them raises Lost."""
        for pids in (self._spawned, *(server.live for server in self._servers)):
            for pid in list(pids):
                kill_all(pid)

    def start(
        self,
        *,
        memory_bytes: float,
        gpu: int = 0,
        compiles: bool = False,
        confined: bool = True,
        built: Path | None = None,
    ) -> Process:
        """A new process, which runs a candidate or, if `compiles`, compiles it without a GPU. The trusted reference
        need not be `confined` (sandbox.py). `built`: a Triton cache, which is copied for the process. Raises NotBegun,
        NoDeviceError.
        """
        scratch = Path(tempfile.mkdtemp(dir=self.folder))
        if built is not None:
            shutil.copytree(built, scratch / CACHE)
        if confined:
            sandbox.give(scratch)
        server = self._compiling if compiles else self._running
        ours, theirs = socket.socketpair()
        asked = json.dumps(
            {
                "scratch": str(scratch),
                "device": "cpu" if compiles else self.device,
                "compiles": compiles,
                "confined": confined,
                "memory_bytes": memory_bytes,
            }
        )
        try:
            pid = server.fork(theirs, asked) if server else self._spawn(theirs, asked, gpu)
        finally:
            theirs.close()
        return Process(pid, ours, scratch, memory_bytes, self._ended, watch_s=COMPILING_S if compiles else wire.WATCH_S)

    def _spawn(self, theirs: socket.socket, asked: str, gpu: int) -> int:
        """Starts a whole new process. The process sees only the `gpu`-th of this process's GPUs."""
        seen = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        interpret, visible = "0" if self._gpus else "1", seen.split(",")[gpu] if seen else str(gpu)
        process = python(theirs, ["one", asked], {"CUDA_VISIBLE_DEVICES": visible, "TRITON_INTERPRET": interpret})
        self._spawned[process.pid] = process
        return process.pid

    def _ended(self, pid: int) -> None:
        if (spawned := self._spawned.pop(pid, None)) is not None:
            spawned.wait()
        for server in self._servers:
            server.ended(pid)


class Process:
    def __init__(
        self,
        pid: int,
        dialogue: socket.socket,
        scratch: Path,
        memory_bytes: float,
        ended: Callable[[int], object],
        *,
        watch_s: float,
    ) -> None:
        self.pid, self._dialogue, self.scratch = pid, dialogue, scratch
        self.cpu_s = 0.0  # CPU seconds in the process's last report
        self._memory, self._ended, self._watch_s = memory_bytes, ended, watch_s
        self._looked_at, self._over = 0.0, False
        try:
            head, _ = self._receive(time.monotonic() + GREET_S, GREET_S, 0)
            if "error" in head:
                raise NoDeviceError(head["error"])
            self.isolated = bool(head.get("isolated"))
        except Lost as error:
            self.close()
            raise NotBegun(f"before it received a source: {error}") from None
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def ask(
        self, head: dict[str, Any], blobs: Sequence[wire.Blob] = (), *, limit_s: float, most_bytes: int = 0
    ) -> wire.Message:
        """Asks one question and returns its answer. Raises Lost with the reason."""
        if head["do"] != "trial":  # not during a trial, because a look would change its time
            self._watch()
        until = time.monotonic() + limit_s
        # The process may have sent a message just before it ended.
        with suppress(wire.Closed, wire.Late):
            wire.send(self._dialogue, head, blobs, until=until)
        return self._receive(until, limit_s, most_bytes)

    def _receive(self, until: float, limit_s: float, most_bytes: int) -> wire.Message:
        try:
            head, blobs = wire.receive(
                self._dialogue, until=until, most_bytes=most_bytes, watch=self._watch, watch_s=self._watch_s
            )
            reply = wire.reply(head)
        except wire.Late:
            raise OutOfTime(f"no answer within {limit_s:.3g} s") from None
        except wire.Closed as error:
            raise Lost(f"the process ended: {error}") from None
        self.cpu_s = reply.get("cpu_s", self.cpu_s)
        return reply, blobs

    def _watch(self) -> None:
        if time.monotonic() >= self._looked_at + self._watch_s:
            self.look()

    def look(self) -> None:
        """Raises Lost if the process uses more memory or disk than it may."""
        self._looked_at = time.monotonic()
        used = usage.memory_bytes((self.pid, *offspring(self.pid)))
        if used > self._memory:
            raise Lost(f"{used / 1e9:.1f} GB of memory, {self._memory / 1e9:.1f} are allowed")
        if usage.folder_bytes(self.scratch, SCRATCH_BYTES) > SCRATCH_BYTES:
            raise Lost(f"more in its folder than {SCRATCH_BYTES >> 20} MiB and {usage.MOST_ENTRIES:,} files")

    @contextmanager
    def paused(self) -> Iterator[None]:
        """A context in which the process and its descendants are stopped, because another process is timed."""
        self._signal(signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        for pid in (self.pid, *offspring(self.pid)):
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)

    def end(self) -> None:
        """Ends the process and everything that it started. The process's files stay until `close`."""
        if self._over:
            return
        self._over = True
        self._dialogue.close()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGSTOP)  # so that the process starts nothing while its descendants are listed
        kill_all(self.pid)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        self._ended(self.pid)

    def close(self) -> None:
        """Ends the process and removes its folder."""
        self.end()
        try:
            shutil.rmtree(self.scratch, ignore_errors=True)
        except RecursionError:  # raised for a thousand nested folders before Python 3.12
            subprocess.run(["rm", "-rf", str(self.scratch)], check=False)
