"""One start of the host: the command is started, watched, asked to leave, and judged, until the supervisor knows."""

from __future__ import annotations

import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpufleet.job import atomic
from gpufleet.job.command import processes
from gpufleet.job.command.checkpoints import CommandCheckpoints, copy
from gpufleet.job.command.endings import End, Verdict, judge
from gpufleet.job.command.given import Folders, blanked, progress_file, secrets, variables
from gpufleet.job.command.places import GoneError, GuardedProcesses, NodeContainer, Place, Scripts, give_to_everybody
from gpufleet.job.command.reader import Metrics, Output, StepReader
from gpufleet.job.command.stopping import Leaving
from gpufleet.job.command.watchdogs import StartWatch
from gpufleet.job.contract import environment
from gpufleet.job.contract.codes import TrainerExit
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.messages import CommandEnd, Fatal, Message, Spent, Stop
from gpufleet.job.contract.run import Task
from gpufleet.job.contract.workdir import FINAL, METRICS, RESULTS, SAVE, SCALARS, STOP
from gpufleet.job.gpus import Sampler
from gpufleet.job.spec.command import CommandConfig, filled
from gpufleet.job.supervisor import machine
from gpufleet.job.text import printable

TICK_S = 0.1
CALM_S = 1.0  # between two looks at processes and watchdogs
LEFTOVER_S = 10.0  # for what a command leaves behind when it has ended by itself
SETUP = "setup"
CODES: dict[Verdict, int] = {
    "finished": TrainerExit.FINISHED,
    "failed": TrainerExit.FATAL,
    "elsewhere": TrainerExit.CRASHED,
    "stopped": TrainerExit.STOPPED,
}


@dataclass(slots=True)
class CommandStart:
    """One start of the command, or of its set-up."""

    name: str
    command: str
    restored: Commit | None = None
    interval: int | None = None
    leaving: Leaving | None = None


