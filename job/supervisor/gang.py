"""Decides which nodes of a run train together, and when they stop, from what this node has last read about the others.
This module only makes decisions, and there is no coordinator. Every node writes its presence below the run's prefix,
and reads the presences of the others. When all nodes are ready, the oldest proposes which nodes train: it creates the
object of the next generation, and only one node can succeed in this. The first member of a generation is its leader: it
publishes checkpoints, enforces the run's limits, and ends the run. If a member notices that another member is missing,
it ends its own trainer, and is ready again. So does a member that cannot read the store while its ranks make no steps.
If no node can reach the store, no node draws conclusions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.codes import AttemptExit, TrainerExit
from gpufleet.job.contract.gang import GangGeneration, Presence

BEAT_S = 5.0  # seconds between two writes of a presence
# seconds between two writes of a waiting node's presence; short, because all nodes are billed until the last one has
# seen the next generation
WAITING_BEAT_S = 1.0
LOST_S = 45.0  # a node is lost this many seconds after its last presence, if the ranks make no steps
# The same number of seconds, if ranks of the node's generation have failed on another node. It is shorter, because then
# no further step can show that the node still works.
FAILED_S = 20.0
SILENT_S = 600.0  # this many seconds after its last presence a node is taken to be lost, even if its ranks make steps
# A node is slow if its steps take this many times as long as those of the others, or if a look at S3 takes this many
# seconds. The last SLOW_STEPS steps and SLOW_LOOKS looks are compared.
SLOW, SLOW_LOOK_S, SLOW_STEPS, SLOW_LOOKS = 1.5, 15.0, 20, 5
# Looks must have succeeded for this many seconds before a node is taken to be lost, because after an outage of S3 every
# presence is old.
STEADY_S = 15.0
# a member ends its trainer after this many seconds in which it could not read the store and its ranks made no steps
FENCE_S = 60.0
PROPOSE_S = 30.0  # the oldest node has this many seconds to propose a generation; after that any node may
SPARE_S = 600.0  # a node ends after the others have trained without it for this many seconds
# Seconds for which a block's nodes wait for the others, which boot at the same time and are not replaced.
BLOCK_S = 1200.0
RETRIES = 1  # retries with the same nodes from the same checkpoint
TOGETHER = (TrainerExit.FINISHED, TrainerExit.STOPPED)  # exit codes with which all ranks end together


@dataclass(frozen=True, kw_only=True, slots=True)
class Sight:
    """Another node's presence, and its age by the store's own clock."""

    presence: Presence
    age_s: float

    @property
    def notice_in_s(self) -> float | None:
        """Seconds from this look until the node is taken away. A time of day would not do, because the node's clock may
        differ from the others.
        """
        return None if self.presence.notice is None else self.presence.notice - self.presence.at - self.age_s

    @property
    def is_there(self) -> bool:
        """Whether the node has not ended, and its presence is not too old."""
        return self.age_s <= LOST_S and self.presence.state != "gone"


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """What a node knows about the other nodes.

    `steady_s`: seconds since looks last failed; `age_s`: seconds since the last look.
    """

    own: Presence
    others: Mapping[str, Sight] = field(default_factory=dict)
    newest: GangGeneration | None = None
    is_over: bool = False  # whether done.json exists
    # How often waiting nodes were told to end since the newest generation; None if this was not read yet.
    let_go: int | None = None
    steady_s: float = 0.0
    age_s: float = 0.0

    @property
    def alive(self) -> dict[str, Presence]:
        """The nodes that exist, including this one."""
        there = {name: sight.presence for name, sight in self.others.items() if not self.is_lost(sight)}
        return {**there, self.own.instance: self.own}

    def is_lost(self, sight: Sight) -> bool:
        """Whether the node has ended, or its presence is too old. The limit is shorter if ranks of its generation have
        failed.
        """
        if not sight.is_there or sight.age_s <= FAILED_S or self.steady_s < STEADY_S:
            return not sight.is_there
        every = [self.own, *(other.presence for other in self.others.values())]
        failed = {presence.generation for presence in every if presence.ended not in (None, *TOGETHER)}
        return sight.presence.state == "busy" and sight.presence.generation in failed


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """The decision of this node to train as a member of the generation."""

    generation: GangGeneration


@dataclass(frozen=True, kw_only=True, slots=True)
class Propose:
    """The decision to create the next generation's object; only the first node to do so succeeds."""

    generation: GangGeneration


