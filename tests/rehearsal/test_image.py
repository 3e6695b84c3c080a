"""`gpufleet rehearse --image`: a command in its own image. Here a docker that notes down what it is asked, and runs
containers as processes by the stand-in; what only a real one can show is in test_image_real.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.errors import GpufleetError
from gpufleet.rehearsal import images, registry
from gpufleet.rehearsal.images import Docker
from gpufleet.rehearsal.node import STANDINS
from gpufleet.rehearsal.rehearse import rehearse

DIGEST = "sha256:" + "ab" * 32
IMAGE = "public.ecr.aws/docker/library/python:3.13-slim"
FAKE = f"""#!{sys.executable}
import json, os, signal, subprocess, sys
from pathlib import Path
from gpufleet.job.command import processes

words, notes = sys.argv[1:], Path(__file__).parent
with (notes / "asked").open("a") as asked:
    asked.write(json.dumps(words) + "\\n")


def stand_in(root, *words):
    env = {{**os.environ, "GPUFLEET_ROOT": root}}
    env.pop("GPUFLEET_DOCKER", None)
    os.execve(sys.executable, [sys.executable, "{STANDINS}/docker.py", *words], env)


if words[0] == "version":
    print("28.2.2")
elif words[0] == "image":
    print("150000000 elsewhere/it@{DIGEST}")
elif words[:2] == ["run", "--rm"]:
    if "sh" in words:
        os.environ["LOOK"] = words[3].partition("=")[2]
        os.execv("/bin/sh", ["sh", *words[words.index("-c"):]])
    if "python" in words:
        os.execv(sys.executable, [sys.executable, *words[words.index("-c"):]])
elif words[0] == "run":
    (notes / words[words.index("--name") + 1]).write_text(os.environ["GPUFLEET_ROOT"])
    stand_in(os.environ["GPUFLEET_ROOT"], *words)
elif "GPUFLEET_ROOT" in os.environ:
    stand_in(os.environ["GPUFLEET_ROOT"], *words)
elif words[0] in ("rm", "pause", "unpause"):
    for name in words[1:]:
        if (notes / name).is_file() and (at := Path((notes / name).read_text()) / "run/docker" / name).exists():
            number = {{"rm": signal.SIGKILL, "pause": signal.SIGSTOP, "unpause": signal.SIGCONT}}[words[0]]
            processes.send(processes.descendants(int(at.read_text())), number)
"""
SCRIPT = """
import json, os, signal, sys, time
path = os.path.join(sys.argv[1], "ckpt.json")
step = json.load(open(path))["step"] if os.path.exists(path) else 0
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
while step < 600:
    step += 1
    time.sleep(0.08)
    print("step", step)
    if step % 50 == 0 or asked:
        json.dump({"step": step}, open(path, "w"))
    if asked:
        break
"""
TEXT = f"""
run: {{id: r1, owner: you}}
job:
  image: {IMAGE}
  code: {{folder: ../mine}}
  command: 'python3 train.py {{checkpoints}}'
  checkpoint: {{each: ckpt.json, rewritten: true, every: {{steps: 50}}, size_gb: 0.0001}}
  progress: {{stdout: 'step (?P<step>[0-9]+)'}}
  work: {{steps: 600, step_ms: {{L40S: 80}}}}
  stop: {{saves: true}}
fleet: {{region: us-east-2, zones: [us-east-2a, us-east-2b], instance_types: [g6e.2xlarge]}}
storage: {{keep: {{days: 7}}}}
limits: {{max_usd: 5, max_hours: 3}}
rehearsal:
  job: {{device: cpu, gpus: 1, checkpoint: {{heartbeat_s: 1}}}}
  estimate: {{step_ms: [80], setup_minutes: 0.1, restart_minutes: 0.1, capacity_wait_minutes: 0.05}}
