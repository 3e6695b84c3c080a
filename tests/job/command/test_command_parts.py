"""What each of two nodes keeps of a checkpoint that both write, and what each gets back."""

from __future__ import annotations

import itertools
import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpufleet.job.command.checkpoints import SAVING_S, CommandCheckpoints
from gpufleet.job.command.lines import Counting
from gpufleet.job.command.progress import ToldProgress
from gpufleet.job.contract import commit
from gpufleet.job.contract.commit import Commit, Manifest
from gpufleet.job.contract.inputs import InputFile
from gpufleet.job.contract.messages import LeaderSaved
from gpufleet.job.contract.metrics import Save
from gpufleet.job.kind import convert
from gpufleet.job.kind.command import CommandConfig


def config(checkpoint: dict[str, Any], **sections: Any) -> CommandConfig:
    tree = {"command": "x", "checkpoint": checkpoint, **sections}
    return convert.from_json(CommandConfig, tree, "job", CommandConfig())


class TellsNothing:
    """A command that prints no step."""

    val: Mapping[int, float] = {}
    spread = 1

    def told_by(self, moment: float) -> ToldProgress:
        return ToldProgress(step=None, counting=Counting(unit="step"))

    def saved(self, save: Save, written: float, *, is_counted: bool) -> None:
        """Nobody asks."""


@pytest.fixture(autouse=True)
def _nothing_stays_open() -> Iterator[None]:
    yield
    while NodeDisk.made:
        NodeDisk.made.pop().checkpoints.close()


class NodeDisk:
    """The command's folder of one node of two, and a clock that a look moves by a second."""

    made: ClassVar[list[NodeDisk]] = []

    def __init__(self, folder: Path, checkpoint: dict[str, Any], node: int) -> None:
        self.work, self.folder, self.now, self.said = folder, folder / "user" / "checkpoints", time.time(), list[str]()
        self.folder.mkdir(parents=True)
        self.leader: Callable[[], LeaderSaved | None] = lambda: None
        self.checkpoints = CommandCheckpoints(
            config(checkpoint),
            self.folder,
            folder / "user",
            folder,
            run="r1",
            digest="0" * 64,
            gpus=1,
            nodes=2,
            node=node,
            leader=lambda: self.leader(),
            alive=lambda: [],
            writing=lambda pids: set(),
            lines=TellsNothing(),
            say=self.said.append,
            clock=lambda: self.now,
        )
        self.made.append(self)

    def write(self, *names: str) -> None:
        for name in names:
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text("{}")

    def look(self, seconds: int) -> Commit | None:
        """The newest commit after so many looks."""
        for _ in range(seconds):
            self.now += 1
            self.checkpoints.look()
            if self.checkpoints._copying is not None:
                self.checkpoints._copying[1].exception()
                self.checkpoints.look()
        return self.newest

    @property
    def newest(self) -> Commit | None:
        found = [each for path in self.work.glob("ckpt/step_*") if (each := commit.read(path)) is not None]
        return max(found, key=lambda each: each.step, default=None)


def names(files: Any) -> list[str]:
    return sorted(name.removeprefix("files/") for name in files)


