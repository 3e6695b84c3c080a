"""What the tests of several commands begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import review_world
from commands_world import account, definition
from commands_world import project as stack_project

from infra.definition import StackDefinition
from rehearsal.cloud import Cloud


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> StackDefinition:
    """A small stack's definition, its project the current directory."""
    return definition(stack_project(tmp_path, monkeypatch))


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """An embedded AWS that is everybody's AWS."""
    with account(tmp_path, monkeypatch) as cloud:
        yield cloud


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> review_world.Project:
    """An empty repository with a project in it, which is the current directory."""
    return review_world.enter(tmp_path, monkeypatch)
