"""A command that turns its folders into links, pipes and devices leads the supervisor and its host nowhere else.

Here as processes of this machine; in real containers: tests/job/node/test_container_real.py.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.job import hostile_world
from tests.job.command_world import SupervisedNode, run_of
from tests.job.script_world import FakeScript, ScriptWorld


def test_a_hostile_command_writes_takes_and_sends_nothing_of_anybody_else_s_and_holds_nobody_up(tmp_path: Path) -> None:
    hostile_world.private(tmp_path / "i-1")
    node = SupervisedNode(tmp_path, run_of(tmp_path, hostile_world.run_parameters()), "i-1")

    try:
        hostile_world.go_on(node.workdir, lambda: node.log, node.wait_for)
        assert node.code() == 0, node.log
    finally:
        if node.process.poll() is None:
            node.lose()

    assert hostile_world.wrong(node.workdir, node.bucket / "r1", node.log) == [], node.log


def _emptied(folder: Path) -> Path:
    shutil.rmtree(folder)
    return folder


DELIVERIES: dict[str, tuple[bool, Callable[[Path, Path], object]]] = {
    "a file": (True, lambda outputs, _: (outputs / "a").touch()),
    "a file elsewhere": (False, lambda outputs, outside: (outputs / "a").symlink_to(outside / "file")),
    "a folder elsewhere": (False, lambda outputs, outside: _emptied(outputs).symlink_to(outside)),
    "a pipe": (False, lambda outputs, _: os.mkfifo(outputs / "a")),
    "a device": (False, lambda outputs, _: (outputs / "a").symlink_to("/dev/null")),
    "a pipe in its place": (False, lambda outputs, _: os.mkfifo(_emptied(outputs))),
}


@pytest.mark.parametrize("what", DELIVERIES)
def test_only_a_file_of_its_own_folders_is_an_output_of_its_end(tmp_path: Path, what: str) -> None:
    script, outside = FakeScript(), tmp_path / "outside"
    world = ScriptWorld(tmp_path / "run", script, script.config())
    start = world.start()
    outside.mkdir()
    (outside / "file").touch()
    is_output, make = DELIVERIES[what]
    world.now = start.began = min(world.now, (outside / "file").stat().st_mtime) - 1
    make(world.folders.outputs, outside)
    assert start.end(0, "", "the command").is_delivered is is_output


def test_a_file_from_before_its_end_is_no_output_after_it_though_the_clock_was_set_meanwhile(tmp_path: Path) -> None:
    world = ScriptWorld(tmp_path / "run", FakeScript(), FakeScript().config())
    world.checkpoints.moment = lambda written: written - 7200  # the machine's clock is two hours ahead by now
    start = world.start()
    (world.folders.outputs / "ckpt-5.json").touch()
    os.utime(world.folders.outputs / "ckpt-5.json", (start.began + 3600,) * 2)
    assert not start.end(0, "", "the command").is_delivered
    assert start._search.look(start.began + 60, at_once=True) == ""


def test_of_folders_that_it_counts_up_one_that_leads_elsewhere_is_no_checkpoint(tmp_path: Path) -> None:
    private = hostile_world.private(tmp_path)
    script = FakeScript(names="one")
    world = ScriptWorld(
        tmp_path / "run", script, script.config(checkpoint={"each": ["*/last.json"], "rewritten": True})
    )
    folder = world.folders.user / "checkpoints"
    start = world.start()
    (folder / "exp").mkdir()
    (folder / "exp" / "last.json").write_text('{"step": 1}')
    (folder / "exp2").mkdir()
    (folder / "exp2" / "last.json").symlink_to(private / "file")
    (folder / "exp3").symlink_to(private)
    os.mkfifo(folder / "last.json")
    for _ in range(40):
        world.now += 2
        world.look(start)
    assert [path.name for path in (world.folder / "ckpt").rglob("last.json")] == ["last.json"]
    assert hostile_world.PRIVATE not in "".join(path.read_text() for path in (world.folder / "ckpt").rglob("*.json"))
    assert "the checkpoint does not count" in "".join(world.notes)
    assert "'exp2/last.json' is a link to no file of the command's folders" in "".join(world.notes)
