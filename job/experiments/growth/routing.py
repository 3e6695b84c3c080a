"""Which experts each token goes to, seen from outside: for the check that a growth sends none elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from gpufleet.job.experiments.growth.model import Growth
from gpufleet.job.experiments.models.blocks import Experts


class ExpertChoice(NamedTuple):
    """What one expert layer chose. Legend: N tokens, K experts of a token."""

    experts: Tensor  # [N, K], sorted by number
    margin: Tensor  # [N], between the last expert chosen and the first that was not
    scale: Tensor  # the largest logit


@contextlib.contextmanager
def routed(module: Growth) -> Iterator[list[ExpertChoice]]:
    """Collects each expert layer's choice, in layer order."""
    chosen: list[ExpertChoice] = []

    def choice(logits_NE: Tensor, k: int) -> ExpertChoice:
        values, experts = logits_NE.sort(-1, descending=True)
        margin_N = (
            values[:, k - 1] - values[:, k] if k < logits_NE.shape[-1] else torch.full_like(values[:, 0], torch.inf)
        )
        return ExpertChoice(experts[:, :k].sort().values, margin_N, logits_NE.abs().max())

    with contextlib.ExitStack() as stack:
        for block in module.blocks:
            if isinstance(block.ffn, Experts):
                k = block.ffn.top_k
                hook = block.ffn.router.register_forward_hook(
                    lambda _, __, logits_NE, k=k: chosen.append(choice(logits_NE, k))
                )
                stack.enter_context(hook)
        yield chosen


def flipped(old: ExpertChoice, new: ExpertChoice) -> Tensor:
    """[N]: whether a token goes to other experts."""
    return (old.experts != new.experts).any(-1)


def tied(layers: list[tuple[ExpertChoice, ExpertChoice]], limit: float) -> bool:
    """Whether the first layer that routes differently does so only where its logits tie; what follows, follows."""
    for old, new in layers:
        flipped_N = flipped(old, new)
        if flipped_N.any():
            return bool(old.margin[flipped_N].max() <= limit * old.scale.clamp(min=1.0))
    return False
