"""The core stands without the ready-made jobs: it finds them by a table of their own, and imports none of them.

In a copy of the project without job/experiments/ a script of the user's own is priced and rehearsed, its preview and
its `up` among it, without the engine.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.repository import ROOT

TRAIN = """\
import pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
begun = max((int(each.stem) for each in folder.glob("*.pt")), default=0)
for step in range(begun + 1, 61):
    time.sleep(0.02)
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    if step % 20 == 0:
        made = folder / ".made"
        made.write_text(str(step))
        made.rename(folder / f"{step}.pt")
"""
FILE = f"""\
run: {{id: r1, owner: me}}
job:
  command: {sys.executable} train.py {{checkpoints}}
  image: docker.io/library/python:3.13-slim
  code: {{folder: code}}
  checkpoint: {{each: "{{step}}.pt", every: {{steps: 20}}, size_gb: 0.001}}
  progress: {{stdout: 'step (?P<step>[0-9]+) loss (?P<loss>[0-9.]+)'}}
  work: {{steps: 60, step_ms: {{A10G: 50}}}}
fleet: {{region: us-east-2, zones: [us-east-2a], instance_types: [g5.2xlarge]}}
storage: {{}}
limits: {{max_usd: 3, max_hours: 2}}
rehearsal:
  estimate: {{step_ms: [20]}}
  job: {{device: cpu}}
  interruptions: {{with_notice: 0, without_notice: 0}}
"""
PROGRAM = """\
import sys
from gpufleet.infra.cli import main

assert main(["cost", "mine"]) == 0
assert main(["rehearse", "mine"]) == 0
assert main(["cost", "sft-h100"]) == 2
assert not [name for name in sys.modules if name.startswith("gpufleet.job.experiments")]
"""


def test_an_own_script_is_priced_previewed_and_rehearsed_without_them(tmp_path: Path) -> None:
    project = tmp_path / "project"
    without = shutil.ignore_patterns("experiments")  # with what is compiled already
    for name in ("infra", "job", "rehearsal"):
        shutil.copytree(ROOT / name, project / name, ignore=without)
    shutil.copytree(ROOT / "gpufleet", project / "gpufleet", symlinks=True)
    for name, text in (("code/train.py", TRAIN), ("stacks/mine.yaml", FILE)):
        (project / name).parent.mkdir()
        (project / name).write_text(text)
    shutil.copy(ROOT / "stacks" / "sft-h100.yaml", project / "stacks")
    for name in ("Pulumi.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, project)
    environment = {**os.environ, "PYTHONPATH": str(project), "PATH": "/usr/bin:/bin"}  # without the engine
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=project, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("in eight runs of ten") == 2  # of `cost`, and of the preview
    assert "job.experiment" in done.stderr
    receipt = json.loads((project / "rehearsals" / "mine" / "r1" / "receipt.json").read_text())
    assert receipt["reason"] == "finished"
    assert [attempt["last_step"] for attempt in receipt["attempts"]] == [60]
