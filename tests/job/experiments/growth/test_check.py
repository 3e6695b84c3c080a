"""The boundary report: what it holds, and every way in which it stops a run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from gpufleet.job.experiments.growth import check
from gpufleet.job.experiments.growth.check import (
    ExpertChoice,
    GrowthCheckFailed,
    cast_difference,
    check_boundary,
    compare,
    fit_capacity,
    routed,
    tied,
)
from gpufleet.job.experiments.growth.growing import grow
from gpufleet.job.experiments.growth.model import Growth, load
from gpufleet.job.experiments.growth.spec import Precision
from tests.job.growth_models import CONFIG, PROBE, dense, experts, generator, moe

pytestmark = pytest.mark.xdist_group("growth")


def boundary(phase: int, dtype: torch.dtype = torch.float32) -> tuple[Growth, Growth]:
    state = (dense if phase == 1 else moe)(dtype)
    return load(CONFIG, phase - 1, state), load(CONFIG, phase, grow(CONFIG, phase, state, generator()))


@pytest.mark.parametrize("phase", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_right_boundary_reports_its_numbers_and_leaves_the_export(phase: int, tmp_path: Path) -> None:
    old, new = boundary(phase)
    old.train()
    new.train()
    new.compute_dtype = torch.bfloat16
    report = check_boundary(CONFIG, phase, old, new, PROBE, export=tmp_path / "exports" / "start.safetensors")
    tree: dict[str, Any] = json.loads(json.dumps(report.to_json()))
    assert tree["phase"] == ("", "moe", "grown")[phase]
    for when in ("before", "after_round_trip"):
        assert 0 < tree[when]["max_logit_difference"] < tree[when]["limit"]
        assert tree[when]["mean_logit_difference"] < tree[when]["max_logit_difference"]
        assert tree[when]["routing_flips"] == 0
    assert tree["problems"] == []
    saved = load_file(tmp_path / "exports" / "start.safetensors")
    assert all(torch.equal(saved[name], tensor) for name, tensor in new.state_dict().items())
    assert old.training
    assert new.training
    assert new.compute_dtype == torch.bfloat16  # as it was
    assert tree["before"]["limit"] == pytest.approx(3e-5 * max(1.0, tree["before"]["max_logit"]))
    assert all(1 <= each <= CONFIG.model.experts for each in tree["load_max_over_mean"])


def test_a_changed_function_stops_with_the_numbers() -> None:
    old, new = boundary(2)
    new.norm.weight.data *= 2
    with pytest.raises(
        GrowthCheckFailed, match=r"growth into phase 'grown' failed: logits moved by up to \d.*limit"
    ) as failure:
        check_boundary(CONFIG, 2, old, new, PROBE)
    before = failure.value.report.before
    assert before.verdict == "fail"
    with torch.no_grad():
        gap = (old(PROBE).logits - new(PROBE).logits).abs()
    assert before.max_logit_difference > 1
    assert before.max_logit_difference == pytest.approx(gap.max().item(), rel=1e-4)
    assert before.mean_logit_difference == pytest.approx(gap.mean().item(), rel=1e-4)


def test_one_flipped_routing_is_no_pass() -> None:
    old, new = boundary(2)
    router = experts(new)[0].router
    router.weight.data = router.weight.data.roll(1, dims=0)
    difference = compare(old, new, PROBE)
    assert difference.routing_flips > 0
    assert not difference.passed
    with torch.no_grad():
        losses = [
            F.cross_entropy(module(PROBE).logits[:, :-1].flatten(0, 1), PROBE[:, 1:].flatten()) for module in (old, new)
        ]
    assert difference.loss_difference == pytest.approx((losses[1] - losses[0]).item(), rel=1e-3)


def test_a_clear_flip_between_experts_that_say_the_same_is_no_pass() -> None:
    old, new = boundary(2)
    for module in (old, new):
        for name, parameter in experts(module)[0].named_parameters():
            if not name.startswith("router"):
                parameter.data.zero_()
    swap(old, new, windows=1, margin=1e-2)
    difference = compare(old, new, PROBE[:1])
    assert difference.max_logit_difference <= difference.limit
    assert (difference.routing_flips, difference.verdict) == (1, "unclear")


def test_a_tie_is_measured_by_the_largest_logit_and_every_token_that_flips_must_be_one() -> None:
    def layer(margin: list[float], scale: float) -> list[tuple[ExpertChoice, ExpertChoice]]:
        of = (torch.tensor(margin), torch.tensor(scale))
        return [(ExpertChoice(torch.tensor([[0, 1]] * 2), *of), ExpertChoice(torch.tensor([[0, 2]] * 2), *of))]

    assert tied(layer([1e-5, 2e-5], 1.0), 3e-5)
    assert not tied(layer([1e-5, 1e-2], 1.0), 3e-5)
    assert tied(layer([2e-4, 2e-4], 10.0), 3e-5)
    assert tied(layer([2e-5, 2e-5], 0.1), 3e-5)
    module = boundary(1)[1]
    with routed(module) as chosen, torch.no_grad():
        module(PROBE[:1])
    assert all((each.experts.diff(dim=-1) > 0).all() for each in chosen)  # a set: which is first does not count


def swap(old: Growth, new: Growth, windows: int, margin: float) -> None:
    """In the first `windows` windows, the models disagree by `margin` on which expert of a token is second."""
    for module, ahead in ((old, (0, 1, 2)), (new, (0, 2, 1))):
        seen = iter(range(10**6))

        def choose(_: object, __: object, logits: Tensor, seen: Iterator[int] = seen, at: Any = ahead) -> Tensor:
            logits = logits.clone()
            if next(seen) < windows:
                logits[0], logits[0, at[0]] = -9.0, 1.0
                logits[0, at[1]], logits[0, at[2]] = 0.5 + margin, 0.5
            return logits

        experts(module)[0].router.register_forward_hook(choose)


def test_a_tie_that_rounding_decides_leaves_its_window_out() -> None:
    old, new = boundary(2)
    swap(old, new, windows=1, margin=1e-6)
    difference = compare(old, new, PROBE)
    assert (difference.ties, difference.routing_flips) == (1, 0)
    assert difference.routings == (len(PROBE) - 1) * PROBE.shape[1] * len(old.blocks)
    assert difference.passed


@pytest.mark.parametrize(("windows", "margin"), [(1, 1e-2), (len(PROBE), 1e-6)])
def test_a_choice_that_was_clear_or_ties_everywhere_are_no_pass(windows: int, margin: float) -> None:
    old, new = boundary(2)
    swap(old, new, windows, margin)
    assert not compare(old, new, PROBE).passed


def test_not_a_number_is_a_failure() -> None:
    old, new = boundary(1)
    new.norm.bias.data[0] = float("nan")
    assert compare(old, new, PROBE).verdict == "fail"


def test_a_file_that_lost_bits_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:

    def lossy(tensors: dict[str, torch.Tensor], path: Path) -> None:
        save_file({name: t.to(torch.bfloat16).to(t.dtype) for name, t in tensors.items()}, path)

    monkeypatch.setattr(check, "save_file", lossy)
    with pytest.raises(GrowthCheckFailed, match=r"after a round trip; the file does not contain the weights that"):
        check_boundary(CONFIG, 1, *boundary(1), PROBE)


def test_a_file_that_lacks_a_tensor_is_not_intact(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = boundary(1)[1]
    assert check.round_trip(module, tmp_path / "whole.safetensors")
    monkeypatch.setattr(check, "save_file", lambda tensors, path: save_file(dict(list(tensors.items())[1:]), path))
    assert not check.round_trip(module, tmp_path / "less.safetensors")


def test_the_cast_to_bf16_reports_its_loss_difference() -> None:
    config = replace(CONFIG, precision=Precision(compute="bf16", phase3_state="bf16"))
    old, new = boundary(2)
    report = check_boundary(config, 2, old, new, PROBE)
    assert report.cast_loss_difference is not None
    assert 0 < abs(report.cast_loss_difference) <= 0.01
    assert new.embed.weight.dtype == torch.float32  # the check casts a copy


def test_a_cast_that_costs_too_much_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, precision=Precision(compute="bf16", phase3_state="bf16"))
    monkeypatch.setattr(check, "LOSS_LIMIT", 1e-9)
    with pytest.raises(GrowthCheckFailed, match="the cast to bf16 moves the loss by"):
        check_boundary(config, 2, *boundary(2), PROBE)


def test_a_cast_or_a_padding_that_gives_no_number_stops_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "cast_difference", lambda *_: float("nan"))
    monkeypatch.setattr(check, "fit_capacity", lambda *_: (8.0, float("nan")))
    monkeypatch.setattr(check, "expert_load", lambda *_: ((5, 3), (1.0, 1.0)))
    old, new = boundary(1)
    new.set_dispatch("padded")
    with pytest.raises(
        GrowthCheckFailed,
        match=r"only 3 of 8 experts are used.*padding moves the loss by nan.*the cast to bf16.* by nan",
    ) as found:
        check_boundary(CONFIG, 1, old, new, PROBE)
    json.dumps(written := found.value.report.to_json(), allow_nan=False)  # growth_report.json is JSON whatever happens
    assert written["cast_loss_difference"] == "NaN"


def test_phases_in_fp32_are_not_cast() -> None:
    assert cast_difference(CONFIG, 2, boundary(2)[1], PROBE) is None


def test_capacity_is_raised_until_padding_costs_little() -> None:
    _, new = boundary(1)
    with torch.no_grad():  # a router with favourites: the even share and a quarter is far too little
        for ffn in experts(new):
            ffn.router.weight.mul_(20)
            ffn.up.weight.mul_(torch.linspace(0.2, 2, 8)[:, None, None])
    new.set_dispatch("padded", 1.25)
    capacity, difference = fit_capacity(new, PROBE)
    assert difference is not None
    assert capacity is not None
    assert abs(difference) <= check.LOSS_LIMIT
    assert capacity > 1.25
    assert new.capacity == capacity


def test_a_padding_that_lowers_the_loss_is_no_better_than_one_that_raises_it(monkeypatch: pytest.MonkeyPatch) -> None:
    _, new = boundary(1)
    new.set_dispatch("padded", 1.5)
    losses = iter([2.0, 1.5, 2.005])  # dropless, then at 1.5 and 2.0
    monkeypatch.setattr(check, "_loss", lambda *_: next(losses))
    capacity, difference = fit_capacity(new, PROBE[:1])
    assert capacity == 2.0
    assert difference == pytest.approx(0.005)


def test_what_a_cast_costs_is_the_mean_over_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, precision=Precision(compute="bf16", phase3_state="bf16"))
    losses = iter([1.0] * len(PROBE) + [1.5] * len(PROBE))
    monkeypatch.setattr(check, "_loss", lambda *_: next(losses))
    assert cast_difference(config, 2, boundary(2)[1], PROBE) == pytest.approx(0.5)


def test_where_nothing_is_dropped_a_capacity_is_found_for_the_nodes_where_something_is() -> None:
    found = []
    for dispatch in ("padded", "grouped"):
        _, new = boundary(1)
        with torch.no_grad():
            for ffn in experts(new):
                ffn.router.weight.mul_(20)
                ffn.up.weight.mul_(torch.linspace(0.2, 2, 8)[:, None, None])
        new.set_dispatch(dispatch)
        found.append(fit_capacity(new, PROBE))
        assert {ffn.dispatch for ffn in experts(new)} == {dispatch}
    assert found[0] == pytest.approx(found[1])
    assert fit_capacity(boundary(1)[0], PROBE) == (None, None)  # dense


def test_what_padding_would_cost_elsewhere_is_no_reason_to_stop_where_nothing_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "CAPACITIES", (1.25,))
    monkeypatch.setattr(check, "LOSS_LIMIT", 1e-9)
    old, new = boundary(1)
    report = check_boundary(CONFIG, 1, old, new, PROBE)
    assert report.padded_loss_difference is not None
    assert abs(report.padded_loss_difference) > 1e-9
    new.set_dispatch("padded")
    with pytest.raises(GrowthCheckFailed, match="padding moves the loss by"):
        check_boundary(CONFIG, 1, old, new, PROBE)
