"""A node that is not what it was rented as is refused before it trains, with the reason; never for ever."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
import threading
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpufleet.job import atomic, between, gpus
from gpufleet.job.contract.codes import AttemptExit
from gpufleet.job.experiments.engine import preflight
from gpufleet.job.experiments.engine.device import Device, NodeRefusedError, PeerRefusedError, choose
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.preflight import Measured, judge, parse_clocks
from gpufleet.job.kind import from_json
from gpufleet.job.supervisor.machine import DriverGpu
from tests.job import rank_world, runs
from tests.job import train_world as world
from tests.job.supervisor_world import Bench, FakeTrainer
from tests.repository import ROOT
from tests.waiting import HANG_S

SOUND = Measured(
    gpus=8,
    matmul_tflops=690.0,
    memory_gb_s=2900.0,
    to_host_gb_s=25.0,
    matmul_share=0.7,
    memory_share=0.87,
    clock_mhz=1900,
    clock_max_mhz=1980,
    throttled=False,
)
CPU = choose("cpu", bf16=False)


def test_a_sound_node_is_not_refused() -> None:
    assert judge(SOUND, gpus=8) == []
    assert judge(SOUND, gpus=None) == []


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"gpus": 7}, "7 of the 8 GPUs that the run config asks for"),
        ({"matmul_tflops": 300.0, "matmul_share": 0.3}, "matrix products at 300.0 TFLOP/s, 30% of the data sheet"),
        ({"memory_gb_s": 700.0, "memory_share": 0.21}, "memory at 700 GB/s, 21% of the data sheet; at least 40%"),
        ({"to_host_gb_s": 0.8}, "copies to the host at 0.8 GB/s, at least 1.5"),
        ({"throttled": True, "clock_mhz": 345}, "the hardware slows its clock down: 345 of 1980 MHz"),
    ],
)
def test_each_fault_is_refused_with_its_figures(changed: dict[str, Any], words: str) -> None:
    (problem,) = judge(replace(SOUND, **changed), gpus=8)
    assert words in problem


def test_an_l4_at_its_base_clock_is_sound_and_one_that_lost_its_clocks_is_not() -> None:
    def measured(share: float) -> Measured:
        gpu = replace(CPU, name="NVIDIA L4", peak_tflops=121.0)
        return replace(preflight.measure(gpu), matmul_share=share, memory_share=0.8)

    assert judge(measured(0.35), gpus=None) == []
    (problem,) = judge(measured(0.1), gpus=None)
    assert "10% of the data sheet; at least 20%" in problem


def test_what_is_unknown_is_not_judged() -> None:
    unknown: dict[str, Any] = {"matmul_share": None, "memory_share": None, "to_host_gb_s": None, "throttled": None}
    assert judge(replace(SOUND, **unknown), gpus=None) == []


def test_a_cpu_is_measured_in_the_same_way() -> None:
    found = preflight.measure(CPU)
    assert found.matmul_tflops > 0
    assert found.memory_gb_s > 0
    assert (found.matmul_share, found.memory_share, found.to_host_gb_s) == (None, None, None)


def test_the_share_is_of_the_data_sheet_of_the_gpu_found() -> None:
    found = preflight.measure(replace(CPU, name="NVIDIA A10G", peak_tflops=70.0))
    assert found.matmul_share == pytest.approx(found.matmul_tflops / 70, abs=1e-3)
    assert found.memory_share == pytest.approx(found.memory_gb_s / 600, abs=1e-3)


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("Not Active, Not Active, 1695, 1710\n", (1695, 1710, False)),
        ("Not Active, Active, 345, 1710\n", (345, 1710, True)),
        ("[N/A], [N/A], 1695, [N/A]\n", (1695, None, None)),
        ("[N/A], Active, 345, 1710\n", (345, 1710, True)),
        ("", (None, None, None)),
    ],
)
def test_clocks_are_read_from_nvidia_smi(answer: str, expected: tuple[Any, ...]) -> None:
    assert parse_clocks(gpus.rows(answer)) == expected


@pytest.mark.parametrize(
    ("active", "throttled"), [("hw_thermal_slowdown", True), ("hw_power_brake_slowdown", True), ("hw_slowdown", False)]
)
def test_heat_and_the_power_brake_throttle_a_gpu_and_a_change_of_clocks_does_not(
    active: str, throttled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def smi(words: list[str], **_: Any) -> subprocess.CompletedProcess[str]:
        """Gives what was asked for, as if that one reason of them all were active."""
        asked = words[1].removeprefix("--query-gpu=").split(",")
        reasons = {True: "Active", False: "Not Active"}
        said = [reasons[name.endswith(f".{active}")] if ".hw_" in name else "1500" for name in asked]
        return subprocess.CompletedProcess(words, 0, stdout=", ".join(said))

    monkeypatch.setattr(shutil, "which", lambda name: name)
    monkeypatch.setattr(subprocess, "run", smi)
    assert preflight._clocks(CPU) == (1500, 1500, throttled)


HANGING = """
import sys, threading
from pathlib import Path
import torch
from gpufleet.job.experiments.engine import __main__ as trainer, preflight
from gpufleet.job.experiments.engine.device import Device
from gpufleet.job.experiments.engine.requests import Requests
preflight.LIMIT_S = 0.01
preflight.measure = lambda device: threading.Event().wait()
Device.is_cuda = property(lambda self: True)
torch.cuda.is_available = lambda: False
trainer.train(Path(sys.argv[1]), 0, Requests(Path(sys.argv[1])))
"""


def slow(monkeypatch: pytest.MonkeyPatch) -> list[Device]:
    """Every device is a slow GPU; the calls."""
    calls: list[Device] = []

    def measured(device: Device) -> Measured:
        calls.append(device)
        return replace(SOUND, matmul_share=0.1)

    monkeypatch.setattr(preflight, "measure", measured)
    return calls


def test_a_refused_node_trains_nothing_and_has_its_own_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    slow(monkeypatch)
    monkeypatch.setattr(Device, "is_cuda", property(lambda self: True))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    workdir = world.make(tmp_path)
    assert world.train(workdir) == 71
    record = atomic.read_object(workdir / "preflight.json")
    assert record is not None
    assert "rank 0: matrix products at 690.0 TFLOP/s, 10% of the data sheet" in record["problems"][0]
    assert not (workdir / "metrics.jsonl").exists()
    assert not (workdir / "fatal.json").exists()


def test_a_run_that_may_refuse_no_more_goes_on_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, said = slow(monkeypatch), list[str]()
    with pytest.raises(NodeRefusedError, match="10% of the data sheet"):
        preflight.run(tmp_path, CPU, World(), gpus=None, say=said.append, hung=said.append)
    (tmp_path / "preflight.json").unlink()
    (tmp_path / "accept.json").write_text("{}")
    preflight.run(tmp_path, CPU, World(), gpus=None, say=said.append, hung=said.append)
    assert "warning: this node goes on, although others were refused for the same" in said[-1]
    preflight.run(tmp_path, CPU, World(), gpus=None, say=said.append, hung=said.append)
    assert len(calls) == 2  # a restart within the attempt does not measure again


@pytest.mark.parametrize(("gb_s", "gbps", "refused"), [(5.0, 100.0, False), (4.9, 100.0, True), (4.9, 0.0, False)])
def test_nodes_that_meet_without_efa_are_refused_with_the_figures(gb_s: float, gbps: float, refused: bool) -> None:
    said = between.judge(gb_s, gbps)
    assert bool(said) is refused
    if said:
        assert said[0].startswith("EFA is not in use: 4.9 GB/s from a node to the others, 39% of its cards' 100 Gb/s")


def summed(number: int, size: int, port: int, folder: Path) -> None:
    """A rank's process on a node of its own; what it prints is in a file."""
    rank_world.environment(number, size, port, nodes=2)
    between.BYTES = 1 << 16
    with (folder / str(number)).open("w") as printed, contextlib.redirect_stdout(printed):
        between.main()