@dataclass(frozen=True, kw_only=True, slots=True)
class LetAllGo:
    """The decision that all waiting nodes end, so that all nodes are requested from AWS together later."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """The decision to end this attempt."""

    code: int
    why: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """The decision to wait; `why`: the reason, for the log."""

    why: str


Action = Join | Propose | LetAllGo | Leave | Wait


def next_of(
    view: View,
    nodes: int,
    *,
    ready_s: float,
    spare_s: float,
    lacking_s: float,
    gather_s: float,
    origin: CheckpointPlace | None,
) -> Action:
    """What a node should do while it is in no generation. `ready_s`: seconds since which enough nodes are ready.
    `spare_s`: seconds for which the others have trained without this node. `lacking_s`: seconds since which a block has
    too few nodes. `gather_s`: seconds for which the oldest node may still wait for missing nodes. `origin`: the
    checkpoint from which the next generation begins.
    """
    own, newest = view.own, view.newest
    if newest is not None and newest.number > own.generation and own.instance in newest.members:
        if newest.is_last:
            at = "before any checkpoint" if newest.step < 0 else f"at step {newest.step}"
            return Leave(code=AttemptExit.CRASHED, why=f"the same nodes ended {newest.tries} times {at}")
        return Join(generation=newest)
    if busy := busy_nodes(view):
        if spare_s >= SPARE_S:
            return Leave(code=AttemptExit.INTERRUPTED, why=f"the run has trained without this node for {spare_s:.0f} s")
        return Wait(why=f"{', '.join(busy)} not ready yet")
    ready = ready_nodes(view)
    if len(ready) < nodes:
        if lacking_s >= BLOCK_S:
            why = f"only {len(ready)} of {nodes} nodes for {lacking_s:.0f} s, and a block's fleet replaces none"
            return Leave(code=AttemptExit.CRASHED, why=why)
        if gather_s <= 0 and view.let_go is not None and acts(view):
            return LetAllGo()
        return Wait(why=f"{len(ready)} of {nodes} nodes are ready")
    members = ready[:nodes]
    if own.instance == members[0].instance or (own in members and ready_s >= PROPOSE_S):
        return Propose(generation=_proposal(members, newest, origin))
    return Wait(why=f"{members[0].instance} must propose a generation")


def busy_nodes(view: View) -> list[str]:
    """The other nodes that train or still publish. While there are any, no node may begin from an older checkpoint."""
    return sorted(
        name for name, presence in view.alive.items() if presence.state == "busy" and name != view.own.instance
    )


def ready_nodes(view: View) -> list[Presence]:
    """The nodes that could train, the oldest first."""
    able = [presence for presence in view.alive.values() if presence.state == "ready" and presence.notice is None]
    return sorted(able, key=lambda presence: (presence.launched_at, presence.instance))


def acts(view: View) -> bool:
    """Whether a node that is in no generation enforces the run's limits. If no node trains, the oldest node does."""
    idle = [presence for presence in view.alive.values() if presence.state != "busy" and presence.notice is None]
    oldest = min(idle, key=lambda presence: (presence.launched_at, presence.instance), default=None)
    return (
        view.age_s <= LOST_S
        and not view.is_over
        and not busy_nodes(view)
        and oldest is not None
        and oldest.instance == view.own.instance
    )


def timely(places: Iterable[CheckpointPlace], newest: GangGeneration | None) -> list[CheckpointPlace]:
    """The published checkpoints from which the next generation may begin, in order. A leader that hung may have
    published a checkpoint after the generation `newest` had begun without it. Such a checkpoint is skipped, because the
    log since that time does not belong to it.
    """
    every = sorted(places)
    began = (newest and newest.origin) or CheckpointPlace(-1)
    if newest is None:
        return every
    known = [place for place in every if place <= began or place.generation == 0 or place.generation >= newest.number]
    return known or every


