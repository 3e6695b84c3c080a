"""Prices as CSV files: on_demand.csv, spot.csv and services.csv of one folder, each row with its source and date.

One such folder is shipped beside this module, and `gpufleet prices refresh` writes others as `prices/<date>/` of a
project. Each is complete: prices that were not read again keep their date and source.

A row of on_demand.csv may be a price change that AWS has announced: its last column, `valid_from`, is the day from
which it applies. A file without such rows may lack the column.
"""

from __future__ import annotations

import csv
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Literal

from gpufleet.infra.catalog.regions import known_regions
from gpufleet.infra.errors import GpufleetError

Status = Literal["verified", "inferred"]

# 2026-11-21; the second folder of that day is 2026-11-21-2
NAME = re.compile(r"(\d{4}-\d{2}-\d{2})(?:-([2-9]|[1-9]\d+))?")
_FROM = "valid_from"
_HEADS = {
    "on_demand.csv": "type,regions,usd_per_hour,source,as_of,status",
    "spot.csv": "type,region,zone,usd_per_hour,low_usd,high_usd,source,as_of,status",
    "services.csv": "item,regions,usd,unit,source,as_of,status,note",
}


_ZONE = re.compile(r"az\d{1,2}")
_MOST_USD = 100_000  # the highest price of a unit that is accepted; real prices are far below it


@dataclass(frozen=True, kw_only=True, slots=True)
class Price:
    """USD for one unit."""

    amount: Decimal
    unit: str
    source: str
    as_of: date
    status: Status
    valid_from: date | None = None  # the day from which it applies; None if it applies now


@dataclass(frozen=True, kw_only=True, slots=True)
class SpotPrice:
    """A spot price in one zone, which is named by its id within the region (az1). If the price comes from a price
    history, `price` is the median over 7 days, and `low` and `high` are the extremes.
    """

    zone: str
    price: Price
    low: Decimal | None = None
    high: Decimal | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Prices:
    """All prices, by (type or item, region). The spot prices of a type in a region are in order, the cheapest zone
    first.
    """

    on_demand: dict[tuple[str, str], Price] = field(default_factory=dict)
    spot: dict[tuple[str, str], tuple[SpotPrice, ...]] = field(default_factory=dict)
    services: dict[tuple[str, str], Price] = field(default_factory=dict)
    # the conditions under which a service's price applies
    notes: dict[tuple[str, str], str] = field(default_factory=dict)
    # announced on-demand prices, with the day from which each applies
    dated: dict[tuple[str, str], tuple[Price, ...]] = field(default_factory=dict)

    @property
    def newest(self) -> date:
        """The newest date of any price; the first day of the calendar if there is no price."""
        return max((price.as_of for price in self.all()), default=date.min)

    def copy(self) -> Prices:
        """A copy that the caller may change."""
        return Prices(
            on_demand=dict(self.on_demand),
            spot=dict(self.spot),
            services=dict(self.services),
            notes=dict(self.notes),
            dated=dict(self.dated),
        )

    def all(self) -> Iterator[Price]:
        yield from self.on_demand.values()
        yield from (price for prices in self.dated.values() for price in prices)
        yield from (zone.price for zones in self.spot.values() for zone in zones)
        yield from self.services.values()


def read(folder: Path) -> Prices:
    """The prices of one folder. Raises GpufleetError, with file and line, if a price is invalid."""
    prices = Prices()
    zones: dict[tuple[str, str], list[SpotPrice]] = {}
    regions = known_regions()

    def checked_region(name: str) -> str:
        if name not in regions:
            raise ValueError(f"region {name!r} is none of {', '.join(regions)}")
        return name

    def on_demand(row: dict[str, str]) -> None:
        price = _price(row, row["usd_per_hour"], "node-hour")
        for region in row["regions"].split():
            key = (row["type"], checked_region(region))
            if price.valid_from is None:
                _first(prices.on_demand, key)
                prices.on_demand[key] = price
                continue
            before = {_begin(other): other for other in prices.dated.get(key, ())}
            if _begin(price) in before:
                raise ValueError(f"{key[0]} in {key[1]} is there twice from {price.valid_from} on")
            prices.dated[key] = tuple(sorted((*before.values(), price), key=_begin))

    def spot(row: dict[str, str]) -> None:
        zone, price = row["zone"], _price(row, row["usd_per_hour"], "node-hour")
        low = _usd(row["low_usd"], above_0=True) if row["low_usd"] else None
        high = _usd(row["high_usd"], above_0=True) if row["high_usd"] else None
        of_type = zones.setdefault((row["type"], checked_region(row["region"])), [])
        if not _ZONE.fullmatch(zone):
            raise ValueError(f"zone {zone!r} is not like az1")
        for other in of_type:
            if other.zone == zone:
                raise ValueError(f"{row['type']} in {row['region']} {zone} is there twice")
        if (low and low > price.amount) or (high and high < price.amount):
            raise ValueError(f"{price.amount} USD is not within {low} to {high}")
        of_type.append(SpotPrice(zone=zone, price=price, low=low, high=high))

    def service(row: dict[str, str]) -> None:
        price = _price(row, row["usd"], row["unit"])
        for region in row["regions"].split():
            _first(prices.services, (row["item"], checked_region(region)))
            prices.services[row["item"], region] = price
            prices.notes[row["item"], region] = row["note"]

    _each(folder / "on_demand.csv", on_demand)
    _each(folder / "spot.csv", spot)
    _each(folder / "services.csv", service)
    prices.spot.update({key: cheapest_first(spots) for key, spots in zones.items()})
    return prices


