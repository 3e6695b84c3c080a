"""The settings of a script: from its parser, its dataclasses, its configuration files, and the typed command.

Each setting has its form on the command line, by which `gpufleet new` sets, for example, the output folder. A setting
that exists only in a file has no such form.
"""

from __future__ import annotations

import ast
import operator
import posixpath
import re
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import yaml

from gpufleet.infra.discover.reach import Function, Reach, Scope, Site, called, dotted, walk
from gpufleet.infra.discover.source import CodeFolder
from gpufleet.infra.discover.start import StartedProgram, parts

CONFIG = re.compile(r".*\.(ya?ml|toml|json|py)")
# How libraries declare settings: the called function, the argument of the call that holds the settings, and the form of
# a setting on the command line ({-name} for libraries that write - for _).
_PARSERS = tuple(
    (re.compile(callee), kind, form)
    for callee, kind, form in (
        (r"(.*\.)?add_argument|(rich_|async)?(click\.)?option", "option", ""),
        (r"(.*\.)?DEFINE_\w+", "flag", "--{name}={}"),
        (r"(.*\.)?((Hf|H4)ArgumentParser|TrlParser|add_arguments)|simple_parsing\.parse", "class", "--{name} {}"),
        (r"(.*\.)?(draccus|pyrallis|parser)\.(wrap|parse)", "class", "--{name}={}"),
        (r"(.*\.)?tyro\.cli", "class", "--{-name} {}"),
        (r"(.*\.)?structured", "class", "{name}={}"),
        (r"(fire\.)?Fire|(jsonargparse\.)?(CLI|auto_cli)", "function", "--{name}={}"),
        (r"typer\.run|\w+\.command", "function", "--{-name} {}"),
        (r"(.*\.)?(HParams|(Simple)?Namespace|EasyDict|AttrDict|CfgNode)", "keywords", ""),
    )
)
# By name, the calls after which the command line can override values of configuration files, and the form of that.
_OVERRIDES = {
    "from_cli": "{name}={}", "from_dotlist": "{name}={}", "merge_from_args": "--{name}={}",
    "parse_args_and_config": "--{name} {}", "LightningCLI": "--{name} {}",
}  # fmt: skip
_YACS = ("CfgNode", "CN")
_ARITHMETIC = {ast.Mult: operator.mul, ast.Add: operator.add, ast.Sub: operator.sub, ast.Pow: operator.pow}


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of the script."""

    name: str  # the name with _ for -, and with dots: trainer.max_steps
    form: str  # the form on a command line: "--max-steps {}", "trainer.max_steps={}"; empty if only a file can set it
    default: object = None
    is_flag: bool = False  # the option takes no value
    where: str = ""
    others: tuple[str, ...] = ()  # the option's other names: -n
    is_truth: bool = False  # the option takes true or false
    is_positional: bool = False
    is_environment: bool = False  # an environment variable, written before the command
    is_of_file: bool = False  # a value of a configuration file, which precedes the default in the code
    typed: str | None = None  # the setting's value in the typed command

    @property
    def value(self) -> object:
        """The setting's value in the typed command, or else its default."""
        return self.default if self.typed is None else _plain(self.typed)

    @property
    def count(self) -> int | None:
        """The setting's value as a number of steps or epochs; None if it is not a positive whole number."""
        value = self.value
        is_count = isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e12
        return int(value) if is_count and value == int(value) else None  # type: ignore[call-overload]

    @property
    def word(self) -> str:
        """The setting's name on a command line, such as --max-steps."""
        return self.form.replace("{}", "").rstrip(" =") or self.name

    @property
    def place(self) -> str:
        """The place of the value: in the code, or in the typed command."""
        return self.where if self.typed is None else "your command"

    def with_value(self, value: object) -> str:
        """The words on a command line that give the setting this value."""
        return self.form.format(value).strip()


