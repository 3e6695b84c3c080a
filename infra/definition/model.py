"""The definition of one experiment: the content of `stacks/<experiment>.yaml`, as frozen dataclasses.

This module imports no pulumi and no boto3, and reads no clock. The bill, the resources and the tests use the same
object.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable, Iterator
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
from gpufleet.job.contract.goal import HOURS, USD
from gpufleet.job.kind import JobConfig
from gpufleet.job.kind.common import Sizes, added_later
from gpufleet.job.text import stamp


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run, which is known by its id. A new id starts a new fleet on the same bucket."""

    id: str
    owner: str


# The image in which the supervisor runs if the job is a user's command. It has only Python, and its registry needs no
# login.
SUPERVISOR_IMAGE = "public.ecr.aws/docker/library/python:3.13-slim"


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What is trained, and in which container image."""

    experiment: str  # the name of a ready-made job; for a user's own command, `command`
    image: str  # repository:tag, or repository:tag@sha256:... once pinned
    # the image for gpufleet's own part; None for a ready-made job, whose image contains this part
    supervisor_image: str | None = None
    parameters: JobConfig  # the typed config of this kind of job; the file states only differences from its defaults

    @property
    def images(self) -> tuple[str, ...]:
        """The images that a node pulls."""
        return tuple(filter(None, (self.image, self.supervisor_image)))


if TYPE_CHECKING:
    Capacity = str
    Fallback = str
else:  # the values of the key in a file: one for each row of infra/market
    Capacity, Fallback = Literal[tuple(market.WAYS)], Literal[tuple(market.FALLBACKS)]
Cards = Literal["one", "all"]


def is_zone_id(zone: str) -> bool:
    """Whether the text is a zone's id, such as use2-az1, and not a zone's name."""
    return "-az" in zone


@dataclass(frozen=True, kw_only=True, slots=True)
class Fleet:
    """The nodes on which the run trains. The order of the types has no meaning, because the fleet's strategy
    chooses.
    """

    region: str
    zones: tuple[str, ...]  # names (us-east-2a), or ids (use2-az1), which are the same in every account
    instance_types: tuple[str, ...]
    capacity: Capacity = "spot"
    nodes: int = added_later(1)  # the number of nodes that train together; several nodes have one type and one zone
    cards: Cards = added_later("one")  # which network cards of each node carry the traffic between nodes
    # how long nodes wait for missing nodes; if None, the model of waits decides
    gather_minutes: Decimal | None = added_later(None)
    fallback: Fallback = added_later("none")  # what to do once spot would miss the deadline
    block: CapacityBlock | None = added_later(None)  # None unless capacity is block
    ami: str = "unpinned"  # a literal ami-..., written by `gpufleet doctor --pin`
    baked_ami: str | None = added_later(None)  # an AMI that holds the job's images, written by `gpufleet bake`

    @property
    def starts_from(self) -> str:
        """The AMI of the nodes."""
        return self.baked_ami or self.ami

    @property
    def is_gang(self) -> bool:
        """Whether several nodes train as one."""
        return self.nodes > 1

    @property
    def lets_go(self) -> bool:
        """Whether waiting nodes end themselves after some time, so that all nodes are requested from AWS together
        later.
        """
        return self.is_gang and self.market.replaces

    @property
    def market(self) -> Market:
        return market.find(self.capacity, self.fallback, nodes=self.nodes, block=self.block)

    @property
    def zone_ids(self) -> tuple[str, ...]:
        """The zones' ids within the region (az1 for use2-az1); empty if the file gives names."""
        return tuple(zone.rpartition("-")[2] for zone in self.zones if is_zone_id(zone))

    def bought_as(self, capacity: Capacity) -> Fleet:
        """A copy of this fleet in another market."""
        return replace(self, capacity=capacity, block=self.block if market.WAYS[capacity].has_block else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A gp3 volume. Only the data volume, which is mounted at /data, may have a `snapshot`."""

    size_gib: int
    iops: int = 3000
    throughput_mibps: int = 125
    snapshot: str | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Keep:
    """What is kept after `pulumi destroy`: the whole bucket with its policy and lifecycle, or nothing."""

    bucket: bool = True
    days: int = 30  # objects of a run expire after this many days
    # `others`: rules of the account delete the objects, which gpufleet does not check
    lifecycle: Literal["own", "others"] = "own"

    @property
    def expiry(self) -> str:
        """When objects expire, in words."""
        return (
            f"after {self.days} days"
            if self.lifecycle == "own"
            else f"by the account's own rules, assumed to be after {self.days} days"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Storage:
    """Disks and inputs. `dataset`, `base_weights` and each of `inputs` are a local folder or an s3:// prefix."""

    dataset: str = ""  # for a ready-made job, which needs one; empty for a command
    base_weights: str | None = None
    # by name: for a command, {inputs.NAME} is the input's path on the node; for a ready-made job, its `demands`
    inputs: dict[str, str] | None = None
    root: Disk = Disk(size_gib=100)
    data: Disk | None = None
    keep: Keep = Keep()

    def dataset_folder(self, root: Path) -> Path | None:
        """The dataset's folder, which may not exist yet; None if there is no dataset, or if it is in a bucket."""
        return _local(self.dataset, root) if self.dataset else None

    def weights_folder(self, root: Path) -> Path | None:
        """The folder of the base weights; None if there are none, or if they are in a bucket."""
        return None if self.base_weights is None else _local(self.base_weights, root)

    def input_folders(self, root: Path) -> dict[str, Path]:
        """The folders of the inputs that are not s3:// prefixes, by name."""
        places = {name: _local(place, root) for name, place in (self.inputs or {}).items()}
        return {name: folder for name, folder in places.items() if folder is not None}

    def taken_by(self, config: JobConfig) -> Storage:
        """The part of a staged run's storage that the job of one stage takes."""
        asked = {name for _, name in config.demands.inputs}
        inputs = {name: place for name, place in (self.inputs or {}).items() if name in asked}
        return replace(
            self,
            dataset=self.dataset if config.dataset_kind else "",
            base_weights=self.base_weights if config.sizes().base_weights else None,
            inputs=self.inputs if config.processes == "own" else inputs or None,
        )

    def weights(self, sizes: Sizes) -> Iterator[tuple[str, int]]:
        """The places of base weights and of a ready-made job's other inputs, with their bytes."""
        if self.base_weights is not None:
            yield self.base_weights, sizes.base_weights
        yield from ((place, sizes.inputs) for place in (self.inputs or {}).values())

    @property
    def prefixes(self) -> dict[str, str]:
        """All s3:// prefixes, by the names that they have in the nodes' rights."""
        named = {"Dataset": self.dataset, "BaseWeights": self.base_weights}
        named |= {f"Input{index}": place for index, place in enumerate((self.inputs or {}).values())}
        return {sid: place for sid, place in named.items() if place and place.startswith("s3://")}


def _local(place: str, root: Path) -> Path | None:
    return None if place.startswith("s3://") else root / place


Deadline = datetime | timedelta  # a time in UTC, or a span that begins at the run's first `up`


def deadline_text(deadline: Deadline) -> str:
    """The deadline as it is written in a definition file: `2026-12-31T18:00:00Z`, or `in 10 h`."""
    return f"in {deadline / timedelta(hours=1):g} h" if isinstance(deadline, timedelta) else stamp(deadline)


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """The limits that end the run. Hours are billed hours, summed over attempts and nodes."""

    max_usd: Decimal
    max_hours: Decimal
    deadline: datetime | timedelta | None = None  # if it is None, the fleet ends max_hours + 24 h after its creation
    # the highest price per node; more expensive types and zones are not used
    usd_per_hour: Decimal | None = added_later(None)

    def due(self, begin: datetime) -> datetime | None:
        """The deadline of a run whose first `up` is at `begin`; None if the run has none."""
        return begin + self.deadline if isinstance(self.deadline, timedelta) else self.deadline


def days_to_keep(begin: datetime, end: datetime) -> int:
    """The least storage.keep.days for a fleet that exists from `begin` to `end`, with one day added. The objects must
    exist for longer than the fleet, because nodes cannot boot without run.json, and the meter sums attempts and
    heartbeats. An object's age in S3 begins at its creation.
    """
    return math.ceil((end - begin) / timedelta(days=1)) + 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Vpc:
    """An existing network. The network's owner sets its routes."""

    id: str
    subnets: dict[str, str]  # subnets by zone, one for each of fleet.zones


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """An organisation's rules for everything that a stack makes."""

    tags: dict[str, str] | None = None  # tags in addition to the stack's own
    permissions_boundary: str | None = None  # the permissions boundary of the nodes' role: a policy's ARN
    vpc: Vpc | None = None  # None if the stack makes its own network
    kms_key: str | None = None  # the key that encrypts bucket and disks: an ARN in the fleet's region


@dataclass(frozen=True, kw_only=True, slots=True)
class Notify:
    """Who gets messages about a run. Without an e-mail address nobody gets any."""

    email: str | None = None  # gets the nodes' messages, and AWS's messages if no node can send one
    webhook: str | None = None  # where its URL is kept, which is a secret: ssm:/name or secretsmanager:name
    silent_hours: Decimal = Decimal(6)  # a message is sent after this many hours without a training step


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """Assumptions of the bill. None means the default, which infra.bill states with its source."""

    # the interruption hazard; if it is None, each simulated run has a random hazard
    hazard_per_hour: Decimal | None = None
    efficiency: Decimal | None = None  # share of the roofline (compute + optimizer traffic) that a step reaches
    # milliseconds per optimizer step of each phase, as measured outside of this project
    step_ms: tuple[Decimal, ...] | None = None
    setup_minutes: Decimal | None = None  # launch to first step: boot, image pull, staging
    restart_minutes: Decimal | None = None  # minutes from a replacement node's launch to its first step
    capacity_wait_minutes: Decimal | None = None  # mean wait for a replacement, not billed
    notice_missed: Decimal | None = None  # probability that a notice is not handled
    upload_gb_per_s: Decimal | None = None  # the rate of an upload from a node to S3
    max_price_age_days: int = 90  # if prices are older, the bill warns of their age; this changes no figure


Place = Literal["step", "first", "boundary", "save", "stage"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interruptions:
    """The rehearsal's interruptions: how many come with a notice, and how many without. `seed` determines when they
    come: at a training step in the first phase or a later one, between two phases, while a checkpoint is written, or in
    a phase after training.
    """

    seed: int = 7
    with_notice: int = 1
    without_notice: int = 1
    notice_at: Place = "step"
    loss_at: Place = "step"
    stage_results: int = 1  # the node is interrupted after this many results of a phase after training
    notice_s: int = 20  # seconds of notice; AWS gives 120 s, and the rehearsal does not wait that long


REHEARSED_S = 30.0  # seconds of training; long enough for two interruptions
REHEARSED_SAVES = 6


def rehearsed_steps(step_ms: float) -> int:
    """The number of steps or epochs, to two digits, that a rehearsal trains in REHEARSED_S seconds."""
    return max(1, int(float(f"{REHEARSED_S * 1000 / step_ms:.2g}")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What the run is meant to cost, take and reach. A goal stops nothing; the receipt says which goals were met."""

    usd: Decimal | None = None
    hours: Decimal | None = None  # hours from the first node's launch to the run's end, with waits
    # the result that each named metric value should reach; see job/contract/goal.py
    results: dict[str, Decimal] | None = None

    @property
    def wanted(self) -> dict[str, Decimal]:
        """Every goal by its name."""
        goals = {USD: self.usd, HOURS: self.hours, **(self.results or {})}
        return {name: figure for name, figure in goals.items() if figure is not None}


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """Costs or hours that somebody else has stated for a scenario; shown beside the bill."""

    hours: Decimal | None = None
    usd: Decimal | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """The keys of a scenario that are not sections of the file."""

    note: str = ""
    claim: Claim = Claim()
    # whether the scenario ran or was planned elsewhere: then only its claim is shown, and it is never priced
    reference: bool = False
    hold_hours: Decimal | None = None  # each node is kept for this time even if its work is done earlier
    buffer: Decimal = Decimal(0)  # the share of the work by which the bill is increased, as a buffer for failures

    @property
    def only_priced(self) -> str:
        """Why the definition can only be priced; empty if it can be run."""
        reasons = {
            "ran elsewhere": self.reference,
            "holds its node beyond its work": self.hold_hours is not None,
            "adds a buffer to its work": bool(self.buffer),
        }
        return next((reason for reason, true in reasons.items() if true), "")


@dataclass(frozen=True, kw_only=True, slots=True)
class StackDefinition:
    """One validated file of stacks/, or one of its scenarios."""

    name: str  # the file's name without its ending, such as tinystories-growth
    source: Path
    purpose: str  # the comment block at the beginning of the file
    run: Run
    job: Job
    fleet: Fleet
    storage: Storage
    limits: Limits
    goal: Goal = Goal()
    account: Account = Account()
    notify: Notify = Notify()
    estimate: Estimate = Estimate()
    # The Python of a command in a rehearsal, as a path relative to the project; empty for the Python of the code's
    # environment.
    python: str = ""
    interruptions: Interruptions = Interruptions()  # the other keys of `rehearsal` replace those of the other sections
    scenario: str = ""  # the scenario's name; empty for the file as it is
    variant: Variant = Variant()
    # The stages in the order in which they run; empty if the file has none. Each stage is a run of its own in this
    # run's folder. The other fields of a definition with stages are those of its first stage.
    stages: tuple[StackDefinition, ...] = ()
    before: tuple[str, ...] = ()  # of a stage: the names of the stages before it
    next_stage: str = ""  # of a stage: the name of the stage after it
    # Of a stage on the node of the stages before it: the first of these, whose fleet it uses. Of every stage that
    # shares a node: the limits of all of them together, while `limits` are its own.
    fleet_of: str = ""
    shared: Limits | None = None
    taken: tuple[str, ...] = ()  # of a stage: the folders (RUN/STAGE) of another run's stages that this run takes over
    own_data: bool = False  # whether a scenario itself states the counts of its data (job.parameters.data)
    # the file's tree; None if the definition was not read from a file
    tree: Mapping | None = field(default=None, compare=False, repr=False)
    # STACK as the user gave it; empty if no command read the definition
    asked: str = field(default="", compare=False, repr=False)

    @property
    def argument(self) -> str:
        """The argument STACK for further commands: as the user gave it; if no user gave it, the name of a file of
        stacks/, or the path of another file.
        """
        return shlex.quote(self.asked or (self.name if self.source.parent.name == "stacks" else str(self.source)))

    @property
    def parts(self) -> tuple[StackDefinition, ...]:
        """The stages, or the definition itself if it has none."""
        return self.stages or (self,)

    @property
    def with_fleets(self) -> tuple[StackDefinition, ...]:
        """The parts that have a fleet of their own."""
        return tuple(part for part in self.parts if not part.fleet_of)

    @property
    def fleet_run(self) -> str:
        """The run id in the tags of the fleet that this part uses."""
        return f"{self.run.id.partition('/')[0]}/{self.fleet_of}" if self.fleet_of else self.run.id

    @property
    def zones(self) -> list[str]:
        """The zones of all parts, in the order of their names."""
        return sorted({zone for part in self.parts for zone in part.fleet.zones})

    @property
    def changes_fleets(self) -> bool:
        """Whether a state machine may change the size of a fleet of this run."""
        return bool(self.fleet.market.stands_by) or self.fleet.lets_go or len(self.with_fleets) > 1

    def changed(self, change: Callable[[StackDefinition], StackDefinition]) -> StackDefinition:
        """The definition with `change` applied to it and to each of its stages."""
        return replace(change(self), stages=tuple(map(change, self.stages)))

    @property
    def left(self) -> dict[str, str]:
        """The folder of each earlier stage, by name. This stage may use the outputs in it."""
        run = self.run.id.partition("/")[0]
        return {
            folder.partition("/")[2]: folder for folder in (*self.taken, *(f"{run}/{name}" for name in self.before))
        }

    @property
    def stage(self) -> str:
        """The stage's name; empty if the definition is not a stage."""
        return self.run.id.partition("/")[2]

    @property
    def priced_argument(self) -> str:
        """`argument`, with --scenario if it is needed, for further commands about the same work."""
        return f"{self.argument} --scenario {self.scenario}" if self.scenario else self.argument

    @property
    def is_earlier_run(self) -> bool:
        """Whether --run named another run than the file. `pulumi destroy` concerns only the run in the file."""
        own = find_node(self.tree, "run.id") if self.tree else None
        return isinstance(own, Scalar) and own.text != self.run.id

    @property
    def run_argument(self) -> str:
        """`argument`, with --run if it is needed, for further commands about the same run."""
        return f"{self.argument} --run {self.run.id}" if self.is_earlier_run else self.argument

    @property
    def nodes(self) -> int:
        """The number of nodes that run at once."""
        return self.fleet.nodes

    def on_nodes(self, count: int) -> StackDefinition:
        """This work on `count` nodes."""
        cards: Cards = self.fleet.cards if count > 1 else "one"
        if (count, cards) == (self.nodes, self.fleet.cards):
            return self
        return replace(self, fleet=replace(self.fleet, nodes=count, cards=cards))

    def begins_at(self, now: datetime) -> datetime:
        """When the run can begin: now, or when its block begins."""
        return self.fleet.market.begins_at(now)

    def due(self, now: datetime) -> datetime | None:
        """The time by which a run that begins as soon as possible must be done: its deadline, or the end of its block
        if that is earlier.
        """
        ends = [self.limits.due(self.begins_at(now)), self.fleet.market.last]
        return min(filter(None, ends), default=None)

    def due_by(self, now: datetime) -> str:
        """The key of the file from which the time of `due` comes."""
        return self.fleet.market.due_by(self.due(now))

    def expiry(self, now: datetime) -> datetime:
        """The time at which AWS ends a fleet that begins now, even if the job is not done."""
        lives = (part.fleet.market.lives_hours(self.limits.max_hours) for part in self.parts)
        return self.due(now) or now + timedelta(hours=max(lives))

    def hours_left(self, now: datetime) -> float | None:
        """Hours from the run's begin to its deadline; negative if the deadline has passed, None if there is none."""
        due = self.due(now)
        return None if due is None else (due - self.begins_at(now)).total_seconds() / 3600

    def problem(self, path: str, value: str, allowed: str, hint: str = "") -> Problem:
        """A problem at `path`, with the line in the file. If the value comes from a scenario, the path is that of the
        scenario's key.
        """
        node = find_node(self.tree, path) if self.tree else None
        if node is None:
            return Problem(path=path, value=value, allowed=allowed, hint=hint)
        return Problem(path=node.path, value=value, allowed=allowed, hint=hint, line=node.line)