ZERO = "bf16_zero_pp_rank_{}_mp_rank_00_optim_states.pt"
# By format: the checkpoint of step 30 on the leader, on the other node, and what each reads of the other's.
SHARDED: dict[str, tuple[dict[str, Any], list[str], list[str], list[str], list[str]]] = {
    "dcp": (
        {"format": "dcp"},
        ["step-30/.metadata", "step-30/__0_0.distcp"],
        ["step-30/__1_0.distcp"],
        ["step-30/__1_0.distcp"],
        ["step-30/.metadata", "step-30/__0_0.distcp"],
    ),
    "nanochat": (
        {"format": "nanochat"},
        ["model_000030.pt", "meta_000030.json", "optim_000030_rank0.pt"],
        ["optim_000030_rank1.pt"],
        [],
        ["model_000030.pt", "meta_000030.json"],
    ),
    "DeepSpeed": (
        {"format": "deepspeed"},
        [
            "latest",
            "global_step30/mp_rank_00_model_states.pt",
            f"global_step30/{ZERO.format(0)}",
        ],
        [f"global_step30/{ZERO.format(1)}"],
        [],
        ["latest", "global_step30/mp_rank_00_model_states.pt"],
    ),
    "DeepSpeed in Accelerate's save_state": (
        {"each": ["step_{step}/"]},
        ["step_30/pytorch_model/mp_rank_00_model_states.pt", f"step_30/pytorch_model/{ZERO.format(0)}"],
        [f"step_30/pytorch_model/{ZERO.format(1)}"],
        [],
        ["step_30/pytorch_model/mp_rank_00_model_states.pt"],
    ),
    "DeepSpeed's elastic checkpoint": (
        {"format": "deepspeed", "same_gpus": False},
        ["latest", f"global_step30/{ZERO.format(0)}"],
        [f"global_step30/{ZERO.format(1)}"],
        [f"global_step30/{ZERO.format(1)}"],
        ["latest", f"global_step30/{ZERO.format(0)}"],
    ),
    "FSDP's SHARDED_STATE_DICT in HF's Trainer": (
        {"format": "hf-trainer"},
        [
            "checkpoint-30/trainer_state.json",
            "checkpoint-30/pytorch_model_fsdp_0/.metadata",
            "checkpoint-30/pytorch_model_fsdp_0/__0_0.distcp",
            "checkpoint-30/rng_state_0.pth",
        ],
        ["checkpoint-30/pytorch_model_fsdp_0/__1_0.distcp", "checkpoint-30/rng_state_1.pth"],
        ["checkpoint-30/pytorch_model_fsdp_0/__1_0.distcp", "checkpoint-30/rng_state_1.pth"],
        [
            "checkpoint-30/trainer_state.json",
            "checkpoint-30/pytorch_model_fsdp_0/.metadata",
            "checkpoint-30/pytorch_model_fsdp_0/__0_0.distcp",
            "checkpoint-30/rng_state_0.pth",
        ],
    ),
    "names with {rank}": (
        {"each": ["w-{step}.bin", "o-{step}-{rank}.bin"]},
        ["w-30.bin", "o-30-0.bin"],
        ["o-30-1.bin"],
        [],
        ["w-30.bin"],
    ),
    "a folder that both write, in part by the same names": (
        {"each": ["{step}/"]},
        ["30/w.bin", "30/state.json"],
        ["30/x.bin", "30/state.json"],
        ["30/x.bin"],
        ["30/w.bin"],
    ),
    "rank 0 alone saves": ({"each": ["w-{step}.bin"]}, ["w-30.bin"], [], [], ["w-30.bin"]),
}


@pytest.mark.parametrize("case", SHARDED)
def test_each_node_keeps_what_its_ranks_wrote_and_gets_back_what_they_read(case: str, tmp_path: Path) -> None:
    checkpoint, on_leader, on_other, leader_borrows, other_borrows = SHARDED[case]
    leader, other = NodeDisk(tmp_path / "0", checkpoint, 0), NodeDisk(tmp_path / "1", checkpoint, 1)
    leader.write(*on_leader)
    other.write(*on_other)
    whole = leader.look(70)
    assert whole is not None
    assert names(dict(whole.files)) == sorted(on_leader)
    assert other.look(70) is None, "before the leader's is whole"
    other.leader = lambda: LeaderSaved(step=whole.step, named_by=whole.named_by, ended=False)
    part = other.look(70)
    assert part is not None
    assert (part.step, part.node, names(dict(part.files))) == (30, 1, sorted(on_other))

    lists = [tuple(InputFile(name=name, bytes=size, sha256="") for name, size in each.files) for each in (whole, part)]
    manifest = Manifest(commit=whole, run="r1", files=lists[0], parts=(lists[1],), generation=1)
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json(PUBLISHED, []))), 1) == manifest
    for node, own, borrowed in ((0, on_leader, leader_borrows), (1, on_other, other_borrows)):
        read = manifest.read_by(node, config(checkpoint).parts.is_of_rank)
        prefix = manifest.place.part_prefix(node)
        assert names(file.name for key, file in read.items() if key == prefix + file.name) == sorted(own)
        assert names(file.name for key, file in read.items() if key != prefix + file.name) == sorted(borrowed)


