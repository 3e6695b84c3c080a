"""The processes of a command as the kernel shows them: which of them exist, which of them catch a signal. This module
also sends signals.

As a program, `python -I processes.py PARENT WORD...` is the guard of a command without a container: all processes that
it starts stay below it, and end when PARENT ends. `python -I processes.py watch FOLDER` runs where the command's
processes are visible and answers questions about them at a socket in FOLDER. The file uses only the standard library,
so that it can be started by its path. If there is no /proc (on macOS, in rehearsals), these functions can see less.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

PROC = Path("/proc")
KNOWN = (PROC / "self" / "stat").exists()
ADOPT, DIE_WITH_PARENT = 36, 1  # PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG: linux/prctl.h; kept across execve
EXITING = 0x4  # PF_EXITING in a process's flags: linux/sched.h
GONE_S = 10.0  # seconds for killed processes to end; a process that waits for a lost GPU may never end
KILLED = 137
SOCKET = "socket"  # a socket of this name in the folder answers questions
ANSWER_S = 60.0
# In a rehearsal, this variable has the id of the first process, because the containers of a rehearsal share the
# machine's ids.
FIRST_PROCESS = "GPUFLEET_FIRST_PROCESS"
# Variables by which torchrun, accelerate, DeepSpeed and Lightning, then Open MPI, MVAPICH, MPICH and Intel MPI tell a
# rank the number of all ranks, its own number, and the same two numbers within its node. The first variable that is set
# is used.
SIZE = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
RANK = ("RANK", "OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK")
LOCAL_SIZE = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS")
LOCAL_RANK = ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID")
# variables of the process of an `accelerate launch` that starts only one and gives it no rank
BY_ACCELERATE = {"ACCELERATE_USE_CPU", "ACCELERATE_DYNAMO_MODE"}


def descendants(first: int) -> list[int]:
    """Processes below `first`, parents before children, without zombies. /proc is read only once: if it were read
    twice, a process whose parent ended between the two reads would be missed.
    """
    return _walk(first) or _walk(first)


def alive(first: int) -> list[int]:
    """Processes below `first` that have not begun to exit. An exiting process closes its files before it is gone, so a
    closed file does not prove that its process has finished the save.
    """
    return [pid for pid in descendants(first) if not _is_exiting(pid)]


def _is_exiting(pid: int) -> bool:
    # the fields from the process's state on; flags are the seventh
    fields = _read(pid, "stat").rpartition(b")")[2].split()
    return len(fields) > 6 and bool(int(fields[6]) & EXITING)


def _walk(first: int) -> list[int]:
    parents = _parents()
    below: dict[int, list[int]] = {}
    for pid, parent in parents.items():
        below.setdefault(parent, []).append(pid)
    pids, waiting = [], [first]
    while waiting:
        for pid in sorted(below.get(waiting.pop(0), [])):
            pids.append(pid)
            waiting.append(pid)
    return pids


def _parents() -> dict[int, int]:
    """The parent of every living process, by id."""
    parents = {}
    if not KNOWN:
        listed = subprocess.run(["ps", "-axo", "pid=,ppid=,stat="], capture_output=True, text=True, check=False).stdout
        for line in listed.splitlines():
            pid, parent, state = line.split()
            if not state.startswith("Z"):
                parents[int(pid)] = int(parent)
        return parents
    for name in os.listdir(PROC):  # noqa: PTH208 - names alone, ten times a second
        if name.isdigit():
            with suppress(OSError, ValueError):
                state, parent = (PROC / name / "stat").read_text().rpartition(")")[2].split()[:2]
                if state != "Z":
                    parents[int(name)] = int(parent)
    return parents


def catches(pid: int, number: int) -> bool:
    """Whether the process has a handler for the signal, or waits for the signal."""
    return _is_in_mask(pid, number, "SigCgt:", "SigBlk:")


def survives(pid: int, number: int) -> bool:
    """Whether the process catches, ignores or awaits the signal. If not, the process ends without a save."""
    return _is_in_mask(pid, number, "SigCgt:", "SigBlk:", "SigIgn:")


def _is_in_mask(pid: int, number: int, *masks: str) -> bool:
    mask = 0
    with suppress(OSError):
        for line in (PROC / str(pid) / "status").read_text().splitlines():
            if line.startswith(masks):
                mask |= int(line.split()[1], 16)
    return bool(mask >> (number - 1) & 1)


def addressees(first: int, number: int) -> list[int]:
    """The processes below `first` to which a signal should be sent.

    A process that catches the signal gets the signal, and its children do not: if a data loader died of the signal, the
    script's save would fail. The ranks of a launcher get the signal directly, because torchrun would pass it on to all
    processes below them, including data loaders. A process that does not catch the signal, such as a shell, gets it
    too, and the same rules apply to its children. USR1 and USR2 are not sent to such a process, because they would only
    end it.
    """
    if not KNOWN:
        return descendants(first)
    below: dict[int, list[int]] = {}
    for pid, parent in _parents().items():
        below.setdefault(parent, []).append(pid)
    spared = number in (signal.SIGUSR1, signal.SIGUSR2)

    def chosen(pid: int) -> list[int]:
        ranks = [child for child in below.get(pid, []) if _rank(child) not in (None, _rank(pid))]
        if not catches(pid, number):
            return [*([] if spared else [pid]), *(process for child in below.get(pid, []) for process in chosen(child))]
        if not any(catches(rank, number) for rank in ranks):
            return [pid]
        # Lightning's first rank
        is_one_of_them = any(_read(rank, "cmdline") == _read(pid, "cmdline") for rank in ranks)
        return [*([pid] if is_one_of_them else []), *(process for rank in ranks for process in chosen(rank))]

    return [process for child in sorted(below.get(first, [])) for process in chosen(child)]


def _rank(pid: int) -> bytes | None:
    """The rank that the launcher has given to the process; None if there is none."""
    variables = [
        variable for variable in _read(pid, "environ").split(b"\0") if variable.startswith((b"LOCAL_RANK=", b"RANK="))
    ]
    return b" ".join(sorted(variables)) or None


def world(first: int) -> tuple[int, int, bool] | None:
    """The number of all ranks, the number of ranks on this node, and whether rank 0 is one of them, from the
    environments of the processes below `first`. Returns None if no environment has them, for example if a script sets
    its own variables later.

    Numbers in the environment of a shell or launcher are ignored, because it replaces them for the ranks that it
    starts.
    """
    parents, replaced = _parents(), set[int]()
    numbers = {pid: numbers_of_rank for pid in descendants(first) if (numbers_of_rank := _numbers(pid)) is not None}
    for pid in reversed(numbers):
        parent = parents.get(pid, 0)
        if pid in replaced or numbers.get(parent) != numbers[pid]:
            replaced.add(parent)
    ranks = {numbers_of_rank for pid, numbers_of_rank in numbers.items() if pid not in replaced}
    size = max((of_rank[0] for of_rank in ranks), default=0)
    if not size:
        return None
    ranks = {of_rank for of_rank in ranks if of_rank[0] == size}
    numbered = {rank for _, rank, _, _ in ranks}
    here = max(len(numbered), *(max(local_size or 0, (local or 0) + 1) for _, _, local_size, local in ranks))
    return size, here, 0 in numbered


def _numbers(pid: int) -> tuple[int, int | None, int | None, int | None] | None:
    """The number of ranks, the rank, the ranks of the node, and the rank on the node, from the environment of the
    process at its start.
    """
    lines = _read(pid, "environ").decode("utf-8", "replace").split("\0")
    variables = dict(line.split("=", 1) for line in lines if "=" in line)

    def number(names: tuple[str, ...]) -> int | None:
        return next((int(variables[name]) for name in names if variables.get(name, "").isdecimal()), None)

    size = number(SIZE)
    if size is None and variables.keys() >= BY_ACCELERATE and "ACCELERATE_USE_DEEPSPEED" not in variables:
        return 1, 0, 1, 0
    return None if not size else (size, number(RANK), number(LOCAL_SIZE), number(LOCAL_RANK))


def _read(pid: int, name: str) -> bytes:
    with suppress(OSError):
        return (PROC / str(pid) / name).read_bytes()
    return b""


def send(first: int, name: str) -> tuple[int, bool]:
    """Sends a signal (TERM, INT, USR1, USR2) to its addressees below `first`; returns the number of addressees, and
    whether one of them survives the signal.
    """
    number = int(signal.Signals[f"SIG{name}"])
    to = addressees(first, number)
    is_survived = any(survives(pid, number) for pid in to)
    _send(to, number)
    return len(to), is_survived


def _send(pids: Iterable[int], number: int) -> None:
    """Sends the signal to each process that still exists."""
    for pid in pids:
        with suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def kill(first: int) -> bool:
    """Kills all processes below `first`, including those that they start meanwhile.

    Returns False if one of them cannot be killed.
    """
    until = time.monotonic() + GONE_S
    while living := descendants(first):
        if time.monotonic() > until:
            return False
        _send(living, signal.SIGSTOP)  # a stopped process cannot fork
        _send(descendants(first), signal.SIGKILL)
        time.sleep(0.02)
    return True


def adopt_orphans() -> None:
    """Makes orphaned descendants children of this process from now on, as in a container."""
    _prctl(ADOPT, 1)


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


def guard(parent: int, argv: list[str], die: Callable[[int], None] = os._exit) -> int:
    """Runs `argv` in its own process group, and adopts processes whose parents have ended; returns the exit code, as in
    a shell.
    """

    def end(*_: object) -> None:
        kill(os.getpid())
        die(KILLED)

    adopt_orphans()
    signal.signal(signal.SIGTERM, end)
    _prctl(DIE_WITH_PARENT, signal.SIGTERM)
    if os.getppid() != parent:
        return KILLED
    code = subprocess.Popen(argv, preexec_fn=adopt_orphans).wait()
    kill(os.getpid())
    return 128 - code if code < 0 else code


def watch(folder: Path, first: int) -> NoReturn:
    """Answers questions about the processes below `first`, one question per line, until it is killed."""
    answers: dict[str, Callable[..., object]] = {"alive": alive, "send": send, "kill": kill, "world": world}
    with suppress(FileNotFoundError):
        (folder / SOCKET).unlink()
    with socket.socket(socket.AF_UNIX) as listening:
        _reach(folder, listening.bind)
        listening.listen()
        while True:
            connection, _ = listening.accept()
            with connection, connection.makefile("rwb") as lines, suppress(OSError):
                for line in lines:
                    question, *words = line.decode().split()
                    lines.write(json.dumps(answers[question](first, *words)).encode() + b"\n")
                    lines.flush()


def connect(folder: Path) -> socket.socket:
    """A connection to the watching process of the folder. Raises OSError if there is no such process yet."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.settimeout(ANSWER_S)
        _reach(folder, connection.connect)
    except OSError:
        connection.close()
        raise
    return connection


def _reach(folder: Path, act: Callable[[str], object]) -> None:
    """Calls `act` with a short address of the socket: the kernel allows 107 bytes, and the path may be longer."""
    at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        act(f"/proc/self/fd/{at}/{SOCKET}" if KNOWN else str(folder / SOCKET))
    finally:
        os.close(at)


if __name__ == "__main__":
    if sys.argv[1] == "watch":  # in its container, process 1 is the command's first process
        watch(Path(sys.argv[2]), int(os.environ.get(FIRST_PROCESS, 1)))
    sys.exit(guard(int(sys.argv[1]), sys.argv[2:]))
