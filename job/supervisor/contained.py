"""The trainer in a container of its own, which the node starts (job/node/jobs.py): without the node's role.

The same process as in the supervisor's own (child.py), for whoever watches it: what it prints comes through a pipe, and
the node says how it ended. Everything else lies in the work folder, which both containers see.
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

# `sh` stays, or who trains would be the first process of its container, which no signal ends that it does not catch.
TEXT = """\
exec >{out} 2>&1 </dev/null
export {holder}=$$ {environment}
{command}
exit
"""
DOCKERS_OWN = range(125, 128)  # exit codes: nothing has begun


class ContainedProcess:
    """`stdout` ends when no process of the container is left, or nobody is to be waited for."""

    def __init__(self, workdir: Path, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        """`argv` runs with the image's environment and this one over it."""
        folder = workdir / CONTROL / SCRIPTS
        folder.mkdir(parents=True, exist_ok=True)
        out = folder / OUT
        ForeignFolder(folder).make_pipe(out)
        told = " ".join(f"{key}={shlex.quote(value)}" for key, value in environment.items())
        text = TEXT.format(out=shlex.quote(str(out)), holder=HOLDER, environment=told, command=shlex.join(argv))
        atomic.write_bytes(folder / FIRST, text.encode())  # a shell may read on in the one before it
        reading = os.open(out, os.O_RDONLY | os.O_NONBLOCK)
        self._writing: int | None = os.open(out, os.O_WRONLY)  # until then it is not at its end
        os.set_blocking(reading, True)
        self.stdout = os.fdopen(reading, "rb")
        self._node = NodeContainer(workdir)

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        answer = self._node.answer()
        if answer is None or not answer.problem:
            return None
        if answer.code in DOCKERS_OWN and self._writing is not None:
            with suppress(OSError):
                os.write(self._writing, f"no trainer: {answer.problem}\n".encode())
        self._let_go()
        return answer.code if answer.code < 128 else 128 - answer.code

    def kill(self) -> None:
        """Ends all of its processes soon. Safe to call again."""
        with suppress(OSError):  # its disk is full: it ends with this process's own container
            self._node.close()
        self._let_go()

    def _let_go(self) -> None:
        if self._writing is not None:
            os.close(self._writing)
            self._writing = None
