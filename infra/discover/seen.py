"""What a trial showed: which files are checkpoints, which lines tell the step, what a signal did, if it goes on."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path

from gpufleet.infra.discover.frameworks import Framework
from gpufleet.infra.discover.lines import BAR, NUMBER, PrintedLine
from gpufleet.infra.discover.sandbox import LEAVES_S, NO_CHECKPOINT, TrialRun, Written
from gpufleet.infra.discover.saves import Pattern, SaveCadence
from gpufleet.infra.discover.script import CheckpointFacts, ScriptFacts
from gpufleet.infra.discover.source import Finding
from gpufleet.job.spec.command import FORMATS

_INTEGER = re.compile(r"(?<![\w.])\d{1,3}(?:,\d{3})+(?![\w.])|(?<![\w.,])\d+(?![\w]|\.\d|,\d)")
_EXCEPTION = re.compile(r"[\w.]*(Error|Exception)\b")


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenCheckpoint:
    """What one checkpoint is, as files showed it. `where`: checkpoints, or code for one below the command's folder."""

    names: tuple[str, ...]
    folder: str
    where: str
    rewritten: bool
    unit: str  # step or epoch
    every: int | None
    complete: str
    bytes: int
    files: tuple[str, ...]  # below the folder, as they came
    evidence: str


@dataclass(frozen=True, kw_only=True, slots=True)
class SeenLines:
    """A form of line that came again and again."""

    regex: str
    groups: frozenset[str]
    evidence: str


@dataclass(slots=True)
class TrialFindings:
    """All that the trial showed. None: it did not come to that; `problems` says why."""

    checkpoint: SeenCheckpoint | None = None
    lines: SeenLines | None = None
    goes_on: bool | None = None
    resume_evidence: str = ""
    saves_on_signal: bool | None = None
    signal_evidence: str = ""
    output: list[str] = field(default_factory=list)  # the first start's lines
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


def with_seen(found: ScriptFacts, seen: TrialFindings, out: str) -> None:
    """Puts what was seen in the place of what was read. `out`: the setting that told the command where to save."""
    row, read = found.framework, found.checkpoint
    if (kept := seen.checkpoint) is not None:
        place = (
            Pattern(kept.names[0], out) if kept.where == "checkpoints" else Pattern(kept.names[0], folder=kept.folder)
        )
        if kept.where == "checkpoints" and not out:
            place = Pattern(kept.names[0], in_checkpoints=True)
        cadence = read.cadence if read is not None else None
        if cadence is None or not cadence.setting:  # one with a setting was asked for more often than it is meant
            cadence = (
                SaveCadence(unit="epoch" if kept.unit == "epoch" else "step", count=kept.every, where="seen")
                if kept.every
                else cadence
            )
        names = found.names if found.names and _are_of(found.names, kept) else kept.names
        found.checkpoint = CheckpointFacts(names=names, place=place, where=kept.evidence, cadence=cadence)
        found.complete = Finding(kept.complete, "seen: the last of each") if kept.complete else None
        found.size = Finding(f"{kept.bytes / 1e9:.4f}", "seen")
        if row is not None:
            found.framework = replace(row, format=None, each=(), named=True, complete="", progress=_progress_of(row))
    _take_lines(found, seen)
    if seen.goes_on is False:
        found.begins_anew, found.resume, found.reads_itself = Finding(seen.resume_evidence, "seen"), None, None
    elif seen.goes_on and found.resume is not None:
        found.resume = Finding(found.resume.value, seen.resume_evidence)
    elif seen.goes_on:
        found.reads_itself = Finding("it goes on by itself", seen.resume_evidence)
    if seen.saves_on_signal is not None:
        found.saves_on_signal = Finding(str(seen.saves_on_signal).lower(), seen.signal_evidence)


def _are_of(names: tuple[str, ...], kept: SeenCheckpoint) -> bool:
    """Whether names that were read are those of the files that came."""
    patterns = [re.compile(name_regex(name)) for name in names]
    return kept.rewritten != ("{" in names[0]) and all(
        any(each.match(file) for each in patterns) for file in kept.files
    )


def _progress_of(row: Framework) -> tuple[str, ...]:
    return row.progress or (FORMATS[row.format].progress if row.format else ())


