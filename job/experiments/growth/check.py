"""Proves that a growth has not changed the function that the model computes: measures at each boundary, and raises an
error if a number exceeds its limit. Everything runs in eval mode with every product in the weights' own dtype (fp32 or
fp64), TF32 off, one attention backend for both models and no dropped token. bf16 cannot be used here, because changed
routing alone moves logits by about 2. The limits were measured on this experiment (2026-11): rounding gives differences
of 2e-6 to 7e-6 in fp32. Every wrong variant gives at least 1e-2, or at least 1e-9 in fp64 if the mistake cannot be seen
in fp32.

If the second and third expert of a token are equal to within rounding, the same function may route the token either
way. A window is left out if the first layer that routes differently does so only at such ties. If more than a few
windows are left out, the check fails.
"""

from __future__ import annotations

import contextlib
import json
import math
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from gpufleet.job.experiments.growth.model import Growth, load, state_dtype
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.models.blocks import Experts, at_least_fp32

# the largest allowed difference, as a multiple of max(1, largest logit)
PASS = {torch.float32: 3e-5, torch.float64: 1e-12}
FAIL = {torch.float32: 1e-2, torch.float64: 1e-9}
LOSS_LIMIT = 0.01  # the largest loss difference in nats per token that padding, or the cast to bf16, may cause
TIES = 0.25  # the share of the windows that may be left out because of ties
CAPACITIES = (1.25, 1.5, 2.0, 3.0, 4.0, 8.0)  # capacities to try in turn


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The difference between the old and the new model on the probe. `passed`: whether it is below the limit, and no
    token is routed differently.
    """

    max_logit_difference: float
    mean_logit_difference: float
    max_logit: float
    limit: float
    loss_difference: float  # nats per token, new - old
    routing_flips: int  # number of pairs of a token and an old layer whose set of experts has changed
    routings: int
    ties: int  # windows that were left out because of ties
    verdict: str  # pass, unclear (between the limits) or fail

    @property
    def passed(self) -> bool:
        return self.verdict == "pass"


@dataclass(frozen=True, kw_only=True, slots=True)
class BoundaryReport:
    """The check of one growth. `growth_report.json` has one for each boundary."""

    phase: str
    dtype: str
    probe: tuple[int, int]
    before: Difference
    after_round_trip: Difference
    experts_used: tuple[int, ...]  # number of experts used on the probe, by layer
    load_max_over_mean: tuple[float, ...]
    capacity: float | None  # the capacity of the padded product after this boundary, on GPUs that use this product
    padded_loss_difference: float | None
    cast_loss_difference: float | None  # loss of bf16 weights minus loss of fp32; None without a cast
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain values. JSON has no NaN and no infinity: these values become words."""
        tree: dict[str, Any] = json.loads(json.dumps(asdict(self)), parse_constant=str)
        return tree


class ExpertChoice(NamedTuple):
    """The choices of one expert layer. Legend: N tokens, K experts of a token."""

    experts: Tensor  # [N, K], sorted by number
    # [N], the difference between the logits of the last chosen expert and of the first one that was not chosen
    margin: Tensor
    scale: Tensor  # the largest logit


class GrowthCheckFailed(ValueError):
    """The function of the model has changed at a boundary. `report` has the numbers."""

    def __init__(self, report: BoundaryReport) -> None:
        super().__init__(f"growth into phase {report.phase!r} failed: " + "; ".join(report.problems))
        self.report = report


