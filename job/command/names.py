"""What one checkpoint of a command is by its names: which files belong to which step, and whether they look whole.

Pure but for reading ends and heads of files.
"""

from __future__ import annotations

import json
import os
import pickletools
import re
import shutil
import struct
import zipfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePath
from typing import BinaryIO

from gpufleet.job.contract import reading
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.spec.command import CommandConfig, filled

ZIPPED = (".pt", ".pth", ".ckpt", ".bin", ".npz", ".zip")  # torch.save's, where they begin as a zip does
PICKLED = ".metadata"  # torch.distributed.checkpoint's
MOST_STEPS = 10**8  # names of ckpt/ have eight digits
MOST_JSON = 64 * 1024 * 1024
MOST_HEADER = 100_000_000  # of a .safetensors file, as its library has it, and of a .metadata that is looked into
_STEP = re.compile(r"\{step(:[0-9a-z]+)?\}")


@dataclass(frozen=True, slots=True)
class FileState:
    """A file as it was seen. `renamed`: something was done to it after it was last written, as a rename is."""

    inode: int
    device: int
    bytes: int
    written: int  # ns
    renamed: bool = field(default=False, compare=False)

    @classmethod
    def from_stat(cls, there: os.stat_result) -> FileState:
        renamed = there.st_size > 0 and there.st_ctime_ns > there.st_mtime_ns
        return cls(there.st_ino, there.st_dev, there.st_size, there.st_mtime_ns, renamed)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """The files of one checkpoint, by their names below the folder of checkpoints; `inner`: below its own folder."""

    step: int | None  # None: no name tells it
    files: Mapping[str, FileState]
    inner: Mapping[str, str]

    @property
    def bytes(self) -> int:
        return sum(look.bytes for look in self.files.values())

    @property
    def written(self) -> float:
        """Epoch seconds of the newest."""
        return max(look.written for look in self.files.values()) / 1e9


class Names:
    """The names of a definition, and what the first whole checkpoint has taught of them."""

    def __init__(self, config: CommandConfig, prefix: str = "") -> None:
        """`prefix`: what stands before a file's name in the bucket."""
        self._complete, self._unless, self._prefix = config.complete, config.unless, prefix
        self._patterns = [_pattern(name) for name in config.names]
        self._also = [_pattern(name.rstrip("/") + end) for name in config.checkpoint.also for end in ("", "/")]
        self.unfit: dict[str, str] = {}  # checkpoints of the last `find` that can never be published, and why
        self.are_known = bool(config.complete) or not any("*" in name or name.endswith("/") for name in config.names)
        self._sizes: set[tuple[str, int]] = set()
        self.learned: dict[str, tuple[int, int]] = {}  # of a kind of name: how many there are, bytes of the smallest

    def find(self, folder: Path, allowed: Path) -> list[FoundCheckpoint]:
        """Every checkpoint that has begun, oldest step first, without those that could never be published, as no store
        or reader would take them: `unfit` has these. What a link leads to lies below `allowed`.
        """
        steps: dict[int | None, tuple[dict[str, FileState], dict[str, str]]] = {}
        unfit: dict[int | None, str] = {}
        disk_bytes = shutil.disk_usage(allowed).total
        for name, look in ForeignFolder(allowed).files(folder):
            match = next(filter(None, (pattern.fullmatch(name) for pattern in self._patterns)), None)
            if match is None:
                continue
            groups = match.groupdict()
            step = int(groups["step"]) if "step" in groups else None
            files, inner = steps.setdefault(step, ({}, {}))
            try:
                files[name] = FileState.from_stat(look())
            except FileNotFoundError:  # removed meanwhile
                continue
            except OSError:
                unfit[step] = f"{reading.show(name)} is a link to no file of the command's folders"
                continue
            inner[name] = groups.get("inner") or name
            if problem := self.problem(name, step):
                unfit[step] = problem
            elif files[name].bytes > disk_bytes:
                unfit[step] = f"{reading.show(name)} is longer than its disk: it is made of holes"
        self.unfit = {_shown(step): why for step, why in unfit.items()}
        found = [
            FoundCheckpoint(step=step, files=files, inner=inner)
            for step, (files, inner) in steps.items()
            if files and step not in unfit
        ]
        return sorted(found, key=lambda each: each.step or 0)

    def problem(self, name: str, step: int | None) -> str:
        """Why no checkpoint with a file of this name can be published; nothing where it can."""
        if step is not None and step >= MOST_STEPS:
            return f"a step has at most eight digits: count in thousands, or name {reading.show(name)} otherwise"
        try:
            reading.name(self._prefix + name)
        except reading.DoubtError:
            return (
                f"no object may be called {reading.show(name)}; allowed is UTF-8 that prints, {reading.NAME_BYTES}"
                f" bytes a part and {reading.KEY_BYTES - len(self._prefix)} together. Call the file otherwise"
            )
        return ""

    def companions(self, folder: Path, allowed: Path) -> dict[str, int]:
        """The bytes of files that are kept with each checkpoint, by their names below the folder."""
        found = {}
        for name, look in ForeignFolder(allowed).files(folder):
            if any(pattern.fullmatch(name) for pattern in self._also) and not self.problem(name, None):
                with suppress(OSError):
                    found[name] = look().st_size
        return found

    def lacks(self, found: FoundCheckpoint) -> str:
        """What of it is not there yet, in words; nothing where its names are complete."""
        inner = set(found.inner.values())
        if self._unless and _at_step(self._unless, found.step) in inner:
            return f"{self._unless} says that it is unfinished"
        if self._complete:
            return "" if _at_step(self._complete, found.step) in inner else f"{self._complete} is not there"
        if not all(any(pattern.fullmatch(name) for name in found.files) for pattern in self._patterns):
            return "one of its files is not there"
        if found.step is None:
            return ""
        kinds = _kinds(found.files)
        for kind, (count, least) in self.learned.items():
            there, smallest = kinds.get(kind, (0, 0))
            if there < count:
                return f"{kind} is not there" if count == 1 else f"{there} of {count} {kind} are there"
            if smallest < least / 2:
                return f"{kind} has {smallest:,} bytes, the first one's had {least:,}"
        return ""

    def _last(self, found: FoundCheckpoint) -> list[str]:
        """The files of it that say by their being there that the others are whole; all where none does."""
        if not self._complete:
            return list(found.files)
        return [name for name, inner in found.inner.items() if inner == _at_step(self._complete, found.step)]

    def learn(self, files: Mapping[str, int]) -> None:
        """From names and bytes of one that is whole: the first teaches the names, the newest the sizes."""
        kinds = _kinds({name: FileState(0, 0, size, 0) for name, size in files.items()})
        if not self._complete and not self.learned:
            self.learned = kinds
        self._sizes = {(_kind(name), size) for name, size in files.items()}

    def shows_a_cut(self, opened: Callable[[str], BinaryIO], found: FoundCheckpoint) -> bool:
        """Whether a cut in what was written last would show: by the file itself, as it is as long as the newest whole
        one's, or as who renames a file has written it. `opened` gives a file by its name. Raises OSError.
        """
        return all(
            _tells_itself(opened, name)
            or found.files[name].renamed
            or (_kind(name), found.files[name].bytes) in self._sizes
            for name in self._last(found)
        )

    def place(self, files: Iterable[str]) -> str:
        """What a command is told as {checkpoint}: the file, or the folder that all of it is in."""
        first = sorted(files)[0]
        match = next(filter(None, (pattern.fullmatch(first) for pattern in self._patterns)), None)
        inner = match and match.groupdict().get("inner")
        return first.removesuffix(f"/{inner}") if inner else first


