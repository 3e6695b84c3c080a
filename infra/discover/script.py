"""What a folder of training code, and the command that starts it, say of its training: read, never run.

Each finding has its place, so that the file written from it can say why. What is not found is left open, never guessed.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpufleet.infra.discover.frameworks import Framework, framework_of
from gpufleet.infra.discover.lines import PrintedLine, find_lines
from gpufleet.infra.discover.reach import Reach, Site, called, dotted, walk
from gpufleet.infra.discover.resume import find_resume, shown
from gpufleet.infra.discover.saves import (
    CodeSave,
    Pattern,
    SaveCadence,
    Saves,
    around_of,
    find_saves,
    loop_unit,
    pattern,
)
from gpufleet.infra.discover.settings import ScriptSettings, Setting, declared, literal, of_file
from gpufleet.infra.discover.source import CodeFolder, Finding
from gpufleet.infra.discover.start import StartedProgram, dockerfile_command, starts
from gpufleet.infra.discover.values import Hole, Kind, Values, loop_range
from gpufleet.infra.errors import GpufleetError
from gpufleet.job.spec.command import FORMATS, STEP_COUNTS

MOST_LOOKED_INTO = 12  # files that may be the one that trains, where no command says it
# What settings are called that a framework or a reader of the code looks for, where no use of them says more.
OUT = (
    *(
        "output_dir",
        "out_dir",
        "outdir",
        "checkpoint_dir",
        "ckpt_dir",
        "save_dir",
        "checkpoints_dir",
        "work_dir",
        "workdir",
    ),
    *(
        "output_path",
        "checkpoint_path",
        "output",
        "out",
        "logdir",
        "log_dir",
        "save_path",
        "dump_dir",
        "results_dir",
        "log_folder",
    ),
)
EPOCHS = (
    "num_train_epochs",
    "num_epochs",
    "max_epochs",
    "epochs",
    "n_epochs",
    "training_epochs",
    "total_epochs",
    "nepochs",
    "epoch",
)
STEPS = (
    *STEP_COUNTS,
    "max_train_steps",
    "max_iter",
    "num_iters",
    "total_timesteps",
    "timesteps",
    "num_train_steps",
    "train_iters",
    "niter",
)
DEVICE, COMPILE, BACKEND = (
    ("device", "device_type"),
    ("compile", "torch_compile"),
    ("backend", "dist_backend", "ddp_backend"),
)
LOG_EVERY = ("log_interval", "logging_steps", "log_every", "print_freq", "log_freq")
SIGNALS = ("SIGTERM", "SIGUSR1", "SIGUSR2")  # SIGINT is for a keyboard


@dataclass(frozen=True, kw_only=True, slots=True)
class Total:
    """How long it trains, in steps or epochs, and the setting that says so."""

    unit: Kind
    count: int | None
    where: str
    setting: Setting | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointFacts:
    """What one checkpoint is, as the code says it."""

    names: tuple[str, ...]
    place: Pattern  # of the first of them
    where: str
    cadence: SaveCadence | None


@dataclass(slots=True)
class ScriptFacts:
    """All that was found. None or empty: not found."""

    folder: Path
    start: StartedProgram
    settings: ScriptSettings
    framework: Framework | None = None
    checkpoint: CheckpointFacts | None = None
    total: Total | None = None
    lines: list[PrintedLine] = field(default_factory=list)
    resume: Finding | None = None  # the words that go on from a checkpoint
    reads_itself: Finding | None = None  # it looks for a checkpoint by itself
    bare_resume: Finding | None = None  # a trainer's train() that is given no checkpoint
    signals: list[Finding] = field(default_factory=list)
    joins: Finding | None = None  # it joins a process group
    runs_alone: bool = False  # it does without a launcher, which it looks for
    wandb: Finding | None = None
    requirements: str = ""
    saves_else: Finding | None = None  # what it saves that is no checkpoint
    begins_anew: Finding | None = None  # a trial saw that it does not go on
    saves_on_signal: Finding | None = None  # a trial saw it: true or false
    complete: Finding | None = None  # a trial saw which file of a checkpoint is written last
    size: Finding | None = None  # a trial saw how large one is, in GB
    coded: dict[str, tuple[object, str]] = field(default_factory=dict)  # keywords of a framework's calls, with places

    @property
    def names(self) -> tuple[str, ...]:
        """What one checkpoint is called, by the code, else by its framework; empty: nobody says."""
        if self.checkpoint is not None or self.framework is None:
            return self.checkpoint.names if self.checkpoint else ()
        row = self.framework
        named = str(self.coded.get(row.naming, ("", ""))[0]) if row.naming else ""
        setting = self.settings.first([row.naming]) if row.naming and not named else None
        named = str(setting.value or "") if setting is not None else named
        if named:
            return (_named_by_user(named, self.coded, self.settings),)
        return row.each or (FORMATS[row.format].each if row.format else ())

    @property
    def script(self) -> str:
        """The file that starts; empty for a program of a package."""
        return self.start.script


def look(folder: Path, command: str = "") -> ScriptFacts:
    """What the folder, and the command where the user gave one, say. Raises GpufleetError."""
    code = CodeFolder(folder)
    if not command and not code.python:
        raise GpufleetError(f"--code: no Python file in {folder}; say how it is started: --command '...'")
    begun = starts(code, command) if command else [_entry(code)]
    if not begun:
        raise GpufleetError(
            f"--command: {command!r} starts no program that can be found; write it as you would type it"
        )
    start, reach = _which_trains(code, begun)
    requirements = next((n for n in ("requirements.txt", "pyproject.toml", "setup.py") if n in code.files), "")
    if reach is None:
        row = framework_of(None, start)
        named = [each for name in _program_files(code, start) for each in of_file(code, name, "")]
        settings = ScriptSettings(named, start)
        return ScriptFacts(
            folder=folder, start=start, settings=settings, framework=row, requirements=requirements,
            total=_named_total(settings, row, {}),
        )  # fmt: skip
    row = framework_of(reach, start)
    settings = ScriptSettings([*declared(reach, start, row.form if row else ""), *_of_row(row, reach)], start)
    row = row or framework_of(reach, start)  # a configuration may name classes of the folder
    values = Values(reach, settings)
    saves = find_saves(reach, values)
    if not any(each.score > 0 for each in saves.found) and row is None:
        reach.widen()
        saves = find_saves(reach, values)
    found = ScriptFacts(folder=folder, start=start, settings=settings, framework=row, requirements=requirements)
    found.coded = dict(_coded(reach, values, row))
    found.checkpoint = _checkpoint(saves, values, row)
    chosen = next((each for each in saves.found if found.checkpoint and each.where == found.checkpoint.where), None)
    found.total = _total(reach, values, chosen, row, found.coded)
    found.lines = find_lines(reach, values)
    found.resume, found.reads_itself = find_resume(reach, values, saves, chosen, row)
    found.saves_else = next((Finding(shown(each), each.where) for each in saves.found if each.score > -1), None)
    _read_calls(found, reach)
    return found


def _named_by_user(text: str, coded: dict[str, tuple[object, str]], settings: ScriptSettings) -> str:
    """A name as Lightning's ModelCheckpoint takes it, as a pattern: it writes `epoch=` before each figure by itself."""
    asked = coded.get("auto_insert_metric_name", (None, ""))[0]
    setting = settings.first(["auto_insert_metric_name"])
    inserts = str(asked if asked is not None else setting.value if setting is not None else True) != "False"

    def one(match: re.Match[str]) -> str:
        figure = match[0] if match[1] in ("epoch", "step") else "*"
        return f"{match[1]}={figure}" if inserts and not text[: match.start()].endswith("=") else figure

    return "*" + re.sub(r"\{([\w/]+)(:[^}]*)?\}", one, text) + "*.ckpt" if "{" in text else text + "*.ckpt"


