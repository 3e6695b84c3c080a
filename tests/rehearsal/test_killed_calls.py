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
from killed import Mode
from killed_calls import SharedAccount, shared_account

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


def test_a_destroy_that_hears_nothing_of_its_fleet_s_deletion_leaves_nothing(account: SharedAccount) -> None:
    found = account.kill("destroy", "no answer", "DeleteFleets")
    assert found.fired
    assert found.holds, found


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
