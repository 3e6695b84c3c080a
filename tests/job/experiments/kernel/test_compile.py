"""Stage 2: candidates are compiled for a GPU that need not be there, once each, within the same limits as ever."""

from __future__ import annotations

import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gpufleet.job.experiments.kernel.judge import catalog, planted, tasks, worker
from gpufleet.job.experiments.kernel.judge.compilation import OUTCOME, Compilation
from gpufleet.job.experiments.kernel.judge.compiler import ADDRESS, CACHE
from gpufleet.job.experiments.kernel.judge.funnel import Judge
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import Course, Verdict
from gpufleet.job.experiments.kernel.judge.worker import Process, Workers
from tests.job.kernel_judge import LIMITS, SEED, Switches, candidate, honest, judge, judged, scratch, verdicts
from tests.waiting import HANG_S

pytestmark = pytest.mark.xdist_group("kernels")

OFF = Switches(funnel=False)

# What a GPU's process does at the first launches, but for the GPU: says how often the compiler was needed.
LAUNCH = """
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import KernelInterface

hits, launched = [], []

class Utils:
    def get_device_properties(self, device):
        return {"max_shared_mem": 232448}
    def load_binary(self, name, kernel, shared, device):
        assert kernel.startswith(b"\\x7fELF")
        return None, None, 0, 0, 1024

class Driver:
    utils = Utils()
    def launcher_cls(self, src, metadata):
        return lambda *args: launched.append(args)
    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)
    def get_current_device(self):
        return 0
    def get_current_stream(self, device):
        return 0

KernelInterface.__getitem__ = lambda self, grid: lambda *given, **named: self.run(
    *given, grid=grid, warmup=False, **named
)
driver.set_active(Driver())
knobs.compilation.listener = lambda *, cache_hit, **_: hits.append(cache_hit)
for layouts in CALLS:
    kernel_function(*(
        torch.empty_strided(one["shape"], one["stride"], dtype=getattr(torch, one["dtype"])) for one in layouts
    ))
raise ValueError(f"{len(launched)} launches, {hits.count(True)} found, {hits.count(False)} compiled")
"""
TUNED = (
    "@triton.autotune(configs=[triton.Config({'BLOCK': size}, num_warps=4) for size in (128, 256, SIZE)], key=['n'])\n"
    "@triton.jit"
)


def unlike(number: int) -> str:
    """A kernel that differs from the others."""
    return f"x * x + {number}.0 - {number}.0"


def built(workers: Workers, source: str, task: str = "relu") -> Path:
    """Triton's cache as stage 2 leaves it."""
    outcome = Compilation(workers, LIMITS, SEED).compile(
        source, f"{abs(hash(source)):x}", catalog.BY_NAME[task], lambda _: None
    )
    assert outcome.problem is None
    return outcome.built


def cubins(folder: Path) -> int:
    return len(list(folder.glob("*/*.cubin")))


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("x + tl.arange(0, 1000)", "arange's range must be a power of 2"),
        ("tl.exp(x.to(tl.int32))", "Expected dtype"),
        pytest.param("tl.dot(x, x)", "must have equal ranks", marks=pytest.mark.slow),
        pytest.param("x + tl.sum(x, axis=3)", "invalid axis 3", marks=pytest.mark.slow),
        pytest.param("tl.where(x > 0, x, 'a')", "str", marks=pytest.mark.slow),
    ],
)
def test_what_loads_but_does_not_compile_stops_at_stage_2_with_the_compilers_words(
    workers: Workers, body: str, said: str
) -> None:
    source = planted.source(catalog.BY_NAME["relu"], body=body)
    verdict = judged(workers, candidate(source))
    assert (verdict.stage, verdict.passed) == (2, False)
    assert verdict.reason.startswith("does not compile: ")
    assert said in verdict.reason


def test_libdevice_compiles_though_no_interpreter_has_it(workers: Workers) -> None:
    source = planted.source(catalog.BY_NAME["tanh"], body="libdevice.tanh(x)")
    source = source.replace("import torch\n", "import torch\nfrom triton.language.extra import libdevice\n")
    assert cubins(built(workers, source, "tanh")) > 0
    assert judged(workers, candidate(source, "tanh")).stage == 3


