"""Failed attempts of a node: what is recorded, what is counted, and when the run is given up."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.infra.boot_stubs import DELETE, INSTANCE, RUN, SHUTDOWN, TERMINATE, StubNode

CONTAINER_LOG_LINE = "a line from the job"


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    return StubNode(tmp_path)


def test_a_crash_is_recorded_with_the_job_s_last_lines_and_leaves_the_fleet_alone(node: StubNode) -> None:
    node.job_ends_with(1)

    outcome = node.boot()

    attempt = node.stored(f"attempts/{INSTANCE}.json")
    assert attempt["exit"] | {"at": ""} == {
        "code": 1,
        "reason": "the container ended with 1",
        "notice": False,
        "at": "",
    }
    assert attempt["manifest_at_boot"] is None
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]
    assert not node.has("done.json")
    assert CONTAINER_LOG_LINE in (node.s3 / f"r1/boot/{INSTANCE}.log").read_text()


def test_what_the_supervisor_wrote_into_the_attempt_stays(node: StubNode) -> None:
    written = node.s3 / f"r1/attempts/{INSTANCE}.json"
    stutters = f"touch {node.world / 'fails' / 'read-once'}"  # S3, for a moment
    node.job_ends_with(
        75, f"""{stutters}; echo '{{"gpu": "A10G", "exit": {{"code": 75, "notice": true}}}}' > {written}"""
    )

    node.boot()

    attempt = node.stored(f"attempts/{INSTANCE}.json")
    assert (attempt["gpu"], attempt["exit"]) == ("A10G", {"code": 75, "notice": True})


def test_the_third_crash_without_a_newer_manifest_ends_the_run(node: StubNode) -> None:
    node.earlier_boots(2)
    node.job_ends_with(1)

    outcome = node.boot()

    assert outcome.writes()[-4:] == ["done.json", DELETE, TERMINATE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "boot-loop"


def test_two_nodes_boot_twice_as_often_before_the_run_is_given_up(node: StubNode) -> None:
    node.nodes = 2
    node.imds("meta-data/local-ipv4", "10.1.2.3")
    node.earlier_boots(4)
    node.job_ends_with(1)
    assert node.boot().calls_starting(RUN, DELETE, SHUTDOWN) == [RUN, SHUTDOWN]

    again = StubNode(node.world.parent / "again")
    again.nodes = 2
    again.earlier_boots(6)
    assert again.boot().calls_starting(RUN, DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]
    assert again.stored("done.json")["reason"] == "boot-loop"


def test_a_node_of_several_runs_the_job_where_the_others_reach_it(node: StubNode) -> None:
    node.nodes = 2
    node.imds("meta-data/local-ipv4", "10.1.2.3")

    words = next(call for call in node.boot().calls if call.startswith(RUN)).split()

    assert "GPUFLEET_ADDRESS=10.1.2.3" in words
    assert words[words.index("--network") + 1] == "host"


def test_a_node_of_several_that_has_no_address_runs_nothing(node: StubNode) -> None:
    node.nodes = 2
    outcome = node.boot()
    assert outcome.calls_starting(RUN) == []
    assert "does not give this machine's address" in node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]


@pytest.mark.parametrize(("wanted", "here", "why"), [
    (2, 2, ""),
    (2, 1, "this machine has 1 EFA devices, but its launch template asks for 2"),
    (2, 0, "this machine has 0 EFA devices, but its launch template asks for 2"),
    (0, 1, ""),
])  # fmt: skip
def test_a_node_of_several_with_other_cards_than_declared_trains_nothing(
    node: StubNode, wanted: int, here: int, why: str
) -> None:
    node.nodes, node.efa = 2, wanted
    node.imds("meta-data/local-ipv4", "10.1.2.3")
    for number in range(here):
        (node.root / "dev/infiniband").mkdir(parents=True, exist_ok=True)
        (node.root / f"dev/infiniband/uverbs{number}").touch()
    outcome = node.boot()
    assert outcome.calls_starting(RUN, "docker pull") == ([] if why else ["docker pull", RUN])
    if why:
        assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"] == why


ASKS = "aws stepfunctions start-execution"


@pytest.mark.parametrize("refused", [False, True])
def test_a_node_that_has_let_go_starts_what_asks_for_all_again_and_ends_itself_alone(
    node: StubNode, refused: bool
) -> None:
    node.nodes = 2
    node.imds("meta-data/local-ipv4", "10.1.2.3")
    if refused:
        node.fails("states")
    told = json.dumps({"name": "3-2", "pause_s": 7200.0})
    node.job_ends_with(75, f"echo '{told}' >$(find {node.root} -path '*/run/run.json' -printf '%h')/ask_again.json")
    outcome = node.boot()
    assert outcome.calls_starting(ASKS, DELETE, SHUTDOWN) == [*[ASKS] * (3 if refused else 1), SHUTDOWN]
    call = next(each for each in outcome.calls if each.startswith(ASKS))
    assert "--state-machine-arn arn:aws:states:us-east-2:111122223333:stateMachine:gpufleet-schedules" in call
    assert "--name r1-3-2" in call
    assert json.loads((node.world / "asked").read_text()) == {"pause_s": 7200} if not refused else True
    assert ("AWS launches all again in 120 minutes" in outcome.log) is not refused


def test_boots_that_let_go_are_not_counted(node: StubNode) -> None:
    node.earlier_boots(4, reason="let go")
    assert node.boot().calls_starting(RUN) == [RUN]


def test_a_node_alone_is_given_no_address(node: StubNode) -> None:
    (call,) = [call for call in node.boot().calls if call.startswith(RUN)]
    assert "GPUFLEET_ADDRESS" not in call


def test_a_node_that_finds_three_dead_boots_does_not_start_the_job(node: StubNode) -> None:
    node.earlier_boots(3)

    outcome = node.boot()

    assert outcome.calls_starting(RUN, DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "boot-loop"


def test_interruptions_with_a_notice_are_not_counted(node: StubNode) -> None:
    node.earlier_boots(4, notice=True)

    outcome = node.boot()

    assert outcome.calls_starting(RUN) == [RUN]


def test_a_node_lost_among_results_has_led_somewhere_and_one_that_crashed_there_has_not(node: StubNode) -> None:
    node.earlier_boots(3)
    attempt = node.stored("attempts/i-1.json") | {"results": True}
    node.put("attempts/i-1.json", {key: attempt[key] for key in attempt if key != "exit"})
    assert node.boot().calls_starting(RUN) == [RUN]

    again = StubNode(node.world.parent / "again")
    again.earlier_boots(3)
    again.put("attempts/i-1.json", attempt)
    assert again.boot().calls_starting(RUN) == []


def test_a_node_that_left_results_before_its_notice_begins_a_new_count(node: StubNode) -> None:
    node.earlier_boots(4)
    attempt = node.stored("attempts/i-2.json")
    node.put("attempts/i-2.json", attempt | {"results": True, "exit": {"code": 75, "notice": True}})
    assert node.boot().calls_starting(RUN) == [RUN]


def test_boots_before_the_newest_manifest_are_not_counted(node: StubNode) -> None:
    node.earlier_boots(5, manifest="r1/ckpt/step_00000100/manifest.json")
    for step in (100, 1200):
        node.put(f"ckpt/step_{step:08d}/manifest.json", {})
    node.put("ckpt/step_00009999/model.bin", {})  # no manifest: it does not exist
    node.job_ends_with(1)

    outcome = node.boot()

    assert outcome.calls_starting(RUN, DELETE, SHUTDOWN) == [RUN, SHUTDOWN]
    newest = "r1/ckpt/step_00001200/manifest.json"
    assert node.stored(f"attempts/{INSTANCE}.json")["manifest_at_boot"] == newest


def test_a_crash_after_progress_is_the_first_of_a_new_count(node: StubNode) -> None:
    node.earlier_boots(2)
    manifest = node.s3 / "r1/ckpt/step_00000050/manifest.json"
    node.job_ends_with(1, f"mkdir -p {manifest.parent}; echo '{{}}' > {manifest}")

    outcome = node.boot()

    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]
    assert not node.has("done.json")


@pytest.mark.parametrize(
    ("arrange", "reason"),
    [
        (lambda node: node.fails("pull"), "the image cannot be pulled"),
        (lambda node: node.fails("nvidia-smi"), "no working GPU"),
        (lambda node: setattr(node, "data_volume", "blank"), "/dev/sdf did not appear"),
    ],
    ids=["image", "gpu", "data volume"],
)
def test_a_machine_that_cannot_start_the_job_is_a_failed_attempt(
    node: StubNode, arrange: Callable[[StubNode], None], reason: str
) -> None:
    arrange(node)

    outcome = node.boot()

    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"] == reason
    assert outcome.calls_starting(RUN, DELETE, SHUTDOWN) == [SHUTDOWN]


FULL = "failed to register layer: write /usr/lib/x.so: no space left on device"
PULLS = {
    "disk full": (f"Pulling\n{FULL}\n\nRun 'docker pull --help' for more information\n", FULL, 1),
    "no such digest": ("manifest for x@sha256:aa not found: manifest unknown", "manifest for x@sha256:aa not found", 1),
    "private": ('pull access denied for "x": denied\n', "pull access denied for x: denied", 1),
    "network": ("dial tcp: lookup registry: i/o timeout", "dial tcp: lookup registry: i/o timeout", 5),
}


@pytest.mark.parametrize(("says", "why", "times"), PULLS.values(), ids=PULLS.keys())
def test_a_pull_is_tried_again_only_where_that_can_help_and_its_cause_is_in_the_attempt(
    node: StubNode, says: str, why: str, times: int
) -> None:
    node.says("pull", says)

    outcome = node.boot()

    assert outcome.calls_starting("docker pull") == ["docker pull"] * times
    reason = node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]
    assert reason.startswith(f"the image cannot be pulled: {why}")


def test_a_driver_that_does_not_answer_is_found_before_the_image_is_pulled(node: StubNode) -> None:
    node.says("nvidia-smi", "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n")

    outcome = node.boot()

    assert outcome.calls_starting("docker pull") == []
    reason = node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]
    assert reason.startswith("no working GPU: NVIDIA-SMI has failed because it couldn't communicate")


def test_a_container_that_docker_cannot_start_leaves_docker_s_words_in_the_attempt(node: StubNode) -> None:
    said = 'docker: Error response from daemon: could not select device driver "".'
    node.job_ends_with(125, f"""echo '{said}'; echo; echo "See 'docker run --help'." """)

    node.boot()

    reason = node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]
    assert reason == "the container ended with 125: " + said.replace('"', "")


@pytest.mark.parametrize("what", ["run.json", "inputs"])
def test_an_object_with_another_hash_is_not_run(node: StubNode, what: str) -> None:
    script = node.script()
    changed = node.s3 / "r1/run.json" if what == "run.json" else next((node.s3 / "inputs").rglob("*.gz"))
    changed.write_bytes(b"something else")

    outcome = node.boot(script)

    assert outcome.calls_starting(RUN, SHUTDOWN) == [SHUTDOWN]
    assert "cannot be had as declared" in node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]
    assert "sha256 is" in outcome.log


def test_without_metadata_the_machine_shuts_down(node: StubNode) -> None:
    script = node.script()
    (node.world / "imds").rename(node.world / "gone")

    assert node.boot(script).calls == [SHUTDOWN]


@pytest.mark.parametrize("broken", ["list", "write"])
def test_a_machine_that_cannot_record_its_attempt_stops_the_fleet(node: StubNode, broken: str) -> None:
    node.fails(broken)

    outcome = node.boot()

    assert outcome.calls_starting(RUN, DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]


def test_an_error_nobody_thought_of_shuts_the_machine_down_and_counts(node: StubNode) -> None:
    node.breaks(at='say("starting the container")', by="raise ZeroDivisionError")

    outcome = node.boot()

    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"] == "the node script stopped unexpectedly"
    assert outcome.calls_starting(RUN, SHUTDOWN) == [SHUTDOWN]


def test_a_rebooted_machine_counts_as_failed_and_is_replaced(node: StubNode) -> None:
    node.job_ends_with(1)
    node.boot()
    again = node.root / "var/lib/cloud/scripts/per-boot/gpufleet"  # what cloud-init runs at a second boot
    (node.world / "calls").write_text("")

    outcome = node.boot(again)

    assert outcome.calls_starting(RUN, DELETE, SHUTDOWN) == [SHUTDOWN]
    assert "the machine was rebooted" in outcome.log
