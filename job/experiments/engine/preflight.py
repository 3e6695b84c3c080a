"""Checks that this node is what was rented. The checks take some seconds before an attempt's first step, on each rank's
own GPU.

Even a slow, throttled or missing GPU costs its full price, and it may take hours until somebody notices it. A node that
fails a check is refused: the attempt ends, and the fleet starts another one. After some refusals the supervisor lets a
run go on with a warning (job/supervisor), because then the node is not the cause.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from gpufleet.job import between
from gpufleet.job.contract import environment
from gpufleet.job.contract.messages import Preflight
from gpufleet.job.contract.workdir import ACCEPT, PREFLIGHT
from gpufleet.job.experiments.engine.device import Device, NodeRefusedError, PeerRefusedError, bandwidth_gb_s
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.gpus import ask

# A GPU below these shares is refused. A good GPU reaches 60 to 90 % of both rates in the data sheet in a plain product
# or copy. A GPU with too low clocks, or without one of its memory stacks, is far below this. The shares are estimates
# of 2026-11. In long products, an L4 with its 72 W falls to its base clock, 795 of 2040 MHz. (A T4 with 70 W reaches 24
# of 65 TFLOP/s, although it is good; NVIDIA's forum, thread 264462.)
MATMUL_SHARE, BANDWIDTH_SHARE = 0.4, 0.4
POWER_LIMITED = {"NVIDIA L4": 0.2}  # replaces MATMUL_SHARE for these GPUs
# least rate of copies to pinned memory (PCIe 4.0 x8 has 16); below it, a checkpoint of 10 GB delays training by 7 s or
# more
TO_HOST_GB_S = 1.5

# The causes of throttling that are checked. hw_slowdown is not among them, because it is also set while clocks change
# (NVML reference, 2026-11), and they change during this check.
CLOCKS = "clocks_event_reasons.hw_power_brake_slowdown,clocks_event_reasons.hw_thermal_slowdown,clocks.sm,clocks.max.sm"
SMI_S = 20.0
LIMIT_S = 60.0  # the most seconds for one rank's measurements, which usually take only a few
BEST_OF = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The measurements of one rank's device. A value is None if it is unknown; then it is not judged."""

    gpus: int
    matmul_tflops: float
    memory_gb_s: float
    to_host_gb_s: float | None
    matmul_share: float | None = None  # share of the data sheet's figure
    matmul_least: float = MATMUL_SHARE  # share of the data sheet's figure below which this kind of GPU is refused
    memory_share: float | None = None
    clock_mhz: int | None = None  # the clock right after the products
    clock_max_mhz: int | None = None
    throttled: bool | None = None


