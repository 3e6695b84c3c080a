"""A receipt.json for tests of those who read one."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path
from typing import Any


def receipt(actual: str = "1.10", *, run: str = "r1", stack: str = "small-growth", **changes: Any) -> dict[str, Any]:
    """Estimated at 1 USD, 0.80 to 1.30; the difference is all runtime. `changes` replace whole keys."""
    difference = str(Decimal(actual) - 1)
    return {
        "schema": 1,
        "run": run,
        "stack": stack,
        "reason": "finished",
        "counted_until": "2026-11-21T18:00:00.000Z",
        "device": "cuda",
        "capacity": "spot",
        "usd": {"estimate": "1.0000", "actual": actual, "difference": difference},
        "range_usd": {"p10": "0.80", "p90": "1.30"},
        "lines": [
            {"name": "compute", "estimate": "0.9000", "actual": str(Decimal(actual) - Decimal("0.1")), "note": ""},
            {"name": "root disk", "estimate": "0.1000", "actual": "0.1", "note": ""},
        ],
        "causes": {"price": "0.0000", "runtime": difference, "interruptions": "0.0000", "other": "0.0000"},
        "attempts": [
            node("i-1", seconds="1800.000", interrupted=True),
            node("i-2", seconds="5400.000"),
            node("i-3", seconds="3600.000", zone="us-east-2b"),
        ],
        **changes,
    }


def node(instance: str, *, seconds: str, zone: str = "us-east-2a", interrupted: bool = False) -> dict[str, Any]:
    return {
        "instance": instance,
        "type": "g5.2xlarge",
        "zone": zone,
        "seconds": seconds,
        "lived_s": seconds,
        "interrupted": interrupted,
    }


def place(root: Path, tree: Any, name: str = "r1", stack: str = "small-growth") -> None:
    path = root / "receipts" / stack / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(tree if isinstance(tree, str) else json.dumps(tree))
