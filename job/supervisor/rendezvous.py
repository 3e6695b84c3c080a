"""Makes the options of torchrun, and the environment of a command, with which the trainers of several nodes find each
other.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpufleet.job.contract import environment
from gpufleet.job.contract.gang import GangGeneration

# each generation has its own port, so that a rank of an old generation cannot connect to a new one
FIRST_PORT, PORTS = 29400, 500
ROUTES = Path("/proc/net/route")  # exists on Linux only


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendezvous:
    """How one node finds the others of its generation."""

    nodes: int
    rank: int
    master: str
    port: int
    number: int = 1
    gbps: float = 0.0  # rate of the network cards between nodes; 0 if unknown

    @classmethod
    def of_member(cls, generation: GangGeneration, rank: int, gbps: float = 0.0) -> Rendezvous:
        return cls(
            nodes=len(generation.members),
            rank=rank,
            master=generation.addresses[0],
            port=FIRST_PORT + generation.number % PORTS,
            number=generation.number,
            gbps=gbps,
        )

    @property
    def torchrun(self) -> list[str]:
        """torchrun's options for a static rendezvous: torchrun waits only for the named nodes, and does not restart
        nodes.
        """
        meeting = ["--master-addr", self.master, "--master-port", str(self.port)]
        return ["--nnodes", str(self.nodes), "--node-rank", str(self.rank), *meeting, "--max-restarts", "0"]

    @property
    def environment(self) -> dict[str, str]:
        """A command's environment variables, and the network interface for gloo, which otherwise would use any."""
        values = {"nodes": self.nodes, "node_rank": self.rank, "master": self.master, "port": self.port}
        named = {environment.COMMAND[name]: str(value) for name, value in values.items()}
        cards = {environment.GBPS: f"{self.gbps:g}"} if self.gbps else {}
        return {**named, **cards, "GLOO_SOCKET_IFNAME": interface(self.master), "FI_EFA_USE_HUGE_PAGE": "0"}


def interface(master: str, routes: Path = ROUTES) -> str:
    """The network interface of the default route; in a rehearsal, the loopback interface."""
    if master.startswith("127."):
        return "lo"
    rows = [line.split() for line in routes.read_text().splitlines()[1:]]
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), "eth0")
