"""AdamW in fp32 and in bf16, clipping, and that cutting a batch into micro-batches changes nothing but rounding."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType

import pytest
import torch
import train_world as world
import triton
from torch import nn
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from job.config import AdamW, GrowthConfig
from job.models.growth import build
from job.sizing import Rung
from job.train import narrow_kernel, optimizer
from job.train.optimizer import NarrowAdamW, stochastic_bf16
from job.train.step import update

CONFIG = AdamW(weight_decay=0.1)


def groups(*parameters: nn.Parameter) -> list[dict[str, object]]:
    return [{"params": list(parameters), "weight_decay": CONFIG.weight_decay}]


def bits(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 1 << 16, (count,), generator=torch.Generator().manual_seed(seed))


def test_a_number_that_bf16_holds_is_never_moved() -> None:
    x = torch.tensor([1.0, -0.5, 3.0e38, 0.0, 1e-40]).bfloat16().float()
    for seed in range(20):
        assert torch.equal(stochastic_bf16(x, bits(5, seed)).float(), x)


def test_rounding_is_right_on_average() -> None:
    x = torch.full((100_000,), 1.0 + 0.3 * 2**-7)  # 0.3 of the way to bf16's next number
    rounded = stochastic_bf16(x, bits(x.numel())).float()
    assert set(rounded.tolist()) == {1.0, 1.0 + 2**-7}
    assert rounded.mean().item() == pytest.approx(x[0].item(), abs=1e-4)


def test_infinities_and_nan_stay_what_they_are() -> None:
    x = torch.tensor([float("inf"), float("-inf"), float("nan")])
    rounded = stochastic_bf16(x, torch.full((3,), 0xFFFF))
    assert rounded[:2].tolist() == [float("inf"), float("-inf")]
    assert rounded[2].isnan()


def test_steps_far_below_bf16s_spacing_are_not_lost() -> None:
    parameter = nn.Parameter(torch.ones(20_000, dtype=torch.bfloat16))
    opt = optimizer.make([{"params": [parameter], "weight_decay": 0.0}], CONFIG, seed=1)
    optimizer.set_lr(opt, 1e-5)  # the spacing at 1 is 7.8e-3
    for _ in range(100):
        parameter.grad = torch.ones_like(parameter)
        opt.step()
    assert parameter.float().mean().item() == pytest.approx(1 - 100 * 1e-5, abs=2e-4)
    nearest = torch.ones((), dtype=torch.bfloat16)
    for _ in range(100):
        nearest -= 1e-5
    assert nearest == 1.0


def test_the_bf16_optimizer_follows_torchs_fp32_one() -> None:
    generator = torch.Generator().manual_seed(3)
    start = torch.randn(64, 64, generator=generator) * 0.1
    wide, narrow = nn.Parameter(start.bfloat16().float()), nn.Parameter(start.bfloat16())
    two = [optimizer.make(groups(p), CONFIG, seed=1) for p in (wide, narrow)]
    for _ in range(50):
        gradient = (torch.randn(64, 64, generator=generator) + 0.5).bfloat16()
        for opt, parameter in zip(two, (wide, narrow), strict=True):
            parameter.grad = gradient.to(parameter.dtype)
            optimizer.set_lr(opt, 1e-3)
            opt.step()
    moved = wide - start.bfloat16().float()
    assert (narrow.float() - wide).abs().mean() < 0.05 * moved.abs().mean()


def test_one_bf16_step_is_torchs_from_the_same_state_but_for_the_last_bit() -> None:
    """Weights and moments; with an eps that counts, so that it must stand where torch has it."""
    generator = torch.Generator().manual_seed(5)
    numbers = [torch.rand(4000, generator=generator).bfloat16() - 0.5 for _ in range(4)]
    numbers[3] = numbers[3].square()  # exp_avg_sq
    config = AdamW(weight_decay=0.1, eps=1e-2)
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        parameter, gradient, *moments = (number.to(dtype) for number in numbers)
        parameter = nn.Parameter(parameter)
        opt = optimizer.make(groups(parameter), config, seed=1)
        for kind, moment in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
            opt.state[parameter][kind].copy_(moment)
        optimizer.set_step(opt, 3)
        optimizer.set_lr(opt, 0.05)
        parameter.grad = gradient
        opt.step()
        found.append([parameter.detach(), opt.state[parameter]["exp_avg"], opt.state[parameter]["exp_avg_sq"]])
    for wide, narrow in zip(*found, strict=True):
        spacing = torch.exp2(wide.abs().log2().floor() - 7)  # of bf16's numbers there
        assert ((narrow.float() - wide).abs() <= 1.001 * spacing).all()


def test_fp32_weights_get_torchs_fused_adamw_and_bf16_ones_ours() -> None:
    fused = optimizer.make(groups(nn.Parameter(torch.ones(2))), CONFIG, seed=1)
    assert isinstance(fused, torch.optim.AdamW)
    assert fused.defaults["fused"]
    narrow = optimizer.make(groups(nn.Parameter(torch.ones(2, dtype=torch.bfloat16))), CONFIG, seed=1)
    assert isinstance(narrow, NarrowAdamW)
    assert {t.dtype for state in narrow.state.values() for k, t in state.items() if k != "step"} == {torch.bfloat16}


def test_the_bf16_optimizer_draws_the_same_bits_at_the_same_step_and_others_at_the_next() -> None:
    def stepped(at: int) -> torch.Tensor:
        parameter = nn.Parameter(torch.ones(1000, dtype=torch.bfloat16))
        opt = optimizer.make([{"params": [parameter], "weight_decay": 0.0}], CONFIG, seed=1)
        optimizer.set_step(opt, at)
        optimizer.set_lr(opt, 1e-3)
        parameter.grad = torch.zeros_like(parameter)
        opt.param_groups[0]["weight_decay"] = 1.0
        opt.step()
        return parameter.detach()

    assert torch.equal(stepped(5), stepped(5))
    assert not torch.equal(stepped(5), stepped(6))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The GPU's update in Triton's interpreter."""
    with monkeypatch.context() as changed:
        changed.setattr(triton.knobs.runtime, "interpret", True)
        yield importlib.reload(narrow_kernel)
    importlib.reload(narrow_kernel)


