"""Runs a command in a copy of its folder, and watches the lines that it prints and the files that it completes.

The user's folder is only read. Of the user's files, the command may write only caches below the home folder.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.infra.discover.lacking import lacking
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.code import ENVIRONMENTS, MIB, files_in
from gpufleet.job.command import processes
from gpufleet.job.command.elsewhere import NO_CHECKPOINT, SKIPPED
from gpufleet.job.command.lines import CONTROL
from gpufleet.job.command.names import FileState
from gpufleet.job.command.places import own_environment
from gpufleet.job.contract.environment import COMMAND
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.kind.command import filled

MOST_MIB = 500  # the most MiB of a folder that is copied
LOOK_S = 0.1
ENOUGH_SAVES, ENOUGH_LINES = 3, 6  # the trial ends after this many saves and lines
LEAVES_S = 20.0  # seconds that a command has to save and end after the request


@dataclass(frozen=True, kw_only=True, slots=True)
class Written:
    """A file, and the moment at which it became complete: it stopped changing, or got its final name."""

    name: str
    at: float
    began: float
    bytes: int
    renamed_from: str = ""


@dataclass(slots=True)
class TrialRun:
    """What was observed of one start of the command."""

    lines: list[tuple[float, str]] = field(default_factory=list)
    writes: list[Written] = field(default_factory=list)
    code: int | None = None
    signalled_at: float | None = None
    catches: bool = False  # whether a process of the command has a handler for SIGTERM


class Sandbox:
    """The folders of a trial, laid out as on a node."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self._folder = root, folder.resolve()
        self.code, self.home = root / "code", root / "home"
        self.user = {name: root / name for name in ("checkpoints", "outputs", "state")}
        self._shipped: dict[str, FileState] = {}

    def copy(self) -> None:
        """Copies the files that would be shipped. Raises GpufleetError."""
        files = list(files_in(self._folder))
        size = sum(path.stat().st_size for _, path in files if not path.is_symlink())
        if size > MOST_MIB * MIB:
            raise GpufleetError(
                f"--try: {self._folder} has {size / 1e6:.0f} MB, but a trial copies at most {MOST_MIB} MiB;"
                " leave out --try, or let git ignore its data"
            )
        for name, path in files:
            if path.is_dir():
                raise GpufleetError(
                    f"--try: {name} leads to the folder {path.resolve()}, which would not be shipped: put a copy in its"
                    " place, let git ignore it, or leave out --try; data belongs under storage.inputs"
                )
            target = self.code / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(
                path, target, follow_symlinks=not path.is_symlink() or not path.resolve().is_relative_to(self._folder)
            )
        for folder in (self.code, self.home, self.root / "tmp", *self.user.values()):
            folder.mkdir(parents=True, exist_ok=True)
        if (cache := Path.home() / ".cache").is_dir():
            (self.home / ".cache").symlink_to(cache)
        self._shipped = self._look()

    def values(self) -> dict[str, str | int]:
        """The values of a command's placeholders, for one process on one node."""
        alone: dict[str, str | int] = {"nodes": 1, "node_rank": 0, "master": "127.0.0.1", "port": 29400}
        folders = {name: str(path) for name, path in self.user.items()}
        return {**folders, "code": str(self.code), "gpus": 1, "run": "try", **alone}

    def _environment(self, values: dict[str, str | int], more: dict[str, str]) -> dict[str, str]:
        """The environment of a node, but with the Python of the user's folder first on the PATH, and without GPUs."""
        own = own_environment(os.environ)
        places = [self._folder / name / "bin" for name in ENVIRONMENTS]
        bins = [str(place) for place in places if (place / "python").exists()]
        own |= {"PATH": os.pathsep.join([*bins, own["PATH"]]), "HOME": str(self.home), "TMPDIR": str(self.root / "tmp")}
        own |= {"PYTHONUNBUFFERED": "1", "PYTHONDONTWRITEBYTECODE": "1", "CUDA_VISIBLE_DEVICES": ""}
        own |= {"WANDB_MODE": "offline", "PYTHONPATH": f"{self.code}:{self.code}/src"}
        own |= {COMMAND[name]: str(value) for name, value in values.items() if name in COMMAND}
        return own | {name: filled(value, values) for name, value in more.items()}

    def lacking(self, command: str) -> str:
        """The reason why the command cannot run here: modules that its Python lacks. Empty if none is known."""
        environment = self._environment(self.values(), {})
        python = Path(shutil.which("python", path=environment["PATH"]) or "python3")
        if not (missing := lacking(self.code, command, python, environment)):
            return ""
        places = ", ".join(f"{name} ({where})" for name, where in missing.items())
        return f"{python} lacks what the script imports: {places}; install it there, or make a .venv in the folder"

    def start(
        self, command: str, workdir: str, environment: dict[str, str], seconds: float, *, ask: bool,
        until: Callable[[TrialRun], bool] | None = None,
    ) -> TrialRun:  # fmt: skip
        """Runs the command until it ends, until enough was seen, or until the time is over. If `ask`, the command is
        then asked to stop.
        """
        values, watch = self.values(), TrialRun()
        where = Path(filled(workdir or "{code}", values))
        where.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [sys.executable, "-I", processes.__file__, str(os.getpid()), "sh", "-ec", filled(command, values)],
            cwd=where,
            env=self._environment(values, environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        assert process.stdout is not None
        reader = threading.Thread(target=_read, args=(process.stdout.fileno(), watch), daemon=True)
        reader.start()
        files = _Files(self._look, watch, self._look() if not ask else self._shipped)
        try:
            deadline = time.monotonic() + seconds
            while process.poll() is None and time.monotonic() < deadline:
                files.look()
                if (until or _is_enough)(watch):
                    break
                time.sleep(LOOK_S)
            if process.poll() is None and ask:
                asked = processes.addressees(process.pid, signal.SIGTERM)
                catching = [pid for pid in asked if processes.catches(pid, signal.SIGTERM)]
                watch.catches = bool(catching)
                mark = self.root / "asked"  # file times are up to one tick behind this process's clock
                mark.touch()
                watch.signalled_at = mark.stat().st_mtime
                for pid in catching or asked:  # if the shell died first, its guard process would end too
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
                deadline = time.monotonic() + LEAVES_S
                while process.poll() is None and time.monotonic() < deadline:
                    files.look()
                    time.sleep(LOOK_S)
            watch.code = process.poll()
        finally:
            if process.poll() is None:
                process.terminate()
            process.wait()
            reader.join(5)
            process.stdout.close()
            files.look(last=True)
        return watch

    def _look(self) -> dict[str, FileState]:
        """The files of the command's folders, by names that begin with `code/` or `checkpoints/`."""
        states = {}
        for top in (self.code, *self.user.values()):
            for name, look in ForeignFolder(self.root).files(top, SKIPPED):
                with suppress(OSError):  # the file may have been removed meanwhile
                    states[f"{top.name}/{name}"] = FileState.from_stat(look())
        return states


class _Files:
    """Finds at each look the files that became complete: unchanged at two looks, or renamed."""

    def __init__(self, look: Callable[[], dict[str, FileState]], watch: TrialRun, before: dict[str, FileState]) -> None:
        self._look, self._watch = look, watch
        self._known = dict(before)  # the files' states when they were last reported
        self._last: dict[str, FileState] = dict(before)
        self._began: dict[str, float] = {}

    def look(self, *, last: bool = False) -> None:
        now, there = time.time(), self._look()
        gone = {file.inode: name for name, file in self._last.items() if name not in there}
        for name, file in there.items():
            if self._known.get(name) == file:
                continue
            self._began.setdefault(name, now)
            came_from = gone.get(file.inode, "")
            if last or came_from or self._last.get(name) == file:
                self._known[name] = file
                at = file.written / 1e9
                self._watch.writes.append(
                    Written(
                        name=name, at=at, began=min(self._began.pop(name), at), bytes=file.bytes, renamed_from=came_from
                    )
                )
        self._last = there


def _read(pipe: int, watch: TrialRun) -> None:
    with open(pipe, encoding="utf-8", errors="replace", newline=None, closefd=False) as output:
        for line in output:  # a carriage return ends a line too, as in a progress bar
            if text := CONTROL.sub("", line.rstrip("\r\n")).rstrip():
                watch.lines.append((time.time(), text[:2000]))


def _is_enough(watch: TrialRun) -> bool:
    saves = Counter(
        re.sub(r"\d+", "#", written.name) for written in watch.writes if not NO_CHECKPOINT.search(written.name)
    )
    forms = Counter(re.sub(r"\d+", "#", line)[:40] for _, line in watch.lines)
    return max(saves.values(), default=0) >= ENOUGH_SAVES and max(forms.values(), default=0) >= ENOUGH_LINES
