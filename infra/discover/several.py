"""Converts a command that clusters start on each of several nodes into the form of a definition."""

from __future__ import annotations

import re
from typing import NamedTuple

# Settings of torchrun, of `accelerate launch`, and of Lightning's trainers, which ask the environment for the rest.
_NODES = r"nnodes|num[-_]machines|(?:trainer\.)?num[-_]nodes"
# PyTorch's ImageNet example and the many scripts based on it start a node's processes themselves, and name the number
# of nodes `world` and the node `rank`.
_SPAWNS = {r"world[-_]size": "{nodes}", "rank": "{node_rank}", r"dist[-_]url": "tcp://{master}:{port}"}
_WORDS = {
    r"node[-_]rank|machine[-_]rank": "{node_rank}",
    r"master[-_]addr|main[-_]process[-_]ip|main[-_]address": "{master}",
    r"master[-_]port|main[-_]process[-_]port|main[-_]port": "{port}",
    r"rdzv[-_]endpoint": "{master}:{port}",
    r"rdzv[-_]id": "{run}",  # $RANDOM differs on each node, and a job number may not be set
}
_TORCHRUN = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b")
_PYTHON = re.compile(r"python3? (?=-m |[^-])")
_DEEPSPEED = re.compile(r"(?<!\S)deepspeed (?!.*--no_ssh\b)")
# Without ssh each node starts its own ranks; of the hosts in the file only their number and slots are read.
_BY_DEEPSPEED = (
    "deepspeed --hostfile \"$(seq -f 'node-%g slots={gpus}' {nodes} > {state}/hosts; echo {state}/hosts)\" --no_ssh"
    " --node_rank {node_rank} --master_addr {master} --master_port {port} "
)
_STATIC = {"{node_rank}": "--node-rank {node_rank}", "{master}": "--master-addr {master} --master-port {port}"}
# Lightning follows torchrun, and each of its processes then has a WORLD_SIZE, which shows that nodes met.
_BY_TORCHRUN = f"torchrun --nnodes {{nodes}} {' '.join(_STATIC.values())} --nproc-per-node {{gpus}} "
_BY_ENVIRONMENT = {"NODE_RANK": "{node_rank}", "MASTER_ADDR": "{master}", "MASTER_PORT": "{port}"}


class SeveralNodes(NamedTuple):
    """`command` for `nodes` nodes (0: its text does not say) in a definition's words, with its `environment`."""

    command: str
    nodes: int
    environment: dict[str, str]


def for_several(command: str, coded: object) -> SeveralNodes | None:
    """`coded`: how many nodes the code gives its framework, if that is a number. Returns None if the command is for one
    node.
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
