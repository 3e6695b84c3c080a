"""Reads a folder of training code, and the command that starts it, without running either.

Each finding has its place in the code, so that the definition file can give the reason. A fact that is not found stays
open; it is never guessed.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpufleet.infra.discover.expressions import Hole, Kind, Span, Values, loop_range
from gpufleet.infra.discover.frameworks import Framework, framework_of
from gpufleet.infra.discover.lines import PrintedLine, find_lines
from gpufleet.infra.discover.reach import Reach, Site, dotted, walk
from gpufleet.infra.discover.resume import find_resume, shown
from gpufleet.infra.discover.saves import CodeSave, Pattern, Saves, around_of, find_saves, loop_unit, pattern
from gpufleet.infra.discover.settings import ScriptSettings, Setting, declared, environment_key, literal, of_file
from gpufleet.infra.discover.source import CodeFolder, Finding
from gpufleet.infra.discover.start import StartedProgram, dockerfile_command, starts
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.kind.command import EPOCH_COUNTS, FORMATS, STEP_COUNTS

MOST_LOOKED_INTO = 12  # number of files that are searched for the one that trains, if no command names it
# Usual names of settings, which count only if the code itself does not show what a setting is for.
OUT = (
    "output_dir", "out_dir", "outdir", "checkpoint_dir", "ckpt_dir", "save_dir", "checkpoints_dir", "work_dir",
    "workdir", "output_path", "checkpoint_path", "output", "out", "logdir", "log_dir", "save_path", "dump_dir",
    "results_dir", "log_folder",
)  # fmt: skip
EPOCHS = (*EPOCH_COUNTS, "training_epochs", "total_epochs", "nepochs", "epoch")
STEPS = (
    *STEP_COUNTS, "total_iter", "total_iters", "n_iters",
    "max_train_steps", "max_iter", "num_iters", "total_timesteps", "timesteps", "n_timesteps",
    "num_train_steps", "train_iters", "niter",
)  # fmt: skip
DEVICE, BACKEND = ("device", "device_type"), ("backend", "dist_backend", "ddp_backend")
COMPILE = ("compile", "torch_compile")
LOG_EVERY = ("log_interval", "logging_steps", "log_every", "print_freq", "log_freq")
LIBRARIES = ("tensorflow", "jax", "paddle", "mindspore", "mxnet")
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # SIGINT comes from a keyboard
_TRAINS = {"backward", "fit", "value_and_grad", "grad", "learn", "train", "train_step", "launch_training"}
_SUPPORT = re.compile(  # files with another purpose
    r"/(tests?|docs?|bench(marks?)?|scripts/convert|tools/convert)/|/(test_|setup\.py|conftest)"
    r"|eval|infer|sample|convert|export|demo"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """The files of one checkpoint, as the code names them."""

    names: tuple[str, ...]
    place: Pattern  # the place of the first of `names`
    where: str
    cadence: Span | None
    switch: Setting | None = None  # the option without which the script does not save them
    is_one_of_several: bool = False  # the function that saves these may save other names too


@dataclass(slots=True)
class ScriptFacts:
    """All facts about the code. A fact that was not found is None or empty."""

    folder: Path
    start: StartedProgram
    settings: ScriptSettings
    framework: Framework | None = None
    checkpoint: CheckpointFacts | None = None
    total: Span | None = None  # the length of the training
    lines: list[PrintedLine] = field(default_factory=list)
    resume: Finding | None = None  # the words that resume from a checkpoint
    reads_itself: Finding | None = None  # where the script looks for a checkpoint by itself
    bare_resume: Finding | None = None  # a trainer's train() without a checkpoint
    signals: list[Finding] = field(default_factory=list)
    joins: Finding | None = None  # where the script joins a group of several processes
    runs_alone: bool = False  # the script looks for a launcher, and also works without one
    wandb: Finding | None = None
    requirements: str = ""
    library: str = ""  # the library of another kind than PyTorch on which the script stands
    # files and folders that the code names relative to its start folder, by the first part of their paths
    names_own: dict[str, Finding] = field(default_factory=dict)
    saves_else: Finding | None = None  # saved files that are no checkpoints
    begins_anew: Finding | None = None  # a trial showed that the script does not resume
    saves_on_signal: Finding | None = None  # shown by a trial: true or false
    complete: Finding | None = None  # shown by a trial: the file of a checkpoint that is written last
    size: Finding | None = None  # shown by a trial: the size in GB
    trained: bool = False  # whether the script trained in a trial, so that this machine has the modules it imports
    seen_ms: dict[str, float] = field(default_factory=dict)  # shown by a trial: milliseconds of a step or an epoch here
    muted: str = ""  # where the code or a configuration names what prints no progress into a pipe
    # keyword arguments of a framework's calls, with places
    coded: dict[str, tuple[object, str]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of one checkpoint's files, by the code or else by its framework; empty if not known."""
        if self.checkpoint is not None or self.framework is None:
            return self.checkpoint.names if self.checkpoint else ()
        row = self.framework
        if row.naming and (named := self._named_by_user(str(self.value_of(row.naming)[0] or ""))):
            return (named,)
        by_steps = row.each_step if self.total is not None and self.total.unit == "step" else ()
        return by_steps or row.each or (FORMATS[row.format].each if row.format else ())

    def value_of(self, name: str) -> tuple[object, str]:
        """The value that the code gives its framework under a name, or else the value of the setting of this name; and
        the value's place. The value is None if neither is there.
        """
        value, where = self.coded.get(name, (None, ""))
        setting = self.settings.first([name]) if value is None else value
        return (setting.value, setting.place) if isinstance(setting, Setting) else (value, where)

    def _named_by_user(self, text: str) -> str:
        """A name for Lightning's ModelCheckpoint as a pattern; empty if the user gives none. Lightning itself adds
        words such as `epoch=` before each figure. If only the best are kept under the name, the last one is meant.
        """
        inserts, save_last, monitor, save_top_k = (
            str(self.value_of(key)[0]) for key in ("auto_insert_metric_name", "save_last", "monitor", "save_top_k")
        )
        if save_last == "True" and ((monitor != "None" and save_top_k != "-1") or "${" in text):
            return "last*.ckpt"
        if not text:
            return ""

        def one(match: re.Match[str]) -> str:
            figure = match[0] if match[1] in ("epoch", "step") else "*"
            is_worded = inserts != "False" and not text[: match.start()].endswith("=")
            return f"{match[1]}={figure}" if is_worded else figure

        return "*" + re.sub(r"\{([\w/]+)(:[^}]*)?\}", one, text) + "*.ckpt" if "{" in text else text + "*.ckpt"

    @property
    def script(self) -> str:
        """The file that the command starts; empty if it starts a program of a package."""
        return self.start.script


