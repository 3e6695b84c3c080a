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
    """A Capacity Block for ML that the user has bought or may buy. gpufleet itself buys none."""

    # the id (cr-...); None if the block is not bought, so that the run can only be priced
    reservation: str | None = None
    start: datetime
    end: datetime
    fee_usd: Decimal  # the block's fee, which is paid at once; if several runs share the block, the part of this run

    @property
    def last(self) -> datetime:
        """The time until which a node may train."""
        return self.end - BLOCK_ENDING

    @property
    def hours(self) -> float:
        """Hours for which a node can run in the block."""
        return (self.last - self.start) / timedelta(hours=1)
