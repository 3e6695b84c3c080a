"""Converts a command that clusters start on each of several nodes into the form of a definition."""

from __future__ import annotations

import re
from typing import NamedTuple

# Settings of torchrun, `accelerate launch` and Lightning's trainers; Lightning reads the rest from the environment.
_NODES = r"nnodes|num[-_]machines|(?:trainer\.)?num[-_]nodes"
# PyTorch's ImageNet example, and the many scripts based on it, start a node's processes themselves. There `world-size`
# is the number of nodes, and `rank` is the number of the node.
_SPAWNS = {r"world[-_]size": "{nodes}", "rank": "{node_rank}", r"dist[-_]url": "tcp://{master}:{port}"}
_WORDS = {
    r"node[-_]rank|machine[-_]rank": "{node_rank}",
    r"master[-_]addr|main[-_]process[-_]ip|main[-_]address": "{master}",
    r"master[-_]port|main[-_]process[-_]port|main[-_]port": "{port}",
    r"rdzv[-_]endpoint": "{master}:{port}",
    r"rdzv[-_]id": "{run}",  # the usual $RANDOM differs on each node, and a cluster's job number is not set here
}
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b")
_PYTHON = re.compile(r"python3? (?=-m |[^-])")
_DEEPSPEED = re.compile(r"(?<!\S)deepspeed (?!.*--no_ssh\b)")
# With --no_ssh each node starts its own ranks; DeepSpeed then reads only the number of hosts and their slots.
_BY_DEEPSPEED = (
    "deepspeed --hostfile \"$(seq -f 'node-%g slots={gpus}' {nodes} > {state}/hosts; echo {state}/hosts)\" --no_ssh"
    " --node_rank {node_rank} --master_addr {master} --master_port {port} "
)
_STATIC = {"{node_rank}": "--node-rank {node_rank}", "{master}": "--master-addr {master} --master-port {port}"}
# Lightning takes its ranks from torchrun. Each process then has WORLD_SIZE, by which gpufleet sees that the nodes met.
_BY_TORCHRUN = f"torchrun --nnodes {{nodes}} {' '.join(_STATIC.values())} --nproc-per-node {{gpus}} "
_BY_ENVIRONMENT = {"NODE_RANK": "{node_rank}", "MASTER_ADDR": "{master}", "MASTER_PORT": "{port}"}


class SeveralNodes(NamedTuple):
    """`command` as a definition has it, and its `environment`, for `nodes` nodes (0 if the text does not say)."""

    command: str
    nodes: int
    environment: dict[str, str]


def for_several(command: str, coded: object) -> SeveralNodes | None:
    """Converts the command; None if it is for one node. `coded`: the number of nodes that the code gives its framework,
    if it is a number.
    """
    spawns = "--multiprocessing-distributed" in command
    match = _value(r"world[-_]size" if spawns else _NODES).search(command)
    value = match["value"] if match is not None else coded if isinstance(coded, str) else "1"
    if value in ("1", "1:1"):
        return None
    most = value.rpartition(":")[2]
    count = int(most) if most.isdigit() else 0
    if _DEEPSPEED.search(command):
        command = _value(rf"{_NODES}|num_gpus|hostfile|node_rank|master_addr|master_port").sub("", command)
        command = _DEEPSPEED.sub(_BY_DEEPSPEED, re.sub(" {2,}", " ", command), 1)
        return SeveralNodes(command, count, {})
    command = _value(_NODES).sub(r"\g<flag>{nodes}", command)
    for flags, word in (_SPAWNS if spawns else _WORDS).items():
        command = _value(flags).sub(rf"\g<flag>{word}", command)
    if "accelerate" in command:
        command = _value(r"num[-_]processes").sub(r"\g<flag>{ranks}", command)
    meets = re.search(r"--rdzv[-_]backend[= ]+(?!static)", command)
    if _TORCHRUN.search(command) and not meets:
        lacks = [words for word, words in _STATIC.items() if word not in command]
        command = command.replace("{nodes}", " ".join(["{nodes}", *lacks]), 1)
    if "{node_rank}" not in command and not meets:
        command = _PYTHON.sub(_BY_TORCHRUN, command, 1)
        command = re.sub(r"^(?=litgpt )", f"{_BY_TORCHRUN}--no-python ", command)
    by_environment = "{node_rank}" not in command and not meets
    return SeveralNodes(command, count, dict(_BY_ENVIRONMENT) if by_environment else {})


def _value(flags: str) -> re.Pattern[str]:
    return re.compile(rf"(?P<flag>(?<!\S)--(?:{flags})[= ]+)(?P<value>\"[^\"]*\"|\$\([^)]*\)|\$\{{[^}}]*\}}\S*|\S+)")
