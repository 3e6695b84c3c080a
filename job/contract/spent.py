"""Computes each node's cost, the total, and the time at which the limits will be reached, from the nodes' records and
from AWS's answers about the ends of nodes. All functions are pure.

The computed cost of a node is never less than its real cost. A killed node writes nothing after its last heartbeat; the
fleet's history has the time at which AWS ended the node. Until AWS answers, a node is charged until the launch of the
next node, because a fleet of one node launches no other node before that. If AWS says only that the node no longer
exists, the node is charged until GONE_S after its last heartbeat. A node with a notice is charged until the end that
the notice states. A fleet's history is about a minute late, and covers two days. The node's own Python reads this file,
so it must work with Python 3.9.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal

from gpufleet.job.contract import aws, done
from gpufleet.job.contract.attempt import AttemptRecord, Beat, Node
from gpufleet.job.contract.messages import Spent
from gpufleet.job.contract.reading import epoch, iso
from gpufleet.job.contract.terms import RunLimits, Terms

CENT_100 = Decimal("0.0001")
MINIMUM_S = Decimal(aws.MINIMUM_S)
HOUR_S = Decimal(3600)
# seconds of two intervals between heartbeats: one heartbeat was due, and another may not have arrived yet
GONE_S = 120.0
BOOT_S = 480.0  # seconds for the newest node before its first heartbeat: the set-up time of a small node in the bill
KEPT_S = 48 * 3600.0  # AWS keeps a fleet's events for two days (EC2 API reference, DescribeFleetHistory)
LATE_S = 300.0  # after this many seconds AWS reports no further event about a time


def hours(seconds: Decimal) -> Decimal:
    return seconds / HOUR_S


def least_s(older_s: Decimal) -> Decimal:
    """The least number of billed seconds of a node that had run for `older_s` before. The minimum charge of its start
    is in what it cost before.
    """
    return Decimal(0) if older_s else MINIMUM_S


@dataclass(frozen=True)
class History:
    """One answer of AWS. Times are epoch seconds. `there`: the nodes that have not ended; None if unknown."""

    changes: tuple[float, ...] = ()  # the times at which the fleet's owner changed the fleet
    launched: Mapping[str, float] = field(default_factory=dict)
    ended: Mapping[str, float] = field(default_factory=dict)
    there: Collection[str] | None = None


@dataclass(frozen=True)
class Lives:
    """The times at which each node ended or was last seen running, in epoch seconds. `gone`: nodes that have ended at
    an unknown time.
    """

    ended: Mapping[str, float] = field(default_factory=dict)
    seen: Mapping[str, float] = field(default_factory=dict)
    gone: Collection[str] = ()


UNKNOWN = Lives()


@dataclass(frozen=True)
class Attempt:
    """One node of the run: its records and its cost. `usd`: the cost of compute, disks and address."""

    record: AttemptRecord
    beat: Beat  # the node's last heartbeat, or an empty one
    seconds: Decimal  # billed seconds, at least 60
    lived_s: Decimal
    usd: Decimal
    compute_usd: Decimal
    ceiling_s: Decimal = Decimal(0)  # seconds billed at the highest possible spot price, because AWS gave no price
    # Whether AWS, and not the owner, ended the node; None if there was no notice, or if it is unknown.
    reclaimed: bool | None = None

    @property
    def instance(self) -> str:
        return self.record.instance

    @property
    def noticed(self) -> bool:
        """Whether AWS gave the node a notice."""
        return self.record.exit is not None and self.record.exit.notice

    @property
    def interrupted(self) -> bool:
        """Whether the node had a notice and, as far as known, was not ended by its owner."""
        return self.noticed and self.reclaimed is not False

    @property
    def free_usd(self) -> Decimal:
        """The compute that AWS does not charge."""
        free = self.reclaimed and (self.record.older_s or 0) + self.seconds < aws.FREE_S
        return self.compute_usd if free else Decimal(0)

    @property
    def last_step(self) -> int:
        return self.beat.step or self.record.resumed_step or 0

    @property
    def idle_s(self) -> Decimal:
        """Seconds from the notice to the node's end, during which the node only waited."""
        ending = self.record.exit
        noticed, gone = (epoch(ending.at), epoch(ending.ends_at)) if ending else (None, None)
        return Decimal(f"{max(0.0, gone - noticed):.3f}") if noticed and gone else Decimal(0)


Left = tuple[AttemptRecord, "Beat | None"]  # a node's record and its last heartbeat


