"""The builder of `gpufleet bake` is a plain definition, of the same images, region, disk and account."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.account import rights
from gpufleet.infra.commands.bake import MadeImage
from gpufleet.infra.definition import bake
from gpufleet.infra.definition.loader import find, load, rehearsal_text
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from tests.infra.staged_files import IMAGE, PINNED
from tests.repository import ROOT

NOW = datetime.now(UTC)
DIGEST = "@sha256:" + "5" * 64
TEXT = f"""
run: {{id: r1, owner: you}}
job:
  image: ghcr.io/me/train:1{DIGEST}
  supervisor_image: public.ecr.aws/x/y:1{DIGEST}
  registry: ssm:/mine/registry
  command: python train.py
  setup: pip install x
  code: {{folder: .}}
  checkpoint: none
  progress: {{stdout: 'step (?P<step>[0-9]+)'}}
  work: {{steps: 600, step_ms: {{L40S: 80}}}}
fleet: {{region: us-east-2, zones: [us-east-2a, us-east-2b], instance_types: [g6e.2xlarge], ami: ami-01234567}}
storage: {{root: {{size_gib: 120}}}}
limits: {{max_usd: 5, max_hours: 3}}
account:
  tags: {{team: vision}}
  permissions_boundary: arn:aws:iam::111122223333:policy/boundary
  vpc: {{id: vpc-01234567, subnets: {{us-east-2a: subnet-01234567, us-east-2b: subnet-01234568}}}}
"""


def builder_of(definition: StackDefinition, root: Path) -> StackDefinition:
    path = bake.write_builder(definition, root)
    assert find(f"{definition.name}{bake.ENDING}", root) == path
    return load(path, now=NOW)


@pytest.mark.parametrize("stack", sorted(path.stem for path in (ROOT / "stacks").glob("*.yaml")))
def test_each_shipped_stack_of_one_job_has_a_builder(stack: str, tmp_path: Path) -> None:
    definition = load(ROOT / "stacks" / f"{stack}.yaml", now=NOW, staged=True)
    builder = builder_of(definition, tmp_path)
    assert bake.is_builder(builder)
    assert not bake.is_builder(definition)
    assert set(builder.job.images) == set(definition.job.images)
    assert builder.fleet.capacity == "on-demand"


def test_stages_with_images_of_their_own_get_no_bake(tmp_path: Path) -> None:
    file, other = tmp_path / "staged.yaml", f"{IMAGE}@sha256:{'6' * 64}"
    file.write_text(PINNED)
    MadeImage(definition=load(file, now=NOW, staged=True), root=tmp_path).require()
    file.write_text(PINNED.replace("  - name: judge\n    job: {", f"  - name: judge\n    job: {{image: '{other}', "))
    made = MadeImage(definition=load(file, now=NOW, staged=True), root=tmp_path)
    with pytest.raises(GpufleetError, match=f"judge has {other}.*at the top of the file, and in no stage"):
        made.require()


def test_a_builder_has_the_images_the_disk_and_the_account_of_its_stack(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT)
    definition = load(file, now=NOW)
    builder = builder_of(definition, tmp_path)
    assert builder.job.images == definition.job.images
    assert builder.job.parameters.demands.login == "ssm:/mine/registry"
    assert builder.job.parameters.demands.code is None
    assert builder.account == definition.account
    assert builder.storage.root == definition.storage.root
    assert (builder.fleet.ami, builder.fleet.zones) == (definition.fleet.ami, definition.fleet.zones)
    assert not builder.storage.keep.bucket
    assert "ec2:CreateImage" in rights.needed(builder)
    assert "ec2:CreateImage" not in rights.needed(definition)


def test_a_builder_of_data_copies_them_to_a_volume_of_its_own(tmp_path: Path) -> None:
    (file := tmp_path / "mine.yaml").write_text(TEXT)
    definition = load(file, now=NOW)
    runs = []
    for content in (bake.Content("data/mine", "0" * 64, 30), bake.Content("data/mine", "1" * 64, 30)):
        builder = load(bake.write_builder(definition, tmp_path, content), now=NOW)
        runs.append(builder.run.id)
    assert builder.name == f"{definition.name}-data"
    assert bake.is_builder(builder)
    assert builder.storage.inputs == {"data": "data/mine"}
    assert builder.storage.data is not None
    assert (builder.storage.data.size_gib, builder.storage.data.snapshot) == (30, None)
    assert builder.storage.root.size_gib == 120 + 30  # the inputs lie there before they are copied
    assert len(set(runs)) == 2  # other files are another run
    assert "ec2:CreateSnapshot" in rights.needed(builder)
    assert "ec2:CreateImage" not in rights.needed(builder)


def test_a_rehearsal_starts_from_no_baked_ami(tmp_path: Path) -> None:
    file = tmp_path / "mine.yaml"
    file.write_text(TEXT.replace("ami: ami-01234567", "ami: ami-01234567, baked_ami: ami-76543210"))
    assert load(file, now=NOW).fleet.starts_from == "ami-76543210"
    rehearsed = rehearsal_text(file)
    assert "ami-01234567" in rehearsed
    assert "ami-76543210" not in rehearsed


def test_another_image_gives_the_builder_another_run(tmp_path: Path) -> None:
    runs = []
    for text in (TEXT, TEXT, TEXT.replace("5" * 64, "6" * 64), TEXT.replace("ami-01234567", "ami-76543210")):
        (file := tmp_path / "mine.yaml").write_text(text)
        runs.append(builder_of(load(file, now=NOW), tmp_path).run.id)
    assert runs[0] == runs[1]
    assert len(set(runs)) == 3


def test_a_name_that_leaves_no_room_for_the_builder_s_is_refused() -> None:
    assert bake.builder_name("a" * 35) == "a" * 35 + "-bake"
    with pytest.raises(GpufleetError, match="too long"):
        bake.builder_name("a" * 36)
