"""`gpufleet canary`: makes the first runs on an account, for less than half a dollar, and writes a file about what AWS
did.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gpufleet.infra.account import actual_bill, aws, checks
from gpufleet.infra.canary import charges, notice, proof, stacks
from gpufleet.infra.canary.flight import Flight
from gpufleet.infra.catalog import check_region
from gpufleet.infra.definition.loader import project_root
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.infra.evidence import proofs


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--region", default="us-east-2", help="where it runs (default: %(default)s)")
    parser.add_argument("--no-notice", action="store_true", help="leave out FIS, whose notice costs 0.20 USD")
    parser.add_argument(
        "--no-gpu", action="store_true", help="use types without a GPU, and test nothing that needs one"
    )
    parser.add_argument("--embedded", action="store_true", help="run on the embedded AWS, without an account")
    parser.add_argument("--bill", action="store_true", help="a day later: add what AWS charged to the newest file")
    parser.add_argument("--yes", action="store_true", help="do not ask whether it may cost the stated amount")


def run(args: argparse.Namespace) -> int:
    """Returns 0 if no assumption was refuted and nothing is left in the account; otherwise 1."""
    root = project_root(Path.cwd())
    check_region(args.region)
    if args.bill:
        return _bill(args.region, root)
    if args.embedded:
        return _embedded(args, root)
    if os.environ.get("AWS_ENDPOINT_URL"):
        raise GpufleetError("AWS_ENDPOINT_URL is set: unset it for a canary on AWS, or write --embedded")
    try:
        from gpufleet.rehearsal import scratch
        from gpufleet.rehearsal.engine import Pulumi
    except ImportError as error:
        raise GpufleetError(f"the canary is not installed ({error}): pip install 'gpufleet[rehearsal]'") from error

    if shutil.which("pulumi") is None:
        raise GpufleetError("pulumi is not on PATH: the canary makes its stacks with it. Install Pulumi")

    def client(service: str) -> Any:
        return aws.client(service, args.region)

    if (who := checks.identity(client("sts"))).state == "problem":
        raise AwsRefused(who.found)
    by_notice = not args.no_notice and not (refused := notice.refused(client("fis")))
    project = root / ".gpufleet" / "canary" / args.region
    scale = stacks.AWS.without_gpu() if args.no_gpu else stacks.AWS
    with scratch.locked(project.parent):
        _of_before(project, client)
        if not (project / "stacks").is_dir():
            scratch.make(project, {})
        chosen = stacks.choose(
            project, f"c{uuid.uuid4().hex[:6]}", args.region, client, scale, notice=by_notice
        )  # fmt: skip
        print(f"A canary in {args.region}, {who.found}, on {' or '.join(chosen.types)}: at most {chosen.usd} USD.")
        for line in chosen.lines:
            print(f"  {line}")
        if not by_notice and not args.no_notice:
            print(f"  no notice by FIS: {refused}")
        if not args.yes and not _agreed():
            raise GpufleetError("you did not agree, so nothing was made. `--yes` begins without asking")
        state = project / "state"
        state.mkdir(exist_ok=True)
        settings = _of_user(state)

        def engine(name: str) -> AbstractContextManager[Any]:
            return _opened(Pulumi(project, settings, name, lambda line: None))

        flight = Flight(
            project=project,
            scale=scale,
            client=client,
            engine=engine,
            environment={**os.environ},
            by_notice=by_notice,
            say=print,
        )
        return _flown(flight, args.region, root / proofs.FOLDER, embedded=False)


def _bill(region: str, root: Path) -> int:
    """Prints the newest canary's receipts beside AWS's charges, and adds these charges to its file."""
    last = proofs.newest(root, region)
    if last is None:
        raise GpufleetError(f"no canary has run in {region} yet: run `gpufleet canary --region {region}` first")
    receipts = charges.kept_receipts(last, root)
    ce = aws.client("ce", actual_bill.REGION)
    actual_bill.require_tags(ce)
    for line in charges.judged(last, receipts, ce, datetime.now(UTC).date()):
        print(line)
    return _written(last.tree, last.path.parent)


def _of_user(state: Path) -> Mapping[str, str]:
    """The user's environment variables for AWS, and variables that give the canary a Pulumi state of its own."""
    own = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    backend = {"PULUMI_BACKEND_URL": f"{state.resolve().as_uri()}?metadata=skip"}
    home = {"PULUMI_HOME": os.environ["PULUMI_HOME"]} if "PULUMI_HOME" in os.environ else {}
    return {**own, **backend, **home, "PULUMI_CONFIG_PASSPHRASE": "canary"}  # this state contains no secrets


@contextmanager
def _opened(engine: Any) -> Iterator[Any]:
    yield engine


def _of_before(project: Path, client: Any) -> None:
    """Removes what an earlier, killed canary has left in the account and in its Pulumi state."""
    if not (project / "stacks").is_dir():
        return
    flight = Flight(
        project=project, scale=stacks.AWS, client=client, engine=_opened, environment={}, by_notice=True, say=print
    )
    flight.leave_nothing()
    if flight.facts.seen["left.at_end"] != [0]:
        raise AwsRefused("an earlier canary left resources that could not be removed: remove those listed above first")
    shutil.rmtree(project)


def _agreed() -> bool:
    return sys.stdin.isatty() and input("Go on? [y/N] ").strip().lower() in ("y", "yes")


def _embedded(args: argparse.Namespace, root: Path) -> int:
    """Runs the canary on the embedded AWS. Its file says so, and is in the folder of rehearsals."""
    from gpufleet.rehearsal import environment

    environment.forget_account()
    try:
        from gpufleet.rehearsal import canary
        from gpufleet.rehearsal.cloud import Cloud
    except ImportError as error:
        raise GpufleetError(f"the embedded AWS is missing ({error}): pip install 'gpufleet[rehearsal]'") from error
    with tempfile.TemporaryDirectory(prefix="gpufleet-canary-") as folder:
        place = Path(folder)
        with Cloud(place / "cloud", region=args.region, habits=canary.HABITS) as cloud:
            scale = stacks.EMBEDDED.without_gpu() if args.no_gpu else stacks.EMBEDDED
            flight = canary.flight(place / "project", cloud, say=print, by_notice=not args.no_notice, scale=scale)
            nodes = canary.nodes(cloud, place / "nodes")
            try:
                return _flown(flight, args.region, root / "rehearsals" / "canary", embedded=True)
            finally:
                nodes.close()


def _flown(flight: Flight, region: str, folder: Path, *, embedded: bool) -> int:
    """Runs the canary, writes the file, and prints the refuted assumptions."""
    why = flight.fly()
    beside = proofs.newest(folder.parents[1]) if embedded else None
    made = proof.make(flight, region, datetime.now(UTC), why=why, beside=beside, embedded=embedded)
    if not embedded:
        charges.keep(flight.receipts, proof.path(made, folder), folder.parent)
    return max(int(bool(why)), _written(made, folder))


def _written(made: dict[str, Any], folder: Path) -> int:
    """Writes the file and prints the refuted assumptions; returns 1 if there is one."""
    path = proof.write(made, folder)
    for line in proof.lines(made):
        print(line)
    print(f"{proof.summary(made)} {path}")
    return int(any(assumption["state"] == "refuted" for assumption in made["assumptions"]))
