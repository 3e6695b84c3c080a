"""`python -m tests.released.record [FOLDER]`: records what this version writes, as tests/released/<its version>/.

Two runs against the embedded AWS with the real engine: `growth`, a ready-made job in gpufleet's own program, and
`command`, a script in a program of a user's. The first node of each is taken back; while none follows, its bucket is
recorded. Then the first run comes to its end, and `gpufleet stop` ends the second.
"""

from __future__ import annotations

import gzip
import io
import json
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from datetime import UTC, date, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from gpufleet.infra.catalog import SHIPPED, files
from gpufleet.infra.definition.loader import load
from gpufleet.infra.program.run_guard import creation_digest
from gpufleet.job.experiments.dataset.weights import describe
from gpufleet.rehearsal import provider, scratch
from gpufleet.rehearsal.cloud import Cloud
from gpufleet.rehearsal.engine import Engine, Pulumi, settings
from gpufleet.rehearsal.evidence import Rehearsal
from gpufleet.rehearsal.habits import Habits
from gpufleet.rehearsal.node import NodeRunner
from gpufleet.rehearsal.rehearse import command
from gpufleet.rehearsal.timeline import Timeline
from gpufleet.rehearsal.watch import Planned, Watch
from tests.released.recorded import HERE, PROJECT, definition_keys, program

ROOT = HERE.parents[1]
INTERRUPTED_AT = {"growth": 130, "command": 60}  # after this step
LEFT_OUT = ("/job.tar.gz", "/model.safetensors")  # large; the archive is read by its own nodes, a model by users
TRACES = {
    "samples.json": '{"gap_s": 300, "available": [1, 1, 0, 1], "type": "g5.2xlarge", "start": "2026-11-01"}\n',
    "public.json": '{"metadata": {"gap_seconds": 300}, "data": [1, 1, 0, 1]}\n',
    "changes.csv": "# type=g5.2xlarge, zone=us-east-2a\nat_h,available\n0,1\n12.5,0\n13.25,1\n48,0\n",
}
TYPE, REGION = "g5.2xlarge", "us-east-2"


def main(target: Path) -> None:
    """Raises GpufleetError and RuntimeError where a run does not do what is to be recorded."""
    target.mkdir(parents=True)
    record_definitions(target)
    record_prices(target)
    record_weights(target)
    record_traces(target)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made).resolve()
        growth = scratch.make(folder / "growth", {"growth": (HERE / "growth.yaml").read_text()})
        record_run(growth, "stacks/growth.yaml", "growth", target / "growth")
        shutil.copytree(HERE / "program", folder / "command")
        program(folder / "command")
        record_run(folder / "command", "command.yaml", "dev", target / "command")


def record_definitions(target: Path) -> None:
    """Every file that is shipped, what the stack of a run of each remembers of it, and every key that counts there."""
    found = sorted([*ROOT.glob("stacks/*.yaml"), *ROOT.glob("examples/*.yaml")])
    write_archive(target / "definitions.tar.gz", ((path.name, path.read_bytes()) for path in found))
    digests = {path.name: creation_digest(load(path, now=datetime.now(UTC))) for path in found}
    (target / "digests.json").write_text(json.dumps(digests, indent=1) + "\n")
    (target / "keys.json").write_text(json.dumps(sorted(definition_keys())) + "\n")


def record_prices(target: Path) -> None:
    """A folder as `gpufleet prices refresh` leaves it, of one type."""
    shipped = files.read(SHIPPED)
    few = files.Prices(
        on_demand={(TYPE, REGION): shipped.on_demand[TYPE, REGION]},
        spot={(TYPE, REGION): shipped.spot[TYPE, REGION]},
        services={key: price for key, price in shipped.services.items() if key[1] == REGION},
        notes={key: note for key, note in shipped.notes.items() if key[1] == REGION},
    )
    files.write(few, target / "prices", date.today())


def record_weights(target: Path) -> None:
    """Base weights as `gpufleet prepare` lists them."""
    folder = target / "weights"
    folder.mkdir()
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    for name in ("config.json", "tokenizer.json"):
        (folder / name).write_text("{}\n")
    describe(folder)


def record_traces(target: Path) -> None:
    """Traces as people write them, one of each form that docs/risk.md tells."""
    (target / "traces").mkdir()
    for name, text in TRACES.items():
        (target / "traces" / name).write_text(text)


