"""A command that turns its own folders into all that could lead whoever works there astray, and what came of it.

It runs in two starts. Before it ends the first it replaces the folder that its checkpoint is put back into, and all
that is written for the second; in the second, all that is looked at, copied, sent and delivered. What is not the
command's lies in WORKDIR/private, under a path that it knows, and must be as it was; its content must be nowhere else.
"""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.job.command_world import PYTHON, parameters

PRIVATE = "nobody but the supervisor has this"
SCRIPT = """
import os, sys, time
from pathlib import Path

K, O, S = (Path(os.environ["GPUFLEET_" + name]) for name in ("CHECKPOINTS", "OUTPUTS", "STATE"))
U, RUN = K.parent, K.parent.parent
JOB, OUT = RUN / "control" / "job", RUN / "private"

def step(number):
    print("step", number, "loss 1", flush=True)

def checkpoint(number, make=lambda folder: (folder / "w.bin").write_text("of the command")):
    folder = K / f"step-{number}"
    folder.mkdir(exist_ok=True)
    make(folder)
    (folder / "done").touch()

def wait_until_seen(what):  # by the host, which looks once a second: `go_on` tells
    while not (S / what).exists():
        time.sleep(0.05)

def link(path, to):
    if path.is_dir() and not path.is_symlink():
        path.rename(path.with_name(path.name + ".moved"))
    path.unlink(missing_ok=True)
    path.symlink_to(to)

step(1)
if "GPUFLEET_RESUME_STEP" not in os.environ:
    checkpoint(2)
    wait_until_seen("first")
    (U / "evil").mkdir()
    link(U / "evil" / "step-2", OUT)
    link(K, U / "evil")
    for name in ("command2.sh", "command2.code", "command2.env", "command2.env.tmp", ".command2.sh.1"):
        link(JOB / name, OUT / "file")
    link(U / "stop.json", OUT / "file")
    link(O / "tb", OUT)
    os.mkfifo(U / "progress.jsonl")
    step(2)
    sys.exit(3)

print("restored", (K / "step-2" / "w.bin").read_text(), K.is_symlink(), flush=True)
link(K / "tokenizer", OUT)
checkpoint(3, lambda folder: link(folder / "w.bin", OUT / "file"))
checkpoint(4, lambda folder: (folder / "n\\u00a0o.bin").write_text("of the command"))
checkpoint(5, lambda folder: (folder / "w.bin").open("wb").truncate(1 << 43))
os.mkfifo(K / "step-2" / "pipe")
checkpoint(6)
(K / "pipes").mkdir()
link(O / "folder", OUT)
link(O / "file", OUT / "file")
link(O / "zero", "/dev/zero")
os.mkfifo(O / "pipe")
(O / ".git").mkdir()
(O / ".git" / "config").write_text("of the command")
(O / "bytes").write_text("of the command")
os.rename(os.fsencode(O / "bytes"), os.fsencode(O) + b"/by\\xfftes")
(O / "result.txt").write_text("of the command")
O.joinpath("tb").unlink()
(O / "tb").mkdir()
(O / "tb" / "large").open("wb").truncate(1 << 42)
os.mkfifo(O / "tb" / "pipe")
link(O / "tb" / "file", OUT / "file")
(O / "tb" / "events").write_text("of the command")
link(U / "progress.jsonl", "/dev/zero")
for number in range(3, 7):
    step(number)
wait_until_seen("second")
step(8)
"""
SEEN = {  # what the log says once all that the command waits for is seen
    "first": ("checkpoint of step 2 is whole",),
    "second": (
        "'step-3/w.bin' is a link to no file of the command's folders",
        "'step-4/n\\xa0o.bin' cannot be an object's name",
        "'step-5/w.bin' is larger than the disk",
        "published step 6",
        "tb/large has 4,398,046,511,104 bytes, and is not sent",
    ),
}


def run_parameters() -> dict[str, Any]:
    """job.parameters of the command."""
    script = SCRIPT.replace("{", "{{").replace("}", "}}")  # else it would be filled in
    return parameters(
        f"{PYTHON} -c '{script}'",
        checkpoint={"each": ["step-{step}/"], "complete": "done", "also": ["tokenizer/"], "heartbeat_s": 0.5},
        resume={"args": "--", "check": "none"},
        exit={"restarts": 1},
    )


def private(workdir: Path) -> Path:
    """A folder that is none of the command's."""
    folder = workdir / "private"
    folder.mkdir(parents=True)
    (folder / "file").write_text(PRIVATE)
    (folder / "file").chmod(0o600)
    return folder


def go_on(workdir: Path, log: Callable[[], str], wait_for: Callable[[str, Callable[[], object]], object]) -> None:
    """Lets the command go on each time when the log says what it waits for."""
    for what, said in SEEN.items():
        wait_for(f"{said} in the log", lambda said=said: all(each in log() for each in said))  # type: ignore[misc]
        (workdir / "user" / "state" / what).touch()


def wrong(workdir: Path, store: Path, log: str) -> list[str]:
    """What has gone wrong, in words."""
    found = []
    (file,) = (workdir / "private").iterdir()
    if (file.read_text(), stat.S_IMODE(file.stat().st_mode)) != (PRIVATE, 0o600):
        found.append(f"a file elsewhere was changed: {file.read_text()[:80]!r}, {file.stat().st_mode:o}")
    for path in (*workdir.rglob("*"), *store.rglob("*")):
        own = (workdir / "user", workdir / "control" / "job", workdir / "private")
        of_command = any(path.is_relative_to(folder) for folder in own)
        if not of_command and path.is_file() and PRIVATE.encode() in path.read_bytes():
            found.append(f"a file elsewhere was taken into {path}")
    sent = {path.relative_to(store).as_posix() for path in store.rglob("*") if path.is_file()}
    checkpoint = {f"ckpt/step_00000006/{name}" for name in ("files/step-6/w.bin", "files/step-6/done", "manifest.json")}
    wanted = {*checkpoint, "final/result.txt", "final/tb/events", "tb/events", "done.json", "receipt.json"}
    found += [f"{name} was not sent" for name in sorted(wanted - sent)]
    found += [f"{name} was sent" for name in sorted(sent) if name.startswith(("final/", "tb/")) and name not in wanted]
    said = (
        "restored of the command False",
        "'final/.git/config': git, shells, editors or tests run or obey",
        "the run ends: finished",
    )
    return found + [f"nothing says: {each}" for each in said if each not in log]
