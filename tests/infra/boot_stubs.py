"""A node for the tests: the rendered script and job/node really run, in a folder; small recorders on PATH stand for the
programs that they call.

S3 is a folder, the metadata service is a folder, a command named in `fails` answers as if it were refused. To sleep
takes next to no time, and the machine's clock jumps where `timer-fires` says so. The script's own fetch of the job
archive is not among the calls.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet import job
from gpufleet.infra.inputs import archive
from gpufleet.infra.program.boot import user_data
from gpufleet.job.contract.aws import OWN_TAGS
from gpufleet.job.contract.bucket import fleet_key
from gpufleet.job.contract.reading import iso
from tests.waiting import wait_for

JOB = Path(job.__file__).parent
PYTHON = os.environ.get("GPUFLEET_NODE_PYTHON", sys.executable)  # a node has Python 3.9
CONTRACT = (
    *("__init__", "attempt", "aws", "bucket", "codes", "done", "environment"),
    *("gathering", "messages", "reading", "spent", "terms", "workdir"),
)
# What the node imports, all of it written for Python 3.9 (per-file-target-version in pyproject.toml).
CODE = [
    "__init__.py",
    "atomic.py",
    "clock.py",
    *(f"contract/{name}.py" for name in CONTRACT),
    *(path.relative_to(JOB).as_posix() for path in (JOB / "node").glob("*.*")),
]
INSTANCE = "i-0123456789abcdef0"
BUCKET = "gpufleet-test"
FLEET = "fleet-0a1b2c3d"
SCHEDULE = "gpufleet-schedules/stop"
TIMER_S = 9000
EXPIRES = iso(
    float(int(time.time()) + 10 * 365 * 86_400)
)  # AWS ends the fleet at this hour, unless a node moves the hour
DECLARED = {  # the answer of GetSchedule
    "Arn": f"arn:aws:scheduler:us-east-2:111122223333:schedule/{SCHEDULE}",
    "ActionAfterCompletion": "NONE",
    "CreationDate": "2026-11-27T00:00:00Z",
    "FlexibleTimeWindow": {"Mode": "OFF"},
    "GroupName": "gpufleet-schedules",
    "Name": "stop",
    "ScheduleExpression": f"at({EXPIRES[:19]})",
    "ScheduleExpressionTimezone": "UTC",
    "State": "ENABLED",
    "Target": {"Arn": "arn:aws:scheduler:::aws-sdk:ec2:deleteFleets", "RoleArn": "arn:aws:iam::1:role/stop"},
}

# How calls begin.
DELETE = "aws ec2 delete-fleets"
TERMINATE = "aws ec2 terminate-instances"
SHUTDOWN = "shutdown -h now"
MOVE = "aws scheduler update-schedule"
RUN = "docker run"

_FAILS = r"""
fails() { [[ -e $WORLD/fails/$1 ]] && echo "$1" >>"$WORLD/refused"; }
"""
_AWS = r"""
if [[ $3 == */job.tar.gz ]]; then echo "aws $*" >>"$WORLD/fetched"; else echo "aws $*" >>"$WORLD/calls"; fi
[[ ! -e $WORLD/dies-at || $(wc -l <"$WORLD/calls") -lt $(<"$WORLD/dies-at") ]] || kill -KILL 0
at() { file=$WORLD/s3/${1#s3://}; } # a builtin: a boot makes ten such calls, and each process takes its time
written() { # what the node has said is in its log: AWS's own program takes longer to start than tee to write
  echo "# $$" >"/proc/$PPID/fd/1" && until grep -qx "# $$" "$1"; do /bin/sleep 0.01; done
}
case "$1 $2" in
  "s3 cp")
    if [[ $3 == s3://* && " $* " == *" --recursive "* ]]; then
      fails read && exit 1
      at "$3"
      [[ ! -d $file ]] || cp "$file"* "$4"
    elif [[ $3 == s3://* ]]; then
      fails read && exit 1
      fails read-once && rm "$WORLD/fails/read-once" && exit 1
      at "$3"
      cp "$file" "$4"
    else
      fails write && exit 1
      [[ $3 != */boot.log ]] || written "$3"
      at "$4"
      mkdir -p "${file%/*}" && cp "$3" "$file"
    fi ;;
  "s3api list-objects-v2")
    fails list && exit 254
    [[ "$6" == *known_fleet* ]] && fails known_fleet && exit 254
    cd "$WORLD/s3/$4" && found=$(find "${6%/}" -type f 2>/dev/null | sort)
    echo "${found:-None}" ;;
  "ec2 delete-fleets") if fails delete-fleets; then echo "not authorized"; else echo None; fi ;;
  "ec2 terminate-instances") fails terminate-instances && exit 254; echo TERMINATINGINSTANCES ;;
  "ec2 describe-instances")
    if [[ " $* " == *" --filters "* ]]; then cat "$WORLD/there" 2>/dev/null; else cat "$WORLD/described"; fi ;;
  "ec2 describe-fleet-history") fails history && exit 254; cat "$WORLD/history" 2>/dev/null; true ;;
  "scheduler get-schedule") fails scheduler && exit 254; sed "s#\"stop\"#\"$6\"#" "$WORLD/schedule" ;;
  "scheduler update-schedule")
    fails scheduler && exit 254
    cp "${4#file://}" "$WORLD/moved" && cat "$WORLD/moved" >>"$WORLD/moves" && echo >>"$WORLD/moves" ;;
  "sns publish") fails sns && exit 254; printf '%s\n' "$8" "${10}" >>"$WORLD/told" ;;
  "stepfunctions start-execution") fails states && exit 254; echo "${10}" >"$WORLD/asked" ;;
  "ssm get-parameter" | "secretsmanager get-secret-value") cat "$WORLD/secret" 2>/dev/null || echo "me:secret of $4" ;;
  "ecr get-authorization-token") fails ecr && exit 254; echo "token of ${4}" ;;
  *) exit 252 ;;
