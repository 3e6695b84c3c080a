"""A definition with three stages."""

from __future__ import annotations

import yaml

from tests.rehearsal.engine_world import AMI

STAGED = """\
# Three stages. Bound: 8 dollars.
run: {id: r1, owner: me@example.org}
job:
  image: public.ecr.aws/docker/library/python:3.13-slim
  code: {folder: code}
  checkpoint: none
  device: cpu
  progress: {stdout: 'step (?P<step>[0-9]+)'}
  work: {hours: {low: 0.1, likely: 0.2, high: 0.4}}
fleet:
  region: us-east-2
  zones: [us-east-2a, us-east-2b]
  instance_types: [g5.2xlarge]
  capacity: spot
storage:
  keep: {days: 7}
limits: {max_usd: 8, max_hours: 8}
stages:
  - name: prepare
    job: {command: 'python stage.py prepare {outputs}'}
    fleet: {instance_types: [c7i.xlarge], capacity: on-demand}
  - name: train
    job: {command: 'python stage.py train {inputs.prepare} {outputs}'}
  - name: judge
    job: {command: 'python stage.py judge {inputs.train} {outputs}'}
    fleet: {instance_types: [c7i.xlarge]}
"""

IMAGE = "public.ecr.aws/docker/library/python:3.13-slim"
DIGEST = "@sha256:" + "5" * 64
PINNED = STAGED.replace(IMAGE, f"{IMAGE}{DIGEST}\n  supervisor_image: {IMAGE}{DIGEST}").replace(
    "  capacity: spot\n", f"  capacity: spot\n  ami: {AMI}\n"
)


def several_in(stage: str, text: str = STAGED, *, nodes: int = 2) -> str:
    """The definition, in which this stage has several nodes. Its image has a digest."""
    tree = yaml.safe_load(text if DIGEST in text else text.replace(IMAGE, f"{IMAGE}{DIGEST}"))
    own = next(each for each in tree["stages"] if each["name"] == stage)
    own["job"]["env"] = {"NODE_RANK": "{node_rank}", "WORLD_SIZE": "{ranks}"}
    own["fleet"] = {**own.get("fleet", {}), "nodes": nodes, "zones": ["us-east-2a"]}
    return str(yaml.safe_dump(tree))
