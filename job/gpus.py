"""Reads this node's GPUs from the driver: model, load, memory, temperature and Xid errors.

nvidia-smi exists on every machine with a driver. Xid errors come from the driver's library NVML, because a container
may not read the kernel's log. This module needs no torch.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import itertools
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

MIB = 1024 * 1024
INTERVAL_S = 5
MEAN_OF = 60  # number of samples in the mean, which are five minutes
KILL_S = 5.0  # seconds that a killed nvidia-smi may take to end
QUERY = "index,utilization.gpu,memory.used,temperature.gpu"
# After these errors a GPU needs a reset or is broken: double-bit memory errors, a failed row remapping, a GPU that is
# off the bus, uncontained errors, a GSP that does not answer, a recovery that has failed (NVIDIA's Xid catalog,
# 2026-11). Most other errors are errors of the program: 13, 31, 43, 45, 94.
LOST = {48: "double-bit memory error", 64: "row remapping failed", 79: "fallen off the bus", 95: "uncontained error"}
LOST |= {119: "GSP does not answer", 120: "GSP error"}
XID_EVENT, WAIT_MS, TIMED_OUT = 0x8, 1000, 10  # nvml.h: nvmlEventTypeXidCriticalError; NVML_ERROR_TIMEOUT


@dataclass(frozen=True, kw_only=True, slots=True)
class Sample:
    """The state of the GPUs at one moment. A value is None if the driver does not report it."""

    # use in percent of the least busy GPU, because in a mean, seven busy GPUs would hide one that waits
    use: float | None
    busiest: float | None
    memory_gb: float | None  # memory used on the fullest GPU, in units of 1e9 bytes
    temperature_c: float | None  # temperature of the hottest GPU

    def figures(self) -> dict[str, float]:
        """The known values, by their keys in a line of metrics.jsonl."""
        figures = {"gpu_util": self.use, "gpu_mem_gb": self.memory_gb, "gpu_temp_c": self.temperature_c}
        return {name: value for name, value in figures.items() if value is not None}


def ask(query: str, *, of: Sequence[int] = (), timeout_s: float = 60.0) -> list[list[str]]:
    """nvidia-smi's answer to a query, a list for each GPU; empty if there is no working driver."""
    words = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"]
    words += ["-i", ",".join(map(str, of))] if of else []
    try:
        output = subprocess.run(words, capture_output=True, text=True, timeout=timeout_s, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return rows(output)


def rows(answer: str) -> list[list[str]]:
    """nvidia-smi's text, a list for each GPU."""
    return [[word.strip() for word in line.split(",")] for line in answer.splitlines()]


class Sampler:
    """Watches the node's first `gpus` GPUs with one nvidia-smi process and one thread that uses NVML. If the node has
    no GPUs, there are no values.
    """

    def __init__(
        self,
        *,
        gpus: int,
        clock: Callable[[], float] = time.time,
        nvml: Callable[[], Any] = lambda: ctypes.CDLL("libnvidia-ml.so.1"),
    ) -> None:
        self.now: Sample | None = None
        self.used_at = clock()  # the time at which a GPU was last busy, or its use was unknown
        self.xids = list[int]()
        self._told = 0  # Xid errors that were reported already
        self._gone: str | None = None  # how many GPUs still answer, if nvidia-smi has ended; empty if all do
        self._clock, self._count = clock, gpus
        self._recent: collections.deque[float] = collections.deque(maxlen=MEAN_OF)
        self._process: subprocess.Popen[str] | None = None
        self._ended = threading.Event()
        self._threads = list[threading.Thread]()
        if (smi := shutil.which("nvidia-smi")) is None:
            return
        words = [smi, f"--query-gpu={QUERY}", "--format=csv,noheader,nounits"]
        words += ["-i", ",".join(map(str, range(gpus))), "-l", str(INTERVAL_S)]
        self._process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        self._threads = [
            threading.Thread(target=self._read, name="gpus", daemon=True),
            threading.Thread(target=self._listen, args=(nvml,), name="xids", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def mean(self) -> float | None:
        """The mean use of the least busy GPU over the last five minutes; None in the first five minutes."""
        recent = list(self._recent)
        return sum(recent) / len(recent) if len(recent) == MEAN_OF else None

    def figures(self) -> dict[str, float]:
        """The values for the next line of metrics.jsonl. A new Xid error is included once, in the first line
        after it.
        """
        new, self._told = self.xids[self._told :], len(self.xids)
        figures = {} if self.now is None else self.now.figures()
        return {**figures, **({"gpu_xid": float(new[-1])} if new else {})}

    def lost(self) -> str:
        """A sentence about how a GPU of this node is broken; empty if none is."""
        if self._gone is None and self._process is not None and self._process.poll() is not None:
            count = len(ask("index", timeout_s=KILL_S))
            self._gone = f"{count} of {self._count} GPUs answer" if count < self._count else ""
        return next((f"Xid {xid}, {LOST[xid]}" for xid in self.xids if xid in LOST), self._gone or "")

    def close(self) -> None:
        """Ends nvidia-smi and the thread. If nvidia-smi waits for a GPU that is off the bus, it cannot be killed. The
        end of nvidia-smi is not waited for, because the node is billed meanwhile.
        """
        self._ended.set()
        if self._process is not None:
            self._process.kill()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(timeout=KILL_S)
                for thread in self._threads:
                    thread.join(timeout=KILL_S)
                assert self._process.stdout is not None
                self._process.stdout.close()

    def see(self, sample: Sample | None) -> None:
        """Processes one sample; `None` means that nothing can be measured any more."""
        self.now = sample
        if sample is None or sample.use is None:
            self._recent.clear()
        else:
            self._recent.append(sample.use)
        if sample is None or sample.busiest is None or sample.busiest > 0:
            self.used_at = self._clock()

    def _read(self) -> None:
        assert self._process is not None
        assert self._process.stdout is not None
        while lines := list(itertools.islice(self._process.stdout, self._count)):
            self.see(sampled(rows("".join(lines))))
        self.see(None)  # nvidia-smi has ended: its last sample is out of date

    def _listen(self, nvml: Callable[[], Any]) -> None:
        with contextlib.suppress(OSError, AttributeError):  # the library is missing, or does not support events
            for xid in _events(nvml(), self._ended):
                self.xids.append(xid)


def sampled(lines: Sequence[Sequence[str]]) -> Sample:
    """The sample from one round's lines: index, percent, MiB, degrees."""

    def column(at: int) -> list[float]:
        numbers = []
        for row in lines:
            with contextlib.suppress(ValueError, IndexError):
                numbers.append(float(row[at]))
        return numbers

    use, memory, degrees = column(1), column(2), column(3)
    return Sample(
        use=min(use, default=None),
        busiest=max(use, default=None),
        memory_gb=round(max(memory) * MIB / 1e9, 3) if memory else None,
        temperature_c=max(degrees, default=None),
    )


class _Event(ctypes.Structure):
    """nvml.h's nvmlEventData_t."""

    _fields_ = (
        ("device", ctypes.c_void_p),
        ("type", ctypes.c_ulonglong),
        ("data", ctypes.c_ulonglong),
        ("instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


def _events(nvml: Any, ended: threading.Event) -> Iterator[int]:
    """Yields Xid errors of all GPUs as they come, until `ended` is set."""
    count, device, events, event = ctypes.c_uint(), ctypes.c_void_p(), ctypes.c_void_p(), _Event()
    if nvml.nvmlInit_v2() or nvml.nvmlEventSetCreate(ctypes.byref(events)):
        return
    nvml.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        if not nvml.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(device)):
            nvml.nvmlDeviceRegisterEvents(device, ctypes.c_ulonglong(XID_EVENT), events)
    while not ended.is_set():
        status = nvml.nvmlEventSetWait_v2(events, ctypes.byref(event), ctypes.c_uint(WAIT_MS))
        if status == 0 and event.type == XID_EVENT:
            yield event.data
        elif status not in (0, TIMED_OUT):  # the answer for a lost GPU, which does not change any more
            ended.wait(WAIT_MS / 1000)
    nvml.nvmlShutdown()
