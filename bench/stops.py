"""Tests whether a run's limits hold if some of its stops fail: `python bench/stops.py [RUNS]`, 1,000 by default.

Runs are drawn at random, not trained: nodes boot, stage, train at prices that rise, are taken with a notice, vanish,
live on beside the next node, or wait for capacity; EC2's API, S3 and the scheduler do not answer for a while. The
decisions are made by the real code: the job's meter and forecast, the cost of other nodes, and a node's allowance,
timer and schedule. There are three stops: the meter in the supervisor, the timer of the boot, and the schedule of AWS
(with the fleet's expiry). The check that a boot makes before it pulls an image always works. A meter that fails either
falls silent, or reports but does not stop the run; a node whose timer fails can no longer move the schedule's hour from
some moment on. The program writes bench/results/stops.md to standard output.
"""

from __future__ import annotations

import io
import itertools
import json
import platform
import random
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.market.market import WAITING_TIME
from gpufleet.infra.program.boot.run_config import run_config
from gpufleet.job.contract import bucket, run
from gpufleet.job.contract.attempt import AttemptRecord, Beat, Exit, Node, last_beat, record
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.run import RunFile
from gpufleet.job.contract.spent import History, Means, OtherNodes
from gpufleet.job.contract.workdir import RUN
from gpufleet.job.node.allowance import LEAST_S, Allowance
from gpufleet.job.supervisor.attempts import Others
from gpufleet.job.supervisor.forecast import RESERVE_S, Forecast
from gpufleet.job.supervisor.meter import Meter
from gpufleet.job.supervisor.store import Entry
from gpufleet.job.text import stamp

ROOT = Path(__file__).parents[1]
# Files with one job, because a stage has limits as a run has.
STACKS = [
    *(path for path in sorted((ROOT / "stacks").glob("*.yaml")) if "\nstages:\n" not in path.read_text()),
    ROOT / "examples" / "hf-run-clm.yaml",
]
T0 = 1_800_000_000.0
MINUTE, HOUR = 60.0, 3600.0
METER, TIMER, AWS = "meter", "timer", "schedule"
STOPS = frozenset({METER, TIMER, AWS})
ALLOWED_S = 10 * MINUTE  # seconds that a run may pass a limit with two stops dead, beside a checkpoint
HARD_S = 3 * HOUR  # seconds past a limit after which nothing has ended the run


@dataclass(frozen=True, kw_only=True)
class PricedStack:
    """The parts of a definition on which its limits depend."""

    name: str
    run: RunFile
    type: str
    zone: str
    spot: bool
    setup_s: float
    forecast: Forecast
    checkpoint_s: float
    waits_s: float  # how long the fleet waits for capacity before it expires, in addition to the run's own hours

    @property
    def ceiling(self) -> float:
        """USD per second of a node, at the most."""
        rates = self.run.rates(self.type, self.zone)
        return float(rates.ceiling + rates.extras) / HOUR


def stack(path: Path) -> PricedStack:
    """The stack of a definition file, with what its bill says."""
    definition = load(path, now=datetime.fromtimestamp(T0, UTC))
    bill = price(definition, load_catalog())
    expiry = stamp(definition.expiry(datetime.fromtimestamp(T0, UTC)))
    place: dict[str, Any] = {"uri": "s3://elsewhere", "sha256": None, "files": []}
    tree = run_config(definition, bill, {"dataset": place}, expires=expiry)
    with TemporaryDirectory() as folder:
        file = Path(folder) / RUN
        file.write_bytes(run.encode(tree))
        read = run.load(file)
    chosen = bill.chosen
    forecast = Forecast(read.config, chosen.type, phases=read.estimate.phases, notice=read.estimate.notice)
    zone = sorted(definition.fleet.zones)[0]
    return PricedStack(
        name=path.stem,
        run=read,
        type=chosen.type,
        zone=zone,
        spot=definition.fleet.capacity == "spot",
        setup_s=chosen.exposure.setup_h * HOUR,
        forecast=forecast,
        checkpoint_s=forecast.end_s(0, None),
        waits_s=WAITING_TIME.total_seconds(),
    )


