"""What a candidate's process may do, set up by itself before it sees the candidate. Linux only.

Three layers, none of which decides a verdict: namespaces where the kernel allows them (no network, nothing else to
signal, every file read-only but the scratch folder, all offspring gone with the first process), limits on file sizes
and cores, and an audit hook, which Python cannot take away again, that ends the process at the first forbidden act.
Memory and wall-clock are the judge's (worker.py): a limit on address space breaks CUDA.

So do a namespace of processes and a read-only /proc: since version 570 the driver names its threads in
/proc/self/task/<id>/comm and takes a refusal for error 304. In a new namespace the ids are others than those of the
/proc there is, and a new /proc may not be mounted where a container hides parts of it. So a process that uses a GPU
stays in the namespace of processes it is in, and may change what is its own in /proc.
"""

from __future__ import annotations

import ctypes
import os
import platform
import re
import resource
import signal
import sys
import sysconfig
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from gpufleet.job.experiments.kernel.judge.compiler import CACHE

WITH_PROCESSES = 0x10000000 | 0x40000000 | 0x08000000 | 0x00020000  # user, network, IPC, mounts
NAMESPACES = WITH_PROCESSES | 0x20000000  # and processes
CLONE = {"x86_64": 56, "aarch64": 220}
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, READ_ONLY = 442, -100, 0x8000, 1  # the call's number on every architecture
SET_DEATH_SIGNAL, SET_NO_NEW_PRIVILEGES, SET_SUBREAPER = 1, 38, 36  # prctl
FILE_BYTES = 1 << 28
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
NEVER = (
    "socket.", "subprocess.", "os.fork", "os.exec", "os.posix_spawn", "os.spawn", "os.system", "os.kill", "pty.",
    "ctypes.", "gc.", "mmap.", "sys._current", "sys.settrace", "sys.setprofile", "sys.addaudithook", "signal.",
    "sys._getframe", "cpython.", "webbrowser.", "ftplib.", "http.", "urllib.", "smtplib.", "syslog.",
)  # fmt: skip
CHANGING = (
    "os.remove", "os.rename", "os.rmdir", "os.mkdir", "os.link", "os.symlink", "os.chmod", "os.chown", "os.truncate",
    "os.utime", "os.setxattr", "shutil.", "tempfile.", "os.chdir",
)  # fmt: skip
TWO_PLACES = ("os.rename", "os.link", "os.symlink")  # from, to
STARTING = ("subprocess.Popen", "os.posix_spawn")  # both see: program, words
DEVICES = ("/dev/null", "/dev/urandom", "/proc/cpuinfo")
_libc = ctypes.CDLL(None, use_errno=True)
_with_gil = ctypes.PyDLL(None)  # a fork amid a call that has let go of the GIL would leave the child without it


