"""AdamW in fp32 and in bf16, clipping, and that cutting a batch into micro-batches changes nothing but rounding."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from gpufleet.job.experiments.engine import optimizer
from gpufleet.job.experiments.engine.device import Device
from gpufleet.job.experiments.engine.optimizer import NarrowAdamW, stochastic_bf16
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.step import update
from gpufleet.job.experiments.growth.model import build
from gpufleet.job.experiments.growth.run import TinystoriesGrowth
from gpufleet.job.experiments.growth.spec import AdamW, GrowthConfig
from gpufleet.job.kind.common import Rung
from tests.job import train_world as world

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


def test_no_two_parameters_of_a_seed_are_rounded_by_the_same_bits() -> None:
    def stepped(seed: int) -> list[torch.Tensor]:
        """Two groups of the same weights, after a step that is a quarter of bf16's spacing."""
        weights = [nn.Parameter(torch.ones(256, dtype=torch.bfloat16)) for _ in range(2)]
        made = NarrowAdamW([{"params": [weight]} for weight in weights], betas=(0.9, 0.95), eps=1e-8, seed=seed)
        optimizer.set_lr(made, 1e-3)
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        made.step()
        return [weight.detach() for weight in weights]

    found = [*stepped(1), *stepped(2)]
    assert not any(torch.equal(a, b) for place, a in enumerate(found) for b in found[:place])


def test_clipping_scales_to_the_norm_and_gives_the_one_before() -> None:
    a, b = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4))
    a.grad, b.grad = torch.full((3,), 3.0), torch.full((4,), 4.0)
    before, opt = (27 + 64) ** 0.5, torch.optim.SGD([a, b])
    assert optimizer.clip(opt, 1.0).item() == pytest.approx(before)
    assert a.grad.tolist() == pytest.approx([3 / before] * 3, rel=1e-5)
    assert optimizer.clip(opt, 10.0).item() == pytest.approx(1.0, rel=1e-5)


def test_bf16_gradients_are_clipped_while_the_update_reads_them() -> None:
    """A quarter is exact in bf16: the same bits as from gradients that are scaled already. The next step is not."""

    def steps(given: Sequence[float], limit: float) -> torch.Tensor:
        weights = [nn.Parameter(torch.zeros(8, dtype=torch.bfloat16)), nn.Parameter(torch.ones(8).bfloat16())]
        made = NarrowAdamW([{"params": [weight]} for weight in weights], betas=(0.9, 0.95), eps=1e-8, seed=1)
        optimizer.set_lr(made, 0.1)
        for size in given:
            for weight in weights:
                weight.grad = torch.full_like(weight, size)
            assert optimizer.clip(made, limit).item() == pytest.approx(4 * size, rel=1e-5)
            assert all(
                torch.equal(weight.grad, torch.full_like(weight, size)) for weight in weights if weight.grad is not None
            )
            made.step()
        kept = [state[kind] for state in made.state.values() for kind in ("exp_avg", "exp_avg_sq")]
        return torch.cat([weight.detach() for weight in weights] + kept)

    limit = 4 + 1e-6
    assert torch.equal(steps([4.0, 1.0], limit), steps([1.0, 1.0], 0.0))
    assert not torch.equal(steps([4.0, 1.0], 0.0), steps([1.0, 1.0], 0.0))


def test_the_norm_of_bf16_gradients_is_summed_in_fp32() -> None:
    parameter = nn.Parameter(torch.zeros(100_000, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 0.01)
    expected = (100_000 * parameter.grad[0].item() ** 2) ** 0.5
    assert optimizer.clip(torch.optim.SGD([parameter]), 0.0).item() == pytest.approx(expected, rel=2e-4)  # in bf16 2e-3


def test_each_phase_of_a_growth_has_its_rate_and_warms_up_anew(tmp_path: Path) -> None:
    found = world.experiment(world.make(tmp_path, optim={"lr": [0.01, 0.004, 0.002], "warmup_after_growth": 2}))
    opt = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    rates = []
    for phase in found.phases:
        for step in range(phase.first, phase.last):
            rates.append(found.schedule(phase, opt, step))
            assert opt.param_groups[0]["lr"] == rates[-1]
    assert rates == [0.01] * 4 + [0.002, 0.004, 0.004, 0.004] + [0.001, 0.002, 0.002, 0.002]


def test_every_micro_batch_of_every_step_draws_from_a_seed_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    experiment, seeds = world.experiment(world.make(tmp_path)), list[int]()
    monkeypatch.setattr(Device, "seed", lambda device, seed: seeds.append(seed))
    module = build(experiment.session.config, 0)  # type: ignore[arg-type]
    opt = experiment.optimizer(experiment.phases[0], module)
    for step in (0, 1, 0):
        update(experiment, module, opt, experiment.batch(experiment.phases[0], step, Rung(micro=2)), step)
    assert seeds[:2] == seeds[4:]
    assert len(set(seeds)) == 4


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
        losses.append([*(r.loss.item() for r in results), experiment.evaluate(one, 1, module, rung)])
        norms.append([r.grad_norm.item() for r in results])
    for cut in (1, 2):
        assert losses[cut] == pytest.approx(losses[0], rel=1e-5)
        assert norms[cut] == pytest.approx(norms[0], rel=1e-4)


def test_what_is_a_mean_already_weighs_the_same_however_the_batch_is_cut(tmp_path: Path) -> None:
    """The load-balance term and the router's entropy; of one window four times, so that each piece has the whole's."""
    experiment = world.experiment(world.make(tmp_path, optim={"load_balance": 10.0}))
    assert isinstance(experiment, TinystoriesGrowth)
    phase, starts, found = experiment.phases[1], torch.zeros(4, dtype=torch.int64), []
    for micro in (4, 3, 1):
        module = build(experiment.config, phase.index)
        opt = experiment.optimizer(phase, module)
        found.append(update(experiment, module, opt, experiment.dataset.train.work(starts, World(), micro), 0))
    for cut in found[1:]:
        assert cut.grad_norm.item() == pytest.approx(found[0].grad_norm.item(), rel=1e-4)
        assert torch.equal(cut.aux["load"], found[0].aux["load"])
        torch.testing.assert_close(cut.aux["entropy"], found[0].aux["entropy"])


def test_the_load_balance_moves_the_weights_and_is_no_part_of_the_loss(tmp_path: Path) -> None:
    losses, routers = [], []
    for weight in (0.0, 1.0):
        experiment = world.experiment(world.make(tmp_path / str(weight), optim={"load_balance": weight, "clip": 0.0}))
        config, moe = experiment.session.config, experiment.phases[1]
        assert isinstance(config, GrowthConfig)
        module = build(config, 1)
        opt = torch.optim.SGD(module.parameters(), lr=1.0)
        result = update(experiment, module, opt, experiment.batch(moe, 0, Rung(micro=4)), 0)
        losses.append(result.loss.item())
        routers.append(module.state_dict()["blocks.0.ffn.router.weight"])
    assert losses[0] == losses[1]
    assert (routers[0] - routers[1]).abs().max() > 1e-3