def look(folder: Path, command: str = "") -> ScriptFacts:
    """The facts in the folder, and in the user's command if there is one. Raises GpufleetError."""
    code = CodeFolder(folder)
    if not command and not code.python:
        raise GpufleetError(f"--code: no Python file in {folder}; say how the training starts: --command '...'")
    begun = starts(code, command) if command else [_entry(code)]
    if not begun:
        raise GpufleetError(f"--command: no program is found in {command!r}; write the command as you would type it")
    start, reach = _which_trains(code, begun)
    requirements = next((n for n in ("requirements.txt", "pyproject.toml", "setup.py") if n in code.files), "")
    row = framework_of(reach, start)
    if reach is None:
        files = (posixpath.normpath(word.rpartition("=")[2]) for word in start.words)
        files = (file for file in files if file in code.files and file.endswith((".yaml", ".yml", ".toml")))
        style = row.form if row is not None else ""
        settings = ScriptSettings([setting for name in files for setting in of_file(code, name, style)], start)
        facts = ScriptFacts(folder=folder, start=start, settings=settings, framework=row, requirements=requirements)
        facts.total = None if row is not None and row.counts_tokens else _named_total(settings, row, {})
        facts.resume = Finding(row.resume, row.name) if row is not None and row.resume else None
        return facts
    settings = ScriptSettings([*declared(reach, start, row.form if row else ""), *_of_row(row, reach)], start)
    row = row or framework_of(reach, start)  # again: a configuration may have named more classes of the folder
    values = Values(reach, settings)
    saves = find_saves(reach, values)
    facts = ScriptFacts(folder=folder, start=start, settings=settings, framework=row, requirements=requirements)
    modules = [module.partition(".")[0] for module in reach.imported]
    facts.library = next((module for module in modules if module in LIBRARIES and "torch" not in modules), "")
    facts.coded = {**dict(_in_dictionaries(reach, row)), **dict(_coded(reach, values, row))}
    facts.checkpoint = _checkpoint(saves, values, row)
    chosen = next((save for save in saves.found if facts.checkpoint and save.where == facts.checkpoint.where), None)
    facts.total = _total(reach, values, chosen, row, facts.coded)
    facts.lines = find_lines(reach, values)
    if row is not None and row.mutes:
        named = [site.where for site in reach.by_name.get(row.mutes, [])]
        facts.muted = next(iter([*named, *settings.naming(row.mutes)]), "")
    facts.resume, facts.reads_itself = find_resume(reach, values, saves, chosen, row)
    asked, where = facts.coded.get(row.resume_setting if row else "", ("", ""))
    if facts.resume is None and isinstance(asked, Setting) and asked.form and not asked.is_environment:
        facts.resume = Finding(asked.with_value("{checkpoint}"), where)
    if row is not None and row.resume.endswith("{checkpoints}"):
        reads, writes = settings.first([row.resume.lstrip("-").split()[0]]), settings.first(row.out)
        if reads is not None and writes is not None and reads.typed and reads.typed == writes.typed:
            facts.resume, facts.reads_itself = None, Finding(f"{reads.word} names the output folder", "your command")
    if facts.resume is None and asked in ("last", "latest", "auto"):
        facts.reads_itself = Finding(f"{asked} is its checkpoint", where)
    calls = (site for name in (row.restores if row else ()) for site in reach.by_name.get(name, []))
    if facts.resume is None and (call := next(calls, None)) is not None:
        facts.reads_itself = facts.reads_itself or Finding(f"{call.name} looks for a checkpoint by itself", call.where)
    others = (save for save in saves.found if save.score > -1 and pattern(save, values) is not None)
    facts.saves_else = next((Finding(shown(save), save.where) for save in others), None)
    _read_calls(facts, reach)
    facts.names_own = {finding.value.partition("/")[0]: finding for finding in _names_own(facts, reach, code)}
    return facts


