"""Measures how fast the nodes of a run reach one another: all ranks at once sum a tensor across nodes.

A ready-made job measures this before its first step. For a user's command, the module runs as a program in the
command's image before the command starts, because it must measure with the torch, NCCL and network libraries of this
image. So it imports nothing of gpufleet, and runs on Python 3.8.
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

# a node is refused below this share of the data sheet's rate; TCP, which NCCL uses without a warning if EFA fails, is
# far below it
SHARE = 0.4
BYTES = 64 << 20
# rounds, and sums per round; the best round is used, because a good network may be busy for a moment, and the first
# round is slow
BEST_OF, TIMES = 4, 3
TOLD = "gpufleet-between "  # the prefix of the line that the program prints
WAIT_S = 900.0  # seconds to wait for the ranks of the other nodes, whose set-up may take longer
# finds the transport in NCCL's log, which has such a line for each channel between two nodes (2.4 to 2.31,
# transport/net.cc)
VIA = re.compile(r"via NET/([^/\n]+)/")


def judge(gb_s: float, gbps: float, transport: str = "") -> list[str]:
    """Why these nodes are refused because of a slow network; empty if they are not. `gbps`: the rate of their network
    cards, 0 if unknown.
    """
    if not gbps or gb_s * 8 >= SHARE * gbps:
        return []
    over, share = f" over {transport}" if transport else "", gb_s * 8 / gbps
    return [
        f"EFA is not in use: {gb_s:.1f} GB/s from a node to the others{over}, {share:.0%} of its cards' {gbps:g} Gb/s;"
        f" at least {SHARE:.0%} is expected"
    ]


def gb_s(group: Any, device: Any, ranks_per_node: int, nodes: int) -> float:
    """The GB/s that a node sends to the others. `group` consists of this rank and of the rank with the same local
    number on each other node.
    """
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
