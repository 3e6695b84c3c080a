"""A command of a user's own in a work folder, run by the real host as processes of this machine."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import runs
from repository import ROOT

from gpufleet.job import atomic
from gpufleet.job.contract import commit
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.messages import Message
from gpufleet.job.contract.run import config_digest
from gpufleet.job.spec import convert
from gpufleet.job.spec.command import CommandConfig

OWN_CODE = Path(__file__).parent / "own_code"
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
STEP_LINE = r"^step (?P<step>\d+) loss (?P<loss>[\d.]+)"
PATIENCE_S = 60.0

# By convention: script, section checkpoint, what a resume adds.
FORMATS: dict[str, tuple[str, dict[str, Any]]] = {
    "hf-trainer": ("hf", {"format": "hf-trainer"}),
    "lightning": ("lightning", {"format": "lightning"}),
    "litgpt": ("litgpt", {"format": "litgpt"}),
    "nanochat": ("nanochat", {"format": "nanochat"}),
    "dcp": ("dcp", {"format": "dcp"}),
    "file": ("single", {"format": "file", "each": ["ckpt.pt"], "rewritten": True}),
}


def parameters(command: str, **sections: Any) -> dict[str, Any]:
    """job.parameters of run.json, checked as the program and the supervisor check them."""
    tree = {
        "command": command,
        "device": "cpu",
        "checkpoint": {"each": ["ckpt-{step}.pt"]},
        "progress": {"stdout": [STEP_LINE]},
        **sections,
    }
    config = convert.from_json(CommandConfig, tree, "job", CommandConfig())
    config.require()
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


def of_format(name: str, more: str = "", **sections: Any) -> dict[str, Any]:
    """The miniature script of a convention, run with `more` arguments."""
    script, checkpoint = FORMATS[name]
    progress = {} if name in ("hf-trainer", "lightning", "litgpt", "nanochat") else {"stdout": [STEP_LINE]}
    return parameters(
        f"{PYTHON} {script}.py --out {{checkpoints}} {more}".rstrip(),
        **{
            "checkpoint": checkpoint,
            "progress": progress,
            "resume": {"args": "--resume={step}"},
            **sections,
        },
    )


def as_restored(step: int, **lines: Any) -> Commit:
    """A checkpoint as a reader of lines is given it."""
    return Commit(step=step, config_sha256="0" * 64, goes_on_from=step, lines=lines)


class CommandJob:
    """One node's work folder. `start` gives the host's process."""

    def __init__(self, workdir: Path, parameters: dict[str, Any], code: Path = OWN_CODE) -> None:
        self.workdir, self.parameters = workdir, parameters
        self.environment: dict[str, str] = {}  # of the host, beside its own
        self.digest = config_digest("command", parameters)
        self.tree = runs.tree(job={"experiment": "command", "parameters": parameters})
        runs.place(workdir, self.tree)
        shutil.copytree(code, workdir / "user" / "code", dirs_exist_ok=True)

    def start(self) -> subprocess.Popen[bytes]:
        """The host, its output in host.log."""
        with (self.workdir / "host.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "gpufleet.job.command", str(self.workdir)],
                cwd=ROOT,
                env={**os.environ, **self.environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def run(self, during: Callable[[], object] = lambda: None) -> int:
        """The host's exit code; `during` is called once it has begun."""
        return self.finish(self.start(), during)

    def finish(self, process: subprocess.Popen[bytes], during: Callable[[], object] = lambda: None) -> int:
        try:
            during()
            return process.wait(PATIENCE_S)
        finally:
            kill(process)

    def wait_for(self, seen: Callable[[], object], process: subprocess.Popen[bytes] | None = None) -> None:
        until = time.monotonic() + PATIENCE_S
        while not seen():
            assert time.monotonic() < until, f"never got there:\n{self.log}"
            assert process is None or process.poll() is None, f"ended early:\n{self.log}"
            time.sleep(0.01)

    def tell(self, message: Message) -> None:
        message.write(self.workdir)

    @property
    def log(self) -> str:
        path = self.workdir / "host.log"
        return path.read_text() if path.exists() else ""

    @property
    def checkpoints_folder(self) -> Path:
        return self.workdir / "user" / "checkpoints"

    def commits(self) -> list[Commit]:
        found = [commit.read(path) for path in sorted((self.workdir / "ckpt").glob("step_*"))]
        return [each for each in found if each is not None]

    def steps(self) -> list[int]:
        return [each.step for each in self.commits()]

    def metrics(self) -> list[dict[str, Any]]:
        path = self.workdir / "metrics.jsonl"
        return atomic.objects(path.read_bytes()) if path.exists() else []


def kill(process: subprocess.Popen[bytes]) -> None:
    """The host, as a node that is lost ends it; its guard ends the command then."""
    if process.poll() is None:
        process.send_signal(signal.SIGKILL)
        process.wait()


def wrong(folder: Path, step: int) -> list[str]:
    """The files of a checkpoint's folder that are not what the miniature scripts write for this step. A file without
    a step in its name says which one it is of.
    """
    found = []
    for path in sorted(each for each in folder.rglob("*") if each.is_file() and each.name != "commit.json"):
        body = path.read_bytes()
        if path.suffix == ".json":
            good = json.loads(body)["step"] == step
        elif path.suffix in (".pt", ".pth", ".ckpt"):
            with zipfile.ZipFile(io.BytesIO(body)) as file:
                inner = file.read("data")
            steps = [step] if path.name != "ckpt.pt" else range(1, 10_000)
            good = any(inner == content(path.name, each) for each in steps)
        elif path.name == ".metadata":
            good = pickle.loads(body) == {"body": content(path.name, step)}
        else:
            good = body == content(path.name, step)
        if not good:
            found.append(path.name)
    return found


def content(name: str, step: int, size: int = 4096) -> bytes:
    """As own_code/job has it."""
    return hashlib.sha256(f"{name} {step}".encode()).digest() * (size // 32)
