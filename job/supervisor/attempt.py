"""One attempt at the run on this node, from its arrival to its end: the parent of the trainer.

The attempt prepares (its record, the meter, files for training), trains (starts and watches the trainer, and publishes
checkpoints), and ends in one of five ways: finished (or at a limit of the run), failed for good, interrupted, crashed,
or over before it began. Only an attempt that finished or failed for good writes done.json, last of all. See
docs/interruptions.md.
"""

from __future__ import annotations

import shutil
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from typing import Any, TypeVar

from gpufleet.job import atomic
from gpufleet.job.contract import bucket, metrics
from gpufleet.job.contract import done as ends
from gpufleet.job.contract.attempt import SUPERSEDED, Beat, Exit, Node
from gpufleet.job.contract.aws import HANDOVER_S
from gpufleet.job.contract.codes import AttemptExit, TrainerExit
from gpufleet.job.contract.commit import BEST, Manifest, Published
from gpufleet.job.contract.goal import results_in
from gpufleet.job.contract.messages import (
    Accept,
    Alarm,
    CommandEnd,
    Fatal,
    Message,
    Preflight,
    SaveRequest,
    Spent,
    Stop,
    Unreadable,
    UsedRung,
)
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.run import RunFile
from gpufleet.job.contract.spent import count_node
from gpufleet.job.contract.workdir import CHECKPOINTS, COMPILED, LOG, METRICS, PREFLIGHT, RECEIPT, RUNG, STAGES
from gpufleet.job.supervisor import attempts, machine, receipt, staging, switch
from gpufleet.job.supervisor.child import FIRST_SIGN_S, MetricsFollower
from gpufleet.job.supervisor.compile_cache import GraphMirror
from gpufleet.job.supervisor.forecast import RESERVE_S, Forecast
from gpufleet.job.supervisor.meter import Meter
from gpufleet.job.supervisor.publish import Publisher, commits
from gpufleet.job.supervisor.store import StoreError, SupersededError, create
from gpufleet.job.supervisor.tracker import Tracker
from gpufleet.job.supervisor.uploads import Pulse, Uploader, send_log
from gpufleet.job.supervisor.world import Cause, Outside, Trainer

TICK_S = 0.25
SPENT_S = 5.0  # seconds between two writes of spent.json, which the trainer's log lines show
MARGIN_S = 5.0  # seconds between a predicted publication and the end of the machine
SIGTERM_S = 105.0  # seconds for which a trainer may go on after a SIGTERM; docker stop waits 115 s
PATIENCE_S = 120.0  # the least seconds to wait for a trainer that was asked to stop at a limit
LINES = 3  # a trainer that rarely writes is taken to be stuck after this many missing lines
# seconds to upload everything; after that the attempt ends as crashed, and the next one uploads the files
FINISH_S = 900.0
TRACKER_S = 60.0  # seconds for which a tracker may still send metric values at the run's end
MARK_S = 120.0  # seconds to write how the run ended, after all uploads; after that, the node writes it
PAST_S = 60.0  # seconds after a limit and a checkpoint; any work that is still going on then is abandoned
CRASH_S = 120.0  # seconds to publish the trainer's commits
LATE_S = 60.0  # AWS may take the machine this many seconds later than announced
XIDS = 8  # number of newest Xid errors (of NVIDIA's driver) in a heartbeat
T = TypeVar("T")


class InterruptedEarlyError(Exception):
    """The machine is being taken away before training has begun."""


class LimitReachedError(Exception):
    """A limit of the run is reached before training has begun."""


