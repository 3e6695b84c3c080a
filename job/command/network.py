"""Measures how fast nodes reach one another before a command starts, by the torch and NCCL of its own image."""

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
# torchrun may not be on the path, as in an environment that nobody has activated
LAUNCHER = (
    "if command -v torchrun > /dev/null; then set -- torchrun; elif python3 -c 'import torch' 2> /dev/null; then"
    ' set -- python3 -m torch.distributed.run; else exit {}; fi; exec "$@"'
)
NO_TORCH = 3
FURTHER = 500  # the difference to the command's port, so that the command's ranks never meet those of a pre-flight


def command(scripts: Scripts, values: Mapping[str, str | int]) -> str:
    """The command line in the command's container, with as many ranks as it has GPUs."""
    path = scripts.put(PROGRAM, Path(between.__file__).read_bytes())
    flags = f"--nnodes {values['nodes']} --node-rank {values['node_rank']} --nproc-per-node {values['gpus']}"
    flags += f" --master-addr {values['master']} --master-port {int(values['port']) + FURTHER} --max-restarts 0"
    return f"{LAUNCHER.format(NO_TORCH)} {flags} {shlex.quote(str(path))}"


def read(code: int, lines: Sequence[str], gbps: float, say: Callable[[str], None]) -> Preflight:
    """The result of the measurement. If it failed, no node is refused. `gbps`: rate of its cards; 0: not known."""
    for line in lines:
        with suppress(ValueError, KeyError, TypeError):
            result = json.loads(line.partition(between.TOLD)[2])
            gb_s, transport = float(result["gb_s"]), str(result["transport"])
            say(f"pre-flight: {gb_s:.1f} GB/s from a node to the others over {transport or 'an unnamed transport'}")
            return Preflight(
                problems=tuple(between.judge(gb_s, gbps, transport)), between_gb_s=gb_s, transport=transport
            )
    why = "the image has no torch" if code == NO_TORCH else f"it ended with {code}: {''.join(lines[-1:])}"
    say(f"warning: how fast the nodes reach one another is not known: {why}")
    return Preflight()
