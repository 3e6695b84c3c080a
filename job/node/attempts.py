"""What earlier boots of the run tell this one. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from gpufleet.job.contract.attempt import AttemptRecord
from gpufleet.job.contract.bucket import MANIFEST_KEY

MOST_FUTILE = 3  # boots in a row that lead nowhere end the run


def newest_manifest(keys: Iterable[str]) -> str | None:
    """The key of the newest published checkpoint's manifest."""
    return max((key for key in keys if MANIFEST_KEY.fullmatch(key)), default=None)


def futile_boots(records: Iterable[AttemptRecord], manifest: str | None) -> int:
    """How many boots in a row, up to the newest, led nowhere: no checkpoint after `manifest`, which was the newest then
    as it is now, and no results of a later stage before the machine was taken or lost. Those that AWS interrupted with
    a notice are passed over.
    """
    count = 0
    for boot in sorted(records, key=lambda boot: boot.booted_at, reverse=True):
        noticed = boot.exit is not None and boot.exit.notice
        if boot.manifest_at_boot != manifest or (boot.results and (noticed or boot.exit is None)):
            break
        count += not noticed
    return count
