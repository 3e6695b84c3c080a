"""Runs the `pulumi` on PATH, for `gpufleet run` and for rehearsals."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.program import approval

END_S = 20.0  # seconds within which the engine of a rehearsal finishes its current resource and ends its plugins
_NO_STACK = "no stack named"  # a part of the engine's error message
INSTALL = "https://www.pulumi.com/docs/install/"


@dataclass(frozen=True, kw_only=True, slots=True)
class PulumiStack:
    """One Pulumi stack of the project in `root`. If a command of the engine fails, raises GpufleetError; the engine has
    then already printed its own message.
    """

    root: Path
    name: str
    say: Callable[[str], None] = print

    def select(self) -> None:
        """Selects the stack. Makes the stack if it does not exist."""
        _require()
        self._call("stack", "select", "--create")

    def outputs(self) -> dict[str, Any]:
        """The outputs of the last `up`; empty before the first `up` and after a destroy."""
        _require()
        words = ["pulumi", "stack", "output", "--json", "--non-interactive", "--stack", self.name]
        done = subprocess.run(words, cwd=self.root, stdin=subprocess.DEVNULL, capture_output=True, text=True)
        if done.returncode and _NO_STACK in done.stderr:
            return {}
        if done.returncode:
            raise GpufleetError(f"`{' '.join(words)}` failed: {done.stderr.strip()}")
        return dict(json.loads(done.stdout))

    def up(self, approved: str, config: Mapping[str, str] | None = None) -> None:
        """Previews and makes all resources, if the bill has not changed since it was approved. `config`: settings to
        write into the stack's configuration first.
        """
        settings = (word for key, value in (config or {}).items() for word in ("--config", f"{key}={value}"))
        self._call("up", "--yes", *settings, environment={approval.VARIABLE: approved})

    def destroy(self) -> None:
        """Removes everything that the definition does not keep."""
        self._call("destroy", "--yes")

    def forget(self) -> None:
        """Removes the empty stack and its configuration."""
        self._call("stack", "rm", "--yes")

    def _call(self, *words: str, environment: Mapping[str, str] | None = None) -> None:
        command = ["pulumi", *words, "--non-interactive", "--stack", self.name]
        code, _ = streamed(
            command, folder=self.root, environment={**os.environ, **(environment or {})}, say=self.say, end_s=None
        )
        if code:
            raise GpufleetError(
                f"`{' '.join(command)}` failed, for the reason above. `gpufleet docs real-aws` says what to do after a "
                "killed command; then the same `gpufleet run` goes on from here."
            )


def _require() -> None:
    if shutil.which("pulumi") is None:
        raise GpufleetError(f"`pulumi` is not on PATH; {INSTALL} says how to install it")


def streamed(
    command: list[str],
    *,
    folder: Path | None,
    environment: Mapping[str, str],
    say: Callable[[str], None],
    end_s: float | None = END_S,
) -> tuple[int, str]:
    """Runs a command, passes each line to `say` as it comes, and returns the exit code and the whole output. After a
    Ctrl-C the engine finishes its current resource; if `end_s` is not None, it is killed this many seconds later.
    """
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # so that Ctrl-C in a terminal does not reach the engine, which would leave its plugins behind after a second
        # one
        start_new_session=True,
    )
    lines = []
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                say(line.rstrip("\n"))
        except BaseException:
            _end(process, end_s)
            raise
    return process.returncode, "".join(lines)


def _end(process: subprocess.Popen[str], end_s: float | None) -> None:
    """Ends the engine. It first asks the engine to end, because only the engine knows the process groups of its
    plugins.
    """
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=end_s)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
