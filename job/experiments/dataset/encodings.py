"""Recognises files that are not UTF-8 text by their beginning, and says how to convert them."""

from __future__ import annotations

from pathlib import Path

_UTF16 = "convert the file first: iconv -f UTF-16 -t UTF-8 OLD > NEW"
_BEGINS = {
    b"\xff\xfe\0\0": "convert the file first: iconv -f UTF-32 -t UTF-8 OLD > NEW",
    b"\xff\xfe": _UTF16,  # the > of PowerShell writes files that begin with this
    b"\xfe\xff": _UTF16,
    b"\x1f\x8b": "it is compressed; unpack it first: gunzip",
    b"(\xb5/\xfd": "it is compressed; unpack it first: unzstd",
    b"BZh": "it is compressed; unpack it first: bunzip2",
    b"\xfd7zXZ\0": "it is compressed; unpack it first: unxz",
    b"\x04\x22\x4d\x18": "it is compressed; unpack it first: unlz4",
    b"PK\x03\x04": "it is an archive; unpack it first: unzip",
    b"7z\xbc\xaf": "it is an archive; unpack it first: 7z x",
    b"PAR1": "it is Parquet; write it as text first, for example with pandas.read_parquet",
    b"ARROW1": "it is Arrow; write it as text first, for example with pandas.read_feather",
    b"\xff\xff\xff\xff": "it is an Arrow stream, as `datasets` keeps one; write it as text first: Dataset.to_json",
    b"\0\x05\x16\x07": "it is a file that macOS keeps beside another: name the file without ._ before its name",
}
# control characters, without those that occur in texts and terminals
_NOT_TEXT = frozenset(range(32)) - set(b"\t\n\f\r\x1b")
LOOKED_AT = 1 << 16  # number of characters that are checked
NOISE = 0.01  # a larger share of control characters (0x80 to 0x9f of Unicode too) means that a file is not text


def foreign(content: bytes) -> str:
    """A sentence about what to do with a file that begins with `content`; empty if the file may be text."""
    return next((todo for begin, todo in _BEGINS.items() if content.startswith(begin)), "")


def not_utf8(content: bytes, error: UnicodeDecodeError) -> str:
    """Why `content`, a file or its first line, cannot be read, and what to do. The advice names the encoding for iconv.
    Without it, iconv would use the encoding of the terminal, mostly UTF-8, and stop at the same byte.
    """
    todo = "convert the file first, e.g. iconv -f LATIN1 -t UTF-8 OLD > NEW"
    if odd := next((byte for byte in content if byte in _NOT_TEXT), None):
        todo = f"it contains bytes that no text has (0x{odd:02x}): write it as text with the program that made it"
    return f"not UTF-8 (byte {error.start}); {foreign(content) or todo}"


def require_text(text: str, path: Path) -> None:
    """Raises ValueError for valid UTF-8 that is not text, such as a compressed file that iconv has converted from
    Latin-1.
    """
    begin = text[:LOOKED_AT]
    odd = sum(ord(letter) in _NOT_TEXT or 0x7F <= ord(letter) < 0xA0 for letter in begin)
    if odd > NOISE * len(begin):
        raise ValueError(
            f"{path}: of its first {len(begin):,} characters {odd:,} do not occur in texts: was it compressed, or in "
            "another format, before it became UTF-8? Name the text itself"
        )
