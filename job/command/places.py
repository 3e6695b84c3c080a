"""Where a command runs: in a container that the node starts (docs/own-training.md), or as processes of this machine.

In both cases the first process is `sh first.sh`, which goes on after the processes that it starts have ended. This
process reads the name of a script from a pipe, runs the script, and writes its exit code to a file. So each start has
the packages that the set-up installed, and the end of the command does not end a process that still saves. Host and
container exchange small files in WORKDIR/control/job. This is the only folder of gpufleet that the container can see.
Requests to the node are in the folder above it.
"""

from __future__ import annotations

import errno
import json
import os
import shlex
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

from gpufleet.job.command import processes
from gpufleet.job.contract.environment import USER_PATH
from gpufleet.job.contract.messages import Contained, Container
from gpufleet.job.contract.workdir import CONTROL, FIRST, SCRIPTS, WATCHER
from gpufleet.job.foreign import ForeignFolder

OUT, NEXT = "out", "next"  # pipes: the output, the next script
FIRST_TEXT = """\
exec >{folder}/out 2>&1 </dev/null
while read -r name <{folder}/next; do
  sh {folder}/"$name".sh
  echo $? >{folder}/"$name".code
done
"""
STEP_TEXT = """\
. {folder}/{name}.env
cd {start} 2>/dev/null || {{ mkdir -p {start} && cd {start}; }} || exit
exec sh -ec {command}
"""


class Place(Protocol):
    """The place of the first process. `poll` returns whether that process has started. After that, `alive` returns the
    ids of the processes below it. `send` sends a named signal to the processes that should get it, and returns their
    number. `kill` ends all processes, and returns whether it succeeded. `world` is processes.world. Each raises
    GoneError.
    """

    def poll(self) -> bool: ...
    def alive(self) -> list[int]: ...
    def send(self, signal: str) -> tuple[int, bool]: ...
    def kill(self) -> bool: ...
    def world(self) -> tuple[int, int, bool] | None: ...
    def close(self) -> None: ...


class GoneError(Exception):
    """The first process has ended, or cannot be started."""


