"""Several processes: a parent that starts others, and what each does at a signal. Says who got it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from job import save


def tell(text):
    return os.write(1, f"{text}\n".encode())


def rank(number, kind, folder):
    """Saves at the signal, and ends."""
    asked = []
    signal.signal(kind, lambda *_: asked.append(tell(f"rank {number} was signalled")))
    for step in range(1, 1_000_000):
        time.sleep(0.02)
        if number == 0:
            tell(f"step {step} loss 1.0")
        if asked:
            if number == 0:
                save(folder / f"ckpt-{step}.pt", step)
            tell(f"rank {number} has seen {len(asked)}")
            return


def launcher(kind, catches):
    """As torchrun: two ranks with an environment of their own. Passes the signal on where it catches it."""
    words = [sys.executable, __file__, sys.argv[1], "rank", sys.argv[3]]
    ranks = [subprocess.Popen([*words, str(each)], env={**os.environ, "RANK": str(each)}) for each in range(2)]
    if catches:
        signal.signal(
            kind, lambda *_: tell("the launcher was signalled") and [each.send_signal(kind) for each in ranks]
        )
    for each in ranks:
        each.wait()
    tell("the launcher ends well")


def again(kind, folder):
    """As Lightning without a launcher: rank 0 starts the same program once more, as rank 1."""
    if "LOCAL_RANK" in os.environ:
        rank(1, kind, folder)
        return
    other = subprocess.Popen([sys.executable, *sys.argv], env={**os.environ, "LOCAL_RANK": "1"})
    rank(0, kind, folder)
    other.wait()


def loader(kind, folder):
    """As a script with a data loader: a forked worker that would take the script down with it."""
    worker = os.fork()
    if worker == 0:
        signal.signal(kind, lambda *_: os._exit(tell("the worker was signalled") or 1))
        while os.getppid() != 1:
            time.sleep(0.05)
        os._exit(0)
    signal.signal(signal.SIGCHLD, lambda *_: os._exit(tell("the script fell with its worker") or 9))
    rank(0, kind, folder)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.kill(worker, signal.SIGKILL)


if __name__ == "__main__":
    folder, part, kind = Path(sys.argv[1]), sys.argv[2], signal.Signals[f"SIG{sys.argv[3]}"]
    if part == "rank":
        rank(int(sys.argv[4]), kind, folder)
    elif part == "again":
        again(kind, folder)
    elif part == "loader":
        loader(kind, folder)
    else:
        launcher(kind, part == "launcher-that-passes-on")
