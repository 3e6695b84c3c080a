"""Writes the definition file for a folder of training code: facts with their places, and marks for what is unknown."""

from __future__ import annotations

import posixpath
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import REHEARSED_SAVES, rehearsed_steps
from gpufleet.infra.discover.expressions import Kind, Span
from gpufleet.infra.discover.lines import BAR, PrintedLine
from gpufleet.infra.discover.marks import processes_asked, processes_in
from gpufleet.infra.discover.script import BACKEND, COMPILE, DEVICE, LOG_EVERY, OUT, ScriptFacts
from gpufleet.infra.discover.settings import Setting, with_setting
from gpufleet.infra.discover.several import for_several
from gpufleet.infra.discover.start import parts
from gpufleet.infra.errors import DefinitionError, GpufleetError, Problem
from gpufleet.infra.inputs.code import ENVIRONMENTS
from gpufleet.job.kind.command import FORMATS, INPUT, SAVE_INTERVALS, Format

IMAGE = "public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023"
REHEARSED_STEPS, REHEARSED_EVERY = 60, 10  # if a script is so fast that it needs more, its rehearsal says how many
REHEARSED_EPOCHS, REHEARSED_EPOCH_STEPS = 6, 10
BY_GPUS = {1: "g6e.2xlarge", 4: "g6e.12xlarge", 8: "g6e.48xlarge"}  # L40S with 48 GB each
_HF_ON_CPU = ("--use_cpu true", "--report_to none")
_CHECKPOINTS = "'{checkpoints}'"
_REQUIRED = re.compile(r"  (image|command|code):")
_REHEARSED = """\
  estimate:
    step_ms: [{step_ms}]{where}
    setup_minutes: 0.1
    restart_minutes: 0.1
    capacity_wait_minutes: 0.05
  interruptions:
    with_notice: 1
    without_notice: 1"""


@dataclass(slots=True)
class Draft:
    """The text of a definition, and a sentence for each thing that its reader must know or decide."""

    text: str = ""
    known: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)
    out: str = ""  # the setting for the output folder
    trial: Trial | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """The trial of `gpufleet new --try`: the command, small enough for a CPU but long enough to be watched."""

    command: str
    resume: str = ""  # words added to the command of the second start, with {checkpoint}, {step} and {epoch}
    workdir: str = ""  # the working folder, as job.workdir would name it
    environment: dict[str, str] = field(default_factory=dict)
    lines: tuple[str, ...] = ()  # patterns of lines that give the position, from the code and its framework
    every: str = ""  # the setting that makes the command save more often than usual


def draft(name: str, facts: ScriptFacts, *, folder: str, command: str = "", modeline: str = "") -> Draft:
    """Writes a definition. `folder`: the folder of the code, relative to the project; `modeline`: a comment for
    editors, or empty.
    """
    writer = _Writer(facts)
    typed = command or facts.start.typed
    if not command and facts.joins:
        typed = re.sub(r"^python ", "torchrun --standalone --nproc-per-node={gpus} ", typed)
    if (several := for_several(typed, facts.coded.get("num_nodes", ("1", ""))[0])) is not None:
        typed, writer.nodes = several.command, several.nodes or 2
        writer.place.environment |= several.environment
        writer.known("your command is for several nodes: the file has placeholders for each node's own values")
    typed, type_, type_check = writer.processes(typed)
    written = writer.switched_on(writer.told_where(typed))
    lines = [
        *filter(None, [modeline]),
        f"# {name}: {facts.script or typed}, on rented GPUs.",
        "# Written by `gpufleet new`. Lines marked CHECK are yours. All keys: `gpufleet docs definition`.",
        "",
        "run:",
        "  id: r1            # a new id is a new fleet on the same bucket",
        "  owner: you        # a tag of every resource, so that people know whom to ask about a bill",
        "",
        "job:",
        f"  image: {IMAGE}   # CHECK: {writer.image()}",
        "  code:",
        f"    folder: {_quoted(folder)}",
        *writer.setup(),
        f"  command: {_quoted(written)}",
        *filter(None, [writer.place.workdir]),
        *writer.environment(),
        *writer.resume(),
        *writer.checkpoint(),
        *writer.progress(),
        *writer.work(),
        *writer.stop(written),
        *writer.secrets(),
        "",
        "fleet:",
        "  region: us-east-2",
        f"  zones: [us-east-2a{', us-east-2b, us-east-2c' if writer.nodes == 1 else ''}]",
        f"  instance_types: [{type_}]   # CHECK: {type_check}; `gpufleet compare` ranks others",
        *([f"  nodes: {writer.nodes}{'' if several.nodes else '   # CHECK: how many'}"] if several else []),
        "  capacity: spot",
        f"  ami: unpinned     # gpufleet doctor {name} --pin",
        "",
        "storage:",
        *writer.inputs(typed),
        "  root:",
        "    size_gib: 200",
        "  keep:",
        "    bucket: true",
        "    days: 7",
        "",
        "limits:             # CHECK: the run saves and ends at the first limit that it reaches",
        "  max_usd: 20",
        "  max_hours: 24",
        "",
        *writer.rehearsal(written),
    ]
    writer.made.text = "\n".join(lines) + "\n"
    writer.unknown(
        f"which GPU the script needs: fleet.instance_types has {type_} as a default; `gpufleet compare {name}` prices"
        " other types"
    )
    return writer.made


