"""Finds what other attempts of the run did and cost, from attempts/*.json, heartbeat/*.jsonl and the fleet's history.

contract/spent.py decides what a node has cost.
"""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from decimal import Decimal
from typing import Any

from gpufleet.job.contract import attempt, bucket, reading, terms
from gpufleet.job.contract.attempt import Aside, AttemptRecord, Exit, Node
from gpufleet.job.contract.codes import AttemptExit
from gpufleet.job.contract.done import Done
from gpufleet.job.contract.reading import Fields, epoch, iso
from gpufleet.job.contract.receipt import AttemptCost
from gpufleet.job.contract.run import RunFile
from gpufleet.job.contract.spent import KEPT_S, Attempt, History, Left, OtherNodes
from gpufleet.job.contract.workdir import RUN
from gpufleet.job.supervisor import fleet
from gpufleet.job.supervisor.store import Store, StoreError, bucket_uri, open_store
from gpufleet.job.supervisor.world import Cause

# at most this many nodes may be refused in a row; this is fewer than the boots without progress that end the run
REFUSALS = 2
WRONG = "node refused, bytes arrived wrong"
LAUNCH_S = 10.0  # tolerance in seconds, because AWS gives launch times in whole seconds
# the most seconds between a change of a fleet and the notice of a node that ends because of it (assumed)
CHANGED_S = 300.0


def interruption(cause: Cause, at: float) -> Exit:
    """The `exit` of an attempt whose machine is taken away."""
    noticed = cause.reason == "notice"
    ends_at = iso(cause.deadline) if noticed and cause.deadline is not None else None
    return Exit(AttemptExit.INTERRUPTED, cause.reason, noticed, iso(at), ends_at)


def accepts(earlier: Sequence[Attempt]) -> bool:
    """Whether this node must train in any case, because too many nodes were refused since a node last trained."""
    since = itertools.takewhile(lambda attempt: attempt.record.started_s is None, reversed(earlier))
    ends = [attempt.record.exit for attempt in since]
    refused = [end for end in ends if end is not None and end.code == AttemptExit.REFUSED]
    return sum(not end.reason.startswith(WRONG) for end in refused) >= REFUSALS


def doubts(earlier: Sequence[Attempt], key: str) -> bool:
    """Whether this node is taken to be the cause of wrong bytes of `key`, and not yet the store."""
    ends = [attempt.record.exit for attempt in earlier]
    return sum(end is not None and end.reason.startswith(f"{WRONG}: {key}: ") for end in ends) < REFUSALS


class OwnRecord:
    """The attempts/<instance>.json of this attempt; `now` has its content. Fields that the node wrote stay unchanged.
    `flush` uploads changes.
    """

    def __init__(self, store: Store, instance: str, aside: Aside) -> None:
        self._store = store
        self._key = bucket.attempt_key(instance)
        self.now = replace(attempt.record(store.get_bytes(self._key), aside), instance=instance)
        self._changed = False
        self._sending, self._noting = threading.Lock(), threading.Lock()

    def update(self, **changes: Any) -> None:
        """Changes the record in memory, without the network. Any thread may call this method."""
        with self._noting:
            # a new object is made, because another thread may be sending the old one
            self.now = replace(self.now, **changes)
        self._changed = True

    def flush(self) -> None:
        """Sends the record, from any thread. An older state never replaces a newer one. Raises StoreError."""
        with self._sending:
            if self._changed:
                self._changed = False
                try:
                    self._store.put_bytes(json.dumps(self.now.to_json(), sort_keys=True).encode(), self._key)
                except StoreError:
                    self._changed = True
                    raise


def read(
    store: Store, *, but: str = "", done: Done | None = None, say: Callable[[str], None] = lambda text: None
) -> list[Left]:
    """The records that each of the run's nodes, except `but`, has written. After the run's end, pass `done`, because it
    proves until when the node that wrote it existed. `say` is called with a line for each damaged record.
    """
    keys = [entry.key for prefix in (bucket.ATTEMPTS, bucket.HEARTBEATS) for entry in store.entries(prefix)]
    named = {key: node for key in keys if (node := bucket.node_of(key))}
    for key in set(keys) - set(named):
        say(f"{reading.show(key)} is set aside: no node has this name")
    with ThreadPoolExecutor(8) as pool:
        texts = dict(zip(named, pool.map(store.get_bytes, named), strict=True))

    def set_aside(key: str) -> Aside:
        return lambda why: say(f"{key}: set aside: {why}")

    def left(name: str) -> Left:
        key, beats = bucket.attempt_key(name), bucket.heartbeat_key(name)
        record = replace(attempt.record(texts.get(key), set_aside(key)), instance=name)
        if done and name == done.instance:
            ended = record.exit or Exit(AttemptExit.CRASHED, done.reason)
            record = replace(record, exit=replace(ended, at=done.at))
        return record, attempt.last_beat(texts.get(beats), set_aside(beats))

    return [left(name) for name in set(named.values()) - {but}]


