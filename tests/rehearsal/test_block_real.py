"""`gpufleet rehearse` of a command in a Capacity Block, on one node and on two: the whole of it, its own processes."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from gpufleet.rehearsal.rehearse import rehearse
from tests.dates import skip_where_the_clock_is_moved
from tests.repository import ROOT

pytestmark = pytest.mark.optional
TRAIN = """\
import pathlib, sys, time
steps, folder = int(sys.argv[1]), pathlib.Path(sys.argv[2])
folder.mkdir(parents=True, exist_ok=True)
begun = max([int(each.stem) for each in folder.glob("*.pt")], default=0)
for step in range(begun + 1, steps + 1):
    time.sleep(0.05)
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    if step % 20 == 0:
        made = folder / f".{step}.tmp"
        made.write_bytes(b"x" * 1000)
        made.rename(folder / f"{step}.pt")
"""
FILE = """\
run: {{id: r1, owner: me}}
job:
  command: python train.py 5000 {{checkpoints}} {{node_rank}} {{master}} {{port}}
  image: public.ecr.aws/docker/library/python:3.13-slim
  code: {{folder: ../code}}
  env: {{WORLD_SIZE: "{{ranks}}", RANK: "{{node_rank}}"}}
  gpus: 8
  checkpoint: {{each: "{{step}}.pt", every: {{steps: 20}}, size_gb: 0.001}}
  progress: {{stdout: 'step (?P<step>\\d+) loss (?P<loss>[\\d.]+)'}}
  work: {{steps: 5000, step_ms: {{H100: 50}}}}
fleet:
  region: us-east-2
  zones: [us-east-2a]
  instance_types: [p5.48xlarge]
  nodes: {nodes}
  capacity: block
  block: {{start: 2099-12-01T11:30:00Z, end: 2099-12-02T11:30:00Z, fee_usd: 943.92}}
storage: {{}}
limits: {{max_usd: 1000, max_hours: 80}}
rehearsal:
  python: {python}
  estimate: {{step_ms: [50]}}
  job:
    command: python train.py 100 {{checkpoints}} {{node_rank}} {{master}} {{port}}
    work: {{steps: 100}}
    device: cpu
    gpus: 1
"""


@pytest.mark.parametrize("nodes", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_run_in_a_block_ends_with_its_fleet_deleted_and_nothing_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: int
) -> None:
    skip_where_the_clock_is_moved("does not reach what a container has for an environment")
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text(TRAIN)
    project = tmp_path / "project"
    (project / "stacks").mkdir(parents=True)
    shutil.copy(ROOT / "Pulumi.yaml", project)
    (project / "stacks" / "mine.yaml").write_text(FILE.format(nodes=nodes, python=sys.executable))
    monkeypatch.chdir(project)
    said: list[str] = []
    assert rehearse("mine", root=project, out=said.append) == 0, "\n".join(said)
    told = "\n".join(said)
    assert "cannot be deleted" not in told
    receipt = json.loads((project / "rehearsals" / "mine" / "r1" / "receipt.json").read_text())
    amounts = {line["name"]: line["actual"] for line in receipt["lines"]}
    assert (amounts["compute"], amounts["capacity block"]) == ("0.0000", "943.9200")
    assert len(receipt["attempts"]) == nodes
