"""The container runtime of a rehearsed node: `docker run` without images, namespaces or root.

The command runs with the project's Python in the node's process group. Instead of mounts, host folders are used: a
container path at the start of an argument or of an environment value is replaced by the host's. The environment is that
of the container, without variables of the laptop. A container that is not on the machine's network, or has the name of
a training container, is a training container. In it, processes whose parent has ended stay below the container's first
process. A container with an entry point runs a command of the user's own: its PATH begins with the user's programs and
has none of gpufleet's.

With GPUFLEET_DOCKER (`gpufleet rehearse --image`) the machine's own docker does everything except the log driver.

Output goes to standard output and, with --log-driver awslogs, to CloudWatch Logs. Options without effect here are
accepted by name; an unknown one is an error, never ignored.
"""

# ruff: noqa: T201 - a command speaks by printing

from __future__ import annotations

import argparse
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

from gpufleet.job.command import processes
from gpufleet.job.command.places import activated
from gpufleet.job.contract.environment import SECRET, USER_PATH

# the path of the machine's own docker; if it is set, this docker runs the containers
DOCKER = os.environ.get("GPUFLEET_DOCKER")
ROOT = Path(os.environ["GPUFLEET_ROOT"])
CONTAINERS = ROOT / "run" / "docker"
CONFIG = ROOT / "etc" / "docker" / "daemon.json"
DATA = json.loads(CONFIG.read_text()).get("data-root") if CONFIG.exists() else None
IMAGES = Path(DATA or ROOT / "var" / "lib" / "docker") / "images"  # a file with the pulled images, one per line
TRAINS = "-job"  # the name of the training container ends with this (job/node/jobs.py)
DAEMON_ERROR = 125  # exit code of docker itself if the container never started
NAMED = "PET_LOCAL_ADDR"  # torchrun takes a machine's name from this variable: all nodes here share the host's name
METADATA = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
# whether a container on a bridge can reach the metadata service, by the machine's hop limit
REACHES_BRIDGE = int(os.environ.get("GPUFLEET_HOPS") or 1) > 1
LOG_LINES = 50_000  # the most lines that wait to be sent


def main(words: list[str]) -> int:
    command, rest = (words[0], words[1:]) if words else ("", [])
    if DOCKER:
        os.environ["DOCKER_CONFIG"] = os.environ["GPUFLEET_DOCKER_CONFIG"]
        if command != "run":
            os.execv(DOCKER, [DOCKER, *words])
        options = _run_options().parse_args(rest)
        own = ["-e", NAMED] if options.network == "host" else []
        return _printed([DOCKER, "run", *own, *_without_awslogs(rest, options)], options)
    commands = {"run": run, "pull": pull, "stop": stop, "inspect": inspect, "rm": remove}
    commands |= {"image": image, "images": images}
    if command not in commands:
        print(f"docker: a rehearsal has no stand-in for '{command}'", file=sys.stderr)
        return DAEMON_ERROR
    return commands[command](rest)


def run(words: list[str]) -> int:
    options = _run_options().parse_args(words)
    name = options.name or f"container-{os.getpid()}"
    record = CONTAINERS / name
    if record.exists():
        print(f'docker: Conflict. The container name "/{name}" is already in use.', file=sys.stderr)
        return DAEMON_ERROR
    if options.gpus and not _has_gpu():
        print('docker: could not select device driver "" with capabilities: [[gpu]].', file=sys.stderr)
        return DAEMON_ERROR
    for option in options.security_opt:
        name, _, profile = option.partition("=")
        if name == "seccomp" and not Path(profile).is_file():
            print(f"docker: opening seccomp profile ({profile}) failed: no such file or directory.", file=sys.stderr)
            return DAEMON_ERROR
    watched = (options.pid or "").removeprefix("container:")
    trains = options.network in ("none", "bridge") or (options.name or "").endswith(TRAINS)
    mounts = _mounts(options.volume)
    environment = {
        "PATH": _users_path() if options.entrypoint else os.environ["PATH"],
        **(activated(os.environ.get(USER_PATH, "")) if options.entrypoint else {}),
        "HOME": str(ROOT / "root"),
        "LANG": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",  # the code is mounted read-only
        # One thread is used, because the model is tiny, and two threads that wait for each other on a busy laptop are
        # 100 times slower.
        "OMP_NUM_THREADS": "1",
        # By this variable, the runner finds the processes that it must kill.
        "GPUFLEET_NODE": os.environ.get("GPUFLEET_NODE", ""),
        **({} if trains else {name: os.environ[name] for name in os.environ if name.startswith(SECRET)}),
        **({METADATA: os.environ[METADATA]} if options.network == "bridge" and REACHES_BRIDGE else {}),
        **({processes.FIRST_PROCESS: str(_first_process(watched))} if watched else {}),
        **_environment([*options.env, *([NAMED] if options.network == "host" else [])], mounts),
    }
    argv = [_to_host_path(word, mounts) for word in options.command]
    if trains:
        guard = [os.environ["GPUFLEET_PYTHON"], "-I", processes.__file__, str(os.getpid())]
        argv = [*guard, *filter(None, [options.entrypoint]), *argv]
    elif argv[0] in ("python", "python3"):
        argv[0] = os.environ["GPUFLEET_PYTHON"]
    CONTAINERS.mkdir(parents=True, exist_ok=True)
    folder = _to_host_path(options.workdir, mounts) if options.workdir else str(ROOT)
    return _printed(argv, options, record, cwd=folder, env=environment)


