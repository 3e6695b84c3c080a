"""Whether the ranks of several nodes meet, by what their processes were started with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import atomic, between
from gpufleet.job.command import network, processes
from gpufleet.job.command.meeting import STABLE_S, Meeting
from gpufleet.job.contract.messages import Accept, Fatal, Observed
from tests.job.command_world import CommandJob, parameters
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the environment of other processes is /proc's")

ACCELERATE = "ACCELERATE_USE_CPU=True ACCELERATE_DYNAMO_MODE=default"
RANK = "LOCAL_RANK={0} RANK={0} WORLD_SIZE=2 sleep 600"


@pytest.mark.parametrize(
    ("started", "seen"),
    [
        ("sleep 600", None),
        ("env WORLD_SIZE=1 sleep 600", (1, 1, False)),
        ("env WORLD_SIZE=4 RANK=2 sleep 600", (4, 1, False)),
        ("env WORLD_SIZE=4 RANK=0 sleep 600", (4, 1, True)),
        ("env WORLD_SIZE=4 LOCAL_WORLD_SIZE=4 sleep 600", (4, 4, False)),
        ("env WORLD_SIZE=2 LOCAL_RANK=1 sleep 600", (2, 2, False)),  # Lightning's first rank has no variables
        (f"{{ env {RANK.format(0)} & env {RANK.format(1)} & wait; }}", (2, 2, True)),
        ("env OMPI_COMM_WORLD_SIZE=8 OMPI_COMM_WORLD_LOCAL_SIZE=4 OMPI_COMM_WORLD_RANK=0 sleep 600", (8, 4, True)),
        # What a launcher has replaced, below a shell in between, does not count.
        ("env WORLD_SIZE=8 RANK=0 sh -c 'sh -c \"env WORLD_SIZE=1 RANK=1 sleep 600; true\"; true'", (1, 1, False)),
        (f"env {ACCELERATE} sleep 600", (1, 1, True)),
        (f"env {ACCELERATE} sh -c 'env WORLD_SIZE=4 RANK=1 sleep 600; true'", (4, 1, False)),
        (f"env {ACCELERATE} ACCELERATE_USE_DEEPSPEED=true sleep 600", None),
        ("env ACCELERATE_USE_CPU=1 sleep 600", None),  # anybody's, before torchrun has started a rank
    ],
)
def test_a_world_is_what_the_innermost_processes_were_started_with(
    started: str, seen: tuple[int, int, bool] | None
) -> None:
    process = subprocess.Popen(["sh", "-c", f"{started} & wait"])
    count = started.count("sleep")
    try:
        wait_for("all of it to be there", lambda: _sleepers(process.pid) == count, process=process)
        assert processes.world(process.pid) == seen
    finally:
        processes.kill(process.pid)
        process.kill()
        process.wait()


def _sleepers(first: int) -> int:
    return sum(processes._read(pid, "comm") == b"sleep\n" for pid in processes.descendants(first))


class Looked:
    """A meeting on a clock of its own."""

    def __init__(self, nodes: int, gpus: int) -> None:
        self.now = 100.0
        self.meeting = Meeting(nodes=nodes, gpus=gpus, clock=lambda: self.now)

    def look_after(self, seconds: float, seen: tuple[int, int] | None, has_first: bool = False) -> str:
        self.now += seconds
        self.meeting.look(None if seen is None else (*seen, has_first))
        return self.meeting.why


@pytest.mark.parametrize(
    ("nodes", "gpus", "seen", "why"),
    [
        (
            2,
            1,
            (1, 1),
            "the launcher counts 1 rank instead of 2, 1 on each of 2 nodes: each node trains alone. With torchrun",
        ),
        (2, 8, (1, 1), "the launcher counts 1 rank instead of 2"),
        (2, 8, (8, 8), "the launcher counts 8 ranks instead of 16, 8 on each of 2 nodes"),
        (2, 8, (8, 1), "the launcher counts 8 ranks instead of 16"),  # the others of this node are not seen
        (2, 1, (2, 2), "the launcher counts 2 ranks instead of 4"),  # a rehearsal starts more than one a node
        (4, 8, (16, 8), "the launcher counts 16 ranks instead of 32"),  # two by two
        (2, 1, (2, 1), ""),
        (2, 8, (16, 8), ""),
        (2, 8, (16, 3), ""),
        (2, 8, (8, 4), ""),  # on half of its GPUs
        (2, 8, (2, 1), ""),  # one process for all GPUs of its node
        (1, 8, (4, 1), ""),
    ],
)
def test_ranks_that_are_all_on_one_node_train_alone(nodes: int, gpus: int, seen: tuple[int, int], why: str) -> None:
    looked = Looked(nodes, gpus)
    assert looked.look_after(0, seen) == ""
    assert looked.look_after(STABLE_S - 1, seen) == ""
    assert looked.look_after(1, seen).startswith(why)
    assert bool(looked.meeting.why) is bool(why)
    assert bool(looked.meeting.figure) is (not why and nodes > 1)


def test_ranks_that_start_one_after_the_other_have_time_and_those_that_met_are_not_looked_at_again() -> None:
    looked = Looked(2, 8)
    assert [looked.look_after(STABLE_S - 1, (8, here)) for here in (1, 2, 3)] == [""] * 3
    assert looked.look_after(STABLE_S - 1, (8, 4)) == looked.look_after(1, None) == ""
    assert looked.look_after(STABLE_S, (8, 1)) == ""  # three of them have ended
    assert not looked.meeting.is_open
    assert (
        looked.look_after(STABLE_S, (1, 1)) == looked.look_after(STABLE_S, (1, 1)) == ""
    )  # a rank starts a program of its own


def test_rank_0_is_here_where_it_was_seen_among_those_that_met() -> None:
    looked = Looked(2, 8)
    looked.look_after(0, (1, 1), True)  # before its launcher has started the others
    looked.look_after(1, (16, 7), False)
    assert not looked.meeting.has_first
    looked.look_after(1, (16, 8), True)
    looked.look_after(STABLE_S, (16, 8), False)  # it ends as it is looked at
    assert looked.meeting.has_first


AT_ONCE = "from gpufleet.job.command import meeting\nmeeting.STABLE_S = 0.0\n"
SEEN = """
from gpufleet.job.command.meeting import Meeting
look = Meeting.look
def looked(self, seen):
    look(self, seen)
    if seen is not None:
        open({path!r}, "w").close()
