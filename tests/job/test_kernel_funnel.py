"""The funnel on planted candidates: each kind stops at its own stage, each candidate dies alone."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_judge import SEED, candidate, honest, judge, judged, scratch, verdicts

from job.kernels import ablation, catalog, planted, rules, source_text, tasks, timing, wire, worker
from job.kernels.child import NOTHING
from job.kernels.compiler import CACHE
from job.kernels.planted import STOPS_AT
from job.kernels.verdict import Course, Switches, Verdict
from job.kernels.watched import WIDTH, Ops
from job.kernels.worker import GREET_S, Lost, NoDeviceError, OutOfTime, Process, Workers

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


def run(process: Process, source: str, *tensors: torch.Tensor) -> tuple[dict[str, object], list[bytes]]:
    process.ask({"do": "load"}, [source.encode()], limit_s=20)
    packed = [wire.pack(tensor) for tensor in tensors]
    head = {"do": "run", "inputs": [spec for spec, _ in packed], "ops": True}
    return process.ask(head, [blob for _, blob in packed], limit_s=20, most_bytes=1 << 20)


def test_there_are_200_planted_candidates_of_five_kinds() -> None:
    made = planted.candidates(1000)
    assert len(made) == len({candidate.name for candidate in made}) == 200
    assert Counter(candidate.label for candidate in made) == dict.fromkeys(STOPS_AT, 40)


@pytest.mark.parametrize(
    "task",
    [pytest.param("leaky_relu", marks=pytest.mark.slow), pytest.param("hardtanh", marks=pytest.mark.slow), "addcmul"],
)
def test_each_planted_kind_stops_at_its_own_stage(workers: Workers, task: str) -> None:
    made = [candidate for candidate in planted.candidates(100) if candidate.task == task]
    assert {label: v.stage for label, v in verdicts(judge(workers), made).items()} == STOPS_AT


@pytest.mark.slow
def test_all_200_stop_where_they_should(workers: Workers) -> None:
    found: list[Verdict] = []
    judge(workers).all(planted.candidates(200), Switches(), "full", found.append)
    assert [v for v in found if v.stage != STOPS_AT[v.label]] == []


TUNED = (
    "@triton.autotune([triton.Config({'BLOCK': size}) for size in (256, 512)], key=['n'], reset_to_zero=['out_ptr'])\n"
    "@triton.jit"
)
GRID = "    def grid(meta):\n        return (triton.cdiv(n, meta['BLOCK']),)\n    n = "
HONEST: dict[str, dict[str, str]] = {
    "autotuned": {
        "@triton.jit": TUNED,
        "(triton.cdiv(n, 1024),)": "lambda m: (triton.cdiv(n, m['BLOCK']),)",
        ", BLOCK=1024": "",
    },
    "a function for a grid": {"    n = ": GRID, "[(triton.cdiv(n, 1024),)]": "[grid]"},
    "waits for a GPU": {"    return out": "    torch.cuda.synchronize()\n    return out"},
    "another name": {
        "import torch\n": "import torch\nfrom triton import cdiv\n",
        "triton.cdiv": "cdiv",
        "torch.empty_like(x)": "x.detach().ravel().new_zeros(x.shape)",
    },
    "without gradients": {"def kernel_function": "@torch.no_grad()\ndef kernel_function"},
    "names of Triton's own": {
        "import torch\n": "import torch\nfrom triton import jit, cdiv\n",
        "@triton.jit": "@jit",
        "triton.cdiv": "cdiv",
    },
    "slices in a block without gradients": {
        "    return out": "    with torch.no_grad():\n        return out[None, ...][0]",
        "x = x.contiguous()": "x = x[None][0].contiguous()",
    },
    "Python's maximum, of a block and of two numbers": {
        "tl.maximum(x, 0.0)": "max(x, 0.0)",
        "mask=inside, other": "mask=at < min(n, n + 1), other",
        "    n = out.numel()": "    n = max(out.numel(), min(0, 1))",
    },
    "a constant of the module's before a block": {
        "@triton.jit": "NONE = tl.constexpr(0.0)\n\n\n@triton.jit",
        "tl.maximum(x, 0.0)": "tl.where(NONE < x, (NONE + 1.0) * x, NONE - NONE / (1.0 + x * x))",
    },
    "methods of a block": {"tl.maximum(x, 0.0)": "tl.where(x > 0, x.abs().cast(tl.float32), x.exp().sigmoid() * 0.0)"},
    "prints and deletes": {
        "    n = out.numel()": "    if (n := out.numel()) > 0:\n        print(n, x.shape, f'{x.dtype}', sep=': ')",
        "    return out": "    del x\n    return out",
    },
    "asks": {
        "    n = out.numel()": "    assert x.is_floating_point() and torch.is_tensor(x) and x.dtype in {torch.float}\n"
        "    n = x.float().view_as(x).nelement()"
    },
}


def test_honest_forms_pass_the_whole_funnel(workers: Workers) -> None:
    def written(changes: dict[str, str], text: str) -> str:
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        return text

    made = [honest(change=partial(written, changes), label=label) for label, changes in HONEST.items()]
    found = verdicts(judge(workers), made)
    assert {label: (verdict.passed, verdict.reason) for label, verdict in found.items() if not verdict.passed} == {}
    assert len(found) == len(HONEST)


def test_every_configuration_of_a_tuned_kernel_is_tried(workers: Workers) -> None:
    """Which is timed on a GPU the tuner says."""

    def tuned(text: str, wrong: int) -> str:
        configs = ", ".join(
            f"triton.Config({{'BLOCK': {256 + 256 * (n % 2)}, 'OFF': {n == wrong:d}}})" for n in range(9)
        )
        for old, new in {
            "@triton.jit": f"@triton.autotune([{configs}], key=['n'])\n@triton.jit",
            "BLOCK: tl": "OFF: tl.constexpr, BLOCK: tl",
            "tl.maximum(x, 0.0)": "tl.maximum(x, 0.0) + OFF",
            "(triton.cdiv(n, 1024),)": "lambda m: (triton.cdiv(n, m['BLOCK']),)",
            ", BLOCK=1024": "",
        }.items():
            text = text.replace(old, new)
        return text

    made = [honest(change=partial(tuned, wrong=wrong), label=str(wrong)) for wrong in (0, 4, 8, 9)]
    found = verdicts(judge(workers), made)
    assert {label: verdict.passed for label, verdict in found.items()} == {"0": 0, "4": 0, "8": 0, "9": 1}


@pytest.mark.parametrize("task", ["silu", pytest.param("lerp", marks=pytest.mark.slow), "addcmul"])
def test_one_that_ignores_the_strides_of_any_argument_is_wrong(workers: Workers, task: str) -> None:
    arguments = catalog.BY_NAME[task].arguments
    forgets = {name: {name} for name in arguments} | {"all": set(arguments)}

    def forgetful(text: str, names: set[str]) -> str:
        for name in names:
            text = text.replace(f"    {name} = {name}.contiguous()\n", "")
        return text

    made = [honest(task, partial(forgetful, names=names), label) for label, names in forgets.items()]
    found = verdicts(judge(workers), made)
    assert {label: (verdict.stage, verdict.reason[:16]) for label, verdict in found.items()} == dict.fromkeys(
        forgets, (4, "non-contiguous: ")
    )


THREE_AT_MOST = """    x = x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    one, two, three = ((1, 1, 1) + tuple(x.shape))[-3:]
    n = one * two * three