PUBLISHED = commit.Published(
    code_sha256=None, attempt=1, instance="i-1", spent_usd="0", spent_s="0", published_at="2027-01-15T08:00:00Z"
)


def test_what_a_part_lacks_is_waited_for_once_it_is_known_what_one_has(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path, {"each": ["{step}/"]}, 1)
    disk.leader = lambda: LeaderSaved(step=30, named_by="30/w.bin", ended=False)
    disk.write("30/o-0.bin", "30/o-1.bin")
    assert disk.look(int(SAVING_S) - 1) is None  # there might be more of it
    assert disk.look(3) is not None
    disk.leader = lambda: LeaderSaved(step=60, named_by="60/w.bin", ended=False)
    disk.write("60/o-0.bin")
    assert (disk.look(70) or Commit(step=0, config_sha256="", goes_on_from=0)).step == 30
    disk.write("60/o-1.bin")
    assert (disk.look(5) or Commit(step=0, config_sha256="", goes_on_from=0)).step == 60


@pytest.mark.parametrize("written", [[], ["epoch=1-step=30.ckpt"]])
def test_a_first_part_is_ready_within_the_time_of_a_notice_also_where_it_has_no_files(
    written: list[str], tmp_path: Path
) -> None:
    disk = NodeDisk(tmp_path, {"format": "lightning"}, 1)
    disk.leader = lambda: LeaderSaved(step=30, named_by="epoch=0-step=30.ckpt", ended=False)
    disk.write(*written)
    part = disk.look(10)
    assert part is not None
    assert (part.step, part.node, names(dict(part.files))) == (30, 1, written)


@pytest.mark.parametrize("knows", [False, True])
def test_a_part_that_the_command_deletes_before_the_leader_names_it_is_kept(knows: bool, tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path, {"each": ["{step}/"]}, 1)
    if knows:
        disk.write("10/o-0.bin", "10/o-1.bin")
        disk.leader = lambda: LeaderSaved(step=10, named_by="10/w.bin", ended=False)
        assert disk.look(10) is not None
    for step in (30, 40, 50):  # it keeps one, as it saves the next
        disk.write(f"{step}/o-0.bin", f"{step}/o-1.bin")
        shutil.rmtree(disk.folder / str(step - 10), ignore_errors=True)
        disk.look(3)
    disk.leader = lambda: LeaderSaved(step=30, named_by="30/w.bin", ended=False)
    part = disk.look(10)
    assert part is not None
    assert (part.step, names(dict(part.files))) == (30, ["30/o-0.bin", "30/o-1.bin"])
    assert (tmp_path / "ckpt" / "step_00000030" / "files" / "30" / "o-1.bin").read_text() == "{}"


def test_a_part_that_the_command_deletes_while_it_is_copied_is_whole(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path, {"each": ["{step}/"]}, 1)
    disk.leader = lambda: LeaderSaved(step=30, named_by="30/w.bin", ended=False)
    disk.write("30/o-0.bin", "30/o-1.bin")
    disk.look(3)
    (disk.folder / "30" / "o-0.bin").unlink()
    part = disk.look(10)
    assert part is not None
    assert names(dict(part.files)) == ["30/o-0.bin", "30/o-1.bin"]