esac
"""
_CURL = r"""
url=${!#}
[[ $url == */api/token ]] && { [[ -d $WORLD/imds ]] && echo token; exit; }
[[ " $* " == *" X-aws-ec2-metadata-token: token "* ]] || exit 22
file=$WORLD/imds/${url#*/latest/}
[[ -f $file ]] && cat "$file" || exit 22
"""
_DOCKER = r"""
echo "docker $*" >>"$WORLD/calls"
if [[ $1 == pull ]]; then
  cat "$DOCKER_CONFIG/config.json" >"$WORLD/login" 2>/dev/null
  cat "$WORLD/pull-says" >&2 2>/dev/null
fi
case $1 in
  images) cat "$WORLD/images" 2>/dev/null ;;
  image) grep -qxF "${!#}" "$WORLD/images" 2>/dev/null ;;
  pull) ! fails pull ;;
  stop) touch "$WORLD/stopped"; [[ -e $WORLD/running ]] ;;
  inspect) cat "$WORLD/pid" ;;
  rm) echo removed ;;
  run)
    if [[ $* == *first.sh || $* == *" watch "* ]]; then exec /usr/bin/env -i /bin/sleep 5000; fi
    touch "$WORLD/running"
    echo "a line from the job"
    [[ ! -e $WORLD/job ]] || . "$WORLD/job"
    rm "$WORLD/running"
    exit "$(cat "$WORLD/code")" ;;
esac
"""
_PYTHON = r"""
[[ $* != *"-m gpufleet.job.node" ]] || set -- "$WORLD/clock.py"
"""
_CLOCK = r"""
import os, pathlib, runpy, sys, time

world, wait = pathlib.Path(os.environ["WORLD"]), time.sleep

def sleep(seconds):
    if seconds == 4:
        wait(0.2)
    elif seconds == 10:
        wait(0.02)

def jumped(told):
    def tell(*which):
        fires = world / "timer-fires"
        return told(*which) + (10**6 if fires.exists() and (world / fires.read_text()).exists() else 0)
    return tell

time.clock_gettime, time.monotonic = jumped(time.clock_gettime), jumped(time.monotonic)
time.sleep = sleep
sys.path.insert(0, "")
runpy.run_module("gpufleet.job.node", run_name="__main__")
"""
_RECORDED = r"""
echo "{name} $*" >>"$WORLD/calls"
cat "$WORLD/{name}-says" 2>/dev/null
! fails {name}
"""
_STUBS = {
    "aws": _AWS,
    "curl": _CURL,
    "docker": _DOCKER,
    "sleep": "exit 0\n",
    "python3": f'{_PYTHON}exec {shlex.quote(PYTHON)} -S -B "$@"\n',  # no site-packages: half the start-up time
    "lsblk": '[[ ! -e $WORLD/lsblk ]] || cat "$WORLD/lsblk"\n',
    "findmnt": "[[ -e $WORLD/mounted ]]\n",
    "blkid": "[[ -e $WORLD/has-filesystem ]] && exit 0\nexit 2\n",
    **{
        name: _RECORDED.replace("{name}", name) for name in ("shutdown", "nvidia-smi", "mkfs.xfs", "mount", "systemctl")
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BootOutcome:
    """The calls and objects that a boot made."""

    calls: list[str]
    log: str

    def calls_starting(self, *beginnings: str) -> list[str]:
        """The calls that begin with one of these, in order, cut to the beginning."""
        return [start for call in self.calls for start in beginnings if call.startswith(start)]

    def writes(self) -> list[str]:
        """Keys under the run's prefix that the node wrote, and the calls that end a run, in order."""
        found = []
        for call in self.calls:
            if call.startswith("aws s3 cp /"):
                found.append(call.split()[4].removeprefix(f"s3://{BUCKET}/r1/"))
            found += [start for start in (RUN, DELETE, TERMINATE, SHUTDOWN) if call.startswith(start)]
        return found


