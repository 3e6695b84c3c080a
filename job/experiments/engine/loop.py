"""The training loop, one for every experiment: phases of steps, evaluation, checkpoints, stopping, the log.

An experiment defines its phases, the model of each phase, and the files at its end. The loop does the rest and knows
nothing of models except their output. The checkpoint at the end of a phase contains the phase's model, but no moments.
A resume from it repeats the transition to the next phase, which has new moments, or the work that follows training.

Every rank runs this loop. Rank 0 makes every decision that depends on time, supervisor or disk. Once per optimizer step
it sends the decision to all ranks, so that no rank ever stops or saves alone.
"""

from __future__ import annotations

import copy
import gc
import math
from contextlib import suppress
from dataclasses import asdict
from functools import cached_property
from typing import Any

import torch
from torch import nn

from gpufleet.job.contract.commit import Commit, Reason, Retry
from gpufleet.job.contract.inputs import DatasetManifest
from gpufleet.job.contract.metrics import Save
from gpufleet.job.contract.workdir import STEPPED
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.engine import committed, device, export, metrics, optimizer, rungs, step
from gpufleet.job.experiments.engine.cadence import Cadence
from gpufleet.job.experiments.engine.checkpoint import Saved, State, all_finite
from gpufleet.job.experiments.engine.committed import Found
from gpufleet.job.experiments.engine.compile_cache import CompileCache
from gpufleet.job.experiments.engine.cuda_graph import RecordedPasses
from gpufleet.job.experiments.engine.experiment import (
    Experiment,
    LossNotFiniteError,
    LostError,
    Phase,
    Session,
    Stopped,
    Weights,
)
from gpufleet.job.experiments.engine.guard import SpikeGuard
from gpufleet.job.experiments.engine.journal import Journal
from gpufleet.job.kind.common import Rung


