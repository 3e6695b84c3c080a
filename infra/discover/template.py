"""The definition file of a folder of training code: what was found in it, each with its place, and what was not."""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.definition.loader import load
from gpufleet.infra.discover.frameworks import Framework
from gpufleet.infra.discover.lines import PrintedLine
from gpufleet.infra.discover.marks import PROCESSES
from gpufleet.infra.discover.script import BACKEND, COMPILE, DEVICE, LOG_EVERY, OUT, ScriptFacts, Total
from gpufleet.infra.discover.settings import Setting, with_setting
from gpufleet.infra.errors import DefinitionError, GpufleetError, Problem
from gpufleet.infra.inputs.code import ENVIRONMENTS
from gpufleet.job.spec.command import FORMATS, INPUT, SAVE_INTERVALS

IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"
REHEARSED_STEPS, REHEARSED_EVERY = 60, 10  # of slow ones; a fast script is given more (rehearsal/pace.py)
REHEARSED_EPOCHS = 6
BY_GPUS = {1: "g6e.2xlarge", 4: "g6e.12xlarge", 8: "g6e.48xlarge"}  # L40S with 48 GB each
_HF_ON_CPU = "--use_cpu true --report_to none"
_CHECKPOINTS = "'{checkpoints}'"
_REQUIRED = re.compile(r"  (image|command|code):")
_BAR = r"^\s*\d+%\|[^|]*\| *(?P<step>\d+)/(?P<total>\d+) \["


@dataclass(slots=True)
class Draft:
    """The text of a definition, and what its reader has to know or decide, a sentence each."""

    text: str = ""
    known: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    out: str = ""  # the setting by which the command is told where to save
    trial: Trial | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """What `gpufleet new --try` runs: the command, small enough for a CPU but as long as it takes to be watched."""

    command: str
    resume: str = ""  # what the second start gets beside it, with {checkpoint}, {step} and {epoch}
    workdir: str = ""  # in the words of job.workdir
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class CountingPlan:
    """What the parts of a definition have to agree on. `unit`: what the run counts; `each`: names of a checkpoint."""

    unit: str  # step, or epoch
    word: str  # what {step} and (?P<step>) stand for in it: step, or epoch where the script counts nothing else
    total: Total | None
    steps_per_epoch: bool  # the file has to say how long an epoch is
    every: Interval
    lines: tuple[PrintedLine, ...]

    def named(self, text: str) -> str:
        """A name or a pattern of the script's epochs in the run's own unit."""
        if self.word == "epoch" and self.unit == "step":
            return text.replace("{epoch", "{step").replace("(?P<epoch>", "(?P<step>")
        return text


def draft(name: str, found: ScriptFacts, *, folder: str, command: str = "", modeline: str = "") -> Draft:
    """A definition. `folder`: the code's, relative to the project; `modeline`: for editors, or empty."""
    made = Draft()
    plan = _plan(found)
    typed = command or found.start.typed
    if not command and found.joins:
        typed = re.sub(r"^python ", "torchrun --standalone --nproc-per-node={gpus} ", typed)
    typed, type_, type_check = _processes(typed, found, made)
    written, place = _where_it_writes(found, typed, made)
    written = _switched_on(found, plan, written, made)
    lines = [
        *filter(None, [modeline]),
        f"# {name}: {found.script or typed}, on rented GPUs.",
        "# Written by `gpufleet new`. Lines marked CHECK are yours. All keys: docs/definition.md of gpufleet.",
        "",
        "run:",
        "  id: r1            # a new id is a new fleet on the same bucket",
        "  owner: you        # tagged on everything, so that a bill can be asked about",
        "",
        "job:",
        f"  image: {IMAGE}   # CHECK: any Linux image with sh and what the script needs",
        "  code:",
        f"    folder: {_quoted(folder)}",
        *_setup(found),
        f"  command: {_quoted(written)}",
        *place.workdir,
        *_environment(found, place),
        *_resume(found, plan, made),
        *_checkpoint(found, plan, place, made),
        *_progress(found, plan, made),
        *_work(plan, made),
        *_stop(found, written, made),
        *_secrets(found),
        "",
        "fleet:",
        "  region: us-east-2",
        "  zones: [us-east-2a, us-east-2b, us-east-2c]",
        f"  instance_types: [{type_}]   # CHECK: {type_check}; `gpufleet compare` ranks others",
        "  capacity: spot",
        f"  ami: unpinned     # gpufleet doctor {name} --pin",
        "",
        "storage:",
        *_inputs(typed, made),
        "  root:",
        "    size_gib: 200",
        "  keep:",
        "    bucket: true",
        "    days: 7",
        "",
        "limits:             # CHECK: the run ends at the first of them, saved",
        "  max_usd: 20",
        "  max_hours: 24",
        "",
        *_rehearsal(found, plan, written, made),
    ]
    made.text = "\n".join(lines) + "\n"
    if made.trial is not None:
        environment = {**(found.framework.environment if found.framework else {}), **place.environment}
        made.trial = replace(made.trial, workdir="{checkpoints}" if place.workdir else "", environment=environment)
    made.unknown.append(
        f"which GPU it needs: fleet.instance_types has {type_}, whatever the script is; `gpufleet compare {name}`"
        " prices the others"
    )
    return made


