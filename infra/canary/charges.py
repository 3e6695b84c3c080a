"""Adds AWS's charges for a canary, which Cost Explorer shows a day later: `gpufleet canary --bill`."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

from gpufleet.infra.account import actual_bill
from gpufleet.infra.account.actual_bill import Charged
from gpufleet.infra.canary.assumptions import judge
from gpufleet.infra.canary.observations import FlightFacts
from gpufleet.infra.errors import AwsRefused, GpufleetError
from gpufleet.infra.evidence.proofs import Proof
from gpufleet.job import atomic
from gpufleet.job.contract.receipt import Receipt, parse

FOLDER = Path(".gpufleet", "canary", "receipts")  # receipts name runs and nodes, so they are not kept in proofs/
_FACTS = "charged."  # names of facts about charges begin with this


def keep(receipts: Sequence[Receipt], proof: Path, root: Path) -> None:
    """Keeps a canary's receipts for `gpufleet canary --bill`."""
    place = root / FOLDER / proof.stem
    place.mkdir(parents=True, exist_ok=True)
    for receipt in receipts:
        atomic.write_bytes(
            place / f"{receipt.stack}-{receipt.run}.json", (json.dumps(receipt.to_json()) + "\n").encode()
        )


def kept_receipts(proof: Proof, root: Path) -> list[Receipt]:
    """The receipts of the proof's canary. Raises GpufleetError if they are not on this machine."""
    receipts = [parse(path.read_bytes()) for path in sorted((root / FOLDER / proof.path.stem).glob("*.json"))]
    if not receipts:
        raise GpufleetError(
            f"the receipts of {proof.path} are not on this machine: run this on the machine that ran the canary"
        )
    return receipts


def judged(proof: Proof, receipts: Sequence[Receipt], ce: Any, today: date) -> Iterator[str]:
    """Yields each receipt's lines beside AWS's charges. Adds the charges to `proof.tree`, with what they show about the
    assumptions. Raises AwsRefused if Cost Explorer has no charges yet.
    """
    facts, usd = FlightFacts(), defaultdict[str, Decimal](Decimal)  # by stack
    for receipt in receipts:
        charges = actual_bill.charged(ce, receipt, today)
        yield from actual_bill.compared(receipt, charges, today)
        if not charges.usd:
            raise AwsRefused(f"Cost Explorer has no charge of {receipt.stack} yet: try again a day after the canary")
        _add(facts, receipt, charges)
        usd[receipt.stack] += charges.total
    verdicts = {
        judgement.assumption.id: judgement.to_json()
        for judgement in judge(facts)
        if judgement.assumption.fact.startswith(_FACTS)
    }
    proof.tree["charged"] = {stack: str(total) for stack, total in usd.items()}
    proof.tree["assumptions"] = [verdicts.get(assumption["id"], assumption) for assumption in proof.tree["assumptions"]]


def _add(facts: FlightFacts, receipt: Receipt, charges: Charged) -> None:
    lines = actual_bill.by_line(receipt)
    facts.add(f"{_FACTS}nodes", float(charges.usd.get("compute", 0) / lines["compute"]))
    facts.add(f"{_FACTS}unknown_usd", float(sum(usd for name, usd in charges.usd.items() if name not in lines)))
    facts.add(f"{_FACTS}of_receipt", float(charges.total / receipt.actual))
