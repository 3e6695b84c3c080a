"""How an attempt ends: finished or failed (done.json, last of all), interrupted, crashed."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from job import atomic
from job.supervisor import receipt
from job.supervisor.attempts import Attempt
from job.supervisor.store import StoreError

if TYPE_CHECKING:
    from job.supervisor.supervisor import Supervisor
    from job.supervisor.world import Cause

FINISHED, FAILED, REFUSED, INTERRUPTED, CRASHED = 0, 70, 71, 75, 1  # exit codes, for the node script
TICK_S = 0.25
FINISH_S = 900.0  # to upload everything; then the attempt counts as crashed and the next one does it
CRASH_S = 120.0  # to publish what the trainer had committed
LATE_S = 60.0  # AWS may take the machine later than it said


def finish(s: Supervisor, reason: str, detail: str = "") -> int:
    """Everything uploaded, receipt, then done.json. 0, 70 for `failed`, or 1 when the store does not take it."""
    code = FAILED if reason == "failed" else FINISHED
    s.say(f"the run ends: {reason} {detail}".rstrip())
    until = s.clock() + FINISH_S
    if not drain(s, until if code == FINISHED else s.clock() + CRASH_S) and code == FINISHED:
        return crashed(s, "the last checkpoints could not be uploaded")
    try:
        _insist(s, until, lambda: _beside(s, s.publisher.outputs))
        at = iso(s.clock())
        s.record.update(exit={"code": code, "reason": reason, "notice": False, "at": at})
        _insist(s, until, lambda: s.pulse.last(s.heartbeat()))
        _insist(s, until, lambda: _receipt(s, reason, at))
        _insist(s, until, s.record.flush)
        _insist(s, until, lambda: s.store.put_bytes(s.world.log.path.read_bytes(), "job.log"))
        done = {"schema": 1, "reason": reason, "detail": detail, "instance": s.node.instance, "at": at}
        _insist(s, until, lambda: s.store.put_bytes(_json(done), "done.json"))
    except OSError as error:
        return crashed(s, f"the end of the run could not be written: {error}")
    return code


def interrupted(s: Supervisor) -> int:
    """Publishes what there is time for, then says so. 75: this machine must not go on."""
    cause = s.cause
    assert cause is not None
    assert cause.deadline is not None
    s.uploader.hurry(cause.deadline)
    s.uploader.fast()
    published = drain(s, cause.deadline + (LATE_S if cause.reason == "notice" else 0.0))
    s.say(
        f"interrupted ({cause.reason}); newest published step {s.publisher.newest}"
        + ("" if published else "; more was committed, and is lost")
    )
    _leave(s, interruption(cause, s.clock()))
    return INTERRUPTED


def interruption(cause: Cause, at: float) -> dict[str, Any]:
    """The `exit` of an attempt whose machine goes away."""
    ending = {"code": INTERRUPTED, "reason": cause.reason, "notice": cause.reason == "notice", "at": iso(at)}
    if cause.reason == "notice" and cause.deadline is not None:
        ending["ends_at"] = iso(cause.deadline)
    return ending


def crashed(s: Supervisor, why: str, code: int = CRASHED) -> int:
    """Publishes what the trainer had committed. The node script counts such ends and shuts down without a done marker,
    so that the fleet brings another node. `code` REFUSED: this node is a bad one.
    """
    s.say(f"this attempt failed: {why}")
    if hasattr(s, "meter"):
        drain(s, s.clock() + CRASH_S)
        _leave(s, {"code": code, "reason": why, "notice": False, "at": iso(s.clock())})
    return code


def _leave(s: Supervisor, ending: dict[str, Any]) -> None:
    s.record.update(exit=ending)
    for act in (s.record.flush, lambda: s.pulse.last(s.heartbeat())):
        try:
            act()
        except OSError as error:
            s.say(f"not written: {error}")


def drain(s: Supervisor, until: float) -> bool:
    """Uploads what is committed until there is no more, or no more time. True: nothing is left."""
    s.uploader.poll()
    while not s.uploader.idle and s.clock() < until:
        s.between()
        s.world.sleep(TICK_S)
        s.uploader.poll()
    return s.uploader.idle


def _beside(s: Supervisor, act: Callable[[], None]) -> None:
    """`act` in the thread of the uploads where that has no more to do, with heartbeats meanwhile."""
    if not s.uploader.idle:
        return act()
    doing = s.world.uploads.submit(act)
    while not doing.done():
        s.between()
        s.world.sleep(TICK_S)
    return doing.result()


def _insist(s: Supervisor, until: float, act: Callable[[], Any]) -> None:
    pause = 2.0
    while True:
        try:
            act()
            return
        except StoreError as error:
            if s.clock() + pause > until:
                raise
            s.say(f"{error}; again in {pause:.0f} s")
            again = s.clock() + pause
            while s.clock() < again:
                s.between()
                s.world.sleep(TICK_S)
            pause = min(2 * pause, 60.0)


def _receipt(s: Supervisor, reason: str, at: str) -> None:
    """receipt.json, and its text in the log. A bill that cannot be graded does not keep the run from ending."""
    try:
        attempts = [*s.earlier, _present(s)]
        measurement = receipt.measure(s.run_file, attempts, s.workdir, s.record.fields, at=at)
        made = receipt.build(s.run_file, attempts, reason=reason, at=at, measurement=measurement)
        text = receipt.text(made)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        s.say(f"no receipt: {type(error).__name__}: {error}")
        return
    s.store.put_bytes(_json(made), "receipt.json")
    with suppress(OSError):
        atomic.write_json(s.workdir / "receipt.json", made)
    s.world.log.write((text + "\n").encode())


def _present(s: Supervisor) -> Attempt:
    spent = s.meter.spent(s.clock())
    started = s.record.fields.get("started_s")
    return Attempt(
        instance=s.node.instance,
        type=s.node.type,
        zone=s.node.zone,
        launched_at=s.node.launched_at,
        seconds=spent.attempt_s,
        lived_s=Decimal(f"{s.clock() - s.node.launched_at:.3f}"),
        usd=spent.attempt_usd,
        compute_usd=spent.compute_usd,
        free_usd=Decimal(0),
        started_s=None if started is None else Decimal(str(started)),
        resumed_step=s.resumed_step,
        last_step=s.progress.step,
        step_s=s.progress.step_s or 0.0,
        idle_s=Decimal(0),
        rung=s.record.fields.get("rung"),
        floor=s.rung,
        exit=s.record.fields.get("exit"),
    )


def iso(at: float) -> str:
    """UTC, milliseconds, Z."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _json(value: Any) -> bytes:
    return (json.dumps(value, sort_keys=True) + "\n").encode()