class ScriptSettings:
    """All settings by name, including settings of the typed command that no code declares."""

    def __init__(self, declared: Iterable[Setting], start: StartedProgram) -> None:
        self._by_name: dict[str, Setting] = {}
        for setting in declared:
            there = self._by_name.setdefault(setting.name, setting)
            if setting.is_of_file and not there.is_of_file:
                of_file = replace(there, default=setting.default, where=setting.where, is_of_file=True)
                self._by_name[setting.name] = replace(of_file, form=setting.form or there.form)
        self._take_typed(list(start.words), start.environment)

    def find(self, name: str) -> Setting | None:
        """The setting of this name, or the only setting whose name ends with `name`; None if there is no such setting.
        A value of a file, `OUTPUT`, is set by the option of that name, `--output`, if there is one.
        """
        there = self._find(name.replace("-", "_"))
        if there is None or there.form:
            return there
        option = self._by_name.get(there.name.rpartition(".")[2].lower())
        if option is None or not option.form:
            return there
        return replace(option, default=there.default, where=there.where)

    def _find(self, name: str) -> Setting | None:
        if name in self._by_name:
            return self._by_name[name]
        last = [setting for key, setting in self._by_name.items() if key.rpartition(".")[2] == name.rpartition(".")[2]]
        fitting = [setting for setting in last if setting.name.endswith(f".{name}")] or last
        return (
            fitting[0]
            if len(fitting) == 1
            else next((setting for setting in fitting if setting.typed is not None), None)
        )

    def several(self, names: Iterable[str]) -> list[Setting]:
        """The settings of these names, whatever the case of their letters; those in the typed command come first."""
        by_lower: dict[str, Setting] = {}
        for key, setting in self._by_name.items():
            by_lower.setdefault(key.lower(), setting)
            by_lower.setdefault(key.lower().rpartition(".")[2], setting)
        wanted = (name.lower().replace("-", "_") for name in names)
        there = [by_lower[name] for name in wanted if name in by_lower]
        return sorted(there, key=lambda setting: setting.typed is None)

    def first(self, names: Iterable[str]) -> Setting | None:
        """The first of `several`; None if there is none."""
        return next(iter(self.several(names)), None)

    def naming(self, cls: str) -> Iterator[str]:
        """The places of the settings whose value names a class, or a configuration called like it."""
        for setting in self._by_name.values():
            words = (str(setting.value).rpartition(".")[2], *setting.name.replace("_", "").lower().split("."))
            if cls in words or cls.lower() in words:
                yield setting.where

    def _take_typed(self, words: list[str], environment: Iterable[str]) -> None:
        positional = [setting for setting in self._by_name.values() if setting.is_positional]
        by_word = {word: setting for setting in self._by_name.values() for word in (setting.word, *setting.others)}
        for key, _, value in (entry.partition("=") for entry in environment):
            variable = self._by_name.get(key) or Setting(name=key, form=f"{key}={{}}", is_environment=True)
            self._by_name[key] = replace(variable, typed=value)
        is_value = False
        for word, following in zip(words, [*words[1:], "-"], strict=False):
            match = re.fullmatch(r"(\+{0,2}|--?)([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
            if match is None or not (match[1].startswith("-") or match[3] is not None):
                if positional and not is_value and word != "--":
                    first = positional.pop(0)
                    self._by_name[first.name] = replace(first, typed=word)
                is_value = False
                continue
            name, value = match[2].replace("-", "_"), match[3]
            there = by_word.get(match[1] + match[2]) or by_word.get(match[2]) or self._by_name.get(name)
            takes_next = value is None and not (there is not None and there.is_flag)
            is_value = takes_next and following != "-" and not re.match(r"--?[A-Za-z]", following)
            value = following if is_value else value
            if there is None:
                form = word[: match.start(3)] + "{}" if match[3] is not None else f"{word} {{}}"
                there = Setting(name=name, form=form, is_flag=value is None, where="your command")
            self._by_name[there.name] = replace(there, typed="True" if value is None else value)


def declared(reach: Reach, start: StartedProgram, overrides: str = "") -> Iterator[Setting]:
    """Yields the settings that the reached code declares, and the settings in files that the command names. `overrides`
    is the form in which the command line overrides a file's value, such as `--{name} {}`; empty if no form is known.
    """
    style = overrides
    for site in reach.sites:
        chain = dotted(site.call.func) or site.name
        for callee, kind, form in _PARSERS:
            if callee.fullmatch(chain):
                yield from _of_call(reach, site, kind, form)
        if site.name == "DEFINE_config_file":
            style = f"--{literal(site.argument(0))}.{{name}}={{}}"
        if key := environment_key(site.call):
            default = literal(site.argument(1))
            yield Setting(
                name=key,
                form=f"{key}={{}}",
                default=_plain(default) if isinstance(default, str) else default,
                where=site.where,
                is_environment=True,
            )
        style = _OVERRIDES.get(site.name, style)
        if chain == "hydra.main":
            style = "{name}={}"
            yield from _hydra(reach, site, start)
    text = reach.folder.text(reach.entry)
    is_globals = "configurator" in text  # an executed file that sets the script's own globals
    style = "--{name}={}" if is_globals else style
    words = (part for word in start.words for part in (word, *re.split(r"[=:]", word)))
    files = (posixpath.normpath(posixpath.join(start.folder, word)) for word in words)
    named = [there for file in files if CONFIG.fullmatch(file) for there in _named(reach, file)]
    for file in dict.fromkeys((*named, *([reach.entry] if "merge_from_args" in reach.by_name else []))):
        yield from _of_reached(reach, file, style)
    for site in (site for name in _YACS for site in reach.by_name.get(name, [])):
        if not site.scope.functions and not site.call.args:  # _C = CfgNode(), whose values the lines after it set
            yield from of_file(reach.folder, site.scope.file, "")
    read_at = text[: text.find("configurator")].count("\n") + 1
    for name, values in reach.names(reach.entry).assigned.items() if is_globals else ():
        if (value := literal(values[0])) is not None and values[0].lineno < read_at:
            yield Setting(name=name, form=f"--{name}={{}}", default=value, where=f"{reach.entry}:{values[0].lineno}")


def _named(reach: Reach, file: str) -> list[str]:
    """The configuration file of the folder that a typed path means: the path may begin at a folder inside, where a
    package keeps its configurations.
    """
    if file in reach.folder.files:
        return [file] if file != reach.entry else []
    return below if len(below := [name for name in reach.folder.files if name.endswith(f"/{file}")]) == 1 else []


def _of_reached(reach: Reach, name: str, style: str, prefix: str = "") -> Iterator[Setting]:
    """The values in a configuration file; the classes of the folder that it names count as reached."""
    for setting in of_file(reach.folder, name, style, prefix):
        yield setting
        if setting.name.endswith(("_target_", "class_path")):
            reach.reach_dotted(str(setting.default))
    bases = re.findall(r"(?im)^_base_\s*[=:]\s*(\[[^\]]*\]|.*)", reach.folder.text(name))
    for base in re.findall(r"[\w./-]+\.(?:py|ya?ml)", " ".join(bases)):
        there = posixpath.normpath(posixpath.join(posixpath.dirname(name), base))
        yield from _of_reached(reach, there, style, prefix) if there in reach.folder.files else ()


def _of_call(reach: Reach, site: Site, kind: str, form: str) -> Iterator[Setting]:
    """The settings that a call of a library declares."""
    first, function = site.argument(0), site.scope.functions[-1] if site.scope.functions else None
    if kind == "option":
        yield from _option(reach, site)
    elif kind == "flag" and isinstance(key := literal(first), str):
        yield Setting(name=key, form=form.replace("{name}", key), default=_constant(reach, site, 1), where=site.where)
    elif kind == "class":
        arguments = [first] if first is not None else [a.annotation for a in function.args.args[:1]] if function else []
        for name in _names_in(arguments):
            yield from _fields(reach, site.scope, name, form)
    elif kind == "function":
        symbols = [reach.symbol(site.scope.file, name) for name in _names_in([first])]
        if site.name == "command" and not site.around:
            symbols = [(site.scope.file, function)] if any(m.split(".")[0] == "typer" for m in reach.imported) else []
        for file, node in filter(None, symbols):
            if isinstance(node, Function):
                yield from _parameters(node, file, form)
    elif kind == "keywords":
        for keyword in site.call.keywords:
            if keyword.arg and (value := literal(keyword.value)) is not None:
                yield Setting(
                    name=keyword.arg, form="", default=value, where=f"{site.scope.file}:{keyword.value.lineno}"
                )


def _constant(reach: Reach, site: Site, position: int) -> object:
    """The value of a default in a call: a literal, or a constant of the folder's code."""
    value = site.argument(position, "default")
    if isinstance(value, ast.Name) and (symbol := reach.symbol(site.scope.file, value.id)) and symbol[1] is None:
        assigned = reach.names(symbol[0]).assigned.get(value.id, [])
        return literal(assigned[0] if len(assigned) == 1 else None)
    return literal(value)


def _option(reach: Reach, site: Site) -> Iterator[Setting]:
    """An option of argparse or click, or a positional argument."""
    words = [str(literal(argument)).split("/")[0] for argument in site.call.args if isinstance(literal(argument), str)]
    dashed = [word for word in words if word.startswith("-")]
    long = next((word for word in dashed if word.startswith("--")), dashed[0] if dashed else "")
    if words and not long:
        yield Setting(name=words[0], form="", where=site.where, is_positional=True)
    if not long:
        return
    action = ast.unparse(site.keyword("action") or ast.Constant(value=""))
    is_flag = bool(
        re.search("store_true|store_false|count|BooleanOptional", action) or literal(site.keyword("is_flag"))
    )
    default = _constant(reach, site, -1)
    yield Setting(
        name=str(literal(site.keyword("dest")) or long.lstrip("-")).replace("-", "_"),
        form=long if is_flag else f"{long} {{}}",
        default="store_false" in action if is_flag and default is None else default,
        is_flag=is_flag,
        where=site.where,
        others=tuple(word for word in words if word != long),
        is_truth="bool" in ast.unparse(site.keyword("type") or ast.Constant(value="")).lower(),
    )


def _typed(key: str, annotation: ast.expr | None, default: ast.expr | None, where: str, form: str) -> Setting:
    """The setting that a field or a parameter declares."""
    parts = [part for part in (default, annotation) if part is not None]
    words = [e.value for p in parts for e in walk(p) if isinstance(e, ast.Constant) and str(e.value).startswith("--")]
    hyphened = "{-name}" in form
    word = str(words[0]) if words else "--" + key.replace("_", "-")
    is_truth = annotation is not None and ast.unparse(annotation) == "bool"
    written = f"{word} {{}}" if hyphened else form.replace("{name}", key)
    if isinstance(default, ast.Call) and literal(default) is None:
        named = [keyword.value for keyword in default.keywords if keyword.arg in ("default", "default_factory")]
        default = next(iter([*named, *default.args]), None)
    return Setting(
        name=key,
        form=word if hyphened and is_truth else written,
        default=literal(default),
        is_flag=hyphened and is_truth,
        where=where,
        others=(f"--{key}",),
        is_truth=is_truth,
    )


def _fields(reach: Reach, scope: Scope, name: str, form: str, prefix: str = "", depth: int = 0) -> Iterator[Setting]:
    """The fields of a dataclass, of its bases, and of its nested dataclasses."""
    file, cls = reach.symbol(scope.file, name) or ("", None)
    if not isinstance(cls, ast.ClassDef) or depth > 5:
        return
    for node in cls.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            key = prefix + node.target.id
            inner = next(
                (annotated for annotated in _names_in([node.annotation]) if _is_dataclass(reach, file, annotated)), ""
            )
            if inner:
                yield from _fields(reach, Scope(file), inner, form, f"{key}.", depth + 1)
            else:
                yield _typed(key, node.annotation, node.value, f"{file}:{node.lineno}", form)
    for base in cls.bases:
        yield from _fields(reach, Scope(file), dotted(base), form, prefix, depth + 1)


def _is_dataclass(reach: Reach, file: str, name: str) -> bool:
    symbol = reach.symbol(file, name)
    decorators = symbol[1].decorator_list if symbol is not None and isinstance(symbol[1], ast.ClassDef) else []
    return any(re.search("dataclass|config", ast.unparse(decorator).lower()) for decorator in decorators)


def _parameters(function: Function, file: str, form: str) -> Iterator[Setting]:
    """The parameters of a function that a library turns into a command line."""
    arguments, more = function.args.args, function.args
    defaults = [*[None] * (len(arguments) - len(more.defaults)), *more.defaults, *more.kw_defaults]
    for argument, default in zip([*arguments, *more.kwonlyargs], defaults, strict=True):
        yield _typed(argument.arg, argument.annotation, default, f"{file}:{argument.lineno}", form)


def _names_in(nodes: Iterable[ast.AST | None]) -> Iterator[str]:
    for expr in (inner for node in nodes if node is not None for inner in walk(node)):
        if isinstance(expr, ast.Name):
            yield expr.id
        elif isinstance(expr, ast.Constant) and isinstance(expr.value, str):
            yield from re.findall(r"[A-Za-z_]\w*", expr.value)  # the annotation is in quotes


def of_file(folder: CodeFolder, name: str, style: str, prefix: str = "") -> Iterator[Setting]:
    """The values in a configuration file, by dotted name."""
    pairs: list[tuple[str, object, int]] = []
    add = partial(_add_values, pairs)
    try:
        if name.endswith(".py"):
            for node in walk(folder.tree(name) or ast.parse("")):
                if isinstance(node, ast.Assign) and len(node.targets) == 1 and (key := dotted(node.targets[0])):
                    add(re.sub(r"^_?(config|cfg|c|C)(\.|$)", "", key), node.value)
        elif name.endswith(".toml"):
            add("", tomllib.loads(folder.text(name)))
        else:
            add("", yaml.compose(folder.text(name), Loader=yaml.SafeLoader))  # unlike load, it accepts unknown tags
    except (yaml.YAMLError, tomllib.TOMLDecodeError):
        return
    for key, value, line in pairs:
        form = style.replace("{name}", prefix + key) if "*" not in key else ""  # no command line sets a list's element
        where = f"{name}:{line}" if line else name
        name_there = (prefix + key).replace("-", "_")
        yield Setting(name=name_there, form=form, default=value, where=where, is_of_file=True)


def _add_values(pairs: list[tuple[str, object, int]], above: str, value: object) -> None:
    """Adds each value nested in a file's value as (dotted name, value, line); the line is 0 if unknown."""
    items: Iterable[tuple[object, object]] = ()
    match value:
        case yaml.MappingNode():
            items = [(key.value, node) for key, node in value.value]
        case yaml.SequenceNode() if above.endswith("callbacks"):
            items = [(f"*{index}", node) for index, node in enumerate(value.value)]
        case yaml.ScalarNode() if above:
            pairs.append((above, _plain(value.value), value.start_mark.line + 1))
        case ast.Call() if called(value) in ("dict", "ConfigDict", "DictConfig"):
            items = [
                *((keyword.arg, keyword.value) for keyword in value.keywords),
                *(("", argument) for argument in value.args),
            ]
        case ast.Dict():
            items = [(literal(key), node) for key, node in zip(value.keys, value.values, strict=True)]
        case ast.Constant() if above:
            pairs.append((above, value.value, value.lineno))
        case dict():
            items = value.items()
        case str() | int() | float():
            pairs.append((above, value, 0))
    for key, child in items:
        _add_values(pairs, ".".join(filter(None, [above, str(key)])), child)


def _hydra(reach: Reach, site: Site, start: StartedProgram) -> Iterator[Setting]:
    """The configuration that a hydra program composes, with the groups that the command chooses."""
    folder = posixpath.join(posixpath.dirname(site.scope.file), str(literal(site.keyword("config_path")) or "."))
    chosen = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in start.words) if value}
    chosen |= dict(pair for pair in zip(start.words, start.words[1:], strict=False) if pair[0].startswith("-"))
    name = chosen.get("--config-name") or chosen.get("-cn") or literal(site.keyword("config_name")) or "config"
    folder = posixpath.normpath(chosen.get("--config-path") or chosen.get("-cp") or folder)
    yield from _hydra_file(reach, folder, f"{folder}/{str(name).removesuffix('.yaml')}.yaml", "", chosen, 0)


