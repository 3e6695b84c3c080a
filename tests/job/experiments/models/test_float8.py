"""A frozen base in fp8: its products and gradients against dequantised weights, and what of it is stored."""

from __future__ import annotations

from collections.abc import Iterator
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from gpufleet.job.experiments.models import float8, lora
from gpufleet.job.experiments.models.config import Lora
from gpufleet.job.experiments.models.decoder import Decoder
from tests.job.decoder_models import FAMILIES, as_arguments, generator, model, packed

ROWS = packed([[9, 7], [12]], 16)


def pair(family: str) -> tuple[Decoder, Decoder]:
    """A model whose adapted matrices are fp8, and one with the same adapters whose matrices are these, dequantised."""
    narrow, plain = (lora.attach(model(family), Lora(rank=4, dropout=0.0), generator()) for _ in range(2))
    for module in (narrow, plain):
        for _, layer in lora.layers(module):
            torch.nn.init.normal_(layer.lora_b, std=0.1, generator=generator())
    lora.store(narrow, float8.DTYPE)
    fill = lora.filling(narrow)
    for (_, layer), (_, whole) in zip(lora.layers(narrow), lora.layers(plain), strict=True):
        fill(layer.weight, whole.weight)
        assert layer.row_scales is not None
        with torch.no_grad():
            whole.weight.copy_(layer.weight.float() * layer.row_scales)
    return narrow, plain


@pytest.fixture
def multiplied_in_fp8() -> Iterator[None]:
    """What a GPU does, on the CPU."""
    with patch.object(float8, "multiplies", lambda x, weight: True):
        yield


def test_a_weight_is_within_half_a_step_of_e4m3_and_its_scale_a_power_of_two() -> None:
    rows = torch.randn(64, 96, generator=generator()) * torch.logspace(-6, 3, 64)[:, None]
    weight, scales = float8.quantise(rows)
    assert weight.dtype == torch.float8_e4m3fn
    assert torch.equal(scales.log2(), scales.log2().round())
    top = weight.float().abs().amax(-1)
    assert float(top.min()) > float8.LARGEST / 2 - 16  # all of the range is used, but for the power of two
    assert float(top.max()) <= float8.LARGEST
    # 3 bits of mantissa, or the step of the smallest numbers
    limit = torch.maximum(rows.abs() / 16, scales * 2**-10)
    assert bool(((weight.float() * scales - rows).abs() <= limit).all())


def test_a_row_of_zeros_stays_zeros() -> None:
    weight, scales = float8.quantise(torch.zeros(2, 16))
    assert torch.equal(weight.float() * scales, torch.zeros(2, 16))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_product_and_the_gradient_of_its_input_are_those_of_the_dequantised_weight(dtype: torch.dtype) -> None:
    weight, scales = float8.quantise(torch.randn(32, 48, generator=generator()))
    slope = torch.randn(3, 5, 32, generator=generator()).to(dtype)

    def passed(function: str) -> tuple[Tensor, Tensor]:
        x = torch.randn(3, 5, 48, generator=generator()).to(dtype).requires_grad_()
        exact = (weight.float() * scales).to(dtype)
        y = F.linear(x, exact) if function == "plain" else float8.product(x, weight, scales)
        y.backward(slope)
        assert x.grad is not None
        return y.detach(), x.grad

    for ours, theirs in zip(passed("fp8"), passed("plain"), strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, theirs)


@pytest.mark.usefixtures("multiplied_in_fp8")
def test_the_product_of_a_gpu_is_that_of_both_sides_dequantised() -> None:
    x = torch.randn(3, 5, 48, generator=generator()).bfloat16()
    weight, scales = float8.quantise(torch.randn(32, 48, generator=generator()))
    x_NI, scales_N1 = float8.quantise(x.flatten(0, 1))
    exact = (x_NI.double() * scales_N1) @ (weight.double() * scales).t()
    result = float8.product(x, weight, scales)
    assert result.shape == (3, 5, 32)
    torch.testing.assert_close(result.flatten(0, 1).double(), exact, rtol=2**-8, atol=1e-2)


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_gradients_of_the_adapter_are_those_over_dequantised_weights(family: str) -> None:
    narrow, plain = pair(family)
    losses = []
    for module in (narrow, plain):
        loss = module(*as_arguments(ROWS)).loss_sum
        assert loss is not None
        torch.autograd.backward(loss)
        losses.append(loss.detach())
    torch.testing.assert_close(*losses)
    theirs = lora.weights(plain)
    for name, parameter in lora.weights(narrow).items():
        assert parameter.grad is not None
        assert float(parameter.grad.abs().max()) > 0
        torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-4, atol=1e-5)


def test_the_matrices_are_one_byte_and_everything_else_is_as_it_was() -> None:
    narrow, plain = pair("qwen3")
    adapted = {f"{name}.weight" for name, _ in lora.layers(narrow)}
    assert len(adapted) == 14
    for (name, ours), (_, theirs) in zip(narrow.named_parameters(), plain.named_parameters(), strict=True):
        assert ours.element_size() == (1 if name in adapted else theirs.element_size())
    assert not any("row_scales" in name for name in narrow.state_dict())


def test_weights_in_fp8_are_never_merged() -> None:
    narrow, _ = pair("llama")
    with pytest.raises(AssertionError):
        dict(lora.merged_weights(narrow))


@pytest.mark.parametrize(
    ("capability", "refused"), [((8, 6), True), ((8, 9), False), ((9, 0), False), ((12, 0), False)]
)
def test_a_gpu_that_cannot_multiply_fp8_is_refused(
    capability: tuple[int, int], refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    float8.require(torch.device("cpu"))
    if not refused:
        float8.require(torch.device("cuda"))
        return
    with pytest.raises(ValueError, match=r"needs compute capability 8\.9 .* this GPU has 8\.6"):
        float8.require(torch.device("cuda"))