def loadable(made: Draft, name: str) -> Draft:
    """The draft as it loads: a value that the loader refuses becomes a comment marked CHECK, with what is allowed.
    Raises GpufleetError where that does not mend it.
    """
    lines = made.text.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.yaml")
        while True:
            path.write_text("\n".join(lines) + "\n")
            try:
                load(path, now=datetime.now(UTC))
            except DefinitionError as error:
                bad = next((each for each in error.problems if each.line and _comment_out(lines, each)), None)
                if bad is None:
                    problems = "; ".join(map(str, error.problems[:3]))
                    raise GpufleetError(
                        f"what the code says makes no definition that loads, so none is written: {problems}"
                    ) from None
                made.unknown.append(f"{bad.path}: {bad.value!r} does not load; allowed: {bad.allowed}")
            else:
                made.text = "\n".join(lines) + "\n"
                return made


def _comment_out(lines: list[str], problem: Problem) -> bool:
    """Makes a comment of the line that a problem names, and of what stands below it. False: it is one already."""
    at = (problem.line or 0) - 1
    line = lines[at]
    indent = len(line) - len(line.lstrip())
    if "# CHECK: allowed:" in line or line.lstrip().startswith("#") or not indent or _REQUIRED.match(line):
        return False
    written = line.strip() if not line.lstrip().startswith("each:") else f"format: none   # {line.strip()}"
    mark = "# " if written == line.strip() else ""  # without any name it is declared to save nothing
    lines[at] = f"{' ' * indent}{mark}{written}   # CHECK: allowed: {problem.allowed}"
    for below in range(at + 1, len(lines)):
        if len(lines[below]) - len(lines[below].lstrip()) <= indent or not lines[below].strip():
            break
        lines[below] = f"{' ' * indent}# {lines[below].strip()}"
    return True


# What the parts agree on ----------------------------------------------------------------------------------------------


def _plan(found: ScriptFacts) -> CountingPlan:
    """Steps where anything counts them; epochs where names, lines and length count nothing else."""
    row, total = found.framework, found.total
    if row is not None and row.work_epochs and (total is None or total.count is None):
        total = Total(unit="epoch", count=row.work_epochs, where=row.name)
    names = " ".join(found.names)
    groups = [set(re.findall(r"\(\?P<(\w+)>", each)) for each in _patterns(found)]
    lines_step = any("step" in each for each in groups)
    lines_batch = any({"batch", "batches"} <= each for each in groups)
    every = _every(found)
    counts_steps = "{step" in names or lines_step
    has_total = total is not None and total.count is not None
    unit, word, per_epoch = "step", "step", False
    if has_total and total is not None and total.unit == "epoch":
        if counts_steps:
            per_epoch = True
        elif lines_batch:
            unit = word = "epoch"
        else:
            word = "epoch"
    elif not has_total and not lines_step and not lines_batch and any("epoch" in each for each in groups):
        unit = "epoch" if counts_steps else "step"
        word = "epoch"
    lines = _chosen(found.lines)
    if has_total and unit == word == "step" and not per_epoch and lines and lines[0].counts == "epoch":
        lines = ()  # they cannot tell a step
    return CountingPlan(
        unit=unit, word=word, total=total if has_total else None, steps_per_epoch=per_epoch, every=every, lines=lines
    )


def _patterns(found: ScriptFacts) -> tuple[str, ...]:
    row = found.framework
    if row is not None and (row.progress or (row.format and FORMATS[row.format].progress)):
        return row.progress or FORMATS[row.format or "file"].progress
    return tuple(each.regex for each in _chosen(found.lines))


