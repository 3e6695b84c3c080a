"""The character model: to the digit, equal to a plain one written down again, and the same with a cache as without."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gpufleet.job.experiments.pretrain import model as char_gpt
from gpufleet.job.experiments.pretrain.model import CharCache, CharGpt, Text, generate, initial, norm, std
from gpufleet.job.experiments.pretrain.spec import CharData, CharModel, PretrainConfig

SMALL = CharModel(layers=2, width=64, head_dim=32)


def model(shape: CharModel = SMALL, dtype: torch.dtype = torch.float64, seed: int = 0) -> CharGpt:
    """Random weights everywhere: the real start has zeros that would hide a mistake."""
    module = CharGpt(shape, dtype).to(dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    return module.eval()


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randint(17, shape, generator=torch.Generator().manual_seed(seed))


def plain(weights: dict[str, Tensor], ids: list[int], shape: CharModel) -> list[list[float]]:
    """Logits of one sequence, position by position and head by head, in Python's own doubles."""
    d, width = shape.head_dim, shape.width
    heads, kv = width // d, shape.kv_heads or width // d
    w = {name: tensor.tolist() for name, tensor in weights.items()}

    def rms(x: list[float]) -> list[float]:
        scale = math.sqrt(sum(v * v for v in x) / len(x) + 2.0**-52)
        return [v / scale for v in x]

    def times(matrix: list[list[float]], x: list[float]) -> list[float]:
        return [sum(a * b for a, b in zip(row, x, strict=True)) for row in matrix]

    def turned(x: list[float], position: int) -> list[float]:
        out = list(x)
        for i in range(d // 2):
            angle = position * 10_000.0 ** (-2 * i / d)
            a, b = x[i], x[i + d // 2]
            out[i], out[i + d // 2] = (
                a * math.cos(angle) - b * math.sin(angle),
                b * math.cos(angle) + a * math.sin(angle),
            )
        return out

    def split(x: list[float]) -> list[list[float]]:
        return [x[i : i + d] for i in range(0, len(x), d)]

    xs = [rms(w["embed.weight"][i]) for i in ids]
    for layer in range(shape.layers):
        own = {k.removeprefix(f"blocks.{layer}."): v for k, v in w.items() if k.startswith(f"blocks.{layer}.")}
        ks: list[list[list[float]]] = []
        vs: list[list[list[float]]] = []
        for t, x in enumerate(xs):
            h = rms(x)
            q = [turned(rms(part), t) for part in split(times(own["attention.q.weight"], h))]
            ks.append([turned(rms(part), t) for part in split(times(own["attention.k.weight"], h))])
            vs.append(split(times(own["attention.v.weight"], h)))
            y: list[float] = []
            for head in range(heads):
                g = head * kv // heads
                scores = [sum(a * b for a, b in zip(q[head], k[g], strict=True)) / math.sqrt(d) for k in ks]
                top = max(scores)
                weight = [math.exp(s - top) for s in scores]
                y += [sum(a * v[g][i] for a, v in zip(weight, vs, strict=True)) / sum(weight) for i in range(d)]
            xs[t] = [a + b for a, b in zip(x, times(own["attention.o.weight"], y), strict=True)]
        for t, x in enumerate(xs):
            up = [max(0.0, u) ** 2 for u in times(own["ffn.up.weight"], rms(x))]
            xs[t] = [a + b for a, b in zip(x, times(own["ffn.down.weight"], up), strict=True)]
    return [[15 * math.tanh(v / 15) for v in times(w["head.weight"], rms(x))] for x in xs]


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_the_model_equals_a_plain_one_in_double_precision(kv_heads: int | None) -> None:
    shape = CharModel(layers=2, width=16, head_dim=4, kv_heads=kv_heads)
    module, ids = model(shape), tokens(1, 7)
    with torch.no_grad():
        module.head.weight.mul_(5)
    found = module(ids).logits[0]
    expected = torch.tensor(plain(module.state_dict(), ids[0].tolist(), shape), dtype=torch.float64)
    assert (found - expected).abs().max() < 1e-12
    assert found.abs().max() > 7  # of 15, so that the cap counts


def test_the_loss_is_the_sum_of_what_the_logits_say_and_ignores_padding() -> None:
    module, ids, targets = model(), tokens(3, 9), tokens(3, 9, seed=2)
    targets[2] = -100
    log = torch.log_softmax(module(ids).logits, -1)
    expected = -log[:2].gather(-1, targets[:2, :, None]).sum()
    assert module(ids, targets).loss_sum.item() == pytest.approx(expected.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("layers", "width", "matrices", "total", "gflop"),
    [
        (44, 2816, 4_186_963_968, 4_187_144_192, "28.2"),
        (64, 2304, 4_076_863_488, 4_077_010_944, "28.1"),
        (64, 4096, 12_884_901_888, 12_885_164_032, "83.8"),
        (24, 1536, 679_477_248, 679_575_552, "4.98"),
    ],
)
def test_full_sizes_are_to_the_digit(layers: int, width: int, matrices: int, total: int, gflop: str) -> None:
    shape = CharModel(layers=layers, width=width)
    with torch.device("meta"):
        module = CharGpt(shape)
    counted = {name: parameter.numel() for name, parameter in module.named_parameters()}
    assert sum(counted.values()) == total
    assert sum(n for name, n in counted.items() if name.startswith("blocks.")) == matrices == 12 * layers * width**2
    config = PretrainConfig(model=shape)
    size = config.phases()[0]
    assert size.params_total == total
    assert f"{size.flops_per_token / 1e9:.3g}" == gflop


def test_the_rehearsals_model_has_102_400_parameters() -> None:
    assert sum(parameter.numel() for parameter in model().parameters()) == 102_400
    config = PretrainConfig(model=SMALL, data=CharData(sequence=64))
    assert config.phases()[0].params_total == 102_400


def test_shared_key_and_value_heads_have_the_size_that_the_bill_counts() -> None:
    shape = replace(SMALL, kv_heads=1)
    counted = sum(parameter.numel() for parameter in CharGpt(shape).parameters())
    assert counted == PretrainConfig(model=shape).phases()[0].params_total == 102_400 - 2 * 2 * 64 * 32


@pytest.mark.parametrize(
    "wrong", [{"width": 65}, {"head_dim": 48}, {"kv_heads": 3}, {"width": 6, "head_dim": 3}], ids=str
)
def test_a_shape_that_cannot_be_is_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="multiple of an even head_dim"):
        CharGpt(replace(SMALL, **wrong))


def test_a_position_sees_nothing_that_follows() -> None:
    module, ids = model(), tokens(1, 12)
    changed = ids.clone()
    changed[0, 8:] = (changed[0, 8:] + 1) % 17
    assert torch.equal(module(ids).logits[:, :8], module(changed).logits[:, :8])


def test_logits_never_pass_the_cap_and_are_fp32_when_products_are_bf16() -> None:
    module = model(dtype=torch.float32)
    module.compute_dtype = torch.bfloat16
    with torch.no_grad():
        module.head.weight.mul_(100)
    logits = module(tokens(2, 8)).logits
    assert logits.dtype == torch.float32
    assert 14 < logits.abs().max() <= 15


def test_the_norm_has_no_gain_and_unit_mean_square() -> None:
    x = torch.randn(3, 64, dtype=torch.float64) * 7
    assert norm(x).square().mean(-1).tolist() == pytest.approx([1.0] * 3)


@pytest.mark.parametrize("kv_heads", [None, 1])
def test_with_a_cache_one_position_at_a_time_the_logits_are_the_same(kv_heads: int | None) -> None:
    module, ids = model(replace(SMALL, kv_heads=kv_heads)), tokens(2, 20)
    whole = module(ids).logits
    cache = CharCache(20)
    parts = [module(ids[:, :5], cache=cache).logits]
    parts += [module(ids[:, t : t + 1], cache=cache).logits for t in range(5, 20)]
    assert (torch.cat(parts, 1) - whole).abs().max() < 1e-12


def test_greedy_generation_follows_the_largest_logit() -> None:
    module, ids = model(), tokens(1, 4)[0].tolist()
    made = list(generate(module, Text(ids, allowed=17, max_tokens=10, window=64)))
    for place, chosen in enumerate(made):
        logits = module(torch.tensor([ids + made[:place]])).logits[0, -1, :17]
        assert chosen == int(logits.argmax())


def test_generation_goes_on_beyond_the_window_with_its_last_half() -> None:
    module, ids = model(), tokens(1, 6)[0].tolist()
    made = list(generate(module, Text(ids, allowed=17, max_tokens=14, window=8)))
    context = list(ids)
    for chosen in made:
        if len(context) > 8:
            context = context[-4:]
        assert chosen == int(module(torch.tensor([context])).logits[0, -1, :17].argmax())
        context.append(chosen)


@pytest.mark.parametrize(("max_tokens", "window", "room"), [(3, 64, 7), (14, 8, 8)])
def test_a_generation_takes_memory_for_what_it_may_write_and_no_more(
    max_tokens: int, window: int, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rooms: list[int] = []

    class Seen(CharCache):
        def __init__(self, capacity: int) -> None:
            super().__init__(capacity)
            rooms.append(capacity)

    monkeypatch.setattr(char_gpt, "CharCache", Seen)
    ids = tokens(1, 4)[0].tolist()
    assert len(list(generate(model(), Text(ids, allowed=17, max_tokens=max_tokens, window=window)))) == max_tokens
    assert set(rooms) == {room}


def test_a_seed_repeats_a_sample_and_another_gives_another() -> None:
    def sample(seed: int) -> list[int]:
        return list(generate(model(), Text([1, 2], allowed=17, max_tokens=40, window=64, temperature=2.0, seed=seed)))

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)


def test_top_k_keeps_to_the_likeliest_and_1_is_greedy() -> None:
    module = model()
    greedy = list(generate(module, Text([3], allowed=17, max_tokens=12, window=64)))
    assert (
        list(generate(module, Text([3], allowed=17, max_tokens=12, window=64, temperature=2.0, top_k=1, seed=5)))
        == greedy
    )
    likely = set(module(torch.tensor([[3]])).logits[0, -1, :17].topk(3).indices.tolist())
    first = {
        next(generate(module, Text([3], allowed=17, max_tokens=1, window=64, temperature=2.0, top_k=3, seed=s)))
        for s in range(60)
    }
    assert first == likely


def test_ids_without_a_symbol_are_never_generated() -> None:
    module = model()
    with torch.no_grad():
        module.head.weight[17:] = 0
        module.head.weight[:17] *= 0.01
    assert all(
        i < 17 for i in generate(module, Text([1], allowed=17, max_tokens=60, window=64, temperature=2.0, seed=0))
    )


def test_generation_ends_behind_a_stop() -> None:
    module = model()
    made = list(generate(module, Text([3], allowed=17, max_tokens=30, window=64)))
    stop = made[4]
    ended = list(generate(module, Text([3], allowed=17, max_tokens=30, window=64, stop=[stop])))
    assert ended == made[: made.index(stop) + 1]


def test_a_tiny_temperature_is_greedy_and_no_error() -> None:
    module = model()
    greedy = list(generate(module, Text([3], allowed=17, max_tokens=8, window=64)))
    assert list(generate(module, Text([3], allowed=17, max_tokens=8, window=64, temperature=1e-6, seed=1))) == greedy


def test_the_start_is_the_stated_one_and_needs_no_other_parameter() -> None:
    names = {name: tuple(p.shape) for name, p in CharGpt(replace(SMALL, width=256)).named_parameters()}
    drawn = {name: initial(name, shape, seed=4) for name, shape in names.items()}
    deviations = {name: round(tensor.std().item(), 2) for name, tensor in drawn.items()}
    assert deviations["embed.weight"] == pytest.approx(1.0, abs=0.02)
    for layer in (0, 1):
        for part in ("attention.q", "attention.k", "attention.v", "ffn.up"):
            assert deviations[f"blocks.{layer}.{part}.weight"] == pytest.approx(1 / 16, abs=0.01)
        for part in ("attention.o", "ffn.down"):
            assert deviations[f"blocks.{layer}.{part}.weight"] == 0
    assert deviations["head.weight"] == 0
    assert std("blocks.0.attention.k.weight", (16, 64)) == 1 / 16  # with fewer outputs than inputs, less
    q = "blocks.1.attention.q.weight"
    assert torch.equal(initial(q, names[q], seed=4), drawn[q])
    assert not torch.equal(initial(q, names[q], seed=5), drawn[q])
    assert not torch.equal(drawn["blocks.0.attention.q.weight"], drawn[q])


def test_activation_checkpointing_changes_no_gradient() -> None:
    module, ids, targets = model(), tokens(2, 9), tokens(2, 9, seed=2)
    module.train()
    found = []
    for on in (False, True):
        module.checkpointing = on
        module.zero_grad()
        module(ids, targets).loss_sum.backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert module.checkpointing
    assert len(found[0]) == len(list(module.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_dropout_drops_while_training_alone_by_the_seed_and_so_with_checkpointing() -> None:
    shape = replace(SMALL, dropout=0.5)
    module, whole = model(shape), model()
    ids, targets = tokens(2, 16), tokens(2, 16, seed=2)
    with torch.no_grad():
        assert torch.equal(module(ids, targets).loss_sum, whole(ids, targets).loss_sum)
    module.train()

    def trained(seed: int, *, checkpointing: bool) -> tuple[float, Tensor]:
        module.recompute(checkpointing, products_too=False)
        module.zero_grad()
        torch.manual_seed(seed)
        loss = module(ids, targets).loss_sum
        loss.backward()
        gradient = module.embed.weight.grad
        assert gradient is not None
        return loss.item(), gradient.clone()

    kept, again, other = (
        trained(1, checkpointing=False),
        trained(1, checkpointing=True),
        trained(2, checkpointing=False),
    )
    assert kept[0] == again[0] != other[0]
    assert torch.equal(kept[1], again[1])
    assert kept[0] != whole(ids, targets).loss_sum.item()
    scale = torch.ones(1, 400, SMALL.width, dtype=torch.float64)
    torch.manual_seed(3)
    dropped = module.blocks[0]._dropped(scale)  # type: ignore[operator]
    assert set(dropped.unique().tolist()) == {0.0, 2.0}
    assert abs(dropped.mean().item() - 1) < 0.05
