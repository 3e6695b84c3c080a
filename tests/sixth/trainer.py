"""toy as the training loop asks it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import FINAL, RESULTS
from gpufleet.job.experiments.engine import export, optimizer
from gpufleet.job.experiments.engine.data import TokenDataset
from gpufleet.job.experiments.engine.experiment import Experiment, Phase, Session, Weights, Work
from gpufleet.job.experiments.toy.spec import ToyConfig
from gpufleet.job.kind.common import Rung


class Answer(NamedTuple):
    """What a micro-batch gives."""

    loss_sum: Tensor
    aux: dict[str, Tensor]
    aux_loss: None = None


class Bigram(nn.Module):
    """Logits of the next token from this one alone."""

    def __init__(self, config: ToyConfig) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(config.vocab, config.width), nn.Linear(config.width, config.vocab, False)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Answer:
        logits_NV = self.head(self.embed(tokens_BT)).flatten(0, 1)
        return Answer(nn.functional.cross_entropy(logits_NV, targets_BT.flatten(), reduction="sum"), {})


class Toy(Experiment):
    """One phase, one process."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, ToyConfig)
        self.session, self.config = session, session.config
        self.device = session.device.torch
        self.dataset = TokenDataset(
            session.data, vocab=self.config.vocab, sequence=self.config.data.sequence, device=self.device
        )
        self.phases = Phase.chain(self.config.phases())
        self.progress = {}

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        torch.manual_seed(self.config.seed)
        return self.blank(phase)

    def blank(self, phase: Phase) -> nn.Module:
        return Bigram(self.config).to(self.device)

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        groups = [{"params": list(module.parameters()), "weight_decay": 0.0}]
        return optimizer.make(groups, self.config.optim, seed=self.config.seed)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        optimizer.set_lr(opt, self.config.optim.lr)
        return self.config.optim.lr

    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        return self.dataset.batch(self.config.seed, step, self.config.windows, rung.micro, self.session.world)

    def validation(self, phase: Phase, rung: Rung) -> Work:
        return self.dataset.fixed(self.config.eval.windows, rung.micro, self.session.world)

    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        export.export(self.session.workdir / FINAL, module, {**weights._asdict(), **self.outcome})

    def finish(self) -> None:
        results = {"schema": 1, "experiment": "toy", "steps": self.phases[-1].last, **self.outcome}
        atomic.write_json(self.session.workdir / RESULTS, results)
