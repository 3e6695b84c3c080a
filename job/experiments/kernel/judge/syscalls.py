"""The system calls that a candidate's process may make: a seccomp filter, which neither the process nor its children
can remove.

Calls that a candidate does not need fail with EPERM: the calls that docker's default profile refuses, and those for
sockets, messages, signals to other processes, System V memory, mounts, namespaces, new processes and new programs.
Calls that are newer than this table fail with ENOSYS, as if the system did not have them. A call with the numbers of
another architecture ends the process. sandbox.py limits which file, mount or process a call can reach.
"""

from __future__ import annotations

import ctypes
import os
import platform
import struct
from collections.abc import Iterator

NEWEST = 456  # the highest number in this table; the numbers of x32 are higher
ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}  # AUDIT_ARCH_*, linux/audit.h
NETWORK = ("socket", "socketpair", "connect", "bind", "listen", "accept", "accept4", "sendmsg", "sendmmsg", "recvmsg",
           "recvmmsg")  # fmt: skip
PROGRAMS = ("execve", "execveat", "fork", "vfork")
MEMORY_FILES = ("memfd_create",)
SIGNALS = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")  # calls whose first argument is a process
# Name, number on x86_64, number on aarch64 (-1: none); asm/unistd_64.h and asm-generic/unistd.h of Linux 6.
_NUMBERS = """
socket 41 198, socketpair 53 199, connect 42 203, bind 49 200, listen 50 201, accept 43 202, accept4 288 242,
sendmsg 46 211, sendmmsg 307 269, recvmsg 47 212, recvmmsg 299 243, execve 59 221, execveat 322 281, fork 57 -1,
vfork 58 -1, memfd_create 319 279, memfd_secret 447 447, clone 56 220, clone3 435 435, kill 62 129, tkill 200 130,
tgkill 234 131, rt_sigqueueinfo 129 138, rt_tgsigqueueinfo 297 240, pidfd_send_signal 424 424, pidfd_open 434 434,
pidfd_getfd 438 438, ptrace 101 117, process_vm_readv 310 270, process_vm_writev 311 271, process_madvise 440 440,
process_mrelease 448 448, kcmp 312 272, shmget 29 194, shmat 30 196, shmctl 31 195, semget 64 190, semop 65 193,
semctl 66 191, semtimedop 220 192, msgget 68 186, msgsnd 69 189, msgrcv 70 188, msgctl 71 187, mq_open 240 180,
mq_unlink 241 181, add_key 248 217, request_key 249 218, keyctl 250 219, mount 165 40, umount2 166 39,
pivot_root 155 41, chroot 161 51, move_mount 429 429, open_tree 428 428, fsopen 430 430, fsconfig 431 431,
fsmount 432 432, fspick 433 433, mount_setattr 442 442, unshare 272 97, setns 308 268, io_uring_setup 425 425,
io_uring_enter 426 426, io_uring_register 427 427, bpf 321 280, perf_event_open 298 241, userfaultfd 323 282,
fanotify_init 300 262, name_to_handle_at 303 264, open_by_handle_at 304 265, lookup_dcookie 212 18,
init_module 175 105, finit_module 313 273, delete_module 176 106, kexec_load 246 104, kexec_file_load 320 294,
reboot 169 142, swapon 167 224, swapoff 168 225, syslog 103 116, acct 163 89, quotactl 179 60, quotactl_fd 443 443,
iopl 172 -1, ioperm 173 -1, modify_ldt 154 -1, vhangup 153 58, settimeofday 164 170, clock_settime 227 112,
clock_adjtime 305 266, adjtimex 159 171, sethostname 170 161, setdomainname 171 162, nfsservctl 180 42,
uselib 134 -1, ustat 136 -1, sysfs 139 -1, personality 135 92, _sysctl 156 -1
"""
NUMBERS = {name: (int(x86), int(arm)) for name, x86, arm in (row.split() for row in _NUMBERS.split(","))}
_THREAD, _NAMESPACES, _AF_UNIX = 0x00010000, 0x7E020000, 1  # of clone's flags; of socket's first argument
_LOAD, _EQUAL, _GREATER, _ANY, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06  # BPF: word, jeq, jgt, jset, ret
_NUMBER, _ARCHITECTURE, _FIRST = 0, 4, 16  # offsets in struct seccomp_data
# the filter's results; the last two are EPERM and ENOSYS
_ALLOW, _KILL, _REFUSE, _ABSENT = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
SET_SECCOMP, MODE_FILTER = 22, 2  # prctl


def install(libc: ctypes.CDLL, *, programs: bool, cuda: bool) -> None:
    """Installs the filter for this thread and everything that the thread starts. If `programs`, the thread may start
    processes and programs. If `cuda`, it may also ask for sockets of this machine and for memory as a file, as a GPU's
    driver does. Raises OSError.
    """
    code = b"".join(_program(os.getpid(), programs=programs, cuda=cuda))
    held = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("HxxxxxxQ", len(code) // 8, ctypes.addressof(held))  # struct sock_fprog
    if libc.prctl(SET_SECCOMP, MODE_FILTER, program, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "no seccomp filter can be set")


def _program(pid: int, *, programs: bool, cuda: bool) -> Iterator[bytes]:
    """The filter's instructions."""
    machine = platform.machine()
    column = list(ARCHITECTURES).index(machine)
    lifted = {"clone", "clone3", *SIGNALS}
    lifted |= {*(PROGRAMS if programs else ()), *((*NETWORK, *MEMORY_FILES) if cuda else ())}
    yield _step(_LOAD, _ARCHITECTURE)
    yield _step(_EQUAL, ARCHITECTURES[machine], 1, 0)
    yield _step(_RETURN, _KILL)
    yield _step(_LOAD, _NUMBER)
    yield _step(_GREATER, NEWEST, 0, 1)
    yield _step(_RETURN, _ABSENT)
    # the flags of clone3 cannot be read; libc falls back to clone
    yield from _when(NUMBERS["clone3"][column], _step(_RETURN, _ABSENT))
    refused = [numbers[column] for name, numbers in NUMBERS.items() if name not in lifted and numbers[column] >= 0]
    for number in refused:
        yield from _when(number, _step(_RETURN, _REFUSE))
    yield from _when(
        NUMBERS["clone"][column],
        _step(_LOAD, _FIRST),
        _step(_ANY, _NAMESPACES, 1, 0),
        _step(_ANY, _THREAD, 1, 0) if not programs else _step(_RETURN, _ALLOW),
        _step(_RETURN, _REFUSE),
        _step(_RETURN, _ALLOW),
    )
    own = dict.fromkeys(SIGNALS, pid) | ({"socket": _AF_UNIX, "socketpair": _AF_UNIX} if cuda else {})
    for name, only in own.items():
        yield from _when(
            NUMBERS[name][column],
            _step(_LOAD, _FIRST),
            _step(_EQUAL, only, 1, 0),
            _step(_RETURN, _REFUSE),
            _step(_RETURN, _ALLOW),
        )
    yield _step(_RETURN, _ALLOW)


def _when(number: int, *steps: bytes) -> Iterator[bytes]:
    """The `steps` of the filter for one system call. The last of them returns the result."""
    yield _step(_EQUAL, number, 0, len(steps))
    yield from steps


def _step(code: int, value: int, then: int = 0, otherwise: int = 0) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value)
