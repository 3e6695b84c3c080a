"""Frozen weights of a Linear in 8 bits: W = scale x weight, weight in float8_e4m3fn, and an fp32 scale for each output
row.

A scale is a power of two, so it is exact in bf16, and so is the dequantised weight. On a GPU, in bf16,
`torch._scaled_mm` multiplies, and each token's activations are quantised in the same way. Elsewhere the weights are
dequantised for the product. The gradient of the input is always computed from dequantised weights, which are not kept
between the two passes. Legend: N tokens, O outputs, I inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from gpufleet.job.experiments.models.config import FP8_CAPABILITY

DTYPE = torch.float8_e4m3fn
LARGEST = torch.finfo(DTYPE).max  # 448
LEAST = 1e-12  # stands for the largest number of a row of zeros
MULTIPLE = 16  # of both dimensions of a matrix that torch._scaled_mm multiplies


def require(device: torch.device) -> None:
    """Raises ValueError if this device is a GPU that cannot use the weights."""
    if device.type != "cuda":
        return
    major, minor = torch.cuda.get_device_capability(device)
    if major + minor / 10 < FP8_CAPABILITY:
        raise ValueError(
            f"precision.base is fp8, which needs compute capability {FP8_CAPABILITY} (L4, L40S, H100 or later); this"
            f" GPU has {major}.{minor}: choose another instance type, or set precision.base to bf16"
        )


def quantise(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The rows in fp8, and their scales [rows, 1]."""
    largest = rows.abs().amax(-1, keepdim=True).float().clamp(min=LEAST)
    scales = (largest / LARGEST).log2().ceil().exp2().to(torch.bfloat16)
    return (rows / scales.to(rows.dtype)).to(DTYPE), scales.float()


def dequantise(weight_OI: Tensor, scales_O1: Tensor, dtype: torch.dtype) -> Tensor:
    return weight_OI.to(dtype).mul_(scales_O1.to(dtype))


def product(x: Tensor, weight_OI: Tensor, scales_O1: Tensor) -> Tensor:
    """x W^T in the dtype of x [.., I], which alone gets a gradient."""
    result: Tensor = _Product.apply(x, weight_OI, scales_O1)  # type: ignore[no-untyped-call]
    return result


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_OI: Tensor, scales_O1: Tensor) -> Tensor:
        ctx.save_for_backward(weight_OI, scales_O1)
        if multiplies(x, weight_OI):
            return scaled_product(x, weight_OI, scales_O1)
        return F.linear(x, dequantise(weight_OI, scales_O1, x.dtype))

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None, None]:
        weight_OI, scales_O1 = ctx.saved_tensors
        return slope @ dequantise(weight_OI, scales_O1, slope.dtype), None, None


def multiplies(x: Tensor, weight_OI: Tensor) -> bool:
    """Whether the product is computed in fp8."""
    return x.is_cuda and x.dtype == torch.bfloat16 and not any(size % MULTIPLE for size in weight_OI.shape)


def scaled_product(x: Tensor, weight_OI: Tensor, scales_O1: Tensor) -> Tensor:
    """The product of quantised activations and weights, in bf16."""
    x_NI, scales_N1 = quantise(x.flatten(0, -2))
    y_NO = torch._scaled_mm(x_NI, weight_OI.t(), scale_a=scales_N1, scale_b=scales_O1.t(), out_dtype=torch.bfloat16)
    return y_NO.view(*x.shape[:-1], -1)
