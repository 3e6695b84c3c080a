"""Reads the files of canaries in a project's proofs/, which infra/canary/proof.py writes. Files about the embedded AWS
are elsewhere, because they prove nothing about AWS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from gpufleet.infra.errors import GpufleetError
from gpufleet.job.contract import reading
from gpufleet.job.contract.reading import DoubtError, Fields

SCHEMA = 1
FOLDER = "proofs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """The file of a canary."""

    path: Path
    tree: dict[str, Any]

    @property
    def day(self) -> date:
        """The day on which the canary ran."""
        return date.fromisoformat(self.tree["at"][:10])

    def figure(self, name: str, which: str = "median") -> float | None:
        """The `least`, `median` or `most` of a measured quantity; None if the canary did not measure it."""
        spread = self.tree["figures"].get(name)
        return None if spread is None else float(spread[which])

    def refuted(self) -> Iterator[dict[str, Any]]:
        """The assumptions that AWS refuted: `id`, `expected`, `seen`."""
        yield from (assumption for assumption in self.tree["assumptions"] if assumption["state"] == "refuted")


def read(path: Path) -> Proof:
    """The proof in a file. Raises GpufleetError if no canary wrote the file."""
    try:
        tree = reading.parse(path.read_bytes())
        _check(Fields(tree))
    except (OSError, DoubtError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise GpufleetError(f"{path}: {why}; allowed are files of `gpufleet canary`, in {FOLDER}/") from None
    return Proof(path=path, tree=tree)


def _check(fields: Fields) -> None:
    """Raises DoubtError if a value is missing or has the wrong type."""
    fields.schema(SCHEMA)
    fields.need("at", reading.moment)
    fields.need("region", reading.text)
    fields.need("embedded", reading.flag)
    fields.section("answers")
    fields.take("types", reading.listed(reading.text), ())  # files of the first version do not have `types`
    for figure in fields.table("figures").values():
        for which in ("least", "median", "most"):
            figure.need(which, reading.number)
    for assumption in fields.sections("assumptions"):
        for key in ("id", "state", "expected", "seen"):
            assumption.need(key, reading.text)


def newest(root: Path, region: str = "") -> Proof | None:
    """The newest readable proof from a real account, of this region, or of any region if none is given; None if there
    is no proof.
    """
    # file names begin with the day, so the newest comes first
    for path in sorted((root / FOLDER).glob("*.json"), reverse=True):
        try:
            proof = read(path)
        except GpufleetError:
            continue
        if not proof.tree["embedded"] and region in ("", proof.tree["region"]):
            return proof
    return None
