"""The node script, run for real: what a machine does in each case, and in which order."""

from __future__ import annotations

import json
import re
import shutil
import signal
from pathlib import Path

import pytest

from tests.infra.boot_stubs import DELETE, FLEET, INSTANCE, RUN, SHUTDOWN, TERMINATE, StubNode
from tests.waiting import wait_for


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    return StubNode(tmp_path)


def test_a_finished_job_uploads_then_marks_then_deletes_the_fleet_then_shuts_down(node: StubNode) -> None:
    outcome = node.boot()

    assert outcome.writes() == [
        f"attempts/{INSTANCE}.json",
        RUN,
        f"attempts/{INSTANCE}.json",
        f"boot/{INSTANCE}.log",
        "done.json",
        DELETE,
        TERMINATE,
        SHUTDOWN,
    ]
    assert node.stored("done.json") | {"at": ""} == {
        "schema": 1,
        "reason": "finished",
        "detail": "",
        "instance": INSTANCE,
        "at": "",
    }


def test_an_image_of_a_private_ecr_is_pulled_with_the_login_of_the_node_s_role(node: StubNode) -> None:
    registry = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
    node.image = f"{registry}/team/train:1@sha256:aa"

    outcome = node.boot()

    ask = "aws ecr get-authorization-token --region eu-west-1"
    assert outcome.calls_starting(ask, "docker pull", RUN) == [ask, "docker pull", RUN]
    assert json.loads((node.world / "login").read_text()) == {"auths": {registry: {"auth": "token of eu-west-1"}}}


def test_an_image_that_everybody_may_have_is_pulled_without_a_login(node: StubNode) -> None:
    outcome = node.boot()

    assert outcome.calls_starting("aws ecr") == []
    assert (node.world / "login").read_text() == ""


def test_a_run_that_is_over_is_ended_before_anything_is_started(node: StubNode) -> None:
    node.put("done.json", {"reason": "finished"})

    outcome = node.boot()

    assert outcome.writes() == [f"boot/{INSTANCE}.log", DELETE, TERMINATE, SHUTDOWN]
    assert outcome.calls[0].startswith("aws s3api list-objects-v2")  # the marker is read first
    assert not node.has(f"attempts/{INSTANCE}.json")


def test_the_supervisors_done_marker_is_not_overwritten(node: StubNode) -> None:
    marker = node.s3 / "r1/done.json"
    node.job_ends_with(0, f"""echo '{{"reason": "max_usd"}}' > {marker}""")

    node.boot()

    assert node.stored("done.json") == {"reason": "max_usd"}


def test_a_job_that_failed_for_good_ends_the_run(node: StubNode) -> None:
    node.job_ends_with(70)

    outcome = node.boot()

    assert outcome.calls_starting(DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "failed"


def test_an_interrupted_node_over_an_hour_old_shuts_down_at_once(node: StubNode) -> None:
    node.job_ends_with(75)

    outcome = node.boot()

    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]
    assert "waiting for AWS" not in outcome.log
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["code"] == 75


def test_an_interrupted_node_in_its_first_hour_waits_for_aws_but_not_for_ever(node: StubNode) -> None:
    node.launched(minutes_ago=10)
    node.notice()
    node.job_ends_with(75)

    outcome = node.boot()

    assert "waiting for AWS" in outcome.log
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["notice"] is True


def test_a_notice_that_the_job_has_seen_counts_although_the_metadata_service_does_not_answer(node: StubNode) -> None:
    written = node.s3 / f"r1/attempts/{INSTANCE}.json"
    node.launched(minutes_ago=10)
    node.job_ends_with(75, f"""echo '{{"exit": {{"code": 75, "notice": true}}}}' > {written}""")

    assert "waiting for AWS" in node.boot().log  # AWS would charge an hour that the receipt calls free


def test_a_job_stopped_without_a_notice_is_replaced_at_once_even_in_the_first_hour(node: StubNode) -> None:
    node.launched(minutes_ago=10)
    node.job_ends_with(75)

    outcome = node.boot()

    assert "waiting for AWS" not in outcome.log
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]


def test_the_deletion_leaves_the_node_alive_until_it_ends_itself_from_outside(node: StubNode) -> None:
    node.fails("terminate-instances")

    outcome = node.boot()

    deletion = f"{DELETE} --fleet-ids {FLEET} --no-terminate-instances"
    end = f"{TERMINATE} --instance-ids {INSTANCE}"
    assert outcome.calls_starting(deletion, end, SHUTDOWN) == [deletion, end, SHUTDOWN]
    assert node.has("done.json")


