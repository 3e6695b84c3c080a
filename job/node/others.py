"""The run's other nodes, as this one knows them: their records, and what AWS says of those that tell no end."""

from __future__ import annotations

from collections.abc import Iterable

from gpufleet.job.contract.attempt import AttemptRecord, Beat
from gpufleet.job.contract.cost import Lives
from gpufleet.job.node.outside import ended_nodes, nodes_there


class OtherNodes:
    """Those that had a record when this one booted, each with its last heartbeat."""

    def __init__(self, nodes: Iterable[tuple[AttemptRecord, Beat | None]] = ()) -> None:
        self.nodes = list(nodes)
        self.ended = {name: at for each, _ in self.nodes for name, at in each.ended.items()}
        self._seen: dict[str, float] = {}
        self._gone: set[str] = set()  # when, AWS does not tell

    @property
    def lives(self) -> Lives:
        return Lives(self.ended, self._seen)

    @property
    def unknown(self) -> set[str]:
        """Nodes of which AWS may still have to say when they ended."""
        return {each.instance for each, _ in self.nodes} - self.ended.keys() - self._gone

    def ask(self, fleet: str, now: float) -> None:
        """Asks AWS of those."""
        asked = self.unknown
        self.ended.update(ended_nodes(fleet, min(each.launched for each, _ in self.nodes if each.instance in asked)))
        there = nodes_there(fleet)
        if there is not None:
            self._seen.update(dict.fromkeys(asked & there, now))
            self._gone |= asked - there
