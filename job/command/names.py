"""Groups a command's files into checkpoints by their names: which files belong to which step, and whether all files of
a checkpoint exist.

Apart from reading the beginning and end of files, the functions are pure.
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
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import BinaryIO

from gpufleet.job.contract import reading
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.kind.command import COUNTED, RANK, CommandConfig, filled

# endings of files that may be zips; the files of torch.save are zips, which are recognised by their first bytes
ZIPPED = (".pt", ".pth", ".ckpt", ".bin", ".npz", ".zip")
PICKLED = ".metadata"  # torch.distributed.checkpoint gives this name to its file
MOST_STEPS = 10**8  # steps must be below this, because names in ckpt/ have eight digits
MOST_JSON = 64 * 1024 * 1024
# The most bytes of the header of a .safetensors file (the limit of its library), and of a .metadata file that is
# parsed.
MOST_HEADER = 100_000_000
Key = tuple[str, int | None]


@dataclass(frozen=True, slots=True)
class FileState:
    """A file at one look. `renamed`: whether its inode changed after its last write, as it does when a file is
    renamed.
    """

    inode: int
    device: int
    bytes: int
    written: int  # time of the last write in ns
    renamed: bool = field(default=False, compare=False)

    @classmethod
    def from_stat(cls, there: os.stat_result) -> FileState:
        renamed = there.st_size > 0 and there.st_ctime_ns > there.st_mtime_ns
        return cls(there.st_ino, there.st_dev, there.st_size, there.st_mtime_ns, renamed)


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCheckpoint:
    """The files of one checkpoint, by their paths relative to the folder of checkpoints. `inner`: the paths relative to
    the checkpoint's own folder. `places`: the files themselves, or their folders if the definition names a folder.
    """

    counts: Mapping[str, int]  # the numbers in the checkpoint's names, by `step` and `epoch`; may be empty
    folder: str  # the text that matched each `*` in the definition's folders
    files: Mapping[str, FileState]
    inner: Mapping[str, str]
    places: frozenset[str]

    @property
    def number(self) -> int | None:
        """The number by which checkpoints are ordered; None if no name contains a number."""
        return self.counts.get("step", self.counts.get("epoch"))

    @property
    def key(self) -> Key:
        """The key that distinguishes the checkpoint from others in its folder."""
        return self.folder, self.number

    @property
    def series(self) -> str:
        """The name of the checkpoint's folder without its digits: exp and exp2 are the same series, pretrain and tune
        are not.
        """
        return re.sub(r"[-_.]?\d+", "", self.folder)

    @property
    def title(self) -> str:
        """The checkpoint's name for use in a sentence."""
        return _title(self.counts)

    @property
    def bytes(self) -> int:
        return sum(look.bytes for look in self.files.values())

    @property
    def written(self) -> float:
        """Epoch seconds of the newest file; 0 if there are no files."""
        return max((look.written for look in self.files.values()), default=0) / 1e9

    @property
    def first_written(self) -> float:
        """Epoch seconds of the oldest file; 0 if there are no files."""
        return min((look.written for look in self.files.values()), default=0) / 1e9

    def without_files(self, names: Collection[str]) -> FoundCheckpoint:
        files = {name: look for name, look in self.files.items() if name not in names}
        outer = frozenset(top for top in self.places if any(name.startswith(top) for name in files))
        return replace(self, files=files, inner={name: self.inner[name] for name in files}, places=outer)

    def is_anew(self, before: FoundCheckpoint) -> bool:
        """Whether the checkpoint was written again after `before` was seen. A file added to its folder is no sign."""
        changed = any(name in before.files and before.files[name] != look for name, look in self.files.items())
        return changed or bool(self.places - before.places)


