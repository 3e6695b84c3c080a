"""The trainer in its own container, without the node's role; the node starts it (job/node/jobs.py).

The class has the same methods as a trainer in the supervisor's container (child.py). The trainer's output comes through
a pipe, and the node reports how the trainer ended. All other files are in the work folder, which both containers see.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpufleet.job import atomic
from gpufleet.job.command.places import OUT, NodeContainer
from gpufleet.job.contract.workdir import CONTROL, FIRST, SCRIPTS
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.supervisor.leash import HOLDER

# `sh` must remain the container's first process, because a first process ignores every signal that it does not catch.
TEXT = """\
exec >{out} 2>&1 </dev/null
export {holder}=$$ {environment}
{command}
exit
"""
DOCKERS_OWN = range(125, 128)  # docker's exit codes for a program that has not begun


class ContainedProcess:
    """`stdout` ends when the container has no process any more, or when none is expected."""

    def __init__(self, workdir: Path, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """`argv` runs with the environment of the image; variables in `environment` override it."""
        folder = workdir / CONTROL / SCRIPTS
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / OUT
        ForeignFolder(folder).make_pipe(out)
        assignments = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
        text = TEXT.format(out=shlex.quote(str(out)), holder=HOLDER, environment=assignments, command=shlex.join(argv))
        atomic.write_bytes(folder / FIRST, text.encode())  # an earlier shell may still be reading its script
        reading = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
        # This keeps the pipe open until `_let_go`, which is called after the trainer's end.
        self._writing: int | None = os.open(out, os.O_WRONLY)
        os.set_blocking(reading, True)
        self.stdout = os.fdopen(reading, "rb")
        self._node = NodeContainer(workdir)

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while the trainer runs."""
        answer = self._node.answer()
        if answer is None or not answer.problem:
            return None
        if answer.code in DOCKERS_OWN and self._writing is not None:
            with suppress(OSError):
                os.write(self._writing, f"no trainer: {answer.problem}\n".encode())
        self._let_go()
        return answer.code if answer.code < 128 else 128 - answer.code

    def kill(self) -> None:
        """Ends all processes of the trainer soon. The method may be called again."""
        with suppress(OSError):  # if the disk is full, the trainer ends only when this process's own container ends
            self._node.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
