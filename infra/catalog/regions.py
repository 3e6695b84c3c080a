"""The regions that this version knows. Each has a row in regions.csv; `gpufleet prices refresh` reads the prices of a
new region.

The columns are: the letters of the region's zones, as accounts see them; the prefixes of its usage types in the Price
List, the likeliest first (`none` for no prefix); and its name in the heading of a table.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gpufleet.infra.catalog.table import read_table

FILE = Path(__file__).with_name("regions.csv")
_SIDES = {"northeast": "ne", "northwest": "nw", "southeast": "se", "southwest": "sw"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Region:
    """One region of AWS."""

    name: str
    zones: tuple[str, ...]  # names such as us-east-2a
    usage_prefixes: tuple[str, ...]  # prefixes of its usage types in the Price List
    short: str

    @property
    def zone_id_prefix(self) -> str:
        """The prefix of its zone ids: use2- for us-east-2, apne1- for ap-northeast-1 (EC2 User Guide, AZ IDs)."""
        continent, *middle, number = self.name.split("-")
        sides = "".join(_SIDES.get(word, word[0]) for word in middle)
        return f"{continent}{sides}{number}-"


def known_regions() -> Mapping[str, Region]:
    """All regions by name, in the file's order. Raises GpufleetError, with file and line, if a row is invalid."""
    return _read(FILE)


@cache
def _read(path: Path) -> dict[str, Region]:
    return read_table(path, "region", _region)


def _region(row: dict[str, str]) -> Region:
    name, letters, prefixes, short = (row[key] for key in ("region", "zones", "usage_prefixes", "short"))
    if not re.fullmatch(r"[a-z]{2}(-[a-z]+)+-\d", name):
        raise ValueError(f"{name!r} is no region; allowed: such as us-east-2")
    if not re.fullmatch(r"[a-z]+", letters) or len(set(letters)) < len(letters):
        raise ValueError(f"zones {letters!r}; allowed: the letters of its zones, each once, such as abc")
    if not prefixes or not short:
        raise ValueError("usage_prefixes and short must not be empty; `none` stands for no prefix")
    return Region(
        name=name,
        zones=tuple(name + letter for letter in letters),
        usage_prefixes=tuple("" if prefix == "none" else prefix for prefix in prefixes.split()),
        short=short,
    )
