"""The functions by which the supervisor uses the world outside of its process, and which tests replace; and the causes
for which training stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Protocol

from gpufleet.job.gpus import Sampler
from gpufleet.job.supervisor import machine
from gpufleet.job.supervisor.child import JobLog
from gpufleet.job.supervisor.fleet import Ask
from gpufleet.job.supervisor.metadata import Metadata
from gpufleet.job.supervisor.meter import SpotPrice
from gpufleet.job.supervisor.store import Store


class Trainer(Protocol):
    """A started trainer. `output_at`: when the trainer last printed anything."""

    output_at: float

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Outside:
    """The functions and settings themselves. Times are epoch seconds."""

    store: Store
    metadata: Metadata
    # Starts a trainer at a rung of the ladder; if there are several nodes, also with a rendezvous.Rendezvous.
    start: Callable[..., Trainer]
    terminated: Callable[[], float | None]  # returns the time at which SIGTERM came; None if it has not come
    uploads: Executor
    pulse: Executor
    log: JobLog
    spot_price: SpotPrice
    ranks: int = 1  # number of processes that train
    fleet_history: Ask
    gpus: Callable[[], tuple[machine.DriverGpu, ...]]
    sampler: Sampler | None = None  # samples the GPUs; None if there are none
    clock: Callable[[], float]
    sleep: Callable[[float], None] = time.sleep


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """Why training stops. If it has a deadline (epoch seconds), the machine is taken away then; if it has none, the run
    ends.
    """

    reason: str  # one of notice, sigterm, fallback, max_usd, max_hours, deadline, expiry, stopped
    deadline: float | None = None

    @property
    def ends(self) -> bool:
        """Whether this cause ends the run, and not only this attempt."""
        return self.deadline is None
