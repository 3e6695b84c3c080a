"""Observes one start of the command through its files and its lines, but not through its processes."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from gpufleet.job.command.checkpoints import CommandCheckpoints
from gpufleet.job.command.elsewhere import Search
from gpufleet.job.command.endings import End, Verdict, judge
from gpufleet.job.command.given import Folders, progress_file
from gpufleet.job.command.lines import Counting
from gpufleet.job.command.meeting import Meeting
from gpufleet.job.command.output import Output
from gpufleet.job.command.progress import StepReader
from gpufleet.job.command.resumption import ResumeCheck
from gpufleet.job.command.stopping import Leaving
from gpufleet.job.contract.commit import Commit
from gpufleet.job.contract.messages import Observed
from gpufleet.job.contract.workdir import SCALARS
from gpufleet.job.kind.command import CommandConfig

# Seconds between two looks at the files after the resume is judged, and seconds between two writes of observed.json.
LOOK_S = 1.0


class CommandStart:
    """One start, from its restored checkpoint on. Call `look` often, and `judge` when none of its processes is left."""

    def __init__(
        self,
        config: CommandConfig,
        folders: Folders,
        values: dict[str, str | int],
        checkpoints: CommandCheckpoints,
        progress: StepReader,
        output: Output,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Restores the newest checkpoint. Raises OSError."""
        self.leaving: Leaving | None = None
        self._config, self._folders, self._values, self._clock = config, folders, values, clock
        self._checkpoints, self._progress, self._output = checkpoints, progress, output
        self.restored: Commit | None = checkpoints.restore()
        self._progress_file = progress_file(config, folders, values)
        progress.begin(self.restored, self._progress_file)
        self.begin()
        self._resumption: ResumeCheck | None = None
        self.meeting = Meeting(nodes=int(values["nodes"]), gpus=int(values["gpus"]), clock=clock)
        self._follows = str(values["node_rank"]) != "0"
        if self.restored is not None and not self._follows:
            counting = Counting.from_json(self.restored.lines, config.unit, config.work.steps_per_epoch)
            self._resumption = ResumeCheck(config, self.restored, checkpoints.restored, counting)
        self._observed, self._observed_at, self._looked_at = Observed(), 0.0, 0.0

    def begin(self) -> None:
        """Notes that the command is about to be started. Files that were written before, by the set-up, are not files
        of the command.
        """
        self._output.begin()
        self.began, saved = self._clock(), self._checkpoints
        self._search = Search(self._config, saved.names, self._folders, saved.folder, self.began, saved.moment)

    @property
    def refusal(self) -> str:
        """Why no further start can help: the command does not resume from the checkpoint, or each node trains alone.
        Empty as long as neither is proved.
        """
        resumption = self._resumption
        return self.meeting.why or (
            resumption.why if resumption is not None and resumption.verdict == "begins anew" else ""
        )

    def look(self, *, commit: bool = True) -> str:
        """Looks at files and lines. Returns the reason to end the start, or "". `commit`: saves may be committed."""
        checkpoints, now = None, self._clock()
        if self._resumption is not None and (self._resumption.is_open or now >= self._looked_at + LOOK_S):
            checkpoints, self._looked_at = self._checkpoints.find(), now
            self._resumption.look(self._checkpoints.written_anew(checkpoints), self._progress.first)
        if commit and self._counts():
            self._checkpoints.look(checkpoints)
        return self.refusal

    def _counts(self, *, is_over: bool = False) -> bool:
        """Whether a save that is made now belongs to this run. A save does not belong to the run if the start begins
        anew. If the step of an overwritten file is known only from lines, the save belongs to the run only after lines
        have shown that the start resumes. `is_over`: whether the command has ended without an error, so that no more
        lines will come.
        """
        resumption = self._resumption
        if resumption is None or not self._config.checkpoint.rewritten or self._config.resume.check == "none":
            return not self.refusal
        waits = resumption.expects_lines and self._progress.first is None and not is_over
        return not self.refusal and not waits

    def end(self, code: int, why: str, part: str) -> End:
        """Commits the complete checkpoints that exist at the end of the command, and returns how the command ended."""
        self._progress.poll()
        self._progress.flush()
        is_own = code == 0 and not why
        if is_own and self.leaving is None:
            self.meeting.settle()
        anew = self._checkpoints.written_anew(self._checkpoints.find())
        if self._resumption is not None:
            self._resumption.look(anew, self._progress.first, is_over=is_own)
        if self._counts(is_over=is_own):
            self._checkpoints.reason = "final" if is_own and self.leaving is None else self._checkpoints.reason
            self._checkpoints.end(by_itself=is_own)
            self._progress.flush()
        progress, is_told = self._progress, self._progress.is_believed or self._checkpoints.counted >= 0
        is_delivered = self._delivers_after(max(self.began, progress.at))
        return End(
            code=code,
            step=progress.step,
            is_told=is_told,
            is_read=progress.is_believed,
            spread=progress.spread,
            saved=self._checkpoints.counted,
            is_saved=self._checkpoints.count > 0,
            is_delivered=is_delivered,
            restored=None if self.restored is None else self.restored.step,
            is_idle=not (is_told or anew or is_delivered),
            follows=self._follows,
            lines=tuple(self._output.last),
            unread=tuple(self._output.unread),
            why=why,
            what=part,
            cause=self._output.cause.text,
        )

    def judge(self, end: End, before: list[End]) -> tuple[Verdict, str]:
        """What the end means, and a sentence with the reason."""
        leaving = self.leaving
        verdict, why = judge(self._config, end, before, stopped=leaving is not None and leaving.signalled)
        if self.refusal:
            return "failed", self.refusal
        return ("stopped" if leaving is not None and verdict != "finished" else verdict), why

    def _delivers_after(self, moment: float) -> bool:
        """Whether an output was written after `moment`, not including files that a training writes all the time."""
        own = self._folders.own
        for text in self._config.outputs:
            with suppress(ValueError):
                root = self._folders.resolve_path(text, self._values)
                for name, look in [("", partial(own.stat, root))] if own.is_file(root) else own.files(root):
                    path = root / name
                    along = path == self._progress_file or path.is_relative_to(self._folders.outputs / SCALARS)
                    with suppress(OSError):
                        if not along and self._checkpoints.moment(look().st_mtime) > moment:
                            return True
        return False

    def observe(self, *, is_over: bool = False) -> Observed | None:
        """New observations of this start; None if there are none. `is_over`: whether the start is over; then all
        observations are returned.
        """
        now = self._clock()
        if now < self._observed_at + LOOK_S and not is_over:
            return None
        self._observed_at, there = now, self._checkpoints.find()
        seen = Observed(
            lines=self._output.lines,
            told=self._progress.first is not None,
            unread=tuple(self._output.unread),
            begun=len(there),
            checkpoints=self._checkpoints.count,
            doubt=self._checkpoints.doubt,
            restored=None if self.restored is None else self.restored.step,
            resumes="" if self._resumption is None else self._resumption.verdict,
            why="" if self._resumption is None else self._resumption.why,
            met=self.meeting.figure,
            has_first=self.meeting.has_first and not self.meeting.is_open,
            follows=self._follows,
            elsewhere="" if there else self._search.look(now, at_once=is_over),
        )
        if seen == self._observed and not is_over:
            return None
        self._observed = seen
        return seen