def check_boundary(
    config: GrowthConfig, phase_index: int, old: Growth, new: Growth, probe_BT: Tensor, *, export: Path | None = None
) -> BoundaryReport:
    """Checks a growth, its save/load round trip, expert load, padding and the cast to the phase's state dtype.

    Both modules hold fp32 (or fp64) weights on the probe's device. `export`: the place of the round trip's safetensors
    file (a phase's start export); without it a temporary one. Raises `new`'s capacity if padding costs too much. Raises
    GrowthCheckFailed.
    """
    before = compare(old, new, probe_BT)
    with contextlib.ExitStack() as stack:
        path = export or Path(stack.enter_context(tempfile.TemporaryDirectory())) / "model.safetensors"
        intact = round_trip(new, path)
        after = compare(old, new, probe_BT)
    used, spread = expert_load(new, probe_BT)
    capacity, padded = fit_capacity(new, probe_BT)
    cast = cast_difference(config, phase_index, new, probe_BT)

    problems = [
        f"{_sentence(d)} {when}" for d, when in ((before, "at once"), (after, "after a round trip")) if not d.passed
    ]
    if not intact:
        problems.append("the file does not contain the weights that were saved")
    if phase_index == 1 and min(used) * 2 < config.model.experts:
        problems.append(f"only {min(used)} of {config.model.experts} experts are used in a layer")
    # This is checked only if tokens are padded on this device. Neither difference may be NaN.
    if new.capacity is not None and padded is not None and not abs(padded) <= LOSS_LIMIT:
        problems.append(f"padding moves the loss by {padded:.4f} at capacity {capacity}, limit {LOSS_LIMIT}")
    if cast is not None and not abs(cast) <= LOSS_LIMIT:
        problems.append(f"the cast to bf16 moves the loss by {cast:.4f}, limit {LOSS_LIMIT}")
    report = BoundaryReport(
        phase=config.phases()[phase_index].name,
        dtype=str(_dtype(new)).removeprefix("torch."),
        probe=(probe_BT.shape[0], probe_BT.shape[1]),
        before=before,
        after_round_trip=after,
        experts_used=used,
        load_max_over_mean=spread,
        capacity=capacity,
        padded_loss_difference=padded,
        cast_loss_difference=cast,
        problems=tuple(problems),
    )
    if problems:
        raise GrowthCheckFailed(report)
    return report


def compare(old: Growth, new: Growth, probe_BT: Tensor) -> Difference:
    """Logits, loss and routing of two models on the same tokens, one window at a time."""
    dtype = _dtype(new)
    largest = total = top = 0.0
    loss = flips = routings = count = 0.0
    ties = 0
    with exact(old, new), routed(old) as before, routed(new) as after:
        for tokens_1T in _windows(probe_BT):
            a, b = _logits(old, tokens_1T), _logits(new, tokens_1T)
            layers = list(zip(before, after, strict=False))  # only the old layers are compared
            before.clear()
            after.clear()
            if tied(layers, PASS[dtype]):
                ties += 1
                continue
            gap = (a - b).abs()
            largest, top = max(largest, gap.max().item()), max(top, a.abs().max().item())
            total, count = total + gap.sum(dtype=torch.float64).item(), count + gap.numel()
            loss += _loss(b, tokens_1T) - _loss(a, tokens_1T)
            flips += sum(flipped(x, y).sum().item() for x, y in layers)
            routings += sum(x.experts.shape[0] for x, _ in layers)
    if ties > TIES * probe_BT.shape[0]:
        largest = math.inf
    limit = PASS[dtype] * max(1.0, top)
    if math.isnan(total):
        largest = math.inf  # needed because max() above ignores a NaN
    compared = probe_BT.shape[0] - ties
    verdict = "pass" if largest <= limit and not flips else "unclear" if largest < FAIL[dtype] else "fail"
    return Difference(
        max_logit_difference=largest,
        mean_logit_difference=total / count if count else math.inf,
        max_logit=top,
        limit=limit,
        loss_difference=loss / compared if compared else math.inf,
        routing_flips=int(flips),
        routings=int(routings),
        ties=ties,
        verdict=verdict,
    )