class MemoryStore:
    """The run's bucket, in memory."""

    uri = "memory"

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def entries(self, prefix: str) -> list[Entry]:
        return [Entry(key=key, bytes=len(each)) for key, each in self.objects.items() if key.startswith(prefix)]

    def get_bytes(self, key: str) -> bytes | None:
        return self.objects.get(key)


class SaidNode:
    """Replaces the work folder, from which a node reads the meter's last report."""

    def __init__(self) -> None:
        self.told = b""

    def __truediv__(self, name: str) -> SaidNode:
        return self

    def read_bytes(self) -> bytes:
        return self.told


@dataclass(kw_only=True)
class Machine:
    """A node, from its launch to its end."""

    id: str
    launched: float
    allowance: Allowance | None = None
    known: OtherNodes  # the other nodes that this one knew when it booted
    counted_at: float = 0.0
    loses_keeper_at: float = float("inf")
    said: SaidNode = field(default_factory=SaidNode)
    meter: Meter | None = None
    others: Others | None = None
    checks_at: float  # when the node checks what is left, before it pulls an image
    meters_at: float
    ended: float | None = None  # this moment may be in the future
    lives_on: bool = False  # whether the node goes on while the next one already runs


def outages(draw: random.Random, until: float, share: float) -> Callable[[float], bool]:
    """A function that says whether a service does not answer at a moment. Outages last half an hour on average."""
    spans, at = list[tuple[float, float]](), T0
    while share and at < until:
        at += draw.expovariate(share / (1 - share) / (0.5 * HOUR))
        spans.append((at, at + draw.expovariate(1 / (0.5 * HOUR))))
        at = spans[-1][1]
    return lambda now: any(since <= now < to for since, to in spans)


@dataclass(frozen=True, kw_only=True)
class DrawnResult:
    """One run: seconds of its fleet past its limits (hours, or dollars at the dearest price), and what ended it."""

    past_s: float
    ended_by: str
    is_late: bool  # whether its last node started so near the limit that the limit was reached before it could train


