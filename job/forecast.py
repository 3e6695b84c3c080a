"""How long a stop takes: one optimizer step, save, hash and upload. Measured as soon as something can be."""

from __future__ import annotations

from typing import Any

from job import sizing
from job.config import JobConfig

DISK_BYTES_S = 1.0e8  # gp3's included 125 MiB/s less a little; instance-store NVMe is faster. An assumption
UPLOAD_BYTES_S = 2.0e8  # assumption; 1.02 GB/s was once measured on g5.12xlarge, hashing (1.4 GB/s) runs beside it
LATENCY_S = 2.0  # of a save and an upload of nothing
SLACK = 1.25
MEASURABLE_BYTES = 50_000_000  # below this an upload's time is all latency


class Forecast:
    """Predictions for one run on one node."""

    def __init__(self, config: JobConfig, predicted: list[dict[str, Any]]) -> None:
        self._config = config
        self._predicted_s = [float(phase["step_ms"]) / 1000 for phase in predicted]
        self._upload_bytes_s = UPLOAD_BYTES_S

    def learn(self, measured: tuple[int, float] | None) -> None:
        """Takes in bytes and seconds of an upload."""
        if measured is not None and measured[0] >= MEASURABLE_BYTES:
            self._upload_bytes_s = measured[0] / max(measured[1], 0.001)

    def phase(self, step: int) -> int:
        """The phase that optimizer step `step` belongs to."""
        return min(step // self._config.steps_per_phase, len(sizing.phases(self._config)) - 1)

    def stop_s(self, step: int, step_s: float | None) -> float:
        """From the request to the published manifest, at `step`, with steps of `step_s` (None: the bill's)."""
        phase = self.phase(step)
        if step_s is None:
            step_s = self._predicted_s[phase] if phase < len(self._predicted_s) else 0.0
        size = sizing.checkpoint_bytes(self._config, phase)
        return step_s + LATENCY_S + SLACK * (size / DISK_BYTES_S + size / self._upload_bytes_s)
