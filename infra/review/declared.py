"""The facts of a run as its run.json states them: what the Pulumi policy pack in `policy/` judges.

run.json is an object that the program declares before the fleet, which depends on it: a rule that refuses it keeps the
fleet from being made, even where nobody looked at a preview. Knows plain values only: no pulumi.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from infra.policy import Facts

OBJECT = "aws:s3/bucketObjectv2:BucketObjectv2"
RUN_CONFIG = "run-config"  # the name of the object's resource


def facts(type_: str, name: str, properties: Mapping[str, Any]) -> Facts | None:
    """Of one resource, spelled as the engine spells it; None for any other than run.json.

    No other property is read: in a first preview the bucket's name is unknown, and reading it an error.
    """
    if type_ != OBJECT or name != RUN_CONFIG:
        return None
    run = json.loads(properties["content"])
    return Facts(
        region=run["region"],
        instance_types=tuple(option["type"] for option in run["estimate"]["types"]),
        capacity=run["capacity"],
        owner=run["run"]["owner"],
        usd_p90=Decimal(run["estimate"]["usd"]["p90"]),
    )
