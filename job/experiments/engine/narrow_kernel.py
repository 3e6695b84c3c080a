"""The update of NarrowAdamW on a GPU: one launch for all parameters of a group, whatever their number and size.

A row of the table holds the addresses of a parameter and its tensors; each program of the launch takes TILE elements of
one parameter. `optimizer.update_plainly` is the same arithmetic in torch operations, and draws the same random bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 2048
# The columns of the table, int64: four addresses, the number of elements, the parameter's first tile, and its counter.
COLUMNS = tl.constexpr(7)


class Launch:
    """The launch for these tensors of one device, contiguous bf16: weights, first and second moments."""

    def __init__(self, weights: Sequence[Tensor], averages: Sequence[Tensor], squares: Sequence[Tensor]) -> None:
        assert all(tensor.is_contiguous() for tensor in (*weights, *averages, *squares))
        self.device = weights[0].device
        tiles = [triton.cdiv(weight.numel(), TILE) for weight in weights]
        ends = torch.tensor(tiles).cumsum(0)
        self.tiles, first = int(ends[-1]), (ends - torch.tensor(tiles)).tolist()
        self.owner = torch.arange(len(tiles)).repeat_interleave(torch.tensor(tiles)).to(self.device)
        self.table = torch.tensor(
            [
                (weight.data_ptr(), 0, average.data_ptr(), square.data_ptr(), weight.numel(), at, 0)
                for weight, average, square, at in zip(weights, averages, squares, first, strict=True)
            ]
        )
        self.aligned = all(_aligned(tensor) for tensor in (*weights, *averages, *squares))

    def __call__(
        self,
        gradients: Sequence[Tensor],
        scale: Tensor,  # fp32 scalar on the device: the gradients' factor
        counters: Sequence[int],
        *,
        decay: float,  # the weight's factor
        rate: float,  # learning rate / bias correction of the first moment
        root: float,  # 1 / square root of the bias correction of the second moment
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        """Launches one update. `counters`: the number at which the random bits of each parameter begin."""
        assert all(gradient.is_contiguous() for gradient in gradients)
        self.table[:, 1] = torch.tensor([gradient.data_ptr() for gradient in gradients])
        self.table[:, 6] = torch.tensor(counters)
        table = self.table.to(self.device, non_blocking=True)
        _update[(self.tiles,)](
            table,
            self.owner,
            scale,
            decay,
            rate,
            root,
            1 - betas[0],
            1 - betas[1],
            eps,
            ALIGNED=self.aligned and all(_aligned(gradient) for gradient in gradients),
            TILE=TILE,
            num_warps=8,
        )


def _aligned(tensor: Tensor) -> bool:
    """Whether a thread may read eight numbers of the tensor (16 bytes) at once."""
    return tensor.data_ptr() % 16 == 0 and tensor.numel() % 8 == 0


@triton.jit
def _update(table, owner, scale, decay, rate, root, toward1, toward2, eps, ALIGNED: tl.constexpr, TILE: tl.constexpr):
    tile = tl.program_id(0)
    row = table + tl.load(owner + tile) * COLUMNS
    # otherwise the mask would prevent wide reads
    count = tl.multiple_of(tl.load(row + 4), 8) if ALIGNED else tl.load(row + 4)
    at = (tile - tl.load(row + 5)) * TILE + tl.arange(0, TILE)
    inside = at < count
    weights = _tensor(row, ALIGNED) + at
    averages = _tensor(row + 2, ALIGNED) + at
    squares = _tensor(row + 3, ALIGNED) + at
    g = tl.load(_tensor(row + 1, ALIGNED) + at, mask=inside, other=0.0).to(tl.float32) * tl.load(scale)
    m = tl.load(averages, mask=inside, other=0.0).to(tl.float32)
    v = tl.load(squares, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weights, mask=inside, other=0.0).to(tl.float32)
    m = m + toward1 * (g - m)
    v = v + toward2 * (g * g - v)
    w = w * decay - rate * m / (tl.sqrt(v) * root + eps)
    bits = (at + tl.load(row + 6)).to(tl.uint64)  # MurmurHash3's finaliser
    bits = (bits ^ (bits >> 33)) * 0xFF51AFD7ED558CCD
    bits = (bits ^ (bits >> 33)) * 0xC4CEB9FE1A85EC53
    bits = bits ^ (bits >> 33)
    tl.store(weights, _rounded(w, bits), mask=inside)
    tl.store(averages, _rounded(m, bits >> 16), mask=inside)
    tl.store(squares, _rounded(v, bits >> 32), mask=inside)


@triton.jit
def _tensor(address, ALIGNED: tl.constexpr):
    pointer = tl.load(address).to(tl.pointer_type(tl.bfloat16))
    return tl.multiple_of(pointer, 16) if ALIGNED else pointer


@triton.jit
def _rounded(x, bits):
    """Rounds stochastically to bf16; infinities and NaN stay."""
    raw = x.to(tl.int32, bitcast=True)
    up = ((raw + (bits & 0xFFFF).to(tl.int32)) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where((raw & 0x7F800000) != 0x7F800000, up, x).to(tl.bfloat16)
