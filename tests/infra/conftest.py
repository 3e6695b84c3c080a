"""What the tests of several commands begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from commands_world import account, definition, project

from infra.definition import StackDefinition
from rehearsal.cloud import Cloud


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackDefinition:
    """A small stack's definition, its project the current directory."""
    return definition(project(tmp_path, monkeypatch))


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """An embedded AWS that is everybody's AWS."""
    with account(tmp_path, monkeypatch) as cloud:
        yield cloud
