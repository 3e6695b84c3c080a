"""Spot first, and on demand once spot would miss the deadline. Until then a second fleet waits with size 0."""

from __future__ import annotations

from gpufleet.infra.market.market import DEADLINE, Beside, FleetKeys, ProblemList
from gpufleet.infra.market.spot import Spot
from gpufleet.job.kind import batch

# heartbeats may be at most this many seconds apart, because a hand-over to on demand waits only ten minutes
MOST_HEARTBEAT_S = 300


class SpotThenOnDemand(Spot):
    """A fleet on spot, and a standby fleet on demand. The deadline and the remaining work decide when the run
    switches.
    """

    stands_by = ("on-demand",)
    quotas = ("spot", "on-demand")

    def late_hint(self, argument: str) -> str | None:
        return None

    def check(self, findings: ProblemList, fleet: FleetKeys, beside: Beside) -> None:
        config = beside.config
        if fleet.capacity != self.name:
            hint = "Write fallback: none beside that capacity."
            findings.add("fleet.fallback", f"none where fleet.capacity is {fleet.capacity}", hint)
        if self.nodes > 1:
            findings.add(
                "fleet.fallback", f"none where fleet.nodes is {self.nodes}", "Only a single node can fall back."
            )
        if beside.deadline is None and DEADLINE not in findings.bad:
            hint = "The fallback begins when spot alone would miss it: write a time, or `in 10 h`."
            findings.add(DEADLINE, "a deadline, with fleet.fallback: on-demand", hint)
        if config is not None and config.checkpoint.heartbeat_s > MOST_HEARTBEAT_S:
            hint = "Within this time a spot node learns that the run continues on demand, and saves."
            path = f"{config.path}.checkpoint.heartbeat_s"
            findings.add(path, f"at most {MOST_HEARTBEAT_S}, with fleet.fallback: on-demand", hint)
        if config is not None and batch.is_endless(config):
            hint = f"Say how long the run is, in {config.path}.work."
            findings.add("fleet.fallback", "none for a run without a declared amount of work", hint)
