"""Texts that are frozen in files: `GPUFLEET_FREEZE=1`, as `make freeze` has it, writes down a deliberate change."""

from __future__ import annotations

import os
from pathlib import Path


def assert_frozen(path: Path, text: str) -> None:
    """Fails where `text` is not what the file holds."""
    if os.environ.get("GPUFLEET_FREEZE"):
        path.write_text(text)
    assert text == path.read_text(), f"{path.name} says otherwise; `make freeze` writes down what is meant"
