"""What makes UTF-8 text of a file that is none, told by how it begins."""

from __future__ import annotations

_UTF16 = "convert the file first: iconv -f UTF-16 -t UTF-8 OLD > NEW"
_BEGINS = {
    b"\xff\xfe": _UTF16,  # as PowerShell's > writes it
    b"\xfe\xff": _UTF16,
    b"\x1f\x8b": "it is compressed; unpack it first: gunzip",
    b"(\xb5/\xfd": "it is compressed; unpack it first: unzstd",
    b"PK\x03\x04": "it is an archive; unpack it first: unzip",
    b"PAR1": "it is Parquet; write it as text first, for example with pandas.read_parquet",
}


def foreign(content: bytes) -> str:
    """What to do with a file that begins like `content`; nothing where it may be text."""
    return next((todo for begin, todo in _BEGINS.items() if content.startswith(begin)), "")


def not_utf8(content: bytes, error: UnicodeDecodeError) -> str:
    """Why `content`, a file or its first line, cannot be read, and what to do. iconv has to be told what a file is in:
    else it takes it for what the terminal is in, mostly UTF-8, and stops at the same byte.
    """
    latin = "convert the file first, e.g. iconv -f LATIN1 -t UTF-8 OLD > NEW"
    return f"not UTF-8 (byte {error.start}); {foreign(content) or latin}"
