"""When a run is not worth its money any more: a loss that shot up and stayed up. And what is slower than was promised.

A loss that is NaN or infinite is the loop's own business; these rules look at the losses that are logged.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping
from statistics import median
from typing import Any

from job.train.device import Device

# Loss spike: this far above the window's median, twice in a row. 10 MADs are 6.7 standard deviations of a normal
# distribution; the nat keeps a quiet late window (MAD 0.01) from calling an ordinary bump a spike. Our choice, 2026-11.
WINDOW, LEAST, MADS, NATS, IN_A_ROW = 50, 10, 10.0, 1.0, 2

# Warnings: below or above these a run costs more than its bill says, or is about to fail.
UTILIZATION, MEMORY, PACE, MFU = 80.0, 0.95, 0.6, 0.6


class LossSpikeError(ValueError):
    """The loss left its range and did not come back."""


class SpikeGuard:
    """Looks at one phase's logged losses, in order. Each rank's sees the same ones, so all of them stop together.

    `known`: the state of an earlier start's, so that an interruption makes it forget nothing.
    """

    def __init__(self, known: Mapping[str, Any] | None = None) -> None:
        known = known or {"window": [], "above": 0, "clean": 0}
        self._window: collections.deque[float] = collections.deque(known["window"], maxlen=WINDOW)
        self._above: int = known["above"]
        self._clean: int = known.get("clean", 0)  # the step of the newest loss in range

    @property
    def state(self) -> dict[str, Any]:
        """For the checkpoint's progress: the losses it judges by, and how many of the newest are out of range."""
        return {"window": list(self._window), "above": self._above, "clean": self._clean}

    @property
    def suspicious(self) -> bool:
        """The newest loss is out of range: nothing but an improvement is saved until the next one has been seen."""
        return self._above > 0

    def see(self, loss: float, step: int) -> None:
        """Raises LossSpikeError at the second loss in a row that is out of range."""
        if len(self._window) >= LEAST:
            middle = median(self._window)
            limit = middle + max(MADS * median(abs(x - middle) for x in self._window), NATS)
            if loss > limit:
                self._above += 1
                if self._above == IN_A_ROW:
                    raise LossSpikeError(
                        f"the loss is {loss:.3f} at step {step}, after {middle:.3f} (median of the last "
                        f"{len(self._window)} logged, limit {limit:.3f}), {IN_A_ROW} times in a row. Checkpoints "
                        f"up to step {self._clean} are from before: lower optim.lr or optim.clip (0 clips nothing) "
                        "and start a run anew"
                    )
                return
        self._above, self._clean = 0, step
        self._window.append(loss)


class Thresholds:
    """Warnings about one phase, each at most once, with the reason."""

    def __init__(self, predicted: Mapping[str, Any], device: Device) -> None:
        """`predicted`: the bill's figures of the phase; may be empty."""
        self._predicted = predicted
        self._device = device
        self._said: set[str] = set()

    def check(
        self, *, tokens_per_s: float | None, mfu: float | None, memory_gb: float, utilization: float | None
    ) -> list[str]:
        """Sentences for the log. `utilization`: percent, mean over the last five minutes."""
        total = self._device.memory_gb
        promised, target = self._predicted.get("tokens_per_s"), self._predicted.get("mfu")
        found: dict[str, str] = {}
        if utilization is not None and utilization < UTILIZATION:
            found["utilization"] = (
                f"gpu utilisation {utilization:.0f} % over 5 minutes, at least {UTILIZATION:.0f} % is expected: it "
                "waits for the host, or its micro-batches are too small (batch.micro or batch.micro_tokens, rung.json)"
            )
        if self._device.is_cuda and memory_gb > MEMORY * total:
            found["memory"] = (
                f"{memory_gb:.1f} of {total:.1f} GB GPU memory in use, more than {MEMORY:.0%}: little is left before "
                "it runs out and the run continues a rung lower on the ladder"
            )
        if tokens_per_s and promised and tokens_per_s < PACE * promised:
            found["pace"] = (
                f"{tokens_per_s:,.0f} tok/s is {tokens_per_s / promised:.2f} x the {promised:,.0f} that the bill is "
                f"made of: time and dollars grow by {promised / tokens_per_s:.1f}"
            )
        if mfu and target and mfu < MFU * target:
            found["mfu"] = f"mfu {mfu:.1%} is {mfu / target:.2f} x the {target:.1%} that was assumed"
        new = [text for name, text in found.items() if name not in self._said]
        self._said |= found.keys()
        return new