class Scripts:
    """The folder of scripts and pipes. Secrets go only through pipes, because the command can write into this
    folder.
    """

    def __init__(self, workdir: Path) -> None:
        self.folder = workdir / CONTROL / SCRIPTS
        self._waiting: list[tuple[Path, bytes]] = []
        self._pipe: int | None = None  # text for the waiting first process, while it is being written
        self.began = False  # names of scripts that were requested
        self.folder.mkdir(parents=True, exist_ok=True)
        self._own = ForeignFolder(self.folder)
        self._own.empty(self.folder)
        for name in (OUT, NEXT):
            self._own.make_pipe(self.folder / name)
        self._own.write(self.folder / FIRST, FIRST_TEXT.format(folder=shlex.quote(str(self.folder))).encode())
        # The pipe is opened so that reading never blocks, and never reaches an end, because several processes write
        # into it one after the other.
        self.out = self._own.open_pipe(self.folder / OUT, os.O_RDWR)

    def run(self, name: str, command: str, environment: Mapping[str, str], start: Path) -> None:
        """Asks the first process to run the command in the folder `start`; `offer` then passes the script's name on."""
        folder, quoted = shlex.quote(str(self.folder)), shlex.quote(str(start))
        text = STEP_TEXT.format(folder=folder, name=name, start=quoted, command=shlex.quote(command))
        self._own.write(self.folder / f"{name}.sh", text.encode())
        self._own.write(self.folder / f"{name}.code", b"", 0o666)  # the user of an image may not be root
        self._own.make_pipe(self.folder / f"{name}.env")
        self.began = False
        self._let_go()
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in environment.items())
        self._waiting = [(self.folder / NEXT, f"{name}\n".encode()), (self.folder / f"{name}.env", exports.encode())]

    def put(self, name: str, content: bytes) -> Path:
        """Writes a file for the scripts; the scripts see it at the same path."""
        self._own.write(self.folder / name, content)
        return self.folder / name

    def offer(self) -> None:
        """Writes as much as possible into each waiting pipe. Raises GoneError if a pipe has been replaced."""
        while self._waiting:
            path, content = self._waiting[0]
            try:
                if self._pipe is None:
                    self._pipe = self._own.open_pipe(path, os.O_WRONLY)
                content = content[os.write(self._pipe, content) :]
            except BlockingIOError:  # the pipe is full
                return
            except BrokenPipeError:
                content = b""
            except OSError as error:
                if error.errno == errno.ENXIO:  # nobody reads it yet
                    return
                raise GoneError(
                    f"{path.name}, the pipe from which the first process reads what to run, was replaced: {error}"
                ) from None
            self._waiting[0] = path, content
            if not content:
                self._let_go()
                self._waiting.pop(0)
                self.began = not self._waiting

    def code(self, name: str) -> int | None:
        """The exit code of a script, as in a shell; None if the script runs or has not begun."""
        with suppress(OSError), self._own.open(self.folder / f"{name}.code") as file:
            digits = file.read(16)
            if digits.endswith(b"\n"):
                # the command has written any other content, which is not trusted
                return int(digits) % 256 if digits.strip().isdigit() else 1
        return None

    def close(self) -> None:
        """Stops reading."""
        self._let_go()
        os.close(self.out)

    def _let_go(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None


class NodeContainer:
    """A container that job/node/jobs.py starts and removes on request."""

    def __init__(self, workdir: Path) -> None:
        self._folder = workdir / CONTROL
        self._number = int(time.time() * 1000)
        Container(number=self._number).write(self._folder)

    def answer(self) -> Contained | None:
        """The node's answer about the container; None if the node has not answered yet."""
        answer = Contained.read(self._folder)
        return answer if answer is not None and answer.number == self._number else None

    def close(self) -> None:
        Container(number=self._number, wanted=False).write(self._folder)


class WatchedContainer(NodeContainer):
    """The container of a command. The host cannot see its processes, so the node starts a third container next to it,
    which answers questions about them (`processes.watch`).
    """

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._place = workdir / WATCHER
        self._watcher: socket.socket | None = None

    def poll(self) -> bool:
        answer = self.answer()
        if answer is not None and answer.problem:
            raise GoneError(answer.problem)
        if self._watcher is None and answer is not None:
            with suppress(OSError):  # the socket may not exist yet
                self._watcher = processes.connect(self._place)
        return self._watcher is not None

    def alive(self) -> list[int]:
        pids: list[int] = self._ask("alive")
        return pids

    def send(self, signal: str) -> tuple[int, bool]:
        count, is_survived = self._ask(f"send {signal}")
        return int(count), bool(is_survived)

    def kill(self) -> bool:
        return bool(self._ask("kill"))

    def world(self) -> tuple[int, int, bool] | None:
        seen = self._ask("world")
        return None if seen is None else (seen[0], seen[1], seen[2])

    def close(self) -> None:
        if self._watcher is not None:
            self._watcher.close()
        super().close()

    def _ask(self, question: str) -> Any:
        if self._watcher is None:
            raise GoneError("its processes are not watched")
        try:
            self._watcher.sendall(f"{question}\n".encode())
            answer = b""
            while not answer.endswith(b"\n"):
                if not (part := self._watcher.recv(1 << 16)):
                    raise OSError("no answer")
                answer += part
            return json.loads(answer)
        except OSError as error:
            raise GoneError(f"its processes are not watched any more: {error}") from None


class GuardedProcesses:
    """Processes of this machine, below a guard process that ends together with this process. These processes do not use
    gpufleet's Python.
    """

    def __init__(self, workdir: Path) -> None:
        self._guard = subprocess.Popen(
            [
                *(sys.executable, "-I", processes.__file__, str(os.getpid())),
                *("sh", str(workdir / CONTROL / SCRIPTS / FIRST)),
            ],
            env=own_environment(os.environ),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._first = 0

    def poll(self) -> bool:
        if (code := self._guard.poll()) is not None:
            raise GoneError(f"its first process ended with {code}")
        self._first = self._first or next(iter(processes.descendants(self._guard.pid)), 0)
        return bool(self._first)

    def alive(self) -> list[int]:
        return processes.alive(self._first)

    def send(self, signal: str) -> tuple[int, bool]:
        return processes.send(self._first, signal)

    def kill(self) -> bool:
        return processes.kill(self._first)

    def world(self) -> tuple[int, int, bool] | None:
        return processes.world(self._first)

    def close(self) -> None:
        self._guard.terminate()
        self._guard.wait()


def own_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """The part of this process's environment that a user's command may see: without keys, and without gpufleet's
    Python.
    """
    passed_on = {key: value for key, value in ours.items() if not key.startswith(("AWS_", "GPUFLEET_", "PYTHON"))}
    passed_on.pop("VIRTUAL_ENV", None)
    bins = {str(Path(sys.prefix) / "bin"), str(Path(sys.executable).parent)} - {"/usr/bin", "/usr/local/bin", "/bin"}
    path = [folder for folder in passed_on.get("PATH", os.defpath).split(os.pathsep) if folder not in bins]
    programs = ours.get(USER_PATH, "")
    return {**passed_on, **activated(programs), "PATH": os.pathsep.join([*filter(None, [programs]), *path])}


def activated(programs: str) -> dict[str, str]:
    """Variables that tell tools such as uv that a virtual environment is active, if `programs` is the folder of one."""
    folder = Path(programs).parent
    return {"VIRTUAL_ENV": str(folder)} if programs and (folder / "pyvenv.cfg").is_file() else {}