"""


def test_one_that_takes_three_dimensions_at_most_is_wrong(workers: Workers) -> None:
    def small(text: str) -> str:
        old = "    x = x.contiguous()\n    out = torch.empty_like(x)\n    n = out.numel()\n"
        assert old in text
        return text.replace(old, THREE_AT_MOST)

    verdict = judged(workers, honest(change=small), Switches(timing=False))
    assert (verdict.stage, verdict.reason[:5]) == (4, "four:"), verdict


def test_each_argument_has_strides_of_its_own() -> None:
    task = catalog.BY_NAME["addcmul"]
    for device in ("cpu", "cuda"):
        layout = tasks.layouts(task, SEED)[tasks.LAYOUTS.index("non-contiguous")]
        given = [torch.empty_strided(one["shape"], one["stride"], device="meta") for one in layout]
        if device == "cpu":
            given = list(tasks.case(task, SEED, "non-contiguous").tensors)
        assert len({tensor.shape for tensor in given}) == 1
        assert len({tensor.stride() for tensor in given}) == 3
        assert not any(tensor.is_contiguous() for tensor in given)
        assert torch.empty_like(given[0]).stride() != given[0].stride()


def test_inputs_reach_the_candidate_with_their_gaps(workers: Workers) -> None:
    x = torch.randn(6, 4)[:, ::2]
    with workers.start(memory_bytes=2e9) as process:
        reply, _ = run(process, "def kernel_function(x):\n    raise ValueError(x.stride())", x)
    assert reply["error"] == "ValueError: (4, 2)"


@pytest.mark.parametrize(("index", "view"), [(":1", 1), ("None, ..., 0", 1), ("x > 0", 0), ("[0]", 0), ("x.long()", 0)])
def test_an_index_that_takes_a_part_is_no_operation_and_any_other_is(workers: Workers, index: str, view: bool) -> None:
    with workers.start(memory_bytes=2e9) as process:
        reply, _ = run(process, f"def kernel_function(x):\n    x[{index}]\n    return x + 1", torch.zeros(3))
    assert ("__getitem__" in reply["ops"]) is not bool(view)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("asks", "reads"),
    [
        ("x.new_empty(x.byte()[0])", True),
        ("torch.empty((x.byte()[0],))", True),
        ("x[:1].expand(x.byte()[0])", True),
        ("torch.full(x.shape, fill_value=x[0])", True),
        ("x.view_as(x).expand_as(x).to(x)", False),
        ("torch.broadcast_tensors(x, x)", False),
        ("torch.full_like(input=x, fill_value=1.0).expand(x.shape)", False),
    ],
)
def test_a_number_that_torch_takes_from_a_tensor_is_no_size_unseen(asks: str, reads: bool) -> None:
    x = torch.ones(1)
    with Ops(fenced=False) as ops:
        eval(asks, {"torch": torch, "x": x})
    assert any(name.startswith("a tensor's number in") for name in rules.forbidden_ops(ops.names)) is reads


HOLDS = "import torch\ndef kernel_function(x):\n    return torch.empty_like(x)"


def test_memory_that_is_made_holds_no_number(workers: Workers) -> None:
    """What somebody left there may be right: zeros, or the output of a call before."""
    with workers.start(memory_bytes=2e9) as process:
        _, blobs = run(process, HOLDS, torch.ones(1000))
    assert torch.frombuffer(bytearray(blobs[0]), dtype=torch.float32).isnan().all()


BESIDE = """
import torch
def kernel_function(x):
    y = torch.{made}
    {where}.as_strided((1,), (1,), {where}.storage_offset() + {place})[0] = 5
    return x + 1