def _which_trains(code: CodeFolder, begun: list[StartedProgram]) -> tuple[StartedProgram, Reach | None]:
    """The start among several that trains, with what it runs; the first where none is seen to."""
    own = [each for each in begun if each.script]
    own.sort(key=lambda each: not each.launcher)
    reaches = ((each, Reach(code, each.roots, each.script, each.function)) for each in own[:MOST_LOOKED_INTO])
    for each, reach in reaches:
        if trains(reach) or framework_of(reach, each) is not None:
            return each, reach
    known = next((each for each in begun if not each.script and framework_of(None, each)), None)
    if known is not None or not own:
        return known or begun[0], None
    return own[0], Reach(code, own[0].roots, own[0].script, own[0].function)


def trains(reach: Reach) -> bool:
    """Whether what is reached trains: it goes backward, or has something fitted or trained."""
    names = set(reach.by_name)
    return bool(
        names & {"backward", "fit", "value_and_grad", "grad", "learn", "train", "train_step", "launch_training"}
    )


def _entry(code: CodeFolder) -> StartedProgram:
    """The program of the folder that trains: what its image starts, else the one file that does. Raises GpufleetError
    where several may be meant, and names them.
    """
    if (command := dockerfile_command(code)) and (found := [each for each in starts(code, command) if each.script]):
        start, reach = _which_trains(code, found)
        if reach is not None and trains(reach):
            return replace(start, typed=command)
    able = [name for name in code.python if not _SUPPORT.search(f"/{name.lower()}")]
    able = sorted(able or code.python, key=lambda name: (-_named_like_training(name), name.count("/"), name))
    main = (
        [name for name in able if "__main__" in code.text(name)] or [n for n in able if _runs_at_once(code, n)] or able
    )
    candidates, found_training = main[:MOST_LOOKED_INTO], list[tuple[float, str]]()
    for name in candidates:
        start = StartedProgram(script=name, roots=tuple(dict.fromkeys((posixpath.dirname(name), "", "src"))))
        reach = Reach(code, start.roots, name)
        says_so = bool(re.search(r"train|fit|optim|loss", f"{name} {code.text(name)}"))
        sole = len(code.python) == 1 and says_so
        if trains(reach) or framework_of(reach, start) is not None or sole:
            found_training.append((_named_like_training(name) - 0.5 * name.count("/"), name))
    found_training.sort(key=lambda each: -each[0])
    exact = [name for name in candidates if _named_like_training(name) >= 2]
    if not found_training and len(exact) == 1:
        found_training = [(0.0, exact[0])]
    if not found_training or (len(found_training) > 1 and found_training[0][0] == found_training[1][0]):
        some = ", ".join(name for _, name in found_training[:6]) or "none of them is seen to train"
        raise GpufleetError(
            f"--code: which file in {code.path} trains is not clear ({some}); say it: --command 'python FILE.py ...'"
        )
    name = found_training[0][1]
    return StartedProgram(
        script=name, typed=f"python {name}", roots=tuple(dict.fromkeys((posixpath.dirname(name), "", "src")))
    )


