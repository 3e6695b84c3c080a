"""A node whose fleet no stack's state knows of ends it: nobody else would."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.job.contract.bucket import fleet_key
from gpufleet.job.node import __main__ as node_main
from tests.infra.boot_stubs import DELETE, FLEET, INSTANCE, RUN, SHUTDOWN, TERMINATE, StubNode

# The node has looked twice since, so that it knows the answer to the first look; or was refused as often.
LOOKED = (
    "n=$(grep -c known_fleet $WORLD/calls);"
    " until [[ $(grep -c known_fleet $WORLD/calls) -gt $((n+1)) ]]; do /bin/sleep 0.02; done"
)
REFUSED = "until [[ $(grep -c list $WORLD/refused) -gt 10 ]]; do /bin/sleep 0.02; done"
FOR_EVER = "while [[ ! -e $WORLD/stopped ]]; do /bin/sleep 0.02; done"
ENDS = [RUN, "docker stop -t 115", DELETE, TERMINATE, SHUTDOWN]


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    made = StubNode(tmp_path)
    patient(made, 0.5)
    return made


def patient(node: StubNode, seconds: float) -> None:
    """It looks each twentieth of a second, and waits so long."""
    node.breaks(at=f"= {node_main.UNKNOWN_S}, {node_main.KNOWN_LOOK_S}", by=f"= {seconds}, 0.05")


def known(node: StubNode) -> Path:
    return node.s3 / "r1" / fleet_key(FLEET)


def test_a_fleet_that_no_state_knows_of_is_ended_and_its_node_too(node: StubNode) -> None:
    known(node).unlink()
    node.job_ends_with(75, FOR_EVER)

    outcome = node.boot()

    assert outcome.calls_starting(*ENDS[1:]) == ENDS[1:]  # a slow boot may not have come to the job
    assert "its fleet is in no stack's state" in node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]


def test_of_two_fleets_of_a_run_the_one_that_the_state_does_not_know_ends_and_leaves_the_run_to_the_other(
    node: StubNode,
) -> None:
    known(node).rename(node.s3 / "r1" / fleet_key("fleet-other"))
    node.job_ends_with(75, FOR_EVER)

    outcome = node.boot()

    assert outcome.calls_starting(*ENDS[1:]) == ENDS[1:]  # a slow boot may not have come to the job
    assert not node.has("done.json")  # it would end the other's run


def test_a_fleet_that_a_destroy_was_about_to_delete_ends(node: StubNode) -> None:
    node.job_ends_with(75, f"{LOOKED}; rm {known(node)}; {FOR_EVER}")

    outcome = node.boot()

    assert outcome.calls_starting(*ENDS) == ENDS
    assert not node.has("done.json")


def test_a_node_whose_bucket_is_gone_ends_its_fleet(node: StubNode) -> None:
    gone = "An error occurred (NoSuchBucket) when calling the ListObjectsV2 operation"
    aws = node.bin / "aws"
    aws.write_text(
        aws.read_text().replace(
            "fails list &&", f'[[ ! -e $WORLD/gone ]] || {{ echo "{gone}" >&2; exit 254; }}\n    fails list &&'
        )
    )
    node.job_ends_with(75, f"touch $WORLD/gone; rm -r {node.s3}; {FOR_EVER}")

    outcome = node.boot()

    assert outcome.calls_starting(*ENDS) == ENDS


def test_an_s3_that_does_not_answer_ends_no_fleet_that_was_known(node: StubNode) -> None:
    trouble = node.world / "fails" / "list"
    node.job_ends_with(0, f"{LOOKED}; touch {trouble}; {REFUSED}; rm {trouble}")

    outcome = node.boot()

    assert outcome.calls_starting(*ENDS) == [RUN, DELETE, TERMINATE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "finished"


def test_a_fleet_is_given_ten_minutes_to_become_known(tmp_path: Path) -> None:
    assert node_main.UNKNOWN_S == 600
    node = StubNode(tmp_path)
    patient(node, 5000)
    known(node).unlink()
    node.job_ends_with(0, f"{LOOKED}; mkdir -p {known(node).parent}; touch {known(node)}; {LOOKED}")

    outcome = node.boot()

    assert outcome.calls_starting(*ENDS) == [RUN, DELETE, TERMINATE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "finished"
