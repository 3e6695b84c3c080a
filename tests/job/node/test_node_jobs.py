"""The containers of a node: what each may do, and that none is left behind."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path

import pytest

from gpufleet.job.kind import EXPERIMENTS
from gpufleet.job.node.jobs import RIGHTS
from tests.infra.boot_stubs import RUN, StubNode

ASK = """
control=$GPUFLEET_ROOT/opt/gpufleet/run/control
mkdir -p "$control"
echo '{"number": 7, "wanted": true}' >"$control/container.json"
until grep -q pid "$control/contained.json"; do /bin/sleep 0.05; done
cp "$control/contained.json" "$WORLD/contained.json"
"""


NEEDED = {"clone", "mount", "umount2", "pivot_root", "open_tree", "move_mount", "mount_setattr", "seccomp", "capset"}


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    """With a command of the user's own."""
    made = StubNode(tmp_path)
    made.image, made.job_image = "public.ecr.aws/x/python:3@sha256:aa", "team/train:1@sha256:bb"
    (made.world / "pid").write_text("4711\n")
    return made


@pytest.fixture
def ready_made(node: StubNode) -> StubNode:
    """With a job of gpufleet's own."""
    node.job_image = ""
    return node


def containers(node: StubNode, waited: str = "pid") -> list[str]:
    """The calls that start the supervisor's, the one that trains, of which `waited` is told, and of a command the one
    that watches it.
    """
    node.job_ends_with(0, ASK.replace("pid", waited))
    return [call for call in node.boot().calls if call.startswith(RUN)]


def test_what_trains_has_no_network_no_socket_and_cannot_change_what_the_supervisor_runs(ready_made: StubNode) -> None:
    _, training = containers(ready_made)

    root = ready_made.root / "opt/gpufleet"
    words = training.split()
    assert [words[at + 1] for at, word in enumerate(words) if word == "-v"] == [
        f"{root}/app:/gpufleet/app:ro",
        f"{root}/run:/gpufleet/run",
        f"{root}/run/control:/gpufleet/run/control:ro",
        f"{root}/run/packages:/gpufleet/run/packages:ro",
    ]
    assert "--network none --hostname localhost" in training
    assert "--pid host" not in training
    assert "docker.sock" not in training
    assert "AWS_" not in training
    assert "--gpus all -e NVIDIA_DISABLE_REQUIRE=true" in training
    assert "--ipc host --ulimit memlock=-1" in training
    assert training.endswith(f" {ready_made.image} sh /gpufleet/run/control/job/first.sh")
    assert json.loads((ready_made.world / "contained.json").read_text()) == {"number": 7, "pid": 4711}


def test_containers_of_a_ready_made_job_are_not_root_s_and_have_no_rights(ready_made: StubNode) -> None:
    for call in containers(ready_made):
        assert "--user 1000:1000 -e HOME=/tmp -e USER=gpufleet" in call
        assert "--cap-drop ALL --security-opt no-new-privileges --pids-limit 30000" in call
        assert "--cap-add" not in call
    if os.geteuid() == 0:
        for name in ("", "run.json", "control"):
            assert (ready_made.root / "opt/gpufleet/run" / name).stat().st_uid == 1000


def test_a_job_with_a_data_volume_reads_whatever_is_on_it(ready_made: StubNode) -> None:
    ready_made.data_volume = "snapshot"
    (ready_made.root / "dev").mkdir(parents=True, exist_ok=True)
    (ready_made.root / "dev/sdf").touch()

    supervisor, training = containers(ready_made)

    rights = " ".join(f"--cap-add {right}" for right in ("CHOWN", "DAC_OVERRIDE", "KILL", "SETGID", "SETUID"))
    assert f"--cap-drop ALL {rights} --security-opt no-new" in training
    assert f"-v {ready_made.root}/data:/data" in training
    assert "--cap-drop ALL --security-opt no-new" in supervisor
    assert "--user" not in supervisor + training


def test_only_the_job_that_runs_untrusted_programs_may_make_namespaces(ready_made: StubNode) -> None:
    assert not any("seccomp" in call for call in containers(ready_made))


def test_a_job_that_runs_untrusted_programs_can_lock_them_in(ready_made: StubNode) -> None:
    ready_made.container_options = EXPERIMENTS["kernel-sft"]().demands.container_options

    supervisor, training = containers(ready_made)

    profile = ready_made.root / "opt/gpufleet/app/gpufleet/job/node/namespaces.json"
    assert f"--security-opt seccomp={profile}" in training
    assert "seccomp" not in supervisor
    refused = {name for rule in json.loads(profile.read_text())["syscalls"] for name in rule["names"]}
    assert not refused & NEEDED
    assert {"keyctl", "bpf", "io_uring_setup", "setns", "perf_event_open", "open_by_handle_at"} <= refused


def test_both_images_are_pulled_and_the_supervisor_of_a_command_sees_no_process_but_its_own(node: StubNode) -> None:
    calls = node.boot().calls

    assert [call.split()[-1] for call in calls if call.startswith("docker pull")] == [node.image, node.job_image]
    (run,) = [call for call in calls if call.startswith(RUN)]
    rights = "--cap-drop ALL --cap-add DAC_OVERRIDE --cap-add FOWNER --cap-add LEASE --security-opt no-new-privileges"
    for option in (rights, "--network host", "-e GPUFLEET_JOB_CONTAINER=1", "-e NVIDIA_DRIVER_CAPABILITIES=utility"):
        assert option in run
    assert "--pid " not in run