def _proposal(ready: list[Presence], newest: GangGeneration | None, origin: CheckpointPlace | None) -> GangGeneration:
    """The next generation. The generation's leader is the node that last had rank 0; if there is none, the node whose
    address comes first in text order. PyTorch's c10d assigns ranks in the order of host names (torch 2.13,
    elastic/rendezvous/dynamic_rendezvous.py). An EC2 host name has the address in it, as in
    ip-10-0-1-5.us-east-2.compute.internal, so both orders are the same.
    """
    members = sorted(ready, key=lambda presence: (-presence.first_in, presence.address))
    made = GangGeneration(
        number=newest.number + 1 if newest else 1,
        members=tuple(presence.instance for presence in members),
        addresses=tuple(presence.address for presence in members),
        step=-1 if origin is None else origin.step,
        source=0 if origin is None else origin.generation,
        rung=max(presence.rung for presence in members),
    )
    if newest is None or (set(newest.members), newest.origin, newest.rung) != (
        set(made.members),
        made.origin,
        made.rung,
    ):
        return made
    first, *others = members
    if (
        first.first_in == newest.number
        and made.leader != newest.leader
        and not any(presence.first_in for presence in others)
    ):
        # the count stays, because no node has failed; only the node with rank 0 was not known
        return replace(made, tries=newest.tries)
    return replace(made, tries=newest.tries + 1, is_last=newest.tries >= RETRIES)


def why_over(view: View, generation: GangGeneration, *, idle_s: float, stopping: bool = False) -> str | None:
    """Why a member must end its trainer; None if it may go on. `idle_s`: seconds since a step of this node's ranks, or
    since the ranks began. `stopping`: whether the ranks were asked to end or have done all steps; another member may
    then end with an error while the leader's ranks save.
    """
    if view.age_s >= FENCE_S:
        return f"no store and no step for {min(view.age_s, idle_s):.0f} s" if idle_s >= FENCE_S else None
    if view.newest is not None and view.newest.number > generation.number:
        return f"generation {view.newest.number} has taken over"
    if view.is_over:
        return "the run is over"
    for name, presence in view.alive.items():
        if presence.first_in == generation.number and name != generation.leader:
            return f"rank 0, which saves and prints, is on {name}: {name} leads the next generation"
    for name in generation.members:
        if name == view.own.instance:
            continue
        seen = view.others.get(name)
        if seen is not None and seen.presence.state == "gone":
            return f"{name} has left"
        # All ranks take part in every step, so a step of this node's ranks proves that all ranks work.
        if seen is None or (not seen.is_there and (idle_s > LOST_S or seen.age_s > SILENT_S)):
            if view.steady_s >= STEADY_S:
                return f"{name} is lost"
        elif (
            seen.presence.generation >= generation.number
            and seen.presence.ended not in (None, *TOGETHER)
            and (name == generation.leader or not stopping)
        ):
            return f"{name}'s trainer ended with {seen.presence.ended}"
    return None


def leader_stops(view: View, generation: GangGeneration) -> bool:
    """Whether the generation's leader asks its ranks to end, or they have ended so: a look may come only then."""
    leader = view.others.get(generation.leader)
    if leader is None:
        return False
    has_stopped = (leader.presence.generation, leader.presence.ended) == (generation.number, TrainerExit.STOPPED)
    return leader.presence.stopping or has_stopped


def why_slow(view: View, generation: GangGeneration) -> str:
    """A sentence about how this node is slow; empty if it is not."""
    if view.own.look_s > SLOW_LOOK_S:
        return f"its last {SLOW_LOOKS} looks at S3 have each taken {view.own.look_s:.0f} s or more"
    if late_s := late_each_step_s(view, generation):
        times = view.own.own_s / (view.own.own_s - late_s)
        return (
            f"before the exchange, its last {SLOW_STEPS} steps took {times:.1f} times as long as those of other nodes"
        )
    return ""


def late_each_step_s(view: View, generation: GangGeneration) -> float:
    """Seconds for which the other nodes wait for this node in each step; 0 if this may be chance."""
    others = [view.others[name].presence for name in generation.members if name in view.others]
    known = [presence.own_s for presence in others if presence.generation == generation.number and presence.own_s]
    usual_s = median(known) if known else math.inf
    return view.own.own_s - usual_s if view.own.own_s >= SLOW * usual_s else 0.0


def notice_in_s(view: View, generation: GangGeneration) -> float | None:
    """Seconds until the first of the other members that have a notice is taken away; None if no member has one."""
    notices = [view.others[name].notice_in_s for name in generation.members if name in view.others]
    return min((seconds - view.age_s for seconds in notices if seconds is not None), default=None)


def fatal(view: View, generation: GangGeneration) -> str | None:
    """The message of a member of the generation about an error that would occur on every node; None if there is
    none.
    """
    for name in generation.members:
        seen = view.others.get(name)
        if seen and seen.presence.generation == generation.number and seen.presence.ended == TrainerExit.FATAL:
            return f"{name}: {seen.presence.said}"
    return None
