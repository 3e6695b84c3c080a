"""Which files are a checkpoint, when it is whole, and that its copy and its restoring change nothing of it."""

from __future__ import annotations

import json
import os
import pickle
import struct
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.command import processes
from gpufleet.job.command.checkpoints import CommandCheckpoints
from gpufleet.job.command.lines import Counting, Position
from gpufleet.job.command.names import FoundCheckpoint, Names, torn
from gpufleet.job.command.progress import ToldProgress
from gpufleet.job.contract import commit
from gpufleet.job.contract.metrics import Save
from gpufleet.job.foreign import ForeignFolder
from gpufleet.job.kind import convert
from gpufleet.job.kind.command import CommandConfig
from tests.waiting import HANG_S, wait_for


def config(*, epochs: int | None = None, **checkpoint: Any) -> CommandConfig:
    tree = {"command": "x", "checkpoint": checkpoint, "work": {"epochs": epochs}}
    return convert.from_json(CommandConfig, tree, "job", CommandConfig())


class WatchedDisk:
    """A command's folder, a clock, and what has open files."""

    def __init__(self, folder: Path, **checkpoint: Any) -> None:
        self.now, self.step, self.alive, self.open = time.time(), 0, [7, 8], set[tuple[int, int]]()
        self.val: dict[int, float] = {}
        self.saves, self.said = list[Save](), list[str]()
        self.folder = folder / "user" / "checkpoints"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.work = folder
        self.found = CommandCheckpoints(
            config(**checkpoint),
            self.folder,
            folder / "user",
            folder,
            run="r1",
            digest="0" * 64,
            gpus=1,
            alive=lambda: self.alive,
            writing=lambda pids: self.open,
            lines=self,
            say=self.said.append,
            clock=lambda: self.now,
        )

    spread = 1

    def told_by(self, moment: float) -> ToldProgress:
        place = Position(step=self.step) if self.step else None
        return ToldProgress(step=self.step or None, counting=Counting(unit="step", newest=place))

    def saved(self, save: Save, written: float, *, is_counted: bool) -> None:
        self.saves.append(save)

    def write(self, name: str, content: bytes | str = b"x" * 100) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def wait(self, seconds: float, each: float = 1.0) -> None:
        """Looks meanwhile; a copy that has begun is finished each time."""
        until = self.now + seconds
        while self.now < until:
            self.now += each
            self.found.look()
            if self.found._copying is not None:
                self.found._copying[1].exception()
                self.found.look()

    def committed(self) -> list[int]:
        return [int(path.name[5:]) for path in sorted((self.work / "ckpt").glob("step_*"))]

    def files(self, step: int) -> list[str]:
        folder = self.work / "ckpt" / f"step_{step:08d}" / "files"
        return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("checkpoint", "names", "found"),
    [
        ({"format": "hf-trainer"}, ["checkpoint-500/a", "checkpoint-500/b/c", "checkpoint-x/a", "tmp-checkpoint-500/a"],
         {500: ["checkpoint-500/a", "checkpoint-500/b/c"]}),
        ({"format": "nanochat"},
         ["model_000250.pt", "meta_000250.json", "optim_000250_rank0.pt", "optim_000250_rank1.pt"],
         {250: ["meta_000250.json", "model_000250.pt", "optim_000250_rank0.pt", "optim_000250_rank1.pt"]}),
        ({"each": ["ckpt/epoch=*-step={step}.ckpt"]}, ["ckpt/epoch=3-step=600.ckpt", "epoch=3-step=600.ckpt"],
         {600: ["ckpt/epoch=3-step=600.ckpt"]}),
        ({"each": ["{step:06d}/"]}, ["000300/global_step300/m.pt", "000300/latest"],
         {300: ["000300/global_step300/m.pt", "000300/latest"]}),
        ({"each": ["ckpt.pt"], "rewritten": True}, ["ckpt.pt", "ckpt.pt.tmp"], {None: ["ckpt.pt"]}),
        ({"each": ["epoch_{epoch:02d}/"]}, ["epoch_03/a", "epoch_x/a"], {3: ["epoch_03/a"]}),
        ({"each": ["e{epoch}-s{step}.pt"]}, ["e1-s50.pt", "e2-s100.pt"], {50: ["e1-s50.pt"], 100: ["e2-s100.pt"]}),
    ],
)  # fmt: skip
def test_which_files_belong_to_which_step(
    tmp_path: Path, checkpoint: dict[str, Any], names: list[str], found: dict[int | None, list[str]]
) -> None:
    disk = WatchedDisk(tmp_path, **checkpoint)
    for name in names:
        disk.write(name)
    seen = Names(config(**checkpoint)).find(disk.folder, tmp_path)
    assert {each.number: sorted(each.files) for each in seen} == found


