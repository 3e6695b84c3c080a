"""What the trainer makes of the device it finds."""

from __future__ import annotations

import ctypes
import resource
from functools import partial

import pytest
import torch
from torch import nn

from gpufleet.job.experiments.engine import device, step
from gpufleet.job.experiments.engine.device import (
    ALLOCATORS,
    Device,
    DeviceRefusedError,
    allocate_exactly,
    bandwidth_gb_s,
    choose,
    peak_tflops,
)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library is not glibc")
def test_on_a_cpu_the_memory_of_a_freed_tensor_is_there_for_the_next() -> None:
    found = []
    with device.settings(choose("cpu", bf16=False)):
        for _ in range(8):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
            torch.ones(10_000_000)  # 9,766 pages, more than glibc keeps by default when they are freed
            found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
    assert min(found) < 1000  # the first ones find no place that fits, as the heap happens to lie


def test_a_gpu_without_bf16_is_refused_when_bf16_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = type("P", (), {"name": "Tesla T4", "major": 7, "minor": 5, "total_memory": 16e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    with pytest.raises(DeviceRefusedError, match=r"Tesla T4 has no bf16 .*set precision"):
        choose("cuda", bf16=True)


@pytest.mark.parametrize(
    ("name", "peak", "bandwidth"),
    [
        ("NVIDIA A10G", 70, 600),
        ("NVIDIA H100 80GB HBM3", 989.5, 3350),
        ("NVIDIA H100 PCIe", 756, 2000),
        ("NVIDIA H100 NVL", None, None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None, None),
        ("NVIDIA A100-SXM4-80GB", 312, 2039),
        ("NVIDIA GH200 480GB", None, None),
        ("NVIDIA GeForce RTX 4090", None, None),
    ],
)
def test_each_board_has_its_own_data_sheet_and_an_unknown_one_none(
    name: str, peak: float | None, bandwidth: float | None
) -> None:
    assert (peak_tflops(name), bandwidth_gb_s(name)) == (peak, bandwidth)


@pytest.mark.parametrize(
    ("name", "found", "room"),
    [("NVIDIA H100 80GB HBM3", 85.5, 80), ("NVIDIA L4", 23.6, 23.6), ("NVIDIA GeForce RTX 4090", 25.4, 25.4)],
)
def test_a_batch_is_chosen_for_what_the_driver_reports_but_no_more_than_the_data_sheet(
    name: str, found: float, room: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    properties = type("P", (), {"name": name, "major": 9, "minor": 0, "total_memory": found * 1e9})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(device, "allocate_exactly", list)
    gpu = choose("cuda", bf16=True)
    assert [gpu.memory_gb, gpu.room_gb] == pytest.approx([found, room])


def test_this_torch_knows_how_its_memory_is_to_be_allocated() -> None:
    assert allocate_exactly() == list(ALLOCATORS)


def test_a_setting_that_this_torch_does_not_know_keeps_none_of_the_others_from_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def older(settings: str) -> None:
        if "pinned" in settings:  # as 2.11 does
            raise ValueError("Unrecognized key 'pinned_max_cached_size_mb' in Accelerator allocator config.")

    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", older)
    assert allocate_exactly() == ["expandable_segments:True"]


def test_no_number_of_shapes_over_all_phases_is_too_many_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + 1

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Block()])

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    shapes = iter(range(2, 100))
    for _ in range(3):  # phases
        with step.compiled(model := Model(), torch.device("cuda")):
            for rows in (next(shapes) for _ in range(4)):  # 12 + 4 windows, in training and evaluation
                assert model.blocks[0](torch.zeros(rows)).sum() == rows


def test_random_numbers_begin_on_the_cpu_and_on_this_ranks_gpu_where_they_are_told_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpus = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch.cuda, "default_generators", gpus)
    found = Device(torch=torch.device("cuda", 1), name="", count=2, memory_gb=24, driver=None, peak_tflops=None)
    found.seed(5)
    drawn = torch.rand(3), torch.rand(3, generator=gpus[1])
    torch.manual_seed(5)
    expected = torch.rand(3)
    assert torch.equal(drawn[0], expected)
    assert torch.equal(drawn[1], expected)
    assert not torch.equal(torch.rand(3, generator=gpus[0]), expected)