def count_node(
    terms: Terms, node: AttemptRecord, beat: Beat | None, lives: Lives = UNKNOWN, until: float | None = None
) -> Attempt:
    """The cost of the node that this record names. `until`: the launch of the next node; None if there is none."""
    rates, last = terms.rates(node.type, node.zone, node.capacity), beat or Beat()
    lived = _lived_s(node, beat, lives, until)
    seconds = max(lived, least_s(node.older_s or Decimal(0)))
    metered = last.attempt_s
    compute = rates.ceiling * hours(metered) if last.compute_usd is None else last.compute_usd
    tail = max(seconds - metered, Decimal(0))
    # The price is known for the hour of the last heartbeat, but not for the hours after it.
    known = Decimal(0) if last.usd_per_hour is None else min(tail, HOUR_S - metered % HOUR_S)
    compute += hours(known) * (last.usd_per_hour or 0) + hours(tail - known) * rates.ceiling
    unknown = tail - known + (metered if last.compute_usd is None else last.ceiling_s or Decimal(0))
    return Attempt(
        record=node,
        beat=last,
        seconds=seconds,
        lived_s=lived,
        usd=(compute + hours(seconds) * rates.extras).quantize(CENT_100),
        compute_usd=compute.quantize(CENT_100),
        ceiling_s=unknown if rates.moves else Decimal(0),
    )


def _lived_s(node: AttemptRecord, beat: Beat | None, lives: Lives, until: float | None) -> Decimal:
    launched, last = node.launched, beat or Beat()
    ended = None if node.stayed else lives.ended.get(node.instance)  # the machine went on for the next stage
    lived = last.attempt_s if last.lived_s is None else last.lived_s
    if not launched:
        return lived
    moments = [lives.seen.get(node.instance) if ended is None else ended]
    if ended is None and node.exit is not None:
        moments += [epoch(node.exit.at), epoch(node.exit.ends_at)]
    elif ended is None:
        least = launched + (BOOT_S if beat is None else float(lived) + GONE_S)
        is_gone = node.instance in lives.gone and beat is not None
        moments.append(least if until is None else min(least, until) if is_gone else until)
    return max([lived, *(Decimal(f"{at - launched:.3f}") for at in moments if at is not None)])


def count_nodes(terms: Terms, nodes: Iterable[Left], lives: Lives, *launches: float) -> list[Attempt]:
    """The cost of each of these nodes, the oldest first.

    `launches`: the launches of other nodes, or the end of the run.
    """
    by_launch = sorted(nodes, key=lambda pair: pair[0].launched)
    every = [*launches, *(node.launched for node, _ in by_launch)]
    reclaimed = {name: taken for node, _ in by_launch for name, taken in node.reclaimed.items()}

    def next_launch(node: AttemptRecord) -> float | None:
        # If there are several nodes, the launch of one does not mean that another has ended.
        return None if terms.is_gang else min((at for at in every if at > node.launched), default=None)

    counted = [count_node(terms, node, beat, lives, next_launch(node)) for node, beat in by_launch]
    return [replace(attempt, reclaimed=reclaimed.get(attempt.instance)) for attempt in counted]