def drawn(shapes: Sequence[tuple[int, ...]], seed: int = 0) -> tuple[list[torch.Tensor], ...]:
    """Weights, first and second moments, gradients."""
    generator = torch.Generator().manual_seed(seed)
    found = [[torch.rand(shape, generator=generator).bfloat16() - 0.5 for shape in shapes] for _ in range(4)]
    found[2] = [square.square() for square in found[2]]
    return tuple(found)


STEP = {"decay": 0.999, "rate": 3e-3, "root": 1.2, "betas": (0.9, 0.95), "eps": 1e-8}


@pytest.mark.parametrize("shapes", [[(5000,), (3, 7), (2048,), (64, 65)], [(8, 16), (2, 8, 128), (4096,)]])
def test_the_gpus_update_is_the_plain_one(kernel: ModuleType, shapes: list[tuple[int, ...]]) -> None:
    counters = [optimizer._key(3, 4, index) for index in range(len(shapes))]
    plain, launched, before = (drawn(shapes) for _ in range(3))
    optimizer.update_plainly(plain[:3], plain[3], counters, **STEP)
    kernel.Launch(*launched[:3])(launched[3], counters, **STEP)
    for expected, found, old in zip(plain[:3], launched[:3], before[:3], strict=True):
        for a, b, c in zip(expected, found, old, strict=True):
            assert (a != c).float().mean() > 0.5
            # A fused product and sum may round to another fp32 number, which may draw the other neighbour.
            assert (a != b).float().mean() < 0.002


def test_the_gpus_update_leaves_alone_what_lies_beside_its_tensors(kernel: ModuleType) -> None:
    """Views that begin in the middle of 16 bytes, with numbers behind them that are others'."""
    whole = drawn([(43,)])
    before = [tensors[0].clone() for tensors in whole]
    parts = [[tensors[0][3:40]] for tensors in whole]
    kernel.Launch(*parts[:3])(parts[3], [7], **STEP)
    for tensors, old in zip(whole, before, strict=True):
        assert torch.equal(tensors[0][:3], old[:3])
        assert torch.equal(tensors[0][40:], old[40:])
    assert not torch.equal(whole[0][0], before[0])


