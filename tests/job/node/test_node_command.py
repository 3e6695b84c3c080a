"""The node of a command of the user's own: two images, two containers, and none of the command's left behind."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
from boot_stubs import RUN, StubNode

from gpufleet.job.node.jobs import RIGHTS

ASK = """
control=$GPUFLEET_ROOT/opt/gpufleet/run/control
mkdir -p "$control"
echo '{"number": 7, "wanted": true}' >"$control/container.json"
for ((i = 0; i < 400; i++)); do
  [[ -e $control/contained.json ]] && break
  /bin/sleep 0.05
done
cp "$control/contained.json" "$WORLD/contained.json"
"""


@pytest.fixture
def node(tmp_path: Path) -> StubNode:
    made = StubNode(tmp_path)
    made.image, made.job_image = "public.ecr.aws/x/python:3@sha256:aa", "team/train:1@sha256:bb"
    (made.world / "pid").write_text("4711\n")
    return made


def test_both_images_are_pulled_and_the_supervisor_sees_the_processes_of_another_container(node: StubNode) -> None:
    calls = node.boot().calls

    assert [call.split()[-1] for call in calls if call.startswith("docker pull")] == [node.image, node.job_image]
    (run,) = [call for call in calls if call.startswith(RUN)]
    rights = "--cap-drop ALL --cap-add CHOWN --cap-add DAC_OVERRIDE --cap-add FOWNER --cap-add KILL"
    for option in ("--pid host", "--network host", f"{rights} --cap-add SYS_PTRACE", "-e GPUFLEET_JOB_CONTAINER=1"):
        assert option in run
    assert "--security-opt no-new-privileges" in run
    assert "-e NVIDIA_DRIVER_CAPABILITIES=utility" in run


def test_a_container_that_is_asked_for_has_no_role_no_socket_and_little_of_the_node(node: StubNode) -> None:
    node.job_ends_with(0, ASK)

    outcome = node.boot()

    (run,) = [call for call in outcome.calls if call.startswith(RUN) and "--entrypoint sh" in call]
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


@pytest.mark.parametrize("code", [0, 1, 75, 137])
def test_it_is_removed_when_the_supervisor_ends_however_it_ends(node: StubNode, code: int) -> None:
    node.job_ends_with(code, ASK)

    calls = node.boot().calls

    assert [call for call in calls if call.startswith("docker rm")] == [
        "docker rm -f gpufleet-i-0123456789abcdef0-job",
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
