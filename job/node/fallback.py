"""What a node does in a run with a fallback: it finds its market, hands the run over or takes it over, and moves the
time of the switch. The first on-demand node takes the run over for good: it writes an object that says so, deletes the
spot fleet, and waits until the spot nodes have saved and ended. So only one node trains at a time, and no node has to
change a fleet's size. While the run trains on spot, the time of the switch only moves into the future. So AWS starts
the on-demand fleet when no node trains and the slack is used up.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from gpufleet.job import atomic
from gpufleet.job.contract.aws import HANDOVER_S, OWN_TAGS, SWITCH
from gpufleet.job.contract.bucket import FALLBACK
from gpufleet.job.contract.messages import Spent
from gpufleet.job.contract.reading import iso
from gpufleet.job.node.outside import MetadataService, Objects, aws, retry, say, spot_nodes, tries
from gpufleet.job.node.schedule import Schedule
from gpufleet.job.node.settings import Settings

LIFE_CYCLE = "meta-data/instance-life-cycle"
# Seconds between two looks, and between two moves of the schedule (or a refusal and the next move). No move is shorter
# than this.
LOOK_S, MOVE_S = 10, 300
SOON_S, DAY_S = 90, 86_400  # the earliest hour is SOON_S ahead, because AWS refuses a time that has passed
GONE_S = 900  # the most seconds until terminated nodes no longer exist; large nodes take minutes


def choose_hand_over(
    settings: Settings, metadata: MetadataService, objects: Objects, clock: Callable[[], float]
) -> OneFleet:
    """The role of this node: HandOver if there is a standby fleet; otherwise OneFleet, which has nothing to do."""
    return HandOver(settings, metadata, objects, clock) if settings.fallback else OneFleet()


class OneFleet:
    """The role of a node whose run has one fleet: there is no other node to find, and no schedule to move."""

    market, fleet, took_over = "", "", False

    def meet(self, find_fleet: Callable[[], str | None], keys: Collection[str]) -> bool:
        """Whether this node may train."""
        return True

    def others(self, own: str | None) -> list[str]:
        """The run's other fleets, as far as objects in S3 name them."""
        return []

    def watch(self, workdir: Path) -> None:
        """Starts the work that has to be done while the run trains."""

    def end(self) -> None:
        """Ends this work, because the run is over."""


