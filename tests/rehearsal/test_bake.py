"""`gpufleet bake` on the embedded AWS, with the real engine: the program, user-data and node are the real ones."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.commands import bake as command
from gpufleet.infra.definition import bake as builders
from gpufleet.infra.definition import pin
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.inputs import bakes
from gpufleet.infra.program.pulumi_cli import PulumiStack
from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, Pulumi
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.launch import CloudInstance
from gpufleet.rehearsal.node import NodeRunner
from tests.rehearsal.engine_world import AMI
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("pulumi") is None, reason="the Pulumi engine is not on PATH"),
]
STACK, BUILDER = "mine", "mine-bake"
DIGEST = "@sha256:" + "5" * 64
IMAGE = f"public.ecr.aws/docker/library/python:3.13-slim{DIGEST}"
SUPERVISOR = f"public.ecr.aws/deep-learning-containers/pytorch:2.13{DIGEST}"
TEXT = f"""
run: {{id: r1, owner: you}}
job:
  image: {IMAGE}
  supervisor_image: {SUPERVISOR}
  command: echo step 1
  device: cpu
  checkpoint: none
  progress: {{stdout: '^step (?P<step>[0-9]+)'}}
  work: {{hours: {{low: 0.05, likely: 0.1, high: 0.2}}}}
fleet:
  ami: {AMI}
  region: us-east-2
  zones: [us-east-2a]
  instance_types: [g5.xlarge]  # whose docker is moved to its instance store where the disk has no image
storage: {{keep: {{bucket: false}}}}
limits: {{max_usd: 1, max_hours: 1}}
"""


class BakeWorld:
    """A project, its account, and the machines there."""

    def __init__(self, root: Path, cloud: Cloud, runner: NodeRunner, engine: Pulumi) -> None:
        self.root, self.cloud, self.runner, self.engine = root, cloud, runner, engine

    @property
    def definition(self) -> StackDefinition:
        return load(self.root / "stacks" / f"{STACK}.yaml", now=datetime.now(UTC))

    def nodes(self, stack: str) -> list[CloudInstance]:
        return [each for each in self.cloud.instances() if each.tags["gpufleet:stack"] == stack]

    def log(self, stack: str) -> str:
        return "\n".join(self.runner.nodes[each.id].log.read_text() for each in self.nodes(stack))


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BakeWorld]:
    root = scratch.make(tmp_path / "project", {STACK: TEXT})
    programs = tmp_path / "programs"
    programs.mkdir()
    monkeypatch.chdir(root)
    monkeypatch.setattr(command, "LOOK_S", 0.2)
    with Cloud(root, habits=Habits(notice_s=20.0, relaunch_s=1.0)) as cloud:
        runner = NodeRunner(cloud, tmp_path / "nodes", lambda root: programs)
        try:
            with Engine.open(root, cloud.environment(), STACK, real=True) as engine:
                assert isinstance(engine, Pulumi)
                for name, value in engine._environment.items():
                    monkeypatch.setenv(name, value)
                yield BakeWorld(root, cloud, runner, engine)
        finally:
            runner.close()


class BakeKilledError(BaseException):
    """The end of the process, as a closed laptop would bring it."""


def killed_after_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """`gpufleet bake`, killed when its next `up` is done."""
    up = PulumiStack.up

    def then_die(self: PulumiStack, *words: Any, **named: Any) -> None:
        up(self, *words, **named)
        raise BakeKilledError

    with monkeypatch.context() as patched:
        patched.setattr(PulumiStack, "up", then_die)
        with pytest.raises(BakeKilledError):
            main(["bake", STACK, "--days", "9"])


def test_nodes_start_from_the_bake_without_a_pull_until_it_is_deleted(
    world: BakeWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is killed after each of its steps on the way, and goes on."""
    monkeypatch.setattr("builtins.input", lambda _: "no")
    assert main(["bake", STACK]) == 1
    assert world.cloud.leftovers() == {}
    assert "at most 5.37 USD a month, that of a full 100 GiB root disk" in capsys.readouterr().out
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    killed_after_up(monkeypatch)
    killed_after_up(monkeypatch)
    assert main(["bake", STACK]) == 0, capsys.readouterr()
    (builder,) = world.nodes(BUILDER)
    assert builder.ended_at is not None
    assert "nothing is pulled" not in world.log(BUILDER)
    assert sorted(kind for kind, _ in world.cloud.leftovers()) == ["image", "role", "schedule-group", "snapshot"]
    (image,) = world.cloud.client("ec2").describe_images(Owners=["self"])["Images"]
    tags = {each["Key"]: each["Value"] for each in image["Tags"]}
    assert datetime.fromisoformat(tags["gpufleet:delete-after"]) - datetime.now(UTC) > timedelta(days=8, hours=23)

    made = bakes.read(world.definition, world.root)
    assert made is not None
    assert (made.ami, made.images, made.base_ami) == (image["ImageId"], (IMAGE, SUPERVISOR), AMI)
    capsys.readouterr()
    assert main(["sweep", STACK]) == 0
    said = capsys.readouterr().out
    assert "Kept by `gpufleet bake`; `gpufleet bake mine --delete` deletes it:" in said
    assert made.ami in said

    assert world.engine.up().ok
    wait_for("the end of the run", lambda: world.nodes(STACK) and world.nodes(STACK)[0].ended_at)
    (node,) = world.nodes(STACK)
    assert node.image == made.ami
    assert world.log(STACK).count("nothing is pulled") == 2
    assert world.engine.destroy().ok

    pin.write_values(world.definition.source, {"job.image": IMAGE.replace("5" * 64, "6" * 64)})
    stale = world.engine.up()
    assert not stale.ok
    assert f"fleet.baked_ami, {made.ami}, contains" in stale.diagnostics

    assert main(["bake", STACK, "--delete"]) == 0
    assert world.cloud.leftovers() == {}
    assert [*(world.root / "bakes").iterdir()] == []


