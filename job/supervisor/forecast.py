"""Predicts how long a stop takes: one optimizer step, save, hash and upload. The bill has predicted this time for each
type and phase, and whether it is shorter than a notice. This module only makes the predicted time longer, if steps are
slower, or if saves and uploads were measured to be slower. So its decisions agree with the bill.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from gpufleet.job.contract.estimate import NoticeEstimate, PhaseEstimate
from gpufleet.job.kind import JobConfig

if TYPE_CHECKING:
    from gpufleet.job.contract.metrics import Save

GB_S = 2.5  # seconds per GB to save, hash and send (1.0 + 0.7 + 0.8) for a type for which the bill has no prediction
RESERVE_S = 60.0  # seconds that are kept free before a limit, in addition to those of a step, a save and an upload
LATENCY_S = 2.0  # the least seconds that a save and an upload take
UPLOAD_GB_S = 1.5  # the part of GB_S for hashing and sending
SAVE_GB_S = GB_S - UPLOAD_GB_S
SLACK = 1.25
MEASURABLE_BYTES = 50_000_000  # smaller uploads are not measured, because their time is mostly latency


class Forecast:
    """Predictions for one run on one type of node."""

    def __init__(
        self,
        config: JobConfig,
        instance_type: str,
        *,
        phases: Sequence[PhaseEstimate] = (),
        notice: Sequence[NoticeEstimate] = (),
    ) -> None:
        self._config = config
        self._phases = config.phases()
        # the numbers of steps are those of the prepared dataset
        counted = {row.phase: row.steps for row in phases if row.steps is not None}
        self._last = list(itertools.accumulate(counted.get(phase.name, phase.steps) for phase in self._phases))
        self._step_s = {row.phase: row.step_ms / 1000 for row in phases}
        self._stop_s = {
            row.phase: row.seconds for row in notice if row.type == instance_type and row.seconds is not None
        }
        self._upload_s_per_byte: float | None = None
        self._save_s_per_byte: float | None = None

    def learn(self, measured: tuple[int, float] | None) -> None:
        """Learns from an upload's bytes and seconds."""
        if measured is not None and measured[0] >= MEASURABLE_BYTES:
            self._upload_s_per_byte = measured[1] / measured[0]

    def learn_saves(self, saves: Iterable[Save]) -> None:
        """Learns from how long saves took."""
        for save in saves:
            if save.took_s is not None and save.bytes >= MEASURABLE_BYTES:
                self._save_s_per_byte = save.took_s / save.bytes

    def phase(self, step: int) -> int:
        """The phase that optimizer step `step` belongs to."""
        return next((index for index, last in enumerate(self._last) if step < last), len(self._phases) - 1)

    def done_share(self, step: int) -> float:
        """The share of the training that is done at `step`, if each phase takes the time in the bill."""
        paces = [self._step_s.get(phase.name, 0.0) for phase in self._phases]
        paces = paces if all(paces) else [1.0] * len(paces)
        spans = list(zip([0, *self._last[:-1]], self._last, paces, strict=True))
        whole = sum((last - first) * pace for first, last, pace in spans)
        done = sum((min(max(step, first), last) - first) * pace for first, last, pace in spans)
        return done / whole if whole else 0.0

    def steps_left(self, step: int) -> int:
        """Optimizer steps still to do."""
        return max(self._last[-1] - step, 0)

    def slower(self, step: int, step_s: float | None) -> float:
        """The factor by which a step takes longer than in the bill, at least 1."""
        predicted_s = self._step_s.get(self._phases[self.phase(step)].name, 0.0)
        return max(1.0, (step_s or 0.0) / predicted_s) if predicted_s else 1.0

    def stop_s(self, step: int, step_s: float | None) -> float:
        """Seconds from the request to the published manifest, at `step`, with `step_s` seconds per step (None for the
        bill's).
        """
        index = self.phase(step)
        name, size = self._phases[index].name, self._config.sizes().checkpoints[index]
        predicted_s = self._step_s.get(name, 0.0)
        known_s = self._stop_s.get(name, predicted_s + LATENCY_S + size / 1e9 * GB_S)
        slower = max(0.0, (step_s or 0.0) - predicted_s)
        if self._upload_s_per_byte is None and self._save_s_per_byte is None:
            return known_s + slower
        return max(known_s, predicted_s + LATENCY_S + self._save_s(size) + self._sent_s(size)) + slower

    def end_s(self, step: int, step_s: float | None) -> float:
        """Seconds that a stop at a limit takes: those of stop_s, and those of the export."""
        export = self._config.sizes().final_if_cut[self.phase(step)]
        save_s = max(export / 1e9 * SAVE_GB_S, self._save_s(export))
        sent_s = max(export / 1e9 * UPLOAD_GB_S, self._sent_s(export))
        stop_s = self.stop_s(step, step_s)
        # This job gets its whole grace period, and then the time for a complete checkpoint.
        if grace_s := self._config.grace_s:
            stop_s = max(stop_s, grace_s + self.upload_s(self._config.sizes().checkpoints[self.phase(step)]))
        return stop_s + save_s + sent_s

    def line_s(self, step: int) -> float:
        """Seconds between two lines of metrics.jsonl at `step`, with the bill's time per step: there is a line every
        log.every steps, and one for each save. During an evaluation the trainer reports its progress.
        """
        step_s = self._step_s.get(self._phases[self.phase(step)].name, 0.0)
        return min(self._config.log.every * step_s, self._config.save_interval_s(step_s) + step_s)

    def upload_s(self, size: int) -> float:
        """Seconds to publish `size` bytes from the disk: as measured, or as in the bill if nothing is measured yet."""
        if self._upload_s_per_byte is None:
            return LATENCY_S + size / 1e9 * UPLOAD_GB_S
        return LATENCY_S + SLACK * size * self._upload_s_per_byte

    def _save_s(self, size: int) -> float:
        """Seconds until `size` bytes are on the disk: as measured, or as in the bill if nothing is measured yet."""
        return size * (SAVE_GB_S / 1e9 if self._save_s_per_byte is None else self._save_s_per_byte)

    def _sent_s(self, size: int) -> float:
        """Seconds to hash and send `size` bytes."""
        return size * (UPLOAD_GB_S / 1e9 if self._upload_s_per_byte is None else self._upload_s_per_byte)
