"""What a kill, a full disk or a careless copy leaves in ckpt/ never stops or fools a run."""

from __future__ import annotations

import json
import math
import os
import re
import shutil
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader

from gpufleet.job import atomic
from gpufleet.job.contract.commit import Commit
from gpufleet.job.experiments.engine.checkpoint import CheckpointDamagedError, Checkpoints, all_finite
from tests.job import train_world as world
from tests.job.train_world import STEPS, StopAt

Usage = namedtuple("Usage", "total used free")


def state(value: float = 1.0) -> dict[str, dict[str, torch.Tensor]]:
    return {"model": {"weight": torch.full((3, 2), value)}, "exp_avg": {"weight": torch.zeros(3, 2)}}


def commit(step: int, *, val_loss: float | None = None, config_sha256: str = "config") -> Commit:
    return Commit(
        step=step,
        phase="dense",
        goes_on_from=step,
        tokens=step * 64,
        val_loss=val_loss,
        config_sha256=config_sha256,
        determinism={},
        dataset={},
        requires=(),
        reason="timed",
    )


def save(checkpoints: Checkpoints, step: int, **changed: Any) -> None:
    checkpoints.save(state(float(step)), commit(step, **changed), {"step": step})
    checkpoints.wait()


def opened(folder: Path) -> Checkpoints:
    return Checkpoints(folder / "ckpt", config_sha256="config")


