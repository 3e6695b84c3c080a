"""Public files over HTTPS, as much of them as is needed, continued where an earlier attempt stopped.

Standard library only. A file on its way is `<name>.part` beside `<name>.part.json`, which holds the server's ETag and
size, so that a continuation is never glued to another version.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import http.client

TINYSTORIES_REVISION = "f54c09fd23315a6f9c86f9dc80f725de7d8f9c64"  # 2024-08-12, the newest in 2026-11
TINYSTORIES_URL = (
    f"https://huggingface.co/datasets/roneneldan/TinyStories/resolve/{TINYSTORIES_REVISION}/TinyStories-train.txt"
)
TINYSTORIES_BYTES = 1_924_281_556
GPT2_REVISION = "607a30d783dfa663caf39e06633721c8d4cfcd7e"
GPT2_URL = f"https://huggingface.co/openai-community/gpt2/resolve/{GPT2_REVISION}/tokenizer.json"
TIMEOUT_S = 30.0
CHUNK = 1 << 20


class FetchError(ValueError):
    """A file could not be fetched. What has arrived stays; the next attempt goes on from there."""


def fetch(
    url: str,
    path: Path,
    *,
    first_bytes: int | None = None,
    total_bytes: int | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """`path` holding the file, or at least its first `first_bytes` (all of it where it is shorter).

    `total_bytes` is the size the whole file must have on the server. One path is fetched either whole or by its
    beginning, never both. Raises FetchError.
    """
    if path.exists() and (first_bytes is None or path.stat().st_size >= first_bytes):
        return path
    import http.client  # here: 20 ms, and a bill, which knows of datasets, fetches nothing
    import urllib.error

    path.parent.mkdir(parents=True, exist_ok=True)
    part, note = path.with_name(path.name + ".part"), path.with_name(path.name + ".part.json")
    if path.exists():  # a shorter beginning of the same file
        path.replace(part)
    try:
        _continue(url, part, note, first_bytes, total_bytes, say)
    except urllib.error.HTTPError as error:
        raise FetchError(f"{url}: the server answered {error.code} {error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise FetchError(f"{url}: {getattr(error, 'reason', None) or error}") from error
    part.replace(path)
    if first_bytes is None:
        note.unlink(missing_ok=True)
    return path


def _continue(
    url: str,
    part: Path,
    note: Path,
    first_bytes: int | None,
    total_bytes: int | None,
    say: Callable[[str], None],
) -> None:
    import urllib.request

    known = json.loads(note.read_text()) if note.exists() and part.exists() else {}
    have = part.stat().st_size if known.get("etag") else 0
    wanted = min((size for size in (first_bytes, known.get("bytes")) if size is not None), default=None)
    if have and wanted is not None and have >= wanted:
        return  # an earlier attempt wanted more, or ended before it could say that this is all: asking gives 416
    headers = {"User-Agent": "gpufleet"}
    if have or first_bytes:
        headers["Range"] = f"bytes={have}-{first_bytes - 1 if first_bytes else ''}"
    if have:
        headers["If-Range"] = known["etag"]
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=TIMEOUT_S) as answer:
        if answer.status != 206:  # the whole file: no ranges there, or it has changed since
            have = 0
        size, wanted = _sizes(answer, first_bytes)
        if total_bytes is not None and size is not None and size != total_bytes:
            raise FetchError(f"{url}: {size} bytes on the server, {total_bytes} expected; the file has changed")
        note.write_text(json.dumps({"etag": answer.headers.get("ETag"), "bytes": size}))
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            file.truncate()
            said = have
            while (wanted is None or have < wanted) and (block := answer.read(CHUNK)):
                file.write(block)
                have += len(block)
                if have - said >= 16 * CHUNK:
                    say(f"  {have / 1e6:,.0f} of {wanted / 1e6:,.0f} MB" if wanted else f"  {have / 1e6:,.0f} MB")
                    said = have
    if wanted is not None and have < wanted:
        raise FetchError(f"{url}: the connection ended after {have} of {wanted} bytes; run the command again to go on")


def _sizes(answer: http.client.HTTPResponse, first_bytes: int | None) -> tuple[int | None, int | None]:
    """(bytes of the whole file, bytes that must lie on disk at the end); None where the server does not say."""
    size: int | None = None
    if answer.status == 206:
        total = answer.headers.get("Content-Range", "").rpartition("/")[2]
        size = int(total) if total.isdigit() else None
    elif length := answer.headers.get("Content-Length"):
        size = int(length)
    if first_bytes is None or size is None:
        return size, size
    return size, min(size, first_bytes)
