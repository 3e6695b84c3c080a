"""`gpufleet bake STACK`: an AMI that holds the stack's images, in a Pulumi stack of its own, STACK-bake; with `--data`
a snapshot of a folder or an s3:// prefix instead, in STACK-data.

A builder, a node without a GPU, pulls the images, or copies the data to its data volume, and waits. Then the stack is
declared again. In place of the builder it now has an AMI of the builder's disk, or a snapshot of the volume. The
command writes its id into the definition, as fleet.baked_ami or storage.data.snapshot, and a record into bakes/. Like
`gpufleet run`, the command keeps no state of its own: if it was interrupted at any point, it continues there when it is
run again.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any, Protocol

from gpufleet.infra.account import aws
from gpufleet.infra.account.fleet import fleets_of, may_launch
from gpufleet.infra.account.run_folder import find_folder
from gpufleet.infra.account.wait import WaitLoop
from gpufleet.infra.bill import bake
from gpufleet.infra.bill.project import bill_of
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.commands import run as run_command
from gpufleet.infra.commands import stack, sweep
from gpufleet.infra.definition import bake as builders
from gpufleet.infra.definition import pin
from gpufleet.infra.definition.bake import Content
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.selected import BAKE
from gpufleet.infra.envelope import tell
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs import bakes, folders
from gpufleet.infra.inputs.bakes import Bake, BakedData
from gpufleet.infra.program import pulumi_cli
from gpufleet.infra.program.boot.user_data import DATA_DEVICE
from gpufleet.infra.text import wrap
from gpufleet.job.contract.attempt import AttemptRecord, record
from gpufleet.job.contract.bucket import ATTEMPTS
from gpufleet.job.text import stamp

SPARE = 1.1  # factor between the size of a data volume and that of its files, because the file system needs space too
LOOK_S = 15.0  # seconds between two looks at the builder
DAYS, MOST_DAYS = 30, 365


class BakeEngine(run_command.RunEngine, Protocol):
    """What this command needs from the Pulumi engine."""

    def up(self, approved: str, config: dict[str, str] | None = None) -> None: ...

    def forget(self) -> None: ...


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument(
        "--data", metavar="PLACE", help="make no AMI, but a snapshot of this folder or s3:// prefix, such as a model's"
    )
    parser.add_argument(
        "--days", type=_days, default=DAYS, metavar="N", help="delete it after so many days (default: %(default)s)"
    )
    parser.add_argument("--approve", metavar="HASH", help="of the bill that was shown; without it you are asked")
    parser.add_argument("--delete", action="store_true", help="delete it and its stack now")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the AMI or the snapshot exists, or, with --delete, no longer exists; 1 if the user did not approve
    the bill, or if something is left in the account.
    """
    root = project_root(Path.cwd())
    definition = stack.definition_of(args, staged=True)
    made: Made = MadeImage(definition=definition, root=root)
    if args.data:
        content = Content(args.data, "", 1) if args.delete else _content(args.data, definition, root)
        made = MadeSnapshot(definition=definition, root=root, content=content)
    name = builders.builder_name(definition.name, made.ending)
    engine = pulumi_cli.PulumiStack(root=root, name=name)
    path = builders.write_builder(definition, root, made.content)
    theirs = argparse.Namespace(stack=path.stem, approve=args.approve, begin=False)
    whole = run_command.WholeRun(
        args=theirs,
        definition=stack.definition_of(theirs),
        root=root,
        engine=engine,
        begins_with=f"gpufleet bake {made.argument}",
    )
    work = BakeWork(definition=definition, made=made, whole=whole, root=root, engine=engine, days=args.days)
    return work.delete() if args.delete else work.carry_out()


def _content(place: str, definition: StackDefinition, root: Path) -> Content:
    """The content of a snapshot of this place. Raises GpufleetError if the place holds nothing."""
    if place.startswith("s3://"):
        folders.listed(place, root, aws.client("s3", definition.fleet.region))
    listed = folders.content(place, root)
    if listed is None:
        raise GpufleetError(
            f"{place}: no folder with files that can be uploaded; allowed are a folder and s3://BUCKET/PREFIX"
        )
    return Content(place, listed.sha256, math.ceil(listed.bytes / 2**30 * SPARE) + 1)