"""


@pytest.mark.parametrize("made", ["empty_like(x)", "zeros(x.shape)", "empty(x.shape, dtype=torch.bool)"])
@pytest.mark.parametrize(
    ("where", "place", "seen"), [("y", -1, 1), ("y", 8, 1), ("y", 7, 0), ("x", 8, 1), ("x", -2, 1)]
)
def test_a_write_beside_what_was_made_or_given_is_seen(
    workers: Workers, made: str, where: str, place: int, seen: bool
) -> None:
    with workers.start(memory_bytes=2e9) as process:
        reply, _ = run(process, BESIDE.format(made=made, where=where, place=place), torch.ones(8))
    assert ("writes beyond" in reply.get("error", "")) is bool(seen), reply  # type: ignore[operator]


def test_no_address_tells_a_trial_that_is_listed_from_another(workers: Workers) -> None:
    """Else torch could compute in all that are not."""
    source = "import torch\ndef kernel_function(x):\n    raise ValueError(torch.empty_like(x).storage_offset())"
    with workers.start(memory_bytes=2e9) as process:
        watched, _ = run(process, source, torch.ones(8))
        trials = [process.ask({"do": "trial", "ops": ops}, limit_s=60)[0]["error"] for ops in (True, False)]
    assert (watched["error"], trials) == (f"ValueError: {WIDTH}", ["ValueError: 0"] * 2)


@pytest.mark.parametrize(
    "computes",
    [
        "x + 1", "2 ** x", "x @ x", "abs(x)", "-x", "x > 0", "max(x, y)", "x[x.to(torch.long)]", "x[[0]]", "x.exp()",
        "float(x[0, 0])", "f'{x}'", "'%s' % x", "range(x[0, 0].int())", "[*x]", "x.sum()", "round(x)", "x[0, 0] or x",
    ],
)  # fmt: skip
def test_no_call_computes_with_torch_whether_it_is_listed_or_not(workers: Workers, computes: str) -> None:
    """A program may tell: in a call that is listed Python's own objects, of which it can print where, lie elsewhere."""
    source = f"import torch\ndef kernel_function(x):\n    y = x[:1, None].clone()\n    return {computes}"
    packed = wire.pack(torch.zeros(8, 8))
    with workers.start(memory_bytes=2e9) as process:
        process.ask({"do": "load", "refuses": True}, [source.encode()], limit_s=60)
        process.ask({"do": "give", "inputs": [packed[0]]}, [packed[1]], limit_s=60)
        for ops in (True, False):
            reply, _ = process.ask({"do": "trial", "ops": ops}, limit_s=60)
            assert str(reply.get("error")).startswith("computes with torch: "), reply


def test_no_address_tells_a_checked_call_among_the_trials_from_a_timed_one(workers: Workers) -> None:
    """Where a kernel is tuned, what it has seen of addresses may outlive a call."""
    source = "import torch\ndef kernel_function(x):\n    return torch.tensor([x.data_ptr() % 2**20, x.sum()])"
    with workers.start(memory_bytes=2e9) as process:

        def asked(act: str, *given: torch.Tensor, **how: Any) -> list[float]:
            packed = [wire.pack(tensor) for tensor in given]
            head = {"do": act, "inputs": [spec for spec, _ in packed], **how}
            _, blobs = process.ask(head, [blob for _, blob in packed], limit_s=60, most_bytes=8)
            return [number for blob in blobs for number in torch.frombuffer(blob, dtype=torch.float32).tolist()]

        process.ask({"do": "load"}, [source.encode()], limit_s=60)
        for act in ("give", "trial"):
            asked(act, torch.ones(8, 8))
        place, total = asked("collect")
        assert asked("run", torch.zeros(8, 8), as_timed=True) == [place, 0.0]
        assert asked("run", torch.zeros(8, 16)[:, ::2], as_timed=True)[0] != place
        asked("ready", flush=False)
        asked("trial")
        assert asked("collect") == [place, total] == [place, 64.0]


def test_one_that_waits_for_memory_that_is_not_filled_is_rejected_before_it_is_timed(workers: Workers) -> None:
    def waits(text: str) -> str:
        text = text.replace("out_ptr, n,", "out_ptr, new_ptr, n,").replace("x, out, n,", "x, out, torch.empty(1), n,")
        return text.replace(
            "    inside = ", "    while tl.load(new_ptr) == tl.load(new_ptr):\n        at += 0\n    inside = "
        )

    verdict = judged(workers, honest(change=waits), candidate_s=3.0)
    assert (verdict.stage, verdict.reason[:16]) == (4, "no answer within")


