"""What other attempts of the run did and cost, from attempts/*.json, heartbeat/*.jsonl and the fleet's history.

What a node has cost is contract/cost.py's to say.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from gpufleet.job.contract import attempt, bucket, cost, reading
from gpufleet.job.contract.attempt import Aside, AttemptRecord, Beat, Exit, Node
from gpufleet.job.contract.aws import FREE_S
from gpufleet.job.contract.codes import AttemptExit
from gpufleet.job.contract.done import Done
from gpufleet.job.contract.lives import KEPT_S, UNTOLD, Lives, Sightings
from gpufleet.job.contract.reading import epoch, iso
from gpufleet.job.contract.receipt import AttemptCost
from gpufleet.job.contract.run import RunFile
from gpufleet.job.supervisor import fleet
from gpufleet.job.supervisor.store import Store, StoreError
from gpufleet.job.supervisor.world import Cause

REFUSALS = 2  # nodes that a run may refuse: fewer than the boots in a row without a checkpoint that end it
WRONG = "node refused, bytes arrived wrong"


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One node of the run. `usd` is compute, disks and address; `free_usd` the compute that AWS does not charge.

    `reclaimed`: AWS took it, or its owner did (fleet.py); None: it had no notice, or nobody knows.
    """

    instance: str
    type: str
    zone: str
    launched_at: float
    seconds: Decimal  # as billed: 60 at least
    lived_s: Decimal
    usd: Decimal
    compute_usd: Decimal
    free_usd: Decimal
    started_s: Decimal | None  # from launch to the trainer's first step; None: never got there
    resumed_step: int
    last_step: int
    step_s: float
    idle_s: Decimal  # told to end and waiting for AWS to do it
    rung: int | None
    floor: int  # rung of the ladder to begin at: above it memory ran out
    exit: Exit | None
    ceiling_s: Decimal = Decimal(0)  # counted at the ceiling of a spot price, which AWS did not tell
    pulled_s: Decimal | None = None  # how long its images took
    capacity: str = ""  # spot or on-demand; empty: the run's
    reclaimed: bool | None = None
    alarm: str = ""

    @property
    def noticed(self) -> bool:
        """AWS said that it would take the node away."""
        return self.exit is not None and self.exit.notice

    @property
    def interrupted(self) -> bool:
        """With a notice, and not by the owner's own hand as far as anybody knows."""
        return self.noticed and self.reclaimed is not False


def interruption(cause: Cause, at: float) -> Exit:
    """The `exit` of an attempt whose machine goes away."""
    noticed = cause.reason == "notice"
    ends_at = iso(cause.deadline) if noticed and cause.deadline is not None else None
    return Exit(AttemptExit.INTERRUPTED, cause.reason, noticed, iso(at), ends_at)


def accepts(earlier: Sequence[Attempt]) -> bool:
    """Enough nodes were refused for what they are since one trained: whatever this one is, it trains."""
    since = itertools.takewhile(lambda attempt: attempt.started_s is None, reversed(earlier))
    refused = [attempt for attempt in since if attempt.exit and attempt.exit.code == AttemptExit.REFUSED]
    return sum(not _reason(attempt).startswith(WRONG) for attempt in refused) >= REFUSALS


def doubts(earlier: Sequence[Attempt], key: str) -> bool:
    """Bytes of `key` that arrive wrong are this node's fault, and not yet the store's."""
    return sum(_reason(attempt).startswith(f"{WRONG}: {key}: ") for attempt in earlier) < REFUSALS


def _reason(attempt: Attempt) -> str:
    return attempt.exit.reason if attempt.exit else ""


class OwnRecord:
    """attempts/<instance>.json of this attempt, `now`. What the node wrote stays; `flush` sends what changed."""

    def __init__(self, store: Store, instance: str, aside: Aside) -> None:
        self._store = store
        self._key = bucket.attempt_key(instance)
        self.now = replace(attempt.record(store.get_bytes(self._key), aside), instance=instance)
        self._changed = False
        self._sending, self._noting = threading.Lock(), threading.Lock()

    def update(self, **changes: Any) -> None:
        """Notes it here; no network. From any thread."""
        with self._noting:
            self.now = replace(self.now, **changes)  # a new one: another thread may be sending the old one
        self._changed = True

    def flush(self) -> None:
        """From any thread: an older state is never put last. Raises StoreError."""
        with self._sending:
            if self._changed:
                self._changed = False
                try:
                    self._store.put_bytes(json.dumps(self.now.to_json(), sort_keys=True).encode(), self._key)
                except StoreError:
                    self._changed = True
                    raise


