"""tinystories-growth: a dense model, turned into a mixture of experts, then made twice as wide and deeper.

At each growth the new model is checked against the old one in fp32 before a step is taken (check.py). Every phase
starts with fresh moments and a new warm-up. The run leaves weights at each phase's start and end, `growth_report.json`,
`results.json`, `loss.csv` and `final/`.
"""

from __future__ import annotations

import csv
import io
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import EXPORTS, FINAL, RESULTS
from gpufleet.job.experiments.engine import export, metrics, optimizer
from gpufleet.job.experiments.engine.data import TokenDataset
from gpufleet.job.experiments.engine.experiment import Experiment, Phase, Session, Weights, Work
from gpufleet.job.experiments.growth import model as growth
from gpufleet.job.experiments.growth.check import GrowthCheckFailed, check_boundary, expert_load, halves_difference
from gpufleet.job.experiments.growth.growing import grow
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.models.blocks import any_length
from gpufleet.job.kind.common import Rung

PROBE = 8  # number of windows of held-out text on which the old and the new model must agree


class TinystoriesGrowth(Experiment):
    """The experiment for the training loop, in one process: its ladder splits the batch, not the model."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, GrowthConfig)
        self.session, self.config = session, session.config
        self.dataset = TokenDataset(
            session.data, vocab=self.config.model.vocab, sequence=self.config.data.sequence, device=session.device.torch
        )
        self.aux_weight = self.config.optim.load_balance
        self.sizes = self.config.phases()
        self.phases = Phase.chain(self.sizes)
        self.progress: dict[str, Any] = {"boundaries": [], "phases": {}, "capacity": {}}
        self._at: tuple[Phase, growth.Growth] | None = None  # the phase and the model in training
        self.probe_BT = next(iter(self.dataset.fixed(PROBE, PROBE, session.world).micros)).inputs[0]

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """New weights, or weights that were grown and verified. Raises GrowthCheckFailed; growth_report.json has the
        numbers.
        """
        device = self.session.device.torch
        self._announce(phase)
        if previous is None:
            module = growth.build(self.config, 0, device=device)
            self._at = phase, module
            return module
        assert isinstance(previous, growth.Growth)
        generator = torch.Generator().manual_seed(self.config.seed + phase.index)
        weights = {name: tensor.float() for name, tensor in previous.state_dict().items()}
        grown = growth.load(self.config, phase.index, grow(self.config, phase.index, weights, generator), device=device)
        folder = self._export(f"phase{phase.index + 1}_start")
        export.begin(folder)
        try:
            report = check_boundary(
                self.config, phase.index, previous, grown, self.probe_BT, export=folder / export.WEIGHTS
            )
        except GrowthCheckFailed as error:
            self._write_report([*self.progress["boundaries"], error.report.to_json()])
            raise
        export.describe(folder, self._meta(phase, grown, Weights(phase.first, None)))
        earlier = [b for b in self.progress["boundaries"] if b["phase"] != phase.name]
        self.progress["boundaries"] = [*earlier, report.to_json()]
        self.progress["capacity"][phase.name] = report.capacity
        self._write_report(self.progress["boundaries"])
        at_once = report.before
        self.session.say(
            f"growth into {phase.name} verified: logits moved by up to {at_once.max_logit_difference:.1e} of "
            f"{at_once.max_logit:.1f} ({report.after_round_trip.max_logit_difference:.1e} after save and load), "
            f"limit {at_once.limit:.1e}, {at_once.routing_flips} of {at_once.routings} routings flipped"
        )
        grown = grown.to(growth.state_dtype(self.config, phase.index))
        self._at = phase, grown
        return grown

    def blank(self, phase: Phase) -> nn.Module:
        """Uninitialised weights with the shapes of the phase, and with the capacity that the check at its beginning has
        chosen.
        """
        self._announce(phase)
        device = self.session.device.torch
        meta = growth.build(self.config, phase.index, device="meta")
        empty = {name: torch.empty_like(tensor, device=device) for name, tensor in meta.state_dict().items()}
        module = growth.load(self.config, phase.index, empty, device=device)
        capacity = self.progress["capacity"].get(phase.name)
        if capacity is not None and module.capacity is not None:
            module.set_dispatch("padded", capacity)
        self._at = phase, module
        return module

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        """AdamW, with weight decay for the parameters that the model names."""
        groups = optimizer.groups(module, growth.decays, self.config.optim.weight_decay)
        return optimizer.make(groups, self.config.optim, seed=self.config.seed)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Linear warm-up after a growth, then constant."""
        lr, warmup = self.config.optim.lr[phase.index], self._warmup(phase)
        now = lr * min(1.0, (step - phase.first + 1) / warmup) if warmup else lr
        optimizer.set_lr(opt, now)
        return now

    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        return self.dataset.batch(self.config.seed, step, self.config.batch.sequences, rung.micro, self.session.world)

    def validation(self, phase: Phase, rung: Rung) -> Work:
        return self.dataset.fixed(self.config.eval.windows, rung.micro, self.session.world)

    def logged(self, aux: dict[str, Tensor]) -> dict[str, Any]:
        """For each layer, the load of the most used expert divided by the mean load, and the router's entropy
        in nats.
        """
        if not aux:
            return {}
        spread = aux["load"].max(-1).values / aux["load"].float().mean(-1)
        return {
            "router_load": [round(x, 3) for x in spread.tolist()],
            "router_entropy": [round(x, 4) for x in aux["entropy"].tolist()],
        }

    def requires(self, phase: Phase) -> tuple[str, ...]:
        """The exports of all earlier boundaries, because a resume repeats only those at the end of its own phase."""
        done = [(f"{EXPORTS}/phase{n}_end", f"{EXPORTS}/phase{n + 1}_start") for n in range(1, phase.index + 1)]
        return tuple(name for pair in done for name in pair)

    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        """Writes weights, greedy samples and expert load, and the difference between the two halves of a
        widened model.
        """
        assert isinstance(module, growth.Growth)
        name = f"phase{phase.index + 1}_end"
        export.export(self._export(name), module, self._meta(phase, module, weights))
        used, spread = expert_load(module, self.probe_BT)
        samples = {prompt: self._continue(module, prompt) for prompt in self.config.eval.prompts}
        self.progress["phases"][phase.name] = {
            "val_loss": weights.val_loss,
            "samples": samples,
            "experts_used": used,
            "load_max_over_mean": spread,
            "halves_difference": halves_difference(module, self.probe_BT) if phase.index == 2 else None,
        }
        for prompt, text in samples.items():
            self.session.say(f"  {prompt!r} -> {text!r}")

    def finish(self) -> None:
        """Writes the model, the report, the result table and the curve."""
        workdir = self.session.workdir
        export.copy(self._export(f"phase{len(self.phases)}_end"), workdir / FINAL)
        self._write_report(self.progress["boundaries"])
        records = self.session.metrics.records()
        self._write_curve(workdir / "loss.csv", records)
        final = atomic.read_object(workdir / FINAL / export.META) or {}
        atomic.write_json(
            workdir / RESULTS,
            {
                "schema": 1,
                "experiment": "tinystories-growth",
                "steps": self.phases[-1].last,
                "tokens": sum(phase.steps * phase.tokens_per_step for phase in self.phases),
                "device": self.session.device.name,
                "torch": torch.__version__,
                "weights_sha256": final["files"][0]["sha256"],
                "phases": [self._result(phase, records) for phase in self.phases],
                "growth": self.progress["boundaries"],
                **self.outcome,
            },
        )

    def cut(self, step: int, weights: Weights) -> None:
        """Writes final/ with the model of the present phase."""
        if self._at is not None:
            phase, module = self._at
            export.export(self.session.workdir / FINAL, module, self._meta(phase, module, weights))

    def _result(self, phase: Phase, records: list[dict[str, Any]]) -> dict[str, Any]:
        """The results of one phase: sizes, predictions, measurements."""
        size = self.sizes[phase.index]
        own = [record for record in records if record["phase"] == phase.name]
        return {
            "name": phase.name,
            "params_total": size.params_total,
            "params_active": size.params_active,
            "flops_per_token_causal": size.flops_per_token,
            "steps": phase.steps,
            "lr": self.config.optim.lr[phase.index],
            "warmup_steps": self._warmup(phase),
            "loss_first": own[0]["loss"] if own else None,
            "loss_last": own[-1]["loss"] if own else None,
            "predicted": self.session.prediction(phase.name),
            "measured": metrics.measured(own),
            **self.progress["phases"][phase.name],
        }

    @torch.no_grad()
    def _continue(self, module: growth.Growth, prompt: str) -> str:
        """The prompt and `eval.sample_tokens` greedy tokens, fewer if the story ends."""
        tokenizer = self.dataset.tokenizer
        ids = tokenizer.encode(prompt)
        module.eval()
        for _ in range(self.config.eval.sample_tokens):
            window_1T = torch.tensor([ids[-self.config.data.sequence :]], device=self.session.device.torch)
            with any_length():
                logits_BTV: Tensor = module(window_1T).logits
            ids.append(int(logits_BTV[0, -1].argmax()))
            if ids[-1] == tokenizer.end:
                break
        module.train()
        return tokenizer.decode(ids)

    def _warmup(self, phase: Phase) -> int:
        """Warm-up steps; the first phase has none."""
        return self.config.optim.warmup_after_growth if phase.index else 0

    def _announce(self, phase: Phase) -> None:
        size, warmup = self.sizes[phase.index], self._warmup(phase)
        self.session.say(
            f"phase {phase.index + 1}/{len(self.phases)} {phase.name}: {size.params_total:,} parameters, "
            f"{size.params_active:,} active per token, steps {phase.first + 1} to {phase.last}, "
            f"lr {self.config.optim.lr[phase.index]:g}"
            + (f" after {warmup} steps of warm-up with fresh moments" if warmup else "")
        )

    def _meta(self, phase: Phase, module: growth.Growth, weights: Weights) -> dict[str, Any]:
        manifest = self.dataset.manifest
        return {
            "experiment": "tinystories-growth",
            "phase": phase.name,
            **weights._asdict(),
            **self.outcome,
            "tokens": weights.step * phase.tokens_per_step,
            "shape": asdict(module.shape),
            "dtype": str(module.embed.weight.dtype).removeprefix("torch."),
            "params_total": self.sizes[phase.index].params_total,
            "params_active": self.sizes[phase.index].params_active,
            "tokenizer": manifest.facts["tokenizer"],
            "dataset_sha256": manifest.sha256,
            "config_sha256": self.session.config_sha256,
        }

    def _export(self, name: str) -> Path:
        return self.session.workdir / EXPORTS / name

    def _write_report(self, boundaries: list[dict[str, Any]]) -> None:
        atomic.write_json(self.session.workdir / "growth_report.json", {"schema": 1, "boundaries": boundaries})

    def _write_curve(self, path: Path, records: list[dict[str, Any]]) -> None:
        text, columns = io.StringIO(newline=""), ("step", "tokens", "phase", "loss", "val_loss")
        csv.writer(text).writerows([columns, *([record[key] for key in columns] for record in records)])
        atomic.write_bytes(path, text.getvalue().encode())
