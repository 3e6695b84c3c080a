"""The user's own package called job: files in pieces, steps, signals."""

import argparse
import hashlib
import io
import json
import pickle
import signal
import time
import zipfile
from pathlib import Path

import infra

PIECES = 8


def content(name, step, size=4096):
    """Bytes that no other name and step have."""
    return hashlib.sha256(f"{name} {step}".encode()).digest() * (size // 32)


def save(path, step, size=4096):
    """In pieces, in place, as torch.save writes: a zip where its name asks for one, raw bytes else."""
    body = content(path.name, step, size)
    if path.suffix in (".pt", ".pth", ".ckpt"):
        made = io.BytesIO()
        with zipfile.ZipFile(made, "w") as file:
            file.writestr("data", body)
        body = made.getvalue()
    if path.suffix == ".json":
        body = json.dumps({"step": step, "pad": "x" * 500}).encode()
    if path.name == ".metadata":
        body = pickle.dumps({"body": body})
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(body), max(1, len(body) // PIECES)):
            file.write(body[start : start + max(1, len(body) // PIECES)])
            time.sleep(infra.PAUSE)


class Loop:
    """Steps, with a line and maybe a save for each."""

    def __init__(self, write, line=lambda step, loss: f"step {step} loss {loss:.4f}", end="\n"):
        parser = argparse.ArgumentParser()
        parser.add_argument("--out", type=Path, required=True)
        parser.add_argument("--steps", type=int, default=20)
        parser.add_argument("--every", type=int, default=5)
        parser.add_argument("--resume", type=int, default=0)
        parser.add_argument("--step-s", type=float, default=0.02)
        parser.add_argument("--pause", type=float, default=infra.PAUSE)
        parser.add_argument("--catch", action="store_true")
        self.given = parser.parse_args()
        infra.PAUSE = self.given.pause
        self.write, self.line, self.end, self.asked = write, line, end, False
        if self.given.catch:
            signal.signal(signal.SIGTERM, self.stop)

    def stop(self, *_):
        self.asked = True

    def run(self):
        given = self.given
        for step in range(given.resume + 1, given.steps + 1):
            time.sleep(given.step_s)
            print(self.line(step, 1 / step), end=self.end, flush=True)
            if self.asked or step % given.every == 0:
                self.write(given.out, step)
            if self.asked:
                return
