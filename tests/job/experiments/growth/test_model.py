"""The model: its counts, its mathematics against slow and obvious versions, and what the trainer relies on."""

from __future__ import annotations

import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpufleet.job.experiments.engine.optimizer import groups
from gpufleet.job.experiments.growth.growing import grow
from gpufleet.job.experiments.growth.model import Growth, GrowthOutput, _choose_dispatch, build, decays, load
from gpufleet.job.experiments.growth.spec import GrowthConfig, GrowthModel, Precision
from gpufleet.job.experiments.models.blocks import Experts, rotate, rotations
from gpufleet.job.experiments.models.routing import rows_per_expert
from tests.job.growth_models import CONFIG, PROBE, dense, experts, generator, moe, text

pytestmark = pytest.mark.xdist_group("growth")

TOKENS, TARGETS = PROBE[:, :-1], PROBE[:, 1:]


def gradients(module: Growth, output: GrowthOutput) -> dict[str, Tensor]:
    module.zero_grad()
    assert output.loss_sum is not None
    loss = output.loss_sum / TARGETS.numel()
    (loss if output.aux_loss is None else loss + 0.01 * output.aux_loss).backward()
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor], atol: float) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=0, atol=atol, msg=(name + ": {}").format)


@pytest.mark.parametrize("phase", [0, 1, 2])
def test_full_size_modules_hold_what_sizing_counts(phase: int) -> None:
    config = GrowthConfig()
    module = build(config, phase, device="meta")
    size = config.phases()[phase]
    assert sum(p.numel() for p in module.parameters()) == size.params_total
    assert {p.dtype for p in module.parameters()} == {(torch.float32, torch.float32, torch.bfloat16)[phase]}
    unused = sum(
        p.numel() * (8 - 2) // 8 for n, p in module.named_parameters() if phase and ".ffn." in n and "router" not in n
    )
    assert size.params_total - unused == size.params_active


@pytest.mark.parametrize("phase", [0, 1, 2])
def test_rehearsal_modules_hold_the_counted_parameters(phase: int) -> None:
    assert sum(p.numel() for p in build(CONFIG, phase).parameters()) == (182_848, 879_232, 5_672_192)[phase]


def test_no_token_sees_the_future() -> None:
    module = load(CONFIG, 1, moe(torch.float64))
    module.compute_dtype = torch.float64
    module.eval()
    changed = TOKENS.clone()
    changed[:, 40:] = (changed[:, 40:] + 7) % 512
    a, b = module(TOKENS).logits, module(changed).logits
    torch.testing.assert_close(a[:, :40], b[:, :40], rtol=0, atol=1e-12)
    assert (a[:, 40:] - b[:, 40:]).abs().max() > 0.1


def test_rotary_scores_depend_on_distance_alone_and_equal_complex_rotation() -> None:
    q, k = torch.randn(2, 1, 1, 16, dtype=torch.float64, generator=generator()).expand(2, 1, 32, 16)
    cos, sin = rotations(32, 16, q)
    scores = rotate(q[None], cos, sin) @ rotate(k[None], cos, sin).transpose(-2, -1)
    for distance in (-5, 0, 7):
        diagonal = scores[0, 0].diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    assert not torch.allclose(scores[0, 0, 0, 0], scores[0, 0, 7, 0])
    pairs = torch.complex(
        q[..., :8], q[..., 8:]
    )  # dimensions i and i + 8 as one number, turned by position x 10^4^(-i/8)
    angle = torch.arange(32)[:, None] * 10_000.0 ** (-torch.arange(8, dtype=torch.float64) / 8)
    turned = pairs * torch.polar(torch.ones_like(angle), angle)
    torch.testing.assert_close(rotate(q, cos, sin), torch.cat([turned.real, turned.imag], dim=-1))