Meeting.look = looked
"""


def on_two_nodes(folder: Path, command: str, *, changed: str = "", nodes: int = 2, device: str = "cpu") -> CommandJob:
    told = parameters(
        f"echo step 1 loss 1; {command}", checkpoint={"format": "none"}, work={"steps": 1}, gpus=1, device=device
    )
    job = CommandJob(folder / "w", told, changed=changed)
    job.environment = {"GPUFLEET_NODES": str(nodes), "GPUFLEET_NODE_RANK": "0"}
    return job


def test_a_command_whose_nodes_train_alone_is_ended_and_the_run_with_it(tmp_path: Path) -> None:
    job = on_two_nodes(tmp_path, "exec env WORLD_SIZE=1 sleep 600", changed=AT_ONCE)
    assert job.run() == 65, job.log
    fatal = Fatal.read(job.workdir)
    assert fatal is not None
    assert "the launcher counts 1 rank instead of 2, 1 on each of 2 nodes: each node trains alone" in fatal.detail
    assert "--nnodes {nodes} --node-rank {node_rank}" in fatal.detail
    assert "--machine_rank {node_rank}" in fatal.detail


@pytest.mark.parametrize(
    ("nodes", "size", "code", "met"),
    [(2, 1, 65, ""), (2, 2, 0, "2 ranks, 1 of them on one node"), (1, 1, 0, "")],
)
def test_one_that_ends_before_it_is_sure_is_judged_by_what_was_seen(
    tmp_path: Path, nodes: int, size: int, code: int, met: str
) -> None:
    seen = tmp_path / "seen"
    wait = f"env WORLD_SIZE={size} sh -c 'until [ -e {seen} ]; do sleep 0.1; done'"
    job = on_two_nodes(tmp_path, wait, changed=SEEN.format(path=str(seen)), nodes=nodes)
    if nodes == 1:  # nobody looks
        seen.touch()
    assert job.run() == code, job.log
    assert (Observed.read(job.workdir) or Observed(met="nothing")).met == met


FAST, SLOW = ({"gb_s": gb_s, "transport": by} for gb_s, by in ((300, "AWS Libfabric"), (3, "Socket")))


@pytest.mark.parametrize(
    ("code", "printed", "gbps", "said", "problem"),
    [
        (0, FAST, 3200.0, "300.0 GB/s from a node to the others over AWS Libfabric", ""),
        (0, SLOW, 3200.0, "3.0 GB/s", "EFA is not in use: 3.0 GB/s from a node to the others over Socket, 1% of"),
        (0, SLOW, 0.0, "3.0 GB/s from a node to the others over Socket", ""),  # cards of unknown speed
        (network.NO_TORCH, "", 3200.0, "is unknown: the image has no torch", ""),
        (1, "RuntimeError: no GPU", 3200.0, "is unknown: it ended with 1: RuntimeError: no GPU", ""),
    ],
)
def test_only_what_a_pre_flight_has_measured_refuses_a_node(
    code: int, printed: dict[str, Any] | str, gbps: float, said: str, problem: str
) -> None:
    log = list[str]()
    line = printed if isinstance(printed, str) else f"{between.TOLD}{json.dumps(printed)}"
    found = network.read(code, ("NCCL version 2.31", line), gbps, log.append)
    assert said in log[0]
    assert "; ".join(found.problems).startswith(problem)
    assert bool(found.problems) is bool(problem)
    assert found.transport == (None if isinstance(printed, str) else printed["transport"])


TORCHRUN = f"""#!/bin/sh
[ "$1" = -c ] && exit
for each in "$@"; do last=$each; done
echo "asked $*"
grep -q "def gb_s" "$last" && echo '{between.TOLD}{json.dumps(SLOW)}'
"""


@pytest.mark.parametrize(
    ("launcher", "accepted", "code"), [("torchrun", False, 71), ("torchrun", True, 0), ("python3", False, 71)]
)
def test_a_node_whose_network_is_slow_is_refused_before_its_command_begins_unless_others_were(
    tmp_path: Path, launcher: str, accepted: bool, code: int
) -> None:
    job = on_two_nodes(tmp_path, "env WORLD_SIZE=2 true", device="cuda")
    program = tmp_path / "bin" / launcher
    program.parent.mkdir()
    program.write_text(TORCHRUN)
    program.chmod(0o755)
    job.environment |= {"PATH": f"{program.parent}:{os.defpath}", "GPUFLEET_GBPS": "3200"}
    if accepted:
        Accept().write(job.workdir)
    assert job.run() == code, job.log
    flags = "-m torch.distributed.run " * (launcher == "python3")
    flags += "--nnodes 2 --node-rank 0 --nproc-per-node 1 --master-addr 127.0.0.1 --master-port 29900 --max-restarts 0"
    assert f"asked {flags} " in job.log
    assert ("step 1 loss 1" in job.log) is accepted
    (problem,) = (atomic.read_object(job.workdir / "preflight.json") or {})["problems"]
    assert problem in job.log
