"""Fixtures of the tests of several commands."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.evidence.speeds import Expected, SpeedGroup, Speeds
from gpufleet.infra.risk import unknown
from gpufleet.rehearsal.cloud import Cloud
from tests.infra import review_world
from tests.infra.commands_world import account, definition
from tests.infra.commands_world import project as stack_project


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small stack's file, in a project that is the current directory."""
    return stack_project(tmp_path, monkeypatch)


@pytest.fixture
def stack(path: Path) -> StackDefinition:
    """That stack's definition."""
    return definition(path)


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """An embedded AWS that every client uses."""
    with account(tmp_path, monkeypatch) as cloud:
        yield cloud


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> review_world.Project:
    """An empty repository with a project in it, which is the current directory."""
    return review_world.enter(tmp_path, monkeypatch)


PLANNED = {"mixture": 0.5, "from scratch": 0.5, "adapter": 0.45, "all weights": 0.4, "": 0.5}


@pytest.fixture
def everything_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sets round shares of the roofline and exact speed, price and set-up, so that only interruptions are uncertain."""
    for name in ("MEASURED", "STATED", "PAGE", "SETUP", "SETUP_MEASURED", "MOST_PRICE"):
        monkeypatch.setattr(unknown, name, 0.0)

    def expect(_: Speeds, place: SpeedGroup) -> Expected:
        share = 0.45 if place.several and place.kind == "from scratch" else PLANNED[place.kind]
        return Expected(share=share, sigma=0.0, shared=0.0, whose="from public measurements")

    monkeypatch.setattr(Speeds, "expect", expect)