def test_who_watches_a_command_sees_its_processes_and_nothing_of_the_node(node: StubNode) -> None:
    *_, run = containers(node)

    root = node.root / "opt/gpufleet"
    place = "/gpufleet/run/control/watcher"
    assert run == (
        "docker run --name gpufleet-i-0123456789abcdef0-watcher --log-driver none"
        " --pid container:gpufleet-i-0123456789abcdef0-job --network none"
        " --cap-drop ALL --cap-add DAC_OVERRIDE --cap-add KILL --cap-add SYS_PTRACE"
        " --security-opt no-new-privileges --pids-limit 30000"
        f" -v {root}/app:/gpufleet/app:ro -v {root}/run/control/watcher:{place}"
        f" {node.image} python -I /gpufleet/app/gpufleet/job/command/processes.py watch {place}"
    )


def test_a_command_whose_watcher_ends_is_gone_too(node: StubNode) -> None:
    docker = node.bin / "docker"
    docker.write_text(docker.read_text().replace('|| $* == *" watch "* ]]; then exec', "]]; then exec"))
    docker.write_text(docker.read_text().replace("  run)\n", '  run)\n    [[ $* != *" watch "* ]] || exit 137\n'))

    containers(node, "problem")

    told = {"number": 7, "problem": "it ended with 137", "code": 137}
    assert json.loads((node.world / "contained.json").read_text()) == told


def test_a_container_that_is_asked_for_has_no_role_no_socket_and_little_of_the_node(node: StubNode) -> None:
    _, run, _ = containers(node)

    root = node.root / "opt/gpufleet/run"
    words = run.split()
    mounts = [words[index + 1] for index, word in enumerate(words) if word == "-v"]
    assert mounts == [f"{root}/user:/gpufleet/run/user", f"{root}/control/job:/gpufleet/run/control/job"]
    assert "--network bridge" in run
    assert "--cap-drop ALL" in run
    assert {words[at + 1] for at, word in enumerate(words) if word == "--cap-add"} == {*RIGHTS}
    assert not {*RIGHTS} & {"NET_RAW", "MKNOD", "SYS_CHROOT", "SETFCAP", "SETPCAP", "AUDIT_WRITE"}
    assert "--security-opt no-new-privileges --pids-limit 30000" in run
    assert "--privileged" not in run
    assert "docker.sock" not in run
    assert run.endswith(f"{node.job_image} /gpufleet/run/control/job/first.sh")
    assert json.loads((node.world / "contained.json").read_text()) == {"number": 7, "pid": 4711}


def test_a_container_that_ends_by_itself_is_told_of_with_its_code(ready_made: StubNode) -> None:
    docker = ready_made.bin / "docker"
    docker.write_text(docker.read_text().replace("exec /usr/bin/env -i /bin/sleep 5000", "exit 69"))

    containers(ready_made, "code")

    told = {"number": 7, "problem": "it ended with 69", "code": 69}
    assert json.loads((ready_made.world / "contained.json").read_text()) == told


@pytest.mark.parametrize("code", [0, 1, 75, 137])
def test_it_is_removed_when_the_supervisor_ends_however_it_ends(node: StubNode, code: int) -> None:
    node.job_ends_with(code, ASK)

    calls = node.boot().calls

    assert [call for call in calls if call.startswith("docker rm")] == [
        "docker rm -f gpufleet-i-0123456789abcdef0-job",
        "docker rm -f gpufleet-i-0123456789abcdef0-watcher",
    ]


def test_nothing_is_removed_where_nothing_was_asked_for(node: StubNode) -> None:
    assert not [call for call in node.boot().calls if call.startswith(("docker rm", "docker inspect"))]


@pytest.mark.parametrize(
    ("place", "image", "host"),
    [
        ("ssm:/team/registry", "registry.example.com/team/train:1@sha256:bb", "registry.example.com"),
        ("secretsmanager:registry", "team/train:1@sha256:bb", "https://index.docker.io/v1/"),
    ],
)
def test_an_image_of_another_registry_is_pulled_with_its_secret_which_no_file_keeps(
    node: StubNode, place: str, image: str, host: str
) -> None:
    node.job_image, node.parameters = image, {"registry": place}

    outcome = node.boot()

    secret = f"me:secret of {place.partition(':')[2]}"
    told = base64.b64encode(secret.encode()).decode()
    assert json.loads((node.world / "login").read_text()) == {"auths": {host: {"auth": told}}}
    assert not (node.root / "opt/gpufleet/docker").exists()
    assert secret not in outcome.log
    assert told not in outcome.log


@pytest.mark.parametrize("kind", ["node", "ready_made"])
def test_of_several_nodes_what_trains_has_the_machine_s_network(kind: str, request: pytest.FixtureRequest) -> None:
    several: StubNode = request.getfixturevalue(kind)
    several.nodes = 2
    several.imds("meta-data/local-ipv4", "10.1.2.3")
    _, training, *_ = containers(several)
    assert "--network host" in training
    assert "--network none" not in training
    assert "--network bridge" not in training
