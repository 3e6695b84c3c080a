"""What earlier attempts of the run did and cost, from attempts/*.json and heartbeat/*.jsonl.

A killed node says nothing after its last heartbeat: its cost is known to within one heartbeat. One that never sent any
is billed until the next node's launch, LOST_BOOT_S at most. A node that was told of its end is billed until that end.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from decimal import Decimal
from typing import Any

from job import atomic
from job.run_file import Node, RunFile
from job.supervisor import fleet
from job.supervisor.metadata import epoch
from job.supervisor.meter import CENT_100, MINIMUM_S, hours
from job.supervisor.store import Store, StoreError

LOST_BOOT_S = 480.0  # what the bills take for a small node's set-up, about half of a large one's
FREE_S = 3600  # AWS does not charge compute when it takes a spot instance back in its first hour (EC2 User Guide)


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One node of the run. `usd` is compute, disks and address; `free_usd` the compute that AWS does not charge.

    `reclaimed`: AWS took it, or its owner did (fleet.py); None: it had no notice, or nobody knows.
    """

    instance: str
    type: str
    zone: str
    launched_at: float
    seconds: Decimal  # as billed: 60 at least
    lived_s: Decimal
    usd: Decimal
    compute_usd: Decimal
    free_usd: Decimal
    started_s: Decimal | None  # from launch to the trainer's first step; None: never got there
    resumed_step: int
    last_step: int
    step_s: float
    idle_s: Decimal  # told to end and waiting for AWS to do it
    rung: int | None
    floor: int  # rung of the ladder to begin at: above it memory ran out
    exit: dict[str, Any] | None
    ceiling_s: Decimal = Decimal(0)  # counted at the ceiling of a spot price, which AWS did not tell
    reclaimed: bool | None = None

    @property
    def noticed(self) -> bool:
        """AWS said that it would take the node away."""
        return bool((self.exit or {}).get("notice"))

    @property
    def interrupted(self) -> bool:
        """With a notice, and not by the owner's own hand as far as anybody knows."""
        return self.noticed and self.reclaimed is not False


class Record:
    """attempts/<instance>.json of this attempt. The node script's keys stay; `flush` sends what changed."""

    def __init__(self, store: Store, instance: str) -> None:
        self._store = store
        self._key = f"attempts/{instance}.json"
        self.fields: dict[str, Any] = {"instance": instance, **(atomic.parse_object(store.get_bytes(self._key)) or {})}
        self._changed = False
        self._sending, self._noting = threading.Lock(), threading.Lock()

    def update(self, **fields: Any) -> None:
        """Notes it here; no network. From any thread."""
        with self._noting:
            self.fields = {**self.fields, **fields}  # a new dict: another thread may be sending the old one
        self._changed = True

    def flush(self) -> None:
        """From any thread: an older state is never put last. Raises StoreError."""
        with self._sending:
            if self._changed:
                self._changed = False
                try:
                    self._store.put_bytes(json.dumps(self.fields, sort_keys=True).encode(), self._key)
                except StoreError:
                    self._changed = True
                    raise


def read(
    store: Store,
    run: RunFile,
    *,
    but: Node | None = None,
    done: Mapping[str, Any] | None = None,
) -> list[Attempt]:
    """Every attempt, oldest first, except that of the node `but`, which came after them; or all of a run that is over,
    `done.json` given: its node was there until then.
    """
    keys = [entry.key for prefix in ("attempts/", "heartbeat/") for entry in store.entries(prefix)]
    with ThreadPoolExecutor(8) as pool:
        texts = dict(zip(keys, pool.map(store.get_bytes, keys), strict=True))
    names = {key.split("/", 1)[1].rsplit(".", 1)[0] for key in keys} - {but.instance if but else ""}
    records = {name: atomic.parse_object(texts.get(f"attempts/{name}.json")) or {} for name in names}
    if done and (last := records.get(str(done.get("instance")))) is not None:
        exit_ = {"code": 1, "reason": done.get("reason"), "notice": False, **(_exit(last) or {})}
        last["exit"] = {**exit_, "at": done.get("at")}
    ordered = sorted(names, key=lambda name: _launched(records[name]))
    end = but.launched_at if but else epoch((done or {}).get("at")) or 0.0
    launches = [*(_launched(records[name]) for name in ordered), end]
    known = {name: bool(taken) for each in records.values() for name, taken in (each.get("reclaimed") or {}).items()}
    found = [
        of(run, name, records[name], _last(texts, name), until)
        for name, until in zip(ordered, launches[1:], strict=True)
    ]
    return told(found, known)


