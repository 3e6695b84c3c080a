"""What one checkpoint of a command is by its names: which files belong to which step, and whether they look whole.

Pure but for reading ends and heads of files.
"""

from __future__ import annotations

import json
import os
import pickletools
import re
import struct
import zipfile
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.job.spec.command import RANK, CommandConfig, filled

ZIPPED = (".pt", ".pth", ".ckpt", ".bin", ".npz", ".zip")  # torch.save's, where they begin as a zip does
PICKLED = ".metadata"  # torch.distributed.checkpoint's
MOST_STEPS = 10**8  # names of ckpt/ have eight digits
MOST_JSON = 64 * 1024 * 1024
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
    def from_path(cls, path: Path) -> FileState:
        """Raises OSError."""
        there = path.stat()
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
        """Epoch seconds of the newest; 0 where there are none."""
        return max((look.written for look in self.files.values()), default=0) / 1e9


class Names:
    """The names of a definition, and what the first whole checkpoint has taught of them."""

    def __init__(self, config: CommandConfig) -> None:
        self._complete, self._unless = config.complete, config.unless
        self._patterns = [_pattern(name) for name in config.names]
        several = ("*", RANK)  # files of which nobody knows how many there are
        self.are_known = bool(config.complete) or not any(
            name.endswith("/") or any(word in name for word in several) for name in config.names
        )
        self._sizes: set[tuple[str, int]] = set()
        self.learned: dict[str, tuple[int, int]] = {}  # of a kind of name: how many there are, bytes of the smallest

    def find(self, folder: Path, allowed: Path) -> list[FoundCheckpoint]:
        """Every checkpoint that has begun, oldest step first. What a link leads to lies below `allowed`, or is none."""
        steps: dict[int | None, tuple[dict[str, FileState], dict[str, str]]] = {}
        for top, _, names in os.walk(folder):
            for name in names:
                path = Path(top, name)
                relative = path.relative_to(folder).as_posix()
                match = next(filter(None, (pattern.fullmatch(relative) for pattern in self._patterns)), None)
                if (
                    match is None
                    or int(match.groupdict().get("step") or 0) >= MOST_STEPS
                    or (path.is_symlink() and not path.resolve().is_relative_to(allowed.resolve()))
                ):
                    continue
                groups = match.groupdict()
                files, inner = steps.setdefault(int(groups["step"]) if "step" in groups else None, ({}, {}))
                try:
                    files[relative] = FileState.from_path(path)
                except OSError:  # removed meanwhile
                    continue
                inner[relative] = groups.get("inner") or relative
        found = [
            FoundCheckpoint(step=step, files=files, inner=inner) for step, (files, inner) in steps.items() if files
        ]
        return sorted(found, key=lambda each: each.step or 0)

    def step_of(self, name: str) -> int | None:
        """The step that the name of one of its files tells; None: none, or it is no file of a checkpoint."""
        match = next(filter(None, (pattern.fullmatch(name) for pattern in self._patterns)), None)
        return int(match["step"]) if match and "step" in match.groupdict() else None

    def lacks(self, found: FoundCheckpoint, *, is_part: bool = False) -> str:
        """What of it is not there yet, in words; nothing where its names are complete. Of a part, which a node writes
        that follows another, as far as earlier parts tell: what says that all are whole is the other's.
        """
        if is_part:
            return self._unlike_learned(found)
        inner = set(found.inner.values())
        if self._unless and _at_step(self._unless, found.step) in inner:
            return f"{self._unless} says that it is unfinished"
        if self._complete:
            return "" if _at_step(self._complete, found.step) in inner else f"{self._complete} is not there"
        if not all(any(pattern.fullmatch(name) for name in found.files) for pattern in self._patterns):
            return "one of its files is not there"
        return "" if found.step is None else self._unlike_learned(found)

    def _unlike_learned(self, found: FoundCheckpoint) -> str:
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

    def shows_a_cut(self, folder: Path, found: FoundCheckpoint) -> bool:
        """Whether a cut in what was written last would show: by the file itself, as it is as long as the newest whole
        one's, or as who renames a file has written it. Raises OSError.
        """
        return all(
            tells_itself(folder / name)
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
    for part in re.split(r"(\{step(?::[0-9a-z]+)?\}|\{rank\}|\*)", name.rstrip("/")):
        if _STEP.fullmatch(part):
            text += r"0*(?P=step)" if seen else r"0*(?P<step>\d+)"
            seen = True
        elif part == RANK:
            text += r"\d+"
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    return re.compile(text + ("/(?P<inner>.+)" if name.endswith("/") else ""))


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
    return _checked(path)[0]


def tells_itself(path: Path) -> bool:
    """Whether a cut would show in the file."""
    return _checked(path)[1]


def _checked(path: Path) -> tuple[str, bool]:
    size = path.stat().st_size
    with path.open("rb") as file:
        head = file.read(8)
        if path.suffix in ZIPPED:
            if not head:
                return "it is empty", True
            if head[:2] in (b"P", b"PK"):
                return ("" if zipfile.is_zipfile(path) else "its zip has no end"), True
        if path.suffix == ".safetensors":
            try:
                length = struct.unpack("<Q", head)[0]
                header = json.loads(file.read(length)) if length < size else {}
                ends = [row["data_offsets"][1] for key, row in header.items() if key != "__metadata__"]
                whole = size == 8 + length + max(ends, default=0)
            except (struct.error, ValueError, KeyError, TypeError, AttributeError):
                whole = False
            return ("" if whole else "it is another length than its header says"), True
        if path.name == PICKLED and head.startswith(b"\x80"):
            try:
                for _ in pickletools.genops(head + file.read()):  # reads, and makes nothing of it
                    pass
            except ValueError:
                return "its pickle has no end", True
            return "", True
        if path.suffix == ".json" and size < MOST_JSON:
            try:
                json.loads(head + file.read())
            except ValueError:
                return "it is no JSON", True
            return "", True
    return "", False