class Made(Protocol):
    """The kind of thing that a bake makes: an AMI, or a snapshot of data."""

    @property
    def ending(self) -> str: ...  # the ending of its stack's name

    @property
    def content(self) -> Content | None: ...  # the content of the data volume; None for an AMI

    @property
    def argument(self) -> str: ...  # the argument with which a further `gpufleet bake` makes the same thing

    @property
    def used(self) -> str | None: ...  # its id, if the definition uses it

    def require(self) -> None: ...  # raises GpufleetError if it cannot be baked

    def words(self) -> str: ...  # what it is, and what its storage will cost

    # further config values for the stack's program
    def describe(self, builder: AttemptRecord, ec2: Any) -> dict[str, Any]: ...

    # writes its record, and its id into the definition
    def keep(self, outputs: Mapping[str, Any], usd: Decimal, ec2: Any) -> Bake | BakedData: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeImage:
    """An AMI of a builder's root disk."""

    definition: StackDefinition
    root: Path
    ending: str = builders.ENDING
    content: None = None

    @property
    def argument(self) -> str:
        return self.definition.argument

    @property
    def used(self) -> str | None:
        return self.definition.fleet.baked_ami

    def require(self) -> None:
        """Raises GpufleetError for an image without a digest, because only a digest says what is in the AMI, and for
        stages that need different AMIs.
        """
        parts = {part.stage: (*part.job.images, part.fleet.ami) for part in self.definition.parts}
        if len({frozenset(needed) for needed in parts.values()}) > 1:
            of_each = "; ".join(f"{stage} has {', '.join(needed)}" for stage, needed in parts.items())
            raise GpufleetError(
                f"{self.definition.source}: {of_each}. A bake is one AMI, from which the nodes of all stages start:"
                " write job.image, job.supervisor_image and fleet.ami at the top of the file, and in no stage"
            )
        if loose := [image for image in self.definition.job.images if "@sha256:" not in image]:
            pinned = f"`gpufleet doctor {self.definition.argument} --pin` writes digests"
            raise GpufleetError(f"{self.definition.source}: {', '.join(loose)} has no digest; {pinned}")

    def words(self) -> str:
        most = bake.most_usd_per_month(load_catalog(self.root), self.definition)
        size = f"{self.definition.storage.root.size_gib} GiB root disk"
        costs = f"Its snapshot costs at most {most:.2f} USD a month, that of a full {size}."
        return f"An AMI of {', '.join(self.definition.job.images)}. {costs}"

    def describe(self, builder: AttemptRecord, ec2: Any) -> dict[str, Any]:
        images, pulled = list(self.definition.job.images), str(builder.pulled_s or 0)
        return {"base_ami": self.definition.fleet.ami, "images": images, "image_pull_s": pulled}

    def keep(self, outputs: Mapping[str, Any], usd: Decimal, ec2: Any) -> Bake:
        described, ami, region = outputs[BAKE], str(outputs["ami"]), self.definition.fleet.region
        snapshot = ec2.describe_snapshots(SnapshotIds=[outputs["snapshot"]])["Snapshots"][0]
        stored = snapshot.get("FullSnapshotSizeInBytes")  # AWS does not give this size for every snapshot
        gb = Decimal(stored) / 10**9 if stored else Decimal(snapshot["VolumeSize"]) * bake.GB_PER_GIB
        pin.write_values(self.definition.source, {"fleet.baked_ami": ami})
        return Bake(
            ami=ami,
            region=region,
            base_ami=described["base_ami"],
            images=tuple(described["images"]),
            made=described["made"],
            until=described["until"],
            usd_per_month=round(bake.usd_per_month(load_catalog(self.root), region, gb), 4),
            builder_usd=usd,
            pulled_s=Decimal(described["image_pull_s"]),
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MadeSnapshot:
    """A snapshot of a builder's data volume, which holds a copy of a place."""

    definition: StackDefinition
    root: Path
    content: Content
    ending: str = builders.DATA_ENDING

    @property
    def argument(self) -> str:
        return f"{self.definition.argument} --data {shlex.quote(self.content.place)}"

    @property
    def used(self) -> str | None:
        return self.definition.storage.data.snapshot if self.definition.storage.data else None

    def require(self) -> None:
        """Does nothing, because the content of a snapshot is known by its hashes."""

    def words(self) -> str:
        costs = f"at most {self._usd_per_month():.2f} USD a month, that of a full volume"
        return f"A snapshot of {self.content.place} on a volume of {self.content.size_gib} GiB. It costs {costs}."

    def describe(self, builder: AttemptRecord, ec2: Any) -> dict[str, Any]:
        of_builder = {"attachment.instance-id": builder.instance, "attachment.device": DATA_DEVICE}
        filters = [{"Name": name, "Values": [value]} for name, value in of_builder.items()]
        (volume,) = ec2.describe_volumes(Filters=filters)["Volumes"]
        return {"volume": volume["VolumeId"], **self.content._asdict()}

    def keep(self, outputs: Mapping[str, Any], usd: Decimal, ec2: Any) -> BakedData:
        described, snapshot = outputs[BAKE], str(outputs["snapshot"])
        size = int(described["size_gib"])
        if self.used:
            pin.write_values(
                self.definition.source, {"storage.data.snapshot": snapshot, "storage.data.size_gib": str(size)}
            )
        else:
            entry = f"data: {{size_gib: {size}, snapshot: {snapshot}}}"
            print(f"Write `{entry}` under `storage:` of {self.definition.source.name}.")
        return BakedData(
            snapshot=snapshot,
            region=self.definition.fleet.region,
            place=described["place"],
            sha256=described["sha256"],
            size_gib=size,
            made=described["made"],
            until=described["until"],
            usd_per_month=round(self._usd_per_month(), 4),
            builder_usd=usd,
        )

    def _usd_per_month(self) -> Decimal:
        gb = self.content.size_gib * bake.GB_PER_GIB
        return bake.usd_per_month(load_catalog(self.root), self.definition.fleet.region, gb)


@dataclass(frozen=True, kw_only=True, slots=True)
class BakeWork:
    """Continues a bake from the point that it has reached to its end."""

    definition: StackDefinition
    made: Made
    whole: run_command.WholeRun  # the run of the builder
    root: Path
    engine: BakeEngine
    days: int
    sleep: Callable[[float], None] = time.sleep

    def carry_out(self) -> int:
        """Carries out the bake; returns the exit code of `run`. Raises GpufleetError if the builder ends before its
        disk is kept, or if the stack keeps a different AMI or snapshot than is needed now.
        """
        if BAKE not in self.engine.outputs():
            if not self.whole.has_begun():
                self.made.require()
                approved = self._approved()
                if not approved:
                    return 1
                self.engine.select()
                self.engine.up(approved, {BAKE: ""})
            builder = self._wait()
            if builder is None:
                return 1
            self.engine.up("", {BAKE: json.dumps(self._describe_kept(builder))})
        return self._keep()

    def delete(self) -> int:
        """Deletes the AMI or snapshot, and everything that belongs to the builder; returns the exit code of `run`.
        Raises GpufleetError while a fleet may still start nodes from it.
        """
        used, fleets = self.made.used, fleets_of(self._ec2, self.definition, every_run=True)
        going_on = [fleet["FleetId"] for fleet in fleets if may_launch(fleet, datetime.now(UTC))]
        if used and going_on:
            raise GpufleetError(f"{', '.join(going_on)} may still start nodes from {used}: end it first, or let it end")
        self.engine.select()
        outputs = self.engine.outputs()
        self.engine.destroy()
        self.engine.forget()
        bakes.path_of(str(outputs.get("ami") or outputs.get("snapshot")), self.root).unlink(missing_ok=True)
        return sweep.run(argparse.Namespace(stack=self.whole.args.stack, delete=False, yes=False))

    @property
    def _ec2(self) -> Any:
        return aws.client("ec2", self.definition.fleet.region)

    def _approved(self) -> str:
        """The hash of the builder's bill if the user has approved it; otherwise empty."""
        print(f"{self.made.words()} It is deleted after {self.days} days. Its builder:")
        return self.whole.approved()

    def _wait(self) -> AttemptRecord | None:
        """Waits until the builder has pulled the images. If AWS starts no node, prints the reason and returns None."""
        s3 = aws.client("s3", self.definition.fleet.region)
        watch = WaitLoop(definition=self.whole.definition, ec2=self._ec2, s3=s3, sleep=self.sleep)
        while (builder := self._builder(s3)) is None:
            if self.whole.is_over():
                name, again = self.whole.definition.name, f"gpufleet bake {self.made.argument}"
                raise GpufleetError(
                    f"{name} ended before its disk was kept: `gpufleet status {name}` says why. `{again} --delete`"
                    f" deletes what it left; then `{again}` begins anew."
                )
            if watch.until_node(math.inf):
                return None
            self.sleep(LOOK_S)
        return builder

    def _builder(self, s3: Any) -> AttemptRecord | None:
        """The node that has pulled the images and waits; None if there is no such node yet."""
        folder = find_folder(s3, self.whole.definition)
        if folder is None:
            return None
        records = (record(folder.read(entry.name), lambda _: None) for entry in folder.objects(ATTEMPTS))
        return next((node for node in records if node.started_s is not None and node.exit is None), None)

    def _describe_kept(self, builder: AttemptRecord) -> dict[str, Any]:
        """The config values from which the stack's program declares the AMI or snapshot, and which its outputs
        repeat.
        """
        now = datetime.now(UTC)
        until = stamp(now + timedelta(days=self.days))
        more = self.made.describe(builder, self._ec2)
        return {"builder": builder.instance, "made": stamp(now), "until": until, **more}

    def _keep(self) -> int:
        """Writes the record of the AMI or snapshot, and its id into the definition; returns the exit code."""
        catalog = load_catalog(self.root)
        usd = bill_of(self.whole.definition, self.root, catalog).usd.p50
        baked = self.made.keep(self.engine.outputs(), usd, self._ec2)
        path = bakes.write(baked, self.root)
        definition = stack.definition_of(argparse.Namespace(stack=self.definition.argument), staged=True)
        print(f"{path.relative_to(self.root)} and {definition.source.name} name {baked.id}. Commit both.")
        priced = [(part, bill_of(part, self.root, catalog)) for part in definition.parts]
        for sentence in bake.lines(priced, self.root):
            print("\n".join(wrap(sentence)))
        tell({"id": baked.id, "until": baked.until, "usd_per_month": f"{baked.usd_per_month:.2f}"})
        if wrong := list(dict.fromkeys(why for part in definition.parts for why in bakes.not_ready(part, self.root))):
            raise GpufleetError("\n".join(wrong))
        return 0


def _days(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= MOST_DAYS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed are 1 to {MOST_DAYS} days")
