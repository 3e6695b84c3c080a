"""Decides whether the ranks on several nodes train together, from the numbers that the command's launcher gives to its
ranks.
"""

from __future__ import annotations

from collections.abc import Callable

from gpufleet.job.kind.command import STATIC
from gpufleet.job.text import counted

STABLE_S = 10.0  # if the numbers have not changed for this many seconds, all ranks of a node have started
FLAGS = (
    f"With torchrun write {STATIC}; with accelerate, --num_machines {{nodes}} --machine_rank {{node_rank}}"
    " --main_process_ip {master} --main_process_port {port} --num_processes {ranks} (on a CPU"
    " it starts no ranks: rehearse with torchrun); a script without a launcher reads RANK, WORLD_SIZE, MASTER_ADDR and"
    " MASTER_PORT, which job.env sets from {node_rank}, {ranks}, {master} and {port}. Commands that only"
    " prepare a node belong in job.setup, where gpufleet does not look for ranks"
)


class Meeting:
    """Watches one start of a command on one of `nodes` nodes with `gpus` GPUs each. If there is only one node, it
    checks nothing.
    """

    def __init__(self, *, nodes: int, gpus: int, clock: Callable[[], float]) -> None:
        self._nodes, self._gpus, self._clock = nodes, gpus, clock
        self._size, self._here, self._since = 0, 0, 0.0
        self.is_open = nodes > 1
        self.has_first = False  # whether this node has rank 0
        self.why = ""  # why the command is refused; empty if it is not

    def look(self, seen: tuple[int, int, bool] | None) -> None:
        """Reads the numbers of all ranks and of this node's ranks (processes.world), and uses them as soon as they have
        stopped changing.
        """
        if seen is not None:
            size, here, has_first = seen
            self.has_first = has_first or (self.has_first and size == self._size)
            if size == self._size:  # the ranks of a node start and end one after the other, so the number changes
                here = max(here, self._here)
            if (size, here) != (self._size, self._here):
                self._size, self._here, self._since = size, here, self._clock()
        if self._size and self._clock() >= self._since + STABLE_S:
            self.settle()

    def settle(self) -> None:
        """Uses the numbers that were read last, even if they have changed lately."""
        if self.is_open and self._size:
            self.is_open = False
            if not self._meets:
                here = self._here if self._size < self._nodes * self._here else self._gpus
                self.why = (
                    f"the launcher counts {counted(self._size, 'rank')} instead of {self._nodes * here}, {here} on"
                    f" each of {self._nodes} nodes: each node trains alone. {FLAGS}"
                )

    @property
    def figure(self) -> str:
        """A text about the ranks that train together; empty if none were seen."""
        return f"{self._size} ranks, {self._here} of them on one node" if self._size and self._meets else ""

    @property
    def _meets(self) -> bool:
        """Whether ranks on the other nodes take part in the training too. A node may have more or fewer ranks than
        GPUs.
        """
        least = self._nodes * self._here
        return self._size == least or self._size >= max(least, self._nodes * self._gpus)
