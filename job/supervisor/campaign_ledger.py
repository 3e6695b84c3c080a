"""campaign.json: the dollars that the runs of a campaign have reserved under its cap, in one object of a bucket.

The object changes only by puts that S3 holds against the object as it was read. So of several writers, which may be
drivers on people's machines or nodes, each sees all reservations that count when it adds its own. A run reserves its
own limit before it begins; its receipt gives back what it did not use. Without the object nothing is reserved any more:
what has begun stops before its own limits, whose sum was within the cap.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal
from typing import Any, Protocol

from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields
from gpufleet.job.supervisor.store import ABSENT, Entry, StoreError, TakenError

NAME = "campaign.json"
SCHEMA = 1
TRIES = 20  # of one change: each failed try but a lost answer is a change that another writer has made


class LedgerLostError(Exception):
    """The ledger is not there any more, or cannot be read: nothing may be reserved."""


class NotReservedError(Exception):
    """The reservation is not possible now. The message says why."""


class LedgerObjects(Protocol):
    """The part of a Store that a ledger needs."""

    def put_bytes(self, content: bytes, key: str, over: str = ...) -> None: ...
    def get_bytes(self, key: str) -> bytes | None: ...
    def entries(self, prefix: str) -> list[Entry]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignReservation:
    """What one run holds of the cap. It is open until the run has ended."""

    usd: Decimal  # reserved; after the end the receipt's dollars, or without a receipt still what was reserved
    by: str  # the driver or node that begins it
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignLedger:
    """The reservations by run. `approved` is the hash of the campaign that somebody has approved."""

    approved: str
    max_usd: Decimal
    at_once: int
    began: float  # epoch seconds, by the clock of the driver that made it
    runs: Mapping[str, CampaignReservation] = field(default_factory=dict)

    @property
    def rest(self) -> Decimal:
        """USD of the cap that no run holds."""
        return self.max_usd - sum((run.usd for run in self.runs.values()), Decimal(0))

    def open_runs(self, by: str | None = None) -> list[str]:
        """The runs that have not ended; with `by` those of one driver."""
        return [name for name, run in self.runs.items() if not run.ended and by in (None, run.by)]

    def reserved(self, run: str, usd: Decimal, *, by: str, approved: str) -> CampaignLedger:
        """The ledger with `usd` reserved for the run. Raises NotReservedError if another driver has reserved the run,
        if it has ended, if the dollars or the runs at the same time do not fit, or if another campaign is the approved
        one by now.
        """
        if held := self.runs.get(run):
            if held.by == by and not held.ended:
                return self
            raise NotReservedError("it has ended" if held.ended else f"{held.by} has reserved it")
        if approved != self.approved:
            raise NotReservedError(f"the campaign {self.approved} was approved after {approved}")
        if usd > self.rest:
            raise NotReservedError(f"{usd:f} USD do not fit {self.rest:f}")
        if len(self.open_runs()) >= self.at_once:
            raise NotReservedError(f"{self.at_once} runs go on")
        return replace(self, runs={**self.runs, run: CampaignReservation(usd=usd, by=by)})

    def released(self, run: str) -> CampaignLedger:
        """The ledger without the reservation of a run that has certainly not begun."""
        return replace(self, runs={name: held for name, held in self.runs.items() if name != run})

    def settled(self, run: str, usd: Decimal | None) -> CampaignLedger:
        """The ledger after the run has ended with a receipt of `usd`; None: it left no receipt."""
        held = self.runs[run]
        if held.ended:
            return self
        ended = replace(held, usd=held.usd if usd is None else usd, ended=True)
        return replace(self, runs={**self.runs, run: ended})

    def taken_over(self, driver: str, by: str) -> CampaignLedger:
        """The ledger in which the open reservations of `driver` are those of `by`."""
        runs = {name: replace(run, by=by) if run.by == driver else run for name, run in self.runs.items()}
        return replace(self, runs=runs)

    def to_bytes(self) -> bytes:
        """The content of campaign.json."""
        runs = {name: {"usd": f"{run.usd:f}", "by": run.by, "ended": run.ended} for name, run in self.runs.items()}
        tree: dict[str, Any] = {"schema": SCHEMA, "approved": self.approved, "max_usd": f"{self.max_usd:f}"}
        return json.dumps({**tree, "at_once": self.at_once, "began": self.began, "runs": runs}, indent=1).encode()

    @classmethod
    def parse(cls, content: bytes) -> CampaignLedger:
        """The ledger in the bytes of campaign.json. Raises DoubtError."""
        fields = Fields(reading.parse(content))
        fields.schema(SCHEMA)
        runs = {name: reading.filled(CampaignReservation, run) for name, run in fields.table("runs").items()}
        return reading.filled(cls, fields, but=("runs",), runs=runs)


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerObject:
    """The ledger in its bucket. Raises StoreError if the bucket cannot be asked."""

    store: LedgerObjects

    def is_there(self) -> bool:
        """Whether there is a ledger."""
        return any(entry.key == NAME for entry in self.store.entries(NAME))

    def read(self) -> CampaignLedger:
        """The ledger as it is. Raises LedgerLostError."""
        return self._read()[0]

    def create(self, ledger: CampaignLedger) -> None:
        """Puts the first ledger, unless there is one."""
        try:
            self.store.put_bytes(ledger.to_bytes(), NAME, over=ABSENT)
        except TakenError:
            return

    def change(self, make: Callable[[CampaignLedger], CampaignLedger]) -> CampaignLedger:
        """Puts what `make` gives for the ledger as it is, and returns that. `make` is called again where another writer
        came between, and where the answer to a put was lost, so it has to give the same for a ledger that has its
        change. Raises LedgerLostError, and what `make` raises.
        """
        lost: StoreError | None = None
        for _ in range(TRIES):
            was, etag = self._read()
            now = make(was)
            if now == was:
                return was
            try:
                self.store.put_bytes(now.to_bytes(), NAME, over=etag)
                return now
            except TakenError:
                continue
            except StoreError as error:  # whether it was put, the next reading tells
                lost = error
        raise lost or StoreError(f"{NAME} has changed {TRIES} times in a row; try again")

    def _read(self) -> tuple[CampaignLedger, str]:
        """The ledger, and the etag of an object that is not newer: a change of a newer one than that is refused."""
        etags = [entry.etag for entry in self.store.entries(NAME) if entry.key == NAME]
        content = self.store.get_bytes(NAME)
        if not etags or content is None:
            raise LedgerLostError(f"{NAME} is not in its bucket any more")
        try:
            return CampaignLedger.parse(content), etags[0]
        except DoubtError as error:
            raise LedgerLostError(f"{NAME} cannot be read: {error}") from None