def _chosen(lines: list[PrintedLine]) -> tuple[PrintedLine, ...]:
    """The best line, and the first beside it that tells an evaluation's loss."""
    best = lines[:1]
    return (*best, *[each for each in lines[1:] if "val" in each.groups and best and best[0].counts == each.counts][:1])


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """How often it saves. `setting`: that says so, on the command line or in a file; `is_off`: it saves not at all."""

    count: int | None
    unit: str = "step"
    where: str = ""
    setting: Setting | None = None
    is_off: bool = False


def _every(found: ScriptFacts) -> Interval:
    """What the framework is told, else what stands around the save; a setting that is off is switched on."""
    row, settings, facts = found.framework, found.settings, found.checkpoint
    cadence = facts.cadence if facts else None
    off: Interval | None = None
    for names, unit in ((row.every, "step"), (row.every_epochs, "epoch")) if row and facts is None else ():
        for name in names:
            value, where = found.coded.get(name, (None, ""))
            if isinstance(value, str | int) and str(value).isdigit() and int(value) > 0:
                return Interval(count=int(value), unit=unit, where=where)
            setting = value if isinstance(value, Setting) else settings.first([name])
            if setting is not None and (setting.count or setting.typed is not None):
                return Interval(count=setting.count, unit=unit, where=_place_of(setting), setting=setting)
            if setting is not None and setting.form and off is None and row is not None and row.every_count is None:
                count = 500 if unit == "step" else 10
                off = Interval(count=count, unit=unit, where=setting.where, setting=setting, is_off=True)
    if off is not None:
        return off
    if cadence is not None:
        setting = settings.find(cadence.setting) if cadence.setting else None
        unit = "epoch" if cadence.unit == "epoch" else "step"
        if setting is not None and setting.count is None and setting.form and setting.typed is None:
            return Interval(
                count=500 if unit == "step" else 10, unit=unit, where=setting.where, setting=setting, is_off=True
            )
        where = _place_of(setting) if setting is not None else cadence.where
        return Interval(
            count=setting.count if setting is not None else cadence.count, unit=unit, where=where, setting=setting
        )
    if row is not None and row.every_count:
        return Interval(count=row.every_count, unit="epoch", where=row.name)
    setting = settings.first(SAVE_INTERVALS)
    if setting is not None and setting.count and facts is None:
        return Interval(count=setting.count, where=_place_of(setting), setting=setting)
    return Interval(count=None)


def _place_of(setting: Setting) -> str:
    return "your command" if setting.typed is not None else setting.where


# The command ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class WritePlace:
    """Where its checkpoints come to lie, in the words of the file."""

    folder: str = ""  # of checkpoint.folder; empty: {checkpoints}
    below: str = ""  # what comes before the names in it
    workdir: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    why: str = ""  # beside the folder


def _processes(typed: str, found: ScriptFacts, made: Draft) -> tuple[str, str, str]:
    """The command with {gpus} for a number of processes, the instance type, and what to look at beside it."""
    said = found.start.processes
    match = PROCESSES.search(typed)
    number = match["count"] if match else said
    count = int(number) if number.isdigit() else 0
    if match and "{gpus}" not in number and (count > 1 or not number.isdigit()):
        typed = typed[: match.start("count")] + "{gpus}" + typed[match.end("count") :]
        fixed = False
    elif not match and count > 1 and (changed := re.subn(rf"(?<=\s){count}(?=\s|$)", "{gpus}", typed, count=1))[1]:
        typed, fixed = changed[0], False
    else:
        fixed = count > 1
    if count <= 1:
        return typed, BY_GPUS[1], "one L40S with 48 GB"
    size = next((each for each in BY_GPUS if each >= count), 8)
    if fixed:
        where = found.start.through[-1] if found.start.through else "your command"
        made.unknown.append(
            f"{where} starts {count} processes on a node, whatever its GPUs: fleet.instance_types has one with {size}"
        )
        return typed, BY_GPUS[size], f"{size} L40S, as {where} starts {count} processes"
    made.known.append(
        f"your command starts {count} processes on a node: it has {{gpus}} for that, as many as the type has GPUs;"
        f" {BY_GPUS[size]} has {size}"
    )
    return typed, BY_GPUS[1], f"one L40S with 48 GB, where you typed {count} processes ({BY_GPUS[size]} has {size})"


