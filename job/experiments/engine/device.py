"""Chooses, checks and describes the device on which a run trains. Only this module asks the hardware."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import platform
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

# Dense bf16 TFLOP/s, memory GB/s and GB of memory, by torch's exact name of the board, because boards with the same
# chip differ. If a board is not listed, its MFU is not shown. Sources: NVIDIA's data sheets, 2026-11; for the A10G, AWS
# (the A10 has 125 TFLOP/s); for the B200, the table of HGX.
DATA_SHEETS: dict[str, tuple[float, float, float]] = {
    "NVIDIA A10G": (70, 600, 24),
    "NVIDIA L4": (121, 300, 24),
    "NVIDIA L40S": (362, 864, 48),
    "NVIDIA A100-SXM4-40GB": (312, 1555, 40),
    "NVIDIA A100-PCIE-40GB": (312, 1555, 40),
    "NVIDIA A100-SXM4-80GB": (312, 2039, 80),
    "NVIDIA A100 80GB PCIe": (312, 1935, 80),
    "NVIDIA H100 80GB HBM3": (989.5, 3350, 80),  # SXM
    "NVIDIA H100 PCIe": (756, 2000, 80),
    "NVIDIA H200": (989.5, 4800, 141),
    "NVIDIA B200": (2250, 7700, 180),
    "NVIDIA B300": (2250, 8000, 269),
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": (480, 1597, 96),
    "NVIDIA RTX PRO 4500 Blackwell Server Edition": (203, 800, 32),
}
ALLOCATORS = ("expandable_segments:True", "pinned_max_cached_size_mb:1,pinned_max_round_threshold_mb:1")
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # glibc's malloc.h


class DeviceRefusedError(ValueError):
    """The device cannot do what the run config asks for, on any node of its kind."""


class NodeRefusedError(Exception):
    """This node is not what was rented, or is not worth its price."""


class PeerRefusedError(Exception):
    """Another node of the run is refused, which also ends this one's start."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The device that was found. Memory is in GB (1e9 bytes). `peak_tflops` None means unknown, so there is no MFU."""

    torch: torch.device
    name: str
    count: int
    memory_gb: float
    driver: str | None
    peak_tflops: float | None

    @property
    def is_cuda(self) -> bool:
        return self.torch.type == "cuda"

    @property
    def room_gb(self) -> float:
        """The GB of memory with which a micro-batch is chosen. It is the memory in the data sheet, as in the bill. For
        some boards, drivers report up to 7 % more, which is not used, so that the node splits a batch as the bill does.
        """
        return min(self.memory_gb, DATA_SHEETS[self.name][2] if self.name in DATA_SHEETS else self.memory_gb)

    def seed(self, seed: int) -> None:
        """Seeds a model's random numbers on the CPU and on this device. torch.manual_seed is not used, because it seeds
        all kinds of devices, which takes 0.4 ms in each step.
        """
        torch.default_generator.manual_seed(seed)
        if self.is_cuda:
            torch.cuda.default_generators[self.torch.index].manual_seed(seed)

    def synchronize(self) -> None:
        """Waits for all queued work."""
        if self.is_cuda:
            torch.cuda.synchronize()

    def tidy(self) -> None:
        """Frees the last phase's memory, including objects in reference cycles, and resets the peak."""
        if self.is_cuda:
            gc.collect()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def used_gb(self) -> float:
        """The peak of memory in GB since `tidy`, by torch's allocator; on a CPU, the peak of the process."""
        if self.is_cuda:
            return torch.cuda.max_memory_allocated() / 1e9
        unit = 1 if platform.system() == "Darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9

    def banner(self) -> str:
        """One line: CUDA or not, GPU name and count, memory, driver, torch, peak."""
        peak = "unknown, no MFU" if self.peak_tflops is None else f"{self.peak_tflops:g} TFLOP/s bf16 dense"
        chip = f"{self.count} x {self.name}" if self.is_cuda else f"{self.name}, {torch.get_num_threads()} threads"
        driver = f" | driver {self.driver}" if self.driver else ""
        return (
            f"CUDA {'available' if torch.cuda.is_available() else 'not available'} | {chip} | {self.memory_gb:.1f} GB"
            f"{driver} | torch {torch.__version__} | peak {peak}"
        )