def _printed(argv: list[str], options: argparse.Namespace, record: Path | None = None, **where: Any) -> int:
    """Runs the program; returns its exit code, as in a shell.

    `record` is called with its process id. The options decide where its output goes.
    """
    child = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **where)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda received, _: child.send_signal(received))
    if record is not None:
        record.write_text(str(child.pid))
    logs = _logs(options)
    assert child.stdout is not None
    for line in child.stdout:
        sys.stdout.buffer.write(line)
        sys.stdout.buffer.flush()
        if logs is not None:
            logs.write(line)
    code = child.wait()
    if logs is not None:
        logs.close()
    return 128 - code if code < 0 else code


def pull(words: list[str]) -> int:
    """Notes only the image's name: 15 GB are too much for a laptop. Fails if a registry would refuse the image."""
    name = words[-1]
    if not re.fullmatch(r"[a-z0-9][a-z0-9._/:-]*(:[\w.-]+)?@sha256:[0-9a-f]{64}", name):
        print(f"docker: {name} names no digest", file=sys.stderr)
        return 1
    IMAGES.parent.mkdir(parents=True, exist_ok=True)
    with IMAGES.open("a") as images:
        images.write(f"{name}\n")
    print(name)
    return 0


def image(words: list[str]) -> int:
    """`image inspect -f {{.Id}} NAME`: whether an image was pulled."""
    name = words[-1]
    if name not in (IMAGES.read_text().splitlines() if IMAGES.exists() else ()):
        print(f"Error response from daemon: No such image: {name}", file=sys.stderr)
        return 1
    print(name.rpartition("@")[2])
    return 0


def images(words: list[str]) -> int:
    print(IMAGES.read_text() if IMAGES.exists() else "", end="")
    return 0


def inspect(words: list[str]) -> int:
    """`inspect -f {{.State.Pid}} NAME`: the id of the container's first process, which its guard has started; 0 before
    it is started.
    """
    _, template, name = words
    if template != "{{.State.Pid}}":
        print(f"docker: a rehearsal has no stand-in for {template}", file=sys.stderr)
        return DAEMON_ERROR
    try:
        print(_first_process(name))
    except FileNotFoundError:
        print(f"Error: No such object: {name}", file=sys.stderr)
        return 1
    return 0


def _first_process(name: str) -> int:
    return next(iter(processes.descendants(int((CONTAINERS / name).read_text()))), 0)


def remove(words: list[str]) -> int:
    """`rm -f NAME`: ends all of the container's processes at once."""
    record = CONTAINERS / words[-1]
    try:
        pid = int(record.read_text())
    except FileNotFoundError:
        print(f"Error response from daemon: No such container: {words[-1]}", file=sys.stderr)
        return 1
    if _alive(pid):
        os.kill(pid, signal.SIGTERM)
    while _alive(pid):
        time.sleep(0.05)
    record.unlink(missing_ok=True)
    print(words[-1])
    return 0


def stop(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="docker stop")
    parser.add_argument("-t", dest="time", type=float, default=10)
    parser.add_argument("container")
    options = parser.parse_args(words)
    try:
        pid = int((CONTAINERS / options.container).read_text())
    except FileNotFoundError:
        print(f"Error response from daemon: No such container: {options.container}", file=sys.stderr)
        return 1
    deadline = time.monotonic() + options.time
    if _alive(pid):
        os.kill(pid, signal.SIGTERM)
    while _alive(pid):
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    print(options.container)
    return 0


def _without_awslogs(words: list[str], options: argparse.Namespace) -> list[str]:
    """The words without the log driver, because the daemon has no keys."""
    remaining = iter(words)
    dropped = ("--log-driver", "--log-opt") if options.log_driver == "awslogs" else ()
    return [word for word in remaining if word not in dropped or not next(remaining)]


