"""A model of one number, saved every hundred steps, which goes on from the last file that is there."""

import pathlib
import sys

import torch

folder = pathlib.Path(sys.argv[1])
saved = sorted(folder.glob("step-*.pt"), key=lambda path: int(path.stem[5:]))
step, weight = torch.load(saved[-1]) if saved else (0, torch.zeros(1))
while step < 10_000:
    weight, step = weight + 0.01 * (1 - weight), step + 1
    print(f"step {step} loss {float((1 - weight) ** 2):.6f}", flush=True)
    if step % 100 == 0:
        torch.save((step, weight), folder / f"step-{step}.pt")
