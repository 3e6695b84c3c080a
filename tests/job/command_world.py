"""A command of a user's own in a work folder, run by the real host or under a supervisor, as processes from here."""

from __future__ import annotations

import hashlib
import io
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpufleet.job import atomic
from gpufleet.job.contract import commit
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.messages import Message
from gpufleet.job.contract.run import config_digest
from gpufleet.job.kind import convert
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.kind.job import require
from tests.dates import skip_where_the_clock_is_moved
from tests.job import runs
from tests.repository import ROOT
from tests.waiting import T, wait_for

OWN_CODE = Path(__file__).parent / "own_code"
PYTHON = shutil.which("python3", path="/usr/bin:/usr/local/bin") or sys.executable
HOST = "import sys; from gpufleet.job.command.__main__ import main; sys.exit(main())"
SUPERVISOR = """
import pathlib, runpy, sys, time
run_json = pathlib.Path(sys.argv[1])
passed, real = run_json.with_name("passed"), time.clock_gettime
time.clock_gettime = lambda clock: real(clock) + (float(passed.read_text()) if passed.exists() else 0.0)
runpy.run_module("gpufleet.job", run_name="__main__", alter_sys=True)
"""
STEP_LINE = r"^step (?P<step>\d+) loss (?P<loss>[\d.]+)"

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
    require(config)
    return json.loads(json.dumps(asdict(config)))  # type: ignore[no-any-return]


def of_format(name: str, more: str = "", **sections: Any) -> dict[str, Any]:
    """The miniature script of a convention, run with `more` arguments."""
    if name == "file":  # whose step the lines tell that were printed when it was written
        skip_where_the_clock_is_moved("moves the times of no files")
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

    def __init__(self, workdir: Path, parameters: dict[str, Any], code: Path = OWN_CODE, *, changed: str = "") -> None:
        """`changed`: Python code that changes this host."""
        self.workdir, self.parameters, self.changed = workdir, parameters, changed
        self.environment: dict[str, str] = {}  # of the host, beside its own
        self.digest = config_digest("command", parameters)
        self.tree = runs.tree(job={"experiment": "command", "parameters": parameters})
        runs.place(workdir, self.tree)
        shutil.copytree(code, workdir / "user" / "code", dirs_exist_ok=True)

    def start(self) -> subprocess.Popen[bytes]:
        """The host, its output in host.log."""
        with (self.workdir / "host.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", f"{self.changed}\n{HOST}", str(self.workdir)],
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
            wait_for("the end of the host", lambda: process.poll() is not None, log=lambda: self.log)
            return process.wait()
        finally:
            kill(process)

    def wait_for(self, seen: Callable[[], object], process: subprocess.Popen[bytes], what: str = "its turn") -> None:
        wait_for(what, seen, process=process, log=lambda: self.log)

    def wait_for_line(self, text: str, process: subprocess.Popen[bytes]) -> None:
        self.wait_for(lambda: text in self.log, process, f"{text!r} in its log")

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


class SupervisedNode:
    """One node: a supervisor, and what it starts."""

    def __init__(self, folder: Path, run: dict[str, Any], instance: str, **environment: str) -> None:
        self.bucket, self.workdir = folder / "bucket", folder / instance
        run_json = runs.place(self.workdir, run)
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISOR, str(run_json)],
            cwd=ROOT,
            env=runs.environment_of(self.bucket, instance, **environment),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )

    @property
    def log(self) -> str:
        path = self.workdir / "job.log"
        return path.read_text() if path.exists() else ""

    def wait_for(self, what: str, seen: Callable[[], T]) -> T:
        return wait_for(what, seen, process=self.process, log=lambda: self.log)

    def let_pass(self, seconds: float) -> None:
        """So many seconds go by at once for the supervisor."""
        atomic.write_bytes(self.workdir / "passed", str(seconds).encode())

    def code(self) -> int:
        wait_for("the end of the run", lambda: self.process.poll() is not None, log=lambda: self.log)
        return self.process.wait()

    def lose(self) -> None:
        """The machine is gone."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def step(self) -> int:
        """The newest that it has told."""
        path = self.workdir / "metrics.jsonl"
        found = atomic.objects(path.read_bytes()) if path.exists() else []
        return int(found[-1]["step"]) if found else 0

    def manifests(self) -> list[int]:
        return sorted(int(path.parent.name[5:]) for path in (self.bucket / "r1" / "ckpt").glob("step_*/manifest.json"))

    def stored(self, key: str) -> Any:
        return json.loads((self.bucket / "r1" / key).read_text())


def run_of(folder: Path, parameters: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """A run of the command, whose script is where it lies: nothing is shipped."""
    command = re.sub(r"(\w+\.py) --out", rf"{OWN_CODE}/\1 --out", parameters["command"])
    tree = runs.tree(job={"experiment": "command", "parameters": {**parameters, "command": command}}, **changes)
    return runs.with_files(tree, folder / "bucket", {"dataset.json": b'{"schema": 1, "files": []}'})


def processes_in(folder: Path) -> list[int]:
    """Those whose current directory lies there: what a command starts keeps its own, in any session."""
    return [int(link.parent.name) for link in Path("/proc").glob("[0-9]*/cwd") if _leads_into(link, folder)]


def _leads_into(link: Path, folder: Path) -> bool:
    try:
        return link.resolve(strict=True).is_relative_to(folder)
    except OSError:
        return False


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