def test_the_gpus_update_leaves_infinities_and_nan_what_they_are(kernel: ModuleType) -> None:
    weights, averages, squares = ([torch.zeros(3, dtype=torch.bfloat16)] for _ in range(3))
    gradient = torch.tensor([float("inf"), float("nan"), 1.0]).bfloat16()
    with warnings.catch_warnings():  # numpy's, of the interpreter
        warnings.simplefilter("ignore", RuntimeWarning)
        kernel.Launch(weights, averages, squares)([gradient], [7], **STEP)
    assert averages[0][0].isinf()
    assert averages[0][1].isnan()
    assert weights[0][:2].isnan().all()
    assert weights[0][2].isfinite()


@pytest.mark.parametrize(("aligned", "load"), [(True, "ld.global.v4.b32"), (False, "ld.global.b16")])
def test_the_gpus_update_reads_eight_numbers_at_once_where_it_may(aligned: bool, load: str) -> None:
    kernel = narrow_kernel._update
    kinds = ["*i64", "*i64"] + 6 * ["fp32"] + 2 * ["constexpr"]
    source = ASTSource(
        kernel, dict(zip(kernel.arg_names, kinds, strict=True)), {"ALIGNED": aligned, "TILE": narrow_kernel.TILE}
    )
    ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8}).asm["ptx"]
    assert load in ptx


def test_steps_on_a_gpu_are_the_plain_ones(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two groups, rates that change, moments carried on."""
    ends = []
    for updater in (optimizer._updater, lambda tensors: kernel.Launch(*tensors)):
        monkeypatch.setattr(optimizer, "_updater", updater)
        parameters = [nn.Parameter(tensor) for tensor in drawn([(64,), (3000,), (8, 100)])[0]]
        opt = optimizer.make(
            [*groups(*parameters[:2]), {"params": parameters[2:], "weight_decay": 0.0}], CONFIG, seed=1
        )
        for step in range(3):
            for parameter, gradient in zip(parameters, drawn([(64,), (3000,), (8, 100)], step)[3], strict=True):
                parameter.grad = gradient
            optimizer.set_lr(opt, 0.01 * (step + 1))
            opt.step()
        ends.append(torch.cat([parameter.detach().flatten().float() for parameter in parameters]))
    assert (ends[0] != ends[1]).float().mean() < 0.01
    assert torch.allclose(ends[0], ends[1], atol=0.01)


def test_clipping_scales_to_the_norm_and_gives_the_one_before() -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    a.grad, b.grad = torch.full((3,), 3.0), torch.full((4,), 4.0)
    before = (27 + 64) ** 0.5
    assert optimizer.clip([a, b], 1.0).item() == pytest.approx(before)
    assert a.grad.tolist() == pytest.approx([3 / before] * 3, rel=1e-5)
    assert optimizer.clip([a, b], 10.0).item() == pytest.approx(1.0, rel=1e-5)


def test_the_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    expected = (100_000 * parameter.grad[0].item() ** 2) ** 0.5
    assert optimizer.clip([parameter], 0.0).item() == pytest.approx(expected, rel=2e-4)  # in bf16 2e-3


@pytest.mark.parametrize("phase", [0, 1])
def test_cutting_the_batch_changes_only_rounding(phase: int, tmp_path: Path) -> None:
    experiment = world.experiment(world.make(tmp_path, optim={"lr": [1e-2, 1e-2, 1e-2], "load_balance": 0.0}))
    config, one = experiment.session.config, experiment.phases[phase]
    assert isinstance(config, GrowthConfig)
    losses, norms = [], []
    for rung in (Rung(micro=4), Rung(micro=3), Rung(micro=1)):
        module = build(config, phase)
        opt = experiment.optimizer(one, module)
        optimizer.set_lr(opt, 1e-2)
        results = [update(experiment, module, opt, experiment.batch(one, s, rung), s) for s in range(3)]
        losses.append([r.loss.item() for r in results] + [experiment.evaluate(one, module, rung)])
        norms.append([r.grad_norm.item() for r in results])
    for cut in (1, 2):
        assert losses[cut] == pytest.approx(losses[0], rel=1e-5)
        assert norms[cut] == pytest.approx(norms[0], rel=1e-4)
