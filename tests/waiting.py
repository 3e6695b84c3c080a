"""How a test waits for another process or thread: for what it means, never for a time.

There is one limit, which only a hang reaches. A test that waits in a call of Python's own, `Popen.wait` say, sets none:
pytest's limit (pyproject.toml), which is twice as long, ends it, and the traceback shows the call.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol, TypeVar

import pytest

# No wait here takes more than a few seconds on a quiet machine; a busy one has a hundred times that. bench/guards.py
# gives less where a test waits in vain.
HANG_S = float(os.environ.get("HANG_S", "900"))
T = TypeVar("T")


class Ending(Protocol):
    """A process, as the one who started it sees it."""

    def poll(self) -> int | None:
        """The code with which it has ended; None: it runs."""
        ...


def wait_for(
    what: str, look: Callable[[], T], *, process: Ending | None = None, log: Callable[[], str] = lambda: ""
) -> T:
    """What `look` returns, as soon as that is true. Fails where it never is, or where `process`, from which it should
    come, has ended before; the failure says `what` the test waited for, and shows the `log`.
    """
    end = time.monotonic() + HANG_S
    while True:
        code = None if process is None else process.poll()  # read before the look: what came last counts
        if seen := look():
            return seen
        if code is not None:
            pytest.fail(f"waited for {what}, but the process has ended with {code}\n{log()}")
        if time.monotonic() > end:
            pytest.fail(f"waited {HANG_S:g} s for {what}, in vain\n{log()}")
        time.sleep(0.01)


def is_alive(pid: int) -> bool:
    """Whether a process of this machine runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def children() -> dict[int, str]:
    """The children of this process by id, with their command lines; dead ones too, which nobody has reaped. Linux
    alone knows them.
    """
    found = {}
    for thread in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):  # it has ended
            found.update({int(pid): _words(pid) for pid in thread.read_text().split()})
    return found


def _words(pid: str) -> str:
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""
