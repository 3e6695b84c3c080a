"""What holds for every test."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from gpufleet.rehearsal.environment import forget_account
from tests import descriptions, own_prices  # noqa: F401 - before anything has read the catalog or a description
from tests.dates import MOVED_CLOCK
from tests.waiting import children

# A shell starts what it puts in the background with Ctrl-C ignored, and every process started from there inherits it.
# The tests press Ctrl-C themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)
# With an AWS_PROFILE that is not there moto cannot be imported, and through a user's proxy no server here be reached.
forget_account()
for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
    del os.environ[name]
os.environ.pop("COLUMNS", None)  # pytest's workers set it, and what is no terminal has lines of 100
if MOVED_CLOCK:  # also for those whose environment a test has made, a node's say
    _start: Any = subprocess.Popen.__init__

    def _start_moved(self: Any, *words: Any, env: Any = None, **how: Any) -> None:
        _start(self, *words, env=None if env is None else {**MOVED_CLOCK, **env}, **how)

    subprocess.Popen.__init__ = _start_moved  # type: ignore[method-assign]
SERVERS = re.compile(r"multiprocessing\.|forked|judge\.child \d+ (compile|serve)")  # which serve all tests of a worker
LONG = (
    "test_engine_real.py",
    "test_shared_campaign.py",
    "test_shared_node.py",
    "test_stages.py",
    "test_killed_calls.py",
    "test_member.py",
    "test_campaign_command.py",
    "test_canary.py",
    "test_block_real.py",
    "test_training_run.py",
    "test_gang_schedules.py",
    "test_run_command.py",
    "test_run_stages.py",
    "test_command_attempts.py",
    "test_states.py",
    "test_component_package.py",
    "test_json_schema.py",
    "test_rehearse_failures.py",
    "test_command_endings.py",
    "test_init_command.py",
    "test_compare_command.py",
    "test_container_real.py",
    "test_frozen.py",
)


@pytest.fixture(autouse=True)
def _no_process_is_left() -> Iterator[None]:
    """What a test has started it ends and reaps itself: else it works on beside the next test."""
    before = children()
    yield
    left = {pid: words for pid, words in children().items() if pid not in before and not SERVERS.search(words)}
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
    assert not left, f"the test has left processes behind: {left}"


@pytest.fixture(scope="session", autouse=True)
def _programs_of_the_engine_are_forks() -> Iterator[None]:
    from tests import warm  # after the account is forgotten

    with warm.programs():
        yield


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """What is imported and collected stays: the garbage collector need not look at it, a fifth of a worker's start."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files of half a minute and more begin first, so that no worker has one left when the others are done."""
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure() -> None:
    """pytest collects garbage ten times at its end, for errors in what is torn down. The first finds them; each of the
    others would look through all of torch again, for a third of a second.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadgroup`, and a file's tests go to one worker too. Files that share what takes 3 to 8 s to make once
    (the funnel's servers, a server of ranks, trained models) name a group: `pytest.mark.xdist_group("kernels")`.
    """
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class Scheduling(LoadGroupScheduling):  # type: ignore[misc]  # xdist has no types
        def _split_scope(self, nodeid: str) -> str:
            group: str = super()._split_scope(nodeid)
            return nodeid.split("::")[0] if group == nodeid else group

    return Scheduling(config, log)
