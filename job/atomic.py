"""Writes small files so that a reader always finds either the whole old file or the whole new one, even after a SIGKILL
or a power cut. Also reads and hashes files.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

BLOCK = 1 << 20  # bytes per read


def write_bytes(path: Path, content: bytes) -> None:
    """Replaces `path` in one step: temporary file, fsync, rename, fsync of the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with temporary.open("xb") as file:  # mode x never follows a link that somebody has put at this name
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def json_bytes(value: Any) -> bytes:
    """The object as one line of JSON, keys sorted."""
    return (json.dumps(value, sort_keys=True) + "\n").encode()


def write_json(path: Path, value: Any) -> None:
    """Writes `value` as JSON, atomically, as write_bytes does."""
    write_bytes(path, json_bytes(value))


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def parse_object(content: bytes | None) -> dict[str, Any] | None:
    """The JSON object in `content`; None if `content` is missing or cut off, or is no object."""
    if content is None:
        return None
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def objects(lines: bytes) -> list[dict[str, Any]]:
    """The JSON objects of a file of lines. Skips lines that are blank, were cut off by a kill, or are no object."""
    return [tree for line in lines.split(b"\n") if (tree := parse_object(line)) is not None]


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None as in `parse_object`. Raises PermissionError if the file may not be read. Such a
    file is not treated as missing, because a new one could not be read either.
    """
    try:
        return parse_object(path.read_bytes())
    except PermissionError:
        raise
    except OSError:
        return None


def sha256(path: Path, advance: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file's content, in hex. `advance` is called with the bytes of each part. Raises OSError."""
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:
        part = memoryview(bytearray(BLOCK))
        while count := file.readinto(part):
            digest.update(part[:count])
            advance(count)
    return digest.hexdigest()
