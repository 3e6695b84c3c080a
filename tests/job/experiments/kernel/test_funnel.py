"""The funnel on planted candidates: each kind stops at its own stage, each candidate dies alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from gpufleet.job.experiments.kernel.judge import catalog, planted, source_text
from gpufleet.job.experiments.kernel.judge.child import NOTHING
from gpufleet.job.experiments.kernel.judge.compiler import CACHE
from gpufleet.job.experiments.kernel.judge.planted import STOPS_AT
from gpufleet.job.experiments.kernel.judge.verdict import Verdict
from gpufleet.job.experiments.kernel.judge.worker import GREET_S, Process, Workers
from tests.job.kernel_judge import Switches, candidate, honest, judge, judged, verdicts
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("kernels")


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
    judge(workers).all(planted.candidates(200), found.append)
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
    "without gradients, not called": {"def kernel_function": "@torch.no_grad\ndef kernel_function"},
    "what a block and a launcher may be asked by another name": {
        "    x = tl.load(x_ptr + at, mask=inside,": "    if n < 0:\n        tl.device_print('x', at)\n"
        "    x = tl.load(x_ptr + at, mask=inside.logical_and(at >= 0).logical_or(at < 0),",
        "tl.maximum(x, 0.0)": "tl.squeeze(tl.unsqueeze(tl.mul(tl.sub(tl.add(tl.maximum(x, 0.0), 0), 0), 1), 0), 0)",
        "    n = out.numel()": "    if x.dim() > 9:\n        raise Exception\n    n = torch.flatten(x).numel()",
        "torch.empty_like(x)": "torch.empty(x.shape, dtype=torch.promote_types(x.dtype, torch.result_type(x, x)))",
    },
    "shapes that are broadcast": {"torch.empty_like(x)": "x.new_empty(torch.broadcast_shapes(x.shape, (1,)))"},
    "in inference mode": {"def kernel_function": "@torch.inference_mode()\ndef kernel_function"},
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
    "another name of a constant's type": {"BLOCK: tl.constexpr": "BLOCK: triton.language.constexpr"},
    "the name of a constant's type as text": {"BLOCK: tl.constexpr": "BLOCK: 'tl.constexpr'"},
    "methods of a block": {"tl.maximum(x, 0.0)": "tl.where(x > 0, x.abs().cast(tl.float32), x.exp().sigmoid() * 0.0)"},
    "and, or and not of blocks, of constants and of none": {
        "inside = at < n": "inside = BLOCK > 1 and (at < n) and not (at < 0 or at >= n or n < 0)",
        "tl.maximum(x, 0.0)": "tl.where(not (BLOCK == 0 and 1 // BLOCK or x <= 0.0), x, 0.0 if not BLOCK else 0.0)",
    },
    "descriptors": {
        " + tl.arange(0, BLOCK)\n    inside = at < n": "\n"
        "    given = tl.make_tensor_descriptor(x_ptr, shape=[n], strides=[1], block_shape=[BLOCK])\n"
        "    made = tl.make_tensor_descriptor(out_ptr, [n], [1], [BLOCK])",
        "tl.load(x_ptr + at, mask=inside, other=0.0)": "given.load([at])",
        "tl.store(out_ptr + at, tl.maximum(x, 0.0), mask=inside)": "made.store([at], tl.maximum(x, 0.0))",
        "    n =": "    triton.set_allocator(lambda size, alignment, stream: torch.empty(size))\n    n =",
    },
    "a launcher with a name, a type that is asked": {
        "    kernel[(triton.cdiv(n, 1024),)](": "    run = kernel[(triton.cdiv(n, 1024),)]\n    run(",
        "tl.maximum(x, 0.0)": "tl.where(x > 0 if x.dtype.is_floating() else x < 0, x, 0.0)",
    },
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


REST = """    at = tl.arange(0, BLOCK)
    inside = at < (n % BLOCK if tl.program_id(0) == tl.num_programs(0) - 1 else BLOCK)
    at += tl.program_id(0) * BLOCK
"""


@pytest.mark.parametrize("block", [256, 1024])
def test_one_whose_last_block_may_not_be_full_up_is_wrong(workers: Workers, block: int) -> None:
    """What is left over is nothing where n is a multiple of the block, as most sizes in use are."""

    def by_the_rest(text: str) -> str:
        old = "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n    inside = at < n\n"
        assert old in text
        return text.replace(old, REST).replace("1024", str(block))

    verdict = judged(workers, honest("leaky_relu", by_the_rest))
    assert (verdict.stage, verdict.reason[:8]) == (4, "spread: ")


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
    with off.applied():
        first, second = (made.verdict(broken) for _ in range(2))
    assert (first.stage, first.isolated is None) == (2, False)
    assert (second.stage, second.isolated is None) == (2, True)  # no process was started
    assert first.reason == second.reason


def test_a_hang_and_a_crash_lose_only_themselves_within_bounded_time(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = honest(change=lambda text: text.replace("    n = ", "    while True:\n        pass\n    n = "), label="loop")
    crash = candidate("import os\ndef kernel_function(x):\n    os.kill(os.getpid(), 11)\nos.abort()", label="crash")
    crowd, ask = [loop, honest(label="a"), crash, honest("add", label="b")], Process.ask
    hurried = set[int]()

    def asked(process: Process, head: dict[str, Any], blobs: Sequence[Any] = (), **limits: Any) -> Any:
        if b"while True" in b"".join(blobs):
            hurried.add(process.pid)
        return ask(process, head, blobs, **limits | ({"limit_s": 1.5} if process.pid in hurried else {}))

    monkeypatch.setattr(Process, "ask", asked)
    found = verdicts(judge(workers), crowd, Switches(funnel=False))
    assert not found["loop"].passed
    assert not found["crash"].passed
    assert "no answer within" in found["loop"].reason
    assert "ended" in found["crash"].reason
    assert len(found) == len(crowd)


def test_an_empty_launch_compiles_for_a_gpu(workers: Workers) -> None:
    if workers.lacks is not None:
        pytest.skip(workers.lacks)
    with workers.start(memory_bytes=8e9, compiles=True) as process:
        process.ask({"do": "load"}, [NOTHING.encode()], limit_s=HANG_S)
        calls = [[{"dtype": "float32", "shape": [1], "stride": [1]}]]
        reply, _ = process.ask({"do": "compile", "calls": calls, "device": "cuda"}, limit_s=HANG_S)
        assert reply["problem"] is None
        assert list((process.scratch / CACHE).glob("*/*.cubin"))


def test_the_bound_holds_starts_and_the_references_time(workers: Workers) -> None:
    made = judge(workers, candidate_s=10.0)  # two workers
    assert made.bound_s(3) == pytest.approx(3 * source_text.LONGEST_S + 2 * (3 * GREET_S + 6 * 10.0))
