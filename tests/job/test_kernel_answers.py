"""What a candidate's process answers is its own affair: no answer ends the judge, no error of ours becomes a verdict.

With the rules left out, so that what comes after them is seen alone.
"""

from __future__ import annotations

import ast
import os
import socket
import struct
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from kernel_judge import candidate, honest, judge, judged, never_misses_its_gpu, scratch

from job.kernels import adversarial, answers, forkserver, planted, rules, tasks, timing, wire
from job.kernels.catalog import BY_NAME
from job.kernels.funnel import digest
from job.kernels.verdict import Course, Switches
from job.kernels.worker import Lost, NotBegun, OutOfTime, Process, Workers

NO_RULES = Switches(funnel=False)


def course() -> Course:
    return Course(honest(), NO_RULES, "row", "")


JITTED = "@triton.jit\ndef kernel():\n    pass\n"
LAUNCHES = "def kernel_function(x):\n    kernel[1,](x)\n"
ENTRY = "def kernel_function(x):\n    pass"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch", "import torch\n"),
        ("Here it is:\n```python\nimport a\n```\nDone.", "import a\n"),
        ("```\nimport a", "import a\n"),
        ("```py\nimport a\n```\nThat is all.", "import a\n"),
        ("```Python\nimport a\n```\nThat is all.", "import a\n"),
        ("```triton\nimport a\n```", "import a\n"),
        (f"Write ```triton``` so:\n  ```python title=a\n{ENTRY}\n```\n", ENTRY + "\n"),
        (f"```bash\npip install triton\n```\nthen\n```python\n{ENTRY}\n```\n", ENTRY + "\n"),
        (f"{ENTRY}\n```\nThat is all.", ENTRY + "\n"),
        (f"~~~python\n{ENTRY}\n~~~\nDone.", ENTRY + "\n"),
        (f"````python\n{ENTRY}\n    '```'\n````\nDone.", ENTRY + "\n    '```'\n"),
        (f"1. So:\n\n   ```python\n   {ENTRY.replace(chr(10), chr(10) + '   ')}\n   ```\n", ENTRY + "\n"),
        (f"<think>\n```\n{ENTRY}\n```\n</think>\n```python\n{JITTED}{LAUNCHES}```\n", JITTED + LAUNCHES),
        (f"A kernel:\n```python\n{JITTED}```\nIts entry:\n```\n{LAUNCHES}```\n", f"{JITTED}\n{LAUNCHES}"),
        (f"For\n```\n{ENTRY}\n```\n\n```\n{JITTED}```\n\n```\n{LAUNCHES}```\n", f"{JITTED}\n{LAUNCHES}"),
        (f"Either\n```python\n{ENTRY}\n```\nor\n```\n{ENTRY}1\n```\n", f"{ENTRY}\n"),
    ],
)
def test_the_program_is_what_the_fence_with_the_entry_holds(text: str, found: str) -> None:
    assert answers.program(text) == found


UNUSED = """
from __future__ import annotations
import os, numpy as np
import torch.nn as nn
import torch.nn
from typing import Optional
from torch import Tensor

__all__ = ["kernel_function"]
DEVICE = triton.runtime.driver.active.get_active_torch_device()

class Model(nn.Module):
    def forward(self, x):
        return kernel_function(x)

def test():
    torch.testing.assert_close(kernel_function(torch.randn(4, device=DEVICE)), torch.zeros(4))

if __name__ == "__main__":
    test()
"""


def test_what_a_program_never_uses_is_dropped_before_it_is_judged() -> None:
    source = honest().source
    noted = source.replace("kernel_function(x):", "kernel_function(x: Optional[Tensor]) -> Tensor:")
    noted = noted.replace("    out =", "    out: Tensor =")
    assert rules.problem(noted + UNUSED) is not None
    assert answers.used(noted + UNUSED) == ast.unparse(ast.parse(source)) + "\n"
    assert answers.used(source) == source  # as it was written where there is nothing to drop


def test_what_is_called_after_the_entry_is_dropped_and_before_it_is_not() -> None:
    source = honest().source
    example = (
        "def test():\n    print(kernel_function(1))\n\n\na = torch.randn(4)\ntest()\nkernel_function(a)\n'Done.'\n"
    )
    assert answers.used(source + example) == ast.unparse(ast.parse(source)) + "\n"
    before = source.replace("def kernel_function", "exec('1')\n\n\ndef kernel_function")
    assert answers.used(before) == before
    assert rules.problem(before) is not None


