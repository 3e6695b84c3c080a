"""The decoder: its counts, packed rows against single examples, its loss against torch's, its cache."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from gpufleet.job.experiments.engine.experiment import IGNORED
from gpufleet.job.experiments.engine.optimizer import groups
from gpufleet.job.experiments.models import decoder, lora
from gpufleet.job.experiments.models.config import QWEN3_8B, Lora
from gpufleet.job.experiments.models.config import DecoderConfig as Shape
from gpufleet.job.experiments.models.decoder import build, decays, frequencies, positions
from gpufleet.job.experiments.models.generate import _choose, generate, uniform
from gpufleet.job.experiments.models.linear_loss import CHUNK_TOKENS, chunk_loss, linear_loss
from gpufleet.job.experiments.sft.spec import SftConfig
from tests.job.decoder_models import FAMILIES, as_arguments, examples, generator, model, packed, slow_varlen

QWEN25_7B = Shape(
    family="qwen2",
    vocab=152_064,
    layers=28,
    width=3584,
    heads=28,
    kv_heads=4,
    head_dim=128,
    ffn=18_944,
    norm_eps=1e-6,
    rope_theta=1e6,
    rope_scaling="none",
)
QWEN3_1_7B = replace(QWEN3_8B, layers=28, width=2048, heads=16, ffn=6144, tied=True)
LENGTHS = [[5, 9, 2, 8], [24], [1, 1, 20]]


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (Shape(), 8_030_261_248),
        (QWEN3_8B, 8_190_735_360),
        (QWEN25_7B, 7_615_616_512),
        (QWEN3_1_7B, 1_720_574_976),
    ],
    ids=["llama-3.1-8b", "qwen3-8b", "qwen2.5-7b", "qwen3-1.7b"],
)
def test_full_size_decoders_hold_the_published_number_of_parameters(shape: Shape, count: int) -> None:
    module = build(shape, compute=torch.bfloat16, device="meta")
    assert sum(p.numel() for p in module.parameters()) == count
    assert replace(SftConfig(), model=shape).sizes().base_weights == 2 * count


def test_the_adapter_of_the_full_size_holds_168_million_parameters() -> None:
    module = lora.attach(build(Shape(), compute=torch.bfloat16, device="meta"), Lora())
    assert sum(p.numel() for p in module.parameters() if p.requires_grad) == 167_772_160
    assert SftConfig().phases()[0].params_trained == 167_772_160


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_row_has_the_loss_of_its_examples_alone(family: str) -> None:
    module, rows = model(family), packed(LENGTHS, 24)
    whole = module(*as_arguments(rows)).loss_sum
    alone = sum(module(tokens, targets).loss_sum for tokens, targets in examples(rows))
    counted = int((rows["targets"] != IGNORED).sum())
    assert abs(whole.item() - alone.item()) / counted < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_no_example_of_a_row_attends_to_another(family: str) -> None:
    module, rows = model(family), packed(LENGTHS, 24)
    before = module(rows["tokens"], None, rows["documents"]).logits
    changed = rows["tokens"].clone()
    changed[0, 5:14] = (changed[0, 5:14] + 31) % 96  # the second example of the first row
    after = module(changed, None, rows["documents"]).logits
    moved = (before - after).abs().amax(-1) > 0
    assert moved[0, 5:14].all()
    assert not moved[0, :5].any()
    assert not moved[0, 14:].any()
    assert not moved[1:].any()


def test_no_token_sees_the_future_of_its_own_example() -> None:
    module, rows = model("llama"), packed([[24]], 24)
    changed = rows["tokens"].clone()
    changed[0, 10:] = (changed[0, 10:] + 31) % 96
    for documents in (rows["documents"], None):
        moved = (module(rows["tokens"], None, documents).logits - module(changed, None, documents).logits).abs()
        assert moved[0, :10].max() < 1e-6
        assert moved[0, 10:].max() > 0.1


def test_positions_restart_with_each_example() -> None:
    assert positions(torch.tensor([[1, 1, 1, 2, 2, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4]])).tolist() == [
        [0, 1, 2, 0, 1, 0, 0, 1],
        [0, 1, 2, 3, 4, 5, 6, 7],
    ]


def test_gradients_of_packed_rows_are_those_of_the_examples_alone() -> None:
    module, rows = model("qwen3", torch.float64), packed(LENGTHS, 24)
    module(*as_arguments(rows)).loss_sum.backward()
    whole = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    for tokens, targets in examples(rows):
        module(tokens, targets).loss_sum.backward()
    for name, parameter in module.named_parameters():
        torch.testing.assert_close(whole[name], parameter.grad, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("products_too", [False, True])
def test_activation_checkpointing_changes_neither_loss_nor_gradient(products_too: bool) -> None:
    module, rows = model("llama"), packed(LENGTHS, 24)
    plain = module(*as_arguments(rows)).loss_sum
    plain.backward()
    wanted = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.zero_grad()
    module.recompute(True, products_too=products_too)
    again = module(*as_arguments(rows)).loss_sum
    again.backward()
    assert again.item() == plain.item()
    for parameter, gradient in zip(module.parameters(), wanted, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_varlen_kernel_is_given_the_examples_that_the_mask_tells_apart(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, rows = model(family, torch.float64), packed(LENGTHS, 24)
    starts = torch.tensor([0, 5, 14, 16, 24, 48, 49, 50, 70, 72, 72, 72], dtype=torch.int32)
    masked = module(*as_arguments(rows)).loss_sum
    monkeypatch.setattr(decoder, "varlen_runs", lambda device, compute: True)
    monkeypatch.setattr("gpufleet.job.experiments.models.decoder.varlen.varlen_attn", slow_varlen)
    torch.testing.assert_close(module(*as_arguments(rows), starts).loss_sum, masked, rtol=1e-12, atol=0)


def test_the_varlen_kernel_of_a_torch_without_a_word_for_shared_heads_is_not_told_of_them() -> None:
    def of_2_11(q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int]) -> None: ...
    def of_2_13(q: Tensor, k: Tensor, v: Tensor, *, window_size: tuple[int, int], enable_gqa: bool) -> None: ...

    assert decoder.groups(of_2_11) == {}
    assert decoder.groups(of_2_13) == {"enable_gqa": True}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the varlen kernel runs on CUDA alone")
@pytest.mark.parametrize("family", FAMILIES)
def test_the_varlen_kernel_agrees_with_the_mask(family: str) -> None:
    module = model(family, torch.float32).to("cuda")
    rows = {name: tensor.cuda() for name, tensor in packed(LENGTHS, 24).items()}
    starts = torch.tensor([0, 5, 14, 16, 24, 48, 49, 50, 70, 72, 72, 72], dtype=torch.int32, device="cuda")
    exact = module(*as_arguments(rows)).loss_sum
    module.compute_dtype = torch.bfloat16
    torch.testing.assert_close(module(*as_arguments(rows), starts).loss_sum, exact, rtol=2e-2, atol=0)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")  # the compiler's own look
@pytest.mark.parametrize("family", ["qwen3"])
def test_a_block_with_adapters_compiles_whole_and_once_for_all_layers(family: str) -> None:
    module = lora.attach(model(family), Lora(rank=2, dropout=0.0), generator())
    rows = packed(LENGTHS, 24)
    eager = module(*as_arguments(rows)).loss_sum
    graphs: list[Any] = []

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in module.blocks:
        block.forward = torch.compile(block.forward, fullgraph=True, dynamic=False, backend=backend)
    torch.testing.assert_close(module(*as_arguments(rows)).loss_sum, eager)
    module(*as_arguments(rows)).loss_sum.backward()
    assert len(graphs) == 2  # the first block's input needs no gradient, the others' does
    torch.compiler.reset()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_the_chunked_loss_and_its_gradients_equal_torchs(dtype: torch.dtype) -> None:
    tokens = 2 * CHUNK_TOKENS + 37
    x = torch.randn(tokens, 24, generator=generator(), dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(96, 24, generator=generator(8), dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(96, (tokens,), generator=generator(9))
    targets[::3] = IGNORED
    loss = linear_loss(x, weight, targets)
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    (loss / tokens).backward()
    ours, x.grad = x.grad, None
    our_weight, weight.grad = weight.grad, None
    logits = F.linear(x, weight).to(loss.dtype)
    wanted = F.cross_entropy(logits, targets, reduction="sum", ignore_index=IGNORED)
    (wanted / tokens).backward()
    rtol, atol = (1e-12, 1e-12) if dtype == torch.float64 else (2e-2, 1e-4)
    torch.testing.assert_close(loss, wanted, rtol=1e-12 if dtype == torch.float64 else 1e-6, atol=0)
    torch.testing.assert_close(ours, x.grad, rtol=rtol, atol=atol)
    torch.testing.assert_close(our_weight, weight.grad, rtol=rtol, atol=atol)


def test_the_gradient_of_a_bf16_table_is_added_up_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufleet.job.experiments.models.linear_loss.CHUNK_TOKENS", 8)
    x = torch.randn(2048, 24, generator=generator()).bfloat16()
    weight = torch.randn(96, 24, generator=generator(8)).bfloat16().requires_grad_()
    targets = torch.randint(96, (2048,), generator=generator(9))
    linear_loss(x, weight, targets).backward()
    assert weight.grad is not None
    slope = F.linear(x.double(), weight.detach().double()).softmax(-1) - F.one_hot(targets, 96)
    wanted = slope.T @ x.double()
    assert (weight.grad.double() - wanted).norm() < 0.006 * wanted.norm()  # 0.003; added up in bf16 it is 0.016


class Passes(TorchDispatchMode):
    """Operators that give a tensor of `numbers` numbers, views and products left out: each is a pass over memory."""

    def __init__(self, numbers: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numbers, self.names = numbers, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and out.numel() == self.numbers and not func.is_view and "mm" not in func.__name__:
            self.names.append(func.__name__)
        return out


def test_the_chunked_loss_passes_over_its_logits_no_more_often_than_it_must() -> None:
    x = torch.randn(50, 8, generator=generator()).bfloat16().requires_grad_()
    weight = torch.randn(70, 8, generator=generator()).bfloat16().requires_grad_()
    with Passes(50 * 70) as passes:
        linear_loss(x, weight, torch.arange(50)).backward()
    assert passes.names == [
        "_to_copy.default", "_log_softmax.default", "exp_.default", "scatter_add_.default", "_to_copy.default",
    ]  # fmt: skip


def test_the_compiler_gets_a_slope_without_a_scatter_and_the_same_numbers() -> None:
    logits, targets = torch.randn(5, 7, generator=generator()), torch.tensor([0, IGNORED, 6, 3, 3])
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    torch.compiler.reset()
    found = torch.compile(chunk_loss, fullgraph=True, backend=backend)(logits, targets, True)
    torch.compiler.reset()
    torch.testing.assert_close(found, chunk_loss(logits, targets, True))
    assert ["scatter" in graph for graph in graphs] == [False]


def test_the_scale_of_an_adapter_is_no_pass_over_what_it_gives_or_its_gradient() -> None:
    layer = lora.LoraLinear(nn.Linear(8, 70, bias=False).bfloat16(), Lora(rank=2, dropout=0.0))
    nn.init.normal_(layer.lora_a)
    nn.init.normal_(layer.lora_b)
    x = torch.randn(50, 8, generator=generator()).requires_grad_()
    with Passes(50 * 70) as passes:
        y = layer(x)
        torch.autograd.backward(y, torch.ones_like(y))
    assert passes.names == ["add.Tensor", "ones_like.default"]
    torch.testing.assert_close(y, F.linear(x, layer.merged()), rtol=1e-5, atol=1e-4)  # of sums that reach 360


def test_the_size_of_a_batch_scales_the_gradient_without_being_rounded() -> None:
    x = torch.randn(4, 8, generator=generator()).to(torch.bfloat16).requires_grad_()
    weight = torch.eye(8, dtype=torch.bfloat16) * 2
    (whole,) = torch.autograd.grad(linear_loss(x, weight, torch.arange(4)), x)
    share = 1 / 255  # 0.4 % below the next number in bf16
    (scaled,) = torch.autograd.grad(linear_loss(x, weight, torch.arange(4)) * share, x)
    assert torch.equal(scaled, (whole.float() * share).to(torch.bfloat16))


def test_a_frozen_head_gets_no_gradient_and_evaluation_makes_none() -> None:
    x, weight = torch.randn(5, 8, requires_grad=True), torch.randn(11, 8)
    linear_loss(x, weight, torch.arange(5)).backward()
    assert x.grad is not None
    assert weight.grad is None
    with torch.no_grad():
        assert not linear_loss(x, weight.requires_grad_(), torch.arange(5)).requires_grad


def test_llama_31_scaling_divides_slow_rotations_by_eight_and_leaves_fast_ones() -> None:
    scaled, plain = frequencies(Shape()), frequencies(replace(Shape(), rope_scaling="none"))
    ratio = scaled / plain
    assert ratio[0] == 1.0
    assert ratio[-1] == 1 / 8
    assert (ratio.diff() <= 0).all()
    assert ((ratio > 1 / 8) & (ratio < 1)).any()


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_weights_follow_the_table(family: str) -> None:
    module = build(replace(FAMILIES[family], layers=8), compute=torch.float32, generator=generator())
    for name, parameter in module.named_parameters():
        if "norm" in name or name.endswith("bias"):
            assert torch.equal(parameter, torch.full_like(parameter, "norm" in name))
        else:
            wanted = 0.02 / 4 if name.endswith(("o.weight", "down.weight")) else 0.02  # sqrt(2 x 8 layers)
            assert parameter.std().item() == pytest.approx(wanted, rel=0.15), name


def test_parameters_fall_into_groups_as_the_table_says() -> None:
    module = model("qwen2")
    decayed, plain = groups(module, decays, 0.1)
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert {p.ndim for p in decayed["params"]} == {2}
    assert sum(p.ndim == 2 for p in plain["params"]) == 2  # embedding and head
    assert len(decayed["params"]) + len(plain["params"]) == len(list(module.parameters()))


def test_heads_that_cannot_be_grouped_are_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"model\.kv_heads: 3 does not divide model\.heads, 4"):
        build(replace(FAMILIES["llama"], kv_heads=3), compute=torch.float32)


@pytest.mark.parametrize("family", FAMILIES)
def test_cached_generation_writes_what_reading_everything_anew_would(family: str) -> None:
    module = model(family, torch.float64)
    prompts = [[5, 6, 7], [9], [1, 2, 3, 4, 5, 6]]
    written = generate(module, prompts, 6)
    for prompt, tokens in zip(prompts, written, strict=True):
        ids = list(prompt)
        for token in tokens:
            assert token == int(module(torch.tensor([ids])).logits[0, -1].argmax())
            ids.append(token)
        assert len(tokens) == 6


def test_decoding_takes_attention_with_the_heads_innermost_as_cuda_gives_it(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = Shape(vocab=32, layers=2, width=16, heads=4, kv_heads=2, head_dim=4, ffn=16)
    module = build(shape, compute=torch.float32, generator=torch.Generator().manual_seed(1))
    wanted = generate(module, [[1, 2, 3], [4]], 5)
    plain = torch.nn.functional.scaled_dot_product_attention

    def strided(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        return plain(q, k, v, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", strided)
    assert generate(module, [[1, 2, 3], [4]], 5) == wanted


def test_a_sample_depends_on_its_seed_and_not_on_its_neighbours() -> None:
    module = model("llama", torch.float64)
    together = generate(module, [[5, 6], [5, 6], [8]], 8, temperature=1.0, seeds=[1, 2, 3])
    assert together[0] != together[1]
    assert generate(module, [[8]], 8, temperature=1.0, seeds=[3]) == together[2:]
    assert generate(module, [[5, 6]], 8, temperature=1.0, seeds=[2]) == together[1:2]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_samples_follow_the_distribution(temperature: float) -> None:
    module = model("llama")
    module.compute_dtype = torch.float32
    expected = (module(torch.tensor([[5, 6]])).logits[0, -1] / temperature).softmax(-1)
    drawn = generate(module, [[5, 6]] * 4000, 1, temperature=temperature, seeds=range(4000))
    seen = torch.bincount(torch.tensor([tokens[0] for tokens in drawn]), minlength=96) / 4000
    assert (seen - expected).abs().max() < 0.03
    assert abs(sum(uniform(seed, 0) for seed in range(4000)) / 4000 - 0.5) < 0.02


def test_a_token_that_cannot_be_is_not_drawn_by_the_smallest_number() -> None:
    assert _choose(torch.tensor([[-torch.inf, 0.0]]), 1.0, [0.0]).tolist() == [1]


def test_every_token_is_drawn_anew() -> None:
    module = model("llama")
    assert module.head is not None
    torch.nn.init.zeros_(module.head.weight)  # every token is as likely, whatever was before
    (drawn,) = generate(module, [[5]], 60, temperature=1.0, seeds=[1])
    assert len(set(drawn)) > 30  # of 96; 45 are expected


def test_generation_ends_at_a_stop_token_and_leaves_it_out() -> None:
    module = model("llama")
    free = generate(module, [[5, 6, 7], [9]], 6)
    stop = free[0][3]
    stopped = generate(module, [[5, 6, 7], [9]], 6, stop={stop})
    assert stopped[0] == free[0][: free[0].index(stop)]
    assert stopped[1] == (free[1][: free[1].index(stop)] if stop in free[1] else free[1])
    assert generate(module, [[5, 6, 7]], 6, stop={free[0][0]}) == [[]]


def test_generation_ends_when_all_ranks_do_and_not_when_this_one_would() -> None:
    module, calls = model("llama"), list[bool]()
    stop = generate(module, [[5, 6, 7]], 6)[0][2]

    def other(own: bool) -> bool:
        calls.append(own)
        return len(calls) == 5

    written = generate(module, [[5, 6, 7]], 6, stop={stop}, agree=other)
    assert stop not in written[0]
    assert len(written[0]) <= 2
    assert calls[-1]  # this rank had no more to write
    assert len(calls) == 5


def test_an_empty_prompt_and_missing_seeds_are_refused() -> None:
    module = model("llama")
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        generate(module, [[1], []], 3)
    with pytest.raises(ValueError, match="0 seeds for 1 prompts"):
        generate(module, [[1]], 3, temperature=0.5)
