"""Measures how fast the nodes reach one another before a command starts, with the command's own torch and NCCL."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from gpufleet.job import between
from gpufleet.job.command.places import Scripts
from gpufleet.job.contract.messages import Preflight

PROGRAM = "between.py"
# torchrun may be missing on the path, for example if an environment is not activated.
LAUNCHER = (
    "if command -v torchrun > /dev/null; then set -- torchrun; elif python3 -c 'import torch' 2> /dev/null; then"
    ' set -- python3 -m torch.distributed.run; else exit {}; fi; exec "$@"'
)
NO_TORCH = 3
# this is added to the command's port, so that the ranks of the command and those of the measurement never connect to
# each other
FURTHER = 500


def command(scripts: Scripts, values: Mapping[str, str | int]) -> str:
    """The command line that runs in the command's container, with one rank per GPU."""
    path = scripts.put(PROGRAM, Path(between.__file__).read_bytes())
    flags = f"--nnodes {values['nodes']} --node-rank {values['node_rank']} --nproc-per-node {values['gpus']}"
    flags += f" --master-addr {values['master']} --master-port {int(values['port']) + FURTHER} --max-restarts 0"
    return f"{LAUNCHER.format(NO_TORCH)} {flags} {shlex.quote(str(path))}"


def read(code: int, lines: Sequence[str], gbps: float, say: Callable[[str], None]) -> Preflight:
    """The result of the measurement. If the measurement failed, the node is not refused. `gbps`: the rate of the node's
    network cards; 0 if unknown.
    """
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            result = json.loads(line.partition(between.TOLD)[2])
            gb_s, transport = float(result["gb_s"]), str(result["transport"])
            say(f"pre-flight: {gb_s:.1f} GB/s from a node to the others over {transport or 'an unnamed transport'}")
            return Preflight(
                problems=tuple(between.judge(gb_s, gbps, transport)), between_gb_s=gb_s, transport=transport
            )
    why = "the image has no torch" if code == NO_TORCH else f"it ended with {code}: {''.join(lines[-1:])}"
    say(f"warning: the speed between the nodes is unknown: {why}")
    return Preflight()
