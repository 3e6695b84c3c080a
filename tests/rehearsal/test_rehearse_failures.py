"""A rehearsal that does not hold says which step and why, and leaves the user's checkout alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.commands import rehearse as command
from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic
from gpufleet.job.command.host import SETUP_BEGINS, SETUP_ENDS
from gpufleet.job.contract import bucket, metrics
from gpufleet.job.contract.gang import GangGeneration
from gpufleet.job.contract.workdir import METRICS
from gpufleet.job.kind import EXPERIMENTS
from gpufleet.rehearsal import environment, scratch
from gpufleet.rehearsal.clock import ManualClock
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.node import NodeRunner, RehearsalNode
from gpufleet.rehearsal.rehearse import headline, rehearse
from gpufleet.rehearsal.timeline import Timeline
from gpufleet.rehearsal.watch import WORK_FOLDERS, Begun, NodeView, Planned, RunFailedError, Tail, Watch
from tests.rehearsal.declared import fleet, template
from tests.repository import ROOT
from tests.waiting import HANG_S

Watching = Callable[..., Watch]


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A project with the growth stack."""
    (tmp_path / "stacks").mkdir()
    shutil.copy(ROOT / "stacks" / "tinystories-growth.yaml", tmp_path / "stacks")
    return tmp_path


def test_a_stack_that_is_not_there_is_named(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "other.yaml").touch()
    with pytest.raises(GpufleetError, match="no-such-stack"):
        rehearse("no-such-stack", root=tmp_path)


def test_a_stack_that_names_its_file_in_its_configuration_is_found(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    (tmp_path / "stacks" / "small.yaml").write_text("run: {}\n")
    (tmp_path / "Pulumi.night.yaml").write_text("config: {gpufleet:definition: small}\n")
    with pytest.raises(GpufleetError, match=r"stacks/small\.yaml: \d+ problems"):
        rehearse("night", root=tmp_path)


def test_the_step_that_fails_is_named_its_scratch_is_kept_and_so_is_the_rehearsal_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("gpufleet.rehearsal.report.save_bucket", full)  # which must not stand for the step
    (tmp_path / "stacks").mkdir()
    text = (ROOT / "stacks" / "tinystories-growth.yaml").read_text()
    assert "vocab: 512" in text
    (tmp_path / "stacks" / "small.yaml").write_text(text.replace("vocab: 512", "vocab: 16"))
    said: list[str] = []
    earlier = tmp_path / "rehearsals" / "small" / "r1" / "receipt.json"
    earlier.parent.mkdir(parents=True)
    earlier.write_text("{}")
    assert rehearse("small", root=tmp_path, out=said.append) == 1
    assert "The bucket's objects could not be kept: [Errno 28] No space left on device" in said
    assert re.fullmatch(r"FAILED: .*vocab.* \(at prepare, after \d+ s\)", said[-1])  # the reason, and not what gave it
    assert any(line.startswith("\n$ gpufleet prepare small\n") for line in said)
    assert "The files of the rehearsal are in rehearsals/small/r1.unfinished/scratch" in said
    assert (tmp_path / "rehearsals" / "small" / "r1.unfinished" / "scratch" / "commands.log").is_file()
    assert earlier.read_text() == "{}"


@pytest.mark.parametrize(
    ("why", "said"),
    [
        (
            "the command ended with exit code 1 at step 0 (ModuleNotFoundError: No module named 'torch'), twice for the"
            " same reason | Traceback (most recent call last): | File train.py",
            "the Python that runs the script has no module 'torch': install it there, or name the Python that has it",
        ),
        (
            "the command ended with exit code 1 at step 1,000 (ValueError: (a) b), twice for the same reason |"
            " Traceback",
            "ValueError: (a) b: the command ended with exit code 1 at step 1,000, twice for the same reason",
        ),
        ("no such role", "no such role"),
        (
            "node 1: sh: no torchrun, for this reason\nTraceback\n12:00:01 supervisor: attempt 1",
            "node 1: sh: no torchrun",
        ),
        ("word " * 200, "word word "),
    ],
)
def test_the_last_line_of_a_failure_says_the_reason_first_and_repeats_no_traceback(why: str, said: str) -> None:
    found = headline(why)
    assert found.startswith(said)
    assert "Traceback" not in found
    assert len(found) <= 400
    assert found.endswith((" ...", "section", "reason", "role"))


def test_a_failure_names_a_disk_that_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=3_000_000)
    monkeypatch.setattr("shutil.disk_usage", lambda _: usage)
    assert list(scratch.full_disks(tmp_path)) == [
        f"The disk of {tmp_path} has 3 MB left, which may be the cause: free some space and try again."
    ]


