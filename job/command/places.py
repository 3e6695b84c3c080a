"""Where a command runs: in a container that the node starts (docs/own-training.md), or as processes of this machine.

Either way the first process is `sh first.sh`, which outlives what it starts: it reads the name of a script from a pipe,
runs it, and leaves its exit code in a file. So what the set-up installed is there for each start, and the end of the
command ends nothing that still saves. Everything goes through small files of WORKDIR/control/job, the one folder of
gpufleet's that the container sees; what is asked of the node lies above it.
"""

from __future__ import annotations

import errno
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from gpufleet.job.command import processes
from gpufleet.job.contract.environment import USER_PATH
from gpufleet.job.contract.messages import Contained, Container
from gpufleet.job.contract.workdir import CONTROL, FIRST, SCRIPTS

OUT, NEXT = "out", "next"  # pipes: what is printed, what to run
FIRST_TEXT = """\
exec >{folder}/out 2>&1 </dev/null
while read -r name <{folder}/next; do
  sh {folder}/"$name".sh
  echo $? >{folder}/"$name".code
done
"""
STEP_TEXT = """\
. {folder}/{name}.env
mkdir -p {start} && cd {start} || exit
exec sh -ec {command}
"""


class Place(Protocol):
    """Where the first process is. `poll`: its process id, None where it is not there yet. Raises GoneError."""

    def poll(self) -> int | None: ...
    def close(self) -> None: ...


class GoneError(Exception):
    """There is no first process any more, or none can be had."""


class Scripts:
    """The folder of scripts and pipes. Nothing of what the command is told lies in a file: it goes through a pipe."""

    def __init__(self, workdir: Path) -> None:
        self.folder = workdir / CONTROL / SCRIPTS
        self._waiting: list[tuple[Path, bytes]] = []
        self.began = False  # what was asked for
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.iterdir():
            left.unlink()
        for name in (OUT, NEXT):
            make_pipe(self.folder / name)
        (self.folder / FIRST).write_text(FIRST_TEXT.format(folder=shlex.quote(str(self.folder))))
        # Never at its end: who opens it to write closes it again, and others come. Never waited for.
        self.out = os.open(self.folder / OUT, os.O_RDWR | os.O_NONBLOCK)

    def run(self, name: str, command: str, environment: Mapping[str, str], start: Path) -> None:
        """Asks for the command, in the folder `start`. `offer` goes on with it."""
        folder, quoted = shlex.quote(str(self.folder)), shlex.quote(str(start))
        text = STEP_TEXT.format(folder=folder, name=name, start=quoted, command=shlex.quote(command))
        (self.folder / f"{name}.sh").write_text(text)
        answer = self.folder / f"{name}.code"
        answer.write_text("")
        answer.chmod(0o666)  # an image need not run as root
        self.began = False
        exports = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in environment.items())
        self._waiting = [
            (self.folder / NEXT, f"{name}\n".encode()),
            (make_pipe(self.folder / f"{name}.env"), exports.encode()),
        ]

    def offer(self) -> None:
        """Writes into each pipe that is waited at, in turn."""
        while self._waiting:
            path, content = self._waiting[0]
            try:
                pipe = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
            except OSError as error:
                if error.errno != errno.ENXIO:  # nobody reads yet
                    raise
                return
            os.set_blocking(pipe, True)
            with os.fdopen(pipe, "wb") as file, suppress(BrokenPipeError):
                file.write(content)
            self._waiting.pop(0)
            self.began = not self._waiting

    def code(self, name: str) -> int | None:
        """Exit code of what was run, as a shell has it; None: it runs, or has not begun."""
        said = (self.folder / f"{name}.code").read_text()
        return int(said) if said.endswith("\n") else None

    def close(self) -> None:
        """Nothing is read any more."""
        os.close(self.out)


def make_pipe(path: Path) -> Path:
    """A new one, for whoever a container runs as."""
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    path.chmod(0o666)
    return path


class NodeContainer:
    """A container, which job/node/jobs.py starts and removes when it is asked to."""

    def __init__(self, workdir: Path) -> None:
        self._folder = workdir / CONTROL
        self._number = int(time.time() * 1000)
        Container(number=self._number).write(self._folder)

    def answer(self) -> Contained | None:
        """What the node says of it; None: nothing yet."""
        answer = Contained.read(self._folder)
        return answer if answer is not None and answer.number == self._number else None

    def poll(self) -> int | None:
        answer = self.answer()
        if answer is not None and answer.problem:
            raise GoneError(answer.problem)
        return None if answer is None else answer.pid

    def close(self) -> None:
        Container(number=self._number, wanted=False).write(self._folder)


class GuardedProcesses:
    """Processes of this machine, below a guard that ends with this process. Nothing of gpufleet's Python is theirs."""

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
        self._first: int | None = None

    def poll(self) -> int | None:
        if (code := self._guard.poll()) is not None:
            raise GoneError(f"its first process ended with {code}")
        if self._first is None:
            self._first = next(iter(processes.descendants(self._guard.pid)), None)
        return self._first

    def close(self) -> None:
        self._guard.terminate()
        self._guard.wait()


def own_environment(ours: Mapping[str, str]) -> dict[str, str]:
    """What a command of the user's may see of this process's environment: its Python is its own, and no keys."""
    kept = {key: value for key, value in ours.items() if not key.startswith(("AWS_", "GPUFLEET_", "PYTHON"))}
    kept.pop("VIRTUAL_ENV", None)
    bins = {str(Path(sys.prefix) / "bin"), str(Path(sys.executable).parent)} - {"/usr/bin", "/usr/local/bin", "/bin"}
    path = [each for each in kept.get("PATH", os.defpath).split(os.pathsep) if each not in bins]
    return {**kept, "PATH": os.pathsep.join([*filter(None, [ours.get(USER_PATH)]), *path])}


def give_to_everybody(folder: Path) -> None:
    """Folder and files for whoever the image runs as."""
    for path in (folder, *folder.rglob("*")):
        if not path.is_symlink():
            with suppress(OSError):
                path.chmod(path.stat().st_mode | (0o777 if path.is_dir() else 0o666))
