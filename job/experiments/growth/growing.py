"""Turns one phase's weights into the next one's, keeping the function: pure functions, state dict -> state dict.

The functions are exact in real arithmetic, and keep the dtype. Only rounding remains, which check.py measures. New
numbers are drawn on the CPU in fp32 from the given generator, in the order of the state dict, so a growth can be
repeated anywhere.

Three mistakes that look right and are silent: writing E/2 into a tied table (which also halves the input), zero-padding
a normalised stream (which changes the statistics), copying a layer (which is then applied twice).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpufleet.job.experiments.growth.model import initial_std
from gpufleet.job.experiments.growth.spec import GrowthConfig

State = dict[str, Tensor]


def grow(config: GrowthConfig, phase_index: int, state: State, generator: torch.Generator) -> State:
    """The starting weights of a phase, from the end of the phase before: 1 adds experts, 2 width and layers."""
    model = config.model
    if phase_index == 1:
        return upcycle(state, experts=model.experts, router_std=model.router_std, generator=generator)
    if phase_index == 2:
        wide = widen(state, noise=model.symmetry_noise, generator=generator)
        return deepen(wide, new_layers=model.new_layers, router_std=model.router_std, generator=generator)
    raise ValueError(f"phase {phase_index} is not grown; only 1 and 2 are")


def upcycle(state: State, *, experts: int, router_std: float, generator: torch.Generator) -> State:
    """Every expert is the dense FFN. Weights over the chosen experts sum to 1, so any router keeps the function; the
    router is random, because zero logits tie and send every token to the same two experts.
    """
    grown: State = {}
    for name, tensor in state.items():
        if ".ffn." not in name:
            grown[name] = tensor.clone()
            continue
        if name.endswith("up.weight"):
            router = name.replace("up.weight", "router.weight")
            grown[router] = _normal((experts, tensor.shape[-1]), router_std, tensor, generator)
        grown[name] = tensor.expand(experts, *tensor.shape).clone()
    return grown


def widen(state: State, *, noise: float, generator: torch.Generator) -> State:
    """Twice as wide, activations x -> [x; x]: heads doubled in block order (head_dim stays), FFN units duplicated.

    A matrix's inputs arrive twice, so the matrix is halved, which is exact in binary. `noise` x the matrix's own
    standard deviation is added to one input half and subtracted from the other: the noise cancels now and lets the
    copies part in training.
    """
    grown: State = {}
    for name, tensor in state.items():
        if name == "embed.weight":
            grown[name] = torch.cat([tensor, tensor], dim=-1)
        elif name.startswith("norm."):
            # the tied head [E, E] doubles every logit; halving its input once corrects that
            grown[name] = torch.cat([tensor, tensor]) / 2
        elif name.endswith("router.weight"):
            grown[name] = _widened(tensor, 1, noise, generator)  # keeps the outputs, and so the choice of experts
        elif name.endswith("weight") and tensor.ndim > 1:
            grown[name] = _widened(tensor, 2, noise, generator)
        else:  # layer norms' gains and biases, Linear biases: one value per output
            grown[name] = torch.cat([tensor, tensor], dim=-1)
    return grown


def deepen(state: State, *, new_layers: int, router_std: float, generator: torch.Generator) -> State:
    """Appends `new_layers` blocks that add exactly 0: weights and biases that write to the residual stream (o and every
    expert's down-projection) are zero, the rest is initialised as usual. The old layers' tensors are shared.
    """
    layers = 1 + max(int(name.split(".")[1]) for name in state if name.startswith("blocks."))
    template = [(name.removeprefix("blocks.0."), tensor) for name, tensor in state.items() if ".0." in name[:9]]
    grown = {name: tensor for name, tensor in state.items() if not name.startswith("norm.")}
    for index in range(layers, layers + new_layers):
        for part, tensor in template:
            std = initial_std(part, layers + new_layers, router_std)
            if part.split(".")[-2] in ("o", "down"):
                fresh = torch.zeros_like(tensor)
            elif std is None:
                fresh = torch.full_like(tensor, 1.0 if part.endswith("weight") else 0.0)
            else:
                fresh = _normal(tensor.shape, std, tensor, generator)
            grown[f"blocks.{index}.{part}"] = fresh
    return grown | {name: tensor for name, tensor in state.items() if name.startswith("norm.")}


def _widened(matrix: Tensor, copies: int, noise: float, generator: torch.Generator) -> Tensor:
    """[W/2 + N, W/2 - N], with a fresh N for each copy of the outputs. N's scale is each matrix's own, also among
    stacked experts. The result is written in place: at full size every temporary takes a third of a gigabyte.
    """
    rows, columns = matrix.shape[-2:]
    wide = matrix.new_empty(*matrix.shape[:-2], copies * rows, 2 * columns)
    half, scale = matrix / 2, matrix.std(dim=(-2, -1), keepdim=True)
    for start in range(0, copies * rows, rows):
        copy = wide[..., start : start + rows, :]
        n = _normal(matrix.shape, noise, matrix, generator).mul_(scale)
        torch.add(half, n, out=copy[..., :columns])
        torch.sub(half, n, out=copy[..., columns:])
    return wide


def _normal(shape: tuple[int, ...], std: float, like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty(shape).normal_(0.0, std, generator=generator).to(like)
