"""Decides whether a start resumes from the checkpoint that was restored for it, by its files and its lines.

| The start has | Verdict |
|---|---|
| written a checkpoint with a lower number than the restored one | begins anew |
| written the restored checkpoint again, and no line shows that the start goes on | begins anew |
| printed a position before the one that lines showed when the checkpoint was begun | begins anew |
| printed a position after it that no start without a checkpoint prints first | goes on |
| written the checkpoint that `checkpoint.every` makes the next one, and none before it | goes on |
| done none of these | not shown |

The numbers in names are compared only with names, and those in lines only with lines. A sign that the start begins anew
is used at any time. After the last step, and in a second training of the same command, lines prove nothing, because
they are about something else.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from gpufleet.job.command.lines import Counting, Position
from gpufleet.job.command.names import FoundCheckpoint, place
from gpufleet.job.contract.commit import Commit
from gpufleet.job.kind.command import CommandConfig

Verdict = Literal["goes on", "begins anew", "not shown", "not looked at"]


class ResumeCheck:
    """The judgement of one start. `verdict`: the verdict so far. `why`: a sentence with the reason."""

    def __init__(
        self, config: CommandConfig, restored: Commit, checkpoint: FoundCheckpoint | None, counting: Counting
    ) -> None:
        """`checkpoint`: the restored files. `counting`: what the checkpoint's commit has kept about the lines."""
        self.verdict: Verdict = "not shown"
        self.why = "it has printed no step and saved nothing yet"
        self._config, self._restored, self._checkpoint, self._counting = config, restored, checkpoint, counting
        self._interval, total = counting.interval or 1, config.total
        # If the first step has the number 0, the number of the last step is one less. After the last step for which a
        # line is printed, no other line comes.
        last = total - (config.unit == "step") if total is not None else None
        self.is_done = last is not None and (restored.step >= last or restored.step + self._interval > last + 1)
        self._reads_lines = not self.is_done and config.stages < 2

    @property
    def expects_lines(self) -> bool:
        """Whether a line had shown a position when the checkpoint was begun, with which later ones are compared."""
        return self._counting.newest is not None and self._reads_lines

    @property
    def is_open(self) -> bool:
        """Whether the next file may still change the verdict."""
        return self.verdict == "not shown"

    def look(self, anew: Iterable[FoundCheckpoint], first: Position | None, *, is_over: bool = False) -> Verdict:
        """Judges by the checkpoints that this start has written and by its first position. `is_over`: whether the start
        has ended, so that no more files or lines will come.
        """
        if self._config.resume.check == "none":
            self.verdict, self.why = "not looked at", "job.resume.check is none"
        elif self.verdict != "begins anew":
            self._judge(list(anew), first, is_over=is_over)
        return self.verdict

    def _judge(self, anew: list[FoundCheckpoint], first: Position | None, *, is_over: bool) -> None:
        before, again, after = self._files(anew)
        by_lines, position = self._lines(first)
        if before is not None and self._config.stages < 2:
            self._settle("begins anew", f"the command wrote {place(before)}")
        elif by_lines == "begins anew":
            self._settle("begins anew", f"the command began at {position}")
        elif by_lines == "goes on":
            self._settle("goes on", f"its first line shows {position}")
        elif again and again.number and self._reads_lines and (is_over or first or not self.expects_lines):
            # A start that resumes in the middle of the first epoch also writes the number 0 again.
            self._settle("begins anew", f"the command wrote {place(again)} again")
        elif again is None and after is not None:
            self._settle("goes on", f"its first checkpoint is {place(after)}")
        elif self.verdict == "not shown":
            self.why = self._what_would_show(position)

    def _files(
        self, anew: list[FoundCheckpoint]
    ) -> tuple[FoundCheckpoint | None, FoundCheckpoint | None, FoundCheckpoint | None]:
        """Three checkpoints that this start has written, or None for each: one with a lower number than the restored
        one, the restored one again, and the next one.
        """
        restored = self._checkpoint
        if restored is None or restored.number is None:
            return None, None, None
        same = [
            (checkpoint, checkpoint.number)
            for checkpoint in anew
            if checkpoint.series == restored.series and checkpoint.number is not None
        ]
        before = next((checkpoint for checkpoint, number in same if number < restored.number), None)
        again = next((checkpoint for checkpoint, number in same if number == restored.number), None)
        every = self._config.checkpoint.every
        apart = every.epochs if "step" not in restored.counts else every.steps or self._config.steps_between_saves()
        after = next(
            (
                checkpoint
                for checkpoint, number in same
                if apart and restored.number < number <= restored.number + apart
            ),
            None,
        )
        return before, again, after

    def _lines(self, first: Position | None) -> tuple[Verdict, str]:
        """The verdict that follows from the first line alone, and the position of this line in words."""
        if first is None:
            return "not shown", ""
        newest, fresh = self._counting.newest or Position(), self._counting.first or Position()
        now, then, usual, slack = first.epoch or 0, newest.epoch, fresh.epoch, 0
        words = f"epoch {now:,}"
        if first.step is not None:
            now, then, usual, slack = first.step, newest.step, fresh.step, self._interval + 1
            words = f"step {now:,}"
            if then is not None and self._config.unit == "step":
                then = min(then, self._restored.step)
        if then is None:
            return "not shown", words
        if now < then - slack:
            return ("begins anew" if self._reads_lines else "not shown"), words
        return ("goes on" if usual is not None and now > usual else "not shown"), words

    def _settle(self, verdict: Verdict, fact: str) -> None:
        self.verdict = verdict
        named = f" ({place(self._checkpoint)})" if self._checkpoint is not None and self._checkpoint.counts else ""
        restored = f"checkpoint of {self._config.unit} {self._restored.step:,}{named} was restored"
        or_anew = "; if it resumes but counts from the beginning, write job.resume.check: none"
        does = f": it does not resume{or_anew}" if verdict == "begins anew" else ""
        self.why = f"{restored} and {fact}{does}"

    def _what_would_show(self, lines: str) -> str:
        names = (
            " So would checkpoint names with {step} or {epoch}, and checkpoint.every in the same unit"
            if self._checkpoint
            else ""
        )
        if self.is_done:
            return "all of its work was done when that checkpoint was made"
        if self._config.stages > 1:
            return "the command trains twice, and each training counts its own steps: make a stack for each"
        if not lines:
            return f"no line of this start showed a step; such a line would show whether it resumes.{names}"
        if self._counting.newest is None:
            return f"its first line shows {lines}, but no line before that checkpoint showed a position to compare with"
        return (
            f"its first line shows {lines}, but a start without a checkpoint may show that too: try an interruption"
            " after a later checkpoint"
        )
