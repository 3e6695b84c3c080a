"""Which weights a run leaves: of the phase's best evaluation, or after its last step, as the file asks."""

from __future__ import annotations

import math

from torch import nn

from job.train.experiment import Experiment, Phase, Weights


def deliver(experiment: Experiment, phase: Phase, module: nn.Module, last: Weights, lowest: Weights | None) -> Weights:
    """The weights to leave, which the module holds then. They are its `last`, or those of the best evaluation that has
    a checkpoint on this disk. Said in the log and, under `delivered`, in the experiment's `outcome`. `lowest`: the best
    evaluation, with a checkpoint or without.
    """
    session = experiment.session
    checkpoints, asked = session.checkpoints, session.config.delivers_best
    saved = checkpoints.committed.best(phase.name) if asked and session.world.first else None
    best = session.world.agree(None if saved is None else (saved.step, saved.val_loss))
    weights = last if best is None else min(last, Weights(*best), key=val_loss)
    if weights.step != last.step:
        found = next(each for each in checkpoints.committed if each.step == weights.step)
        checkpoints.load(found, {"model": experiment.weights(module)})
    which = "the last" if weights.step == last.step else f"the best evaluated; the last: {_said(last)}"
    session.say(f"delivered: {_said(weights)}, {which}")
    if lowest is not None and val_loss(lowest) < val_loss(weights):
        why = "has no checkpoint on this disk" if asked else "is better and not asked for (deliver)"
        session.say(f"the best evaluation, {lowest.val_loss:.4f} at step {lowest.step}, {why}")
    told = {"last": last._asdict(), "best": None if lowest is None else lowest._asdict()}
    experiment.outcome = {"delivered": {"choice": "best" if asked else "last", **weights._asdict(), **told}}
    return weights


def val_loss(weights: Weights) -> float:
    """For comparisons: of weights that were not evaluated infinite."""
    return math.inf if weights.val_loss is None else weights.val_loss


def _said(weights: Weights) -> str:
    evaluated = "not evaluated" if weights.val_loss is None else f"validation {weights.val_loss:.4f}"
    return f"step {weights.step} ({evaluated})"
