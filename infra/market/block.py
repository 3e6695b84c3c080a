"""A Capacity Block for ML: nodes of one type in one zone for a fixed time. The block is paid at once, and AWS does not
interrupt its nodes before its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import date, timedelta
from decimal import Decimal
from typing import Any, ClassVar

from gpufleet.infra.catalog import Catalog, Price
from gpufleet.infra.market.market import Beside, FleetKeys, Market, Offer, ProblemList
from gpufleet.infra.market.reservation import END, START
from gpufleet.job.text import stamp

LONGEST = timedelta(days=182)  # EC2 User Guide, Capacity Blocks for ML, read 2026-11-26
_ENDED = "EC2 begins to end its nodes 30 minutes before its end."


class InBlock(Market):
    """An `instant` fleet, because no other kind launches into a Capacity Block. Such a fleet asks for nodes once,
    replaces none, and has no expiry. A schedule (program/resources/stop.py) ends it half an hour before the block's
    end, when EC2 begins to end the nodes.
    """

    name = metered_as = "block"
    asks_for, by_the_hour = "capacity-block", "on-demand"
    place, counts = "in a block", "{number} node{s} of a capacity block"
    bought = "in its capacity block"
    has_block = True
    is_sold_to_all = replaces = moves_elsewhere = False
    # no service-linked role is needed, because the user who runs `up` launches the nodes
    roles: ClassVar[Mapping[str, str]] = {}
    never = ("with_notice", "without_notice")  # no node replaces one that is lost in a block
    keep_ends = END
    # A deleted fleet may stay in `deleted_terminating` for hours after its nodes have ended. So the provider waits
    # until its timeout, and only the next destroy finds that the fleet is deleted
    # (docs/decisions/2026-11-26-capacity-block.md).
    delete_timeout = "10m"

    def check(self, findings: ProblemList, fleet: FleetKeys, beside: Beside) -> None:
        block = self.block
        if block is None:
            findings.add("fleet.block", "a section with start, end and fee_usd, and reservation once it is bought")
            return
        for key, names in (("zones", fleet.zones), ("instance_types", fleet.instance_types)):
            if len(names) > 1:
                findings.add(f"fleet.{key}", "the block's one, where fleet.capacity is block", value=", ".join(names))
        if findings.bad & {START, END}:
            return
        if block.last <= block.start:
            findings.add(END, f"more than 30 minutes after its start, {stamp(block.start)}", _ENDED)
        elif block.end - block.start > LONGEST:
            findings.add(END, f"at most {LONGEST.days} days after its start: AWS sells no longer blocks")
        elif block.last <= beside.now and not beside.past_end:
            hint = f"{_ENDED} Another block wants a new run.id."
            findings.add(END, f"more than 30 minutes after now, {stamp(beside.now)}", hint)

    def not_ready(self) -> Iterator[str]:
        if self.block and self.block.reservation is None:
            yield "fleet.block has no reservation: buy the block from AWS and write its id, cr-..., as `reservation`."

    def require(self, catalog: Catalog, type_: str, fleet: FleetKeys) -> None:
        """Never raises PriceMissing, because the definition file has the block's fee."""

    def offer(self, catalog: Catalog, type_: str, fleet: FleetKeys, ceiling: Decimal | None) -> Offer:
        return Offer(price=_price(Decimal(0), "node-hour", "paid by the block's fee", catalog.as_of))

    def metered(self, offers: Mapping[str, Offer]) -> tuple[Price | None, Price | None]:
        return offers[self.name].price, None

    def fees(self, day: date) -> tuple[tuple[str, str, Price], ...]:
        """The fee for the nodes, which does not depend on how long they run. This fee is in no price list."""
        return (("capacity block", "capacity_block", _price(self._fee, "block", "fleet.block.fee_usd", day)),)

    @property
    def _fee(self) -> Decimal:
        assert self.block is not None  # `check` refuses a definition without this section
        return self.block.fee_usd

    def fleet_arguments(self, valid_until: str) -> dict[str, Any]:
        return {"type": "instant"}

    def template_arguments(self) -> dict[str, Any]:
        target = {"capacity_reservation_id": self.block and self.block.reservation}
        return {
            "instance_market_options": {"market_type": self.asks_for},
            "capacity_reservation_specification": {"capacity_reservation_target": target},
        }

    def at_price(self, usd: Decimal) -> str:
        return "paid by its fee"

    def price_age(self, days: int) -> str:
        return "the block's fee is the file's"

    def uninterrupted(self, hours: Decimal) -> str:
        paid = f"Its fee, {self._fee:.2f} USD, is paid whatever the run does"
        return f"Interruptions: none in a block. {paid}, which takes {hours:.2f} h of it (p50)."


def _price(amount: Decimal, unit: str, source: str, day: date) -> Price:
    return Price(amount=amount, unit=unit, source=source, as_of=day, status="verified")
