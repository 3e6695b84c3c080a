"""Names in the work folder of a run: what supervisor and trainer tell each other, and what they leave.

What is sent to the bucket has the same name there, below the run's prefix (bucket.py).
"""

from __future__ import annotations

import re

RUN = "run.json"

# From the supervisor to the trainer.
START = "start.json"  # the rung at which a trainer that waits begins
STOP = "stop.json"
SAVE = "save.json"
ACCEPT = "accept.json"  # enough nodes were refused: this one trains
LEADER_SAVED = "leader_saved.json"  # of several nodes: which checkpoint of the leader's is whole

# From the trainer to the supervisor.
FATAL = "fatal.json"
RUNG = "rung.json"
ENDED = "ended.json"  # several ranks leave here the exit code that torchrun cannot pass on
UNREADABLE = "unreadable.json"
PREFLIGHT = "preflight.json"
COMPILED = "compiled.json"
STEPPED = "stepped"  # of several nodes, by each one's first rank: steps done, seconds of one before the others
ASK_AGAIN = "ask_again.json"  # of several nodes, for the node: they let go, and AWS is to be asked later
LEFT = "left.json"  # how a command ended
OBSERVED = "observed.json"  # what was seen of a command's start
ALARM = "alarm.json"  # what people should hear while it trains
LOCK = "lock"  # held by the trainer that is at work

# What the run leaves.
METRICS = "metrics.jsonl"
LOG = "job.log"
RESULTS = "results.json"
RECEIPT = "receipt.json"
DONE = "done.json"  # how it ended: the node sends it where the supervisor could not

# Folders.
DATA = "data"  # the dataset
INPUTS = "inputs"  # base weights
CHECKPOINTS = "ckpt"
STAGES = "stages"  # *.jsonl, a line per finished piece of work
EXPORTS, FINAL = "exports", "final"  # models: at each phase's start and end, and the last one
SCALARS = "tb"  # TensorBoard's
GRAPHS = "compile_cache"
PACKAGES = "packages"  # what the image lacks
USER = "user"  # of a command: all that its container sees, and CODE, KEPT, OUTPUTS, STATE, NAMED below it
CODE, KEPT, OUTPUTS, STATE, NAMED = "code", "checkpoints", "outputs", "state", "inputs"
CONTROL = "control"  # what the supervisor's container tells and asks the node, and its answers; what trains reads it
SPENT = "control/spent.json"  # for the log, the node's timer and its messages
CONTAINER, CONTAINED = "container.json", "contained.json"  # below it
SCRIPTS, FIRST = "job", "first.sh"  # below it, and seen by the command's container: scripts and pipes
WATCHER = "control/watcher"  # and by the container that watches the command's processes: a socket

STEPS = "step_*"  # folders of checkpoints, as step_folder names them

# Files at the top of the folder that are no results of the run.
OWN = frozenset(
    {RUN, START, STOP, SAVE, ACCEPT, LEADER_SAVED, RUNG, ENDED, UNREADABLE, COMPILED, RECEIPT, LEFT, DONE, OBSERVED}
    | {ALARM, ASK_AGAIN}
)


def step_folder(step: int) -> str:
    """The name of a checkpoint's folder, on the disk and in the bucket."""
    return f"step_{step:08d}"


def step_of(folder: str) -> int | None:
    """The step of a checkpoint by the name of its folder; None: it is no checkpoint's."""
    found = re.fullmatch(r"step_(\d{8})", folder)
    return int(found[1]) if found else None