def test_an_example_after_the_entry_is_dropped_though_it_calls_its_tensors_as_the_entry_does() -> None:
    source = honest().source
    example = "x = torch.randn(4)\nout, n = kernel_function(x), x.numel()\nassert torch.equal(out, torch.relu(x))\n"
    assert answers.used(source + example) == ast.unparse(ast.parse(source)) + "\n"


@pytest.mark.parametrize(
    "line",
    [
        "x, OUTER = OUTER, 1",
        "global OUTER; OUTER = [OUTER for OUTER in (1,)]",
        "d = {OUTER: 1 for OUTER in (2,)}, OUTER",
        "f = lambda OUTER=OUTER: OUTER",
        "def f():\n        return OUTER",
    ],
)
def test_a_name_that_the_entry_takes_from_the_module_is_kept_and_its_own_is_not(line: str) -> None:
    source = "OUTER = 1\n" + honest().source.replace("    out = ", f"    {line}\n    out = ")
    own = ast.unparse(ast.parse(source.removeprefix("OUTER = 1\n"))) + "\n"
    assert answers.used(source) == (own if line.startswith("x, OUTER") else source)


@pytest.mark.parametrize(
    "more",
    [
        "if __name__ == '__main__':\n    pass\nelse:\n    torch.relu = None\n",
        "if __name__ != '__main__':\n    torch.relu = None\n",
        "torch.relu = None\n",
        "n, torch.relu = 1, None\n",
        "n = exec('1'), torch.zeros(9)[exec('1')]\nn[0] = 1\n",
        "for n in (1,):\n    pass\n",
        "n += 1\n",
        "from os import *\n",
    ],
)
def test_what_could_do_something_is_not_taken_for_unused(more: str) -> None:
    assert answers.used(honest().source + more) == honest().source + more
    assert rules.problem(honest().source + more) is not None


def test_what_the_entry_comes_to_is_kept() -> None:
    source = honest().source.replace("def kernel_function(x):", "def launch(x):").replace("BLOCK=1024", "BLOCK=SIZE")
    made = source + "SIZE = HALF * 2\nHALF = 512\nOTHER = 1\ndef kernel_function(x):\n    return launch(x)\n"
    assert answers.used(made) == ast.unparse(ast.parse(made.replace("OTHER = 1\n", ""))) + "\n"


@pytest.mark.parametrize("source", ["def kernel_function(", "x = " + "(" * 5000, ENTRY + "\n\0", ENTRY + "\n\ud800"])
def test_a_text_that_cannot_be_read_stays_as_it_is(source: str) -> None:
    assert answers.used(source) == source


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("seconds", 10**400), ("seconds", -1.0), ("seconds", float("nan")), ("seconds", float("inf")),
        ("seconds", True), ("seconds", "1"), ("cpu_s", []), ("cpu_s", 10**400), ("ops", [[]]), ("ops", "add"),
        ("ops", {"a": 1}),
        ("shape", 3), ("shape", [1.0]), ("shape", [True]), ("shape", [-1]), ("shape", [1 << 70]), ("dtype", None),
        ("error", {}), ("type", 1), ("problem", 0), ("alias", 0), ("changed", "no"), ("isolated", 1), ("violation", []),
    ],
)  # fmt: skip
def test_a_part_of_an_answer_that_has_not_its_type_is_none_of_ours(part: str, value: object) -> None:
    assert wire.reply({"more": 1}) == {}
    with pytest.raises(wire.Closed, match=part):
        wire.reply({part: value})


def test_what_is_said_in_an_answer_can_be_printed() -> None:
    assert wire.reply({"error": "a\nb\x1b[2J\ud800"}) == {"error": "a b?[2J?"}


@pytest.mark.parametrize("blobs", ["[1e999]", "[1.5]", "[-1]", "[true]", "{}", "null", '"a"', "[[]]", str([10**400])])
@pytest.mark.parametrize("shown", ['{"blobs": %s}', "[%s]"])
def test_a_head_that_is_no_message_is_not_believed(blobs: str, shown: str) -> None:
    ours, theirs = socket.socketpair()
    content = (shown % blobs).encode()
    with ours, theirs:
        theirs.sendall(struct.pack("!I", len(content)) + content)
        with pytest.raises(wire.Closed):
            wire.receive(ours, until=time.monotonic() + 5, most_bytes=100)


