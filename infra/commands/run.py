"""`gpufleet run NAME`: carries out a whole run: bill, approval, up, wait, results, destroy, sweep. The command keeps no
state. The command sees how far the run is from the stack's output, its fleet, the run's folder in the bucket, and the
results on this machine. So the same command continues wherever an earlier one was interrupted.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from gpufleet.infra.account import aws, stages
from gpufleet.infra.account.fleet import GONE, fleets_of, is_over, nodes_of, wants
from gpufleet.infra.account.results import cut_off
from gpufleet.infra.account.run_folder import RunFolder, find_folder
from gpufleet.infra.account.stages import StageSeen
from gpufleet.infra.account.status import headline
from gpufleet.infra.account.wait import WaitLoop
from gpufleet.infra.commands import results, stack, sweep
from gpufleet.infra.definition.loader import is_path, project_root
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.envelope import tell
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.readiness import not_ready
from gpufleet.infra.program import plan, pulumi_cli
from gpufleet.infra.program.approval import approval
from gpufleet.infra.program.run_guard import Previous
from gpufleet.infra.review import policy
from gpufleet.job.contract.workdir import RECEIPT

LOOK_S = 60.0  # seconds between two looks at a run


class RunEngine(Protocol):
    """What this command needs from the Pulumi engine."""

    def select(self) -> None: ...

    def outputs(self) -> dict[str, Any]: ...

    def up(self, approved: str) -> None: ...

    def destroy(self) -> None: ...


def arguments(parser: argparse.ArgumentParser) -> None:
    stack.argument(parser)
    parser.add_argument("--approve", metavar="HASH", help="the hash of the bill that was shown (else you are asked)")
    parser.add_argument("--begin", action="store_true", help="end as soon as `up` is done, and do nothing later")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if the run is over and nothing unwanted is left; 1 if the user did not approve the run, or if it left
    no results, or left something in the account.
    """
    return opened(args).carry_out()


def opened(args: argparse.Namespace) -> WholeRun:
    """The run of STACK. Makes and selects its Pulumi stack first."""
    root = project_root(Path.cwd())
    name = Path(args.stack).stem if is_path(args.stack) else args.stack
    definition = stack.definition_of(args, staged=True)  # read first, so that a mistyped name makes no Pulumi stack
    engine = pulumi_cli.PulumiStack(root=root, name=name)
    engine.select()
    return WholeRun(args=args, definition=definition, root=root, engine=engine)