def _names_own(facts: ScriptFacts, reach: Reach, code: CodeFolder) -> Iterator[Finding]:
    """Texts in the reached code that name files in the start folder, which the code opens by a relative path."""
    there = {name.removeprefix(f"{facts.start.folder}/").partition("/")[0] for name in code.files}
    nodes = [
        (node, f"{site.scope.file}:{site.call.lineno}")
        for site in reach.sites
        if site.name != "add_argument"
        for node in [*site.call.args, *(word.value for word in site.call.keywords)]
    ]
    nodes += [
        (node, f"{scope.file}:{node.lineno}")
        for unit, scope in reach.units
        if isinstance(unit, ast.FunctionDef)
        for node in unit.args.defaults
    ]
    for node, where in nodes:
        if isinstance(text := literal(node), str) and (text := text.removeprefix("./")).partition("/")[0] in there:
            yield Finding(text, where)


def _which_trains(code: CodeFolder, begun: list[StartedProgram]) -> tuple[StartedProgram, Reach | None]:
    """The program that trains, of those that a command starts, and its reached code; the first program if none seems to
    train.
    """
    own = sorted((program for program in begun if program.script), key=lambda program: not program.launcher)
    reaches = [
        (program, Reach(code, program.roots, program.script, program.function)) for program in own[:MOST_LOOKED_INTO]
    ]
    for program, reach in reaches:
        if trains(reach) or framework_of(reach, program) is not None:
            return program, reach
    known = next((program for program in begun if not program.script and framework_of(None, program)), None)
    return reaches[0] if own and known is None else (known or begun[0], None)


def trains(reach: Reach) -> bool:
    """Whether the reached code trains: it calls backward, or a function that fits or trains something."""
    return bool(_TRAINS & set(reach.by_name))


def _entry(code: CodeFolder) -> StartedProgram:
    """The program of the folder that trains: the program that the folder's image starts, else the only file that
    trains. Raises GpufleetError with the candidates if there are several.
    """
    if (command := dockerfile_command(code)) and (
        begun := [program for program in starts(code, command) if program.script]
    ):
        start, reach = _which_trains(code, begun)
        if reach is not None and (trains(reach) or len(begun) == 1):
            return replace(start, typed=command)
    able = [name for name in code.python if not _SUPPORT.search(f"/{name.lower()}")] or code.python
    able = sorted(able, key=lambda name: (-_named_like_training(name), name.count("/"), name))
    mains = [name for name in able if "__main__" in code.text(name)] or [name for name in able if _runs(code, name)]
    candidates = (mains or able)[:MOST_LOOKED_INTO]
    training = [name for name in candidates if _may_train(code, name)]
    training = training or [name for name in candidates if _named_like_training(name) >= 2]
    scores = {name: _named_like_training(name) - 0.5 * name.count("/") for name in training}
    training.sort(key=lambda name: -scores[name])
    if not training or (len(training) > 1 and scores[training[0]] == scores[training[1]]):
        some = ", ".join(training[:6]) or "none of them is seen to train"
        raise GpufleetError(
            f"--code: it is unclear which file in {code.path} trains ({some}); name it: --command 'python FILE.py ...'"
        )
    return _program(training[0])