PATCHED = """
import sys
Harness = sys.modules["__main__"].Harness
class J:
    loads = staticmethod(sys.modules["json"].loads)
    dumps = staticmethod(sys.modules["json"].dumps)
sys.modules["job.kernels.wire"].json = J
"""
PATCHES = {
    "a time that is no time": 'Harness._trial = lambda self, head, blobs: ({"seconds": 10**400}, [])',
    "no time": "Harness._trial = lambda self, head, blobs: ({}, [])",
    "operations that are no names": 'Harness._collect = lambda self, head, blobs: ({"ops": [[]]}, [])',
    "no output": "Harness._collect = lambda self, head, blobs: ({}, [])",
    "a shape without content": 'Harness._collect = lambda *_: ({"shape": [1], "dtype": "float32"}, [])',
    "a shape of too many sizes": 'Harness._collect = lambda *_: ({"shape": [1] * 9999, "dtype": "x"}, [b""])',
    "a dtype of no element": 'Harness._collect = lambda *_: ({"shape": [1], "dtype": "x"}, [b"abc"])',
    "too many bytes": 'Harness._collect = lambda *_: ({"shape": [1], "dtype": "float32"}, [b"x" * (1 << 20)])',
    "no aliases": "collect = Harness._collect\n"
    "Harness._collect = lambda *a: (lambda r, b: ({k: r[k] for k in ('shape', 'dtype')}, b))(*collect(*a))",
    "sizes without end": "J.dumps = lambda tree: '{\"blobs\": [1e999]}'",
    "not JSON": "J.dumps = lambda tree: '['",
}


@pytest.mark.parametrize("what", PATCHES)
@pytest.mark.parametrize(
    "switches",
    [NO_RULES, pytest.param(Switches(funnel=False, multi_input=False, timing=False), marks=pytest.mark.slow)],
)
def test_an_answer_that_is_none_loses_its_candidate_alone(workers: Workers, what: str, switches: Switches) -> None:
    patched = honest().source + PATCHED + PATCHES[what]
    found = judged(workers, candidate(patched), switches)
    assert not found.passed, found
    assert len(found.reason) < 400


@pytest.mark.parametrize("source", ["\ud800", "# coding: utf-7\n", "\0", "#" * 16_385])
@pytest.mark.parametrize("switches", [Switches(), NO_RULES])
def test_a_text_that_cannot_be_run_as_it_is_read_reaches_no_process(
    workers: Workers, source: str, switches: Switches
) -> None:
    found = judged(workers, candidate(source + honest().source), switches)
    assert (found.passed, found.isolated, found.stage) == (False, None, 1 if switches.funnel else 2)
    assert found.source_sha256 == digest(source + honest().source)