def _take_lines(found: ScriptFacts, seen: TrialFindings) -> None:
    """The patterns that were read, where they match what came; else the form that came."""
    row = found.framework
    patterns = [(each, row.name) for each in _progress_of(row)] if row is not None else []
    lines: list[PrintedLine] = []
    for regex, where in [*patterns, *((each.regex, each.where) for each in found.lines)]:
        matching = [line for line in seen.output if re.search(regex, line)]
        if matching:
            shown = f"{where}; seen {len(matching)} times: {matching[-1].strip()[:60]!r}"
            lines.append(PrintedLine(regex=regex, where=shown))
    counts = [each for each in lines if each.groups & {"step", "epoch"}]
    if counts:
        found.lines = [*counts[:1], *[each for each in lines if each is not counts[0]][:2]]
    elif seen.lines is not None:
        found.lines = [PrintedLine(regex=seen.lines.regex, where=seen.lines.evidence)]
    else:
        return
    if row is not None:
        found.framework = replace(row, progress=(), format=None if found.checkpoint is not None else row.format)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    number: int
    shown: str
    values: dict[str, str | int]
    at: float  # when the second start began


def learn(seen: TrialFindings, first: TrialRun) -> None:
    if first.code not in (None, 0) and first.signalled_at is None:
        error = next((line for _, line in reversed(first.lines) if _EXCEPTION.match(line)), "")
        last = error or (first.lines[-1][1] if first.lines else "without a line")
        seen.problems.append(f"the command ended with exit code {first.code}: {last[:200]}")
    numbers = _counting(first)
    seen.output = [line for _, line in first.lines]
    seen.lines = _lines_seen(first, numbers)
    seen.checkpoint = _checkpoint_seen(first, numbers)
    if seen.checkpoint is None and not seen.problems:
        seen.problems.append("no checkpoint appeared: nothing was written twice, or under names that count")
    if first.signalled_at is not None:
        _signal_seen(seen, first)


def _form(line: str) -> str:
    return re.sub(r"[-+]?[\d.,]+(e[-+]?\d+)?|\bnan\b|\binf\b|[█▏▎▍▌▋▊▉#━╸╺─]+", "#", line)[:200]


def _numbers(line: str) -> Iterator[tuple[str, int, int]]:
    """The whole numbers of a line, with its form and their places in it."""
    form = _form(line)
    for place, match in enumerate(_INTEGER.finditer(line)):
        yield form, place, int(match[0].replace(",", ""))


@dataclass(frozen=True, slots=True)
class _Counting:
    """A number in a form of line that goes up: `steps` with the times at which they were told."""

    form: str
    place: int
    told: tuple[tuple[float, int], ...]
    sample: str

    def told_by(self, moment: float) -> int | None:
        return next((number for at, number in reversed(self.told) if at <= moment + 0.05), None)


def _counting(watch: TrialRun) -> list[_Counting]:
    """The numbers that go up from line to line, the most lively first."""
    told: dict[tuple[str, int], list[tuple[float, int]]] = defaultdict(list)
    samples: dict[str, str] = {}
    for at, line in watch.lines:
        samples.setdefault(_form(line), line)
        for form, place, number in _numbers(line):
            told[form, place].append((at, number))
    found = []
    for (form, place), pairs in told.items():
        numbers = [number for _, number in pairs]
        ups = sum(after > before for before, after in pairwise(numbers))
        downs = sum(after < before for before, after in pairwise(numbers))
        if len(numbers) >= 3 and ups >= 2 and downs == 0:
            found.append(_Counting(form, place, tuple(pairs), samples[form]))
    words = re.compile(r"step|iter|epoch|\bit\b|batch", re.IGNORECASE)
    return sorted(
        found,
        key=lambda each: (not words.search(each.form), "loss" not in each.form.lower(), -len(each.told), each.place),
    )