def read(
    store: Store,
    run: RunFile,
    *,
    but: Node | None = None,
    done: Done | None = None,
    lives: Lives = UNTOLD,
    say: Callable[[str], None] = lambda text: None,
) -> list[Attempt]:
    """Every attempt, oldest first, except that of the node `but`; or all of a run that is over, `done.json` given: its
    node was there until then. `lives`: what is known beside the records. `say` is told what is set aside of what nodes
    have written.
    """
    keys = [entry.key for prefix in (bucket.ATTEMPTS, bucket.HEARTBEATS) for entry in store.entries(prefix)]
    named = {key: node for key in keys if (node := bucket.node_of(key))}
    for key in set(keys) - set(named):
        say(f"{reading.show(key)} is set aside: no node is called so")
    with ThreadPoolExecutor(8) as pool:
        texts = dict(zip(named, pool.map(store.get_bytes, named), strict=True))

    def set_aside(key: str) -> Aside:
        return lambda why: say(f"{key}: set aside: {why}")

    def recorded(name: str) -> AttemptRecord:
        key = bucket.attempt_key(name)
        return replace(attempt.record(texts.get(key), set_aside(key)), instance=name)

    def beat(name: str) -> Beat | None:
        key = bucket.heartbeat_key(name)
        return attempt.last_beat(texts.get(key), set_aside(key))

    records = {name: recorded(name) for name in set(named.values()) - {but.instance if but else ""}}
    if done and (last := records.get(done.instance)):
        ended = last.exit or Exit(AttemptExit.CRASHED, done.reason)
        records[done.instance] = replace(last, exit=replace(ended, at=done.at))
    launches = [each.launched for each in records.values()]
    if (end := but.launched_at if but else epoch(done.at) if done else None) is not None:
        launches.append(end)
    known = {name: taken for each in records.values() for name, taken in each.reclaimed.items()}
    told = {name: at for each in records.values() for name, at in each.ended.items()}
    lives = replace(lives, ended={**told, **lives.ended})
    found = [
        attempt_from_record(run, each, beat(name), lives, cost.next_launch(each.launched, launches, run.nodes))
        for name, each in records.items()
    ]
    return with_reclaims(sorted(found, key=lambda each: each.launched_at), known)


def attempt_from_record(
    run: RunFile, record: AttemptRecord, beat: Beat | None, lives: Lives = UNTOLD, until: float | None = None
) -> Attempt:
    """What a node's record and its last heartbeat say; `lives` and `until` as contract/cost.py has them."""
    paid = cost.of_node(run.rates(record.type, record.zone, record.capacity), record, beat, lives, until)
    last = beat or Beat()
    told, gone = (epoch(at) for at in ((record.exit.at, record.exit.ends_at) if record.exit else (None, None)))
    return Attempt(
        instance=record.instance,
        type=record.type,
        zone=record.zone,
        capacity=record.capacity,
        launched_at=record.launched,
        seconds=paid.seconds,
        lived_s=paid.lived_s,
        usd=paid.usd,
        compute_usd=paid.compute_usd,
        free_usd=Decimal(0),
        started_s=record.started_s,
        resumed_step=record.resumed_step or 0,
        last_step=last.step or record.resumed_step or 0,
        step_s=last.step_s or 0.0,
        idle_s=Decimal(f"{max(0.0, gone - told):.3f}") if told and gone else Decimal(0),
        rung=record.rung,
        floor=record.floor or 0,
        exit=record.exit,
        ceiling_s=paid.ceiling_s,
        pulled_s=record.pulled_s,
        alarm=record.alarm,
    )