class Host:
    """Runs the command of one work folder. `run` gives the exit code for the supervisor."""

    def __init__(self, workdir: Path, task: Task) -> None:
        assert isinstance(task.config, CommandConfig)
        self.workdir, self.config, self.task = workdir, task.config, task
        self.folders = Folders.from_workdir(workdir)
        self.folders.make()
        told = task.tree.get("run") or {}
        on_node = machine.gpus() if self.config.device == "cuda" else ()
        gpus = self.config.gpus or len(on_node) or 1
        self.values = self.folders.values(str(told.get("id", "run")), gpus)
        spent = Spent.read(workdir)
        self.variables = variables(
            self.config,
            self.folders,
            self.values,
            stack=str(told.get("stack", "own")),
            attempt=spent.attempt if spent else 1,
        )
        self.secrets = secrets(self.config.secrets or {})
        self.blank = blanked(self.secrets.values())
        self.gpus = Sampler(gpus=len(on_node)) if on_node else None
        self.progress = StepReader(Metrics(workdir / METRICS), self.config.patterns, self.warn, self.gpus)
        self.progress_file = progress_file(self.config, self.folders, self.values)
        self.scripts = Scripts(workdir)
        self.output = Output(self.scripts.out, self.progress.line, write, self.blank)
        self.checkpoints = CommandCheckpoints(
            self.config,
            self.folders.resolve_path(self.config.checkpoint.folder, self.values),
            self.folders.user,
            workdir,
            digest=task.digest,
            gpus=gpus,
            alive=self._alive,
            step_at=self.progress.at_time,
            val_of=self.progress.val.get,
            saved=self.progress.saved,
            say=say,
        )
        self.first: int | None = None  # the first process
        self.is_set_up = not self.config.setup.strip()
        self.place: Place | None = None

    def run(self) -> int:
        """Until it is over here."""
        if not processes.KNOWN:
            say("this system does not tell who writes a file: a checkpoint counts when it is quiet for 5 s")
        with suppress(FileExistsError):
            (self.workdir / SCALARS).symlink_to(self.folders.outputs / SCALARS)
        self.output.start()
        ends: list[End] = []
        try:
            while True:
                verdict, why, end, stop = self._run_start(ends)
                if verdict == "again":
                    say(f"{why}; again from the last whole checkpoint, {len(ends) + 1} of {self.config.exit.restarts}")
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
                say(f"{verdict}: {why}")
                return CODES[verdict]
        finally:
            self._close()

    def _run_start(self, before: list[End]) -> tuple[Verdict, str, End, Stop | None]:
        """One start up to its end."""
        restored = self.checkpoints.restore()
        if restored is not None:
            say(f"restored step {restored.step:,} to {self.checkpoints.folder}")
        step = restored.step if restored is not None else 0
        self.progress.begin(step, self.progress_file)
        starts = [CommandStart("command", self._command(restored), restored, self.progress.interval)]
        if not self.is_set_up:
            starts.insert(0, CommandStart(SETUP, filled(self.config.setup, dict(self.values))))
        for start in starts:
            if (stop := Stop.read(self.workdir)) is not None:
                return "stopped", "it was not started", End(code=0, step=step), stop
            try:
                end = self._run(start, f"{start.name}{len(before) + 1}")
            except GoneError as error:
                end = self._end(processes.KILLED, f"its container is gone: {error}")
                self._leave_place()
            if start.name == SETUP and end.code == 0 and not end.why:
                self.is_set_up = True
                continue
            break
        return *self._judged(end, before, start), end, Stop.read(self.workdir)

    def _judged(self, end: End, before: list[End], start: CommandStart) -> tuple[Verdict, str]:
        leaving = start.leaving
        verdict, why = judge(self.config, end, before, stopped=leaving is not None and leaving.signalled)
        if verdict == "finished":
            return verdict, why
        if problem := self._lost(start):
            return "failed", problem
        return ("stopped" if leaving is not None or (self.workdir / STOP).exists() else verdict), why

    def _command(self, restored: Commit | None) -> str:
        """With what a resume adds."""
        values = dict(self.values)
        text = filled(self.config.command, values).rstrip()
        if restored is not None and self.config.resume.args:
            values |= {"checkpoint": str(self.checkpoints.place(restored)), "step": restored.step}
            text += " " + filled(self.config.resume.args, values)
        return text

    def _environment(self, restored: Commit | None) -> dict[str, str]:
        told = dict(self.variables)
        if restored is not None:
            place = str(self.checkpoints.place(restored))
            values = {**self.values, "checkpoint": place, "step": restored.step}
            told[environment.COMMAND["resume_from"]] = place
            told[environment.COMMAND["resume_step"]] = str(restored.step)
            told |= {name: filled(value, values) for name, value in (self.config.resume.env or {}).items()}
        return {**told, **self.secrets}

    # Running ----------------------------------------------------------------------------------------------------------

    def _run(self, start: CommandStart, name: str) -> End:
        """Until no process of it is left. Raises GoneError."""
        self.output.last.clear()
        self.output.error = ""
        self.folders.stop_file.unlink(missing_ok=True)
        if self.place is None:
            for folder in (self.folders.code, *self.folders.written):
                give_to_everybody(folder)
            contained = os.environ.get(environment.JOB_CONTAINER)
            self.place = NodeContainer(self.workdir) if contained else GuardedProcesses(self.workdir)
        folder = self.folders.code
        if start.name != SETUP:
            folder = self.folders.resolve_path(self.config.workdir, self.values)
        self.scripts.run(name, start.command, self._environment(start.restored), folder)
        watch = self._watch()
        code, why, left_at, calm_at = None, "", None, 0.0
        while True:
            now = time.time()
            self.first = self.place.poll()
            if self.first is not None:  # nothing runs that nobody could watch
                self.scripts.offer()
            self.progress.poll()
            code = self.scripts.code(name) if code is None else code
            if why == "":
                why = self._why_not(start, watch)
                if why:
                    self._kill()
                    if self.first is None or not self.scripts.began:  # nor will it
                        code = processes.KILLED
                        break
            if self._counts(start) and (code is None or left_at is not None):  # else `end` judges
                self.checkpoints.look()
            if code is not None or now >= calm_at + CALM_S:
                calm_at = now
                self._prune()
                left_at = self._leftover(start, code, now, left_at)
                if code is not None and left_at is None:
                    break
            self._ask_to_save()
            time.sleep(TICK_S)
        self.output.finish()
        self.progress.poll()
        self.progress.flush()
        if self._counts(start):
            self.checkpoints.reason = "final" if code == 0 and start.leaving is None else self.checkpoints.reason
            self.checkpoints.end(by_itself=code == 0 and not why)
            self.progress.flush()
        leaving = start.leaving
        what = "the set-up" if start.name == SETUP else "the command"
        return self._end(code, why or (leaving.ended if leaving else ""), what)

    def _end(self, code: int, why: str, what: str = "the command") -> End:
        return End(
            code=code,
            step=self.progress.step,
            lines=tuple(self.output.last),
            error=self.output.error,
            why=why,
            what=what,
        )

    def _why_not(self, start: CommandStart, watch: StartWatch) -> str:
        """Why this start is ended now; nothing where it goes on."""
        stop = Stop.read(self.workdir) if (self.workdir / STOP).exists() else None
        if stop is not None and start.leaving is None:
            start.leaving = Leaving(self.config, stop, time.time(), self.checkpoints.newest)
            self.checkpoints.reason = "stop"
            with suppress(OSError):
                atomic.write_json(self.folders.stop_file, {"reason": stop.reason, "deadline": stop.deadline})
            say(start.leaving.plan)
        if start.leaving is not None:
            return start.leaving.look(
                time.time(),
                saving=lambda: start.name != SETUP and self.checkpoints.saving(),
                committed=self.checkpoints.newest,
                begun_at=self.checkpoints.begun_at,
                send=self._send_stop,
                say=say,
            )
        if problem := self._lost(start):
            return problem
        watch.look(self.checkpoints.committed_at, self.progress.at)
        return watch.stuck(self.output.at, self.progress.at)

    def _counts(self, start: CommandStart) -> bool:
        """Whether what is saved now is of this run: not by a set-up, nor by a command that begins anew; and of one file
        whose step its lines tell, not before they have told that it goes on.
        """
        unknown = start.restored is not None and self.config.checkpoint.rewritten and self.progress.first is None
        return start.name != SETUP and not unknown and not self._lost(start)

    def _lost(self, start: CommandStart) -> str:
        """How it does not go on from what was restored, as far as it has told a step. One step of tolerance: some count
        from 0.
        """
        first, restored = self.progress.first, start.restored
        if first is None or restored is None or self.config.resume.check == "none":
            return ""
        if first >= restored.step - (start.interval or max(1, restored.step // 2)) - 1:
            return ""
        return (
            f"checkpoint of step {restored.step:,} was restored and the command began at step {first:,}:"
            " it does not resume"
        )

    def _leftover(self, start: CommandStart, code: int | None, now: float, since: float | None) -> float | None:
        """Since when the command has ended and processes of it are left; None where there are none. They may save
        still, and have a while, after a stop as long as the stop gives.
        """
        if code is None:
            return None
        if self.first is None or not processes.descendants(self.first):
            return None
        since = now if since is None else since
        if start.leaving is None and now - since > LEFTOVER_S and not self.checkpoints.saving():
            say("processes that the command has left behind are ended")
            self._kill()
        return since

    def _watch(self) -> StartWatch:
        return StartWatch(
            silence_s=self.config.progress.silence_minutes * 60,
            every_s=self._every_s,
            folders=self.folders.written,
            gpus=self.gpus,
            spent=self._spent,
            say=say,
            note=self.progress.event,
            clock=time.time,
        )

    def _every_s(self) -> float | None:
        """Between two checkpoints, as declared; None: nobody has said, or the time of a step is not known."""
        every = self.config.checkpoint.every
        if every.minutes is not None:
            return every.minutes * 60
        step_s = self.progress.step_s
        return every.steps * step_s if every.steps is not None and step_s else None

    def _spent(self) -> float | None:
        found = Spent.read(self.workdir)
        return None if found is None else float(found.spent_usd)

    def _prune(self) -> None:
        if self.config.checkpoint.keep_on_disk is not None and (found := Spent.read(self.workdir)) is not None:
            self.checkpoints.prune(found.published)

    def _ask_to_save(self) -> None:
        """The machine may go away soon: a signal that saves and goes on, where there is one."""
        if (self.workdir / SAVE).exists():
            (self.workdir / SAVE).unlink(missing_ok=True)
            if self.config.stop.request is not None:
                self._send(self.config.stop.request)

    def _alive(self) -> list[int]:
        return [] if self.first is None else processes.descendants(self.first)

    def _send_stop(self, name: str) -> None:
        self.checkpoints.signalled()
        self._send(name)

    def _send(self, name: str) -> None:
        if self.first is not None:
            number = processes.number(name)
            to = processes.addressees(self.first, number)
            say(f"SIG{name} to {len(to)} processes")
            processes.send(to, number)

    def _kill(self) -> None:
        if self.first is not None and not processes.kill(self.first):
            say("a process of the command cannot be ended")

    # Ending -----------------------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Its outputs, below final/: those of {outputs} as they are there, others by their path; where there are none,
        its newest checkpoint. No process of it is left, so that nothing of them changes.
        """
        for text in self.config.outputs:
            try:
                source = self.folders.resolve_path(text, self.values)
                target = self.workdir / FINAL
                if source != self.folders.outputs:
                    target /= source.relative_to(self.folders.user)
                for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
                    if path.is_file() and path.resolve().is_relative_to(self.folders.user.resolve()):
                        copy(path, target / path.relative_to(source) if source.is_dir() else target)
            except (OSError, ValueError) as error:
                say(f"warning: outputs {text}: {error}")
        if not any((self.workdir / FINAL).rglob("*")):
            with suppress(OSError):
                self.checkpoints.copy_newest(self.workdir / FINAL)

    def _summarise(self, end: End) -> None:
        """results.json, which every finished run leaves."""
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
        """What the set-up did was in the container."""
        if self.place is not None:
            self.place.close()
        self.place, self.first, self.is_set_up = None, None, not self.config.setup.strip()

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
        """A warning in the log."""
        say(f"warning: {text}")

    def _note(self, message: Message) -> None:
        try:
            message.write(self.workdir)
        except OSError as error:
            say(f"warning: {message.FILE} is not written: {error}")


def write(line: bytes) -> None:
    """Passes on what the command printed."""
    with suppress(OSError, ValueError):
        sys.stdout.buffer.write(printable(line.decode("utf-8", "replace")).encode())
        sys.stdout.buffer.flush()


def say(text: str) -> None:
    """A line of the host's own."""
    write(f"{time.strftime('%H:%M:%S', time.gmtime())} host: {text}\n".encode())