def of(run: RunFile, name: str, record: dict[str, Any], beat: dict[str, Any], until: float = 0.0) -> Attempt:
    """What a node's record and its last heartbeat say. `until`: the launch of the node after it."""
    kind, zone = str(record.get("type", "")), str(record.get("zone", ""))
    rates = run.rates(kind, zone)
    launched = _launched(record)
    ended = _exit(record)
    seen = Decimal(str(beat.get("attempt_s", 0)))
    lived = Decimal(str(beat.get("lived_s", seen)))
    for key in ("at", "ends_at"):
        time = epoch((ended or {}).get(key))
        if time is not None and launched:
            lived = max(lived, Decimal(f"{time - launched:.3f}"))
    if not beat and ended is None and launched:  # lost while it booted: it was there until another one came, at most
        lived = Decimal(f"{min(max(until - launched, 0.0), LOST_BOOT_S):.3f}")
    seconds = max(lived, MINIMUM_S)
    compute = Decimal(str(beat["compute_usd"])) if "compute_usd" in beat else rates.ceiling * hours(seen)
    compute += hours(seconds - seen) * Decimal(str(beat.get("usd_per_hour", rates.ceiling)))
    unasked_s = seconds if "compute_usd" not in beat and rates.capacity == "spot" else 0
    told, gone = epoch((ended or {}).get("at")), epoch((ended or {}).get("ends_at"))
    started = record.get("started_s")
    return Attempt(
        instance=name,
        type=kind,
        zone=zone,
        launched_at=launched,
        seconds=seconds,
        lived_s=lived,
        usd=(compute + hours(seconds) * rates.extras).quantize(CENT_100),
        compute_usd=compute.quantize(CENT_100),
        free_usd=Decimal(0),
        started_s=None if started is None else Decimal(str(started)),
        resumed_step=int(record.get("resumed_step") or 0),
        last_step=int(beat.get("step") or record.get("resumed_step") or 0),
        step_s=float(beat.get("step_s") or 0.0),
        idle_s=Decimal(f"{max(0.0, gone - told):.3f}") if told and gone else Decimal(0),
        rung=record.get("rung"),
        floor=int(record.get("floor") or 0),
        exit=ended,
        ceiling_s=Decimal(str(beat.get("ceiling_s", unasked_s))),
    )


def told(attempts: Iterable[Attempt], known: Mapping[str, bool]) -> list[Attempt]:
    """With what is `known` of each, as `reclaimed` gives it."""
    return [_taken(each, known[each.instance]) if each.instance in known else each for each in attempts]


def judged(attempts: Sequence[Attempt], changes: fleet.Changes, now: float) -> list[Attempt]:
    """With what the fleet's `changes` say of those that got a notice and of which no attempt knows yet. A change during
    a node's life is what took it: whoever made it pays for the node.
    """
    doubtful = {
        each.instance: each.launched_at + float(each.lived_s)
        for each in attempts
        if each.noticed and each.reclaimed is None and each.launched_at >= now - fleet.KEPT_S
    }
    at = changes(min(each.launched_at for each in attempts if each.instance in doubtful)) if doubtful else None
    if at is None:
        return list(attempts)
    return [
        _taken(each, not any(each.launched_at <= change <= doubtful[each.instance] for change in at))
        if each.instance in doubtful
        else each
        for each in attempts
    ]


def reclaimed(attempts: Iterable[Attempt]) -> dict[str, bool]:
    """What is known of each, for later attempts: AWS forgets."""
    return {each.instance: each.reclaimed for each in attempts if each.reclaimed is not None}


def _taken(attempt: Attempt, by_aws: bool) -> Attempt:
    free = attempt.compute_usd if by_aws and attempt.seconds < FREE_S else Decimal(0)
    return replace(attempt, reclaimed=by_aws, free_usd=free)


def _exit(record: dict[str, Any]) -> dict[str, Any] | None:
    ended = record.get("exit")
    return ended if isinstance(ended, dict) else None


def _launched(record: dict[str, Any]) -> float:
    return epoch(record.get("launched_at")) or epoch(record.get("booted_at")) or 0.0


def _last(texts: dict[str, bytes | None], name: str) -> dict[str, Any]:
    lines = (texts.get(f"heartbeat/{name}.jsonl") or b"").splitlines()
    return next((beat for line in reversed(lines) if (beat := atomic.parse_object(line)) is not None), {})