def adopt_orphans() -> None:
    """Processes whose parents die below this one become its children, not those of the machine's first process."""
    _libc.prctl(SET_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Has the kernel kill this process as soon as the thread that started it ends, whatever ends it."""
    _libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def fork() -> tuple[int, bool]:
    """os.fork into namespaces of the child's own, and whether the kernel allowed them. The child is the first of its
    process namespace: what it starts ends with it. Only for a process with one thread.
    """
    number = CLONE.get(platform.machine())
    if number is None:
        return os.fork(), False
    ctypes.pythonapi.PyOS_BeforeFork()  # what os.fork does around its own call; from 3.13 on the child ends without
    pid = _with_gil.syscall(number, NAMESPACES | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        return 0, True
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    return (os.fork(), False) if pid < 0 else (pid, True)


def enter() -> bool:
    """Moves a process that we did not fork and that uses a GPU into the namespaces: its child goes on in them, the
    process itself holds nothing any more, ends as the child ends, and ends what that has left.
    """
    if _libc.unshare(WITH_PROCESSES) != 0:
        return False
    adopt_orphans()
    child = os.fork()
    if child:
        os.closerange(3, 1 << 16)
        _, status = os.waitpid(child, 0)
        end_children()
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    return True


def end_children() -> None:
    """Ends all children of a process that adopts orphans: the children of those become its own as they end."""
    me = os.getpid()
    with suppress(ChildProcessError):
        while True:
            for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def confine(scratch: Path, *, namespaces: bool, cuda: bool) -> bool:
    """No core files, no large files and, in namespaces, no file to change but in the scratch folder and, for `cuda`, in
    /proc/self. Whether all of it holds.
    """
    _libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (FILE_BYTES, FILE_BYTES))
    return namespaces and _freeze_files(str(scratch).encode(), *([f"/proc/{os.getpid()}".encode()] if cuda else []))


def _freeze_files(*own: bytes) -> bool:
    """Every mount read-only, but those of these folders."""
    attributes = ctypes.c_uint64 * 4  # set, clear, propagation, user namespace
    return (
        _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
        and all(_libc.mount(path, path, None, MS_BIND, None) == 0 for path in own)
        and _attribute(b"/", AT_RECURSIVE, attributes(READ_ONLY, 0, 0, 0)) == 0
        and all(_attribute(path, 0, attributes(0, READ_ONLY, 0, 0)) == 0 for path in own)
    )


def _attribute(path: bytes, flags: int, attributes: Any) -> int:
    return int(_libc.syscall(MOUNT_SETATTR, AT_FDCWD, path, flags, ctypes.byref(attributes), ctypes.sizeof(attributes)))


def guard(scratch: Path, report: Callable[[str], None], *, programs: tuple[str, ...] | None) -> None:
    """From now on a forbidden act is reported and ends this process at once. Cannot be undone.

    programs: those that may be run, on files of the scratch folder, by a process that compiles; torch's fake tensors
    look into frames there. None: a GPU's driver is built by the C compiler and loaded from Triton's cache; the events
    of processes are let through then, and the static rules and namespaces stand alone for them.
    """
    home = os.path.realpath(scratch) + "/"
    own = str(Path(__file__).resolve().parents[1]) + "/"
    libraries = tuple(
        os.path.realpath(path) + "/"
        for path in {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")} | {"/usr/lib"}
    )
    building = ("subprocess.", "ctypes.", "os.posix_spawn", "sys._getframe")  # a fork by Python would not be one
    allowed = building if programs is None else ("sys._getframe",) if programs else ("\0",)
    loadable = (*libraries, home + CACHE + "/") if programs is None else libraries
    realpath, leave, fspath = os.path.realpath, os._exit, os.fspath

    def is_inside(path: Any, places: tuple[str, ...]) -> bool:
        if isinstance(path, int):
            return True  # an open file; nothing outside was open
        if path is None:
            return False
        text = fspath(path)
        full = realpath(text.decode() if isinstance(text, bytes) else text)
        return (full + "/").startswith(places)

    def wrong(event: str, args: tuple[Any, ...]) -> bool:
        if event == "open":
            path, flags = args[0], args[2] or 0
            if isinstance(path, str) and path in DEVICES:
                return False
            if flags & WRITING:
                return not is_inside(path, (home,))
            return not is_inside(path, (home, *libraries)) or (is_inside(path, (own,)) and not is_inside(path, (home,)))
        if event == "import":
            foreign = args[1] is not None and not is_inside(args[1], loadable)  # the file, where it is no Python
            return foreign or str(args[0]).split(".")[0] == "job"
        if event.startswith(CHANGING):
            return not all(is_inside(path, (home,)) for path in args[: 2 if event in TWO_PLACES else 1])
        if event in STARTING and programs and realpath(args[0]) in programs:
            words = (fspath(word).replace(home, "./") for word in args[1][1:])  # whose own path may hold = and ,
            named = (name for word in words for name in re.split("[=,]", word))  # an option's as well
            return not all(is_inside(name, (home,)) for name in named if "/" in name)
        return event.startswith(NEVER) and not event.startswith(allowed)

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "import") or event.startswith((*NEVER, *CHANGING)):
            bad = True
            with suppress(Exception):
                bad = wrong(event, args)
            if bad:
                with suppress(Exception):
                    report(f"{event} {str(args[0])[:120] if args else ''}".strip())
                leave(77)

    sys.addaudithook(hook)