"""
Asked = Callable[[], list[list[str]]]


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "project" / "stacks").mkdir(parents=True)
    (tmp_path / "project" / "stacks" / "mine.yaml").write_text(TEXT)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "train.py").write_text(SCRIPT)
    return tmp_path / "project"


def put_docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> Path:
    """Puts a docker with this text first on PATH; returns the file in which it records its calls."""
    place = tmp_path / "bin" / "docker"
    place.parent.mkdir()
    place.write_text(text)
    place.chmod(0o755)
    monkeypatch.setenv("PATH", f"{place.parent}{os.pathsep}{os.environ['PATH']}")
    return place.with_name("asked")


@pytest.fixture
def asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asked:
    notes = put_docker(tmp_path, monkeypatch, FAKE)
    return lambda: [json.loads(line) for line in notes.read_text().splitlines()]


def test_a_machine_without_docker_is_told_so_before_anything_starts(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name, **_: None)
    with pytest.raises(GpufleetError, match="no docker on PATH: install Docker Engine"):
        rehearse("mine", root=project, image=True)
    assert not (project / "rehearsals").exists()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ('[ "$1" = image ]', r"daemon does not answer \(exit code 1\): start it"),
        ('echo "Cannot connect to the Docker daemon" >&2; exit 1', r"does not answer \(Cannot connect to the Docker"),
        ('[ "$1" = version ] || { echo "manifest unknown" >&2; exit 1; }', rf"cannot pull {IMAGE}: manifest unknown"),
        ('[ "$1" = image ] && echo 1000; exit 0', "is in no registry, so no node could pull it"),
    ],
)
def test_a_docker_that_cannot_is_told_in_its_own_words(
    project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: str, said: str
) -> None:
    put_docker(tmp_path, monkeypatch, f"#!/bin/sh\n{answers}\n")
    with pytest.raises(GpufleetError, match=said):
        rehearse("mine", root=project, image=True, out=lambda _: None)
    assert not (project / "rehearsals").exists()


def test_images_are_pulled_first_and_the_registry_gives_their_own_digests(project: Path, asked: Asked) -> None:
    found = images.require(load(project / "stacks" / "mine.yaml", now=datetime.now(UTC)), lambda _: None)
    assert found.digests == {IMAGE: DIGEST}
    assert found.supervisor == f"{IMAGE}@{DIGEST}"
    assert ["pull", IMAGE] in asked()
    real = {("docker/library/python", "3.13-slim"): DIGEST}
    status, headers, _ = registry.answer("/v2/docker/library/python/manifests/3.13-slim", "Bearer x", "", real)
    assert (status, headers["Docker-Content-Digest"]) == ("200 OK", DIGEST)


def test_a_container_that_is_elsewhere_is_told_where_it_must_be(asked: Asked) -> None:
    docker = Docker(program=shutil.which("docker") or "", digests={}, supervisor=IMAGE)
    with pytest.raises(GpufleetError, match=r"does not reach the embedded AWS at http://127\.0\.0\.1:9 \(.*refused"):
        docker.require_reach("http://127.0.0.1:9")
    (words,) = asked()
    assert words[:6] == ["run", "--rm", "--network", "host", "--entrypoint", "python"]


def test_the_stand_in_passes_everything_on_but_the_log_driver(tmp_path: Path, asked: Asked) -> None:
    logs = ("--log-driver", "awslogs", "--log-opt", "awslogs-region=us-east-2", "--log-opt", "awslogs-group=/g")
    told: dict[str, str] = {
        **os.environ,
        "GPUFLEET_ROOT": str(tmp_path),
        "GPUFLEET_PYTHON": sys.executable,
        **Docker(program=shutil.which("docker") or "", digests={}, supervisor="").environment(),
        "DOCKER_CONFIG": "/the/nodes/own",
    }
    ran = ("--name", "c", "--log-opt", "awslogs-stream=s", "--pid", "host", IMAGE, "python", "-c", "print('ran')")
    for words in (("run", *logs, *ran), ("run", "--log-driver", "none", IMAGE, "true"), ("stop", "-t", "1", "c")):
        subprocess.run([STANDINS / "docker", *words], env=told, check=False, capture_output=True)
    assert asked()[0] == ["run", "--name", "c", "--pid", "host", IMAGE, "python", "-c", "print('ran')"]
    assert asked()[1:] == [["run", "--log-driver", "none", IMAGE, "true"], ["stop", "-t", "1", "c"]]


def rehearse_with_image(project: Path) -> None:
    """All of which has held."""
    said: list[str] = []
    assert rehearse("mine", root=project, image=True, out=said.append) == 0, "\n".join(said)
    assert any("your script in its own image, without a GPU" in line for line in said)
    assert sorted(path.name for path in project.iterdir()) == ["rehearsals", "stacks"]  # nothing else was left
    told: dict[str, Any] = json.loads((project / "rehearsals" / "mine" / "r1" / "summary.json").read_text())
    assert [each.split()[0] for each in told["interruptions"]] == ["notice", "loss"]


@pytest.mark.slow
def test_a_command_is_rehearsed_by_the_node_s_own_docker_command_line(project: Path, asked: Asked) -> None:
    rehearse_with_image(project)
    runs = [words for words in asked() if words[0] == "run" and "--name" in words]
    assert len(runs) == 6  # of three nodes, two each
    assert not any("--gpus" in words or "awslogs" in words for words in runs)
    for words in runs:
        line = " ".join(words)
        is_command = words[words.index("--name") + 1].endswith("-job")
        assert f"{IMAGE}@{DIGEST}" in words
        assert ("--network bridge" in line, "--network host" in line) == (is_command, not is_command)
        assert ("AWS_SECRET_ACCESS_KEY" in line or "AWS_ENDPOINT_URL" in line) != is_command
    assert [words[0] for words in asked() if words[0] in ("pause", "unpause")] == ["pause", "unpause"]
    removed = {words[2] for words in asked() if words[:2] == ["rm", "-f"] and len(words) == 4}
    assert len(removed) == 3


@pytest.mark.parametrize(
    ("command", "reads", "grace_s", "named"),
    [
        ("torchrun --nproc-per-node={gpus} train.py", "", 90, True),
        ("torchrun --nproc-per-node={gpus} train.py", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", 90, False),
        ("torchrun --nproc-per-node={gpus} train.py", "", 30, False),
        ("python3 train.py", "", 90, False),
    ],
)
def test_an_image_whose_torchrun_waits_less_than_is_declared_is_named(
    project: Path, asked: Asked, monkeypatch: pytest.MonkeyPatch, command: str, reads: str, grace_s: float, named: bool
) -> None:
    torch = project / "packages" / "torch"
    (torch / "distributed" / "launcher").mkdir(parents=True)
    (torch / "__init__.py").touch()
    (torch / "version.py").write_text("__version__ = '2.5.1+cu124'\n")
    (torch / "distributed" / "launcher" / "api.py").write_text(reads)
    monkeypatch.setenv("PYTHONPATH", str(torch.parent))
    path = project / "stacks" / "mine.yaml"
    text = path.read_text().replace("'python3 train.py {checkpoints}'", f"'{command} {{checkpoints}}'")
    path.write_text(text.replace("{saves: true}", f"{{saves: true, grace_s: {grace_s}}}"))
    definition = load(path, now=datetime.now(UTC), rehearsal=True)
    docker = images.require(definition, lambda _: None)
    sentence = docker.impatience(definition)
    assert bool(sentence) is named
    assert not named or sentence.startswith(f"torch 2.5.1 of {IMAGE} ends the workers of torchrun after 30 s")
