"""kernel-sft: all weights of a code model trained on kernel pairs, candidates generated, and judged in the funnel.

One phase of training with FSDP2. What follows it is in kernel_stages.py; each stage appends what it has finished to
stages/*.jsonl, so a restart repeats no finished candidate. With more than one epoch and `data.curriculum`, the model is
tried at the end of each and the next one draws more from tasks that it half masters (job/kernels/curriculum.py).
Leaves `final/` (bf16 weights as published ones look, the tokenizer), `stages/candidates.jsonl`,
`stages/verdicts.jsonl`, `ablation.json` and `results.json`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from job import sizing
from job.config.kernel import KernelConfig
from job.dataset.chat import Turn
from job.dataset.packing import order
from job.dataset.prepare import read_manifest
from job.dataset.rendering import TEMPLATES, Renderer, open_chat_tokenizer
from job.experiments import kernel_stages
from job.experiments.sft import COMPUTE, cosine
from job.kernels import curriculum
from job.kernels.catalog import TASKS
from job.models import decoder, hf
from job.models.decoder import Decoder
from job.train import optimizer, parallel
from job.train import step as training
from job.train.experiment import Experiment, Phase, Session, Work
from job.train.packed_rows import PackedBatches

Rows = NDArray[np.int64]


class Kernel(Experiment):
    """The experiment as the training loop asks it."""

    saves_improvements = False  # 98 GB each, and only the last weights are used

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, KernelConfig)
        self.session, self.config = session, session.config
        sizing.require(self.config)
        self.manifest = read_manifest(session.data)
        self.batches = PackedBatches(session.data, self.manifest, session.world, session.device.torch)
        self._check_dataset()
        tokenizer = open_chat_tokenizer(self.manifest.facts["tokenizer"], session.data)
        self.renderer = Renderer(TEMPLATES[self.config.model.family], tokenizer)
        self.per_step = self.config.batch.tokens // self.config.data.row
        self.rows = len(self.batches.splits["train"])
        measured = replace(self.config.data, tokens_per_sample=float(self.manifest.facts["mean_tokens"]))
        self.size = sizing.phases(replace(self.config, data=measured))[0]
        self.phases = [
            Phase(
                index=0,
                name=self.size.name,
                first=0,
                steps=self.batches.steps(self.per_step, self.config.epochs),
                flops_per_token=self.size.flops_per_token,
                tokens_per_step=self.config.batch.tokens,
            )
        ]
        self.progress: dict[str, Any] = {"evaluations": []}  # [steps done, task -> pass rate], oldest first
        self.module: Decoder | None = None
        self.val_loss: float | None = None
        self._step = 0  # under way
        self._tasks: list[list[str]] | None = None

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """The base, sharded."""
        self.session.say(
            f"{self.size.params_total:,} parameters, all trained; {phase.steps} steps of {self.per_step} rows, "
            f"{self.config.epochs} epochs of {self.rows:,} rows; {self.manifest.facts['examples']:,} pairs"
        )
        return self._make(fresh=True)

    def blank(self, phase: Phase) -> nn.Module:
        """Room for a checkpoint's."""
        return self._make(fresh=False)

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        """AdamW on everything, as the decoder's table says."""
        groups = decoder.parameter_groups(module, self.config.optim.weight_decay)
        return optimizer.make(groups, self.config.optim, seed=self.config.seed)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Linear warm-up, then a cosine."""
        self._step = step
        lr = cosine(self.config.optim, step, phase.steps)
        optimizer.set_lr(opt, lr)
        return lr

    def batch(self, phase: Phase, step: int, rung: sizing.Rung) -> Work:
        """The next rows of the epoch, this rank's part: a function of the seed, the step and the last evaluation."""
        return self.batches.work("train", self.step_rows(step), rung.micro)

    def step_rows(self, step: int) -> Rows:
        """Of the global batch. Before the first evaluation every row is as likely as another."""
        places = np.arange(step * self.per_step, min((step + 1) * self.per_step, self.config.epochs * self.rows))
        rates: dict[str, float] = next((r for at, r in reversed(self.progress["evaluations"]) if at <= step), {})
        rows = np.empty(len(places), dtype=np.int64)
        for epoch in np.unique(places // self.rows):
            here = places // self.rows == epoch
            rows[here] = self._epoch(int(epoch), rates)[places[here] % self.rows]
        return rows

    def validation(self, phase: Phase, rung: sizing.Rung) -> Work:
        """All rows held out."""
        return self.batches.work("validation", self.batches.fixed(len(self.batches.splits["validation"])), rung.micro)

    def evaluated(self, phase: Phase, step: int) -> bool:
        """At the end of each epoch."""
        ends = {-(-epoch * self.rows // self.per_step) for epoch in range(1, self.config.epochs + 1)}
        return step in ends or step == phase.last

    @torch.no_grad()
    def evaluate(self, phase: Phase, module: nn.Module, rung: sizing.Rung) -> float:
        """Loss on the rows held out; for the curriculum also pass rates, when another epoch comes."""
        loss = super().evaluate(phase, module, rung)
        done = self._step + 1
        if self.config.data.curriculum and done < phase.last:
            assert isinstance(module, Decoder)
            with training.as_written(module):
                rates = kernel_stages.pass_rates(self, module)
            module.train()
            self.progress["evaluations"].append([done, rates])
            half = sorted(task for task, rate in rates.items() if curriculum.LOW <= rate <= curriculum.HIGH)
            self.session.say(f"curriculum after step {done}: {', '.join(half) or 'no task'} between 20 and 80 %")
        return loss

    def end(self, phase: Phase, module: nn.Module, *, val_loss: float | None) -> None:
        """What follows is `finish`'s."""
        assert isinstance(module, Decoder)
        self.module, self.val_loss = module, val_loss
        module.checkpointing = False

    def finish(self) -> None:
        """Weights, candidates, verdicts, results. Raises Stopped."""
        assert self.module is not None
        kernel_stages.finish(self, self.module)

    def _epoch(self, epoch: int, rates: dict[str, float]) -> Rows:
        if not rates:
            return order(self.config.seed, epoch, self.rows)
        if self._tasks is None:
            self._tasks = self._row_tasks()
        weight = [float(np.mean(curriculum.weights(tasks, rates))) for tasks in self._tasks]
        return np.array(curriculum.order(self.rows, weight, seed=self.config.seed, epoch=epoch), dtype=np.int64)

    def _row_tasks(self) -> list[list[str]]:
        """The task of each example of each row, by how it begins; empty for a question that is none of the tasks'."""
        train = self.batches.splits["train"]
        asked = [
            (task.name, np.array(self.renderer.prompt([Turn("user", task.prompt), Turn("assistant", "")])))
            for task in TASKS
        ]
        found = []
        for tokens, marks in zip(train.tokens, train.marks, strict=True):
            documents = marks >> 1
            starts = [int(np.argmax(documents == number)) for number in range(1, int(documents.max()) + 1)]
            found.append([_task_at(tokens[start:], asked) for start in starts])
        return found

    def _make(self, *, fresh: bool) -> Decoder:
        """fp32 weights, those of storage.base_weights; for generated pairs, which need none, drawn from the seed."""
        config, session = self.config, self.session
        published = session.inputs is not None and (session.inputs / hf.CONFIG).exists()
        if not published and config.data.source != "generated-kernels":
            raise ValueError(
                "no base weights: storage.base_weights must name a folder with config.json and safetensors "
                "(only data.source: generated-kernels starts from random ones)"
            )
        drawn = torch.Generator().manual_seed(config.seed) if fresh and not published else None
        compute = COMPUTE[config.precision.compute]
        module = decoder.build(config.model, compute=compute, device=session.device.torch, generator=drawn)
        if fresh and published:
            assert session.inputs is not None
            hf.load(session.inputs, module)
        parallel.shard(module, session.world, module.blocks, compute=compute, reshard=config.reshard_after_forward)
        return module

    def _check_dataset(self) -> None:
        """Raises ValueError where the prepared rows are not those of the run config."""
        facts, data = self.manifest.facts, self.config.data
        if facts["vocab"] > self.config.model.vocab:
            raise ValueError(
                f"{self.session.data}: {facts['vocab']} ids, the model's vocabulary (model.vocab) is "
                f"{self.config.model.vocab}; prepare the dataset with the tokenizer of the base weights"
            )
        if facts["row"] != data.row:
            raise ValueError(
                f"{self.session.data} was prepared with row {facts['row']}, data.row is {data.row}: prepare it again"
            )


def _task_at(tokens: NDArray[Any], asked: list[tuple[str, NDArray[Any]]]) -> str:
    return next((name for name, prompt in asked if np.array_equal(tokens[: len(prompt)], prompt)), "")