def _lines_seen(watch: TrialRun, counting: list[_Counting]) -> SeenLines | None:
    """The form that tells the step best, as a regular expression."""
    for best in counting:
        line = best.sample
        if bar := re.search(r"^(.*?)\d+%\|[^|]*\| *\d+/\d+ \[", line):
            regex = _escaped(bar[1]) + BAR.format(count="step", total="total")
            return SeenLines(
                regex=regex, groups=frozenset({"step", "total"}), evidence=f"seen: {len(best.told)} states of a bar"
            )
        matches = list(_INTEGER.finditer(line))
        if best.place >= len(matches):
            continue
        match = matches[best.place]
        before, after = line[: match.start()], line[match.end() :]
        word = re.findall(r"[A-Za-z]+", before[-24:])
        group = "epoch" if word and word[-1].lower().startswith("ep") else "step"
        head = (
            _escaped(re.sub(r"^.*?(?=\S{0,12}\s*[A-Za-z(\[|]*\W*$)", "", before))
            if len(before) > 40
            else _escaped(before)
        )
        regex, groups = f"{head}(?P<{group}>[\\d,]+)", {group}
        if total := re.match(r"\s*/\s*(\d+)", after):
            name = "total" if group == "step" else ""
            regex += r"\s*/\s*" + (f"(?P<{name}>\\d+)" if name else r"\d+")
            groups |= {name} if name else set()
            after = after[total.end() :]
        if loss := re.search(r"(?<![A-Za-z_])(?:train[ _])?loss\W{1,4}", after, re.IGNORECASE):
            regex += f".*?{_escaped(loss[0])}(?P<loss>{NUMBER})"
            groups.add("loss")
        if not re.search(regex, line):
            continue
        shown = f"seen: {len(best.told)} lines, such as {line.strip()[:60]!r}"
        return SeenLines(regex=regex, groups=frozenset(groups), evidence=shown)
    return None


def _escaped(text: str) -> str:
    """Literal text of a line; numbers and blanks in it may be others."""
    text = re.sub(r"[█▏▎▍▌▋▊▉━╸╺─]+", "#", text)
    parts = re.split(r"(\s+|\d[\d.,:]*)", text)
    return "".join(
        r"\s*"
        if part.isspace()
        else r"[\d.,:]+"
        if part[:1].isdigit()
        else re.escape(part).replace("\\ ", " ").replace("\\#", "#").replace("\\%", "%")
        for part in parts
        if part
    )


def _checkpoint_seen(watch: TrialRun, counting: list[_Counting]) -> SeenCheckpoint | None:
    """The kind of file that came again and again, or was written again, and is no log."""
    before = watch.signalled_at or float("inf")
    kinds: dict[str, list[Written]] = defaultdict(list)
    for each in watch.writes:
        if not NO_CHECKPOINT.search(each.name) and each.at <= before + LEAVES_S:
            kinds[re.sub(r"\d+", "#", each.name)].append(each)
    options = []
    for writes in kinds.values():
        if len({each.name for each in writes}) >= 2:
            if (option := _numbered(writes, watch, counting)) is not None:
                options.append(option)
        elif len(writes) >= 2:
            options.append(_rewritten(writes, watch, counting))
    options.sort(
        key=lambda each: (bool(re.search(r"best|ema|sample|optim_only", each.names[0])), each.rewritten, -each.bytes)
    )
    return options[0] if options else None


def _relative_name(name: str, top: str, folder: str) -> str:
    """A name relative to the folder of the checkpoints."""
    return name.removeprefix(f"{top}/").removeprefix(f"{folder}/")


def _split_place(name: str) -> tuple[str, str]:
    top, _, rest = name.partition("/")
    return ("checkpoints" if top == "checkpoints" else top), rest


