"""AdamW in two forms: in fp32 (torch's fused one), and entirely in bf16 with 8 bytes per parameter, gradient included.

In bf16 a step of lr 8e-5 is often smaller than the distance to the next number, and rounding to nearest would lose it.
`NarrowAdamW` computes in fp32 and rounds weights and moments stochastically, so that they are right on average
(Connolly, Higham, Mary 2021). Its random bits are a hash of (seed, step, parameter, element): there is no generator and
no state, and the bits are the same on every device, so that a resumed run continues bit for bit. The arguments: the
engine sets the learning rate before each step; weight decay is per group (`groups`); betas and eps come from the run
config; amsgrad and maximize are off. Moments start at 0 with each phase.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job.experiments.engine import parallel

KEYS = (1 << 62) - 1  # a key fits into int64 even after an element's number is added
Tensors = tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]  # weights, first and second moments


class Moments(Protocol):
    """AdamW's settings in a section `optim`."""

    @property
    def betas(self) -> tuple[float, ...]: ...
    @property
    def eps(self) -> float: ...


def make(groups: Iterable[dict[str, Any]], config: Moments, *, seed: int) -> Optimizer:
    """The optimizer for the parameters of `groups`, chosen by their dtype. The optimizer's moments exist from the
    beginning, as zeros.
    """
    groups = [group for group in groups if group["params"]]
    betas = (config.betas[0], config.betas[1])
    dtypes = {parameter.dtype for group in groups for parameter in group["params"]}
    if dtypes == {torch.bfloat16}:
        return NarrowAdamW(groups, betas=betas, eps=config.eps, seed=seed)
    assert torch.bfloat16 not in dtypes, dtypes
    optimizer = torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=config.eps, fused=True)
    for parameter in parameters(optimizer):
        optimizer.state[parameter] = zeros(parameter)
    return optimizer


