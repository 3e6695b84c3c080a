"""pretrain-d64: trains a deep character model until validation stops improving, and keeps the best checkpoint.

Weights, gradients and moments are spread over the GPUs of the node (FSDP2). The early stop depends only on the recorded
evaluations, so that a resumed run makes the same decisions as an uninterrupted one. The run writes `final/` (the
weights with the best evaluation, not the last ones) and `results.json`. The run writes both even if a limit ends the
run, because its checkpoints cannot be read by other programs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import FINAL, RESULTS
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.engine import export, metrics, parallel
from gpufleet.job.experiments.engine.experiment import Experiment, Phase, Session, Weights, Work
from gpufleet.job.experiments.models.blocks import DTYPES
from gpufleet.job.experiments.pretrain import characters, muon
from gpufleet.job.experiments.pretrain.model import CharGpt, Text, generate, initial
from gpufleet.job.experiments.pretrain.rows import Rows
from gpufleet.job.experiments.pretrain.spec import SYMBOLS, EarlyStop, MuonAdamW, PretrainConfig
from gpufleet.job.kind.common import Rung
from gpufleet.job.kind.job import require

EXPERIMENT = "pretrain-d64"


class Pretrain(Experiment):
    """The experiment for the training loop."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, PretrainConfig)
        self.session, self.config = session, session.config
        require(self.config)
        self.manifest = read_manifest(session.data)
        if self.manifest.kind != "characters":
            raise ValueError(
                f"{session.data}: a dataset of {self.manifest.kind}, but {EXPERIMENT} trains on characters: prepare it "
                "with gpufleet prepare"
            )
        sequence, device = self.config.data.sequence, session.device.torch
        self.train = Rows(session.data / characters.TRAIN, sequence=sequence, device=device)
        self.validated = Rows(session.data / characters.VALIDATION, sequence=sequence, device=device)
        self.size = self.config.phases()[0]
        self.phases = [Phase.from_size(self.size)]
        self.progress: dict[str, Any] = {"evaluations": []}
        self._module: CharGpt | None = None
        self._weights = Weights(0, None)

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """New weights. The weights are initialised on the CPU, one after the other, and are the same for any number of
        ranks.
        """
        module = self._spread()
        for name, parameter in module.named_parameters():
            parallel.fill(parameter, initial(name, tuple(parameter.shape), self.config.seed))
        return module

    def blank(self, phase: Phase) -> nn.Module:
        return self._spread()

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        return make_optimizer(module, self.config)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Sets every group's rate, and Muon's momentum. Returns the hidden matrices' rate for the log."""
        config, scale = self.config.optim, rate(step, phase.steps, self.config.optim)
        for group in opt.param_groups:
            group["lr"] = scale * group["base_lr"]
            if group["kind"] == "muon":
                group["momentum"] = momentum(step, config)
        return scale * config.lr

    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        starts = self.train.step(self.config.seed, step, self.config.batch.rows)
        return self.train.work(starts, self.session.world, rung.micro)

    def validation(self, phase: Phase, rung: Rung) -> Work:
        starts = self.validated.fixed(self.config.eval.windows)
        return self.validated.work(starts, self.session.world, rung.micro)

    def stop_early(self, phase: Phase, step: int, val_loss: float | None) -> str | None:
        """Records the evaluation; returns a reason if the last ones brought no improvement."""
        self.progress["evaluations"].append({"step": step, "val_loss": val_loss})
        return plateau([(e["step"], e["val_loss"]) for e in self.progress["evaluations"]], self.config.early_stop)

    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        """Does nothing, because `finish` does the work that follows."""
        self._weights = weights

    def finish(self) -> None:
        """Writes the weights, their continuations of the prompts, and the result table."""
        module, session = self._module, self.session
        assert module is not None
        session.check_stop()
        samples: dict[str, str] = {}
        for prompt in self.config.eval.prompts:
            samples[prompt] = self._continue(module, prompt)
            session.say(f"  {prompt!r} -> {samples[prompt]!r}")
            session.check_stop()
        self._leave(module, self._weights, samples, self.progress["evaluations"][-1]["step"])

    def cut(self, step: int, weights: Weights) -> None:
        """Writes the results of a run that a limit ends: final/ without continuations. Writes nothing if the best
        weights are to be exported but none were evaluated.
        """
        if self._module is not None and (weights.val_loss is not None or not self.config.delivers_best):
            self._leave(self._module, weights, {}, step)

    def _spread(self) -> CharGpt:
        """The model sharded over the ranks, on the device, uninitialised."""
        session = self.session
        compute = DTYPES[self.config.precision.compute]
        with torch.device("meta"):
            module = CharGpt(self.config.model, compute)
        parallel.shard(module, session.world, module.blocks, compute=compute, reshard=self.config.reshard_after_forward)
        module.to_empty(device=session.device.torch)
        session.say(
            f"{self.size.params_total:,} parameters, {self.config.model.layers} layers x {self.config.model.width}, "
            f"{self.train.per_epoch:,} rows an epoch, {self.train.per_epoch / self.config.batch.rows:,.1f} steps; "
            f"{self.config.optim.kind}, lr {self.config.optim.lr:g}"
        )
        self._module = module
        return module

    def _leave(self, module: CharGpt, weights: Weights, samples: dict[str, str], steps: int) -> None:
        """Writes final/ and results.json, after `steps` steps. Must be called by all ranks."""
        tensors = parallel.gather(module.state_dict(), self.session.world)
        if self.session.world.first:
            self._export(tensors, weights)
            atomic.write_json(self.session.workdir / RESULTS, self._results(weights, samples, steps))

    def _export(self, tensors: dict[str, Tensor], weights: Weights) -> None:
        with torch.device("meta"):
            whole = CharGpt(self.config.model)
        whole.load_state_dict(tensors, assign=True)
        meta = {
            "experiment": EXPERIMENT,
            **weights._asdict(),
            **self.outcome,
            "tokens": weights.step * self.size.tokens_per_step,
            "shape": asdict(self.config.model),
            "sequence": self.config.data.sequence,
            "symbols": list(SYMBOLS),
            "dtype": "float32",
            "params_total": self.size.params_total,
            "dataset_sha256": self.manifest.sha256,
            "config_sha256": self.session.config_sha256,
        }
        export.export(self.session.workdir / FINAL, whole, meta)

    def _continue(self, module: CharGpt, prompt: str) -> str:
        """The prompt and `eval.sample_tokens` greedy characters. Must be called by all ranks, because each has a part
        of the weights.
        """
        module.eval()
        text = Text(
            list(characters.encode(prompt.encode())),
            allowed=len(SYMBOLS),
            max_tokens=self.config.eval.sample_tokens,
            window=self.config.data.sequence,
        )
        return prompt + characters.decode(list(generate(module, text)))

    def _results(self, weights: Weights, samples: dict[str, str], steps: int) -> dict[str, Any]:
        session, evaluations = self.session, self.progress["evaluations"]
        final = atomic.read_object(session.workdir / FINAL / export.META) or {}

        return {
            "schema": 1,
            "experiment": EXPERIMENT,
            "steps": steps,
            "steps_planned": self.size.steps,
            "tokens": steps * self.size.tokens_per_step,
            "epochs": round(steps * self.config.batch.rows / self.train.per_epoch, 3),
            "device": session.device.name,
            "ranks": session.world.size,
            "torch": torch.__version__,
            "weights_sha256": final["files"][0]["sha256"],
            "params_total": self.size.params_total,
            "flops_per_token_full": self.size.flops_per_token,
            "best_step": weights.step,
            "val_loss_nats_per_character": weights.val_loss,
            **self.outcome,
            "early_stop": plateau([(e["step"], e["val_loss"]) for e in evaluations], self.config.early_stop),
            "evaluations": evaluations,
            "samples": samples,
            "predicted": session.prediction(self.size.name),
            "measured": metrics.measured(session.metrics.records(self.size.name)),
        }


