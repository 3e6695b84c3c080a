"""Records a run's steps: the console line, metrics.jsonl, TensorBoard, and warnings. Only rank 0 writes them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpufleet.job.contract.messages import Spent
from gpufleet.job.contract.metrics import Save, scalars
from gpufleet.job.contract.workdir import METRICS, SCALARS
from gpufleet.job.experiments.engine import metrics
from gpufleet.job.experiments.engine.experiment import Phase, Session
from gpufleet.job.experiments.engine.guard import Thresholds
from gpufleet.job.gpus import Sampler

FIGURES = (
    ("step_ms", ".1f", "ms"),
    ("tokens_per_s", ",.0f", "tok/s"),
    ("mfu", ".1%", "mfu"),
    ("memory_gb", ".1f", "GB"),
)


class Journal:
    """One start's records. `event` may be called on every rank, but only events of rank 0 are kept."""

    def __init__(self, session: Session, phases: Sequence[Phase]) -> None:
        self._session, self._phases = session, phases
        self.left_out = 0  # tokens of the steps that were skipped because phases ended early
        wanted = session.device.is_cuda and session.world.first
        self._gpus = Sampler(gpus=session.world.ranks_per_node) if wanted else None
        self._events: list[str] = []  # events, which like the next two lists wait for the next line
        self._saves: list[Save] = []
        self._resumed: int | None = None
        self._thresholds: dict[str, Thresholds] = {}
        self._scalars: Scalars | None = None
        self._lost: set[str] = set()  # files that could not be written, and for which this was reported

    def open(self, step: int) -> None:
        """Continues after `step`; lines of later steps will be repeated. Raises ValueError."""
        if not self._session.world.first:
            return
        with self._on_any_disk(METRICS):
            self._session.metrics.resume(step)
        if self._session.config.log.tensorboard:
            with self._on_any_disk("TensorBoard's"):
                self._scalars = Scalars(self._session.workdir, step)

    def close(self) -> None:
        """Ends the threads that write."""
        if self._gpus is not None:
            self._gpus.close()
        if self._scalars is not None:
            with self._on_any_disk("TensorBoard's"):
                self._scalars.close()

    def event(self, text: str, *, aloud: bool = False) -> None:
        """Adds an event to the next line of metrics.jsonl; if `aloud`, also prints it now."""
        if aloud:
            self._session.say(text)
        self._events.append(text)

    def saved(self, save: Save) -> None:
        """Adds a save to the next line of metrics.jsonl."""
        self._saves.append(save)

    def resumed(self, step: int) -> None:
        """Notes a resume in the next line of metrics.jsonl: the time since the line before was not training."""
        self._resumed = step

    def _clear(self) -> None:
        self._events, self._saves, self._resumed = [], [], None

    def tokens(self, step: int) -> int:
        """The tokens trained on up to `step`."""
        planned = sum(max(0, min(step, phase.last) - phase.first) * phase.tokens_per_step for phase in self._phases)
        return planned - self.left_out

    def write(
        self,
        phase: Phase,
        step: int,
        values: dict[str, Any],
        *,
        lr: float,
        step_s: float | None,
        tok_s: float | None,
        shown_val_loss: float | None,
        over: bool,
    ) -> None:
        """Writes one logged step. `values`: loss, val_loss (None unless evaluated now), grad_norm, the experiment's own
        figures. `shown_val_loss`: the newest validation loss. `over`: whether this is the last step of the phase, which
        may have ended early.
        """
        session = self._session
        memory_gb = session.device.used_gb()
        if not session.world.first:
            self._clear()
            return
        peak = session.device.peak_tflops
        mfu = tok_s * phase.flops_per_token / (peak * 1e12 * session.world.size) if tok_s and peak else None
        spent, gpus = Spent.read(session.workdir), self._gpu_figures()
        line = metrics.ConsoleLine(
            step=step,
            steps=self._phases[-1].last,
            loss=values["loss"],
            val_loss=None if phase.validation is None else shown_val_loss,
            lr=lr,
            step_s=step_s,
            tokens_per_s=tok_s,
            mfu=mfu,
            memory_gb=memory_gb,
            memory_total_gb=session.device.memory_gb,
            gpu_util=gpus.get("gpu_util"),
            spent_usd=None if spent is None else float(spent.spent_usd),
            eta_s=None if step_s is None else self._eta_s(phase, 0 if over else phase.last - step, step_s),
            validation=phase.validation or "val",
        )
        session.say(str(line))
        promised = session.prediction(phase.name) or {}
        thresholds = self._thresholds.setdefault(phase.name, Thresholds(promised, session.device))
        for text in thresholds.check(
            tokens_per_s=tok_s,
            mfu=mfu,
            memory_gb=memory_gb,
            utilization=None if self._gpus is None else self._gpus.mean(),
        ):
            self.event(f"warning: {text}", aloud=True)
        record = {
            "ts": round(time.time(), 3),
            "phase": phase.name,
            "step": step,
            "tokens": self.tokens(step),
            "lr": lr,
            "step_ms": None if step_s is None else round(step_s * 1000, 3),
            "tok_s": None if tok_s is None else round(tok_s, 1),
            "mfu": None if mfu is None else round(mfu, 4),
            "mem_gb": round(memory_gb, 3),
            **gpus,
            "spent_usd": line.spent_usd,
            "resumed": self._resumed,
            "saves": [asdict(save) for save in self._saves] or None,
            "event": "; ".join(self._events) or None,
            **values,
        }
        self._clear()
        with self._on_any_disk(METRICS):
            session.metrics.write(record)
        if self._scalars is not None:
            with self._on_any_disk("TensorBoard's"):
                self._scalars.write(record)

    def _gpu_figures(self) -> dict[str, float]:
        """Use, memory and temperature of the GPUs, from the driver. An Xid error also becomes an event."""
        figures = {} if self._gpus is None else self._gpus.figures()
        if (xid := figures.get("gpu_xid")) is not None:
            self.event(f"warning: the GPU's driver reports Xid {xid:.0f}", aloud=True)
        return figures

    def evaluated(self, step: int, val_loss: float) -> None:
        """Adds the evaluation of a step whose line is already written."""
        self._session.say(f"evaluated at step {step}, which an earlier stop had prevented: {val_loss:.4f}")
        if not self._session.world.first:
            return
        with self._on_any_disk(METRICS):
            self._session.metrics.evaluated(step, val_loss)
        if self._scalars is not None:
            with self._on_any_disk("TensorBoard's"):
                self._scalars.write({"step": step, "ts": round(time.time(), 3), "val_loss": val_loss})

    def compare(self, phase: Phase) -> None:
        """Prints one line at the phase's end: the bill's predictions beside the measured values."""
        if not self._session.world.first:
            return
        predicted = self._session.prediction(phase.name) or {}
        seen = metrics.measured(self._session.metrics.records(phase.name))
        pairs = (
            f"{metrics.shown(predicted.get(name), form)} / {metrics.shown(seen[name], form)} {unit}"
            for name, form, unit in FIGURES
        )
        self._session.say(f"phase {phase.name}, predicted / measured: {', '.join(pairs)}")

    @contextmanager
    def _on_any_disk(self, whose: str) -> Iterator[None]:
        """A context in which a failed write only loses lines and is reported once, so that a full disk does not end the
        run.
        """
        try:
            yield
        except OSError as error:
            if whose not in self._lost:
                self._session.say(f"warning: lines are lost ({whose}): {error}")
            self._lost.add(whose)

    def _eta_s(self, phase: Phase, steps: int, step_s: float) -> float:
        """Seconds for `steps` steps of this phase and for all later phases, computed from their FLOPs, without growth
        and evaluations.
        """
        later = sum(p.steps * p.flops_per_token * p.tokens_per_step for p in self._phases[phase.index + 1 :])
        return step_s * (steps + later / (phase.flops_per_token * phase.tokens_per_step))


FLUSH_S = 30


class Scalars:
    """The event file of this start. The event file hides values that earlier starts wrote for steps after `step`.
    Raises ValueError.
    """

    def __init__(self, workdir: Path, step: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise ValueError(
                f"log.tensorboard is set and a package is missing ({error}): install tensorboard, or set it to false"
            ) from error
        self._writer: Any = SummaryWriter(str(workdir / SCALARS), purge_step=step + 1, flush_secs=FLUSH_S)

    def write(self, record: dict[str, Any]) -> None:
        """Writes one record of metrics.jsonl."""
        for name, number in scalars(record):
            self._writer.add_scalar(name, number, record["step"], walltime=record["ts"])

    def close(self) -> None:
        """Writes buffered records, and closes the file."""
        self._writer.close()