def _where_it_writes(found: ScriptFacts, typed: str, made: Draft) -> tuple[str, WritePlace]:
    """The command, told to write below {checkpoints} where it can be told, and what the file has to say else."""
    row, facts, place = found.framework, found.checkpoint, WritePlace()
    if row is not None and row.environment:
        place.environment = dict(row.environment)
        return typed, place
    if facts is None and row is not None and row.format == "nanochat":
        place.folder, place.why = '"{state}/base_checkpoints/d20"', "CHECK: d and the depth, or the model tag"
        return typed, place
    if row is not None and row.folder:
        place.below = f"{row.folder}/"
    if facts is not None and facts.place.in_checkpoints:
        made.known.append(f"{facts.where}: $GPUFLEET_CHECKPOINTS says where it writes")
        return typed, place
    setting = found.settings.find(facts.place.setting) if facts is not None and facts.place.setting else None
    if setting is None and (facts is None or not facts.place.folder):
        candidates = [found.settings.first([name]) for name in (*(row.out if row else ()), *OUT)]
        known = [each for each in candidates if each is not None]
        said = [each for each in known if each.value is not None]
        filed = [each for each in said if re.search(r"\.(ya?ml|toml|json):\d+$", each.where)]
        setting = next(iter([*[each for each in said if each.typed is not None], *filed, *said, *known]), None)
        coded = next(((found.coded[name], name) for name in (row.out if row else ()) if name in found.coded), None)
        if coded is not None:
            (value, where), _ = coded
            if isinstance(value, Setting):
                setting = value
            elif setting is None or setting.typed is None:
                return typed, _in_own_folder(found, str(value), where, typed, made)
    if "{checkpoints}" in typed and (setting is None or "{checkpoints}" in str(setting.value)):
        return typed, place
    if setting is not None and setting.form:
        if not found.start.passes_on:
            there = setting.with_value('"$GPUFLEET_CHECKPOINTS"')
            made.unknown.append(
                f"{found.start.through[-1]} does not pass on what is added to the command: write {there} in it"
            )
            place.folder = ""
            place.why = f"CHECK: {found.start.through[-1]} has to say {setting.word} $GPUFLEET_CHECKPOINTS"
            return typed, place
        value = "{checkpoints}"
        if facts is not None and facts.place.is_whole_path and facts.place.setting == setting.name:
            value = "{checkpoints}/" + facts.place.name
        made.known.append(f"{setting.where}: {setting.word} says where it writes")
        made.out = setting.name
        return with_setting(typed, setting, value), place
    if setting is not None and isinstance(setting.value, str) and setting.value:
        return typed, _in_own_folder(found, setting.value, setting.where, typed, made)
    if facts is not None and facts.place.folder:
        if facts.place.folder == ".":
            return _in_working_folder(found, typed, facts.where, place, made)
        return typed, _in_own_folder(found, facts.place.folder, facts.where, typed, made)
    if row is not None and row.out and row.form and facts is None and found.start.passes_on:
        value = row.form.replace("{name}", row.out[0]).format("{checkpoints}")
        made.known.append(f"{row.name}: {value} says where it writes")
        return f"{typed} {value}", place
    if found.names:
        place.why = (
            "CHECK: the script has to write below $GPUFLEET_CHECKPOINTS, or checkpoint.folder names its own folder"
        )
        made.unknown.append(
            "where the script writes its checkpoints: into $GPUFLEET_CHECKPOINTS ({checkpoints} in the command), or"
            " into a folder of its own that checkpoint.folder names"
        )
    return typed, place


def _in_own_folder(found: ScriptFacts, folder: str, where: str, typed: str, made: Draft) -> WritePlace:
    """A folder that the code names itself, below the one that it starts in."""
    place = WritePlace()
    plain = posixpath.normpath(posixpath.join(found.start.folder, folder))
    if plain in ("", "."):
        place.workdir = []
        return _in_working_folder(found, typed, where, place, made)[1]
    if plain.startswith(("/", "..", "~")) or "$" in plain or "://" in plain:
        place.why = f"CHECK: {where} writes to {folder}, which is no folder of the run: write {{checkpoints}} there"
        made.unknown.append(
            f"{where}: it writes to {folder}, which is no folder of the run; it has to be $GPUFLEET_CHECKPOINTS"
        )
        return place
    made.known.append(f"{where}: it writes below {plain}")
    place.folder, place.why = _quoted(plain), f"{where}: it writes there"
    return place


