"""What the end of a command means: its exit code, its step and what it printed last, to a verdict. Pure.

| Exit code | No stop was sent | After a stop |
|---|---|---|
| 0 | finished, where its steps are reached or none are declared; else it cannot be: failed | stopped |
| one of exit.fatal | failed | stopped |
| one of exit.again | another node | stopped |
| another, or a signal | again in place, exit.restarts times; then another node; twice the same end: failed | stopped |

A stop at the declared last step finds it finished.
"""

from __future__ import annotations

import signal
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal

from gpufleet.job.spec.command import CommandConfig

REACHED = 0.99  # of the declared steps: the last ones may be logged nowhere
MEMORY = (
    "out of memory",
    "outofmemory",
    "cublas_status_alloc_failed",
    "failed to cuda malloc",
    "cannot allocate memory",
)

Verdict = Literal["finished", "failed", "again", "elsewhere", "stopped"]


@dataclass(frozen=True, kw_only=True, slots=True)
class End:
    """How one start ended. `code` as a shell has it; `why`: gpufleet ended it, for this reason."""

    code: int
    step: int
    lines: tuple[str, ...] = ()
    why: str = ""
    what: str = "the command"
    error: str = ""  # the exception that it printed last

    @property
    def sentence(self) -> str:
        """In a sentence without its period."""
        if self.why:
            return f"{self.what} was ended at step {self.step:,}: {self.why}"
        said = f"exit code {self.code}"
        if self.code > 128:
            with suppress(ValueError):
                said = f"{signal.Signals(self.code - 128).name}, exit code {self.code}"
        memory = any(word in line.lower() for line in self.lines for word in MEMORY)
        if memory:
            said += ", out of memory"
        elif self.code == 128 + signal.SIGKILL:
            said += ", as where the kernel lacks memory"
        named = f" ({self.error})" if self.error and self.code else ""
        return f"{self.what} ended with {said} at step {self.step:,}{named}"

    def is_like(self, other: End) -> bool:
        """At the same step, with the same last words."""
        return (self.step, self.lines[-1:]) == (other.step, other.lines[-1:])


def of_several_nodes(config: CommandConfig, node: int) -> CommandConfig:
    """What a node of several judges by. None starts its ranks again by itself, from a checkpoint that the others may
    not have: all begin anew together. Nor does one that follows another judge by steps, which its ranks need not tell.
    """
    config = replace(config, exit=replace(config.exit, restarts=0))
    if node == 0:
        return config
    return replace(config, work=replace(config.work, early=True), resume=replace(config.resume, check="none"))


def is_reached(config: CommandConfig, step: int) -> bool:
    """Whether its declared steps are done; with none declared whatever it did is all."""
    return config.work.steps is None or step >= REACHED * config.work.steps


def judge(config: CommandConfig, end: End, before: Sequence[End], *, stopped: bool) -> tuple[Verdict, str]:
    """What follows, and why in a sentence. `before`: earlier ends of this node; `stopped`: a stop had been sent."""
    if stopped:
        done = config.work.steps is not None and end.step >= config.work.steps
        return ("finished" if done else "stopped"), end.sentence
    if end.code == 0 and not end.why:
        if is_reached(config, end.step) or config.work.early:
            return "finished", end.sentence
        return "failed", (
            f"{end.what} ended by itself at step {end.step:,} of {config.work.steps:,}; if it may, set work.early: true"
        )
    if not end.why and end.code in config.exit.fatal:
        return "failed", f"{end.sentence}, which is one of exit.fatal"
    if not end.why and end.code in config.exit.again:
        return "elsewhere", f"{end.sentence}, which is one of exit.again"
    if not end.why and any(end.is_like(other) for other in before):
        return "failed", f"{end.sentence}, twice with the same last line"
    return ("again" if len(before) < config.exit.restarts else "elsewhere"), end.sentence