_SUPPORT = re.compile(
    r"/(tests?|docs?|bench(marks?)?|scripts/convert|tools/convert)/|/(test_|setup\.py|conftest)|eval|infer|sample|convert|export|demo"
)


def _named_like_training(name: str) -> float:
    stem = Path(name).stem.lower()
    exact = stem in ("train", "main", "main_train", "pretrain", "finetune", "run_training", "run_train")
    return 2.0 * exact + 1.0 * bool(re.search(r"train|finetune|sft|run_|main", stem))


def _runs_at_once(code: CodeFolder, name: str) -> bool:
    tree = code.tree(name)
    return tree is not None and any(
        isinstance(each, ast.Expr | ast.For | ast.While) and not isinstance(getattr(each, "value", None), ast.Constant)
        for each in tree.body
    )


def _program_files(code: CodeFolder, start: StartedProgram) -> Iterator[str]:
    for word in start.words:
        if (name := posixpath.normpath(word.rpartition("=")[2])) in code.files and name.endswith(
            (".yaml", ".yml", ".toml")
        ):
            yield name


def _of_row(row: Framework | None, reach: Reach) -> Iterator[Setting]:
    """The settings of a framework's own parser, where the script parses them by it."""
    parsers = {"HfArgumentParser", "TrlParser", "H4ArgumentParser", "LightningCLI"} & set(reach.by_name)
    if row is None or not parsers:
        return
    style = "--trainer.{name} {{}}" if "LightningCLI" in parsers else "--{name} {{}}"
    for name in (*row.out, *row.steps, *row.epochs, *row.every, *filter(None, [row.resume_setting]), "logging_steps"):
        default = {"save_steps": 500, "num_train_epochs": 3}.get(name)
        yield Setting(name=name, form=style.format(name=name), default=default, where=row.name)


