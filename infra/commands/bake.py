"""`gpufleet bake STACK`: makes an AMI that contains the stack's images, in a Pulumi stack of its own, STACK-bake.

A builder (a node without a GPU) pulls the images and waits. Then the stack is declared anew: an AMI of the builder's
disk takes the builder's place. The AMI's id goes into the definition as fleet.baked_ami, and its record into bakes/.
Like `gpufleet run`, the command keeps no state: stopped anywhere and started again, it goes on.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable
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
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.selected import BAKE
from gpufleet.infra.envelope import tell
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs import bakes
from gpufleet.infra.program import pulumi_cli
from gpufleet.infra.text import wrap
from gpufleet.job.contract.attempt import AttemptRecord, record
from gpufleet.job.contract.bucket import ATTEMPTS
from gpufleet.job.text import stamp

LOOK_S = 15.0  # seconds between two looks at the builder
DAYS, MOST_DAYS = 30, 365


class BakeEngine(run_command.RunEngine, Protocol):
    """What this command needs from the Pulumi engine."""

    def up(self, approved: str, config: dict[str, str] | None = None) -> None: ...

    def forget(self) -> None: ...


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument(
        "--days", type=_days, default=DAYS, metavar="N", help="delete the AMI after so many days (default: %(default)s)"
    )
    parser.add_argument("--approve", metavar="HASH", help="the hash of the bill that was shown (else you are asked)")
    parser.add_argument("--delete", action="store_true", help="delete the AMI and its stack now")


def run(args: argparse.Namespace) -> int:
    """0 if the AMI exists, or was deleted; 1 if it was not approved, or if something is left."""
    root = project_root(Path.cwd())
    definition = stack.definition_of(args)
    name = builders.builder_name(definition.name)
    engine = pulumi_cli.PulumiStack(root=root, name=name)
    path = builders.write_builder(definition, root)
    theirs = argparse.Namespace(stack=path.stem, approve=args.approve, begin=False)
    whole = run_command.WholeRun(
        args=theirs,
        definition=stack.definition_of(theirs),
        root=root,
        engine=engine,
        begins_with=f"gpufleet bake {definition.argument}",
    )
    work = BakeWork(definition=definition, whole=whole, root=root, engine=engine, days=args.days)
    return work.delete() if args.delete else work.carry_out()


@dataclass(frozen=True, kw_only=True, slots=True)
class BakeWork:
    """Carries a bake on, from wherever it is, to its end."""

    definition: StackDefinition
    whole: run_command.WholeRun  # the run of the builder
    root: Path
    engine: BakeEngine
    days: int
    sleep: Callable[[float], None] = time.sleep

    def carry_out(self) -> int:
        """Makes the AMI; returns the exit code of `run`. Raises GpufleetError if the builder ends before its disk is
        kept, or if the stack keeps an AMI of other images.
        """
        if "ami" not in self.engine.outputs():
            if not self.whole.has_begun():
                self._require_pins()
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
        """Deletes the AMI and everything of the builder; returns the exit code of `run`. Raises GpufleetError if a
        fleet may still start nodes from the AMI.
        """
        ami, fleets = self.definition.fleet.baked_ami, fleets_of(self._ec2, self.definition, every_run=True)
        going_on = [fleet["FleetId"] for fleet in fleets if may_launch(fleet, datetime.now(UTC))]
        if ami and going_on:
            raise GpufleetError(f"{', '.join(going_on)} may still start nodes from {ami}: end it first, or let it end")
        self.engine.select()
        ami_of_stack = str(self.engine.outputs().get("ami") or "")
        self.engine.destroy()
        self.engine.forget()
        bakes.path_of(ami_of_stack, self.root).unlink(missing_ok=True)
        return sweep.run(argparse.Namespace(stack=self.whole.args.stack, delete=False, yes=False))

    @property
    def _ec2(self) -> Any:
        return aws.client("ec2", self.definition.fleet.region)

    def _require_pins(self) -> None:
        """Raises GpufleetError if an image has no digest: only a digest says what is in the AMI."""
        if loose := [image for image in self.definition.job.images if "@sha256:" not in image]:
            pinned = f"`gpufleet doctor {self.definition.argument} --pin` writes digests"
            raise GpufleetError(f"{self.definition.source}: {', '.join(loose)} has no digest; {pinned}")

    def _approved(self) -> str:
        """The hash of the builder's bill; empty if it is not approved."""
        most = bake.most_usd_per_month(load_catalog(self.root), self.definition)
        size = f"{self.definition.storage.root.size_gib} GiB root disk"
        print(f"An AMI of {', '.join(self.definition.job.images)}, for {self.days} days, by this builder:")
        print(f"Its snapshot costs at most {most:.2f} USD a month, that of a full {size}.")
        return self.whole.approved()

    def _wait(self) -> AttemptRecord | None:
        """Waits until the builder has pulled the images. If no node comes, prints the reason and returns None."""
        s3 = aws.client("s3", self.definition.fleet.region)
        watch = WaitLoop(definition=self.whole.definition, ec2=self._ec2, s3=s3, sleep=self.sleep)
        while (builder := self._builder(s3)) is None:
            if self.whole.is_over():
                name, again = self.whole.definition.name, f"gpufleet bake {self.definition.argument}"
                raise GpufleetError(
                    f"{name} ended before its disk was kept: `gpufleet status {name}` says why. `{again} --delete`"
                    f" deletes what it left; then `{again}` begins anew."
                )
            if watch.until_node(math.inf):
                return None
            self.sleep(LOOK_S)
        return builder

    def _builder(self, s3: Any) -> AttemptRecord | None:
        """The node that has pulled the images and waits; None as long as there is none."""
        folder = find_folder(s3, self.whole.definition)
        if folder is None:
            return None
        records = (record(folder.read(entry.name), lambda _: None) for entry in folder.objects(ATTEMPTS))
        return next((node for node in records if node.started_s is not None and node.exit is None), None)

    def _describe_kept(self, builder: AttemptRecord) -> dict[str, Any]:
        """What the stack's program and its outputs say about the AMI."""
        now = datetime.now(UTC)
        return {
            "builder": builder.instance,
            "base_ami": self.definition.fleet.ami,
            "images": list(self.definition.job.images),
            "made": stamp(now),
            "until": stamp(now + timedelta(days=self.days)),
            "image_pull_s": str(builder.pulled_s or 0),
        }

    def _keep(self) -> int:
        """Writes the AMI's record, and its id into the definition; returns the exit code."""
        outputs, region, catalog = self.engine.outputs(), self.definition.fleet.region, load_catalog(self.root)
        described, ami = outputs[BAKE], str(outputs["ami"])
        snapshot = self._ec2.describe_snapshots(SnapshotIds=[outputs["snapshot"]])["Snapshots"][0]
        stored = snapshot.get("FullSnapshotSizeInBytes")  # AWS does not give it for every snapshot
        gb = Decimal(stored) / 10**9 if stored else Decimal(snapshot["VolumeSize"]) * bake.GB_PER_GIB
        made = bakes.Bake(
            ami=ami,
            region=region,
            base_ami=described["base_ami"],
            images=tuple(described["images"]),
            made=described["made"],
            until=described["until"],
            usd_per_month=round(bake.usd_per_month(catalog, region, gb), 4),
            builder_usd=bill_of(self.whole.definition, self.root, catalog).usd.p50,
            pulled_s=Decimal(described["image_pull_s"]),
        )
        path = bakes.write(made, self.root)
        pin.write_values(self.definition.source, {"fleet.baked_ami": ami})
        definition = stack.definition_of(argparse.Namespace(stack=self.definition.argument))
        print(f"{path.relative_to(self.root)} and fleet.baked_ami of {definition.source.name} name {ami}. Commit both.")
        for sentence in bake.lines(definition, bill_of(definition, self.root, catalog), self.root):
            print("\n".join(wrap(sentence)))
        tell({"ami": ami, "until": made.until, "usd_per_month": f"{made.usd_per_month:.2f}"})
        if wrong := list(bakes.not_ready(definition, self.root)):
            raise GpufleetError("\n".join(wrong))
        return 0


def _days(text: str) -> int:
    if text.isdecimal() and 1 <= int(text) <= MOST_DAYS:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text}: allowed are 1 to {MOST_DAYS} days")
