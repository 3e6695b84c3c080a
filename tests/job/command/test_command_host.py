"""The host of a command, for real: the miniature script of each convention, from its first step to its end."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_world import FORMATS, CommandJob, of_format, wrong


@pytest.mark.parametrize("name", FORMATS)
def test_a_script_of_each_convention_runs_to_its_end_and_leaves_whole_checkpoints(tmp_path: Path, name: str) -> None:
    job = CommandJob(tmp_path / "w", of_format(name, "--steps 20 --every 5", work={"steps": 20}))
    assert job.run() == 0, job.log
    assert job.commits(), job.log
    # Of a file that is overwritten the step is the one that was told by then: its last line may be read after it.
    assert job.commits()[-1].step in (range(15, 21) if name == "file" else [20])
    left = [path for path in (job.workdir / "final").rglob("*") if path.is_file()]
    assert left, "its outputs are empty, and its newest checkpoint is not what the run leaves"
    for each in job.commits():
        assert wrong(job.workdir / "ckpt" / each.folder, each.step) == []
    assert job.metrics()[-1]["step"] == 20
