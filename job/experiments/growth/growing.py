"""Makes the weights of the next phase from those of a phase, so that the model still computes the same function. All
functions are pure, from a state dict to a state dict. The functions are exact in real arithmetic, and keep the dtype.
Only rounding remains, which check.py measures. New numbers are drawn on the CPU in fp32 from the given generator, in
the order of the state dict, so a growth can be repeated anywhere.

Three mistakes look right, and cause no error: writing E/2 into a tied table (which also halves the input), zero-padding
a normalised stream (which changes the statistics), copying a layer (which is then applied twice).
"""

from __future__ import annotations

import torch
from torch import Tensor

from gpufleet.job.experiments.growth.model import initial_std
from gpufleet.job.experiments.growth.spec import GrowthConfig

State = dict[str, Tensor]


def grow(config: GrowthConfig, phase_index: int, state: State, generator: torch.Generator) -> State:
    """The first weights of a phase, from the last weights of the previous phase: phase 1 adds experts, phase 2 adds
    width and layers.
    """
    model = config.model
    if phase_index == 1:
        return upcycle(state, experts=model.experts, router_std=model.router_std, generator=generator)
    if phase_index == 2:
        wide = widen(state, noise=model.symmetry_noise, generator=generator)
        return deepen(wide, new_layers=model.new_layers, router_std=model.router_std, generator=generator)
    raise ValueError(f"phase {phase_index} is not grown; only 1 and 2 are")


def upcycle(state: State, *, experts: int, router_std: float, generator: torch.Generator) -> State:
    """Makes every expert a copy of the dense FFN. The weights of the chosen experts sum to 1, so the function stays the
    same with any router. The router is random, because if all its logits were zero, every token would go to the same
    two experts.
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
    """Makes the model twice as wide, with activations x -> [x; x]: heads are doubled in block order (head_dim stays),
    and FFN units are duplicated. Each input of a matrix now occurs twice, so the matrix is divided by two, which is
    exact in binary. Noise, `noise` times the standard deviation of the matrix, is added to the half for the first copy
    of the inputs, and subtracted from the other half. At first the two cancel; in training they let the two copies
    become different.
    """
    grown: State = {}
    for name, tensor in state.items():
        if name == "embed.weight":
            grown[name] = torch.cat([tensor, tensor], dim=-1)
        elif name.startswith("norm."):
            # The tied head [E, E] doubles every logit. Dividing its input by two corrects this.
            grown[name] = torch.cat([tensor, tensor]) / 2
        elif name.endswith("router.weight"):
            # the outputs, and so the choice of experts, stay the same
            grown[name] = _widened(tensor, 1, noise, generator)
        elif name.endswith("weight") and tensor.ndim > 1:
            grown[name] = _widened(tensor, 2, noise, generator)
        else:  # layer norms' gains and biases, Linear biases: these have one value per output
            grown[name] = torch.cat([tensor, tensor], dim=-1)
    return grown


def deepen(state: State, *, new_layers: int, router_std: float, generator: torch.Generator) -> State:
    """Appends `new_layers` blocks that add exactly 0 to the residual stream: the weights and biases of the last product
    in each (o, and the down-projection of every expert) are zero. All other parameters are initialised as usual. The
    tensors of the old layers are not copied.
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
    """The matrix [W/2 + N, W/2 - N], with a new N for each copy of the outputs. The scale of N is that of the matrix;
    each of the stacked experts has its own. The result is written in place, because at full size every temporary tensor
    takes a third of a gigabyte.
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
