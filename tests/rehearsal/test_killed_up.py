"""An `up` that was killed: what it left is found, and `gpufleet sweep --delete` removes it, whenever the kill came."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpufleet.infra.cli import main
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, Pulumi
from tests import forked
from tests.rehearsal.engine_world import STACK, pinned, project
from tests.rehearsal.killed import WRITES, killed_engine, killed_standin, seeded

SEEDS = range(60)
SLOW = [pytest.param(seeded(seed), marks=pytest.mark.slow, id=f"seed{seed}") for seed in SEEDS]
# Right after what makes trouble: a part that the next one needs, one that is in two steps, a bucket without its tags, a
# node that runs.
SAMPLE = [
    *(pytest.param(call, marks=pytest.mark.slow) for call in ("CreateSubnet", "CreateInternetGateway")),
    *("PUT", "CreateFleet"),
]


@dataclass
class KilledWorld:
    cloud: Cloud
    project: Path


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KilledWorld]:
    folder = pinned(project(tmp_path / "project")).parents[1]
    monkeypatch.chdir(folder)
    with Cloud(tmp_path / "cloud", clock=ManualClock()) as cloud:
        for name, value in cloud.environment().items():
            monkeypatch.setenv(name, value)
        yield KilledWorld(cloud, folder)


def stays(world: KilledWorld) -> set[tuple[str, str]]:
    """What is left after a sweep, but for a bucket: kept, or without the tags that would say whose it is."""
    return {(kind, name) for kind, name in world.cloud.leftovers() if kind != "bucket"}


@pytest.mark.parametrize("at", [*SAMPLE, *SLOW])
def test_a_sweep_removes_what_a_killed_up_has_left(
    world: KilledWorld, at: int | str, capsys: pytest.CaptureFixture[str]
) -> None:
    done = killed_standin(world.cloud, world.project, at)
    assert at in (len(done), done[-1])
    assert main(["sweep", STACK]) == (1 if stays(world) else 0), capsys.readouterr().out
    assert main(["sweep", STACK, "--delete", "--yes"]) == 0, capsys.readouterr().out
    assert stays(world) == set()
    with (
        forked.programs(world.project),
        Engine.open(world.project, world.cloud.environment(), STACK, real=False) as engine,
    ):
        assert engine.up().ok
        assert engine.destroy().ok
    assert main(["sweep", STACK]) == 0, capsys.readouterr().out


@pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")
@pytest.mark.parametrize("at", [pytest.param("CreateFleet", marks=pytest.mark.slow), *SLOW])
def test_cancel_sweep_and_up_get_the_engine_s_stack_out_again(
    world: KilledWorld, at: int | str, capsys: pytest.CaptureFixture[str]
) -> None:
    killed_engine(world.cloud, world.project, at)
    with Engine.open(world.project, world.cloud.environment(), STACK, real=True) as engine:
        assert isinstance(engine, Pulumi)
        engine._run(["pulumi", "cancel", "--yes", "--non-interactive", "--stack", STACK])
        if forgotten := [name for kind, name in world.cloud.leftovers() if kind == "fleet"]:
            named = f"{forgotten[0]} of run r1 is in us-east-2, and this stack's state does not know of it"
            assert named in engine.preview().diagnostics
            refused = engine.up()
            assert not refused.ok
            assert named in refused.diagnostics
            assert refused.affected("create") == set()
        assert main(["sweep", STACK, "--delete", "--yes"]) == 0, capsys.readouterr().out
        assert stays(world) == set()
        again = engine.up()
        assert again.ok, again.text
        destroyed = engine.destroy()
        assert destroyed.ok, destroyed.text
    assert main(["sweep", STACK]) == 0, capsys.readouterr().out


def test_the_kills_are_spread_over_a_whole_up(world: KilledWorld) -> None:
    assert len(killed_standin(world.cloud, world.project, 0)) == WRITES