def test_a_launch_with_the_wrong_arguments_does_not_compile(workers: Workers) -> None:
    verdict = judged(workers, honest(change=lambda text: text.replace("(x, out, n, ", "(x, out, ")))
    assert (verdict.stage, "missing 1 required positional argument: 'n'" in verdict.reason) == (2, True)


@pytest.mark.parametrize("option", ["ptx_options='output.txt'", "ir_override='a.ptx'", "**{'extern_libs': {}}"])
def test_a_launch_that_brings_code_which_nobody_has_read_does_not_compile(workers: Workers, option: str) -> None:
    """For example, PTX that a program writes into its folder would run on a GPU in place of its kernel."""
    verdict = judged(workers, honest(change=lambda text: text.replace("BLOCK=1024)", f"BLOCK=1024, {option})")))
    assert (verdict.stage, ": a launch with " in verdict.reason) == (2, True), verdict


def test_a_work_folder_with_signs_of_options_in_its_name_rejects_nobody(
    workers: Workers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "lr=0.1,seed=1"  # as Hydra names them
    folder.mkdir()
    monkeypatch.setattr(workers, "folder", folder)
    assert cubins(built(workers, planted.source(catalog.BY_NAME["relu"]))) > 0


def test_what_the_rest_of_a_program_does_with_numbers_is_left_to_stage_3(workers: Workers) -> None:
    looks = honest(change=lambda text: text.replace("    n = ", "    assert float(x.flatten()[0]) < 1e9\n    n = "))
    verdict = judged(workers, looks, OFF)
    assert verdict.passed, verdict


def test_one_that_asks_which_gpu_it_is_on_is_compiled_ahead(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    """There is none here: what such a program launches would first be compiled while a GPU waits."""
    monkeypatch.setattr(Workers, "device", "cuda")
    asks = (
        "    most = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count\n"
        "    with torch.cuda.device(x.device):\n        kernel[(max(most, triton.cdiv(n, 1024)),)]"
    )
    source = planted.source(catalog.BY_NAME["square"], body=unlike(5))
    assert cubins(built(workers, source.replace("    kernel[(triton.cdiv(n, 1024),)]", asks), "square")) > 0


ADDRESSES = """
import torch
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, n, address, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(address.to(tl.pointer_type(tl.float32)) + at, mask=at < n)
    tl.store(out_ptr + at, x + tl.load(x_ptr), mask=at < n)

def kernel_function(x):
    x = x.contiguous().flatten()
    out = torch.empty_like(x)
    kernel[(1,)](x[1:], out, x.numel(), x.data_ptr(), BLOCK=128)
    return out
"""


def test_one_that_launches_more_kernels_than_there_is_time_for_is_compiled_all_the_same(workers: Workers) -> None:
    """One for each row, say: on a GPU's inputs thousands; here without end."""

    def launched_in_a_loop(text: str) -> str:
        return text.replace("    kernel[", f"    while x.data_ptr() == {ADDRESS}:\n        kernel[", 1).replace(
            "    return out", "    kernel[(triton.cdiv(n, 1024),)](x, out, n, BLOCK=1024)\n    return out"
        )

    assert judged(workers, honest(change=launched_in_a_loop), Switches(timing=False)).passed


def test_what_only_llvm_finds_wrong_is_said_in_its_words(workers: Workers) -> None:
    source = ADDRESSES.replace("x.data_ptr()", "3")
    verdict = judged(workers, candidate(source))
    assert (verdict.stage, "must be 64-bit signless integer" in verdict.reason) == (2, True), verdict


def test_the_first_launches_on_a_gpu_find_all_that_was_compiled_ahead(workers: Workers) -> None:
    def said(source: str, task: str, cache: Path | None) -> str:
        program = f"{source}\nCALLS = {tasks.layouts(catalog.BY_NAME[task], SEED)!r}\n{LAUNCH}".encode()
        with workers.start(memory_bytes=4e9, compiles=True, built=cache) as process:
            return str(process.ask({"do": "load"}, [program], limit_s=HANG_S)[0]["error"])

    source = planted.source(catalog.BY_NAME["addcmul"])
    launches = f"ValueError: {len(tasks.LAYOUTS)} launches"
    assert said(source, "addcmul", None) == f"{launches}, 0 found, 2 compiled"
    assert said(source, "addcmul", built(workers, source, "addcmul")) == f"{launches}, 2 found, 0 compiled"
    assert said(ADDRESSES, "relu", built(workers, ADDRESSES)) == f"{launches}, 2 found, 0 compiled"


def test_every_configuration_of_an_autotuned_kernel_is_compiled_and_none_timed(workers: Workers) -> None:
    def source(size: int) -> str:
        tuned = planted.source(catalog.BY_NAME["relu"]).replace("@triton.jit", TUNED.replace("SIZE", str(size)))
        return tuned.replace(", BLOCK=1024", "")

    assert cubins(built(workers, source(512))) == 3 * 2  # of two kinds of sizes: multiples of 16, and others
    verdict = judged(workers, candidate(source(100)))
    assert (verdict.stage, "power of 2" in verdict.reason) == (2, True)


def test_the_same_source_is_compiled_once_also_after_a_restart_and_by_two_at_a_time(
    workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = planted.source(catalog.BY_NAME["square"], body=f"{unlike(1)} + 1.0")
    first = verdicts(judge(workers), [candidate(source, "square", label) for label in "ab"])
    later = judge(workers)
    monkeypatch.setattr(later.compilation, "_compile", None)
    again = verdicts(later, [candidate(source, "square", "c")])["c"]
    assert {verdict.stage for verdict in (*first.values(), again)} == {3}
    assert len(list(workers.folder.glob(f"compiled/{again.source_sha256}-*"))) == 1
    (took,) = {verdict.seconds["compile"] for verdict in (*first.values(), again)}
    assert took > 0.1


def test_a_compilation_that_a_lost_power_supply_has_torn_is_made_again(workers: Workers) -> None:
    source = planted.source(catalog.BY_NAME["square"], body=unlike(9))
    folder = built(workers, source, "square").parent
    (folder / OUTCOME).write_text("")
    assert built(workers, source, "square").parent == folder
    assert cubins(folder / CACHE) > 0


def test_another_task_with_other_arguments_is_another_compilation(workers: Workers) -> None:
    sigmoid = planted.source(catalog.BY_NAME["sigmoid"]).replace("tl.sigmoid(x)", "tl.exp(x)")
    two = ("relu", "hardtanh")  # fp32, and fp16, for which there is no tl.exp
    assert [judged(workers, candidate(sigmoid, task)).stage for task in two] == [3, 2]


def test_only_plain_files_are_taken_from_a_candidate_and_only_for_its_own_source(workers: Workers) -> None:
    plants = """
import os
os.makedirs("cache/mine", exist_ok=True)
open("cache/mine/kept", "w").write("x")
os.symlink("kept", "cache/mine/link")
os.mkfifo("cache/mine/pipe")
"""
    source = planted.source(catalog.BY_NAME["relu"])
    planted_in, other = built(workers, plants + source), built(workers, source)
    assert sorted(path.name for path in (planted_in / "mine").iterdir()) == ["kept"]
    assert not (other / "mine").exists()


@pytest.mark.parametrize(
    ("acts", "said"),
    [
        ("while True: pass", "no answer within 1 s"),
        ("import socket; socket.create_connection(('127.0.0.1', 9), 1)", "PermissionError"),
        ("import subprocess; subprocess.run(['cp', 'candidate.py', '/var/tmp/x'], check=True)", "CalledProcessError"),
        ("import os; os.rename('candidate.py', '/var/tmp/gpufleet-was-here')", "FileNotFoundError"),
        ("import os; os.abort()", "ended"),
    ],
)
def test_a_process_that_compiles_is_held_to_the_same_limits(workers: Workers, acts: str, said: str) -> None:
    limit_s = 1.0 if "within 1 s" in said else HANG_S
    verdict = judged(workers, candidate(acts), OFF, candidate_s=limit_s)
    assert (verdict.stage, said in verdict.reason) == (2, True), verdict


@pytest.mark.slow
def test_where_nothing_can_be_compiled_candidates_are_only_loaded_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "CAPABILITY", (1, 0))  # ptxas knows no such GPU
    with Workers(scratch(tmp_path), gpus=False) as workers:
        made = judge(workers)
        found = verdicts(made, [honest("square", lambda text: text.replace("x * x", "x"), "wrong")])["wrong"]
    assert made.compilation.words.startswith("loads candidates and compiles nothing (")
    assert "sm_10" in made.compilation.words
    assert found.stage == 3


@pytest.fixture
def crowd(monkeypatch: pytest.MonkeyPatch) -> list[Candidate]:
    """Five to be judged as with GPUs, of the sizes of a CPU."""
    shapes = {"tiny": (17,), "full": (9, 130), "second-shape": (3, 7, 61), "many-blocks": (5121,), "one": (1,)}
    shapes["four"] = (2, 3, 5, 7)
    fixed = {kind: tuple((size, size, 1) for size in shape) for kind, shape in shapes.items()}
    monkeypatch.setitem(tasks.SHAPES, "cuda", fixed)
    source = planted.source(catalog.BY_NAME["square"], body=unlike(2))
    return [candidate(f"{source}# {n}\n", "square", f"{n}") for n in range(5)]


def held_back(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, list[Path]]:
    """Lets no candidate run before an event, and lists what those that run then are given."""
    start, go, given = workers.start, threading.Event(), list[Path]()

    def watched(**named: Any) -> Process:
        if not named.get("compiles") and named.get("confined", True):
            assert go.wait(HANG_S)
            given.append(named["built"])
        return start(**named)

    monkeypatch.setattr(workers, "start", watched)
    return go, given


def test_with_gpus_candidates_are_compiled_ahead_of_those_that_run(
    workers: Workers, crowd: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    (go, given), compile_one, compiled = held_back(workers, monkeypatch), Compilation.compile, list[int]()

    def counted(*arguments: Any) -> Any:
        found = compile_one(*arguments)
        compiled.append(1)
        if len(compiled) == len(crowd) - 2:  # as many at once as there are cores and GPUs
            go.set()
        return found

    monkeypatch.setattr(Compilation, "compile", counted)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    found = verdicts(Judge(replace(LIMITS, workers=None), SEED, workers, gpus=1), crowd)
    assert [verdict.reason for verdict in found.values() if not verdict.passed] == []
    assert len(found) == len(crowd)
    assert [cubins(folder) for folder in given] == [1] * len(crowd)  # no size here is a multiple of 16


def test_eight_gpus_judge_eight_candidates_at_once(workers: Workers, monkeypatch: pytest.MonkeyPatch) -> None:
    together, used = threading.Barrier(8), list[int]()

    def judge_there(made: Judge, course: Course, gpu: int) -> None:
        together.wait(HANG_S)
        used.append(gpu)

    monkeypatch.setattr(Judge, "_begun", lambda made, candidate: Course(candidate, ""))
    monkeypatch.setattr(Judge, "_judge", judge_there)
    found: list[Verdict] = []
    Judge(replace(LIMITS, workers=None), SEED, workers, gpus=8).all(planted.candidates(16), found.append)
    assert sorted(used) == sorted([*range(8)] * 2)
    assert len(found) == 16


def test_what_is_compiled_and_waits_for_a_gpu_is_given_up_with_the_rest(
    workers: Workers, crowd: list[Candidate], monkeypatch: pytest.MonkeyPatch
) -> None:
    go, given = held_back(workers, monkeypatch)
    crowd = [replace(one, source=one.source + "# again\n") for one in crowd[:3]]
    before = len(list(workers.folder.glob("compiled/[0-9a-f]*")))

    def check() -> None:
        if len(list(workers.folder.glob("compiled/[0-9a-f]*"))) == before + len(crowd):
            go.set()
            raise KeyboardInterrupt

    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    with pytest.raises(KeyboardInterrupt):
        Judge(replace(LIMITS, workers=None), SEED, workers, gpus=1).all(crowd, print, check)
    assert len(given) == 1


def test_the_layouts_compiled_for_are_those_of_the_inputs_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(tasks.SHAPES, "cuda", tasks.SHAPES["cpu"])
    task = catalog.BY_NAME["maximum"]
    names = ("tiny", "random-0", *tasks.ADVERSARIAL[:-1], "timing")
    given = [tasks.case(task, SEED, name, "cuda").tensors for name in names]
    seen = {(tuple(t.shape), t.stride(), t.dtype) for tensors in given for t in tensors}
    layouts = [one for call in tasks.layouts(task, SEED) for one in call]
    assert {(tuple(one["shape"]), tuple(one["stride"]), getattr(torch, one["dtype"])) for one in layouts} == seen
