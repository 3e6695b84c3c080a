"""Limits what a candidate's process can reach, before it sees the candidate. Linux only.

The operating system's kernel enforces the limits, as in a container. Namespaces separate users, network, IPC, mounts,
names and, except with CUDA, processes. The root folder contains only libraries, which are read-only, and the scratch
folder. If the judge is root, the process runs as a different user; it has no capability and no new privilege, and
system calls are filtered (syscalls.py). None of these limits decides a verdict. The judge limits time and memory
(worker.py); the kernel refuses more address space than the judge allows.

CUDA has fewer limits: since version 570 the driver names its threads in /proc/self/task/<id>/comm and turns a refusal
into error 304; in a process namespace the ids differ from those of the existing /proc, and a new /proc may not be
mounted where a container hides parts of it. So a process with CUDA sees the ids of the container's processes, and may
change its own entries in /proc. The process may start the C compiler, and load that compiler's results from Triton's
cache.
"""

from __future__ import annotations

import ctypes
import os
import platform
import resource
import signal
import stat
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from gpufleet.job.experiments.kernel.judge import syscalls

# The flags for new namespaces of users, network, IPC, mounts, host names and control groups; and the flag for
# processes.
WITH_PROCESSES = 0x10000000 | 0x40000000 | 0x08000000 | 0x00020000 | 0x04000000 | 0x02000000
NAMESPACES = WITH_PROCESSES | 0x20000000
CLONE = {"x86_64": 56, "aarch64": 220}
INSIDE, NOBODY = 1000, 65534  # the process's user id inside of its namespace; its user id outside, if the judge is root
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
UMOUNT_DETACH, PIVOT_ROOT = 2, {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, OPEN_TREE, MOVE_MOUNT = 442, 428, 429  # the same numbers on every architecture
AT_FDCWD, AT_RECURSIVE, AT_EMPTY_PATH, OPEN_CLONED, MOVE_EMPTY_PATH = -100, 0x8000, 0x1000, 1, 4
READ_ONLY, NO_SUID, NO_DEVICES, NO_PROGRAMS = 1, 2, 4, 8  # flags of a mount, for mount and mount_setattr
CAPSET, CAPABILITIES = {"x86_64": 126, "aarch64": 91}, 0x20080522  # the calls' numbers, and their structure's version
SET_DEATH_SIGNAL, SET_DUMPABLE, SET_NO_NEW_PRIVILEGES, SET_SUBREAPER = 1, 4, 38, 36  # prctl
FILE_BYTES, RESERVED_BYTES, PROCESSES = 1 << 28, 1 << 30, 512
SHARED = Path("/dev/shm")
SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/libx32", "/etc/ld.so.cache", "/etc/alternatives")
NEW_ROOT = Path("/tmp")  # where the new root is built: a folder that everybody may read
DEVICES = ("/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
PROCESSOR = ("/proc/cpuinfo", "/sys/devices/system/cpu")  # torch reads these files to choose its kernels
PACKAGE = Path(__file__).resolve().parents[3]  # the folder of gpufleet's job
_libc = ctypes.CDLL(None, use_errno=True)
# PyDLL keeps the GIL during a call; otherwise the child would not have the GIL after a fork
_with_gil = ctypes.PyDLL(None)


def adopt_orphans() -> None:
    """Makes orphans among this process's descendants children of this process, not of the machine's first process."""
    _libc.prctl(SET_SUBREAPER, 1, 0, 0, 0)


def die_with_parent() -> None:
    """Makes the kernel kill this process as soon as the thread that started it ends, for whatever reason."""
    _libc.prctl(SET_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)


def fork(*, cuda: bool = False) -> tuple[int, bool]:
    """Forks as os.fork does, into the child's own namespaces; returns the child's id, and whether the kernel allowed
    the namespaces. If not `cuda`, the child is the first process of a process namespace, so that its own children end
    with it. Call it only in a process with one thread.
    """
    number = CLONE.get(platform.machine())
    if number is None:
        return os.fork(), False
    reader, tells = os.pipe()
    # os.fork makes the same calls around the fork. Without them, the child dies in Python 3.13 and later.
    ctypes.pythonapi.PyOS_BeforeFork()
    pid = _with_gil.syscall(number, (WITH_PROCESSES if cuda else NAMESPACES) | signal.SIGCHLD, 0, 0, 0, 0)
    if pid == 0:
        ctypes.pythonapi.PyOS_AfterFork_Child()
        os.close(tells)
        named = os.read(reader, 1) == b"1"
        os.close(reader)
        return 0, named
    ctypes.pythonapi.PyOS_AfterFork_Parent()
    os.close(reader)
    with os.fdopen(tells, "wb", 0) as say:
        if pid < 0:
            return os.fork(), False
        named = _name_user(pid)
        say.write(b"1" if named else b"0")
    return pid, named


def _name_user(pid: int) -> bool:
    """Gives the child's namespace one user and one group, so that root's rights do not apply to files. Returns False if
    the child is still nobody.
    """
    for user, group in [(NOBODY, NOBODY)] * (os.geteuid() == 0) + [(os.geteuid(), os.getegid())]:
        with suppress(OSError):  # root may not be allowed to change to another user
            with suppress(OSError):  # the file may already be written
                Path(f"/proc/{pid}/setgroups").write_text("deny")
            Path(f"/proc/{pid}/gid_map").write_text(f"{INSIDE} {group} 1")
            Path(f"/proc/{pid}/uid_map").write_text(f"{INSIDE} {user} 1")
            return True
    return False


def give(scratch: Path, user: int = NOBODY) -> None:
    """Gives folder and files to the user of candidates, if this process is root and candidates are not."""
    if os.geteuid() == 0:
        with suppress(PermissionError):
            for path in (scratch, *scratch.rglob("*")):
                os.chown(path, user, user, follow_symlinks=False)


def enter() -> bool:
    """Moves a process that was not forked here, and uses a GPU, into the namespaces. A child of this process continues
    in the namespaces. The process itself does nothing more: it ends when the child ends, and ends all processes that
    the child leaves.
    """
    adopt_orphans()
    child, namespaces = fork(cuda=True)
    if child:
        os.closerange(3, 1 << 16)
        _, status = os.waitpid(child, 0)
        end_children()
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    die_with_parent()
    return namespaces


def end_children() -> None:
    """Ends all descendants of a process that adopts orphans: when a child ends, its own children become children of
    that process.
    """
    me = os.getpid()
    with suppress(ChildProcessError):
        while True:
            for pid in Path(f"/proc/{me}/task/{me}/children").read_text().split():
                os.kill(int(pid), signal.SIGKILL)
            os.waitpid(-1, 0)


def confine(scratch: Path, *, namespaces: bool, programs: bool, cuda: bool, memory_bytes: float) -> bool:
    """Confines this process to its scratch folder and libraries; if `programs`, it may run the system's programs, and
    if `cuda`, it may use a GPU. Returns whether all limits are in force; without namespaces, only the filter and the
    memory limit are. Raises OSError if a step fails after an earlier step has succeeded.
    """
    with suppress(OSError):  # so that this process is killed first if memory runs out
        Path("/proc/self/oom_score_adj").write_text("1000")
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    held = namespaces and _change_root(scratch, cuda=cuda)
    if not namespaces:
        give(scratch, os.geteuid())
    for limit, most in (
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (
            resource.RLIMIT_NPROC,
            PROCESSES if held else resource.RLIM_INFINITY,
        ),  # otherwise the limit would apply to all processes of the user together
        (resource.RLIMIT_AS, resource.RLIM_INFINITY if cuda else used + int(memory_bytes) + RESERVED_BYTES),
    ):
        hard = resource.getrlimit(limit)[1]
        most = most if hard == resource.RLIM_INFINITY or most == resource.RLIM_INFINITY else min(most, hard)
        if most != resource.RLIM_INFINITY:
            resource.setrlimit(limit, (most, most))
    _check(_libc.syscall(CAPSET[platform.machine()], struct.pack("Ii", CAPABILITIES, 0), bytes(24)), "no capabilities")
    _check(_libc.prctl(SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no new privileges")
    syscalls.install(_libc, programs=programs, cuda=cuda)
    return held


def visible(*, cuda: bool) -> Iterator[str]:
    """The parts of the machine that a candidate's process may read: programs and libraries of the system and of Python,
    and a GPU's files. Other entries of Python's path are not visible: the first entry is the folder in which Python was
    started.
    """
    yield from (*SYSTEM, *DEVICES, *PROCESSOR, sys.prefix, sys.base_prefix)
    yield from (path for path in sys.path if path.endswith(("site-packages", "dist-packages")))
    yield from filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(":"))
    if cuda:
        yield from filter(None, (os.environ.get("CUDA_HOME"), "/sys", "/proc"))
        yield from map(str, Path("/dev").glob("nvidia*"))


def _change_root(scratch: Path, *, cuda: bool) -> bool:
    """Replaces the root by a folder with only the `visible` parts, at their old paths, and the scratch folder.
    Afterwards the process has another user. Returns False if no mount may be changed, so that the machine's files stay
    visible.
    """
    private = _libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None)
    if private != 0 or _attribute(AT_FDCWD, "/", AT_RECURSIVE, READ_ONLY | NO_SUID) != 0:
        _change_user()
        return False
    named = [path for path in map(Path, visible(cuda=cuda)) if path.exists()]
    # These are opened while this process may still read them. Folders come before their contents.
    trees = {path: _tree(path) for path in sorted(path.resolve() for path in named)}
    own = Path(f"/proc/{os.getpid()}")
    mine = {scratch: _tree(scratch), **({own: _tree(own)} if cuda else {})}
    _change_user()
    _mount_memory(NEW_ROOT)
    for path, tree in trees.items():
        if not _new(path).exists():  # otherwise the path is below an earlier one
            _place(tree, _new(path))
        os.close(tree)
    for path in named:
        if not os.path.lexists(_new(path)):  # the path is a link, or behind a link
            _new(path).parent.mkdir(parents=True, exist_ok=True)
            _new(path).symlink_to(path.resolve())
    if _new(PACKAGE).exists():  # true if gpufleet is installed in a folder of libraries; an empty folder then hides it
        _mount_memory(_new(PACKAGE))
    if cuda:
        _new(SHARED).mkdir()
        _mount_memory(_new(SHARED))
    for path, tree in mine.items():
        _place(tree, _new(path))
        flags = 0 if path == own else NO_SUID | NO_DEVICES | (0 if cuda else NO_PROGRAMS)
        _check(_attribute(tree, "", AT_EMPTY_PATH, flags, READ_ONLY), path)
        os.close(tree)
    os.chdir(NEW_ROOT)
    _check(_libc.syscall(PIVOT_ROOT[platform.machine()], b".", b"."), "pivot_root")
    _check(_libc.umount2(b".", UMOUNT_DETACH), "the old root")  # the old root is mounted on top of the new one
    os.chdir("/")
    _check(_attribute(AT_FDCWD, "/", 0, READ_ONLY), "/")
    return True


def _change_user() -> None:
    os.setresgid(INSIDE, INSIDE, INSIDE)
    os.setresuid(INSIDE, INSIDE, INSIDE)
    _libc.prctl(SET_DUMPABLE, 1, 0, 0, 0)  # otherwise the process's own entries in /proc would belong to another user


def _new(path: Path) -> Path:
    """Where a path of the new root is before the root is changed."""
    return NEW_ROOT / path.relative_to("/")


def _tree(path: Path) -> int:
    """A detached copy of the mount at a path with everything below it."""
    flags = OPEN_CLONED | AT_RECURSIVE | os.O_CLOEXEC
    return _check(_libc.syscall(OPEN_TREE, AT_FDCWD, os.fsencode(path), flags), path)


def _place(tree: int, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if stat.S_ISDIR(os.fstat(tree).st_mode):
        path.mkdir(exist_ok=True)
    else:
        path.touch()
    _check(_libc.syscall(MOVE_MOUNT, tree, b"", AT_FDCWD, os.fsencode(path), MOVE_EMPTY_PATH), path)


def _mount_memory(path: Path) -> None:
    """Mounts a small folder in memory."""
    options = b"size=64m,nr_inodes=4096,mode=0755"
    _check(_libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", NO_SUID | NO_DEVICES, options), path)


def _attribute(at: int, path: str, flags: int, on: int, off: int = 0) -> int:
    asked = (ctypes.c_uint64 * 4)(on, off, 0, 0)  # set, clear, propagation, user namespace
    call = (MOUNT_SETATTR, at, os.fsencode(path), flags, ctypes.byref(asked), ctypes.sizeof(asked))
    return int(_libc.syscall(*call))


def _check(result: int, subject: str | Path) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(subject))
    return result
