"""Rehearsed nodes: real bash, real AWS CLI, real curl; stand-ins for what a laptop must not do."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.gate import NODE_KEY
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.node import STANDINS, NodeRunner, RehearsalNode, _marked
from tests.rehearsal.declared import fleet, living, template
from tests.waiting import is_alive, wait_for


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def cloud(tmp_path: Path, clock: ManualClock) -> Iterator[Cloud]:
    with Cloud(tmp_path, clock=clock, habits=Habits(relaunch_s=5)) as cloud:
        yield cloud


@pytest.fixture
def boot(cloud: Cloud, tmp_path: Path) -> Iterator[Callable[..., RehearsalNode]]:
    runner = NodeRunner(cloud, tmp_path / "nodes")
    cloud.client("iam").create_instance_profile(InstanceProfileName="node")

    def launch(user_data: str, **changes: object) -> RehearsalNode:
        fleet(
            cloud,
            template(cloud, user_data="#!/bin/bash\n" + user_data, IamInstanceProfile={"Name": "node"}, **changes),
        )
        cloud.tick()
        return runner.nodes[cloud.instances()[-1].id]

    yield launch
    runner.close()


@pytest.mark.parametrize("curl", [True, False], ids=["curl", "no curl"])
def test_user_data_runs_with_its_roles_credentials_and_shuts_its_instance_down(
    cloud: Cloud,
    clock: ManualClock,
    boot: Callable[..., RehearsalNode],
    curl: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not curl:  # a slim image has none
        (tmp_path / "bin").mkdir()
        for name in ("bash", "env", "mkdir", "mv"):
            (tmp_path / "bin" / name).symlink_to(shutil.which(name) or "")
        monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    node = boot("""set -eu
[ -z "${AWS_ACCESS_KEY_ID:-}" ]
export AWS_DEFAULT_REGION=us-east-2
aws sts get-caller-identity --query Account --output text
imds=$AWS_EC2_METADATA_SERVICE_ENDPOINT/latest
token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 60' "$imds/api/token")
curl -sf -H "X-aws-ec2-metadata-token: $token" "$imds/meta-data/instance-id"
echo
shutdown -h now
""")
    node.process.wait()
    wait_for("the end of the instance", lambda: node.instance.ended_at is not None)
    assert node.log.read_text().split() == [cloud.account, node.instance.id]
    assert cloud._gate is not None
    assert NODE_KEY in {key for key, action in cloud._gate.calls if action == "GetCallerIdentity"}
    assert living(cloud) == []
    clock.advance(5)
    cloud.tick()
    assert len(living(cloud)) == 1


@pytest.mark.parametrize(
    ("words", "code"),
    [(["latest/meta-data/instance-id"], 22), (["-X", "PUT", "latest/api/token"], 22), (["-m", "0.2", "deaf"], 28)],
    ids=["no token", "no header", "no answer"],
)
def test_the_stand_in_for_curl_fails_as_curl_does(
    boot: Callable[..., RehearsalNode], words: list[str], code: int
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}" if "deaf" in words else "$AWS_EC2_METADATA_SERVICE_ENDPOINT"
        command = shlex.join(["bash", str(STANDINS / "absent" / "curl"), "-sf", *words[:-1]])
        node = boot(f'{command} "{url}/{words[-1]}"')
        assert node.process.wait() == code
    assert node.log.read_text() == ""


def test_the_stand_in_for_curl_says_that_nobody_is_there(boot: Callable[..., RehearsalNode]) -> None:
    assert boot(f"{STANDINS}/absent/curl -sf http://127.0.0.1:9/").process.wait() == 7


def test_a_script_that_just_ends_leaves_the_machine_running(cloud: Cloud, boot: Callable[..., RehearsalNode]) -> None:
    node = boot("exit 1")
    assert node.process.wait() == 1
    assert living(cloud) == [node.instance.id]


def test_losing_the_machine_kills_all_its_processes_at_once(cloud: Cloud, boot: Callable[..., RehearsalNode]) -> None:
    node = boot("""trap '' TERM
sleep 5000 &
"$GPUFLEET_PYTHON" -c 'import os, time; os.setsid(); open("away", "w").write(str(os.getpid())); time.sleep(5000)' &
echo $! $$ >started
wait""")
    told = [node.root / "away", node.root / "started"]
    wait_for("both processes", lambda: all(each.exists() and each.read_text() for each in told))
    pids = [int(word) for name in ("away", "started") for word in (node.root / name).read_text().split()]
    cloud.kill(node.instance.id)
    wait_for("the end of all", lambda: not any(is_alive(pid) for pid in pids))
    assert living(cloud) == []


def test_instance_store_and_data_volume_are_there_to_be_formatted_and_mounted(
    boot: Callable[..., RehearsalNode],
) -> None:
    data = {"DeviceName": "/dev/sdf", "Ebs": {"VolumeSize": 50, "VolumeType": "gp3"}}
    node = boot(
        """set -eu