def _program(name: str) -> StartedProgram:
    roots = tuple(dict.fromkeys((posixpath.dirname(name), "", "src")))
    return StartedProgram(script=name, typed=f"python {name}", roots=roots)


def _may_train(code: CodeFolder, name: str) -> bool:
    start = _program(name)
    reach = Reach(code, start.roots, name)
    is_sole = len(code.python) == 1 and re.search(r"train|fit|optim|loss", f"{name} {code.text(name)}")
    return bool(trains(reach) or framework_of(reach, start) is not None or is_sole)


def _named_like_training(name: str) -> float:
    stem = Path(name).stem.lower()
    exact = stem in ("train", "main", "main_train", "pretrain", "finetune", "run_training", "run_train")
    return 2.0 * exact + 1.0 * bool(re.search(r"train|finetune|sft|run_|main", stem))


def _runs(code: CodeFolder, name: str) -> bool:
    """Whether the file does more than define functions and classes: its top level has a call or a loop."""
    body = tree.body if (tree := code.tree(name)) is not None else []
    run = (statement for statement in body if isinstance(statement, ast.Expr | ast.For | ast.While))
    return any(not isinstance(getattr(statement, "value", None), ast.Constant) for statement in run)


def _of_row(row: Framework | None, reach: Reach) -> Iterator[Setting]:
    """The settings of a framework's parser, if the script uses this parser."""
    parsers = {"HfArgumentParser", "TrlParser", "H4ArgumentParser", "LightningCLI"} & set(reach.by_name)
    if row is None or not parsers:
        return
    if "LightningCLI" in parsers:
        for name in ("max_steps", "max_epochs", *row.out):
            yield Setting(name=f"trainer.{name}", form=f"--trainer.{name} {{}}", where=row.name)
        if not any(literal(site.keyword("run")) is False for site in reach.by_name["LightningCLI"]):
            yield Setting(name=row.resume_setting, form=f"--{row.resume_setting} {{}}", where=row.name)
        return
    for name in (*row.out, *row.steps, *row.epochs, *row.every, *filter(None, [row.resume_setting]), "logging_steps"):
        default = {"save_steps": 500, "num_train_epochs": 3}.get(name)
        yield Setting(name=name, form=f"--{name} {{}}", default=default, where=row.name)


def _coded(reach: Reach, values: Values, row: Framework | None) -> Iterator[tuple[str, tuple[object, str]]]:
    """Yields the keyword arguments that a script gives to a framework: numbers, texts or settings; None for
    a value that is not known.
    """
    for site in (use for name in (row.uses if row is not None else ()) for use in reach.by_name.get(name, [])):
        for keyword in site.call.keywords:
            parts = values.resolve(keyword.value, site.scope)[0]
            head = parts[0] if parts else ""
            if keyword.arg and isinstance(head, Hole) and len(parts) == 1 and head.kind == "setting":
                yield keyword.arg, (values.settings.find(head.name), site.where)
            elif keyword.arg:
                is_known = all(isinstance(part, str) for part in parts)
                yield keyword.arg, ("".join(map(str, parts)) if is_known else None, site.where)


def _in_dictionaries(reach: Reach, row: Framework | None) -> Iterator[tuple[str, tuple[object, str]]]:
    """Yields the same of a dictionary by which a script makes the callback that saves. Its folder stays open."""
    nodes = ((node, scope) for unit, scope in reach.units for node in walk(unit) if isinstance(node, ast.Dict))
    for node, scope in nodes if row is not None and row.inside else ():
        pairs = {str(literal(key)): literal(value) for key, value in zip(node.keys, node.values, strict=True)}
        if row is not None and row.inside in pairs:
            where = f"{scope.file}:{node.lineno}"
            yield from ((key, (str(value), where)) for key, value in pairs.items() if value is not None)
            yield row.moved_by, (None, where)
            return


