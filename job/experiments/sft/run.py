"""sft-h100: trains an adapter, or all weights, of a Llama- or Qwen-class decoder on packed chat examples.

The base is frozen in bf16; it is either complete on every rank or sharded (`lora.shard_base`). With `precision.base:
fp8` its matrices are quantised when they are read for training, and are bf16 again for what follows. Only the adapter
is trained, saved in checkpoints, and has gradients that are summed over the ranks. With `method: full` the fp32 weights
are sharded over the ranks (FSDP2). The run has one phase; merge.py does what follows. The run leaves `final/` (merged
weights in the published layout, the tokenizer, `adapter/`) and `results.json`.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import RESULTS
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.engine import metrics, optimizer, parallel
from gpufleet.job.experiments.engine.experiment import Experiment, Phase, Session, Weights, Work
from gpufleet.job.experiments.engine.packed_rows import PackedBatches
from gpufleet.job.experiments.models import decoder, lora
from gpufleet.job.experiments.models.decoder import Decoder
from gpufleet.job.experiments.sft import merge
from gpufleet.job.experiments.sft.judge import AnswerJudge
from gpufleet.job.experiments.sft.spec import SftConfig, narrow_base
from gpufleet.job.experiments.tuning import run as tuning
from gpufleet.job.kind.common import Rung
from gpufleet.job.kind.job import require
from gpufleet.job.text import counted

EXPERIMENT = "sft-h100"


class Sft(Experiment):
    """The experiment for the training loop."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, SftConfig)
        self.session, self.config = session, session.config
        require(self.config)
        self.manifest = read_manifest(session.data)
        self.batches = self._opened()
        self.per_step = self.config.batch.tokens // self.config.data.row
        self.size = self.config.with_facts(self.manifest.facts).phases()[0]
        self.phases = [Phase.from_size(self.size, steps=self.batches.steps(self.per_step, self.config.epochs))]
        self.progress: dict[str, Any] = {}
        self.module: Decoder | None = None
        self.trained = Weights(0, None)
        self.judge = AnswerJudge(self) if self.config.eval.judge else None
        self._began = time.monotonic()

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """The base with a new adapter; with `method: full`, the base itself."""
        self._announce(phase)
        return self._make(fresh=True)

    def blank(self, phase: Phase) -> nn.Module:
        self._announce(phase)
        return self._make(fresh=False)

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        """AdamW for the adapter, with weight decay only if the file asks for it; or for all weights, with decay as in
        the decoder's table.
        """
        decay = self.config.optim.weight_decay
        if self.config.method == "lora":
            groups: list[dict[str, Any]] = [{"params": list(lora.weights(module).values()), "weight_decay": decay}]
        else:
            groups = optimizer.groups(module, decoder.decays, decay)
        return optimizer.make(groups, self.config.optim, seed=self.config.seed)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Linear warm-up, then a cosine."""
        lr = tuning.cosine(self.config.optim, step, phase.steps)
        optimizer.set_lr(opt, lr)
        return lr

    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        rows = self.batches.step(self.config.seed, step, self.per_step, self.config.epochs)
        return self.batches.work("train", rows, rung.micro, per_step=self.per_step)

    def validation(self, phase: Phase, rung: Rung) -> Work:
        return self.batches.work("validation", self.batches.fixed(self.config.eval.rows), rung.micro)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The adapter alone, or all weights."""
        return lora.weights(module) if self.config.method == "lora" else super().weights(module)

    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        """Does nothing, because `finish` does the work that follows, and keeps its own progress."""
        assert isinstance(module, Decoder)
        self.trained = weights
        module.checkpointing = False
        self.trained_s = time.monotonic() - self._began

    def finish(self) -> None:
        """Validates the merge, stores answers, writes final/, has the answers judged, and writes results.json. Raises
        Stopped. Raises MergeDiffersError on every rank after everything is written.
        """
        assert self.module is not None
        if narrow_base(self.config):
            self.session.say(
                "the base is read again in bf16: the adapter is merged into these weights, not those in fp8"
            )
            lora.store(self.module, torch.bfloat16)
            tuning.fill(self.session, self.config, self.module)
        entries = merge.finish(self, self.module)
        if self.judge is not None:
            entries |= self.judge.judged(entries.get("answers", []))
        if self.session.world.first:
            atomic.write_json(self.session.workdir / RESULTS, self._results(entries))
        report = entries.get("merge")  # None if nothing was merged, or if another rank has the report
        refused = self.session.world.agree(report and not report["fp32_matches"] and report["fp32_difference"])
        if refused:
            raise merge.MergeDiffersError(refused)

    def cut(self, step: int, weights: Weights) -> None:
        """Writes the adapter, not merged, or all weights."""
        if self.module is not None and self.config.method == "lora":
            merge.keep_adapter(self, self.module)
        elif self.module is not None:
            meta = {"experiment": EXPERIMENT, "phase": self.phases[0].name, **weights._asdict(), **self.outcome}
            tuning.leave(self.session, self.manifest, self.config, self.module, meta)

    def _make(self, *, fresh: bool) -> Decoder:
        """The module on the device, replicated or sharded."""
        config, session = self.config, self.session
        if config.method == "full":
            self.module = tuning.trained_whole(session, config, written=fresh)
        else:
            drawn = torch.Generator().manual_seed(config.seed + 1) if fresh else None
            split, narrow = config.lora.shard_base, narrow_base(config)
            self.module = tuning.base(
                session, config, torch.bfloat16, spread=split, adapters=config.lora, narrow=narrow
            )
            if config.lora.template_tokens:
                lora.train_rows(self.module, tuning.template_ids(session, self.manifest, config))
            if drawn is not None:
                lora.initialise(self.module, drawn)
            parallel.replicate(self.module, session.world)
        return self.module

    def _opened(self) -> PackedBatches:
        """The dataset. Raises ValueError if the prepared rows do not match the run config."""
        session = self.session
        tuning.check_dataset(session, self.manifest, self.config)
        renderer = None if self.config.measures.pretokenised else tuning.renderer(session, self.manifest, self.config)
        return PackedBatches(session.data, self.manifest, session.world, session.device.torch, renderer)

    def _announce(self, phase: Phase) -> None:
        s, facts = self.size, self.manifest.facts
        rows, examples = (counted(f"{facts[key + 's']:,}", key) for key in ("row", "example"))
        self.session.say(
            f"{self.config.method}: {s.params_trained:,} of {s.params_total:,} parameters trained, "
            f"{counted(phase.steps, 'step')} of {counted(self.per_step, 'row')}, "
            f"{counted(self.config.epochs, 'epoch')} of {rows}; {examples}, fill {facts['fill']:.1%}"
        )

    def _results(self, entries: dict[str, Any]) -> dict[str, Any]:
        """Sizes, predictions, measurements, and the results of the merge."""
        config, session, phase = self.config, self.session, self.phases[0]
        own = session.metrics.records(phase.name)
        measured = {
            **metrics.measured(own),
            # An upper bound of the share of this attempt's time that was spent on data.
            "data_share": round(self.batches.waited_s / self.trained_s, 6),
        }
        return {
            "schema": 1,
            "experiment": EXPERIMENT,
            "method": config.method,
            "steps": phase.steps,
            "epochs": config.epochs,
            "tokens": config.epochs * self.manifest.facts["tokens"],
            "device": session.device.name,
            "ranks": session.world.size,
            "torch": torch.__version__,
            "dataset": {"sha256": self.manifest.sha256, **self.manifest.facts},
            "measures": {name: getattr(config.measures, name) for name in config.measures.__slots__},
            "phases": [
                {
                    "name": phase.name,
                    "params_total": self.size.params_total,
                    "params_trained": self.size.params_trained,
                    "flops_per_token_causal": phase.flops_per_token,
                    "steps": phase.steps,
                    "val_loss": self.trained.val_loss,
                    "loss_first": own[0]["loss"] if own else None,
                    "loss_last": own[-1]["loss"] if own else None,
                    "predicted": session.prediction(phase.name),
                    "measured": measured,
                }
            ],
            **self.outcome,
            **entries,
        }
