"""What the copy of a large checkpoint costs a user's script beside it, and how soon a new start has it back: a minute.

    python bench/own_snapshot.py [MB]

The script steps every 10 ms and notes when; it saves once, as one file. Its longest step beside the copy is held
against its longest one before the save. Then the host is lost, and the next start puts the checkpoint back.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from tests.job.command_world import PYTHON, CommandJob, kill, parameters  # noqa: E402 - of the tests

SCRIPT = """
import json, os, sys, time
print("began", time.time())
folder, size, notes = sys.argv[1], int(sys.argv[2]), []
done = max([int(name[5:-4]) for name in os.listdir(folder) if name.endswith(".bin")], default=0)
part = os.urandom(1 << 20)
for step in range(done + 1, done + 2001):
    time.sleep(0.01)
    notes.append(time.time())
    if step % 20 == 0:
        print("step", step, "loss 1")
    if step == 300:
        with open(f"{folder}/ckpt-{step}.bin", "wb") as file:
            for _ in range(size):
                file.write(part)
        print("saved", time.time())
        notes.append(time.time())
    if step % 100 == 0:
        json.dump(notes, open(os.path.join(os.environ["GPUFLEET_OUTPUTS"], "notes"), "w"))
"""


def main() -> None:
    """Its figures, a line each."""
    megabytes = int(sys.argv[1]) if len(sys.argv) > 1 else 1500
    with tempfile.TemporaryDirectory() as folder:
        code = Path(folder) / "code"
        code.mkdir()
        (code / "train.py").write_text(SCRIPT)
        told = parameters(
            f"{PYTHON} train.py {{checkpoints}} {megabytes}",
            checkpoint={"each": ["ckpt-{step}.bin"]},
            progress={"stdout": [r"step (?P<step>\d+)"]},
        )
        job = CommandJob(Path(folder) / "w", told, code)
        process = job.start()
        try:
            job.wait_for(job.commits, process, "a checkpoint")
            committed = time.time()
            time.sleep(4)
        finally:
            kill(process)
        found = re.search(r"MB, copied in ([\d.]+) s", job.log)
        copied_s = float(found[1]) if found else 0.0
        saved = float(re.findall(r"saved ([\d.]+)", job.log)[0])
        notes = json.loads((job.workdir / "user" / "outputs" / "notes").read_text())
        steps = [(after, after - before) for before, after in pairwise(notes)]
        say(f"{megabytes} MB, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
        say(f"from its last byte to the commit {committed - saved:.1f} s, of which the copy {copied_s:.1f} s")
        told_of = {
            "before the save": steps[:290],
            "beside the copy": [each for each in steps if committed - copied_s <= each[0] <= committed],
            "afterwards": [each for each in steps if each[0] > committed],
        }
        for name, inside in told_of.items():
            took = [1e3 * seconds for _, seconds in inside] or [0.0]
            say(f"steps {name}: {len(inside)}, median {median(took):.1f} ms, longest {max(took):.0f} ms")
        began = time.time()
        process = job.start()
        try:
            job.wait_for(lambda: len(re.findall(r"began ([\d.]+)", job.log)) > 1, process, "its second start")
        finally:
            kill(process)
        again = float(re.findall(r"began ([\d.]+)", job.log)[1])
        say(f"host's start to the script's first line, checkpoint put back: {again - began:.1f} s")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