def test_calls_among_the_trials_are_made_once_and_nobody_foresees_when() -> None:
    def places(secret: str) -> list[int]:
        steady, trials, found = _steady(RELU), [0], list[int]()

        def ask(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
            trials[0] += head["do"] == "trial" and not head.get("empty")
            return steady(head, *more, **rest)

        others = [lambda: found.append(trials[0])] * 8
        timing.calibrated(
            RELU, SEED, ask, _steady(RELU), drawn, trials=20, suspicious=9.0, secret=secret, others=others
        )
        return found

    first = places("a")
    assert len(first) == 8
    assert len(set(first)) > 3
    assert first != places("b")


def test_a_correct_one_is_timed_or_said_why_it_is_not(workers: Workers) -> None:
    verdict = judged(workers, honest())
    assert verdict.passed
    assert verdict.kernel_s is not None
    assert verdict.kernel_s[0] <= verdict.kernel_s[1] <= verdict.kernel_s[2]
    assert (verdict.speedup is None) == (verdict.reason.startswith("the reference"))
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
    crash = candidate("import os\ndef kernel_function(x):\n    os.kill(os.getpid(), 11)\nos.abort()", label="crash")
    made = judge(workers, candidate_s=1.5)
    crowd = [loop, honest(label="a"), crash, honest("add", label="b")]
    started = time.monotonic()
    found = verdicts(made, crowd, Switches(funnel=False))
    assert time.monotonic() - started < made.bound_s(len(crowd))
    assert not found["loop"].passed
    assert not found["crash"].passed
    assert "no answer within" in found["loop"].reason
    assert "ended" in found["crash"].reason
    assert len(found) == len(crowd)


@pytest.mark.parametrize("fails", ["never", "in namespaces", "everywhere"])
def test_a_machine_is_tried_on_a_kernel_that_is_right_before_any_candidate(
    workers: Workers, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask, said = Process.ask, list[str]()

    def failing(process: Process, head: dict[str, Any], *more: Any, **rest: Any) -> Any:
        reply = ask(process, head, *more, **rest)
        broken = fails == "everywhere" or (fails == "in namespaces" and workers.confines)
        return ({"error": "CUDA error 304"}, []) if broken and head["do"] == "run" else reply

    monkeypatch.setattr(workers, "confines", True)
    monkeypatch.setattr(Process, "ask", failing)
    made = judge(workers)
    if fails == "everywhere":
        with pytest.raises(NoDeviceError, match="fails on this machine's cpu:0: tiny: CUDA error 304; without"):
            made.prove(said.append)
        return
    made.prove(said.append)
    assert ["fails in namespaces, cpu:0: tiny: CUDA error 304; " in line for line in said] == [True] * (
        fails != "never"
    )
    assert workers.confines is (fails == "never")
    if fails != "never":
        verdict = verdicts(made, [honest()], Switches(timing=False))["x"]
        assert (verdict.passed, verdict.isolated) == (True, False)


def test_a_process_without_its_gpu_is_no_verdict(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    def start(**_: Any) -> Process:
        ours, theirs = socket.socketpair()
        with theirs:
            wire.send(theirs, {"isolated": True, "error": "RuntimeError: no CUDA-capable device"})
        sleeping = subprocess.Popen(["sleep", "60"], start_new_session=True)
        return Process(sleeping.pid, ours, tmp, 1e9, lambda _: sleeping.wait(), watch_s=wire.WATCH_S)

    made, tmp = judge(workers), workers.folder / "none"
    monkeypatch.setattr(workers, "start", start)
    with pytest.raises(NoDeviceError, match="no CUDA-capable device"):
        made.all([honest()], Switches(multi_input=False), "row", lambda verdict: pytest.fail(str(verdict)))


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
    with pytest.raises(NoDeviceError, match="before it had got a source: the process ended"):
        judge(workers).all([one], Switches(), "row", lambda verdict: pytest.fail(str(verdict)))


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


@pytest.mark.slow
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


def test_a_large_message_goes_in_few_pieces_and_its_memory_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = list[str]()

    class Counted(socket.socket):
        def send(self, *asked: Any) -> int:
            calls.append("send")
            return super().send(*asked)

        def recv_into(self, *asked: Any) -> int:
            calls.append("receive")
            return super().recv_into(*asked)

    monkeypatch.setattr(wire, "WATCH_S", 30.0)  # however busy this machine is
    ours, theirs = (Counted(fileno=end.detach()) for end in socket.socketpair())
    spec, blob = wire.pack(torch.arange(6_000_000, dtype=torch.int32))
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        sent = pool.submit(wire.send, theirs, {}, [blob])
        _, (found,) = wire.receive(ours, until=time.monotonic() + 60, most_bytes=len(blob), watch_s=30.0)
        sent.result()
    assert found == blob
    assert calls.count("receive") == 3  # the length, the head, and the tensor
    assert calls.count("send") == 1 + -(-len(blob) // wire.PIECE_BYTES)
    assert wire.unpack(spec, found).data_ptr() == torch.frombuffer(found, dtype=torch.int32).data_ptr()


@pytest.mark.parametrize("sends", [True, False])
def test_who_neither_reads_nor_writes_is_late_at_the_limit_and_looked_at_meanwhile(sends: bool) -> None:
    ours, theirs = socket.socketpair()
    looks, started = list[float](), time.monotonic()
    tries: Callable[[], object] = partial(wire.receive, ours, until=started + 0.3, watch=lambda: looks.append(0.0))
    if sends:
        tries = partial(wire.send, ours, {}, [bytes(1 << 24)], until=started + 0.3)
    with ours, theirs, pytest.raises(wire.Late):
        tries()
    assert 0.3 <= time.monotonic() - started < 3.0
    assert sends or looks


@pytest.mark.parametrize("sends", [True, False])
def test_a_limit_is_kept_by_one_who_is_interrupted_all_the_time(sends: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A profiler stops each thread many times a second."""
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    ours, theirs = socket.socketpair()
    until = time.monotonic() + 0.3
    tries: Callable[[], object] = partial(wire.receive, ours, until=until, watch_s=10.0)
    if sends:
        monkeypatch.setattr(wire, "WATCH_S", 10.0)
        tries = partial(wire.send, ours, {}, [bytes(1 << 24)], until=until)
    caught = list[wire.Late]()

    def waits() -> None:
        try:
            tries()
        except wire.Late as error:
            caught.append(error)

    waiting = threading.Thread(target=waits)
    try:
        waiting.start()
        while waiting.is_alive() and time.monotonic() < until + 5:
            signal.pthread_kill(waiting.ident or 0, signal.SIGUSR1)
            waiting.join(0.02)
        assert len(caught) == 1
    finally:
        signal.signal(signal.SIGUSR1, before)
        theirs.close()  # which ends one who still waits
        waiting.join()
        ours.close()


def test_one_who_answers_a_little_at_a_time_is_late_and_one_who_ends_is_seen_at_once() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        theirs.sendall(b"\0\0\1\0")

        def dribbles() -> None:
            with suppress(OSError):
                while True:
                    theirs.sendall(b" ")
                    time.sleep(0.01)

        pool.submit(dribbles)
        with pytest.raises(wire.Late):
            wire.receive(ours, until=time.monotonic() + 0.3, watch_s=10.0)
        ours.close()
    ours, theirs = socket.socketpair()
    with ours:
        theirs.sendall(b"\0")
        theirs.close()
        started = time.monotonic()
        with pytest.raises(wire.Closed, match="the connection ended"):
            wire.receive(ours, until=started + 60, watch_s=30.0)
        assert time.monotonic() - started < 20


def test_a_process_that_compiles_is_looked_at_once_a_second(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    looks = dict.fromkeys((True, False), 0)

    def looked(pids: Any) -> int:
        looks[compiles] += 1
        return 0

    monkeypatch.setattr("job.kernels.worker.usage.memory_bytes", looked)
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
        process.ask({"do": "load"}, [b"while True: pass"], limit_s=20.0)


def test_inputs_are_a_pure_function_of_seed_task_and_case() -> None:
    task = catalog.BY_NAME["lerp"]
    for name in ("tiny", "random-0", "random-1", *tasks.ADVERSARIAL):
        one, two = tasks.case(task, SEED, name), tasks.case(task, SEED, name)
        assert all(a.isnan().equal(b.isnan()) for a, b in zip(one.tensors, two.tensors, strict=True))
        assert all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(one.tensors, two.tensors, strict=True))
    assert not tasks.case(task, SEED, "non-contiguous").tensors[0].is_contiguous()
    assert not torch.equal(tasks.case(task, SEED, "random-0").tensors[0], tasks.case(task, SEED, "random-2").tensors[0])


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_sizes_are_drawn_from_the_judges_seed_and_multiples_of_no_block(device: str) -> None:
    task = catalog.BY_NAME["relu"]
    drawn = [{tuple(call[0]["shape"]) for call in tasks.layouts(task, seed)} for seed in range(20)]
    assert len({frozenset(shapes) for shapes in drawn}) == 20
    for seed in range(20):
        shapes = {name: tasks._shape(task, seed, name, device) for name in (*tasks.ADVERSARIAL, "tiny", "random-0")}
        assert shapes["one"] == (1,)
        assert shapes["many-blocks"][0] % 2 == 1
        assert shapes["many-blocks"][0] > 19 * 1024
        assert device == "cuda" or shapes["many-blocks"][0] < 20 * 1024
        assert len(shapes["four"]) == 4
        assert 1 not in shapes["four"]
        assert 1024 < math.prod(shapes["random-0"]) == math.prod(shapes["large"])


def test_values_between_ordinary_and_large_and_special_ones_are_tried() -> None:
    task = catalog.BY_NAME["add"]
    spread = tasks.case(task, SEED, "spread").tensors[0].abs()
    assert all(((spread > low) & (spread < 3 * low)).sum() > 40 for low in (0.1, 1, 5, 30, 100, 300))
    assert all(((spread > low) & (spread < 1e3 * low)).sum() > 40 for low in (1e4, 1e7, 1e10, 1e13))
    assert tasks.case(catalog.BY_NAME["maximum"], SEED, "spread").tensors[0].isfinite().all()
    special = tasks.case(task, SEED, "special").tensors[0]
    assert special.isnan().any()
    assert (special == 0).any()
    assert special.isposinf().any()
    assert special.isneginf().any()


def answered(task: str, name: str, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> str | None:
    """What is said of the reference's result, changed by a function of the first input and it."""
    given = tasks.case(catalog.BY_NAME[task], SEED, name)
    found = change(given.tensors[0], tasks.expected(catalog.BY_NAME[task], given.tensors))
    dtype = str(found.dtype).removeprefix("torch.")
    return tasks.difference(catalog.BY_NAME[task], given, tuple(found.shape), dtype, wire.raw(found))


@pytest.mark.parametrize(("task", "inside", "outside"), [("add", 5e-5, 5e-4), ("maximum", 1e-3, 1e-2)])
def test_the_tolerance_is_the_dtypes_in_proportion_to_the_result(task: str, inside: float, outside: float) -> None:
    for name in ("tiny", "random-0", "large", "spread"):
        assert answered(task, name, lambda x, right: right * (1 + inside)) is None
        assert answered(task, name, lambda x, right: right * (1 + outside)) is not None


@pytest.mark.parametrize(
    ("task", "change"),
    [
        ("sigmoid", lambda x, right: torch.where(x < -20, right + 0.09, right)),
        ("hardtanh", lambda x, right: torch.where(x.abs() > 10, torch.zeros_like(right), right)),
        ("tanh", lambda x, right: torch.where(x > 7, right - 0.01, right)),
        ("silu", lambda x, right: torch.where(x < -20, right - 0.01, right)),
        ("elu", lambda x, right: torch.where(x < -50, right + 0.5, right)),
        ("hardswish", lambda x, right: torch.where(x > 1e3, 0.5 * right, right)),
    ],
)
@pytest.mark.parametrize("name", ["large", "spread"])
def test_a_bounded_result_is_not_measured_by_a_large_input(
    task: str, change: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], name: str
) -> None:
    assert answered(task, name, lambda x, right: right) is None
    assert answered(task, name, change) is not None


@pytest.mark.parametrize("task", ["square", "multiply", "squared_difference", "addcmul"])
def test_what_is_wrong_for_large_numbers_alone_is_found(task: str) -> None:
    assert (
        answered(task, "spread", lambda x, right: torch.where(x.abs() < 1e5, right, torch.zeros_like(right)))
        is not None
    )
    assert answered(task, "spread", lambda x, right: right) is None


def test_where_terms_cancel_another_order_of_the_same_terms_is_right() -> None:
    task = catalog.BY_NAME["lerp"]
    for name in ("random-3", "spread", "large"):
        given = tasks.case(task, SEED, name)
        x, y = given.tensors
        for other in (0.7 * x + 0.3 * y, x - 0.3 * (x - y)):
            assert tasks.difference(task, given, tuple(other.shape), "float32", wire.raw(other)) is None
        wrong = x + 0.301 * (y - x)
        assert tasks.difference(task, given, tuple(wrong.shape), "float32", wire.raw(wrong)) is not None


def test_infinity_counts_and_what_the_reference_makes_nan_does_not() -> None:
    assert answered("relu", "special", lambda x, right: right.nan_to_num(nan=7.0, posinf=float("inf"))) is None
    assert answered("relu", "special", lambda x, right: torch.where(x.isinf(), torch.zeros_like(x), right)) is not None
    assert answered("relu", "special", lambda x, right: torch.full_like(right, float("nan"))) is not None


@pytest.mark.parametrize("grows", [1.5, 1 / 1.5])
def test_a_reference_that_does_not_repeat_gives_no_speedup(grows: float) -> None:
    task, times = catalog.BY_NAME["relu"], (grows**number for number in itertools.count())

    def reference(head: dict[str, Any], blobs: Any = None) -> tuple[dict[str, Any], list[bytes]]:
        return ({"seconds": 0.0 if head.get("empty") else float(next(times))} if head["do"] == "trial" else {}), []

    found = timing.calibrated(task, SEED, _steady(task), reference, drawn, trials=3, suspicious=1e9)
    assert found.speedup is None
    assert "the reference's own repeat differs by" in found.why


def test_a_reference_as_quick_as_an_empty_operation_gives_no_speedup() -> None:
    task = catalog.BY_NAME["relu"]

    def reference(head: dict[str, Any], blobs: Any = None) -> tuple[dict[str, Any], list[bytes]]:
        return ({"seconds": 1e-6} if head["do"] == "trial" else {}), []

    found = timing.calibrated(task, SEED, _steady(task), reference, drawn, trials=3, suspicious=1e9)
    assert (found.speedup, found.why) == (None, "the reference takes no longer than an empty operation")


class Clock:
    """The judge's: it moves when a program says that it works."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr("job.kernels.timing.time.perf_counter", lambda: self.now)

    def taking(self, ask: timing.Ask, *, says: float, takes: float) -> timing.Ask:
        def answer(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
            reply, blobs = ask(head, *more, **rest)
            if head["do"] == "trial" and not head["empty"]:
                self.now += takes
                reply = {"seconds": says}
            return reply, blobs

        return answer


RELU = catalog.BY_NAME["relu"]


def drawn(task: catalog.Task, name: str) -> tasks.Case:
    return tasks.case(task, SEED, name)


def test_a_trial_is_what_it_took_less_an_empty_launch_by_both_clocks(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    own, way = iter([9.0, 9.0, 1.0, 2.0, 3.0, 5.0]), iter([9.0, 9.0, 0.2, 0.4, 0.4, 0.8])  # two of each warm up

    def ask(head: dict[str, Any], *_: Any, **__: Any) -> tuple[dict[str, Any], list[bytes]]:
        if head["do"] != "trial":
            return {}, []
        says = 0.5 if head["empty"] else next(own)
        clock.now += next(way) if head["empty"] else 2 * says
        return {"seconds": says}, []

    case = tasks.Case(name="", tensors=(torch.ones(3),))
    found = timing.Program(ask=ask, task=RELU, given=case, random=random.Random(1), empty="kernel").trials(4)
    assert found.quartiles == pytest.approx((1.25, 2.0, 3.0))  # of 0.5, 1.5, 2.5, 4.5
    assert (found.judged, found.blur) == pytest.approx((4.6, 0.15))  # of 1.6, 3.6, 5.6, 9.6; from 0.35 to 0.5
    assert (found.quickest, found.slowest) == pytest.approx((1.6, 4.5))


def took(median: float, *, lies: bool = False) -> timing.Trials:
    quickest = 2 * median + (1.1e-3 if lies else 0.9e-3)
    return timing.Trials(quartiles=(median,) * 3, judged=median, blur=0.0, quickest=quickest, slowest=median)


@pytest.mark.parametrize(
    ("reference", "lies", "found"),
    [
        ([1.0, 1.04], [False], 2.04),  # the mean of before and after
        ([1.0, 1.0, 1.0], [True, False], 2.0),
        ([1.0, 2.0, 2.0, 2.0], [False, True, True], "did not agree in the last try"),
        ([1.0, 1.0, 1.0, 1.0], [True, True, True], "it says at most"),
    ],
)
def test_a_try_counts_when_it_repeats_and_is_believed_and_one_that_is_never_believed_is_a_lie(
    reference: list[float], lies: list[bool], found: float | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = {"operation": map(took, reference), "kernel": iter([took(0.5, lies=lie) for lie in lies])}
    also = list[int]()

    def trials(self: timing.Program, count: int, others: Sequence[Callable[[], object]] = ()) -> timing.Trials:
        also.extend([len(others)] if self.empty == "kernel" else [])
        return next(made[self.empty])

    monkeypatch.setattr(timing.Program, "trials", trials)
    asked: dict[str, Any] = {"trials": 3, "suspicious": 1e9, "others": [list]}
    if all(lies):
        with pytest.raises(timing.Rejected, match=str(found)):
            timing.calibrated(RELU, SEED, _steady(RELU), _steady(RELU), drawn, **asked)
    else:
        timed = timing.calibrated(RELU, SEED, _steady(RELU), _steady(RELU), drawn, **asked)
        assert (timed.why if isinstance(found, str) else timed.speedup) == (
            pytest.approx(found) if isinstance(found, float) else f"its clock and the judge's {found}"
        )
        assert (timed.speedup is None) == isinstance(found, str)
    assert also == [1, 0, 0][: len(lies)]


def test_who_is_quick_on_the_inputs_of_the_trials_alone_is_as_fast_as_on_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, given, steady = Clock(monkeypatch), [0], _steady(RELU)

    def knows(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
        given[0] += head["do"] == "give"
        reply, blobs = steady(head, *more, **rest)
        if head["do"] == "trial" and not head["empty"]:
            clock.now += 0.4 * given[0]
            reply = {"seconds": 0.4}
        return reply, blobs

    reference = clock.taking(_steady(RELU), says=1.0, takes=1.0)
    found = timing.calibrated(RELU, SEED, knows, reference, drawn, trials=3, suspicious=2.0)
    assert (found.suspicious, found.speedup) == (True, pytest.approx(1 / 0.8))


def test_the_stopwatch_divides_the_references_seconds_by_the_candidates() -> None:
    def taking(seconds: float) -> timing.Ask:
        return lambda head, *_, **__: ({"seconds": seconds} if head["do"] == "stopwatch" else {}, [])

    assert timing.stopwatch(RELU, taking(0.5), taking(2.0), drawn).speedup == 4.0


@pytest.mark.parametrize(
    ("said", "blobs"),
    [({"alias": None}, 1), ({"changed": None}, 1), ({"ops": None}, 1), ({"alias": True}, 1), ({}, 0), ({}, 2)],
)
def test_an_answer_that_leaves_out_what_it_must_say_is_no_result(said: dict[str, Any], blobs: int) -> None:
    case = drawn(RELU, "random-0")
    right = tasks.expected(RELU, case.tensors)
    whole = {"shape": list(right.shape), "dtype": "float32", "alias": False, "changed": False, "ops": []}
    timing.check(RELU, case, whole, [wire.raw(right)], ops=True)
    reply = {key: value for key, value in {**whole, **said}.items() if value is not None}
    with pytest.raises(timing.Rejected):
        timing.check(RELU, case, reply, [wire.raw(right)] * blobs, ops=True)


def test_a_claim_far_below_the_judges_clock_is_a_lie(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    liar = clock.taking(_steady(RELU), says=1e-6, takes=1.0)
    with pytest.raises(timing.Rejected, match="the judge's clock at least 1000"):
        timing.calibrated(RELU, SEED, liar, _steady(RELU), drawn, trials=3, suspicious=2.0)


@pytest.mark.parametrize(("says", "takes"), [(0.4, 0.79), (0.6, 0.9)])  # above what is suspicious, and below
def test_no_speedup_is_above_what_the_judges_clock_saw(
    says: float, takes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch)
    reference = clock.taking(_steady(RELU), says=1.0, takes=1.0)
    boasts = clock.taking(_steady(RELU), says=says, takes=takes)
    found = timing.calibrated(RELU, SEED, boasts, reference, drawn, trials=3, suspicious=2.0)
    assert found.speedup == pytest.approx(1 / takes)
    modest = clock.taking(_steady(RELU), says=takes, takes=takes)
    assert timing.calibrated(RELU, SEED, modest, reference, drawn, trials=3, suspicious=2.0).speedup == pytest.approx(
        1 / takes
    )


@pytest.mark.parametrize(("says", "flagged"), [(0.4, True), (0.6, False)])
def test_a_suspicious_one_is_run_again_on_other_inputs_and_keeps_the_flag(says: float, flagged: bool) -> None:
    steady, given = _steady(RELU), list[bytes]()

    def quick(head: dict[str, Any], blobs: Any = None, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
        if head["do"] == "give":
            given.extend(blobs)
        reply, found = steady(head, blobs, **rest)
        return ({"seconds": says} if reply.get("seconds") else reply), found

    found = timing.calibrated(RELU, SEED, quick, _steady(RELU), drawn, trials=3, suspicious=2.0)
    assert found.suspicious is flagged
    assert len(given) == len(set(given)) == 1 + flagged


def test_a_flag_is_in_the_verdict_and_counted() -> None:
    course = Course(honest(), Switches(), "full", "", timing=timing.Timing(speedup=3.0, suspicious=True))
    verdict = Verdict.from_json(course.verdict(None).to_json())
    assert verdict.suspicious
    assert ablation.figures("full", [verdict], seed=1)["suspicious"] == 1


def test_a_candidates_empty_launch_is_a_kernels_and_the_references_an_operations() -> None:
    def watched(kinds: set[str]) -> timing.Ask:
        steady = _steady(RELU)

        def ask(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
            if head.get("empty"):
                kinds.add(head["empty"])
            return steady(head, *more, **rest)

        return ask

    asked: tuple[set[str], set[str]] = set(), set()
    timing.calibrated(RELU, SEED, watched(asked[0]), watched(asked[1]), drawn, trials=3, suspicious=2.0)
    assert asked == ({"kernel"}, {"operation"})


COUNTS = """
import torch
from triton.runtime.interpreter import GridExecutor
count, launch = [0, 0], GridExecutor.__call__

def launched(*args, **kwargs):
    count[0] += 1
    return launch(*args, **kwargs)

def added(*args):
    count[1] += 1
    return add(*args)

GridExecutor.__call__ = launched
add, torch.Tensor.add_ = torch.Tensor.add_, added

def kernel_function(x):
    raise ValueError(count)
"""


def test_an_empty_launch_launches_and_a_guarded_process_may(workers: Workers) -> None:
    with workers.start(memory_bytes=2e9) as process:
        process.ask({"do": "load"}, [COUNTS.encode()], limit_s=20)
        for kind in ("kernel", "operation", "kernel"):
            reply, _ = process.ask({"do": "trial", "empty": kind}, limit_s=20)
            assert reply["seconds"] > 0
        spec, blob = wire.pack(torch.ones(1))
        reply, _ = process.ask({"do": "run", "inputs": [spec]}, [blob], limit_s=20)
    assert reply["error"] == "ValueError: [2, 1]"


def test_an_empty_launch_compiles_for_a_gpu(workers: Workers) -> None:
    if workers.lacks is not None:
        pytest.skip(workers.lacks)
    with workers.start(memory_bytes=8e9, compiles=True) as process:
        process.ask({"do": "load"}, [NOTHING.encode()], limit_s=20)
        calls = [[{"dtype": "float32", "shape": [1], "stride": [1]}]]
        reply, _ = process.ask({"do": "compile", "calls": calls, "device": "cuda"}, limit_s=60)
        assert reply["problem"] is None
        assert list((process.scratch / CACHE).glob("*/*.cubin"))


def test_the_time_of_a_stage_is_of_its_answers_and_not_of_the_judges_work(monkeypatch: pytest.MonkeyPatch) -> None:
    now, limits = [0.0], list[float]()
    monkeypatch.setattr("job.kernels.timing.time.monotonic", lambda: now[0])

    class Slow:
        def ask(self, *asked: Any, limit_s: float, most_bytes: int) -> tuple[dict[str, Any], list[bytes]]:
            limits.append(limit_s)
            now[0] += 4.0
            return {}, []

    ask = timing.bound(Slow(), 10.0)  # type: ignore[arg-type]
    for _ in range(4):
        ask({"do": "trial"})
        now[0] += 100.0  # the judge compares
    assert limits == [10.0, 6.0, 2.0, 0.001]


def test_inputs_are_drawn_once_for_all_candidates_and_kept_within_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "CASES_BYTES", 2 * 16)
    made = list[str]()

    def counted(task: catalog.Task, seed: int, name: str, device: str) -> tasks.Case:
        made.append(name)
        return tasks.Case(name=name, tensors=(torch.zeros(4),))

    monkeypatch.setattr(tasks, "case", counted)
    kept = tasks.Cases(SEED, "cpu")
    for name in ("a", "a", "b", "a", "c", "a", "b"):
        assert kept.case(RELU, name).name == name
    assert made == ["a", "b", "c", "b"]  # the one that was not used for longest went


def test_the_bound_holds_starts_and_the_references_time(workers: Workers) -> None:
    made = judge(workers, candidate_s=10.0)  # two workers
    assert made.bound_s(3) == pytest.approx(3 * source_text.LONGEST_S + 2 * (3 * GREET_S + 6 * 10.0))


def test_a_slow_program_gets_fewer_trials_in_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], [0]
    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(f"job.kernels.timing.time.{clock}", lambda: now[0])
    steady = _steady(RELU)

    def slow(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
        if head["do"] == "trial" and not head["empty"]:
            now[0], calls[0] = now[0] + 0.25, calls[0] + 1
        return steady(head, *more, **rest)

    found = timing.calibrated(RELU, SEED, slow, slow, drawn, trials=100, suspicious=9.0, limit_s=60.0)
    assert found.speedup == pytest.approx(1.0)
    assert now[0] < 60.0
    assert calls[0] > 20
    now[0] = 0.0

    def drifting(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
        reply, blobs = slow(head, *more, **rest)
        return ({"seconds": 1.0 + now[0]} if reply.get("seconds") else reply), blobs

    never = timing.calibrated(RELU, SEED, slow, drifting, drawn, trials=100, suspicious=9.0, limit_s=60.0)
    assert never.speedup is None
    assert 30.0 < now[0] < 60.0  # all tries


def test_every_call_that_is_timed_gets_other_inputs_and_which_are_checked_is_not_to_be_foreseen() -> None:
    def course(secret: str) -> tuple[list[tuple[int, ...]], list[str]]:
        steady, shifts, checked = _steady(RELU), [], []

        def ask(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
            if head["do"] == "ready" and "shifts" in head:
                shifts.append(tuple(head["shifts"]))
            if head["do"] in ("trial", "collect") and not head.get("empty"):
                checked.append(head["do"] + str(head.get("ops")))
            return steady(head, *more, **rest)

        timing.calibrated(RELU, SEED, ask, _steady(RELU), drawn, trials=30, suspicious=9.0, ops=True, secret=secret)
        return shifts, checked

    shifts, checked = course("a")
    assert len(set(shifts)) > 0.9 * len(shifts)  # drawn from about 1500
    assert checked.count("trialTrue") == timing.LISTED
    assert checked.count("collectNone") == timing.LISTED + timing.LOOKED_AT
    assert course("a") == (shifts, checked)
    assert course("b")[0] != shifts
    assert course("b")[1] != checked


def _steady(task: catalog.Task) -> timing.Ask:
    """A program that is right and always takes a second."""
    given: list[torch.Tensor] = []
    shifts: list[int] = []

    def ask(head: dict[str, Any], blobs: Any = None, *, most_bytes: int = 0) -> tuple[dict[str, Any], list[bytes]]:
        if head["do"] == "give":
            given[:] = [wire.unpack(spec, blob) for spec, blob in zip(head["inputs"], blobs or [], strict=True)]
        if head["do"] == "ready":
            shifts[:] = head.get("shifts", shifts)
        if head["do"] == "collect":
            moved = tuple(tensor.roll(shift) for tensor, shift in zip(given, shifts, strict=True))
            right = tasks.expected(task, moved)
            said = {"shape": list(right.shape), "dtype": "float32", "alias": False, "changed": False, "ops": []}
            return said, [wire.raw(right)]
        return ({"seconds": 0.0 if head.get("empty") else 1.0} if head["do"] == "trial" else {}), []

    return ask