class CloudWatchLogs:
    """The awslogs driver in its non-blocking mode. While the container starts, it tries to make its stream until it
    succeeds. The stand-in drops lines that cannot be sent, and never waits. The stand-in behaves like moby's
    (daemon/logger/awslogs, 2026-08-23).
    """

    def __init__(self, region: str, group: str, stream: str) -> None:
        self._place = {"logGroupName": group, "logStreamName": stream}
        self._lines: queue.Queue[tuple[int, str] | None] = queue.Queue()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._send, args=(region,), daemon=True)
        self._thread.start()

    def write(self, line: bytes) -> None:
        text = line.decode("utf-8", "replace").rstrip("\n")
        if text and self._lines.qsize() < LOG_LINES:
            self._lines.put((int(time.time() * 1000), text))

    def close(self) -> None:
        self._closed.set()
        self._lines.put(None)
        self._thread.join(timeout=60)

    def _send(self, region: str) -> None:
        import botocore.session
        from botocore.exceptions import BotoCoreError, ClientError

        client: Any = botocore.session.get_session().create_client("logs", region_name=region)
        while True:
            try:
                client.create_log_stream(**self._place)
                break
            except (BotoCoreError, ClientError) as error:
                print(f"awslogs: no stream: {error}", file=sys.stderr)
                if self._closed.wait(1.0):
                    return
        more = True
        while more:
            batch = [self._lines.get()]
            time.sleep(0.5)
            while not self._lines.empty():
                batch.append(self._lines.get())
            more = None not in batch
            events = [{"timestamp": entry[0], "message": entry[1]} for entry in batch if entry is not None]
            if events:
                try:
                    client.put_log_events(**self._place, logEvents=events)
                except (BotoCoreError, ClientError) as error:
                    print(f"awslogs: {len(events)} lines dropped: {error}", file=sys.stderr)


def _logs(options: argparse.Namespace) -> CloudWatchLogs | None:
    """The log driver; None if the options name none."""
    if options.log_driver != "awslogs":
        return None
    settings = dict(option.split("=", 1) for option in options.log_opt)
    return CloudWatchLogs(settings["awslogs-region"], settings["awslogs-group"], settings["awslogs-stream"])


def _run_options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="docker run", allow_abbrev=False)
    for option in ("--name", "--stop-timeout", "--ipc", "--log-driver", "--gpus", "--pid", "--network", "--entrypoint"):
        parser.add_argument(option)
    for option in ("--pids-limit", "--user", "--hostname"):
        parser.add_argument(option)
    for option in ("--ulimit", "--log-opt", "--security-opt", "--cap-add", "--cap-drop"):
        parser.add_argument(option, action="append", default=[])
    parser.add_argument("-v", "--volume", action="append", default=[])
    parser.add_argument("-e", "--env", action="append", default=[])
    parser.add_argument("-w", "--workdir")
    parser.add_argument("image")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    return parser


def _mounts(volumes: list[str]) -> dict[str, str]:
    """The host folder by container path, the longest path first."""
    mounts = {}
    for volume in volumes:
        host, container = volume.split(":")[:2]
        if not host.startswith(f"{ROOT}/"):
            raise SystemExit(f"docker: {host} is outside this node ({ROOT})")
        Path(host).mkdir(parents=True, exist_ok=True)
        mounts[container] = host
    return dict(sorted(mounts.items(), key=lambda pair: -len(pair[0])))


def _to_host_path(text: str, mounts: dict[str, str]) -> str:
    """The text with a leading container path replaced by the host's."""
    for container, host in mounts.items():
        if text == container or text.startswith(container + "/"):
            return host + text[len(container) :]
    return text


def _environment(settings: list[str], mounts: dict[str, str]) -> dict[str, str]:
    result = {}
    for setting in settings:
        name, sign, value = setting.partition("=")
        if sign or name in os.environ:
            result[name] = _to_host_path(value if sign else os.environ[name], mounts)
    return result


def _users_path() -> str:
    """The PATH with the user's programs first, then those of the laptop, but without those of this project."""
    own = {str(Path(os.environ["GPUFLEET_PYTHON"]).parent), str(Path(__file__).parent)}
    path = [folder for folder in os.environ["PATH"].split(os.pathsep) if folder not in own]
    return os.pathsep.join([*filter(None, [os.environ.get(USER_PATH)]), *path])


def _has_gpu() -> bool:
    try:
        return subprocess.run(["nvidia-smi"], capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