@dataclass(frozen=True, kw_only=True, slots=True)
class WholeRun:
    """Continues a run from the point that it has reached to its end."""

    args: argparse.Namespace
    definition: StackDefinition
    root: Path
    engine: RunEngine
    begins_with: str = ""  # the command that begins the run; empty for `gpufleet run STACK`
    sleep: Callable[[float], None] = time.sleep

    def carry_out(self) -> int:
        """Carries the run out; returns the exit code of `run`."""
        if not self.is_over():
            if not self.has_begun():
                approved = self.approved()
                if not approved:
                    return 1
                self.engine.up(approved)
            self._tell("begun")
            if self.args.begin:
                print(f"{self.definition.name}, run {self.definition.run.id}, has begun.")
                return 0
            if code := self._wait():
                return code
        self._tell("over")
        if self.args.begin:
            print(f"{self.definition.name}, run {self.definition.run.id}, is over. Omit --begin to get its results.")
            return 0
        return self.finish()

    def finish(self) -> int:
        """Downloads the results of a run that is over, destroys and sweeps; returns the exit code of `run`."""
        if self.folder() is not None:
            asked = argparse.Namespace(stack=self.args.stack, run_id=None, to=None, light=False, exports=False)
            asked.quiet = False
            if code := results.run(asked):
                again = f"then `pulumi destroy` and `gpufleet sweep {self.definition.argument}`"
                print(f"Nothing was destroyed, so that you can look at what it left; {again}.")
                self._tell("without results")
                return code
        self._require_own_stack()
        self.engine.destroy()
        code = sweep.run(argparse.Namespace(stack=self.args.stack, delete=False, yes=False))
        self._tell("something left" if code else "swept")
        return code

    def _tell(self, state: str, **more: Any) -> None:
        """Adds the state of the run to the answer of --json."""
        tell({"stack": self.definition.name, "run": self.definition.run.id, "state": state, **more})

    def _client(self, service: str) -> Any:
        return aws.client(service, self.definition.fleet.region)

    def folder(self) -> RunFolder | None:
        """The run's folder in the bucket; None if this owner has none."""
        folder = find_folder(self._client("s3"), self.definition)
        return folder if folder and folder.is_of(self.definition.run.owner) else None

    def is_over(self) -> bool:
        """Whether the run is over: by its bucket, or, if that no longer exists, by its receipt on this machine."""
        folder = self.folder()
        if folder is None:
            receipt = self.root / "results" / self.definition.name / self.definition.run.id / RECEIPT
            return receipt.is_file() and not self._fleets()
        present = self._present()
        if present.done is not None:
            return True
        written = present.folder.objects() if present.folder else []
        ended = cut_off(present.stage, folder.owner, written, self._client("ec2"), datetime.now(UTC))
        return bool(ended and ended.reason) or self._came_to_nothing(present)

    def has_begun(self) -> bool:
        """Whether an earlier `up` made the run's fleet, even if that `up` was interrupted later."""
        return self._of_stack() == self.definition.run.id or bool(self._fleets())

    def _present(self) -> StageSeen:
        """The stage that the run is in; after its end, the last one that it reached."""
        return stages.begun(self.definition, self._client("s3"))[-1]

    def _of_stack(self) -> str | None:
        """The id of the run for which `up` was last completed; None after a destroy."""
        return (self.engine.outputs().get("run") or {}).get("id")

    def _came_to_nothing(self, seen: StageSeen) -> bool:
        """Whether `up` is completed, but the stage has neither a node nor a fleet that will launch one."""
        fleets = self._fleets(seen.stage)
        called_off = seen.is_called_off and not any(map(wants, fleets))
        if self._of_stack() != self.definition.run.id or (fleets and not called_off):
            return False
        return all(node["State"]["Name"] in GONE for node in nodes_of(self._client("ec2"), seen.stage))

    def _fleets(self, *parts: StackDefinition) -> list[dict[str, Any]]:
        """The fleets that may launch nodes for these parts of the run; without an argument, for all parts."""
        now, owner, ec2 = datetime.now(UTC), self.definition.run.owner, self._client("ec2")
        fleets = [fleet for part in parts or self.definition.parts for fleet in fleets_of(ec2, part)]
        return [fleet for fleet in fleets if not is_over(fleet, now) and aws.owner_of(fleet) in ("", owner)]

    def plan(self) -> plan.Plan:
        """The plan of what `up` would begin now. Raises GpufleetError if `up` would refuse it, or if it breaks
        policy.yaml.
        """
        staged, now = bool(self.definition.stages), datetime.now(UTC)
        definition = stack.definition_of(self.args, past_deadline=False, staged=staged)
        if missing := dict.fromkeys(line for part in definition.parts for line in not_ready(part, self.root)):
            raise GpufleetError("\n".join([f"{definition.source}: not ready", *(f"  - {line}" for line in missing)]))
        made = plan.make(
            self.root,
            definition.name if definition.source.parent == self.root / "stacks" else str(definition.source),
            now=now,
            previous=Previous(outputs={}),
            preview=True,
            scenario=definition.scenario,
        )
        rules = policy.find_policy(self.root) or policy.Policy()
        parts = [(part.definition, part.bill, part.fallbacks) for part in made.parts]
        if broken := policy.broken_by_any(rules, parts, made.staged.usd.p90 if made.staged else None):
            raise GpufleetError(
                "\n".join(f"breaks {breach.rule} of policy.yaml: {breach.message}" for breach in broken)
            )
        return made

    def approved(self) -> str:
        """The hash of the bill as it is now; empty if the user does not approve it. Shows the bill unless --approve has
        this hash. Raises GpufleetError like plan().
        """
        made, now = self.plan(), datetime.now(UTC)
        digits = approval(made)
        if self.args.approve == digits:
            return digits
        print("\n".join(made.shown(now.date())))
        for warning in made.warnings:
            print(f"gpufleet: {warning}", file=sys.stderr)
        usd = {name: f"{amount:.2f}" for name, amount in asdict(made.usd).items()}
        self._tell("not approved", usd=usd | {"stops_before": f"{self.definition.limits.max_usd:.2f}"})
        if self.args.approve:  # the right hash is not printed, so that nobody gets it by a wrong guess
            print(f"{self.args.approve} is not the hash of this bill, which has not been approved.")
        else:
            begins = self.begins_with or f"gpufleet run {self.definition.argument}"
            print(f"Hash of this bill: {digits}. It begins with `{begins} --approve {digits}`.")
        return digits if agreed() else ""

    def _wait(self) -> int:
        """Waits until the run is over; if it cannot go on by itself, prints why and returns 1. The run does not depend
        on this: if the command is stopped, the run goes on.
        """
        ec2, s3, scheduler = (self._client(service) for service in ("ec2", "s3", "scheduler"))
        printed, watches = "", dict[str, WaitLoop]()
        while not self.is_over():
            stage = self._present().stage
            of_stage = WaitLoop(definition=stage, ec2=ec2, s3=s3, sleep=self.sleep)
            # each of them remembers what it has printed, because it prints each thing only once
            watch = watches.setdefault(stage.run.id, of_stage)
            if code := watch.until_node(math.inf):
                return 0 if self.is_over() else code
            line = headline(list(stages.report(self.definition, ec2, s3, datetime.now(UTC), scheduler)))
            if line != printed:
                print(line)
            printed = line
            self.sleep(LOOK_S)
        return 0

    def _require_own_stack(self) -> None:
        """Raises GpufleetError if another run of the stack exists, because a destroy would end that run too."""
        began = self._of_stack()
        if began and began != self.definition.run.id:
            raise GpufleetError(
                f"run {self.definition.run.id} is over, and the Pulumi stack has run {began}, which a destroy would"
                f" end. Nothing was destroyed. Put run.id: {began} into {self.definition.source} to go on with it."
            )


def agreed() -> bool:
    """Whether the person at the terminal says yes; False if there is no terminal."""
    try:
        return input("Begin it now? Type yes: ").strip() == "yes"
    except EOFError:
        return False
