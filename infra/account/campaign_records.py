"""The records that a campaign's bucket keeps beside the ledger: the values that a sampler drew, and small documents of
each ended run. Every machine that drives the campaign can read them, even after the run's own bucket is gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gpufleet.infra.account.campaign_ledger import LedgerObjects
from gpufleet.infra.definition.campaign import VALUES, read_values, write_values
from gpufleet.infra.definition.loader import STACK_NAME
from gpufleet.job import atomic
from gpufleet.job.contract.workdir import DONE, METRICS, RECEIPT, RESULTS
from gpufleet.job.supervisor.store import ABSENT, TakenError

DRAWN, TRIALS = "drawn/", "trials/"
OF_RUN = (METRICS, DONE, RECEIPT, RESULTS)  # documents that a run itself leaves
DOCUMENTS = (*OF_RUN, VALUES)


@dataclass(frozen=True, kw_only=True, slots=True)
class CampaignRecords:
    """The records of one campaign. Each method raises StoreError if the bucket cannot be read or written."""

    store: LedgerObjects

    def add_draw(self, number: int, values: Mapping[str, str]) -> bool:
        """Records the drawn values with this number. Returns False if another machine has already recorded one."""
        try:
            self.store.put_bytes(write_values(values), f"{DRAWN}{number:04}.json", over=ABSENT)
        except TakenError:
            return False
        return True

    def draws(self) -> list[dict[str, str]]:
        """The values of each draw; empty for a draw that cannot be read."""
        keys = sorted(entry.key for entry in self.store.entries(DRAWN))
        return [read_values(self.store.get_bytes(key) or b"") for key in keys]

    def keep(self, trial: str, documents: Mapping[str, bytes]) -> None:
        for name, content in documents.items():
            self.store.put_bytes(content, f"{TRIALS}{trial}/{name}")

    def read(self, trial: str, document: str) -> bytes | None:
        """A kept document; None if there is none."""
        return self.store.get_bytes(f"{TRIALS}{trial}/{document}")

    def bring(self, folder: Path) -> None:
        """Writes the kept documents to folder/TRIAL/."""
        for entry in self.store.entries(TRIALS):
            trial, _, name = entry.key.removeprefix(TRIALS).partition("/")
            if name in DOCUMENTS and STACK_NAME.fullmatch(trial) and (content := self.store.get_bytes(entry.key)):
                (folder / trial).mkdir(parents=True, exist_ok=True)
                atomic.write_bytes(folder / trial / name, content)