def test_what_nodes_send_each_other_is_measured_by_a_sum_and_the_first_rank_of_each_tells(tmp_path: Path) -> None:
    assert rank_world.launched(summed, 2, tmp_path) == [0, 0]
    printed = [path.read_text() for path in tmp_path.iterdir()]
    found = [json.loads(each.removeprefix(between.TOLD)) for each in printed]
    assert len(found) == 2
    assert all(each["gb_s"] > 0 and each["transport"] == "" for each in found)


def test_nccl_names_the_transport_of_each_channel_between_nodes() -> None:
    log = "x:1:2 [0] NCCL INFO Channel 00/0 : 1[1] -> 0[0] [send] via NET/AWS Libfabric/0/GDRDMA\n[0] via P2P/CUMEM\n"
    assert between.VIA.findall(log + "Ring 00 : 7 -> 8 [receive] via NET/Socket/0\n") == ["AWS Libfabric", "Socket"]


class SecondOfTwo(World):
    """A rank on the second node of two; the first one's GPU fails."""

    def every(self, value: Any) -> list[Any]:
        return [[{}, ["NVIDIA L4 fails: CUDA error"]], value]

    def agree(self, value: Any) -> Any:
        return False


def test_a_node_is_not_refused_for_another_one_s_gpu(tmp_path: Path) -> None:
    second = SecondOfTwo(rank=1, size=2, node=1, nodes=2)
    with pytest.raises(PeerRefusedError, match="rank 0: NVIDIA L4 fails"):
        preflight.run(tmp_path, CPU, second, gpus=None, say=print, hung=print)
    assert (atomic.read_object(tmp_path / "preflight.json") or {})["problems"] == []


