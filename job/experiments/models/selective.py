"""Activation checkpointing: keeps expensive results and recomputes all others in the backward pass, or recomputes
everything.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.attention import varlen as _registers_its_operator  # noqa: F401
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

aten = torch.ops.aten
KEPT = {
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten._grouped_mm.default,
    aten._scaled_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.torch_attn._varlen_attn.default,  # packed rows on CUDA
    # kept, because if it were recomputed, a token with equal logits could be routed differently than in the forward
    # pass
    aten.topk.default,
}
# the index of the first of the product's two matrices
MATMULS = {aten.mm.default: 0, aten.addmm.default: 1, aten.bmm.default: 0}
# Above this ratio of outputs to summed numbers, storing a product takes longer than computing it again (as for an
# adapter's B).
WIDE = 8


class Checkpointed(nn.Module):
    """A model of `blocks`, which switches their flags `checkpointing` and perhaps `products_too` together."""

    blocks: nn.ModuleList

    @property
    def checkpointing(self) -> bool:
        """Activation checkpointing in training mode: the results of products and attention are kept, and all others are
        recomputed.
        """
        return bool(self.blocks[0].checkpointing)

    @checkpointing.setter
    def checkpointing(self, on: bool) -> None:
        self.recompute(on)

    def recompute(self, checkpointing: bool, *, products_too: bool = False) -> None:
        """Sets what backward recomputes in training mode: nothing, all but products, or whole blocks."""
        for block in self.blocks:
            block.checkpointing, block.products_too = checkpointing, products_too  # type: ignore[assignment]


def keep_products() -> Any:
    """The `context_fn` for torch.utils.checkpoint: matmuls, attention and top-k are kept."""
    return create_selective_checkpoint_contexts(_policy)


# Without this, torch caches no traced graph that calls the policy, because the policy is part of what was compiled.
keep_products.cache_hash = " ".join([*sorted(map(str, KEPT)), str(WIDE)])  # type: ignore[attr-defined]


def _policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    keep = op in KEPT
    if keep and op in MATMULS:
        first, second = args[MATMULS[op] : MATMULS[op] + 2]
        keep = second.shape[-1] <= WIDE * first.shape[-1]
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE
