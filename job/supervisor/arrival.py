"""Before an attempt trains: its record and meter, is this node good enough, and what training needs on its disk."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from typing import Any, TypeVar

from job import atomic
from job.contract import bucket
from job.contract.codes import AttemptExit
from job.contract.commit import BEST
from job.contract.messages import Unreadable
from job.contract.workdir import CHECKPOINTS, LOG, METRICS, STAGES
from job.supervisor import attempts, endings, machine, staging
from job.supervisor.meter import Meter
from job.supervisor.store import StoreError
from job.supervisor.underway import Underway, iso

REFUSALS = 2  # nodes that a run may refuse: fewer than the boots in a row without a checkpoint that end it
WRONG = "node refused, bytes arrived wrong"
T = TypeVar("T")


class InterruptedEarlyError(Exception):
    """The machine goes away before training began."""


def over(this: Underway) -> dict[str, Any] | None:
    """done.json, where the run has ended already. Raises StoreError."""
    return atomic.parse_object(_patiently(this, lambda: this.store.get_bytes(bucket.DONE), bucket.DONE))


def register(this: Underway) -> None:
    """Earlier attempts and their cost, this one's record beside theirs, the price. Raises StoreError, OSError."""
    _patiently(this, lambda: _register(this), "what earlier attempts left")
    this.ask_price()  # before any limit is judged


def _register(this: Underway) -> None:
    staging.clear(this.workdir)
    log = this.store.get_bytes(LOG)
    if log:
        atomic.write_bytes(this.world.log.path, log)
    this.record = attempts.Record(this.store, this.node.instance)
    this.earlier = attempts.read(this.store, this.run_file, but=this.node, say=this.say)
    this.meter = Meter(
        rates=this.run_file.rates(this.node.type, this.node.zone),
        launched_at=this.node.launched_at,
        fixed_usd=this.run_file.fixed_usd,
        prior_usd=sum((attempt.usd for attempt in this.earlier), Decimal(0)),
        prior_s=sum((attempt.seconds for attempt in this.earlier), Decimal(0)),
        spot_price=this.world.spot_price,
    )
    # Where memory really ran out. A phase that is predicted not to fit, the trainer takes lower by itself.
    this.rung = max([attempt.floor for attempt in this.earlier if attempt.type == this.node.type], default=0)
    this.say(f"attempt {len(this.earlier) + 1} of run {this.run_file.run} on {this.node.instance} {this.node.type}")
    this.record.update(
        type=this.node.type,
        zone=this.node.zone,
        launched_at=iso(this.node.launched_at),
        attempt=len(this.earlier) + 1,
        supervised_at=iso(this.clock()),
        ranks=this.world.ranks,
        **machine.record(this.world.gpus() if this.run_file.config.device == "cuda" else ()),
    )


def lacking(this: Underway) -> str | None:
    """Why this node is refused before anything is staged: the trainer would make do with the GPUs it finds."""
    config, listed = this.run_file.config, this.run_file.gpus(this.node.type)
    if config.device != "cuda" or accepts(this):
        return None
    found, needed = len(this.world.gpus()), config.ranks(listed) if listed else 0
    return None if found >= needed else f"{found} working GPUs, this run uses {needed} of {this.node.type}'s"


def accepts(this: Underway) -> bool:
    """Enough nodes were refused for what they are since one trained: whatever this one is, it trains."""
    since = list(itertools.takewhile(lambda attempt: attempt.started_s is None, reversed(this.earlier)))
    refused = [attempt for attempt in since if (attempt.exit or {}).get("code") == AttemptExit.REFUSED]
    return sum(not _reason(attempt).startswith(WRONG) for attempt in refused) >= REFUSALS


def doubts(this: Underway, key: str) -> bool:
    """Bytes of `key` that arrive wrong are this node's fault, and not yet the store's."""
    return sum(_reason(attempt).startswith(f"{WRONG}: {key}: ") for attempt in this.earlier) < REFUSALS


def _reason(attempt: attempts.Attempt) -> str:
    return str((attempt.exit or {}).get("reason"))


def stage(this: Underway) -> None:
    """Dataset, base weights, checkpoint, results of later stages, compiled graphs.

    Raises InterruptedEarlyError, StoreError, MismatchError, OSError, and ValueError when no other node could do better.
    """
    staging.inputs(_staging(this))
    _resume(this)
    if lines := _patiently(this, this.publisher.stages.restore, STAGES):
        this.say(f"{lines} results of its stages are there already")
    this.graphs.restore(lambda: _check(this))
    _check(this)


def fall_back(this: Underway, unreadable: Unreadable) -> bool:
    """A checkpoint whose bytes are right cannot be read: the store's one before it. False: there is none."""
    if not staging.set_aside(_staging(this), unreadable.step, unreadable.problem):
        return False
    endings.drain(this, this.clock() + endings.CRASH_S)
    shutil.rmtree(this.workdir / CHECKPOINTS, ignore_errors=True)
    _resume(this)
    return True


def _resume(this: Underway) -> None:
    """Brings the store's newest good checkpoint, and the log that belongs to it."""
    manifest = staging.checkpoint(_staging(this))
    this.resumed_step = 0 if manifest is None else manifest.commit.goes_on_from
    if manifest is not None:
        # Before anything may end this attempt: it prunes what it does not know of.
        _patiently(this, lambda: this.publisher.resumed(manifest), BEST)
        if not staging.best_too(_staging(this), manifest.commit.step):
            this.publisher.forget_best(manifest)
        metrics = _patiently(this, lambda: this.store.get_bytes(METRICS), METRICS)
        if metrics:
            atomic.write_bytes(this.workdir / METRICS, metrics)
    this.progress.skip(this.resumed_step)
    this.record.update(resumed_step=this.resumed_step)
    if manifest is not None:
        with suppress(StoreError):  # a heartbeat sends it then; lost before one, this node would seem to begin anew
            this.record.flush()


def _patiently(this: Underway, act: Callable[[], T], what: str) -> T:
    return staging.retried(_staging(this), act, what)


def _staging(this: Underway) -> staging.Stage:
    return staging.Stage(
        store=this.store,
        run=this.run_file,
        workdir=this.workdir,
        say=this.say,
        check=lambda: _check(this),
        pause=this.world.sleep,
        doubts=lambda key: doubts(this, key),
    )


def _check(this: Underway) -> None:
    this.between()
    if this.world.metadata.notice is not None or this.world.terminated() is not None:
        raise InterruptedEarlyError
