"""The script before and around job/node: it fetches and starts it, and ends a machine that cannot run it."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.infra.boot_stubs import BUCKET, DELETE, INSTANCE, RUN, SHUTDOWN, TERMINATE, StubNode
from tests.waiting import wait_for

BROKEN = {
    "a syntax error": (")", 1),
    "killed": ("os.kill(os.getpid(), 9)", 137),
    "gone without a word": ("os._exit(3)", 3),
}


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    return StubNode(tmp_path)


def test_the_archive_comes_from_the_address_that_its_hash_names(node: StubNode) -> None:
    node.boot()

    (fetch,) = (node.world / "fetched").read_text().splitlines()
    sha256 = next((node.s3 / "inputs").iterdir()).name
    assert fetch.startswith(f"aws s3 cp s3://{BUCKET}/inputs/{sha256}/job.tar.gz {node.root}/opt/gpufleet/job.tar.gz ")


@pytest.mark.parametrize(("by", "code"), BROKEN.values(), ids=BROKEN.keys())
def test_a_machine_on_which_the_node_breaks_deletes_the_fleet_and_shuts_down(
    node: StubNode, by: str, code: int
) -> None:
    node.breaks(at="signal.signal(signal.SIGTERM, self._terminated)", by=by)

    outcome = node.boot()

    assert outcome.calls_starting(RUN, DELETE, TERMINATE, SHUTDOWN) == [DELETE, TERMINATE, SHUTDOWN]
    exit_ = node.stored(f"attempts/{INSTANCE}.json")["exit"]
    assert (exit_["code"], exit_["reason"], exit_["notice"]) == (1, f"job/node ended with {code}", False)
    assert f"job/node ended with {code}" in (node.s3 / f"r1/boot/{INSTANCE}.log").read_text()


def test_a_node_that_breaks_amid_its_attempt_keeps_what_it_recorded(node: StubNode) -> None:
    node.breaks(at='say("starting the container")', by="os._exit(3)")

    outcome = node.boot()

    assert outcome.calls_starting(DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]
    assert node.stored(f"attempts/{INSTANCE}.json")["type"] == "g5.2xlarge"


def test_without_the_archive_no_other_machine_follows(node: StubNode) -> None:
    node.fails("read")

    outcome = node.boot()

    assert outcome.calls_starting(DELETE, TERMINATE, SHUTDOWN) == [DELETE, TERMINATE, SHUTDOWN]
    reason = node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]
    assert reason == "the job archive cannot be had as declared"


def test_a_shutdown_that_the_system_refuses_is_asked_for_until_the_timer_ends_the_run(node: StubNode) -> None:
    with (node.bin / "shutdown").open("a") as shutdown:
        shutdown.write('[[ $(grep -c ^shutdown "$WORLD/calls") != 5 ]] || touch "$WORLD/asked"\nexit 1\n')
    (node.world / "timer-fires").write_text("asked")
    node.job_ends_with(1)

    outcome = node.boot()

    assert node.stored("done.json")["reason"] == "timer"
    assert outcome.calls_starting(DELETE) == [DELETE] * 2  # by the timer, then by the script
    assert outcome.calls_starting(SHUTDOWN) == [SHUTDOWN] * 15


def test_sigterm_while_the_archive_is_fetched_shuts_down_and_leaves_the_fleet(node: StubNode) -> None:
    aws = node.bin / "aws"
    waits = 'touch "$WORLD/fetching"; until [[ -e $WORLD/asked ]]; do /bin/sleep 0.02; done'
    aws.write_text(aws.read_text().replace("case ", f"{waits}\ncase ", 1))
    process = node.start()
    wait_for("the fetch of the archive", (node.world / "fetching").exists, process=process)

    process.send_signal(signal.SIGTERM)
    (node.world / "asked").touch()

    assert node.outcome(process).calls == [SHUTDOWN]
