"""The model of tinystories-growth: a GPT-2-style decoder whose FFN is dense (phase 0) or a mixture of experts (1, 2).

Unusual here:
- the head is the embedding table (tied): `embed.weight` is stored once; no buffers: a state dict has only weights;
- master weights may be wider than the compute dtype: each product casts its own weight to the activations' dtype,
  there is no autocast; router, softmax and loss are at least fp32;
- on GPUs other than sm_90 training may drop (token, expert) pairs beyond a static capacity; evaluation never does.

The module knows nothing of training: no optimizer, no schedule, no accumulation. Legend: B batch, T sequence, V
vocabulary, L layers, E experts, d width. The layers are in blocks.py, the experts' products in routing.py.

| parameter                                      | initialisation                          | group    |
| ---------------------------------------------- | --------------------------------------- | -------- |
| embed.weight (also the head)                   | normal, 0.02                            | no decay |
| q, k, v, up weights                            | normal, 0.02                            | decay    |
| o, down weights (write to the residual stream) | normal, 0.02 / sqrt(2 x layers)         | decay    |
| router.weight                                  | normal, model.router_std                | decay    |
| norm weights / norm biases                     | 1 / 0                                   | no decay |
| every other bias                               | 0                                       | no decay |
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gpufleet.job.experiments.growth.spec import GrowthConfig, shape
from gpufleet.job.experiments.models.blocks import DTYPES, Block, Dispatch, Experts, Norm, at_least_fp32, rotations
from gpufleet.job.experiments.models.config import CAPACITY
from gpufleet.job.experiments.models.routing import Routing
from gpufleet.job.experiments.models.selective import Checkpointed
from gpufleet.job.kind.job import require

INIT_STD = 0.02


class GrowthOutput(NamedTuple):
    """The result of a forward pass. The trainer divides `loss_sum` by the tokens of the whole global batch, and weights
    `aux_loss` by this micro-batch's share of these tokens.
    """

    logits: Tensor | None  # [B, T, V] in the compute dtype; only without targets
    loss_sum: Tensor | None  # scalar, fp32 or wider: cross-entropy summed over tokens; only with targets
    # A scalar: the load balance as the mean over layers, without its coefficient. It is 1 if the load is even; None in
    # a dense model.
    aux_loss: Tensor | None
    # [L, E] int64: number of pairs of a token and a choice for each expert; None in a dense model
    expert_load: Tensor | None
    router_entropy: Tensor | None  # [L] nats, mean over tokens; None in a dense model

    @property
    def aux(self) -> dict[str, Tensor]:
        """The metric values to log, by name; empty for a dense model."""
        if self.expert_load is None or self.router_entropy is None:
            return {}
        return {"load": self.expert_load, "entropy": self.router_entropy}


def build(
    config: GrowthConfig,
    phase_index: int,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype | None = None,
    generator: torch.Generator | None = None,
) -> Growth:
    """A freshly initialised model of a phase. `dtype` of the parameters: by default the phase's state dtype.

    The values are random numbers of `generator` on the CPU (by default seeded with config.seed), so that they are the
    same on each device. On the device "meta", no values are made.
    """
    with torch.device("meta"):
        module = Growth(config, phase_index)
    module = module.to(dtype or state_dtype(config, phase_index))
    if torch.device(device).type != "meta":
        module = module.to_empty(device=device)
        initialise(module, config, generator or torch.Generator().manual_seed(config.seed))
    _choose_dispatch(module, torch.device(device))
    return module


def load(
    config: GrowthConfig, phase_index: int, state: dict[str, Tensor], *, device: torch.device | str = "cpu"
) -> Growth:
    """A model that uses the tensors of `state`, moved to `device`, with their dtype. Raises ValueError if they do not
    fit.
    """
    module = build(config, phase_index, device="meta")
    try:
        module.load_state_dict({name: tensor.to(device) for name, tensor in state.items()}, assign=True)
    except RuntimeError as error:
        raise ValueError(f"phase {phase_index}: the weights do not fit this run config: {error}") from error
    for parameter in module.parameters():
        parameter.requires_grad_(True)
    _choose_dispatch(module, torch.device(device))
    return module


def state_dtype(config: GrowthConfig, phase_index: int) -> torch.dtype:
    """The dtype of weights, gradients and moments in a phase."""
    return DTYPES[config.state_dtype(phase_index)]


def decays(name: str) -> bool:
    """Whether weight decay applies to the parameter: to every matrix except the table."""
    return name.endswith("weight") and "norm" not in name and not name.startswith("embed")


class Growth(Checkpointed):
    """One phase's model. `compute_dtype`, `checkpointing` and the dispatch may be changed at any time."""

    def __init__(self, config: GrowthConfig, phase_index: int) -> None:
        super().__init__()
        require(config)
        self.shape = s = shape(config.model, phase_index)
        self.compute_dtype = DTYPES[config.precision.compute]
        self.embed = nn.Embedding(s.vocab, s.width)
        self.blocks = nn.ModuleList(Block(s) for _ in range(s.layers))
        self.norm = Norm(s.width)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> GrowthOutput:
        """Logits if there are no targets, otherwise the summed loss. Tokens and targets are int64."""
        x_BTd = self.look_up(tokens_BT).to(self.compute_dtype)
        cos_TD, sin_TD = rotations(tokens_BT.shape[1], self.shape.width // self.shape.heads, x_BTd)
        routings: list[Routing] = []
        for block in self.blocks:
            x_BTd, routing = block(x_BTd, cos_TD, sin_TD)
            if routing is not None:
                routings.append(routing)
        x_BTd = self.norm(x_BTd)
        logits = loss_sum = None
        if targets_BT is None:
            logits = F.linear(x_BTd, self.embed.weight.to(x_BTd.dtype))
        else:
            loss_sum = self.loss(x_BTd, targets_BT)
        if not routings:
            return GrowthOutput(logits, loss_sum, None, None, None)
        return GrowthOutput(
            logits,
            loss_sum,
            torch.stack([r.balance for r in routings]).mean(),
            torch.stack([r.load for r in routings]),
            torch.stack([r.entropy for r in routings]),
        )

    def look_up(self, tokens_BT: Tensor) -> Tensor:
        """The tokens' rows of the table. On a CPU, the table's gradient is sparse here, and is added row by row to the
        gradient of the last product, which saves 1 % of a step. The gradient is not sparse in bf16, which would round
        each row, nor on a GPU, which adds in no fixed order.
        """
        table = self.embed.weight
        sparse = table.device.type == "cpu" and table.dtype != torch.bfloat16
        return F.embedding(tokens_BT, table, sparse=sparse)

    def loss(self, x_BTd: Tensor, targets_BT: Tensor) -> Tensor:
        """Cross-entropy summed over tokens. F.linear_cross_entropy, which needs no memory for logits, is not used,
        because it rounds the sum to the compute dtype (in bf16, 3198.3 to 3200.0) and cannot be compiled. 24 GB are
        enough for the logits.
        """
        logits = F.linear(x_BTd, self.embed.weight.to(x_BTd.dtype)).flatten(0, 1)
        return F.cross_entropy(logits.to(at_least_fp32(logits.dtype)), targets_BT.flatten(), reduction="sum")

    @property
    def capacity(self) -> float | None:
        """If the product is padded, the number of rows for each expert, as a multiple of the even share; None if rows
        are never dropped.
        """
        ffn = self.blocks[0].ffn
        return ffn.capacity if isinstance(ffn, Experts) and ffn.dispatch == "padded" else None

    def set_dispatch(self, dispatch: Dispatch, capacity: float = CAPACITY) -> None:
        """Sets how the expert product runs: `grouped` drops nothing, `padded` drops pairs beyond `capacity`."""
        for block in self.blocks:
            if isinstance(block.ffn, Experts):
                block.ffn.dispatch, block.ffn.capacity = dispatch, capacity


@torch.no_grad()
def initialise(module: Growth, config: GrowthConfig, generator: torch.Generator) -> None:
    """Fills the parameters as the table at the top of this file says, with random numbers that are made on the CPU in
    fp32.
    """
    for name, parameter in module.named_parameters():
        std = initial_std(name, module.shape.layers, config.model.router_std)
        if std is None:
            parameter.fill_(1.0 if name.endswith("weight") else 0.0)
        else:
            parameter.copy_(torch.empty(parameter.shape).normal_(0.0, std, generator=generator))


def initial_std(name: str, layers: int, router_std: float) -> float | None:
    """The standard deviation of the initial values of a matrix, by its name in the state dict; None for norms and
    biases.
    """
    if "norm" in name or not name.endswith("weight"):
        return None
    if name.endswith("router.weight"):
        return router_std
    if name.endswith(("o.weight", "down.weight")):
        return INIT_STD / math.sqrt(2 * layers)
    return INIT_STD


def _choose_dispatch(module: Growth, device: torch.device) -> None:
    """Chooses the experts' product for `device`. grouped_mm is fast on CPU, sm_90 and sm_100; on other devices it loops
    and waits for the host (torch 2.11 to 2.15). On sm_100 an expert without tokens gets a gradient that is not 0
    (pytorch issues 172439, 193633, open in 2026-11).
    """
    grouped = device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9
    module.set_dispatch("grouped" if grouped else "padded")
