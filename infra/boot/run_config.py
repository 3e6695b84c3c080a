"""run.json: all that the job is told, known before the first resource and the same bytes on every machine.

It holds no bucket name: the node script gives the container its own address. The program alone writes it, once per run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from infra.cost import record
from infra.cost.bill import Bill
from infra.definition import StackDefinition

SCHEMA = 1


def run_config(definition: StackDefinition, bill: Bill, inputs: Mapping[str, Any], *, expires: str) -> dict[str, Any]:
    """The object of run.json; money and hours are decimal strings.

    `inputs`: {"archive": {"sha256", "bytes"}, "dataset": {"uri", "sha256", "files"}}, and `base_weights` like `dataset`
    where the run has them; a `uri` of None means that the files lie under inputs/<sha256>/ of the run's own bucket.
    `expires`: when AWS ends the fleet (UTC, ISO): at the deadline, where there is one.
    """
    limits = definition.limits
    return {
        "schema": SCHEMA,
        "run": {
            "id": definition.run.id,
            "stack": definition.name,
            "experiment": definition.job.experiment,
            "owner": definition.run.owner,
        },
        "region": definition.fleet.region,
        "job": {"experiment": definition.job.experiment, "parameters": asdict(definition.job.parameters)},
        "limits": {
            "max_usd": str(limits.max_usd),
            "max_hours": str(limits.max_hours),
            "deadline": None if limits.deadline is None else expires,
            "expires": expires,
        },
        "capacity": definition.fleet.capacity,
        "rates": record.rates(bill),
        "extras": record.extras(bill),
        "estimate": record.to_json(bill),
        "predicted": record.predicted(bill),
        "inputs": dict(inputs),
    }


def encode(config: Mapping[str, Any]) -> bytes:
    """The bytes of run.json: the node compares their sha256."""
    return (json.dumps(config, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()
