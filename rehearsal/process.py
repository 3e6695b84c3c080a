"""What runs in the foreground: a command, heard line by line and ended with all it has started when we are ended; or
we ourselves, until somebody ends us.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import stat
import subprocess
import sys
import time
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


def wait_for_end(timeout_s: float | None) -> None:
    """Returns at the end of a piped standard input or after `timeout_s`; a terminal or /dev/null never end."""
    deadline = None if timeout_s is None else time.monotonic() + timeout_s
    piped = _is_pipe()
    while deadline is None or time.monotonic() < deadline:
        left = 3600.0 if deadline is None else max(0.0, deadline - time.monotonic())
        readable, _, _ = select.select([sys.stdin] if piped else [], [], [], left)
        if readable and not os.read(sys.stdin.fileno(), 4096):
            return


def _is_pipe() -> bool:
    try:
        mode = os.fstat(sys.stdin.fileno()).st_mode
    except (OSError, ValueError, AttributeError):  # closed, or a test's
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)