def _coded(reach: Reach, values: Values, row: Framework | None) -> Iterator[tuple[str, tuple[object, str]]]:
    """The keywords that the script gives to a framework, as numbers and texts, or as the setting that they are."""
    for name in row.uses if row is not None else ():
        for site in reach.by_name.get(name, []):
            for each in site.call.keywords:
                for parts in values.resolve(each.value, site.scope)[:1]:
                    if each.arg and len(parts) == 1:
                        part = parts[0]
                        if isinstance(part, Hole):
                            setting = values.settings.find(part.name) if part.kind == "setting" else None
                            if setting is not None:
                                yield each.arg, (setting, site.where)
                        else:
                            yield each.arg, (part, site.where)
                    elif each.arg and all(isinstance(part, str) for part in parts):
                        yield each.arg, ("".join(map(str, parts)), site.where)


def _checkpoint(saves: Saves, values: Values, row: Framework | None) -> CheckpointFacts | None:
    """The checkpoint that a resume needs, with what is saved beside it; None where the code names none."""
    if row is not None and not row.named and row.each and not any(each.score >= 6 for each in saves.found):
        return None
    for chosen in saves.found:
        place = pattern(chosen, values)
        is_at_the_end = (
            not chosen.is_inside_loop and chosen.cadence is None and "{" not in place.name if place else True
        )
        if place is None or is_at_the_end or chosen.score < 1.5 or (row is not None and row.format and not row.named):
            continue
        names = [place.name]
        for other in saves.found:
            beside = pattern(other, values)
            if beside is None or other is chosen or not _goes_with(chosen, other) or beside.name in names:
                continue
            if posixpath.dirname(beside.name) != posixpath.dirname(place.name):
                continue
            if (
                (beside.setting, beside.folder) == (place.setting, place.folder)
                and "{" in place.name
                and "{" in beside.name
            ):
                names.append(beside.name)
        return CheckpointFacts(names=tuple(names[:4]), place=place, where=chosen.where, cadence=chosen.cadence)
    return None


def _goes_with(chosen: CodeSave, other: CodeSave) -> bool:
    """Whether two saves are of one checkpoint: in the same block of one function, as often as each other."""
    if chosen.is_folder or other.is_folder or other.score < chosen.score - 1 or chosen.cadence != other.cadence:
        return False
    return chosen.site.scope.file == other.site.scope.file


def _total(
    reach: Reach, values: Values, chosen: CodeSave | None, row: Framework | None, coded: dict[str, tuple[object, str]]
) -> Total | None:
    """How long it trains: what was typed, then what bounds its loops, then settings by their names."""
    found = list(_bounds(reach, values, chosen))
    bounding = {each.setting.name for each in found if each.setting is not None}
    named = _named_total(values.settings, row, coded)
    if named is not None and not (named.setting is not None and named.setting.name in bounding):
        found.append(named)
    typed = [each for each in found if each.setting is not None and each.setting.typed is not None and each.count]
    counted = [each for each in found if each.count is not None]
    for several in (typed, counted, found):
        if several:
            return next((each for each in several if each.unit == "step"), several[0])
    return None


def _bounds(reach: Reach, values: Values, chosen: CodeSave | None) -> Iterator[Total]:
    """The ends of the loops around the save, and around what goes backward."""
    sites = [
        *([chosen.site] if chosen is not None else []),
        *reach.by_name.get("backward", [])[:3],
        *reach.by_name.get("value_and_grad", [])[:1],
    ]
    seen = set[ast.stmt]()
    for site in sites:
        for statement, at in around_of(reach, site):
            if statement in seen:
                continue
            seen.add(statement)
            unit = loop_unit(values, statement, at.scope)
            for kind, expr, begin in _ends(values, statement, at, unit):
                yield from _bound(values, kind, expr, begin, at, statement)