def _in_working_folder(
    found: ScriptFacts, typed: str, where: str, place: WritePlace, made: Draft
) -> tuple[str, WritePlace]:
    """A script that saves where it starts is started in {checkpoints}, and finds its code by {code}."""
    made.known.append(f"{where}: it saves into the folder that it starts in, so it starts in {{checkpoints}}")
    place.workdir = [f"  workdir: '{{checkpoints}}'   # {where}: it saves into the folder that it starts in"]
    if found.start.through or found.start.is_module or found.start.folder:
        place.environment["PYTHONPATH"] = "{code}"
        place.workdir[0] = (
            f"  workdir: '{{checkpoints}}'   # CHECK: {where} saves where it starts; other paths are seen from it"
        )
        return typed, place
    words = [
        f"{{code}}/{word.removeprefix('./')}"
        if not word.startswith(("-", "/", "{")) and (found.folder / word).exists()
        else word
        for word in typed.split(" ")
    ]
    return " ".join(words), place


def _switched_on(found: ScriptFacts, plan: CountingPlan, written: str, made: Draft) -> str:
    """The command with a setting for saves that are off, or that a framework's default would leave unsaid."""
    every, row = plan.every, found.framework
    if row is not None and row.needs and row.needs not in written and found.start.passes_on:
        made.known.append(f"{row.name}: it saves nothing by default, so the command asks for it ({row.needs})")
        written = f"{written} {row.needs}"
    if every.setting is None or not every.setting.form or every.setting.typed is not None or not found.start.passes_on:
        return written
    if every.is_off:
        made.known.append(
            f"{every.where}: it saves nothing by default, so the command asks for it ({every.setting.word})"
        )
    elif row is None or row.format != "hf-trainer" or found.checkpoint is not None:
        return written
    return with_setting(written, every.setting, every.count)


def _setup(found: ScriptFacts) -> Iterator[str]:
    if found.requirements:
        install = "-r requirements.txt" if found.requirements == "requirements.txt" else "-e ."
        yield f"  setup: pip install {install}   # once per node; a pinned image starts faster"


def _environment(found: ScriptFacts, place: WritePlace) -> Iterator[str]:
    if place.environment:
        yield "  env:"
        yield from (f"    {name}: {_quoted(value)}" for name, value in place.environment.items())


def _resume(found: ScriptFacts, plan: CountingPlan, made: Draft) -> Iterator[str]:
    """What the command gets where a checkpoint was restored."""
    row = found.framework
    if found.bare_resume:
        made.unknown.append(
            f"{found.bare_resume.where}: trainer.train() is given no checkpoint, so it begins anew on each node. Write"
            " trainer.train(resume_from_checkpoint=os.environ.get('GPUFLEET_RESUME_FROM')) there; a rehearsal refuses"
            " it as it is"
        )
        yield f"  # resume: {{}}   # CHECK: {found.bare_resume.where}: train() begins anew by itself"
    elif found.begins_anew is not None:
        made.unknown.append(
            f"how it goes on from a checkpoint: {found.begins_anew.value}; a rehearsal refuses it as it is"
        )
        yield f"  # resume: {{args: --resume}}   # CHECK: {found.begins_anew.value}"
    elif found.resume is not None and found.start.passes_on:
        made.known.append(
            f"{found.resume.where}: {found.resume.value.split()[0].split('=')[0]} goes on from a checkpoint"
        )
        yield f"  resume: {{args: {_quoted(plan.named(found.resume.value))}}}   # {found.resume.where}"
    elif found.resume is not None:
        through = _starting_script(found)
        yield f"  # resume: {{args: {_quoted(found.resume.value)}}}   # CHECK: {through} does not pass it on"
    elif found.reads_itself:
        made.known.append(
            f"{found.reads_itself.where}: {found.reads_itself.value}; a rehearsal shows whether it goes on from there"
        )
    elif not found.names:
        return
    elif row is not None and "by itself" in row.resumes:
        made.known.append(f"{row.name}: goes on {row.resumes}")
    else:
        how = f" ({row.name}: {row.resumes})" if row is not None else ""
        made.unknown.append(
            f"how it goes on from a checkpoint: job.resume.args, or it looks into {{checkpoints}} itself{how}"
        )
        yield f"  # resume: {{args: --resume}}   # CHECK: added only where a checkpoint was restored{how}"


