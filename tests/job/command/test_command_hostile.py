"""A command that turns its folders into links, pipes and devices leads the supervisor and its host nowhere else.

Here as processes of this machine; in real containers: tests/job/node/test_container_real.py.
"""

from __future__ import annotations

from pathlib import Path

import hostile_world
from command_world import SupervisedNode, run_of


def test_a_hostile_command_writes_takes_and_sends_nothing_of_anybody_else_s_and_holds_nobody_up(tmp_path: Path) -> None:
    hostile_world.private(tmp_path / "i-1")
    node = SupervisedNode(tmp_path, run_of(tmp_path, hostile_world.run_parameters()), "i-1")

    hostile_world.go_on(node.workdir, lambda: node.log, node.wait_for)
    assert node.code() == 0, node.log

    assert hostile_world.wrong(node.workdir, node.bucket / "r1", node.log) == [], node.log
