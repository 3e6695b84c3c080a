"""two-tower: ranks models for a query; the models of all folds are trained together, and each is tested once.

A run has one phase per family of towers (the config's own family, or each variant of the sweep). Then it trains one
family again on all judged queries; this is the refit. It is the family that is best on the watched folds, and it is
trained for the median of the epochs that were chosen for its folds. An epoch is `steps_per_epoch` joint steps. A member
stops after `patience` epochs without a better epoch; the phase ends when all members have stopped. The run writes
`fold_table.json`, `fold_table.md`, `results.json`, `exports/scores.npz` and `final/`.
"""

from __future__ import annotations

import os
import time
from dataclasses import asdict
from statistics import fmean, median_low
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from gpufleet.job import atomic
from gpufleet.job.contract.workdir import FINAL
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.engine import export, optimizer
from gpufleet.job.experiments.engine.experiment import Experiment, Phase, Session, Stopped, Weights, Work
from gpufleet.job.experiments.engine.parallel import local
from gpufleet.job.experiments.models.blocks import DTYPES
from gpufleet.job.experiments.spec import CosineAdamW
from gpufleet.job.experiments.two_tower import baselines, ranking, results
from gpufleet.job.experiments.two_tower.batches import Batches
from gpufleet.job.experiments.two_tower.folds import Member, members, refit_member
from gpufleet.job.experiments.two_tower.members import Members, Share, clip_each
from gpufleet.job.experiments.two_tower.model import TwoTowerModel as Towers
from gpufleet.job.experiments.two_tower.model import decays
from gpufleet.job.experiments.two_tower.spec import REFIT, TwoTowerConfig, parameters, variants
from gpufleet.job.experiments.two_tower.tables import spread
from gpufleet.job.kind.common import Rung
from gpufleet.job.text import counted

BETAS, EPS = (0.9, 0.999), 1e-8  # the defaults of AdamW, because the published record has none
FLOOR = 0.1  # share of the learning rate at which the cosine ends
OVER = "over"  # the last word of rank 0
SCORED = 512  # number of queries that are scored at once after the end of a phase
# seconds between two lines about the trees of one fold, because a job that prints nothing is taken to be stuck
SPOKEN_S = 60.0
# first seed of the refit's initial weights and dropout, which differs from the seeds of all folds
REFIT_SEEDS = 1_000_000


