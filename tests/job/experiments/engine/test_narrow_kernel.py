"""The bf16 AdamW's kernel: what the plain update does, in Triton's interpreter, and compiled for a GPU not there."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from gpufleet.job.experiments.engine import optimizer
from gpufleet.job.experiments.growth.spec import AdamW

triton = pytest.importorskip("triton", reason="Triton is for Linux alone")
narrow_kernel = importlib.import_module("gpufleet.job.experiments.engine.narrow_kernel")


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The GPU's update in Triton's interpreter."""
    with monkeypatch.context() as changed:
        changed.setattr(triton.knobs.runtime, "interpret", True)
        yield importlib.reload(narrow_kernel)
    importlib.reload(narrow_kernel)


def drawn(
    shapes: Sequence[tuple[int, ...]], seed: int = 0
) -> tuple[list[torch.Tensor], list[torch.Tensor], list[torch.Tensor], list[torch.Tensor]]:
    """Weights, first and second moments, gradients."""
    generator = torch.Generator().manual_seed(seed)
    found = [[torch.rand(shape, generator=generator).bfloat16() - 0.5 for shape in shapes] for _ in range(4)]
    weights, first, second, gradients = found
    return weights, first, [square.square() for square in second], gradients


STEP: dict[str, Any] = {"decay": 0.999, "rate": 3e-3, "root": 1.2, "betas": (0.9, 0.95), "eps": 1e-8}
SCALE = torch.tensor(0.3)


@pytest.mark.parametrize("shapes", [[(5000,), (3, 7), (2048,), (64, 65)], [(8, 16), (2, 8, 128), (4096,)]])
def test_the_update_is_the_plain_one(kernel: ModuleType, shapes: list[tuple[int, ...]]) -> None:
    counters = [optimizer._key(3, 4, index) for index in range(len(shapes))]
    plain, launched, before = (drawn(shapes) for _ in range(3))
    optimizer.update_plainly(plain[:3], plain[3], SCALE, counters, **STEP)
    kernel.Launch(*launched[:3])(launched[3], SCALE, counters, **STEP)
    for expected, found, old in zip(plain[:3], launched[:3], before[:3], strict=True):
        for a, b, c in zip(expected, found, old, strict=True):
            assert (a != c).float().mean() > 0.5
            # A fused product and sum may round to another fp32 number, which may draw the other neighbour.
            assert (a != b).float().mean() < 0.002


def test_the_update_leaves_alone_what_lies_beside_its_tensors(kernel: ModuleType) -> None:
    """Views that begin in the middle of 16 bytes, with numbers behind them that are others'."""
    whole = drawn([(43,)])
    before = [tensors[0].clone() for tensors in whole]
    parts = [[tensors[0][3:40]] for tensors in whole]
    kernel.Launch(*parts[:3])(parts[3], SCALE, [7], **STEP)
    for tensors, old in zip(whole, before, strict=True):
        assert torch.equal(tensors[0][:3], old[:3])
        assert torch.equal(tensors[0][40:], old[40:])
    assert not torch.equal(whole[0][0], before[0])


def test_the_update_leaves_infinities_and_nan_what_they_are(kernel: ModuleType) -> None:
    weights, averages, squares = ([torch.zeros(3, dtype=torch.bfloat16)] for _ in range(3))
    gradient = torch.tensor([float("inf"), float("nan"), 1.0]).bfloat16()
    with warnings.catch_warnings():  # numpy's, of the interpreter
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel.Launch(weights, averages, squares)([gradient], SCALE, [7], **STEP)
    assert averages[0][0].isinf()
    assert averages[0][1].isnan()
    assert weights[0][:2].isnan().all()
    assert weights[0][2].isfinite()


@pytest.mark.parametrize(("aligned", "load"), [(True, "ld.global.v4.b32"), (False, "ld.global.b16")])
def test_the_update_reads_eight_numbers_at_once_where_it_may(aligned: bool, load: str) -> None:
    kernel = narrow_kernel._update
    kinds = ["*i64", "*i64", "*fp32"] + 6 * ["fp32"] + 2 * ["constexpr"]
    source = triton.compiler.ASTSource(
        kernel, dict(zip(kernel.arg_names, kinds, strict=True)), {"ALIGNED": aligned, "TILE": narrow_kernel.TILE}
    )
    ptx = triton.compile(
        source, target=triton.backends.compiler.GPUTarget("cuda", 90, 32), options={"num_warps": 8}
    ).asm["ptx"]
    assert load in ptx


def test_steps_on_a_gpu_are_the_plain_ones(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, rates that change, moments carried on."""
    ends = []
    for updater in (optimizer._updater, lambda tensors: kernel.Launch(*tensors)):
        monkeypatch.setattr(optimizer, "_updater", updater)
        parameters = [nn.Parameter(tensor) for tensor in drawn([(64,), (3000,), (8, 100)])[0]]
        opt = optimizer.make(
            [{"params": parameters[:2], "weight_decay": 0.1}, {"params": parameters[2:], "weight_decay": 0.0}],
            AdamW(),
            seed=1,
        )
        for step in range(3):
            for parameter, gradient in zip(parameters, drawn([(64,), (3000,), (8, 100)], step)[3], strict=True):
                parameter.grad = gradient
            optimizer.clip(opt, 1.0 if step else 0.0)
            optimizer.set_lr(opt, 0.01 * (step + 1))
            opt.step()
        ends.append(torch.cat([parameter.detach().flatten().float() for parameter in parameters]))
    assert (ends[0] != ends[1]).float().mean() < 0.01
    assert torch.allclose(ends[0], ends[1], atol=0.01)
