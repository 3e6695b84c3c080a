"""What a checked call sees of a candidate, and that the candidate cannot tell."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

from gpufleet.job.experiments.kernel.judge import planted, rules, timing, wire
from gpufleet.job.experiments.kernel.judge.catalog import BY_NAME
from gpufleet.job.experiments.kernel.judge.watched import WIDTH, Ops
from gpufleet.job.experiments.kernel.judge.worker import Process, Workers
from tests.job.kernel_judge import honest, judged, run
from tests.waiting import HANG_S


def test_inputs_reach_the_candidate_with_their_gaps(workers: Workers) -> None:
    x = torch.randn(6, 4)[:, ::2]
    with workers.start(memory_bytes=2e9) as process:
        reply, _ = run(process, "def kernel_function(x):\n    raise ValueError(x.stride())", x)
    assert reply["error"] == "ValueError: (4, 2)"


@pytest.mark.parametrize(("index", "view"), [(":1", 1), ("None, ..., 0", 1), ("x > 0", 0), ("[0]", 0), ("x.long()", 0)])
def test_an_index_that_takes_a_part_is_no_operation_and_any_other_is(workers: Workers, index: str, view: bool) -> None:
    with workers.start(memory_bytes=2e9) as process:
        reply, _ = run(process, f"def kernel_function(x):\n    x[{index}]\n    return x + 1", torch.zeros(3))
    assert ("__getitem__" in reply["ops"]) is not bool(view)


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


@pytest.mark.parametrize(
    "made", ["empty_like(x)", "zeros(x.shape)", "empty(x.shape, dtype=torch.bool)", "clone(x)", "Tensor.half(x)"]
)
@pytest.mark.parametrize(
    ("where", "place", "seen"), [("y", -1, 1), ("y", 8, 1), ("y", 7, 0), ("x", 8, 1), ("x", -2, 1)]
)
def test_a_write_beside_what_was_made_or_given_is_seen(
    workers: Workers, made: str, where: str, place: int, seen: bool
) -> None:
    with workers.start(memory_bytes=2e9) as process:
        reply, _ = run(process, BESIDE.format(made=made, where=where, place=place), torch.ones(8))
    assert ("writes beyond" in reply.get("error", "")) is bool(seen), reply


def test_what_lies_beside_an_input_written_beside_the_output_is_seen(workers: Workers) -> None:
    """`at <= n` for `at < n` reads and writes one element too many; most tasks make of a large number itself."""
    source = planted.source(BY_NAME["relu"]).replace("at < n", "at <= n")
    with workers.start(memory_bytes=2e9) as process:
        reply, _ = run(process, source, torch.ones(8))
    assert "writes beyond" in reply.get("error", ""), reply


def test_no_address_tells_a_trial_that_is_listed_from_another(workers: Workers) -> None:
    """Else torch could compute in all that are not."""
    source = "import torch\ndef kernel_function(x):\n    raise ValueError(torch.empty_like(x).storage_offset())"
    with workers.start(memory_bytes=2e9) as process:
        watched, _ = run(process, source, torch.ones(8))
        trials = [process.ask({"do": "trial", "ops": ops}, limit_s=HANG_S)[0]["error"] for ops in (True, False)]
    assert (watched["error"], trials) == (f"ValueError: {WIDTH}", ["ValueError: 0"] * 2)


@pytest.mark.parametrize(
    "computes",
    [
        "x + 1", "2 ** x", "x @ x", "abs(x)", "-x", "x > 0", "max(x, y)", "x[x.to(torch.long)]", "x[[0]]", "x.exp()",
        "float(x[0, 0])", "f'{x}'", "'%s' % x", "range(x[0, 0].int())", "[*x]", "x.sum()", "round(x)", "sum((x, x))",
        "sorted((x, y))", "reversed(x)", "x[0, 0] or x",
    ],
)  # fmt: skip
def test_no_call_computes_with_torch_whether_it_is_listed_or_not(workers: Workers, computes: str) -> None:
    """A program may tell: in a call that is listed Python's own objects, of which it can print where, lie elsewhere."""
    source = f"import torch\ndef kernel_function(x):\n    y = x[:1, None].clone()\n    return {computes}"
    packed = wire.pack(torch.zeros(8, 8))
    with workers.start(memory_bytes=2e9) as process:
        process.ask({"do": "load", "refuses": True}, [source.encode()], limit_s=HANG_S)
        process.ask({"do": "give", "inputs": [packed[0]]}, [packed[1]], limit_s=HANG_S)
        for ops in (True, False):
            reply, _ = process.ask({"do": "trial", "ops": ops}, limit_s=HANG_S)
            assert str(reply.get("error")).startswith("computes with torch: "), reply