def loadable(made: Draft, name: str) -> Draft:
    """Makes the draft load: a value that the loader refuses becomes a comment marked CHECK, with the allowed values.
    Raises GpufleetError if the draft still does not load.
    """
    lines = made.text.splitlines()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.yaml")
        while True:
            path.write_text("\n".join(lines) + "\n")
            try:
                load(path, now=datetime.now(UTC))
            except DefinitionError as error:
                bad = next(
                    (problem for problem in error.problems if problem.line and _comment_out(lines, problem)), None
                )
                if bad is None:
                    problems = "; ".join(map(str, error.problems[:3]))
                    raise GpufleetError(
                        f"the facts in the code give a definition that does not load, so no file is written: {problems}"
                    ) from None
                made.unknown.append(f"{bad.path}: {bad.value!r} does not load; allowed: {bad.allowed}")
            else:
                made.text = "\n".join(lines) + "\n"
                return made


def _comment_out(lines: list[str], problem: Problem) -> bool:
    """Makes a comment of the line that a problem names, and of the lines nested below it. Returns False if it cannot:
    the line is a comment already, a whole section, or required.
    """
    at = (problem.line or 0) - 1
    line = lines[at]
    indent = len(line) - len(line.lstrip())
    if "# CHECK: allowed:" in line or line.lstrip().startswith("#") or not indent or _REQUIRED.match(line):
        return False
    written = line.strip() if not line.lstrip().startswith("each:") else f"format: none   # {line.strip()}"
    mark = "# " if written == line.strip() else ""  # `format: none` takes the place of a name that is not allowed
    lines[at] = f"{' ' * indent}{mark}{written}   # CHECK: allowed: {problem.allowed}"
    for below in range(at + 1, len(lines)):
        if len(lines[below]) - len(lines[below].lstrip()) <= indent or not lines[below].strip():
            break
        lines[below] = f"{' ' * indent}# {lines[below].strip()}"
    return True


@dataclass(frozen=True, kw_only=True, slots=True)
class CountingPlan:
    """Facts on which the parts of a definition must agree. `unit`: what the run counts."""

    unit: str  # step, or epoch
    word: str  # what {step} and (?P<step>) mean in the script: step, or epoch if the script counts nothing else
    total: Span | None
    steps_per_epoch: bool  # whether the file must say how long an epoch is
    every: Span  # how often the script saves
    lines: tuple[PrintedLine, ...]

    def named(self, text: str) -> str:
        """The script's name or pattern, with {step} in the place of {epoch} if each epoch is one step of the run."""
        if self.word == "epoch" and self.unit == "step":
            return text.replace("{epoch", "{step").replace("(?P<epoch>", "(?P<step>")
        return text

    @property
    def says_every(self) -> bool:
        """Whether the file gives the interval in the run's unit, not in minutes."""
        if self.every.count is None or self.total is None:
            return False
        if "epoch" in (self.unit, self.word):
            return self.every.unit == "epoch"
        return self.every.unit == "step" or self.steps_per_epoch


def _plan(facts: ScriptFacts) -> CountingPlan:
    """Plans in steps if anything counts steps, and in epochs if names, lines and length count nothing else."""
    row, total, names = facts.framework, facts.total, " ".join(facts.names)
    if total is None or total.count is None:
        total = Span(unit="epoch", count=row.work_epochs, where=row.name) if row and row.work_epochs else None
    best = facts.lines[:1]
    lines = (*best, *[line for line in facts.lines[1:] if "val" in line.groups and line.counts == best[0].counts][:1])
    patterns = (row.patterns if row else ()) or tuple(line.regex for line in lines)
    groups = [set(re.findall(r"\(\?P<(\w+)>", pattern)) for pattern in patterns]
    tells_step, tells_batch = any("step" in group for group in groups), any({"batch", "batches"} <= e for e in groups)
    unit, word, steps_per_epoch = "step", "step", False
    if total is not None and total.unit == "epoch":
        steps_per_epoch = "{step" in names or (tells_step and not tells_batch)
        word = "step" if steps_per_epoch else "epoch"
        unit = "epoch" if tells_batch and not steps_per_epoch else "step"
    elif total is None and any("epoch" in group for group in groups) and not tells_step and not tells_batch:
        word = "step" if "{step" in names else "epoch"
    if unit == word == "step" and not steps_per_epoch and lines and lines[0].counts == "epoch":
        lines = ()  # these lines cannot give a step
    return CountingPlan(
        unit=unit, word=word, total=total, steps_per_epoch=steps_per_epoch, every=_every(facts), lines=lines
    )


def _interval(setting: Setting, unit: Kind) -> Span:
    """The interval that a setting gives; if the setting is off, an interval to switch it on with."""
    is_off = setting.count is None and setting.form and setting.typed is None
    span = Span.from_setting(setting, unit)
    return replace(span, count=500 if unit == "step" else 10) if is_off else span