def test_a_gpu_that_fails_is_refused_with_what_cuda_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(device: Device) -> Measured:
        raise torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered\nCompile with TORCH_USE_CUDA_DSA")

    monkeypatch.setattr(preflight, "measure", broken)
    with pytest.raises(NodeRefusedError, match="NVIDIA L4 fails"):
        preflight.run(tmp_path, replace(CPU, name="NVIDIA L4"), World(), gpus=None, say=print, hung=print)
    why = "rank 0: NVIDIA L4 fails: CUDA error: uncorrectable ECC error encountered"
    assert atomic.read_object(tmp_path / "preflight.json") == {"ranks": [{}], "problems": [why]}


def test_a_gpu_that_hangs_ends_the_pre_flight_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    ended = threading.Event()

    def hung(problem: str) -> None:
        said.append(problem)
        ended.set()

    def hanging(device: Device) -> Measured:
        assert ended.wait(HANG_S)
        return SOUND

    monkeypatch.setattr(preflight, "measure", hanging)
    monkeypatch.setattr(preflight, "LIMIT_S", 0.0)
    preflight.run(tmp_path, replace(CPU, name="NVIDIA L4"), World(rank=0), gpus=None, say=said.append, hung=hung)
    assert said[0] == "rank 0: no answer from NVIDIA L4 within 0 s: it hangs"


def test_a_gpu_that_hangs_ends_the_pre_flight_on_a_full_disk_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended = threading.Event()

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device")

    def hanging(device: Device) -> Measured:
        assert ended.wait(HANG_S)
        return SOUND

    monkeypatch.setattr(atomic, "write_bytes", full)
    monkeypatch.setattr(preflight, "measure", hanging)
    monkeypatch.setattr(preflight, "LIMIT_S", 0.0)
    with pytest.raises(OSError, match="No space left"):  # the process is gone before
        preflight.run(tmp_path, CPU, World(), gpus=None, say=print, hung=lambda problem: ended.set())


