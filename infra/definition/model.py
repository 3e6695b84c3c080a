"""The definition of one experiment: what `stacks/<experiment>.yaml` says, as frozen dataclasses.

Pure: no pulumi, no boto3, no clock. The same object feeds the bill, the resources and the tests.
"""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from gpufleet.infra import market
from gpufleet.infra.definition.yaml_tree import Mapping, Scalar, find_node
from gpufleet.infra.errors import Problem
from gpufleet.infra.market.market import Market
from gpufleet.infra.market.reservation import CapacityBlock as CapacityBlock
from gpufleet.job.kind import JobConfig
from gpufleet.job.kind.common import added_later
from gpufleet.job.text import stamp


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One run is one id: a new id is a new fleet on the same bucket."""

    id: str
    owner: str


# What gpufleet's own part runs in beside a command's image: Python and nothing else, in a registry without a login.
SUPERVISOR_IMAGE = "public.ecr.aws/docker/library/python:3.13-slim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained, and in which container image."""

    experiment: str  # for a user's own command, the name of its kind
    image: str  # repository:tag, or repository:tag@sha256:... once pinned
    supervisor_image: str | None = None  # what gpufleet's own part runs in; None: in the job's, which is ready-made
    parameters: JobConfig  # the kind's own typed config; the file holds only what differs from its defaults

    @property
    def images(self) -> tuple[str, ...]:
        """The images that a node pulls."""
        return tuple(filter(None, (self.image, self.supervisor_image)))


if TYPE_CHECKING:
    Capacity = str
    Fallback = str
else:  # what a file may write: a row of infra/market each
    Capacity, Fallback = Literal[tuple(market.WAYS)], Literal[tuple(market.FALLBACKS)]
Cards = Literal["one", "all"]


