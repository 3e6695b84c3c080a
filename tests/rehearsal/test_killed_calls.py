"""`up` and `destroy` of the engine, killed at any of their calls to AWS or left without an answer: cancel, destroy and
one sweep leave nothing, touch nothing of others, and no node runs on behind an exit code 0. `python bench/kills.py`
prints the table.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.job.node import __main__ as node_main
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.node import NodeRunner
from tests.rehearsal.engine_world import edit, pinned, project
from tests.rehearsal.killed import Mode, killed_engine
from tests.rehearsal.killed_calls import SharedAccount, shared_account
from tests.repository import ROOT
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH")


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SharedAccount]:
    with shared_account(tmp_path_factory.mktemp("shared")) as made:
        yield made


def test_an_up_killed_after_it_has_made_its_fleet_leaves_a_node_that_ends_itself_and_a_destroy_that_says_so(
    account: SharedAccount,
) -> None:
    found = account.kill("up", "killed", "CreateFleet")
    assert found.holds, found
    assert (found.running, found.known, found.destroyed) == (1, 0, False)


@pytest.mark.slow  # of each CI's chaos one such cut comes, at any call of either command
def test_a_destroy_that_hears_nothing_of_its_fleet_s_deletion_leaves_nothing(account: SharedAccount) -> None:
    found = account.kill("destroy", "no answer", "DeleteFleets")
    assert found.fired
    assert found.holds, found


@pytest.mark.slow
def test_the_node_of_an_up_killed_after_its_fleet_ends_both_with_the_rights_it_has(tmp_path: Path) -> None:
    """The real script in the embedded AWS; ten minutes are ten seconds."""
    root, code = pinned(project(tmp_path / "project")).parents[1], tmp_path / "code"
    for package in ("gpufleet", "infra", "job"):
        shutil.copytree(ROOT / package, code / package, symlinks=True)
    main = code / "job/node/__main__.py"
    edit(main, f"= {node_main.UNKNOWN_S}, {node_main.KNOWN_LOOK_S}", "= 10, 1")
    with Cloud(tmp_path / "cloud") as cloud:
        runner = NodeRunner(cloud, tmp_path / "nodes")
        try:
            killed_engine(cloud, root, "CreateFleet", environment={"PYTHONPATH": str(code)})
            (fleet,) = cloud.fleets.fleets.values()

            def logs() -> str:
                return "\n".join(node.log.read_text() for node in runner.nodes.values())

            wait_for("the fleet's deletion", lambda: fleet.state == "deleted", log=logs)
        finally:
            runner.close()
        (node,) = cloud.instances()  # nothing came after it
        assert node.ended_at is not None
        said = runner.nodes[node.id].log.read_text()
    assert "its fleet is in no stack's state" in said
    assert "is deleted" in said


@pytest.mark.slow
@pytest.mark.timeout(6 * 3600)
@pytest.mark.parametrize("mode", ["killed", "no answer"])
@pytest.mark.parametrize("command", ["up", "destroy"])
def test_whatever_call_it_is_killed_at_nothing_is_left(command: str, mode: Mode, tmp_path: Path) -> None:
    with shared_account(tmp_path) as account:
        for at in itertools.count(1):
            found = account.kill(command, mode, at)
            assert found.holds, (at, found)
            if not found.fired:  # it has fewer calls
                break
    assert at > 75
