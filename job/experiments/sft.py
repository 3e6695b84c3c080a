"""sft-h100: an adapter, or all weights, of a Llama- or Qwen-class decoder trained on packed chat examples.

The base is frozen in bf16 and only the adapter is trained, checkpointed and reduced over ranks (replicated); with
`method: full` the fp32 weights are spread over the ranks (FSDP2). One phase; what follows it is in merge.py. Leaves
`final/` (merged weights as published ones look, the tokenizer, `adapter/`) and `results.json`.
"""

from __future__ import annotations

import math
import time
from dataclasses import replace
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from job import atomic, sizing
from job.config.common import CosineAdamW
from job.config.sft import SftConfig
from job.dataset.prepare import read_manifest
from job.dataset.rendering import TEMPLATES, Renderer, open_chat_tokenizer
from job.experiments import merge
from job.models import decoder, hf, lora
from job.models.decoder import Decoder
from job.train import optimizer, parallel
from job.train.experiment import Experiment, Phase, Session, Work
from job.train.packed_rows import PackedBatches

EXPERIMENT = "sft-h100"
COMPUTE = {"bf16": torch.bfloat16, "fp32": torch.float32}


class Sft(Experiment):
    """The experiment as the training loop asks it."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, SftConfig)
        self.session, self.config = session, session.config
        sizing.require(self.config)
        self.manifest = read_manifest(session.data)
        self.batches = self._opened()
        self.per_step = self.config.batch.tokens // self.config.data.row
        measured = replace(self.config.data, tokens_per_example=float(self.manifest.facts["mean_tokens"]))
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
        self.progress: dict[str, Any] = {}
        self.module: Decoder | None = None
        self.val_loss: float | None = None
        self._began = time.monotonic()

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """The base with a fresh adapter, or the base itself."""
        self._announce(phase)
        return self._make(fresh=True)

    def blank(self, phase: Phase) -> nn.Module:
        """The same, the trained tensors not yet written."""
        self._announce(phase)
        return self._make(fresh=False)

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        """AdamW on the adapter, without decay unless asked for; or on everything, as the decoder's table says."""
        decay = self.config.optim.weight_decay
        if self.config.method == "lora":
            groups: list[dict[str, Any]] = [{"params": list(lora.weights(module).values()), "weight_decay": decay}]
        else:
            groups = decoder.parameter_groups(module, decay)
        return optimizer.make(groups, self.config.optim, seed=self.config.seed)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Linear warm-up, then a cosine."""
        lr = cosine(self.config.optim, step, phase.steps)
        optimizer.set_lr(opt, lr)
        return lr

    def batch(self, phase: Phase, step: int, rung: sizing.Rung) -> Work:
        """The next rows of the epoch, this rank's part."""
        rows = self.batches.step(self.config.seed, step, self.per_step, self.config.epochs)
        return self.batches.work("train", rows, rung.micro)

    def validation(self, phase: Phase, rung: sizing.Rung) -> Work:
        """Rows spread evenly over those held out."""
        return self.batches.work("validation", self.batches.fixed(self.config.eval.rows), rung.micro)

    def weights(self, module: nn.Module) -> dict[str, Tensor]:
        """The adapter alone, or everything."""
        return lora.weights(module) if self.config.method == "lora" else super().weights(module)

    def end(self, phase: Phase, module: nn.Module, *, val_loss: float | None) -> None:
        """What follows is `finish`'s, which remembers how far it came."""
        assert isinstance(module, Decoder)
        self.module, self.val_loss = module, val_loss
        module.checkpointing = False
        self.trained_s = time.monotonic() - self._began

    def finish(self) -> None:
        """Validation of the merge, stored answers, final/, results.json. Raises Stopped."""
        assert self.module is not None
        found = merge.finish(self, self.module)
        if self.session.world.first:
            atomic.write_json(self.session.workdir / "results.json", self._results(found))

    def _make(self, *, fresh: bool) -> Decoder:
        """On the device, replicated or sharded."""
        config, session = self.config, self.session
        adapter = config.method == "lora"
        module = self.base(torch.bfloat16 if adapter else torch.float32, written=adapter or fresh)
        if adapter:
            drawn = torch.Generator().manual_seed(config.seed + 1) if fresh else None
            parallel.replicate(lora.attach(module, config.lora, drawn), session.world)
        else:
            compute = COMPUTE[config.precision.compute]
            parallel.shard(module, session.world, module.blocks, compute=compute, reshard=config.reshard_after_forward)
        return module

    def base(self, dtype: torch.dtype, *, written: bool = True) -> Decoder:
        """The weights to start from: published ones, or drawn from the seed for generated pairs, which need none.
        Unless `written`, only their room. Raises ValueError.
        """
        config, session = self.config, self.session
        published = session.inputs is not None and (session.inputs / hf.CONFIG).exists()
        if not published and config.data.source != "generated-pairs":
            raise ValueError(
                "no base weights: storage.base_weights must name a folder with config.json and safetensors "
                "(only data.source: generated-pairs starts from random ones)"
            )
        drawn = torch.Generator().manual_seed(config.seed) if written and not published else None
        compute, device = COMPUTE[config.precision.compute], session.device.torch
        module = decoder.build(config.model, compute=compute, dtype=dtype, device=device, generator=drawn)
        if written and published:
            assert session.inputs is not None
            hf.load(session.inputs, module)
        return module

    def _opened(self) -> PackedBatches:
        """The dataset. Raises ValueError where the prepared rows are not those of the run config."""
        session, data, measures = self.session, self.config.data, self.config.measures
        facts = self.manifest.facts
        if self.manifest.kind != "packed":
            raise ValueError(f"{session.data}: a dataset of {self.manifest.kind}, {EXPERIMENT} needs packed rows")
        if facts["vocab"] > self.config.model.vocab:
            raise ValueError(
                f"{self.session.data}: {facts['vocab']} ids, the model's vocabulary (model.vocab) is "
                f"{self.config.model.vocab}; prepare the dataset with the tokenizer of the base weights"
            )
        wanted = {"row": data.row, "loss_on": data.loss_on, "packing": measures.packing}
        wanted |= {} if measures.pretokenised else {"texts": True}
        differing = [
            f"{key} {facts[key]}, the run config {value}" for key, value in wanted.items() if facts[key] != value
        ]
        if differing:
            raise ValueError(f"{session.data} was prepared with {'; '.join(differing)}: prepare it again")
        renderer = None
        if not measures.pretokenised:
            tokenizer = open_chat_tokenizer(facts["tokenizer"], session.data)
            renderer = Renderer(TEMPLATES[self.config.model.family], tokenizer)
        return PackedBatches(session.data, self.manifest, session.world, session.device.torch, renderer)

    def _announce(self, phase: Phase) -> None:
        s, facts = self.size, self.manifest.facts
        self.session.say(
            f"{self.config.method}: {s.params_trained:,} of {s.params_total:,} parameters trained, {phase.steps} steps "
            f"of {self.per_step} rows, {self.config.epochs} epochs of {facts['rows']:,} rows; {facts['examples']:,} "
            f"examples, fill {facts['fill']:.1%}"
        )

    def _results(self, found: dict[str, Any]) -> dict[str, Any]:
        """Sizes, what was predicted, what was measured, and what the merge gave."""
        config, session, phase = self.config, self.session, self.phases[0]
        own = [record for record in session.metrics.records() if record["phase"] == phase.name]

        def middle(key: str) -> float | None:
            values = [record[key] for record in own if record[key] is not None]
            return median(values) if values else None

        measured = {
            "step_ms": middle("step_ms"),
            "tokens_per_s": middle("tok_s"),
            "mfu": middle("mfu"),
            "memory_gb": max((record["mem_gb"] for record in own), default=None),
            "data_share": round(self.batches.waited_s / self.trained_s, 6),  # of this attempt's time, at most
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
                    "val_loss": self.val_loss,
                    "loss_first": own[0]["loss"] if own else None,
                    "loss_last": own[-1]["loss"] if own else None,
                    "predicted": next((p for p in session.predicted if p.get("phase") == phase.name), None),
                    "measured": measured,
                }
            ],
            **found,
        }


def cosine(config: CosineAdamW, step: int, steps: int) -> float:
    """The rate of the step that follows `step` steps: up over `warmup`, then a cosine that ends at floor x lr."""
    if step < config.warmup:
        return config.lr * (step + 1) / config.warmup
    share = (step - config.warmup) / max(1, steps - config.warmup)
    return config.lr * (config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * share)))
