"""Members are clipped, chunked, sampled and kept each for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpufleet.job.experiments.two_tower.members import HARD_POOL, Members, clip_each, sampled_loss
from gpufleet.job.experiments.two_tower.model import Towered, diversity, draw_noise, softmax_loss
from gpufleet.job.experiments.two_tower.spec import Sampled, TwoTowerConfig
from tests.job import two_tower_world as world

MEMBERS, QUERIES, MODELS, WIDTH = 3, 24, 31, 16


def built(config: TwoTowerConfig | None = None) -> Members:
    return Members(config or world.config(), MEMBERS, 0, torch.float32)


def batch(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.normalize(torch.randn(MEMBERS, QUERIES, WIDTH, generator=g), dim=-1)
    targets = torch.softmax(3 * torch.randn(MEMBERS, QUERIES, MODELS, generator=g), -1)
    return x, targets, torch.ones(MEMBERS, QUERIES)


def gradients(module: Members) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in module.parameters() if parameter.grad is not None]
    module.zero_grad()
    return found


@pytest.mark.parametrize("chunk", [1, 7, 16, 24])
def test_gradients_summed_over_chunks_of_queries_are_those_of_the_whole_dropout_included(chunk: int) -> None:
    module, (x, targets, weights) = built(), batch()
    noise = draw_noise(module.config.towers, MEMBERS, QUERIES, MODELS, torch.Generator().manual_seed(1))
    assert noise is not None
    whole = module(x, targets, weights, noise.query, noise.model)
    (whole.loss_sum / QUERIES).backward()
    wanted = gradients(module)
    loss, losses = torch.zeros(()), torch.zeros(MEMBERS)
    for first in range(0, QUERIES, chunk):
        part = slice(first, first + chunk)
        output = module(x[:, part], targets[:, part], weights[:, part], noise.query[:, part], noise.model)
        (output.loss_sum / QUERIES).backward()
        loss += output.loss_sum.detach() / QUERIES
        losses += output.aux["losses"] * x[:, part].shape[1] / QUERIES
    assert torch.allclose(loss, whole.loss_sum / QUERIES, rtol=1e-5)
    assert torch.allclose(losses, whole.aux["losses"], rtol=1e-5)
    for a, b in zip(gradients(module), wanted, strict=True):
        assert torch.allclose(a, b, rtol=1e-4, atol=2e-5)  # gradients of up to 30


def test_the_objective_is_the_loss_and_its_share_of_the_heads_likeness_with_dropout_and_weights() -> None:
    module, (x, targets, _) = built(world.config(optim={"head_diversity": 0.5})), batch()
    weights = torch.rand(MEMBERS, QUERIES, generator=torch.Generator().manual_seed(2))
    noise = draw_noise(module.config.towers, MEMBERS, QUERIES, MODELS, torch.Generator().manual_seed(1))
    assert noise is not None
    towered = module.stack(x, noise)
    wanted = softmax_loss(towered, targets, weights) + 0.5 * (diversity(towered.heads) * weights).sum(-1)
    found = module(x, targets, weights, noise.query, noise.model)
    assert torch.allclose(found.loss_sum, wanted.mean())
    assert torch.allclose(found.aux["losses"], wanted / QUERIES)
    assert not torch.allclose(found.loss_sum, module(x, targets, weights).loss_sum)


def test_each_member_is_clipped_by_its_own_norm() -> None:
    module, (x, targets, weights) = built(), batch()
    weights[0] *= 1e-4  # one member far below the limit
    (module(x, targets, weights).loss_sum / QUERIES).backward()
    alone = [MEMBERS * gradient for gradient in (p.grad for p in module.parameters()) if gradient is not None]
    norms = torch.stack([g.flatten(1).square().sum(1) for g in alone]).sum(0).sqrt()
    limit = norms[1:].min().item() / 2
    assert torch.allclose(clip_each(list(module.parameters()), limit), norms, rtol=1e-5)
    for gradient, whole in zip(gradients(module), alone, strict=True):
        assert torch.allclose(gradient[0], whole[0], rtol=1e-5)
        for k in (1, 2):
            assert torch.allclose(gradient[k], whole[k] * limit / norms[k], rtol=1e-4, atol=1e-9)


def test_without_a_limit_norms_are_measured_only() -> None:
    module, (x, targets, weights) = built(), batch()
    (module(x, targets, weights).loss_sum / QUERIES).backward()
    alone = [MEMBERS * p.grad.clone() for p in module.parameters() if p.grad is not None]
    clip_each(list(module.parameters()), 0.0)
    assert all(torch.allclose(a, b) for a, b in zip(gradients(module), alone, strict=True))


def test_only_the_members_that_improved_are_kept() -> None:
    module = built()
    before = module.best.clone()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(1)
    module.keep([2])
    assert torch.equal(module.best[:2], before[:2])
    assert torch.equal(module.best[2], module.stack.packed()[2])
    module.keep([])
    assert torch.equal(module.best[:2], before[:2])


def test_a_member_starts_from_the_same_weights_however_many_there_are() -> None:
    alone = Members(world.config(), 1, 0, torch.float32)
    assert torch.equal(alone.stack.packed()[0], built().stack.packed()[0])
    assert not torch.equal(built().stack.packed()[0], built().stack.packed()[1])
    later = Members(world.config(), 1, 1, torch.float32)
    assert torch.equal(later.stack.packed()[0], built().stack.packed()[1])


def test_the_sampled_objective_takes_one_relevant_and_irrelevant_models() -> None:
    g = torch.Generator().manual_seed(0)
    models = 200
    towered = Towered(torch.randn(1, 50, 8, generator=g), torch.randn(1, models, 8, generator=g), torch.zeros(1))
    targets = torch.zeros(1, 50, models)
    targets[0, :, 7], targets[0, :, 9] = 0.75, 0.25
    scores = (towered.query @ towered.model.mT)[0]
    ranked = scores.masked_fill(targets[0] > 0, -torch.inf).argsort(-1, descending=True)
    sampled = Sampled(negatives=2, hard=1.0)
    draws = torch.full((1, 50, 5), 0.5)
    draws[..., 3], draws[..., 4] = 0.0, 0.999
    chosen = torch.stack([torch.full((50,), 7), ranked[:, 0], ranked[:, HARD_POOL - 1]], dim=-1)
    wanted = -torch.log_softmax(scores.gather(-1, chosen), -1)[:, 0]
    assert torch.allclose(sampled_loss(towered, targets, draws, sampled)[0], wanted)
    draws[..., 0] = 0.0  # the first model whose target is not 0
    assert torch.allclose(sampled_loss(towered, targets, draws, sampled)[0], wanted)
    draws[..., 0] = 0.9  # the other relevant model
    draws[..., 4] = 0.999
    easy = sampled_loss(towered, targets, draws, replace(sampled, hard=0.0))[0]
    chosen = torch.stack([torch.full((50,), 9), ranked[:, 0], ranked[:, 197]], dim=-1)
    assert torch.allclose(easy, -torch.log_softmax(scores.gather(-1, chosen), -1)[:, 0])