def is_zone_id(zone: str) -> bool:
    """Whether the text is a zone's id, such as use2-az1, and not a zone's name."""
    return "-az" in zone


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """Where it runs. The set of types has no order, the fleet's strategy picks."""

    region: str
    zones: tuple[str, ...]  # names, us-east-2a; or ids, use2-az1, which are the same in every account
    instance_types: tuple[str, ...]
    capacity: Capacity = "spot"
    nodes: int = added_later(1)  # the number that train together; several are of one type, in one zone
    cards: Cards = added_later("one")  # which network cards of each node carry the traffic of several nodes
    gather_minutes: Decimal | None = added_later(None)  # that nodes wait for missing ones; None: by the model of waits
    fallback: Fallback = added_later("none")  # once spot would miss the deadline
    block: CapacityBlock | None = added_later(None)  # None: capacity is another
    ami: str = "unpinned"  # a literal ami-..., written by `gpufleet doctor --pin`

    @property
    def is_gang(self) -> bool:
        """Whether several nodes train as one."""
        return self.nodes > 1

    @property
    def lets_go(self) -> bool:
        """Whether nodes that wait for others let go, so that AWS is asked for all of them later."""
        return self.is_gang and self.market.replaces

    @property
    def market(self) -> Market:
        """How these nodes are bought."""
        return market.find(self.capacity, self.fallback, nodes=self.nodes, block=self.block)

    @property
    def zone_ids(self) -> tuple[str, ...]:
        """The zones by id within the region (az1, ...), where the file gives ids (use2-az1): empty for names."""
        return tuple(zone.rpartition("-")[2] for zone in self.zones if is_zone_id(zone))

    def bought_as(self, capacity: Capacity) -> Fleet:
        """These nodes, bought in another way."""
        return replace(self, capacity=capacity, block=self.block if market.WAYS[capacity].has_block else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A gp3 volume. `snapshot` only for the data volume, which is mounted at /data."""

    size_gib: int
    iops: int = 3000
    throughput_mibps: int = 125
    snapshot: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """What outlives `pulumi destroy`: the whole bucket with its policy and lifecycle, or nothing."""

    bucket: bool = True
    days: int = 30  # objects of a run expire after this many days
    lifecycle: Literal["own", "others"] = "own"  # others: the bucket's rules are the account's, and not looked at

    @property
    def expiry(self) -> str:
        """When objects expire, in words."""
        return f"after {self.days} days" if self.lifecycle == "own" else f"by others' rules, taken for {self.days} days"


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Disks and inputs. `dataset`, `base_weights` and each of `inputs` are a local folder or an s3:// prefix."""

    dataset: str = ""  # of a ready-made job, which needs one; empty: of a command
    base_weights: str | None = None
    inputs: dict[str, str] | None = None  # of a command, by name: {inputs.NAME} is where they lie for it
    root: Disk = Disk(size_gib=100)
    data: Disk | None = None
    keep: Keep = Keep()

    def dataset_folder(self, root: Path) -> Path | None:
        """Where the dataset lies, or will. None: there is none, or it is in a bucket."""
        return _local(self.dataset, root) if self.dataset else None

    def weights_folder(self, root: Path) -> Path | None:
        """Where the base weights lie. None: there are none, or they are in a bucket."""
        return None if self.base_weights is None else _local(self.base_weights, root)

    def input_folders(self, root: Path) -> dict[str, Path]:
        """The inputs that are folders and not s3:// prefixes, by name."""
        places = {name: _local(place, root) for name, place in (self.inputs or {}).items()}
        return {name: folder for name, folder in places.items() if folder is not None}

    @property
    def prefixes(self) -> dict[str, str]:
        """All that lies in a bucket already, by what it is called in the nodes' rights."""
        named = {"Dataset": self.dataset, "BaseWeights": self.base_weights}
        named |= {f"Input{index}": place for index, place in enumerate((self.inputs or {}).values())}
        return {sid: place for sid, place in named.items() if place and place.startswith("s3://")}


def _local(place: str, root: Path) -> Path | None:
    return None if place.startswith("s3://") else root / place


Deadline = datetime | timedelta  # a time in UTC, or so long after the first `up` of the run


def deadline_text(deadline: Deadline) -> str:
    """The deadline as a definition file writes it: 2026-12-31T18:00:00Z, or in 10 h."""
    return f"in {deadline / timedelta(hours=1):g} h" if isinstance(deadline, timedelta) else stamp(deadline)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The bound of the run. Hours are billed hours, summed over attempts and nodes."""

    max_usd: Decimal
    max_hours: Decimal
    deadline: datetime | timedelta | None = None  # None = creation + max_hours + 24 h
    usd_per_hour: Decimal | None = added_later(None)  # of a node: zones and types whose price is above are left out

    def due(self, begin: datetime) -> datetime | None:
        """The deadline of a run whose first `up` is then; None without one."""
        return begin + self.deadline if isinstance(self.deadline, timedelta) else self.deadline


def days_to_keep(begin: datetime, end: datetime) -> int:
    """The least storage.keep.days for a fleet that lives so long. Nodes cannot boot without run.json, and attempts and
    heartbeats are what the caps count; S3 takes an object's age from its creation. One day to spare.
    """
    return math.ceil((end - begin) / timedelta(days=1)) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vpc:
    """A network that is there already. Its routes are its owner's."""

    id: str
    subnets: dict[str, str]  # by zone, one for each of fleet.zones


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """What the rules of an organisation ask of all that a stack makes."""

    tags: dict[str, str] | None = None  # beside the stack's own
    permissions_boundary: str | None = None  # of the nodes' role; a policy's ARN
    vpc: Vpc | None = None  # None: the stack makes its own
    kms_key: str | None = None  # of bucket and disks; an ARN in the fleet's region


@dataclass(frozen=True, kw_only=True, slots=True)
class Notify:
    """Who is told of a run. Without an e-mail address nobody is."""

    email: str | None = None  # of a topic that AWS itself tells too, where no node could
    webhook: str | None = None  # ssm:/name or secretsmanager:name of its URL, which is a secret; nodes alone call it
    silent_hours: Decimal = Decimal(6)  # somebody is told after so long without a training step


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Assumptions behind the bill. None = the default, stated with its source where infra.bill uses it."""

    hazard_per_hour: Decimal | None = None  # fixes the interruption hazard instead of drawing it per simulated run
    efficiency: Decimal | None = None  # share of the roofline (compute + optimizer traffic) a step reaches, in (0, 1]
    step_ms: tuple[Decimal, ...] | None = None  # milliseconds per optimizer step, one per phase: measured elsewhere
    setup_minutes: Decimal | None = None  # launch to first step: boot, image pull, staging
    restart_minutes: Decimal | None = None  # the same for a replacement node
    capacity_wait_minutes: Decimal | None = None  # mean wait for a replacement, not billed
    notice_missed: Decimal | None = None  # probability that a notice is not handled
    upload_gb_per_s: Decimal | None = None  # node to S3
    max_price_age_days: int = 90  # a bill from older prices says so; changes no figure


Place = Literal["step", "first", "boundary", "save", "stage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """The rehearsal's interruptions, drawn from `seed`: how many with a notice and how many without, and when: at a
    training step after the first phase or in it, between two phases, while a checkpoint is written, or in a stage
    after training.
    """

    seed: int = 7
    with_notice: int = 1
    without_notice: int = 1
    notice_at: Place = "step"
    loss_at: Place = "step"
    stage_results: int = 1  # results of a stage after training, before a node is taken away in it
    notice_s: int = 20  # AWS gives 120 s; the rehearsal does not wait that long


REHEARSED_S = 30.0  # of training, so that two interruptions find it at work
REHEARSED_SAVES = 6


def rehearsed_steps(step_ms: float) -> int:
    """How many steps, or epochs, a rehearsal trains for that long, to two digits."""
    return max(1, int(float(f"{REHEARSED_S * 1000 / step_ms:.2g}")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What the plan behind a scenario said it would take; shown beside what it comes to."""

    hours: Decimal | None = None
    usd: Decimal | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The keys of one entry of `scenarios` beside those it lays over the file's sections."""

    note: str = ""
    claim: Claim = Claim()
    reference: bool = False  # ran or was planned elsewhere: shown as claimed, never priced
    hold_hours: Decimal | None = None  # each node is kept this long when its work is done sooner
    buffer: Decimal = Decimal(0)  # share added to the work for what goes wrong

    @property
    def only_priced(self) -> str:
        """Why the definition can be priced and not run; empty when it can be run."""
        reasons = {
            "ran elsewhere": self.reference,
            "holds its node beyond its work": self.hold_hours is not None,
            "adds a buffer to its work": bool(self.buffer),
        }
        return next((reason for reason, true in reasons.items() if true), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackDefinition:
    """One file of stacks/, validated; or one of its scenarios."""

    name: str  # tinystories-growth: the file's stem
    source: Path
    purpose: str  # the comment block that opens the file
    run: Run
    job: Job
    fleet: Fleet
    storage: Storage
    limits: Limits
    account: Account = Account()
    notify: Notify = Notify()
    estimate: Estimate = Estimate()
    python: str = ""  # of `rehearsal`: the interpreter of a command, as seen from the project; empty: its code's own
    interruptions: Interruptions = Interruptions()  # the rest of `rehearsal` is laid over the other sections
    scenario: str = ""  # its name; empty for the file as it is
    variant: Variant = Variant()
    own_data: bool = False  # a scenario that says itself what its data counts (job.parameters.data)
    tree: Mapping | None = field(default=None, compare=False, repr=False)  # as written; None: no file holds it
    asked: str = field(default="", compare=False, repr=False)  # STACK as it was given; empty: by no command

    @property
    def argument(self) -> str:
        """What further commands take for it: a name leads only to a file of stacks/, or through a stack's own
        configuration.
        """
        return shlex.quote(self.asked or (self.name if self.source.parent.name == "stacks" else str(self.source)))

    @property
    def priced_argument(self) -> str:
        """`argument`, with --scenario where need be: what further commands about the same work take."""
        return f"{self.argument} --scenario {self.scenario}" if self.scenario else self.argument

    @property
    def is_earlier_run(self) -> bool:
        """Whether it is a run that --run named, and not the one of its file: `pulumi destroy` is about the file's."""
        own = find_node(self.tree, "run.id") if self.tree else None
        return isinstance(own, Scalar) and own.text != self.run.id

    @property
    def run_argument(self) -> str:
        """`argument`, with --run where need be: what further commands about the same run take."""
        return f"{self.argument} --run {self.run.id}" if self.is_earlier_run else self.argument

    @property
    def nodes(self) -> int:
        """The number of nodes that run at once."""
        return self.fleet.nodes

    def on_nodes(self, count: int) -> StackDefinition:
        """This work on so many nodes."""
        cards: Cards = self.fleet.cards if count > 1 else "one"
        if (count, cards) == (self.nodes, self.fleet.cards):
            return self
        return replace(self, fleet=replace(self.fleet, nodes=count, cards=cards))

    def begins_at(self, now: datetime) -> datetime:
        """When the run can begin: now, or when its block begins."""
        return self.fleet.market.begins_at(now)

    def due(self, now: datetime) -> datetime | None:
        """When a run that begins as soon as it can has to be done: by its deadline, and while its block lasts."""
        ends = [self.limits.due(self.begins_at(now)), self.fleet.market.last]
        return min(filter(None, ends), default=None)

    def due_by(self, now: datetime) -> str:
        """The key that says when it is due."""
        return self.fleet.market.due_by(self.due(now))

    def expiry(self, now: datetime) -> datetime:
        """When AWS ends a fleet that begins now, whatever the job says."""
        return self.due(now) or now + timedelta(hours=self.fleet.market.lives_hours(self.limits.max_hours))

    def hours_left(self, now: datetime) -> float | None:
        """Hours from the run's begin to its deadline; negative after the deadline, None without one."""
        due = self.due(now)
        return None if due is None else (due - self.begins_at(now)).total_seconds() / 3600

    def problem(self, path: str, value: str, allowed: str, hint: str = "") -> Problem:
        """What is wrong at `path`, with the line it was written at, under its own path where a scenario wrote it."""
        node = find_node(self.tree, path) if self.tree else None
        if node is None:
            return Problem(path=path, value=value, allowed=allowed, hint=hint)
        return Problem(path=node.path, value=value, allowed=allowed, hint=hint, line=node.line)
