"""One optimizer step and one evaluation: the arithmetic of training, without a schedule, a log or a checkpoint.

Precision: parameters are fp32 (bf16 where the phase's state is); each product inside the model casts its own weight to
the compute dtype, so there is no autocast and no second copy to keep. Loss and norms are fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from job.config import JobConfig
from job.train.data import Dataset
from job.train.optimizer import clip


class StepResult(NamedTuple):
    """One optimizer step, on the device: nothing is read back until it is logged."""

    loss: Tensor  # mean over the tokens of the global batch, nats, fp32
    grad_norm: Tensor  # before clipping
    load: Tensor | None  # [L, E] (token, choice) pairs per expert
    entropy: Tensor | None  # [L] nats

    def read_back(self) -> dict[str, Any]:
        """The figures for the log; waits for the device."""
        load = entropy = None
        if self.load is not None and self.entropy is not None:
            spread = self.load.max(-1).values / self.load.float().mean(-1)
            load = [round(x, 3) for x in spread.tolist()]
            entropy = [round(x, 4) for x in self.entropy.tolist()]
        return {
            "loss": self.loss.item(),
            "grad_norm": self.grad_norm.item(),
            "router_load": load,  # largest over mean, per layer
            "router_entropy": entropy,
        }


def update(module: nn.Module, opt: Optimizer, dataset: Dataset, config: JobConfig, step: int, micro: int) -> StepResult:
    """Forward and backward over the micro-batches of step `step`'s global batch, then one update.

    Loss and gradient are means over the tokens of the whole batch, so how it is cut does not change them (the
    load-balance term, a product of means, is weighted by each micro-batch's share).
    """
    tokens = config.batch.sequences * config.data.sequence
    loss: Tensor | float = 0.0
    load: Tensor | None = None
    entropy: Tensor | None = None
    for tokens_BT, targets_BT in dataset.micro_batches(config.seed, step, config.batch.sequences, micro):
        output = module(tokens_BT, targets_BT)
        share = tokens_BT.numel() / tokens
        objective = output.loss_sum / tokens
        loss = loss + objective.detach()
        if output.aux_loss is not None:
            objective = objective + config.optim.load_balance * share * output.aux_loss
            load = output.expert_load if load is None else load + output.expert_load
            weighted = share * output.router_entropy
            entropy = weighted if entropy is None else entropy + weighted
        objective.backward()
    norm = clip(module.parameters(), config.optim.clip)
    opt.step()
    opt.zero_grad(set_to_none=True)
    assert isinstance(loss, Tensor)
    return StepResult(loss, norm, load, entropy)


@torch.no_grad()
def evaluate(module: nn.Module, dataset: Dataset, config: JobConfig, micro: int) -> float:
    """Mean loss in nats per token on the same fixed windows every time."""
    module.eval()
    total = sum(module(*window).loss_sum.double() for window in dataset.fixed(config.eval.windows, micro))
    module.train()
    assert isinstance(total, Tensor)
    return total.item() / (config.eval.windows * config.data.sequence)


@contextlib.contextmanager
def compiled(module: nn.Module, device: torch.device) -> Iterator[None]:
    """Within it, each block runs compiled on CUDA: one graph for all blocks, static shapes. Outside, and on a CPU,
    the module runs as written, hooks and all.
    """
    blocks = list(getattr(module, "blocks", ())) if device.type == "cuda" else []
    for block in blocks:
        block.compile(fullgraph=True, dynamic=False)
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None
        if blocks:
            torch.compiler.reset()  # graphs of all phases share one cache: more than 8 (12 + 4 windows) are an error