def test_a_link_out_of_the_command_s_folders_is_no_file_of_a_checkpoint(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    (tmp_path / "secret").write_text("not the command's")
    (disk.folder / "a-1.bin").symlink_to(tmp_path / "secret")
    (disk.folder / "a-2.bin").symlink_to(disk.write("kept.bin"))
    disk.wait(3)
    assert disk.committed() == [2]


LONG = "/".join(("n" * 200,) * 5)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("plain.bin", ""),
        ("no\u00a0break.bin", "'step-2/no\\xa0break.bin' cannot be an object's name"),
        ("\u3000.bin", "cannot be an object's name"),
        ("a\u200db.bin", "cannot be an object's name"),
        ("\u202ea.bin", "cannot be an object's name"),
        ("a\tb.bin", "cannot be an object's name"),
        ("a\nb.bin", "cannot be an object's name"),
        (b"by\xfftes.bin", "'step-2/by\\udcfftes.bin' cannot be an object's name"),
        (LONG, "use printable UTF-8, at most 255 bytes per part and 979 in all"),
    ],
)
def test_a_name_that_cannot_be_published_keeps_a_checkpoint_from_being_whole_and_is_told_at_once(
    tmp_path: Path, name: str | bytes, said: str
) -> None:
    """What is whole for the host is what its reader takes and the store can have: one rule."""
    disk = WatchedDisk(tmp_path, each=["step-{step}/"], complete="done")
    disk.write("step-2/done")
    path = os.path.join(os.fsencode(disk.folder / "step-2"), os.fsencode(name))  # noqa: PTH118 - of bytes
    os.makedirs(os.path.dirname(path), exist_ok=True)  # noqa: PTH103, PTH120
    with open(path, "w") as file:  # noqa: PTH123
        file.write("1")
    disk.wait(1)
    assert [each.startswith("warning: checkpoint of step 2 does not count") and said in each for each in disk.said] == (
        [True] if said else []
    )
    disk.wait(3)
    assert disk.committed() == ([] if said else [2])
    read = [commit.read(path) for path in (tmp_path / "ckpt").glob("step_*")]
    assert None not in read
    disk.write("step-3/done")
    disk.wait(3)
    assert disk.committed()[-1] == 3  # another one counts


def test_a_step_of_more_digits_than_a_checkpoint_s_name_has_is_told(tmp_path: Path) -> None:
    named = WatchedDisk(tmp_path / "named", each=["a{step}.bin"])
    named.write("a123456789.bin")
    named.wait(3)
    assert named.committed() == []
    assert "checkpoint of step 123,456,789 does not count" in named.said[0]
    counted = WatchedDisk(tmp_path / "counted", each=["a.bin"], rewritten=True)
    counted.step = 100_000_000
    counted.write("a.bin")
    counted.wait(5)
    assert counted.committed() == []
    assert counted.said == ["the checkpoint is not taken yet: its step has more than eight digits, and is never"
                            " published: count in thousands"]  # fmt: skip


