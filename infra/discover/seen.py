"""Evaluates a trial: which files are checkpoints, which printed lines give the step, what the script did on a signal,
and whether it resumes.
"""

from __future__ import annotations

import posixpath
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import get_args

from gpufleet.infra.discover.expressions import Span
from gpufleet.infra.discover.lines import BAR, NUMBER, PrintedLine
from gpufleet.infra.discover.sandbox import LEAVES_S, TrialRun, Written
from gpufleet.infra.discover.saves import Pattern
from gpufleet.infra.discover.script import CheckpointFacts, ScriptFacts
from gpufleet.infra.discover.source import Finding
from gpufleet.infra.discover.template import Trial
from gpufleet.job.command.elsewhere import NO_CHECKPOINT, pattern_of
from gpufleet.job.command.lines import Counting, Patterns, Position
from gpufleet.job.command.names import FoundCheckpoint, Names
from gpufleet.job.command.output import CauseOfEnd
from gpufleet.job.command.resumption import ResumeCheck
from gpufleet.job.contract.commit import Commit
from gpufleet.job.kind.command import CommandCheckpoint, CommandConfig, Every, Progress, Unit

_INTEGER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?![\w.])|(?<![\w.,])\d+(?![\w]|\.\d|,\d)")
_OF_ONE_START = re.compile(  # a time or a running number, in the name of a folder that each start makes anew
    r".*\d{8}.*|.*\d{4}-\d\d-\d\d.*|.*\d{4}_\d{6}.*|.*\d\d[-:_]\d\d[-:_]\d\d.*|(?<=[_-])\d+$|(?<=^exp)\d*$"
)
# for example Epoch [3/10]
_OF_ALL = re.compile(r"\b(epoch|step|iter(?:ation)?)s?\b\W{0,4}\d+ *(?:/|of) *(\d+)", re.IGNORECASE)
_BURST_S = 0.5  # seconds within which numbered lines count as a table or a list
_COUNTS = re.compile(r"step|iter|epoch|\bit\b|batch", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenCheckpoint:
    """A checkpoint, as its files show it. `top` is `checkpoints`, or `code` if the checkpoint lies in the command's own
    folder.
    """

    name: str  # with {step} or {epoch}; if it has neither, each save rewrites the checkpoint
    folder: str  # the folder below `top`; empty or a dot for `top` itself
    top: str
    unit: Unit
    every: int | None
    complete: str
    bytes: int
    files: tuple[str, ...]  # files below the folder, in the order in which they were written
    evidence: str

    @property
    def rewritten(self) -> bool:
        return "{" not in self.name

    def config(self, lines: Sequence[str]) -> CommandConfig:
        """The command's config, as a node would get it."""
        every = Every(epochs=self.every) if self.unit == "epoch" else Every(steps=self.every)
        checkpoint = CommandCheckpoint(each=(self.name,), complete=self.complete, every=every)
        return CommandConfig(checkpoint=checkpoint, progress=Progress(stdout=tuple(lines)))


@dataclass(slots=True)
class TrialFindings:
    """The results of the trial. A result is None if the trial did not get that far; `problems` says why."""

    checkpoint: SeenCheckpoint | None = None
    line: PrintedLine | None = None  # a form of line that was printed repeatedly
    read: tuple[str, ...] = ()  # those patterns of the code or its framework that match a printed line
    goes_on: bool | None = None
    resume_evidence: str = ""
    saves_on_signal: bool | None = None
    signal_evidence: str = ""
    output: list[str] = field(default_factory=list)  # the first start's lines
    # milliseconds of a step and of an epoch, measured by the first start's lines
    took_ms: dict[str, float] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns that give the position: those of the code, or else the form of a line that came repeatedly."""
        return self.read or ((self.line.regex,) if self.line is not None else ())

    def places(self, watch: TrialRun) -> list[tuple[float, Position]]:
        """The positions that a start's lines give, with their times."""
        patterns = Patterns(self.patterns)
        read = ((at, patterns.read(line)) for at, line in watch.lines)
        places = ((at, reading.place) for at, reading in read if reading is not None)
        return [(at, place) for at, place in places if place is not None and not place.is_beginning]


def with_seen(facts: ScriptFacts, seen: TrialFindings, out: str, trying: Trial) -> None:
    """Replaces facts of the code by facts of the trial. `out`: the setting that gave the trial its output folder."""
    row, checkpoint = facts.framework, seen.checkpoint
    if checkpoint is not None:
        place = Pattern(checkpoint.name, folder=posixpath.relpath(checkpoint.folder or ".", facts.start.folder or "."))
        if checkpoint.top == "checkpoints":
            read = facts.checkpoint.place if facts.checkpoint is not None else None
            is_path = read is not None and read.is_whole_path and read.setting == out and read.name == checkpoint.name
            folder = "" if out or not trying.workdir else read.folder if read is not None and read.folder else "."
            place = Pattern(
                checkpoint.name, out, folder=folder, in_checkpoints=not out and not folder, is_whole_path=is_path
            )
        cadence = facts.checkpoint.cadence if facts.checkpoint is not None else None
        if trying.every:  # the trial's interval between saves is shorter than that of the code
            cadence = cadence or Span(unit=checkpoint.unit, setting=facts.settings.find(trying.every))
        elif checkpoint.every:
            cadence = Span(unit=checkpoint.unit, count=checkpoint.every, where="in the trial")
        names = facts.names if facts.names and _are_of(facts.names, checkpoint) else (checkpoint.name,)
        facts.checkpoint = CheckpointFacts(names=names, place=place, where=checkpoint.evidence, cadence=cadence)
        facts.complete = (
            Finding(checkpoint.complete, "in the trial: each checkpoint's last file") if checkpoint.complete else None
        )
        facts.size = Finding(f"{checkpoint.bytes / 1e9:.4f}", "in the trial")
        if row is not None:
            facts.framework = replace(row, format=None, each=(), named=True, complete="", progress=row.patterns)
    _take_lines(facts, seen)
    facts.trained = checkpoint is not None or bool(seen.patterns)
    facts.total = facts.total or _total(seen.output)
    facts.seen_ms = seen.took_ms
    if seen.goes_on is False:
        facts.begins_anew, facts.resume, facts.reads_itself = Finding(seen.resume_evidence, "in the trial"), None, None
    elif seen.goes_on and facts.resume is not None:
        facts.resume = Finding(facts.resume.value, seen.resume_evidence)
    elif seen.goes_on:
        facts.reads_itself = Finding("it finds its checkpoint by itself", seen.resume_evidence)
    if seen.saves_on_signal is not None:
        facts.saves_on_signal = Finding(str(seen.saves_on_signal).lower(), seen.signal_evidence)


def _are_of(names: tuple[str, ...], checkpoint: SeenCheckpoint) -> bool:
    """Whether names in the code match the checkpoint's files."""
    read = Names(CommandConfig(checkpoint=CommandCheckpoint(each=names)))
    return checkpoint.rewritten != ("{" in names[0]) and all(read.match(file) for file in checkpoint.files)


def _total(output: Sequence[str]) -> Span | None:
    """How long the script trains: the total of epochs in its lines, or else the total of steps."""
    totals = [(match[1].lower(), int(match[2])) for line in output if (match := _OF_ALL.search(line))]
    for unit in ("epoch", "step", "iter", "iteration"):
        counts = [count for word, count in totals if word == unit]
        if len(counts) > 1 and len(set(counts)) == 1:
            return Span(
                unit="epoch" if unit == "epoch" else "step", count=counts[0], where="in the trial: its lines say so"
            )
    return None


def _take_lines(facts: ScriptFacts, seen: TrialFindings) -> None:
    """Takes the patterns of the code if they match the printed lines, else the form of the printed lines."""
    row = facts.framework
    lines: list[PrintedLine] = []
    for regex, where in [
        *((pattern, row.name) for row in filter(None, [row]) for pattern in row.patterns),
        *((line.regex, line.where) for line in facts.lines),
    ]:
        if matching := [line for line in seen.output if re.search(regex, line)]:
            shown = f"{where}; seen {len(matching)} times: {matching[-1].strip()[:60]!r}"
            lines.append(PrintedLine(regex=regex, where=shown))
    if counts := [line for line in lines if line.groups & {"step", "epoch"}]:
        facts.lines = [*counts[:1], *[line for line in lines if line is not counts[0]][:2]]
    elif seen.line is not None:
        facts.lines = [seen.line]
    else:
        return
    if row is not None:
        facts.framework = replace(row, progress=(), format=None if facts.checkpoint is not None else row.format)


def learn(seen: TrialFindings, first: TrialRun, patterns: Sequence[str]) -> None:
    """Adds the findings of the first start. `patterns`: the patterns of printed lines by the code or its framework."""
    if why := failure(first):
        seen.problems.append(f"the command {why}")
    counters = _counters(first)
    seen.output = [line for _, line in first.lines]
    seen.line = next(filter(None, map(_as_pattern, counters)), None)
    counting = [pattern for pattern in patterns if re.search(r"\(\?P<(step|epoch)>", pattern)]
    seen.read = tuple(pattern for pattern in counting if any(re.search(pattern, line) for line in seen.output))[:1]
    seen.took_ms = dict(_took_ms(seen.places(first)))
    seen.checkpoint = _checkpoint(seen, first, counters)
    if seen.checkpoint is None and not seen.problems:
        ended = "the command ended by itself, and " if first.code == 0 and first.signalled_at is None else ""
        seen.problems.append(f"{ended}no checkpoint appeared: no file was written twice, and no names count upwards")
    if first.signalled_at is not None:
        _take_signal(seen, first, first.signalled_at)


def _took_ms(places: Sequence[tuple[float, Position]]) -> Iterator[tuple[Unit, float]]:
    """Milliseconds per unit: from the first position to the moment at which the last position was first printed."""
    for unit in get_args(Unit):
        first_at = {count: at for at, place in reversed(places) if (count := _count(place, unit)) is not None}
        if (count := max(first_at, default=0) - min(first_at, default=0)) > 0:
            yield unit, (first_at[max(first_at)] - first_at[min(first_at)]) * 1000 / count


def failure(watch: TrialRun) -> str:
    """How a start failed by itself; empty if it did not fail."""
    if watch.code in (None, 0) or watch.signalled_at is not None:
        return ""
    cause = CauseOfEnd()
    for _, line in watch.lines:
        cause.take(line, tells_step=False)
    last = cause.text or (watch.lines[-1][1] if watch.lines else "without a line")
    return f"ended with exit code {watch.code}: {last[:200]}"


@dataclass(frozen=True, slots=True)
class _Counter:
    """A number that goes up in lines of the same form, with the times of its values."""

    place: int
    told: tuple[tuple[float, int], ...]
    sample: str

    @property
    def match(self) -> re.Match[str]:
        return list(_INTEGER.finditer(self.sample))[self.place]

    @property
    def is_epoch(self) -> bool:
        words = re.findall(r"[A-Za-z]+", self.sample[: self.match.start()][-24:])
        return bool(words) and words[-1].lower() in ("ep", "epoch", "epochs")  # episodes are not epochs


def _counters(watch: TrialRun) -> list[_Counter]:
    """The numbers that go up from line to line; the most likely count of the training comes first."""
    values: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    samples: dict[str, str] = {}
    for at, line in watch.lines:
        form = re.sub(r"[-+]?[\d.,]+(e[-+]?\d+)?|\bnan\b|\binf\b|[█▏▎▍▌▋▊▉#━╸╺─]+", "#", line)
        form = re.sub(r"\s+", "", form)[:200]  # without blanks, because they vary where numbers are aligned in columns
        samples.setdefault(form, line)
        for place, match in enumerate(_INTEGER.finditer(line)):
            values[form, place].append((at, int(match[0].replace(",", ""))))
    counters = []
    for (form, place), pairs in values.items():
        changes = [after - before for (_, before), (_, after) in pairwise(pairs)]
        if (
            sum(change > 0 for change in changes) >= 2
            and min(changes) >= 0
            and pairs[-1][0] - pairs[0][0] >= _BURST_S
            and len(_INTEGER.findall(samples[form])) > place
        ):
            counters.append(_Counter(place, tuple(pairs), samples[form]))
    return sorted(
        counters,
        key=lambda counter: (
            not _COUNTS.search(counter.sample), "loss" not in counter.sample.lower(), -len(counter.told), counter.place,
        ),
    )  # fmt: skip


def _as_pattern(counter: _Counter) -> PrintedLine | None:
    """The counter's line as a regular expression; None if the expression would not match this line."""
    line, match = counter.sample, counter.match
    if bar := re.search(r"^(.*?)\d+%\|[^|]*\| *\d+/\d+ \[", line):
        regex = _escaped(bar[1]) + BAR.format(count="step", total="total")
        return PrintedLine(regex=regex, where=f"in the trial: {len(counter.told)} states of a bar")
    before, after = line[: match.start()], line[match.end() :]
    if len(before) > 40:
        before = re.sub(r"^.*?(?=\S{0,12}\s*[A-Za-z(\[|]*\W*$)", "", before)
    regex = f"{_escaped(before)}(?P<{'epoch' if counter.is_epoch else 'step'}>[\\d,]+)"
    if total := re.match(r"\s*/\s*(\d+)", after):
        regex += r"\s*/\s*" + (r"\d+" if counter.is_epoch else r"(?P<total>\d+)")
        after = after[total.end() :]
    if loss := re.search(r"(?<![A-Za-z_])(?:train[ _])?loss\W{1,4}", after, re.IGNORECASE):
        regex += f".*?{_escaped(loss[0])}(?P<loss>{NUMBER})"
    shown = f"in the trial: {len(counter.told)} lines, such as {line.strip()[:60]!r}"
    return PrintedLine(regex=regex, where=shown) if re.search(regex, line) else None


def _escaped(text: str) -> str:
    """A regular expression for the text of a line, in which numbers and blanks may vary."""
    regex = ""
    for part in filter(None, re.split(r"(\s+|\d[\d.,:]*)", re.sub(r"[█▏▎▍▌▋▊▉━╸╺─]+", "#", text))):
        regex += (
            r"\s*"
            if part.isspace()
            else r"[\d.,:]+"
            if part[0].isdigit()
            else re.sub(r"\\([ #%])", r"\1", re.escape(part))
        )
    return regex


def _checkpoint(seen: TrialFindings, watch: TrialRun, counters: list[_Counter]) -> SeenCheckpoint | None:
    """The checkpoint: files that appeared or were rewritten repeatedly, and are not logs."""
    until = (watch.signalled_at or float("inf")) + LEAVES_S
    kinds: dict[str, list[Written]] = defaultdict(list)
    for written in watch.writes:
        if not NO_CHECKPOINT.search(written.name) and written.at <= until:
            kinds[re.sub(r"\d+", "#", written.name)].append(written)
    several = (sorted(writes, key=lambda written: written.at) for writes in kinds.values() if len(writes) > 1)
    options = [
        checkpoint for writes in several if (checkpoint := _as_checkpoint(seen, writes, watch, counters)) is not None
    ]
    likely = re.compile(r"best|ema|sample|optim_only")
    options.sort(key=lambda written: (bool(likely.search(written.name)), written.rewritten, -written.bytes))
    return next(iter(options), None)


def _as_checkpoint(
    seen: TrialFindings, writes: list[Written], watch: TrialRun, counters: list[_Counter]
) -> SeenCheckpoint | None:
    """The checkpoint that the files of `writes` form: one file or folder that is rewritten, or several whose names
    count upwards; None if they form neither.
    """
    top, files = writes[0].name.partition("/")[0], [written.name.partition("/")[2] for written in writes]
    name, numbers, unit, complete = files[0], list[int](), "step", ""
    if len(set(files)) > 1:
        name = pattern_of(files)[0]
        matches = [Names(CommandConfig(checkpoint=CommandCheckpoint(each=(name,)))).match(file) for file in files]
        numbers = [number for match in matches if match is not None for number in match[0].values()]
        if "{" not in name or numbers != sorted(numbers):
            return None
        unit = "epoch" if "{epoch" in name or _are_epochs(seen, watch, writes, numbers, counters) else "step"
        name = name.replace("{step", f"{{{unit}") if "{epoch" not in name else name
        complete = _written_last(writes, watch, name)
    else:
        places = seen.places(watch)
        positions = [
            place for written in writes for place in [p for at, p in places if at <= written.began + 0.05][-1:]
        ]
        unit = "epoch" if any(place.step is None for place in positions) else "step"
        numbers = [number for place in positions if (number := _count(place, unit)) is not None]
    *above, last = name.rstrip("/").split("/")
    parts = [*(_OF_ONE_START.sub("*", part) for part in above), last]
    fixed = next((index for index, part in enumerate(parts) if re.search(r"[{*]", part)), len(parts) - 1)
    fixed = fixed if top == "code" else 0
    every = _interval(list(dict.fromkeys(numbers)))
    if "{" not in name:  # a rewritten file has no interval: it may be written only after an improvement
        reached = max((_count(place, unit) or 0 for _, place in seen.places(watch)), default=0)
        every = every if every and len(numbers) > 2 and reached < numbers[-1] + 2 * every else None
    came = ", ".join(list(dict.fromkeys(files))[:3]) if len(set(files)) > 1 else f"written {len(writes)} times"
    told_at = f", at {unit}s {', '.join(map(str, list(dict.fromkeys(numbers))[:4]))}" if counters and numbers else ""
    renamed = f"; renamed from {Path(writes[-1].renamed_from).name}" if writes[-1].renamed_from else ""
    return SeenCheckpoint(
        name="/".join(parts[fixed:]) + ("/" if name.endswith("/") else ""),
        folder="/".join(parts[:fixed]) or ("." if top == "code" else ""),
        top=top,
        unit="epoch" if unit == "epoch" else "step",
        every=every,
        complete=complete,
        bytes=_bytes(writes, watch, name),
        files=tuple("/".join(file.split("/")[fixed:]) for file in files),
        evidence=f"in the trial: {came}{told_at}{renamed}",
    )


def _count(place: Position, unit: str) -> int | None:
    return place.epoch if unit == "epoch" else place.step


def _interval(numbers: list[int]) -> int | None:
    """The distance between consecutive numbers; None if the distance varies."""
    gaps = {after - before for before, after in pairwise(numbers)}
    return gaps.pop() if len(gaps) == 1 else None


def _files_of_each(writes: list[Written], watch: TrialRun, name: str) -> dict[str, dict[str, Written]]:
    """For each checkpoint that is a folder: its files, by their names in the folder."""
    level, by_folder = name.count("/"), defaultdict[str, dict[str, Written]](dict)
    kinds = {re.sub(r"\d+", "#", "/".join(written.name.split("/")[: level + 1])) for written in writes}
    for written in watch.writes:
        parts = written.name.split("/")
        if re.sub(r"\d+", "#", folder := "/".join(parts[: level + 1])) in kinds:
            by_folder[folder]["/".join(parts[level + 1 :])] = written
    return by_folder


def _bytes(writes: list[Written], watch: TrialRun, name: str) -> int:
    """The size of one checkpoint in bytes: of its file, or of all files in its folder."""
    if not name.endswith("/"):
        return max(written.bytes for written in writes)
    return max(
        sum(written.bytes for written in files.values()) for files in _files_of_each(writes, watch, name).values()
    )


def _written_last(writes: list[Written], watch: TrialRun, name: str) -> str:
    """The file that was written last in every one of the checkpoints' folders; empty if the folders differ."""
    folders = _files_of_each(writes, watch, name).values() if name.endswith("/") else ()
    names = {max(files, key=lambda file: files[file].at) for files in folders}
    return names.pop() if len(names) == 1 and len(folders) > 1 else ""


def _are_epochs(
    seen: TrialFindings, watch: TrialRun, writes: list[Written], numbers: list[int], counters: list[_Counter]
) -> bool:
    """Whether the numbers in the files' names are the epochs that were printed when the files were written."""
    read = tuple(
        (at, place.epoch) for at, place in seen.places(watch) if place.step is None and place.epoch is not None
    )
    for printed in (read, *(counter.told for counter in counters if counter.is_epoch)):
        by_then = ([number for at, number in printed if at <= write.began + 0.05][-1:] for write in writes)
        close = sum(abs(at[0] - number) <= 1 for at, number in zip(by_then, numbers, strict=False) if at)
        if close > len(numbers) / 2:
            return True
    return False


def _take_signal(seen: TrialFindings, first: TrialRun, signalled_at: float) -> None:
    """Adds what came after the signal. A save counts only if a process catches the signal: otherwise the save had begun
    before, and the end of the process may cut it off.
    """
    ended = f"was still there {LEAVES_S:.0f} s later" if first.code is None else f"ended with exit code {first.code}"
    later = [
        written for written in first.writes if written.began >= signalled_at and not NO_CHECKPOINT.search(written.name)
    ]
    if first.catches and later:
        seen.saves_on_signal = True
        seen.signal_evidence = f"in the trial: after SIGTERM it wrote {Path(later[0].name).name} and {ended}"
    elif first.code is not None:
        seen.saves_on_signal = False
        why = "wrote nothing" if first.catches else "dies of it, because nothing in the script catches it,"
        seen.signal_evidence = f"in the trial: on SIGTERM it {why} and {ended}"


def resume_check(seen: TrialFindings, first: TrialRun, restored: FoundCheckpoint) -> ResumeCheck | None:
    """The check that a node makes of a resume, for the second start; None if no line or name gave the position."""
    assert seen.checkpoint is not None
    places = seen.places(first)
    by_then = [place for at, place in places if at <= restored.first_written + 0.05]
    newest, unit = (by_then[-1] if by_then else None), seen.checkpoint.unit
    count = None if newest is None else newest.epoch if newest.step is None else newest.step
    number = restored.number if restored.number is not None else count
    if number is None:
        return None
    start = Counting(unit=unit, first=places[0][1] if places else None, newest=newest)
    config = seen.checkpoint.config(seen.patterns)
    return ResumeCheck(config, Commit(step=number, config_sha256="", goes_on_from=number), restored, start)


def take_verdict(seen: TrialFindings, check: ResumeCheck, second: TrialRun) -> None:
    """Adds the findings of the second start, in words."""
    if check.verdict == "not shown":
        ended = failure(second)
        seen.problems.append(f"whether it resumes is not shown: {f'a second start {ended}' if ended else check.why}")
    else:
        seen.goes_on = check.verdict == "goes on"
        seen.resume_evidence = f"in the trial: {check.why}; it {check.verdict}"
