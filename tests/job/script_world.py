"""A script of a user's that is only said to run: what it prints and saves, on a clock of its own, followed by the real
judgement of files and lines. Two starts of it take some hundredths of a second.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from gpufleet.job import atomic
from gpufleet.job.command.checkpoints import CommandCheckpoints
from gpufleet.job.command.endings import End, Verdict
from gpufleet.job.command.given import Folders
from gpufleet.job.command.output import Output
from gpufleet.job.command.progress import Metrics, StepReader
from gpufleet.job.command.start import CommandStart
from gpufleet.job.kind import convert
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.kind.job import require

Delivery = Literal["at once", "in blocks", "late", "none"]
PATTERNS = {
    "step": r"^step (?P<step>\d+) loss",
    "epoch": r"^epoch (?P<epoch>\d+) loss",
    "batch": r"^epoch (?P<epoch>\d+) \| (?P<batch>\d+)/(?P<batches>\d+) loss",
}
NAMES = {"step": "ckpt-{step}.json", "epoch": "epoch_{epoch}.json", "epoch as step": "e{step}.json", "one": "last.json"}
BLOCK = 12  # lines that come together
LATE = 15  # steps of a process before its first line


@dataclass(frozen=True, kw_only=True)
class FakeScript:
    """Trains `epochs` of `batches` steps, and saves every `every` steps. Counts from `base`."""

    lines: str = "step"  # of PATTERNS
    names: str = "step"  # of NAMES
    base: int = 1
    delivery: Delivery = "at once"
    each: int = 1  # steps between two lines
    every: int = 10
    renames: bool = True
    resumes: bool = True
    does_nothing: bool = False  # where it was given a checkpoint
    saves_again: bool = False  # what it was given, before its first step
    epochs: int = 6
    batches: int = 10
    keeps: int | None = None  # of its own checkpoints
    shift: int = 0  # by which steps lie further at which a later start saves
    evaluates: int = 0  # lines like those of its steps, once all of these are done
    counts_anew: bool = False  # from its first step at each start, though it goes on

    @property
    def steps(self) -> int:
        return self.epochs * self.batches

    def line(self, step: int) -> str | None:
        """What it prints after a step, if anything."""
        epoch, batch = (step - 1) // self.batches, (step - 1) % self.batches
        if self.lines == "epoch":
            return f"epoch {epoch + self.base} loss 1.5" if batch == self.batches - 1 else None
        if step % self.each:
            return None
        if self.lines == "batch":
            return f"epoch {epoch + self.base} | {batch + self.base}/{self.batches} loss 1.5"
        return f"step {step - 1 + self.base} loss 1.5"

    def name(self, step: int) -> str:
        epoch = (step - 1) // self.batches + self.base
        number = step - 1 + self.base if self.names == "step" else epoch
        return NAMES[self.names].format(step=number, epoch=number)

    def config(self, **sections: Any) -> CommandConfig:
        """A definition of it."""
        tree: dict[str, Any] = {
            "command": "x",
            "checkpoint": {"each": [NAMES[self.names]], "rewritten": self.names == "one"},
            "progress": {"stdout": [PATTERNS[self.lines]]},
            **sections,
        }
        config = convert.from_json(CommandConfig, tree, "job", CommandConfig())
        require(config)
        return config


@dataclass
class ScriptWorld:
    """A work folder in which a script starts, is lost, and starts again."""

    folder: Path
    script: FakeScript
    config: CommandConfig
    now: float = field(default_factory=time.time)
    notes: list[str] = field(default_factory=list)
    verdicts: list[str] = field(default_factory=list)  # whether its newest start goes on, at each look
    why: str = ""

    def __post_init__(self) -> None:
        self.folders = Folders.from_workdir(self.folder)
        self.folders.make()
        self.values = self.folders.values("r1", 1)
        metrics = Metrics(self.folder / "metrics.jsonl")
        self.reader = StepReader(metrics, self.config, self.notes.append, lambda kind, text: None)
        pipe, other = os.pipe()
        self.output = Output(pipe, self.reader.line, lambda _: None, lambda line: line, lambda: self.now)
        os.close(pipe)
        os.close(other)
        self.checkpoints = CommandCheckpoints(
            self.config,
            self.folders.user / "checkpoints",
            self.folders.user,
            self.folder,
            run="r1",
            digest="0" * 64,
            gpus=1,
            alive=lambda: [7],
            writing=lambda pids: set(),
            lines=self.reader,
            say=self.notes.append,
            clock=lambda: self.now,
        )

    def start(self) -> CommandStart:
        self.verdicts.clear()
        start = CommandStart(
            self.config, self.folders, self.values, self.checkpoints, self.reader, self.output, lambda: self.now
        )
        start.begin()
        return start

    def run(self, start: CommandStart, until: int | None = None, code: int = 0) -> End | None:
        """Trains to the end, or up to the step after which it ends with `code`. None: it is lost there without a word,
        or was refused.
        """
        script, waiting, began = self.script, list[str](), self._first_step(start)
        if script.saves_again and start.restored is not None and script.resumes:
            self._save(began - 1, began - 1)
        for number, step in enumerate(self._steps(start, began), 1):
            self.now += 1.0
            if script.delivery != "none" and (number > LATE or script.delivery != "late"):
                counted = number if script.counts_anew else step
                waiting += [line] if (line := script.line(counted)) is not None else []
            if script.delivery != "in blocks" or len(waiting) >= BLOCK:
                self._print(waiting)
            if script.delivery == "none":
                self._print([f"working on {step}"])
            if (step - (script.shift if start.restored else 0)) % script.every == 0:
                self._save(step, number if script.counts_anew else step)
            if self.look(start) or step == until:
                break
        else:
            until = None
            for number in range(1, script.evaluates + 1):
                self._print([f"step {number} loss 1.5"])
                if self.look(start):
                    break
        if start.refusal or (until is not None and code < 0):
            return None
        self._print(waiting)
        self.look(start)
        return start.end(code, "", "the command")

    def look(self, start: CommandStart) -> str:
        """As often as the host does, a second long."""
        for _ in range(4):
            self.now += 0.4
            refusal = start.look()
            if self.checkpoints._copying is not None:
                self.checkpoints._copying[1].exception()
                start.look()
            seen = start.observe(is_over=True)
            if seen is not None:
                self.verdicts.append(seen.resumes)
                self.why = seen.why
        return refusal

    def metrics(self) -> list[dict[str, Any]]:
        self.reader.flush()
        return atomic.objects((self.folder / "metrics.jsonl").read_bytes())

    def committed(self) -> list[int]:
        return [int(path.name[5:]) for path in sorted((self.folder / "ckpt").glob("step_*"))]

    def judge(self, start: CommandStart, end: End) -> Verdict:
        return start.judge(end, [])[0]

    def _first_step(self, start: CommandStart) -> int:
        if start.restored is None or not self.script.resumes:
            return 1
        return int(json.loads(self.checkpoints.place(start.restored).read_text())["step"]) + 1

    def _steps(self, start: CommandStart, began: int) -> Iterator[int]:
        if start.restored is None or not self.script.does_nothing:
            yield from range(began, self.script.steps + 1)

    def _print(self, lines: list[str]) -> None:
        self.output.take("".join(f"{line}\n" for line in lines).encode())
        lines.clear()

    def _save(self, step: int, counted: int) -> None:
        self.now += 0.1
        folder = self.folders.user / "checkpoints"
        path = folder / self.script.name(counted)
        made = path.with_suffix(".tmp") if self.script.renames else path
        made.write_text(json.dumps({"step": step}))
        os.utime(made, (self.now, self.now))
        made.replace(path)
        if self.script.keeps is not None:
            for old in sorted(folder.glob("*.json"), key=lambda each: each.stat().st_mtime)[: -self.script.keeps]:
                old.unlink()


def lost_and_started_again(world: ScriptWorld, at: int) -> CommandStart:
    """The start after one that was lost at a step, with its newest checkpoint."""
    world.run(world.start(), until=at, code=-1)
    world.now += 60.0
    return world.start()
