"""Finds this node's GPUs, driver and versions, for its record, without torch, which takes seconds and memory
to import.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gpufleet.job.contract.attempt import Hardware
from gpufleet.job.gpus import MIB, ask

PACKAGES = ("torch", "numpy", "safetensors", "tokenizers", "boto3")
QUERY = "name,memory.total,driver_version"


@dataclass(frozen=True, kw_only=True, slots=True)
class DriverGpu:
    """One GPU, with its memory in units of 1e9 bytes, as the driver reports it."""

    name: str
    memory_gb: float
    driver: str


def gpus() -> tuple[DriverGpu, ...]:
    """All GPUs of this machine; empty if there is no working driver."""
    return parse(ask(QUERY))


def parse(answer: Iterable[Sequence[str]]) -> tuple[DriverGpu, ...]:
    """The GPUs in nvidia-smi's answer; other lines are skipped."""
    listed = []
    for words in answer:
        if len(words) == 3 and words[1].isdigit():
            listed.append(DriverGpu(name=words[0], memory_gb=int(words[1]) * MIB / 1e9, driver=words[2]))
    return tuple(listed)


def describe(devices: tuple[DriverGpu, ...]) -> Hardware:
    """The machine in the form of attempts/<instance>.json."""
    versions = {}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "missing"
    return Hardware(
        gpu=devices[0].name if devices else None,
        gpu_count=len(devices),
        gpu_memory_gb=round(min(gpu.memory_gb for gpu in devices), 2) if devices else None,
        driver=devices[0].driver if devices else None,
        cpus=os.cpu_count(),
        python=platform.python_version(),
        versions=versions,
    )