def run(
    workdir: Path,
    device: Device,
    world: World,
    *,
    gpus: int | None,
    say: Callable[[str], None],
    hung: Callable[[str], object],
) -> None:
    """Measures once per attempt; every rank calls it. `gpus`: the number that the run config asks for; None for any
    number. If this rank's GPU has not answered within LIMIT_S, a thread calls `hung` with the reason. `hung` ends the
    process, because it cannot be stopped in another way.

    Writes preflight.json. Raises NodeRefusedError on every rank of a node if one of them is refused, and
    PeerRefusedError on other nodes, unless the supervisor has written accept.json.
    """
    if (workdir / PREFLIGHT).exists():  # the checks were already made, because this start is a restart on a lower rung
        return
    began = time.perf_counter()

    def give_up() -> None:
        problem = f"rank {world.rank}: no answer from {device.name} within {LIMIT_S:.0f} s: it hangs"
        with suppress(OSError):  # if the file cannot be written, the log still has the values
            Preflight(problems=(problem,)).write(workdir)
        hung(problem)

    own: Measured | None = None
    with _limited(give_up):
        try:
            own = measure(device)
            judged = judge(own, gpus=gpus)
        except RuntimeError as error:  # an error of CUDA, such as an uncorrectable memory error or a lost GPU
            judged = [f"{device.name} fails: {str(error).splitlines()[0]}"]
    by_rank = world.every([{} if own is None else asdict(own), judged])
    findings = [(rank, f"rank {rank}: {text}") for rank, (_, texts) in enumerate(by_rank) for text in texts]
    problems = [text for _, text in findings]
    own_problems = tuple(text for rank, text in findings if rank // world.ranks_per_node == world.node)
    found_gb_s: float | None = None
    if not problems and world.spans_nodes and device.is_cuda:
        assert world.mesh is not None
        with _limited(give_up):
            own_gb_s = between.gb_s(world.mesh.get_group("node"), device.torch, world.ranks_per_node, world.nodes)
            found_gb_s = max(world.every(own_gb_s))
        say(f"pre-flight: {found_gb_s:.1f} GB/s from a node to the others")
        problems += between.judge(found_gb_s, float(os.environ.get(environment.GBPS, 0)))
        own_problems = tuple(problems)
    if own is not None:
        say(
            f"pre-flight ({time.perf_counter() - began:.1f} s): {own.matmul_tflops:.1f} TFLOP/s, memory "
            f"{own.memory_gb_s:.0f} GB/s, to host {own.to_host_gb_s or 0:.1f} GB/s"
        )
    if world.first_here:
        Preflight(ranks=tuple(figures for figures, _ in by_rank), problems=own_problems, between_gb_s=found_gb_s).write(
            workdir
        )
    if not problems:
        return
    if world.agree((workdir / ACCEPT).exists()):
        say(f"warning: this node goes on, although others were refused for the same: {'; '.join(problems)}")
        return
    raise (NodeRefusedError if own_problems else PeerRefusedError)("; ".join(problems))


def measure(device: Device) -> Measured:
    """Measures the device. This takes some seconds on a GPU, and, with smaller sizes, some milliseconds on a CPU."""
    cuda = device.is_cuda
    matmul = _matmul_tflops(device, 8192 if cuda else 256)
    clock, clock_max, throttled = _clocks(device) if cuda else (None, None, None)
    memory = _copy_gb_s(device, 1 << 30 if cuda else 1 << 24)
    peak, bandwidth = device.peak_tflops, bandwidth_gb_s(device.name)
    return Measured(
        gpus=torch.cuda.device_count() if cuda else 0,
        matmul_tflops=round(matmul, 3),
        memory_gb_s=round(memory, 1),
        to_host_gb_s=round(_to_host_gb_s(device, 1 << 28), 2) if cuda else None,
        matmul_share=round(matmul / peak, 3) if peak else None,
        matmul_least=POWER_LIMITED.get(device.name, MATMUL_SHARE),
        memory_share=round(memory / bandwidth, 3) if bandwidth else None,
        clock_mhz=clock,
        clock_max_mhz=clock_max,
        throttled=throttled,
    )


def judge(probe: Measured, *, gpus: int | None) -> list[str]:
    """Reasons to refuse the node; empty if there are none."""
    problems = []
    if gpus is not None and probe.gpus < gpus:
        problems.append(f"{probe.gpus} of the {gpus} GPUs that the run config asks for (job.parameters.gpus)")
    if probe.matmul_share is not None and probe.matmul_share < probe.matmul_least:
        problems.append(
            f"matrix products at {probe.matmul_tflops:.1f} TFLOP/s, {probe.matmul_share:.0%} of the data sheet; at "
            f"least {probe.matmul_least:.0%} is expected"
        )
    if probe.memory_share is not None and probe.memory_share < BANDWIDTH_SHARE:
        problems.append(
            f"memory at {probe.memory_gb_s:.0f} GB/s, {probe.memory_share:.0%} of the data sheet; at least "
            f"{BANDWIDTH_SHARE:.0%} is expected"
        )
    if probe.to_host_gb_s is not None and probe.to_host_gb_s < TO_HOST_GB_S:
        problems.append(f"copies to the host at {probe.to_host_gb_s:.1f} GB/s, at least {TO_HOST_GB_S} is expected")
    if probe.throttled:
        problems.append(f"the hardware slows its clock down: {probe.clock_mhz} of {probe.clock_max_mhz} MHz")
    return problems


@contextmanager
def _limited(give_up: Callable[[], None]) -> Iterator[None]:
    """A context that calls `give_up` if it lasts longer than LIMIT_S."""
    watchdog = threading.Timer(LIMIT_S, give_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        yield
    finally:
        watchdog.cancel()


def parse_clocks(answer: Sequence[Sequence[str]]) -> tuple[int | None, int | None, bool | None]:
    """The present clock and the highest clock in MHz, and whether the hardware has slowed the GPU down, from
    nvidia-smi's answer; None if a value is missing.
    """
    words = answer[0] if answer else ()
    if len(words) != 4:
        return None, None, None
    slowed = {"Active": True, "Not Active": False}
    flags = [slowed.get(word) for word in words[:2]]
    now, most = (int(word) if word.isdigit() else None for word in words[2:])
    return now, most, True if True in flags else None if None in flags else False


def _clocks(device: Device) -> tuple[int | None, int | None, bool | None]:
    return parse_clocks(ask(CLOCKS, of=(device.torch.index or 0,), timeout_s=SMI_S))


def _seconds(device: Device, act: Callable[[], object], times: int) -> float:
    """Seconds of one `act`, the best of several rounds. The best round is used, because the first round warms the
    device up, and other processes may disturb a round. On a bad node, no round is good.
    """
    best = float("inf")
    for _ in range(BEST_OF):
        device.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            act()
        device.synchronize()
        best = min(best, (time.perf_counter() - began) / times)
    return best


def _matmul_tflops(device: Device, size: int) -> float:
    dtype = torch.bfloat16 if device.is_cuda else torch.float32
    a = torch.ones(size, size, dtype=dtype, device=device.torch)
    return 2 * size**3 / _seconds(device, lambda: a @ a, 10 if device.is_cuda else 2) / 1e12


def _copy_gb_s(device: Device, size: int) -> float:
    """GB/s of a copy within the device's memory, reads and writes together."""
    a = torch.zeros(size, dtype=torch.uint8, device=device.torch)
    b = torch.empty_like(a)
    return 2 * size / _seconds(device, lambda: b.copy_(a), 5) / 1e9


def _to_host_gb_s(device: Device, size: int) -> float:
    a = torch.zeros(size, dtype=torch.uint8, device=device.torch)
    host = torch.empty(size, dtype=torch.uint8, pin_memory=True)
    return size / _seconds(device, lambda: host.copy_(a, non_blocking=True), 3) / 1e9
