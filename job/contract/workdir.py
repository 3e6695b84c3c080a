"""Names in a run's work folder: of messages between supervisor and trainer, and of results.

Uploaded files have the same names below the run's prefix (bucket.py).
"""

from __future__ import annotations

import re

RUN = "run.json"

# Messages from the supervisor to the trainer.
START = "start.json"  # the rung at which a waiting trainer begins
STOP = "stop.json"
SAVE = "save.json"
ACCEPT = "accept.json"  # train on this node, because enough nodes were refused
LEADER_SAVED = "leader_saved.json"  # with several nodes: the leader's newest complete checkpoint

# Messages from the trainer to the supervisor.
FATAL = "fatal.json"
RUNG = "rung.json"
ENDED = "ended.json"  # the ranks' exit code, which torchrun cannot pass on
UNREADABLE = "unreadable.json"
PREFLIGHT = "preflight.json"
COMPILED = "compiled.json"
# With several nodes, each node's first rank writes this: the steps that are done, and the seconds per step before it
# needs other nodes.
STEPPED = "stepped"
# with several nodes, for the node: all waiting nodes end, and nodes are requested from AWS again later
ASK_AGAIN = "ask_again.json"
LEFT = "left.json"  # the end of a command
OBSERVED = "observed.json"  # the observations of a command's start
ALARM = "alarm.json"  # a warning for people
LOCK = "lock"  # the lock of the trainer that uses the folder

# Results of the run.
METRICS = "metrics.jsonl"
LOG = "job.log"
RESULTS = "results.json"
RECEIPT = "receipt.json"
HANDED_ON = "handed_on.json"  # in a stage's final folder: the files that later stages may take, with their hashes
DONE = "done.json"  # how the run ended; the node uploads this file if the supervisor could not

# Folders.
DATA = "data"  # the dataset
INPUTS = "inputs"  # base weights
CHECKPOINTS = "ckpt"
STAGES = "stages"  # *.jsonl, one line per finished piece of work
EXPORTS, FINAL = "exports", "final"  # folders of models: those at each phase's start and end, and the final model
SCALARS = "tb"  # event files for TensorBoard
GRAPHS = "compile_cache"
TRACKED = "tracked"  # the files of W&B or MLflow
PACKAGES = "packages"  # packages that the image does not have
# a command's folders, which are all that the command's container can see: CODE, KEPT, OUTPUTS, STATE, NAMED
USER = "user"
CODE, KEPT, OUTPUTS, STATE, NAMED = "code", "checkpoints", "outputs", "state", "inputs"
# Requests of the supervisor's container and the node's answers. The training process can read them.
CONTROL = "control"
SPENT = "control/spent.json"  # the run's cost, for the log, the node's timer and its messages
CONTAINER, CONTAINED = "container.json", "contained.json"  # files below CONTROL
# below CONTROL: the folder of scripts and pipes, which the command's container can see
SCRIPTS, FIRST = "job", "first.sh"
WATCHER = "control/watcher"  # a folder with a socket, which the container that watches the command's processes can see

STEPS = "step_*"  # the folders of checkpoints, as step_folder names them

# Files in the folder that are not results.
OWN = frozenset(
    {RUN, START, STOP, SAVE, ACCEPT, LEADER_SAVED, RUNG, ENDED, UNREADABLE, COMPILED, RECEIPT, LEFT, DONE, OBSERVED}
    | {ALARM, ASK_AGAIN}
)


def step_folder(step: int) -> str:
    """The name of a checkpoint's folder, on the disk and in the bucket."""
    return f"step_{step:08d}"


def step_of(folder: str) -> int | None:
    """The step in the name of a checkpoint's folder; None if this is not the name of such a folder."""
    match = re.fullmatch(r"step_(\d{8})", folder)
    return int(match[1]) if match else None
