"""Reads tables of facts from CSV files. Each row becomes a record, stored under its key."""

from __future__ import annotations

import csv
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from gpufleet.infra.errors import GpufleetError

_T = TypeVar("_T")


def read_table(path: Path, key: str, make: Callable[[dict[str, str]], _T]) -> dict[str, _T]:
    """The records by the value of the column `key`. Raises GpufleetError, with file and line, if a row is invalid."""
    records: dict[str, _T] = {}
    with path.open(encoding="utf-8", newline="") as lines:
        reader = csv.DictReader(lines, restval="")
        for row in reader:
            try:
                if row[key] in records:
                    raise ValueError(f"{row[key]} is there twice")
                records[row[key]] = make(row)
            except KeyError as error:
                raise GpufleetError(f"{path}, line {reader.line_num}: {error} is not known") from None
            except ValueError as error:
                raise GpufleetError(f"{path}, line {reader.line_num}: {error}") from None
    return records
