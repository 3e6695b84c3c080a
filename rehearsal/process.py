"""A command that runs in the foreground, heard line by line, and ended with all it has started when we are ended."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path

END_S = 20.0  # what the engine needs at most to finish the one resource it is at and to end its plugins


def streamed(
    command: list[str], *, folder: Path | None, environment: Mapping[str, str], say: Callable[[str], None]
) -> tuple[int, str]:
    """Runs a command, says each line as it comes. Gives the exit code and all it printed."""
    process = subprocess.Popen(
        command,
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,  # a terminal's second Ctrl-C makes the engine leave its plugins behind
    )
    lines = []
    with process:
        assert process.stdout is not None
        try:
            for line in process.stdout:
                lines.append(line)
                say(line.rstrip("\n"))
        except BaseException:
            _end(process)
            raise
    return process.returncode, "".join(lines)


def _end(process: subprocess.Popen[str]) -> None:
    """Asked first: the engine's plugins are in process groups of their own, and only the engine knows them."""
    process.send_signal(signal.SIGINT)
    try:
        process.communicate(timeout=END_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
