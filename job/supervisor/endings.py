"""How an attempt ends: finished or failed (done.json, last of all), interrupted, crashed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from job import atomic
from job.contract import bucket
from job.contract.attempt import Record
from job.contract.codes import AttemptExit
from job.contract.workdir import LOG, RECEIPT
from job.supervisor import attempts, receipt
from job.supervisor.store import StoreError
from job.supervisor.underway import Underway, interruption, iso

TICK_S = 0.25
FINISH_S = 900.0  # to upload everything; then the attempt counts as crashed and the next one does it
CRASH_S = 120.0  # to publish what the trainer had committed
LATE_S = 60.0  # AWS may take the machine later than it said


def finish(this: Underway, reason: str, detail: str = "") -> int:
    """Everything uploaded, receipt, then done.json. 0, 70 for `failed`, or 1 when the store does not take it."""
    code = AttemptExit.FAILED if reason == "failed" else AttemptExit.FINISHED
    this.say(f"the run ends: {reason} {detail}".rstrip())
    until = this.clock() + FINISH_S
    if (
        not drain(this, until if code == AttemptExit.FINISHED else this.clock() + CRASH_S)
        and code == AttemptExit.FINISHED
    ):
        return crashed(this, "the last checkpoints could not be uploaded")
    try:
        _insist(this, until, lambda: _beside(this, this.publisher.outputs))
        at = iso(this.clock())
        this.record.update(exit={"code": code, "reason": reason, "notice": False, "at": at})
        _insist(this, until, lambda: this.pulse.last(this.heartbeat()))
        _insist(this, until, lambda: _receipt(this, reason, detail, at))
        _insist(this, until, this.record.flush)
        _insist(this, until, lambda: this.store.put_bytes(this.world.log.path.read_bytes(), LOG))
        done = {"schema": 1, "reason": reason, "detail": detail, "instance": this.node.instance, "at": at}
        _insist(this, until, lambda: this.store.put_bytes(atomic.json_bytes(done), bucket.DONE))
    except OSError as error:
        return crashed(this, f"the end of the run could not be written: {error}")
    return code


def interrupted(this: Underway) -> int:
    """Publishes what there is time for, then says so. 75: this machine must not go on."""
    cause = this.cause
    assert cause is not None
    assert cause.deadline is not None
    this.uploader.hurry(cause.deadline)
    published = drain(this, cause.deadline + (LATE_S if cause.reason == "notice" else 0.0))
    this.say(
        f"interrupted ({cause.reason}); newest published step {this.publisher.newest}"
        + ("" if published else "; more was committed, and is lost")
    )
    _leave(this, interruption(cause, this.clock()))
    return AttemptExit.INTERRUPTED


def crashed(this: Underway, why: str, code: int = AttemptExit.CRASHED) -> int:
    """Publishes what the trainer had committed. The node script counts such ends and shuts down without a done marker,
    so that the fleet brings another node. `code` REFUSED: this node is a bad one.
    """
    this.say(f"this attempt failed: {why}")
    if hasattr(this, "meter"):
        drain(this, this.clock() + CRASH_S)
        _leave(this, {"code": code, "reason": why, "notice": False, "at": iso(this.clock())})
    return code


def _leave(this: Underway, ending: dict[str, Any]) -> None:
    this.record.update(exit=ending)
    for act in (this.record.flush, lambda: this.pulse.last(this.heartbeat())):
        try:
            act()
        except OSError as error:
            this.say(f"not written: {error}")


def drain(this: Underway, until: float) -> bool:
    """Uploads what is committed until there is no more, or no more time. True: nothing is left."""
    this.uploader.poll()
    while not this.uploader.idle and this.clock() < until:
        this.between()
        this.world.sleep(TICK_S)
        this.uploader.poll()
    return this.uploader.idle


def _beside(this: Underway, act: Callable[[], None]) -> None:
    """`act` in the thread of the uploads where that has no more to do, with heartbeats meanwhile."""
    if not this.uploader.idle:
        return act()
    doing = this.world.uploads.submit(act)
    while not doing.done():
        this.between()
        this.world.sleep(TICK_S)
    return doing.result()


def _insist(this: Underway, until: float, act: Callable[[], Any]) -> None:
    pause = 2.0
    while True:
        try:
            act()
            return
        except StoreError as error:
            if this.clock() + pause > until:
                raise
            this.say(f"{error}; again in {pause:.0f} s")
            again = this.clock() + pause
            while this.clock() < again:
                this.between()
                this.world.sleep(TICK_S)
            pause = min(2 * pause, 60.0)


def _receipt(this: Underway, reason: str, detail: str, at: str) -> None:
    """receipt.json, and its text in the log. A bill that cannot be graded does not keep the run from ending."""
    try:
        run, record = this.run_file, this.record.fields
        own = Record.from_json(record, lambda why: this.say(f"of this node's record: {why}"))
        every = [*this.earlier, attempts.of(run, this.node.instance, own, this.heartbeat())]
        measurement = receipt.measure(run, every, this.workdir, record, at=at)
        made = receipt.build(run, every, reason=reason, detail=detail, at=at, measurement=measurement)
        text = receipt.text(made)
    except (KeyError, TypeError, ValueError, ArithmeticError) as error:
        this.say(f"no receipt: {type(error).__name__}: {error}")
        return
    this.store.put_bytes(atomic.json_bytes(made), RECEIPT)
    with suppress(OSError):
        atomic.write_json(this.workdir / RECEIPT, made)
    this.world.log.write((text + "\n").encode())
