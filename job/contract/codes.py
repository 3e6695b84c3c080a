"""Exit codes: the trainer's, which the supervisor reads, and the supervisor's, which the node reads."""

from __future__ import annotations


class TrainerExit:
    """Exit codes of the training process. Any other code is a crash."""

    FINISHED = 0
    CRASHED = 1  # also used if another trainer uses the folder; torchrun's code if no rank reported a code of its own
    FATAL = 65  # no node can succeed: fatal.json has the reason
    OUT_OF_MEMORY = 69  # rung.json names the next rung
    REFUSED = 71  # this node is refused: preflight.json has the reason
    UNREADABLE = 72  # unreadable.json names the newest checkpoint
    STOPPED = 75  # the trainer ended on request


class AttemptExit:
    """Exit codes of `python -m gpufleet.job`, in the `exit` of attempts/<instance>.json. Any other code is a crash."""

    FINISHED = 0  # the work is done, or the run has reached a limit, which done.json names
    CRASHED = 1  # the next attempt resumes from the newest checkpoint
    FAILED = 70  # the run failed, and no node can continue it
    REFUSED = 71  # this node is refused: another may continue
    INTERRUPTED = 75  # another node has to continue the run
    TERMINATED = 143  # the node ended before the job began, or after it ended