class Names:
    """The names of checkpoints' files in a definition, and what the first complete checkpoint has shown about these
    files.
    """

    def __init__(self, config: CommandConfig, prefix: str = "") -> None:
        """`prefix`: the part of a file's key before its name in the bucket."""
        self._complete, self._unless, self._prefix = config.complete, config.unless, prefix
        self._patterns = [_pattern(name) for name in config.names]
        self._also = [_pattern(name.rstrip("/") + end)[0] for name in config.companions for end in ("", "/")]
        self.unfit: dict[str, str] = {}  # why checkpoints of the last `find` can never be published, by checkpoint
        self._has_parts = any("*" in name.rpartition("/")[2] or RANK in name for name in config.names)
        self.are_known = bool(config.complete) or not (
            self._has_parts or any(name.endswith("/") for name in config.names)
        )
        self._sizes: set[tuple[str, int]] = set()
        # number of files and bytes of the smallest file, for each kind of name
        self.learned: dict[str, tuple[int, int]] = {}

    def match(self, relative: str) -> tuple[dict[str, int], str, str, str] | None:
        """Compares a path below the folder of checkpoints with the declared names. Returns the step and epoch in it,
        the text that stands for folders with a `*`, the file or folder that is the checkpoint, and the path below that
        folder. None if the path belongs to no checkpoint.
        """
        for pattern, depth in self._patterns:
            if (match := pattern.fullmatch(relative)) is not None:
                groups = match.groupdict()
                counts: dict[str, int] = {name: int(groups[name]) for name in ("step", "epoch") if name in groups}
                folder = "/".join(relative.split("/")[:depth])
                inner = groups.get("inner")
                outer = relative if inner is None else relative.removesuffix(f"/{inner}")
                return counts, folder, outer, inner or relative.removeprefix(f"{folder}/")
        return None

    def find(self, folder: Path, allowed: Path) -> list[FoundCheckpoint]:
        """Every checkpoint that the command has begun to write, the newest last. The order is that of the numbers in
        the names; if there are none, that of the times of writing. Checkpoints that no store or reader would accept can
        never be published: they are left out, and `unfit` lists them. A link's target must lie below `allowed`.
        """
        made: dict[tuple[str, tuple[tuple[str, int], ...]], list[tuple[str, str, str, FileState]]] = {}
        unfit: dict[tuple[str, tuple[tuple[str, int], ...]], str] = {}
        disk_bytes = shutil.disk_usage(allowed).total
        for name, look in ForeignFolder(allowed).files(folder):
            if (match := self.match(name)) is None:
                continue
            counts, starred, outer, inner = match
            key = starred, tuple(counts.items())
            try:
                state = FileState.from_stat(look())
            except FileNotFoundError:  # the file was removed meanwhile
                continue
            except OSError:
                unfit[key] = f"{reading.show(name)} is a link to no file of the command's folders"
                continue
            made.setdefault(key, []).append((name, outer, inner, state))
            if problem := self._problem(name, counts):
                unfit[key] = problem
            elif state.bytes > disk_bytes:
                unfit[key] = f"{reading.show(name)} is larger than the disk, so it consists of holes"
        self.unfit = {_title(dict(counts)): why for (_, counts), why in unfit.items()}
        checkpoints = [
            FoundCheckpoint(
                counts=dict(counts),
                folder=starred,
                files={name: state for name, _, _, state in rows},
                inner={name: inner for name, _, inner, _ in rows},
                places=frozenset(outer for _, outer, _, _ in rows),
            )
            for (starred, counts), rows in made.items()
            if (starred, counts) not in unfit
        ]
        return sorted(checkpoints, key=lambda candidate: (candidate.number or 0, candidate.written))

    def named(self, relative: str) -> FoundCheckpoint | None:
        """The checkpoint to which a file of this name belongs, without its files; None if it belongs to none."""
        match = self.match(relative)
        return match and FoundCheckpoint(counts=match[0], folder=match[1], files={}, inner={}, places=frozenset())

    def companions(self, folder: Path, allowed: Path) -> dict[str, int]:
        """Sizes in bytes of the files that are kept with each checkpoint, by their names below the folder."""
        sizes = {}
        for name, look in ForeignFolder(allowed).files(folder):
            if any(pattern.fullmatch(name) for pattern in self._also) and not self._problem(name, {}):
                with suppress(OSError):
                    sizes[name] = look().st_size
        return sizes

    @staticmethod
    def pointing(text: str, checkpoint: FoundCheckpoint, others: Iterable[FoundCheckpoint]) -> str:
        """The text of a companion for `checkpoint`. DeepSpeed's `latest` contains only the name of a checkpoint's
        folder, and Megatron's file only its number. Such a text may have been read too early or too late, and then
        names another checkpoint. The text is changed so that it names `checkpoint`.
        """
        words = [(PurePath(place(other)).name, str(other.number)) for other in others if other.places]
        for there in words:
            for word, own in zip(there, (PurePath(place(checkpoint)).name, str(checkpoint.number)), strict=True):
                if text.strip() == word:
                    return text.replace(word, own)
        return text

    def _problem(self, name: str, counts: Mapping[str, int]) -> str:
        """Why a checkpoint with a file of this name cannot be published; empty if it can be published."""
        if any(count >= MOST_STEPS for count in counts.values()):
            return f"a step has at most eight digits: count in thousands, or give {reading.show(name)} another name"
        try:
            reading.name(self._prefix + name)
        except reading.DoubtError:
            return (
                f"{reading.show(name)} cannot be an object's name; use printable UTF-8, at most {reading.NAME_BYTES}"
                f" bytes per part and {reading.KEY_BYTES - len(self._prefix)} in all. Give the file another name"
            )
        return ""

    def lacks(self, checkpoint: FoundCheckpoint, *, is_part: bool = False) -> str:
        """What the checkpoint still lacks, in words; empty if it is complete. For a part of a node that is not the
        leader, earlier parts show which files belong to it, because only the leader has the file that completes a
        checkpoint.
        """
        if is_part:
            return self._unlike_learned(checkpoint)
        inner = set(checkpoint.inner.values())
        if self._unless and filled(self._unless, {**checkpoint.counts}) in inner:
            return f"{self._unless} marks it as unfinished"
        if self._complete:
            return "" if filled(self._complete, {**checkpoint.counts}) in inner else f"{self._complete} is not there"
        if not all(any(pattern.fullmatch(name) for name in checkpoint.files) for pattern, _ in self._patterns):
            return "one of its files is not there"
        if checkpoint.number is None:
            count = sum(count for count, _ in self.learned.values()) if self._has_parts else 0
            return f"{len(checkpoint.files)} of {count} files are there" if len(checkpoint.files) < count else ""
        return self._unlike_learned(checkpoint)

    def _unlike_learned(self, checkpoint: FoundCheckpoint) -> str:
        kinds = _kinds(checkpoint.inner, checkpoint.files)
        for kind, (count, least) in self.learned.items():
            there, smallest = kinds.get(kind, (0, 0))
            if there < count:
                return f"{kind} is not there" if count == 1 else f"{there} of {count} {kind} are there"
            if smallest < least / 2:
                return f"{kind} has {smallest:,} bytes, in the first checkpoint it had {least:,}"
        return ""

    def newest(self, checkpoint: FoundCheckpoint, before: FoundCheckpoint | None) -> FoundCheckpoint:
        """The checkpoint, reduced to the files that were written after `before` was seen. This is done only if its
        names have no number and match several files, and if the new files alone are a complete checkpoint.
        """
        if before is None or checkpoint.number is not None or not self._has_parts:
            return checkpoint
        newer = checkpoint.without_files(
            {name for name, look in before.files.items() if checkpoint.files.get(name) == look}
        )
        is_whole = all(any(pattern.fullmatch(name) for name in newer.files) for pattern, _ in self._patterns)
        return newer if newer.files and is_whole else checkpoint

    def _last(self, checkpoint: FoundCheckpoint) -> list[str]:
        """The files that are written last, and so show that the other files are complete; all files if there is no such
        file.
        """
        if not self._complete:
            return list(checkpoint.files)
        return [
            name for name, inner in checkpoint.inner.items() if inner == filled(self._complete, {**checkpoint.counts})
        ]

    def learn(self, checkpoint: FoundCheckpoint) -> None:
        """Learns from a complete checkpoint: the names from the first checkpoint, the sizes from the newest."""
        if not self._complete and not self.learned:
            self.learned = _kinds(checkpoint.inner, checkpoint.files)
        self._sizes = {(_kind(name), look.bytes) for name, look in checkpoint.files.items()}

    def shows_a_cut(self, opened: Callable[[str], BinaryIO], checkpoint: FoundCheckpoint) -> bool:
        """Whether a cut in the file that was written last would be visible: by its format, by its length in the newest
        complete checkpoint, or by a rename after it was written. `opened` opens a file by its name. Raises OSError.
        """
        return all(
            _tells_itself(opened, name)
            or checkpoint.files[name].renamed
            or (_kind(name), checkpoint.files[name].bytes) in self._sizes
            for name in self._last(checkpoint)
        )


