"""Packs the job package into one file for the bucket. The same sources give the same bytes on every machine. The file's
hash is its name in the bucket and part of the user-data, so that a run trains with the code that its preview showed.
The hash is also the file's name in the project's .gpufleet/, from where the Pulumi engine uploads the file. The stack's
state has the path of the file, but no copy of it.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from gpufleet.infra.inputs.folders import FOLDER
from gpufleet.job import atomic

_LEFT_OUT = {"__pycache__", "tests"}
_BLOCK = 65535  # the longest stored block of a deflate stream (RFC 1951)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """A tar.gz that unpacks to `gpufleet/job/` and nothing else."""

    content: bytes
    sha256: str

    def file(self, root: Path) -> Path:
        """The archive's file in the project `root`; the file is written if it does not exist. Older archives are not
        removed, because the engine still reads the archive with which a run began.
        """
        path = root / FOLDER / f"job-{self.sha256}.tar.gz"
        if not path.exists() or path.stat().st_size != len(self.content):
            atomic.write_bytes(path, self.content)
        return path


def build(job_package_dir: Path) -> Archive:
    """The archive of all files of the package, sorted, without times, owners, modes, caches and tests. Raises
    FileNotFoundError if the folder has no file.
    """
    contents = {
        f"gpufleet/job/{path.relative_to(job_package_dir).as_posix()}": path.read_bytes()
        for path in job_package_dir.rglob("*")
        if path.is_file() and _wanted(path.relative_to(job_package_dir))
    }
    if not contents:
        raise FileNotFoundError(f"{job_package_dir}: there is no job package")
    contents["gpufleet/__init__.py"] = b""
    packed = io.BytesIO()
    with packing(packed, tarfile.USTAR_FORMAT) as tar:
        for name, content in sorted(contents.items()):
            entry = tarfile.TarInfo(name)  # by default the entry has time 0, owner 0 and mode 0644
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return Archive(content=packed.getvalue(), sha256=hashlib.sha256(packed.getvalue()).hexdigest())


@contextmanager
def packing(target: BinaryIO, form: int) -> Iterator[tarfile.TarFile]:
    """A tar.gz to which entries can be added. Each entry is written to `target` at once. `form`: one of tarfile's
    formats.
    """
    stored = _StoredGzip(target)
    with tarfile.open(fileobj=stored, mode="w|", format=form, encoding="utf-8") as tar:  # type: ignore[call-overload]
        yield tar
    stored.close()


def _wanted(relative: Path) -> bool:
    return relative.suffix != ".pyc" and not any(part in _LEFT_OUT or part.startswith(".") for part in relative.parts)


class _StoredGzip:
    """gzip without compression (RFC 1952), because different builds of zlib compress differently, and the hash must be
    the same everywhere.
    """

    def __init__(self, target: BinaryIO) -> None:
        self._target, self._waiting = target, bytearray()
        self._crc = self._length = 0
        # the header: method deflate, no name, no time, unknown system
        target.write(bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255]))

    def write(self, plain: bytes) -> int:
        self._crc, self._length = zlib.crc32(plain, self._crc), self._length + len(plain)
        self._waiting += plain
        while len(self._waiting) > _BLOCK:
            self._block(self._waiting[:_BLOCK], last=False)
            del self._waiting[:_BLOCK]
        return len(plain)

    def close(self) -> None:
        self._block(self._waiting, last=True)
        self._target.write(self._crc.to_bytes(4, "little") + (self._length % 2**32).to_bytes(4, "little"))

    def _block(self, plain: bytearray, *, last: bool) -> None:
        size = len(plain)
        self._target.write(bytes([last]) + size.to_bytes(2, "little") + (size ^ 0xFFFF).to_bytes(2, "little") + plain)
