"""`gpufleet prices` shows how old and complete the known prices are. `gpufleet prices refresh` reads them again from
AWS.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.catalog import load_catalog, project_prices
from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.prices import coverage
from gpufleet.infra.prices.price_list import API_REGION


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "action", nargs="?", choices=["refresh"], help="refresh: read prices from AWS into a new dated folder"
    )
    parser.add_argument("--region", action="append", metavar="REGION", help="only this region; may be repeated")
    parser.add_argument(
        "--to", type=Path, metavar="FOLDER", help="with refresh: make the dated folder here (default: prices/)"
    )
    parser.add_argument("--json", action="store_true", help="without refresh: the same for programs")


def run(args: argparse.Namespace) -> int:
    """Shows or refreshes prices. A refresh returns 1 if a request to AWS failed, and raises AwsRefused if all
    failed.
    """
    catalog = load_catalog()
    known = known_regions()
    regions = list(dict.fromkeys(args.region or (known if args.action == "refresh" else catalog.regions())))
    if unknown := [region for region in regions if region not in known]:
        raise GpufleetError(f"--region {unknown[0]}: the catalog covers {', '.join(known)}")
    now = datetime.now(UTC)
    if args.action == "refresh":
        if args.json:
            raise GpufleetError("--json shows prices; refresh writes them: run `gpufleet prices --json` afterwards")
        from gpufleet.infra.prices import aws, refresh

        pricing, ec2_in = aws.client("pricing", API_REGION), functools.partial(aws.client, "ec2")
        to = args.to or project_prices(Path.cwd())
        return refresh.renew(catalog, regions, to, pricing=pricing, ec2_in=ec2_in, now=now)
    if args.to:
        raise GpufleetError("--to goes with refresh: gpufleet prices refresh --to FOLDER")
    if args.json:
        sys.stdout.write(json.dumps(coverage.to_json(catalog, regions, now.date()), indent=2) + "\n")
    else:
        sys.stdout.write(coverage.render(catalog, regions, now.date()))
    return 0