def test_no_address_tells_a_checked_call_among_the_trials_from_a_timed_one(workers: Workers) -> None:
    """Where a kernel is tuned, what it has seen of addresses may outlive a call."""
    source = "import torch\ndef kernel_function(x):\n    return torch.tensor([x.data_ptr() % 2**20, x.sum()])"
    with workers.start(memory_bytes=2e9) as process:

        def asked(act: str, *given: torch.Tensor, **how: Any) -> list[float]:
            packed = [wire.pack(tensor) for tensor in given]
            head = {"do": act, "inputs": [spec for spec, _ in packed], **how}
            _, blobs = process.ask(head, [blob for _, blob in packed], limit_s=HANG_S, most_bytes=8)
            return [number for blob in blobs for number in torch.frombuffer(blob, dtype=torch.float32).tolist()]

        process.ask({"do": "load"}, [source.encode()], limit_s=HANG_S)
        for act in ("give", "trial"):
            asked(act, torch.ones(8, 8))
        place, total = asked("collect")
        assert asked("run", torch.zeros(8, 8), as_timed=True) == [place, 0.0]
        assert asked("run", torch.zeros(8, 16)[:, ::2], as_timed=True)[0] != place
        asked("ready", flush=False)
        asked("trial")
        assert asked("collect") == [place, total] == [place, 64.0]


def test_what_one_call_gives_triton_for_memory_is_not_there_in_the_next(workers: Workers) -> None:
    """A function of that call's would know its output still."""
    source = """
import torch, triton
from triton.runtime import _allocation
def kernel_function(x):
    before = type(_allocation._allocator.get()).__name__
    triton.set_allocator(lambda size, alignment, stream: x)
    raise ValueError(before)
"""
    with workers.start(memory_bytes=2e9) as process:
        first, _ = run(process, source, torch.ones(8))
        second, _ = process.ask({"do": "trial"}, limit_s=HANG_S)
    assert first["error"] == second["error"] == "ValueError: NullAllocator"


def test_one_that_waits_for_memory_that_is_not_filled_is_rejected_before_it_is_timed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def waits(text: str) -> str:
        text = text.replace("out_ptr, n,", "out_ptr, new_ptr, n,").replace("x, out, n,", "x, out, torch.empty(1), n,")
        return text.replace(
            "    inside = ", "    while tl.load(new_ptr) == tl.load(new_ptr):\n        at += 0\n    inside = "
        )

    bound, stages = timing.bound, count(2)  # the first asks nothing

    def hurried(process: Process, limit_s: float) -> timing.Ask:
        return bound(process, 3.0 if next(stages) == 4 else limit_s)

    monkeypatch.setattr(timing, "bound", hurried)
    verdict = judged(workers, honest(change=waits))
    assert (verdict.stage, verdict.reason[:16]) == (4, "no answer within")


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


def test_an_empty_launch_launches_and_a_contained_process_may(workers: Workers) -> None:
    with workers.start(memory_bytes=2e9) as process:
        process.ask({"do": "load"}, [COUNTS.encode()], limit_s=HANG_S)
        for kind in ("kernel", "operation", "kernel"):
            reply, _ = process.ask({"do": "trial", "empty": kind}, limit_s=HANG_S)
            assert reply["seconds"] > 0
        spec, blob = wire.pack(torch.ones(1))
        reply, _ = process.ask({"do": "run", "inputs": [spec]}, [blob], limit_s=HANG_S)
    assert reply["error"] == "ValueError: [2, 1]"


def test_one_that_knows_which_calls_are_listed_computes_in_no_other(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "problem", lambda source: None)
    monkeypatch.setattr(timing, "LISTED", 0)  # as if it told those from the others
    knows = "    return out if out.storage_offset() else out + 0\n"  # before it lies a fence in a call that is listed
    found = judged(workers, honest(change=lambda text: text.replace("    return out\n", knows)))
    assert (found.passed, found.reason) == (False, "timing: computes with torch: __add__"), found
