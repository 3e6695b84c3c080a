"""The recorder writes what is recorded."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.released.record import main
from tests.released.recorded import RELEASES


def names(folder: Path) -> set[str]:
    """Files below a folder; the day of the prices is left out."""
    found = (path.relative_to(folder).parts for path in folder.rglob("*") if path.is_file())
    return {"/".join(part for part in parts if not part[0].isdigit()) for parts in found}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
def test_a_record_of_this_version_has_what_the_last_one_has(tmp_path: Path) -> None:
    main(tmp_path / "recorded")
    assert names(tmp_path / "recorded") >= names(RELEASES[-1])
