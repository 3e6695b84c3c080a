"""Every row of the table of growth rules: right growths pass in fp32 and fp64, and each wrong one fails where it must.

The wrong variants are written here, on purpose, and nowhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpufleet.job.experiments.engine.optimizer import groups
from gpufleet.job.experiments.growth.check import (
    Difference,
    GrowthCheckFailed,
    check_boundary,
    compare,
    expert_load,
    halves_difference,
)
from gpufleet.job.experiments.growth.growing import State, deepen, grow, upcycle, widen
from gpufleet.job.experiments.growth.model import Growth, build, decays, load
from gpufleet.job.experiments.models.blocks import Experts
from tests.job.growth_models import CONFIG, PROBE, dense, generator, moe, text

pytestmark = pytest.mark.xdist_group("growth")

DTYPES = [torch.float32, torch.float64]


def upcycled(dtype: torch.dtype, *, router_std: float = 0.02) -> tuple[Growth, Growth]:
    state = dense(dtype)
    return load(CONFIG, 0, state), load(
        CONFIG, 1, upcycle(state, experts=8, router_std=router_std, generator=generator())
    )


def grown(dtype: torch.dtype, change: Callable[[State, State], State], *, noise: float = 0.1) -> Difference:
    """The right growth into phase 3, then `change(old, new)`, then the comparison."""
    old = moe(dtype)
    wide = widen(old, noise=noise, generator=generator())
    new = deepen(wide, new_layers=2, router_std=0.02, generator=generator())
    return compare(load(CONFIG, 1, old), load(CONFIG, 2, change(old, new)), PROBE)


def scale_ffn_by_softmax_over_all(module: Growth, factor: float) -> None:
    """Softmax over all experts, then the top k without renormalising, times `factor`: the product's weights sum to 1,
    so a layer's output is scaled by what they should have summed to.
    """
    for block in module.blocks:
        ffn = block.ffn
        assert isinstance(ffn, Experts)
        share: list[Tensor] = []
        ffn.router.register_forward_hook(
            lambda _, __, logits, share=share: share.append(logits.softmax(-1).topk(2).values.sum(-1, keepdim=True))
        )
        ffn.register_forward_hook(
            lambda _, __, out, share=share: (out[0] * share.pop().view(*out[0].shape[:-1], 1) * factor, out[1])
        )


@pytest.mark.parametrize("dtype", DTYPES)
def test_upcycling_with_a_random_router_passes(dtype: torch.dtype) -> None:
    old, new = upcycled(dtype)
    difference = compare(old, new, PROBE)
    assert difference.passed
    assert difference.max_logit > 5  # a trained model: an untrained one would hide most mistakes
    assert min(expert_load(new, PROBE)[0]) == 8


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_before_top_2_without_renormalising_fails(dtype: torch.dtype) -> None:
    old, new = upcycled(dtype)
    scale_ffn_by_softmax_over_all(new, 1.0)
    assert compare(old, new, PROBE).verdict == "fail"


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_zero_router_with_rescaled_output_passes_the_logits_and_fails_the_load_check(dtype: torch.dtype) -> None:
    old, new = upcycled(dtype, router_std=0.0)
    scale_ffn_by_softmax_over_all(new, 8 / 2)
    assert compare(old, new, PROBE).passed
    with pytest.raises(GrowthCheckFailed, match="only 2 of 8 experts are used") as failure:
        check_boundary(CONFIG, 1, old, new, PROBE)
    assert failure.value.report.problems == ("only 2 of 8 experts are used in a layer",)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("noise", [0.01, pytest.param(0.1, marks=pytest.mark.slow), 1.0])
def test_width_and_zero_layers_pass_for_any_noise(dtype: torch.dtype, noise: float) -> None:
    difference = grown(dtype, lambda _, new: new, noise=noise)
    assert difference.passed
    assert difference.routings == 3 * 8 * 64  # every token of every old layer was compared


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_noise_passes_the_logits(dtype: torch.dtype) -> None:
    assert grown(dtype, lambda _, new: new, noise=0.0).passed


def parted_after(steps: int, noise: float) -> float:
    """Width alone (with new layers the control is not exactly 0), a fixed 1e-3, no warm-up."""
    config = replace(CONFIG, model=replace(CONFIG.model, new_layers=0, symmetry_noise=noise))
    module = load(config, 2, grow(config, 2, moe(torch.float32), generator()))
    optimizer = torch.optim.AdamW(groups(module, decays, config.optim.weight_decay), lr=1e-3, betas=(0.9, 0.95))
    for step in range(steps):
        batch = text(8, seed=5000 + step)
        out = module(batch[:, :-1], batch[:, 1:])
        (out.loss_sum / batch[:, 1:].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return halves_difference(module, PROBE)


def test_divergence_check_passes_with_noise_and_fails_without() -> None:
    assert parted_after(20, 0.1) >= 5e-3
    assert parted_after(5, 0.0) == 0.0


def tied_head_not_compensated(_: State, new: State) -> State:
    return new | {name: new[name] * 2 for name in ("norm.weight", "norm.bias")}


def half_written_into_the_tied_table(old: State, new: State) -> State:
    return tied_head_not_compensated(old, new) | {"embed.weight": new["embed.weight"] / 2}


def new_layers_copy_the_last(_: State, new: State) -> State:
    copies: State = {}
    for name, tensor in new.items():
        if name.startswith("blocks.2."):
            copies |= {name.replace("blocks.2.", f"blocks.{i}."): tensor for i in (3, 4)}
    return new | copies


def zero_padded_norms(_: State, new: State) -> State:
    """The stream's other half silenced instead of duplicated: the statistics change."""
    d = CONFIG.model.width
    return new | {"embed.weight": torch.cat([2 * new["embed.weight"][:, :d], 0 * new["embed.weight"][:, d:]], dim=1)}


