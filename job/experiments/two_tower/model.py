"""Two towers that meet in a cosine: one over frozen sentence embeddings, one over model ids. Many such models can be
trained at once.

Legend: K members trained together, Q queries, M models, S sentence width, H heads, h head width, d meeting width,
N dropout bits of one row.

- a head is sentence -> head -> ReLU -> head; the heads' outputs are joined, fused, and go through the query tower;
- every Linear has a bias; no ReLU after the last layer of a tower;
- dropout after each hidden ReLU and after fusion takes its random bits as an input (`noise`), 16 per unit. The same
  draw works for members together or one by one, and for all queries or chunks of them; it costs a fifth of torch's own
  dropout on a CPU. The next layer's weights, which are smaller than the activations, are multiplied by 1 / keep;
- the loss of the whole candidate matrix computes its own gradient while the scores are in memory, a few members at a
  time, so no tensor of scores outlives the loss (`softmax_loss`);
- each product casts to the compute dtype; norms, softmax and loss are fp32.

| parameters | at the start | weight decay |
|---|---|---|
| weights of Linear layers and heads | normal, std sqrt(2 / inputs) (He et al. 2015: what ReLU keeps) | yes |
| biases | 0 | no |
| model embedding | normal, std 1 / sqrt(width), as long as a sentence embedding | no |
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, stack_module_state, vmap

from gpufleet.job.experiments.engine.parallel import local
from gpufleet.job.experiments.two_tower.spec import Towers

NORM_EPS = 1e-8  # its square is added to a vector's squared length before the division by the length
GROUP = 1 << 23  # number of scores that the loss has in memory at once; at least those of one member


class Towered(NamedTuple):
    """The towers' outputs; [K, ...] for members together. Scores are query @ model.mT."""

    query: Tensor  # [Q, d], of length 1 / temperature, fp32
    model: Tensor  # [M, d], of length 1, fp32
    heads: Tensor  # [Q, H, h], the heads' outputs, fp32


class Noise(NamedTuple):
    """Uniform 16-bit integers, one per hidden unit of a row; [K, ...] for members together."""

    query: Tensor  # [Q, N]
    model: Tensor  # [M, N]


class TwoTowerModel(nn.Module):
    """One member. `forward` scores queries against all models."""

    def __init__(self, towers: Towers, models: int, *, compute: torch.dtype = torch.float32) -> None:
        super().__init__()
        t, joined = towers, towers.heads * towers.head
        self.towers, self.compute = t, compute
        self.head_in = nn.Linear(t.sentence, joined)
        self.head_out = nn.Parameter(torch.empty(t.heads, t.head, t.head))  # [H, in, out]
        self.head_bias = nn.Parameter(torch.empty(t.heads, 1, t.head))
        self.fusion = nn.Linear(joined, t.fusion)
        self.query = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((t.fusion, *t.query)))
        self.embedding = nn.Parameter(torch.empty(models, t.embedding))
        self.model = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise((t.embedding, *t.model)))

    def forward(self, x_QS: Tensor, noise: Noise | None = None) -> Towered:
        """`noise` None means no dropout."""
        t = self.towers
        query_bits, model_bits = _split(noise, t)
        hidden_QHh = self._hidden(self.head_in, x_QS, query_bits).view(-1, t.heads, t.head)
        heads_HQh = torch.baddbmm(
            self.head_bias.to(self.compute),
            hidden_QHh.transpose(0, 1).to(self.compute),
            self._dropout_weight(self.head_out, noise).to(self.compute),
        )
        # J = H h; this is the only copy, which fusion and `diversity` both need
        joined_QJ = heads_HQh.transpose(0, 1).flatten(1)
        fused_QF = self._hidden(self.fusion, joined_QJ, query_bits)
        query_Qd = self._tower(self.query, fused_QF, query_bits, noise, first=True)
        model_Md = self._tower(self.model, self.embedding, model_bits, noise, first=False)
        return Towered(unit(query_Qd) / t.temperature, unit(model_Md), joined_QJ.float().view(-1, t.heads, t.head))

    def _tower(self, layers: nn.ModuleList, x: Tensor, bits: list[Tensor], noise: Noise | None, first: bool) -> Tensor:
        """The tower's output. `first`: whether dropout was applied to its input."""
        for index, layer in enumerate(layers):
            dropped = noise if first or index else None
            x = self._hidden(layer, x, bits, dropped) if index < len(layers) - 1 else self._linear(layer, x, dropped)
        return x

    def _linear(self, layer: nn.Module, x: Tensor, dropped: Noise | None = None) -> Tensor:
        """The layer's output. `dropped` is given if dropout was applied to `x`."""
        return F.linear(*self._cast(layer, x, dropped))

    def _hidden(self, layer: nn.Module, x: Tensor, bits: list[Tensor], dropped: Noise | None = None) -> Tensor:
        """Applies the layer, ReLU, and dropout with the next bits. The result is not scaled yet."""
        taken = (bits.pop(0), _threshold(self.towers)) if bits else (None, 0)
        hidden: Tensor = _Hidden.apply(*self._cast(layer, x, dropped), *taken)  # type: ignore[no-untyped-call]
        return hidden

    def _cast(self, layer: nn.Module, x: Tensor, dropped: Noise | None) -> tuple[Tensor, Tensor, Tensor]:
        assert isinstance(layer, nn.Linear)
        weight = self._dropout_weight(layer.weight, dropped)
        return x.to(self.compute), weight.to(self.compute), layer.bias.to(self.compute)

    def _dropout_weight(self, weight: Tensor, dropped: Noise | None) -> Tensor:
        """The weight of a layer whose input was dropped, times 1 / keep."""
        return weight if dropped is None else weight * (65536 / (32768 - _threshold(self.towers)))