class HandOver(OneFleet):
    """The role of a node whose run has a fallback. After it has found the other nodes, `market` is its market (spot or
    on-demand), `fleet` its fleet, and `took_over` says whether it is the first on-demand node.
    """

    def __init__(
        self, settings: Settings, metadata: MetadataService, objects: Objects, clock: Callable[[], float]
    ) -> None:
        group = settings.schedule.partition("/")[0]
        self._settings, self._metadata, self._objects, self._clock = settings, metadata, objects, clock
        self._schedule = Schedule(f"{group}/{SWITCH}" if group else "", settings.folder)
        self._on_spot, self._workdir = False, Path()
        self._trained_at, self._again_at, self._ended = 0.0, float("-inf"), False
        self._changing = threading.Lock()

    def meet(self, find_fleet: Callable[[], str | None], keys: Collection[str]) -> bool:
        """Whether this node may train. An on-demand node waits until no other node trains. `keys`: the keys of the
        run's objects. Raises OSError if AWS does not answer a question that must be answered.
        """
        own = find_fleet()
        own_life_cycle = next((life_cycle for _ in tries(5) if (life_cycle := self._metadata.get(LIFE_CYCLE))), None)
        if own_life_cycle is None:
            raise OSError("the metadata service does not say whether this node is on spot")
        if own is None:
            raise OSError("AWS does not say to which fleet this node belongs")
        self._on_spot, self.fleet = own_life_cycle == "spot", own
        self.market = "spot" if self._on_spot else "on-demand"
        if self._on_spot:
            return FALLBACK not in keys
        self._take_over(own, keys)
        return True

    def others(self, own: str | None) -> list[str]:
        return self._others(own) or []

    def _others(self, own: str | None) -> list[str] | None:
        """The run's other fleets; None when S3 does not answer."""
        known = self._objects.fleets()
        return None if known is None else [fleet for fleet in known if fleet != own]

    def _take_over(self, own: str, keys: Collection[str]) -> None:
        say("on demand: this node takes the run over")
        if FALLBACK not in keys:
            file = self._settings.folder / FALLBACK
            atomic.write_json(file, {"at": iso(self._clock())})
            if not retry(4, lambda: self._objects.put(file, FALLBACK)):
                raise OSError(f"{FALLBACK} cannot be written: a spot node would train at the same time")
            self.took_over = True
        known = next((others for _ in tries(4) if (others := self._others(own)) is not None), None)
        if known is None:
            raise OSError("S3 does not say which fleet is on spot: its node would train at the same time")
        tags = {key: self._metadata.get(f"meta-data/tags/instance/{key}") for key in OWN_TAGS}
        run = {key: value for key, value in tags.items() if value}
        if run.keys() != tags.keys():
            raise OSError(
                "the metadata service does not give this node's tags, which are needed to find the spot nodes"
            )
        # AWS still lists nodes of a fleet whose id is no longer in the bucket, because `destroy` first removes the id.
        there = next((nodes for _ in tries(4) if (nodes := spot_nodes(run)) is not None), {})
        for fleet in sorted({*known, *filter(None, there.values())}):
            delete_fleet(fleet)  # AWS refuses if the fleet is already deleted; then only its nodes must end
        remaining = self._wait(run, HANDOVER_S)
        if remaining:
            say(f"ended now, because still there after {HANDOVER_S} s: {' '.join(sorted(remaining))}")
            aws("ec2", "terminate-instances", "--instance-ids", *sorted(remaining), "--output", "text")
            if self._wait(run, GONE_S):
                raise OSError("a node on spot cannot be ended, and two would train")

    def _wait(self, run: Mapping[str, str], seconds: float) -> set[str]:
        """The run's spot nodes that still exist after the wait. Raises OSError if AWS never answered."""
        until, remaining = self._clock() + seconds, None
        while True:
            nodes = spot_nodes(run)
            remaining = remaining if nodes is None else set(nodes)
            if nodes == {} or self._clock() >= until:
                break
            time.sleep(5)
        if remaining is None:
            raise OSError("AWS does not say whether a node on spot is there: two would train")
        return remaining

    def watch(self, workdir: Path) -> None:
        """On spot, starts a thread that moves the hour while the run trains."""
        if self._on_spot:
            self._workdir = workdir
            threading.Thread(target=self._watch, name="switch", daemon=True).start()

    def end(self) -> None:
        """Disables the switch, because the run is over.

        If it cannot be disabled and a node is started, that node ends itself.
        """
        with self._changing:
            self._ended = True
            if not retry(2, lambda: self._schedule.change(self._clock() + DAY_S, enabled=False)):
                say("the switch to on demand cannot be disabled: a node that it starts finds the run over and ends")

    def _watch(self) -> None:
        while not self._ended:
            time.sleep(LOOK_S)
            if (spent := Spent.read(self._workdir)) is not None:
                with self._changing:
                    self.look(spent)

    def look(self, spent: Spent) -> None:
        """Moves the hour into the future if the run has trained. Disables the switch while its cost does not fit within
        the limits.
        """
        now = self._clock()
        if self._ended or spent.switch_at <= 0 or spent.trained_at <= self._trained_at or now < self._again_at:
            return
        self._trained_at = spent.trained_at
        stands = self._schedule.stands()
        if stands is None:
            self._refused(now)
            return
        at, enabled = stands
        late = spent.switch_at <= now or spent.switch_at < at + MOVE_S
        if late and enabled == spent.switch_is_paid:
            return
        hour = max(spent.switch_at, at, now + SOON_S)
        if self._schedule.change(hour, enabled=spent.switch_is_paid):
            self._again_at = now + MOVE_S
            begins = f"AWS begins on demand at {iso(hour)}, unless a node moves that hour"
            say(begins if spent.switch_is_paid else "no switch to on demand: the rest costs more than the limits allow")
        else:
            self._refused(now)

    def _refused(self, now: float) -> None:
        self._again_at = now + MOVE_S
        say(
            "the hour at which AWS begins on demand cannot be moved: it stays as it is, which is too early rather "
            "than too late"
        )


def delete_fleet(fleet: str, *, with_nodes: bool = False) -> bool:
    """Deletes a fleet. Returns whether the fleet launches nothing more. The fleet's nodes stay, unless `with_nodes`. A
    refusal of AWS is in the answer, and not in the status.
    """
    nodes = "--terminate-instances" if with_nodes else "--no-terminate-instances"
    refused = aws(
        *("ec2", "delete-fleets", "--fleet-ids", fleet, nodes, "--output", "text"),
        *("--query", "UnsuccessfulFleetDeletions[].Error.Message"),
    )
    return refused in ("", "None")
