"""The node script, run for real: what a machine does in each case, and in which order."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from boot_stubs import FLEET, INSTANCE, Node, Outcome

MODIFY = "aws ec2 modify-fleet"
DELETE = "aws ec2 delete-fleets"
SHUTDOWN = "shutdown -h now"
RUN = "docker run"
CONTAINER_LOG_LINE = "a line from the job"


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def uploads(outcome: Outcome) -> list[str]:
    """Keys under the run's prefix that the node wrote, and the calls that end a run, in order."""
    found = []
    for call in outcome.calls:
        words = call.split()
        if call.startswith("aws s3 cp /"):
            found.append(words[4].removeprefix("s3://gpufleet-test/r1/"))
        elif call.startswith((MODIFY, DELETE, SHUTDOWN, RUN)):
            found.append(" ".join(words[: 3 if words[0] == "aws" else 2]))
    return found


def test_a_finished_job_uploads_then_marks_then_sets_the_fleet_to_zero_then_shuts_down(node: Node) -> None:
    outcome = node.boot()

    assert uploads(outcome) == [
        f"attempts/{INSTANCE}.json",
        RUN,
        f"attempts/{INSTANCE}.json",
        f"boot/{INSTANCE}.log",
        "done.json",
        MODIFY,
        "shutdown -h",
    ]
    assert node.stored("done.json") | {"at": ""} == {
        "schema": 1,
        "reason": "finished",
        "detail": "",
        "instance": INSTANCE,
        "at": "",
    }


def test_a_run_that_is_over_is_ended_before_anything_is_started(node: Node) -> None:
    node.put("done.json", {"reason": "finished"})

    outcome = node.boot()

    assert uploads(outcome) == [f"boot/{INSTANCE}.log", MODIFY, "shutdown -h"]
    assert outcome.calls[0].startswith("aws s3api list-objects-v2")  # the marker is read first
    assert not node.has(f"attempts/{INSTANCE}.json")


def test_the_supervisors_done_marker_is_not_overwritten(node: Node) -> None:
    marker = node.s3 / "r1/done.json"
    node.job_ends_with(0, f"""echo '{{"reason": "max_usd"}}' > {marker}""")

    node.boot()

    assert node.stored("done.json") == {"reason": "max_usd"}


