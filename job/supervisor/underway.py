"""The attempt under way: what it holds, and what it says of itself while anything takes its time."""

from __future__ import annotations

from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

from job import atomic
from job.contract import bucket
from job.contract.attempt import Beat
from job.contract.codes import AttemptExit
from job.contract.messages import UsedRung
from job.contract.workdir import COMPILED, METRICS, PREFLIGHT
from job.run_file import Node, RunFile
from job.supervisor import attempts
from job.supervisor.child import Progress
from job.supervisor.compile_cache import CompileCache
from job.supervisor.forecast import Forecast
from job.supervisor.meter import Meter
from job.supervisor.publish import Publisher
from job.supervisor.uploads import Pulse, Uploader
from job.supervisor.world import Cause, World


class Underway:
    """One attempt on this node."""

    record: attempts.Record  # these three from arrival.register
    earlier: list[attempts.Attempt]  # replaced as a whole, by the pulse's thread
    meter: Meter

    def __init__(self, run: RunFile, node: Node, workdir: Path, world: World) -> None:
        self.run_file, self.node, self.workdir, self.world = run, node, workdir, world
        self.cause: Cause | None = None
        self.say = world.log.say
        self.store, self.clock = world.store, world.clock
        self.forecast = Forecast(run.config, run.estimate, node.type)
        self.publisher = Publisher(store=self.store, workdir=workdir, stamp=self._stamp, say=self.say)
        self.uploader = Uploader(self.publisher, world.uploads, self.clock, self.say, self.forecast.upload_s)
        self.graphs = CompileCache(run, self.store, workdir, self.say)
        self.pulse = Pulse(
            store=self.store,
            instance=node.instance,
            log=world.log.path,
            publisher=self.publisher,
            executor=world.pulse,
            also=self._refresh,
            say=self.say,
        )
        self.progress = Progress(workdir / METRICS, self.clock)
        self.resumed_step = 0
        self.rung = 0
        self.asked = False  # to end the run
        self._beat_at = float("-inf")
        self._at_ceiling = False

    def heartbeat(self) -> Beat:
        """One line of heartbeat/<instance>.jsonl. Also what later attempts know of this one's cost."""
        now, seen = self.clock(), self.progress.record
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
        )

    def between(self) -> None:
        """While anything takes its time: heartbeats, and a notice noted at once that is not the cause, the run may be
        ending anyway; uploads hurry then too.
        """
        now, notice = self.clock(), self.world.metadata.notice
        if notice is not None and "exit" not in self.record.fields:
            self.uploader.hurry(notice)
            self.note(Cause(reason="notice", deadline=notice), now)
        elif now >= self._beat_at + self.run_file.config.checkpoint.heartbeat_s:
            self.beat()

    def note(self, cause: Cause, now: float) -> None:
        """At once: a machine taken away amid its last upload must not look like a crash to the next boot."""
        self.record.update(exit=interruption(cause, now))
        self.beat()

    def beat(self) -> None:
        """Now, with what the trainer has left beside its metrics."""
        self._beat_at = self.clock()
        self.take_notes()
        self.pulse.beat(self.heartbeat())

    def take_notes(self) -> None:
        """What the trainer has left for attempts/<instance>.json, and what the fleet has said of earlier nodes."""
        taken = attempts.reclaimed(self.earlier)
        if taken != self.record.fields.get("reclaimed", {}):
            self.record.update(reclaimed=taken)
        used = UsedRung.read(self.workdir)
        if used is not None and used.rung != self.record.fields.get("rung"):
            self.record.update(rung=used.rung)
        for name, file in (("preflight", PREFLIGHT), ("compiled", COMPILED)):
            noted = atomic.read_object(self.workdir / file)
            if noted is not None and noted != self.record.fields.get(name):
                self.record.update(**{name: noted})

    def _refresh(self) -> None:
        if self.publisher.stages.added and "results" not in self.record.fields:
            self.record.update(results=True)  # taken or lost after this, it has led somewhere: job/node/attempts.py
        self.record.flush()
        self.ask_price()
        self.earlier = attempts.judged(self.earlier, self.world.fleet_changes, self.clock())
        self.asked = self.asked or self.store.get_bytes(bucket.ASKED) is not None

    def ask_price(self) -> None:
        """The spot price, where it is not known; its ceiling stands in, and the log says so."""
        self.meter.refresh(self.clock())
        spent = self.meter.spent(self.clock())
        if (guarded := spent.ceiling_s > 0) != self._at_ceiling:
            self._at_ceiling = guarded
            price = f"${spent.usd_per_hour} an hour"
            self.say(
                f"AWS tells no spot price: compute counts at its ceiling, {price}, until it does"
                if guarded
                else f"AWS tells the spot price, {price}: counted from the launch on"
            )

    def _stamp(self) -> dict[str, Any]:
        spent = self.meter.spent(self.clock())
        return {
            "run": self.run_file.run,
            "code_sha256": self.run_file.code_sha256,
            "attempt": len(self.earlier) + 1,
            "instance": self.node.instance,
            "spent_usd": str(spent.usd),
            "spent_s": str(spent.seconds),
            "published_at": iso(self.clock()),
        }


def interruption(cause: Cause, at: float) -> dict[str, Any]:
    """The `exit` of an attempt whose machine goes away."""
    noticed = cause.reason == "notice"
    ending = {"code": AttemptExit.INTERRUPTED, "reason": cause.reason, "notice": noticed, "at": iso(at)}
    if noticed and cause.deadline is not None:
        ending["ends_at"] = iso(cause.deadline)
    return ending


def iso(at: float) -> str:
    """UTC, milliseconds, Z."""
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