@pytest.mark.parametrize("seconds", [0, 40])
def test_a_part_that_was_deleted_unseen_or_long_ago_is_no_empty_one(seconds: int, tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path, {"each": ["{step}/"]}, 1)
    disk.write("30/o-0.bin")
    disk.look(1 if not seconds else 3)
    shutil.rmtree(disk.folder / "30")
    disk.look(seconds)
    disk.leader = lambda: LeaderSaved(step=30, named_by="30/w.bin", ended=False)
    assert disk.look(100) is None
    disk.write("40/o-0.bin")
    disk.leader = lambda: LeaderSaved(step=40, named_by="40/w.bin", ended=False)
    part = disk.look(10)
    assert part is not None
    assert part.step == 40


@pytest.mark.parametrize("says", [True, False])
def test_at_its_end_a_node_waits_for_the_leader_s_last_word_and_not_for_long(says: bool, tmp_path: Path) -> None:
    disk, asked = NodeDisk(tmp_path, {"format": "dcp"}, 1), itertools.count()

    def word() -> LeaderSaved | None:
        disk.now += 1
        return LeaderSaved(step=30, named_by="step-30/.metadata", ended=True) if says and next(asked) > 3 else None

    disk.leader = word
    disk.write("step-30/__1_0.distcp")
    disk.checkpoints.end(by_itself=False)
    assert (disk.newest is not None) is says


def test_at_its_end_a_node_has_its_part_ready_before_the_leader_s_last_word(tmp_path: Path) -> None:
    disk, had = NodeDisk(tmp_path, {"format": "dcp"}, 1), list[int]()

    def word() -> LeaderSaved | None:
        disk.now += 1
        had.append(disk.newest.step if disk.newest else -1)
        return LeaderSaved(step=30, named_by="step-30/.metadata", ended=len(had) > 8)

    disk.leader = word
    disk.write("step-30/__1_0.distcp")
    disk.checkpoints.end(by_itself=False)
    assert had[0] == -1
    assert 30 in had[:8]


def test_of_one_file_that_is_overwritten_no_node_waits_for_the_leader(tmp_path: Path) -> None:
    disk, asked = NodeDisk(tmp_path, {"each": ["last.pt"], "rewritten": True}, 1), list[str]()

    def word() -> LeaderSaved | None:
        disk.now += 1
        asked.append("a look")
        return None

    disk.leader = word
    disk.checkpoints.end(by_itself=True)
    assert len(asked) == 1


def test_a_part_is_of_the_step_that_the_leader_tells_whatever_its_names_count(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path, {"each": ["{step}-{rank}.bin"]}, 1)
    for named, step in ((30, 130), (10, 140)):  # names of a script that counts from the beginning again
        disk.leader = lambda named=named, step=step: LeaderSaved(step=step, named_by=f"{named}-0.bin", ended=False)  # type: ignore[misc]
        disk.write(f"{named}-1.bin")
        part = disk.look(70)
        assert part is not None
        assert (part.step, names(dict(part.files))) == (step, [f"{named}-1.bin"])


def test_after_a_restore_a_part_is_known_by_what_the_node_itself_had_written(tmp_path: Path) -> None:
    disk = NodeDisk(tmp_path, {"each": ["{step}/"]}, 1)
    folder = tmp_path / "ckpt" / "step_00000030"
    for name in ("files/30/w.bin", "files/30/o-0.bin", "files/30/o-1.bin"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")
    files = tuple((name, 2) for name in ("files/30/w.bin", "files/30/o-0.bin", "files/30/o-1.bin"))
    borrowed = ("files/30/w.bin", "files/30/o-0.bin")
    told = Commit(step=30, config_sha256="0" * 64, goes_on_from=30, files=files, node=1, borrowed=borrowed)
    (folder / "commit.json").write_text(json.dumps(told.to_json()))
    assert disk.checkpoints.restore() == told
    assert sorted(path.name for path in (disk.folder / "30").iterdir()) == ["o-0.bin", "o-1.bin", "w.bin"]
    disk.leader = lambda: LeaderSaved(step=60, named_by="60/w.bin", ended=False)
    disk.write("60/o-1.bin")
    part = disk.look(5)
    assert part is not None
    assert names(dict(part.files)) == ["60/o-1.bin"]