def in_force(
    undated: Mapping[tuple[str, str], Price], dated: Mapping[tuple[str, str], tuple[Price, ...]], day: date
) -> dict[tuple[str, str], Price]:
    """For each key, the price that applies on `day`: the one with the latest `valid_from` that is not after
    that day.
    """
    begun = {key: [price for price in prices if _begin(price) <= day] for key, prices in dated.items()}
    return {**undated, **{key: prices[-1] for key, prices in begun.items() if prices}}


def cheapest_first(zones: Iterable[SpotPrice]) -> tuple[SpotPrice, ...]:
    return tuple(sorted(zones, key=lambda spot: (spot.price.amount, spot.zone)))


def newer(base: Prices, over: Prices) -> Prices:
    """For each key, the price with the newer date, or the price in `over` if the dates are equal. Prices that only one
    of them has are kept. Raises GpufleetError if the units of an item differ, because a bill computes with the units of
    `base`.
    """

    def spot_date(zones: tuple[SpotPrice, ...]) -> date:
        return max(zone.price.as_of for zone in zones)

    def read_on(prices: Prices, key: tuple[str, str]) -> date:
        of_key = (*prices.dated.get(key, ()), *((prices.on_demand[key],) if key in prices.on_demand else ()))
        return max((price.as_of for price in of_key), default=date.min)

    merged = base.copy()
    for key in {**over.on_demand, **over.dated}:
        if read_on(over, key) >= read_on(base, key):  # `over` replaces a price together with its announced changes
            merged.dated.pop(key, None)
            merged.on_demand.update({key: over.on_demand[key]} if key in over.on_demand else {})
            merged.dated.update({key: over.dated[key]} if key in over.dated else {})
    for key, zones in over.spot.items():
        if key not in base.spot or spot_date(zones) >= spot_date(base.spot[key]):
            merged.spot[key] = zones
    for key, price in over.services.items():
        if key in base.services and price.unit != base.services[key].unit:
            counted = f"{key[0]} in {key[1]}: its price is for one {price.unit!r}"
            raise GpufleetError(f"services.csv: {counted}; allowed: {base.services[key].unit}, in which bills count it")
        if key not in base.services or price.as_of >= base.services[key].as_of:
            merged.services[key], merged.notes[key] = price, over.notes.get(key, "")
    return merged


def folders(parent: Path) -> list[Path]:
    """The price folders in `parent`, oldest first, without empty folders and folders with other names."""
    named = [(match, path) for path in _listed(parent) if (match := NAME.fullmatch(path.name)) and _listed(path)]
    return [path for match, path in sorted(named, key=lambda pair: (pair[0][1], int(pair[0][2] or 1)))]


def write(prices: Prices, parent: Path, day: date) -> Path:
    """Writes a new folder in `parent`, named after `day`. The folder appears complete and readable, or not at all, and
    never replaces another folder. Raises GpufleetError if `read` would refuse the prices.
    """
    parent.mkdir(parents=True, exist_ok=True)
    building = parent / f".{day.isoformat()}.{os.getpid()}"
    building.mkdir()
    try:
        _write(building / "on_demand.csv", _on_demand_rows(prices), (_FROM,) if prices.dated else ())
        _write(building / "spot.csv", _spot_rows(prices))
        _write(
            building / "services.csv",
            (
                [*key, price.amount, price.unit, price.source, price.as_of, price.status, prices.notes.get(key, "")]
                for key, price in sorted(prices.services.items())
            ),
        )
        read(building)  # raises for prices that no bill could read
        number = 1
        while True:
            final = parent / (day.isoformat() if number == 1 else f"{day.isoformat()}-{number}")
            number += 1
            if not final.exists():
                building.rename(final)
                return final
    finally:
        shutil.rmtree(building, ignore_errors=True)