class Supervisor:
    """One attempt. Call `run`, which returns the exit code for the node."""

    record: attempts.OwnRecord  # this and the next three attributes exist after the attempt is registered
    others: attempts.Others
    number: int  # the number of this attempt
    meter: Meter

    def __init__(self, run: RunFile, node: Node, workdir: Path, world: Outside) -> None:
        self.run_file, self.node, self.workdir, self.world = run, node, workdir, world
        self.cause: Cause | None = None
        self.say = world.log.say
        self.store, self.clock = world.store, world.clock
        self.forecast = Forecast(run.config, node.type, phases=run.estimate.phases, notice=run.estimate.notice)
        self.publisher = Publisher(
            run=run.run, store=self.store, workdir=workdir, published=self._published, say=self.say
        )
        self.uploader = Uploader(self.publisher, world.uploads, self.clock, self.say, self.forecast.upload_s)
        self.graphs = GraphMirror(run, self.store, workdir, self.say)
        self.pulse = Pulse(
            store=self.store,
            instance=node.instance,
            log=world.log.path,
            publisher=self.publisher,
            executor=world.pulse,
            also=self._refresh,
            say=self.say,
        )
        self.staging = staging.Stage(
            store=self.store,
            run=run,
            workdir=workdir,
            say=self.say,
            check=self._check,
            pause=world.sleep,
            doubts=lambda key: attempts.doubts(self.others.attempts, key),
        )
        self.tracker = Tracker(run, workdir, world.log.write, self.say)
        self.progress = MetricsFollower(workdir / METRICS, self.clock, self._track)
        self.resumed_step = 0
        self.rung = 0
        self.asked = False  # whether somebody asked the run to end
        # The time at which this node learned that an on-demand node takes the run over.
        self.superseded_at: float | None = None
        self._beat_at = float("-inf")
        self._metered = False
        self.killed = ""  # why the trainer was killed; empty if it was not
        self.lost = ""  # the GPU that failed, and how
        self._child: Trainer | None = None
        self._kill_at: float | None = None
        self._advised: str | None = None
        self._spent_at = float("-inf")
        self._switch_is_paid = True
        # the newest checkpoint of a job that saves by itself, and the time at which it appeared
        self._seen_save = (0, 0.0)

    def run(self) -> int:
        """Runs the attempt to its end; returns the exit code for the node."""
        try:
            if (over := self._read_done()) is not None:
                self.say(f"the run is over already: {over.reason}")
                return AttemptExit.FAILED if over.reason in ends.FAILURES else AttemptExit.FINISHED
            self._patiently(self._register, "what earlier attempts left")
            self._ask_price()  # asked first, because limits depend on the price
            self._beat()
            if lacking := self._lost() or self._lacking():
                return self._crashed(f"node refused: {lacking}", code=AttemptExit.REFUSED)
            try:
                self._stage()
            except ValueError as error:  # the error would be the same on every node
                return self._finish(ends.FAILED, str(error))
            self._look()
            return self._conclude(self._train())
        except InterruptedEarlyError:
            self._look()
            return self._interrupted()
        except LimitReachedError as error:
            return self._finish(str(error))
        except staging.MismatchError as error:  # this node's memory or disk is blamed until other nodes report the same
            if attempts.doubts(self.others.attempts, error.key):
                return self._crashed(f"{attempts.WRONG}: {error}", code=AttemptExit.REFUSED)
            return self._finish(ends.FAILED, str(error))
        except StoreError as error:
            return self._crashed(f"the store: {error}")
        except OSError as error:
            return self._crashed(f"this node's disk: {error}")
        except Exception as error:  # noqa: BLE001 - whatever it is, it leaves a record and what was committed
            self.say(traceback.format_exc())
            return self._crashed(f"{type(error).__name__}: {error}")
        finally:
            if self._child is not None:
                self._child.kill()
            self.tracker.kill()
            self.publisher.cancel()  # so that no running upload can delay the end of this process
            self.graphs.cancel()

    def _read_done(self) -> ends.Done | None:
        """done.json; None if the run has not ended. Raises StoreError."""
        return ends.read(self._patiently(lambda: self.store.get_bytes(bucket.DONE), bucket.DONE))

    def _register(self) -> None:
        """Reads earlier attempts and their cost, and writes this attempt's record. Raises StoreError, OSError."""
        staging.clear(self.workdir)
        log = self.store.get_bytes(LOG)
        if log:
            atomic.write_bytes(self.world.log.path, log)
        self.record = attempts.OwnRecord(
            self.store, self.node.instance, lambda why: self.say(f"of this node's record: set aside: {why}")
        )
        self.others = attempts.Others(
            self.store, self.run_file, self.node, self.world.fleet_history, self.say, self.record.now
        )
        self.others.before = attempts.read_before(self.store, self.run_file, self.node)
        self.run_file = replace(self.run_file, limits=self.run_file.limits_after(*self.others.before))
        earlier = self.others.attempts
        self.number = len(earlier) + 1
        self.meter = Meter(
            rates=self.run_file.rates(self.node.type, self.node.zone, self.node.capacity),
            launched_at=self.node.launched_at,
            older_s=self.node.older_s,
            fixed_usd=self.run_file.fixed_usd,
            others=self.others.spent,
            spot_price=self.world.spot_price,
            nodes=self.run_file.nodes,
        )
        self._metered = True
        # The rungs of the ladder at which memory has really run out. If a phase is only predicted not to fit, the
        # trainer itself chooses a lower rung.
        floors = [attempt.record.floor for attempt in earlier if attempt.record.type == self.node.type]
        self.rung = max(filter(None, floors), default=0)
        self.say(f"attempt {self.number} of run {self.run_file.run} on {self.node.instance} {self.node.type}")
        self.record.update(
            type=self.node.type,
            zone=self.node.zone,
            capacity=self.node.capacity,
            launched_at=iso(self.node.launched_at),
            attempt=self.number,
            supervised_at=iso(self.clock()),
            pulled_s=Decimal(self.node.pulled_s) if self.node.pulled_s else None,
            ranks=self.world.ranks,
            machine=machine.describe(self.world.gpus() if self.run_file.config.device == "cuda" else ()),
        )

    def _lacking(self) -> str | None:
        """Why this node is refused before any download; None if it is not refused. Without this check the trainer would
        use whatever GPUs it finds.
        """
        config, listed = self.run_file.config, self.run_file.gpus(self.node.type)
        if config.device != "cuda" or attempts.accepts(self.others.attempts):
            return None
        working, needed = len(self.world.gpus()), config.gpus_needed(listed) if listed else 0
        return (
            None if working >= needed else f"{working} working GPUs; this run needs {needed} GPUs of {self.node.type}"
        )

    def _stage(self) -> None:
        """Downloads dataset, base weights, checkpoint, finished results of phases after training (stages/*.jsonl), and
        compiled graphs. Raises InterruptedEarlyError, StoreError, MismatchError, OSError. Raises ValueError if another
        node would fail in the same way.
        """
        staging.inputs(self.staging)
        self._resume()
        if lines := self._patiently(self.publisher.stages.restore, STAGES):
            self.say(f"{lines} results of its stages are there already")
        self.graphs.restore(self._check)
        self._check()

    def _fall_back(self, unreadable: Unreadable) -> bool:
        """Goes back to the previous checkpoint, because the newest one cannot be read although its bytes are right.
        Returns False if there is no earlier checkpoint.
        """
        if not staging.set_aside(self.staging, unreadable.step, unreadable.problem):
            return False
        self._drain(self.clock() + CRASH_S)
        shutil.rmtree(self.workdir / CHECKPOINTS, ignore_errors=True)
        self._resume()
        return True

    def _resume(self) -> None:
        """Downloads the store's newest good checkpoint, and the log that belongs to this checkpoint."""
        self._go_on_from(staging.checkpoint(self.staging))

    def _go_on_from(self, manifest: Manifest | None) -> None:
        self.resumed_step = 0 if manifest is None else manifest.commit.goes_on_from
        self._seen_save = (self.resumed_step, self.clock())
        # The publisher must have the manifest before the attempt can end, because it deletes checkpoints that it does
        # not know.
        self._patiently(lambda: self.publisher.resumed(manifest), BEST)
        if manifest is not None:
            if not staging.best_too(self.staging, manifest.place):
                self.publisher.forget_best(manifest)
            metrics = self._patiently(lambda: self.store.get_bytes(METRICS), METRICS)
            if metrics:
                atomic.write_bytes(self.workdir / METRICS, metrics)
        self.progress.skip(self.resumed_step)
        self.record.update(resumed_step=self.resumed_step)
        if manifest is not None:
            # The next heartbeat sends it. Without a heartbeat, a lost node would look as if it had begun anew.
            with suppress(StoreError):
                self.record.flush()

    def _patiently(self, act: Callable[[], T], title: str) -> T:
        return staging.retried(self.staging, act, title)

    def _check(self) -> None:
        self._keep_alive()
        if self._leaving() is not None:
            raise InterruptedEarlyError
        if self._metered and (limit := self._limit(self.clock(), 0.0)) is not None:
            raise LimitReachedError(limit)

    def _train(self) -> int:
        """Trains; returns the trainer's exit code, or STOPPED if the trainer never began. If memory runs out, the
        trainer starts again at a lower rung.
        """
        if attempts.accepts(self.others.attempts):
            self._tell(Accept())
        while self.cause is None or self._owes_model():
            self.record.update(floor=self.rung)
            with suppress(OSError):  # a file of an earlier start must not be read in this start
                (self.workdir / RUNG).unlink(missing_ok=True)
            self._tell_spent(self.clock())
            self._child = self.world.start(self.rung)
            self._seen_save = (self.resumed_step, self.clock())
            self.progress.grew_at = self.clock()
            while (code := self._child.poll()) is None:
                self._tick()
                self.world.sleep(TICK_S)
            self.progress.poll()
            self._take_notes()
            unreadable = self._unreadable(code)
            if unreadable is not None and self.cause is None and self._fall_back(unreadable):
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
        """Whether somebody asked for a stop before this node trained. In that case the trainer starts only to export
        the checkpoint's model. If a limit was reached, the trainer does not start, because there is no money left.
        """
        return self._by_hand and self._child is None and self.resumed_step > 0

    @property
    def _by_hand(self) -> bool:
        return self.cause is not None and self.cause.reason == ends.STOPPED

    def _unreadable(self, code: int) -> Unreadable | None:
        return Unreadable.read(self.workdir) if code == TrainerExit.UNREADABLE else None

    def _tick(self) -> None:
        now = self.clock()
        self.progress.poll()
        if self.progress.first_at is not None and self.record.now.started_s is None:
            self.record.update(started_s=Decimal(f"{self.progress.first_at - self.node.launched_at:.3f}"))
        self.uploader.poll()
        if self.cause is None and self.uploader.idle:
            self.graphs.poll(self.world.uploads)
        self.forecast.learn(self.publisher.measured)
        self.forecast.learn_saves(metrics.saves(self.progress.record))
        if now >= self._spent_at + SPENT_S:
            self._tell_spent(now)
        self._look()
        self._keep_alive()
        advice = self.world.metadata.save_wanted
        if advice is not None and advice != self._advised:
            self._advised = advice
            self._tell(SaveRequest(reason=advice))
        self._end_if_lost()
        self._end_if_stuck(now)

    def _end_if_lost(self) -> None:
        """Ends the attempt at once if a GPU is off the bus, because the trainer cannot save then, and other
        nodes wait.
        """
        assert self._child is not None
        if not self.lost and (lost := self._lost()):
            self.lost = lost
            self.say(f"a GPU is lost, {lost}: killed")
            self._child.kill()

    def _lost(self) -> str:
        """A sentence about how a GPU of this node is broken; empty if none is, or if earlier nodes were refused for the
        same reason.
        """
        if self.world.sampler is None or attempts.accepts(self.others.attempts):
            return ""
        return self.world.sampler.lost()

    @property
    def waits_since(self) -> float:
        """The time at which this node became the oldest of several waiting nodes; 0 if it is not the oldest."""
        return 0.0

    def _tell_spent(self, now: float) -> None:
        self._spent_at, spent = now, self.meter.spent(now)
        trained_at = 0.0 if self.progress.first_at is None else self.progress.grew_at
        published, step, step_s = self.publisher.newest.step, self.progress.step, self.progress.step_s
        next_switch = switch.find_switch(
            self.run_file,
            done_share=self.forecast.done_share(step),
            slower=self.forecast.slower(step, self.progress.usual_step_s),
            stop_s=self.forecast.end_s(step, step_s) + RESERVE_S,
            spent_usd=spent.usd,
            spent_s=spent.seconds,
        )
        if next_switch.is_paid != self._switch_is_paid:
            self._switch_is_paid = next_switch.is_paid
            fits = "fits" if next_switch.is_paid else "no longer fits"
            then = "" if next_switch.is_paid else ": no switch"
            self.say(f"fallback: the cost of the rest on demand {fits} within the limits{then}")
        self._tell(
            Spent(
                spent_usd=spent.usd,
                spent_s=spent.seconds,
                at=now,
                attempt=self.number,
                published=published,
                trained_at=trained_at,
                switch_at=next_switch.at,
                switch_is_paid=next_switch.is_paid,
                waits_since=self.waits_since,
            )
        )

    def _leaving(self) -> Cause | None:
        """Why and when this machine will be taken away; None if there is no sign of it. Only this method checks for a
        notice.
        """
        if (notice := self.world.metadata.notice) is not None:
            return Cause(reason="notice", deadline=notice)
        if (terminated := self.world.terminated()) is not None:
            return Cause(reason="sigterm", deadline=terminated + SIGTERM_S)
        if self.superseded_at is not None:
            return Cause(reason=SUPERSEDED, deadline=self.superseded_at + HANDOVER_S - LATE_S)
        return None

    def _look(self) -> None:
        """Looks for a reason to stop.

        The first reason is used, except that a limit may replace a stop by hand.
        """
        now, leaving = self.clock(), self._leaving()
        end_s = self.forecast.end_s(self.progress.step, self.progress.step_s)
        if self.cause is not None:
            if self._by_hand and self._kill_at is not None and self._limit(now, end_s):
                self._kill_at = min(self._kill_at, now + self._patience_s(now, end_s))
            return
        if leaving is not None:
            self.cause = leaving
        elif (limit := self._limit(now, end_s) or self._limit_before_next_save(now, end_s)) is not None:
            # This comes before a stop by hand, which has more time.
            self.cause = Cause(reason=limit)
        elif self.asked:
            self.cause = Cause(reason=ends.STOPPED)
        if self.cause is not None:
            self._stop(self.cause, now)
            if self.cause.deadline is not None:
                self._note(self.cause, now)

    def _limit(self, now: float, end_s: float) -> str | None:
        return self.meter.limit(now, self.run_file.limits, end_s + RESERVE_S)

    def _limit_before_next_save(self, now: float, end_s: float) -> str | None:
        """For a job that saves only by itself: the limit that comes before its next checkpoint, so that the training
        until then would not be in any checkpoint. None if the next checkpoint comes first, or if the job has not saved
        yet.
        """
        if self.run_file.config.saves_on_signal is not False:
            return None
        newest = max((commit.step for commit in commits(self.workdir)), default=0)
        saved, at = self._seen_save
        if newest <= saved:
            return None
        self._seen_save, interval_s = (newest, now), now - at
        if saved == self.resumed_step:  # the first interval is not used, because it also contains the start
            interval_s = min(interval_s, self.run_file.config.save_interval_s(self.progress.step_s or 0.0))
        return self._limit(now + interval_s, end_s)

    def _stop(self, cause: Cause, now: float) -> None:
        forecast = self.forecast.end_s if cause.deadline is None else self.forecast.stop_s
        needed = forecast(self.progress.step, self.progress.step_s)
        save = cause.deadline is None or now + needed + MARGIN_S <= cause.deadline
        time_left = f", {(cause.deadline or now) - now:.0f} s left, save and upload need {needed:.0f} s"
        self.say(
            f"stopping: {cause.reason}{'' if cause.ends else time_left}{'' if save else ': nothing more is saved'}"
        )
        self.graphs.cancel()
        if save and cause.deadline is not None:
            self.uploader.hurry(cause.deadline)
        # A stop by hand is not urgent, and a job that is starting, compiling or growing does not look for it yet.
        patience = max(FIRST_SIGN_S, 3 * needed) if self._by_hand else self._patience_s(now, needed)
        self._kill_at = now + patience if cause.deadline is None else cause.deadline
        if not self._tell(Stop(reason=cause.reason, save=save, ends=cause.ends, deadline=cause.deadline)):
            self._kill_at = now  # killed at once, because this job cannot be asked to save

    def _patience_s(self, now: float, needed: float) -> float:
        """Seconds to wait for a trainer that was asked to stop because of a limit: until a minute and the time of a
        checkpoint after the limit.
        """
        most, stop_s = max(PATIENCE_S, 3 * needed), self.forecast.stop_s(self.progress.step, self.progress.step_s)
        return min(most, self._left_s(now, most) + PAST_S + stop_s)

    def _left_s(self, now: float, most_s: float) -> float:
        return self.meter.left_s(now, self.run_file.limits, most_s)

    def _counted_until(self, seconds: float) -> float:
        """The time until which ending this attempt may take: `seconds` from now, but not far past a limit."""
        now = self.clock()
        return now + (min(seconds, self._left_s(now, seconds) + PAST_S) if self._metered else seconds)

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
        """Ends the attempt in the way that belongs to the trainer's exit code."""
        command_end = CommandEnd.read(self.workdir)  # the command has ended by itself
        reason = self.killed or (command_end.full_text if command_end else f"the trainer ended with {code}")
        if code == TrainerExit.FINISHED:
            return self._finish(ends.FINISHED)
        if code == TrainerExit.FATAL:
            fatal = Fatal.read(self.workdir)
            lost = "the reason is in job.log; fatal.json could not be written"
            return self._finish(ends.FAILED, f"{fatal.error}: {fatal.detail}" if fatal else lost)
        if code not in (TrainerExit.FINISHED, TrainerExit.STOPPED) and (lost := self.lost or self._lost()):
            return self._crashed(f"node refused: a GPU is lost, {lost}", code=AttemptExit.REFUSED)
        # another node may be able to run the job
        if code == TrainerExit.REFUSED and (self.cause is None or self._by_hand):
            problems = (Preflight.read(self.workdir) or Preflight()).problems or ("no reason given",)
            return self._crashed(f"node refused: {'; '.join(problems)}", code=AttemptExit.REFUSED)
        if self.cause is not None and self.cause.ends:
            detail = command_end.full_text if command_end else "" if code == TrainerExit.STOPPED else reason
            return self._finish(self.cause.reason, detail)
        if self.cause is not None:
            return self._interrupted()
        if (unreadable := self._unreadable(code)) is not None:
            return self._crashed(f"{unreadable.problem}, and there is no earlier checkpoint")
        return self._crashed(reason)

    def _tell(self, message: Message) -> bool:
        """Writes a message for the trainer. Returns False if the disk refuses it."""
        try:
            message.write(self.workdir)
        except OSError as error:
            self.say(f"{message.FILE} cannot be written: {error}")
            return False
        return True

    def _finish(self, reason: str, detail: str = "") -> int:
        """Uploads everything, then the receipt, then done.json. Returns 0, or 70 for `failed`, or 1 if the store
        refuses an upload and there is money for another try.
        """
        code = AttemptExit.FAILED if reason == ends.FAILED else AttemptExit.FINISHED
        self.say(f"the run ends: {reason} {detail}".rstrip())
        self.tracker.end(reason)
        until = self._counted_until(FINISH_S)
        all_sent = self._drain(until if code == AttemptExit.FINISHED else self._counted_until(CRASH_S))
        try:
            if code == AttemptExit.FINISHED and not all_sent:
                raise StoreError("the last checkpoints could not be uploaded")
            self._insist(until, lambda: self._in_upload_thread(self.publisher.outputs))
        except OSError as error:
            if self._limit(self.clock(), 0.0) is None:
                return self._crashed(f"the end of the run could not be written: {error}")
            self.say(f"at a limit no other node tries again: {error}")
        self._wait_for_tracker()
        self._tell_end(ends.Done(reason, detail, self.node.instance, iso(self.clock())), code)
        return code

    def _track(self, record: dict[str, Any]) -> None:
        """Passes a line of metrics.jsonl on to the tracker. If there are several nodes, only the leader does this."""
        if self.publisher.node == 0:
            self.tracker.take(record)

    def _wait_for_tracker(self) -> None:
        """Waits for a limited time until the tracker has sent what it still has."""
        until = self._counted_until(TRACKER_S)
        while not self.tracker.wait(TICK_S):
            self._keep_alive()
            if self.clock() >= until:
                return self.say("warning: log.tracker did not end in time: its last metrics are lost")

    def _tell_end(self, done: ends.Done, code: int) -> None:
        """Writes to the bucket how the run ended. If this fails, no further attempt is needed: within minutes the node
        uploads the missing done.json from the work folder, and `gpufleet results` makes the receipt.
        """
        marker, until = atomic.json_bytes(done.to_json()), self._counted_until(MARK_S)
        self.record.update(exit=Exit(code, done.reason, at=done.at))
        with suppress(OSError):
            atomic.write_bytes(self.workdir / bucket.DONE, marker)
        for act in (
            lambda: self.pulse.last(self.heartbeat()),
            lambda: self._write_receipt(done),
            self.record.flush,
            lambda: send_log(self.store, self.world.log.path, LOG),
            lambda: create(self.store, marker, bucket.DONE),  # if there are several writers, the first object stays
        ):
            try:
                self._insist(until, act)
            except OSError as error:
                self.say(f"the end of the run could not be recorded: {error}")

    def _interrupted(self) -> int:
        """Publishes what time allows, then records the interruption."""
        self.tracker.end()  # the tracker can send while the uploads go on
        cause = self.cause
        assert cause is not None
        assert cause.deadline is not None
        self.uploader.hurry(cause.deadline)
        published = self._drain(cause.deadline + (LATE_S if cause.reason == "notice" else 0.0))
        self.say(
            f"interrupted ({cause.reason}); newest published step {self.publisher.newest.step}"
            + ("" if published else "; more was committed, and is lost")
        )
        self._leave(attempts.interruption(cause, self.clock()))
        return AttemptExit.INTERRUPTED

    def _crashed(self, why: str, code: int = AttemptExit.CRASHED) -> int:
        """Publishes the trainer's committed checkpoints. The node counts such ends, and shuts down without done.json,
        so that the fleet starts another node. The `code` is REFUSED if this node is bad.
        """
        self.say(f"this attempt failed: {why}")
        self.tracker.end()
        if self._metered:
            self._drain(self._counted_until(CRASH_S))
            self._leave(Exit(code, why, at=iso(self.clock())))
        return code

    def _leave(self, ending: Exit) -> None:
        self.record.update(exit=ending)
        for act in (self.record.flush, lambda: self.pulse.last(self.heartbeat())):
            try:
                act()
            except OSError as error:
                self.say(f"not written: {error}")

    def _drain(self, until: float) -> bool:
        """Uploads committed checkpoints until all are sent or time is up. Returns True if all are sent."""
        self.uploader.poll()
        while not self.uploader.idle and self.clock() < until and not self._waits_in_vain():
            self._keep_alive()
            self.world.sleep(TICK_S)
            self.uploader.poll()
        return self.uploader.idle

    def _waits_in_vain(self) -> bool:
        """Whether a checkpoint can never be published, because the nodes that have its missing parts will not send
        them.
        """
        return False

    def _in_upload_thread(self, act: Callable[[], None]) -> None:
        """Runs `act` in the upload thread as soon as this thread is idle, and sends heartbeats meanwhile."""
        if not self.uploader.idle:
            return act()
        doing = self.world.uploads.submit(act)
        while not doing.done():
            self._keep_alive()
            self.world.sleep(TICK_S)
        return doing.result()

    def _insist(self, until: float, act: Callable[[], Any]) -> None:
        pause = 2.0
        while True:
            try:
                act()
                return
            except StoreError as error:
                if self.clock() + pause > until or isinstance(error, SupersededError):
                    raise
                self.say(f"{error}; again in {pause:.0f} s")
                again = self.clock() + pause
                while self.clock() < again:
                    self._keep_alive()
                    self.world.sleep(TICK_S)
                pause = min(2 * pause, 60.0)

    def _write_receipt(self, done: ends.Done) -> None:
        """Writes receipt.json, and writes it into the log as text. If the bill cannot be compared, there is no
        receipt.
        """
        try:
            run, record = self.run_file, self.record.now
            own = count_node(run, replace(record, instance=self.node.instance), self.heartbeat())
            every = sorted([*self.others.attempts, own], key=lambda attempt: attempt.record.launched)
            measurement = receipt.measure(run, every, self.workdir, record, at=done.at)
            results = results_in(self.workdir)
            made = receipt.build(run, every, done, objects=self._objects(), measurement=measurement, results=results)
            text = receipt.text(made)
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            self.say(f"no receipt: {type(error).__name__}: {error}")
            return
        self.store.put_bytes(atomic.json_bytes(made.to_json()), RECEIPT)
        with suppress(OSError):
            atomic.write_json(self.workdir / RECEIPT, made.to_json())
        self.world.log.write((text + "\n").encode())

    def _objects(self) -> dict[str, int] | None:
        """The bytes of the run's objects, by key; None if the store does not answer, because a receipt does not wait
        for it.
        """
        try:
            return {entry.key: entry.bytes for entry in self.store.entries("")}
        except StoreError:
            return None

    def heartbeat(self) -> Beat:
        """One line of heartbeat/<instance>.jsonl, from which later attempts can see what this attempt has cost."""
        now, seen, sampler = self.clock(), self.progress.record, self.world.sampler
        spent = self.meter.spent(now)
        return Beat(
            ts=iso(now),
            step=self.progress.step,
            phase=seen.get("phase"),
            loss=seen.get("loss"),
            tok_s=seen.get("tok_s"),
            step_s=self.progress.step_s,
            spent_usd=spent.usd,
            attempt_usd=spent.attempt_usd,
            attempt_s=spent.attempt_s,
            lived_s=Decimal(f"{now - self.node.launched_at:.3f}"),
            compute_usd=spent.compute_usd,
            usd_per_hour=spent.usd_per_hour,
            ceiling_s=spent.ceiling_s,
            **({} if sampler is None or sampler.now is None else sampler.now.figures()),
            xids=() if sampler is None else tuple(sampler.xids[-XIDS:]),
        )

    def _keep_alive(self) -> None:
        """Sends heartbeats, and notices the first sign that the machine will be taken away. Every long operation calls
        it, even while the run is ending; uploads then hurry too.
        """
        now, leaving = self.clock(), self._leaving()
        if leaving is not None and leaving.deadline is not None and self.record.now.exit is None:
            self.uploader.hurry(leaving.deadline)
            self._note(leaving, now)
        elif now >= self._beat_at + self.run_file.config.checkpoint.heartbeat_s:
            self._beat()

    def _note(self, cause: Cause, now: float) -> None:
        """Records the interruption at once, so that a machine that is taken during its last upload does not look as if
        it had crashed.
        """
        self.record.update(exit=attempts.interruption(cause, now))
        self._beat()

    def _beat(self) -> None:
        """Sends a heartbeat now, with the trainer's files beside its metrics."""
        self._beat_at = self.clock()
        self._take_notes()
        self.pulse.beat(self.heartbeat())

    def _take_notes(self) -> None:
        """Writes what the trainer has reported, and the fleet's history of earlier nodes, into
        attempts/<instance>.json.
        """
        was, others = self.record.now, self.others
        record = replace(was, reclaimed=attempts.reclaimed(others.attempts), ended=others.ended, untold=others.untold)
        if record != was:
            self.record.update(reclaimed=record.reclaimed, ended=record.ended, untold=record.untold)
        alarm = Alarm.read(self.workdir)
        if alarm is not None and alarm.text != self.record.now.alarm:
            self.record.update(alarm=alarm.text)
        used = UsedRung.read(self.workdir)
        if used is not None and used.rung != self.record.now.rung:
            self.record.update(rung=used.rung)
        for name, file in (("preflight", PREFLIGHT), ("compiled", COMPILED)):
            noted = atomic.read_object(self.workdir / file)
            if noted is not None and noted != getattr(self.record.now, name):
                self.record.update(**{name: noted})

    def _refresh(self) -> None:
        if self.publisher.stages.added and not self.record.now.results:
            # From now on this attempt has made progress, however it ends (job/node/earlier_boots.py).
            self.record.update(results=True)
        self.record.flush()
        self._ask_price()
        self.others.look(self.clock())
        self.meter.count(self.others.spent, self.clock())
        self.asked = self.asked or self.store.get_bytes(bucket.ASKED) is not None
        waits = self.run_file.gives_way(self.node.capacity) and self.superseded_at is None
        if waits and self.store.get_bytes(bucket.FALLBACK) is not None:
            self.superseded_at = self.clock()

    def _ask_price(self) -> None:
        if news := self.meter.news(self.clock()):
            self.say(news)

    def _published(self) -> Published:
        spent = self.meter.spent(self.clock())
        return Published(
            code_sha256=self.run_file.code_sha256,
            attempt=self.number,
            instance=self.node.instance,
            spent_usd=str(spent.usd),
            spent_s=str(spent.seconds),
            published_at=iso(self.clock()),
        )
