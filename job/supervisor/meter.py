"""The dollar meter: it computes an upper bound of the run's cost so far, and the time at which the run must stop.
Compute is charged per second at the price of the hour, for at least 60 s per start; disks and the address are charged
per second; the bill's amounts for S3, logs and transfer are charged once. The price of an instance-hour is AWS's spot
price at its start. Until AWS gives this price, the highest possible spot price is used, and the log says for how long.
A free first hour is not deducted, because it is known only afterwards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from gpufleet.job.contract.spent import CENT_100, GONE_S, hours, least_s, passed_limit
from gpufleet.job.contract.terms import Rates, RunLimits
from gpufleet.job.supervisor.store import ec2, pages

HOUR_S = 3600
ASK_AGAIN_S = 60.0

SpotPrice = Callable[[float], Decimal | None]  # USD per hour at a time in epoch seconds; None if unknown


@dataclass(frozen=True, kw_only=True, slots=True)
class Spending:
    """The run's cost so far, and this attempt's share. `fixed_usd` is part of `usd`, not of `attempt_usd`."""

    usd: Decimal
    seconds: Decimal
    attempt_usd: Decimal
    attempt_s: Decimal
    compute_usd: Decimal
    usd_per_hour: Decimal  # the price of compute in the current hour
    # seconds of this attempt that are charged at the highest possible price, because AWS gave no spot price
    ceiling_s: Decimal


class Meter:
    """Computes the cost since launch. `refresh` and `news` ask AWS, which may take seconds; the other methods only
    compute.
    """

    def __init__(
        self,
        *,
        rates: Rates,
        launched_at: float,
        older_s: Decimal = Decimal(0),
        fixed_usd: Decimal = Decimal(0),
        others: tuple[Decimal, Decimal] = (Decimal(0), Decimal(0)),
        spot_price: SpotPrice = lambda at: None,
        nodes: int = 1,
    ) -> None:
        """`nodes`: the number of the run's nodes that run at once. `older_s`: how long the node had run before."""
        self.rates, self._peers = rates, nodes - 1
        self.launched_at, self._least_s = launched_at, least_s(older_s)
        self.fixed_usd = fixed_usd
        # USD and seconds of the run's other nodes, and the time at which they were read. The thread of the heartbeat
        # replaces the whole tuple.
        self._others: tuple[Decimal, Decimal, float | None] = (*others, None)
        self._spot_price = spot_price
        self._prices: dict[int, Decimal] = {}
        self._asked_at: float | None = None
        self._at_ceiling = False

    def count(self, others: tuple[Decimal, Decimal], now: float) -> None:
        """Notes the cost of the run's other nodes, which was read a moment ago."""
        self._others = (*others, now)

    def _most_of_peers(self, seconds: float) -> tuple[Decimal, Decimal]:
        """The most that the other nodes can cost in `seconds`, and the sum of their seconds."""
        total = self._peers * Decimal(f"{seconds:.3f}")
        return hours(total) * (self.rates.ceiling + self.rates.extras), total

    def _others_spent(self, now: float) -> tuple[Decimal, Decimal]:
        """The spending of the other nodes. While the store cannot be reached, they are taken to be running, and
        training continues.
        """
        usd, seconds, read_at = self._others
        more, more_s = self._most_of_peers(max(0.0, now - read_at - GONE_S) if read_at is not None else 0.0)
        return usd + more.quantize(CENT_100), seconds + more_s

    def refresh(self, now: float) -> None:
        """Looks up the missing prices of hours that have begun, at most once a minute."""
        if not self.rates.moves or (self._asked_at is not None and now - self._asked_at < ASK_AGAIN_S):
            return
        for hour in range(int((now - self.launched_at) // HOUR_S) + 1):
            if hour not in self._prices:
                price = self._spot_price(self.launched_at + hour * HOUR_S)
                if price is None:
                    self._asked_at = now
                    return
                self._prices[hour] = price

    def news(self, now: float) -> str | None:
        """Refreshes the prices; returns a line for the log when a price becomes known, or when the highest possible
        price has to be used.
        """
        self.refresh(now)
        spent = self.spent(now)
        was, self._at_ceiling = self._at_ceiling, spent.ceiling_s > 0
        if self._at_ceiling == was:
            return None
        price = f"${spent.usd_per_hour} an hour"
        if self._at_ceiling:
            return f"AWS gives no spot price: until it does, compute is charged at the highest possible price, {price}"
        return f"AWS gives the spot price, {price}, which replaces the highest possible price since the launch"

    def spent(self, now: float, others_until: float | None = None) -> Spending:
        """The cost up to `now`, to 0.0001 USD; with `others_until`, also what other nodes spend up to then."""
        seconds = max(Decimal(f"{now - self.launched_at:.3f}"), self._least_s)
        others_usd, others_s = self._others_spent(now if others_until is None else others_until)
        compute, ceiling_s, left_s, hour = Decimal(0), Decimal(0), seconds, 0
        while left_s > 0:
            part, price = min(left_s, Decimal(HOUR_S)), self._prices.get(hour)
            compute += hours(part) * (self.rates.ceiling if price is None else price)
            ceiling_s += part if price is None and self.rates.moves else 0
            left_s, hour = left_s - part, hour + 1
        compute = compute.quantize(CENT_100)
        attempt = compute + (hours(seconds) * self.rates.extras).quantize(CENT_100)
        return Spending(
            usd=others_usd + self.fixed_usd + attempt,
            seconds=others_s + seconds,
            attempt_usd=attempt,
            attempt_s=seconds,
            compute_usd=compute,
            usd_per_hour=self._prices.get(hour - 1) or self.rates.ceiling,
            ceiling_s=ceiling_s,
        )

    def limit(self, now: float, limits: RunLimits, reserve_s: float) -> str | None:
        """The limit that would be passed in another `reserve_s`: max_usd, max_hours, deadline, expiry or None."""
        then = now + reserve_s
        spent = self.spent(then, others_until=now)
        more, more_s = self._most_of_peers(reserve_s)  # the cost of the other nodes up to now is already in `spent`
        return passed_limit(limits, spent.usd + more, spent.seconds + more_s, then)

    def left_s(self, now: float, limits: RunLimits, most_s: float) -> float:
        """Seconds until the first limit, but at most `most_s`; 0 if a limit is already passed."""
        left_s, more = 0.0, most_s
        while more >= 1.0:  # by bisection: each hour may have its own price
            more /= 2
            if self.limit(now, limits, left_s + more) is None:
                left_s += more
        return left_s


def spot_history(
    instance_type: str, zone: str, client: Any = None, say: Callable[[str], None] = lambda text: None
) -> SpotPrice:
    """Looks up prices by DescribeSpotPriceHistory. None if AWS gives no usable answer; `say` is called with the
    reason.
    """
    failing = False

    def ask(at: float) -> Decimal | None:
        from botocore.exceptions import BotoCoreError, ClientError

        nonlocal failing
        try:
            of = {"InstanceTypes": [instance_type], "AvailabilityZone": zone, "ProductDescriptions": ["Linux/UNIX"]}
            answers = pages((client or ec2()).describe_spot_price_history, **of, StartTime=at, EndTime=at)
            prices = [row for answer in answers for row in answer["SpotPriceHistory"]]
            rows = [row for row in prices if row["Timestamp"].timestamp() <= at]
            if not rows:
                raise LookupError("no price in the answer")
            price = Decimal(max(rows, key=lambda row: row["Timestamp"])["SpotPrice"])
            if not price.is_finite() or price <= 0:
                raise ValueError(f"{price} is not a price")
        except (BotoCoreError, ClientError, OSError, LookupError, ValueError, ArithmeticError) as error:
            if not failing:
                say(f"DescribeSpotPriceHistory: {type(error).__name__}: {error}")
            failing = True
            return None
        failing = False
        return price

    return ask
