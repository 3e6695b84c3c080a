"""Cross-entropy of a large vocabulary without its logits: one chunk of tokens at a time, with gradients that are
computed in the same pass.

The whole fp32 logits of 8,192 tokens and 128,256 ids are 4.2 GB, and their gradient as much again. Here a chunk's
logits exist only for a moment: its loss and its gradient are computed together in the forward pass (as Hsu et al. 2024,
"Liger Kernel", describe), so nothing is computed twice. `F.linear_cross_entropy` does the same but rounds the sum to
the compute dtype (docs/decisions, training).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from gpufleet.job.experiments.engine.experiment import IGNORED

# The number of tokens whose logits exist at once. They are 0.5 GB in fp32 for 128,256 ids; job/kind assumes this
# number.
CHUNK_TOKENS = 1024


ChunkLoss = Callable[[Tensor, Tensor, bool], tuple[Tensor, Tensor | None]]


def chunk_loss(logits_CV: Tensor, targets_C: Tensor, grad: bool) -> tuple[Tensor, Tensor | None]:
    """Cross-entropy summed over the targets that are not IGNORED, fp32 or wider; if `grad`, also the gradient with
    respect to the logits, in their dtype, computed as if no token were ignored. The compiled function reads the logits
    twice; otherwise they are read about five times.
    """
    places_C1 = targets_C.clamp(min=0)[:, None]
    logs_CV = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32)).log_softmax(-1)
    loss = -(logs_CV.gather(1, places_C1) * (targets_C != IGNORED)[:, None]).sum()
    if not grad:
        return loss, None
    if torch.compiler.is_compiling():  # compiled code cannot fuse a scatter, and eager code would store a [C, V] mask
        ids_V = torch.arange(logits_CV.shape[1], device=logits_CV.device)
        slope_CV = logs_CV.exp_().add_(ids_V == places_C1, alpha=-1)
    else:
        slope_CV = logs_CV.exp_().scatter_add_(1, places_C1, torch.full_like(places_C1, -1.0, dtype=logs_CV.dtype))
    return loss, slope_CV.to(logits_CV.dtype)


def linear_loss(x_Nd: Tensor, weight_Vd: Tensor, targets_N: Tensor, chunk: ChunkLoss = chunk_loss) -> Tensor:
    """Cross-entropy of softmax(x weight^T), summed over the targets that are not IGNORED; fp32 or wider, scalar.

    The product is computed in the dtype of `x`, which `weight` has too; softmax and sum are at least fp32. `chunk`:
    `chunk_loss`, compiled or not. The gradients are computed only once, so a second backward pass through the same
    graph raises RuntimeError.
    """
    grad = torch.is_grad_enabled()
    loss: Tensor = _LinearLoss.apply(x_Nd, weight_Vd, targets_N, grad, chunk)  # type: ignore[no-untyped-call]
    return loss


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_Nd: Tensor, weight_Vd: Tensor, targets_N: Tensor, grad: bool, chunk: ChunkLoss) -> Tensor:
        wide = torch.promote_types(x_Nd.dtype, torch.float32)
        x_needs, weight_needs = (grad and needed for needed in ctx.needs_input_grad[:2])
        grad_x_Nd = torch.empty_like(x_Nd) if x_needs else None
        grad_weight_Vd = torch.zeros_like(weight_Vd, dtype=wide) if weight_needs else None
        loss = torch.zeros((), dtype=wide, device=x_Nd.device)
        for start in range(0, x_Nd.shape[0], CHUNK_TOKENS):
            part = slice(start, start + CHUNK_TOKENS)
            logits_CV = F.linear(x_Nd[part], weight_Vd)
            chunk_sum, slope_CV = chunk(logits_CV, targets_N[part], x_needs or weight_needs)
            del logits_CV
            loss += chunk_sum
            if slope_CV is None:
                continue
            # Ignored tokens are masked here, where a row is as wide as the model, because rows as wide as the
            # vocabulary would take longer.
            counted_C1 = (targets_N[part] != IGNORED)[:, None]
            if grad_x_Nd is not None:
                grad_x_Nd[part] = (slope_CV @ weight_Vd) * counted_C1
            if grad_weight_Vd is not None:
                grad_weight_Vd += slope_CV.T @ (x_Nd[part] * counted_C1)
        ctx.save_for_backward(grad_x_Nd, None if grad_weight_Vd is None else grad_weight_Vd.to(weight_Vd.dtype))
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        # In place, because otherwise a second table would exist while the layers still keep their memory.
        grad_x_Nd, grad_weight_Vd = (None if made is None else made.mul_(slope) for made in ctx.saved_tensors)
        return grad_x_Nd, grad_weight_Vd, None, None, None