def unit(x: Tensor) -> Tensor:
    """Vectors of length 1 along the last dimension, fp32. A zero vector stays zero, and its gradient is finite."""
    x = x.float()
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS**2)


def initialise(module: TwoTowerModel, generator: torch.Generator) -> TwoTowerModel:
    """Fills the parameters as the table above says."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if name == "embedding":
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, math.sqrt(2 / _inputs(name, parameter)), generator=generator)
    return module


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter."""
    return not name.endswith("bias") and name.split(".")[-1] != "embedding"


class Stack(nn.Module):
    """Members of one shape as one module: every parameter of `members.<name>` is [K, ...]. One forward pass of all
    members is one vmap over their weights. Each member computes the same as it would alone.
    """

    def __init__(self, members: Sequence[TwoTowerModel]) -> None:
        super().__init__()
        parameters, _ = stack_module_state(list(members))
        self.count = len(members)
        self.members = members[0]
        with torch.device("meta"):
            self._one_of = (TwoTowerModel(members[0].towers, len(members[0].embedding), compute=members[0].compute),)
        for name, stacked in parameters.items():
            owner, _, last = name.rpartition(".")
            setattr(self.members.get_submodule(owner), last, nn.Parameter(stacked.detach().clone()))

    def forward(self, x_KQS: Tensor, noise: Noise | None = None) -> Towered:
        """`x` [K, Q, S], or [Q, S]: the same queries for every member."""
        dims = (0, 0 if x_KQS.dim() == 3 else None, None if noise is None else 0)
        together: Any = vmap(self._one, in_dims=dims)
        here = {name: local(parameter) for name, parameter in self.members.named_parameters()}
        towered: Towered = together(here, x_KQS, noise)
        return towered

    def packed(self) -> Tensor:
        """The parameters of each member, joined to one row, [K, P], detached."""
        return torch.cat([local(p.detach()).flatten(1) for p in self.members.parameters()], dim=1)

    @torch.no_grad()
    def unpack(self, packed_KP: Tensor) -> None:
        """Sets the parameters of all members from `packed` rows."""
        parameters = [local(p.detach()) for p in self.members.parameters()]
        parts = torch.split(packed_KP, [p[0].numel() for p in parameters], dim=1)
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))

    def _one(self, parameters: dict[str, Tensor], x_QS: Tensor, noise: Noise | None) -> Towered:
        towered: Towered = functional_call(self._one_of[0], parameters, (x_QS, noise))
        return towered


def draw_noise(towers: Towers, members: int, queries: int, models: int, generator: torch.Generator) -> Noise | None:
    """New random bits for one step of all members, on the generator's device; None if there is no dropout."""
    if not towers.dropout:
        return None
    sizes = (members, queries, sum(_query_units(towers))), (members, models, sum(towers.model[:-1]))
    return Noise(*(_bits(size, generator) for size in sizes))


def diversity(heads_QHh: Tensor) -> Tensor:
    """The mean squared cosine between the outputs of different heads, per query; 0 if there is only one head."""
    heads = heads_QHh.shape[-2]
    if heads == 1:
        return heads_QHh.new_zeros(heads_QHh.shape[:-2])
    # The products also give the lengths, so the heads need not be scaled to length 1 in another pass.
    products_QHH = heads_QHh @ heads_QHh.mT
    inverse_QH = torch.rsqrt(products_QHH.diagonal(dim1=-2, dim2=-1) + NORM_EPS**2)
    squares = (products_QHH * inverse_QH.unsqueeze(-1) * inverse_QH.unsqueeze(-2)).square()
    different = ~torch.eye(heads, dtype=torch.bool, device=squares.device)
    return (squares * different).sum((-2, -1)) / (heads * (heads - 1))


