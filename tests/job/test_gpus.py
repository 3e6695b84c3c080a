"""GPUs as their driver tells of them: use, memory, heat, errors, and one that is lost."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import gpus
from gpufleet.job.gpus import MEAN_OF, Sample, Sampler
from tests.waiting import wait_for


def driver(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    """An nvidia-smi that is this script."""
    (folder / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
    (folder / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


class Nvml:
    """NVML of two GPUs that tells these errors, and then none."""

    def __init__(self, *xids: int) -> None:
        self.xids, self.registered = list(xids), 0

    def nvmlInit_v2(self) -> int:  # noqa: N802 - the library's names
        return 0

    nvmlShutdown = nvmlInit_v2  # noqa: N815

    def nvmlEventSetCreate(self, events: object) -> int:  # noqa: N802
        return 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: object, device: object) -> int:  # noqa: N802
        return 0

    def nvmlDeviceRegisterEvents(self, device: object, kinds: Any, events: object) -> int:  # noqa: N802
        self.registered += kinds.value == gpus.XID_EVENT
        return 0

    def nvmlEventSetWait_v2(self, events: object, event: Any, wait_ms: object) -> int:  # noqa: N802
        if not self.xids:
            time.sleep(0.01)
            return gpus.TIMED_OUT
        event._obj.type, event._obj.data = gpus.XID_EVENT, self.xids.pop(0)
        return 0


def test_the_least_busy_the_fullest_and_the_hottest_gpu_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = "0, 97, 20480, 61\\n1, 5, 1024, 84\\n2, [N/A], 512, 40\\n"
    driver(tmp_path, monkeypatch, f'[ "$4" = 0,1,2 ] && printf "{lines}"\nexec /bin/sleep 5000')
    sampler = Sampler(gpus=3, nvml=Nvml)
    wait_for("what nvidia-smi prints", lambda: sampler.now)
    assert sampler.now == Sample(use=5.0, busiest=97.0, memory_gb=21.475, temperature_c=84.0)
    assert sampler.figures() == {"gpu_util": 5.0, "gpu_mem_gb": 21.475, "gpu_temp_c": 84.0}
    sampler.close()
    assert sampler.now is None  # nvidia-smi is gone: its last word is not today's


def test_without_a_driver_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    sampler = Sampler(gpus=1)
    assert (sampler.now, sampler.mean(), sampler.figures(), sampler.lost()) == (None, None, {}, "")
    assert gpus.ask("name") == []
    sampler.close()


def test_use_is_a_mean_over_five_minutes_once_they_are_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    sampler = Sampler(gpus=1)
    for _ in range(MEAN_OF - 1):
        sampler.see(Sample(use=50.0, busiest=50.0, memory_gb=None, temperature_c=None))
    assert sampler.mean() is None
    sampler.see(Sample(use=110.0, busiest=110.0, memory_gb=None, temperature_c=None))
    assert sampler.mean() == pytest.approx(51.0)


@pytest.mark.parametrize(
    ("xids", "lost"), [((31, 43), ""), ((13, 79), "Xid 79, fallen off the bus"), ((48,), "Xid 48, double-bit")]
)
def test_an_error_of_the_hardware_is_a_lost_gpu_and_one_of_a_program_is_not(
    xids: tuple[int, ...], lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver(tmp_path, monkeypatch, "exec /bin/sleep 5000")
    nvml = Nvml(*xids)
    sampler = Sampler(gpus=2, nvml=lambda: nvml)
    wait_for("the errors that NVML tells", lambda: len(sampler.xids) == len(xids))
    assert nvml.registered == 2
    assert sampler.lost().startswith(lost)
    assert bool(sampler.lost()) is bool(lost)
    assert sampler.figures() == {"gpu_xid": float(xids[-1])}
    assert sampler.figures() == {}  # each is told once
    sampler.close()


@pytest.mark.parametrize(("answer", "lost"), [("0\\n1\\n", ""), ("0\\n", "1 of 2 GPUs answer")])
def test_a_gpu_that_answers_no_more_is_lost_though_no_error_was_told(
    answer: str, lost: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """nvidia-smi ends when a GPU falls off the bus. Ended by somebody else it says nothing of the GPUs."""
    driver(tmp_path, monkeypatch, f'[ "$1" = --query-gpu=index ] && printf "{answer}"')
    sampler = Sampler(gpus=2, nvml=Nvml)
    assert sampler._process is not None
    sampler._process.wait()
    assert sampler.lost() == lost
    sampler.close()


def test_an_nvidia_smi_that_cannot_be_killed_keeps_nobody_from_ending(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck:
        def kill(self) -> None: ...

        def wait(self, timeout: float | None = None) -> int:
            assert timeout is not None, "waits for ever"
            raise subprocess.TimeoutExpired("nvidia-smi", timeout)

    monkeypatch.setenv("PATH", "")
    sampler = Sampler(gpus=1)
    monkeypatch.setattr(sampler, "_process", Stuck())
    sampler.close()