class Others:
    """The run's other attempts, looked at again and again: a node before this one may still be there, and one after it
    may have come. They share its limits.
    """

    def __init__(
        self,
        store: Store,
        run: RunFile,
        node: Node,
        ask: fleet.Ask,
        say: Callable[[str], None],
        known: AttemptRecord = AttemptRecord(),  # noqa: B008 - immutable
    ) -> None:
        """`known`: what this node's own record says of others."""
        self._store, self._run, self._node, self._ask = store, run, node, ask
        self._sightings = Sightings(node.instance)
        self._sightings.know(known.untold, known.ended)
        self.attempts = read(store, run, but=node, say=say)  # replaced as a whole

    def look(self, now: float) -> None:
        """Asks AWS what is not known yet, and reads again. Raises StoreError."""
        told = self._ask(now - KEPT_S) if self.doubtful else None
        if told is not None:
            self._sightings.take(self._names(), told.launched, told.ended, told.there, now)
        known = reclaimed(self.attempts)
        found = with_reclaims(read(self._store, self._run, but=self._node, lives=self._sightings.lives), known)
        self.attempts = found if told is None else judged(found, lambda since: told, now)

    @property
    def doubtful(self) -> bool:
        """Whether AWS may have more to say of them."""
        noticed = any(each.noticed and each.reclaimed is None for each in self.attempts)
        return noticed or not self._sightings.is_asked or bool(self._sightings.doubtful(self._names()))

    def _names(self) -> set[str]:
        """Names of the nodes that AWS still knows."""
        since = self._node.launched_at - KEPT_S
        return {each.instance for each in self.attempts if each.launched_at >= since}

    @property
    def spent(self) -> tuple[Decimal, Decimal]:
        """USD and seconds of all together, with those that ended before they could leave a record."""
        launches = [self._node.launched_at, *(each.launched_at for each in self.attempts)]
        untold = [
            cost.of_node(
                self._run.rates("", ""), each, None, self._sightings.lives, cost.next_launch(each.launched, launches)
            )
            for each in cost.untold(self.untold)
        ]
        paid: list[Attempt | cost.NodeCost] = [*self.attempts, *untold]
        return sum((each.usd for each in paid), Decimal(0)), sum((each.seconds for each in paid), Decimal(0))

    @property
    def untold(self) -> dict[str, float]:
        """When those were launched that have no record, for later attempts too."""
        return self._sightings.untold({each.instance for each in self.attempts})

    @property
    def ended(self) -> dict[str, float]:
        """What AWS has said, for later attempts: it forgets."""
        return dict(self._sightings.ended)


def with_reclaims(attempts: Iterable[Attempt], known: Mapping[str, bool]) -> list[Attempt]:
    """With what is `known` of each, as `reclaimed` gives it."""
    return [_with_reclaim(each, known[each.instance]) if each.instance in known else each for each in attempts]


def judged(attempts: Sequence[Attempt], ask: fleet.Ask, now: float) -> list[Attempt]:
    """With what the fleet's history says of those that got a notice and of which no attempt knows yet. A change during
    a node's life is what took it: whoever made it pays for the node.
    """
    doubtful = {
        each.instance: each.launched_at + float(each.lived_s)
        for each in attempts
        if each.noticed and each.reclaimed is None and each.launched_at >= now - KEPT_S
    }
    told = ask(min(each.launched_at for each in attempts if each.instance in doubtful)) if doubtful else None
    if told is None:
        return list(attempts)
    return [
        _with_reclaim(each, not any(each.launched_at <= at <= doubtful[each.instance] for at in told.changes))
        if each.instance in doubtful
        else each
        for each in attempts
    ]


def reclaimed(attempts: Iterable[Attempt | AttemptCost]) -> dict[str, bool]:
    """What is known of each, for later attempts: AWS forgets."""
    return {each.instance: each.reclaimed for each in attempts if each.reclaimed is not None}


def _with_reclaim(attempt: Attempt, by_aws: bool) -> Attempt:
    free = attempt.compute_usd if by_aws and attempt.seconds < FREE_S else Decimal(0)
    return replace(attempt, reclaimed=by_aws, free_usd=free)
