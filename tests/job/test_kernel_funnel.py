"""The funnel on planted candidates: each kind stops at its own stage, each candidate dies alone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from kernel_judge import SEED, honest, judge, scratch, verdicts

from job.kernels import catalog, planted, tasks, timing, wire
from job.kernels.planted import KINDS, STOPS_AT, Candidate
from job.kernels.verdict import Switches, Verdict
from job.kernels.worker import Lost, Process, Workers

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


@pytest.fixture(scope="module")
def workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workers]:
    with Workers(scratch(tmp_path_factory.mktemp("funnel")), gpus=False) as made:
        yield made


def run(process: Process, source: str, *tensors: torch.Tensor) -> tuple[dict[str, object], list[bytes]]:
    process.ask({"do": "load"}, [source.encode()], limit_s=20)
    packed = [wire.pack(tensor) for tensor in tensors]
    head = {"do": "run", "inputs": [spec for spec, _ in packed]}
    return process.ask(head, [blob for _, blob in packed], limit_s=20, most_bytes=1 << 20)


def test_there_are_200_planted_candidates_of_five_kinds() -> None:
    made = planted.candidates(1000)
    assert len(made) == len({candidate.name for candidate in made}) == 200
    assert {kind: sum(c.label == kind for c in made) for kind in KINDS} == dict.fromkeys(KINDS, 40)


@pytest.mark.parametrize("task", ["leaky_relu", "hardtanh", "addcmul"])
def test_each_planted_kind_stops_at_its_own_stage(workers: Workers, task: str) -> None:
    made = [candidate for candidate in planted.candidates(100) if candidate.task == task]
    assert {label: v.stage for label, v in verdicts(judge(workers), made).items()} == STOPS_AT


@pytest.mark.slow
def test_all_200_stop_where_they_should(workers: Workers) -> None:
    found: list[Verdict] = []
    judge(workers).all(planted.candidates(200), Switches(), "full", found.append)
    assert [v for v in found if v.stage != STOPS_AT[v.label]] == []


def test_a_correct_one_is_timed_or_its_timing_refused(workers: Workers) -> None:
    verdict = verdicts(judge(workers), [honest()])["x"]
    assert verdict.passed
    assert verdict.kernel_s is not None
    assert verdict.kernel_s[0] <= verdict.kernel_s[1] <= verdict.kernel_s[2]
    assert (verdict.speedup is None) == ("differs by" in verdict.reason)
    assert Verdict.from_json(verdict.to_json()) == verdict


def test_a_source_that_does_not_load_is_not_loaded_again(workers: Workers) -> None:
    made, broken = judge(workers), honest(change=lambda text: text.replace("tl.constexpr", "tl.int99"))
    off = Switches(funnel=False)
    first, second = (made.verdict(broken, off, "full") for _ in range(2))
    assert (first.stage, first.isolated is None) == (2, False)
    assert (second.stage, second.isolated is None) == (2, True)  # no process was started
    assert first.reason == second.reason


def test_a_hang_and_a_crash_lose_only_themselves_within_bounded_time(workers: Workers) -> None:
    loop = honest(change=lambda text: text.replace("    n = ", "    while True:\n        pass\n    n = "), label="loop")
    crash = Candidate(
        name="crash",
        task="relu",
        source="import os\ndef kernel_function(x):\n    os.kill(os.getpid(), 11)\nos.abort()",
        origin="generated",
        label="crash",
    )
    made = judge(workers, candidate_s=1.5)
    crowd = [loop, honest(label="a"), crash, honest("add", label="b")]
    started = time.monotonic()
    found = verdicts(made, crowd, Switches(funnel=False))
    assert time.monotonic() - started < made.bound_s(len(crowd))
    assert {label: verdict.passed for label, verdict in found.items() if label in ("loop", "crash")} == {
        "loop": False,
        "crash": False,
    }
    assert "no answer within" in found["loop"].reason
    assert "ended" in found["crash"].reason
    assert len(found) == len(crowd)


def test_nothing_of_a_candidate_is_left_when_it_is_over(workers: Workers) -> None:
    before = set(_all_pids())
    with workers.start(memory_bytes=2e9) as process:
        folder = process.scratch
        assert _ours_since(before)
    assert not folder.exists()
    _wait_until_none(before)


def test_processes_that_begin_and_end_at_once_leave_each_other_alone(workers: Workers) -> None:
    def one(number: int) -> str:
        with workers.start(memory_bytes=2e9) as process:
            reply, _ = process.ask({"do": "ready", "flush": False}, limit_s=20)
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


def test_a_new_process_instead_of_a_fork_gives_the_same_verdict(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Workers(scratch(tmp_path), gpus=False) as spawned:
        monkeypatch.setattr(spawned._running, "fork", lambda theirs, asked: spawned._spawn(theirs, asked, 0))
        verdict = judge(spawned).verdict(honest("square", lambda text: text.replace("x * x", "x")), Switches(), "full")
    assert (verdict.stage, verdict.passed) == (3, False)


def test_neither_network_nor_files_nor_credentials_are_within_reach(
    workers: Workers, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    listener = socket.create_server(("127.0.0.1", 0))
    port, outside = listener.getsockname()[1], tmp_path / "outside"
    source = f"""
import os, socket, torch
def kernel_function(x):
    found = []
    try:
        socket.create_connection(("127.0.0.1", {port}), 1)
        found.append("network")
    except OSError:
        pass
    try:
        open({str(outside)!r}, "w").write("x")
        found.append("file")
    except OSError:
        pass
    open("inside", "w").write("x")
    if "secret" in os.environ.values():
        found.append("secret")
    raise ValueError(",".join(found) or "nothing")
