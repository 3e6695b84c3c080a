"""Cheating candidates: all rejected by the full funnel; without one of its extensions it shows which rejects which."""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from gpufleet.job.experiments.kernel.judge import sandbox
from gpufleet.job.experiments.kernel.judge.verdict import Verdict
from gpufleet.job.experiments.kernel.judge.worker import Workers
from tests.job import kernel_cheats
from tests.job.kernel_judge import Switches, judge, never_misses_its_gpu, scratch, verdicts
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("kernels")

ROWS = {
    "full": Switches(),
    "without funnel": Switches(funnel=False),
    "without multi-input": Switches(multi_input=False),
    "without calibrated timing": Switches(timing=False),
    "without any": Switches(funnel=False, multi_input=False, timing=False),
}
FIXTURES = {fixture.candidate.label: fixture for fixture in kernel_cheats.FIXTURES}
CPU = [label for label, fixture in FIXTURES.items() if not fixture.gpu_only]
OTHERS = [row for row in ROWS if row != "full"]
HANGS = ("never-ends",)


def caught(needs: frozenset[str], switches: Switches) -> bool:
    return any(all(getattr(switches, name) for name in need.split("+")) for need in needs)


Row = Callable[[str], dict[str, Verdict]]


@pytest.fixture(scope="module")
def judged(workers: Workers) -> Row:
    """row -> label -> verdict. A row is judged when it is first asked for. Candidates that need no extension are tried
    with none and with all.
    """
    made = judge(workers, candidate_s=HANG_S, memory_gb=1.2)
    impatient = judge(workers, candidate_s=1.5)

    @functools.cache
    def row(name: str) -> dict[str, Verdict]:
        ends = name in ("full", "without any")
        chosen = [FIXTURES[label].candidate for label in CPU if ends or FIXTURES[label].needs]
        patient = [candidate for candidate in chosen if candidate.label not in HANGS]
        hanging = [candidate for candidate in chosen if candidate.label in HANGS]
        return {
            **verdicts(made, patient, ROWS[name]),
            **verdicts(impatient, hanging, ROWS[name]),
        }

    return row


@pytest.mark.parametrize("label", CPU)
def test_the_full_funnel_rejects(judged: Row, label: str) -> None:
    assert not judged("full")[label].passed, judged("full")[label]


@pytest.mark.slow
@pytest.mark.parametrize("label", [label for label in CPU if not FIXTURES[label].needs])
def test_isolation_and_comparison_alone_reject(judged: Row, label: str) -> None:
    assert not judged("without any")[label].passed, judged("without any")[label]


@pytest.mark.parametrize("row", ["full", *(pytest.param(row, marks=pytest.mark.slow) for row in OTHERS)])
@pytest.mark.parametrize("label", [label for label in CPU if FIXTURES[label].needs])
def test_a_row_lets_through_what_its_extensions_do_not_catch(judged: Row, label: str, row: str) -> None:
    assert judged(row)[label].passed is not caught(FIXTURES[label].needs, ROWS[row]), judged(row)[label]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="another stream exists only on a GPU")
def test_work_on_another_stream_is_rejected(tmp_path: Path) -> None:
    with Workers(scratch(tmp_path), gpus=True) as workers:
        found = verdicts(judge(workers), [FIXTURES["wrong-stream"].candidate])
    assert not found["wrong-stream"].passed


@pytest.mark.parametrize("label", ["compiles-for-no-gpu", "compiles-if-asked-for-no-gpu"])
def test_a_kernel_that_only_an_interpreter_runs_stops_at_the_compiler(judged: Row, label: str) -> None:
    found = judged("full")[label]
    assert found.stage == 2
    assert "Cannot access global variable ONE" in found.reason


def test_one_that_tells_checks_by_what_memory_holds_is_wrong_among_the_trials(judged: Row) -> None:
    found = judged("full")["right-where-memory-is-filled"]
    assert (found.stage, "differ from the reference" in found.reason) == (5, True)