def test_a_gpu_that_has_answered_is_not_said_to_hang_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made, real = list[threading.Timer](), threading.Timer

    def timer(limit_s: float, act: Any) -> threading.Timer:
        made.append(real(limit_s, act))
        return made[-1]

    monkeypatch.setattr(threading, "Timer", timer)
    monkeypatch.setattr(preflight, "measure", lambda device: SOUND)
    preflight.run(tmp_path, CPU, World(), gpus=None, say=print, hung=print)
    assert [watchdog.finished.is_set() for watchdog in made] == [True]


def test_a_process_whose_gpu_hangs_is_refused_although_it_cannot_go_on(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    done = subprocess.run([sys.executable, "-c", HANGING, str(workdir)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 71, done.stderr
    record = atomic.read_object(workdir / "preflight.json")
    assert record is not None
    assert "it hangs" in record["problems"][0]
    assert "this node is refused: rank 0: no answer" in done.stdout


def refuse(trainer: FakeTrainer) -> int | None:
    """The first thing a trainer does."""
    if (trainer.workdir / "accept.json").exists():
        return None
    (trainer.workdir / "preflight.json").write_text(json.dumps({"problems": ["rank 0: slow"]}))
    return 71


def test_refused_nodes_end_their_attempt_and_the_third_trains(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    for instance in ("i-1", "i-2"):
        assert bench.attempt(instance, script={0: refuse}).run() == AttemptExit.REFUSED
        record = bench.json(f"attempts/{instance}.json")
        assert record["exit"]["reason"] == "node refused: rank 0: slow"
        assert (record["exit"]["code"], record["exit"]["notice"]) == (71, False)
        assert record["preflight"] == {"problems": ["rank 0: slow"]}
        assert bench.store.get_bytes("done.json") is None
        bench.clock.sleep(600)
    assert bench.attempt("i-3", script={0: refuse}).run() == 0
    assert bench.json("done.json")["reason"] == "finished"


def test_nodes_refused_before_one_that_trained_say_nothing_of_a_later_one(tmp_path: Path) -> None:
    bench = Bench(tmp_path)

    def crash(trainer: FakeTrainer) -> int:
        return 1

    ends = []
    for number, script in enumerate(({0: refuse}, {4: crash}, {0: refuse}, {8: crash}, {0: refuse})):
        bench.clock.sleep(600)
        ends.append(bench.attempt(f"i-{number}", script=script).run())
    assert ends[:4] == [71, 1, 71, 1]
    assert ends[4] == 71  # neither the second in a row nor the third ever


def test_a_node_that_lost_a_gpu_is_refused_before_anything_is_staged(tmp_path: Path) -> None:
    config = from_json("pretrain-d64", {"steps": 12})
    tree = runs.tree(runs.TINY, job={"experiment": "pretrain-d64", "parameters": asdict(config)})
    tree["rates"] = {"p5.48xlarge": {"on_demand": "55.04", "spot": {}, "gpus": 8}}
    bench, gpu = Bench(tmp_path), DriverGpu(name="NVIDIA H100 80GB HBM3", memory_gb=85.5, driver="580.1")
    bench.tree = json.loads(json.dumps({**tree, "inputs": bench.tree["inputs"]}))
    codes = []
    for number, found in enumerate((7, 0, 7, 8)):  # none: nvidia-smi did not answer
        attempt = bench.attempt(f"i-{number}")
        attempt.node = replace(attempt.node, type="p5.48xlarge")
        attempt.world = replace(attempt.world, gpus=partial(lambda count: (gpu,) * count, found), ranks=max(1, found))
        codes.append(attempt.run())
        bench.clock.sleep(600)
    assert codes == [71, 71, 0, 0]  # the third goes on with what it has, so the fourth finds the run over
    assert bench.json("attempts/i-0.json")["exit"]["reason"] == (
        "node refused: 7 working GPUs; this run needs 8 GPUs of p5.48xlarge"
    )
    assert not (tmp_path / "i-0" / "data").exists()
    assert len(bench.trainers) == 1