class StubNode:
    """One machine of one run. Change its world, then `boot()`."""

    def __init__(self, folder: Path) -> None:
        self.root, self.world = folder / "root", folder / "world"
        self.s3 = self.world / "s3" / BUCKET
        for made in (self.root, self.s3, self.world / "imds", self.world / "fails", folder / "bin"):
            made.mkdir(parents=True)
        self.bin = folder / "bin"
        for name, body in _STUBS.items():
            (self.bin / name).write_text(f"#!/bin/bash\n{_FAILS if 'fails' in body else ''}{body}")
            (self.bin / name).chmod(0o755)
        (self.world / "clock.py").write_text(_CLOCK)
        self.data_volume: str | None = None
        self.code = folder / "job"  # the metadata that the node needs
        for part in CODE:
            (self.code / part).parent.mkdir(parents=True, exist_ok=True)
            (self.code / part).write_bytes((JOB / part).read_bytes())
        self.device = "cuda"
        self.container_options = ""
        self.notify: dict[str, Any] = {}
        self.fallback = False
        self.next_stage, self.before = "", list[str]()
        self.run = "r1"
        self.image = "public.ecr.aws/x/pytorch:1@sha256:aa"
        self.job_image = ""
        self.parameters: dict[str, Any] = {}
        self.limits: dict[str, Any] = {"max_usd": "1000", "max_hours": "100", "expires": EXPIRES}
        self.launched(minutes_ago=90)
        self.nodes, self.efa, self.capacity = 1, 0, "spot"
        self.hourly_usd: dict[str, str] = {}
        self.imds("meta-data/tags/instance/aws:ec2:fleet-id", FLEET)
        for key, value in zip(OWN_TAGS, ("tinystories-growth", "r1", "you"), strict=True):
            self.imds(f"meta-data/tags/instance/{key}", value)
        self.put(fleet_key(FLEET), "known")
        (self.world / "calls").touch()
        (self.world / "schedule").write_text(json.dumps(DECLARED))
        self.job_ends_with(0)

    def launched(self, *, minutes_ago: float) -> None:
        self.launched_at = float(int(time.time() - 60 * minutes_ago))  # in AWS's form, with whole seconds
        document = {
            "accountId": "111122223333",
            "instanceId": INSTANCE,
            "instanceType": "g5.2xlarge",
            "availabilityZone": "us-east-2a",
            "pendingTime": iso(self.launched_at),
        }
        self.imds("dynamic/instance-identity/document", json.dumps(document, indent=2))

    def imds(self, path: str, text: str) -> None:
        file = self.world / "imds" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def notice(self) -> None:
        self.imds("meta-data/spot/instance-action", '{"action": "terminate", "time": "2026-11-21T12:00:00Z"}')

    def job_ends_with(self, code: int, script: str = "") -> None:
        (self.world / "code").write_text(str(code))
        (self.world / "job").write_text(script)

    def fails(self, *names: str) -> None:
        for name in names:
            (self.world / "fails" / name).touch()

    def says(self, name: str, text: str) -> None:
        """Sets the output of `docker pull` (as `pull`) or of a recorded command, and makes the command fail."""
        (self.world / f"{name}-says").write_text(text)
        self.fails(name)

    def dies(self, *, at: int | None) -> None:
        """Kills all processes of the node at its call of this number, before AWS gets the call; None: never again."""
        (self.world / "dies-at").unlink(missing_ok=True)
        if at is not None:
            (self.world / "dies-at").write_text(str(at))

    def breaks(self, *, at: str, by: str) -> None:
        """Replaces the statement `at` of job/node by `by`."""
        main = self.code / "node/__main__.py"
        before, after = main.read_text().split(at)
        main.write_text(f"{before}{by}{after}")

    def put(self, key: str, value: Any) -> None:
        file = self.s3 / self.run / key
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(value if isinstance(value, str) else json.dumps(value))

    def stored(self, key: str) -> Any:
        return json.loads((self.s3 / "r1" / key).read_text())

    def has(self, key: str) -> bool:
        return (self.s3 / "r1" / key).exists()

    def moves(self, name: str = "stop") -> list[float]:
        """The hours, in epoch seconds, to which the node moved the schedule that ends its fleet, or another one."""
        path = self.world / "moves"
        told = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        told = [each for each in told if each["Name"] == name]
        assert all(each.keys() == DECLARED.keys() - {"Arn", "CreationDate"} for each in told)
        return [
            datetime.strptime(each["ScheduleExpression"], "at(%Y-%m-%dT%H:%M:%S)").replace(tzinfo=UTC).timestamp()
            for each in told
        ]

    def after_a_moment_of_its_life(self, seconds: float) -> Any:
        """An object that equals every time between the node's start and now, plus the given seconds."""
        lived = time.time() - self.began_at
        return pytest.approx(self.began_at + lived / 2 + seconds, abs=lived / 2 + 1)

    def earlier_boots(self, count: int, *, manifest: str | None = None, notice: bool = False, reason: str = "") -> None:
        for number in range(count):
            exit_ = {"code": 75 if notice else 1, "reason": reason, "notice": notice, "at": ""}
            attempt = {"booted_at": f"2026-11-21T1{number}:00:00Z", "manifest_at_boot": manifest, "exit": exit_}
            self.put(f"attempts/i-{number}.json", attempt)

    def script(self) -> Path:
        """The rendered user-data. The objects that it names are in place under their hashes."""
        packed = archive.build(self.code)
        inputs = self.s3 / "inputs" / packed.sha256
        inputs.mkdir(parents=True, exist_ok=True)
        (inputs / "job.tar.gz").write_bytes(packed.content)
        run_config = json.dumps(
            {
                "job": {"parameters": {"device": self.device, **self.parameters}},
                "limits": self.limits,
                "capacity": self.capacity,
                **({"nodes": self.nodes} if self.nodes > 1 else {}),
                **({"before": self.before} if self.before else {}),
                "rates": {
                    "g5.2xlarge": {
                        "on_demand": "1.20",
                        "spot": {"us-east-2a": "0.40"},
                        **({"efa": self.efa} if self.efa else {}),
                    }
                },
                "extras": {"hourly_usd": self.hourly_usd, "fixed_usd": "0"},
            }
        )
        self.put("run.json", run_config)
        rendered = user_data.render(
            stack="tinystories-growth",
            run_id=self.run,
            region="us-east-2",
            image=self.image,
            job_image=self.job_image,
            bucket=BUCKET,
            log_group="gpufleet-logs",
            schedule=SCHEDULE,
            notify=json.dumps(self.notify) if self.notify else "",
            fallback=self.fallback,
            next_stage=self.next_stage,
            archive_sha256=packed.sha256,
            run_config_sha256=hashlib.sha256(run_config.encode()).hexdigest(),
            timer_seconds=TIMER_S,
            device=self.device,
            container_options=self.container_options,
            data_volume=self.data_volume,
        )
        path = self.world / "user-data.sh"
        path.write_text(rendered)
        return path

    def start(self, script: Path | None = None) -> subprocess.Popen[bytes]:
        self.began_at = time.time()
        environment = {
            "PATH": f"{self.bin}:{os.environ['PATH']}",
            "WORLD": str(self.world),
            "GPUFLEET_ROOT": str(self.root),
            "AWS_ENDPOINT_URL": "http://127.0.0.1:1",
        }
        return subprocess.Popen(
            ["bash", str(script or self.script())],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def boot(self, script: Path | None = None) -> BootOutcome:
        return self.outcome(self.start(script))

    def outcome(self, process: subprocess.Popen[bytes]) -> BootOutcome:
        """Waits for the script, and for every process that the script started."""
        try:
            wait_for("the end of the script", lambda: process.poll() is not None, log=self.log)
            wait_for("the end of all that the script has started", lambda: not _alive(process.pid), log=self.log)
        finally:
            if _alive(process.pid):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        return BootOutcome(
            calls=(self.world / "calls").read_text().splitlines(),
            log=self.log(),
        )

    def log(self) -> str:
        file = self.root / "opt/gpufleet/boot.log"
        return file.read_text() if file.exists() else ""


def _alive(group: int) -> bool:
    """Whether a process of the group still runs. A process that only waits to be reaped does not count."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for process in Path("/proc").iterdir():  # not glob, which raises if a process ends meanwhile
        with contextlib.suppress(OSError):
            state, _, pgrp = (process / "stat").read_text().rpartition(")")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                return True
    return False
