"""Exit codes: the trainer's, which the supervisor reads, and the supervisor's, which the node reads."""

from __future__ import annotations


class TrainerExit:
    """Exit codes of the training process. Any other code is a crash."""

    FINISHED = 0
    CRASHED = 1  # also if another trainer works in the folder, and torchrun's code if no rank reported its own
    FATAL = 65  # no node can succeed: fatal.json has the reason
    OUT_OF_MEMORY = 69  # rung.json names the next rung
    REFUSED = 71  # this node is refused: preflight.json has the reason
    UNREADABLE = 72  # unreadable.json names the newest checkpoint
    STOPPED = 75  # ended on request


class AttemptExit:
    """Exit codes of `python -m gpufleet.job`, in the `exit` of attempts/<instance>.json. Any other code is a crash."""

    FINISHED = 0  # or the run has reached a limit, which done.json names
    CRASHED = 1  # the next attempt resumes from the newest checkpoint
    FAILED = 70  # for good
    REFUSED = 71  # this node is refused: another may continue
    INTERRUPTED = 75  # continue elsewhere, not here
    TERMINATED = 143  # the node ended, before or after the job