def _complete(row: Framework | None) -> str:
    """The file of a checkpoint that a framework writes last; empty: none is known."""
    return "" if row is None else row.complete or (FORMATS[row.format].complete if row.format else "")


def _starting_script(found: ScriptFacts) -> str:
    """The script through which the command starts the training."""
    return found.start.through[-1] if found.start.through else "your command"


def _checkpoint(found: ScriptFacts, plan: CountingPlan, place: WritePlace, made: Draft) -> Iterator[str]:
    row, facts, names = found.framework, found.checkpoint, found.names
    if not names:
        other = found.saves_else
        what = f"{other.where} saves {other.value} alone" if other else "nothing that it runs saves a checkpoint"
        made.unknown.append(
            f"whether it saves: {what}, so a loss repeats all. Where it does, job.checkpoint.each says what;"
            " `gpufleet new --try` watches it"
        )
        yield f"  checkpoint: none   # CHECK: {what}, so a loss repeats all; else each: says what one checkpoint is"
        return
    yield "  checkpoint:"
    if place.folder or place.why:
        yield f"    folder: {place.folder or _CHECKPOINTS}" + (f"   # {place.why}" if place.why else "")
    if facts is None and row is not None and row.format and not place.below:
        yield f"    format: {row.format}   # {row.name}"
        if names != FORMATS[row.format].each:
            yield f"    each: {_always_quoted(names[0])}   # as its {row.naming} is"
        made.known.append(f"{row.name}: {row.resumes}")
    elif names:
        below = place.below if facts is None else ""
        shown = [below + plan.named(each) for each in names]
        where = facts.where if facts is not None else f"{row.name}, {row.version}" if row is not None else ""
        several = f"[{', '.join(map(_always_quoted, shown))}]"
        yield f"    each: {_quoted(shown[0]) if len(shown) == 1 else several}   # {where}"
        made.known.append(f"{where}: a checkpoint is {' and '.join(shown)}")
        if not re.search(r"\{(step|epoch)", shown[0]):
            yield "    rewritten: true   # the same file each time"
        if found.complete is not None and shown[0].endswith("/"):
            yield f"    complete: {_quoted(found.complete.value)}   # {found.complete.where}"
        elif (complete := _complete(row)) and shown[0].endswith("/"):
            yield f"    complete: {complete}   # {row.name if row else ''} writes it last"
        if row is not None and row.also and facts is None:
            yield f"    also: [{', '.join(row.also)}]   # {row.name} resumes by it"
    yield from _every_lines(plan, made)
    seen = f"; the one that was seen had {found.size.value} GB, of the command as tried" if found.size else ""
    yield f"    size_gb: 1.5   # CHECK: of one checkpoint; the rehearsal and the first receipt tell{seen}"
    made.unknown.append("how large a checkpoint is: job.checkpoint.size_gb (the price of storage and of a notice)")


def _every_lines(plan: CountingPlan, made: Draft) -> Iterator[str]:
    every = plan.every
    if _says_every(plan):
        kind = "epochs" if (every.unit == "epoch" and plan.word != "epoch") or plan.unit == "epoch" else "steps"
        yield f"    every: {{{kind}: {every.count}}}   # {every.where}"
        return
    known = f": {every.where} says every {every.count} {every.unit}s" if every.count else ""
    yield f"    every: {{minutes: 10}}   # CHECK: how often it saves, which is what a loss repeats{known}"
    made.unknown.append(f"how often it saves, in minutes: job.checkpoint.every{known}")


def _says_every(plan: CountingPlan) -> bool:
    """Whether the file says how often in what the run counts, not in minutes."""
    if plan.every.count is None or plan.total is None:
        return False
    if plan.unit == "epoch" or plan.word == "epoch":
        return plan.every.unit == "epoch"
    return plan.every.unit == "step" or plan.steps_per_epoch


def _progress(found: ScriptFacts, plan: CountingPlan, made: Draft) -> Iterator[str]:
    row = found.framework
    if (
        row is not None
        and row.format
        and FORMATS[row.format].progress
        and (found.checkpoint is None or row.format != "dcp")
    ):
        if found.checkpoint is None and not row.folder:
            return  # the format has it
        yield from ("  progress:", f"    format: {row.format}   # {row.name}")
        return
    yield "  progress:"
    shown = [(plan.named(each.regex), each.where) for each in plan.lines]
    if row is not None and row.progress:
        shown = [(plan.named(each), f"{row.name}, {row.version}") for each in row.progress]
    if not shown:
        yield f"    stdout: {_quoted(_BAR)}   # CHECK: tqdm's bar, or a line of yours that tells the step"
        made.unknown.append("which line tells the step: job.progress.stdout, with the group (?P<step>...)")
        return
    yield "    stdout:"
    for regex, where in shown:
        yield f"      - {_always_quoted(regex)}   # {where}"
    what = {"step": "step", "epoch": "epoch"}[plan.word]
    made.known.append(f"{shown[0][1]}: a line of its output tells the {what}")


