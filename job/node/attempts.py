"""What earlier boots of the run tell this one. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from job.contract.bucket import MANIFEST_KEY

MOST_FUTILE = 3  # boots in a row that lead nowhere end the run


def newest_manifest(keys: Iterable[str]) -> str | None:
    """The key of the newest published checkpoint's manifest."""
    return max((key for key in keys if MANIFEST_KEY.fullmatch(key)), default=None)


def futile_boots(records: Iterable[dict[str, Any]], manifest: str | None) -> int:
    """How many boots in a row, up to the newest, led nowhere: no checkpoint after `manifest`, which was the newest then
    as it is now, and no results of a later stage before the machine was taken or lost. Those that AWS interrupted with
    a notice are passed over.
    """
    count = 0
    for boot in sorted(records, key=lambda boot: str(boot.get("booted_at", "")), reverse=True):
        end = boot["exit"] if isinstance(boot.get("exit"), dict) else {}
        taken_or_lost = not end or end.get("notice")
        if (boot.get("manifest_at_boot") or None) != manifest or (boot.get("results") and taken_or_lost):
            break
        count += not end.get("notice")
    return count
