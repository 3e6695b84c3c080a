"""What supervisor and trainer tell each other in small files of the work folder, each kind a class.

A message is written whole or not at all. One that cannot be read counts as not there.

The node's own Python reads this: no newer than 3.9 here.
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

LOOK_S = 0.05  # between two looks for start.json


@dataclass(frozen=True)
class Message:
    """One file of a work folder."""

    FILE: ClassVar[str]

    def write(self, folder: Path) -> None:
        """Replaces the one that is there. Raises OSError."""
        tree = {key: str(value) if isinstance(value, Decimal) else value for key, value in asdict(self).items()}
        atomic.write_json(folder / self.FILE, tree)

    @classmethod
    def read(cls, folder: Path) -> Self | None:
        """The message; None where there is none that can be believed."""
        tree = atomic.read_object(folder / cls.FILE)
        try:
            return None if tree is None else reading.filled(cls, Fields(tree))
        except DoubtError:
            return None


# From the supervisor to the trainer.


@dataclass(frozen=True)
class Start(Message):
    """A trainer that waits begins, at this rung of the ladder."""

    FILE = workdir.START
    rung: int


def await_start(workdir: Path) -> int:
    """The rung of start.json, once it is there. Raises SystemExit when whoever started this process is gone."""
    parent = os.getppid()
    while (start := Start.read(workdir)) is None:
        if os.getppid() != parent:
            sys.exit("nobody is left to say when to begin")
        time.sleep(LOOK_S)
    return start.rung


@dataclass(frozen=True)
class Stop(Message):
    """End after the step that is under way; `save` it first. `ends`: the run ends with it, no other start follows."""

    FILE = workdir.STOP
    reason: str = "asked to"
    save: bool = True
    ends: bool = False
    deadline: float | None = None  # epoch seconds, when the machine goes away


@dataclass(frozen=True)
class SaveRequest(Message):
    """A checkpoint is wanted now. The trainer removes the file."""

    FILE = workdir.SAVE
    reason: str


@dataclass(frozen=True)
class Spent(Message):
    """What the run has cost by `at`, for the log and the node's timer; and for a command which attempt this is, and the
    newest step that is in the bucket, -1 before the first. `trained_at`: when it last told of a step, 0 before that.
    `switch_at`: when the run has to begin on demand, 0 without a fallback; `switch_is_paid`: whether its limits allow.
    `waits_since`: when this node became the oldest of several that wait for others, 0 where it is not.
    """

    FILE = workdir.SPENT
    spent_usd: Decimal
    spent_s: Decimal  # billed
    at: float
    attempt: int = 1
    published: Integer = -1
    trained_at: float = 0.0
    switch_at: float = 0.0
    switch_is_paid: bool = True
    waits_since: float = 0.0


@dataclass(frozen=True)
class AskAgain(Message):
    """For the node: those that waited let go. `name`: of this time, the same for all of them; `pause_s`: for how long
    AWS is asked for no node.
    """

    FILE = workdir.ASK_AGAIN
    name: str
    pause_s: float


@dataclass(frozen=True)
class Accept(Message):
    """Enough nodes were refused for what they are: this one trains, whatever it is."""

    FILE = workdir.ACCEPT


@dataclass(frozen=True)
class LeaderSaved(Message):
    """The newest checkpoint that is whole on the leader's disk, of several nodes, of which this node's ranks may have
    written a part. `ended`: the leader's ranks have ended, and there will be none after it.
    """

    FILE = workdir.LEADER_SAVED
    step: Integer
    named_by: str
    ended: bool


# From the trainer to the supervisor.


@dataclass(frozen=True)
class Fatal(Message):
    """The run cannot succeed on any node."""

    FILE = workdir.FATAL
    error: str
    detail: str


@dataclass(frozen=True)
class UsedRung(Message):
    """The rung that a phase runs at, and the one to take where memory runs out there; None: there is none lower."""

    FILE = workdir.RUNG
    rung: int
    phase: str = ""
    micro: int | None = None
    checkpointing: bool | None = None
    lower: int | None = None


@dataclass(frozen=True)
class Ended(Message):
    """The exit code of several ranks, which torchrun does not pass on."""

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
    between_gb_s: float | None = None  # of a node to the others; None: there are none, or it was not measured
    transport: str | None = None  # the transport as NCCL's log names it; None: nobody asked

    def write(self, folder: Path) -> None:
        """As any, without what there is only between several nodes."""
        tree = asdict(self)
        atomic.write_json(folder / self.FILE, {key: tree[key] for key in tree if tree[key] is not None})


@dataclass(frozen=True)
class CommandEnd(Message):
    """How a command ended: `how` in a sentence (exit code or signal, step), and what it printed last."""

    FILE = workdir.LEFT
    how: str
    lines: tuple[str, ...] = ()

    @property
    def full_text(self) -> str:
        """The whole text."""
        return "\n".join((self.how, *(f"  | {line}" for line in self.lines)))


@dataclass(frozen=True)
class Observed(Message):
    """What was seen of a command's newest start so far, for its supervisor and for who rehearses it."""

    FILE = workdir.OBSERVED
    lines: int = 0  # that it has printed
    told: bool = False  # one of them told a step
    unread: tuple[str, ...] = ()  # the last ones with numbers that told none
    begun: int = 0  # checkpoints that are there
    checkpoints: int = 0  # whole ones
    restored: Step | None = None  # the step of the checkpoint that it was given
    resumes: str = ""  # goes on, begins anew, not shown; empty: it was given none
    why: str = ""
    elsewhere: str = ""  # what it has written where nobody looks, and the line to add
    met: str = ""  # the ranks of several nodes that train together; empty: they were not seen
    has_first: bool = False  # rank 0 is one of this node's


@dataclass(frozen=True)
class Alarm(Message):
    """What people should hear while a run trains: a loss that is no number, a node that is held. Of each kind once."""

    FILE = workdir.ALARM
    kind: Name
    text: str


# Between a command's host and the node, in WORKDIR/control.


@dataclass(frozen=True)
class Container(Message):
    """What trains wants a container, another one for each number; or not `wanted`: none any more."""

    FILE = workdir.CONTAINER
    number: int
    wanted: bool = True


@dataclass(frozen=True)
class Contained(Message):
    """The node's answer to a number: the first process of its container, or why there is none, and how it ended."""

    FILE = workdir.CONTAINED
    number: int
    pid: int | None = None
    problem: str = ""
    code: int = 0