def _work(plan: CountingPlan, made: Draft) -> Iterator[str]:
    if plan.total is None:
        made.unknown.append(
            "how long it is: job.work.steps, epochs or hours; until then the bill says what the money buys"
        )
        yield "  # work: {hours: {low: 2, likely: 4, high: 8}}   # CHECK: without it the bill says what the money buys"
        return
    count, where = plan.total.count, plan.total.where
    made.known.append(f"{where}: {count} {plan.total.unit}s")
    yield "  work:"
    if plan.total.unit == "epoch" and (plan.unit == "epoch" or plan.steps_per_epoch):
        yield f"    epochs: {count}   # {where}"
        if plan.steps_per_epoch:
            made.unknown.append(
                "how many steps an epoch has: job.work.steps_per_epoch, rows over the batch of all GPUs"
            )
            yield "    steps_per_epoch: 1000   # CHECK: rows over the batch of all GPUs"
            yield "    step_ms: {L40S: 500}   # CHECK: a guess until `gpufleet calibrate` has measured it"
        else:
            yield "    epoch_minutes: {L40S: 1}   # CHECK: a guess until `gpufleet calibrate` has measured it"
    else:
        is_epoch = plan.word == "epoch"
        yield f"    steps: {count}   # {where}{'; a step is one of its epochs here' if is_epoch else ''}"
        guess = 60_000 if is_epoch else 500
        yield f"    step_ms: {{L40S: {guess}}}   # CHECK: a guess until `gpufleet calibrate` has measured it"
    made.unknown.append("how long a step takes: `gpufleet calibrate` measures it, job.work declares it")


def _stop(found: ScriptFacts, command: str, made: Draft) -> Iterator[str]:
    """The signal that it handles; one that a launcher would die of is none of the file's."""
    if found.saves_on_signal is not None:
        made.known.append(f"{found.saves_on_signal.where}")
        yield f"  stop: {{signal: TERM, saves: {found.saves_on_signal.value}}}   # {found.saves_on_signal.where}"
        return
    taken = next(
        (each for each in found.signals if each.value == "SIGTERM"), found.signals[0] if found.signals else None
    )
    if taken is None:
        if found.framework is not None:
            made.known.append(f"{found.framework.name}: on SIGTERM it {found.framework.on_signal}")
        return
    signal = taken.value.removeprefix("SIG")
    launcher = found.start.launcher or ("torchrun" if "torchrun" in command else "")
    if signal in ("USR1", "USR2") and launcher and "--signals-to-handle" not in command:
        made.unknown.append(
            f"{taken.where}: it handles {taken.value}, as clusters send it; {launcher} would die of that and leave its"
            f" ranks running. Handle SIGTERM there, or let torchrun pass it on: --signals-to-handle={taken.value}, and"
            f" job.stop.signal: {signal}"
        )
        yield f"  # stop: {{signal: {signal}}}   # CHECK: {taken.where} handles {taken.value}, of which {launcher} dies"
        return
    made.known.append(f"{taken.where}: it handles {taken.value}; a rehearsal shows whether it saves")
    yield f"  stop: {{signal: {signal}, saves: unknown}}   # {taken.where}"


def _secrets(found: ScriptFacts) -> Iterator[str]:
    if found.wandb:
        yield f"  # secrets: {{WANDB_API_KEY: ssm:/wandb}}   # {found.wandb.where}: {found.wandb.value}"


def _inputs(command: str, made: Draft) -> Iterator[str]:
    """Those that the command names."""
    if not (names := dict.fromkeys(INPUT.findall(command))):
        made.unknown.append("what the data is: storage.inputs, or the script fetches it itself (setup)")
        yield "  # inputs: {NAME: data/folder or s3://bucket/prefix}   # read as {inputs.NAME} in the command"
        return
    made.unknown.append(f"where the data is: storage.inputs ({', '.join(names)})")
    yield "  inputs:   # CHECK: a folder, or s3://bucket/prefix; the rehearsal needs a folder with a little of it"
    yield from (f"    {name}: data/{name}" for name in names)