def _pattern(name: str) -> re.Pattern[str]:
    """The first {step} tells it, each other one repeats it."""
    text, seen = "", False
    for part in re.split(r"(\{step(?::[0-9a-z]+)?\}|\*)", name.rstrip("/")):
        if _STEP.fullmatch(part):
            text += r"0*(?P=step)" if seen else r"0*(?P<step>[0-9]+)"
            seen = True
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    return re.compile(text + ("/(?P<inner>.+)" if name.endswith("/") else ""), re.DOTALL)


def _shown(step: int | None) -> str:
    return "the checkpoint" if step is None else f"checkpoint of step {step:,}"


def _at_step(name: str, step: int | None) -> str:
    return filled(name, {"step": step or 0})


def _kind(name: str) -> str:
    """The name that all share which differ in their numbers."""
    return re.sub(r"\d+", "#", name)


def _kinds(files: Mapping[str, FileState]) -> dict[str, tuple[int, int]]:
    """Names with their digits taken out: how many there are of each, and the bytes of the smallest."""
    kinds = {name: _kind(name) for name in files}
    counted = Counter(kinds.values())
    return {
        kind: (count, min(files[name].bytes for name in files if kinds[name] == kind))
        for kind, count in counted.items()
    }


def torn(path: Path) -> str:
    """Why a file cannot be whole, as far as its own format tells; nothing where it is, or cannot be told."""
    with path.open("rb") as file:
        return _checked(file, path.name)[0]


def _tells_itself(opened: Callable[[str], BinaryIO], name: str) -> bool:
    """Whether a cut would show in the file."""
    with opened(name) as file:
        return _checked(file, PurePath(name).name)[1]


def _checked(file: BinaryIO, name: str) -> tuple[str, bool]:
    """Why it cannot be whole, and whether its format would tell."""
    size, head = os.fstat(file.fileno()).st_size, file.read(8)
    suffix = PurePath(name).suffix
    if suffix in ZIPPED:
        if not head:
            return "it is empty", True
        if head[:2] in (b"P", b"PK"):
            with suppress(zipfile.BadZipFile):
                if zipfile.is_zipfile(file):
                    return "", True
            return "its zip has no end", True
    if suffix == ".safetensors":
        try:
            length = struct.unpack("<Q", head)[0]
            header = json.loads(file.read(length)) if length < min(size, MOST_HEADER) else {}
            ends = [row["data_offsets"][1] for key, row in header.items() if key != "__metadata__"]
            whole = size == 8 + length + max(ends, default=0)
        except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            whole = False
        return ("" if whole else "it is another length than its header says"), True
    if name == PICKLED and head.startswith(b"\x80") and size < MOST_HEADER:
        try:
            for _ in pickletools.genops(head + file.read()):  # reads, and makes nothing of it
                pass
        except ValueError:
            return "its pickle has no end", True
        return "", True
    if suffix == ".json" and size < MOST_JSON:
        try:
            json.loads(head + file.read())
        except (ValueError, RecursionError):
            return "it is no JSON", True
        return "", True
    return "", False
