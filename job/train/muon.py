"""Muon for hidden matrices, AdamW for the tables, as one optimizer: one list of groups, one state by parameter.

torch.optim.Muon orthogonalises each matrix's momentum in bf16 (five Newton-Schulz steps; Jordan 2024) and scales the
rate by sqrt(max(1, rows / columns)). It runs on FSDP2's shards too, where each matrix is gathered for it. Every
argument is stated; torch's default weight decay of 0.1 is not wanted.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

BASE_WIDTH = 768  # the tables' rates were tuned at this width (nanochat, gpt.py, read 2026-11-21)
ADAM_EPS = 1e-10  # the same source
MUON: dict[str, Any] = {
    "nesterov": True,
    "ns_coefficients": (3.4445, -4.7750, 2.0315),
    "ns_steps": 5,
    "eps": 1e-7,
    "adjust_lr_fn": "original",
}


class Combined(Optimizer):
    """Groups with `kind` "muon" or "adamw", each with its own `base_lr`. All state exists from the start, as zeros:
    `momentum_buffer`, or `step`, `exp_avg` and `exp_avg_sq`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], weight_decay: float) -> None:
        groups = [group for group in groups if group["params"]]
        super().__init__(groups, {"lr": 0.0, "weight_decay": weight_decay})
        self._inner: list[Optimizer] = []
        for group in self.param_groups:
            parameters, lr = group["params"], group["base_lr"]
            group["lr"] = lr
            inner: Optimizer
            if group["kind"] == "muon":
                inner = torch.optim.Muon(
                    parameters, lr=lr, weight_decay=weight_decay, momentum=group["momentum"], **MUON
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
            inner.param_groups[0] = group  # one group, seen from both
            inner.state = self.state
            self._inner.append(inner)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One update of all parameters."""
        for inner in self._inner:
            inner.step()


def _zeros(parameter: nn.Parameter, kind: str) -> dict[str, Tensor]:
    if kind == "muon":
        return {"momentum_buffer": torch.zeros_like(parameter)}
    return {
        "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
        "exp_avg": torch.zeros_like(parameter),
        "exp_avg_sq": torch.zeros_like(parameter),
    }