def test_a_companion_whose_name_cannot_be_published_is_left_out(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"], also=["tokenizer/"])
    for name in ("tokenizer/vocab.txt", "tokenizer/no\u00a0.txt", "a-5.bin"):
        disk.write(name)
    disk.wait(3)
    assert disk.files(5) == ["a-5.bin", "tokenizer/vocab.txt"]


def test_a_file_that_is_open_for_writing_is_waited_for_however_long_it_rests(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    there = disk.write("a-5.bin").stat()
    disk.open = {(there.st_dev, there.st_ino)}
    disk.wait(300)
    assert disk.committed() == []
    assert disk.found.saving()
    disk.open = set()
    disk.wait(3)
    assert disk.committed() == [5]
    assert not disk.found.saving()


@pytest.mark.parametrize(
    ("name", "content", "counts"),
    [("a-5.bin", b"x" * 100, False), ("a-5.json", b"{}", True), ("a-5.json", b"{", False)],
)
def test_a_file_whose_writer_died_counts_only_where_a_cut_would_show(
    tmp_path: Path, name: str, content: bytes, counts: bool
) -> None:
    """Of several ranks one is killed amid its save; the others live on, and nobody has the file open."""
    disk = WatchedDisk(tmp_path, each=[f"a-{{step}}{Path(name).suffix}"])
    there = disk.write(name, content).stat()
    disk.open = {(there.st_dev, there.st_ino)}
    disk.wait(3)
    disk.alive, disk.open = [7], set()
    disk.wait(300)
    assert disk.committed() == ([5] if counts else [])
    disk.write(name.replace("5", "6"), content)  # by another process, in peace
    disk.wait(3)
    assert (disk.committed()[-1:] == [6]) is (content != b"{")


@pytest.mark.parametrize("seen_open", [True, False])
def test_a_process_that_ends_amid_a_look_leaves_its_file_in_doubt(tmp_path: Path, seen_open: bool) -> None:
    """It ends after the look at processes, before or after the look at open files."""
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    path = disk.write("a-5.bin", b"not a zip")
    disk.open = {(path.stat().st_dev, path.stat().st_ino)}
    disk.wait(3)

    def ends(pids: object) -> set[tuple[int, int]]:
        was, disk.open = disk.open, set()
        disk.alive = []
        return was if seen_open else disk.open

    disk.found._writing = ends
    disk.wait(1)
    disk.wait(70)
    disk.found.end(by_itself=False)
    assert disk.committed() == []


def test_a_file_whose_writer_ended_before_the_only_look_is_in_doubt_where_the_command_fails(
    tmp_path: Path,
) -> None:
    """The machine is so busy that the writer's whole life falls between two looks."""
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    disk.wait(1)
    disk.write("a-5.bin", b"not a zip")
    disk.wait(1)
    disk.found.end(by_itself=False)
    assert disk.committed() == []
    assert disk.said == [disk.found.doubt]
    assert disk.found.doubt.startswith("checkpoint of step 5 does not count: the process that wrote it ended")


def test_a_process_that_exits_is_not_alive_though_it_is_still_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has closed its files by then. Field 9 of /proc/PID/stat holds the flags: proc(5)."""
    for pid, state, flags in ((8, "R", 0x400000), (9, "R", 0x400000 | 0x4), (10, "S", 0x400100)):
        (tmp_path / str(pid)).mkdir()
        (tmp_path / str(pid) / "stat").write_text(f"{pid} (a (b) c) {state} 7 8 8 0 -1 {flags} 1 0 0")
    monkeypatch.setattr(processes, "PROC", tmp_path)
    monkeypatch.setattr(processes, "KNOWN", True)
    assert processes.descendants(7) == [8, 9, 10]
    assert processes.alive(7) == [8, 10]


def test_a_process_that_ends_after_its_save_was_seen_closed_raises_no_doubt(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    disk.write("a-5.bin")
    disk.wait(1)
    disk.alive = [7]
    disk.wait(2)
    assert disk.committed() == [5]


def test_a_file_that_was_renamed_when_it_was_written_is_whole_whoever_has_ended_since(tmp_path: Path) -> None:
    """Of a shell script, whose programs come and go."""
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    written = disk.write("new")
    time.sleep(0.02)  # the kernel's clock of files ticks every few ms
    written.rename(disk.folder / "a-5.bin")
    disk.found.look()
    disk.alive = [7, 9]
    disk.wait(3)
    assert disk.committed() == [5]


def test_where_nobody_knows_who_writes_five_quiet_seconds_count(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    disk.found._writing = lambda pids: None
    disk.write("a-5.bin")
    disk.wait(4)
    assert disk.committed() == []
    disk.wait(3)
    assert disk.committed() == [5]


def test_names_are_learned_from_the_first_once_a_later_one_has_begun(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, format="nanochat")
    for name in ("model_000010.pt", "meta_000010.json", "optim_000010_rank0.pt", "optim_000010_rank1.pt"):
        disk.write(name, b"{}" + b" " * 998)
    disk.wait(30)
    assert disk.committed() == []  # who knows how many ranks there are
    assert not disk.found.saving()  # but it is quiet
    disk.write("model_000020.pt")
    disk.wait(3)
    assert disk.committed() == [10]
    for name in ("meta_000020.json", "optim_000020_rank0.pt"):
        disk.write(name, b"{}" + b" " * 998)
    disk.wait(120)
    assert disk.committed() == [10]
    disk.write("optim_000020_rank1.pt", b"y" * 499)  # less than half of what the first had
    disk.write("model_000020.pt", b"y" * 1000)
    disk.wait(120)
    assert disk.committed() == [10]
    disk.write("optim_000020_rank1.pt", b"y" * 501)
    disk.wait(3)
    assert disk.committed() == [10, 20]


def test_a_first_one_counts_after_a_minute_of_quiet(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["step-{step}/"])
    disk.write("step-3/a.bin")
    disk.wait(59)
    assert disk.committed() == []
    disk.wait(4)
    assert disk.committed() == [3]


def test_a_later_one_that_lacks_a_name_never_counts_and_it_is_said_once(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["step-{step}/"])
    for step, names in ((1, "ab"), (2, "a"), (3, "ab")):
        for name in names:
            disk.write(f"step-{step}/{name}.bin")
        disk.wait(70)
    assert disk.committed() == [1, 3]
    assert disk.said.count("checkpoint of step 2 does not count: b.bin is not there") == 1


def test_what_a_format_says_of_itself_decides(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, format="hf-trainer")
    disk.write("checkpoint-5/model.bin")
    disk.wait(120)
    assert disk.committed() == []
    disk.write("checkpoint-5/trainer_state.json", "{}")
    unfinished = disk.write("checkpoint-5/checkpoint-is-incomplete.txt")
    disk.wait(120)
    assert disk.committed() == []
    unfinished.unlink()
    disk.wait(3)
    assert disk.committed() == [5]
    assert disk.files(5) == ["checkpoint-5/model.bin", "checkpoint-5/trainer_state.json"]


def a_zip(path: Path) -> bytes:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("data", b"x" * 1000)
    return path.read_bytes()


def a_safetensors(path: Path) -> bytes:
    header = json.dumps({"w": {"dtype": "F32", "shape": [25], "data_offsets": [0, 100]}}).encode()
    return struct.pack("<Q", len(header)) + header + b"x" * 100


@pytest.mark.parametrize(
    ("name", "make"),
    [
        ("a.pt", a_zip),
        ("a.safetensors", a_safetensors),
        ("a.json", lambda path: json.dumps({"step": 5}).encode()),
        (".metadata", lambda path: pickle.dumps({"step": list(range(100))})),
    ],
)
def test_a_cut_is_seen_in_what_tells_its_own_end(tmp_path: Path, name: str, make: Callable[[Path], bytes]) -> None:
    path = tmp_path / name
    whole = make(path)
    path.write_bytes(whole)
    assert torn(path) == ""
    for cut in range(len(whole) - 1, 0, -max(1, len(whole) // 50)):
        path.write_bytes(whole[:cut])
        assert torn(path) != "", cut
    disk = WatchedDisk(tmp_path, each=["{step}/"], complete=name)
    disk.write(f"7/{name}", whole[:-1])
    disk.wait(30)
    assert disk.committed() == []
    disk.write(f"7/{name}", whole)
    disk.wait(5)
    assert disk.committed() == [7]


def test_a_file_that_changes_while_it_is_copied_is_thrown_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = WatchedDisk(tmp_path, each=["ckpt.bin"], rewritten=True)
    disk.write("ckpt.bin")
    real = ForeignFolder.copy
    times: list[int] = []

    def slow(own: ForeignFolder, source: Path, target: Path) -> None:
        real(own, source, target)
        if not times:
            disk.write("ckpt.bin", b"y" * 100)
        times.append(1)

    monkeypatch.setattr(ForeignFolder, "copy", slow)
    disk.step = 5
    disk.wait(2)
    assert disk.committed() == []
    assert not list((tmp_path / "ckpt").glob("*"))
    disk.wait(4)
    assert disk.committed() == [5]
    assert (tmp_path / "ckpt" / "step_00000005" / "files" / "ckpt.bin").read_bytes() == b"y" * 100


def test_one_that_is_overwritten_has_the_step_that_was_told_and_never_the_same_twice(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["ckpt.bin"], rewritten=True)
    for step, content in ((10, b"a"), (20, b"b"), (20, b"c")):
        disk.step = step
        disk.write("ckpt.bin", content)
        disk.wait(4)
    assert disk.committed() == [10, 20, 21]
    assert [(tmp_path / "ckpt" / f"step_{step:08d}" / "files" / "ckpt.bin").read_bytes() for step in (10, 20, 21)] == [
        b"a",
        b"b",
        b"c",
    ]  # overwritten in place, on the same inode: none of the copies has changed


@pytest.mark.parametrize(
    ("each", "names"),
    [
        ("*/last.pt", ["exp/last.pt", "exp2/last.pt", "exp3/last.pt"]),  # a folder for each start
        ("version_*/last.ckpt", ["version_0/last.ckpt", "version_1/last.ckpt", "version_2/last.ckpt"]),
        ("last*.ckpt", ["last.ckpt", "last-v1.ckpt", "last-v2.ckpt"]),
    ],
)
def test_of_several_matches_of_a_rewritten_name_the_newest_is_the_checkpoint(
    tmp_path: Path, each: str, names: list[str]
) -> None:
    disk = WatchedDisk(tmp_path, each=[each], rewritten=True)
    for step, name in enumerate(names, 1):
        disk.step = 10 * step
        disk.write(name, a_zip(tmp_path / "made"))
        disk.wait(70)
        assert disk.files(10 * step) == [name]
        restored = disk.found.restore()
        assert restored is not None
        assert restored.step == 10 * step
        assert disk.found.place(restored) == disk.folder / name


def test_shards_of_one_rewritten_checkpoint_count_together_alone(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["shard_*.bin"], rewritten=True)
    disk.step = 10
    for rank in range(3):
        disk.write(f"shard_{rank}.bin")
    disk.wait(70)
    assert disk.files(10) == ["shard_0.bin", "shard_1.bin", "shard_2.bin"]
    disk.found.restore()
    disk.step = 20
    for rank in range(3):
        disk.write(f"shard_{rank}.bin", b"y" * 100)
        disk.wait(5)
        assert disk.committed() == ([10] if rank < 2 else [10, 20])


def test_epochs_counted_from_0_are_epochs_that_are_done(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, epochs=3, each=["epoch_{epoch}.bin"])
    for epoch in (0, 1):
        disk.write(f"epoch_{epoch}.bin")
        disk.wait(4)
    disk.found.restore()
    disk.write("epoch_2.bin")
    disk.wait(4)
    assert disk.committed() == [1, 2, 3]


def test_what_is_put_back_is_all_that_is_there(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["step-{step}/"], also=["tokenizer/", "best.txt"])
    disk.write("tokenizer/vocab.txt", "words")
    disk.write("best.txt", "the best")
    for step in (1, 2):
        disk.write(f"step-{step}/a.bin", f"{step}")
    disk.wait(70)
    assert disk.committed() == [1, 2] or disk.committed() == [2]
    disk.write("step-9/a.bin", "torn")
    disk.write("latest", "step-9")
    again = WatchedDisk(tmp_path, each=["step-{step}/"], also=["tokenizer/", "best.txt"])
    restored = again.found.restore()
    assert restored is not None
    assert restored.step == 2
    assert again.found.place(restored) == again.folder / "step-2"
    there = sorted(path.relative_to(again.folder).as_posix() for path in again.folder.rglob("*") if path.is_file())
    assert there == ["best.txt", "step-2/a.bin", "tokenizer/vocab.txt"]
    again.wait(5)
    assert again.said == []  # it is not committed once more
    assert (again.folder / "step-2" / "a.bin").stat().st_mode & 0o666 == 0o666


@pytest.mark.parametrize(
    ("checkpoint", "folder", "file", "word"),
    [
        ({"format": "deepspeed"}, "global_step{}", "latest", "global_step{}"),
        ({"each": ["run/iter_{step}/"], "also": ["run/latest_checkpointed_iteration.txt"]}, "run/iter_{:07d}",
         "run/latest_checkpointed_iteration.txt", "{}\n"),
    ],
    ids=["DeepSpeed", "Megatron"],
)  # fmt: skip
@pytest.mark.parametrize("names", [10, 30])
def test_a_file_that_points_to_a_checkpoint_points_to_the_one_that_was_restored(
    checkpoint: dict[str, Any], folder: str, file: str, word: str, names: int, tmp_path: Path
) -> None:
    disk = WatchedDisk(tmp_path, **checkpoint)
    for step in (10, 20, 30):  # 20 is the newest whole one; the file is late, or the command has gone on
        disk.write(f"{folder.format(step)}/a.bin", f"{step}")
    state = (disk.folder / folder.format(30) / "a.bin").stat()
    disk.open = {(state.st_dev, state.st_ino)}
    disk.write(file, word.format(names))
    disk.wait(5)
    assert disk.committed() == [20]
    again = WatchedDisk(tmp_path, **checkpoint)
    again.found.restore()
    assert (again.folder / file).read_text() == word.format(20)
    assert [path.name for path in again.folder.rglob("*.bin")] == ["a.bin"]


@pytest.mark.parametrize(
    ("checkpoint", "names", "place"),
    [
        ({"format": "hf-trainer"}, ["checkpoint-5/a", "checkpoint-5/b/c", "checkpoint-5/trainer_state.json"],
         "checkpoint-5"),
        ({"each": ["run/{step}.ckpt"]}, ["run/5.ckpt"], "run/5.ckpt"),
    ],
)  # fmt: skip
def test_the_command_is_told_the_file_or_the_folder(
    tmp_path: Path, checkpoint: dict[str, Any], names: list[str], place: str
) -> None:
    disk = WatchedDisk(tmp_path, **checkpoint)
    for name in names:
        disk.write(name, "{}")
    disk.wait(4)
    restored = disk.found.restore()
    assert restored is not None
    assert disk.found.place(restored) == disk.folder / place


def test_an_evaluation_that_comes_after_the_checkpoint_is_written_into_its_commit(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    disk.write("a-5.bin")
    disk.wait(3)
    folder = tmp_path / "ckpt" / "step_00000005"
    assert [told.val_loss for told in [commit.read(folder)] if told] == [None]
    disk.val[5] = 1.25
    disk.wait(2)
    assert [told.val_loss for told in [commit.read(folder)] if told] == [1.25]


def test_older_ones_are_removed_once_they_are_in_the_bucket(tmp_path: Path) -> None:
    disk = WatchedDisk(tmp_path, each=["step-{step}/"], complete="a.bin", keep_on_disk=1)
    for step in (1, 2, 3):
        disk.write(f"step-{step}/a.bin")
        disk.wait(4)
    disk.found.prune(published=1)
    assert sorted(path.name for path in disk.folder.iterdir()) == ["step-2", "step-3"]
    disk.found.prune(published=3)
    assert sorted(path.name for path in disk.folder.iterdir()) == ["step-3"]


def test_a_disk_that_is_full_is_said_and_tried_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    real = ForeignFolder.copy

    def full(own: ForeignFolder, source: Path, target: Path) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ForeignFolder, "copy", full)
    disk.write("a-5.bin")
    disk.wait(5)
    assert disk.committed() == []
    assert any("No space left" in each for each in disk.said)
    monkeypatch.setattr(ForeignFolder, "copy", real)
    disk.wait(40)
    assert disk.committed() == [5]


def test_the_copy_of_a_large_checkpoint_keeps_nobody_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, held = WatchedDisk(tmp_path, each=["a-{step}.bin"]), threading.Event()
    real = ForeignFolder.copy
    monkeypatch.setattr(ForeignFolder, "copy", lambda *words: (held.wait(HANG_S), real(*words)))
    disk.write("a-5.bin")
    disk.now += 2
    disk.found.look()
    disk.now += 2
    for _ in range(20):  # each returns, though the copy does not
        disk.now += 2
        disk.found.look()
    assert disk.committed() == []
    held.set()
    disk.wait(2)
    assert disk.committed() == [5]


@pytest.mark.parametrize(
    ("when", "reason"),
    [
        ("whole before it", "timed"),
        ("begun before it", "timed"),
        ("amid the look", "timed"),
        ("at it", "timed"),
        ("on it", "stop"),
    ],
)
def test_only_what_was_begun_after_the_signal_is_a_save_that_the_signal_caused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str, reason: str
) -> None:
    disk = WatchedDisk(tmp_path, each=["a-{step}.bin"])
    disk.write("a-1.bin")
    disk.wait(70)
    disk.found.reason = "stop"
    if when == "amid the look":
        began, look = disk.write("clock").stat().st_mtime, disk.found.find

        def look_while_it_saves() -> list[FoundCheckpoint]:
            seen = look()
            wait_for("a later time of files", lambda: disk.write("a-2.bin").stat().st_mtime > began + 0.1)
            return seen

        monkeypatch.setattr(disk.found, "find", look_while_it_saves)
    elif when != "on it":
        disk.write("a-2.bin", b"x" * 100 if when == "whole before it" else b"")
    if when == "at it":  # it came after the look at what is there, and before the signal
        held = (disk.folder / "a-2.bin").rename(tmp_path / "held")
        held.write_bytes(b"x" * 100)
    disk.found.signalled()
    monkeypatch.undo()
    if when == "at it":
        held.rename(disk.folder / "a-2.bin")
    if when in ("begun before it", "on it"):
        wait_for("a later time of files", lambda: disk.write("a-2.bin").stat().st_mtime > disk.found._signalled_at)
    disk.wait(3)
    found = commit.read(tmp_path / "ckpt" / "step_00000002")
    assert found is not None
    assert (found.reason, disk.found.newest_is_on_signal) == (reason, reason == "stop")