@pytest.mark.slow
def test_nothing_was_written_outside(judged: Row) -> None:
    found = judged("without any")
    if found["writes-outside"].isolated and found["writes-outside-natively"].isolated:
        assert not Path("/var/tmp/gpufleet-was-here").exists()


CUDA_STARTS = """
import os, sys, threading
from pathlib import Path
from gpufleet.job.experiments.kernel.judge import sandbox

outer, scratch = os.getpid(), Path(sys.argv[1])
sandbox.give(scratch)
if not sandbox.enter():
    sys.exit(77)
if not sandbox.confine(scratch, namespaces=True, programs=True, cuda=True, memory_bytes=1e9):
    os._exit(77)

def named():
    for me in ("self", os.getpid()):
        comm = Path(f"/proc/{me}/task/{threading.get_native_id()}/comm")
        comm.write_text("named")
        assert comm.read_text() == "named\\n"

def refused(path):
    try:
        path.write_text("0")
    except OSError as error:
        return error.strerror == "Read-only file system"

assert os.getpgrp() == os.getpgid(outer)  # one signal reaches all
named()
other = threading.Thread(target=named)
other.start()
other.join()
assert refused(Path(f"/proc/{outer}/task/{outer}/comm")) and refused(Path("/proc/sys/vm/swappiness"))
assert refused(scratch.parent / "outside")
(scratch / "inside").write_text("0")
ready, told = os.pipe()
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        print(os.getpid(), flush=True)
        os.write(told, b"!")
        while True:
            pass
    os._exit(0)
os.wait()
os.read(ready, 1)
os._exit(0)
"""


def test_cuda_may_name_its_threads_and_write_nothing_else_and_what_is_left_ends(tmp_path: Path) -> None:
    """Since version 570 its driver does not start otherwise."""
    inside = tmp_path / "scratch"
    inside.mkdir()
    root = str(Path(sandbox.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-c", CUDA_STARTS, str(inside)],
        env={**os.environ, "PYTHONPATH": root, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode == 77:
        pytest.skip("this kernel allows no namespaces here")
    assert done.returncode == 0, done.stderr
    assert (inside / "inside").exists()
    assert not (tmp_path / "outside").exists()
    assert not Path("/proc", done.stdout.strip()).exists()


BUILDS = '''
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.build import compile_module_from_src
from triton.runtime.jit import JITFunction

@triton.jit
def double(x, n, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x + place, 2 * tl.load(x + place, mask=place < n), mask=place < n)

kernel = ASTSource(double, signature={"x": "*fp32", "n": "i32", "BLOCK": "constexpr"}, constexprs={"BLOCK": 128})
assert triton.compile(kernel, target=GPUTarget("cuda", 90, 32)).asm["cubin"]

# which refuses launches with code from elsewhere
assert JITFunction._pack_args.__module__ == "gpufleet.job.experiments.kernel.judge.compiler"

LAUNCHER = """
#include <Python.h>
static struct PyModuleDef made = {PyModuleDef_HEAD_INIT, "launcher", NULL, -1, NULL};
PyMODINIT_FUNC PyInit_launcher(void) { return PyModule_Create(&made); }
"""
if %s:
    assert compile_module_from_src(LAUNCHER, "launcher").__name__ == "launcher"

def kernel_function(x):
    return x
'''


@pytest.mark.slow
def test_a_gpus_compiler_works_within_the_confinement(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For sm_90, which needs no GPU: Triton's cache, ptxas and the launcher that the C compiler makes."""
    never_misses_its_gpu(monkeypatch)
    headers = Path(sysconfig.get_path("include"), "Python.h").exists() and shutil.which("gcc") is not None
    with Workers(scratch(tmp_path), gpus=True) as workers, workers.start(memory_bytes=4e9) as process:
        reply, _ = process.ask({"do": "load"}, [(BUILDS % headers).encode()], limit_s=HANG_S)
    assert "error" not in reply, reply