@pytest.mark.parametrize(
    ("fails", "said"), [((), "AWS ends it by the schedule"), (("scheduler",), "its schedule or its expiry ends it")]
)
def test_a_refused_deletion_is_seen_although_the_call_succeeds_and_left_to_the_schedule(
    node: StubNode, fails: tuple[str, ...], said: str
) -> None:
    node.fails("delete-fleets", *fails)

    outcome = node.boot()

    assert said in outcome.log
    assert said in (node.s3 / f"r1/boot/{INSTANCE}.log").read_text()
    assert node.moves()[-1:] == ([] if fails else [node.after_a_moment_of_its_life(90)])
    assert outcome.calls_starting(DELETE, TERMINATE, SHUTDOWN) == [DELETE] * 3 + [SHUTDOWN]


def test_without_tags_in_metadata_the_node_finds_its_fleet_by_describing_itself(node: StubNode) -> None:
    (node.world / "imds/meta-data/tags/instance/aws:ec2:fleet-id").unlink()
    (node.world / "described").write_text("fleet-ffff\n")

    outcome = node.boot()

    assert f"{DELETE} --fleet-ids fleet-ffff" in "\n".join(outcome.calls)


def test_the_timer_stops_the_job_marks_the_run_and_ends_it(node: StubNode) -> None:
    (node.world / "timer-fires").write_text("running")
    node.job_ends_with(75, "while [[ ! -e $WORLD/stopped ]]; do /bin/sleep 0.02; done")

    outcome = node.boot()

    ends = [RUN, "docker stop -t 115", DELETE, SHUTDOWN]
    assert outcome.calls_starting(*ends) == ends
    assert node.stored("done.json")["reason"] == "timer"