class TwoTower(Experiment):
    """The experiment for the training loop."""

    def __init__(self, session: Session) -> None:
        assert isinstance(session.config, TwoTowerConfig)
        self.session, self.config = session, session.config
        self.families = variants(session.config)
        self.tables = ranking.read(session.data)
        problems = ranking.mismatches(self.config, self.tables.queries.shape, self.tables.labels.shape)
        if problems:
            raise ValueError(f"{session.data}: " + "; ".join(problems))
        if session.device.is_cuda and self.config.products() == "tf32":
            # this allows TF32, because for a ranking the last digits of fp32 do not matter
            torch.set_float32_matmul_precision("high")
        self.phases = Phase.chain(self.config.phases())
        self.progress: dict[str, Any] = {"families": {}, "refit": None}
        self._losses_K: Tensor | None = None  # losses of the newest step that was copied from the device

    def begin(self, phase: Phase, previous: nn.Module | None) -> nn.Module:
        """New members, with the scores of earlier families."""
        if phase.name == REFIT:
            self.progress["refit"] = self._choose_refit()
        else:
            count = len(members(self.config))
            record = {"best": [None] * count, "epoch": [0] * count, "stopped": [0] * count, "epochs": 0, "weak": []}
            self.progress["families"][self._name(phase)] = record
        module = self.blank(phase)
        if previous is not None:
            assert isinstance(module, Members)
            assert isinstance(previous, Members)
            module.scores.copy_(previous.scores)
            module.optimistic.copy_(previous.optimistic)
        return module

    def blank(self, phase: Phase) -> nn.Module:
        config, refit = self._config(phase), phase.name == REFIT
        self._members = [refit_member(config.data.queries)] if refit else members(config)
        world, here = self.session.world, self.session.device.torch
        self._share = Share.of_rank(len(self._members), world)
        self._batches = Batches(self._members, self.tables, config, here, world)
        seed, compute = REFIT_SEEDS if refit else 0, DTYPES[config.precision.compute]
        module = Members(config, len(self._members), seed, compute, world)
        families, data = len(self.families), config.data
        module.register_buffer("scores", torch.zeros(families, data.folds, data.queries, data.models))
        module.register_buffer("optimistic", torch.zeros(families, data.queries, data.models))
        self._announce(phase, config)
        return module.to(here).spread()

    def optimizer(self, phase: Phase, module: nn.Module) -> Optimizer:
        """AdamW over all members. AdamW works element by element, so the result is the same as for each member
        alone.
        """
        groups = optimizer.groups(module, decays, self.config.optim.weight_decay)
        return optimizer.make(groups, CosineAdamW(betas=BETAS, eps=EPS), seed=self.config.seed)

    def schedule(self, phase: Phase, opt: Optimizer, step: int) -> float:
        """Sets the rate: a cosine to a tenth over all planned epochs, even if fewer are trained, so that the refit has
        the same rates as the folds.
        """
        lr = optimizer.cosine(self.config.optim.lr, FLOOR, (step - phase.first) / phase.steps)
        optimizer.set_lr(opt, lr)
        return lr

    def batch(self, phase: Phase, step: int, rung: Rung) -> Work:
        place = step - phase.first + (REFIT_SEEDS if phase.name == REFIT else 0)
        return self._batches.work(self._config(phase), place, rung.micro)

    def validation(self, phase: Phase, rung: Rung) -> Work:
        return Work((), 1)

    def evaluated(self, phase: Phase, step: int) -> bool:
        """Whether `step` ends an epoch; for the refit, whether it ends the phase."""
        local = step - phase.first
        if phase.name == REFIT:
            epochs: int = self.progress["refit"]["epochs"]
            return local == epochs * self.config.steps_per_epoch
        return local % self.config.steps_per_epoch == 0

    def measure(self, phase: Phase, module: nn.Module, rung: Rung) -> float | None:
        """1 - the honest members' mean nDCG@10 on the folds that they watch; None for the refit, which watches none."""
        assert isinstance(module, Members)
        return None if phase.name == REFIT else 1 - fmean(self._watched(module)[: self.config.data.folds])

    def evaluate(self, phase: Phase, step: int, module: nn.Module, rung: Rung) -> float | None:
        """The members' mean validation figure. The mean validation loss of the members. Notes each member's value, and
        keeps its weights if they are its best.
        """
        assert isinstance(module, Members)
        if phase.name == REFIT:
            return None
        assert self._losses_K is not None  # the losses of every evaluated step were copied from the device
        ndcg_K = self._watched(module)
        record = self.progress["families"][self._name(phase)]
        epoch = record["epochs"] = record["epochs"] + 1
        better = []
        for k, value in enumerate(ndcg_K):
            if not record["stopped"][k] and (record["best"][k] is None or value > record["best"][k]):
                record["best"][k], record["epoch"][k] = value, epoch
                better.append(k)
            late = epoch - record["epoch"][k] >= self.config.patience and epoch >= self.config.first_stop
            if late and not record["stopped"][k]:
                record["stopped"][k] = epoch
        module.keep(better)
        folds = self.config.data.folds
        self._say_epoch(phase, epoch, self._losses_K[:folds].tolist(), ndcg_K)
        return 1 - fmean(ndcg_K[:folds])

    def clip(self, opt: Optimizer) -> Tensor:
        """Clips the gradients of each member by its own norm; returns the mean of the norms."""
        return self._share.gather(clip_each(optimizer.parameters(opt), self.config.optim.clip)).mean()

    def logged(self, aux: dict[str, Tensor]) -> dict[str, Any]:
        """Keeps the members' losses for the line about the epoch. These losses are not written into metrics.jsonl."""
        self._losses_K = aux["losses"].float().cpu()
        return {}

    def stop_early(self, phase: Phase, step: int, val_loss: float | None) -> str | None:
        """The reason why the phase ends: no member can reach a better value any more, or this is the refit's last
        epoch. None if it goes on.
        """
        if phase.name == REFIT:
            epochs = self.progress["refit"]["epochs"]
            reason = f"{counted(epochs, 'epoch')}, the median that the folds chose"
            return reason if epochs < self.config.epochs else None
        record = self.progress["families"][self._name(phase)]
        if all(record["stopped"]):
            return f"no member improved for {counted(self.config.patience, 'epoch')}"
        return None

    def end(self, phase: Phase, module: nn.Module, weights: Weights) -> None:
        """Scores each member of a family on its test fold, which is used for nothing else. Exports the refit."""
        assert isinstance(module, Members)
        self._module = module
        if phase.name == REFIT:
            if self.session.world.first:
                self._export(module)
            return
        module.stack.unpack(local(module.best))
        module.eval()
        folds, family = self.config.data.folds, phase.index
        judged = torch.from_numpy(self.tables.queries).to(self.session.device.torch)
        scores_KQM = self._share.gather(torch.cat([module.score(part) for part in torch.split(judged, SCORED)], dim=1))
        module.scores[family] = scores_KQM[:folds]
        for member, scores_QM in zip(self._members, scores_KQM, strict=True):
            if member.protocol == "optimistic":
                module.optimistic[family][member.test] = scores_QM[member.test]
        self.progress["families"][self._name(phase)]["weak"] = self._batches.weak

    def finish(self) -> None:
        """Rank 0 writes the results. The other ranks wait for its last word, and see each stop that it looks for."""
        world = self.session.world
        if world.first:
            self._write_results()
            world.agree(OVER)
            return
        while (word := world.agree(None)) != OVER:
            if word is not None:
                raise Stopped(word[0], ends=word[1])

    def _write_results(self) -> None:
        """Computes baselines on the same folds, and writes the tables and the comparison."""
        config, tables = self.config, self.tables
        own = [member for member in members(config) if member.protocol == "honest"]
        self.session.say("baselines: popularity, LambdaRank and random order on the same folds")
        missing = baselines.lambdarank_missing(config.data.models)
        outcome = results.TwoTowerOutcome(
            config=config,
            tables=tables,
            families=[name for name, _ in self.families],
            progress=self.progress,
            scores=self._module.scores.cpu().numpy(),
            optimistic=self._module.optimistic.cpu().numpy() if config.optimistic else None,
            baselines={
                "popularity": results.by_query(own, tables, lambda m: baselines.popularity(m, tables)),
                "LambdaRank": missing or results.by_query(own, tables, self._lambdarank),
                "random": results.by_query(own, tables, lambda m: baselines.random_order(m, tables, config.seed)),
            },
        )
        session, meta = self.session, atomic.read_object(self.session.workdir / FINAL / export.META) or {}
        results.write(
            outcome,
            session.workdir,
            {
                "device": session.device.name,
                "torch": torch.__version__,
                "dataset": read_manifest(session.data).facts,
                "weights_sha256": meta["files"][0]["sha256"],
                **self.outcome,
                "predicted": list(session.predicted),
                "measured": results.measured(self.phases, session.metrics.records()),
            },
            say=session.say,
        )

    def _lambdarank(self, member: Member) -> Any:
        """The scores of one fold; prints a line at the end, and one per minute until then. A stop request is followed
        after each tree. The last checkpoint was written at the end of training, so a restart repeats the baselines.
        """
        began = spoken = time.monotonic()
        trees, fold = 0, f"LambdaRank, fold {member.fold + 1}/{self.config.data.folds}"

        def after_tree() -> None:
            nonlocal spoken, trees
            self.session.check_stop()
            trees += 1
            now = time.monotonic()
            if now - spoken >= SPOKEN_S:
                spoken = now
                self.session.say(
                    f"{fold}: {counted(trees, 'tree')} in {now - began:.0f} s, of at most {baselines.MAX_TREES}"
                )

        # Training is over, so this may use the core that training left to the supervisor (engine/__main__.py). The bill
        # assumes this.
        is_set = "OMP_NUM_THREADS" in os.environ and self.session.world.size == 1
        threads = torch.get_num_threads() if is_set else len(os.sched_getaffinity(0))
        scores = baselines.lambdarank(member, self.tables, seed=self.config.seed, threads=threads, stop=after_tree)
        self.session.say(f"{fold}: done, {counted(trees, 'tree')} in {time.monotonic() - began:.0f} s")
        return scores

    @torch.no_grad()
    def _watched(self, module: Members) -> list[float]:
        module.eval()
        ndcg_K: list[float] = self._batches.watched_ndcg(module).tolist()
        module.train()
        return ndcg_K

    def _choose_refit(self) -> dict[str, Any]:
        """The family that is best on the watched folds, and the median of its chosen epochs. No test fold is used."""
        folds = self.config.data.folds
        records = self.progress["families"]
        name = max(records, key=lambda name: fmean(records[name]["best"][:folds]))
        return {"family": name, "epochs": median_low(records[name]["epoch"][:folds])}

    def _config(self, phase: Phase) -> TwoTowerConfig:
        """The config of the family that the phase trains."""
        if phase.name == REFIT:
            return dict(self.families)[self.progress["refit"]["family"]]
        return self.families[phase.index][1]

    def _name(self, phase: Phase) -> str:
        return self.families[phase.index][0]

    def _announce(self, phase: Phase, config: TwoTowerConfig) -> None:
        alike, weak = counted(len(self._members), "member"), self._batches.weak
        self.session.say(
            f"phase {phase.index + 1}/{len(self.phases)} {phase.name}: {alike} of {parameters(config):,} parameters,"
            f" {self._batches.queries} queries each, of them {min(weak)} to {max(weak)} weakly labelled"
        )

    def _say_epoch(self, phase: Phase, epoch: int, losses: list[float], ndcg_K: list[float]) -> None:
        folds, record = self.config.data.folds, self.progress["families"][self._name(phase)]
        loss, inner, best = spread(losses), spread(ndcg_K[:folds]), fmean(record["best"][:folds])
        optimistic = f", optimistic {fmean(ndcg_K[folds:]):.4f}" if ndcg_K[folds:] else ""
        stopped = sum(map(bool, record["stopped"]))
        self.session.say(
            f"{phase.name} epoch {epoch:3d}/{self.config.epochs} | loss {loss['mean']:.4f} ± {loss['std']:.4f} | "
            f"inner nDCG@10 {inner['mean']:.4f} ± {inner['std']:.4f} (best {best:.4f}{optimistic}) | "
            f"{stopped}/{len(ndcg_K)} stopped"
        )

    def _export(self, module: Members) -> None:
        """Writes final/: the refit as a model of its own."""
        config, chosen = module.config, self.progress["refit"]
        alone = Towers(config.towers, config.data.models)
        alone.load_state_dict({name: p[0].detach().cpu() for name, p in module.stack.members.named_parameters()})
        export.export(
            self.session.workdir / FINAL,
            alone,
            {
                "experiment": "two-tower",
                "family": chosen["family"],
                "epochs": chosen["epochs"],
                "step": self.phases[-1].first + chosen["epochs"] * self.config.steps_per_epoch,
                "val_loss": None,  # no data are held out
                **self.outcome,
                "towers": asdict(config.towers),
                "models": self.tables.names["models"],
                "encoder": self.tables.encoder,
                "dataset_sha256": read_manifest(self.session.data).sha256,
                "config_sha256": self.session.config_sha256,
            },
        )
