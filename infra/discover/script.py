"""Reads a folder of training code without running it: which script trains, how it saves, how it tells its step.

Syntax trees only. Everything found has its place, so that the file written from it can say why; what is not found is
left open, never guessed. Raises GpufleetError where there is nothing to read.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.code import files_in
from gpufleet.job.contract.environment import COMMAND
from gpufleet.job.kind.command import STEP, FormatName

MOST_FILES, MOST_BYTES = 2_000, 1_000_000  # a repository's Python; larger files are data or generated
_SKIPPED = {"node_modules", "site-packages", "build", "dist", ".tox"}

# What scripts call these things. A name counts with - for _ and in any case.
OUT = ("out_dir", "output_dir", "outdir", "checkpoint_dir", "ckpt_dir", "save_dir", "checkpoints_dir", "output", "out")
RESUME = (
    "resume_from_checkpoint",
    "resume_from_step",
    "resume_from",
    "ckpt_path",
    "init_from",
    "resume",
    "load_checkpoint",
)
LOG_EVERY = ("log_interval", "logging_steps", "log_every")
DEVICE, COMPILE = ("device", "device_type"), ("compile", "torch_compile")
BACKEND = ("backend", "dist_backend", "ddp_backend")

_STEP_LIKE = re.compile(r"(?:^|_|\b)(global_step|step|steps|iter|iter_num|iteration|it|i_step)(?:$|\b|_num|_idx)")
_NUMBER = r"[-+.\deE]+"
SIGNALS = ("SIGTERM", "SIGINT", "SIGUSR1", "SIGUSR2")
_SAID_BY = {"print", "print0", "info", "log", "write", "echo", "warning", "debug"}


@dataclass(frozen=True, slots=True)
class ScriptFinding:
    """Something that the code says, and where."""

    value: str
    where: str  # train.py:42


@dataclass(frozen=True, slots=True)
class ScriptArgument:
    """A setting of the script: how it is written on a command line, and its default where that is a literal."""

    written: str  # --max-steps, or --max_iters= where the value belongs to the word
    default: object
    where: str

    def with_value(self, value: object) -> str:
        """The argument with this value, as a command line has it."""
        return f"{self.written}{value}" if self.written.endswith("=") else f"{self.written} {value}"


@dataclass(slots=True)
class ScriptFacts:
    """All that was found. None or empty: not found."""

    folder: Path
    script: str = ""  # the entry, below the folder
    module: bool = False  # it was started as `python -m`
    framework: FormatName | None = None
    why: ScriptFinding | None = None  # what tells the framework
    launcher: ScriptFinding | None = None  # why it wants torchrun
    runs_alone: bool = False  # it does without a launcher, which it looks for
    arguments: Mapping[str, ScriptArgument] = field(default_factory=dict)  # by plain name
    saves: ScriptFinding | None = None  # the pattern of one checkpoint's name
    every: ScriptFinding | None = None  # what its step is divided by where it saves: a number, or a setting's name
    counted: ScriptFinding | None = None  # its steps, where a loop has a plain number of them
    writes_there: ScriptFinding | None = None  # it asks where its checkpoints go
    loads: ScriptFinding | None = None  # it reads a checkpoint by itself
    progress: list[ScriptFinding] = field(default_factory=list)  # regular expressions
    bare_resume: ScriptFinding | None = None  # Trainer.train() that passes no checkpoint
    handles_signal: ScriptFinding | None = None
    wandb: ScriptFinding | None = None
    requirements: str = ""

    def argument(self, names: tuple[str, ...]) -> ScriptArgument | None:
        """The first of these settings that the script has."""
        return next((self.arguments[name] for name in names if name in self.arguments), None)


def look(folder: Path, command: str = "") -> ScriptFacts:
    """What the folder, and the command where the user gave one, say."""
    if not folder.is_dir():
        raise GpufleetError(f"--code: {folder} is no folder; name the one that holds your training script")
    trees = dict(_parsed(folder))
    if not trees:
        raise GpufleetError(
            f"--code: no Python file that can be read in {folder}; name the folder that holds your script"
        )
    found = ScriptFacts(folder=folder)
    found.script, found.module = _named(command, trees) if command else (_entry(trees), False)
    if not found.script:
        raise GpufleetError(
            f"--code: which file in {folder} trains is not clear; say it: --command 'python FILE.py ...'"
        )
    found.requirements = next((n for n in ("requirements.txt", "pyproject.toml") if (folder / n).is_file()), "")
    own = trees.get(found.script)
    near = {found.script: own} if own is not None else {}
    for name, tree in [*near.items(), *trees.items()]:
        _read(found, name, tree, entry=name == found.script)
    found.arguments = _arguments(near, found)
    _from_config_files(found, command)
    if "torchrun" in command:
        found.launcher = ScriptFinding("torchrun", "your command")
    return found


def _parsed(folder: Path) -> Iterator[tuple[str, ast.Module]]:
    """Each Python file that would be shipped, but for those of installed packages."""
    shipped = sorted((name, path) for name, path in files_in(folder) if name.endswith(".py"))
    for name, path in [each for each in shipped if not _SKIPPED & set(Path(each[0]).parts[:-1])][:MOST_FILES]:
        try:
            if path.stat().st_size <= MOST_BYTES:
                yield name, ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue


def _named(command: str, trees: Mapping[str, ast.Module]) -> tuple[str, bool]:
    """The script that a command runs, below the folder, and whether as a module; empty for one of a package."""
    try:
        words = shlex.split(command)
    except ValueError as error:
        raise GpufleetError(f"--command: {error}") from None
    for word, following in zip(words, [*words[1:], ""], strict=True):
        if word == "-m" and (name := following.replace(".", "/") + ".py") in trees:
            return name, True
        if word.endswith(".py") and word.removeprefix("./") in trees:
            return word.removeprefix("./"), False
        if word.endswith(".py"):
            raise GpufleetError(f"--command: {word} is not in the folder; it has {', '.join(sorted(trees)[:8])}")
    return next(iter(trees)), False


def _entry(trees: Mapping[str, ast.Module]) -> str:
    """The file that looks most like the one that trains, a sole one at all; empty where two look alike or none does."""
    scores = sorted(((_looks_like_training(name, tree), name) for name, tree in trees.items()), reverse=True)
    (best, name), second = scores[0], scores[1][0] if len(scores) > 1 else -1.0
    return name if best > (len(scores) > 1) and best > second else ""


def _looks_like_training(name: str, tree: ast.Module) -> float:
    """Higher for a script with a training loop in it, near the top of the folder."""
    stem, depth = Path(name).stem.lower(), len(Path(name).parts)
    names = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    score = 3.0 * (stem in ("train", "main_train", "pretrain", "finetune", "run_clm", "base_train", "sft"))
    score += 1.5 * any(word in stem for word in ("train", "finetune", "sft", "run_")) + 0.5 * (stem == "main")
    score += 1.0 * ({"backward", "step", "zero_grad"} <= names) + 1.0 * bool({"train", "fit"} & names)
    score -= 3.0 * any(
        word in name.lower() for word in ("test", "eval", "sample", "infer", "setup", "conftest", "bench")
    )
    return score - 0.25 * depth


def _read(found: ScriptFacts, name: str, tree: ast.Module, *, entry: bool) -> None:
    """Takes in one file; the entry is read first, and what it says stands."""
    local = dict(_assigned(tree))
    imports = set(_imports(tree))
    for node in ast.walk(tree):
        if entry and isinstance(node, ast.For) and found.counted is None:
            found.counted = _counted(node, local, name)
        if isinstance(node, ast.Constant) and node.value == COMMAND["checkpoints"] and found.writes_there is None:
            found.writes_there = ScriptFinding(COMMAND["checkpoints"], f"{name}:{node.lineno}")
        if not isinstance(node, ast.Call):
            continue
        where, called = f"{name}:{node.lineno}", _called(node)
        if called == "save" and _receiver(node) in ("torch", "t") and found.saves is None:
            place = node.args[1] if len(node.args) > 1 else _keyword(node, "f")
            if place is not None and (pattern := _pattern(place, local)):
                found.saves = ScriptFinding(pattern, where)
                found.every = _cadence(tree, node, name)
        if called == "load" and _receiver(node) in ("torch", "t") and entry and found.loads is None:
            found.loads = ScriptFinding("it reads a checkpoint by itself", where)
        if called in _SAID_BY and node.args and entry:
            for regex in _regexes(node):
                if regex not in [each.value for each in found.progress]:
                    found.progress.append(ScriptFinding(regex, where))
        if called == "signal" and node.args and found.handles_signal is None:
            number = ast.unparse(node.args[0]).rpartition(".")[2]
            found.handles_signal = ScriptFinding(number, where) if number in SIGNALS else None
        if entry and called == "get" and node.args and _literal(node.args[0]) in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
            found.runs_alone = True
        if called == "init_process_group" and found.launcher is None:
            found.launcher = ScriptFinding("it joins a process group", where)
        bare = called == "train" and not node.args and not node.keywords and imports & {"transformers", "trl"}
        if entry and bare and "trainer" in ast.unparse(node.func).lower() and found.bare_resume is None:
            found.bare_resume = ScriptFinding("train() is given no checkpoint", where)
    if found.framework is None and (entry or not found.saves):
        told = _framework(imports, tree, name, entry=entry)
        if told:
            found.framework, found.why = told[0], ScriptFinding(told[1], name)
    if "wandb" in imports and found.wandb is None:
        found.wandb = ScriptFinding("it imports wandb", name)


def _assigned(tree: ast.Module) -> Iterator[tuple[str, ast.expr]]:
    """Names and what they are set to, one by one of `a, b = 1, 2`."""
    assigned = (node for node in ast.walk(tree) if isinstance(node, ast.Assign))
    for target, value in ((target, node.value) for node in assigned for target in node.targets):
        pairs = [(target, value)]
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            pairs = list(zip(target.elts, value.elts, strict=False))
        yield from ((name.id, each) for name, each in pairs if isinstance(name, ast.Name))


def _framework(imports: set[str], tree: ast.Module, name: str, *, entry: bool) -> tuple[FormatName, str] | None:
    names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
    if imports & {"trl", "axolotl"} or ("transformers" in imports and names & {"Trainer", "Seq2SeqTrainer"}):
        return "hf-trainer", "it uses the Trainer of transformers"
    if imports & {"lightning", "pytorch_lightning"} and not imports & {"litgpt"}:
        return "lightning", "it imports Lightning"
    if "litgpt" in imports:
        return "litgpt", "it imports litgpt"
    if "nanochat" in imports and entry:
        return "nanochat", "it imports nanochat"
    dotted = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.ImportFrom | ast.Import)}
    if any("torch.distributed.checkpoint" in each or "torchtitan" in each for each in dotted):
        return "dcp", "it imports torch.distributed.checkpoint"
    return None


def _imports(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (each.name.split(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.split(".")[0]


def _called(node: ast.Call) -> str:
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )


def _receiver(node: ast.Call) -> str:
    of = node.func.value if isinstance(node.func, ast.Attribute) else None
    return of.id if isinstance(of, ast.Name) else ""


def _keyword(node: ast.Call, name: str) -> ast.expr | None:
    return next((each.value for each in node.keywords if each.arg == name), None)


def _pattern(place: ast.expr, local: Mapping[str, ast.expr], depth: int = 0) -> str:
    """The last part of a path as a pattern with {step} and *; empty where that is not clear."""
    if isinstance(place, ast.Name) and depth < 4 and place.id in local:
        return _pattern(local[place.id], local, depth + 1)
    if isinstance(place, ast.Call) and place.args and _called(place) in ("join", "Path", "str", "joinpath"):
        return _pattern(place.args[-1], local, depth + 1)
    if isinstance(place, ast.BinOp) and isinstance(place.op, ast.Div | ast.Add):
        return _pattern(place.right, local, depth + 1)
    if isinstance(place, ast.Constant) and isinstance(place.value, str):
        return place.value.replace("\\", "/").rstrip("/").rpartition("/")[2]
    if isinstance(place, ast.JoinedStr):
        text = "".join(_part(each) for each in place.values)
        return text.rpartition("/")[2] if re.search(r"[A-Za-z]", re.sub(r"\{step[^}]*\}|\*", "", text)) else ""
    return ""


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    assert isinstance(part, ast.FormattedValue)
    if not _is_step(part.value) and "epoch" not in ast.unparse(part.value).lower():
        return "*"
    form = ast.unparse(part.format_spec)[2:-1] if part.format_spec else ""
    return f"{{step:{form}}}" if re.fullmatch(r"0\d+d?", form) else STEP


def _is_step(value: ast.expr) -> bool:
    return bool(_STEP_LIKE.search(ast.unparse(value).lower()))


def _cadence(tree: ast.Module, save: ast.Call, name: str) -> ScriptFinding | None:
    """What stands behind % in the nearest condition around a save."""
    around = [node for node in ast.walk(tree) if isinstance(node, ast.If) and save in ast.walk(node)]
    for condition in sorted(around, key=lambda node: -node.lineno):
        for part in ast.walk(condition.test):
            if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                return ScriptFinding(ast.unparse(part.right).rpartition(".")[2], f"{name}:{condition.lineno}")
    return None


def _counted(loop: ast.For, local: Mapping[str, ast.expr], name: str) -> ScriptFinding | None:
    """The end of a loop over steps, where that is a number."""
    ranges = [node for node in ast.walk(loop.iter) if isinstance(node, ast.Call) and _called(node) == "range"]
    if not _is_step(loop.target) or not ranges or not ranges[0].args:
        return None
    begin, end = (None, *ranges[0].args)[-2:] if len(ranges[0].args) < 3 else ranges[0].args[:2]
    value = _literal(local.get(end.id) if isinstance(end, ast.Name) else end)
    if type(value) is not int or value <= 0:
        return None
    from_one = begin is not None and re.search(r"(^|\+ )1$", ast.unparse(begin))
    return ScriptFinding(str(value - 1 if from_one else value), f"{name}:{loop.lineno}")


def _regexes(call: ast.Call) -> Iterator[str]:
    """A regular expression for each formatted text of a call that tells a step and a loss, or a step alone."""
    for text in call.args[:1]:
        if isinstance(text, ast.JoinedStr):
            parts = text.values
        elif isinstance(text, ast.BinOp) and isinstance(text.op, ast.Mod) and isinstance(text.left, ast.Constant):
            parts = _percent(str(text.left.value), text.right)
        else:
            continue
        if (found := _regex(parts)) != "":
            yield found


def _percent(text: str, values: ast.expr) -> list[ast.expr]:
    """`"step %d" % step` as the parts of an f-string."""
    given = iter(values.elts if isinstance(values, ast.Tuple) else [values])
    parts: list[ast.expr] = []
    for piece in re.split(r"(%[-+ 0#]*\d*(?:\.\d+)?[a-zA-Z])", text):
        if re.fullmatch(r"%[-+ 0#]*\d*(?:\.\d+)?[a-zA-Z]", piece):
            parts.append(ast.FormattedValue(value=next(given, ast.Constant(value="")), conversion=-1))
        else:
            parts.append(ast.Constant(value=piece))
    return parts


def _regex(parts: list[ast.expr]) -> str:
    """The regular expression of one printed line, up to the last figure that means something; empty where a step is all
    that there is of it.
    """
    text, used, last = "", set[str](), 0
    for at, part in enumerate(parts):
        if isinstance(part, ast.Constant):
            text += re.sub(r"\s+", r"\\s+", re.sub(r"([.^$*+?{}\[\]|()\\])", r"\\\1", str(part.value)))
            continue
        assert isinstance(part, ast.FormattedValue)
        before = str(parts[at - 1].value).lower() if at and isinstance(parts[at - 1], ast.Constant) else ""  # type: ignore[attr-defined]
        after = str(parts[at + 1].value) if at + 1 < len(parts) and isinstance(parts[at + 1], ast.Constant) else ""  # type: ignore[attr-defined]
        group = _group(part.value, before, after, used)
        used.add(group)
        digits = r"\d+" if group in ("step", "total") else _NUMBER
        text += (r"\s*" if group and not text.endswith(r"\s+") else "") + (
            f"(?P<{group}>{digits})" if group else r".*?"
        )
        last = len(text) if group else last
    if "step" not in used or not used & {"loss", "val", "total", "step_ms"}:
        return ""
    return text[:last]


def _group(value: ast.expr, before: str, after: str, used: set[str]) -> str:
    """What a figure of a line is, by its name and by the words around it; empty: nothing that is asked for."""
    named = ast.unparse(value).lower()
    near = before.rstrip(" :=|([")[-24:]
    if "step" not in used and _is_step(value) and not re.search(r"max|total|num_", named):
        return "step"
    if (
        "total" not in used
        and "step" in used
        and before.endswith("/")
        and re.search(r"max|total|num|steps|iter", named)
    ):
        return "total"
    if re.search(r"\bval\w*|valid", named) and "loss" in named + near and "val" not in used:
        return "val"
    if "loss" in named + near and not re.search(r"val|eval|best", named + near) and "loss" not in used:
        return "loss"
    if re.match(r"\s*ms\b", after) and re.search(r"dt|time|ms|elapsed", named + near) and "step_ms" not in used:
        return "step_ms"
    return ""


def _arguments(near: Mapping[str, ast.Module], found: ScriptFacts) -> dict[str, ScriptArgument]:
    """The script's own settings by plain name: of argparse, click, or a configurator that overrides module values."""
    settings: dict[str, ScriptArgument] = {}
    for name, tree in near.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _called(node) in ("add_argument", "option") and node.args:
                written = [a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")]
                if written:
                    plain = str(written[0])[2:].replace("-", "_").lower()
                    flag = _literal(_keyword(node, "action")) == "store_true"
                    default = _literal(_keyword(node, "default"))
                    settings.setdefault(
                        plain, ScriptArgument(str(written[0]), True if flag else default, f"{name}:{node.lineno}")
                    )
        if "configurator" in ast.unparse(tree):
            for node in tree.body:
                if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
                    key = node.targets[0].id
                    default = _literal(node.value)
                    settings.setdefault(key, ScriptArgument(f"--{key}=", default, f"{name}:{node.lineno}"))
    if found.framework == "hf-trainer":
        own = ("output_dir", "max_steps", "save_steps", "logging_steps", "resume_from_checkpoint")
        if any(
            "TrainingArguments" in ast.unparse(tree) or "HfArgumentParser" in ast.unparse(tree)
            for tree in near.values()
        ):
            for key in own:
                settings.setdefault(key, ScriptArgument(f"--{key}", None, "TrainingArguments"))
    return settings


def _literal(value: ast.expr | None) -> object:
    try:
        return None if value is None else ast.literal_eval(value)
    except ValueError:
        return None


def _from_config_files(found: ScriptFacts, command: str) -> None:
    """Defaults that Python files named on the command line set anew, as nanoGPT's config/*.py do."""
    for word in command.split():
        path = found.folder / word
        if not word.endswith(".py") or word.removeprefix("./") == found.script or not path.is_file():
            continue
        settings = dict(found.arguments)
        for node in ast.parse(path.read_bytes()).body:
            if (
                isinstance(node, ast.Assign)
                and isinstance(node.targets[0], ast.Name)
                and isinstance(node.value, ast.Constant)
            ):
                key = node.targets[0].id
                if key in settings:
                    settings[key] = ScriptArgument(settings[key].written, node.value.value, f"{word}:{node.lineno}")
        found.arguments = settings
