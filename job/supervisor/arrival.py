"""Before an attempt trains: its record and meter, is this node good enough, and what training needs on its disk."""

from __future__ import annotations

import itertools
import shutil
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from job import atomic, sizing
from job.supervisor import attempts, endings, machine, stages, staging
from job.supervisor.meter import Meter

if TYPE_CHECKING:
    from job.supervisor.supervisor import Supervisor

REFUSALS = 2  # nodes that a run may refuse: fewer than the boots in a row without a checkpoint that end it
WRONG = "node refused, bytes arrived wrong"


class InterruptedEarlyError(Exception):
    """The machine goes away before training began."""


def register(s: Supervisor) -> None:
    """What earlier attempts did and cost, and this one's record beside theirs. Raises StoreError, OSError."""
    staging.clear(s.workdir)
    log = s.store.get_bytes("job.log")
    if log:
        atomic.write_bytes(s.world.log.path, log)
    s.record = attempts.Record(s.store, s.node.instance)
    s.earlier = attempts.read(s.store, s.run_file, but=s.node)
    s.meter = Meter(
        rates=s.run_file.rates(s.node.type, s.node.zone),
        launched_at=s.node.launched_at,
        fixed_usd=s.run_file.fixed_usd,
        prior_usd=sum((attempt.usd for attempt in s.earlier), Decimal(0)),
        prior_s=sum((attempt.seconds for attempt in s.earlier), Decimal(0)),
        spot_price=s.world.spot_price,
    )
    # Where memory really ran out. A phase that is predicted not to fit, the trainer takes lower by itself.
    s.rung = max([attempt.floor for attempt in s.earlier if attempt.type == s.node.type], default=0)
    s.say(f"attempt {len(s.earlier) + 1} of run {s.run_file.run} on {s.node.instance} {s.node.type}")
    s.record.update(
        type=s.node.type,
        zone=s.node.zone,
        launched_at=endings.iso(s.node.launched_at),
        attempt=len(s.earlier) + 1,
        supervised_at=endings.iso(s.clock()),
        ranks=s.world.ranks,
        **machine.record(s.world.gpus() if s.run_file.config.device == "cuda" else ()),
    )


def lacking(s: Supervisor) -> str | None:
    """Why this node is refused before anything is staged: the trainer would make do with the GPUs it finds."""
    config, listed = s.run_file.config, s.run_file.gpus(s.node.type)
    if config.device != "cuda" or accepts(s):
        return None
    found, needed = len(s.world.gpus()), sizing.ranks(config, listed) if listed else 0
    return None if found >= needed else f"{found} working GPUs, this run uses {needed} of {s.node.type}'s"


def accepts(s: Supervisor) -> bool:
    """Enough nodes were refused for what they are since one trained: whatever this one is, it trains."""
    since = list(itertools.takewhile(lambda attempt: attempt.started_s is None, reversed(s.earlier)))
    refused = [attempt for attempt in since if (attempt.exit or {}).get("code") == endings.REFUSED]
    return sum(not _reason(attempt).startswith(WRONG) for attempt in refused) >= REFUSALS


def doubts(s: Supervisor, key: str) -> bool:
    """Bytes of `key` that arrive wrong are this node's fault, and not yet the store's."""
    return sum(_reason(attempt).startswith(f"{WRONG}: {key}: ") for attempt in s.earlier) < REFUSALS


def _reason(attempt: attempts.Attempt) -> str:
    return str((attempt.exit or {}).get("reason"))


def stage(s: Supervisor) -> None:
    """Dataset, base weights, checkpoint, results of later stages, compiled graphs.

    Raises InterruptedEarlyError, StoreError, MismatchError, OSError, and ValueError when no other node could do better.
    """
    staging.inputs(_staging(s))
    _resume(s)
    if lines := stages.restore(s.store, s.workdir):
        s.say(f"{lines} results of the stages after training are there already")
    s.graphs.restore(lambda: _check(s))
    _check(s)


def fall_back(s: Supervisor, unreadable: dict[str, Any]) -> bool:
    """A checkpoint whose bytes are right cannot be read: the store's one before it. False: there is none."""
    if not staging.set_aside(_staging(s), unreadable.get("step"), str(unreadable.get("problem"))):
        return False
    endings.drain(s, s.clock() + endings.CRASH_S)
    shutil.rmtree(s.workdir / "ckpt", ignore_errors=True)
    _resume(s)
    return True


def _resume(s: Supervisor) -> None:
    """Brings the store's newest good checkpoint, and the log that belongs to it."""
    manifest = staging.checkpoint(_staging(s))
    s.resumed_step = 0 if manifest is None else manifest["step"]
    if manifest is not None:
        s.publisher.resumed(manifest)  # before anything may end this attempt: it prunes what it does not know of
        if not staging.best_too(_staging(s), s.resumed_step):
            s.publisher.forget_best(manifest)
        metrics = s.store.get_bytes("metrics.jsonl")
        if metrics:
            atomic.write_bytes(s.workdir / "metrics.jsonl", metrics)
    s.progress.skip(s.resumed_step)
    s.record.update(resumed_step=s.resumed_step)


def _staging(s: Supervisor) -> staging.Stage:
    return staging.Stage(
        store=s.store,
        run=s.run_file,
        workdir=s.workdir,
        say=s.say,
        check=lambda: _check(s),
        pause=s.world.sleep,
        doubts=lambda key: doubts(s, key),
    )


def _check(s: Supervisor) -> None:
    s.between()
    if s.world.metadata.notice is not None or s.world.terminated() is not None:
        raise InterruptedEarlyError
