"""The parent of the trainer: stages, starts, watches, publishes, and decides how the attempt ends.

An attempt ends in one of five ways: finished (or at a limit of the run), failed for good, interrupted, crashed, or
over before it began. Only the first two write done.json, last of all. See endings.py and docs/interruptions.md.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from pathlib import Path

from job.contract.codes import AttemptExit, TrainerExit
from job.contract.messages import Accept, Fatal, Message, Save, Spent, Stop, Unreadable, UsedRung
from job.contract.workdir import RUNG
from job.run_file import Node, RunFile
from job.supervisor import arrival, endings, staging
from job.supervisor.child import FIRST_SIGN_S
from job.supervisor.endings import TICK_S
from job.supervisor.forecast import RESERVE_S
from job.supervisor.store import StoreError
from job.supervisor.underway import Underway
from job.supervisor.world import Cause, Trainer, World

STOPPED_BY_HAND = "stopped"
SPENT_S = 5.0  # between writings of spent.json, which the trainer's log lines show
MARGIN_S = 5.0  # between a predicted publication and the end of the machine
SIGTERM_S = 105.0  # docker stop waits 115 s
PATIENCE_S = 120.0  # at least, for a trainer asked to stop at a limit
LINES = 3  # that must be missing before a trainer told to write few is taken for stuck


class Supervisor(Underway):
    """One attempt. `run` gives the exit code for the node script."""

    def __init__(self, run: RunFile, node: Node, workdir: Path, world: World) -> None:
        super().__init__(run, node, workdir, world)
        self.killed = ""  # why
        self._child: Trainer | None = None
        self._kill_at: float | None = None
        self._advised: str | None = None
        self._spent_at = float("-inf")

    def run(self) -> int:
        """Until the attempt has ended, whatever way."""
        try:
            if (over := arrival.over(self)) is not None:
                self.say(f"the run is over already: {over.get('reason')}")
                return AttemptExit.FAILED if over.get("reason") in ("failed", "boot-loop") else AttemptExit.FINISHED
            arrival.register(self)
            self.beat()
            if lacking := arrival.lacking(self):
                return endings.crashed(self, f"node refused: {lacking}", code=AttemptExit.REFUSED)
            try:
                arrival.stage(self)
            except ValueError as error:  # wrong on every node
                return endings.finish(self, "failed", str(error))
            self._look()
            return self._conclude(self._train())
        except arrival.InterruptedEarlyError:
            self._look()
            return endings.interrupted(self)
        except staging.MismatchError as error:  # memory or disk of this node, until others have said the same
            if arrival.doubts(self, error.key):
                return endings.crashed(self, f"{arrival.WRONG}: {error}", code=AttemptExit.REFUSED)
            return endings.finish(self, "failed", str(error))
        except StoreError as error:
            return endings.crashed(self, f"the store: {error}")
        except OSError as error:
            return endings.crashed(self, f"this node's disk: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it leaves a record and what was committed
            self.say(traceback.format_exc())
            return endings.crashed(self, f"{type(error).__name__}: {error}")
        finally:
            if self._child is not None:
                self._child.kill()
            self.publisher.cancel()  # nothing under way keeps this process
            self.graphs.cancel()

    # Training -------------------------------------------------------------------------------------------------------

    def _train(self) -> int:
        """The trainer's exit code, STOPPED if it never began. An out-of-memory restarts it lower on the ladder."""
        if arrival.accepts(self):
            self._tell(Accept())
        while self.cause is None or self._owes_model():
            self.record.update(floor=self.rung)
            with suppress(OSError):  # what an earlier start left says nothing of this one
                (self.workdir / RUNG).unlink(missing_ok=True)
            self._child = self.world.start(self.rung)
            self.progress.grew_at = self.clock()
            while (code := self._child.poll()) is None:
                self._tick()
                self.world.sleep(TICK_S)
            self.progress.poll()
            self.take_notes()
            unreadable = self._unreadable(code)
            if unreadable is not None and self.cause is None and arrival.fall_back(self, unreadable):
                continue
            if code != TrainerExit.OUT_OF_MEMORY or self.cause is not None:
                return code
            used = UsedRung.read(self.workdir)
            at, lower = (self.rung, self.rung + 1) if used is None else (used.rung, used.lower)
            if lower is None or lower >= len(self.run_file.config.ladder(self.world.ranks)):
                detail = f"at the end of the ladder, rung {at}. Choose a type with more GPU memory."
                Fatal(error="out of memory", detail=detail).write(self.workdir)
                return TrainerExit.FATAL
            self.say(f"out of memory on rung {at}: again on rung {lower}")
            self.rung = lower
        return TrainerExit.STOPPED

    def _owes_model(self) -> bool:
        """Stopped by hand before this node trained: the trainer starts to leave what the checkpoint holds. At a limit
        it does not: there is no money for it.
        """
        return self._by_hand and self._child is None and self.resumed_step > 0

    @property
    def _by_hand(self) -> bool:
        return self.cause is not None and self.cause.reason == STOPPED_BY_HAND

    def _unreadable(self, code: int) -> Unreadable | None:
        return Unreadable.read(self.workdir) if code == TrainerExit.UNREADABLE else None

    def _tick(self) -> None:
        now = self.clock()
        self.progress.poll()
        if self.progress.first_at is not None and "started_s" not in self.record.fields:
            self.record.update(started_s=round(self.progress.first_at - self.node.launched_at, 3))
        self.uploader.poll()
        if self.cause is None and self.uploader.idle:
            self.graphs.poll(self.world.uploads)
        self.forecast.learn(self.publisher.measured)
        if now >= self._spent_at + SPENT_S:
            self._spent_at = now
            self._tell(Spent(spent_usd=str(self.meter.spent(now).usd), at=now))
        self._look()
        self.between()
        advice = self.world.metadata.save_wanted
        if advice is not None and advice != self._advised:
            self._advised = advice
            self._tell(Save(reason=advice))
        self._end_if_stuck(now)

    def _look(self) -> None:
        """Is there a cause to stop? The first one decides, and a stop by hand is waited for until a limit."""
        now, notice, terminated = self.clock(), self.world.metadata.notice, self.world.terminated()
        end_s = self.forecast.end_s(self.progress.step, self.progress.step_s)
        if self.cause is not None:
            if self._by_hand and self._kill_at is not None and self._limit(now, end_s):
                self._kill_at = min(self._kill_at, now + max(PATIENCE_S, 3 * end_s))
            return
        if notice is not None:
            self.cause = Cause(reason="notice", deadline=notice)
        elif terminated is not None:
            self.cause = Cause(reason="sigterm", deadline=terminated + SIGTERM_S)
        elif (limit := self._limit(now, end_s)) is not None:  # before a stop by hand, which has more time
            self.cause = Cause(reason=limit)
        elif self.asked:
            self.cause = Cause(reason=STOPPED_BY_HAND)
        if self.cause is not None:
            self._stop(self.cause, now)
            if self.cause.deadline is not None:
                self.note(self.cause, now)

    def _limit(self, now: float, end_s: float) -> str | None:
        return self.meter.limit(now, self.run_file.limits, end_s + RESERVE_S)

    def _stop(self, cause: Cause, now: float) -> None:
        forecast = self.forecast.end_s if cause.deadline is None else self.forecast.stop_s
        needed = forecast(self.progress.step, self.progress.step_s)
        save = cause.deadline is None or now + needed + MARGIN_S <= cause.deadline
        left = (
            ""
            if cause.deadline is None
            else f", {cause.deadline - now:.0f} s left, save and upload need {needed:.0f} s"
        )
        self.say(f"stopping: {cause.reason}{left}{'' if save else ': nothing more is saved'}")
        self.graphs.cancel()
        if save and cause.deadline is not None:
            self.uploader.hurry(cause.deadline)
        # By hand nothing presses, and it may still be starting, compiling or growing: only then does it look.
        patience = max(FIRST_SIGN_S if self._by_hand else PATIENCE_S, 3 * needed)
        self._kill_at = now + patience if cause.deadline is None else cause.deadline
        if not self._tell(Stop(reason=cause.reason, save=save, ends=cause.ends, deadline=cause.deadline)):
            self._kill_at = now  # it cannot be asked

    def _end_if_stuck(self, now: float) -> None:
        assert self._child is not None
        newest = max(self._child.output_at, self.progress.grew_at)
        patience = max(self.progress.quiet_limit_s(), LINES * self.forecast.line_s(self.progress.step))
        if self._kill_at is not None and now >= self._kill_at:
            self.killed = "the trainer did not stop in time"
        elif now - newest > patience:
            self.killed = f"no sign of progress for {now - newest:.0f} s"
        else:
            return
        self.say(f"{self.killed}: killed")
        self._child.kill()

    def _conclude(self, code: int) -> int:
        """What the trainer's end makes of the attempt."""
        if code == TrainerExit.FINISHED:
            return endings.finish(self, "finished")
        if code == TrainerExit.FATAL:
            fatal = Fatal.read(self.workdir)
            lost = "the reason is in job.log; no disk took fatal.json"
            return endings.finish(self, "failed", f"{fatal.error}: {fatal.detail}" if fatal else lost)
        if code == TrainerExit.REFUSED and (self.cause is None or self._by_hand):  # another node may do
            problems = (self.record.fields.get("preflight") or {}).get("problems") or ["no reason given"]
            return endings.crashed(self, f"node refused: {'; '.join(problems)}", code=AttemptExit.REFUSED)
        if self.cause is not None and self.cause.ends:
            detail = "" if code == TrainerExit.STOPPED else self.killed or f"the trainer ended with {code}"
            return endings.finish(self, self.cause.reason, detail)
        if self.cause is not None:
            return endings.interrupted(self)
        if (unreadable := self._unreadable(code)) is not None:
            return endings.crashed(self, f"{unreadable.problem}, and there is none before it")
        return endings.crashed(self, self.killed or f"the trainer ended with {code}")

    def _tell(self, message: Message) -> bool:
        """Writes what the trainer reads. False when the disk refuses."""
        try:
            message.write(self.workdir)
        except OSError as error:
            self.say(f"{message.FILE} cannot be written: {error}")
            return False
        return True