def test_a_stack_without_a_rehearsal_is_refused_with_all_that_it_has_to_say(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    text = (ROOT / "stacks" / "sft-h100.yaml").read_text()
    text = text.replace("dataset: data/sft", "dataset: s3://mine/sft")  # the embedded AWS has no bucket of the user's
    (tmp_path / "stacks" / "big.yaml").write_text(text.partition("\nrehearsal:")[0] + "\n")
    keys = (
        "job.parameters.device: cpu, job.parameters.data.source: generated-pairs, storage.dataset: a folder, "
        "storage.base_weights: null, estimate.step_ms: a list of 1"
    )
    with pytest.raises(GpufleetError, match=re.escape(keys)):
        rehearse("big", root=tmp_path)
    assert not (tmp_path / "rehearsals").exists()


def test_a_rehearsal_that_has_held_replaces_the_one_before(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finished = root / "rehearsals" / "tinystories-growth" / "r1"
    (finished / "results").mkdir(parents=True)

    def successful_rehearsal(path: Path, definition: object, folder: Path, *rest: object, **options: object) -> int:
        assert (finished / "results").is_dir()
        folder.mkdir()
        (folder / "receipt.json").write_text("{}")
        return 0

    monkeypatch.setattr("gpufleet.rehearsal.rehearse._attempt", successful_rehearsal)
    assert rehearse("tinystories-growth", root=root) == 0
    assert [path.name for path in finished.iterdir()] == ["receipt.json"]
    assert sorted(path.name for path in finished.parent.iterdir()) == [".lock", "r1"]


def test_a_stack_that_is_being_rehearsed_is_left_alone(root: Path) -> None:
    folder = root / "rehearsals" / "tinystories-growth"
    live = folder / "r1.unfinished" / "scratch" / "nodes"
    live.mkdir(parents=True)
    said = f"tinystories-growth is being rehearsed already, by process {os.getpid()}; wait for it or end it"
    with scratch.locked(folder), pytest.raises(GpufleetError, match=said):
        rehearse("tinystories-growth", root=root)
    assert live.is_dir()


def test_a_lock_that_a_dead_rehearsal_left_holds_nobody_up(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("1\n")
    with scratch.locked(tmp_path):
        assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
    with scratch.locked(tmp_path):
        pass


def test_a_place_where_nothing_can_be_written_is_named(root: Path) -> None:
    (root / "rehearsals").touch()
    with pytest.raises(GpufleetError, match=r"rehearsals/tinystories-growth: a rehearsal must write there but cannot"):
        rehearse("tinystories-growth", root=root)


def test_ctrl_c_leaves_no_process_and_no_scratch(root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "gpufleet.infra.cli", "rehearse", "tinystories-growth"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    with process:
        assert process.stdout is not None
        for line in process.stdout:
            if "stories" in line and "tokens" in line:  # prepared; doctor begins
                break
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read()
    assert process.returncode == 130
    assert "Every process of the rehearsal has ended" in rest
    assert [path.name for path in (root / "rehearsals" / "tinystories-growth").iterdir()] == [".lock"]
    assert not [p for p in Path("/proc").glob("[0-9]*/environ") if _names(p, root)]


@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_rehearsal_as_ctrl_c_does(nohup: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its nodes have sessions of their own, and would run on without it."""

    def hangs_up(_: object, **options: object) -> int:
        signal.raise_signal(signal.SIGHUP)
        return 0

    monkeypatch.setattr("gpufleet.rehearsal.rehearse.rehearse", hangs_up)
    monkeypatch.setattr(environment, "forget_account", lambda: None)
    kept = {number: signal.getsignal(number) for number in (signal.SIGHUP, signal.SIGTERM)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        assert main(["rehearse", "two-tower"]) == (0 if nohup else 130)
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("word", ["typo", "./typo.yaml"])
def test_a_misspelled_stack_is_said_before_the_embedded_aws_is_imported(word: str) -> None:
    program = "import sys; from gpufleet.infra.cli import main; c = main(sys.argv[1:]); "
    program += "sys.exit('moto' in sys.modules and 9 or c)"
    done = subprocess.run([sys.executable, "-c", program, "rehearse", word], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("gpufleet: there is no ")


def test_a_package_that_training_needs_is_missed_before_anything_is_rehearsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(GpufleetError, match=r"trains with tokenizers: pip install 'gpufleet\[job,rehearsal\]'"):
        command.run(Namespace(stack="two-tower", all=False, plumbing=False, again=[], image=False, quiet=False))


def test_a_profile_that_is_not_there_is_no_matter_of_a_rehearsal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", {**os.environ, "AWS_PROFILE": "nowhere", "AWS_ENDPOINT_URL": "http://x"})
    environment.forget_account()
    assert {name: value for name, value in os.environ.items() if name.startswith("AWS_")} == {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
    }


def test_a_proxy_of_the_users_is_not_asked_for_the_embedded_aws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("HTTP_PROXY", "http_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("no_proxy", "example.org")
    with Cloud(tmp_path, clock=ManualClock()) as cloud:
        assert cloud.client("s3").list_buckets()["Buckets"] == []
        assert cloud.environment()["no_proxy"] == cloud.environment()["NO_PROXY"] == "example.org,127.0.0.1,localhost"
    assert environment.past_proxies({"NO_PROXY": "example.org"}) == {}


def _names(environ: Path, folder: Path) -> bool:
    """Whether the process works in the folder, by its environment."""
    try:
        return f"{folder}/rehearsals".encode() in environ.read_bytes()
    except OSError:
        return False


def test_what_a_rehearsal_writes_is_ignored_by_git() -> None:
    paths = ["rehearsals/tinystories-growth/r1/receipt.json", ".venv/ready", "data/x"]
    done = subprocess.run(["git", "check-ignore", *paths], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode == 128:
        pytest.skip("not a git checkout")
    assert done.stdout.split() == paths


@pytest.fixture
def cloud(tmp_path: Path) -> Iterator[Cloud]:
    with Cloud(tmp_path, habits=Habits(relaunch_s=0.2)) as cloud:
        cloud.client("s3").create_bucket(Bucket="bucket", CreateBucketConfiguration={"LocationConstraint": "us-east-2"})
        yield cloud


@pytest.fixture
def watch(cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Watching]:
    """Of run r1 with these planned interruptions."""
    monkeypatch.setattr("gpufleet.rehearsal.watch.STALLED_S", HANG_S)
    runner = NodeRunner(cloud, tmp_path / "nodes")
    timeline = Timeline(tmp_path / "timeline.jsonl", out=lambda _: None)
    yield lambda *planned: Watch(cloud, runner, timeline, planned, "bucket", "r1")
    runner.close()


def test_a_node_that_runs_on_after_its_script_has_ended_is_a_failure(cloud: Cloud, watch: Watching) -> None:
    fleet(cloud, template(cloud, user_data="#!/bin/bash\nexit 3\n"))
    with pytest.raises(RunFailedError, match="node 1: the node script ended with 3 and left its machine running"):
        watch().run()


def test_a_node_that_the_machine_cannot_start_is_a_failure_at_once(
    cloud: Cloud, watch: Watching, tmp_path: Path
) -> None:
    (tmp_path / "nodes").touch()
    fleet(cloud, template(cloud))
    with pytest.raises(RunFailedError, match="a node cannot be started on this machine"):
        watch().run()


# What a command says before nothing comes any more, on two nodes, of which the second has not come as far.
SILENT = """#!/bin/bash
mkdir -p "$GPUFLEET_ROOT/opt/gpufleet"
echo "pulls the image"
mkdir "$GPUFLEET_ROOT/../first" 2>/dev/null || exec sleep 5000
{ seq 40; echo "ValueError: device_ids"; } >>"$GPUFLEET_ROOT/opt/gpufleet/container.log"
sleep 5000
"""


def test_a_run_that_falls_silent_shows_what_each_node_said_last(
    cloud: Cloud, watch: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.rehearsal.watch.STALLED_S", 8.0)
    two = {"TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot"}
    fleet(cloud, template(cloud, user_data=SILENT), TargetCapacitySpecification=two)
    with pytest.raises(RunFailedError) as failed:
        watch().run()
    lines = str(failed.value).splitlines()
    assert lines[0].startswith("nothing new for 8 s; the nodes' logs are in ")
    said = [["pulls the image"], [*map(str, range(27, 41)), "ValueError: device_ids"]]
    first, second = lines.index("the last lines of node 1:"), lines.index("the last lines of node 2:")
    assert sorted([lines[first + 1 : second], lines[second + 1 :]], key=len) == said


# A command that prints nothing for longer than the silence that counts, but computes, as a compiler does.
COMPUTES = """#!/bin/bash
GPUFLEET_CHECKPOINTS=x timeout 12 sh -c 'while :; do :; done'
exit 3
"""


def test_a_command_that_computes_is_not_silent(cloud: Cloud, watch: Watching, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpufleet.rehearsal.watch.STALLED_S", 6.0)
    monkeypatch.setattr("gpufleet.rehearsal.watch.QUIET_S", 2.0)
    fleet(cloud, template(cloud, user_data=COMPUTES))
    watched = watch()
    with pytest.raises(RunFailedError, match="the node script ended with 3"):
        watched.run()
    told = {moment.text for moment in watched.timeline.select("computes")}
    assert told == {"node 1: prints nothing, but sh computes"}


# A node that boots for longer than the silence that counts, and says so on the way.
SLOW = """#!/bin/bash
for each in $(seq 12); do echo "pulls layer $each"; sleep 1; done
exit 3
"""


def test_a_node_whose_boot_says_something_is_not_silent(
    cloud: Cloud, watch: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.rehearsal.watch.STALLED_S", 8.0)
    fleet(cloud, template(cloud, user_data=SLOW))
    with pytest.raises(RunFailedError, match="the node script ended with 3"):
        watch().run()


# A run of 6 logged steps: resumes after what any earlier node logged, waits for its end after steps 2 and 4, and at the
# last stops the fleet.
RUN = """#!/bin/bash
set -eu
work=$GPUFLEET_ROOT/opt/gpufleet/run
mkdir -p "$work"
steps=$GPUFLEET_ROOT/../steps
touch "$steps"
while (( $(wc -l <"$steps") < 6 )); do
  echo >>"$steps"
  printf '{"ts": %s, "step": %s}\\n' "$(date +%s.%N)" "$(wc -l <"$steps")" >>"$work/metrics.jsonl"
  case $(wc -l <"$steps") in 2 | 4) sleep 5000 ;; esac
done
touch "$GPUFLEET_ROOT/../over"
shutdown -h now
"""


def test_planned_interruptions_happen_at_their_steps_on_a_node_each(
    cloud: Cloud, watch: Watching, tmp_path: Path
) -> None:
    cloud.fleets.habits = Habits(relaunch_s=0.2, notice_s=0.2)
    watching = watch(Planned(step=2, kind="notice"), Planned(step=4, kind="loss"))
    fleet_id = fleet(cloud, template(cloud, user_data=RUN))
    cloud.client("s3").put_object(Bucket="bucket", Key="r1/ckpt/step_00000001/manifest.json", Body=b"{}")

    def stop_the_fleet_when_the_run_is_over() -> None:
        if (tmp_path / "nodes" / "over").exists() and cloud.calls("ModifyFleet") == 0:
            cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})

    watching.run(check=stop_the_fleet_when_the_run_is_over)
    assert watching.planned == []
    nodes = list(watching.views.values())
    assert [node.interrupted and node.interrupted.kind for node in nodes[:3]] == ["notice", "loss", None]
    assert [node.last_step for node in nodes[:3]] == [2, 4, 6]
    assert {"launched", "training", "notice", "loss", "ended"} <= {m.what for m in watching.timeline.moments}


def test_a_loss_waits_for_the_first_checkpoint_in_the_bucket(cloud: Cloud, watch: Watching) -> None:
    watching = watch(Planned(step=2, kind="loss"))
    fleet_id = fleet(cloud, template(cloud, user_data=RUN))
    looks_at_step_2 = 0

    def publish_and_stop() -> None:
        nonlocal looks_at_step_2
        nodes = list(watching.views.values())
        if nodes and nodes[0].last_step == 2:
            looks_at_step_2 += 1
        if looks_at_step_2 == 3:
            assert nodes[0].interrupted is None
            cloud.client("s3").put_object(Bucket="bucket", Key="r1/ckpt/step_00000001/manifest.json", Body=b"{}")
        if nodes and nodes[0].interrupted and cloud.calls("ModifyFleet") == 0:
            cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})

    watching.run(check=publish_and_stop)
    assert looks_at_step_2 >= 3
    assert watching.planned == []


# A hundred steps a second until it is asked to stop, and a supervisor that looks for a notice once a second.
FAST = """#!/bin/bash
work=$GPUFLEET_ROOT/opt/gpufleet/run
mkdir -p "$work"
cat >"$work/train.py" <<'END'
import json, pathlib, sys, time
work = pathlib.Path(sys.argv[2])
with (work / "metrics.jsonl").open("a") as file:
    step = 0
    while not (work / "stop").exists():
        step += 1
        print(json.dumps({"ts": time.time(), "step": step}), file=file, flush=True)
        time.sleep(0.01)
END
"$GPUFLEET_PYTHON" "$work/train.py" MODULE "$work" &
while sleep 1; do
  imds=$AWS_EC2_METADATA_SERVICE_ENDPOINT/latest
  token=$(curl -sf -X PUT -H 'X-aws-ec2-metadata-token-ttl-seconds: 300' "$imds/api/token")
  curl -sf -H "X-aws-ec2-metadata-token: $token" "$imds/meta-data/spot/instance-action" && touch "$work/stop" && break
done
wait
shutdown -h now
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a trainer is held on Linux alone")
def test_a_trainer_too_fast_for_its_supervisor_is_held_until_the_notice_is_seen(
    cloud: Cloud, watch: Watching, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.rehearsal.watch.HELD_S", HANG_S)
    cloud.fleets.habits = Habits(relaunch_s=0.2, notice_s=HANG_S)
    watching = watch(Planned(step=2, kind="notice"))
    fleet_id = fleet(cloud, template(cloud, user_data=FAST.replace("MODULE", EXPERIMENTS["tinystories-growth"].module)))

    def one_node_is_enough() -> None:
        if watching.views and cloud.calls("ModifyFleet") == 0:
            cloud.client("ec2").modify_fleet(FleetId=fleet_id, TargetCapacitySpecification={"TotalTargetCapacity": 0})

    watching.run(check=one_node_is_enough)
    node = next(iter(watching.views.values()))
    moments = {each.what: datetime.fromisoformat(each.at).timestamp() for each in watching.timeline.moments}
    noticed, seen = moments["notice"], moments["seen"]
    steps = [float(json.loads(line)["ts"]) for line in node.logged()]
    assert node.last_step >= 2  # it was let go, and found the stop at that step or a later one
    assert [each for each in steps if noticed + 0.05 < each < seen] == []


def test_what_a_set_up_prints_is_shown_and_its_silence_is_no_standstill(tmp_path: Path, watch: Watching) -> None:
    log, watching = tmp_path / "container.log", watch()
    view = NodeView(node=cast(RehearsalNode, SimpleNamespace(container_log=log)), number=1, logged_at=datetime.now(UTC))

    def looks(*lines: str) -> bool:
        """Whether that is news."""
        with log.open("a") as opened:
            opened.writelines(f"{line}\n" for line in lines)
        watching._news = 0.0
        watching._container_log(view)
        return watching._news > 0

    assert looks(f"00:00:01 host: {SETUP_BEGINS}", "Collecting tiny")
    assert looks()
    assert looks(f"00:00:02 host: {SETUP_ENDS}", "epoch 1")
    assert not looks()
    shown = [each.text for each in watching.timeline.select("setup")]
    assert shown == [f"node 1: {SETUP_BEGINS}", "node 1:   Collecting tiny", f"node 1: {SETUP_ENDS}"]


def test_each_line_is_read_once_and_a_file_that_was_replaced_from_its_beginning(tmp_path: Path) -> None:
    tail, path = Tail(), tmp_path / METRICS
    assert tail.new(path) == []
    path.write_bytes(b"one\ntw")
    assert tail.new(path) == ["one"]
    with path.open("ab") as opened:
        opened.write(b"o\n")
    assert tail.new(path) == ["two"]
    assert tail.new(path) == []
    atomic.write_bytes(path, b"one\nother\nthree\n")
    assert tail.new(path) == ["one", "other", "three"]
    path.write_bytes(b"one\n")
    assert tail.new(path) == ["one"]
    path.rename(tmp_path / "away")
    assert tail.new(path) == []
    (tmp_path / "away").rename(path)  # stands for another file with the same inode
    assert tail.new(path) == ["one"]


def test_a_command_s_signal_is_noted_with_its_generation(tmp_path: Path, watch: Watching) -> None:
    log, watching = tmp_path / "container.log", watch()
    view = NodeView(node=cast(RehearsalNode, SimpleNamespace(container_log=log)), number=1, logged_at=datetime.now(UTC))
    watching.generations[1] = Begun(step=-1, reached=0)
    log.write_text("00:00:01 host: stop (notice): SIGTERM, until 13 s from now\n")
    watching._container_log(view)
    assert view.signalled == set()
    with log.open("a") as opened:
        opened.write("00:00:01 host: SIGTERM to 2 processes\n")
    watching._container_log(view)
    watching.generations[2] = Begun(step=10, reached=12)
    watching._container_log(view)
    assert view.signalled == {1}


def test_a_node_s_first_step_is_none_that_others_logged_while_it_started(
    tmp_path: Path, cloud: Cloud, watch: Watching
) -> None:
    watching, launched = watch(), datetime.now(UTC)
    node = SimpleNamespace(root=tmp_path, instance=SimpleNamespace(id="i-1", launched_at=launched))
    view = watching.views["i-1"] = NodeView(node=cast(RehearsalNode, node), number=4, logged_at=launched)
    log = next(tmp_path / each for each in WORK_FOLDERS) / METRICS
    log.parent.mkdir(parents=True)

    def logs(step: int) -> int | None:
        with log.open("ab") as opened:
            opened.write(metrics.write({"ts": time.time(), "step": step}))
        watching._metrics(view)
        return view.first_step

    others = metrics.write({"ts": time.time(), "step": 8})
    kept = GangGeneration(number=2, members=("i-1",), addresses=("",), step=4).to_json()
    cloud.client("s3").put_object(Bucket=watching.bucket, Key=f"r1/{bucket.generation_key(2)}", Body=json.dumps(kept))
    watching._checkpoints(at_once=True)
    log.write_bytes(others)  # restored as it began
    assert (logs(5), view.last_step) == (5, 5)


def test_a_failed_attempt_is_shown_with_the_containers_last_words(cloud: Cloud, watch: Watching) -> None:
    script = """#!/bin/bash
mkdir -p "$GPUFLEET_ROOT/opt/gpufleet"
echo "ValueError: no such key" >"$GPUFLEET_ROOT/opt/gpufleet/container.log"
echo "2026-11-21T12:00:00Z attempt failed: the container ended with 1"
sleep 5000
"""
    fleet(cloud, template(cloud, user_data=script))
    why = "node 1: ValueError: no such key (attempt failed: the container ended with 1)\nValueError"
    with pytest.raises(RunFailedError, match=re.escape(why)):
        watch().run()


# Two nodes of which one's rank fails, and the other, which ends first, only loses its connection.
OF_TWO = """#!/bin/bash
mkdir -p "$GPUFLEET_ROOT/opt/gpufleet"
say() { echo "$1" >>"$GPUFLEET_ROOT/opt/gpufleet/container.log"; }
mkdir "$GPUFLEET_ROOT/../first" 2>/dev/null && lost=yes
say "[rank1]: KeyError: of the generation before"
say "12:00:00 supervisor: generation 2: a, b; this node ${lost:-fails}"
if [[ $lost ]]; then
  until [[ -d $GPUFLEET_ROOT/../second ]]; do sleep 0.1; done
  say "[rank0]: RuntimeError: Connection closed by peer [127.0.0.1]:1"
  echo "2026-11-21T12:00:00Z attempt failed: the container ended with 1"
else
  say "[rank1]: ValueError: no such path"
  say "torch.distributed.elastic.multiprocessing.errors.ChildFailedError:"
  mkdir "$GPUFLEET_ROOT/../second"
fi
sleep 5000
"""


def test_a_failure_of_another_node_s_rank_is_the_reason(cloud: Cloud, watch: Watching) -> None:
    two = {"TotalTargetCapacity": 2, "DefaultTargetCapacityType": "spot"}
    fleet(cloud, template(cloud, user_data=OF_TWO), TargetCapacitySpecification=two)
    with pytest.raises(RunFailedError, match=r"^node \d: \[rank1\]: ValueError: no such path\n"):
        watch().run()
