"""campaign.json: the dollars that the runs of a campaign have reserved under its cap, in one object of a bucket.

Drivers on people's machines and nodes write the object. Each put has a condition: S3 refuses it if the object has
changed since it was read. So each writer knows all valid reservations when it adds its own. A run reserves its own
limit before it begins; its receipt gives back what the run did not use. If the object is missing, no further run can
reserve dollars. Runs that have begun still stop before their own limits, whose sum is within the cap.

Trials that share a node have one reservation, which is the limit of the node's run. The node itself begins a trial only
if what is left of that limit is enough for nine cases in ten of the trial (`least_usd` of its run.json).
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
TRIES = 20  # tries of one change: a try fails if another writer has changed the object, or if the answer was lost


class LedgerLostError(Exception):
    """The ledger is missing or cannot be read: nothing may be reserved."""


class NotReservedError(Exception):
    """The reservation is not possible now. The message says why."""


class LedgerObjects(Protocol):
    """The part of a Store that a ledger needs."""

    def put_bytes(self, content: bytes, key: str, over: str = ...) -> None: ...
    def get_bytes(self, key: str) -> bytes | None: ...
    def entries(self, prefix: str) -> list[Entry]: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignReservation:
    """The part of the cap that is reserved for one run. The reservation is open until the run has ended."""

    usd: Decimal  # the reserved dollars; after the run's end the dollars of its receipt, if there is one
    by: str  # the driver or node that begins the run
    ended: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignLedger:
    """The reservations by run. `approved` is the hash of the campaign that somebody has approved."""

    approved: str
    max_usd: Decimal
    at_once: int
    began: float  # epoch seconds, by the clock of the driver that made the ledger
    runs: Mapping[str, CampaignReservation] = field(default_factory=dict)

    @property
    def rest(self) -> Decimal:
        """USD of the cap that are not reserved for a run."""
        return self.max_usd - sum((run.usd for run in self.runs.values()), Decimal(0))

    def open_runs(self, by: str | None = None) -> list[str]:
        """The runs that have not ended. If `by` is given, only those of this driver."""
        return [name for name, run in self.runs.items() if not run.ended and by in (None, run.by)]

    def reserved(self, run: str, usd: Decimal, *, by: str, approved: str) -> CampaignLedger:
        """The ledger with `usd` reserved for the run. Raises NotReservedError if another driver has reserved the run,
        if the run has ended, if the dollars or the number of simultaneous runs do not fit, or if another campaign was
        approved in the meantime.
        """
        if held := self.runs.get(run):
            if held.by == by and not held.ended:
                return self
            raise NotReservedError("it has ended" if held.ended else f"{held.by} has reserved it")
        if approved != self.approved:
            raise NotReservedError(f"the campaign {self.approved} was approved after {approved}")
        if usd > self.rest:
            raise NotReservedError(f"{usd:f} USD are more than the {self.rest:f} USD that are left")
        if len(self.open_runs()) >= self.at_once:
            raise NotReservedError(f"{self.at_once} runs have not ended, and no more may run at once")
        return replace(self, runs={**self.runs, run: CampaignReservation(usd=usd, by=by)})

    def released(self, run: str) -> CampaignLedger:
        """The ledger without the reservation of a run that has certainly not begun."""
        return replace(self, runs={name: held for name, held in self.runs.items() if name != run})

    def settled(self, run: str, usd: Decimal | None) -> CampaignLedger:
        """The ledger after the run has ended with a receipt of `usd`; None if it left no receipt."""
        held = self.runs[run]
        if held.ended:
            return self
        ended = replace(held, usd=held.usd if usd is None else usd, ended=True)
        return replace(self, runs={**self.runs, run: ended})

    def taken_over(self, driver: str, by: str) -> CampaignLedger:
        """The ledger in which the open reservations of `driver` belong to `by`."""
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
        return any(entry.key == NAME for entry in self.store.entries(NAME))

    def read(self) -> CampaignLedger:
        """The current ledger. Raises LedgerLostError."""
        return self._read()[0]

    def create(self, ledger: CampaignLedger) -> None:
        """Puts the first ledger, unless there is one."""
        try:
            self.store.put_bytes(ledger.to_bytes(), NAME, over=ABSENT)
        except TakenError:
            return

    def change(self, make: Callable[[CampaignLedger], CampaignLedger]) -> CampaignLedger:
        """Puts what `make` returns for the current ledger, and returns it. `make` is called again if another writer
        came first, or if the answer to a put was lost; so if the ledger already has the change, `make` must return it
        as it is. Raises LedgerLostError, and what `make` raises.
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
            except StoreError as error:  # the next reading shows whether the object was put
                lost = error
        raise lost or StoreError(f"{NAME} has changed {TRIES} times in a row; try again")

    def _read(self) -> tuple[CampaignLedger, str]:
        """The ledger, and an etag that is not newer: if the object changes in between, a put with it is refused."""
        etags = [entry.etag for entry in self.store.entries(NAME) if entry.key == NAME]
        content = self.store.get_bytes(NAME)
        if not etags or content is None:
            raise LedgerLostError(f"{NAME} is missing from its bucket")
        try:
            return CampaignLedger.parse(content), etags[0]
        except DoubtError as error:
            raise LedgerLostError(f"{NAME} cannot be read: {error}") from None