def _on_demand_rows(prices: Prices) -> Iterator[list[object]]:
    for key in sorted({**prices.on_demand, **prices.dated}):
        for price in (*((prices.on_demand[key],) if key in prices.on_demand else ()), *prices.dated.get(key, ())):
            yield [*key, *_cells(price), *((price.valid_from,) if prices.dated else ())]


def _spot_rows(prices: Prices) -> Iterator[list[object]]:
    for key, zones in sorted(prices.spot.items()):
        for zone in sorted(zones, key=lambda spot: spot.zone):
            amount, *rest = _cells(zone.price)
            yield [*key, zone.zone, amount, zone.low, zone.high, *rest]


def _cells(price: Price) -> list[object]:
    return [price.amount, price.source, price.as_of, price.status]


def _write(path: Path, rows: Iterable[list[object]], more: Sequence[str] = ()) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        file.write(",".join((_HEADS[path.name], *more)) + "\n")
        for row in rows:
            csv.writer(file, lineterminator="\n").writerow(
                "" if cell is None else f"{cell:f}" if isinstance(cell, Decimal) else cell for cell in row
            )
        file.flush()
        os.fsync(file.fileno())


def _each(path: Path, take: Callable[[dict[str, str]], None]) -> None:
    try:
        # spreadsheets write a byte order mark at the beginning
        lines = path.read_text(encoding="utf-8-sig").splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise GpufleetError(f"{path} cannot be read ({error}); a price folder has {', '.join(_HEADS)}") from None
    reader, head = csv.reader(lines), _HEADS[path.name]
    columns = next(reader, [])
    if ",".join(columns) not in (head, f"{head},{_FROM}" if path.name == "on_demand.csv" else head):
        raise GpufleetError(f"{path}, line 1: the columns of a price file are {head}")
    for cells in reader:  # not DictReader, which takes more time than everything else that is done with the rows
        if not cells:
            continue
        try:
            if len(cells) != len(columns):
                if len(cells) > len(columns):
                    raise ValueError("more cells than columns")
                cells += [""] * (len(columns) - len(cells))
            take(dict(zip(columns, cells, strict=True)))
        except ValueError as error:
            raise GpufleetError(f"{path}, line {reader.line_num}: not a price ({error})") from None


def _price(row: dict[str, str], amount: str, unit: str) -> Price:
    usd = _usd(amount, above_0=unit == "node-hour")  # a service may cost nothing, but a node never does
    begins = row.get(_FROM)
    return Price(
        amount=usd,
        unit=unit,
        source=row["source"],
        as_of=_date("as_of", row["as_of"]),
        status=_status(row["status"]),
        valid_from=_date(_FROM, begins) if begins else None,
    )


def _status(text: str) -> Status:
    if text == "verified":
        return "verified"
    if text == "inferred":
        return "inferred"
    raise ValueError(f"status {text!r} is neither verified nor inferred")


def _date(column: str, text: str) -> date:
    try:
        return date.fromisoformat(text)
    except ValueError:
        allowed = "allowed: year-month-day, such as 2026-11-21"
        raise ValueError(f"{column} {text!r} is no date; {allowed}") from None


def _begin(price: Price) -> date:
    return price.valid_from or date.min


def _usd(text: str, *, above_0: bool) -> Decimal:
    try:
        usd = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"{text!r} is no number of USD; {_allowed(above_0)}") from None
    if not usd.is_finite() or usd < 0 or (above_0 and not usd) or usd > _MOST_USD:
        raise ValueError(f"{text} USD; {_allowed(above_0)}")
    return usd


def _allowed(above_0: bool) -> str:
    return f"allowed: {'above 0' if above_0 else '0 or more'}, up to {_MOST_USD:,}"


def _first(known: dict[tuple[str, str], Price], key: tuple[str, str]) -> None:
    if not key[0]:
        raise ValueError("it names nothing")
    if key in known:
        raise ValueError(f"{key[0]} in {key[1]} is there twice")


def _listed(parent: Path) -> list[Path]:
    return list(parent.iterdir()) if parent.is_dir() else []
