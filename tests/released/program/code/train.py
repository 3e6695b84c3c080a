"""A number that nears 1, saved every 20 steps; goes on from the newest file that is there."""

import json
import pathlib
import sys
import time

folder = pathlib.Path(sys.argv[1])
saved = sorted(folder.glob("step-*.json"), key=lambda path: int(path.stem[5:]))
step, weight = json.loads(saved[-1].read_text()) if saved else (0, 0.0)
while step < 300:
    weight, step = weight + 0.01 * (1 - weight), step + 1
    if step % 5 == 0:
        print(f"step {step} loss {(1 - weight) ** 2:.6f}", flush=True)
    if step % 20 == 0:
        (folder / f"step-{step}.json").write_text(json.dumps([step, weight]))
    time.sleep(0.02)  # so that it can be interrupted
