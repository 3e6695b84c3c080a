"""A candidate's process: started, confined, limited, and ended with all that it started."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpufleet.job.experiments.kernel.judge import forkserver, wire, worker
from gpufleet.job.experiments.kernel.judge.worker import Lost, NoDeviceError, OutOfTime, Process, Workers
from tests.job.kernel_judge import Switches, honest, judge, never_misses_its_gpu, run, scratch, verdicts
from tests.waiting import HANG_S, wait_for

MULTIPLY = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, o_ptr, N: tl.constexpr):
    at = tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(o_ptr + at, tl.dot(x, x))

def kernel_function(x):
    out = torch.empty_like(x)
    kernel[(1,)](x, out, N=32)
    return out + x @ x
"""


@pytest.mark.parametrize("fails", ["never", "once", "always"])
def test_a_machine_is_tried_on_a_kernel_that_is_right_before_any_candidate(
    workers: Workers, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, asked = Process.ask, list[bool]()

    def failing(process: Process, head: dict[str, Any], *more: Any, **rest: Any) -> Any:
        reply = ask(process, head, *more, **rest)
        if head["do"] != "run" or fails == "never" or (fails == "once" and asked):
            return reply
        asked.append(True)
        return {"error": "CUDA error 304"}, []

    monkeypatch.setattr(Process, "ask", failing)
    made = judge(workers)
    if fails == "always":
        with pytest.raises(NoDeviceError, match="fails on this machine's cpu:0: tiny: CUDA error 304"):
            made.prove(print)
        return
    made.prove(print)


@pytest.mark.parametrize("gpus", [0, 1])
def test_where_the_kernel_contains_nothing_no_gpu_judges_and_a_cpu_says_so(
    workers: Workers, gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, said = judge(workers), list[str]()
    monkeypatch.setattr(made, "_gpus", gpus)

    def found(gpu: int, contained: list[bool]) -> None:
        contained.append(False)

    monkeypatch.setattr(made, "_failure", found)
    with pytest.raises(NoDeviceError, match="does not allow namespaces for candidates") if gpus else nullcontext():
        made.prove(said.append)
    assert len(said) == 1 - gpus


def test_a_process_without_its_gpu_is_no_verdict(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: Any) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            wire.send(theirs, {"isolated": True, "error": "RuntimeError: no CUDA-capable device"})
        sleeping = subprocess.Popen(["sleep", "5000"], start_new_session=True)
        return Process(sleeping.pid, ours, tmp, 1e9, lambda _: sleeping.wait(), watch_s=wire.WATCH_S)

    made, tmp = judge(workers), workers.folder / "none"
    monkeypatch.setattr(workers, "start", start)
    with pytest.raises(NoDeviceError, match="no CUDA-capable device"):
        made.all([honest()], lambda verdict: pytest.fail(str(verdict)))


@pytest.mark.parametrize("compiles", [True, False])
def test_a_process_that_ends_before_it_has_got_a_source_is_no_verdict(
    workers: Workers, compiles: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Process.__init__

    def dying(process: Process, pid: int, dialogue: socket.socket, *more: Any, **how: Any) -> None:
        if (how["watch_s"] == worker.COMPILING_S) is compiles:
            os.kill(pid, signal.SIGKILL)
            dialogue.close()  # it may have greeted before it died
            dialogue, other = socket.socketpair()
            other.close()
        begin(process, pid, dialogue, *more, **how)

    monkeypatch.setattr(Process, "__init__", dying)
    one = honest(change=lambda text: f"# {compiles}\n{text}")  # not compiled before
    with pytest.raises(NoDeviceError, match="before it received a source: the process ended"):
        judge(workers).all([one], lambda verdict: pytest.fail(str(verdict)))


@pytest.mark.parametrize(("seen", "gpu", "visible"), [("", 1, "1"), ("3,5", 1, "5"), ("GPU-a", 0, "GPU-a")])
def test_a_process_uses_a_gpu_of_those_that_the_judge_sees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seen: str, gpu: int, visible: str
) -> None:
    given: list[dict[str, str]] = []

    def python(theirs: socket.socket, arguments: list[str], environment: dict[str, str]) -> SimpleNamespace:
        given.append(environment)
        return SimpleNamespace(pid=1)

    monkeypatch.setattr(worker, "python", python)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", seen)
    with socket.socket() as theirs:
        Workers(tmp_path, gpus=True)._spawn(theirs, "{}", gpu)
    assert given[0]["CUDA_VISIBLE_DEVICES"] == visible


def test_nothing_of_a_candidate_is_left_when_it_is_over(workers: Workers) -> None:
    before = _ours()
    with workers.start(memory_bytes=2e9) as process:
        folder = process.scratch
        assert _ours() - before
    assert not folder.exists()
    wait_for("the end of all of it", lambda: not _ours() - before)


def test_processes_that_begin_and_end_at_once_leave_each_other_alone(workers: Workers) -> None:
    def one(number: int) -> str:
        with workers.start(memory_bytes=2e9) as process:
            reply, _ = process.ask({"do": "ready", "flush": False}, limit_s=HANG_S)
        return str(reply.get("error"))

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(one, range(60))) == {"None"}


def test_a_child_multiplies_matrices_after_a_parallel_operation_here(workers: Workers) -> None:
    torch.mm(torch.ones(600, 600), torch.ones(600, 600))
    x = torch.eye(32) * 2
    with workers.start(memory_bytes=2e9) as process:
        reply, blobs = run(process, MULTIPLY, x)
    assert reply.get("error") is None
    assert torch.frombuffer(bytearray(blobs[0]), dtype=torch.float32).reshape(32, 32).equal(2 * x @ x)


@pytest.mark.slow
def test_a_new_process_instead_of_a_fork_gives_the_same_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Workers(scratch(tmp_path), gpus=False) as spawned:
        monkeypatch.setattr(spawned._running, "fork", lambda theirs, asked: spawned._spawn(theirs, asked, 0))
        verdict = judge(spawned).verdict(honest("square", lambda text: text.replace("x * x", "x")))
    assert (verdict.stage, verdict.passed) == (3, False)


def test_no_credentials_are_within_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    given = list[dict[str, str]]()
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setattr(subprocess, "Popen", lambda words, **how: given.append(how["env"]))
    with socket.socket() as theirs:
        forkserver.python(theirs, ["serve"], {"TRITON_INTERPRET": "1"})
    assert (given[0]["TRITON_INTERPRET"], "secret" in given[0].values()) == ("1", False)


def test_what_gets_away_from_its_parent_ends_with_the_candidate(workers: Workers) -> None:
    source = """
import os
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        while True:
            pass
    os._exit(0)
raise ValueError("forked")
"""
    before = _ours()
    with workers.start(memory_bytes=2e9, compiles=True) as process:  # others may not fork
        reply, _ = process.ask({"do": "load"}, [source.encode()], limit_s=HANG_S)
    assert reply["error"] == "ValueError: forked"
    wait_for("the end of all of it", lambda: not _ours() - before)


def test_no_candidate_outlives_its_judge(workers: Workers) -> None:
    """One that hangs would keep a core from the next attempt on this machine."""
    process, server = _hanging(workers), workers._running
    assert server is not None
    assert server._control is not None
    server._control.shutdown(socket.SHUT_RDWR)  # as the end of the judge's process does
    _wait_until_gone(process.pid)
    process.close()


@pytest.mark.slow
def test_no_process_of_a_gpus_outlives_its_judge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    never_misses_its_gpu(monkeypatch)
    with Workers(scratch(tmp_path), gpus=True) as workers:
        with ThreadPoolExecutor(1) as pool:
            process = pool.submit(_hanging, workers).result()
            pids = list(forkserver.offspring(process.pid))
        workers._spawned[process.pid].wait()
        for pid in pids:
            _wait_until_gone(pid)
        process.close()


def _hanging(workers: Workers) -> Process:
    process = workers.start(memory_bytes=2e9)
    with pytest.raises(OutOfTime):
        process.ask({"do": "load"}, [b"while True: pass"], limit_s=0.5)
    return process


def _wait_until_gone(pid: int) -> None:
    wait_for(f"the end of process {pid}", lambda: not Path(f"/proc/{pid}").exists())


def _ours() -> set[int]:
    """Candidates' processes and their servers."""
    found = set[int]()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            if "job.experiments.kernel.judge.child" in path.read_text():
                found.add(int(path.parent.name))
    return found


def test_a_process_that_compiles_is_looked_at_once_a_second(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = dict.fromkeys((True, False), 0)

    def looked(pids: Any) -> int:
        looks[compiles] += 1
        return 0

    monkeypatch.setattr("gpufleet.job.experiments.kernel.judge.worker.usage.memory_bytes", looked)
    for compiles in looks:
        with workers.start(memory_bytes=2e9, compiles=compiles) as process:
            looks[compiles] = 0
            with pytest.raises(OutOfTime):
                process.ask({"do": "load"}, [b"while True:\n    pass"], limit_s=1.5)
    assert looks[True] <= 3
    assert looks[False] > looks[True]


@pytest.mark.parametrize("compiles", [False, True])
def test_a_process_that_takes_more_memory_than_allowed_is_ended(workers: Workers, compiles: bool) -> None:
    with pytest.raises(Lost, match="of memory"), workers.start(memory_bytes=1.0, compiles=compiles) as process:
        process.ask({"do": "load"}, [b"while True: pass"], limit_s=HANG_S)


def test_memory_of_offspring_and_of_no_process_counts(workers: Workers) -> None:
    grows = "x = b'x' * (600 << 20)\nwhile True:\n    pass"
    forks = f"import os\nif os.fork() == 0:\n    {grows.replace(chr(10), chr(10) + '    ')}\nos.wait()"
    writes = (
        "import os\nfor n in range(20):\n    kept = os.open('x', os.O_CREAT | os.O_WRONLY)\n    os.unlink('x')\n"
        "    os.posix_fallocate(kept, 0, 160 << 20)\nwhile True:\n    pass"
    )
    for source in (forks, writes):
        with (
            workers.start(memory_bytes=1.0e9, compiles=True) as process,
            pytest.raises(Lost, match=r"of memory, 1\.0 are allowed"),
        ):
            process.ask({"do": "load"}, [source.encode()], limit_s=HANG_S)


@pytest.mark.parametrize(
    "fills",
    [
        "os.posix_fallocate(os.open('a', os.O_CREAT | os.O_WRONLY), 0, 200 << 20)\n"
        "os.posix_fallocate(os.open('b', os.O_CREAT | os.O_WRONLY), 0, 100 << 20)",
        "for n in range(11_000):\n    os.close(os.open(str(n), os.O_CREAT))",
        "at = os.open('.', os.O_RDONLY)\nfor _ in range(1100):\n    os.mkdir('deep', dir_fd=at)\n"
        "    outer, at = at, os.open('deep', os.O_RDONLY, dir_fd=at)\n    os.close(outer)",
        "os.mkdir('hidden')\nos.posix_fallocate(os.open('hidden/a', os.O_CREAT | os.O_WRONLY), 0, 200 << 20)\n"
        "os.posix_fallocate(os.open('hidden/b', os.O_CREAT | os.O_WRONLY), 0, 100 << 20)",
    ],
)
def test_the_scratch_folder_as_a_whole_is_limited(workers: Workers, fills: str) -> None:
    def asks() -> None:
        process.ask({"do": "load"}, [f"import os\n{fills}\nkernel_function = len".encode()], limit_s=HANG_S)
        for _ in range(100_000):  # it is looked at between the questions as well
            process.ask({"do": "ready", "flush": False}, limit_s=HANG_S)

    with workers.start(memory_bytes=2e9) as process, pytest.raises(Lost, match="more in its folder than 256 MiB"):
        asks()
    assert not process.scratch.exists()


def test_what_nobody_had_looked_at_when_the_last_answer_came_is_looked_at(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    fills = "for name in 'ab':\n        os.posix_fallocate(os.open(name, os.O_CREAT | os.O_WRONLY), 0, 200 << 20)\n"
    made = honest(change=lambda text: "import os\n" + text.replace("    out = ", f"    {fills}    out = "))
    off = Switches(funnel=False, multi_input=False, timing=False)
    monkeypatch.setattr(wire, "WATCH_S", 3600.0)  # between two looks
    found = verdicts(judge(workers), [made], off)["x"]
    assert found.reason.startswith("more in its folder than 256 MiB"), found


SERVES = """
import socket, struct, sys, time
end, greeting = socket.socket(fileno=int(sys.argv[1])), b'{"blobs": []}'
end.sendall(struct.pack("!I", len(greeting)) + greeting)
if sys.argv[2] == "1":
    end.close()
    time.sleep(5000)
end.recv(4096)
end.sendall(b"77")
end.recv(1)
"""


def test_a_fork_server_that_is_about_to_end_is_another_one_at_the_next_question(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[subprocess.Popen[bytes]] = []

    def python(theirs: socket.socket, *_: object) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-S", "-c", SERVES, str(theirs.fileno()), str(len(begun) + 1)]
        begun.append(subprocess.Popen(words, pass_fds=[theirs.fileno()]))
        return begun[-1]

    monkeypatch.setattr(forkserver, "python", python)
    server = forkserver.ForkServer([], {})
    server.ready()
    with socket.socket() as theirs:
        assert server.fork(theirs, "{}") == 77
    server.close()
    assert [each.poll() is not None for each in begun] == [True, True]


def test_what_a_process_starts_while_it_is_ended_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a chain of any length."""
    below, ended = {pid: [pid + 1] for pid in range(1, 2000)}, list[int]()

    def kill(pid: int, number: int) -> None:
        ended.append(pid)
        if pid == 7:
            below[1] = [2, 5000]

    monkeypatch.setattr(forkserver, "children", lambda pid: below.get(pid, []))
    monkeypatch.setattr(os, "kill", kill)
    forkserver.kill_all(1)
    assert sorted(ended) == [*range(1, 2001), 5000]
    assert ended[-1] == 1
