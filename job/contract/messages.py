"""Messages between supervisor and trainer: small files of the work folder, one class per kind.

A message is written completely or not at all. An unreadable message is treated as missing. The node's own Python reads
this file, so it must work with Python 3.9.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict, dataclass
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from gpufleet.job import atomic
from gpufleet.job.contract import reading, workdir
from gpufleet.job.contract.reading import DoubtError, Fields, Integer, Name, Step

if TYPE_CHECKING:
    from typing import Self

LOOK_S = 0.05  # seconds between two looks for start.json


@dataclass(frozen=True)
class Message:
    """One file of a work folder."""

    FILE: ClassVar[str]

    def write(self, folder: Path) -> None:
        """Replaces the file. Raises OSError."""
        tree = {key: str(value) if isinstance(value, Decimal) else value for key, value in asdict(self).items()}
        atomic.write_json(folder / self.FILE, tree)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The message; None if there is no valid one."""
        tree = atomic.read_object(folder / cls.FILE)
        try:
            return None if tree is None else reading.filled(cls, Fields(tree))
        except DoubtError:
            return None


# Messages from the supervisor to the trainer.


@dataclass(frozen=True)
class Start(Message):
    """Lets a waiting trainer begin, at this rung of the ladder."""

    FILE = workdir.START
    rung: int


def await_start(workdir: Path) -> int:
    """The rung of start.json, once this file exists. Raises SystemExit when the parent process is gone."""
    parent = os.getppid()
    while (start := Start.read(workdir)) is None:
        if os.getppid() != parent:
            sys.exit("the process that would start it has ended")
        time.sleep(LOOK_S)
    return start.rung


@dataclass(frozen=True)
class Stop(Message):
    """Asks the trainer to end after the current step; `save`: whether to save that step first. `ends`: whether no other
    start will follow.
    """

    FILE = workdir.STOP
    reason: str = "asked to"
    save: bool = True
    ends: bool = False
    deadline: float | None = None  # the time at which the machine is taken away, in epoch seconds


@dataclass(frozen=True)
class SaveRequest(Message):
    """Asks for a checkpoint now. The trainer removes the file."""

    FILE = workdir.SAVE
    reason: str


@dataclass(frozen=True)
class Spent(Message):
    """The run's cost at the time `at`, for the log and the node's timer. For a command it also has the attempt's
    number, and the newest step in the bucket (-1 if there is none). `trained_at`: the time of the newest step, 0 if
    there is none. `switch_at`: the time at which the run must begin on demand, 0 if it has no fallback;
    `switch_is_paid`: whether the run's limits allow that. `waits_since`: when this node became the oldest of several
    waiting nodes; 0 if it is not the oldest.
    """

    FILE = workdir.SPENT
    spent_usd: Decimal
    spent_s: Decimal  # billed seconds
    at: float
    attempt: int = 1
    published: Integer = -1
    trained_at: float = 0.0
    switch_at: float = 0.0
    switch_is_paid: bool = True
    waits_since: float = 0.0


@dataclass(frozen=True)
class AskAgain(Message):
    """Tells the node that the waiting nodes will end. `name`: a name for this occasion, the same on all nodes.
    `pause_s`: seconds for which no node is requested from AWS.
    """

    FILE = workdir.ASK_AGAIN
    name: str
    pause_s: float


@dataclass(frozen=True)
class Accept(Message):
    """Tells the trainer to train on this node even if its checks fail, because enough nodes were refused already."""

    FILE = workdir.ACCEPT


@dataclass(frozen=True)
class LeaderSaved(Message):
    """The newest whole checkpoint on the disk of the leader of several nodes; this node's ranks may have written a part
    of it. `ended`: the leader's ranks have ended, so this checkpoint is the last.
    """

    FILE = workdir.LEADER_SAVED
    step: Integer
    named_by: str
    ended: bool


# Messages from the trainer to the supervisor.


@dataclass(frozen=True)
class Fatal(Message):
    """The run cannot succeed on any node."""

    FILE = workdir.FATAL
    error: str
    detail: str


@dataclass(frozen=True)
class UsedRung(Message):
    """The rung at which a phase runs, and the next one if memory runs out there; None if no rung is lower."""

    FILE = workdir.RUNG
    rung: int
    phase: str = ""
    micro: int | None = None
    checkpointing: bool | None = None
    lower: int | None = None


@dataclass(frozen=True)
class Ended(Message):
    """The ranks' exit code, which torchrun does not pass on."""

    FILE = workdir.ENDED
    code: int
    rank: int = 0


@dataclass(frozen=True)
class Unreadable(Message):
    """The newest checkpoint cannot be read."""

    FILE = workdir.UNREADABLE
    step: Step
    problem: str


@dataclass(frozen=True)
class Preflight(Message):
    """What the checks before training have measured on each rank, and why this node is refused, if it is."""

    FILE = workdir.PREFLIGHT
    ranks: tuple[Any, ...] = ()
    problems: tuple[str, ...] = ()
    # GB/s from a node to the others; None if there are none, or if it was not measured
    between_gb_s: float | None = None
    transport: str | None = None  # NCCL's name of the transport; None if it was not measured

    def write(self, folder: Path) -> None:
        """Writes the message; on a single node, the fields that only concern several nodes are left out."""
        tree = asdict(self)
        atomic.write_json(folder / self.FILE, {key: tree[key] for key in tree if tree[key] is not None})


@dataclass(frozen=True)
class CommandEnd(Message):
    """How a command ended: `how` as a sentence (exit code or signal, step), and its last lines."""

    FILE = workdir.LEFT
    how: str
    lines: tuple[str, ...] = ()

    @property
    def full_text(self) -> str:
        return "\n".join((self.how, *(f"  | {line}" for line in self.lines)))


@dataclass(frozen=True)
class Observed(Message):
    """Observations of a command's newest start so far, for its supervisor and its rehearsal."""

    FILE = workdir.OBSERVED
    lines: int = 0  # number of printed lines
    told: bool = False  # whether a printed line gave a step
    unread: tuple[str, ...] = ()  # the last lines with numbers that gave no step
    begun: int = 0  # number of checkpoints that exist, complete or not
    checkpoints: int = 0  # number of complete checkpoints
    # why the newest checkpoint is not valid, if the process that wrote it may have been ended while it wrote
    doubt: str = ""
    restored: Step | None = None  # the step of the checkpoint that was restored for the command
    resumes: str = ""  # `goes on`, `begins anew` or `not shown`; empty if no checkpoint was restored
    why: str = ""
    elsewhere: str = ""  # files outside of the declared folders, and the line of the definition to add for them
    met: str = ""  # the ranks of several nodes that train together, as text; empty if they were not seen
    has_first: bool = False  # whether rank 0 is on this node
    follows: bool = False  # whether another node leads, so that this one may print and save nothing


@dataclass(frozen=True)
class Alarm(Message):
    """A warning for people while a run trains, for example that a loss is not a number. Each kind is sent once."""

    FILE = workdir.ALARM
    kind: Name
    text: str


# Messages between a command's host and the node, in WORKDIR/control.


@dataclass(frozen=True)
class Container(Message):
    """Asks the node for a training container, a new one for each number. If `wanted` is false, asks the node to remove
    it.
    """

    FILE = workdir.CONTAINER
    number: int
    wanted: bool = True


@dataclass(frozen=True)
class Contained(Message):
    """The node's answer to the request with this number: the first process of the container, or why there is no
    container. A later answer says how the container ended.
    """

    FILE = workdir.CONTAINED
    number: int
    pid: int | None = None
    problem: str = ""
    code: int = 0