def _every(script: ScriptFacts) -> Span:
    """The interval between saves: what the code gives its framework, or else what the code around the save says. If a
    setting is off, the interval to switch it on with.
    """
    row, settings, facts = script.framework, script.settings, script.checkpoint
    off: Span | None = None
    strategy, where = script.value_of("save_strategy") if row is not None and row.format == "hf-trainer" else (None, "")
    if facts is None and strategy not in (None, "steps"):
        return Span(unit="epoch", count=1 if strategy == "epoch" else None, where=where)
    intervals: list[tuple[str, Kind]] = []
    if row is not None:
        by_steps = row.each_step and script.names == row.each_step
        rarely: Kind = "step" if by_steps else "epoch"
        intervals = [*((key, "step") for key in row.every), *((key, rarely) for key in row.every_epochs)]
    for name, unit in intervals if facts is None else ():
        value, where = script.coded.get(name, (None, ""))
        if isinstance(value, str) and value.isdigit() and int(value) > 0:
            return Span(count=int(value), unit=unit, where=where)
        setting = value if isinstance(value, Setting) else settings.first([name])
        if setting is not None and (setting.count or setting.typed is not None):
            return _interval(setting, unit)
        if setting is not None and setting.form and off is None and row is not None and row.every_count is None:
            off = _interval(setting, unit)
    if off is not None:
        return off
    if facts is not None and (cadence := facts.cadence) is not None:
        cadence = replace(cadence, unit="epoch" if cadence.unit == "epoch" else "step")
        return _interval(cadence.setting, cadence.unit) if cadence.setting is not None else cadence
    if row is not None and row.every_count:
        return Span(count=row.every_count, unit="epoch", where=row.name)
    setting = settings.first(SAVE_INTERVALS)
    return Span.from_setting(setting, "step") if setting and setting.count and facts is None else Span()


@dataclass(slots=True)
class WritePlace:
    """The place of the command's checkpoints, in the words of the definition file."""

    folder: str = ""  # the value of checkpoint.folder; empty for {checkpoints}
    below: str = ""  # the path between the folder and the checkpoint's names
    workdir: str = ""  # the file's line for job.workdir
    environment: dict[str, str] = field(default_factory=dict)
    why: str = ""  # the comment beside the folder