def round_trip(module: Growth, path: Path) -> bool:
    """Saves the weights, reads them back tensor by tensor, and returns whether every bit is the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    state = module.state_dict()
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, path)
    with safe_open(path, framework="pt") as read:  # read tensor by tensor, because two copies of phase 3 are 17 GB
        same = set(read.keys()) == state.keys()
        for name in state.keys() & set(read.keys()):
            tensor = read.get_tensor(name)
            same = same and bool(torch.equal(state[name].cpu(), tensor))
            state[name].copy_(tensor)
    return same


def expert_load(module: Growth, probe_BT: Tensor) -> tuple[tuple[int, ...], tuple[float, ...]]:
    """For each layer, the number of experts used on the probe, and the largest load divided by the mean load; empty for
    a dense model.
    """
    with exact(module):
        load_LE = module(probe_BT).expert_load
    if load_LE is None:
        return (), ()
    spread = load_LE.max(-1).values / load_LE.double().mean(-1)
    return tuple((load_LE > 0).sum(-1).tolist()), tuple(round(x, 3) for x in spread.tolist())


def fit_capacity(module: Growth, probe_BT: Tensor) -> tuple[float | None, float | None]:
    """Returns the capacity, and the loss with padding minus the loss without dropped tokens. The capacity is raised in
    steps until this difference is within LOSS_LIMIT. The capacity is raised even on a device that drops no tokens,
    because the GPU of the next node may drop some. (None, None) for a dense model.
    """
    ffn = module.blocks[0].ffn
    if not isinstance(ffn, Experts):
        return None, None
    dispatch, least = ffn.dispatch, ffn.capacity
    with exact(module):
        dropless = _loss(module(probe_BT).logits, probe_BT)
        for capacity in [c for c in CAPACITIES if c >= least]:
            module.set_dispatch("padded", capacity)
            module.train()  # only training drops tokens
            difference = _loss(module(probe_BT).logits, probe_BT) - dropless
            module.eval()
            if abs(difference) <= LOSS_LIMIT:
                break
    module.set_dispatch(dispatch, capacity)
    return capacity, difference


def cast_difference(config: GrowthConfig, phase_index: int, module: Growth, probe_BT: Tensor) -> float | None:
    """The loss of the weights cast to bf16, computed in bf16, minus the loss in fp32; None without a cast."""
    if state_dtype(config, phase_index) == _dtype(module) or _dtype(module) == torch.float64:
        return None
    with exact(module):
        wide = sum(_loss(_logits(module, t), t) for t in _windows(probe_BT))
    device = probe_BT.device
    narrow = load(config, phase_index, {n: p.to(torch.bfloat16) for n, p in module.state_dict().items()}, device=device)
    with exact(narrow):
        return (sum(_loss(_logits(narrow, t).float(), t) for t in _windows(probe_BT)) - wide) / probe_BT.shape[0]


def halves_difference(module: Growth, probe_BT: Tensor) -> float:
    """The difference between the two copies of a widened stream at the input of the final norm: |first - second| over
    |first + second| / 2, as root mean squares. Without noise it stays 0; with a noise of 0.1, it is about 1e-3 after 20
    steps of phase 3. It is computed at least in fp32, because products in bf16 alone cause a difference of 3e-3, and a
    cast of the weights one of 1e-3.
    """
    seen: list[Tensor] = []
    with module.norm.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0])), exact(module):
        module.compute_dtype = at_least_fp32(module.compute_dtype)
        module(probe_BT)
    first, second = seen[0].double().chunk(2, dim=-1)
    return ((first - second).square().mean().sqrt() / ((first + second) / 2).square().mean().sqrt()).item()


@contextlib.contextmanager
def exact(*modules: Growth) -> Iterator[None]:
    """Eval mode, computing in the weights' own dtype, TF32 off, the plain attention kernel, no gradients."""
    modes = [(m, m.training, m.compute_dtype) for m in modules]
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        for module in modules:
            module.eval()
            module.compute_dtype = _dtype(module)
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.set_float32_matmul_precision(precision)
        for module, training, compute_dtype in modes:
            module.train(training)
            module.compute_dtype = compute_dtype


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
    """For each token, whether it goes to different experts, as [N]."""
    return (old.experts != new.experts).any(-1)


def tied(layers: list[tuple[ExpertChoice, ExpertChoice]], limit: float) -> bool:
    """Whether the first layer that routes differently does so only where its logits tie; the routing in later layers
    follows from it.
    """
    for old, new in layers:
        flipped_N = flipped(old, new)
        if flipped_N.any():
            return bool(old.margin[flipped_N].max() <= limit * old.scale.clamp(min=1.0))
    return False


def _windows(probe_BT: Tensor) -> list[Tensor]:
    return [probe_BT[i : i + 1] for i in range(probe_BT.shape[0])]


def _dtype(module: Growth) -> torch.dtype:
    return module.embed.weight.dtype


def _logits(module: Growth, tokens_BT: Tensor) -> Tensor:
    logits: Tensor = module(tokens_BT).logits
    return logits


def _loss(logits_BTV: Tensor, tokens_BT: Tensor) -> float:
    """The mean cross-entropy of the next token, in nats."""
    return F.cross_entropy(logits_BTV[:, :-1].flatten(0, 1), tokens_BT[:, 1:].flatten()).item()


def _sentence(d: Difference) -> str:
    flips = f", {d.routing_flips} of {d.routings} routings flipped" if d.routings else ""
    flips += f", {d.ties} windows left out for ties in the routing" if d.ties else ""
    return f"logits moved by up to {d.max_logit_difference:.2e} (limit {d.limit:.1e}{flips})"