class Drawn:
    """One run. `on`: the stops that work."""

    def __init__(self, stack: PricedStack, seed: int, on: frozenset[str], *, keys_die: bool = False) -> None:
        self.stack, self.on, self.draw = stack, on, random.Random(f"{stack.name} {seed}")
        self.now, self.nodes, self.hour = T0, list[Machine](), T0 + HARD_S
        self.store, self.ended_by = MemoryStore(), ""
        limits = stack.run.limits
        self.expires = limits.expires or T0 + float(limits.max_hours) * HOUR + stack.waits_s
        self.hour = self.expires
        span = float(limits.max_hours) * HOUR * 3
        self.losses_per_s = self.draw.choice([0.0, 1, 3, 6]) / span * 3
        self.is_silent = self.draw.random() < 0.5
        self.ec2_out = outages(self.draw, T0 + span, self.draw.choice([0, 0.1, 0.3]))
        self.s3_out = outages(self.draw, T0 + span, self.draw.choice([0, 0.05]))
        self.scheduler_out = outages(self.draw, T0 + span, self.draw.choice([0, 0.1, 0.3]) if on == STOPS else 0)
        self.keepers_die = TIMER not in on and self.draw.random() < 0.5
        self.keys_die = T0 + self.draw.uniform(0, span / 2) if keys_die else float("inf")
        self._prices = self._rising()

    def _rising(self) -> list[float]:
        rates = self.stack.run.rates(self.stack.type, self.stack.zone)
        if rates.capacity != "spot" or rates.spot is None:
            return []
        at, top, found = float(rates.spot), float(rates.ceiling), list[float]()
        drift = self.draw.choice([0.0, 0.02, 0.2])
        for _ in range(2000):
            found.append(min(at, top))
            at *= 1 + self.draw.uniform(-0.02, 0.05) + drift * self.draw.random()
        return found

    def spot(self, at: float) -> float:
        return self._prices[min(int((at - T0) // HOUR), len(self._prices) - 1)]

    def move(self, at: float, fleets: Sequence[str] = ()) -> bool:
        """Answers UpdateSchedule."""
        if self.scheduler_out(self.now) or self.now >= self.keys_die:
            return False
        self.hour = at
        return True

    def __call__(self) -> float:
        return self.now

    def history(self, since: float) -> History | None:
        """The fleet's history, which shows the end of a node within five minutes."""
        if self.ec2_out(self.now):
            return None
        ended = {each.id: each.ended for each in self.nodes if each.ended is not None and each.ended < self.now - 60}
        launched = {each.id: each.launched for each in self.nodes}
        there = frozenset(each.id for each in self.nodes if each.ended is None or each.ended > self.now)
        return History(launched=launched, ended=ended, there=there)

    def cost(self) -> tuple[float, float]:
        """What the run really cost: billed seconds, and USD."""
        rates, seconds, usd = (
            self.stack.run.rates(self.stack.type, self.stack.zone),
            0.0,
            float(self.stack.run.fixed_usd),
        )
        for each in self.nodes:
            lived = max((each.ended or self.now) - each.launched, 60.0)
            seconds, at = seconds + lived, 0.0
            while at < lived:
                part = min(HOUR, lived - at)
                hourly = self.spot(each.launched + at) if self.stack.spot else float(rates.on_demand)
                usd, at = usd + part / HOUR * (hourly + float(rates.extras)), at + part
        return seconds, usd

    def go(self) -> DrawnResult:
        while not self.ended_by:
            self._launch()
            self._live(self.nodes[-1])
        seconds, usd = self.cost()
        limits = self.stack.run.limits
        past = max(seconds - float(limits.max_hours) * HOUR, (usd - float(limits.max_usd)) / self.stack.ceiling, 0.0)
        last = self.nodes[-1]
        late = last.meter is None or last.meter.limit(last.meters_at, limits, self.stack.checkpoint_s + RESERVE_S)
        return DrawnResult(past_s=self._fleet_s(past), ended_by=self.ended_by, is_late=bool(late))

    def _fleet_s(self, node_s: float) -> float:
        """How long the fleet took for the last `node_s` seconds of its nodes: two of them may run at once."""
        ends = [(each.launched, max(each.ended or self.now, each.launched + 60)) for each in self.nodes]
        moments = sorted({moment for span in ends for moment in span}, reverse=True)
        taken, left = 0.0, node_s
        for to, since in itertools.pairwise(moments):
            there = sum(begin <= since and to <= end for begin, end in ends)
            if there:
                part = min(to - since, left / there)
                taken, left = taken + part, left - part * there
        return taken

    def _launch(self) -> None:
        boots, name = self.now + self.draw.uniform(60, 150), f"i-{len(self.nodes)}"
        node = Machine(
            id=name,
            known=OtherNodes(Node(name, self.stack.type, self.stack.zone, self.now)),
            launched=self.now,
            checks_at=boots,
            loses_keeper_at=boots + self.draw.expovariate(1 / HOUR) if self.keepers_die else float("inf"),
            meters_at=boots + self.stack.setup_s * self.draw.uniform(0.2, 0.6),
        )
        self.nodes.append(node)

    def _record(self, node: Machine, ending: Exit | None = None) -> None:
        self.store.objects[bucket.attempt_key(node.id)] = json.dumps(self._own_record(node, ending).to_json()).encode()

    def _own_record(self, node: Machine, ending: Exit | None = None) -> AttemptRecord:
        others = node.others or node.known
        return AttemptRecord(
            instance=node.id,
            type=self.stack.type,
            zone=self.stack.zone,
            launched_at=iso(node.launched),
            booted_at=iso(node.launched + 30),
            exit=ending,
            ended=others.ended,
            untold=others.untold,
        )

    def _check(self, node: Machine) -> bool:
        """Does what job/node does before it pulls an image. Returns False if the run has nothing left."""
        self._hear_earlier()
        nodes = [
            (record(self.store.objects[bucket.attempt_key(each.id)], print), self._last_beat(each))
            for each in self.nodes
            if each is not node and bucket.attempt_key(each.id) in self.store.objects
        ]
        node.known.hear(nodes)
        found = self._means(node)
        self._record(node)
        node.allowance = Allowance(self, self, float(self.stack.run.limits.max_hours) * HOUR + 240)  # type: ignore[arg-type]
        over, _ = node.allowance.begin(found, node.said)  # type: ignore[arg-type]
        return over > self.now + (LEAST_S if nodes else 0)

    def _means(self, node: Machine) -> Means:
        """The means as job/node counts them, at the node's boot and every five minutes."""
        node.counted_at, told = self.now, self.history(T0)
        if told is not None:
            node.known.take(told, self.now)
        return node.known.means(self.stack.run)

    def _last_beat(self, node: Machine) -> Beat | None:
        return last_beat(self.store.objects.get(bucket.heartbeat_key(node.id)), print)

    def _arrive(self, node: Machine) -> None:
        """Does what the supervisor does before it downloads anything."""
        me = Node(instance=node.id, type=self.stack.type, zone=self.stack.zone, launched_at=node.launched)
        node.others = Others(self.store, self.stack.run, me, self.history, print, self._own_record(node))  # type: ignore[arg-type]
        node.others.look(self.now)
        node.meter = Meter(
            rates=self.stack.run.rates(me.type, me.zone),
            launched_at=node.launched,
            fixed_usd=self.stack.run.fixed_usd,
            others=node.others.spent,
            spot_price=lambda at: None if self.ec2_out(self.now) else Decimal(f"{self.spot(at):.6f}"),
        )

    def _speak(self, node: Machine) -> None:
        """The meter's heartbeat and its report to the node, unless the meter is off and silent."""
        meter, others = node.meter, node.others
        if meter is None or others is None or (METER not in self.on and self.is_silent):
            return
        meter.refresh(self.now)
        self._hear_earlier()
        recent = any(each.ended is None or each.ended > self.now - 600 for each in self.nodes[:-1])
        if recent or others.doubtful:
            others.look(self.now)
            meter.count(others.spent, self.now)
            if not self.s3_out(self.now) and self.now < self.keys_die:
                self._record(node)
        spent = meter.spent(self.now)
        told = {"spent_usd": str(spent.usd), "spent_s": str(spent.seconds), "at": self.now}
        node.said.told = json.dumps(told).encode()
        self._beat(node, meter, self.now)

    def _hear_earlier(self) -> None:
        """The heartbeats of a node that lives on beside its successor, up to its end."""
        for each in self.nodes[:-1]:
            at = min(self.now, each.ended or self.now)
            if each.lives_on and each.meter is None and at >= each.meters_at:
                self._arrive(each)
            if each.lives_on and each.meter is not None:
                self._beat(each, each.meter, at)

    def _beat(self, node: Machine, meter: Meter, at: float) -> None:
        if not self.s3_out(at) and at < self.keys_die and (METER in self.on or not self.is_silent):
            spent = meter.spent(at)
            beat = Beat(
                attempt_s=spent.attempt_s,
                lived_s=spent.attempt_s,
                compute_usd=spent.compute_usd,
                usd_per_hour=spent.usd_per_hour,
                ceiling_s=spent.ceiling_s,
            )
            self.store.objects[bucket.heartbeat_key(node.id)] = json.dumps(beat.to_json()).encode()

    def lost_at(self, node: Machine) -> float:
        """When AWS takes the node, unless the run ends before."""
        return self.now + (self.draw.expovariate(self.losses_per_s) if self.losses_per_s else float("inf"))

    def how_lost(self) -> str:
        """Whether AWS gives a notice, and whether the node that the fleet believes to be gone lives on."""
        return self.draw.choice(["notice", "notice", "lost", "lives on"])

    def waits_s(self) -> float:
        """Seconds from a node's end to the launch of the next."""
        return self.draw.lognormvariate(-1.0, 1.3) * HOUR + 60

    def _live(self, node: Machine) -> None:
        """Runs one node to its end, then the wait for the next node, unless the run ends."""
        lost_at = self.lost_at(node)
        while True:
            if AWS in self.on and self.now >= self.hour + self.ends_in:
                return self._end(node, AWS, self.draw.uniform(10, 60))
            if self.now >= lost_at:
                return self._lost(node)
            if self.now >= self.keys_die and node.launched >= self.keys_die - 60 and self.now >= node.checks_at:
                return self._useless(node)
            checks = node.allowance is None and self.now >= node.checks_at
            # a node that cannot be counted ends its fleet
            if checks and (self.s3_out(self.now) or not self._check(node)):
                return self._end(node, "boot", self.draw.uniform(20, 60))
            if node.allowance is not None:
                if node.meter is None and self.now >= node.meters_at:
                    self._hear_earlier()
                    self._arrive(node)
                self._speak(node)
                if self.now < node.loses_keeper_at:
                    if self.now >= node.counted_at + 300 and node.known.doubtful:
                        node.allowance._means = self._means(node)
                    node.allowance.look()
                if TIMER in self.on and self.now >= node.allowance.timer_at:
                    return self._end(node, TIMER, self._takes(TIMER))
                if METER in self.on and node.meter is not None and self._limit(node.meter):
                    return self._end(node, METER, self._takes(METER))
            if self._seconds_past() > HARD_S:
                return self._end(node, "nothing", 0)
            self.now += self._step(node, lost_at)

    def _takes(self, by: str) -> float:
        """Seconds from this stop to the node's end."""
        if by == METER:
            return self.stack.checkpoint_s * self.draw.uniform(0.5, 1.1) + self.draw.uniform(5, 30)
        return self.draw.choice([60, 115, 180]) + self.draw.uniform(30, 60)

    @property
    def ends_in(self) -> float:
        """EventBridge Scheduler is exact to a minute."""
        return 45.0

    def _limit(self, meter: Meter, in_s: float = 0) -> bool:
        reserve_s = max(self.stack.checkpoint_s + RESERVE_S + in_s, 0.0)
        return meter.limit(self.now, self.stack.run.limits, reserve_s) is not None

    def _seconds_past(self) -> float:
        lived = sum((each.ended or self.now) - each.launched for each in self.nodes)
        return lived - float(self.stack.run.limits.max_hours) * HOUR

    def _step(self, node: Machine, lost_at: float) -> float:
        """The seconds to the next moment at which the run may be stopped: minutes, but seconds near a limit."""
        if node.allowance is None:
            return max(node.checks_at - self.now, 5.0)
        if node.meter is None:
            return max(min(node.meters_at, lost_at) - self.now, 5.0)
        near = [node.allowance.timer_at, self.hour, self.expires]
        left = min(abs(each - self.now) for each in near)
        step = 20.0 if left < 900 or (self._limit(node.meter, 900) and not self._limit(node.meter, -900)) else 240.0
        return max(min(step, lost_at - self.now), 1.0)

    def _end(self, node: Machine, by: str, takes: float) -> None:
        self.now += takes
        node.ended, self.ended_by = self.now, by
        for each in self.nodes:
            each.ended = min(self.now if each.ended is None else each.ended, self.now)

    def _lost(self, node: Machine) -> None:
        """AWS takes the node, with a notice or without; or the fleet believes that the node is gone, and it lives on
        for a while.
        """
        kind = self.how_lost()
        if kind == "notice":
            noticed = self.now
            if node.allowance is not None and self.now < node.loses_keeper_at:
                node.allowance.open()
            self.now += 120
            told = noticed if node.allowance is not None else max(noticed, node.checks_at)  # not during its boot
            if told < self.now and not self.s3_out(told) and told < self.keys_die:
                self._record(node, Exit(75, "notice", True, iso(told), iso(self.now)))
        waits = self.draw.uniform(60, 180) if kind == "lives on" else self.waits_s()
        until = self.now + waits
        if kind == "lives on":
            node.ended = until + self.draw.uniform(30, 240)
            node.lives_on = True
            if node.allowance is None and self.now < self.keys_die:
                self._record(node)  # at the end of its boot
            by, at = self._own_stop(node)
            if at < min(node.ended, self.hour + self.ends_in):
                return self._end_beside(node, by, at, until)
        else:
            node.ended = self.now
        if AWS in self.on and until >= self.hour + self.ends_in:
            self.ended_by = "waiting"
            node.ended = min(node.ended, max(self.hour + self.ends_in + 60, self.now))
            return
        self.now = until

    def _own_stop(self, node: Machine) -> tuple[str, float]:
        """The first of the node's own stops that ends it, and the time of that end, without AWS's schedule."""
        stops = [("", float("inf"))]
        if METER in self.on and node.meter is not None:
            left = node.meter.left_s(self.now, self.stack.run.limits, HOUR) - self.stack.checkpoint_s - RESERVE_S
            stops.append((METER, self.now + max(left, 0.0)))
        if TIMER in self.on and node.allowance is not None:
            stops.append((TIMER, node.allowance.timer_at))
        return min(stops, key=lambda each: each[1])

    def _end_beside(self, node: Machine, by: str, at: float, next_at: float) -> None:
        """A node that lives on ends the run. If the next node exists by then, it sees the end when it boots."""
        takes = self._takes(by)
        if at > next_at:
            self.now = next_at
            self._launch()
            takes = max(takes, self.nodes[-1].checks_at - at + self.draw.uniform(20, 60))
        self.now = at
        self._end(node, by, takes)

    def _useless(self, node: Machine) -> None:
        """Ends a node whose calls AWS refuses: such a node ends itself, and the fleet replaces it."""
        self.now += self.draw.uniform(60, 300)
        node.ended = self.now
        self.now += self.draw.uniform(60, 180)
        if self.now >= min(self.hour, self.expires) + self.ends_in:
            self.ended_by = AWS


CASES: dict[str, tuple[frozenset[str], dict[str, bool]]] = {
    "meter alone": (frozenset({METER}), {}),
    "timer alone": (frozenset({TIMER}), {}),
    "schedule alone": (frozenset({AWS}), {}),
    "all three": (STOPS, {}),
    "all three, and from some moment on no node may do anything": (STOPS, {"keys_die": True}),
}


def results(of: PricedStack, case: str, runs: Iterable[int]) -> Iterator[DrawnResult]:
    on, faults = CASES[case]
    for seed in runs:
        with redirect_stdout(io.StringIO()):  # the node's output, which is not printed
            found = Drawn(of, seed, on, **faults).go()
        yield found


def main() -> None:
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 1000
    say: Callable[[str], Any] = sys.stdout.write
    say(
        "# A run's limits with its stops dead\n\n"
        f"{datetime.now(UTC):%Y-%m-%d}, Python {platform.python_version()}. `python bench/stops.py {runs}` wrote this: "
        f"{runs:,} drawn runs a row.\n"
        "Minutes are the fleet's: two nodes that AWS runs at once count once.\n\n"
        "| Stack | A checkpoint | Stops that work | Past the limit, 99th | most | Beyond ten minutes and a checkpoint "
        "| Beyond one minute and a checkpoint: by a last node that came too late | others | Ended by |\n"
        "|---|---|---|---|---|---|---|---|---|\n"
    )
    for path in STACKS:
        of = stack(path)
        for case in CASES:
            found = sorted(results(of, case, range(runs)), key=lambda each: each.past_s)
            beyond = sum(each.past_s > ALLOWED_S + of.checkpoint_s for each in found)
            late = Counter(each.is_late for each in found if each.past_s > MINUTE + of.checkpoint_s)
            p99, worst = found[int(0.99 * (runs - 1))].past_s, found[-1].past_s
            by = Counter(each.ended_by for each in found)
            said = ", ".join(f"{name} {count}" for name, count in by.most_common())
            say(
                f"| {of.name} | {of.checkpoint_s / 60:.1f} min | {case} | {p99 / 60:.1f} min | {worst / 60:.1f} min | "
                f"{beyond} | {late[True]} | {late[False]} | {said} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()
