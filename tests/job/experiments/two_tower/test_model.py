"""The towers have the parameters they claim, and members trained together are what each is alone."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpufleet.job.experiments.two_tower.model import (
    Noise,
    Stack,
    Towered,
    TwoTowerModel,
    decays,
    diversity,
    draw_noise,
    initialise,
    softmax_loss,
)
from gpufleet.job.experiments.two_tower.spec import Towers

SMALL = Towers(sentence=12, heads=3, head=8, fusion=10, query=(9, 7), embedding=11, model=(13, 7), dropout=0.3)
MODELS, QUERIES, MEMBERS = 17, 15, 4


def members(towers: Towers = SMALL) -> list[TwoTowerModel]:
    g = torch.Generator().manual_seed(1)
    return [initialise(TwoTowerModel(towers, MODELS), g) for _ in range(MEMBERS)]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    """Queries, targets and weights of each member, all different; the last row of each without a target."""
    g = torch.Generator().manual_seed(2)
    x = F.normalize(torch.randn(MEMBERS, QUERIES, SMALL.sentence, generator=g), dim=-1)
    targets = torch.rand(MEMBERS, QUERIES, MODELS, generator=g) * (torch.rand(MEMBERS, QUERIES, MODELS) < 0.3)
    targets /= targets.sum(-1, keepdim=True).clamp(min=1e-9)
    targets[:, -1] = 0
    return x, targets, torch.rand(MEMBERS, QUERIES, generator=g)


def objective(towered: Towered, targets: Tensor, weights: Tensor) -> Tensor:
    return softmax_loss(towered, targets, weights) + 0.5 * (diversity(towered.heads) * weights).sum(-1)


def one(noise: Noise | None, k: int) -> Noise | None:
    return None if noise is None else Noise(noise.query[k], noise.model[k])


def stack_one(towered: Towered) -> Towered:
    return Towered(*(part[None] for part in towered))


def test_the_default_is_made_of_the_parts_that_were_published() -> None:
    with torch.device("meta"):
        named = dict(TwoTowerModel(Towers(), 1131).named_parameters())
    parts = {"head_": 185_088, "fusion": 147_840, "query": 172_608, "embedding": 289_536, "model": 460_032}
    for prefix, count in parts.items():
        assert sum(p.numel() for name, p in named.items() if name.startswith(prefix)) == count


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_members_under_vmap_are_ten_separate_runs(dropout: float) -> None:
    towers = replace(SMALL, dropout=dropout)
    alone = members(towers)
    stack = Stack(copy.deepcopy(alone))
    x, targets, weights = batch()
    for step in range(5):
        noise = draw_noise(towers, MEMBERS, QUERIES, MODELS, torch.Generator().manual_seed(step))
        joint = objective(stack(x, noise), targets, weights)
        stack.zero_grad()
        joint.sum().backward()
        for k, module in enumerate(alone):
            module.zero_grad()
            part = slice(k, k + 1)
            loss = objective(stack_one(module(x[k], one(noise, k))), targets[part], weights[part])
            loss.sum().backward()
            assert torch.allclose(loss, joint[part], atol=1e-5)
        with torch.no_grad():
            for parameter in [*stack.parameters(), *(p for module in alone for p in module.parameters())]:
                assert parameter.grad is not None
                parameter.sub_(0.5 * parameter.grad)
    for name, stacked in stack.members.named_parameters():
        for k, module in enumerate(alone):
            assert torch.allclose(stacked[k], module.get_parameter(name), atol=1e-5), name


def test_the_loss_and_its_gradient_are_autograds() -> None:
    stack = Stack(members())
    x, targets, weights = batch()
    found, plain = stack(x), stack(x)
    softmax_loss(found, targets, weights).sum().backward()
    ours = [parameter.grad.clone() for parameter in stack.parameters() if parameter.grad is not None]
    stack.zero_grad()
    logp = torch.log_softmax(plain.query @ plain.model.mT, -1)
    reference = (-(targets * logp).sum(-1) * weights).sum(-1)
    reference.sum().backward()
    theirs = [parameter.grad for parameter in stack.parameters() if parameter.grad is not None]
    assert torch.allclose(softmax_loss(found, targets, weights), reference, atol=1e-6)
    for a, b in zip(ours, theirs, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_forward_pass_by_hand(dropout: float) -> None:
    towers = replace(SMALL, dropout=dropout)
    module, x = initialise(TwoTowerModel(towers, MODELS), torch.Generator().manual_seed(3)), batch()[0][0]
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
    noise = one(draw_noise(towers, 1, QUERIES, MODELS, torch.Generator().manual_seed(4)), 0)
    units = {"query": [24, 10, 9], "model": [13]}  # heads together, fusion, the query tower's first; the model tower's

    def dropped(x: Tensor, tower: str, layer: int) -> Tensor:
        if noise is None:
            return x.relu()
        bits: Tensor = getattr(noise, tower).split(units[tower], -1)[layer]
        return x.relu() * (bits >= round(0.3 * 65536) - 32768) / (1 - round(0.3 * 65536) / 65536)

    hidden = dropped(module.head_in(x), "query", 0).view(QUERIES, 3, 8)
    heads = torch.einsum("qhi,hij->qhj", hidden, module.head_out) + module.head_bias[:, 0]
    fused = dropped(module.fusion(heads.flatten(1)), "query", 1)
    query = module.query[1](dropped(module.query[0](fused), "query", 2))
    model = module.model[1](dropped(module.model[0](module.embedding), "model", 0))
    found = module(x, noise)
    assert torch.allclose(found.heads, heads, atol=1e-5)
    assert torch.allclose(found.query, F.normalize(query, dim=-1) / towers.temperature, atol=1e-4)
    assert torch.allclose(found.model, F.normalize(model, dim=-1), atol=1e-5)


def test_weights_start_as_large_as_relu_keeps_them_biases_at_zero_and_models_as_long_as_sentences() -> None:
    wide = replace(SMALL, sentence=100, heads=5, head=60, fusion=80, query=(70, 50), embedding=90, model=(60, 50))
    module = initialise(TwoTowerModel(wide, 200), torch.Generator().manual_seed(3))
    inputs = {"head_in.weight": 100, "head_out": 60, "fusion.weight": 300, "query.0.weight": 80, "query.1.weight": 70}
    inputs |= {"model.0.weight": 90, "model.1.weight": 60, "embedding": 2 * 90}
    for name, parameter in module.named_parameters():
        if name in inputs:
            assert parameter.std().item() == pytest.approx((2 / inputs[name]) ** 0.5, rel=0.05), name
        else:
            assert not parameter.any()


def test_dropout_drops_its_share_and_keeps_the_mean() -> None:
    towers = replace(SMALL, heads=1, head=400, fusion=4, dropout=0.18)
    module = initialise(TwoTowerModel(towers, MODELS), torch.Generator().manual_seed(3))
    x = torch.randn(1, SMALL.sentence)
    noise = draw_noise(towers, 1, 600, MODELS, torch.Generator().manual_seed(4))
    outputs = module(x.expand(600, -1), one(noise, 0)).heads.detach()  # the same query in every row
    mean, plain = outputs.mean(0), module(x).heads[0].detach()
    assert torch.corrcoef(torch.stack([mean.flatten(), plain.flatten()]))[0, 1] > 0.99
    assert abs((mean * plain).sum() / plain.square().sum() - 1) < 0.02
    assert len({output.sum().item() for output in outputs}) == 600


def test_no_dropout_draws_no_bits() -> None:
    assert draw_noise(replace(SMALL, dropout=0.0), 2, 3, 4, torch.Generator()) is None


def test_noise_is_uniform_over_all_sixteen_bits() -> None:
    noise = draw_noise(SMALL, 1, 3000, 4, torch.Generator().manual_seed(0))
    assert noise is not None
    values = noise.query.double()
    assert values.min() < -32_700
    assert values.max() > 32_700
    assert abs(values.mean()) < 300


def test_heads_that_point_the_same_way_cost_one_and_orthogonal_ones_nothing() -> None:
    same = torch.ones(2, 3, 4)
    assert torch.allclose(diversity(same), torch.ones(2))
    assert torch.allclose(diversity(torch.eye(3)[None]), torch.zeros(1))
    assert torch.equal(diversity(torch.ones(5, 1, 4)), torch.zeros(5))


def test_diversity_and_its_gradient_are_those_of_unit_vectors_and_finite_where_a_head_says_nothing() -> None:
    heads = torch.randn(6, 3, 8, generator=torch.Generator().manual_seed(4), requires_grad=True)
    cosines = F.cosine_similarity(heads.unsqueeze(-2), heads.unsqueeze(-3), dim=-1)
    wanted = (cosines.square().sum((-2, -1)) - 3) / 6
    assert torch.allclose(diversity(heads), wanted, atol=1e-6)
    ours, theirs = (torch.autograd.grad(value.sum(), heads)[0] for value in (diversity(heads), wanted))
    assert torch.allclose(ours, theirs, atol=1e-6)
    silent = torch.zeros(1, 3, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(diversity(silent).sum(), silent)
    assert gradient.isfinite().all()


def test_packed_parameters_come_back_as_they_were() -> None:
    stack, other = Stack(members()), Stack(members())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.unpack(stack.packed())
    for name, parameter in stack.named_parameters():
        assert torch.equal(parameter, other.get_parameter(name))


def test_a_shared_batch_of_queries_goes_to_every_member() -> None:
    stack = Stack(members())
    x = batch()[0][0]
    assert torch.allclose(stack(x).query, stack(x.expand(MEMBERS, -1, -1)).query, atol=1e-6)


def test_biases_and_the_embedding_do_not_decay() -> None:
    named = [name for name, _ in members()[0].named_parameters()]
    assert {name for name in named if not decays(name)} == {n for n in named if "bias" in n} | {"embedding"}


def test_bf16_products_stay_near_fp32() -> None:
    x = batch()[0][0]
    module = members()[0]
    exact = module(x)
    module.compute = torch.bfloat16
    rough = module(x)
    assert rough.query.dtype == torch.float32
    scores, near = exact.query @ exact.model.mT, rough.query @ rough.model.mT
    assert 0 < (scores - near).abs().max() < 0.05 * scores.abs().max()
