"""Commands in real containers, where a docker daemon answers: what the stand-in cannot show."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract.workdir import CONTROL, FIRST, SCRIPTS, USER
from gpufleet.job.node.jobs import Jobs
from gpufleet.job.node.jobs import name as jobs_name
from gpufleet.job.node.settings import InstanceIdentity, Settings
from gpufleet.rehearsal.rehearse import rehearse
from tests.rehearsal import own_images
from tests.rehearsal.test_image import SCRIPT

WHY_NOT = own_images.daemon() if sys.platform == "linux" else "needs Docker Engine on Linux"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]
IN_SH = """
step=0
[ -f "$1/ckpt.txt" ] && step=$(cat "$1/ckpt.txt")
trap 'asked=1' TERM
while [ $step -lt 600 ]; do
  step=$((step + 1))
  sleep 0.08
  echo "step $step"
  if [ $((step % 50)) = 0 ] || [ "$asked" ]; then echo $step >"$1/new" && mv "$1/new" "$1/ckpt.txt"; fi
  [ "$asked" ] && exit 0
done
exit 0
"""
TEXT = """
run: {id: r1, owner: you}
job:
  image: IMAGE
  supervisor_image: SUPERVISOR
  code: {folder: ../mine}
  command: COMMAND
  checkpoint: {each: FILE, rewritten: true, every: {steps: 50}, size_gb: 0.0001}
  progress: {stdout: 'step (?P<step>[0-9]+)'}
  work: {steps: 600, step_ms: {L40S: 80}}
  stop: {saves: true}
fleet: {region: us-east-2, zones: [us-east-2a, us-east-2b], instance_types: [g6e.2xlarge]}
storage: {keep: {days: 7}}
limits: {max_usd: 5, max_hours: 3}
rehearsal:
  job: {device: cpu, gpus: 1, checkpoint: {heartbeat_s: 1}}
  estimate: {step_ms: [80], setup_minutes: 0.1, restart_minutes: 0.1, capacity_wait_minutes: 0.05}
"""
LOOK = """
echo user $(id -u)
grep -E 'CapEff|CapBnd|NoNewPrivs' /proc/self/status
echo pids $(cat /sys/fs/cgroup/pids/pids.max 2>/dev/null || cat /sys/fs/cgroup/pids.max)
echo keys $(env | grep -c '^AWS_.*KEY')
reached=none
for at in 169.254.169.254/80 127.0.0.1/PORT; do
  timeout 3 bash -c "exec 3<>/dev/tcp/$at" 2>/dev/null && reached=$at
done
echo reached $reached
echo run $(ls /gpufleet/run)
echo control $(ls /gpufleet/run/control)
"""


@pytest.fixture(scope="module")
def images() -> dict[str, str]:
    """By what is shown: a shell and no Python; Python as root; as another user."""
    supervisor = own_images.image("supervisor", packages=own_images.required(own_images.SUPERVISOR))
    return {"shell": own_images.image("shell"), "root": supervisor, "user": own_images.as_user(supervisor, 1000)}


@pytest.fixture
def asked(images: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """What docker was asked, a line each."""
    with own_images.shim(tmp_path / "bin", images["shell"]) as folder:
        monkeypatch.setenv("PATH", f"{folder}{os.pathsep}{os.environ['PATH']}")
        yield folder / "docker.asked"


@pytest.mark.parametrize(("kind", "user"), [("root", "0"), ("user", "1000"), ("shell", "0")])
def test_the_command_s_container_has_few_rights_no_keys_and_sees_its_own_folders_alone(
    kind: str, user: str, images: dict[str, str], asked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = Settings(
        **dict.fromkeys(["stack", "run", "region", "image", "bucket", "log_group", "run_config_sha256"], "x"),
        **dict.fromkeys(["container_options", "data_volume", "data_device", "metadata"], ""),
        job_image=images[kind],
        timer_s=1,
        schedule="",
        device="cpu",
        root=tmp_path,
    )
    machine = InstanceIdentity(instance=f"i-{os.getpid()}{kind}", type="g5.2xlarge", zone="us-east-2a", launched_at="")
    run = tmp_path / "scratch" / "run"
    scripts = run / CONTROL / SCRIPTS
    for folder in (scripts, run / USER / "checkpoints", run / "ckpt"):
        folder.mkdir(parents=True)
        folder.chmod(0o777)
    metadata = socket.create_server(("127.0.0.1", 0))  # the machine's, as seen from its own network
    (scripts / FIRST).write_text(LOOK.replace("PORT", str(metadata.getsockname()[1])))
    jobs = Jobs(settings, machine, tmp_path / "scratch")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "of-the-machine")
    with metadata:
        done = subprocess.run(["docker", *jobs.command()[1:]], capture_output=True, text=True, check=False)
    subprocess.run(["docker", "rm", "-f", jobs_name(machine.instance)], capture_output=True, check=False)
    told = dict(line.replace(":", "").split(maxsplit=1) for line in done.stdout.splitlines())
    assert done.returncode == 0, done.stderr
    rights = 0xFB  # CHOWN, DAC_OVERRIDE, FOWNER, FSETID, KILL, SETGID, SETUID
    assert (told["user"], int(told["CapEff"], 16), int(told["CapBnd"], 16)) == (
        user,
        rights if user == "0" else 0,
        rights,
    )
    assert (told["NoNewPrivs"], told["pids"], told["keys"], told["reached"]) == ("1", "30000", "0", "none")
    assert told["run"] == "control user"
    assert told["control"] == "job"


@pytest.mark.parametrize("kind", ["root", "user", "shell"])
def test_a_command_is_rehearsed_in_its_own_image(
    kind: str, images: dict[str, str], asked: Path, tmp_path: Path
) -> None:
    command, file = ("sh train.sh", "ckpt.txt") if kind == "shell" else ("python3 train.py", "ckpt.json")
    told = {
        "IMAGE": images[kind],
        "SUPERVISOR": images["root"],
        "FILE": file,
        "COMMAND": f"'{command} {{checkpoints}}'",
    }
    text = TEXT
    for name, value in told.items():
        text = text.replace(name, value)
    (tmp_path / "project" / "stacks").mkdir(parents=True)
    (tmp_path / "project" / "stacks" / "mine.yaml").write_text(text)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(SCRIPT)
    (tmp_path / "mine" / "train.sh").write_text(IN_SH)
    project, said = tmp_path / "project", list[str]()
    assert rehearse("mine", root=project, image=True, out=said.append) == 0, "\n".join(said)
    assert any("your script in its own image, without a GPU" in line for line in said)
    assert sorted(path.name for path in project.iterdir()) == ["rehearsals", "stacks"]  # nothing else was left
    told_of: dict[str, Any] = json.loads((project / "rehearsals" / "mine" / "r1" / "summary.json").read_text())
    assert [each.split()[0] for each in told_of["interruptions"]] == ["notice", "loss"]
    left = subprocess.run(["docker", "ps", "-aq", "-f", "name=gpufleet-i-"], capture_output=True, text=True, check=True)
    assert left.stdout == ""