lsblk -dnp -o NAME,MODEL
systemctl start dlami-nvme
findmnt -n "$GPUFLEET_ROOT/opt/dlami/nvme" >/dev/null
device=$GPUFLEET_ROOT/dev/sdf
code=0; blkid "$device" || code=$?; echo "blank: $code"
mount "$device" "$GPUFLEET_ROOT/data" 2>/dev/null || echo "not mounted"
mkfs.xfs -q "$device"
mkfs.xfs -q "$device" 2>/dev/null || echo "not formatted again"
mount "$device" "$GPUFLEET_ROOT/data" && touch "$GPUFLEET_ROOT/data/file"
mount "$device" /somewhere 2>/dev/null || echo "not outside"
nvidia-smi || echo "no GPU"
""",
        BlockDeviceMappings=[data],
    )
    assert node.process.wait() == 0
    said = node.log.read_text()
    assert said.startswith(f"{node.root}/dev/nvme1n1 Amazon EC2 NVMe Instance Storage\nblank: 2\nnot mounted\n")
    assert "not formatted again\nnot outside\n" in said
    assert "no GPU" in said


def docker(root: Path, *words: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [str(STANDINS / "docker"), *words],
        env={"GPUFLEET_ROOT": str(root), "GPUFLEET_PYTHON": sys.executable, "PATH": os.environ["PATH"], **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    out, err = process.communicate()
    return process.returncode, out, err


IMAGE = "public.ecr.aws/x/y:1@sha256:" + "0" * 64


def test_a_container_sees_host_folders_under_its_own_paths_and_only_its_own_environment(tmp_path: Path) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "say.py").write_text(
        "import json, os, sys; print(json.dumps([os.getcwd(), dict(os.environ), sys.argv]))"
    )
    code, out, err = finish(
        docker(
            tmp_path,
            *("run", "--name", "c", "-v", f"{tmp_path}/app:/gpufleet/app:ro", "-v", f"{tmp_path}/run:/gpufleet/run"),
            *("-w", "/gpufleet/app", "-e", "PYTHONPATH=/gpufleet/app", "-e", "KEPT", "-e", "ABSENT", IMAGE),
            *("python", "-m", "say", "/gpufleet/run/run.json"),
            KEPT="kept",
            LEAKED="leaked",
        )
    )
    assert (code, err) == (0, "")
    folder, environment, argv = json.loads(out)
    assert folder == environment["PYTHONPATH"] == str(tmp_path / "app")
    assert argv[1] == str(tmp_path / "run" / "run.json")
    assert environment["KEPT"] == "kept"
    assert not {"LEAKED", "ABSENT", "GPUFLEET_ROOT"} & set(environment)


def test_a_containers_exit_code_is_dockers(tmp_path: Path) -> None:
    assert finish(docker(tmp_path, "run", IMAGE, "python", "-c", "raise SystemExit(75)"))[0] == 75
    killed = "import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    assert finish(docker(tmp_path, "run", IMAGE, "python", "-c", killed))[0] == 137


def test_docker_stop_asks_first(tmp_path: Path) -> None:
    waiting = """import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(75))
