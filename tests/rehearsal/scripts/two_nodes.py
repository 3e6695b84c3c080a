"""A script of one's own on several nodes, as torchrun starts it. Now and then, and when asked to stop, rank 0 saves, or
with --dcp each rank its part.
"""

import argparse
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

parser = argparse.ArgumentParser()
parser.add_argument("--out", type=Path, required=True)
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--resume", type=Path)
parser.add_argument("--dcp", action="store_true")
args = parser.parse_args()

dist.init_process_group("gloo")
rank, asked = dist.get_rank(), []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
weights, step = torch.zeros(8, dtype=torch.float64), 0
if args.resume and args.dcp:
    state = {"weights": weights, "step": torch.zeros(8)}
    dcp.load(state, checkpoint_id=args.resume)
    step = int(state["step"][0])
elif args.resume:
    state = torch.load(args.resume)
    weights, step = state["weights"], state["step"]


def save() -> None:
    if args.dcp:  # of two tensors, each of which one of two ranks writes
        dcp.save({"weights": weights, "step": torch.full((8,), float(step))}, checkpoint_id=args.out / f"step-{step}")
    elif rank == 0:
        part = args.out / "part"
        torch.save({"weights": weights, "step": step}, part)
        part.replace(args.out / f"ckpt-{step}.pt")


while step < args.steps:
    gradient = torch.arange(8, dtype=torch.float64) * (rank + 1) / (step + 1)
    dist.all_reduce(gradient)
    weights += gradient
    step += 1
    stop = torch.tensor(float(bool(asked)))
    dist.all_reduce(stop)
    sys.stdout.write(f"step {step} loss {1 / step:.4f}\n")
    sys.stdout.flush()
    if stop.item() or step % 40 == 0 or step == args.steps:
        save()
    if stop.item():
        break
    time.sleep(0.1)
if step == args.steps and rank == 0:
    (args.out.parent / "outputs").mkdir(exist_ok=True)
    torch.save(weights, args.out.parent / "outputs" / "weights.pt")
dist.barrier()
