"""A new dated folder of prices, read from AWS over those that bills stand on now."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from infra.catalog import SHIPPED, Catalog, files, project_prices
from infra.errors import AwsRefused, GpufleetError
from infra.prices.refresh import Refreshed, refresh


def renew(
    catalog: Catalog,
    regions: list[str],
    to: Path,
    *,
    pricing: Any,
    ec2_in: Callable[[str], Any],
    now: datetime,
    say: Callable[[str], None] = print,
) -> int:
    """Asks, writes a dated folder in `to`, and says what was not read, what moved, what is gone. 1 when a question
    failed. Raises AwsRefused when all did.
    """
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
    say(f"Asking AWS for {len(types)} GPU types and the service prices in {', '.join(regions)} ...")
    done = refresh(old, types, regions, pricing=pricing, ec2_in=ec2_in, now=now)
    if not done.read:
        why = "; ".join(dict.fromkeys(kept.why for kept in done.kept))
        raise AwsRefused(
            f"no price could be read, nothing was written: {why}. It takes pricing:GetProducts,"
            " ec2:DescribeSpotPriceHistory and ec2:DescribeAvailabilityZones"
        )
    folder = files.write(done.prices, to, now.date())
    for line in _report(done, folder):
        say(line)
    if (newest := files.folders(to)[-1]) != folder:
        say(f"\nBills go on standing on {newest}, whose name is of a later day: delete that folder.")
    return 1 if done.failed else 0


def _report(done: Refreshed, folder: Path) -> Iterator[str]:
    yield f"{done.read} prices read, written to {folder}. Commit it, so that everyone's bills stand on it."
    if done.kept:
        yield f"\nNot read, {len(done.kept)}; each keeps its old figure with its old date and source:"
    for kept in done.kept:
        old = f"; the old one is of {kept.as_of}" if kept.as_of else "; there is no old one"
        yield f"  - {kept.what}: {kept.why}{old}"
    if done.moved:
        yield "\nMoved by more than 3x; look before you trust:"
    for moved in done.moved:
        yield f"  - {moved.what}: {moved.old.amount:f} ({moved.old.as_of}) to {moved.new:f}"
    if done.gone:
        yield f"\nWithout a spot price now, left out: {', '.join(done.gone)}"