print("ready", flush=True)
time.sleep(5000)"""
    process = docker(tmp_path, "run", "--name", "c", IMAGE, "python", "-c", waiting)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    assert finish(docker(tmp_path, "stop", "-t", "5000", "c"))[:2] == (0, "c\n")
    assert finish(process)[0] == 75


def test_docker_stop_kills_what_does_not_listen(tmp_path: Path) -> None:
    ignores = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    deaf = f"{ignores}; print('ready', flush=True); time.sleep(5000)"
    process = docker(tmp_path, "run", "--name", "c", IMAGE, "python", "-c", deaf)
    assert process.stdout is not None
    process.stdout.readline()
    finish(docker(tmp_path, "stop", "-t", "0.1", "c"))
    assert finish(process)[0] == 137


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["run", "--gpus", "all", IMAGE, "true"], 125, "could not select device driver"),
        (["run", "--privileged", IMAGE, "true"], 2, "unrecognized arguments: --privileged"),
        (["run", "-v", "/etc:/etc", IMAGE, "true"], 1, "outside this node"),
        (["pull", "-q", "pytorch:latest"], 1, "names no digest"),
        (["stop", "nobody"], 1, "No such container"),
        (["exec", "c", "sh"], 125, "no stand-in for"),
    ],
)
def test_docker_refuses_what_it_does_not_stand_in_for(tmp_path: Path, words: list[str], code: int, said: str) -> None:
    got, _, err = finish(docker(tmp_path, *words))
    assert said in err
    assert got == code


LOGS = ("--log-driver", "awslogs", "--log-opt", "mode=non-blocking", "--log-opt", "awslogs-region=us-east-2")


def test_the_containers_output_reaches_cloudwatch_logs(cloud: Cloud, tmp_path: Path) -> None:
    cloud.client("logs").create_log_group(logGroupName="/g")
    stream = ("--log-opt", "awslogs-group=/g", "--log-opt", "awslogs-stream=r1/i-1")
    code, out, _ = finish(
        docker(
            tmp_path, "run", *LOGS, *stream, IMAGE, "python", "-c", "print('one'); print('two')", **cloud.environment()
        )
    )
    assert (code, out) == (0, "one\ntwo\n")
    events = cloud.client("logs").get_log_events(logGroupName="/g", logStreamName="r1/i-1")["events"]
    assert [event["message"] for event in events] == ["one", "two"]


def test_without_its_log_group_a_container_runs_all_the_same(cloud: Cloud, tmp_path: Path) -> None:
    """As docker's does, whose driver is told not to block: a node must not fail for its logs."""
    stream = ("--log-opt", "awslogs-group=/none", "--log-opt", "awslogs-stream=s")
    code, out, err = finish(
        docker(tmp_path, "run", *LOGS, *stream, IMAGE, "python", "-c", "print('ran')", **cloud.environment())
    )
    assert (code, out) == (0, "ran\n")
    assert "awslogs: no stream: " in err


def test_a_container_that_says_more_than_can_wait_for_its_log_group_ends_all_the_same(tmp_path: Path) -> None:
    stream = ("--log-opt", "awslogs-group=/none", "--log-opt", "awslogs-stream=s")
    nobody = {"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
    words = ("run", *LOGS, *stream, IMAGE, "python", "-c", "print('line\\n' * 50_001)")
    code, _, err = finish(docker(tmp_path, *words, **nobody))
    assert code == 0
    assert "awslogs: no stream: " in err


def test_a_log_group_that_comes_late_gets_what_was_said_before(cloud: Cloud, tmp_path: Path) -> None:
    stream = ("--log-opt", "awslogs-group=/late", "--log-opt", "awslogs-stream=s")
    until = (
        f"import os, time\nprint('first', flush=True)\nwhile not os.path.exists('{tmp_path / 'go'}'): time.sleep(0.01)"
    )
    words = ("run", *LOGS, *stream, IMAGE, "python", "-c", until)
    process = docker(tmp_path, *words, **cloud.environment())
    assert process.stdout is not None
    assert process.stderr is not None
    assert "awslogs: no stream: " in process.stderr.readline()
    logs = cloud.client("logs")
    logs.create_log_group(logGroupName="/late")

    def events() -> list[str]:
        if not logs.describe_log_streams(logGroupName="/late")["logStreams"]:
            return []
        return [each["message"] for each in logs.get_log_events(logGroupName="/late", logStreamName="s")["events"]]

    assert wait_for("the line in the log group", events, process=process) == ["first"]
    (tmp_path / "go").touch()
    assert finish(process)[0] == 0


def test_the_cli_imported_once_answers_as_the_cli_itself_and_ends_with_its_node(
    cloud: Cloud, boot: Callable[..., RehearsalNode]
) -> None:
    node = boot("""export AWS_DEFAULT_REGION=us-east-2
cd "$HOME"
ask() { # by the CLI that is first on the PATH, and by its own program
  aws "$@" >>once 2>&1
  echo "$?" >>once
  "${GPUFLEET_PYTHON%/*}/aws" "$@" >>anew 2>&1
  echo "$?" >>anew
}
ask sts get-caller-identity --query Account --output text
ask s3 nonsense
ask s3api head-object --bucket absent --key absent
mkfifo never
aws s3 cp - s3://own/key <>never &
type -p aws >started
wait""")
    home = node.root / "root"
    wait_for("the last call", lambda: (home / "started").exists() and bool((home / "started").read_text()))
    assert (home / "started").read_text().strip() == str(STANDINS / "warm" / "aws")
    assert (home / "once").read_text() == (home / "anew").read_text()
    assert (home / "once").read_text().startswith(f"{cloud.account}\n0\n")
    cloud.kill(node.instance.id)
    assert node.aws.poll() is not None
    assert not _marked(node.instance.id)
