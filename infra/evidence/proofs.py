"""A canary's files in a project's proofs/, for whoever goes by them. infra/canary/proof.py writes them; those of the
embedded AWS lie elsewhere and prove nothing of AWS.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from gpufleet.infra.errors import GpufleetError
from gpufleet.job import atomic

SCHEMA = 1
FOLDER = "proofs"


@dataclass(frozen=True, kw_only=True, slots=True)
class Proof:
    """One file."""

    path: Path
    tree: dict[str, Any]

    @property
    def day(self) -> date:
        """On which the canary flew."""
        return date.fromisoformat(self.tree["at"][:10])

    def figure(self, name: str, which: str = "median") -> float | None:
        """A figure's `least`, `median` or `most`; None where the canary did not come to it."""
        found = self.tree["figures"].get(name)
        return None if found is None else float(found[which])

    def refuted(self) -> Iterator[dict[str, Any]]:
        """The assumptions that AWS refuted: `id`, `expected`, `seen`."""
        yield from (each for each in self.tree["assumptions"] if each["state"] == "refuted")


def read(path: Path) -> Proof:
    """Raises GpufleetError for a file that no canary of this version wrote."""
    try:
        tree = atomic.parse_object(path.read_bytes())
    except OSError as error:
        raise GpufleetError(f"{path}: {error.strerror}; allowed are files of `gpufleet canary`, in {FOLDER}/") from None
    if not tree or tree.get("schema") != SCHEMA:
        raise GpufleetError(f"{path} is no file of `gpufleet canary`, or one of another version")
    return Proof(path=path, tree=tree)


def newest(root: Path, region: str = "") -> Proof | None:
    """The newest of the region, or of any, from a real account. None: there is none that can be read."""
    found = list[Proof]()
    for path in (root / FOLDER).glob("*.json"):
        try:
            proof = read(path)
        except GpufleetError:
            continue
        if not proof.tree["embedded"] and region in ("", proof.tree["region"]):
            found.append(proof)
    return max(found, key=lambda each: (each.day, each.path.name), default=None)