class Loop:
    """Trains an experiment from its current state. Raises Stopped, ValueError (LostError, an experiment's refusal),
    torch.OutOfMemoryError.
    """

    def __init__(self, session: Session, experiment: Experiment) -> None:
        self.session, self.config, self.experiment = session, session.config, experiment
        self.world = session.world
        self.step = 0  # steps done
        self.val_loss: float | None = None  # the newest validation loss
        self._lowest: Weights | None = None  # the weights with the best evaluation of this phase
        self._at: tuple[Phase, nn.Module] | None = None  # the phase and model being trained
        self._delivered: Weights | None = None  # the weights in the module after its training is over
        self._ended: str | None = None  # why this phase ends before its last step
        self._unevaluated = False  # whether a stop came before this step's evaluation was over
        inputs = session.inputs if self.world.first else None
        self._base_weights = None if inputs is None else committed.weights_identity(inputs)
        self._clock = metrics.StepClock(session.device.synchronize)
        self._own = metrics.OwnTime(session.device.torch)
        self._journal = Journal(session, experiment.phases)
        self._cadence = Cadence(session, improvements=experiment.saves_improvements, event=self._journal.event)
        self._guard = SpikeGuard(self.config.guard)
        self._retries: tuple[Retry, ...] = ()  # retries in this run so far, on any node
        self._judged = False  # whether the guard has processed this step's loss
        self._look = False  # whether a save must wait for the next step's loss
        self._finite = torch.ones((), dtype=torch.bool, device=session.device.torch)
        self._graphs: CompileCache | None = None  # the graphs of this phase; None if nothing is compiled

    @cached_property
    def _manifest(self) -> DatasetManifest:
        return read_manifest(self.session.data)  # only needed by a job that trains; others may have no dataset

    def run(self) -> bool:
        """Trains to the end. Returns False if training diverged: another loop must resume from an earlier
        checkpoint.
        """
        try:
            with device.settings(self.session.device):
                try:
                    self._run()
                except Stopped as stopped:
                    self.session.say(f"stopped after step {self.step}: {stopped}")
                    if stopped.ends:
                        self._cut()
                    raise
                except LostError as lost:
                    self._go_back(lost)
                    return False
                return True
        finally:
            gc.unfreeze()
            self._journal.close()
            self.session.checkpoints.close()

    def _run(self) -> None:
        checkpoint = self.session.checkpoints.newest()
        phases = list(self.experiment.phases) if checkpoint is None else self._resume(checkpoint)
        self._journal.open(self.step)
        module: nn.Module | None = None
        for phase in phases:
            self.step = max(self.step, phase.first)  # the previous phase may have ended early
            module = self.experiment.begin(phase, module) if checkpoint is None else self.experiment.blank(phase)
            self._at = phase, module
            self._phase(phase, module, checkpoint)
            self._journal.left_out += (phase.last - self.step) * phase.tokens_per_step
            checkpoint = None
            self.session.device.tidy()
            self._handle_stop(phase, None, self.world.agree(self._stop()))
            weights = Weights(self.step, self.val_loss)
            if phase is self.experiment.phases[-1]:
                weights = self._deliver(phase, module, weights)
            self.experiment.end(phase, module, weights)
            self._ended = self._lowest = None
        self._note(self.session.checkpoints.wait())
        self.experiment.finish()

    def _go_back(self, lost: LostError) -> None:
        """Makes the last good checkpoint the newest, so that training is tried again with a lower learning rate. Raises
        `lost`, with the earlier tries, if there is no such checkpoint, or if there were enough tries.
        """
        guard, checkpoints = self.config.guard, self.session.checkpoints
        self._note(checkpoints.wait())
        good = min(self._guard.clean, self.step - 1) if self._guard.suspicious else self.step - 1
        restart_step: int | None = None
        if self.world.first and len(self._retries) < guard.retries:
            try:
                back = checkpoints.committed.go_back(good, self.step, str(lost))
                restart_step = None if back is None else back.step
            except OSError as error:
                self.session.say(f"no retry is possible: {error}")
        restart_step = self.world.agree(restart_step)
        tried = "".join(f"; lost at {retry.lost_at}, tried again from {retry.from_step}" for retry in self._retries)
        if restart_step is None:
            enough = f"{len(self._retries)} of guard.retries {guard.retries} used{tried}"
            none = "" if len(self._retries) >= guard.retries else f", no checkpoint up to step {good} is on this disk"
            raise type(lost)(f"{lost}{none}; {enough}. Lower optim.lr or optim.clip (0 clips nothing)") from None
        self.session.say(
            f"{lost}. Again from the checkpoint of step {restart_step}, every rate times {guard.lr_factor:g}: retry "
            f"{len(self._retries) + 1} of {guard.retries}"
        )

    def _cut(self) -> None:
        """Writes the files that the run leaves when a limit ends it in the current phase."""
        if self._at is not None:
            phase, module = self._at
            weights = self._delivered or self._deliver(phase, module, Weights(self.step, None))
            self.experiment.cut(self.step, weights)

    def _deliver(self, phase: Phase, module: nn.Module, last: Weights) -> Weights:
        """Puts the weights to export into the module, and logs which weights they are."""
        self._note(self.session.checkpoints.wait())
        self._delivered = export.deliver(self.experiment, phase, module, last, self._lowest)
        self.experiment.outcome = {**self.experiment.outcome, "retries": [asdict(retry) for retry in self._retries]}
        return self._delivered

    def _resume(self, checkpoint: Found) -> list[Phase]:
        """Restores the checkpoint's state. Returns the remaining phases, beginning with that of the checkpoint."""
        self._retries = checkpoint.commit.retries
        self.step, self.val_loss = checkpoint.step, checkpoint.progress["val_loss"]
        self._ended = checkpoint.progress.get("ended")
        self._unevaluated = checkpoint.progress.get("unevaluated", False)
        self._journal.left_out = checkpoint.progress.get("left_out", 0)
        self._cadence.resume(checkpoint.commit.phase, checkpoint.progress["best"])
        lowest = checkpoint.progress.get("lowest")
        self._lowest = None if lowest is None else Weights(*lowest)
        self.experiment.progress.update(checkpoint.progress["experiment"])
        self.session.say(f"resuming from step {self.step} ({checkpoint.commit.phase}, {checkpoint.commit.reason})")
        then = {**checkpoint.commit.determinism, "ranks": checkpoint.commit.world_size}
        now = {**device.determinism(self.session.device), "ranks": self.world.size}
        differing = [f"{key} was {then.get(key)}, is {now[key]}" for key in now if now[key] != then.get(key)]
        if differing:
            self.session.say(f"from here the run no longer repeats bit for bit: {'; '.join(differing)}")
        for name, was, current in (
            ("dataset", checkpoint.commit.dataset.get("sha256"), self._manifest.sha256),
            ("base weights", checkpoint.commit.base_weights, self._base_weights),
        ):
            if self.world.first and was not in (None, current):
                self._journal.event(f"warning: {name}: was {was}, is {current}; another run from here", aloud=True)
        self._journal.resumed(self.step)
        first = next(phase.index for phase in self.experiment.phases if phase.name == checkpoint.commit.phase)
        return list(self.experiment.phases[first:])

    def _phase(self, phase: Phase, module: nn.Module, checkpoint: Found | None) -> None:
        """Trains the remaining steps of one phase."""
        rung = rungs.choose(self.session, phase)
        if checkpoint is not None and self._phase_ended(phase):
            self.session.checkpoints.load(checkpoint, {"model": self.experiment.weights(module)})
            # The loss below may already be known from that evaluation, so it is never computed twice.
            self._make_up(phase, module, rung, checkpoint.val_loss)
            return
        opt = self.experiment.optimizer(phase, module)
        self.session.checkpoints.release()
        state: State = {"model": self.experiment.weights(module), **optimizer.moments(opt, module)}
        if checkpoint is not None:
            self.session.checkpoints.load(checkpoint, state)
            optimizer.set_step(opt, self.step - phase.first)
        self.session.checkpoints.prepare(state)
        self.session.device.tidy()
        self._clock.restart()
        self._cadence.begin(phase.name)
        known = checkpoint.progress.get("guard") if checkpoint is not None else None
        self._guard = SpikeGuard(self.config.guard, known, first=self.step)
        module.train()
        if hasattr(module, "recompute"):
            module.recompute(rung.checkpointing, products_too=rung.products_too)  # type: ignore[operator]
        started = self.step
        self._handle_stop(phase, state, self.world.agree(self._stop()))
        where = self.session.device.torch
        with (
            step.compiled(module, where, wanted=self.config.compiles()) as compiling,
            step.recorded(opt, where, self._aloud, wanted=self.config.records()) as recorded,
        ):
            self._graphs = CompileCache(self.session, phase, rung) if compiling else None
            self._make_up(phase, module, rung)
            while not self._phase_ended(phase):
                val_loss = self._step(phase, module, opt, rung, recorded, first=self.step == started)
                if not self._phase_ended(phase):
                    self._note(self.session.checkpoints.poll())
                due, stop = self.world.agree((self._due(phase, val_loss), self._stop()))
                self._look = due is not None and not self._judged
                if due is not None and not self._look:
                    # waits for earlier steps, so that their unfinished work is not added to the time of the save
                    self._clock.settle()
                    with self._cadence.saving():
                        self._save(phase, state, due, val_loss if due == "best" else None)
                        if self.config.waits_for_saves():
                            self._note(self.session.checkpoints.wait())
                self._handle_stop(phase, state, stop, val_loss)
                if self.step == started + 1:
                    # objects that exist now exist until the end of the phase, so later garbage collections skip them
                    gc.freeze()
        self._journal.compare(phase)
        self._save(phase, state, "final" if phase is self.experiment.phases[-1] else "boundary", self.val_loss)
        gc.unfreeze()

    def _phase_ended(self, phase: Phase) -> bool:
        return self.step >= phase.last or self._ended is not None

    def _step(
        self,
        phase: Phase,
        module: nn.Module,
        opt: torch.optim.Optimizer,
        rung: Rung,
        recorded: RecordedPasses | None,
        *,
        first: bool,
    ) -> float | None:
        """Does one optimizer step, and writes its log line. Returns the validation loss if this step is evaluated."""
        lr = self._lower(opt, self.experiment.schedule(phase, opt, self.step))
        self._clock.start()
        self._own.begin()
        work = self.experiment.batch(phase, self.step, rung)
        result = step.update(self.experiment, module, opt, work, self.step, self._own.end, recorded)
        self._finite &= result.loss.isfinite() & result.grad_norm.isfinite()
        self.step += 1
        if self.world.spans_nodes and self.world.first_here:
            with suppress(OSError):
                (self.session.workdir / STEPPED).write_text(f"{self.step} {self._own.seconds:.4f}")
        evaluated = self.experiment.evaluated(phase, self.step)
        values = None
        if first or evaluated or self._look or (self.step - phase.first) % self.config.log.every == 0:
            values = self._read_back(result)
        self._clock.stop(work.full)
        if values is not None:
            self._require_finite()  # checked before the weights are used, because they may not be finite
        val_loss = self._evaluate(phase, module, rung) if evaluated else None
        if self._graphs is not None and (compiled := self._graphs.keep()) is not None:
            self._journal.event(compiled, aloud=True)
        if values is not None:
            steps, full, step_s = self._clock.steps, self._clock.full, self._clock.read()
            tok_s = full / steps * phase.tokens_per_step / step_s if step_s else None
            self._cadence.stall.see(step_s, steps, busy=self.session.checkpoints.busy)
            values["val_loss"] = val_loss
            self._journal.write(
                phase,
                self.step,
                values,
                lr=lr,
                step_s=step_s,
                tok_s=tok_s,
                shown_val_loss=self.val_loss,
                over=self._phase_ended(phase),
            )
            if self._guard.see(values["loss"], self.step, val_loss):
                self._judge(phase, module, rung, val_loss)
        self._judged = values is not None
        return val_loss

    def _judge(self, phase: Phase, module: nn.Module, rung: Rung, val_loss: float | None) -> None:
        """Checks the validation loss after the training losses have seemed to diverge. Raises LossSpikeError."""
        try:
            asked = self.experiment.measure(phase, module, rung) if val_loss is None else val_loss
        except Stopped:
            return  # the run stops after this step; the next start checks again
        self._require_finite(asked)
        if (remark := self._guard.judge(asked, self.step)) is not None:
            self._journal.event(remark, aloud=True)

    def _lower(self, opt: torch.optim.Optimizer, lr: float) -> float:
        """Lowers every learning rate after a retry, and returns the rate for the log."""
        factor = self.config.guard.lr_factor ** len(self._retries)
        if factor != 1.0:
            for group in opt.param_groups:
                group["lr"] *= factor
        return lr * factor

    def _evaluate(self, phase: Phase, module: nn.Module, rung: Rung, known: float | None = None) -> float | None:
        """The validation loss after this step, or the `known` one. None if no data are held out, or after a stop."""
        try:
            val_loss = self.experiment.evaluate(phase, self.step, module, rung) if known is None else known
        except Stopped:  # this step is saved, and the run stops, as after any stop request
            self._unevaluated = True
            return None
        self._unevaluated = False
        self._require_finite(val_loss)
        self.val_loss = val_loss
        if val_loss is not None and (self._lowest is None or val_loss < export.val_loss(self._lowest)):
            self._lowest = Weights(self.step, val_loss)
        self._ended = self.experiment.stop_early(phase, self.step, val_loss)
        if self._ended is not None:
            self._journal.event(f"phase {phase.name} ends early at step {self.step}: {self._ended}", aloud=True)
        return val_loss

    def _make_up(self, phase: Phase, module: nn.Module, rung: Rung, known: float | None = None) -> None:
        """Repeats the evaluation during which the previous start was stopped, if there was one. The loss is written
        into the checkpoint of the evaluated step on this disk, and into its line of metrics.jsonl. `known` is the loss
        if another start has already computed it.
        """
        if not self._unevaluated:
            return
        val_loss = self._evaluate(phase, module, rung, known)
        if val_loss is not None:
            if self.world.first:
                # if the disk is full, this evaluation is lost, and the next improvement is saved as if this one did not
                # exist
                with suppress(OSError):
                    self.session.checkpoints.committed.evaluated(self.step, val_loss)
            self._cadence.recall()
            self._guard.evaluated(val_loss)
            self._journal.evaluated(self.step, val_loss)
        self._handle_stop(phase, None, self.world.agree(self._stop()))

    def _read_back(self, result: step.StepResult) -> dict[str, Any]:
        """The values for the log, summed over all ranks. Waits until the device has computed them."""
        aux = {name: self.world.sum(figure) for name, figure in result.aux.items()}
        return {
            "loss": self.world.sum(result.loss).item(),
            "grad_norm": result.grad_norm.item(),
            **self.experiment.logged(aux),
        }

    def _due(self, phase: Phase, val_loss: float | None) -> Reason | None:
        """The reason why this step is to be saved; None if it is not. A step without a logged loss waits for the next
        step that has one, because a save during a divergence would push out earlier checkpoints. An improvement does
        not wait, because its weights are better.
        """
        if not self.world.first or self._phase_ended(phase):
            return None
        due = self._cadence.due(val_loss)
        return None if self._guard.suspicious else due

    def _save(self, phase: Phase, state: State, reason: Reason, val_loss: float | None) -> None:
        """Starts a save of this step, unless it is saved already."""
        checkpoints = self.session.checkpoints
        # waits first, because the save that is being written, which may be of this step, may fail
        self._note(checkpoints.wait())
        if self.world.agree(checkpoints.saved_step == self.step):
            return
        # checks the weights after this step's update, because the step's loss was computed before the update
        self._finite &= all_finite(state)
        self._require_finite()
        if val_loss is not None:
            self._cadence.improve(val_loss)
        if self._phase_ended(phase):
            state = {"model": state["model"]}
        commit = Commit(
            step=self.step,
            phase=phase.name,
            goes_on_from=phase.last if self._phase_ended(phase) else self.step,
            tokens=self._journal.tokens(self.step),
            val_loss=val_loss,
            config_sha256=self.session.config_sha256,
            determinism=device.determinism(self.session.device),
            dataset={"sha256": self._manifest.sha256, "source": self._manifest.source},
            base_weights=self._base_weights,
            requires=self.experiment.requires(phase),
            reason=reason,
            torch=torch.__version__,
            retries=self._retries,
            world_size=self.world.size,
        )
        progress = {
            "best": self._cadence.best,
            "val_loss": self.val_loss,
            "lowest": self._lowest,
            "ended": self._ended,
            "unevaluated": self._unevaluated,
            "left_out": self._journal.left_out,
            "guard": self._guard.state,
            "experiment": copy.deepcopy(self.experiment.progress),
        }
        self._note(checkpoints.save(state, commit, progress))

    def _aloud(self, text: str) -> None:
        self._journal.event(text, aloud=True)

    def _note(self, ended: list[Saved]) -> None:
        """Logs how saves ended. If a save failed, a checkpoint is missing, but the run goes on."""
        for saved in ended:
            if saved.problem is None:
                blocked_s, took_s = round(saved.blocking_s, 3), round(saved.blocking_s + saved.seconds, 3)
                self._journal.saved(
                    Save(step=saved.step, reason=saved.reason, bytes=saved.bytes, blocked_s=blocked_s, took_s=took_s)
                )
            else:
                size = f"{saved.bytes / 1e6:.1f} MB"
                self._journal.event(f"NOT saved {saved.step} ({saved.reason}, {size}): {saved.problem}", aloud=True)
                self._cadence.recall()

    def _stop(self) -> tuple[str, bool, bool] | None:
        """The stop request that rank 0 sees: (reason, whether to save, whether the run ends)."""
        stop = self.session.requests.stop() if self.world.first else None
        return None if stop is None else (stop.reason, stop.save, stop.ends)

    def _handle_stop(
        self, phase: Phase, state: State | None, stop: tuple[str, bool, bool] | None, val_loss: float | None = None
    ) -> None:
        """Handles a stop request, once per optimizer step. `state`: None if this step's checkpoint is already being
        written. `val_loss`: the loss of this step's evaluation. The checkpoint must contain it, because a resume does
        not repeat the evaluation.
        """
        if stop is None:
            return
        reason, save, ends = stop
        if save:
            if state is not None:
                self._save(phase, state, "stop", val_loss)
            self._note(self.session.checkpoints.wait())
        raise Stopped(reason, ends=ends)

    def _require_finite(self, val_loss: float | None = None) -> None:
        """Raises LossNotFiniteError if any rank's loss, gradient or weight, or this `val_loss`, is not finite."""
        subject = "loss, gradients or weights are"
        if not self.world.sum((~self._finite).float()).item():
            if val_loss is None or math.isfinite(val_loss):
                return
            subject = f"the validation loss is {val_loss}, which is"
        saved = self.session.checkpoints.saved_step
        before = f"the checkpoint of step {saved} is from before, and finite" if saved >= 0 else "nothing is saved yet"
        if saved == self.step:  # if the evaluation is repeated later, the weights are already saved
            before = f"the checkpoint of step {saved} holds these very weights, finite themselves"
        raise LossNotFiniteError(f"{subject} not finite at step {self.step}; {before}")
