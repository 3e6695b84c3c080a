"""Exit codes: the trainer's, which the supervisor reads, and the supervisor's, which the node reads."""

from __future__ import annotations


class TrainerExit:
    """How the process that trains ends. Any other code is a crash."""

    FINISHED = 0
    CRASHED = 1  # or another trainer at work in the folder; or torchrun's, where no rank has said how it ended
    FATAL = 65  # cannot succeed on any node: fatal.json says why
    OUT_OF_MEMORY = 69  # rung.json names the next rung
    REFUSED = 71  # this node: preflight.json says why
    UNREADABLE = 72  # the newest checkpoint: unreadable.json names it
    STOPPED = 75  # on request


class AttemptExit:
    """`python -m gpufleet.job`, and the `exit` of attempts/<instance>.json. Any other is a crash."""

    FINISHED = 0  # or at a limit of the run: done.json says which
    CRASHED = 1  # the next attempt goes on from the newest checkpoint
    FAILED = 70  # for good
    REFUSED = 71  # this node: another may go on
    INTERRUPTED = 75  # go on elsewhere, not here
    TERMINATED = 143  # the node, before or after the job