def zeros(parameter: Tensor) -> dict[str, Tensor]:
    """The state of fused AdamW before its first step."""
    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
    return {"step": step, "exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.zeros_like(parameter)}


def groups(module: nn.Module, decays: Callable[[str], bool], weight_decay: float) -> list[dict[str, Any]]:
    """Two groups, in the order of the state dict: the parameters that decay, by name, and the rest."""
    named = list(module.named_parameters())
    return [
        {"params": [p for name, p in named if decays(name)], "weight_decay": weight_decay},
        {"params": [p for name, p in named if not decays(name)], "weight_decay": 0.0},
    ]


def moments(optimizer: Optimizer, module: nn.Module) -> dict[str, dict[str, Tensor]]:
    """The optimizer's moment tensors by kind and parameter name; a checkpoint contains them with the weights."""
    by_kind: dict[str, dict[str, Tensor]] = {}
    for name, parameter in module.named_parameters():
        for kind, tensor in optimizer.state.get(parameter, {}).items():
            if kind != "step":
                by_kind.setdefault(kind, {})[name] = tensor
    return by_kind


def set_step(optimizer: Optimizer, step: int) -> None:
    """Continues after `step` steps of this phase, which the bias correction needs."""
    for parameter in parameters(optimizer):
        if "step" in optimizer.state.get(parameter, {}):
            optimizer.state[parameter]["step"].fill_(step)


def cosine(lr: float, floor: float, share: float) -> float:
    """The rate after this share of the steps: half a cosine from `lr` down to `floor` x lr."""
    return lr * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * share)))


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Sets the rate of the next step."""
    for group in optimizer.param_groups:
        group["lr"] = lr


@torch.no_grad()
def clip(optimizer: Optimizer, max_norm: float) -> Tensor:
    """Scales the parameters' gradients down to a global norm of `max_norm` (0 only measures); NarrowAdamW scales them
    only when its next step reads them. Returns the norm before clipping, in fp32, on the device. Unlike torch's
    function, this one sums bf16 gradients in fp32.
    """
    gradients = [p.grad for p in parameters(optimizer) if p.grad is not None]
    total = parallel.norm(gradients)
    if max_norm:
        scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
        if isinstance(optimizer, NarrowAdamW):
            optimizer.scale = scale
        else:
            torch._foreach_mul_([parallel.local(gradient) for gradient in gradients], scale)
    return total


class NarrowAdamW(Optimizer):
    """AdamW whose weights and moments are bf16, stochastically rounded. On CUDA each group is updated by one launch
    (narrow_kernel.py) with fixed addresses. So a checkpoint must be read into the existing tensors: the launch would
    not use tensors that replace them.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, betas: tuple[float, float], eps: float, seed: int) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})
        self.seed = seed
        self.scale: Tensor | None = None  # fp32 scalar on the device, by which the next step's gradients are multiplied
        self._step = torch.zeros((), dtype=torch.int64)  # the same for every parameter
        for parameter in parameters(self):
            moments = {kind: torch.zeros_like(parameter) for kind in ("exp_avg", "exp_avg_sq")}
            self.state[parameter] = {"step": self._step, **moments}
        self._updates = [_updater(self._tensors(group)) for group in self.param_groups]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Does one update from bf16 gradients, which stay unchanged. `scale` is used once."""
        self._step += 1
        step, index = int(self._step), 0
        for group, update in zip(self.param_groups, self._updates, strict=True):
            beta1, beta2 = group["betas"]
            gradients = [parameter.grad for parameter in group["params"]]
            update(
                gradients,
                torch.ones((), device=gradients[0].device) if self.scale is None else self.scale,
                [_key(self.seed, step, index + place) for place in range(len(gradients))],
                decay=1 - group["lr"] * group["weight_decay"],
                rate=group["lr"] / (1 - beta1**step),
                root=(1 - beta2**step) ** -0.5,
                betas=(beta1, beta2),
                eps=group["eps"],
            )
            index += len(gradients)
        self.scale = None

    def _tensors(self, group: dict[str, Any]) -> Tensors:
        """The weights of a group, their first and their second moments."""
        states = [self.state[parameter] for parameter in group["params"]]
        return group["params"], [state["exp_avg"] for state in states], [state["exp_avg_sq"] for state in states]


def _updater(tensors: Tensors) -> Callable[..., None]:
    """Returns a function that updates all `tensors` once."""
    if tensors[0][0].device.type == "cuda":
        from gpufleet.job.experiments.engine.narrow_kernel import Launch  # Triton exists only on Linux

        return Launch(*tensors)
    return functools.partial(update_plainly, tensors)


def update_plainly(
    tensors: Tensors,
    gradients: Sequence[Tensor],
    scale: Tensor,
    counters: Sequence[int],
    *,
    decay: float,
    rate: float,
    root: float,
    betas: tuple[float, float],
    eps: float,
) -> None:
    """Does the same update as narrow_kernel.Launch, with torch operations, one parameter after the other."""
    for weight, average, square, gradient, counter in zip(*tensors, gradients, counters, strict=True):
        g = gradient.float() * scale
        m = torch.lerp(average.float(), g, 1 - betas[0])
        v = torch.lerp(square.float(), g * g, 1 - betas[1])
        w = weight.float() * decay - rate * m / (v.sqrt() * root + eps)
        bits = _hash(torch.arange(counter, counter + weight.numel(), device=weight.device).view_as(weight))
        weight.copy_(stochastic_bf16(w, bits))
        average.copy_(stochastic_bf16(m, bits >> 16))
        square.copy_(stochastic_bf16(v, bits >> 32))


def stochastic_bf16(x: Tensor, bits: Tensor) -> Tensor:
    """Rounds fp32 to one of its two bf16 neighbours, up with the probability of the part that is cut off. `bits` is
    int64 with uniform lowest 16 bits. Infinities and NaN stay unchanged.
    """
    raw = x.view(torch.int32)
    rounded = ((raw + (bits & 0xFFFF).to(torch.int32)) & -0x10000).view(torch.float32)
    return torch.where(x.isfinite(), rounded, x).to(torch.bfloat16)


def _hash(x: Tensor) -> Tensor:
    """48 well-mixed low bits per int64 (the finaliser of MurmurHash3); products wrap, shifts fill with zeros."""
    x = (x ^ _shift(x, 33)) * -0xAE502812AA7333
    x = (x ^ _shift(x, 33)) * -0x3B314601E57A13AD
    return x ^ _shift(x, 33)


def _shift(x: Tensor, by: int) -> Tensor:
    """A logical right shift, because torch's own shift is arithmetic."""
    return (x >> by) & ((1 << (64 - by)) - 1)


def _key(seed: int, step: int, index: int) -> int:
    """The number at which a parameter's counters begin in a step. This number is far away from the counters of other
    parameters, positive, and within int64.
    """
    return (((seed * 1_000_003 + step) * 1_000_003 + index) * 0x9E3779B97F4A7C15) & KEYS


def parameters(optimizer: Optimizer) -> list[nn.Parameter]:
    """All parameters that the optimizer updates. Walking through the module at every step would take longer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
