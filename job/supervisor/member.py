"""One attempt on one of several nodes: the node becomes ready, trains when a generation includes it, and ends as any
attempt does. A generation's leader does what a single node's supervisor does; a follower only watches its own machine
and the other nodes. gang.py makes the decisions; see docs/interruptions.md.
"""

from __future__ import annotations

import math
import shutil
from collections import deque
from contextlib import suppress
from dataclasses import replace
from decimal import Decimal
from pathlib import Path
from statistics import median

from gpufleet.job import atomic
from gpufleet.job.contract import bucket
from gpufleet.job.contract import done as ends
from gpufleet.job.contract.attempt import SLOW, Exit, Node
from gpufleet.job.contract.bucket import CheckpointPlace
from gpufleet.job.contract.codes import AttemptExit, TrainerExit
from gpufleet.job.contract.gang import GangGeneration
from gpufleet.job.contract.gathering import LET_GO, pause_s, wait_s
from gpufleet.job.contract.messages import (
    Accept,
    Alarm,
    AskAgain,
    Fatal,
    LeaderSaved,
    Observed,
    Preflight,
    Stop,
    UsedRung,
)
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.run import RunFile
from gpufleet.job.contract.workdir import (
    CHECKPOINTS,
    LEADER_SAVED,
    LEFT,
    LOG,
    METRICS,
    OBSERVED,
    PREFLIGHT,
    RUNG,
    STEPPED,
    STEPS,
    STOP,
)
from gpufleet.job.supervisor import attempts, gang, staging
from gpufleet.job.supervisor.attempt import CRASH_S, FINISH_S, LATE_S, SPENT_S, TICK_S, LimitReachedError, Supervisor
from gpufleet.job.supervisor.presence import ConditionalStore, Lookout
from gpufleet.job.supervisor.publish import commits
from gpufleet.job.supervisor.rendezvous import Rendezvous
from gpufleet.job.supervisor.store import StoreError
from gpufleet.job.supervisor.uploads import PART_S
from gpufleet.job.supervisor.world import Cause, Outside

# seconds that other nodes get to finish their parts of a checkpoint, once the leader has named that checkpoint
MADE_S = 120.0