@pytest.mark.skipif(shutil.which("timeout") is None, reason="this system has no timeout command; nodes have")
def test_a_docker_that_hangs_does_not_keep_the_timer_from_ending_the_run(node: StubNode) -> None:
    (node.world / "timer-fires").write_text("running")
    node.job_ends_with(137, f"until [[ -e {node.s3}/r1/done.json ]]; do /bin/sleep 0.02; done")
    docker = node.bin / "docker"
    docker.write_text(docker.read_text().replace("stop)", "stop) exec /bin/sleep 5000;"))
    shorter = '[[ "$4 $5" != "docker stop" ]] || set -- -k 1 0.2 "${@:4}"'
    (node.bin / "timeout").write_text(f'#!/bin/bash\n{shorter}\nexec {shutil.which("timeout")} "$@"\n')
    (node.bin / "timeout").chmod(0o755)

    outcome = node.boot()

    assert outcome.calls_starting(DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "timer"


def test_the_timer_ends_the_run_during_an_image_pull_too(node: StubNode) -> None:
    (node.world / "timer-fires").write_text("pulling")
    pull = 'touch "$WORLD/pulling"; while [[ ! -e $GPUFLEET_ROOT/opt/gpufleet/timer ]]; do /bin/sleep 0.02; done'
    (node.bin / "docker").write_text(f'#!/bin/bash\necho "docker $*" >>"$WORLD/calls"\n{pull}\n')

    outcome = node.boot()

    assert outcome.calls_starting(RUN, DELETE, SHUTDOWN) == [DELETE, SHUTDOWN]
    assert node.stored("done.json")["reason"] == "timer"


def test_sigterm_stops_the_container_and_its_exit_code_decides(node: StubNode) -> None:
    node.job_ends_with(75, "while [[ ! -e $WORLD/stopped ]]; do /bin/sleep 0.02; done")
    process = node.start()
    wait_for("the container", (node.world / "running").exists, process=process)

    process.send_signal(signal.SIGTERM)
    outcome = node.outcome(process)

    assert outcome.calls_starting("docker stop -t 115", DELETE, SHUTDOWN) == ["docker stop -t 115", SHUTDOWN]
    assert node.stored(f"attempts/{INSTANCE}.json")["exit"]["code"] == 75


def test_sigterm_during_the_image_pull_is_recorded(node: StubNode) -> None:
    (node.bin / "docker").write_text('#!/bin/bash\ntouch "$WORLD/pulling"\nexec /bin/sleep 5000\n')
    process = node.start()
    wait_for("the image pull", (node.world / "pulling").exists, process=process)

    process.send_signal(signal.SIGTERM)
    outcome = node.outcome(process)

    exit_ = node.stored(f"attempts/{INSTANCE}.json")["exit"]
    assert (exit_["code"], exit_["notice"]) == (143, False)
    assert outcome.calls_starting(DELETE, SHUTDOWN) == [SHUTDOWN]


def test_a_notice_during_the_image_pull_is_recorded_before_the_machine_is_gone(node: StubNode) -> None:
    node.notice()
    attempt = node.s3 / f"r1/attempts/{INSTANCE}.json"
    pull = f"until grep -q exit {attempt}; do /bin/sleep 0.02; done"
    (node.bin / "docker").write_text(f"#!/bin/bash\n[[ $1 != pull ]] || {pull}\nexit 75\n")

    node.boot()

    exit_ = node.stored(f"attempts/{INSTANCE}.json")["exit"]
    assert (exit_["code"], exit_["reason"], exit_["notice"]) == (75, "interrupted", True)


def test_a_metadata_answer_that_is_no_notice_is_not_taken_for_one(node: StubNode) -> None:
    node.imds("meta-data/spot/instance-action", "<html>try later</html>")
    node.job_ends_with(1)

    node.boot()

    exit_ = node.stored(f"attempts/{INSTANCE}.json")["exit"]
    assert (exit_["code"], exit_["notice"]) == (1, False)


def test_every_call_to_aws_is_one_that_the_nodes_role_allows(node: StubNode) -> None:
    """infra/program/resources/identity.py: own prefix, inputs to read, own fleet, itself."""
    (node.world / "imds/meta-data/tags/instance/aws:ec2:fleet-id").unlink()
    (node.world / "described").write_text(f"{FLEET}\n")
    node.earlier_boots(2)

    calls = [call.split() for call in node.boot().calls if call.startswith("aws ")]

    own, inputs = "s3://gpufleet-test/r1/", "s3://gpufleet-test/inputs/"
    for service, action, *words in (call[1:] for call in calls):
        if (service, action) == ("s3", "cp"):
            source, target = words[:2]
            assert target.startswith(own) or source.startswith((own, inputs))
            assert target != f"{own}run.json"
            assert "--recursive" not in words or source.startswith(own)  # it lists that prefix
        elif service == "s3api":
            assert action == "list-objects-v2"
            assert words[words.index("--prefix") + 1].startswith("r1/")
        else:
            assert (service, action) in {
                ("ec2", "describe-instances"),
                ("ec2", "delete-fleets"),
                ("ec2", "terminate-instances"),
                ("ec2", "describe-fleet-history"),
                ("scheduler", "get-schedule"),
                ("scheduler", "update-schedule"),
            }
    assert len({tuple(call[1:3]) for call in calls}) == 8  # all kinds were made


def test_a_cpu_job_needs_no_gpu(node: StubNode) -> None:
    node.device = "cpu"
    node.fails("nvidia-smi")

    outcome = node.boot()

    (call,) = [call for call in outcome.calls if call.startswith(RUN)]
    assert "--gpus" not in call


def test_the_container_is_told_who_and_where_it_is(node: StubNode) -> None:
    outcome = node.boot()

    (call,) = [call for call in outcome.calls if call.startswith(RUN)]
    for part in (
        "--gpus all -e NVIDIA_DISABLE_REQUIRE=true",
        "--stop-timeout 115",
        "--log-opt mode=non-blocking --log-opt max-buffer-size=25m",
        f"--log-opt awslogs-group=gpufleet-logs --log-opt awslogs-stream=r1/{INSTANCE}",
        f"-v {node.root}/opt/gpufleet/app:/gpufleet/app:ro",
        "--network host ",
        "-e GPUFLEET_JOB_CONTAINER=1 ",
        "-e NVIDIA_DRIVER_CAPABILITIES=utility ",
        f"-e GPUFLEET_RUN_URI=s3://gpufleet-test/r1 -e GPUFLEET_INSTANCE_ID={INSTANCE}",
        "-e GPUFLEET_INSTANCE_TYPE=g5.2xlarge -e GPUFLEET_ZONE=us-east-2a -e GPUFLEET_LAUNCHED_AT=20",
        "-e AWS_REGION -e AWS_DEFAULT_REGION -e AWS_METADATA_SERVICE_NUM_ATTEMPTS ",  # as exported
        "-e AWS_ENDPOINT_URL ",
        "python -m gpufleet.job /gpufleet/run/run.json",
    ):
        assert part in call
    assert re.search(r"-e GPUFLEET_PULLED_S=\d+\.\d{3} ", call)
    assert "AWS_SECRET_ACCESS_KEY" not in call  # not set on EC2: the role is used
    assert (node.root / "opt/gpufleet/app/gpufleet/job/__init__.py").exists()