def failing(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def damage(path: Path) -> None:
    """Other bytes, as many as before."""
    path.write_bytes(b"\x7f" * path.stat().st_size)


def newest_step(folder: Path) -> int | None:
    found = opened(folder).newest()
    return None if found is None else found.commit.step


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Steps 1 and 2 committed."""
    checkpoints = opened(tmp_path)
    save(checkpoints, 1)
    save(checkpoints, 2)
    assert newest_step(tmp_path) == 2
    return tmp_path


def test_a_saved_checkpoint_reads_back_with_its_progress(two: Path) -> None:
    checkpoints = opened(two)
    found = checkpoints.newest()
    assert found is not None
    assert checkpoints.saved_step == 2  # a stop at once saves nothing over it
    read = state(0.0)
    checkpoints.load(found, read)
    assert torch.equal(read["model"]["weight"], torch.full((3, 2), 2.0))
    assert found.progress == {"step": 2}


def test_commit_json_names_every_other_file_with_its_size(two: Path) -> None:
    path = two / "ckpt" / "step_00000002"
    tree = atomic.read_object(path / "commit.json")
    assert tree is not None
    assert {f["name"]: f["bytes"] for f in tree["files"]} == {
        file.name: file.stat().st_size for file in path.iterdir() if file.name != "commit.json"
    }


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "progress.json"])
def test_a_truncated_file_makes_the_one_before_the_newest(two: Path, name: str) -> None:
    path = two / "ckpt" / "step_00000002" / name
    path.write_bytes(path.read_bytes()[:-1])
    assert newest_step(two) == 1


@pytest.mark.parametrize("name", ["__0_0.distcp", "commit.json"])
def test_a_missing_file_makes_the_one_before_the_newest(two: Path, name: str) -> None:
    (two / "ckpt" / "step_00000002" / name).unlink()
    assert newest_step(two) == 1


def test_half_a_commit_json_makes_the_one_before_the_newest(two: Path) -> None:
    path = two / "ckpt" / "step_00000002" / "commit.json"
    path.write_bytes(path.read_bytes()[:40])
    assert newest_step(two) == 1


def test_a_commit_alone_in_its_folder_is_no_checkpoint(two: Path) -> None:
    for step in (1, 2):
        for file in (two / "ckpt" / f"step_{step:08d}").iterdir():
            if file.name != "commit.json":
                file.unlink()
    assert newest_step(two) is None


def test_another_configs_checkpoint_is_not_resumed(two: Path) -> None:
    save(opened(two), 3, config_sha256="another")
    assert newest_step(two) == 2


def test_another_configs_checkpoints_push_out_none_of_ones_own(two: Path) -> None:
    foreign = Checkpoints(two / "ckpt", config_sha256="another")
    for step in (8, 9):
        save(foreign, step, config_sha256="another")
    for step in (3, 4):
        save(opened(two), step)
    assert world.committed(two) == [3, 4, 8, 9]


def test_a_failed_save_falls_back_to_ones_own_newest_step(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(Checkpoints(two / "ckpt", config_sha256="another"), 9, config_sha256="another")
    checkpoints = opened(two)
    monkeypatch.setattr(atomic, "write_json", failing)
    checkpoints.save(state(), commit(3), {})
    checkpoints.wait()
    assert checkpoints.saved_step == 2


def test_a_kill_in_the_middle_of_a_save_leaves_the_one_before(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(atomic, "write_json", die)
    with pytest.raises(KeyboardInterrupt):
        save(opened(two), 3)
    assert (two / "ckpt" / "step_00000003" / "__0_0.distcp").exists()
    assert newest_step(two) == 2
    monkeypatch.undo()
    left = two / "ckpt" / "step_00000003" / "__1_0.distcp"
    left.write_bytes(b"of another rank")
    save(opened(two), 3)
    assert newest_step(two) == 3
    assert not left.exists()


@pytest.mark.parametrize("where", ["committed.atomic.write_json", "checkpoint.FileSystemWriter.write_data"])
def test_a_write_error_is_reported_and_leaves_no_rest(two: Path, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"gpufleet.job.experiments.engine.{where}", failing)
    checkpoints = opened(two)
    checkpoints.save(state(), commit(3), {})
    (saved,) = checkpoints.wait()
    assert saved.problem == "OSError: [Errno 28] No space left on device"  # one line of the log, and no traceback
    assert not (two / "ckpt" / "step_00000003").exists()
    assert checkpoints.saved_step == 2


def test_the_newest_two_and_the_best_are_kept(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    for step, val_loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, None), (5, None)):
        save(checkpoints, step, val_loss=val_loss)
    assert world.committed(tmp_path) == [2, 4, 5]


def test_a_prune_reads_each_checkpoint_once(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listed again for the best one, it could be another by then: the supervisor removes beside it."""
    checkpoints, commits, read = opened(two), list[Path](), atomic.read_object

    def counted(path: Path) -> dict[str, Any] | None:
        commits.extend([path] * (path.name == "commit.json"))
        return read(path)

    monkeypatch.setattr(atomic, "read_object", counted)
    checkpoints.committed.prune(1)
    assert len(commits) == len(set(commits)) == 2


def test_a_checkpoint_that_cannot_be_removed_costs_no_new_one(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path, **_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rmdir", refused)
    checkpoints = opened(two)
    checkpoints.save(state(), commit(3), {})
    assert [saved.problem for saved in checkpoints.wait()] == [None]
    assert newest_step(two) == 3


def test_a_short_disk_is_pruned_before_a_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoints = opened(tmp_path)
    for step in (1, 2):
        save(checkpoints, step)
    size, there = 48, list[list[int]]()
    free = iter((size, size, 2 * size))

    def usage(path: Path) -> Usage:
        there.append(world.committed(tmp_path))
        return Usage(0, 0, next(free))

    monkeypatch.setattr(shutil, "disk_usage", usage)
    save(checkpoints, 3)
    assert there == [[1, 2], [1, 2], [2]]
    assert world.committed(tmp_path) == [2, 3]


def test_a_disk_without_room_skips_the_save_and_says_why(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 50))
    (saved,) = opened(two).save(state(), commit(3), {})
    assert re.fullmatch(r"50 bytes free in .*, 58 needed", str(saved.problem))  # 1.2 x 48
    assert newest_step(two) == 2


def test_a_save_holds_the_step_it_was_asked_for_although_training_goes_on(tmp_path: Path) -> None:
    checkpoints = opened(tmp_path)
    weights = state(7.0)
    checkpoints.save(weights, commit(1), {})
    weights["model"]["weight"].fill_(8.0)
    checkpoints.wait()
    read = state(0.0)
    found = checkpoints.newest()
    assert found is not None
    checkpoints.load(found, read)
    assert torch.equal(read["model"]["weight"], torch.full((3, 2), 7.0))


@pytest.mark.parametrize("value", [1.0, math.inf, -math.inf, math.nan])
def test_one_number_that_is_not_finite_is_found_among_all(value: float) -> None:
    given = state(2.0)
    given["exp_avg"]["weight"][1, 1] = value
    assert all_finite(given).item() is math.isfinite(value)


def test_a_save_waits_for_the_memory_that_is_on_its_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taken(tensor: torch.Tensor) -> torch.Tensor:
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.05)
        return torch.empty_like(tensor)

    monkeypatch.setattr("gpufleet.job.experiments.engine.checkpoint._host_copy", taken)
    checkpoints = opened(tmp_path)
    checkpoints.prepare(state(7.0))
    save(checkpoints, 7)
    read, found = state(0.0), checkpoints.newest()
    assert found is not None
    checkpoints.load(found, read)
    assert torch.equal(read["model"]["weight"], torch.full((3, 2), 7.0))


