"""One optimizer step: the arithmetic of training, without schedule, log or checkpoint.

Precision: parameters are fp32 (bf16 if the state of the phase is bf16). Each product inside the model casts its own
weight to the compute dtype. So there is no autocast, and no second copy of the weights. Loss and norms are fp32.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job.experiments.engine import optimizer, parallel
from gpufleet.job.experiments.engine.cuda_graph import CudaRecorder, RecordedPasses, StepSums
from gpufleet.job.experiments.engine.data import mix
from gpufleet.job.experiments.engine.experiment import Experiment, ForwardOutput, Micro, Work

# the most graphs of a block in one phase; the sizes of micro-batches in training and evaluation need up to 8
GRAPHS = 16


class StepResult(NamedTuple):
    """One optimizer step's results on the device; they are copied from the device only when a step is logged."""

    loss: Tensor  # this rank's part of the mean over the global batch's tokens, nats, fp32
    grad_norm: Tensor  # the norm before clipping, over all ranks
    aux: dict[str, Tensor]  # this rank's part of the metric values


def update(
    experiment: Experiment,
    module: nn.Module,
    opt: Optimizer,
    work: Work,
    step: int,
    before_exchange: Callable[[], None] = lambda: None,
    recorded: RecordedPasses | None = None,
) -> StepResult:
    """Does the forward and backward passes over the micro-batches of the global batch after `step` steps, and then one
    update. Loss and gradient are means over the tokens of the whole batch, so they do not depend on how the batch is
    split over micro-batches and ranks. (An auxiliary term is a mean itself, and is weighted by each micro-batch's
    share.) Random numbers within the model are a function of (seed, step, place of the micro-batch). `before_exchange`
    is called before the last backward pass, in which several nodes sum their gradients. `recorded` runs the passes as a
    CUDA graph, which is possible only without random numbers and without other ranks.
    """
    if recorded is None:
        sums = _passes(experiment, module, work.micros, work.total, step, before_exchange)
    else:
        sums = recorded.run(lambda micros: _passes(experiment, module, micros, work.total), list(work.micros))
        before_exchange()
    parallel.reduce(optimizer.parameters(opt), experiment.session.world)
    norm = experiment.clip(opt)
    opt.step()
    opt.zero_grad(set_to_none=True)
    return StepResult(sums.loss, norm, sums.aux)


def _passes(
    experiment: Experiment,
    module: nn.Module,
    micros: Iterable[Micro],
    total: int,
    step: int | None = None,
    before_exchange: Callable[[], None] = lambda: None,
) -> StepSums:
    """Does the forward and backward passes over this rank's micro-batches, and sums the gradients. `step`: None if no
    random numbers are used.
    """
    loss: Tensor | None = None
    aux: dict[str, Tensor] = {}
    session = experiment.session
    for micro, is_last in _with_last(micros):
        if step is not None:
            session.device.seed(mix(session.config.seed, step, micro.place))
        output: ForwardOutput = module(*micro.inputs)
        assert output.loss_sum is not None
        share = micro.tokens / total
        objective = output.loss_sum / total
        loss = objective.detach() if loss is None else loss + objective.detach()
        if output.aux_loss is not None:
            objective = objective + experiment.aux_weight * share * output.aux_loss
        for name, figure in output.aux.items():
            part = share * figure if figure.is_floating_point() else figure
            aux[name] = aux[name] + part if name in aux else part
        parallel.reduce_between(module, session.world, wanted=is_last)
        if is_last:
            before_exchange()
        torch.autograd.backward(objective)
    assert loss is not None
    return StepSums(loss, aux)


def _with_last(micros: Iterable[Micro]) -> Iterator[tuple[Micro, bool]]:
    before: Micro | None = None
    for micro in micros:
        if before is not None:
            yield before, False
        before = micro
    if before is not None:
        yield before, True


@contextlib.contextmanager
def compiled(module: nn.Module, device: torch.device, *, wanted: bool = True) -> Iterator[bool]:
    """A context in which the forward pass of each of the model's blocks is compiled, if this is wanted and the device
    is CUDA. There is one graph for all blocks, with static shapes and without FSDP2's hooks, which cannot be part of a
    graph. The module's own `loss` is compiled too, so that the logits are read only once. After the context, and on a
    CPU, the module is not compiled. Yields whether anything is compiled.
    """
    blocks = list(getattr(module, "blocks", ())) if device.type == "cuda" and wanted else []
    if not blocks:
        yield False
        return
    parts = [(block, "forward") for block in blocks] + [(module, "loss")] * hasattr(module, "loss")
    for owner, name in parts:
        setattr(owner, name, torch.compile(getattr(owner, name), fullgraph=True, dynamic=False))
    try:
        with torch._dynamo.config.patch(recompile_limit=GRAPHS):
            yield True
    finally:
        for owner, name in parts:
            delattr(owner, name)
        torch.compiler.reset()  # the graphs of all phases share one cache, which is emptied here


@contextlib.contextmanager
def recorded(
    opt: Optimizer, device: torch.device, say: Callable[[str], None], *, wanted: bool = True
) -> Iterator[RecordedPasses | None]:
    """A context in which the passes of a phase run as a CUDA graph, if this is wanted and the device is CUDA. The
    graph's memory is freed afterwards.
    """
    if device.type != "cuda" or not wanted:
        yield None
        return
    passes = RecordedPasses(CudaRecorder(device), optimizer.parameters(opt), say)
    try:
        yield passes
    finally:
        passes.drop()
