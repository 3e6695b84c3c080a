"""The section `fleet.block` of a definition."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal

START, END = "fleet.block.start", "fleet.block.end"
# EC2 begins to end a block's nodes this long before the block's end (EC2 User Guide, work with Capacity Blocks, read
# 2026-11-26).
BLOCK_ENDING = timedelta(minutes=30)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityBlock:
    """A Capacity Block for ML that its user has bought, or may buy: gpufleet buys none."""

    reservation: str | None = None  # cr-...; None if it is not bought, so that the run can only be priced
    start: datetime
    end: datetime
    fee_usd: Decimal  # paid at once; if several runs share the block, the part of this run

    @property
    def last(self) -> datetime:
        """The time until which a node may train."""
        return self.end - BLOCK_ENDING

    @property
    def hours(self) -> float:
        """Hours for which a node can run in the block."""
        return (self.last - self.start) / timedelta(hours=1)