def _checkpoint(saves: Saves, values: Values, row: Framework | None) -> CheckpointFacts | None:
    """The checkpoint that a resume needs, and the files saved beside it; None if the code names no checkpoint."""
    if row is not None and not row.named and row.each and not any(save.score >= 6 for save in saves.found):
        return None
    for chosen in saves.found:
        place = pattern(chosen, values)
        if place is None or chosen.score <= 2 or (row is not None and row.format and not row.named):
            continue
        if not chosen.is_inside_loop and chosen.cadence is None and "{" not in place.name:
            continue  # the script saves this only at its end
        saved_names = [place.name]
        for other in saves.found if "{" in place.name else ():
            beside = pattern(other, values)
            if beside is not None and _goes_with(chosen, other) and _place(beside) == _place(place):
                saved_names.append(beside.name)
        names = tuple(dict.fromkeys(saved_names))[:4]
        patterns = {pattern(other, values) for other in saves.found if other.where == chosen.where}
        several = chosen.is_one_of_several and len(patterns) > 1
        cadence = chosen.cadence if not several else None
        return CheckpointFacts(
            names=names,
            place=place,
            where=chosen.where,
            cadence=cadence,
            switch=chosen.switch,
            is_one_of_several=several,
        )
    return None


def _place(pattern: Pattern) -> tuple[object, ...]:
    counted = frozenset(re.findall(r"\{(step|epoch)", pattern.name))
    return pattern.setting, pattern.folder, posixpath.dirname(pattern.name), counted


def _goes_with(chosen: CodeSave, other: CodeSave) -> bool:
    """Whether two saves belong to one checkpoint: the code makes them in the same file, and equally often."""
    if chosen.is_folder or other.is_folder or other.score < chosen.score - 1:
        return False
    return chosen.cadence == other.cadence and chosen.site.scope.file == other.site.scope.file


def _total(
    reach: Reach, values: Values, chosen: CodeSave | None, row: Framework | None, coded: dict[str, tuple[object, str]]
) -> Span | None:
    """How long the script trains: by the typed command, or else by its loops, or else by settings with usual names."""
    spans = list(_bounds(reach, values, chosen))
    bounding = {span.setting.name for span in spans if span.setting is not None}
    named = _named_total(values.settings, row, coded)
    if named is not None and (named.setting is None or named.setting.name not in bounding):
        spans.append(named)
    best = _best(spans)
    return next((span for span in best if span.unit == "step"), next(iter(best), None))


def _best(spans: list[Span]) -> list[Span]:
    """Returns the lengths that the command states. If it states none, returns those with a known number, else all."""
    typed = [span for span in spans if span.setting is not None and span.setting.typed is not None and span.count]
    return typed or [span for span in spans if span.count] or spans


def _bounds(reach: Reach, values: Values, chosen: CodeSave | None) -> Iterator[Span]:
    """The ends of the loops around the save, and around calls of backward."""
    sites = [chosen.site] if chosen is not None else []
    sites += [*reach.by_name.get("backward", [])[:3], *reach.by_name.get("value_and_grad", [])[:1]]
    loops: dict[ast.stmt, Site] = {}
    for inner in sites:
        for statement, around in around_of(reach, inner):
            if isinstance(statement, ast.For | ast.While):
                loops[statement] = around
                if loop_unit(values, statement, around.scope) == "epoch":
                    break  # a loop around that of the epochs repeats the whole training
    for loop, site in loops.items():
        for kind, expr, begin in _ends(values, loop, site):
            first = ast.unparse(begin) if begin is not None else ""
            from_one = bool(re.search(r"(^|\+ )1$", first))
            if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add) and literal(expr.right) == 1:
                expr, from_one = expr.left, False
            number, setting = values.quantity(expr, site.scope)
            if setting is not None:
                yield Span.from_setting(setting, kind)
            elif number is not None and number > 1:
                yield Span(unit=kind, count=number - from_one, where=f"{site.scope.file}:{loop.lineno}")