"""
    with listener, workers.start(memory_bytes=2e9, guarded=False) as process:  # without the guard: namespaces alone
        if not process.isolated:
            pytest.skip("this kernel allows no namespaces here: the guard and the static rules stand alone")
        reply, _ = run(process, source, torch.ones(3))
    assert reply["error"] == "ValueError: nothing"
    assert not outside.exists()


def test_a_fork_that_leaves_its_parent_ends_with_the_candidate(workers: Workers, tmp_path: Path) -> None:
    source = """
import os
def kernel_function(x):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            while True:
                pass
        os._exit(0)
    raise ValueError("forked")
"""
    before = set(_all_pids())
    with workers.start(memory_bytes=2e9, guarded=False) as process:
        reply, _ = run(process, source, torch.ones(3))
    assert reply["error"] == "ValueError: forked"
    _wait_until_none(before)


def _wait_until_none(before: set[int]) -> None:
    for _ in range(100_000):
        if not _ours_since(before):
            return
        os.sched_yield()
    raise AssertionError("a process is left")


def _ours_since(before: set[int]) -> list[int]:
    return [pid for pid in set(_all_pids()) - before if _is_ours(pid)]


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def _is_ours(pid: int) -> bool:
    try:
        return "job.kernels.child" in Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return False


def test_a_message_that_is_none_or_too_large_is_not_believed() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"\xff\xff\xff\xff")
        with pytest.raises(wire.Closed):
            wire.receive(ours, until=time.monotonic() + 5)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        wire.send(theirs, {"shape": [1]}, [b"1234"])
        with pytest.raises(wire.Closed, match="at most 3"):
            wire.receive(ours, until=time.monotonic() + 5, most_bytes=3)
        with pytest.raises(wire.Late):
            wire.receive(ours, until=time.monotonic())


def test_a_process_that_takes_more_memory_than_allowed_is_ended(workers: Workers) -> None:
    def loop() -> None:
        with workers.start(memory_bytes=1.0) as process:
            run(process, "def kernel_function(x):\n    while True:\n        pass", torch.ones(1))

    with pytest.raises(Lost, match="of memory"):
        loop()


def test_inputs_are_a_pure_function_of_seed_task_and_case() -> None:
    task = catalog.BY_NAME["lerp"]
    names = [case.name for case in tasks.cases(task, SEED, 5)]
    assert names == [*(f"random-{i}" for i in range(5)), "zeros", "large", "non-contiguous", "second-shape"]
    for name in names:
        one, two = tasks.case(task, SEED, name), tasks.case(task, SEED, name)
        assert all(torch.equal(a, b) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert not tasks.case(task, SEED, "non-contiguous").tensors[0].is_contiguous()
    assert not torch.equal(tasks.case(task, SEED, "random-0").tensors[0], tasks.case(task, SEED, "random-1").tensors[0])
    assert not torch.equal(tasks.case(task, SEED, "random-0").tensors[0], tasks.case(task, 1, "random-0").tensors[0])


@pytest.mark.parametrize(("dtype", "inside", "outside"), [("add", 5e-6, 1e-3), ("maximum", 5e-4, 0.1)])
def test_the_tolerance_is_the_dtypes(dtype: str, inside: float, outside: float) -> None:
    task = catalog.BY_NAME[dtype]
    given = tasks.case(task, SEED, "tiny")
    right = tasks.expected(task, given)
    name = str(right.dtype).removeprefix("torch.")
    for error, passes in ((inside, True), (outside, False)):
        found = tasks.difference(task, given, tuple(right.shape), name, wire.raw(right + error))
        assert (found is None) == passes


def test_a_reference_that_does_not_repeat_gives_no_speedup() -> None:
    task, times = catalog.BY_NAME["relu"], iter(range(1, 1000))

    def reference(head: dict[str, object], blobs: object = None) -> tuple[dict[str, object], list[bytes]]:
        return ({"seconds": 0.0 if head.get("empty") else float(next(times))} if head["do"] == "trial" else {}), []

    found = timing.calibrated(task, SEED, _steady(task), reference, trials=3, suspicious=1e9)
    assert found.speedup is None
    assert "the reference's own repeat differs by" in found.why


def test_a_claim_far_below_the_judges_clock_is_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(100_000))
    monkeypatch.setattr("job.kernels.timing.time.perf_counter", lambda: float(next(clock)))

    def ask(head: dict[str, object], blobs: object = None) -> tuple[dict[str, object], list[bytes]]:
        if head["do"] == "trial" and not head["empty"]:
            next(clock)  # the judge sees a second more than for an empty call
        return ({"seconds": 1e-6} if head["do"] == "trial" else {}), []

    with pytest.raises(timing.Rejected, match="the judge's clock at least 1000"):
        timing.calibrated(
            catalog.BY_NAME["relu"], SEED, ask, _steady(catalog.BY_NAME["relu"]), trials=3, suspicious=2.0
        )


def _steady(task: catalog.Task) -> timing.Ask:
    """A program that is right and always takes a second."""
    given: list[torch.Tensor] = []

    def ask(head: dict[str, object], blobs: list[bytes] | None = None) -> tuple[dict[str, object], list[bytes]]:
        if head["do"] == "give":
            specs = head["inputs"]
            assert isinstance(specs, list)
            given[:] = [wire.unpack(spec, blob) for spec, blob in zip(specs, blobs or [], strict=True)]
        if head["do"] == "collect":
            right = tasks.expected(task, tasks.Case(name="", tensors=tuple(given)))
            return {"shape": list(right.shape), "dtype": "float32"}, [wire.raw(right)]
        return ({"seconds": 0.0 if head.get("empty") else 1.0} if head["do"] == "trial" else {}), []

    return ask
