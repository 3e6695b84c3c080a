"""Computes how a batch is split over ranks and micro-batches, and which split fits on a GPU. This module uses only the
answers of the job's config.
"""

from __future__ import annotations

from gpufleet.job.kind.common import DEVICE_RESERVE_GB, ENDLESS_S, Rung, remembered
from gpufleet.job.kind.job import JobConfig


def total_steps(config: JobConfig) -> int:
    """Optimizer steps of all phases together."""
    return sum(phase.steps for phase in config.phases())


def is_endless(config: JobConfig) -> bool:
    """Whether the job has no declared length, so that it trains until a limit."""
    last = config.phases()[-1]
    return last.counts == "seconds" and last.steps == ENDLESS_S


def launched(config: JobConfig, ranks: int) -> int:
    """The number of processes that the supervisor starts for `ranks`: for a user's command only one, its host."""
    return 1 if config.processes == "own" else ranks


def _share_rows(config: JobConfig) -> bool:
    """Whether ranks share the rows of a step. If they share models instead, each model has all rows."""
    return config.phases()[0].models is None


def rows_per_rank(config: JobConfig, ranks: int) -> int:
    """The rows of each rank in a step, the same for every rank; 1 if unknown."""
    rows = config.rows() or 1
    return -(-rows // ranks) if _share_rows(config) else rows


def empty_rows(config: JobConfig, ranks: int) -> int:
    """The empty rows that fill up the last ranks in a step, over all ranks; 0 if unknown."""
    rows = config.rows()
    return 0 if rows is None or not _share_rows(config) else rows_per_rank(config, ranks) * ranks - rows


def micro_batches(config: JobConfig, rung: Rung, ranks: int) -> int:
    """Micro-batches that one rank runs in an optimizer step."""
    return -(-rows_per_rank(config, ranks) // rung.micro)


def peak_gb(config: JobConfig, phase_index: int, rung: Rung, ranks: int = 1) -> float:
    """The memory that a GPU needs for a phase: the predicted peak (0 if unknown) plus the reserve."""
    memory = config.memory(phase_index, rung, ranks)
    return (0.0 if memory is None else memory.total_gb) + DEVICE_RESERVE_GB


@remembered
def choose_rung(config: JobConfig, gpu_memory_gb: float, phase_index: int | None = None, ranks: int = 1) -> Rung | None:
    """The highest rung that is predicted to fit, in every phase if `phase_index` is None. Returns None if no
    rung fits.
    """
    chosen = range(len(config.phases())) if phase_index is None else (phase_index,)
    for rung in config.ladder(ranks):
        if all(peak_gb(config, index, rung, ranks) <= gpu_memory_gb for index in chosen):
            return rung
    return None


def lower_rung(config: JobConfig, rung: Rung, phase_index: int, ranks: int = 1) -> Rung | None:
    """The rung to try after a real out-of-memory error: the next one that is predicted to need less; None if there is
    none. If the present rung does not accumulate gradients, a next rung that begins to do so may be skipped, because
    gradients then stay in memory together with the activations.
    """
    rungs = config.ladder(ranks)
    now = peak_gb(config, phase_index, rung, ranks)
    below = rungs[rungs.index(rung) + 1 :]
    return next((lower for lower in below if peak_gb(config, phase_index, lower, ranks) < now), None)