def _numbered(writes: list[Written], watch: TrialRun, counting: list[_Counting]) -> SeenCheckpoint | None:
    """Names that differ in one number which goes up."""
    names = [each.name for each in sorted(writes, key=lambda each: each.at)]
    rows = [re.findall(r"\d+", name) for name in names]
    varying = [place for place in range(len(rows[0])) if len({row[place] for row in rows}) > 1]
    if not varying:
        return None
    texts = re.split(r"\d+", names[0])
    place = next((each for each in varying if re.search(r"step|iter", texts[each], re.IGNORECASE)), varying[0])
    values = [int(row[place]) for row in rows]
    ordered = list(dict.fromkeys(values))
    if ordered != sorted(ordered):
        return None
    digits = {len(row[place]) for row in rows}
    padded = any(row[place].startswith("0") and len(row[place]) > 1 for row in rows) and len(digits) == 1
    unit = _unit_of_names(writes, values, watch, counting, names[0], place)
    word = f"{{{unit}:0{digits.pop()}d}}" if padded else f"{{{unit}}}"
    top, rest = _split_place(names[0])
    pieces, index = re.split(r"(\d+)", rest), -1
    offset = len(re.findall(r"\d+", names[0])) - len(re.findall(r"\d+", rest))
    shown = ""
    for piece in pieces:
        if piece.isdigit():
            index += 1
            shown += word if index + offset == place else "*" if index + offset in varying else piece
        else:
            shown += piece
    parts, complete = shown.split("/"), ""
    for level, part in enumerate(parts[:-1]):
        if word in part:
            shown = "/".join(parts[: level + 1]) + "/"
            complete = _written_last(writes, watch, shown, word)
            break
    folder = ""
    if top == "code":
        fixed = []
        rest_parts = shown.split("/")
        while len(rest_parts) > 1 and word not in rest_parts[0] and "*" not in rest_parts[0] and rest_parts[1:] != [""]:
            fixed.append(rest_parts.pop(0))
        folder, shown = "/".join(fixed) or ".", "/".join(rest_parts)
    gaps = [after - before for before, after in pairwise(ordered)]
    every = min(gaps) if gaps and len(set(gaps)) == 1 else None
    also = "; renamed from " + Path(writes[0].renamed_from).name if writes[0].renamed_from else ""
    told = f", when {unit}s to {ordered[-1]} were told" if counting else ""
    few = [name.partition("/")[2] if "/" in shown else Path(name).name for name in list(dict.fromkeys(names))[:3]]
    return SeenCheckpoint(
        names=(shown,),
        folder=folder,
        where=top,
        rewritten=False,
        unit=unit,
        every=every,
        complete=complete,
        bytes=_bytes_of(watch, writes, shown, word),
        files=tuple(_relative_name(name, top, folder) for name in names),
        evidence=f"seen: {', '.join(few)}{told}{also}",
    )


def _bytes_of(watch: TrialRun, writes: list[Written], shown: str, word: str) -> int:
    """The bytes of one checkpoint: all files of its folder, or the file."""
    if not shown.endswith("/"):
        return max(each.bytes for each in writes)
    level = shown.count("/")
    folder = "/".join(writes[0].name.split("/")[: level + 1]) + "/"
    return sum({each.name: each.bytes for each in watch.writes if each.name.startswith(folder)}.values())


def _unit_of_names(
    writes: list[Written], values: list[int], watch: TrialRun, counting: list[_Counting], name: str, place: int
) -> str:
    """Whether a name's number is the step or the epoch that was told when it was written."""
    text = re.split(r"\d+", name)[place]
    if re.search(r"(?<![a-z])ep(och)?s?[-_=.]?$", text, re.IGNORECASE):
        return "epoch"
    for each in counting:
        word = re.findall(
            r"[A-Za-z]+", each.form.split("#")[min(each.place, each.form.count("#") - 1)] if "#" in each.form else ""
        )
        is_epoch = bool(word) and word[-1].lower().startswith("ep")
        close = [
            abs((each.told_by(write.began) or -9) - value) <= 1 for write, value in zip(writes, values, strict=True)
        ]
        if is_epoch and sum(close) > len(close) / 2 and not re.search(r"step|iter", text, re.IGNORECASE):
            return "epoch"
    return "step"


def _written_last(writes: list[Written], watch: TrialRun, shown: str, word: str) -> str:
    """The file of a folder that came last in each of them; empty where that differs."""
    level = shown.count("/")
    last: dict[str, tuple[float, str]] = {}
    for each in watch.writes:
        parts = each.name.split("/")
        folder = "/".join(parts[: level + 1])
        if re.sub(r"\d+", "#", folder) == re.sub(r"\d+", "#", "/".join(writes[0].name.split("/")[: level + 1])):
            last[folder] = max(last.get(folder, (0.0, "")), (each.at, "/".join(parts[level + 1 :])))
    names = {name for _, name in last.values()}
    return names.pop() if len(names) == 1 and len(last) > 1 else ""


def _rewritten(writes: list[Written], watch: TrialRun, counting: list[_Counting]) -> SeenCheckpoint:
    """One file that was written again and again."""
    top, rest = _split_place(writes[0].name)
    folder, shown = "", rest
    if top == "code":
        folder, shown = (rest.rpartition("/")[0] or "."), rest.rpartition("/")[2]
    steps = [number for each in writes if (number := told_at(watch, each.began)) is not None]
    gaps = {after - before for before, after in pairwise(steps)}
    every = gaps.pop() if len(gaps) == 1 and min(gaps) > 0 else None
    also = "; renamed from " + Path(writes[-1].renamed_from).name if writes[-1].renamed_from else ""
    at = f", at {', '.join(map(str, steps[:4]))}" if steps else ""
    return SeenCheckpoint(
        names=(shown,),
        folder=folder,
        where=top,
        rewritten=True,
        unit="step",
        every=every,
        complete="",
        bytes=max(each.bytes for each in writes),
        files=(shown,),
        evidence=f"seen: written {len(writes)} times{at}{also}",
    )


