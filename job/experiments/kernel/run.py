"""kernel-sft: trains all weights of a code model on kernel pairs, generates candidates, and judges them in the funnel.

Training is FSDP2. stages.py does the work that follows training. The module stages.py appends finished results to
stages/*.jsonl at once, so that a restart repeats no finished candidate. With `data.curriculum: on`, the model is tested
at the end of each epoch, and the next epoch has more samples of tasks that the model half masters
(judge/curriculum.py). With `compare` there are two phases with the same number of steps, each from the base weights:
the first without the curriculum, the second with it. The first phase's candidates are written at the end of that phase.
The run leaves `final/` (the last phase's bf16 weights in the published layout, the tokenizer),
`stages/candidates.jsonl`, `stages/verdicts.jsonl` and `results.json`.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.optim import Optimizer

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import FINAL, NAMED, USER
from gpufleet.job.experiments.dataset.packing import order
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.engine import optimizer
from gpufleet.job.experiments.engine.data import Ids, in_epochs
from gpufleet.job.experiments.engine.experiment import Experiment, Phase, Session, Weights, Work
from gpufleet.job.experiments.engine.export import META
from gpufleet.job.experiments.engine.packed_rows import PackedBatches
from gpufleet.job.experiments.kernel import results, stages
from gpufleet.job.experiments.kernel.judge import curriculum
from gpufleet.job.experiments.kernel.judge.catalog import TASKS
from gpufleet.job.experiments.kernel.results import Training
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.kernel.stages import Made
from gpufleet.job.experiments.models import decoder
from gpufleet.job.experiments.models.decoder import Decoder
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.kind.common import Rung
from gpufleet.job.kind.job import require


class Kernel(Experiment):
    """The experiment for the training loop."""

    saves_improvements = False  # a checkpoint has 98 GB, and only the last weights are used

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, KernelConfig)
        self.session, self.config = session, session.config
        require(self.config)
        self.manifest = read_manifest(session.data)
        tuning.check_dataset(session, self.manifest, self.config)
        self.batches = PackedBatches(session.data, self.manifest, session.world, session.device.torch)
        self.renderer = tuning.renderer(session, self.manifest, self.config)
        self.per_step = self.config.batch.tokens // self.config.data.row
        self.rows = len(self.batches.splits["train"])
        steps = self.batches.steps(self.per_step, self.config.epochs)
        sizes = [size for size in self.config.with_facts(self.manifest.facts).phases() if size.steps]
        self.phases = [
            Phase.from_size(size, index=index, first=index * steps, steps=steps) for index, size in enumerate(sizes)
        ]
        self.params_total = sizes[0].params_total
        self.row_tasks = [] if self.config.data.curriculum == "off" else self._row_tasks()
        # `evaluations`: pairs of the steps done and the pass rate of each task, oldest first. `val_loss`: the loss of
        # each finished phase, by name.
        self.progress: dict[str, Any] = {"evaluations": [], "val_loss": {}}
        self.module: Decoder | None = None

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """The base weights, sharded. These weights are the same for every phase."""
        self.session.say(
            f"{phase.name}: {self.params_total:,} parameters, all trained; {phase.steps} steps of {self.per_step} rows,"
            f" {self.config.epochs} epochs of {self.rows:,} rows; {self.manifest.facts['examples']:,} pairs"
        )
        self.module = tuning.trained_whole(self.session, self.config, written=True)
        return self.module

    def blank(self, phase: Phase) -> nn.Module:
        """An empty module for a checkpoint's weights."""
        self.module = tuning.trained_whole(self.session, self.config, written=False)
        return self.module

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        groups = optimizer.groups(module, decoder.decays, self.config.optim.weight_decay)
        return optimizer.make(groups, self.config.optim, seed=self.config.seed)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Linear warm-up, then a cosine."""
        lr = tuning.cosine(self.config.optim, step - phase.first, phase.steps)
        optimizer.set_lr(opt, lr)
        return lr

    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        """This rank's part of the next rows of the epoch. The rows depend only on the seed, the step and the last
        evaluation.
        """
        return self.batches.work("train", self.step_rows(phase, step), rung.micro, per_step=self.per_step)

    def step_rows(self, phase: Phase, step: int) -> Ids:
        """The row ids of a step's global batch. Before the phase's first evaluation all rows are equally likely."""
        done = step - phase.first
        places = np.arange(done * self.per_step, min((done + 1) * self.per_step, self.config.epochs * self.rows))
        known = [(at, rates) for at, rates in self.progress["evaluations"] if phase.first < at <= step]
        at, rates = known[-1] if known else (phase.first, {})
        # Rows that were chosen before the rates were known. One step can have rows of two epochs.
        over = (at - phase.first) * self.per_step
        return in_epochs(places, self.rows, lambda epoch: self._epoch(epoch, rates, max(0, over - epoch * self.rows)))

    def validation(self, phase: Phase, rung: Rung) -> Work:
        return self.batches.work("validation", self.batches.fixed(len(self.batches.splits["validation"])), rung.micro)

    def evaluated(self, phase: Phase, step: int) -> bool:
        """Whether this is the end of an epoch."""
        ends = {-(-epoch * self.rows // self.per_step) for epoch in range(1, self.config.epochs + 1)}
        return step - phase.first in ends or step == phase.last

    @torch.no_grad()
    def evaluate(self, phase: Phase, step: int, module: nn.Module, rung: Rung) -> float | None:
        """The loss on the held-out rows; for the curriculum, also the pass rates, if another epoch follows."""
        loss = super().evaluate(phase, step, module, rung)
        if self.config.data.curriculum != "off" and phase is self.phases[-1] and step < phase.last:
            assert self.module is not None
            rates = stages.pass_rates(self, self.module, tuning.of_weights(step, loss))
            self.progress["evaluations"].append([step, rates])
            half = sorted(task for task, rate in rates.items() if curriculum.LOW <= rate <= curriculum.HIGH)
            self.session.say(f"curriculum after step {step}: {', '.join(half) or 'no task'} between 20 and 80 %")
        return loss

    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        """Writes the candidates of a phase whose weights are not kept. Raises Stopped."""
        assert isinstance(module, Decoder)
        module.checkpointing = False
        self.progress["val_loss"][phase.name] = weights.val_loss
        if phase is not self.phases[-1]:
            stages.candidates(self, module, phase)

    def finish(self) -> None:
        """Writes weights, candidates, verdicts and results; in the part `train`, the input of the part `judge`. Raises
        Stopped.
        """
        assert self.module is not None
        digest = stages.deliver(self, self.module)
        made = {
            phase.name: stages.candidates(self, self.module if phase is self.phases[-1] else None, phase)
            for phase in self.phases
        }
        trained = results.training(self, digest)
        if self.config.part == "train":
            results.hand_on(self.session, trained, made)
        else:
            _judge(self.session, self.config, trained, made)

    def cut(self, step: int, weights: Weights) -> None:
        """Writes the weights of the last step, unless `finish` has written these."""
        written = (atomic.read_object(self.session.workdir / FINAL / META) or {}).get("step") == step
        if self.module is not None and not self.session.world.agree(written):
            name = next(phase.name for phase in self.phases if step <= phase.last)
            meta = {"experiment": "kernel-sft", "phase": name, **weights._asdict(), **self.outcome}
            tuning.leave(self.session, self.manifest, self.config, self.module, meta)

    def _epoch(self, epoch: int, rates: dict[str, float], begun: int) -> Ids:
        """The epoch's rows in order; if there are pass rates, the rows that follow the `begun` rows, which were chosen
        without the rates.
        """
        weight = [float(np.mean(curriculum.weights(tasks, rates))) for tasks in self.row_tasks]
        if not rates or len(set(weight)) == 1:  # all rows have the same weight, as without a curriculum
            return order(self.config.seed, epoch, self.rows)
        drawn = curriculum.order(weight, seed=self.config.seed, epoch=epoch, begun=begun)
        return np.array([-1] * begun + drawn, dtype=np.int64)

    def _row_tasks(self) -> list[list[frozenset[str]]]:
        """For each row, the tasks of each example. Raises ValueError if there is a curriculum but no row practises a
        task.
        """
        per_epoch, data = -(-self.rows // self.per_step), self.config.data
        if per_epoch >= self.phases[0].steps:
            raise ValueError(
                f"data.curriculum: {data.curriculum}, but all epochs of the {self.rows} rows of {self.session.data} "
                f"make one step of {self.per_step}: the model is never tried between two epochs. Lower batch.tokens."
            )
        train, by_row = self.batches.splits["train"], []
        for tokens, marks in zip(train.tokens, train.marks, strict=True):
            documents, asked = marks >> 1, (marks & 1) == 0
            questions = [
                self.renderer.tokenizer.decode(tokens[(documents == number) & asked].tolist())
                for number in range(1, int(documents.max()) + 1)
            ]
            by_row.append([curriculum.tasks_of(question) for question in questions])
        beginning = f"data.curriculum: {data.curriculum}, but no pair of {self.session.data}"
        tried = TASKS[: self.config.generate.tasks]
        curriculum.require_practice(itertools.chain.from_iterable(by_row), tried, beginning)
        return by_row


class Judging(Kernel):
    """The part `judge`: it has no phases, so the loop only calls its end."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, KernelConfig)
        self.session, self.config = session, session.config
        require(self.config)
        self.phases, self.progress = [], {}
        self.trained, self.made = results.handed_on(session.workdir / USER / NAMED / self.config.candidates)

    def finish(self) -> None:
        """Writes verdicts and results. Raises Stopped."""
        _judge(self.session, self.config, self.trained, self.made)


def _judge(session: Session, config: KernelConfig, trained: Training, made: Made) -> None:
    """Judges all candidates and writes results.json. Raises Stopped."""
    if (verdicts := stages.verified(session, config, made)) is not None:
        results.write(session, config, trained, verdicts)