def test_an_error_of_ours_is_no_verdict(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "difference", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        judged(workers, honest(), Switches())


def test_time_that_runs_out_while_a_right_one_is_timed_leaves_it_untimed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(error: Exception) -> Any:
        def calibrated(*_: object, **__: object) -> timing.Timing:
            raise error

        monkeypatch.setattr(timing, "calibrated", calibrated)
        return judged(workers, honest(), Switches())

    found = fails(OutOfTime("no answer within 3 s"))
    assert (found.passed, found.speedup, found.stage) == (True, None, 6)
    assert found.reason == "no answer within 3 s while it was timed"
    for error in (Lost("the process ended"), timing.Rejected("wrong")):
        assert (fails(error).passed, fails(error).stage) == (False, 5)


@pytest.mark.slow
def test_one_that_hangs_only_while_it_is_timed_is_untimed(workers: Workers) -> None:
    hangs = "calls = []\ndef kernel_function(x):\n    calls.append(1)\n    while len(calls) > 7:\n        pass\n"
    source = honest().source.replace("def kernel_function", "def honest") + hangs + "    return honest(x)"
    one_input = Switches(funnel=False, multi_input=False)  # so that nothing comes again among the trials
    found = judged(workers, candidate(source), one_input, candidate_s=6.0)
    assert (found.passed, found.speedup) == (True, None)
    assert "while it was timed" in found.reason


@pytest.mark.parametrize(
    ("label", "why"),
    [
        ("torch-while-timed", "computes with torch"),
        ("cached-by-content", "computes with torch: __float__"),
        ("in-place-while-timed", "gives its input back"),
        ("cached-by-address", "while it was timed"),
    ],
)
def test_the_timing_alone_catches_who_is_another_while_it_is_timed(
    workers: Workers, label: str, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "problem", lambda source: None)
    cheat = next(fixture.candidate for fixture in adversarial.FIXTURES if fixture.candidate.label == label)
    found = judged(workers, cheat, Switches(), trials=10)
    assert not found.passed
    assert why in found.reason, found


def test_one_that_knows_which_calls_are_listed_computes_in_no_other(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules, "problem", lambda source: None)
    monkeypatch.setattr(timing, "LISTED", 0)  # as if it told those from the others
    knows = "    return out if out.storage_offset() else out + 0\n"  # before it lies a fence in a call that is listed
    found = judged(workers, honest(change=lambda text: text.replace("    return out\n", knows)), Switches())
    assert (found.passed, found.reason) == (False, "timing: computes with torch: __add__"), found


REMEMBERS = """
import torch, triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, kept_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n)
    for _ in range(30 if tl.load(x_ptr) != tl.load(kept_ptr) else 1):
        tl.store(out_ptr + at, tl.maximum(x, 0.0), mask=at < n)

memory = {}
def kernel_function(x):
    x = x.contiguous()
    if x.shape not in memory:
        memory[x.shape] = (torch.zeros(1), torch.empty_like(x))
    kept, out = memory[x.shape]
    kernel[(triton.cdiv(x.numel(), 1024),)](x, kept, out, x.numel(), BLOCK=1024)
    kept.copy_(x.flatten()[:1])
    return out
"""


def test_a_kernel_that_looks_whether_its_input_is_known_pays_for_it_in_each_trial(workers: Workers) -> None:
    """It works 30 times as long on an input that it has not seen: its trials must show that."""
    seen, honest_one = (
        judged(workers, candidate(source), NO_RULES, trials=5)
        for source in (REMEMBERS, planted.source(BY_NAME["relu"]))
    )
    assert seen.passed, seen
    assert honest_one.passed, honest_one
    assert seen.kernel_s is not None
    assert honest_one.kernel_s is not None
    assert seen.kernel_s[1] > 1.5 * honest_one.kernel_s[1]  # the interpreter is most of both


def test_a_candidate_stands_still_while_the_reference_is_timed(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its threads would make the reference slow otherwise."""
    states, ask = set[str](), Process.ask

    def at(pid: int) -> str:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]

    def watched(process: Process, head: dict[str, Any], *more: Any, **rest: Any) -> Any:
        if process is reference and head["do"] == "trial":
            until = time.monotonic() + 20
            while (state := at(candidate_pid)) == "R" and time.monotonic() < until:
                os.sched_yield()  # it has not yet been given a core to stop on
            states.add(state)
        return ask(process, head, *more, **rest)

    with workers.start(memory_bytes=2e9) as process, workers.start(memory_bytes=2e9) as reference:
        candidate_pid = process.pid
        process.ask({"do": "load"}, [honest().source.encode()], limit_s=60)
        monkeypatch.setattr(Process, "ask", watched)
        assert judge(workers, trials=9)._time(BY_NAME["relu"], process, reference, course()).kernel is not None
    assert states == {"T"}


@pytest.mark.parametrize(
    "fails",
    [
        "is late",
        pytest.param("ends", marks=pytest.mark.slow),
        "has no memory left",
        pytest.param("does not load", marks=pytest.mark.slow),
        pytest.param("does not start", marks=pytest.mark.slow),
    ],
)
def test_a_reference_that_is_lost_costs_no_candidate_its_verdict_and_serves_no_other(
    workers: Workers, fails: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, start = set[int](), workers.start

    def started(**asked: Any) -> Process:
        process = start(**asked)
        if asked.get("confined", True) or broken:
            return process
        broken.add(process.pid)
        if fails == "does not start":
            process.close()
            raise NotBegun("no answer within 120 s")
        ask = process.ask

        def failing(head: dict[str, Any], *more: Any, **rest: Any) -> tuple[dict[str, Any], list[bytes]]:
            reply = ask(head, *more, **rest)
            if head["do"] == "load" and fails == "does not load":
                return {"error": "OutOfMemoryError: CUDA"}, []
            if head["do"] != "trial":
                return reply
            if fails == "is late":
                raise OutOfTime("no answer within 30 s")
            if fails == "ends":
                raise Lost("the process ended")
            return {"error": "OutOfMemoryError: CUDA"}, []

        monkeypatch.setattr(process, "ask", failing)
        return process

    monkeypatch.setattr(workers, "start", started)
    made, one = judge(workers, trials=3), honest()
    first, second = (made.verdict(one, Switches(), "full") for _ in range(2))
    made._close_idle()
    assert (first.passed, first.speedup, first.reason[:15]) == (True, None, "the reference: "), first
    assert second.passed
    assert "the reference: " not in second.reason


def test_a_reference_outlives_a_candidate_that_is_rejected_while_it_is_timed(workers: Workers) -> None:
    wrong = honest("square", lambda text: text.replace("x * x", "x"))
    made, pids = judge(workers, trials=3), list[int]()
    for one in (wrong, wrong, honest("square")):
        made.verdict(one, NO_RULES, "row")
        with made._reference(0) as reference:
            pids.append(reference.pid)
    made._close_idle()
    assert len(set(pids)) == 1


def test_memory_of_offspring_and_of_no_process_counts(workers: Workers) -> None:
    grows = "x = b'x' * (600 << 20)\nwhile True:\n    pass"
    forks = f"import os\nif os.fork() == 0:\n    {grows.replace(chr(10), chr(10) + '    ')}\nos.wait()"
    writes = "import os\nwhile True:\n    kept = os.memfd_create('x')\n    os.posix_fallocate(kept, 0, 160 << 20)"
    for source in (forks, writes):
        with (
            workers.start(memory_bytes=1.0e9, guarded=False) as process,
            pytest.raises(Lost, match=r"of memory, 1\.0 are allowed"),
        ):
            process.ask({"do": "load"}, [source.encode()], limit_s=60)


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
        process.ask({"do": "load"}, [f"import os\n{fills}\nkernel_function = len".encode()], limit_s=60)
        for _ in range(100_000):  # it is looked at between the questions as well
            process.ask({"do": "ready", "flush": False}, limit_s=60)

    with workers.start(memory_bytes=2e9) as process, pytest.raises(Lost, match="more in its folder than 256 MiB"):
        asks()
    assert not process.scratch.exists()


@pytest.mark.slow
def test_only_a_gpus_process_loads_a_library_of_its_own_and_only_from_tritons_cache_and_forks_no_more_than_others(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never_misses_its_gpu(monkeypatch)

    def brings(folder: str) -> str:
        return f"""
import os, importlib.machinery, importlib.util
os.makedirs({folder!r}, exist_ok=True)
open({folder!r} + "/native.so", "wb").write(b"nothing")
loader = importlib.machinery.ExtensionFileLoader("native", os.path.abspath({folder!r} + "/native.so"))
importlib.util.module_from_spec(importlib.machinery.ModuleSpec("native", loader, origin=loader.path))
"""

    def says(made: Workers, source: str) -> str:
        with made.start(memory_bytes=4e9) as process:
            try:
                return str(process.ask({"do": "load"}, [source.encode()], limit_s=60)[0]["error"])
            except Lost as error:
                return str(error)

    with Workers(scratch(tmp_path), gpus=True) as spawning:
        assert says(workers, brings("cache/a")) == says(spawning, brings("a")) == "forbidden: import native"
        assert says(spawning, brings("cache/a")).startswith("ImportError")
        assert says(spawning, "import os\nos.fork()") == "forbidden: os.fork"


SERVES = """
import socket, struct, sys, time
end, greeting = socket.socket(fileno=int(sys.argv[1])), b'{"blobs": []}'
end.sendall(struct.pack("!I", len(greeting)) + greeting)
if sys.argv[2] == "1":
    end.close()
    time.sleep(60)
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
    monkeypatch.setattr(forkserver.os, "kill", kill)
    forkserver.kill_all(1)
    assert sorted(ended) == [*range(1, 2001), 5000]
    assert ended[-1] == 1


def test_json_of_any_depth_is_no_message() -> None:
    ours, theirs = socket.socketpair()
    content = b'{"blobs": [], "shape": ' + b"[" * 50_000 + b"]" * 50_000 + b"}"
    with ours, theirs:
        theirs.sendall(struct.pack("!I", len(content)) + content)
        with pytest.raises(wire.Closed):
            wire.reply(wire.receive(ours, until=time.monotonic() + 5)[0])