def read_ended(
    store: Store,
    run: RunFile,
    done: Done,
    history: History | None,
    now: float,
    *,
    known: Mapping[str, bool] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> list[Attempt]:
    """Every attempt of an ended run, the oldest first.

    `history`: the history from AWS. `known`: what `reclaimed` returns.
    """
    nodes = OtherNodes(Node("", "", "", launched_at=epoch(done.at) or 0.0), read(store, done=done, say=say))
    nodes.take(history or History(), now)
    return judged(nodes.count(run, gone=[node.instance for node, _ in nodes.nodes]), known or {}, history, now)


def read_before(
    store: Store, run: RunFile, own: Node, opened: Callable[[str], Store] = open_store
) -> tuple[Decimal, Decimal]:
    """USD and seconds that the stages before this one have spent. Raises StoreError; DoubtError for a damaged
    record.
    """
    usd, seconds = Decimal(0), Decimal(0)
    for stage in run.before:
        place = opened(f"{bucket_uri(store.uri, run.run)}/{bucket.stage_of(run.run, stage)}")
        of_stage = terms.read(Fields(reading.parse(place.get_bytes(RUN) or b"")))
        nodes = OtherNodes(replace(own, instance=""), read(place))
        spent = nodes.total(of_stage)
        usd, seconds = usd + spent[0] + of_stage.fixed_usd, seconds + spent[1]
    return usd, seconds


class Others(OtherNodes):
    """The run's other attempts, read repeatedly: an earlier node may still run, and a later one may have appeared. All
    share the run's limits.
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
        """`known`: this node's own record, which may contain facts about other nodes."""
        super().__init__(node, read(store, but=node.instance, say=say))
        self.know(known)
        self._store, self._run, self._ask = store, run, ask
        self.attempts = self.count(run)  # always replaced as a whole, because other threads read it

    def look(self, now: float) -> None:
        """Asks AWS for facts that are still missing, and reads the records again. Raises StoreError."""
        history = self._ask(now - KEPT_S) if self.doubtful else None
        if history is not None:
            self.take(history, now)
        self.hear(read(self._store, but=self.own.instance))
        self.attempts = judged(self.count(self._run), reclaimed(self.attempts), history, now)

    @property
    def doubtful(self) -> bool:
        return super().doubtful or any(node.noticed and node.reclaimed is None for node in self.attempts)

    @property
    def spent(self) -> tuple[Decimal, Decimal]:
        """USD and seconds of all other nodes together, including nodes that ended before they wrote a record."""
        return self.total(self._run)


def judged(attempts: Iterable[Attempt], known: Mapping[str, bool], past: History | None, now: float) -> list[Attempt]:
    """The attempts, each with whether AWS or the owner ended its node: from `known`, or, for an unexplained notice,
    from AWS's history. If somebody changed the fleet shortly before a node's notice or after it, this change has ended
    the node, and the user pays for it. A change that launched the node of a stage has not ended a node.
    """

    def judge(node: Attempt) -> bool | None:
        taken, launched = known.get(node.instance, node.reclaimed), node.record.launched
        if past is None or not node.noticed or taken is not None or launched < now - KEPT_S:
            return taken
        noticed = epoch(node.record.exit.at) if node.record.exit else None
        begin = max(launched + LAUNCH_S, (noticed or 0.0) - CHANGED_S)
        return not any(begin <= at <= launched + float(node.lived_s) for at in past.changes)

    return [replace(node, reclaimed=judge(node)) for node in attempts]


def reclaimed(attempts: Iterable[Attempt | AttemptCost]) -> dict[str, bool]:
    """Whether AWS took each node, by node. Later attempts need this record, because AWS shows it only for two days."""
    return {node.instance: node.reclaimed for node in attempts if node.reclaimed is not None}