def choose(wanted: str, *, bf16: bool, local_rank: int = 0) -> Device:
    """This rank's device, of the kind in the run config. The device is never silently replaced by a CPU or an emulated
    bf16. Raises DeviceRefusedError, and NodeRefusedError if CUDA does not start, which can happen although nvidia-smi
    lists GPUs.
    """
    if wanted == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9
        name = platform.machine()
        return Device(torch=torch.device("cpu"), name=name, count=0, memory_gb=memory, driver=None, peak_tflops=None)
    require_cuda()
    properties = torch.cuda.get_device_properties(local_rank)
    if bf16 and properties.major < 8:
        raise DeviceRefusedError(
            f"{properties.name} has no bf16 (compute capability {properties.major}.{properties.minor}, 8.0 is needed): "
            "choose another instance type, or set precision.compute and precision.phase3_state to fp32"
        )
    allocate_exactly()
    return Device(
        torch=torch.device("cuda", local_rank),
        name=properties.name,
        count=torch.cuda.device_count(),
        memory_gb=properties.total_memory / 1e9,
        driver=_driver(),
        peak_tflops=peak_tflops(properties.name),
    )


def require_cuda() -> None:
    """Raises NodeRefusedError if there is no CUDA device."""
    if not torch.cuda.is_available():
        raise NodeRefusedError(
            "the run config says device: cuda, but there is no CUDA device: check the instance type and the driver, or "
            "set job.parameters.device: cpu"
        )


def allocate_exactly() -> list[str]:
    """Lets torch use growing segments of GPU memory, and pinned host memory of the exact sizes, freed at once. Returns
    the settings that the installed torch supports (2.13: both; 2.11: the first). Segments of fixed sizes leave gaps.
    With them, phase 3, which needs 20.6 GB, reserved 23.1 of the 23.7 GB of an A10G, and all weights of an 8 B decoder
    on 8 GPUs, which need 72.0 GB, reserved 81.7. With growing segments, these were 21.0 and 76.7 GB (torch's own
    allocator, 2026-11-22). torch rounds each pinned tensor up to a power of two and keeps it for ever: the checkpoint
    of phase 3, of 12.9 GB, would take 20 of the 32 GB of a g5.2xlarge, in addition to 7 for phase 2.
    """
    known = []
    for settings in ALLOCATORS:
        with contextlib.suppress(AttributeError, RuntimeError, ValueError):
            torch._C._accelerator_setAllocatorSettings(settings)
            known.append(settings)
    return known


def peak_tflops(name: str) -> float | None:
    """The peak in dense bf16; None for a board that is not listed by this exact name."""
    return DATA_SHEETS[name][0] if name in DATA_SHEETS else None


def bandwidth_gb_s(name: str) -> float | None:
    """GB/s of the GPU's own memory; None if no data sheet is known."""
    return DATA_SHEETS[name][1] if name in DATA_SHEETS else None


def determinism(device: Device) -> dict[str, Any]:
    """The facts that must be equal for a resumed run to continue bit for bit."""
    return {
        "torch": torch.__version__,
        "device": device.name,
        "threads": torch.get_num_threads(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "flags": {
            "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
            "cudnn_benchmark": torch.backends.cudnn.benchmark,
            "matmul_precision": torch.get_float32_matmul_precision(),
        },
    }


@contextlib.contextmanager
def settings(device: Device) -> Iterator[None]:
    """Sets a run's flags: deterministic algorithms on a CPU, where resume is bit-exact, and keeping freed memory."""
    if not device.is_cuda:
        _keep_freed_memory()
    memory: Any = torch.utils.deterministic
    before = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(not device.is_cuda)
    # off, because filling takes time, and is not needed to find mistakes, since every value is written
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        memory.fill_uninitialized_memory = before[1]


def _keep_freed_memory() -> None:
    """Keeps freed memory in the process for the next step. glibc returns large tensors to the kernel, which later
    provides new pages of zeros, with a page fault for each. This takes 0.2 of the 2.2 CPU-seconds of a joint step of
    two-tower's twenty members (torch 2.13.0, glibc 2.36, 2026-11-22). With another C library the function does nothing.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_MAX, 0)  # no tensor gets a mapping of its own, which would be unmapped with the tensor
        mallopt(M_TRIM_THRESHOLD, -1)  # the heap never shrinks


def _driver() -> str | None:
    """The driver's version from the kernel module, without starting CUDA."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    words = text.splitlines()[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), None)
