"""Token shards: flat little-endian integers behind a 64-byte header. Standard library only.

Header: magic (8 bytes), version (u16), bytes per token (u16: 1, 2 or 4), vocabulary (u32), tokens (u64), sha256 of the
tokens (32 bytes), zeros (8 bytes).
"""

from __future__ import annotations

import hashlib
import os
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HEADER = struct.Struct("<8sHHIQ32s8x")
MAGIC = b"gpufltok"
VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardHeader:
    """The content of a shard's first 64 bytes."""

    token_bytes: int  # 1 (characters), 2 or 4
    vocab: int
    tokens: int
    sha256: str


def write_shard(path: Path, tokens: Sequence[int], vocab: int) -> None:
    """Writes one shard of 2 or 4 bytes per token and syncs it to disk. Ids must be below `vocab`."""
    flat = array("H" if vocab <= 1 << 16 else "I", tokens)
    if sys.byteorder == "big":
        flat.byteswap()
    write_payload(path, flat.tobytes(), vocab, token_bytes=flat.itemsize)


def write_payload(path: Path, payload: bytes, vocab: int, *, token_bytes: int) -> None:
    """Writes a shard of ids that are little-endian bytes already."""
    digest = hashlib.sha256(payload).digest()
    with path.open("wb") as file:
        file.write(HEADER.pack(MAGIC, VERSION, token_bytes, vocab, len(payload) // token_bytes, digest))
        file.write(payload)
        file.flush()
        os.fsync(file.fileno())


def read_header(path: Path) -> ShardHeader:
    """The header, checked against the file's size. Raises ValueError if the file is not a shard or is cut short."""
    with path.open("rb") as file:
        head = file.read(HEADER.size)
    if len(head) < HEADER.size or not head.startswith(MAGIC):
        raise ValueError(f"{path}: not a token shard; prepare the dataset again")
    _, version, token_bytes, vocab, tokens, digest = HEADER.unpack(head)
    if version != VERSION:
        raise ValueError(
            f"{path}: token shard version {version}, but this code reads {VERSION}; prepare the dataset again"
        )
    size, wanted = path.stat().st_size, HEADER.size + tokens * token_bytes
    if size != wanted:
        raise ValueError(f"{path}: {size} bytes, but the header says {wanted}; the file was cut short or overwritten")
    return ShardHeader(token_bytes=token_bytes, vocab=vocab, tokens=tokens, sha256=digest.hex())
