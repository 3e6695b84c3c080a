"""Decides what the end of a command means, by its exit code, its last step and its output. All functions are pure.

| Exit code | No stop was sent | After a stop |
|---|---|---|
| 0 | failed if something contradicts the code, else finished | finished at the last step, else stopped |
| one of exit.fatal | failed | stopped |
| one of exit.again | another node | stopped |
| another, or a signal | exit.restarts more starts here, then another node; failed if two ends are alike | stopped |

Two facts contradict exit code 0. First, the newest step is further away from the declared last step than two printed
lines are from each other, and the command wrote no output after the newest step. Second, a checkpoint was restored and
the start has done nothing. After a stop, "finished" needs a whole checkpoint of the last step, or an output after it.
If there is neither, the next node has to find out what is left to do, which costs minutes.
"""

from __future__ import annotations

import re
import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from gpufleet.job.kind.command import CommandConfig

# if this share of the declared steps is done, the work is treated as done, because a script may not log its last steps
REACHED = 0.99
REASONS = {  # causes of an end, and texts by which they are recognised in the output
    "out of memory": re.compile(
        r"out of memory|outofmemory|cublas_status_alloc_failed|failed to cuda malloc|cannot allocate memory"
    ),
    "no room on the disk": re.compile(r"no space left on device|disk quota exceeded"),
    "a GPU's memory is broken": re.compile(r"uncorrectable ecc|ecc error"),
}

Verdict = Literal["finished", "failed", "again", "elsewhere", "refused", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How one start ended. `code` is an exit code, as a shell gives it. `why` is the reason if gpufleet ended the
    command.
    """

    code: int
    step: int
    is_told: bool = True  # whether a line or a checkpoint of this start showed the newest step
    is_read: bool = True  # whether a printed line showed the newest step
    spread: int = 1  # number of steps that may have been done after the newest known step
    saved: int = -1  # the step of the newest whole checkpoint
    is_saved: bool = False  # whether this start has left a whole checkpoint
    is_delivered: bool = False  # whether a file was written to the outputs after the last step was reported
    restored: int | None = None  # the step of the checkpoint that was restored for this start
    is_idle: bool = False  # whether the start reported no step, and wrote neither checkpoints nor outputs
    follows: bool = False  # whether this node is not the first of several; only the first one has to print and save
    lines: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()  # lines with numbers that job.progress.stdout does not match
    why: str = ""
    what: str = "the command"
    cause: str = ""  # the exception or other cause of the end

    @property
    def sentence(self) -> str:
        """The end as a sentence, without its period."""
        if self.why:
            return f"{self.what} was ended at step {self.step:,}: {self.why}"
        phrase = f"exit code {self.code}"
        if self.code > 128:
            with suppress(ValueError):
                phrase = f"{signal.Signals(self.code - 128).name}, exit code {self.code}"
        text = "\n".join((*self.lines, self.cause)).lower()
        reason = next((name for name, words in REASONS.items() if words.search(text)), "")
        if reason:
            phrase += f", {reason}"
        elif self.code == 128 + signal.SIGKILL:
            phrase += ", as if the kernel lacks memory"
        named = f" ({self.cause})" if self.cause and self.code else ""
        return f"{self.what} ended with {phrase} at step {self.step:,}{named}"

    def is_like(self, other: End) -> bool:
        """Whether both starts ended at the same step for the same cause; if no cause is known, with the same last
        lines.
        """
        mine, theirs = ((end.cause,) if end.cause else end.lines for end in (self, other))
        return (self.step, self.code, *map(_plain, mine)) == (other.step, other.code, *map(_plain, theirs))


def _plain(text: str) -> str:
    """The text without the parts that differ between starts: process ids, addresses, sizes, times."""
    return re.sub(r"0x[0-9a-f]+|[0-9]+", "#", text)


def judge(config: CommandConfig, end: End, before: Sequence[End], *, stopped: bool) -> tuple[Verdict, str]:
    """What the end means, and the reason. `before`: the earlier ends on this node. `stopped`: whether the command had
    been asked to stop.
    """
    if stopped:
        return ("finished" if _is_finished_by_stop(config, end) else "stopped"), end.sentence
    if end.code == 0 and not end.why:
        problem = _contradiction(config, end)
        return ("failed", problem) if problem else ("finished", end.sentence)
    if not end.why and end.code in config.exit.fatal:
        return "failed", f"{end.sentence}, which is one of exit.fatal"
    if not end.why and end.code in config.exit.again:
        return "elsewhere", f"{end.sentence}, which is one of exit.again"
    if not end.why and any(end.is_like(other) for other in before):
        return "failed", f"{end.sentence}, twice for the same reason"
    return ("again" if len(before) < config.exit.restarts else "elsewhere"), end.sentence


def _is_finished_by_stop(config: CommandConfig, end: End) -> bool:
    """Whether the last step was certainly done before the stop."""
    if end.code or config.total is None:
        return False
    return end.saved >= config.total or (end.is_delivered and end.is_told and end.step >= config.total)


def _contradiction(config: CommandConfig, end: End) -> str:
    """Why exit code 0 cannot mean that the work is done; empty if it can."""
    if end.follows:
        return ""
    total, unit = config.total, config.unit
    reached = max(end.step if end.is_told else 0, end.saved, end.restored or 0)
    is_reached = False
    if total is not None:
        last = total - (unit == "step")  # the number of the last step is one less if the first step has the number 0
        is_reached = reached >= REACHED * total or reached + end.spread >= last
    if end.restored is not None and end.is_idle and not is_reached and not config.work.early:
        return (
            f"{end.what} got the checkpoint of {unit} {end.restored:,}, printed no step, wrote nothing and ended"
            f" with exit code 0: it does not resume{_unread(end)}"
        )
    if total is None or config.work.early or is_reached or end.is_delivered:
        return ""
    if not end.is_told and end.is_saved:  # no line shows the last step, but the command has saved
        return ""
    if not end.is_told:
        hint = _unread(end) or ": no line shows a step; say in job.progress which lines do"
        return f"{end.what} ended by itself, and whether it reached {unit} {total:,} is unknown{hint}"
    by_names = "" if end.is_read else ", by the names of its checkpoints (if these count epochs, write {epoch})"
    return f"{end.what} ended by itself at {unit} {reached:,} of {total:,}{by_names}; if it may, set work.early: true"


def _unread(end: End) -> str:
    """A sentence that says that no line had a step, and shows the last lines with numbers; empty if lines had steps."""
    if end.is_told or not end.unread:
        return ""
    return f". No line matched job.progress.stdout; the last ones with numbers were: {' | '.join(end.unread)}"
