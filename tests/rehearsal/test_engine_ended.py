"""Ctrl-C while the engine works: it is asked to end, with the plugins that only it knows, and else killed."""

from __future__ import annotations

import os

import pytest

from gpufleet.infra.program.pulumi_cli import END_S, streamed
from tests.waiting import is_alive, wait_for


def started(script: str, end_s: float = END_S) -> list[int]:
    """Process ids that the script prints in its one line, at which Ctrl-C comes."""
    pids: list[int] = []

    def interrupted(line: str) -> None:
        pids.extend(map(int, line.split()))
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        streamed(["bash", "-c", script], folder=None, environment=os.environ, say=interrupted, end_s=end_s)
    return pids


def test_it_is_asked_so_that_it_can_end_its_plugins() -> None:
    engine, plugin = started("setsid sleep 5000 & trap 'kill $!; exit' INT; echo $$ $!; wait")
    wait_for("the end of both", lambda: not is_alive(engine) and not is_alive(plugin))


def test_it_is_killed_with_its_group_when_it_does_not_listen() -> None:
    engine, child = started("trap '' INT; sleep 5000 & echo $$ $!; wait", end_s=0.2)
    wait_for("the end of both", lambda: not is_alive(engine) and not is_alive(child))