def make_optimizer(module: nn.Module, config: PretrainConfig) -> muon.Combined:
    """The table of model.py as groups: hidden matrices, embedding and head. Only hidden matrices have weight decay.
    `kind` chooses their optimizer.
    """
    optim = config.optim
    tables = (config.model.width / muon.BASE_WIDTH) ** -0.5
    named = dict(module.named_parameters())
    hidden: dict[str, Any] = {
        "params": [p for name, p in named.items() if name.startswith("blocks.")],
        "kind": optim.kind,
        "base_lr": optim.lr,
        "weight_decay": optim.weight_decay,
    }
    if optim.kind == "muon":
        hidden["momentum"] = momentum(0, optim)
    embedding = {"params": [named["embed.weight"]], "kind": "adamw", "base_lr": optim.embedding_lr * tables}
    head = {"params": [named["head.weight"]], "kind": "adamw", "base_lr": optim.head_lr * tables}
    betas = optim.betas[0], optim.betas[1]
    return muon.Combined([hidden, embedding, head], betas=betas)


def rate(step: int, steps: int, optim: MuonAdamW) -> float:
    """The factor of all learning rates for the step after step `step` of `steps`: a linear warm-up, then constant, then
    linear to 0.
    """
    warm = min(1.0, (step + 1) / optim.warmup) if optim.warmup else 1.0
    falling = round(steps * optim.cooldown)
    return min(warm, (steps - step) / falling) if falling and steps - step < falling else warm


def momentum(step: int, optim: MuonAdamW) -> float:
    """Muon's momentum, rising linearly over `momentum_steps`."""
    first, last = optim.momentum
    return first + (last - first) * (min(1.0, step / optim.momentum_steps) if optim.momentum_steps else 1.0)


def plateau(evaluations: Sequence[tuple[int, float]], stop: EarlyStop) -> str | None:
    """Why training should end after these evaluations (step, loss): `patience` evaluations in a row were above the
    best, or better than it by less than `min_delta`, and at least `after` steps are done. None if training should go
    on.
    """
    best_step, best, waited = 0, float("inf"), 0
    for step, loss in evaluations:
        if loss < best - stop.min_delta:
            best_step, best, waited = step, loss, 0
        else:
            waited += 1
    if not evaluations or waited < stop.patience or evaluations[-1][0] < stop.after:
        return None
    return f"{waited} evaluations in a row not {stop.min_delta:g} below {best:.4f}, that of step {best_step}"
