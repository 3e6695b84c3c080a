"""One start of the host: it starts the command, watches it, asks it to stop, decides what its end means, and reports
the result.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpufleet.job import atomic
from gpufleet.job.clock import SteadyClock
from gpufleet.job.command import network, processes
from gpufleet.job.command.checkpoints import CommandCheckpoints
from gpufleet.job.command.endings import End, Verdict
from gpufleet.job.command.given import Folders, Mask, secrets, variables
from gpufleet.job.command.output import Output
from gpufleet.job.command.places import GoneError, GuardedProcesses, Place, Scripts, WatchedContainer
from gpufleet.job.command.progress import Metrics, StepReader
from gpufleet.job.command.start import CommandStart
from gpufleet.job.command.stopping import Leaving
from gpufleet.job.command.watchdogs import StartWatch
from gpufleet.job.contract import environment
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.messages import Alarm, CommandEnd, Fatal, LeaderSaved, Message, Spent, Stop
from gpufleet.job.contract.results import refusal
from gpufleet.job.contract.run import Task
from gpufleet.job.contract.workdir import ACCEPT, FINAL, METRICS, RESULTS, SAVE, STOP
from gpufleet.job.gpus import Sampler
from gpufleet.job.kind.command import CommandConfig, filled
from gpufleet.job.supervisor import machine
from gpufleet.job.text import counted, printable

TICK_S = 0.1
CALM_S = 1.0  # seconds between two looks at processes and watchdogs
LEFTOVER_S = 10.0  # seconds that processes may still run after the command has ended
HOLD_S = 60.0  # seconds between two messages while a container is kept for a person
SETUP, NETWORK, COMMAND = "setup", "network", "command"
# A rehearsal shows the lines between these two texts.
SETUP_BEGINS, SETUP_ENDS = "the set-up begins", "the set-up has ended"
WHAT = {SETUP: "the set-up", NETWORK: "the pre-flight", COMMAND: "the command"}
CODES: dict[Verdict, int] = {
    "finished": TrainerExit.FINISHED,
    "failed": TrainerExit.FATAL,
    "elsewhere": TrainerExit.CRASHED,
    "refused": TrainerExit.REFUSED,
    "stopped": TrainerExit.STOPPED,
}


class Host:
    """Runs the command of one work folder. `run` returns the exit code for the supervisor."""

    def __init__(self, workdir: Path, task: Task) -> None:
        assert isinstance(task.config, CommandConfig)
        self.workdir, self.config, self.task = workdir, task.config, task
        self.clock = SteadyClock.from_environment(os.environ)
        self.folders = Folders.from_workdir(workdir)
        self.folders.make()
        section = task.tree.get("run") or {}
        on_node = machine.gpus() if self.config.device == "cuda" else ()
        gpus = self.config.gpus or len(on_node) or 1
        run = str(section.get("id", "run"))
        self.values = self.folders.values(run, gpus)
        nodes, self.node = int(self.values["nodes"]), int(self.values["node_rank"])
        if nodes > 1:
            # If only this node restarted its command, it would use a checkpoint that the other nodes may not have. So
            # all nodes begin again together.
            self.config = replace(self.config, exit=replace(self.config.exit, restarts=0))
        spent = Spent.read(workdir)
        self.variables = variables(
            self.config,
            self.folders,
            self.values,
            stack=str(section.get("stack", "own")),
            attempt=spent.attempt if spent else 1,
        )
        self.secrets = secrets(self.config.secrets or {})
        mask = Mask(self.secrets.values())
        self.gpus = Sampler(gpus=len(on_node), clock=self.clock) if on_node else None
        self.progress = StepReader(
            Metrics(workdir / METRICS),
            self.config,
            self.warn,
            self.alarm,
            self.gpus,
            opened=self.folders.own.open,
            clock=self.clock,
        )
        self.scripts = Scripts(workdir)
        self.output = Output(self.scripts.out, self.progress.line, write, mask, self.clock, overlap=mask.longest)
        self.checkpoints = CommandCheckpoints(
            self.config,
            self.folders.resolve_path(self.config.checkpoint.folder, self.values),
            self.folders.user,
            workdir,
            run=run,
            digest=task.digest,
            gpus=gpus,
            nodes=nodes,
            node=self.node,
            leader=lambda: LeaderSaved.read(workdir),
            alive=self._alive,
            lines=self.progress,
            say=say,
            clock=self.clock,
            moment=self.clock.moment,
        )
        self.is_there = False  # whether the command's first process exists
        self.is_set_up = not self.config.setup.strip()
        self.asks_network = nodes > 1 and self.config.device == "cuda"
        self.place: Place | None = None

    def run(self) -> int:
        """Runs the command, with its restarts, until it is over on this node; returns the exit code."""
        # The kernel sends this signal because of the leases in foreign.py. Without a handler it would end this process.
        signal.signal(signal.SIGIO, lambda *_: None)
        self.output.start()
        ends: list[End] = []
        try:
            while True:
                verdict, why, end, stop = self._run_start(ends)
                if verdict == "again":
                    say(
                        f"{why}; restart {len(ends) + 1} of {self.config.exit.restarts}, from the last whole checkpoint"
                    )
                    self.progress.event(why)
                    ends.append(end)
                    continue
                if (stop is not None and stop.ends) or verdict in ("finished", "failed"):
                    self._deliver()
                if verdict == "finished":
                    self._summarise(end)
                self._note(CommandEnd(how=why, lines=end.lines))
                if verdict == "failed":
                    self._note(Fatal(error="the command failed", detail=CommandEnd(how=why, lines=end.lines).full_text))
                    self._hold(why)
                say(f"{verdict}: {why}")
                return CODES[verdict]
        finally:
            self._close()

    def _run_start(self, before: list[End]) -> tuple[Verdict, str, End, Stop | None]:
        start = CommandStart(
            self.config, self.folders, self.values, self.checkpoints, self.progress, self.output, self.clock
        )
        step = start.restored.step if start.restored is not None else 0
        if start.restored is not None:
            say(f"restored step {step:,} to {self.checkpoints.place(start.restored)}")
        commands = [(COMMAND, self._command(start.restored))]
        if not self.is_set_up:
            commands.insert(0, (SETUP, filled(self.config.setup, dict(self.values))))
        if self.asks_network:
            commands.insert(-1, (NETWORK, network.command(self.scripts, self.values)))
        for name, command in commands:
            if (stop := Stop.read(self.workdir)) is not None:
                return "stopped", "it was not started", End(code=0, step=step), stop
            if name == SETUP:
                say(SETUP_BEGINS)
            try:
                end = self._run(start, name, command, f"{name}{len(before) + 1}")
            except GoneError as error:
                end = start.end(processes.KILLED, f"its container is gone: {error}", WHAT[name])
                self._leave_place()
            if name == NETWORK and self.place is not None:
                self.asks_network = False
                measured = network.read(end.code, end.lines, float(os.environ.get(environment.GBPS, 0)), say)
                self._note(measured)
                if not measured.problems:
                    continue
                if not (self.workdir / ACCEPT).exists():
                    return "refused", "; ".join(measured.problems), end, None
                self.warn(
                    "this node goes on, although nodes before it were refused for the same:"
                    f" {'; '.join(measured.problems)}"
                )
                continue
            if name == SETUP:
                say(SETUP_ENDS)
                self.is_set_up = end.code == 0 and not end.why
                if self.is_set_up:
                    continue
            break
        return *start.judge(end, before), end, Stop.read(self.workdir)

    def _command(self, restored: Commit | None) -> str:
        """The command line, with the words that a resume adds."""
        values = dict(self.values)
        text = filled(self.config.command, values).rstrip()
        if restored is not None and self.config.resume.args:
            values |= {"checkpoint": str(self.checkpoints.place(restored)), **self.checkpoints.counts(restored)}
            text += " " + filled(self.config.resume.args, values)
        return text

    def _environment(self, restored: Commit | None) -> dict[str, str]:
        environ = dict(self.variables)
        if restored is not None:
            place = str(self.checkpoints.place(restored))
            values = {**self.values, "checkpoint": place, **self.checkpoints.counts(restored)}
            environ[environment.COMMAND["resume_from"]] = place
            environ[environment.COMMAND["resume_step"]] = str(values["step"])
            environ |= {name: filled(value, values) for name, value in (self.config.resume.env or {}).items()}
        return {**environ, **self.secrets}

    def _run(self, start: CommandStart, part: str, command: str, name: str) -> End:
        """Runs the set-up or the command until none of its processes is left. Raises GoneError."""
        own = self.folders.own
        own.remove(self.folders.stop_file)
        if self.place is None:
            for folder in (self.folders.code, *self.folders.written):
                own.open_to_all(folder)
            contained = os.environ.get(environment.JOB_CONTAINER)
            self.place = WatchedContainer(self.workdir) if contained else GuardedProcesses(self.workdir)
        folder = self.folders.code
        if part == COMMAND:
            folder = self.folders.resolve_path(self.config.workdir, self.values)
            start.begin()
        self.scripts.run(name, command, self._environment(start.restored), folder)
        watch = self._watch()
        code, why, left_at, calm_at = None, "", None, 0.0
        while True:
            now = self.clock()
            self.is_there = self.place.poll()
            if self.is_there:  # a command that cannot be watched is not started
                self.scripts.offer()
            self.progress.poll()
            code = self.scripts.code(name) if code is None else code
            refusal = ""
            if part == COMMAND:  # after the end of a command, `end` makes its commits
                refusal = start.look(commit=code is None or left_at is not None)
            if why == "":
                why = self._why_not(start, part, watch, refusal)
                if why:
                    self._kill()
                    if not self.is_there or not self.scripts.began:
                        code = processes.KILLED
                        break
            if part == COMMAND and (observed := start.observe()) is not None:
                self._note(observed)
            if code is not None or now >= calm_at + CALM_S:
                calm_at = now
                self._prune()
                if part == COMMAND and self.is_there and self.place is not None and start.meeting.is_open:
                    start.meeting.look(self.place.world())
                left_at = self._leftover(start, code, now, left_at)
                if code is not None and left_at is None:
                    break
            self._ask_to_save()
            time.sleep(TICK_S)
        self.output.finish()
        why = why or (start.leaving.ended if start.leaving else "")
        if part != COMMAND:
            lines, cause = tuple(self.output.last), self.output.cause.text
            return End(code=code, step=self.progress.step, lines=lines, cause=cause, why=why, what=WHAT[part])
        end = start.end(code, why, WHAT[part])
        self._note(observed := start.observe(is_over=True))
        if observed is not None and observed.elsewhere:
            self.warn(observed.elsewhere)
        return end

    def _why_not(self, start: CommandStart, part: str, watch: StartWatch, refusal: str) -> str:
        """The reason to end this start now; empty if the start may go on."""
        stop = Stop.read(self.workdir) if (self.workdir / STOP).exists() else None
        if stop is not None and start.leaving is None:
            start.leaving = Leaving(self.config, stop, self.clock(), self.checkpoints.newest)
            self.checkpoints.reason = "stop"
            with suppress(OSError):
                content = atomic.json_bytes({"reason": stop.reason, "deadline": stop.deadline})
                self.folders.own.write(self.folders.stop_file, content)
            say(start.leaving.plan)
        if start.leaving is not None:
            return start.leaving.look(
                self.clock(),
                saving=lambda: part == COMMAND and self.checkpoints.saving(),
                committed=self.checkpoints.newest,
                on_signal=self.checkpoints.newest_is_on_signal,
                send=self._send_stop,
                say=say,
            )
        if refusal:
            return refusal
        watch.look(self.checkpoints.committed_at, self.progress.at)
        return watch.stuck(self.output.at, self.progress.at)

    def _leftover(self, start: CommandStart, code: int | None, now: float, since: float | None) -> float | None:
        """The moment since which processes have outlived the command; None if there is no such process. Such processes
        may still be saving, so they are given some time; after a stop, all the time of the stop.
        """
        if code is None:
            return None
        if not self._alive():
            return None
        since = now if since is None else since
        if start.leaving is None and now - since > LEFTOVER_S and not self.checkpoints.saving():
            say("processes that still run after the command are ended")
            self._kill()
        return since

    def _watch(self) -> StartWatch:
        return StartWatch(
            silence_s=self.config.progress.silence_minutes * 60,
            every_s=self._every_s,
            own=self.folders.own,
            folders=self.folders.written,
            gpus=self.gpus,
            spent=self._spent,
            say=say,
            note=self.progress.event,
            clock=self.clock,
        )

    def _every_s(self) -> float | None:
        """Declared seconds between two checkpoints; None if no interval is declared, or if the time of a step is
        unknown.
        """
        every, count = self.config.checkpoint.every, self.config.steps_between_saves()
        if not self.config.saves or every.minutes is not None:
            return math.inf if every.minutes is None else every.minutes * 60
        step_s = self.progress.step_s
        return count * step_s if count is not None and step_s else None

    def _spent(self) -> float | None:
        spent = Spent.read(self.workdir)
        return None if spent is None else float(spent.spent_usd)

    def _prune(self) -> None:
        if self.config.checkpoint.keep_on_disk is not None and (spent := Spent.read(self.workdir)) is not None:
            self.checkpoints.prune(spent.published)

    def _ask_to_save(self) -> None:
        """Asks the command to save, if the definition has a signal for it, because the machine may be taken
        away soon.
        """
        if (self.workdir / SAVE).exists():
            (self.workdir / SAVE).unlink(missing_ok=True)
            if self.config.stop.request is not None:
                self._send(self.config.stop.request)

    def _alive(self) -> list[int]:
        return self.place.alive() if self.place is not None and self.is_there else []

    def _send_stop(self, name: str) -> None:
        self.checkpoints.signalled()
        if not self._send(name):
            self.checkpoints.unanswered()

    def _send(self, name: str) -> bool:
        """Sends a signal to the command. Returns whether a process survives it."""
        if self.place is None or not self.is_there:
            return False
        count, is_survived = self.place.send(name)
        say(f"SIG{name} to {count} processes")
        return is_survived

    def _kill(self) -> None:
        if self.place is not None and self.is_there and not self.place.kill():
            say("a process of the command cannot be ended")

    def _hold(self, why: str) -> None:
        """Keeps the container of a failed command for `gpufleet shell`, as long as the definition and the
        limits allow.
        """
        if not self.config.exit.hold_minutes or self.place is None or self.config.device == "cpu":
            return
        until = self.clock() + self.config.exit.hold_minutes * 60
        minutes, clock = self.config.exit.hold_minutes, time.strftime("%H:%M", time.gmtime(until))
        text = f"{why}; the node is held for {minutes:g} min, until {clock} UTC: gpufleet shell opens a shell on it"
        self.alarm("held", text)
        said_at = self.clock()
        while self.clock() < until and not (self.workdir / STOP).exists():
            if self.clock() >= said_at + HOLD_S:
                said_at = self.clock()
                say(f"held for gpufleet shell, {(until - said_at) / 60:.0f} min more; gpufleet stop ends it now")
            time.sleep(TICK_S)

    def _deliver(self) -> None:
        """Copies the outputs below final/: files in {outputs} under their names, other files under their paths. If
        there are no outputs, it copies the newest checkpoint. The files do not change any more, because no process of
        the command exists.
        """
        for text in self.config.outputs:
            try:
                self._deliver_from(self.folders.resolve_path(text, self.values), text)
            except ValueError as error:
                say(f"warning: outputs {text}: {error}")
        is_part = self.config.format.is_sharded and int(self.values["nodes"]) > 1
        if not any((self.workdir / FINAL).rglob("*")) and not is_part:
            with suppress(OSError):
                self.checkpoints.copy_newest(self.workdir / FINAL)

    def _deliver_from(self, source: Path, text: str) -> None:
        """Copies the files of one entry of job.outputs, a file or a folder. Prints what could not be copied."""
        own, target, uncopied = self.folders.own, self.workdir / FINAL, list[str]()
        if source != self.folders.outputs:
            target /= source.relative_to(self.folders.user)
        for name in ("",) if own.is_file(source) else sorted(name for name, _ in own.files(source)):
            key = (target / name).relative_to(self.workdir).as_posix()
            if why := refusal(key):
                uncopied.append(f"a file whose name {why}")
                continue
            try:
                own.copy(source / name, target / name)
            except OSError as error:
                uncopied.append(f"{key!a}: {error.strerror}")
        if uncopied:
            count = counted(len(uncopied), "file")
            say(f"warning: outputs {text}: {count} could not be copied; the first one: {uncopied[0]}")

    def _summarise(self, end: End) -> None:
        """Writes results.json, which every finished run has."""
        newest = self.checkpoints.newest
        tree = {
            "schema": 1,
            "experiment": self.task.name,
            "steps": end.step,
            "exit_code": end.code,
            "checkpoint": newest,
        }
        with suppress(OSError):
            atomic.write_json(self.workdir / RESULTS, {**tree, "val_loss": self.progress.val.get(newest)})

    def _leave_place(self) -> None:
        """Removes the container, and with it the changes that the set-up made."""
        if self.place is not None:
            self.place.close()
        self.place, self.is_there, self.is_set_up = None, False, not self.config.setup.strip()

    def _close(self) -> None:
        if self.place is not None:
            self.place.close()
        self.output.close()
        self.progress.flush()
        self.scripts.close()
        self.checkpoints.close()
        if self.gpus is not None:
            self.gpus.close()

    def warn(self, text: str) -> None:
        say(f"warning: {text}")

    def alarm(self, kind: str, text: str) -> None:
        """Prints a warning, puts it into status and receipt, and sends it to the people that the definition names."""
        self.warn(text)
        self._note(Alarm(kind=kind, text=text))

    def _note(self, message: Message | None) -> None:
        """Writes a message to the supervisor, if there is one."""
        if message is None:
            return
        try:
            message.write(self.workdir)
        except OSError as error:
            say(f"warning: {message.FILE} could not be written: {error}")


def write(line: bytes) -> None:
    """Prints the command's output."""
    with suppress(OSError, ValueError):
        sys.stdout.buffer.write(printable(line.decode("utf-8", "replace")).encode())
        sys.stdout.buffer.flush()


def say(text: str) -> None:
    """Prints a line of the host itself."""
    write(f"{time.strftime('%H:%M:%S', time.gmtime())} host: {text}\n".encode("utf-8", "backslashreplace"))