def softmax_loss(towered: Towered, targets_KQM: Tensor, weights_KQ: Tensor) -> Tensor:
    """For each member, the weighted sum over queries of the cross-entropy, in nats, between the softmax over all models
    and the targets. The targets of a query sum to 1, or to 0 if it has no loss. The result is [K] in fp32.
    """
    losses_K: Tensor = _SoftmaxLoss.apply(towered.query, towered.model, targets_KQM, weights_KQ)  # type: ignore[no-untyped-call]
    return losses_K


class _SoftmaxLoss(torch.autograd.Function):
    """Computes gradients in the forward pass, GROUP scores at a time, while these scores are still in a CPU's cache."""

    @staticmethod
    def forward(ctx: Any, query_KQd: Tensor, model_KMd: Tensor, targets_KQM: Tensor, weights_KQ: Tensor) -> Tensor:
        members, queries, models = targets_KQM.shape
        size = max(1, GROUP // (queries * models))
        losses_K = query_KQd.new_empty(members)
        grad_query_KQd, grad_model_KMd = torch.empty_like(query_KQd), torch.empty_like(model_KMd)
        for first in range(0, members, size):
            part = slice(first, first + size)
            query, model, targets, weights = query_KQd[part], model_KMd[part], targets_KQM[part], weights_KQ[part]
            logs = torch.log_softmax(query @ model.mT, -1)
            losses_K[part] = -(weights * (targets * logs).sum(-1)).sum(-1)
            mass = targets.sum(-1) * weights
            grad = logs.exp_().mul_(mass.unsqueeze(-1)).addcmul_(targets, weights.unsqueeze(-1), value=-1)
            grad_query_KQd[part] = grad @ model
            grad_model_KMd[part] = grad.mT @ query
        ctx.save_for_backward(grad_query_KQd, grad_model_KMd)
        return losses_K

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_query_KQd, grad_model_KMd = ctx.saved_tensors
        upstream = grads[0][:, None, None]
        return grad_query_KQd * upstream, grad_model_KMd * upstream, None, None


class _Hidden(torch.autograd.Function):
    """relu(x @ weight.T + bias), and 0 where bits < threshold: [R, out], or [K, R, out] for members together. Bias,
    ReLU and dropout work in place, and no mask is stored: the backward pass sees in the output which units were kept.
    """

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor, bits: Tensor | None, threshold: int) -> Tensor:
        hidden = torch.matmul(x, weight.mT).add_(bias.unsqueeze(-2)).relu_()
        return hidden if bits is None else hidden.mul_(bits >= threshold)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2], output)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, activated = ctx.saved_tensors
        grad = torch.ops.aten.threshold_backward(grads[0], activated, 0.0)
        grad_x = grad @ weight if ctx.needs_input_grad[0] else None
        return grad_x, grad.mT @ x, grad.sum(-2), None, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *inputs: Any) -> tuple[Tensor, int]:
        members = [
            value
            if not isinstance(value, Tensor)
            else value.expand(info.batch_size, *value.shape)
            if dim is None
            else value.movedim(dim, 0)
            for value, dim in zip(inputs, in_dims, strict=True)
        ]
        hidden: Tensor = _Hidden.apply(*members)  # type: ignore[no-untyped-call]
        return hidden, 0


def _bits(size: tuple[int, ...], generator: torch.Generator) -> Tensor:
    count = math.prod(size)
    words = torch.empty(-(-count // 4), dtype=torch.int64, device=generator.device)
    words.random_(-(2**63), None, generator=generator)
    return words.view(torch.int16)[:count].view(size)


def _threshold(t: Towers) -> int:
    """The threshold below which a unit's bits mean that it is dropped: the probability, rounded to 1 in 65536."""
    return round(t.dropout * 65536) - 32768


def _query_units(t: Towers) -> list[int]:
    return [t.heads * t.head, t.fusion, *t.query[:-1]]


def _split(noise: Noise | None, t: Towers) -> tuple[list[Tensor], list[Tensor]]:
    """The bits of each layer, in the order in which they are used."""
    if noise is None:
        return [], []
    return list(torch.split(noise.query, _query_units(t), -1)), list(torch.split(noise.model, list(t.model[:-1]), -1))


def _inputs(name: str, parameter: Tensor) -> int:
    return parameter.shape[-2] if name == "head_out" else parameter.shape[-1]