def place(checkpoint: FoundCheckpoint) -> str:
    """The path for {checkpoint}, relative to the folder of checkpoints: the only file, or the folder that contains all
    files.
    """
    return sorted(checkpoint.places)[0]


def _pattern(name: str) -> tuple[re.Pattern[str], int]:
    """The regular expression of a declared name, and the number of folders at its beginning that contain a `*`. The
    first {step} captures the number and the others must repeat it; the same holds for {epoch}.
    """
    text, seen = "", set[str]()
    for part in re.split(r"(\{(?:step|epoch)(?::[0-9a-z]+)?\}|\{rank\}|\*)", name.rstrip("/")):
        if count := COUNTED.fullmatch(part):
            text += rf"0*(?P={count[1]})" if count[1] in seen else rf"0*(?P<{count[1]}>[0-9]+)"
            seen.add(count[1])
        elif part == RANK:
            text += r"\d+"
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    folders = name.rstrip("/").split("/")[:-1]
    depth = max((index + 1 for index, folder in enumerate(folders) if "*" in folder), default=0)
    return re.compile(text + ("/(?P<inner>.+)" if name.endswith("/") else ""), re.DOTALL), depth


def _title(counts: Mapping[str, int]) -> str:
    counted = next((f"{name} {count:,}" for name, count in counts.items()), "")
    return f"checkpoint of {counted}" if counted else "the checkpoint"


