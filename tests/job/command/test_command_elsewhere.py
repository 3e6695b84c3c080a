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
from gpufleet.job.spec import convert
from gpufleet.job.spec.command import CommandConfig


@pytest.mark.parametrize(
    ("command", "checkpoint", "written", "answer"),
    [
        ("python train.py --out runs", {"each": ["ckpt-{step}.json"]}, ["code/runs/ckpt-10.json"],
         "runs/ckpt-10.json was written, where nobody looks: write job.checkpoint.folder: 'runs', or --out"
         " {checkpoints} in job.command"),
        ("python train.py", {"each": ["last.pt"], "rewritten": True}, ["outputs/x/last.pt"],
         "{outputs}/x/last.pt was written, where nobody looks: write job.checkpoint.folder: '{outputs}/x', or have the"
         " command write into {checkpoints}"),
        ("python train.py", {"each": ["last.pt"], "rewritten": True}, ["code/last.pt"],
         "last.pt was written, where nobody looks: write job.workdir: '{checkpoints}', and {code}/ before the script's"
         " name in job.command"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/exp/ckpt-10.pt"],
         "{checkpoints}/exp/ckpt-10.pt was written, where nobody looks: write job.checkpoint.folder:"
         " '{checkpoints}/exp', or have the command write into {checkpoints}"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/step_000010.pt", "checkpoints/step_000020.pt"],
         "step_000010.pt, step_000020.pt came into {checkpoints}, and job.checkpoint.each, ckpt-{step}.pt, names none"
         " of them: write each: 'step_{step:06d}.pt', if that is one checkpoint"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/epoch-3/a", "checkpoints/epoch-4/a"],
         "epoch-3/a, epoch-4/a came into {checkpoints}, and job.checkpoint.each, ckpt-{step}.pt, names none of them:"
         " write each: 'epoch-{epoch}/', if that is one checkpoint"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["checkpoints/best.pt"],
         "best.pt came into {checkpoints}, and job.checkpoint.each, ckpt-{step}.pt, names none of them: write each:"
         " 'best.pt', rewritten: true, if that is one checkpoint"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["code/out/model_4.pth", "code/out/log.txt"],
         "nothing came into {checkpoints}; written were out/model_4.pth: say in job.checkpoint.folder and each which"
         " of these is a checkpoint"),
        ("python train.py", {"each": ["ckpt-{step}.pt"]}, ["code/log.txt", "checkpoints/ckpt-1.tmp"], ""),
    ],
)  # fmt: skip
def test_what_was_written_elsewhere_is_named_with_the_line_to_add(
    tmp_path: Path, command: str, checkpoint: dict[str, Any], written: list[str], answer: str
) -> None:
    tree = {"command": command, "checkpoint": checkpoint}
    config = convert.from_json(CommandConfig, tree, "job", CommandConfig())
    folders = Folders(user=tmp_path)
    folders.make()
    (tmp_path / "code" / "old.pt").touch()  # shipped with the code
    began = time.time() + 1
    search = Search(config, Names(config), folders, tmp_path / "checkpoints", began)
    for name in written:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (began + 1, began + 1))
    assert search.look(began + 60) == answer
