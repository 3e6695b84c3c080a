"""Shows how old and how complete a catalog's prices are, per region and item. The caller passes today's date."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import date
from decimal import ROUND_HALF_UP, Decimal
from operator import itemgetter
from typing import Any

from gpufleet.infra.catalog import Catalog, Instance, Price, SpotPrice
from gpufleet.infra.show.sheet import Column, Sheet, plain
from gpufleet.infra.text import table, wrap

SCHEMA = 1
PLACES = Decimal("0.0001")  # spot prices have fewer decimals: 27.433 is the on-demand price of 27.43298
SPREAD = 3  # if the most expensive zone costs this many times as much as the cheapest, a line names them
ABREAST = 2  # zones of a type per line, because some regions have six
# service prices of at most this many regions are shown side by side; if there are more regions, only the number of
# known prices is shown
BESIDE = 4


def to_json(catalog: Catalog, regions: Sequence[str], today: date) -> dict[str, Any]:
    """Keys as documented in docs/prices.md. Money is a decimal string, and dates are in ISO format."""
    return {
        "schema": SCHEMA,
        "catalog": {
            "name": catalog.name,
            "as_of": catalog.as_of.isoformat(),
            "age_days": (today - catalog.as_of).days,
        },
        "regions": [_region(catalog, region, today) for region in regions],
        "items": [
            {"item": item, "region": region, "usd": f"{price.amount:f}"}
            | plain(price, "unit", "as_of", "source", "status")
            for (item, region), price in sorted(catalog.services.items())
            if region in regions
        ],
    }


def render(catalog: Catalog, regions: Sequence[str], today: date) -> str:
    """The content of to_json as text. A single region is shown with a line for each instance type. Several regions are
    shown as a table with the number of known prices and their dates.
    """
    document = to_json(catalog, regions, today)
    days = document["catalog"]["age_days"]
    age = f"{days} days old" if days >= 0 else f"{-days} days in the future: it cannot have been read"
    lines = [
        f"Prices: {catalog.name}; the newest is of {catalog.as_of}, {age}. * = inferred, not read in any source.",
        "",
    ]
    lines += _types(catalog, regions[0], today) if len(regions) == 1 else _counts(document["regions"])
    if len(regions) <= BESIDE:
        lines += ["", *_items(catalog, regions)]
    lines.append("")
    for region in document["regions"]:
        name, known = region["region"], _launchable(catalog, region["region"], today)
        if lacks := catalog.missing(name):
            brings = f"`gpufleet prices refresh --region {name}`"
            lines += wrap(f"{name}: no bill until there is a price of {', '.join(lacks)}; {brings} reads it")
        for kind in ("on_demand", "spot"):
            if missing := region[kind]["missing"]:
                lines += wrap(f"{name}: no {kind.replace('_', '-')} price of {', '.join(_families(missing, known))}")
        for sentence in (*region["changes"], *region["doubts"]):
            lines += wrap(f"{name}: {sentence}")
    if len(regions) > BESIDE:
        lines += ["", *wrap("`gpufleet prices --region REGION` shows each type, and the price of each service.")]
    return "\n".join(lines).rstrip() + "\n"


def doubts(instance: Instance, on_demand: Price | None, spot: Sequence[SpotPrice]) -> Iterator[str]:
    """Yields a sentence for each oddity in the prices of one type in one region."""
    if not spot:
        return
    low, high = spot[0], spot[-1]
    if on_demand is None:
        yield f"{instance.type} has a spot price and no on-demand price to compare it with"
    elif high.price.amount >= (listed := on_demand.amount.quantize(PLACES, ROUND_HALF_UP)):
        zones = ", ".join(zone.zone for zone in spot if zone.price.amount >= listed)
        word = "more than" if high.price.amount > listed else "as much as"
        yield f"{instance.type}: spot costs {word} on demand ({on_demand.amount:f}) in {zones}"
    if high.price.amount >= SPREAD * low.price.amount:
        yield (
            f"{instance.type}: zones differ by {high.price.amount / low.price.amount:.1f}x, {low.price.amount:f}"
            f" ({low.zone}) to {high.price.amount:f} ({high.zone})"
        )


def _region(catalog: Catalog, region: str, today: date) -> dict[str, Any]:
    known = _launchable(catalog, region, today)
    on_demand = {type_: price for type_ in known if (price := catalog.on_demand_prices.get((type_, region)))}
    spot = {type_: zones for type_ in known if (zones := catalog.spot_prices.get((type_, region)))}
    every_zone = [zone.price for zones in spot.values() for zone in zones]
    items = list(dict.fromkeys(item for item, _ in catalog.services))
    return {
        "region": region,
        "types": len(known),
        "on_demand": {
            "priced": len(on_demand),
            "missing": [type_ for type_ in known if type_ not in on_demand],
            **_dates(on_demand.values()),
        },
        "spot": {
            "priced": len(spot),
            "missing": [type_ for type_ in known if type_ not in spot],
            "zones": len({zone.zone for zones in spot.values() for zone in zones}),
            **_dates(every_zone),
        },
        "services": {
            "priced": sum((item, region) in catalog.services for item in items),
            "missing": [item for item in items if (item, region) not in catalog.services],
        },
        "changes": [
            f"{type_} costs {price.amount:f} on demand from {price.valid_from} on"
            for type_ in known
            for price in catalog.dated_prices.get((type_, region), ())
            if price.valid_from and price.valid_from > today
        ],
        "doubts": [
            doubt
            for type_, instance in known.items()
            for doubt in doubts(instance, on_demand.get(type_), spot.get(type_, ()))
        ],
    }


def _launchable(catalog: Catalog, region: str, today: date) -> dict[str, Instance]:
    """Types that may be launched in the region today: EC2 has not retired them, and as far as is known offers them in
    this region.
    """
    return {
        type_: instance
        for type_, instance in catalog.instances.items()
        if (instance.left_ec2 is None or instance.left_ec2 >= today)
        and (instance.regions is None or region in instance.regions or (type_, region) in catalog.on_demand_prices)
    }


def _families(types: Sequence[str], known: Iterable[str]) -> Iterator[str]:
    """Yields `types`. If all `known` types of a family are among them, yields only the family, such as `g7.*`."""
    whole: dict[str, list[str]] = {}
    for type_ in known:
        whole.setdefault(type_.partition(".")[0], []).append(type_)
    families = {family for family, of_it in whole.items() if len(of_it) > 1 and set(of_it) <= set(types)}
    shown = (f"{family}.*" if (family := type_.partition(".")[0]) in families else type_ for type_ in types)
    yield from dict.fromkeys(shown)


def _dates(prices: Iterable[Price]) -> dict[str, Any]:
    listed = list(prices)
    days = sorted(price.as_of.isoformat() for price in listed)
    return {
        "inferred": sum(price.status == "inferred" for price in listed),
        "oldest": days[0] if days else None,
        "newest": days[-1] if days else None,
    }


def _counts(regions: list[dict[str, Any]]) -> list[str]:
    def count(head: str, of: str, key: str) -> Column:
        return Column(head, of=lambda region: region[of][key])

    def span(of: str) -> Column:
        return Column("of", of=lambda region: _span(region[of]))

    columns = (
        Column("region", of=itemgetter("region")),
        Column("types", of=itemgetter("types")),
        count("on demand", "on_demand", "priced"),
        count("inferred", "on_demand", "inferred"),
        span("on_demand"),
        count("spot", "spot", "priced"),
        count("zones", "spot", "zones"),
        span("spot"),
        count("items", "services", "priced"),
    )
    return list(Sheet.build(columns, regions).text())


def _span(dated: dict[str, Any]) -> str:
    if not dated["oldest"]:
        return "-"
    return dated["oldest"] if dated["oldest"] == dated["newest"] else f"{dated['oldest']} to {dated['newest']}"


def _types(catalog: Catalog, region: str, today: date) -> list[str]:
    rows = []
    for type_, instance in _launchable(catalog, region, today).items():
        price, spot = catalog.on_demand_prices.get((type_, region)), catalog.spot_prices.get((type_, region), ())
        zones = [f"{zone.zone} {zone.price.amount:f}" for zone in spot]
        starts = range(0, len(zones), ABREAST)
        first, *more = [", ".join(zones[at : at + ABREAST]) for at in starts] or ["-"]
        if week := [amount for zone in spot for amount in (zone.low, zone.high) if amount is not None]:
            more.append(f"7 days: {min(week):f} to {max(week):f}")
        newest = max(zone.price.as_of for zone in spot).isoformat() if spot else "-"
        read = price.as_of.isoformat() if price else "-"
        rows.append((type_, instance.gpus, _marked(price), read, first, newest))
        rows += [("", "", "", "", line, "") for line in more]
    return list(table(("type", "GPUs", "on demand", "of", "spot by zone", "of"), rows))


def _items(catalog: Catalog, regions: Sequence[str]) -> list[str]:
    rows = []
    for item in dict.fromkeys(item for item, _ in catalog.services):
        cells = [catalog.services.get((item, region)) for region in regions]
        priced = [cell for cell in cells if cell]
        unit = priced[0].unit if priced else "-"
        rows.append((item, unit, *map(_marked, cells), _span(_dates(priced))))
    return list(table(("item", "USD per", *regions, "of"), rows))


def _marked(price: Price | None) -> str:
    """The price in USD, with `*` if no source states it."""
    return "-" if price is None else f"{price.amount:f}{'*' if price.status == 'inferred' else ''}"
