"""metrics.jsonl: one line per logged step; the trainer appends lines, and supervisor, later attempts and bills read the
file.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.job.contract import reading
from gpufleet.job.contract.commit import Reason
from gpufleet.job.contract.reading import DoubtError, Fields, Seconds, Step

# The keys in their order. A value that does not exist is None, and experiments add values of their own.
KEYS = (
    "ts", "phase", "step", "tokens", "loss", "val_loss", "lr", "step_ms", "tok_s", "mfu", "mem_gb", "gpu_util",
    "spent_usd", "grad_norm", "router_load", "router_entropy", "resumed", "saves", "event",
)  # fmt: skip
_NUMBERS = (
    "ts", "tokens", "loss", "val_loss", "lr", "step_ms", "tok_s", "mfu", "mem_gb", "grad_norm", "gpu_util",
    "gpu_mem_gb", "gpu_temp_c", "gpu_xid",  # these three exist only on a machine with NVIDIA's driver
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """A checkpoint on the disk, listed in the `saves` of the next line."""

    step: Step
    reason: Reason
    bytes: int
    blocked_s: Seconds  # seconds for which training waited for the save
    took_s: Seconds | None = None  # seconds until the save was on the disk


def saves(record: Mapping[str, Any]) -> list[Save]:
    """The saves in a line of metrics.jsonl. Raises DoubtError."""
    listed = Fields(dict(record)).sections("saves") if record.get("saves") is not None else []
    return [reading.filled(Save, section) for section in listed]


def write(record: Mapping[str, Any]) -> bytes:
    """A line, with every key of KEYS."""
    return (json.dumps({**dict.fromkeys(KEYS), **record}, allow_nan=False) + "\n").encode()


def line(content: bytes) -> dict[str, Any] | None:
    """The object of a line, with every key of KEYS; None if the line was cut off or has an invalid value."""
    try:
        fields = Fields(reading.parse(content))
        fields.need("step", reading.step)
        for key in _NUMBERS:
            fields.take(key, reading.number, None)
        for key in ("phase", "event"):
            fields.take(key, reading.text, None)
        fields.take("resumed", reading.step, None)  # the step from which training resumed since the line before
        saves(fields.tree)
    except DoubtError:
        return None
    return {**dict.fromkeys(KEYS), **fields.tree}


def scalars(record: Mapping[str, Any]) -> list[tuple[str, float]]:
    """The metric values of a line by name, for TensorBoard: one for each number, and one for each entry of a list of
    numbers.
    """
    beside = ("ts", "step", "resumed")  # left out, because each scalar already has a time and a step
    return [pair for key, value in record.items() if key not in beside for pair in _numbers(key, value)]


def _numbers(key: str, value: Any) -> list[tuple[str, float]]:
    if isinstance(value, list):
        return [pair for index, part in enumerate(value) for pair in _numbers(f"{key}/{index}", part)]
    return [(key, float(value))] if isinstance(value, int | float) and not isinstance(value, bool) else []


def records(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    """The valid lines that have a time and a phase."""
    valid = [record for raw in lines if (record := line(raw)) is not None]
    return [record for record in valid if record["phase"] is not None and record["ts"] is not None]
