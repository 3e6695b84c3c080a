"""What a command has written where nobody looks for its checkpoints, and the line that is proposed."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.command.elsewhere import Search
from gpufleet.job.command.given import Folders
from gpufleet.job.command.names import Names
from gpufleet.job.kind import convert
from gpufleet.job.kind.command import CommandConfig


class SearchedRun:
    """A run in whose folders files come after its start."""

    def __init__(self, user: Path, command: str, checkpoint: dict[str, Any]) -> None:
        tree = {"command": command, "checkpoint": checkpoint}
        config = convert.from_json(CommandConfig, tree, "job", CommandConfig())
        self.folders, self.began = Folders(user=user), time.time() + 1
        self.folders.make()
        self._search = Search(config, Names(config), self.folders, user / "checkpoints", self.began)

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (self.began + 1, self.began + 1))

    def look(self) -> str:
        return self._search.look(self.began + 60, at_once=True)


@pytest.mark.parametrize(
    ("command", "checkpoint", "written", "answer"),
    [
        ("python train.py --out runs", {"each": ["ckpt-{step}.json"]}, ["code/runs/ckpt-10.json"],
         "runs/ckpt-10.json is outside of job.checkpoint.folder: write job.checkpoint.folder: 'runs', or --out"
         " {checkpoints} in job.command"),
        ("python train.py", {"each": ["last.pt"], "rewritten": True}, ["outputs/x/last.pt"],
         "{outputs}/x/last.pt is outside of job.checkpoint.folder: write job.checkpoint.folder: '{outputs}/x',"
         " or make the command write into {checkpoints}"),
        ("python train.py", {"each": ["last.pt"], "rewritten": True}, ["code/last.pt"],
         "last.pt is outside of job.checkpoint.folder: write job.workdir: '{checkpoints}', and {code}/ before"
         " the script's name in job.command"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/exp/ckpt-10.pt"],
         "{checkpoints}/exp/ckpt-10.pt is outside of job.checkpoint.folder: write job.checkpoint.folder:"
         " '{checkpoints}/exp', or make the command write into {checkpoints}"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/step_000010.pt", "checkpoints/step_000020.pt"],
         "the command wrote step_000010.pt, step_000020.pt into {checkpoints}, but job.checkpoint.each, ckpt-{step}.pt,"
         " matches none of these: if that is a checkpoint, write each: 'step_{step:06d}.pt'"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/epoch-3/a", "checkpoints/epoch-4/a"],
         "the command wrote epoch-3/a, epoch-4/a into {checkpoints}, but job.checkpoint.each, ckpt-{step}.pt, matches"
         " none of these: if that is a checkpoint, write each: 'epoch-{epoch}/'"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/best.pt"],
         "the command wrote best.pt into {checkpoints}, but job.checkpoint.each, ckpt-{step}.pt, matches none of these:"
         " if that is a checkpoint, write each: 'best.pt', rewritten: true"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["code/out/model_4.pth", "code/out/log.txt"],
         "the command wrote nothing into {checkpoints}, but out/model_4.pth: if one of these is a checkpoint, name it"
         " in job.checkpoint.folder and job.checkpoint.each"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["code/log.txt", "checkpoints/ckpt-1.tmp"], ""),
        ("python train.py", {"each": ["model.pt"], "rewritten": True},
         ["checkpoints/config.json", "checkpoints/training_args.bin"], ""),
        ("python train.py", {"each": ["model.pt"]}, ["checkpoints/events.out.tfevents.17.vm.1.0"], ""),
    ],
)  # fmt: skip
def test_what_was_written_elsewhere_is_named_with_the_line_to_add(
    tmp_path: Path, command: str, checkpoint: dict[str, Any], written: list[str], answer: str
) -> None:
    searched = SearchedRun(tmp_path, command, checkpoint)
    (tmp_path / "code" / "old.pt").touch()  # shipped with the code
    for name in written:
        searched.write(tmp_path / name)
    assert searched.look() == answer


@pytest.mark.parametrize("place", ["checkpoints", "code", "outputs", "state"])
@pytest.mark.parametrize(
    "kind", ["a folder elsewhere", "its parent", "a file elsewhere", "a pipe", "no text", "itself"]
)
def test_nothing_is_looked_for_outside_of_the_command_s_folders(tmp_path: Path, place: str, kind: str) -> None:
    """What a command has made a link of is neither followed nor named; of a pipe nobody waits for an end."""
    outside, user = tmp_path / "outside", tmp_path / "run" / "user"
    searched = SearchedRun(user, "python train.py", {"each": ["last.pt"], "rewritten": True})
    searched.write(outside / "last.pt")
    folder = user / place
    if kind == "a folder elsewhere":
        folder.rmdir()
        folder.symlink_to(outside)
    elif kind == "its parent":
        (folder / "runs").symlink_to("../..")
    elif kind == "a file elsewhere":
        (folder / "last.pt").symlink_to(outside / "last.pt")
    elif kind == "a pipe":
        os.mkfifo(folder / "last.pt")
        os.utime(folder / "last.pt", (searched.began + 1,) * 2)
    elif kind == "no text":
        searched.write(Path(os.fsdecode(os.fsencode(folder) + b"/by\xff"), "last.pt"))
    else:
        (folder / "last.pt").symlink_to("last.pt")
    assert searched.look() == ""
    searched.write(user / "code" / "runs2" / "last.pt") if place != "code" else None
    assert searched.look().startswith("runs2/last.pt is outside") is (place != "code")
