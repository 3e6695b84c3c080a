"""Names in a run's work folder: of messages between supervisor and trainer, and of results.

Uploaded files have the same names below the run's prefix (bucket.py).
"""

from __future__ import annotations

import re

RUN = "run.json"

# From the supervisor to the trainer.
START = "start.json"  # the rung at which a waiting trainer begins
STOP = "stop.json"
SAVE = "save.json"
ACCEPT = "accept.json"  # enough nodes were refused: train on this node
LEADER_SAVED = "leader_saved.json"  # with several nodes: the leader's newest whole checkpoint

# From the trainer to the supervisor.
FATAL = "fatal.json"
RUNG = "rung.json"
ENDED = "ended.json"  # the ranks' exit code, which torchrun cannot pass on
UNREADABLE = "unreadable.json"
PREFLIGHT = "preflight.json"
COMPILED = "compiled.json"
# with several nodes, from each node's first rank: steps done, seconds per step before it needs other nodes
STEPPED = "stepped"
ASK_AGAIN = "ask_again.json"  # with several nodes, to the node: all waiting nodes leave, and AWS is asked later
LEFT = "left.json"  # the end of a command
OBSERVED = "observed.json"  # the observations of a command's start
ALARM = "alarm.json"  # a warning for people
LOCK = "lock"  # the lock that the working trainer holds

# Results of the run.
METRICS = "metrics.jsonl"
LOG = "job.log"
RESULTS = "results.json"
RECEIPT = "receipt.json"
HANDED_ON = "handed_on.json"  # in a stage's final folder: the files that later stages may take, with their hashes
DONE = "done.json"  # how the run ended: the node sends this file if the supervisor could not

# Folders.
DATA = "data"  # the dataset
INPUTS = "inputs"  # base weights
CHECKPOINTS = "ckpt"
STAGES = "stages"  # *.jsonl, one line per finished piece of work
EXPORTS, FINAL = "exports", "final"  # models: those at each phase's start and end; the final model
SCALARS = "tb"  # for TensorBoard
GRAPHS = "compile_cache"
TRACKED = "tracked"  # files of W&B or MLflow
PACKAGES = "packages"  # packages that the image lacks
USER = "user"  # a command's folders, all that the command's container sees: CODE, KEPT, OUTPUTS, STATE, NAMED
CODE, KEPT, OUTPUTS, STATE, NAMED = "code", "checkpoints", "outputs", "state", "inputs"
# requests of the supervisor's container and the node's answers, which the training process can read
CONTROL = "control"
SPENT = "control/spent.json"  # for the log, the node's timer and its messages
CONTAINER, CONTAINED = "container.json", "contained.json"  # below CONTROL
SCRIPTS, FIRST = "job", "first.sh"  # below CONTROL, seen by the command's container: scripts and pipes
WATCHER = "control/watcher"  # seen by the container that watches the command's processes: a socket

STEPS = "step_*"  # checkpoints' folders, as step_folder names them

# Files in the folder that are not results.
OWN = frozenset(
    {RUN, START, STOP, SAVE, ACCEPT, LEADER_SAVED, RUNG, ENDED, UNREADABLE, COMPILED, RECEIPT, LEFT, DONE, OBSERVED}
    | {ALARM, ASK_AGAIN}
)


def step_folder(step: int) -> str:
    """The name of a checkpoint's folder, on the disk and in the bucket."""
    return f"step_{step:08d}"


def step_of(folder: str) -> int | None:
    """The step in the name of a checkpoint's folder; None if no such folder has the name."""
    match = re.fullmatch(r"step_(\d{8})", folder)
    return int(match[1]) if match else None
