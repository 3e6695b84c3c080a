"""Detects that a run diverges, or is slower than predicted.

A run has diverged if the logged losses have risen and stay high, and the validation loss confirms that. Single hard
batches among easy ones do not have these effects, however hard they are. NaN and infinity end the training at once, in
the loop.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from typing import Any

from gpufleet.job.experiments.engine.device import Device
from gpufleet.job.experiments.engine.experiment import LostError
from gpufleet.job.kind import Guard

# The level of a window of losses is the value that a tenth of them exceeds; the lowest level of all windows is used. So
# one step in ten may have a hard row without an effect (2 % of rows, with four rows in a step). Ten losses in a row far
# above the level hardly ever occur in 20,000 steps of a good training (bench/results/guard.md). A level needs at least
# LEAST losses.
UPPER, LEAST = 0.9, 20
# a validation loss below this multiple of the phase's best one is in range, even if it is only the second of the phase
WORSE = 1.1

# Thresholds for warnings. Beyond a threshold, a run will cost more than its bill predicts, or is about to fail.
UTILIZATION, MEMORY, PACE, MFU = 80.0, 0.95, 0.6, 0.6


class LossSpikeError(LostError):
    """The loss has left its range and has not come back, and the validation loss confirms this."""


class SpikeGuard:
    """Watches one phase's logged losses, in order. Every rank sees the same losses, so all ranks stop together.

    `known`: the state of an earlier start, so that nothing is forgotten by an interruption. `first`: the number of
    steps before the phase.
    """

    def __init__(self, config: Guard | None = None, known: Mapping[str, Any] | None = None, *, first: int = 0) -> None:
        config, known = config or Guard(), known or {}
        self._config = config
        self._window: collections.deque[float] = collections.deque(known.get("window", ()), maxlen=config.window)
        self._level: float | None = known.get("level")  # the lowest upper tenth so far
        self._above: int = known.get("above", 0)
        self._lowest: float | None = known.get("lowest")  # the lowest validation loss among the evaluations in range
        self._highest: float | None = known.get("highest")
        self.clean: int = known.get("clean", first)
        """The newest step whose loss, or validation loss, was in range: checkpoints up to it are good."""

    @property
    def state(self) -> dict[str, Any]:
        """The state for a checkpoint's progress."""
        return {
            "window": list(self._window),
            "level": self._level,
            "above": self._above,
            "lowest": self._lowest,
            "highest": self._highest,
            "clean": self.clean,
        }

    @property
    def suspicious(self) -> bool:
        """Whether the newest loss is out of range: Until the next loss is known, only an improvement is then saved."""
        return self._above > 0

    def see(self, loss: float, step: int, val_loss: float | None = None) -> bool:
        """Processes a logged loss, with the evaluation of the same step if there was one. Returns True if losses have
        been out of range for so long that `judge` needs the validation loss.
        """
        above = self._level is not None and loss > self._level + self._config.rise
        self._window.append(loss)
        if above and self._config.divergence and not (val_loss is not None and self._in_range(val_loss)):
            self._above += 1
        else:
            self._above, self.clean = 0, step
            if val_loss is not None:
                self.evaluated(val_loss)
        if len(self._window) >= min(LEAST, self._config.window):
            level = self._upper()
            self._level = level if self._level is None else min(self._level, level)
        return self._above >= self._config.in_a_row

    def judge(self, val_loss: float | None, step: int) -> str | None:
        """A line which says that the training has not diverged; None if it is too early to decide. Raises
        LossSpikeError.
        """
        assert self._level is not None
        newest = self._window[-1]
        seen = (
            f"{self._above} logged losses in a row are more than {self._config.rise:g} above {self._level:.3f}, the "
            f"upper tenth of {len(self._window)} before; the newest is {newest:.3f}, at step {step}"
        )
        if val_loss is None:
            if self._above < 2 * self._config.in_a_row:
                return None
            raise LossSpikeError(f"diverged: {seen}; there is no validation loss to confirm it")
        if not self._in_range(val_loss):
            known = "none was evaluated before" if self._lowest is None else f"{self._lowest:.4f} was the best"
            raise LossSpikeError(f"diverged: {seen}; the validation loss is {val_loss:.4f}, {known}")
        self._above, self.clean, self._level = 0, step, self._upper()
        self.evaluated(val_loss)
        return f"no divergence, although {seen}: the validation loss is {val_loss:.4f}, in its range"

    def evaluated(self, val_loss: float) -> None:
        """Notes an evaluation that is in range."""
        self._lowest = val_loss if self._lowest is None else min(self._lowest, val_loss)
        self._highest = val_loss if self._highest is None else max(self._highest, val_loss)

    def _in_range(self, val_loss: float) -> bool:
        """Whether the validation loss is nearer to the best evaluation of the phase than to the worst one. Before the
        first evaluation, it is judged as training losses are.
        """
        if self._lowest is None or self._highest is None:
            return self._level is None or val_loss <= self._level + self._config.rise
        return val_loss <= max((self._lowest + self._highest) / 2, WORSE * self._lowest)

    def _upper(self) -> float:
        return sorted(self._window)[int(UPPER * len(self._window))]


class Thresholds:
    """Warnings about one phase. Each warning is given at most once, with the reason."""

    def __init__(self, predicted: Mapping[str, Any], device: Device) -> None:
        """`predicted`: the bill's predictions for the phase; may be empty."""
        self._predicted = predicted
        self._device = device
        self._said: set[str] = set()

    def check(
        self, *, tokens_per_s: float | None, mfu: float | None, memory_gb: float, utilization: float | None
    ) -> list[str]:
        """Sentences for the log. `utilization`: use of the GPU in percent, as the mean of the last five minutes."""
        total = self._device.memory_gb
        promised, target = self._predicted.get("tokens_per_s"), self._predicted.get("mfu")
        sentences: dict[str, str] = {}
        if utilization is not None and utilization < UTILIZATION:
            sentences["utilization"] = (
                f"gpu utilisation {utilization:.0f} % over 5 minutes, at least {UTILIZATION:.0f} % is expected: it "
                "waits for the host, or its micro-batches are too small (batch.micro or batch.micro_tokens, rung.json)"
            )
        if self._device.is_cuda and memory_gb > MEMORY * total:
            sentences["memory"] = (
                f"{memory_gb:.1f} of {total:.1f} GB GPU memory in use, more than {MEMORY:.0%}: little is left before "
                "it runs out and the run continues a rung lower on the ladder"
            )
        if tokens_per_s and promised and tokens_per_s < PACE * promised:
            sentences["pace"] = (
                f"{tokens_per_s:,.0f} tok/s is {tokens_per_s / promised:.2f} x the {promised:,.0f} that the bill is "
                f"made of: time and dollars grow by {promised / tokens_per_s:.1f}"
            )
        if mfu and target and mfu < MFU * target:
            sentences["mfu"] = f"mfu {mfu:.1%} is {mfu / target:.2f} x the {target:.1%} that was assumed"
        new = [text for name, text in sentences.items() if name not in self._said]
        self._said |= sentences.keys()
        return new