class _Writer:
    """Writes the parts of one definition, and collects notes for its reader."""

    def __init__(self, facts: ScriptFacts) -> None:
        self.found, self.row, self.facts, self.settings = facts, facts.framework, facts.checkpoint, facts.settings
        self.plan, self.made, self.place = _plan(facts), Draft(), WritePlace()
        self.passes_on = facts.start.passes_on  # whether words added to the command reach the program
        self.part = facts.start.part  # the part of the command to which words are added
        self.through = facts.start.through[-1] if facts.start.through else "your command"
        self.nodes = 1
        self.starts_trainer = self.row is not None and self.row.format == "hf-trainer"

    def known(self, sentence: str, where: str = "") -> None:
        """Notes a fact. `where`: its evidence, a place in the code or in the trial."""
        self.made.known.append(f"{sentence} ({where})" if where else sentence)

    def unknown(self, sentence: str) -> None:
        self.made.unknown.append(sentence)

    def processes(self, typed: str) -> tuple[str, str, str]:
        """The command, with {gpus} in place of a number of processes; the instance type; and what to check about it."""
        match = processes_in(typed)
        listed = processes_asked(typed) if match is None else None
        number = match["count"] if match else self.found.start.processes or str(listed or "")
        count, changed = int(number) if number.isdigit() else 0, typed
        if match and number not in ("{gpus}", "{ranks}") and (count > 1 or not number.isdigit()):
            changed = f"{typed[: match.start('count')]}{{gpus}}{typed[match.end('count') :]}"
        elif not match and count > 1 and self.found.start.launcher == "accelerate" and self.passes_on:
            changed = re.sub(r"(accelerate(?:-| |\.commands\.)launch)", r"\1 --num_processes {gpus}", typed, count=1)
        elif not match and count > 1:  # a word of its own, such as a shell script's $1
            changed = re.sub(rf"(?<!\S)((?!-)\S+\s+){count}(?=\s|$)", r"\1{gpus}", typed, count=1)
        if count <= 1:
            return changed, BY_GPUS[1], "one L40S with 48 GB"
        size = next((gpus for gpus in BY_GPUS if gpus >= count), 8)
        if changed == typed:
            self.unknown(
                f"{self.through} starts {count} processes on a node, whatever the number of its GPUs:"
                f" fleet.instance_types names a type with {size}"
            )
            return typed, BY_GPUS[size], f"{size} L40S, as {self.through} starts {count} processes"
        self.known(
            f"your command starts {count} processes on a node: the file has {{gpus}} instead, the number of the type's"
            f" GPUs; {BY_GPUS[size]} has {size}"
        )
        check = f"one L40S with 48 GB, but you typed {count} processes ({BY_GPUS[size]} has {size})"
        return changed, BY_GPUS[1], check

    def told_where(self, typed: str) -> str:
        """The command, changed so that it saves below {checkpoints} if possible; otherwise `place` gets the file's
        lines for the script's own folder.
        """
        row, facts, place = self.row, self.facts, self.place
        place.below = f"{row.folder}/" if row is not None and row.folder else ""
        moved = self.found.coded.get(row.moved_by) if row is not None and row.moved_by else None
        if row is not None and moved is not None and not self.found.value_of(row.inside)[0]:
            place.why = f"CHECK: {moved[1]} says in which folders below it"
            self.unknown(f"in which folders {row.name} saves: {moved[1]} says it")
        if row is not None and row.environment:
            place.environment |= row.environment
            return typed
        if facts is None and row is not None and row.format == "nanochat":
            place.environment["NANOCHAT_BASE_DIR"] = "{state}"
            depth, tag = (self.settings.find(name) for name in ("depth", "model_tag"))
            model = (tag.value if tag is not None else None) or f"d{depth.value if depth is not None else 20}"
            place.folder = f'"{{state}}/base_checkpoints/{model}"'
            place.why = "CHECK: the base model's folder, named by its depth or its tag"
            return typed
        # The framework's own setting names the place.
        out_row = row if row is not None and row.out and row.form and self.passes_on else None
        if facts is not None and facts.place.in_checkpoints and out_row is None:
            self.known("the script writes to $GPUFLEET_CHECKPOINTS", facts.where)
            return typed
        setting = self.settings.find(facts.place.setting) if facts is not None and facts.place.setting else None
        folder, where = (facts.place.folder, facts.where) if facts is not None else ("", "")
        if setting is None and not folder:
            setting, folder, where = self._named_place()
        if "{checkpoints}" in typed and (setting is None or "{checkpoints}" in str(setting.value)):
            return typed
        if setting is not None and setting.form:
            return self._told_by(setting, typed)
        if setting is not None and isinstance(setting.value, str) and setting.value:
            folder, where = setting.value, setting.where
        if folder:
            return self._own_folder(folder, where, typed)
        if out_row is not None and (facts is None or facts.place.in_checkpoints):
            value = out_row.form.replace("{name}", out_row.out[0]).format("{checkpoints}")
            self.known(f"{value} names the output folder", out_row.name)
            return f"{typed} {value}"
        if self.found.names:
            place.below = ""
            place.why = (
                "CHECK: the script has to write below $GPUFLEET_CHECKPOINTS, or checkpoint.folder names its own folder"
            )
            self.unknown(
                "where the script writes its checkpoints: write them into $GPUFLEET_CHECKPOINTS ({checkpoints} in the"
                " command), or name the script's own folder in checkpoint.folder"
            )
        return typed

    def _named_place(self) -> tuple[Setting | None, str, str]:
        """The setting with a usual name for the output folder, or else the folder that the code gives its framework,
        and the place of that folder in the code.
        """
        row, facts = self.row, self.found
        names = row.out if row is not None else ()
        if row is not None and row.inside and facts.value_of(row.inside)[0]:
            self.place.below, names = "", (row.inside,)
        value, where = next((facts.coded[name] for name in names if name in facts.coded), (None, ""))
        if isinstance(value, Setting):
            return value, "", ""
        own = [option for name in names if (option := self.settings.first([name])) is not None]
        others = [option for name in OUT if (option := self.settings.first([name])) is not None]
        is_filed = re.compile(r".*\.(ya?ml|toml|json):\d+")
        setting = min(
            own if any(option.value is not None for option in own) else [*own, *others],
            key=lambda e: (e.value is None, e.typed is None, not is_filed.fullmatch(e.where)),
            default=None,
        )
        if value is not None and (setting is None or setting.typed is None):
            return None, str(value), where
        return self._begun_by(setting) if setting is not None else None, "", ""

    def _begun_by(self, setting: Setting) -> Setting:
        """The setting itself, or the one with which OmegaConf begins its value, as in ${run.folder}/checkpoints, if no
        command line sets the first.
        """
        begun = re.fullmatch(r"\$\{([\w.]+)\}/?(.*)", str(setting.value)) if not setting.form else None
        other = self.settings.find(begun[1]) if begun is not None else None
        if begun is None or other is None:
            return setting
        self.place.below = f"{begun[2].rstrip('/')}/" if begun[2] else ""
        return other

    def _told_by(self, setting: Setting, typed: str) -> str:
        """The command, with {checkpoints} as the value of the setting."""
        if not self.passes_on and setting.typed and typed.split().count(setting.typed) == 1:
            self.known(f"{self.through} gives {setting.word} the folder that your command names")
            return re.sub(rf"(?<!\S){re.escape(setting.typed)}(?!\S)", "{checkpoints}", typed)
        if not self.passes_on:
            there = setting.with_value('"$GPUFLEET_CHECKPOINTS"')
            self.unknown(f"{self.through} does not pass on words that are added to the command: write {there} in it")
            self.place.why = f"CHECK: write {setting.word} $GPUFLEET_CHECKPOINTS in {self.through}"
            return typed
        is_path = self.facts is not None and self.facts.place.is_whole_path
        value = f"{{checkpoints}}/{self.facts.place.name}" if is_path and self.facts is not None else "{checkpoints}"
        self.known(f"{setting.word} names the output folder", setting.where)
        self.made.out = setting.name
        return with_setting(typed, setting, value, self.part)

    def _own_folder(self, folder: str, where: str, typed: str) -> str:
        """The command of a script whose code itself names the output folder. If this is the start folder, the command
        starts in {checkpoints}, and finds the code by {code}.
        """
        start, place = self.found.start, self.place
        plain = posixpath.normpath(posixpath.join(start.folder, folder))
        if plain.startswith(("/", "..", "~")) or "$" in plain or "://" in plain:
            place.why = f"CHECK: {where} writes to {folder}, which is outside of the run: write {{checkpoints}} there"
            self.unknown(
                f"{where}: the script writes to {folder}, which is outside of the run; let it write to"
                " $GPUFLEET_CHECKPOINTS"
            )
        elif plain != ".":
            self.known(f"the script writes below {plain}", where)
            place.folder, place.why = _quoted(plain), f"{where}: the script writes there"
        else:
            self.known("the script saves into its working folder, so it starts in {checkpoints}", where)
            place.workdir = f"  workdir: '{{checkpoints}}'   # {where}: the script saves into its working folder"
            links = ""
            if self.found.names_own:
                own = "; ".join(
                    f"{finding.where} looks for {finding.value}" for finding in self.found.names_own.values()
                )
                place.workdir = f"  workdir: '{{checkpoints}}'   # CHECK: the script saves where it starts ({where});"
                place.workdir += f" the command links its own files there: {own}"
                self.unknown(f"which of its own files the script opens by a relative path: see job.workdir ({own})")
                links = f"ln -sfn {' '.join(f'{{code}}/{file}' for file in self.found.names_own)} . && "
            if not start.through and not start.is_module:
                there = {word for word in typed.split() if word[0] not in "-/{" and (self.found.folder / word).exists()}
                return links + " ".join(f"{{code}}/{e.removeprefix('./')}" if e in there else e for e in typed.split())
            place.environment["PYTHONPATH"] = "{code}"
            place.workdir = (
                f"  workdir: '{{checkpoints}}'   # CHECK: {where} saves where it starts; relative paths begin there too"
            )
        return typed

    def switched_on(self, written: str) -> str:
        """The command with a setting that switches saves on, if they are off by default."""
        every, row = self.plan.every, self.row
        if row is not None and row.needs and row.needs not in written and self.passes_on:
            self.known(f"the script saves nothing by default, so the command switches saves on ({row.needs})", row.name)
            written = f"{written} {row.needs}"
        if self.facts is not None and (switch := self.facts.switch) is not None and self.passes_on:
            self.known(f"the script saves this only with {switch.word}, which the command has now", switch.where)
            written = with_setting(written, switch, True, self.part)
        if every.setting is None or not every.setting.form or every.setting.typed is not None or not self.passes_on:
            return written
        if every.setting.count is None:
            word = every.setting.word
            self.known(f"the script saves nothing by default, so the command switches saves on ({word})", every.where)
        elif not self.starts_trainer or self.facts is not None:
            return written
        return with_setting(written, every.setting, every.count, self.part)

    def image(self) -> str:
        """What to look at beside the image."""
        library = self.found.library
        lacks = f" with {library}, which this image of PyTorch lacks:" if library else ""
        return f"{lacks} any Linux image with sh and the script's packages".strip()

    def setup(self) -> Iterator[str]:
        if self.found.requirements:
            install = "-r requirements.txt" if self.found.requirements == "requirements.txt" else "-e ."
            yield f"  setup: pip install {install}   # once per node; a pinned image starts faster"

    def environment(self) -> Iterator[str]:
        if self.place.environment:
            yield "  env:"
            yield from (f"    {name}: {_quoted(value)}" for name, value in self.place.environment.items())

    def resume(self) -> Iterator[str]:
        """Yields the lines for resuming: the words that are added to the command once a checkpoint is restored."""
        facts, row = self.found, self.row
        if facts.bare_resume:
            where = facts.bare_resume.where
            self.unknown(
                f"{where}: trainer.train() gets no checkpoint, so the script begins anew on each node. Write"
                " trainer.train(resume_from_checkpoint=os.environ.get('GPUFLEET_RESUME_FROM')) there; otherwise a"
                " rehearsal fails"
            )
            yield f"  # resume: {{}}   # CHECK: {where}: train() begins anew by itself"
        elif facts.begins_anew is not None:
            why = facts.begins_anew.value
            self.unknown(f"how the script goes on from a checkpoint: {why}; unless you change that, a rehearsal fails")
            yield f"  # resume: {{args: --resume}}   # CHECK: {why}"
        elif facts.resume is not None and self.passes_on and not self.ends_command:
            self.unknown(
                "how the script goes on from a checkpoint: job.resume.args are added at the command's end, where"
                " another program would get them"
            )
            yield f"  # resume: {{args: {_quoted(facts.resume.value)}}}   # CHECK: the last program would get these"
        elif facts.resume is not None and self.passes_on:
            words, where = facts.resume.value, facts.resume.where
            self.known(f"with {re.split('[ =]', words)[0]} the script goes on from a checkpoint", where)
            yield f"  resume: {{args: {_quoted(self.plan.named(words))}}}   # {where}"
        elif facts.resume is not None:
            yield f"  # resume: {{args: {_quoted(facts.resume.value)}}}   # CHECK: {self.through} does not pass them"
        elif facts.reads_itself:
            where, finding = facts.reads_itself.where, facts.reads_itself.value
            self.known(f"{finding}; a rehearsal shows whether resuming works", where)
        elif row is not None and "by itself" in row.resumes and facts.names:
            self.known(f"the script goes on {row.resumes}", row.name)
        elif facts.names:
            how = f" ({row.name}: {row.resumes})" if row is not None else ""
            self.unknown(
                "how the script goes on from a checkpoint: write its words for that in job.resume.args, or let it look"
                f" into {{checkpoints}} itself{how}"
            )
            yield f"  # resume: {{args: --resume}}   # CHECK: added to the command after a checkpoint was restored{how}"

    def checkpoint(self) -> Iterator[str]:
        names, place = self.found.names, self.place
        if not names:
            other = self.found.saves_else
            reason = f"{other.where} saves only {other.value}" if other else "no code of the command saves a checkpoint"
            self.unknown(
                f"whether the script saves: {reason}, so a lost node repeats all work. If it does save, name its"
                " checkpoints in job.checkpoint.each; `gpufleet new --try` watches for them"
            )
            yield f"  checkpoint: none   # CHECK: {reason}, so a loss repeats all work; else name it in each:"
            return
        yield "  checkpoint:"
        if place.folder or place.why:
            yield f"    folder: {place.folder or _CHECKPOINTS}" + (f"   # {place.why}" if place.why else "")
        yield from self._names()
        yield from self._every_lines()
        size = self.found.size
        seen = f"; in the trial, with the command as tried, one had {size.value} GB" if size else ""
        yield f"    size_gb: 1.5   # CHECK: of one checkpoint; rehearsal and first receipt show the real size{seen}"
        self.unknown(
            "how large a checkpoint is: write job.checkpoint.size_gb, from which storage and notices are priced"
        )

    @property
    def form(self) -> Format:
        """The format of the framework's checkpoints, even if the script names its folders; an empty one for other
        files.
        """
        is_its = bool(self.found.names) and (self.facts is None or self.found.names[0].endswith("/"))
        return FORMATS[self.row.format] if self.row and self.row.format and is_its else Format()

    def _names(self) -> Iterator[str]:
        """The definition's lines for a checkpoint's names, and for the file that completes a checkpoint."""
        row, facts = self.row, self.facts
        shown = [("" if facts else self.place.below) + self.plan.named(name) for name in self.found.names]
        where = facts.where if facts is not None else f"{row.name}, {row.version}" if row is not None else ""
        if facts is not None and facts.is_one_of_several:
            where = f"CHECK: {where} also saves under other names"
        elif facts is not None and facts.place.is_open and self.place.why and not self.place.folder:
            where = f"CHECK: {where} saves it, in a folder that may be a part of the name"
        several = f"[{', '.join(map(_always_quoted, shown))}]"
        form = self.form
        if row is not None and form.each:
            yield f"    format: {row.format}   # {row.name}"
        if tuple(shown) != form.each:
            yield f"    each: {_quoted(shown[0]) if len(shown) == 1 else several}   # {where}"
        self.known(f"a checkpoint is {' and '.join(shown)}", where)
        if not re.search(r"\{(step|epoch)", shown[0]):
            yield "    rewritten: true   # the same file each time"
        complete, why = self.found.complete, ""
        last = complete.value if complete is not None else ""
        if complete is not None:
            why = complete.where
        elif row is not None:
            last, why = row.complete, f"{row.name} writes it last"
        if last and shown[0].endswith("/"):
            yield f"    complete: {_quoted(last)}   # {why}"
        also, folder = () if row is None or (facts is not None and facts.names != row.each) else row.also, ""
        if form.also and (folder := posixpath.dirname(shown[0].rstrip("/"))):
            also = tuple(f"{folder}/{pattern}" for pattern in form.also)
        if row is not None and also:
            yield f"    also: [{', '.join(map(_quoted, also))}]   # {row.name} resumes by it"

    def _every_lines(self) -> Iterator[str]:
        every, plan = self.plan.every, self.plan
        if plan.says_every:
            is_epochs = (every.unit == "epoch" and plan.word != "epoch") or plan.unit == "epoch"
            yield f"    every: {{{'epochs' if is_epochs else 'steps'}: {every.count}}}   # {every.where}"
            return
        known = f": {every.where} says every {every.count} {every.unit}s" if every.count else ""
        known = known or (f": {every.where} says when" if every.where else "")
        yield f"    every: {{minutes: 10}}   # CHECK: how often the script saves; a lost node repeats that much{known}"
        self.unknown(f"how often the script saves, in minutes: write job.checkpoint.every{known}")

    def progress(self) -> Iterator[str]:
        row, plan = self.row, self.plan
        if self.found.muted and row is not None:
            why = f"{self.found.muted}: {row.mutes} prints no line into a pipe, so only the names count"
            self.unknown(f"which line states the step: {why}")
            yield f"  # progress: {{}}   # CHECK: {why}"
        if row is not None and row.format and FORMATS[row.format].progress and not (row.named and plan.lines):
            if self.facts is not None and not self.form.each:  # a checkpoint's format would already define it
                yield from ("  progress:", f"    format: {row.format}   # {row.name}")
            return
        yield "  progress:"
        shown = [(plan.named(line.regex), line.where) for line in plan.lines]
        if row is not None and row.progress and not (row.named and shown):  # then the loop is the script's own
            shown = [(plan.named(pattern), f"{row.name}, {row.version}") for pattern in row.progress]
        if not shown:
            bar = "^\\s*" + BAR.format(count="step", total="total")
            yield f"    stdout: {_quoted(bar)}   # CHECK: a pattern of tqdm's bar, or of your own line with the step"
            self.unknown("which line states the step: write its pattern in job.progress.stdout, with (?P<step>...)")
            return
        yield "    stdout:"
        yield from (f"      - {_always_quoted(regex)}   # {where}" for regex, where in shown)
        self.known(f"a line of the output states the {plan.word}", shown[0][1])

    def work(self) -> Iterator[str]:
        plan, total = self.plan, self.plan.total
        if total is None:
            self.unknown(
                "how long the training is: write job.work.steps, epochs or hours; until then the bill only says how"
                " much training the money buys"
            )
            hours = "{hours: {low: 2, likely: 4, high: 8}}"
            yield f"  # work: {hours}   # CHECK: without this the bill only says how much training the money buys"
            return
        self.known(f"{total.count} {total.unit}s", total.where)
        counts_epochs = total.unit == "epoch" and (plan.unit == "epoch" or plan.steps_per_epoch)
        is_epoch = plan.word == "epoch" and not counts_epochs
        key, guess, more = "step_ms", 60_000 if is_epoch else 500, "; a step here is one epoch of the script" * is_epoch
        yield "  work:"
        yield f"    {'epochs' if counts_epochs else 'steps'}: {total.count}   # {total.where}{more}"
        if plan.steps_per_epoch:
            self.unknown(
                "how many steps an epoch has: write job.work.steps_per_epoch, rows divided by the batch of all GPUs"
            )
            yield "    steps_per_epoch: 1000   # CHECK: rows divided by the batch of all GPUs"
        elif counts_epochs:
            key, guess = "epoch_minutes", 1
        yield f"    {key}: {{L40S: {guess}}}   # CHECK: a guess until `gpufleet calibrate` has measured it"
        self.unknown("how long a step takes: `gpufleet calibrate` measures it, job.work declares it")

    def stop(self, command: str) -> Iterator[str]:
        """Yields the lines for the signal that the script handles, unless this signal would kill its launcher."""
        if (seen := self.found.saves_on_signal) is not None:
            self.known(seen.where)
            yield f"  stop: {{signal: TERM, saves: {seen.value}}}   # {seen.where}"
            return
        taken = min(self.found.signals, key=lambda finding: finding.value != "SIGTERM", default=None)
        if taken is None:
            if self.row is not None:
                self.known(f"on SIGTERM the script {self.row.on_signal}", self.row.name)
            return
        signal, launcher = taken.value.removeprefix("SIG"), self.found.start.launcher
        launcher = launcher or ("torchrun" if "torchrun" in command else "")
        if signal != "TERM" and launcher and "--signals-to-handle" not in command:
            self.unknown(
                f"{taken.where}: the script handles {taken.value}, as clusters send it; {launcher} would die of that"
                f" signal and leave its ranks running. Handle SIGTERM there, or let torchrun pass {taken.value} on with"
                f" --signals-to-handle={taken.value}, and write job.stop.signal: {signal}"
            )
            why = f"{taken.where} handles {taken.value}, of which {launcher} dies"
            yield f"  # stop: {{signal: {signal}}}   # CHECK: {why}"
            return
        self.known(f"the script handles {taken.value}; a rehearsal shows whether it saves then", taken.where)
        yield f"  stop: {{signal: {signal}, saves: unknown}}   # {taken.where}"

    def secrets(self) -> Iterator[str]:
        if wandb := self.found.wandb:
            yield f"  # secrets: {{WANDB_API_KEY: ssm:/wandb}}   # {wandb.where}: {wandb.value}"

    def inputs(self, command: str) -> Iterator[str]:
        """Yields the lines for the inputs that the command names."""
        if not (names := dict.fromkeys(INPUT.findall(command))):
            self.unknown("where the data is: name it in storage.inputs, unless the script or job.setup fetches it")
            yield "  # inputs: {NAME: data/folder or s3://bucket/prefix}   # the command reads it as {inputs.NAME}"
            return
        self.unknown(f"where the data is: name it in storage.inputs ({', '.join(names)})")
        yield "  inputs:   # CHECK: a folder, or s3://bucket/prefix; the rehearsal needs a folder with a little of it"
        yield from (f"    {name}: data/{name}" for name in names)

    def small(self, command: str, interval: int, total: int | None) -> str:
        """The command, made small enough for a laptop's CPU as far as its settings are known. `total`: the length to
        set; None leaves the length as it is.
        """
        settings, every = self.settings, self.plan.every
        wanted: list[tuple[Setting | None, object]] = [
            (self.asked.setting if self.asked is not None and total is not None else None, total),
            (every.setting if self.can_say_every else None, interval),
            *((settings.first(names), value) for names, value in ((LOG_EVERY, 1), (DEVICE, "cpu"), (BACKEND, "gloo"))),
        ]
        for option, value in wanted if self.passes_on else ():
            if option is not None and option.form and not option.is_flag and not isinstance(option.default, bool):
                command = with_setting(command, option, value, self.part)
        # One process on a CPU needs no launcher, and some scripts expect GPUs if they see a launcher.
        if self.found.runs_alone and self.nodes == 1:
            command = re.sub(r"^torchrun(?: +--\S+(?: +(?:\d+|\{gpus\}))?)* +", "python ", command)
        if (setting := settings.first(COMPILE)) is not None and setting.form.endswith("={}"):
            command = with_setting(command, setting, False, self.part)
        parses = any(option.form for option in self.settings.several(["output_dir"]))
        is_script = self.starts_trainer and self.row is not None and not self.row.form and parses
        more = [flag for flag in _HF_ON_CPU if is_script and flag not in command.lower()]
        return " ".join([command, *more])

    @property
    def asked(self) -> Span | None:
        """How long the script trains; if its training does not end by itself, the setting that would end it."""
        return self.plan.total or self.found.total

    @property
    def ends_command(self) -> bool:
        """Whether the training program's words are the last words of the command."""
        return self.part < 0 or self.part == len(list(parts(self.found.start.typed))) - 1

    @property
    def can_say_every(self) -> bool:
        """Whether the command line can set, as a number, how often the script saves."""
        setting = self.plan.every.setting
        is_number = setting is not None and (setting.typed is None or setting.count is not None)
        return setting is not None and is_number and bool(setting.form) and self.passes_on

    def rehearsal(self, command: str) -> Iterator[str]:
        """Yields the lines of the section `rehearsal`."""
        plan, total, every = self.plan, self.asked, self.plan.every
        counts_epochs, check = "epoch" in (plan.word, total.unit if total is not None else ""), ""
        interval = every.count or REHEARSED_EVERY
        if self.can_say_every or every.count is None:
            interval = 1 if "epoch" in (every.unit, plan.word) else min(interval, REHEARSED_EVERY)
        count = max(REHEARSED_EPOCHS if counts_epochs else REHEARSED_STEPS, 3 * interval)
        unit = "epoch" if counts_epochs else "step"
        if took_ms := self.found.seen_ms.get(unit):
            count = max(REHEARSED_SAVES, rehearsed_steps(took_ms))
            if self.can_say_every and every.unit == unit:
                interval = count // REHEARSED_SAVES
            count = max(count, 3 * interval)
        setting = total.setting if total is not None else None
        can_say_total = setting is not None and bool(setting.form) and self.passes_on
        small = self.small(command, interval, count if can_say_total else None)
        tried = (
            with_setting(small, setting, 1000 if counts_epochs else 100_000, self.part)
            if can_say_total and setting
            else small
        )
        if not can_say_total:
            count, check = (
                (total.count if total is not None else 0) or count,
                "   # CHECK: as many as this command trains",
            )
            trains = f", so it trains all {total.count} of {total.where} there" if total and total.count else ""
            self.unknown(f"how a rehearsal gets fewer steps: the script takes no count from its command line{trains}")
        resume = self.found.resume.value if self.found.resume else ""
        self.made.trial = Trial(
            command=tried, resume=resume, workdir="{checkpoints}" if self.place.workdir else "",
            environment={**(self.row.environment if self.row else {}), **self.place.environment},
            every=every.setting.name if every.setting is not None and self.can_say_every else "",
            lines=(*(self.row.patterns if self.row else ()), *(line.regex for line in self.found.lines)),
        )  # fmt: skip
        yield "rehearsal:          # the same script on a laptop's CPU: laid over the sections above"
        has_own = any((self.found.folder / name / "bin").is_dir() for name in ENVIRONMENTS)
        if not has_own:
            yield "  # python: path/to/python   # CHECK: a Python with the script's packages; else python3"
            self.unknown(
                "which Python has the packages that the script imports: its folder has no .venv, so write"
                " rehearsal.python"
            )
        yield from ("  job:", f"    command: {_quoted(small)}   # CHECK: small enough for a CPU", "    device: cpu")
        if has_own and self.found.trained and self.found.requirements == "requirements.txt":
            yield '    setup: ""   # in the trial: the environment in the code\'s folder has the packages'
        yield from ("    gpus: 1", "    work:")
        is_epochs = plan.unit == "epoch" or (counts_epochs and plan.steps_per_epoch)
        yield f"      {'epochs' if is_epochs else 'steps'}: {count}{check}"
        if counts_epochs and plan.steps_per_epoch:
            yield f"      steps_per_epoch: {REHEARSED_EPOCH_STEPS}   # CHECK: steps per epoch with the rehearsal's data"
        if self.found.names:
            saves_epochs = plan.unit == "epoch" or (every.unit == "epoch" and plan.steps_per_epoch)
            minutes = "" if plan.says_every else "minutes: null, "
            yield from (
                "    checkpoint:",
                f"      every: {{{minutes}{'epochs' if saves_epochs else 'steps'}: {interval}}}",
            )
            yield from ("      size_gb: 0.01", "      heartbeat_s: 3")
        step_ms = took_ms / (REHEARSED_EPOCH_STEPS if counts_epochs and plan.steps_per_epoch else 1) if took_ms else 500
        yield _REHEARSED.format(step_ms=round(step_ms, 1), where="   # in the trial" * bool(took_ms))


def _always_quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _quoted(text: str) -> str:
    """A YAML scalar, in single quotes if plain text would mean something else."""
    plain = re.fullmatch(r"[A-Za-z./~][A-Za-z0-9 ./_=-]*", text) and " #" not in text
    return text if plain else _always_quoted(text)
