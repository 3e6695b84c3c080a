"""The dollar meter: what the run has cost so far, exactly, and when it must stop.

Compute is billed per second at the hour's price, 60 s at least for each start; disks and the address by the second; the
bill's amounts for S3, logs and transfer once. The price of an instance-hour is the spot price at its start, as AWS
tells it; where it does not, that of the hour before, else the ceiling of a spot price, and it is said for how long. A
free first hour is not credited: it is known only afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpufleet.job.contract import aws
from gpufleet.job.contract import done as ends
from gpufleet.job.contract.receipt import CENT_100
from gpufleet.job.contract.run import Rates, RunLimits
from gpufleet.job.supervisor.store import ec2

MINIMUM_S = Decimal(aws.MINIMUM_S)
HOUR_S = 3600
ASK_AGAIN_S = 60.0

SpotPrice = Callable[[float], Decimal | None]  # epoch seconds -> USD per hour then; None: not known


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """What the run has cost, and this attempt of it. `fixed_usd` is part of `usd`, not of `attempt_usd`."""

    usd: Decimal
    seconds: Decimal
    attempt_usd: Decimal
    attempt_s: Decimal
    compute_usd: Decimal
    usd_per_hour: Decimal  # compute, in this hour
    ceiling_s: Decimal  # of this attempt, at the ceiling: AWS has told no spot price for them


class Meter:
    """Counts from launch. `refresh` and `news` ask AWS, which may take seconds; everything else is arithmetic."""

    def __init__(
        self,
        *,
        rates: Rates,
        launched_at: float,
        fixed_usd: Decimal = Decimal(0),
        prior_usd: Decimal = Decimal(0),
        prior_s: Decimal = Decimal(0),
        spot_price: SpotPrice = lambda at: None,
    ) -> None:
        self.rates = rates
        self.launched_at = launched_at
        self.fixed_usd = fixed_usd
        self.prior_usd, self.prior_s = prior_usd, prior_s
        self._spot_price = spot_price
        self._prices: dict[int, Decimal] = {}
        self._asked_at: float | None = None
        self._at_ceiling = False

    def refresh(self, now: float) -> None:
        """Looks up the price of each hour begun and not yet known, at most once a minute."""
        if self.rates.capacity != "spot" or (self._asked_at is not None and now - self._asked_at < ASK_AGAIN_S):
            return
        for hour in range(int((now - self.launched_at) // HOUR_S) + 1):
            if hour not in self._prices:
                price = self._spot_price(self.launched_at + hour * HOUR_S)
                if price is None:
                    self._asked_at = now
                    return
                self._prices[hour] = price

    def news(self, now: float) -> str | None:
        """Refreshed: the words for the log where a price has become known, or its ceiling stands in for it."""
        self.refresh(now)
        spent = self.spent(now)
        was, self._at_ceiling = self._at_ceiling, spent.ceiling_s > 0
        if self._at_ceiling == was:
            return None
        price = f"${spent.usd_per_hour} an hour"
        if self._at_ceiling:
            return f"AWS tells no spot price: compute counts at its ceiling, {price}, until it does"
        return f"AWS tells the spot price, {price}: counted from the launch on"

    def spent(self, now: float) -> Spending:
        """Up to `now`, to a ten-thousandth of a dollar."""
        seconds = max(Decimal(f"{now - self.launched_at:.3f}"), MINIMUM_S)
        compute, ceiling_s, left, hour = Decimal(0), Decimal(0), seconds, 0
        while left > 0:
            part, price = min(left, Decimal(HOUR_S)), self._price(hour)
            compute += hours(part) * (self.rates.ceiling if price is None else price)
            ceiling_s += part if price is None and self.rates.capacity == "spot" else 0
            left, hour = left - part, hour + 1
        compute = compute.quantize(CENT_100)
        attempt = compute + (hours(seconds) * self.rates.extras).quantize(CENT_100)
        return Spending(
            usd=self.prior_usd + self.fixed_usd + attempt,
            seconds=self.prior_s + seconds,
            attempt_usd=attempt,
            attempt_s=seconds,
            compute_usd=compute,
            usd_per_hour=self._price(hour - 1) or self.rates.ceiling,
            ceiling_s=ceiling_s,
        )

    def limit(self, now: float, limits: RunLimits, reserve_s: float) -> str | None:
        """The limit that `reserve_s` more would pass: max_usd, max_hours, deadline, expiry or None."""
        spent, reserve = self.spent(now), Decimal(f"{reserve_s:.3f}")
        if spent.usd + hours(reserve) * (spent.usd_per_hour + self.rates.extras) >= limits.max_usd:
            return ends.MAX_USD
        if hours(spent.seconds + reserve) >= limits.max_hours:
            return ends.MAX_HOURS
        if limits.deadline is not None and now + reserve_s >= limits.deadline:
            return ends.DEADLINE
        if limits.expires is not None and now + reserve_s >= limits.expires:
            return ends.EXPIRY
        return None

    def _price(self, hour: int) -> Decimal | None:
        """The newest that AWS has told up to this hour."""
        hours_back = range(hour, -1, -1)  # not over the prices: `refresh` may be adding one in its own thread
        return next((self._prices[each] for each in hours_back if each in self._prices), None)


def hours(seconds: Decimal) -> Decimal:
    """Seconds as hours."""
    return seconds / HOUR_S


def spot_history(
    instance_type: str, zone: str, client: Any = None, say: Callable[[str], None] = lambda text: None
) -> SpotPrice:
    """Prices from DescribeSpotPriceHistory. None whenever AWS does not answer as it should; `say` is told why, once."""
    failing = False

    def ask(at: float) -> Decimal | None:
        from botocore.exceptions import BotoCoreError, ClientError

        nonlocal failing
        try:
            asked: dict[str, Any] = {
                "InstanceTypes": [instance_type],
                "AvailabilityZone": zone,
                "ProductDescriptions": ["Linux/UNIX"],
                "StartTime": at,
                "EndTime": at,
            }
            rows: list[dict[str, Any]] = []
            while True:  # a page may be empty and not the last
                answer = (client or ec2()).describe_spot_price_history(**asked)
                rows += [row for row in answer["SpotPriceHistory"] if row["Timestamp"].timestamp() <= at]
                if not answer.get("NextToken"):
                    break
                asked["NextToken"] = answer["NextToken"]
            if not rows:
                raise LookupError("no price in the answer")
            price = Decimal(max(rows, key=lambda row: row["Timestamp"])["SpotPrice"])
            if not price.is_finite() or price <= 0:
                raise ValueError(f"{price} is no price")
        except (BotoCoreError, ClientError, OSError, LookupError, ValueError, ArithmeticError) as error:
            if not failing:
                say(f"DescribeSpotPriceHistory: {type(error).__name__}: {error}")
            failing = True
            return None
        failing = False
        return price

    return ask