def _hydra_file(
    reach: Reach, folder: str, name: str, prefix: str, chosen: dict[str, str], depth: int
) -> Iterator[Setting]:
    """The values of a configuration file, which override the values of the files that its `defaults` name."""
    name = posixpath.normpath(name)  # the folder is often "."
    if name not in reach.folder.files or depth > 6:
        return
    prefix = "" if "@package _global_" in reach.folder.text(name) else prefix
    yield from _of_reached(reach, name, "{name}={}", prefix)
    try:
        tree = yaml.safe_load(reach.folder.text(name))
    except yaml.YAMLError:
        return
    for entry in (tree or {}).get("defaults", []) if isinstance(tree, dict) else []:
        group, option = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        group = re.sub(r"^(override |optional )*/?", "", str(group))
        options = chosen.get(group, option)
        for option in options if isinstance(options, list) else [options]:
            if option and option != "_self_":
                base = f"{folder}/{group}" if group else posixpath.dirname(name)
                inside = f"{group.replace('/', '.')}." if group else prefix
                yield from _hydra_file(reach, folder, f"{base}/{option}.yaml", inside, chosen, depth + 1)


def environment_key(call: ast.Call) -> str:
    """The environment variable that a call reads; empty if the call reads none."""
    is_read = called(call) in ("getenv", "get") and re.search("environ|getenv", ast.unparse(call.func)) and call.args
    key = literal(call.args[0]) if is_read else None
    return key if isinstance(key, str) else ""