def test_a_checkpoint_that_lacks_a_file_which_its_commit_does_not_name_is_damaged(two: Path) -> None:
    path = two / "ckpt" / "step_00000002"
    (path / "__0_0.distcp").unlink()
    tree = json.loads((path / "commit.json").read_text())
    tree["files"] = [file for file in tree["files"] if file["name"] != "__0_0.distcp"]
    (path / "commit.json").write_text(json.dumps(tree))
    checkpoints = opened(two)
    found = checkpoints.newest()
    assert found is not None
    with pytest.raises(CheckpointDamagedError, match="step_00000002 cannot be read, FileNotFoundError"):
        checkpoints.load(found, state())
    assert newest_step(two) == 1


def test_a_save_never_waits_for_the_gpu_once_it_is_in_host_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def touched(*_: object) -> None:
        raise AssertionError("the GPU is training's")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)  # before that memory is complete
    for name in ("current_stream", "stream", "set_device"):
        monkeypatch.setattr(torch.cuda, name, touched)
    checkpoints = opened(tmp_path)
    save(checkpoints, 1)
    assert newest_step(tmp_path) == 1


def test_a_run_whose_newest_checkpoint_is_torn_resumes_from_the_one_before(tmp_path: Path) -> None:
    whole, torn = world.make(tmp_path / "whole"), world.make(tmp_path / "torn")
    assert world.train(whole) == 0
    assert world.train(torn, StopAt(torn, STEPS + 4, saves=(1, 2))) == 75
    steps = world.committed(torn)
    data = torn / "ckpt" / f"step_{steps[-1]:08d}" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:100])
    assert world.train(torn) == 0
    assert world.final_hash(torn) == world.final_hash(whole)


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata"])
def test_a_run_whose_newest_checkpoint_is_damaged_says_so_and_resumes_from_the_one_before(
    tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, STEPS + 4, saves=(1, 2))) == 75
    *_, before, newest = world.committed(workdir)
    damage(workdir / "ckpt" / f"step_{newest:08d}" / name)
    assert world.train(workdir) == 72
    assert json.loads((workdir / "unreadable.json").read_text())["step"] == newest
    assert world.train(workdir) == 0
    said = capsys.readouterr().out
    assert f"step_{newest:08d} cannot be read" in said
    assert f"resuming from step {before} " in said


@pytest.mark.parametrize("method", ["read_metadata", "read_data"])
def test_a_disk_that_cannot_be_read_is_this_nodes_fault_and_costs_no_checkpoint(
    two: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(FileSystemReader, method, broken)
    checkpoints = opened(two)
    found = checkpoints.newest()
    assert found is not None
    with pytest.raises(OSError, match="Input/output error"):
        checkpoints.load(found, state())
    assert newest_step(two) == 2


def test_a_damaged_checkpoint_without_another_is_never_a_run_from_the_beginning(tmp_path: Path) -> None:
    workdir = world.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 2)) == 75
    (only,) = world.committed(workdir)
    damage(workdir / "ckpt" / f"step_{only:08d}" / "__0_0.distcp")
    assert [world.train(workdir) for _ in range(2)] == [72, 72]
    assert world.committed(workdir) == [only]


def test_a_full_disk_costs_checkpoints_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = world.make(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 10))
    assert world.train(workdir) == 0
    assert world.committed(workdir) == []
    assert "NOT saved 4 (boundary" in capsys.readouterr().out
