"""Names of environment variables: from the node to the container's process, and from job/command to a command."""

from __future__ import annotations

from collections.abc import Mapping

RUN_URI = "GPUFLEET_RUN_URI"  # s3://BUCKET/RUN, or a folder, for the run's files
INSTANCE_ID, INSTANCE_TYPE = "GPUFLEET_INSTANCE_ID", "GPUFLEET_INSTANCE_TYPE"
ZONE = "GPUFLEET_ZONE"
CAPACITY = "GPUFLEET_CAPACITY"  # this node's market, spot or on-demand, if the run may use both
LAUNCHED_AT = "GPUFLEET_LAUNCHED_AT"  # UTC, ISO
# for a stage on the node of the stage before it: when that one ended (UTC, ISO), and the machine's age at LAUNCHED_AT
SINCE, OLDER_S = "GPUFLEET_SINCE", "GPUFLEET_OLDER_S"
NODE_UPTIME = "GPUFLEET_NODE_UPTIME"  # the machine's uptime in seconds when the node's program began
# The supervisor sets this for its child processes: the time at which the machine booted, in epoch seconds by the
# machine's clock.
BOOTED_AT = "GPUFLEET_BOOTED_AT"
PULLED_S = "GPUFLEET_PULLED_S"  # seconds that the node took to pull the images
GBPS = "GPUFLEET_GBPS"  # rate in Gbit/s of the network cards between nodes
ADDRESS = "GPUFLEET_ADDRESS"  # with several nodes: the address at which the others reach this node
JOB_CONTAINER = "GPUFLEET_JOB_CONTAINER"  # 1: the node starts a container for the training process on request
# If there are no containers: the folders of a command's own programs; that of its Python comes first.
USER_PATH = "GPUFLEET_USER_PATH"
COMMAND = {  # values that a command gets, each as GPUFLEET_<name>
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
INPUT = "GPUFLEET_INPUT_"  # followed by the input's name in capitals
ENDPOINT = "AWS_ENDPOINT_URL"  # the address of AWS's services, which every SDK reads
SECRET = "GPUFLEET_SECRET_"  # followed by a secret's name: in a rehearsal, the variable with the secret's value


def tracker_id(stack: str, run: str) -> str:
    """The id of a run for W&B and MLflow, the same in every attempt. W&B allows no slash in it."""
    return f"{stack}-{run.replace('/', '-')}"


def is_rehearsed(environ: Mapping[str, str]) -> bool:
    """Whether AWS is embedded in this machine, at a loopback address."""
    return "://127." in environ.get(ENDPOINT, "")