def test_a_job_that_failed_for_good_ends_the_run(node: Node) -> None:
    node.job_ends_with(70)

    outcome = node.boot()

    assert outcome.told(MODIFY, SHUTDOWN) == [MODIFY, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "failed"


def test_the_modify_call_names_the_fleet_zero_and_termination(node: Node) -> None:
    outcome = node.boot()

    call = next(call for call in outcome.calls if call.startswith(MODIFY)).split()
    assert call[call.index("--fleet-id") + 1] == FLEET
    assert call[call.index("--target-capacity-specification") + 1] == "TotalTargetCapacity=0"
    assert call[call.index("--excess-capacity-termination-policy") + 1] == "termination"


def test_a_crash_is_recorded_with_the_job_s_last_lines_and_leaves_the_fleet_alone(node: Node) -> None:
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
    assert outcome.told(MODIFY, DELETE, SHUTDOWN) == [SHUTDOWN]
    assert not node.has("done.json")
    assert CONTAINER_LOG_LINE in (node.s3 / f"r1/boot/{INSTANCE}.log").read_text()


def test_what_the_supervisor_wrote_into_the_attempt_stays(node: Node) -> None:
    written = node.s3 / f"r1/attempts/{INSTANCE}.json"
    node.job_ends_with(75, f"""echo '{{"gpu": "A10G", "exit": {{"code": 75, "notice": true}}}}' > {written}""")

    node.boot()

    attempt = node.stored(f"attempts/{INSTANCE}.json")
    assert (attempt["gpu"], attempt["exit"]) == ("A10G", {"code": 75, "notice": True})


def test_an_interrupted_node_over_an_hour_old_shuts_down_at_once(node: Node) -> None:
    node.job_ends_with(75)

    outcome = node.boot()

    assert outcome.told(MODIFY, DELETE, SHUTDOWN) == [SHUTDOWN]
    assert "waiting for AWS" not in outcome.log
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["code"] == 75


def test_an_interrupted_node_in_its_first_hour_waits_for_aws_but_not_for_ever(node: Node) -> None:
    node.launched(minutes_ago=10)
    node.notice()
    node.job_ends_with(75)

    outcome = node.boot()

    assert "waiting for AWS" in outcome.log
    assert outcome.told(MODIFY, DELETE, SHUTDOWN) == [SHUTDOWN]
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["notice"] is True


def test_the_third_crash_without_a_newer_manifest_ends_the_run(node: Node) -> None:
    node.earlier_boots(2)
    node.job_ends_with(1)

    outcome = node.boot()

    assert uploads(outcome)[-3:] == ["done.json", MODIFY, "shutdown -h"]
    assert node.stored("done.json")["reason"] == "boot-loop"


def test_a_node_that_finds_three_dead_boots_does_not_start_the_job(node: Node) -> None:
    node.earlier_boots(3)

    outcome = node.boot()

    assert outcome.told(RUN, MODIFY, SHUTDOWN) == [MODIFY, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "boot-loop"


def test_interruptions_with_a_notice_are_not_counted(node: Node) -> None:
    node.earlier_boots(4, notice=True)

    outcome = node.boot()

    assert outcome.told(RUN) == [RUN]


def test_boots_before_the_newest_manifest_are_not_counted(node: Node) -> None:
    node.earlier_boots(5, manifest="r1/ckpt/step_00000100/manifest.json")
    for step in (100, 1200):
        node.put(f"ckpt/step_{step:08d}/manifest.json", {})
    node.put("ckpt/step_00009999/model.bin", {})  # no manifest: it does not exist
    node.job_ends_with(1)

    outcome = node.boot()

    assert outcome.told(RUN, MODIFY, SHUTDOWN) == [RUN, SHUTDOWN]
    newest = "r1/ckpt/step_00001200/manifest.json"
    assert node.stored(f"attempts/{INSTANCE}.json")["manifest_at_boot"] == newest


def test_a_crash_after_progress_is_the_first_of_a_new_count(node: Node) -> None:
    node.earlier_boots(2)
    manifest = node.s3 / "r1/ckpt/step_00000050/manifest.json"
    node.job_ends_with(1, f"mkdir -p {manifest.parent}; echo '{{}}' > {manifest}")

    outcome = node.boot()

    assert outcome.told(MODIFY, SHUTDOWN) == [SHUTDOWN]
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
    node: Node, arrange: Callable[[Node], None], reason: str
) -> None:
    arrange(node)

    outcome = node.boot()

    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"] == reason
    assert outcome.told(RUN, MODIFY, SHUTDOWN) == [SHUTDOWN]


@pytest.mark.parametrize("what", ["run.json", "inputs"])
def test_an_object_with_another_hash_is_not_run(node: Node, what: str) -> None:
    script = node.script()
    changed = node.s3 / "r1/run.json" if what == "run.json" else next((node.s3 / "inputs").rglob("*.gz"))
    changed.write_bytes(b"something else")

    outcome = node.boot(script)

    assert outcome.told(RUN, SHUTDOWN) == [SHUTDOWN]
    assert "cannot be had as declared" in node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"]
    assert "sha256 is" in outcome.log


def test_without_metadata_the_machine_shuts_down(node: Node) -> None:
    script = node.script()
    (node.world / "imds").rename(node.world / "gone")

    assert node.boot(script).calls == [SHUTDOWN]


@pytest.mark.parametrize("broken", ["list", "write"])
def test_a_machine_that_cannot_record_its_attempt_stops_the_fleet(node: Node, broken: str) -> None:
    node.fails(broken)

    outcome = node.boot()

    assert outcome.told(RUN, MODIFY, SHUTDOWN) == [MODIFY, SHUTDOWN]


def test_a_node_that_may_not_modify_its_fleet_deletes_it_and_stays_alive_until_shutdown(node: Node) -> None:
    node.fails("modify-fleet")

    outcome = node.boot()

    deletion = f"{DELETE} --fleet-ids {FLEET} --no-terminate-instances"
    assert outcome.told(MODIFY, deletion, SHUTDOWN) == [MODIFY] * 3 + [deletion, SHUTDOWN]
    assert node.has("done.json")


def test_a_refused_deletion_is_seen_although_the_call_succeeds(node: Node) -> None:
    node.fails("modify-fleet", "delete-fleets")

    outcome = node.boot()

    assert "its expiry ends it" in outcome.log
    assert "its expiry ends it" in (node.s3 / f"r1/boot/{INSTANCE}.log").read_text()
    assert outcome.told(SHUTDOWN) == [SHUTDOWN]


def test_without_tags_in_metadata_the_node_finds_its_fleet_by_describing_itself(node: Node) -> None:
    (node.world / "imds/meta-data/tags/instance/aws:ec2:fleet-id").unlink()
    (node.world / "described").write_text("fleet-ffff\n")

    outcome = node.boot()

    assert f"{MODIFY} --fleet-id fleet-ffff" in "\n".join(outcome.calls)


def test_the_timer_stops_the_job_marks_the_run_and_ends_it(node: Node) -> None:
    (node.world / "timer-fires").write_text("running")
    node.job_ends_with(75, "while [[ ! -e $WORLD/stopped ]]; do /bin/sleep 0.02; done")

    outcome = node.boot()

    ends = [RUN, "docker stop -t 115", MODIFY, SHUTDOWN]
    assert outcome.told(*ends) == ends
    assert node.stored("done.json")["reason"] == "timer"


def test_the_timer_ends_the_run_during_an_image_pull_too(node: Node) -> None:
    (node.world / "timer-fires").write_text("pulling")
    pull = 'touch "$WORLD/pulling"; while [[ ! -e $GPUFLEET_ROOT/opt/gpufleet/timer ]]; do /bin/sleep 0.02; done'
    (node.bin / "docker").write_text(f'#!/bin/bash\necho "docker $*" >>"$WORLD/calls"\n{pull}\n')

    outcome = node.boot()

    assert outcome.told(RUN, MODIFY, SHUTDOWN) == [MODIFY, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "timer"


def test_sigterm_stops_the_container_and_its_exit_code_decides(node: Node) -> None:
    node.job_ends_with(75, "while [[ ! -e $WORLD/stopped ]]; do /bin/sleep 0.02; done")
    process = node.start()
    _until(lambda: (node.world / "running").exists())

    process.send_signal(signal.SIGTERM)
    outcome = node.outcome(process)

    assert outcome.told("docker stop -t 115", MODIFY, SHUTDOWN) == ["docker stop -t 115", SHUTDOWN]
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["code"] == 75


def test_sigterm_during_the_image_pull_is_recorded_with_its_notice(node: Node) -> None:
    node.notice()
    (node.bin / "docker").write_text('#!/bin/bash\ntouch "$WORLD/pulling"\nexec /bin/sleep 1\n')
    process = node.start()
    _until(lambda: (node.world / "pulling").exists())

    process.send_signal(signal.SIGTERM)
    outcome = node.outcome(process)

    exit_ = node.stored(f"attempts/{INSTANCE}.json")["exit"]
    assert (exit_["code"], exit_["notice"]) == (143, True)
    assert outcome.told(MODIFY, SHUTDOWN) == [SHUTDOWN]


def test_an_error_nobody_thought_of_shuts_the_machine_down_and_counts(node: Node) -> None:
    script = node.script()
    script.write_text(script.read_text().replace('say "starting the container"', 'say "$NOT_A_VARIABLE"'))

    outcome = node.boot(script)

    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["reason"] == "the node script stopped unexpectedly"
    assert outcome.told(RUN, SHUTDOWN) == [SHUTDOWN]


def test_a_rebooted_machine_counts_as_failed_and_is_replaced(node: Node) -> None:
    node.job_ends_with(1)
    node.boot()
    again = node.root / "var/lib/cloud/scripts/per-boot/gpufleet"  # what cloud-init runs at a second boot
    (node.world / "calls").write_text("")

    outcome = node.boot(again)

    assert outcome.told(RUN, MODIFY, SHUTDOWN) == [SHUTDOWN]
    assert "the machine was rebooted" in outcome.log


def test_a_cpu_job_needs_no_gpu(node: Node) -> None:
    node.device = "cpu"
    node.fails("nvidia-smi")

    outcome = node.boot()

    (call,) = [call for call in outcome.calls if call.startswith(RUN)]
    assert "--gpus" not in call


def test_the_container_is_told_who_and_where_it_is(node: Node) -> None:
    outcome = node.boot()

    (call,) = [call for call in outcome.calls if call.startswith(RUN)]
    for part in (
        "--gpus all",
        "--init --stop-timeout 115",
        "--log-opt mode=non-blocking --log-opt max-buffer-size=25m",
        f"--log-opt awslogs-group=gpufleet-logs --log-opt awslogs-stream=r1/{INSTANCE}",
        f"-v {node.root}/opt/gpufleet/app:/gpufleet/app:ro",
        f"-e GPUFLEET_RUN_URI=s3://gpufleet-test/r1 -e GPUFLEET_INSTANCE_ID={INSTANCE}",
        "-e GPUFLEET_INSTANCE_TYPE=g5.2xlarge -e GPUFLEET_ZONE=us-east-2a -e GPUFLEET_LAUNCHED_AT=20",
        "-e AWS_REGION=us-east-2",
        "-e AWS_ENDPOINT_URL ",
        "python -m job /gpufleet/run/run.json",
    ):
        assert part in call
    assert "AWS_SECRET_ACCESS_KEY" not in call  # not set on EC2: the role is used
    assert (node.root / "opt/gpufleet/app/job/__init__.py").exists()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)
