"""The settings of a script: what its parser, its dataclasses or its configuration files declare, and what was typed.

A setting knows how it is written on the command line, so that a command can be told where to save; one that only a file
has cannot be.
"""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import yaml

from gpufleet.infra.discover.reach import Function, Reach, Scope, Site, called, dotted, walk
from gpufleet.infra.discover.source import CodeFolder
from gpufleet.infra.discover.start import StartedProgram

CONFIG = re.compile(r".*\.(ya?ml|toml|json|py)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of the script."""

    name: str  # with _ for -, and its dots: trainer.max_steps
    form: str  # as a command line has it: "--max-steps {}", "trainer.max_steps={}"; empty: a file alone has it
    default: object = None
    is_flag: bool = False  # it takes no value
    where: str = ""
    others: tuple[str, ...] = ()  # other words for it: -n
    is_truth: bool = False  # it takes true or false
    is_positional: bool = False  # it is told by its place
    typed: str | None = None  # the value that the command gives it

    @property
    def value(self) -> object:
        """What it has: what was typed goes before the default."""
        return self.default if self.typed is None else _plain(self.typed)

    @property
    def count(self) -> int | None:
        """Its value as a number of steps or epochs; None: it is none."""
        value = self.value
        if isinstance(value, float) and value.is_integer() and value < 1e12:
            value = int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None

    @property
    def word(self) -> str:
        """How it is called where it is typed: --max-steps."""
        return self.form.replace("{}", "").rstrip(" =") or self.name

    def with_value(self, value: object) -> str:
        """The words that give it this value."""
        return self.form.format(value).strip()


class ScriptSettings:
    """All settings by name. What a command typed is in them, also where nothing declares it."""

    def __init__(self, declared: Iterable[Setting], start: StartedProgram) -> None:
        self._by_name: dict[str, Setting] = {}
        for each in declared:
            self._by_name.setdefault(each.name, each)
        self._take_typed(list(start.words))

    def __iter__(self) -> Iterator[Setting]:
        return iter(self._by_name.values())

    def find(self, name: str) -> Setting | None:
        """The setting of this name, or the only one whose last part it is; None: there is none."""
        name = name.replace("-", "_")
        if name in self._by_name:
            return self._by_name[name]
        last = [each for key, each in self._by_name.items() if key.rpartition(".")[2] == name.rpartition(".")[2]]
        fitting = [each for each in last if each.name.endswith(f".{name}")] or last
        return fitting[0] if len(fitting) == 1 else next((each for each in fitting if each.typed is not None), None)

    def first(self, names: Iterable[str]) -> Setting | None:
        """The first of these that there is, in any case of letters; one that was typed goes before."""
        by_lower: dict[str, Setting] = {}
        for each in self._by_name.values():
            by_lower.setdefault(each.name.lower(), each)
            by_lower.setdefault(each.name.lower().rpartition(".")[2], each)
        there = [by_lower[name] for name in names if name in by_lower]
        return next((each for each in there if each.typed is not None), there[0] if there else None)

    def _take_typed(self, words: list[str]) -> None:
        positional = [each for each in self._by_name.values() if each.is_positional]
        taken = False
        by_word = {word: each for each in self._by_name.values() for word in (each.word, *each.others)}
        for index, word in enumerate(words):
            match = re.fullmatch(r"(\+{0,2}|--?)([A-Za-z][\w.-]*)(?:=(.*))?", word, re.DOTALL)
            if match is None or (not match[1].startswith("-") and match[3] is None):
                if positional and not taken and word != "--":
                    first = positional.pop(0)
                    self._by_name[first.name] = replace(first, typed=word)
                taken = False
                continue
            name, value = match[2].replace("-", "_"), match[3]
            there = by_word.get(match[1] + match[2]) or by_word.get(match[2]) or self._by_name.get(name)
            following = words[index + 1] if index + 1 < len(words) else "-"
            if value is None and not (there is not None and there.is_flag):
                value = following if not re.match(r"--?[A-Za-z]", following) and following != "-" else None
            taken = value is not None and match[3] is None
            typed = "True" if value is None else value
            if there is None:
                form = word.replace("=" + (match[3] or ""), "={}") if match[3] is not None else f"{word} {{}}"
                there = Setting(name=name, form=form, is_flag=value is None, where="your command")
            self._by_name[there.name] = replace(there, typed=typed)


def declared(reach: Reach, start: StartedProgram, overrides: str = "") -> Iterator[Setting]:
    """The settings that what is reached declares, and those of the files that the command names. `overrides`: how the
    command line sets what a file has, such as `--{name} {}`; empty: it cannot, as far as this can tell.
    """
    style = overrides
    for site in reach.sites:
        name = called(site.call)
        if name == "add_argument" or (
            name == "option"
            and dotted(site.call.func).split(".")[0]
            in (
                "click",
                "option",
                "rich_click",
                "asyncclick",
            )
        ):
            yield from _argparse(site)
        elif name.startswith("DEFINE_") and site.call.args:
            key, default = _literal(site.call.args[0]), _literal(site.call.args[1] if len(site.call.args) > 1 else None)
            if isinstance(key, str):
                yield Setting(name=key, form=f"--{key}={{}}", default=default, where=site.where)
            if name == "DEFINE_config_file":
                style = f"--{key}.{{name}}={{}}"
        elif name in ("HfArgumentParser", "TrlParser", "H4ArgumentParser"):
            for each in _names_in(site.call.args[:1]):
                yield from _fields(reach, site.scope, each, "--{name} {}")
        elif name == "cli" and dotted(site.call.func).startswith("tyro"):
            for each in _names_in(site.call.args[:1]):
                yield from _fields(reach, site.scope, each, "--{name} {}", hyphens=True)
        elif name in ("wrap", "parse") and dotted(site.call.func).split(".")[0] in (
            "draccus",
            "pyrallis",
            "parser",
            "simple_parsing",
        ):
            for function in site.scope.functions[-1:]:
                for argument in function.args.args[:1]:
                    for each in _names_in([argument.annotation]):
                        yield from _fields(reach, site.scope, each, "--{name}={}")
            for each in _names_in(site.call.args[:1]):
                yield from _fields(reach, site.scope, each, "--{name} {}")
        elif name == "add_arguments":
            for each in _names_in(site.call.args[:1]):
                yield from _fields(reach, site.scope, each, "--{name} {}")
        elif name in ("Fire", "run", "CLI", "auto_cli") and dotted(site.call.func).split(".")[0] in (
            "fire",
            "typer",
            "jsonargparse",
            "CLI",
            "Fire",
        ):
            for each in _names_in(site.call.args[:1]):
                found = reach.symbol(site.scope.file, each)
                if found and isinstance(found[1], Function):
                    yield from _parameters(found[1], found[0], typer="typer" in dotted(site.call.func))
        elif name == "command" and site.scope.functions and not site.around:
            if any(module.split(".")[0] == "typer" for module in reach.imported):
                yield from _parameters(site.scope.functions[-1], site.scope.file, typer=True)
        elif name in ("HParams", "Namespace", "SimpleNamespace", "EasyDict", "AttrDict", "CfgNode"):
            for keyword in site.call.keywords:
                if keyword.arg and (value := _literal(keyword.value)) is not None:
                    yield Setting(
                        name=keyword.arg, form="", default=value, where=f"{site.scope.file}:{keyword.value.lineno}"
                    )
        elif name == "structured":
            for each in _names_in(site.call.args[:1]):
                yield from _fields(reach, site.scope, each, "{name}={}")
        if name == "from_cli" or (name == "main" and dotted(site.call.func).startswith("hydra")):
            style = "{name}={}"
        if name == "main" and dotted(site.call.func).startswith("hydra"):
            yield from _hydra(reach, site, start)
    tree = reach.folder.tree(reach.entry)
    is_globals = tree is not None and "configurator" in reach.folder.text(reach.entry)
    named = list(dict.fromkeys(_config_files(reach, start)))
    if "merge_from_args" in reach.by_name:
        yield from of_file(reach.folder, reach.entry, "--{name}={}")
    if is_globals:
        style = "--{name}={}"
    for file in named:
        yield from of_file(reach.folder, file, style)
    if is_globals:
        read_at = next(
            (n for n, line in enumerate(reach.folder.text(reach.entry).splitlines(), 1) if "configurator" in line), 0
        )
        for name, values in reach.names(reach.entry).assigned.items():  # type: ignore[union-attr]
            if (value := _literal(values[0])) is not None and values[0].lineno < read_at:
                yield Setting(
                    name=name, form=f"--{name}={{}}", default=value, where=f"{reach.entry}:{values[0].lineno}"
                )


def _config_files(reach: Reach, start: StartedProgram) -> Iterator[str]:
    """Files of the folder that the command's words name."""
    for word in start.words:
        for part in (word, word.rpartition("=")[2], word.partition(":")[0].rpartition("=")[2]):
            name = posixpath.normpath(posixpath.join(start.folder, part))
            if CONFIG.fullmatch(name) and name in reach.folder.files and name != reach.entry:
                yield name


def of_file(folder: CodeFolder, name: str, style: str, prefix: str = "") -> Iterator[Setting]:
    """What a configuration file sets, by dotted name."""
    if name.endswith(".py"):
        tree = folder.tree(name)
        pairs = _python_values(tree) if tree else []
    elif name.endswith(".toml"):
        pairs = _toml_values(folder.text(name))
    else:
        pairs = _yaml_values(folder.text(name))
    for key, value, line in pairs:
        form = style.replace("{name}", prefix + key) if style else ""
        yield Setting(name=(prefix + key).replace("-", "_"), form=form, default=value, where=f"{name}:{line}")


def _yaml_values(text: str) -> list[tuple[str, object, int]]:
    """Scalars by dotted name, whatever tags the file has."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError:
        return []
    found: list[tuple[str, object, int]] = []

    def walk(node: yaml.Node | None, above: str) -> None:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if isinstance(key, yaml.ScalarNode):
                    walk(value, f"{above}.{key.value}" if above else key.value)
        elif isinstance(node, yaml.ScalarNode) and above:
            found.append((above, _plain(node.value), node.start_mark.line + 1))

    walk(root, "")
    return found


def _toml_values(text: str) -> list[tuple[str, object, int]]:
    found, table = [], ""
    for number, line in enumerate(text.splitlines(), 1):
        if match := re.match(r"\s*\[([^\[\]]+)\]", line):
            table = match[1].strip() + "."
        elif match := re.match(r"\s*([\w.-]+)\s*=\s*([^#]+)", line):
            found.append((table + match[1], _plain(match[2].strip().strip("\"'")), number))
    return found


def _python_values(tree: ast.Module) -> list[tuple[str, object, int]]:
    found: list[tuple[str, object, int]] = []

    def add(name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Call) and called(value) in ("dict", "ConfigDict", "DictConfig"):
            for each in value.keywords:
                add(f"{name}.{each.arg}" if name else str(each.arg), each.value)
            for inner in value.args:
                add(name, inner)
        elif isinstance(value, ast.Dict):
            for key, item in zip(value.keys, value.values, strict=True):
                if isinstance(key, ast.Constant):
                    add(f"{name}.{key.value!s}" if name else str(key.value), item)
        elif name and isinstance(value, ast.Constant):
            found.append((name, value.value, value.lineno))

    for node in walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and (name := dotted(node.targets[0])):
            inside = name.partition(".")[2] if name.split(".")[0] in ("config", "cfg", "c", "C", "_C") else name
            add(inside if "." in name else ("" if name in ("config", "cfg", "c", "C") else name), node.value)
    return found


def _hydra(reach: Reach, site: Site, start: StartedProgram) -> Iterator[Setting]:
    """The configuration that a hydra program composes, with the groups that the command chooses."""
    said = {each.arg: _literal(each.value) for each in site.call.keywords}
    folder = posixpath.normpath(posixpath.join(posixpath.dirname(site.scope.file), str(said.get("config_path") or ".")))
    chosen = {key: value for key, _, value in (word.lstrip("+").partition("=") for word in start.words) if value}
    for option, value in zip(start.words, start.words[1:], strict=False):
        if option in ("--config-name", "-cn"):
            said["config_name"] = value
        if option in ("--config-path", "-cp"):
            folder = posixpath.normpath(value)
    name = str(chosen.get("--config-name", said.get("config_name") or "config")).removesuffix(".yaml")
    yield from _hydra_file(reach, folder, f"{folder}/{name}.yaml", "", chosen, 0)


def _hydra_file(
    reach: Reach, folder: str, name: str, prefix: str, chosen: dict[str, str], depth: int
) -> Iterator[Setting]:
    """What a file sets goes before what its defaults do."""
    if name not in reach.folder.files or depth > 6:
        return
    values = list(of_file(reach.folder, name, "{name}={}", prefix))
    yield from values
    for each in values:
        if each.name.endswith("_target_") and isinstance(each.default, str):
            reach.reach_dotted(each.default)
    try:
        tree = yaml.safe_load(reach.folder.text(name))
    except yaml.YAMLError:
        return
    for entry in (tree or {}).get("defaults", []) if isinstance(tree, dict) else []:
        group, option = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        group = str(group).removeprefix("override ").removeprefix("optional ").lstrip("/")
        option = chosen.get(group, option)
        if option and option != "_self_":
            base = f"{folder}/{group}" if group else posixpath.dirname(name)
            inside = f"{group.replace('/', '.')}." if group else prefix
            yield from _hydra_file(reach, folder, f"{base}/{option}.yaml", inside, chosen, depth + 1)


def _argparse(site: Site) -> Iterator[Setting]:
    """An option of argparse or click; nothing for what has no dashes."""
    words = [each.value for each in site.call.args if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    words = [part for each in words for part in each.split("/")[:1]]
    long = next((each for each in words if each.startswith("--")), next((e for e in words if e.startswith("-")), ""))
    if not long and words:
        yield Setting(name=words[0], form="", where=site.where, is_positional=True)
    if not long:
        return
    said = {each.arg: each.value for each in site.call.keywords}
    action = _literal(said.get("action"))
    is_flag = action in ("store_true", "store_false", "count") or _literal(said.get("is_flag")) is True
    is_flag = is_flag or "BooleanOptionalAction" in ast.unparse(said.get("action") or ast.Constant(value=""))
    name = _literal(said.get("dest")) or long.lstrip("-")
    yield Setting(
        name=str(name).replace("-", "_"),
        form=long if is_flag else f"{long} {{}}",
        default=_literal(said.get("default")),
        is_flag=is_flag,
        where=site.where,
        others=tuple(each for each in words if each != long),
        is_truth="bool" in ast.unparse(said.get("type") or ast.Constant(value="")).lower(),
    )


def _fields(
    reach: Reach, scope: Scope, name: str, form: str, *, hyphens: bool = False, prefix: str = "", depth: int = 0
) -> Iterator[Setting]:
    """The fields of a dataclass, of its bases, and of dataclasses among them."""
    found = reach.symbol(scope.file, name)
    if found is None or not isinstance(found[1], ast.ClassDef) or depth > 5:
        return
    file, cls = found[0], found[1]
    for node in cls.body:
        if not isinstance(node, ast.AnnAssign) or not isinstance(node.target, ast.Name):
            continue
        value = node.value
        if isinstance(value, ast.Call) and called(value) in ("field", "Option", "HfArg", "Field", "flag", "choice"):
            value = next((each.value for each in value.keywords if each.arg in ("default", "default_factory")), None)
        key = prefix + node.target.id
        inner = next((each for each in _names_in([node.annotation]) if _is_class(reach, file, each)), "")
        if inner:
            yield from _fields(reach, Scope(file), inner, form, hyphens=hyphens, prefix=f"{key}.", depth=depth + 1)
        else:
            typed = key.replace("_", "-") if hyphens else key
            is_flag = hyphens and ast.unparse(node.annotation) == "bool"
            written = f"--{typed}" if is_flag else form.replace("{name}", typed)
            where = f"{file}:{node.lineno}"
            is_truth = ast.unparse(node.annotation) == "bool"
            yield Setting(
                name=key,
                form=written,
                default=_literal(value),
                is_flag=is_flag,
                where=where,
                others=(f"--{key}",),
                is_truth=is_truth,
            )
    for base in cls.bases:
        yield from _fields(reach, Scope(file), dotted(base), form, hyphens=hyphens, prefix=prefix, depth=depth + 1)


def _is_class(reach: Reach, file: str, name: str) -> bool:
    found = reach.symbol(file, name)
    return (
        found is not None
        and isinstance(found[1], ast.ClassDef)
        and any(
            "dataclass" in ast.unparse(each) or "config" in ast.unparse(each).lower()
            for each in found[1].decorator_list
        )
    )


def _parameters(function: Function, file: str, *, typer: bool) -> Iterator[Setting]:
    """The parameters of a function that is a program: fire's --name=value, typer's --name value with hyphens."""
    arguments = [*function.args.args, *function.args.kwonlyargs]
    defaults = [None] * (len(function.args.args) - len(function.args.defaults))
    for argument, default in zip(
        arguments, [*defaults, *function.args.defaults, *function.args.kw_defaults], strict=False
    ):
        words: list[str] = []
        for call in walk(ast.Tuple(elts=[each for each in (default, argument.annotation) if each], ctx=ast.Load())):
            if isinstance(call, ast.Call) and called(call) in ("Option", "Argument"):
                words += [
                    str(each.value)
                    for each in call.args
                    if isinstance(each, ast.Constant) and str(each.value).startswith("--")
                ]
        value = default.args[0] if isinstance(default, ast.Call) and default.args else default
        name = argument.arg
        word = words[0] if words else f"--{name.replace('_', '-')}" if typer else f"--{name}"
        is_flag = typer and argument.annotation is not None and ast.unparse(argument.annotation) == "bool"
        form = word if is_flag else f"{word} {{}}" if typer else f"{word}={{}}"
        yield Setting(
            name=name,
            form=form,
            default=_literal(value),
            is_flag=is_flag,
            where=f"{file}:{argument.lineno}",
            others=(f"--{name}",),
        )


def _names_in(nodes: Iterable[ast.AST | None]) -> Iterator[str]:
    for node in nodes:
        for each in walk(node) if node is not None else ():
            if isinstance(each, ast.Name):
                yield each.id
            elif isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield from re.findall(r"[A-Za-z_]\w*", each.value)  # an annotation in quotes


def _literal(value: ast.expr | None) -> object:
    """The value of a plain expression, simple arithmetic too; None where it is none."""
    try:
        return None if value is None else ast.literal_eval(value)
    except (ValueError, TypeError):
        pass
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mult | ast.Pow | ast.Add | ast.Sub):
        left, right = _literal(value.left), _literal(value.right)
        if (
            isinstance(left, int | float)
            and isinstance(right, int | float)
            and (not isinstance(value.op, ast.Pow) or right < 20)
        ):
            return (
                {ast.Mult: left * right, ast.Add: left + right, ast.Sub: left - right}.get(type(value.op))
                if not isinstance(value.op, ast.Pow)
                else left**right
            )
    if isinstance(value, ast.Call) and called(value) in ("int", "float") and len(value.args) == 1:
        inner = _literal(value.args[0])
        return int(inner) if called(value) == "int" and isinstance(inner, int | float) else inner
    return None


literal = _literal


def _plain(text: str) -> object:
    """A typed value as the number or truth that it is, else as text."""
    if re.fullmatch(r"[-+]?\d[\d_]*", text):
        return int(text)
    if re.fullmatch(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", text, re.IGNORECASE):
        return float(text)
    return {"true": True, "false": False, "null": None, "none": None, "~": None}.get(text.lower(), text)


def with_setting(command: str, setting: Setting, value: object) -> str:
    """The command with this value of a setting, in the place of the one that it has."""
    wanted = setting.with_value(value)
    for word in (setting.word, *setting.others, f"--{setting.name}", f"--{setting.name.replace('_', '-')}"):
        taken = r"" if setting.is_flag else r"(?:=|\s+)(?:\"[^\"]*\"|'[^']*'|\{[^}]*\}\S*|\S+)"
        changed, count = re.subn(rf"(?<!\S){re.escape(word)}{taken}(?=\s|$)", lambda _: wanted, command)
        if count:
            return changed
    return f"{command} {wanted}"