def _kind(name: str) -> str:
    """The name without its numbers. Files that differ only in numbers have the same."""
    return re.sub(r"\d+", "#", name)


def _kinds(inner: Mapping[str, str], files: Mapping[str, FileState]) -> dict[str, tuple[int, int]]:
    """For each name without digits: the number of files that have it, and the bytes of the smallest."""
    kinds = {name: _kind(inside) for name, inside in inner.items()}
    counted = Counter(kinds.values())
    return {
        kind: (count, min(files[name].bytes for name in files if kinds[name] == kind))
        for kind, count in counted.items()
    }


def torn(path: Path) -> str:
    """Why a file cannot be complete, as its format shows; empty if the file is complete, or if its format does not show
    this.
    """
    with path.open("rb") as file:
        return _checked(file, path.name)[0]


def _tells_itself(opened: Callable[[str], BinaryIO], name: str) -> bool:
    """Whether the file's format would show a cut."""
    with opened(name) as file:
        return _checked(file, PurePath(name).name)[1]


def _checked(file: BinaryIO, name: str) -> tuple[str, bool]:
    """Why the file cannot be complete, and whether its format would show a cut at all."""
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
        return ("" if whole else "its length is not the one in its header"), True
    if name == PICKLED and head.startswith(b"\x80") and size < MOST_HEADER:
        try:
            for _ in pickletools.genops(head + file.read()):  # parses the pickle without making objects
                pass
        except ValueError:
            return "its pickle has no end", True
        return "", True
    if suffix == ".json" and size < MOST_JSON:
        try:
            json.loads(head + file.read())
        except (ValueError, RecursionError):
            return "it is not JSON", True
        return "", True
    return "", False
