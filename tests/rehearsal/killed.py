"""A Pulumi command that is killed at one of its calls to AWS, as a closed laptop or the kernel's memory killer would,
or that hears nothing more of AWS from one of them on.
"""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal
from unittest import mock

from gpufleet.rehearsal import gate, provider
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Pulumi, settings
from gpufleet.rehearsal.environment import scratch
from tests import forked
from tests.rehearsal.engine_world import STACK

READS = ("Describe", "Get", "List", "Head")
WRITES = 45  # of an `up` from nothing, which a test counts
Mode = Literal["killed", "no answer"]


class Killer:
    """Stands before an account's AWS. At the call that `at` names, by its number or by its action, the program is dead,
    and its provider with it: nothing more of it comes through. AWS has done that call; with "no answer" the program
    lives, and does not learn it.
    """

    def __init__(self, cloud: Cloud, at: int | str, *, reads: bool = False, mode: Mode = "killed") -> None:
        """`reads`: they count too."""
        assert cloud._gate is not None
        self._gate, self._app, self._at, self._reads, self._mode = cloud._gate, cloud._gate.app, at, reads, mode
        self._lock = threading.Lock()
        self.calls: list[str] = []
        self.kill: Callable[[], None] = lambda: None
        self.fired = False
        self._gate.app = self

    def __call__(self, environ: dict[str, Any], start: Callable[..., Any]) -> Iterable[bytes]:
        action = f"{environ['REQUEST_METHOD']} {environ.get('QUERY_STRING', '')}".strip()
        service = gate._credential(environ, str(environ.get("HTTP_AUTHORIZATION", "")))[2]
        if service != "s3":
            action = gate._scheduler_action(environ) if service == "scheduler" else gate._action(environ)
        if not self._reads and action.startswith((*READS, "GET", "HEAD")):
            return self._app(environ, start)
        with self._lock:  # one call after the other: the same kill finds the same account
            if self.fired and self._mode == "no answer":
                _hang_up(environ)
            if self.fired:
                return gate._send(start, environ, *gate._error("ec2", "400 Bad Request", "Killed", "nobody asks"))
            answer = list(self._app(environ, start))
            self.calls.append(action)
            if self._at in (len(self.calls), action):
                self.fired = True
                if self._mode == "no answer":
                    _hang_up(environ)
                self.kill()
        return answer

    def detach(self) -> None:
        """Nothing of the program is left; whoever comes next is somebody else."""
        self._gate.app = self._app


def _hang_up(environ: dict[str, Any]) -> None:
    with suppress(OSError):
        environ["werkzeug.socket"].shutdown(socket.SHUT_RDWR)
    raise ConnectionAbortedError  # which werkzeug takes for a client that has gone


def seeded(seed: int) -> int:
    """The write at which this seed kills."""
    return random.Random(seed).randint(1, WRITES - 1)


def killed_standin(cloud: Cloud, project: Path, at: int | str) -> list[str]:
    """The in-process runner's `up`, killed after that write; the writes it has done."""
    killer = Killer(cloud, at)

    def begun(process: int) -> None:
        killer.kill = lambda: os.kill(process, signal.SIGKILL)

    up = ["gpufleet.rehearsal.inprocess", "up", str(project), STACK, os.devnull]
    forked.run(up, scratch(cloud.environment()), project / "printed.txt", begun=begun)
    return _end_kill(cloud, killer).calls


def killed_engine(
    cloud: Cloud,
    project: Path,
    at: int | str,
    *,
    command: str = "up",
    reads: bool = False,
    mode: Mode = "killed",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> Killer:
    """A command of the engine's, which is killed together with its provider. `environment`: of its program, too."""
    killer = Killer(cloud, at, reads=reads, mode=mode)
    impatient = {"AWS_MAX_ATTEMPTS": "1"} if mode == "no answer" else {}
    with mock.patch.dict(os.environ, impatient), provider.serve(cloud.environment()) as port:
        whole = {**cloud.environment(), **settings(project, port), "NO_COLOR": "1", **environment}
        Pulumi(project, whole, STACK, lambda line: None)  # makes the stack
        process = subprocess.Popen(
            ["pulumi", command, "--yes", "--skip-preview", "--non-interactive", "--stack", STACK],
            cwd=project,
            env=scratch(whole),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        killer.kill = lambda: os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return _end_kill(cloud, killer)


def _end_kill(cloud: Cloud, killer: Killer) -> Killer:
    killer.detach()
    cloud.tick()  # a fleet that was made has its node by now
    return killer