def test_all_stages_start_from_one_bake(
    world: BakeWorld, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    source = world.definition.source
    source.write_text(
        f"{TEXT}stages:\n  - name: prepare\n    fleet: {{instance_types: [c7i.xlarge]}}\n  - name: train\n"
    )
    assert main(["bake", STACK]) == 0, capsys.readouterr()
    said = capsys.readouterr().out
    assert said.count(" a month until ") == 1
    assert main(["cost", STACK]) == 0
    assert " ".join(capsys.readouterr().out.split()).count("Its builder pulled the images in") == 2
    assert world.engine.up().ok
    wait_for("the end of the run", lambda: sum(each.ended_at is not None for each in world.nodes(STACK)) == 2)
    made = load(source, now=datetime.now(UTC), staged=True).fleet.baked_ami
    assert [each.image for each in world.nodes(STACK)] == [made, made]
    assert world.log(STACK).count("nothing is pulled") == 4
    assert world.engine.destroy().ok
    assert main(["bake", STACK, "--delete"]) == 0
    assert world.cloud.leftovers() == {}


@pytest.fixture
def model(world: BakeWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A finished model, for a builder whose volume is a folder of this machine."""
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(builders, "DATA", str(tmp_path / "volume"))
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    final = world.root / "results" / "mine" / "r0" / "final"
    final.mkdir(parents=True)
    (final / "weights.bin").write_bytes(b"trained")
    return final


BAKE_DATA = ["bake", STACK, "--data", "results/mine/r0/final"]


def test_a_finished_model_becomes_a_snapshot_that_nodes_get_until_the_model_changes(
    world: BakeWorld, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*BAKE_DATA, "--days", "9"]) == 0, capsys.readouterr()
    assert (tmp_path / "volume" / "weights.bin").read_bytes() == b"trained"
    tagged = [{"Name": "tag-key", "Values": ["gpufleet:stack"]}]  # AMIs that moto brings have snapshots too
    (snapshot,) = world.cloud.client("ec2").describe_snapshots(OwnerIds=["self"], Filters=tagged)["Snapshots"]
    said = capsys.readouterr().out
    entry = f"data: {{size_gib: 2, snapshot: {snapshot['SnapshotId']}}}"
    assert f"Write `{entry}` under `storage:` of mine.yaml." in said
    assert sorted(kind for kind, _ in world.cloud.leftovers()) == ["role", "schedule-group", "snapshot"]
    assert main(["sweep", STACK]) == 0
    said = capsys.readouterr().out
    assert "`gpufleet bake mine --data PLACE --delete` takes it away:" in said
    assert f"2 GiB, a schedule deletes it at {datetime.now(UTC) + timedelta(days=9):%Y-%m-%d}" in said

    source = world.definition.source
    source.write_text(source.read_text().replace("keep: {bucket", f"{entry}, keep: {{bucket"))
    assert world.engine.up().ok
    wait_for("the end of the run", lambda: world.nodes(STACK) and world.nodes(STACK)[0].ended_at)
    assert world.nodes(STACK)[0].volumes == {"/dev/sdf": snapshot["SnapshotId"]}
    assert world.engine.destroy().ok

    (model / "weights.bin").write_bytes(b"trained again")
    stale = world.engine.up()
    assert not stale.ok
    assert "its files have changed" in stale.diagnostics

    assert main([*BAKE_DATA, "--delete"]) == 0
    assert world.cloud.leftovers() == {}
    assert [*(world.root / "bakes").iterdir()] == []


@pytest.mark.usefixtures("model")
def test_after_its_days_the_schedule_deletes_a_snapshot_of_data(world: BakeWorld) -> None:
    assert main(BAKE_DATA) == 0
    world.cloud.schedules.bring_forward("delete")
    assert [each.refused for each in world.cloud.schedules.fired] == [""]
    assert sorted(kind for kind, _ in world.cloud.leftovers()) == ["role", "schedule-group"]


def test_after_its_days_the_schedule_deletes_ami_and_snapshot(
    world: BakeWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda _: "yes")
    assert main(["bake", STACK]) == 0
    world.cloud.schedules.bring_forward("delete")
    assert [each.refused for each in world.cloud.schedules.fired] == [""]
    assert sorted(kind for kind, _ in world.cloud.leftovers()) == ["role", "schedule-group"]
    assert main(["bake", STACK, "--delete"]) == 0
    assert world.cloud.leftovers() == {}
