"""The job package as one file for the bucket: the same sources give the same bytes on every machine.

Its hash is its name in the bucket and stands in user-data, so a run trains with the code its preview showed. It is also
its name in the project's own .gpufleet/, where the engine reads it: a stack's state names the file, and holds no copy.
"""

from __future__ import annotations

import hashlib
import io
import tarfile
import zlib
from dataclasses import dataclass
from pathlib import Path

from job import atomic

FOLDER = ".gpufleet"  # of the project; git ignores it
_LEFT_OUT = {"__pycache__", "tests"}
_BLOCK = 65535  # longest stored block of a deflate stream (RFC 1951)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """A tar.gz that unpacks to the folder `job/`."""

    content: bytes
    sha256: str

    def file(self, root: Path) -> Path:
        """Where it lies in the project `root`; written unless it is there. While a run is up, its engine reads the one
        with which the run began, so none is removed here.
        """
        path = root / FOLDER / f"job-{self.sha256}.tar.gz"
        if not path.exists() or path.stat().st_size != len(self.content):
            atomic.write_bytes(path, self.content)
        return path


def build(job_package_dir: Path) -> Archive:
    """Every file under the package, sorted, without times, owners, modes, caches and tests.

    Raises FileNotFoundError when the folder holds no file.
    """
    names = {
        path.relative_to(job_package_dir).as_posix(): path
        for path in job_package_dir.rglob("*")
        if path.is_file() and _wanted(path.relative_to(job_package_dir))
    }
    if not names:
        raise FileNotFoundError(f"{job_package_dir}: no job package there")
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name in sorted(names):
            content = names[name].read_bytes()
            entry = tarfile.TarInfo(f"job/{name}")  # time 0, owner 0, mode 0644
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    zipped = _stored_gzip(packed.getvalue())
    return Archive(content=zipped, sha256=hashlib.sha256(zipped).hexdigest())


def _wanted(relative: Path) -> bool:
    return relative.suffix != ".pyc" and not any(part in _LEFT_OUT or part.startswith(".") for part in relative.parts)


def _stored_gzip(plain: bytes) -> bytes:
    """gzip without compression (RFC 1952): a compressor's output differs between zlib builds, and the hash with it."""
    blocks = [plain[start : start + _BLOCK] for start in range(0, len(plain), _BLOCK)] or [b""]
    body = b"".join(
        bytes([index == len(blocks) - 1])
        + len(block).to_bytes(2, "little")
        + (len(block) ^ 0xFFFF).to_bytes(2, "little")
        + block
        for index, block in enumerate(blocks)
    )
    header = bytes([0x1F, 0x8B, 8, 0, 0, 0, 0, 0, 0, 255])  # deflate, no name, no time, unknown system
    return header + body + zlib.crc32(plain).to_bytes(4, "little") + (len(plain) % 2**32).to_bytes(4, "little")