def test_a_rotations_gradient_is_the_rotation_back() -> None:
    x = torch.randn(5, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    cos, sin = (each[:, None] for each in rotations(5, 8, x))
    assert torch.autograd.gradcheck(lambda given: rotate(given, cos, sin), x)
    (slope,) = torch.autograd.grad(rotate(x, cos, sin).square().sum() / 2, x)
    torch.testing.assert_close(slope, x.detach())  # a rotation keeps lengths


def test_loss_is_the_sum_over_the_logits() -> None:
    module = load(CONFIG, 0, dense(torch.float32))
    logits = module(TOKENS).logits
    expected = F.cross_entropy(logits.flatten(0, 1), TARGETS.flatten(), reduction="sum")
    torch.testing.assert_close(module(TOKENS, TARGETS).loss_sum, expected)
    assert module(TOKENS, TARGETS).logits is None


def one_token_at_a_time(ffn: Experts, x_BTd: Tensor) -> Tensor:
    """What a mixture is: each token, each of its two experts, by hand."""
    rows = []
    for x in x_BTd.flatten(0, 1):
        top, chosen = ffn.router(x).topk(2)
        share = top.exp() / top.exp().sum()
        y = torch.zeros_like(x)
        for w, e in zip(share, chosen, strict=True):
            y = y + w * (ffn.down.weight[e] @ F.gelu(ffn.up.weight[e] @ x + ffn.up.bias[e]) + ffn.down.bias[e])
        rows.append(y)
    return torch.stack(rows).view_as(x_BTd)


@pytest.mark.parametrize(
    ("dispatch", "dtype"), [("grouped", torch.float32), ("padded", torch.float32), ("padded", torch.float64)]
)
def test_expert_products_equal_a_loop_over_tokens(dispatch: str, dtype: torch.dtype) -> None:
    module = load(CONFIG, 1, moe(dtype))
    module.set_dispatch(dispatch, capacity=4.0)  # type: ignore[arg-type]
    ffn = experts(module)[1]
    x = torch.randn(2, 24, 64, generator=generator()).to(dtype)
    seen = []
    for run in (lambda x: ffn(x)[0], lambda x: one_token_at_a_time(ffn, x)):
        leaf = x.clone().requires_grad_()
        ffn.zero_grad()
        y = run(leaf)
        y.square().sum().backward()
        of = {"x": leaf, **dict(ffn.named_parameters())}
        seen.append({n: p.grad.clone() for n, p in of.items() if p.grad is not None} | {"y": y.detach()})
    loop, products = seen
    assert_same(loop, products, atol=2e-4 if dtype == torch.float32 else 1e-10)


@pytest.mark.parametrize(
    ("capability", "dispatch"), [((8, 6), "padded"), ((9, 0), "grouped"), ((10, 0), "padded"), ((12, 0), "padded")]
)
def test_grouped_products_are_hoppers_alone(
    capability: tuple[int, int], dispatch: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    module = build(CONFIG, 1)
    _choose_dispatch(module, torch.device("cuda", 0))
    assert {ffn.dispatch for ffn in experts(module)} == {dispatch}


def test_widths_that_grouped_products_do_not_take_have_the_same_experts() -> None:
    module = build(replace(CONFIG, model=replace(CONFIG.model, ffn=50)), 1)  # 200 bytes a row, no multiple of 16
    ffn = experts(module)[0]
    x = torch.randn(1, 24, 64, generator=generator())
    torch.testing.assert_close(ffn(x)[0], one_token_at_a_time(ffn, x))


def test_the_table_has_the_same_gradient_however_its_look_up_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    for _ in range(2):
        module = load(CONFIG, 1, moe(torch.float64))
        module.compute_dtype = torch.float64
        for first in (0, 4):  # two micro-batches
            part = slice(first, first + 4)
            (module(TOKENS[part], TARGETS[part]).loss_sum / TARGETS.numel()).backward()
        seen.append(module.embed.weight.grad)
        monkeypatch.setattr(Growth, "look_up", lambda self, tokens: self.embed(tokens))
    assert seen[0] is not None
    assert seen[0].layout == torch.strided
    torch.testing.assert_close(*seen, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_only_a_gradient_that_adding_rounds_little_is_added_row_by_row(dtype: torch.dtype) -> None:
    module = load(CONFIG, 0, dense(dtype))
    (given,) = torch.autograd.grad(module.look_up(TOKENS).sum(), module.embed.weight)
    assert given.is_sparse == (dtype == torch.float32)


def test_dropped_pairs_add_nothing_and_the_rest_is_exact() -> None:
    module = load(CONFIG, 1, moe(torch.float64))
    ffn = experts(module)[0]
    module.set_dispatch("padded", capacity=1.25)
    module.train()
    x = torch.randn(1, 64, 64, generator=generator(), dtype=torch.float64)
    y = ffn(x)[0][0]
    rows = rows_per_expert(64, 2, 8, 1.25)
    top, chosen = ffn.router(x[0]).topk(2)
    weights = top.softmax(-1)
    expected, taken, dropped = torch.zeros_like(y), [0] * 8, 0
    for token in range(64):  # pairs come to an expert in the order of their tokens
        for w, e in zip(weights[token], chosen[token].tolist(), strict=True):
            taken[e] += 1
            if taken[e] > rows:
                dropped += 1
                continue
            hidden = F.gelu(ffn.up.weight[e] @ x[0, token] + ffn.up.bias[e])
            expected[token] += w * (ffn.down.weight[e] @ hidden + ffn.down.bias[e])
    assert dropped > 0
    torch.testing.assert_close(y, expected)
    module.eval()
    torch.testing.assert_close(ffn(x)[0], one_token_at_a_time(ffn, x))  # evaluation never drops


@pytest.mark.parametrize(("capacity", "rows"), [(None, 100), (1.25, 32), (4.0, 100), (9.0, 100)])
def test_rows_per_expert(capacity: float | None, rows: int) -> None:
    assert rows_per_expert(100, 2, 8, capacity) == rows


def test_load_and_balance_follow_their_definitions() -> None:
    module = load(CONFIG, 1, moe(torch.float32))
    chosen, probabilities = [], []

    def watch(_: object, __: object, logits: Tensor) -> None:
        chosen.append(logits.topk(2).indices)
        probabilities.append(logits.softmax(-1))

    for ffn in experts(module):
        ffn.router.register_forward_hook(watch)
    out = module(TOKENS, TARGETS)
    pairs = 2 * TOKENS.numel()
    expected = 0.0
    for layer in range(3):
        load_E = torch.bincount(chosen[layer].flatten(), minlength=8)
        assert torch.equal(out.expert_load[layer], load_E)
        expected += 8 * (load_E / pairs * probabilities[layer].mean(0)).sum().item() / 3
    assert out.aux_loss.item() == pytest.approx(expected, rel=1e-5)
    assert (out.router_entropy > 0).all()
    assert (out.router_entropy < torch.log(torch.tensor(8.0))).all()


def test_micro_batches_of_16_of_12_and_4_and_of_8_and_8_give_the_same_loss() -> None:
    batch = text(16, seed=3)
    for phase, state in ((0, dense(torch.float32)), (1, moe(torch.float32))):
        module = load(CONFIG, phase, state)
        losses = []
        for cut in ([16], [12, 4], [8, 8]):
            parts = [module(b[:, :-1], b[:, 1:]).loss_sum.item() for b in batch.split(cut)]
            losses.append(sum(parts) / batch[:, 1:].numel())
        assert max(losses) - min(losses) <= 1e-6


@pytest.mark.parametrize("phase", [0, 1])
def test_two_runs_give_the_same_bits(phase: int) -> None:
    runs = []
    for _ in range(2):
        module = load(CONFIG, phase, (dense, moe)[phase](torch.float32))
        runs.append(gradients(module, module(TOKENS, TARGETS)))
    first, second = runs
    assert_same(first, second, atol=0)


@pytest.mark.parametrize(
    ("phase", "compute", "dispatch"),
    [
        (0, "fp32", "grouped"),
        (1, "bf16", "grouped"),
        pytest.param(1, "fp32", "padded", marks=pytest.mark.slow),
    ],
)
def test_the_model_compiles_as_one_graph(phase: int, compute: str, dispatch: str) -> None:
    config = replace(CONFIG, precision=Precision(compute=compute, phase3_state="fp32"))  # type: ignore[arg-type]
    module = load(config, phase, (dense, moe)[phase](torch.float32))
    module.set_dispatch(dispatch)  # type: ignore[arg-type]
    plain = module(TOKENS, TARGETS).loss_sum
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*should not be instantiated", category=DeprecationWarning)  # dynamo
        compiled = torch.compile(module, backend="eager", fullgraph=True, dynamic=False)(TOKENS, TARGETS).loss_sum
    torch.testing.assert_close(compiled, plain)
    torch.compiler.reset()


def test_bf16_compute_keeps_fp32_weights_and_loss() -> None:
    config = replace(CONFIG, precision=Precision(compute="bf16", phase3_state="fp32"))
    module = load(config, 1, moe(torch.float32))
    exact = load(CONFIG, 1, moe(torch.float32))(TOKENS, TARGETS).loss_sum
    routed: set[torch.dtype] = set()
    for ffn in experts(module):
        ffn.router.register_forward_hook(lambda _, given, logits: routed.update((given[0].dtype, logits.dtype)))
    output = module(TOKENS, TARGETS)
    assert routed == {torch.float32}  # a choice between close experts
    assert output.loss_sum.dtype == torch.float32
    assert output.loss_sum.item() == pytest.approx(exact.item(), rel=5e-3)
    assert {g.dtype for g in gradients(module, output).values()} == {torch.float32}
    assert module(TOKENS).logits.dtype == torch.bfloat16


def test_initial_weights_follow_the_table_and_the_seed() -> None:
    module, again = build(CONFIG, 1), build(CONFIG, 1)
    state = module.state_dict()
    assert all(torch.equal(state[n], t) for n, t in again.state_dict().items())
    assert not torch.equal(state["embed.weight"], build(replace(CONFIG, seed=1), 1).state_dict()["embed.weight"])
    for name, std in (
        ("embed.weight", 0.02),
        ("blocks.2.attention.q.weight", 0.02),
        ("blocks.1.ffn.up.weight", 0.02),
        ("blocks.0.attention.o.weight", 0.02 / 6**0.5),
        ("blocks.0.ffn.down.weight", 0.02 / 6**0.5),
    ):
        assert state[name].std().item() == pytest.approx(std, rel=0.05)
    for name, tensor in state.items():
        if name.endswith("bias"):
            assert not tensor.any()
        elif "norm" in name:
            assert (tensor == 1).all()


def test_weight_decay_is_on_matrices_only() -> None:
    module = build(CONFIG, 1, device="meta")
    names = {id(p): n for n, p in module.named_parameters()}
    decayed, plain = groups(module, decays, CONFIG.optim.weight_decay)
    assert decayed["weight_decay"] == CONFIG.optim.weight_decay
    assert plain["weight_decay"] == 0.0
    assert {names[id(p)] for p in plain["params"]} == {
        n for n in names.values() if n.endswith("bias") or "norm" in n or n == "embed.weight"
    }
    assert len(decayed["params"]) + len(plain["params"]) == len(names)


def test_weights_of_another_shape_are_refused_with_the_phase() -> None:
    with pytest.raises(ValueError, match="phase 1: the weights do not fit this run config"):
        load(CONFIG, 1, dense(torch.float32))


def test_an_impossible_model_is_refused_with_the_key() -> None:
    with pytest.raises(ValueError, match=r"job\.parameters\.model\.heads: a divisor of the width, 64; nearest: 4"):
        build(replace(CONFIG, model=GrowthModel(width=64, heads=5)), 0)


def test_grown_weights_train() -> None:
    module = load(CONFIG, 2, grow(CONFIG, 2, moe(torch.float32), generator()))
    found = gradients(module, module(TOKENS, TARGETS))
    assert found.keys() == dict(module.named_parameters()).keys()
    assert found["blocks.4.ffn.down.weight"].any()  # a layer that adds 0 still learns
