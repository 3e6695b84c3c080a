"""What the node gives the container's process besides run.json, and job/command a command: names of environment
variables.
"""

from __future__ import annotations

RUN_URI = "GPUFLEET_RUN_URI"  # s3://BUCKET/RUN, or a folder: what is kept lies there
INSTANCE_ID, INSTANCE_TYPE = "GPUFLEET_INSTANCE_ID", "GPUFLEET_INSTANCE_TYPE"
ZONE = "GPUFLEET_ZONE"
CAPACITY = "GPUFLEET_CAPACITY"  # spot or on-demand, of this node, where the run may use both
LAUNCHED_AT = "GPUFLEET_LAUNCHED_AT"  # UTC, ISO
NODE_UPTIME = "GPUFLEET_NODE_UPTIME"  # seconds since the machine booted, when the node's program began
BOOTED_AT = "GPUFLEET_BOOTED_AT"  # from the supervisor to what it starts: epoch seconds of that boot, by its clock
PULLED_S = "GPUFLEET_PULLED_S"  # how long the node took to pull the images
GBPS = "GPUFLEET_GBPS"  # of the cards by which they meet
ADDRESS = "GPUFLEET_ADDRESS"  # of a run on several nodes: where the others reach this one
JOB_CONTAINER = "GPUFLEET_JOB_CONTAINER"  # 1: the node starts a container for what trains when it is asked to
USER_PATH = "GPUFLEET_USER_PATH"  # without containers: where a command's own programs are, its Python first of all
COMMAND = {  # what a command is told, each as GPUFLEET_<name>
    "run": "GPUFLEET_RUN",
    "attempt": "GPUFLEET_ATTEMPT",
    "gpus": "GPUFLEET_GPUS",
    "checkpoints": "GPUFLEET_CHECKPOINTS",
    "outputs": "GPUFLEET_OUTPUTS",
    "state": "GPUFLEET_STATE",
    "resume_from": "GPUFLEET_RESUME_FROM",
    "resume_step": "GPUFLEET_RESUME_STEP",
    "progress": "GPUFLEET_PROGRESS",
    "stop_file": "GPUFLEET_STOP_FILE",
    "nodes": "GPUFLEET_NODES",
    "node_rank": "GPUFLEET_NODE_RANK",
    "ranks": "GPUFLEET_RANKS",
    "master": "GPUFLEET_MASTER",
    "port": "GPUFLEET_PORT",
}
INPUT = "GPUFLEET_INPUT_"  # and the input's name in capitals
SECRET = "GPUFLEET_SECRET_"  # in a rehearsal, and a secret's name: its value