def _ends(
    values: Values, statement: ast.stmt, site: Site, unit: Kind | None
) -> Iterator[tuple[Kind, ast.expr, ast.expr | None]]:
    if isinstance(statement, ast.For) and unit in ("step", "epoch"):
        loops = [loop_range(statement)]
        if loops[0] is None and isinstance(statement.iter, ast.Name):  # bar = tqdm(range(...))
            for function in site.scope.functions[-1:]:
                for node in walk(function):
                    if isinstance(node, ast.Assign) and dotted(node.targets[0]) == statement.iter.id:
                        loops = [loop_range(ast.For(target=statement.target, iter=node.value, body=[], orelse=[]))]
        for each in filter(None, loops):
            args = each.args
            yield unit, args[1] if len(args) > 1 else args[0], args[0] if len(args) > 1 else None
    if isinstance(statement, ast.While | ast.For):
        tests = [statement.test] if isinstance(statement, ast.While) else []
        tests += [
            n.test
            for n in statement.body
            if isinstance(n, ast.If) and any(isinstance(b, ast.Break | ast.Return) for b in n.body)
        ]
        for test in tests:
            for node in walk(test):
                if (
                    isinstance(node, ast.Compare)
                    and len(node.ops) == 1
                    and isinstance(node.ops[0], ast.Lt | ast.LtE | ast.Gt | ast.GtE | ast.Eq)
                ):
                    kinds = [
                        p.kind for parts in values.resolve(node.left, site.scope) for p in parts if isinstance(p, Hole)
                    ]
                    kind = next((each for each in kinds if each in ("step", "epoch")), None)
                    if kind is not None:
                        yield kind, node.comparators[0], None


def _bound(
    values: Values, kind: Kind, expr: ast.expr, begin: ast.expr | None, site: Site, statement: ast.stmt
) -> Iterator[Total]:
    where = f"{site.scope.file}:{statement.lineno}"
    from_one = begin is not None and bool(re.search(r"(^|\+ )1$", ast.unparse(begin)))
    if isinstance(expr, ast.BinOp) and isinstance(expr.op, ast.Add) and literal(expr.right) == 1:
        expr, from_one = expr.left, False
    number, setting = values.quantity(expr, site.scope)
    if setting is not None:
        yield Total(unit=kind, count=setting.count, where=setting.place, setting=setting)
    elif number is not None and number > 1:
        yield Total(unit=kind, count=number - from_one, where=where)


def _named_total(settings: ScriptSettings, row: Framework | None, coded: dict[str, tuple[object, str]]) -> Total | None:
    """By the names that settings have, those of the framework first."""
    names: list[tuple[Kind, tuple[str, ...]]] = [
        ("step", (*(row.steps if row else ()), *STEPS)),
        ("epoch", (*(row.epochs if row else ()), *EPOCHS)),
    ]
    found = []
    for kind, several in names:
        for each in several:
            if row is not None and each in coded and each in (*row.steps, *row.epochs):
                value, where = coded[each]
                if isinstance(value, Setting):
                    found.append(Total(unit=kind, count=value.count, where=value.where, setting=value))
                elif str(value).isdigit() and int(str(value)) > 0:
                    found.append(Total(unit=kind, count=int(str(value)), where=where))
        if (setting := settings.first(several)) is not None:
            where = "your command" if setting.typed is not None else setting.where
            found.append(Total(unit=kind, count=setting.count, where=where, setting=setting))
    typed = [each for each in found if each.setting is not None and each.setting.typed is not None and each.count]
    counted = [each for each in found if each.count]
    return next(iter([*typed, *counted, *found]), None)


def _read_calls(found: ScriptFacts, reach: Reach) -> None:
    """What single calls say: signals, process groups, trainers that begin anew, W&B."""
    for site in reach.sites:
        name = called(site.call)
        if (
            name == "signal"
            and len(site.call.args) > 1
            and (signal := ast.unparse(site.call.args[0]).rpartition(".")[2]) in SIGNALS
        ) and "SIG_" not in ast.unparse(site.call.args[1]):
            found.signals.append(Finding(signal, site.where))
        if (
            name in ("get", "getenv")
            and site.call.args
            and literal(site.call.args[0]) in ("RANK", "LOCAL_RANK", "WORLD_SIZE")
        ):
            found.runs_alone = True
        if name == "init_process_group" and found.joins is None:
            found.joins = Finding("it joins a process group", site.where)
        bare = name == "train" and not site.call.args and not site.call.keywords
        is_trainers = found.framework is not None and found.framework.format == "hf-trainer"
        if bare and is_trainers and "trainer" in ast.unparse(site.call.func).lower():
            found.bare_resume = found.bare_resume or Finding("train() is given no checkpoint", site.where)
    if any(each.split(".")[0] == "wandb" for each in reach.imported):
        naming = (file for file in reach.files if (names := reach.names(file)) is not None and "wandb" in names.imports)
        found.wandb = Finding("it imports wandb", next(naming, reach.entry))
