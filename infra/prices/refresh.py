"""Makes a new dated folder of prices: those that bills use now, with each price read from AWS again. A price that AWS
does not return keeps its value, date and source, and is reported.
"""

from __future__ import annotations

import os
import textwrap
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from botocore import exceptions

from gpufleet.infra.catalog import SHIPPED, Catalog, files, project_prices
from gpufleet.infra.catalog.files import Price, Prices, SpotPrice, cheapest_first
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.infra.prices import price_list, spot_history
from gpufleet.infra.prices.price_list import NoFigure

JUMP = 3  # a price is shown if it changed by more than this factor
PATIENCE = 5  # after this many failed requests in a row, each retried by botocore, no further requests are made
_HOPELESS = (
    "AccessDenied", "AccessDeniedException", "UnauthorizedOperation", "AuthFailure", "InvalidClientTokenId",
    "UnrecognizedClientException", "SignatureDoesNotMatch", "ExpiredToken", "ExpiredTokenException", "RequestExpired",
    "OptInRequired",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class KeptFigure:
    """A price that could not be read again. `as_of`: the date of the old price; None if there is no old price."""

    what: str
    why: str
    as_of: date | None
    failed: bool  # False if AWS answered that it has no such price


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """A price that changed by more than the factor JUMP, up or down."""

    what: str
    old: Price
    new: Decimal


@dataclass(slots=True)
class Refreshed:
    """The result of one refresh."""

    prices: Prices
    read: int = 0
    kept: list[KeptFigure] = field(default_factory=list)
    moved: list[Moved] = field(default_factory=list)
    gone: list[str] = field(default_factory=list)  # zones that no longer have a spot price

    @property
    def failed(self) -> list[KeptFigure]:
        return [figure for figure in self.kept if figure.failed]


def refresh(
    old: Prices,
    types: Iterable[str],
    regions: Iterable[str],
    *,
    pricing: Any,
    ec2_in: Callable[[str], Any],
    now: datetime,
) -> Refreshed:
    """Reads the prices of `types` and of every service item in `regions`. `old` is not changed. `pricing`: a client of
    the Price List. `ec2_in`: makes a client of EC2 in a region. `now` must have a time zone.
    """
    prices = old.copy()
    done = Refreshed(prices)
    types, day = sorted(types), now.date()
    in_force = files.in_force(old.on_demand, old.dated, day)
    given_up, failures = "", 0
    for region in regions:
        for name, ask, table, unit in [
            *((type_, price_list.on_demand, prices.on_demand, "node-hour") for type_ in types),
            *((name, price_list.service, prices.services, item.unit) for name, item in price_list.ITEMS.items()),
        ]:
            key = (name, region)
            before = in_force.get(key) if table is prices.on_demand else table.get(key)
            figure = f"on-demand price of {name} in {region}" if table is prices.on_demand else f"{name} in {region}"
            try:
                if given_up:
                    raise _GivenUp(given_up)
                quote = ask(pricing, name, region, day)
            except (NoFigure, _GivenUp, exceptions.ClientError, exceptions.BotoCoreError) as error:
                failures = 0 if isinstance(error, NoFigure) else failures + 1
                given_up = _reason(error) if _hopeless(error) or failures >= PATIENCE else given_up
                _keep(done, figure, error, before)
                continue
            failures = 0
            table[key], *later = (
                Price(amount=usd, unit=unit, source=quote.source, as_of=day, status="verified", valid_from=begin)
                for begin, usd in ((None, quote.amount), *quote.later)
            )
            if table is prices.on_demand:
                prices.dated.pop(key, None)
                prices.dated.update({key: tuple(later)} if later else {})
            _note(done, figure, before, quote.amount)
        _spot(done, old, types, region, ec2_in, now)
    return done


def _spot(
    done: Refreshed, old: Prices, types: list[str], region: str, ec2_in: Callable[[str], Any], now: datetime
) -> None:
    """Asks once per region, so that the request succeeds or fails for all types together."""
    try:
        history = spot_history.read(ec2_in(region), types, now)
    except (exceptions.ClientError, exceptions.BotoCoreError) as error:
        known = [zone.price.as_of for (_, where), zones in old.spot.items() if where == region for zone in zones]
        done.kept.append(
            KeptFigure(
                what=f"all spot prices in {region}", why=_reason(error), as_of=min(known, default=None), failed=True
            )
        )
        return
    for type_ in types:
        zones = [zone for zone in history.prices if zone.type == type_]
        before = {zone.zone: zone for zone in old.spot.get((type_, region), ())}
        rest = [zone for name, zone in before.items() if name not in {priced.zone for priced in zones}]
        unnamed = history.unnamed.get(type_, ())
        for name in unnamed:  # a zone without an id is one of `rest` or a new one, and the answer does not show which
            why, oldest = "AWS gives no id for this zone", min((zone.price.as_of for zone in rest), default=None)
            done.kept.append(KeptFigure(what=f"spot price of {type_} in {name}", why=why, as_of=oldest, failed=True))
        if not zones:
            if before and not unnamed:
                oldest = min(zone.price.as_of for zone in before.values())
                why = f"no spot price in {spot_history.DAYS} days"
                figure = f"spot prices of {type_} in {region}"
                done.kept.append(KeptFigure(what=figure, why=why, as_of=oldest, failed=False))
            continue
        read_anew = [_spot_price(zone, now.date()) for zone in zones]
        done.prices.spot[type_, region] = cheapest_first([*read_anew, *rest] if unnamed else read_anew)
        for zone in zones:
            known_price = before[zone.zone].price if zone.zone in before else None
            _note(done, f"spot price of {type_} in {region} {zone.zone}", known_price, zone.median)
        if not unnamed:
            done.gone += [f"{type_} in {region} {zone}" for zone in sorted(missing.zone for missing in rest)]


def _spot_price(zone: spot_history.ZonePrice, day: date) -> SpotPrice:
    price = Price(amount=zone.median, unit="node-hour", source=spot_history.SOURCE, as_of=day, status="verified")
    return SpotPrice(zone=zone.zone, price=price, low=zone.low, high=zone.high)


class _GivenUp(Exception):
    """The request was not made, because it would fail as earlier requests did."""


def _keep(done: Refreshed, figure: str, error: Exception, before: Price | None) -> None:
    empty = isinstance(error, NoFigure) and error.empty
    if empty and before is None:
        return  # the type is not sold in this region, and never was
    done.kept.append(
        KeptFigure(what=figure, why=_reason(error), as_of=before.as_of if before else None, failed=not empty)
    )


def _note(done: Refreshed, figure: str, before: Price | None, new: Decimal) -> None:
    done.read += 1
    if before and before.amount and (new > JUMP * before.amount or before.amount > JUMP * new):
        done.moved.append(Moved(what=figure, old=before, new=new))


def _hopeless(error: Exception) -> bool:
    """Whether further requests of this kind would fail too, because rights, credentials or a connection to AWS are
    missing.
    """
    if isinstance(error, exceptions.ClientError):
        return error.response.get("Error", {}).get("Code") in _HOPELESS
    return isinstance(error, exceptions.BotoCoreError) and not isinstance(error, exceptions.HTTPClientError)


def _reason(error: Exception) -> str:
    """The reason of a failure, on one line."""
    if isinstance(error, exceptions.ClientError):
        fields = error.response.get("Error", {})
        text = f"{error.operation_name}: {fields.get('Code', '')} {fields.get('Message', '')}"
    else:
        text = str(error)
    return textwrap.shorten(text, 200, placeholder=" ...")


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
    """Asks AWS, writes a dated folder in `to`, and prints the prices that were not read, that changed much, or that no
    longer exist. Returns 1 if a request failed. Raises AwsRefused if all requests failed.
    """
    types = [
        name
        for name, instance in catalog.instances.items()
        if instance.left_ec2 is None or instance.left_ec2 >= now.date()
    ]
    old = files.read(SHIPPED)
    # The prices that bills use now, even if the new prices are written to another folder.
    for known in dict.fromkeys((project_prices(Path.cwd()), to)):
        if folders := files.folders(known):
            old = files.newer(old, files.read(folders[-1]))
    near = next(path for path in (to.absolute(), *to.absolute().parents) if path.exists())
    if not near.is_dir() or not os.access(near, os.W_OK):  # checked before hundreds of requests
        raise GpufleetError(
            f"prices cannot be written to {to}: {near} is not a writable folder; give another folder with --to"
        )
    say(f"Asking AWS for {len(types)} types and the service prices in {', '.join(regions)} ...")
    done = refresh(old, types, regions, pricing=pricing, ec2_in=ec2_in, now=now)
    if not done.read:
        why = "; ".join(dict.fromkeys(figure.why for figure in done.kept))
        raise AwsRefused(
            f"no price could be read, and nothing was written: {why}. This needs the rights pricing:GetProducts,"
            " ec2:DescribeSpotPriceHistory and ec2:DescribeAvailabilityZones"
        )
    folder = files.write(done.prices, to, now.date())
    for line in _report(done, folder):
        say(line)
    if (newest := files.folders(to)[-1]) != folder:
        say(f"\nBills still use {newest}, whose name has a later date: delete that folder.")
    return 1 if done.failed else 0


def _report(done: Refreshed, folder: Path) -> Iterator[str]:
    yield f"{done.read} prices read, written to {folder}. Commit it, so that everyone's bills use it."
    if done.kept:
        yield f"\nNot read, {len(done.kept)}; each keeps its old price with its old date and source:"
    for figure in done.kept:
        old = f"; the old one is of {figure.as_of}" if figure.as_of else "; there is no old one"
        yield f"  - {figure.what}: {figure.why}{old}"
    if done.moved:
        yield "\nChanged by more than a factor of 3; check these before you trust them:"
    for moved in done.moved:
        yield f"  - {moved.what}: {moved.old.amount:f} ({moved.old.as_of}) to {moved.new:f}"
    if done.gone:
        yield f"\nOmitted, because they have no spot price now: {', '.join(done.gone)}"