def _ends(values: Values, loop: ast.stmt, site: Site) -> Iterator[tuple[Kind, ast.expr, ast.expr | None]]:
    """Yields each bound of a loop (its range, its condition, or a test that leaves it), what the loop counts, and where
    the count begins.
    """
    kind = loop_unit(values, loop, site.scope)
    if isinstance(loop, ast.For) and kind in ("step", "epoch"):
        listed = [loop.iter, *(node for node, _ in values.bound(dotted(loop.iter), loop.iter, site.scope))]
        ranges = [
            range_call for expr in listed if isinstance(expr, ast.expr) and (range_call := loop_range(expr)) is not None
        ]
        for arguments in (call.args for call in ranges[:1]):  # the range of a progress bar with a name counts too
            yield kind, arguments[:2][-1], arguments[0] if len(arguments) > 1 else None
    leaving = [statement for statement in getattr(loop, "body", []) if isinstance(statement, ast.If)]
    tests = [
        statement.test
        for statement in leaving
        if any(isinstance(inner, ast.Break | ast.Return) for inner in statement.body)
    ]
    for node in (node for test in [*filter(None, [getattr(loop, "test", None)]), *tests] for node in walk(test)):
        if isinstance(node, ast.Compare) and isinstance(node.ops[-1], ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq):
            counted = values.kinds(node.left, site.scope)
            if counted in ("step", "epoch"):
                yield counted, node.comparators[0], None


def _named_total(settings: ScriptSettings, row: Framework | None, coded: dict[str, tuple[object, str]]) -> Span | None:
    """The length by settings with usual names; the framework's names come first."""
    spans: list[Span] = []
    kinds: tuple[tuple[Kind, tuple[str, ...], tuple[str, ...]], ...] = (
        ("step", row.steps if row else (), STEPS), ("epoch", row.epochs if row else (), EPOCHS),
    )  # fmt: skip
    owns = [name for _, own, _ in kinds for name in own]
    is_own = any(name in coded for name in owns) or any(option.count for option in settings.several(owns))
    for kind, own, names in kinds:
        for value, where in (coded[key] for key in own if key in coded):
            if isinstance(value, Setting):
                spans.append(Span(unit=kind, count=value.count, where=value.where, setting=value))
            elif str(value).isdigit() and int(str(value)) > 0:
                spans.append(Span(unit=kind, count=int(str(value)), where=where))
        if (setting := settings.first(own if is_own else (*own, *names))) is not None:
            spans.append(Span.from_setting(setting, kind))
    return next(iter(_best(spans)), None)


def _read_calls(facts: ScriptFacts, reach: Reach) -> None:
    """Adds facts that single calls show: signals, process groups, trainers that start over, W&B."""
    is_trainers = facts.framework is not None and facts.framework.format == "hf-trainer"
    goes_on: Finding | None = None
    finds_it = False
    for site in reach.sites:
        written = [ast.unparse(argument) for argument in site.call.args[:2]]
        if site.name == "signal" and len(written) > 1 and "SIG_" not in written[1]:
            if (signal := written[0].rpartition(".")[2]) in SIGNALS:
                facts.signals.append(Finding(signal, site.where))
        elif key := environment_key(site.call):
            facts.runs_alone |= key in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
            if key == "GPUFLEET_RESUME_FROM":
                facts.reads_itself = facts.reads_itself or Finding("it reads $GPUFLEET_RESUME_FROM", site.where)
        elif site.name == "init_process_group":
            facts.joins = facts.joins or Finding("it joins a process group", site.where)
        elif is_trainers and site.name == "train" and re.search("checkpoint|resume", ast.unparse(site.call)):
            finds_it = finds_it or literal(site.keyword("resume_from_checkpoint")) is True
            goes_on = goes_on or Finding("it gives train() its newest checkpoint", site.where)
        elif re.search(r"trainer\.train\(\)$", ast.unparse(site.call), re.IGNORECASE) and is_trainers:
            facts.bare_resume = facts.bare_resume or Finding("train() is given no checkpoint", site.where)
    of_row = facts.framework is not None and facts.resume is not None and facts.resume.where == facts.framework.name
    if is_trainers and goes_on is None and of_row:
        facts.resume = None  # its parser takes the words, but the script does not pass them on
    if goes_on is not None:
        facts.bare_resume = None
        facts.reads_itself = facts.reads_itself or goes_on
        facts.resume = None if finds_it else facts.resume
    if any(module.split(".")[0] == "wandb" for module in reach.imported):
        naming = (file for file in reach.files if "wandb" in reach.names(file).imports)
        facts.wandb = Finding("it imports wandb", next(naming, reach.entry))