class GangMember(Supervisor):
    """One attempt on one of several nodes. `run` returns the exit code for the node."""

    def __init__(self, run: RunFile, node: Node, workdir: Path, world: Outside, watch: Lookout) -> None:
        self.watch = watch
        self.fence = ConditionalStore(world.store)
        super().__init__(run, node, workdir, replace(world, store=self.fence))
        self.generation: GangGeneration | None = None  # the generation that trains, or whose end is being published
        self._left: gang.Leave | None = None
        self._over: ends.Done | None = None
        self.pulse.leads, self._waits_for = False, ""
        self._own_log = 0  # position in job.log: the text from there on is in no leader's copy
        self._in_vain_since: float | None = None
        self._told_at = 0.0  # the last time at which no checkpoint waited for its publication
        self._spare_since: float | None = None
        self._ready_since: float | None = None
        self._lacking_since: float | None = None
        self._gathers_since = 0.0  # the time since which the node has been ready but in no generation
        # the newest generation, and how often waiting nodes had ended when it was first seen
        self._let_go: tuple[int, int] | None = None
        # the newest step of this node's ranks, and the time at which this step was seen
        self._stepped: tuple[int, float] = (0, 0.0)
        # the time per step that the ranks need alone, before a step needs other nodes
        self._own_s: deque[float] = deque(maxlen=gang.SLOW_STEPS)
        self._was_silent = False  # whether, at the last look, a member was silent while its ranks went on
        self._is_slow = False  # whether this node is slow and has reported it
        self._gives_way_at: float | None = None  # the time at which this node leaves because it is slow

    def run(self) -> int:
        """Runs the attempt, in the same way as for a single node."""
        try:
            return super().run()
        finally:
            self.watch.leave()

    @property
    def _leaves_parts(self) -> bool:
        """Whether each node sends the part of a checkpoint that its own ranks wrote."""
        return self.run_file.config.parts.leaves

    @property
    def leads(self) -> bool:
        """Whether this node decides: as leader of its generation, or as the oldest of the waiting nodes."""
        if self.generation is not None:
            return self.generation.leader == self.node.instance
        return gang.acts(self.watch.view)

    def _resume(self) -> None:
        """Does nothing: the checkpoint is known only when a generation begins."""

    def _begin_from(self, origin: CheckpointPlace | None) -> bool:
        """Makes `origin` the only checkpoint on this disk; None removes all. Returns False if it does not verify."""
        steps, folder = [commit.step for commit in commits(self.workdir)], self.workdir / CHECKPOINTS
        if origin is None:
            shutil.rmtree(folder, ignore_errors=True)
            self._go_on_from(None)
            return True
        if self.publisher.newest == origin and max(steps, default=-1) == origin.step and not self._leaves_parts:
            self.resumed_step = origin.step
            self.progress.skip(origin.step)
            return True
        manifest = staging.checkpoint_at(self.staging, origin)
        if manifest is None:
            return False
        for path in folder.glob(STEPS):
            if path.name != manifest.commit.folder:
                shutil.rmtree(path, ignore_errors=True)
        self._go_on_from(manifest)
        return True

    def _newest_published(self) -> CheckpointPlace | None:
        """The checkpoint from which the next generation may begin, or None. Raises StoreError."""
        entries = self._patiently(lambda: self.store.entries(bucket.CHECKPOINTS), bucket.CHECKPOINTS)
        places = gang.timely(bucket.published(entry.key for entry in entries), self.watch.view.newest)
        return places[-1] if places else None

    def _gather(self) -> GangGeneration | None:
        """Waits for a generation that includes this node; None if the attempt is over instead. Raises
        InterruptedEarlyError, LimitReachedError, StoreError.
        """
        self.watch.tell(state="ready")
        self._gathers_since = self.clock()
        if self.pulse.leads:
            with suppress(StoreError, OSError):  # the trainer's output since the last heartbeat
                self.store.put_bytes(self.world.log.path.read_bytes(), LOG)
            self.pulse.leads, self._own_log = False, self._log_bytes()
        while True:
            view = self.watch.view
            if view.is_over:
                self._over = self._read_done()
                return None
            if self._has_let_go(view):
                self._left = gang.Leave(code=AttemptExit.INTERRUPTED, why=LET_GO)
                return None
            self._check()
            self._tell_now_and_then()
            if self.asked and self.leads:
                raise LimitReachedError(ends.STOPPED)
            action = self._next(view)
            if isinstance(action, gang.Join):
                return action.generation
            if isinstance(action, gang.Leave):
                self._left = action
                return None
            if isinstance(action, gang.Propose):
                with suppress(StoreError):  # this node or another one proposes the generation later
                    informed = self._next(view, self._newest_published())
                    if isinstance(informed, gang.Propose):
                        self.watch.propose(informed.generation)
            elif isinstance(action, gang.LetAllGo):
                self.say(
                    f"other nodes have been missing for {self.clock() - self._gathers_since:.0f} s: all waiting nodes "
                    "end"
                )
                self.watch.let_go()
            elif action.why != self._waits_for:
                self._waits_for = action.why
                self.say(f"waits: {action.why}")
            self.world.sleep(TICK_S)

    def _has_let_go(self, view: gang.View) -> bool:
        """Whether the oldest waiting node has told all waiting nodes to leave since this node began to wait."""
        if view.let_go is None:
            return False
        seen = (view.newest.number if view.newest else 0, view.let_go)
        if self._let_go is None or self._let_go[0] != seen[0]:
            self._let_go = seen
        if seen == self._let_go:
            return False
        AskAgain(name=f"{seen[0]}-{seen[1]}", pause_s=pause_s(seen[1])).write(self.workdir)
        return True

    @property
    def waits_since(self) -> float:
        view = self.watch.view
        waits = self.generation is None and view.own.state == "ready" and gang.acts(view)
        return self._gathers_since if waits else 0.0

    def _next(self, view: gang.View, origin: CheckpointPlace | None = None) -> gang.Action:
        """Decides what this node does next. `origin` is the newest published checkpoint, which a proposal needs."""
        now, nodes = self.clock(), self.run_file.nodes
        enough = len(gang.ready_nodes(view)) >= nodes and not gang.busy_nodes(view)
        self._ready_since = (self._ready_since or now) if enough else None
        lacking = not self.run_file.replaces and len(gang.ready_nodes(view)) < nodes
        self._lacking_since = (self._lacking_since or now) if lacking else None
        spare = bool(gang.busy_nodes(view)) and view.newest is not None and view.own.instance not in view.newest.members
        self._spare_since = (self._spare_since or now) if spare else None
        may_wait_s = math.inf if self.run_file.gather_s is None else wait_s(self.run_file.gather_s, view.let_go or 0)
        return gang.next_of(
            view,
            nodes,
            ready_s=now - (self._ready_since or now),
            spare_s=now - (self._spare_since or now),
            lacking_s=now - (self._lacking_since or now),
            gather_s=may_wait_s - (now - self._gathers_since),
            origin=origin,
        )

    def _limit(self, now: float, end_s: float) -> str | None:
        return super()._limit(now, end_s) if self.leads else None

    def _train(self) -> int:
        while (generation := self._gather()) is not None:
            code = self._train_with(generation)
            if self._judge_end(generation, code):
                if self._fatal_peer(generation) is not None:
                    return TrainerExit.FATAL
                return code if self.leads or self.cause is None else TrainerExit.STOPPED
        return TrainerExit.STOPPED

    def _train_with(self, generation: GangGeneration) -> int:
        """Trains as a member of the generation, and returns the trainer's exit code."""
        self.watch.tell(
            state="busy", generation=generation.number, ended=None, said="", saved=-1, named_by="", own_s=0.0
        )
        self.uploader.abandon(self._pause)  # as a member, the node must not send what it had as a leader
        self.generation, self.fence.generation = generation, generation.number
        if self.leads:
            self._take_over()
        self._waits_for = ""
        rank = generation.members.index(self.node.instance)
        role = "leads it" if self.leads else f"follows {generation.leader}"
        self.say(f"generation {generation.number}: {', '.join(generation.members)}; this node {role}")
        self._forget()
        self.publisher.join(generation.number, rank, len(generation.members) if self._leaves_parts else 1)
        self.staging = replace(self.staging, node=rank)
        reads = self.leads or self.run_file.config.parts.reads
        if not self._begin_from(generation.origin if reads else None):
            return TrainerExit.UNREADABLE  # all nodes begin again, from the checkpoint before this one
        self.rung = generation.rung
        self.record.update(floor=self.rung)
        if attempts.accepts(self.others.attempts):
            self._tell(Accept())
        self._tell_spent(self.clock())
        now = self.clock()
        self._stepped, self._seen_save, self.progress.grew_at = (0, now), (self.resumed_step, now), now
        listed = self.run_file.prices.get(self.node.type)
        meeting = Rendezvous.of_member(generation, rank, listed.gbps if listed else 0.0)
        self._child = self.world.start(self.rung, meeting)
        while (code := self._child.poll()) is None:
            self._tick()
            if self._child is not None and (why := self._why_over(generation)) is not None:
                self.say(f"generation {generation.number} ends: {why}")
                self.killed = why
                self._child.kill()
            self.world.sleep(TICK_S)
        self.progress.poll()
        self._take_notes()
        return code

    def _pause(self) -> None:
        self._keep_alive()
        self.world.sleep(TICK_S)

    def _take_over(self) -> None:
        """Continues the run's log where the last leader's log ended; this node's output since then follows."""
        if not self.pulse.leads:
            stored = self._patiently(lambda: self.store.get_bytes(LOG), LOG) or b""
            with suppress(OSError):
                atomic.write_bytes(self.world.log.path, stored + self.world.log.path.read_bytes()[self._own_log :])
            self.pulse.leads = True

    def _log_bytes(self) -> int:
        path = self.world.log.path
        return path.stat().st_size if path.exists() else 0

    def _register(self) -> None:
        super()._register()
        self._own_log = self._log_bytes()
        self.watch.tell(rung=self.rung)  # the rung at which memory ran out before

    def _forget(self) -> None:
        """Removes the files of an earlier generation, which say nothing about this one."""
        self.cause, self.killed, self._kill_at = None, "", None
        self._own_s.clear()
        self.uploader.calm()
        for name in (STOP, RUNG, LEFT, STEPPED, LEADER_SAVED, OBSERVED):
            with suppress(OSError):
                (self.workdir / name).unlink(missing_ok=True)

    def _why_over(self, generation: GangGeneration) -> str | None:
        stopping = self.cause is not None or (self.workdir / STOP).exists()
        stopping |= self._has_done_all  # the leader's ranks save for the last time
        return gang.why_over(self.watch.view, generation, idle_s=self._idle_s(), stopping=stopping)

    @property
    def _has_done_all(self) -> bool:
        """Whether no step is left to do."""
        return self.forecast.done_share(self.progress.step) >= 1

    def _idle_s(self) -> float:
        """Seconds since a step of this node's ranks, or since the ranks began."""
        with suppress(OSError, ValueError):  # the file does not exist yet, or is being written
            step, own_s = (*(self.workdir / STEPPED).read_text().split(), "0")[:2]
            if int(step) != self._stepped[0]:
                self._stepped = int(step), self.clock()
                self._own_s.append(float(own_s))
                if int(step) % gang.SLOW_STEPS == 0 and len(self._own_s) == gang.SLOW_STEPS:
                    self.watch.tell(own_s=round(median(self._own_s), 4))
        return self.clock() - max(self._stepped[1], self.progress.grew_at)

    def _tick(self) -> None:
        """Does the regular work. A follower publishes only its part of a checkpoint. It does not judge progress,
        because it has no metrics.
        """
        if (leaving := self._leaving()) is not None:
            self.watch.tell(notice=leaving.deadline)
        if (seen := Observed.read(self.workdir)) is not None and seen.has_first:
            self.watch.tell(first_in=self.fence.generation)
        self._tell_slow()
        if self._leaves_parts:
            self._tell_saved()
        if self.leads:
            super()._tick()
            return
        if self._leaves_parts:
            self.uploader.poll()
        self.progress.poll()  # a command's metrics; a trainer's metrics are written only by the leader
        step, at = self._stepped
        if step and self.record.now.started_s is None:
            self.record.update(started_s=Decimal(f"{at - self.node.launched_at:.3f}"))
        self.progress.step = max(self.progress.step, step)
        self._tell_now_and_then()
        self._keep_alive()
        self._end_if_lost()
        if self._leader_stops() and not (self.workdir / STOP).exists():
            self._tell(Stop(reason="the run stops here", save=True))  # rank 0 tells a trainer's other ranks

    def _tell_slow(self) -> None:
        """Reports in this node's record, and so in status, receipt and messages, that the node keeps the others
        waiting. If a member is silent while the ranks go on, it logs one line.
        """
        assert self.generation is not None
        view = self.watch.view
        if (why := gang.why_slow(view, self.generation)) and not self._is_slow:
            self._is_slow = True
            self.say(f"warning: {why}")
            with suppress(OSError):
                Alarm(kind="slow", text=f"{self.node.instance} is slow: {why}").write(self.workdir)
        if self._gives_way_at is None and self._is_dearer_than_another(gang.late_each_step_s(view, self.generation)):
            stop_s = self.forecast.stop_s(self.progress.step, self.progress.step_s)
            self._gives_way_at = self.clock() + stop_s + LATE_S
            self.say("a new node is cheaper than waiting for this one, which saves and leaves")
        silent = [name for name, sight in view.others.items() if name in self.generation.members and not sight.is_there]
        if silent and not self._was_silent:
            self.say(f"no news from {', '.join(silent)} for {gang.LOST_S:.0f} s; the ranks' steps decide")
        self._was_silent = bool(silent)

    def _is_dearer_than_another(self, late_s: float) -> bool:
        """Whether waiting for this node, `late_s` per remaining step, costs more than waiting for a new one; meanwhile
        all nodes are billed. Only one node of a run leaves for this reason: if the next one is slow too, no node is at
        fault.
        """
        gather_s, began_s = self.run_file.gather_s, self.record.now.started_s
        has_left = any(
            attempt.record.exit is not None and attempt.record.exit.reason == SLOW for attempt in self.others.attempts
        )
        if not late_s or gather_s is None or began_s is None or has_left:
            return False
        return late_s * self.forecast.steps_left(self.progress.step) > gather_s + float(began_s)

    def _leaving(self) -> Cause | None:
        """Makes a slow node leave, as if AWS took it."""
        leaving = super()._leaving()
        return leaving or (None if self._gives_way_at is None else Cause(reason=SLOW, deadline=self._gives_way_at))

    def _tell_now_and_then(self) -> None:
        """Reports what the run has spent, because the node moves its timer only after such reports."""
        if (now := self.clock()) >= self._spent_at + SPENT_S:
            self._tell_spent(now)

    def _tell_saved(self) -> None:
        """Names the checkpoint to publish now: the leader tells the other nodes, a follower tells its ranks. The leader
        waits for a checkpoint's parts before it names the next checkpoint, if the parts may come and time allows.
        Otherwise no checkpoint would become whole when parts are slower than saves.
        """
        assert self.generation is not None
        newest = max(commits(self.workdir), key=lambda commit: commit.step, default=None)
        if newest is not None and not (self.leads and self._awaits_parts()):
            self.publisher.newest_wanted = newest.step
            self.watch.tell(saved=newest.step, named_by=newest.named_by)
        if self.leads:
            return
        leader = self.watch.view.others.get(self.generation.leader)
        if leader is None or leader.presence.generation != self.generation.number:
            return
        seen = leader.presence
        message = LeaderSaved(step=seen.saved, named_by=seen.named_by, ended=seen.ended is not None)
        if message != LeaderSaved.read(self.workdir):
            self._tell(message)

    def _awaits_parts(self) -> bool:
        """Whether the checkpoint named last is still to be published, and will be."""
        assert self.generation is not None
        step, now = self.watch.own.saved, self.clock()
        if step <= self.publisher.newest.step or self.cause is not None or self._child is None:
            self._told_at = now
            return False
        others = [self.watch.view.others.get(name) for name in self.generation.members[1:]]
        is_made = all(sight is not None and sight.presence.saved >= step for sight in others)
        return is_made or now - self._told_at < MADE_S

    def _leader_stops(self) -> bool:
        assert self.generation is not None
        return self.run_file.config.parts.reads and gang.leader_stops(self.watch.view, self.generation)

    def _look(self) -> None:
        """Treats a notice to any member as the leader's own, except that the leader does not leave."""
        if self.generation is None or self._child is None:
            super()._look()
            return
        now, peer_s = self.clock(), gang.notice_in_s(self.watch.view, self.generation)
        if self.leads and self.cause is None and peer_s is not None and self._leaving() is None:
            self.cause = Cause(reason="notice", deadline=now + peer_s)
            self._stop(self.cause, now)
        else:
            super()._look()
        self.watch.tell(stopping=self.cause is not None)

    def _judge_end(self, generation: GangGeneration, code: int) -> bool:
        """Acts on the end of this node's trainer. Returns False if the node is ready for another generation."""
        lower, self._child = self.rung, None
        if self._leaves_parts:
            self._tell_saved()
        if code == TrainerExit.OUT_OF_MEMORY:
            lower, code = self._lower(code)
        self.watch.tell(ended=code, rung=lower, said=self._said(code), stopping=False)
        if self._leaving() is not None:
            self.cause = self._leaving()
            return True
        if self.leads:
            if code == TrainerExit.FINISHED or code == TrainerExit.FATAL or self._fatal_peer(generation) is not None:
                return True
            if self.cause is not None and self.cause.ends:
                return True
            if (unreadable := self._unreadable(code)) is not None:
                staging.set_aside(self.staging, unreadable.step, unreadable.problem)
        self._drain(self._counted_until(FINISH_S if code in gang.TOGETHER else CRASH_S))
        refused = code == TrainerExit.REFUSED and bool((Preflight.read(self.workdir) or Preflight()).problems)
        if refused or (code not in gang.TOGETHER and (self.lost or self._lost())):
            return True
        with suppress(OSError):
            (self.workdir / PREFLIGHT).unlink(missing_ok=True)  # the next generation measures its own nodes together
        self.generation = self.cause = None
        return False

    def _drain(self, until: float) -> bool:
        """Publishes before the end what is not published yet. A follower sends only its parts, because the leader has
        its own copy of the other files.
        """
        self._in_vain_since = None
        return super()._drain(until) if self.pulse.leads or self.leads or self._leaves_parts else True

    def _waits_in_vain(self) -> bool:
        """Whether this node waits for parts that cannot come: their nodes are gone or have sent all that they have."""
        there, number = self.watch.view.alive, self.fence.generation
        members = self.generation.members if self.generation is not None else ()
        missing = [there.get(members[rank]) if members else None for rank in self.uploader.lacking]
        if all(
            presence is not None and (presence.state, presence.generation) == ("busy", number) for presence in missing
        ):
            self._in_vain_since = None
            return False
        self._in_vain_since = self._in_vain_since or self.clock()
        return self.clock() - self._in_vain_since > 3 * PART_S  # a node's last report may be older than its part

    def _lower(self, code: int) -> tuple[int, int]:
        """The rung at which all nodes begin after memory ran out here, and the exit code that follows."""
        used = UsedRung.read(self.workdir)
        at, lower = (self.rung, self.rung + 1) if used is None else (used.rung, used.lower)
        if lower is None or lower >= len(self.run_file.config.ladder(self.world.ranks)):
            detail = f"at the end of the ladder, rung {at}. Choose a type with more GPU memory."
            Fatal(error="out of memory", detail=detail).write(self.workdir)
            return self.rung, TrainerExit.FATAL
        self.say(f"out of memory on rung {at}: all go on at rung {lower}")
        return lower, code

    def _said(self, code: int) -> str:
        fatal = Fatal.read(self.workdir) if code == TrainerExit.FATAL else None
        return f"{fatal.error}: {fatal.detail}" if fatal else ""

    def _fatal_peer(self, generation: GangGeneration) -> str | None:
        """An error that another member reported and that every node would meet: this node then ends the run because of
        it. None if there is no such error, or if another node leads.
        """
        error = gang.fatal(self.watch.view, generation) if self.leads else None
        if error is not None and Fatal.read(self.workdir) is None:
            Fatal(error="on another node", detail=error).write(self.workdir)
        return error

    def _conclude(self, code: int) -> int:
        if self._left is not None:
            return self._leaves(self._left)
        if self._over is not None:
            return self._follows(self._over)
        return super()._conclude(code)

    def _leaves(self, leave: gang.Leave) -> int:
        if leave.code == AttemptExit.CRASHED:
            return self._crashed(leave.why)
        self.say(leave.why)
        self._leave(Exit(leave.code, leave.why, at=iso(self.clock())))
        return leave.code

    def _follows(self, over: ends.Done) -> int:
        """Ends this node, because the leader has ended the run."""
        code = AttemptExit.FAILED if over.reason in ends.FAILURES else AttemptExit.FINISHED
        self.say(f"{over.instance} has ended the run: {over.reason}")
        self._leave(Exit(code, over.reason, at=iso(self.clock())))
        return code

    def _write_receipt(self, done: ends.Done) -> None:
        """Writes the receipt. Nodes that still exist do not count as lost: they leave when they read of the end."""
        there, ending = self.watch.view.alive, Exit(AttemptExit.FINISHED, done.reason, at=done.at)
        self.others.attempts = [
            replace(attempt, record=replace(attempt.record, exit=ending))
            if attempt.record.exit is None and attempt.instance in there
            else attempt
            for attempt in self.others.attempts
        ]
        super()._write_receipt(done)

    def _finish(self, reason: str, detail: str = "") -> int:
        """Ends the run, unless a newer generation has taken over: then the leader of that generation ends the run."""
        self.watch.tell(state="busy")  # no new generation may begin while this node uploads
        newest = self.watch.view.newest
        if newest is not None and self.generation is None:  # no node trains, and this one is the oldest
            self.fence.generation = newest.number
            with suppress(OSError):
                self._take_over()
                if metrics := self._patiently(lambda: self.store.get_bytes(METRICS), METRICS):
                    atomic.write_bytes(self.workdir / METRICS, metrics)
        elif newest is not None and newest.number > self.fence.generation:
            return self._crashed(f"generation {newest.number} has taken over")
        return super()._finish(reason, detail)
