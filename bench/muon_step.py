"""One optimizer step on FSDP2's shards, over 2 gloo ranks on the CPU: AdamW, torch.optim.Muon, and Muon with owners.

    python bench/muon_step.py [--width 512] [--layers 4] [--steps 5]

The three are timed in turn, so that a noisy machine disturbs all alike; printed is the median of rank 0.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import time
import warnings
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn

from job.experiments.pretrain.model import CharGpt
from job.experiments.pretrain.muon import MUON, OwnedMuon
from job.spec.pretrain import CharModel
from job.train.parallel import meet, shard

RANKS = 2


def main() -> None:
    """Starts the ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(found.getsockname()[1]), WORLD_SIZE=str(RANKS))
    spawn(rank, args=(parser.parse_args(),), nprocs=RANKS)


def rank(number: int, a: argparse.Namespace) -> None:
    """One rank."""
    warnings.filterwarnings("ignore", "DTensor random operators")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=number, world_size=RANKS)
    world = meet("cpu", local_rank=number)
    made: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
        "AdamW (fused)": lambda p: torch.optim.AdamW(p, lr=1e-3, fused=True),
        "torch.optim.Muon on shards": lambda p: torch.optim.Muon(p, lr=1e-3, weight_decay=0.0, **MUON),
        "Muon with owners": lambda p: OwnedMuon(p, lr=1e-3, weight_decay=0.0, **MUON),
    }
    optimizers = {}
    for name, make in made.items():
        module = CharGpt(CharModel(layers=a.layers, width=a.width, head_dim=64))
        shard(module, world, module.blocks, compute=torch.float32, reshard=False)
        hidden = [p for n, p in module.named_parameters() if n.startswith("blocks.")]
        for parameter in hidden:
            parameter.grad = torch.randn_like(parameter)
        optimizers[name] = make(hidden)
        for parameter in hidden:
            if "Muon" in name:
                optimizers[name].state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
    taken: dict[str, list[float]] = {name: [] for name in made}
    for _ in range(a.steps + 1):
        for name, optimizer in optimizers.items():
            world.barrier()
            began = time.perf_counter()
            optimizer.step()
            world.barrier()
            taken[name].append(time.perf_counter() - began)
    if world.first:
        print(f"torch {torch.__version__}, {a.layers} x {a.width}, {RANKS} ranks of 1 thread")  # noqa: T201
        for name, seconds in taken.items():
            print(f"{name:28} {1000 * statistics.median(seconds[1:]):8.1f} ms")  # noqa: T201
    world.close()


if __name__ == "__main__":
    main()
