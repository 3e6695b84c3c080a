"""Definition files with a command of the user's own; each key of job has its own line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.repository import ROOT

IMAGE = "docker.io/pytorch/pytorch:2.5.1"
JOB: dict[str, Any] = {
    "image": IMAGE,
    "command": "python train.py",
    "checkpoint": {"format": "hf-trainer", "every": {"steps": 10}, "size_gb": 1},
    "work": {"steps": 1000, "step_ms": {"A10G": 100}},
}
FLEET = {"ami": "unpinned", "region": "us-east-2", "zones": ["us-east-2a"], "instance_types": ["g5.2xlarge"]}
LIMITS = {"max_usd": 10, "max_hours": 10}


def command_file(project: Path, *, name: str = "mine", more: str = "", **job: Any) -> Path:
    """Writes stacks/NAME.yaml below `project`, from JOB with changed values; a value of None removes its key.
    `storage`, `fleet`, `account` and `limits` are sections; `more` is added as text. job's first key is on line 3.
    """
    sections: dict[str, Any] = {
        key: job.pop(key) for key in list(job) if key in ("fleet", "storage", "account", "limits")
    }
    lines = ["run: {id: r1, owner: me}", "job:"]
    for key, value in {**JOB, **job}.items():
        if value is not None:
            lines.append(f"  {key}: {json.dumps(value)}")
    every: dict[str, Any] = {"fleet": FLEET, "limits": LIMITS, **sections}
    for key, value in every.items():
        lines.append(f"{key}: {json.dumps(value)}")
    if "storage" not in sections:
        lines.append("storage: {}")
    path = project / "stacks" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*lines, more, ""]))
    return path


def in_block(text: str, block: str = "") -> str:
    """A file with one zone and one spot type, changed to a block of a day, an hour of which is over on 2026-11-26."""
    told = (
        block
        or "{reservation: cr-0123456789abcdef0, start: 2026-11-25T23:00:00Z, end: 2026-11-27T11:30:00Z, fee_usd: 900}"
    )
    assert text.count("  capacity: spot\n") == 1
    return text.replace("  capacity: spot\n", f"  capacity: block\n  block: {told}\n")


def several_nodes(cards: str) -> str:
    """pretrain-d64 on two nodes."""
    text = (ROOT / "stacks" / "pretrain-d64.yaml").read_text()
    zones = "  zones: [us-east-2a, us-east-2b, us-east-2c]\n"
    assert text.count(zones) == 1
    return text.replace(zones, f"  zones: [us-east-2a]\n  nodes: 2\n  cards: {cards}\n")