def literal(value: ast.AST | None) -> object:
    """The value of a literal or of simple arithmetic; None for other expressions."""
    match value:
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _ARITHMETIC:
            one, two = literal(left), literal(right)
            is_small = isinstance(one, int | float) and isinstance(two, int | float) and two < 1e12
            is_small = is_small and not (isinstance(op, ast.Pow) and two > 20)  # type: ignore[operator]
            return _ARITHMETIC[type(op)](one, two) if is_small else None
        case ast.Call(func=ast.Name(id="int" | "float"), args=[only]):
            inner = literal(only)
            return int(inner) if called(value) == "int" and isinstance(inner, int | float) else inner
        case ast.expr():
            try:
                return ast.literal_eval(value)
            except (ValueError, TypeError):
                return None
    return None


def _plain(text: str) -> object:
    """A typed value as a number or a truth value if it is one; otherwise as text."""
    if re.fullmatch(r"[-+]?\d[\d_]*", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE):
        return float(text)
    return {"true": True, "false": False, "null": None, "none": None, "~": None}.get(text.lower(), text)


def with_setting(command: str, setting: Setting, value: object, part: int = -1) -> str:
    """The command with this value of a setting, which replaces an earlier one. `part`: the index of the program among
    the command's parts.
    """
    begin, end = list(parts(command))[part]
    before, after = command[:begin], command[end:]
    blanks = re.match(r"(\s*)(.*?)(\s*)$", command[begin:end], re.DOTALL)
    assert blanks is not None
    return before + blanks[1] + _with_setting(blanks[2], setting, value) + blanks[3] + after


def _with_setting(command: str, setting: Setting, value: object) -> str:
    wanted = setting.with_value(value)
    for word in (setting.word, *setting.others, f"--{setting.name}", f"--{setting.name.replace('_', '-')}"):
        taken = r"" if setting.is_flag else r"(?:=|\s+)(?:\"[^\"]*\"|'[^']*'|\{[^}]*\}\S*|\S+)"
        changed, count = re.subn(rf"(?<!\S){re.escape(word)}{taken}(?=\s|$)", lambda _: wanted, command)
        if count:
            return changed
    return f"{wanted} {command}" if setting.is_environment else f"{command} {wanted}"
