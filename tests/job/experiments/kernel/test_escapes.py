"""Ways out of a candidate's process, as programs that no rule has looked at: each leads out where nothing is confined,
and nowhere from where candidates are.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.experiments.kernel.judge import sandbox, syscalls
from gpufleet.job.experiments.kernel.judge.worker import Lost, Process, Workers
from tests.job.kernel_judge import never_misses_its_gpu, scratch
from tests.waiting import HANG_S

pytestmark = [
    pytest.mark.xdist_group("kernels"),
    pytest.mark.skipif(sys.platform != "linux", reason="candidates run on Linux alone"),
]

ROOT = os.geteuid() == 0
HEAD = """
import ctypes, os, shutil, signal, socket, struct, subprocess, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.syscall.restype = ctypes.c_long

def call(number, *arguments):
    found = libc.syscall(number, *arguments)
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found

def ended(pid):
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
"""
ESCAPES = {
    # Files.
    "reads a file": "assert open(OUTSIDE).read() == 'secret'",
    "writes a file": "open(OUTSIDE, 'w').write('changed')",
    "makes a file": "open(OUTSIDE + '-new', 'w').close()",
    "removes a file": "os.remove(OUTSIDE)",
    "renames a file": "os.rename(OUTSIDE, OUTSIDE + '-moved')",
    "changes a mode": "os.chmod(OUTSIDE, 0o777)",
    "follows a symbolic link": "os.symlink(OUTSIDE, 'link'); assert open('link').read() == 'secret'",
    "follows a hard link": "os.link(OUTSIDE, 'hard'); assert open('hard').read() == 'secret'",
    "climbs": "assert len(os.listdir('..')) > 1",  # another candidate's folder
    "maps a file": "import torch; torch.from_file(OUTSIDE, shared=True, size=1, dtype=torch.uint8).add_(1)",
    "writes the judge's code": "open(JUDGE, 'r+').close()",
    "reads memory as a file": "assert open('/dev/shm/' + NAME).read() == 'secret'",
    # Other processes.
    "reads an environment": "assert b'secret' in open(f'/proc/{VICTIM}/environ', 'rb').read()",
    "reads the first process": "assert open('/proc/1/cmdline', 'rb').read()",
    "counts processes": "assert str(VICTIM) in os.listdir('/proc')",
    "signals": "os.kill(VICTIM, signal.SIGCONT)",
    "signals all": "os.kill(-VICTIM, signal.SIGCONT)",
    "signals by descriptor": "signal.pidfd_send_signal(os.pidfd_open(VICTIM), signal.SIGCONT)",
    "shares memory": "call(SHMAT, call(SHMGET, KEY, 4096, 0), None, 0)",
    "forks": "pid = os.fork()\nif pid == 0:\n    os._exit(0)\nassert ended(pid) == 0",
    # Network.
    "connects": "socket.create_connection(('127.0.0.1', PORT), 5)",
    "asks the metadata service": (
        "import urllib.request\n"
        "assert urllib.request.urlopen(f'http://127.0.0.1:{PORT}/latest/api/token', timeout=600).read() == b'role'"
    ),
    "sends a datagram": "socket.socket(type=socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))",
    "connects to a socket without a file": "socket.socket(socket.AF_UNIX).connect(chr(0) + NAME)",
    "connects to a socket with a file": "socket.socket(socket.AF_UNIX).connect(SOCKET)",
    "listens": "socket.create_server(('127.0.0.1', 0))",
    # Programs.
    "runs a program": "subprocess.run(['true'], check=True)",
    "runs a program of its own": "shutil.copy(TRUE, 'mine'); subprocess.run(['./mine'], check=True)",
    "runs a program without a file": (
        "kept = os.memfd_create('mine')\nos.write(kept, open(TRUE, 'rb').read())\npid = os.fork()\n"
        "if pid == 0:\n    os.execve(kept, ['mine'], {})\nassert ended(pid) == 0"
    ),
    "loads a library of its own": "shutil.copy(LIBRARY, 'mine.so'); ctypes.CDLL(os.path.abspath('mine.so'))",
    # The kernel.
    "makes namespaces": "call(UNSHARE, 0x10000000)",
    "asks by a ring": "call(425, 4, ctypes.create_string_buffer(120))",
    "takes address space": "import mmap; mmap.mmap(-1, 8 << 30)",
    "starts threads": (
        "go = threading.Event()\nthreading.stack_size(1 << 16)\n"
        "try:\n    for _ in range(700):\n        threading.Thread(target=go.wait, daemon=True).start()\n"
        "finally:\n    go.set()"
    ),
}
OF_ROOT = {  # others may not do these anywhere
    "reads another's memory": (
        "place = int(open(f'/proc/{VICTIM}/maps').read().split('-')[0], 16)\n"
        "with open(f'/proc/{VICTIM}/mem', 'rb') as memory:\n    memory.seek(place)\n    assert memory.read(4)"
    ),
    "reads another's memory by a call": (
        "place = int(open(f'/proc/{VICTIM}/maps').read().split('-')[0], 16)\nkept = ctypes.create_string_buffer(4)\n"
        "pair = lambda at: struct.pack('QQ', at, 4)\n"
        "assert call(READV, VICTIM, pair(ctypes.addressof(kept)), 1, pair(place), 1, 0) == 4"
    ),
    "traces": "call(PTRACE, 16, VICTIM, 0, 0); os.waitpid(VICTIM, 0x40000000); call(PTRACE, 17, VICTIM, 0, 0)",
    "mounts": "os.mkdir('at'); call(MOUNT, b'none', b'at', b'tmpfs', 0, None); call(UMOUNT, b'at', 2)",
    "changes the root": "root = os.open('/', 0)\nos.mkdir('at')\nos.chroot('at')\nos.fchdir(root)\nos.chroot('.')",
    "becomes root": "os.setresuid(0, 0, 0)",
    "makes a device": "os.mknod('disk', 0o60600, os.makedev(7, 0))",
    "opens by a handle": (
        "handle = ctypes.create_string_buffer(struct.pack('Ii', 128, 0) + bytes(128))\n"
        "call(NAME_TO_HANDLE, -100, OUTSIDE.encode(), handle, ctypes.byref(ctypes.c_int()), 0)\n"
        "assert os.read(call(OPEN_BY_HANDLE, os.open('/', 0), handle, 0), 6) == b'secret'"
    ),
}
ALL = {**ESCAPES, **(OF_ROOT if ROOT else {})}
OF_COMPILING = {"forks", "runs a program"}  # ptxas is one
OF_CUDA = OF_COMPILING | {
    "runs a program of its own",  # what the C compiler makes is loaded from there
    "runs a program without a file",
    "loads a library of its own",
    "counts processes",  # the ids that CUDA sees are those of /proc; what is not for everybody stays closed
    "reads the first process",
    "takes address space",
}
FILES = {
    *list(ESCAPES)[: list(ESCAPES).index("signals")],
    "loads a library of its own",
    "starts threads",
    "becomes root",
}


@pytest.fixture
def names(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[str]:
    """What a program finds by these names, outside: a file, sockets, a process, memory."""
    column = list(syscalls.ARCHITECTURES).index(os.uname().machine)
    numbers = {name: pair[column] for name, pair in syscalls.NUMBERS.items()}
    outside, name = tmp_path / "outside", f"gpufleet-test-{os.getpid()}"
    outside.write_text("secret")
    outside.chmod(0o666)
    memory = Path("/dev/shm", name)
    memory.write_text("secret")
    libc, key = sandbox._libc, 0x6770 + os.getpid()
    shared = libc.shmget(key, 4096, 0o1666)
    with ExitStack() as held:
        held.callback(memory.unlink)
        held.callback(libc.shmctl, shared, 0, None)
        web = held.enter_context(socket.create_server(("127.0.0.1", 0)))
        for at in (f"\0{name}", str(tmp_path / "s")):
            local = held.enter_context(socket.socket(socket.AF_UNIX))
            local.bind(at)
            local.listen()
        victim = held.enter_context(
            subprocess.Popen(
                ["sleep", "600"], env={"SAID": "secret", "PATH": os.environ["PATH"]}, start_new_session=True
            )
        )
        held.callback(victim.kill)
        threading.Thread(target=answer, args=(web,), daemon=True).start()
        told = {
            "OUTSIDE": str(outside), "JUDGE": sandbox.__file__, "NAME": name, "VICTIM": victim.pid, "KEY": key,
            "PORT": web.getsockname()[1], "SOCKET": str(tmp_path / "s"), "TRUE": os.path.realpath("/bin/true"),
            "LIBRARY": str(next(Path("/usr").glob("lib*/**/libm.so.6"))), "SHMGET": numbers["shmget"],
            "SHMAT": numbers["shmat"], "UNSHARE": numbers["unshare"], "READV": numbers["process_vm_readv"],
            "PTRACE": numbers["ptrace"], "MOUNT": numbers["mount"], "UMOUNT": numbers["umount2"],
            "NAME_TO_HANDLE": numbers["name_to_handle_at"], "OPEN_BY_HANDLE": numbers["open_by_handle_at"],
        }  # fmt: skip
        yield "".join(f"{key} = {value!r}\n" for key, value in told.items())


def answer(web: socket.socket) -> None:
    """As the metadata service would."""
    while True:
        try:
            client, _ = web.accept()
        except OSError:
            return
        with client:
            if client.recv(4096):
                client.sendall(b"HTTP/1.0 200 OK\r\nContent-Length: 4\r\n\r\nrole")


def said(process: Process, names: str, way: str) -> str:
    """ "out", or what came in the way."""
    acts = "".join(f"    {line}\n" for line in ALL[way].splitlines())
    text = f"{HEAD}{names}def kernel_function():\n    pass\ndef escape():\n{acts}\nescape()\nraise ValueError('out')"
    try:
        reply, _ = process.ask({"do": "load"}, [text.encode()], limit_s=HANG_S)
    except Lost as error:
        return f"lost: {error}"
    return str(reply.get("error")).removeprefix("ValueError: ")


@contextmanager
def contained(workers: Workers, *, compiles: bool = False) -> Iterator[Process]:
    """A candidate's process, beside another's. One that has started CUDA takes a gigabyte."""
    with workers.start(memory_bytes=4e9, compiles=compiles) as process:
        if not process.isolated:
            pytest.skip("this kernel allows no namespaces here")
        with workers.start(memory_bytes=1e9, compiles=True):
            yield process


@pytest.mark.parametrize("way", ALL)
def test_a_way_leads_out_where_nothing_is_confined(workers: Workers, names: str, way: str) -> None:
    with workers.start(memory_bytes=1e10, confined=False) as process, contained(workers):
        assert said(process, names, way) == "out"


@pytest.mark.parametrize("compiles", [False, True])
def test_none_leads_out_of_a_candidate_s_process(workers: Workers, names: str, compiles: bool) -> None:
    with contained(workers, compiles=compiles) as process:
        found = {way: said(process, names, way) for way in ALL}
    assert {way for way, why in found.items() if why == "out"} == (OF_COMPILING if compiles else set()), found
    assert not [way for way, why in found.items() if why.startswith("lost: ") or "NameError" in why], found


@pytest.mark.slow
def test_none_leads_out_of_one_that_has_a_gpu_but_for_what_cuda_needs(
    tmp_path: Path, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_misses_its_gpu(monkeypatch)
    with Workers(scratch(tmp_path), gpus=True) as workers, contained(workers) as process:
        found = {way: said(process, names, way) for way in ALL}
    assert {way for way, why in found.items() if why == "out"} == OF_CUDA, found


# Which namespaces docker's default profile refuses.
LIKE_DOCKER = """
import ctypes, os, struct
clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
steps = [(32, 0, 0, 0), (21, 0, 3, clone), (32, 0, 0, 16), (69, 0, 1, 0x10000000), (6, 0, 0, 0x50001)]
steps += [(6, 0, 0, 0x7FFF0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in steps))
libc = ctypes.CDLL(None)
libc.prctl(38, 1, 0, 0, 0)
assert libc.prctl(22, 2, struct.pack("HxxxxxxQ", len(steps), ctypes.addressof(code)), 0, 0) == 0
"""


@pytest.mark.slow
def test_without_namespaces_the_filter_holds_all_but_files_and_what_proc_says(
    tmp_path: Path, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(LIKE_DOCKER)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with (
        Workers(scratch(tmp_path), gpus=False) as workers,
        workers.start(memory_bytes=1e9) as process,
        workers.start(memory_bytes=1e9),
    ):
        assert not process.isolated
        found = {way: said(process, names, way) for way in ALL}
    assert {way for way, why in found.items() if why == "out"} <= FILES, found


def test_every_call_of_the_table_is_refused_and_what_is_newer_is_not_there() -> None:
    numbers = [pair[list(syscalls.ARCHITECTURES).index(os.uname().machine)] for pair in syscalls.NUMBERS.values()]
    told, tells = os.pipe()
    if (pid := os.fork()) == 0:
        sandbox._libc.prctl(sandbox.SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        syscalls.install(sandbox._libc, programs=False, cuda=False)
        refused = [number for number in numbers if number >= 0 and tried(number) == 1]
        os.write(tells, f"{sorted(refused)} {tried(syscalls.NEWEST + 1)} {tried(0x40000000 + 39)}".encode())
        os._exit(0)
    os.waitpid(pid, 0)
    clone3 = syscalls.NUMBERS["clone3"][0]
    assert os.read(told, 10_000).decode() == f"{sorted({*numbers} - {-1, clone3})} 38 38"
    os.close(told)
    os.close(tells)


def tried(number: int) -> int:
    """errno of a call with arguments that are none."""
    import ctypes

    return 0 if sandbox._libc.syscall(number, -1, -1, -1, -1, -1, -1) >= 0 else ctypes.get_errno()


@pytest.mark.slow  # torch is imported anew
def test_no_open_file_comes_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin = subprocess.Popen

    def careless(words: list[str], **how: Any) -> subprocess.Popen[bytes]:
        return begin(words, **{**how, "pass_fds": [*how["pass_fds"], kept]})

    monkeypatch.setattr(subprocess, "Popen", careless)
    kept = os.open(tmp_path, os.O_RDONLY)
    text = "import os\nfound = []\nfor n in range(3, 256):\n    try:\n        os.fstat(n)\n        found.append(n)\n"
    with Workers(scratch(tmp_path), gpus=False) as workers, workers.start(memory_bytes=1e9) as process:
        text += "    except OSError:\n        pass\nraise ValueError(len(found))"
        reply, _ = process.ask({"do": "load"}, [text.encode()], limit_s=HANG_S)
    os.close(kept)
    assert reply["error"] == "ValueError: 1"  # what it talks through


@pytest.mark.skipif(not ROOT, reason="only root can become a user without rights")
def test_it_holds_for_a_judge_without_any_right_as_on_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "visible", lambda cuda: sandbox.SYSTEM)  # root's Python is not everybody's
    told, tells = os.pipe()
    if (pid := os.fork()) == 0:
        with suppress(BaseException):
            os.setgroups([])
            os.setresgid(1000, 1000, 1000)
            os.setresuid(1000, 1000, 1000)
            sandbox._libc.prctl(sandbox.SET_DUMPABLE, 1, 0, 0, 0)
            sandbox._libc.prctl(sandbox.SET_NO_NEW_PRIVILEGES, 1, 0, 0, 0)
            folder = Path(tempfile.mkdtemp(dir="/tmp"))
            child, namespaces = sandbox.fork()
            if child == 0:
                held = sandbox.confine(folder, namespaces=namespaces, programs=False, cuda=False, memory_bytes=1e9)
                os.write(tells, f"{held} {Path('/etc/passwd').exists()} {folder.exists()}".encode())
                os._exit(0)
            os.waitpid(child, 0)
            folder.rmdir()
        os._exit(0)
    os.waitpid(pid, 0)
    os.close(tells)
    with os.fdopen(told) as said_by_it:
        assert said_by_it.read() == "True False True"


def test_one_that_takes_memory_faster_than_anybody_looks_is_the_first_to_go(workers: Workers) -> None:
    with workers.start(memory_bytes=1e9) as process:
        assert int(Path(f"/proc/{process.pid}/oom_score_adj").read_text()) == 1000


def test_a_candidate_is_another_user_without_rights_of_any_kind(workers: Workers) -> None:
    with contained(workers) as process:
        status = dict(line.split(":\t", 1) for line in Path(f"/proc/{process.pid}/status").read_text().splitlines())
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert status["Uid"].split()[0] == str(sandbox.NOBODY if ROOT else os.geteuid())
