"""The run's other nodes, as this one knows them: their records, and AWS's word on those without an end, or a record."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gpufleet.job.contract import cost
from gpufleet.job.contract.attempt import AttemptRecord, Beat
from gpufleet.job.contract.aws import ENDED, LAUNCHED
from gpufleet.job.contract.lives import KEPT_S, Lives, Sightings
from gpufleet.job.node.outside import fleet_nodes, nodes_there


class OtherNodes:
    """The nodes that had a record when the node `own` booted, each with its last heartbeat."""

    def __init__(self, own: str, recorded: Iterable[tuple[AttemptRecord, Beat | None]] = ()) -> None:
        self._recorded, self._sightings = list(recorded), Sightings(own)
        for each, _ in self._recorded:
            self._sightings.know(each.untold, each.ended)
        self._names = {each.instance for each, _ in self._recorded}

    @property
    def nodes(self) -> list[tuple[AttemptRecord, Beat | None]]:
        """These nodes, and those that ended before they could leave a record."""
        return [*self._recorded, *((each, None) for each in cost.untold(self.untold))]

    @property
    def lives(self) -> Lives:
        return self._sightings.lives

    @property
    def ended(self) -> Mapping[str, float]:
        """When nodes ended, by instance, for those whose end is known."""
        return self._sightings.ended

    @property
    def untold(self) -> dict[str, float]:
        """When nodes without a record were launched, by instance."""
        return self._sightings.untold(self._names)

    @property
    def doubtful(self) -> bool:
        """Whether AWS may have more to say."""
        return not self._sightings.is_asked or bool(self._sightings.doubtful(self._names))

    def ask(self, fleets: Sequence[str], now: float) -> None:
        """Asks AWS about all of the run's fleets."""
        told = [fleet_nodes(each, now - KEPT_S) for each in fleets]
        launched, ended = (
            {name: at for each in told if each is not None for name, at in each[what].items()}
            for what in (LAUNCHED, ENDED)
        )
        if None not in told:
            self._sightings.take(self._names, launched, ended, nodes_there(*fleets), now)
