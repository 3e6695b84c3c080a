"""Measures how fast the nodes of a run reach one another: all ranks at once add up a tensor across nodes.

A ready-made job measures this before its first step. Before a command, the module runs as a program in the command's
image, whose torch, NCCL and network libraries it must measure. So it imports nothing of gpufleet, and runs on Python
3.8.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

SHARE = 0.4  # least share of the data sheet's rate; TCP, to which NCCL falls back silently, reaches far less
BYTES = 64 << 20
BEST_OF, TIMES = 4, 3  # a sound network may be busy for a moment, and the first round warms it up
TOLD = "gpufleet-between "  # the prefix of the line that the program prints
WAIT_S = 900.0  # seconds to wait for the ranks of the other nodes, whose set-up may take longer
VIA = re.compile(r"via NET/([^/\n]+)/")  # in NCCL's log, per channel between two nodes (2.4 to 2.31, transport/net.cc)


def judge(gb_s: float, gbps: float, transport: str = "") -> list[str]:
    """Why these nodes are refused for a slow network, on cards of `gbps` (0 if unknown); empty if they are not."""
    if not gbps or gb_s * 8 >= SHARE * gbps:
        return []
    over, share = f" over {transport}" if transport else "", gb_s * 8 / gbps
    return [
        f"EFA is not in use: {gb_s:.1f} GB/s from a node to the others{over}, {share:.0%} of its cards' {gbps:g} Gb/s;"
        f" at least {SHARE:.0%} is expected"
    ]


def gb_s(group: Any, device: Any, ranks_per_node: int, nodes: int) -> float:
    """The GB/s that a node sends to the others. `group` has this rank and the same local rank of each other node."""
    import torch
    import torch.distributed as dist

    sent, best = torch.ones(BYTES // 4, device=device), float("inf")
    for _ in range(BEST_OF):
        began = time.perf_counter()
        for _ in range(TIMES):
            dist.all_reduce(sent, group=group)
        if sent.is_cuda:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - began) / TIMES)
    return ranks_per_node * BYTES * 2 * (nodes - 1) / nodes / best / 1e9


def main() -> None:
    """Runs one of the ranks that a launcher started on all nodes; the first one of each node prints the result."""
    logs = tempfile.mkdtemp()
    os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS="INIT", NCCL_DEBUG_FILE=f"{logs}/%p")
    import torch
    import torch.distributed as dist

    local, here = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    is_cuda = torch.cuda.is_available()
    device = torch.device("cuda", local) if is_cuda else torch.device("cpu")
    if is_cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if is_cuda else "gloo", timeout=timedelta(seconds=WAIT_S))
    world = dist.get_world_size()
    groups = [dist.new_group(list(range(first, world, here))) for first in range(here)]
    best_gb_s = torch.tensor([gb_s(groups[local], device, here, world // here)], device=device)
    dist.all_reduce(best_gb_s, op=dist.ReduceOp.MAX)
    if local == 0:
        named = {name for log in Path(logs).iterdir() for name in VIA.findall(log.read_text(errors="replace"))}
        result = {"gb_s": round(best_gb_s.item(), 2), "transport": ", ".join(sorted(named))}
        sys.stdout.write(f"{TOLD}{json.dumps(result)}\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
