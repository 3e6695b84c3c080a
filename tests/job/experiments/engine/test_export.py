"""Exported weights never lie beside the meta file of others, wherever a node is lost."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import nn

from gpufleet.job.experiments.engine import export


def lost(*_: object) -> None:
    raise KeyboardInterrupt


def lost_behind(source: Path, path: Path) -> None:
    path.write_bytes(source.read_bytes())
    raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("where", "how", "again"),
    [
        (export, ("describe", lost), lambda made, folder: export.export(folder, nn.Linear(2, 2), {})),
        (os, ("link", lost_behind), lambda made, folder: export.copy(made, folder)),
    ],
    ids=["exported", "copied"],
)
def test_an_export_that_is_cut_short_is_not_complete(
    where: object,
    how: tuple[str, Callable[..., None]],
    again: Callable[[Path, Path], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("made", "final"):
        export.export(tmp_path / name, nn.Linear(2, 2), {})
    monkeypatch.setattr(where, *how)
    with pytest.raises(KeyboardInterrupt):
        again(tmp_path / "made", tmp_path / "final")
    assert not (tmp_path / "final" / export.META).exists()