class OtherNodes:
    """The run's nodes except `own`: their records, and AWS's answers about those without an end or a record."""

    def __init__(self, own: Node, nodes: Iterable[Left] = ()) -> None:
        self.own, self.nodes = own, list[Left]()
        # times of ends by node; like `_launched`, replaced as a whole, because another thread may read it
        self.ended: dict[str, float] = {}
        self._launched: dict[str, float] = {}
        self._seen: dict[str, float] = {}
        self._missing: dict[str, float] = {}  # the time since which each node has been without an end
        self._is_asked, self._asked_at = False, 0.0  # whether AWS was asked, and when AWS answered
        self.before = Decimal(0), Decimal(0)  # USD and seconds of the stages before this one
        self.hear(nodes)

    def hear(self, nodes: Iterable[Left]) -> None:
        """Replaces earlier records by the nodes' newest records, and adds what these records contain about
        other nodes.
        """
        self.nodes = list(nodes)
        for node, _ in self.nodes:
            self.know(node)

    def know(self, record: AttemptRecord) -> None:
        """Adds what this record, which may be that of this node, contains about other nodes."""
        self._launched = {**record.untold, **self._launched}
        self.ended = {**record.ended, **self.ended}

    def take(self, history: History, now: float) -> None:
        """Adds the facts in an answer of AWS."""
        self._is_asked, self._asked_at = True, now
        launched = {name: at for name, at in history.launched.items() if at >= self.own.since}
        self._launched, self.ended = {**self._launched, **launched}, {**self.ended, **history.ended}
        for name in self._doubtful_names() if history.there is not None else ():
            if name in (history.there or ()):
                self._seen[name] = now
            elif name not in self._missing:
                self._missing[name] = now
                if name in self._seen:  # the node has ended by now at the latest
                    self._seen[name] = now

    @property
    def lives(self) -> Lives:
        gone = {name for name, since in self._missing.items() if self._asked_at - since >= LATE_S}
        return Lives(self.ended, self._seen, gone)

    @property
    def untold(self) -> dict[str, float]:
        """Launch times of the nodes that ended before they could write a record."""
        names = {self.own.instance, *(node.instance for node, _ in self.nodes)}
        return {name: at for name, at in self._launched.items() if name not in names}

    @property
    def doubtful(self) -> bool:
        """Whether another question to AWS may show more."""
        return not self._is_asked or bool(self._doubtful_names())

    def _doubtful_names(self) -> set[str]:
        """The nodes of which no end is known, and about which AWS still has information."""
        since = self.own.launched_at - KEPT_S
        recent = {node.instance for node, _ in self.nodes if node.launched >= since}
        return {*recent, *self._launched} - {self.own.instance, *self.ended, *self.lives.gone}

    def count(self, terms: Terms, gone: Collection[str] = ()) -> list[Attempt]:
        """The cost of each node with a record, the oldest first. `gone`: nodes that are known to have ended."""
        lives = replace(self.lives, gone={*self.lives.gone, *gone})
        return count_nodes(terms, self.nodes, lives, self.own.launched_at)

    def total(self, terms: Terms) -> tuple[Decimal, Decimal]:
        """USD and billed seconds of all other nodes, and of the stages before this one. A node without a record is
        charged at the highest price.
        """
        without_record = [(AttemptRecord(instance=name, launched_at=iso(at)), None) for name, at in self.untold.items()]
        launches = [self.own.launched_at, *(node.launched for node, _ in self.nodes)]
        paid = [*self.count(terms), *count_nodes(terms, without_record, self.lives, *launches)]
        usd, seconds = self.before
        return sum((attempt.usd for attempt in paid), usd), sum((attempt.seconds for attempt in paid), seconds)

    def means(self, terms: Terms) -> Means:
        """The limits on what this node, and the nodes that train with it, may still spend."""
        rates, (usd, seconds) = terms.rates(self.own.type, self.own.zone, self.own.capacity), self.total(terms)
        return Means(
            terms=replace(terms, limits=terms.limits_after(*self.before)),
            usd_per_hour=terms.nodes * (rates.ceiling + rates.extras),
            before=Spent(spent_usd=terms.fixed_usd + usd, spent_s=seconds, at=self.own.launched_at),
        )


@dataclass(frozen=True)
class Means:
    """The run's terms, and the most that its nodes can cost; `before`: everything that was spent before this node's
    launch. The job's meter knows what was spent. If the meter stops reporting, this class bounds the spending: every
    hour after the last report is charged at the highest price. So the time at which a limit will be reached moves into
    the future while the meter reports, and does not move any more when the reports stop.
    """

    terms: Terms
    usd_per_hour: Decimal  # the price for all nodes that train together
    before: Spent

    def when_over(self, newest: Spent | None) -> tuple[float, str]:
        """The time in epoch seconds at which a limit will be reached, and that limit. `newest`: the meter's last
        report.
        """
        known = newest or self.before
        hours = min(self._hours_over(spent) for spent in (self.before, known))
        usd = known.at + float((self.terms.limits.max_usd - known.spent_usd) / self.usd_per_hour) * 3600
        return min((hours, done.MAX_HOURS), (usd, done.MAX_USD))

    def _hours_over(self, spent: Spent) -> float:
        return spent.at + float(self.terms.limits.max_hours * 3600 - spent.spent_s) / self.terms.nodes


def passed_limit(limits: RunLimits, usd: Decimal, seconds: Decimal, at: float) -> str | None:
    """The limit that is reached at that time, with this much spent: dollars, hours, deadline or expiry."""
    if usd >= limits.max_usd:
        return done.MAX_USD
    if hours(seconds) >= limits.max_hours:
        return done.MAX_HOURS
    if limits.deadline is not None and at >= limits.deadline:
        return done.DEADLINE
    if limits.expires is not None and at >= limits.expires:
        return done.EXPIRY
    return None