def told_at(watch: TrialRun, moment: float) -> int | None:
    counting = _counting(watch)
    return counting[0].told_by(moment) if counting else None


def _signal_seen(seen: TrialFindings, first: TrialRun) -> None:
    """A save after a signal counts where something catches the signal: else it was under way, and may be cut."""
    assert first.signalled_at is not None
    ended = f"was still there {LEAVES_S:.0f} s later" if first.code is None else f"ended with exit code {first.code}"
    later = [each for each in first.writes if each.began > first.signalled_at and not NO_CHECKPOINT.search(each.name)]
    if first.catches and later:
        seen.saves_on_signal = True
        seen.signal_evidence = f"seen: after SIGTERM it wrote {Path(later[0].name).name} and {ended}"
    elif first.code is not None:
        seen.saves_on_signal = False
        why = "wrote nothing" if first.catches else "dies of it, as nothing in it catches it,"
        seen.signal_evidence = f"seen: on SIGTERM it {why} and {ended}"
    else:
        seen.signal_evidence = f"seen: after SIGTERM it {ended}"


def steps_told(seen: TrialFindings, watch: TrialRun) -> list[int]:
    if seen.lines is None:
        return []
    pattern = re.compile(seen.lines.regex)
    group = "step" if "step" in seen.lines.groups else "epoch"
    return [int(match[group].replace(",", "")) for _, line in watch.lines if (match := pattern.search(line))]


def written_again(seen: SeenCheckpoint, restored: Restored, second: TrialRun) -> str:
    """A file below what was restored that the second start has written; empty: there is none."""
    pattern = re.compile(name_regex(seen.names[0]))
    for each in second.writes if not seen.rewritten else ():
        match = pattern.search(_split_place(each.name)[1])
        if match and "n" in match.groupdict() and int(match["n"]) < restored.number:
            return match[0]
    return ""


def judge_resume(seen: TrialFindings, restored: Restored, first: TrialRun, second: TrialRun) -> None:
    """Files first: one below what was restored, written anew, refuses it. Then the first number that it tells, in the
    unit of the names, or nothing is shown.
    """
    assert seen.checkpoint is not None
    steps, began = steps_told(seen, second), steps_told(seen, first)
    group = "step" if seen.lines is not None and "step" in seen.lines.groups else "epoch"
    comparable = bool(steps) and (group == seen.checkpoint.unit or seen.checkpoint.rewritten)
    if again := written_again(seen.checkpoint, restored, second):
        seen.goes_on, what = False, f"it wrote {again} again"
    elif comparable and steps[0] >= restored.number:
        seen.goes_on, what = True, f"it told {group} {steps[0]} first"
    elif comparable and (steps[0] < restored.number - 1 or steps[0] == began[0]):
        seen.goes_on, what = False, f"it told {group} {steps[0]} first"
    else:
        line = next((line for _, line in reversed(second.lines) if _EXCEPTION.match(line)), "")
        ended = (
            f"ended with exit code {second.code}: {line[:160]}" if second.code not in (None, 0) and not steps else ""
        )
        said = ended or "told nothing that its names count"
        seen.problems.append(f"a second start with {restored.shown} {said}: whether it goes on is not shown")
        return
    verdict = "goes on" if seen.goes_on else "begins anew"
    seen.resume_evidence = f"seen: started with {restored.shown}, of {restored.number}, {what}: it {verdict}"


def name_regex(name: str) -> str:
    """A pattern of names as a regular expression with the group n."""
    text, named = "", False
    for part in re.split(r"(\{(?:step|epoch)[^}]*\}|\*)", name.rstrip("/")):
        if part.startswith("{"):
            text += r"0*(?P=n)" if named else r"0*(?P<n>\d+)"
            named = True
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    return text + "(?=/|$)"


def name_at(name: str, number: int, fallback: str) -> str:
    if "*" in name:
        return fallback
    return re.sub(r"\{(?:step|epoch)(:[^}]*)?\}", lambda match: format(number, (match[1] or ":d")[1:]), name).rstrip(
        "/"
    )