def record_run(project: Path, argument: str, stack: str, target: Path) -> None:
    """One run of the definition `argument` of the `project`, from its preparation to its destroy."""
    name, folder = project.name, project.parent
    target.mkdir()
    with ExitStack() as context:
        cloud = context.enter_context(Cloud(folder / f"{name}-cloud", habits=Habits(notice_s=20, relaunch_s=86_400)))
        runner = NodeRunner(cloud, folder / f"{name}-nodes")
        context.callback(runner.close)
        port = context.enter_context(provider.serve(cloud.environment()))
        engine = Pulumi(project, {**cloud.environment(), **settings(project, port)}, stack, print)
        rehearsal = Rehearsal(
            definition=load(project / argument, now=datetime.now(UTC)),
            folder=project,
            project=project,
            root=project,
            timeline=Timeline(project / "timeline.jsonl"),
            cloud=cloud,
            engine=engine,
            runner=runner,
        )
        if name == "growth":
            command(rehearsal, "prepare", argument)
        command(rehearsal, "doctor", argument, "--pin")
        shutil.copy(project / argument, target / "definition.yaml")
        up(engine)
        record_state(engine, project, target / "stack-up.json.gz")
        follow(rehearsal, str(engine.outputs()["bucket"]), argument, target)
        up(engine)
        record_state(engine, project, target / "stack-ended.json.gz")
        command(rehearsal, "calibrate", argument)
        (measured,) = (project / "calibrations" / name).iterdir()
        shutil.copy(measured, target / "calibration.json")
        if not engine.destroy().ok:
            raise RuntimeError(f"{name}: destroy failed")


def follow(rehearsal: Rehearsal, bucket: str, argument: str, target: Path) -> None:
    """Watches the run; records its bucket between its two nodes and at its end. The second node of the command finds
    that it has been asked to stop.
    """
    cloud, name, here = rehearsal.cloud, target.name, rehearsal.project.parent
    planned = [Planned(step=INTERRUPTED_AT[name], kind="notice")]
    watch = Watch(cloud, rehearsal.runner, rehearsal.timeline, planned, bucket, "r1")
    between = target / "bucket-interrupted.tar.gz"

    def check() -> None:
        nodes = list(watch.views.values())
        if nodes and nodes[0].ended and not between.exists():
            newest = f"/step_{max(watch.manifests):08d}/"
            record_bucket(cloud, bucket, between, lambda key: "/ckpt/" not in key or newest in key, here)
            if name == "command":
                command(rehearsal, "stop", argument)
            launch(cloud)

    watch.run(check=check)
    if watch.planned:
        raise RuntimeError(f"{name}: it ended before it was interrupted")
    ended = target / "bucket-ended.tar.gz"
    record_bucket(cloud, bucket, ended, lambda key: key.startswith("r1/") and "/ckpt/" not in key, here)


def launch(cloud: Cloud) -> None:
    """The fleet waits for no capacity."""
    cloud.fleets.habits = Habits(relaunch_s=0.0)
    for fleet in cloud.fleets.fleets.values():
        fleet.next_launch = None


def up(engine: Engine) -> None:
    result = engine.up()
    if not result.ok:
        raise RuntimeError(result.text)


def record_state(engine: Pulumi, project: Path, path: Path) -> None:
    """The stack's deployment, without what names places on this machine."""
    text = engine._run(["pulumi", "stack", "export", "--stack", engine._stack]).replace(str(project), PROJECT)
    tree = json.loads(text)
    for resource in tree["deployment"]["resources"]:  # where in which program it was declared; nothing reads that
        resource.pop("sourcePosition", None)
        resource.pop("stackTrace", None)
    path.write_bytes(gzip.compress(json.dumps(tree, indent=1).encode(), mtime=0))


def record_bucket(cloud: Cloud, bucket: str, path: Path, wanted: Callable[[str], bool], here: Path) -> None:
    """The bucket's objects whose key is wanted, but for large ones that no test needs."""
    s3 = cloud.client("s3")
    keys = [each["Key"] for each in s3.list_objects_v2(Bucket=bucket)["Contents"]]
    objects = {
        key: s3.get_object(Bucket=bucket, Key=key)["Body"].read().replace(str(here).encode(), PROJECT.encode())
        for key in keys
        if wanted(key) and not key.endswith(LEFT_OUT)
    }
    write_archive(path, objects.items())


def write_archive(path: Path, contents: Iterable[tuple[str, bytes]]) -> None:
    """A tar.gz of these files, the same bytes for the same files."""
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w") as tar:
        for name, content in contents:
            entry: Any = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    path.write_bytes(gzip.compress(packed.getvalue(), mtime=0))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if sys.argv[1:] else HERE / version("gpufleet"))
