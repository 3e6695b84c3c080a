"""`gpufleet prices`: how old and complete the known prices are; `gpufleet prices refresh` reads them anew from AWS."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infra.catalog import SHIPPED, Catalog, files, load_catalog, project_prices
from infra.catalog.regions import known_regions
from infra.errors import AwsRefused, GpufleetError
from infra.prices import coverage
from infra.prices.price_list import API_REGION

if TYPE_CHECKING:
    from infra.prices.refresh import Refreshed

_AWS = (".amazonaws.com", ".api.aws")


def arguments(parser: argparse.ArgumentParser) -> None:
    """Command-line arguments."""
    parser.add_argument(
        "action", nargs="?", choices=["refresh"], help="refresh: read prices from AWS into a new dated folder"
    )
    parser.add_argument("--region", action="append", metavar="REGION", help="only this region; may be repeated")
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="with refresh: where the dated folder goes (default: prices/)"
    )
    parser.add_argument("--json", action="store_true", help="without refresh: the same for programs")


def run(args: argparse.Namespace) -> int:
    """Shows, or refreshes. A refresh gives 1 when a question to AWS failed, and raises AwsRefused when all did."""
    catalog = load_catalog()
    known = known_regions()
    regions = list(dict.fromkeys(args.region or (known if args.action == "refresh" else catalog.regions())))
    if unknown := [region for region in regions if region not in known]:
        raise GpufleetError(f"--region {unknown[0]}: the catalog covers {', '.join(known)}")
    now = datetime.now(UTC)
    if args.action == "refresh":
        if args.json:
            raise GpufleetError("--json shows prices; refresh writes them: run `gpufleet prices --json` afterwards")
        pricing, ec2_in = _client("pricing", API_REGION), functools.partial(_client, "ec2")
        return refresh(catalog, regions, args.to or project_prices(Path.cwd()), pricing=pricing, ec2_in=ec2_in, now=now)
    if args.to:
        raise GpufleetError("--to goes with refresh: gpufleet prices refresh --to FOLDER")
    if args.json:
        sys.stdout.write(json.dumps(coverage.to_json(catalog, regions, now.date()), indent=2) + "\n")
    else:
        sys.stdout.write(coverage.render(catalog, regions, now.date()))
    return 0


def refresh(catalog: Catalog, regions: list[str], to: Path, *, pricing: Any, ec2_in: Any, now: datetime) -> int:
    """Asks, writes the folder, and says what was not read, what moved, what is gone."""
    from infra.prices.refresh import refresh as read_anew  # here: showing prices needs no boto3

    types = [name for name, each in catalog.instances.items() if each.left_ec2 is None or each.left_ec2 >= now.date()]
    old = files.read(SHIPPED)
    for known in dict.fromkeys((project_prices(Path.cwd()), to)):  # what bills stand on now, wherever the new ones go
        if found := files.folders(known):
            old = files.newer(old, files.read(found[-1]))
    near = next(path for path in (to.absolute(), *to.absolute().parents) if path.exists())
    if not near.is_dir() or not os.access(near, os.W_OK):  # before hundreds of questions
        raise GpufleetError(
            f"{to} is no folder that prices can go into: {near} is no folder, or must not be written to"
        )
    print(f"Asking AWS for {len(types)} GPU types and the service prices in {', '.join(regions)} ...")
    done = read_anew(old, types, regions, pricing=pricing, ec2_in=ec2_in, now=now)
    if not done.read:
        why = "; ".join(dict.fromkeys(kept.why for kept in done.kept))
        raise AwsRefused(
            f"no price could be read, nothing was written: {why}. It takes pricing:GetProducts,"
            " ec2:DescribeSpotPriceHistory and ec2:DescribeAvailabilityZones"
        )
    folder = files.write(done.prices, to, now.date())
    _say(done, folder)
    if (newest := files.folders(to)[-1]) != folder:
        print(f"\nBills go on standing on {newest}, whose name is of a later day: delete that folder.")
    return 1 if done.failed else 0


def _say(done: Refreshed, folder: Path) -> None:
    print(f"{done.read} prices read, written to {folder}. Commit it, so that everyone's bills stand on it.")
    if done.kept:
        print(f"\nNot read, {len(done.kept)}; each keeps its old figure with its old date and source:")
    for kept in done.kept:
        old = f"; the old one is of {kept.as_of}" if kept.as_of else "; there is no old one"
        print(f"  - {kept.what}: {kept.why}{old}")
    if done.moved:
        print("\nMoved by more than 3x; look before you trust:")
    for moved in done.moved:
        print(f"  - {moved.what}: {moved.old.amount:f} ({moved.old.as_of}) to {moved.new:f}")
    if done.gone:
        print(f"\nWithout a spot price now, left out: {', '.join(done.gone)}")


def _client(service: str, region: str) -> Any:
    """Adaptive: hundreds of questions in a row meet the API's rate, and botocore then slows down by itself."""
    import boto3
    from botocore.config import Config
    from botocore.exceptions import NoCredentialsError

    retries: Any = {"mode": "adaptive", "total_max_attempts": 8}
    config = Config(connect_timeout=5, read_timeout=60, retries=retries, user_agent_extra="gpufleet")
    session = boto3.session.Session()
    made = session.client(service, region_name=region, config=config)
    host = urlsplit(made.meta.endpoint_url).hostname or ""
    if not host.endswith(_AWS):
        raise GpufleetError(
            f"prices come from AWS alone, and {service} would be asked at {host}, whose prices may be made up:"
            " unset AWS_ENDPOINT_URL"
        )
    if session.get_credentials() is None:  # said as the other commands say it, and before hundreds of questions
        raise NoCredentialsError
    return made
