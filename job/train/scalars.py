"""TensorBoard scalars of metrics.jsonl's numbers. tensorboard is imported only when a run asks for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from job.contract.workdir import SCALARS

FLUSH_S = 30
LEFT_OUT = {"ts", "step", "resumed"}  # each scalar has time and step already


class Scalars:
    """The event file of this start; what an earlier start wrote beyond `step` is hidden by TensorBoard. Raises
    ValueError without tensorboard.
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
        """One record of metrics.jsonl: a scalar for each number, one for each entry of a list of numbers."""
        for key, value in record.items():
            if key in LEFT_OUT:
                continue
            for name, number in _numbers(key, value):
                self._writer.add_scalar(name, number, record["step"], walltime=record["ts"])

    def close(self) -> None:
        """Writes what is buffered."""
        self._writer.close()


def _numbers(key: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, list):
        return [pair for index, part in enumerate(value) for pair in _numbers(f"{key}/{index}", part)]
    return [(key, float(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []
