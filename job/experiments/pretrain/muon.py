"""Muon for hidden matrices, AdamW for the tables, as one optimizer: one list of groups, one state by parameter.

Muon orthogonalises each matrix's momentum in bf16 (five Newton-Schulz steps; Jordan 2024) and scales the rate by
sqrt(max(1, rows / columns)). Every argument is passed, because torch's default weight decay of 0.1 is not wanted. On
FSDP2's shards, torch.optim.Muon gathers the matrix in every product. Here each rank gets some of the matrices as a
whole, orthogonalises them, and returns the shards. This needs only two exchanges of bf16 per matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.optim import Optimizer

from gpufleet.job.experiments.engine import optimizer, parallel

BASE_WIDTH = 768  # the width at which the tables' rates were tuned (nanochat, gpt.py, read 2026-11-21)
ADAM_EPS = 1e-10  # from the same source
MUON: dict[str, Any] = {
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": "original",
}


class Combined(Optimizer):
    """Groups with `kind` "muon" or "adamw", each with its own `base_lr` and, unless it is 0, `weight_decay`. All state
    exists from the start, as zeros: `momentum_buffer`, or `step`, `exp_avg` and `exp_avg_sq`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float]) -> None:
        groups = [group for group in groups if group["params"]]
        super().__init__(groups, {"lr": 0.0, "weight_decay": 0.0})
        self._inner: list[Optimizer] = []
        for group in self.param_groups:
            parameters, lr, weight_decay = group["params"], group["base_lr"], group["weight_decay"]
            group["lr"] = lr
            inner: Optimizer
            if group["kind"] == "muon":
                kind = OwnedMuon if owned(parameters) else torch.optim.Muon
                inner = kind(
                    parameters, lr=lr, weight_decay=weight_decay, momentum=group["momentum"], nesterov=True, **MUON
                )
            else:
                inner = torch.optim.AdamW(
                    parameters,
                    lr=lr,
                    betas=betas,
                    eps=ADAM_EPS,
                    weight_decay=weight_decay,
                    amsgrad=False,
                    maximize=False,
                    fused=True,
                )
            for parameter in parameters:
                self.state[parameter] = _zeros(parameter, group["kind"])
            group.update({key: value for key, value in inner.param_groups[0].items() if key not in group})
            inner.param_groups[0] = group  # the only group of the inner optimizer is the same object
            inner.state = self.state
            self._inner.append(inner)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters."""
        for inner in self._inner:
            inner.step()


def owned(parameters: Sequence[Tensor]) -> bool:
    """Whether each rank can own some of these matrices: all of them must be split by rows over the ranks of a node."""
    cuts = ((Shard(0),), (Replicate(), Shard(0)))
    return all(isinstance(parameter, DTensor) and parameter.placements in cuts for parameter in parameters)


class OwnedMuon(torch.optim.Muon):
    """torch.optim.Muon with shared work: each rank orthogonalises one of several matrices of the same shape."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameters in _by_shape(group["params"]):
                _, ranks, rank = parallel.cut_over(parameters[0])
                for start in range(0, len(parameters), ranks):
                    self._update_round(parameters[start : start + ranks], group, rank, ranks)

    def _update_round(self, parameters: Sequence[DTensor], group: dict[str, Any], rank: int, ranks: int) -> None:
        """Updates `parameters`, at most one matrix per rank. Must be called by every rank with the same matrices."""
        updates = []
        for parameter in parameters:
            assert parameter.grad is not None
            gradient = cast(DTensor, parameter.grad).to_local()
            average = self.state[parameter]["momentum_buffer"].to_local()
            average.lerp_(gradient, 1 - group["momentum"])
            update = gradient.lerp(average, group["momentum"]) if group["nesterov"] else average
            updates.append(update.to(torch.bfloat16))
        parts = torch.cat(updates)
        rows, columns = parameters[0].shape
        # Rows per rank, as torch.chunk splits rows: equally many except for the last ranks, which may have none.
        rows_each = -(-rows // ranks)
        shares = [max(0, min(rows_each, rows - rows_each * other)) for other in range(ranks)]
        sent = [shares[rank] if other < len(parameters) else 0 for other in range(ranks)]
        taken = shares if rank < len(parameters) else [0] * ranks
        group_of_ranks, _, _ = parallel.cut_over(parameters[0])
        whole = parts.new_empty(sum(taken), columns)
        dist.all_to_all_single(whole, parts, taken, sent, group=group_of_ranks)
        if rank < len(parameters):
            whole = _orthogonal(whole)
        dist.all_to_all_single(parts, whole, sent, taken, group=group_of_ranks)
        for part, parameter in zip(parts.view(len(parameters), shares[rank], columns), parameters, strict=True):
            weights = parameter.to_local()
            weights.mul_(1 - group["lr"] * group["weight_decay"])
            weights.add_(part, alpha=group["lr"])


def _orthogonal(update: Tensor) -> Tensor:
    """The change that torch.optim.Muon makes to the matrix for this update with a learning rate of 1, computed by
    torch's own step.
    """
    matrix = nn.Parameter(torch.zeros_like(update))
    matrix.grad = update
    step: Callable[[], None] = torch.optim.Muon(
        [matrix], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False, **MUON
    ).step
    step()
    return matrix.detach()


def _by_shape(parameters: Iterable[Tensor]) -> Iterator[list[DTensor]]:
    """The matrices by shape, in the order in which shapes first appear, which is the same on every rank."""
    by_shape: dict[torch.Size, list[DTensor]] = {}
    for parameter in parameters:
        by_shape.setdefault(parameter.shape, []).append(cast(DTensor, parameter))
    yield from by_shape.values()


def _zeros(parameter: nn.Parameter, kind: str) -> dict[str, Tensor]:
    if kind == "muon":
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return optimizer.zeros(parameter)