def down_biases_left_in_new_layers(_: State, new: State) -> State:
    """Uneven ones: a constant would be taken out again by the next norm's mean."""
    uneven = torch.linspace(-0.1, 0.1, 2 * CONFIG.model.width).to(new["norm.bias"])
    return new | {name: new[name] + uneven for name in ("blocks.3.ffn.down.bias", "blocks.4.ffn.down.bias")}


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.float64])
@pytest.mark.parametrize(
    "mistake",
    [
        tied_head_not_compensated,
        half_written_into_the_tied_table,
        new_layers_copy_the_last,
        zero_padded_norms,
        down_biases_left_in_new_layers,
    ],
)
def test_a_wrong_growth_fails(dtype: torch.dtype, mistake: Callable[[State, State], State]) -> None:
    assert grown(dtype, mistake).verdict == "fail"


def noise_over_output_rows(std: float) -> Callable[[State, State], State]:
    """Antisymmetric over the two output halves, which does not cancel."""

    def change(_: State, new: State) -> State:
        changed, g = dict(new), generator(11)
        for name, tensor in new.items():
            if name.startswith(("blocks.0.", "blocks.1.", "blocks.2.")) and tensor.ndim > 1 and "weight" in name:
                if "router" in name:
                    continue
                half = [*tensor.shape[:-2], tensor.shape[-2] // 2, tensor.shape[-1]]
                n = torch.empty(half).normal_(0, std, generator=g).to(tensor)
                changed[name] = tensor + torch.cat([n, -n], dim=-2)
        return changed

    return change


def test_output_noise_of_1e_5_is_hidden_in_fp32_and_caught_in_fp64() -> None:
    assert grown(torch.float32, noise_over_output_rows(1e-5)).passed
    assert grown(torch.float64, noise_over_output_rows(1e-5)).verdict == "fail"


@pytest.mark.parametrize("dtype", DTYPES)
def test_output_noise_of_1e_2_fails(dtype: torch.dtype) -> None:
    assert grown(dtype, noise_over_output_rows(1e-2)).verdict == "fail"


def test_growth_is_pure_keeps_dtype_and_repeats() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        old = dense(dtype)
        kept = {name: tensor.clone() for name, tensor in old.items()}
        for phase, state in ((1, old), (2, moe(dtype))):
            first, again = (grow(CONFIG, phase, state, generator()) for _ in range(2))
            assert {t.dtype for t in first.values()} == {dtype}
            assert all(torch.equal(first[n], again[n]) for n in first)
            assert list(first) == list(build(CONFIG, phase, device="meta").state_dict())
            assert not {t.data_ptr() for t in first.values()} & {t.data_ptr() for t in state.values()}
        assert all(torch.equal(old[n], kept[n]) for n in old)


def test_noise_is_a_tenth_of_each_matrix_own_spread() -> None:
    old = moe(torch.float64)
    old["blocks.1.ffn.up.weight"][3] *= 10  # one expert's, among those stacked with it
    new = widen(old, noise=0.1, generator=generator())
    for name in ("blocks.1.attention.q.weight", "blocks.1.ffn.router.weight", "blocks.1.ffn.up.weight"):
        left, right = new[name].chunk(2, dim=-1)
        noise, spread = (left - right) / 2, old[name].std(dim=(-2, -1))
        torch.testing.assert_close(noise.std(dim=(-2, -1)), 0.1 * spread, rtol=0.15, atol=0)
    for name in ("blocks.1.attention.q.weight", "blocks.1.ffn.up.weight"):  # outputs alike would learn alike
        first, second = new[name].chunk(2, dim=-2)
        assert not torch.isclose(first, second).all()


def test_new_layers_draw_ordinary_weights_except_what_writes_to_the_stream() -> None:
    new = grow(CONFIG, 2, moe(torch.float32), generator())
    assert all(not new[f"blocks.{i}.{n}"].any() for i in (3, 4) for n in new_zero_names())
    for name in ("attention.q.weight", "ffn.router.weight", "ffn.up.weight"):
        assert new[f"blocks.4.{name}"].std().item() == pytest.approx(0.02, rel=0.1)
    assert not torch.equal(new["blocks.4.ffn.up.weight"][0], new["blocks.4.ffn.up.weight"][1])


def new_zero_names() -> list[str]:
    return [f"{part}.{kind}" for part in ("attention.o", "ffn.down") for kind in ("weight", "bias")]


def test_nothing_grows_into_the_first_phase() -> None:
    with pytest.raises(ValueError, match="phase 0 is not grown"):
        grow(CONFIG, 0, {}, generator())