# The rehearsal --------------------------------------------------------------------------------------------------------


def _rehearsal(found: ScriptFacts, plan: CountingPlan, command: str, made: Draft) -> Iterator[str]:
    """The lines of a rehearsal's section: the command, small enough for a laptop's CPU, as far as its settings are
    known.
    """
    small, settings, total, every = command, found.settings, plan.total, plan.every
    counts_epochs = total is not None and total.unit == "epoch"
    setting = total.setting if total is not None else None
    can_say = every.setting is not None and bool(every.setting.form) and found.start.passes_on
    interval = (1 if every.unit == "epoch" else REHEARSED_EVERY) if can_say or every.count is None else every.count
    count, check, long = max(REHEARSED_EPOCHS if counts_epochs else REHEARSED_STEPS, 3 * interval), "", 0
    if setting is not None and setting.form and found.start.passes_on:
        small = with_setting(small, setting, count)
        long = 1000 if counts_epochs else 100_000
    else:
        count, check = (
            (total.count or count) if total is not None else count,
            "   # CHECK: as many as that command does",
        )
        made.unknown.append(
            "how a rehearsal gets fewer steps: the script takes no count from its command line"
            + (f", and trains all {total.count} of {total.where} there" if total is not None else "")
        )
    wanted: list[tuple[Setting | None, object]] = [(every.setting if can_say else None, interval)]
    wanted += [(settings.first(names), value) for names, value in ((LOG_EVERY, 1), (DEVICE, "cpu"), (BACKEND, "gloo"))]
    for each, value in wanted if found.start.passes_on else ():
        if each is not None and each.form and not each.is_flag and not isinstance(each.default, bool):
            small = with_setting(small, each, value)
    if found.runs_alone:  # one process on a CPU needs no launcher, and some scripts take any for GPUs
        small = re.sub(r"^torchrun(?: +--\S+(?: +(?:\d+|\{gpus\}))?)* +", "python ", small)
    compile_ = settings.first(COMPILE)
    if compile_ is not None and compile_.form.endswith("={}"):
        small = with_setting(small, compile_, False)
    if (
        found.framework is not None
        and found.framework.format == "hf-trainer"
        and found.framework.form == ""
        and found.start.script
    ):
        small += f" {_HF_ON_CPU}"
    tried = with_setting(small, setting, long) if long and setting is not None else small
    made.trial = Trial(command=tried, resume=found.resume.value if found.resume else "")
    yield "rehearsal:          # the same script on a laptop's CPU: laid over the sections above"
    if not any((found.folder / name / "bin").is_dir() for name in ENVIRONMENTS):
        yield "  # python: path/to/python   # CHECK: which has what the script imports; else this machine's python3"
        made.unknown.append("which Python has what the script imports: its folder has no .venv, so rehearsal.python")
    yield "  job:"
    yield f"    command: {_quoted(small)}   # CHECK: small enough for a CPU"
    yield "    device: cpu"
    yield "    gpus: 1"
    yield "    work:"
    if counts_epochs and plan.steps_per_epoch:
        yield f"      epochs: {count}{check}"
        yield "      steps_per_epoch: 10   # CHECK: of the rehearsal's data"
    else:
        yield f"      {'epochs' if plan.unit == 'epoch' else 'steps'}: {count}{check}"
    yield "    checkpoint:"
    if found.names:
        kind = "epochs" if plan.unit == "epoch" or (every.unit == "epoch" and plan.steps_per_epoch) else "steps"
        minutes = "" if _says_every(plan) else "minutes: null, "
        yield f"      every: {{{minutes}{kind}: {interval}}}"
        yield "      size_gb: 0.01"
    yield "      heartbeat_s: 1"
    yield "  estimate:"
    yield "    step_ms: [500]"
    yield "    setup_minutes: 0.1"
    yield "    restart_minutes: 0.1"
    yield "    capacity_wait_minutes: 0.05"
    yield "  interruptions:"
    yield "    with_notice: 1"
    yield "    without_notice: 1"


def _always_quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _quoted(text: str) -> str:
    """A YAML scalar in single quotes where a plain one would mean something else."""
    plain = re.fullmatch(r"[A-Za-z./~][A-Za-z0-9 ./_=-]*", text) and " #" not in text
    return text if plain else _always_quoted(text)
