"""Finds the files that a script saves (under which names, how often, in which folder) and those that it reads again."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpufleet.infra.discover.expressions import Hole, Kind, Parts, Span, Values, loop_range, unit
from gpufleet.infra.discover.reach import Function, Reach, Scope, Site, assignments, called, dotted, walk
from gpufleet.infra.discover.settings import Setting

OWNER = -1  # in place of an argument's position: the call is a method of the path, or of the file at the path
# Calls that write files. Each row has a pattern of the function's name, the position of the path among the arguments,
# the keywords for the path, and whether the path is that of a folder.
_SAVES: tuple[tuple[re.Pattern[str], int, tuple[str, ...], bool], ...] = tuple(
    (re.compile(callee), position, keywords, is_folder)
    for callee, position, keywords, is_folder in (
        (r"(torch|t|th|xm|paddle|mx|accelerator|self\.accelerator)\.save", 1, ("f", "path"), False),
        (r"(.*\.)?(dcp|dist_cp|checkpoint|DCP)\.(async_)?save", 99, ("checkpoint_id",), True),
        (r"(.*\.)?save_file", 1, ("filename",), False),
        (r"(json|pickle|joblib|cloudpickle|yaml|dill)\.dump", 1, ("fp", "file", "filename"), False),
        (r"(np|numpy|jnp)\.save(z|z_compressed)?", 0, ("file",), False),
        (r"(.*\.)?save_(model|weights)", 0, ("fname", "filename", "filepath", "output_dir"), False),
        (r"(.*\.)?save_(state|pretrained)", 0, ("output_dir", "save_directory"), True),
        (r"(.*\.)?((orbax_|async_)?checkpointer|ckptr)\.save|ocp\..*\.save", 0, ("directory", "path"), True),
        (r".*\.write(_bytes|_text)?", OWNER, (), False),
        (r".*\.save", 0, ("path", "filepath"), False),  # of Keras models, fabric, and similar objects
    )
)
_DEEPSPEEDS_TAG = ast.parse('f"global_step{global_steps}"', mode="eval").body  # if the script names no tag
_LOADS = re.compile(
    r"load(_(state(_dict)?|checkpoint|file|model|weights)|s)?|from_pretrained|restore|open|read_(text|bytes)|glob"
)
_WRITES = re.compile(r"open\(.*['\"][wax]b?['\"]")
OTHER = re.compile(  # names of files that are no checkpoints, or checkpoints from which nothing resumes
    r"best|final|ema|export|onnx|adapter|config|arg|vocab|token|sample|metric|result|log|history|stat|readme|summary|hparam"
    r"|split|embed|pred|loss|plot|cache|crash|\.(tmp|txt|csv|ya?ml|png|html|md)",
    re.IGNORECASE,
)
_OTHER_FOLDER = re.compile(r"(?:^|/)(?:eval|test|sample|export|infer)\w*/")
_RESUMABLE = re.compile(r"optim|epoch|step|iter|scheduler|\bopt\b", re.IGNORECASE)
_WEIGHTS = re.compile(
    r"\.(pth?|ckpt|bin|tar|pkl|pickle|safetensors|np[yz]|msgpack|h5|keras|t7|model|zip|params|json)\b"
)
_LIKE_ONE = re.compile(r"ckpt|checkpoint|last|state|latest|resume|snapshot|model", re.IGNORECASE)
_IRREGULAR = re.compile(r"best|<|>|improv|patience|\bin\b", re.IGNORECASE)  # conditions without a regular interval


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeSave:
    """One call that saves."""

    parts: Parts  # the pattern of the whole path
    is_folder: bool
    where: str
    site: Site
    cadence: Span | None  # how often
    is_inside_loop: bool
    holds: str  # the saved object, as written
    is_off: bool = False  # a condition around it does not hold
    switch: Setting | None = None  # the option with which this condition holds
    is_one_of_several: bool = False  # loops call its function at several places, of which each may save another name
    score: float = 0.0

    @property
    def text(self) -> str:
        """The path, with unknown parts in angle brackets."""
        return "".join(part if isinstance(part, str) else f"<{part.kind}>" for part in self.parts)


@dataclass(frozen=True, slots=True)
class Pattern:
    """A checkpoint's name below a folder, and what determines that folder."""

    name: str  # the name with {step}, {epoch} and *; a folder ends in /
    setting: str = ""  # the setting with the folder as its value, or with the path of which `name` is the default
    folder: str = ""  # a folder that the code itself names; "." is the script's working folder
    in_checkpoints: bool = False  # the path uses $GPUFLEET_CHECKPOINTS
    is_whole_path: bool = False  # whether the setting is the file's own path
    is_open: bool = False  # whether nothing is known of the folder


@dataclass(slots=True)
class Saves:
    """All calls that save, with the one that a resume needs first, and all paths that are loaded."""

    found: list[CodeSave] = field(default_factory=list)
    loads: list[tuple[Parts, Site]] = field(default_factory=list)


def find_saves(reach: Reach, values: Values) -> Saves:
    renames, saves = dict(reversed(list(_renames(reach, values)))), Saves()
    for site in (through for direct in reach.sites for through in _forwarded_calls(reach, direct)):
        place, is_folder = _written(reach, site)
        if place is not None:
            for inner, at in _by_caller(reach, place, site):
                around = [
                    *((statement, site) for statement in reversed(site.around) if at is not site),
                    *around_of(reach, at),
                ]
                several = len({(other.count, other.where) for other in _of_callers(reach, values, at)}) > 1
                sites = dict.fromkeys(one for _, one in around)
                for parts in values.resolve(inner, at.scope):
                    save = CodeSave(
                        parts=renames.get(parts, parts),
                        is_folder=is_folder,
                        where=site.where,
                        site=at,
                        cadence=_cadence(values, around) if not several else None,
                        is_inside_loop=any(isinstance(statement, ast.For | ast.While) for statement, _ in around),
                        holds=_contents(values, site),
                        is_off=values.never_runs(at) or values.never_runs(site),
                        switch=next((switch for one in sites for switch in values.switches(one)), None),
                        is_one_of_several=several,
                    )
                    saves.found.append(save)
        elif _LOADS.fullmatch(site.name) and site.call.args and not _WRITES.search(ast.unparse(site.call)):
            saves.loads += [(loaded, site) for loaded in values.resolve(site.call.args[0], site.scope) if loaded]
    scored = (replace(unscored, score=_score(unscored, saves, values)) for unscored in saves.found)
    saves.found = sorted(scored, key=lambda scored_save: -scored_save.score)
    return saves


def _forwarded_calls(reach: Reach, site: Site) -> Iterator[Site]:
    """Yields the call itself. If the call passes on all arguments of the function around it, yields the calls of that
    function instead.
    """
    function = site.scope.functions[-1] if site.scope.functions else None
    if function is None or function.args.vararg is None or not any(isinstance(e, ast.Starred) for e in site.call.args):
        yield site
        return
    for caller in reach.calls_of(function, site.scope):
        call = ast.Call(
            func=site.call.func, args=caller.call.args, keywords=caller.call.keywords, lineno=caller.call.lineno
        )
        yield Site(call, caller.scope, caller.around)


def _by_caller(reach: Reach, place: ast.expr, site: Site, depth: int = 0) -> Iterator[tuple[ast.expr, Site]]:
    """Yields the path, and the place where the code states it. If the path is a parameter that nothing else sets, each
    caller of the function yields its own path.
    """
    function = site.scope.functions[-1] if site.scope.functions else None
    name, passed = dotted(place), list[tuple[ast.expr, Site]]()
    if function is not None and name and depth < 3 and name not in dict(assignments(walk(function))):
        passed = list(reach.passed(function, site.scope, name))
    if not passed:
        yield place, site
    for inner, at in passed:
        yield from _by_caller(reach, inner, at, depth + 1)


def _written(reach: Reach, site: Site) -> tuple[ast.expr | None, bool]:
    """Returns the path that a call writes, and whether this path is a folder. The path is None if the call is not known
    to write.
    """
    func = site.call.func
    if site.name == "save_checkpoint" and _is_of_engine(reach, site):
        pair = [site.argument(0, "save_dir") or ast.Constant(value=""), site.argument(1, "tag") or _DEEPSPEEDS_TAG]
        return ast.Call(func=ast.Name(id="join", ctx=ast.Load()), args=pair, keywords=[]), True
    for callee, position, keywords, is_folder in _SAVES:
        if callee.fullmatch(dotted(func) or ast.unparse(func)):
            if isinstance(func, ast.Name) and _is_own(reach, site, func.id):
                return None, False
            owner = func.value if isinstance(func, ast.Attribute) else None
            return (owner if position == OWNER else site.argument(position, *keywords)), is_folder
    return None, False


def _is_own(reach: Reach, site: Site, name: str) -> bool:
    """Whether a name is that of a function of the folder, of which a save is looked for inside."""
    symbol = reach.symbol(site.scope.file, name)
    nested = (node for outer in site.scope.functions for node in walk(outer) if isinstance(node, Function))
    return (symbol is not None and isinstance(symbol[1], Function)) or any(node.name == name for node in nested)


def _is_of_engine(reach: Reach, site: Site) -> bool:
    """Whether `save_checkpoint` is a method of DeepSpeed's engine, not of a class of the folder."""
    if site.keyword("tag") is not None:
        return True
    is_imported = any(f"{name}.".startswith("deepspeed.") for name in reach.imported)
    own = (node for node, scope in reach.units if scope.cls is not None and isinstance(node, Function))
    is_method = isinstance(site.call.func, ast.Attribute) and bool(site.call.args or site.call.keywords)
    return is_imported and is_method and all(node.name != site.name for node in own)


def _contents(values: Values, site: Site) -> str:
    """Returns the source text of the saved object: that of the argument, or that of the argument's definition if it is
    a name.
    """
    first = site.call.args[0] if site.call.args else None
    bound = values.bound(dotted(first), first, site.scope) if first is not None and dotted(first) else []
    return ast.unparse(bound[0][0] if bound else first)[:500] if first is not None else ""


def _renames(reach: Reach, values: Values) -> Iterator[tuple[Parts, Parts]]:
    """For each call that renames a file, yields the old name and the new name."""
    for site in reach.sites:
        pair = site.call.args[:2]
        if (
            site.name in ("replace", "rename")
            and isinstance(site.call.func, ast.Attribute)
            and len(site.call.args) == 1
        ):
            pair = [site.call.func.value, *pair]
        elif not re.fullmatch(
            r"(os|shutil|(tf\.io\.)?gfile|\w*path_?(mgr|manager))\.(replace|renames?|move|mv)", dotted(site.call.func)
        ):
            continue
        old, new = (values.resolve(argument, site.scope) for argument in pair)
        yield from zip(old, new if len(new) >= len(old) else new[:1] * len(old), strict=False)


def around_of(reach: Reach, site: Site, depth: int = 0) -> Iterator[tuple[ast.stmt, Site]]:
    """Yields the statements around a call, innermost first; then the statements around a call of the enclosing
    function, preferably of a call in a loop.
    """
    for statement in reversed(site.around):
        yield statement, site
    callers = reach.calls_of(site.scope.functions[-1], site.scope) if depth < 5 and site.scope.functions else []
    in_a_loop = [caller for caller in callers if any(isinstance(s, ast.For | ast.While) for s in caller.around)]
    for caller in (in_a_loop or callers)[:1]:
        yield from around_of(reach, caller, depth + 1)


def _cadence(values: Values, around: list[tuple[ast.stmt, Site]]) -> Span | None:
    """How often a call saves: the number behind % in the nearest condition, or else once per epoch of such a loop."""
    irregular = False
    for statement, site in around:
        where = f"{site.scope.file}:{statement.lineno}"
        if isinstance(statement, ast.If):
            names = (node for node in walk(statement.test) if isinstance(node, ast.Name))
            behind = (value for name in names for value, _ in values.bound(name.id, name, site.scope)[:1])
            for part in (part for test in (statement.test, *behind) for part in walk(test)):
                if isinstance(part, ast.Compare) and isinstance(part.ops[0], ast.In):
                    counter, interval = part.left, None  # a list names them
                elif isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                    counter, interval = part.left, part.right
                else:
                    continue
                counted = values.kinds(counter, site.scope) if not isinstance(counter, ast.Constant) else None
                if counted is not None:  # otherwise the number may count ranks
                    count, setting = values.quantity(interval, site.scope)
                    return Span(unit=counted, count=count, setting=setting, where=where)
            irregular = irregular or bool(_IRREGULAR.search(ast.unparse(statement.test)))
        elif (
            isinstance(statement, ast.For | ast.While)
            and (kind := loop_unit(values, statement, site.scope)) is not None
        ):
            is_each = kind == "epoch" and not irregular
            return Span(unit="epoch", count=1, where=where) if is_each else None
    return None


def _of_callers(reach: Reach, values: Values, site: Site) -> Iterator[Span]:
    """How often each call of the function around a save is made; calls outside of loops are left out."""
    function = site.scope.functions[-1] if site.scope.functions else None
    for caller in reach.calls_of(function, site.scope) if function is not None else ():
        if (span := _cadence(values, [(statement, caller) for statement in reversed(caller.around)])) is not None:
            yield span


def loop_unit(values: Values, loop: ast.stmt, scope: Scope) -> Kind | None:
    """What a loop counts: steps, epochs or batches; None if not known."""
    if isinstance(loop, ast.While):
        return next((kind for node in walk(loop.test) if (kind := unit(dotted(node))) is not None), None)
    if not isinstance(loop, ast.For):
        return None
    target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else loop.target
    tries_again = isinstance(loop.body[0], ast.Try)
    is_range, kind = loop_range(loop.iter) is not None, unit(dotted(target))
    is_of_batches = kind == "step" and called(loop.iter) == "enumerate" and not is_range
    return "batch" if is_of_batches else kind or ("step" if is_range and not tries_again else None)


def _score(save: CodeSave, saves: Saves, values: Values) -> float:
    """A number that is the higher the more a save looks like what a resume needs: its name is that of a checkpoint, it
    is inside a loop, it holds the optimizer, and the script loads it.
    """
    text, name = save.text, save.text.rstrip("/").rpartition("/")[2]
    setting = save.cadence.setting if save.cadence is not None else None
    head = save.parts[0] if save.parts else None
    return sum(
        weight * bool(holds)
        for weight, holds in (
            (2.0, save.is_inside_loop),
            (1.5, _RESUMABLE.search(save.holds)),
            (3.5, save.site.name == "save_state"),
            (1.0, save.cadence is not None),
            (1.5, "<step>" in text or "<epoch>" in text),
            (1.0, _WEIGHTS.search(name) or save.is_folder),
            (1.0, _LIKE_ONE.search(text)),
            (1.0, re.search("latest|last", name)),  # what a resume reads, beside others with numbers
            (-3.0, OTHER.search(name)),
            (-4.0, _OTHER_FOLDER.search(text)),
            (-2.0, save.site.name in ("write", "write_text", "dump", "save_pretrained")),
            (-3.0, re.match(r"(np|numpy)\.", dotted(save.site.call.func))),
            (1.5, any(load == save.parts for load, _ in saves.loads)),
            (1.0, setting is not None and setting.typed is not None),
            # a value of 0 or less turns saving off
            (-4.0, setting is not None and isinstance(setting.value, int) and setting.value <= 0),
            (-4.0, _is_not_asked_for(save, values)),
            (0.5, isinstance(head, str) or (head is not None and head.kind in ("setting", "checkpoints"))),
            (2.5, save.site.scope.file == values.entry),
            (-4.0, not re.search(r"[A-Za-z<]", re.sub(r"<(any|step|epoch|batch)>", "", text))),
        )
    )


def _is_not_asked_for(save: CodeSave, values: Values) -> bool:
    """Whether the command switches this save off: its interval is not a number, or the code asks for another word (as
    in `by == "epoch"`) than the command gives.
    """
    interval = save.cadence.setting if save.cadence is not None else None
    if interval is not None and interval.typed is not None and interval.count is None:
        return True
    if save.is_off and (save.switch is None or save.site.name != "save_state"):
        return True
    for statement in save.site.around:
        match statement:
            case ast.If(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[ast.Constant(value=str() as word)])):
                _, setting = values.quantity(left, save.site.scope)
                if setting is not None and setting.typed not in (None, word):
                    return True
    return False


def pattern(save: CodeSave, values: Values) -> Pattern | None:
    """The checkpoint's name and its folder; None if too little of the path is known."""
    head, rest = (save.parts[0], list(save.parts[1:])) if save.parts else ("", [])
    kind = head.kind if isinstance(head, Hole) else "text"
    setting = values.settings.find(head.name) if isinstance(head, Hole) and kind == "setting" else None
    default = setting.value if setting is not None else None
    is_below = bool(rest) and isinstance(rest[0], str) and rest[0].startswith("/")
    if setting is not None and not rest and not save.is_folder:
        name = posixpath.basename(default) if isinstance(default, str) else ""
        return Pattern(name, setting.name, is_whole_path=True) if name else None
    if kind == "text" or (setting is not None and rest and not is_below):  # the code names a folder, or a prefix
        known = default.rstrip("/") if isinstance(default, str) else head if kind == "text" else None
        return _named(_text([known, *rest], values), save) if known is not None else None
    if kind not in ("setting", "checkpoints") and not (kind == "any" and is_below):
        rest = [head, *rest]
    file_name = _cut(_text(rest, values).lstrip("/"), save.is_folder)
    if ".." in file_name.split("/"):
        return Pattern(posixpath.basename(file_name), folder=posixpath.dirname(file_name))
    is_open = kind not in ("setting", "checkpoints")
    name = setting.name if setting else ""
    return Pattern(file_name, name, "", kind == "checkpoints", is_open=is_open) if file_name else None


def _named(path: str, save: CodeSave) -> Pattern | None:
    """Returns the pattern of a path that the code itself names. The leading folders without {} or * become the
    pattern's folder, and the rest of the path becomes its name.
    """
    fixed, rest = list[str](), posixpath.normpath(path).split("/") if path.strip("/*") else [""]
    while len(rest) > 1 and not re.search(r"[{*]", rest[0]):
        fixed.append(rest.pop(0))
    name = _cut("/".join(rest), save.is_folder)
    return Pattern(name, folder="/".join(fixed) or ".") if name else None


def _text(parts: list[str | Hole], values: Values) -> str:
    """The name as a pattern: with {step} and {epoch}, with the values of settings, and with * for unknown parts."""
    name = ""
    for part in parts:
        setting = values.settings.find(part.name) if isinstance(part, Hole) and part.kind == "setting" else None
        if isinstance(part, str):
            name += part
        elif (
            setting is not None
            and isinstance(setting.value, str | int)
            and str(setting.value) not in ("True", "False", "")
        ):
            name += str(setting.value)
        elif part.kind in ("step", "epoch"):
            kind = "epoch" if re.search(r"(?<![a-z])ep(och)?[-_=:]?$", name, re.IGNORECASE) else part.kind
            name += "*" if f"{{{kind}" in name else f"{{{kind}:{part.form}}}" if part.form else f"{{{kind}}}"
        else:
            name += "*"
    return re.sub(r"\*{2,}", "*", name)


def _cut(name: str, is_folder: bool) -> str:
    """Returns the pattern up to the first folder that has the step or epoch in its name: all files in that folder are
    one checkpoint. Without such a folder, returns the whole pattern. Returns an empty text if too little is known.
    """
    parts = name.strip("/").split("/")
    for index, part in enumerate(parts[:-1]):
        if "{step" in part or "{epoch" in part:
            return "/".join(parts[: index + 1]) + "/"
    plain = "/".join(parts)
    is_known = "{" in plain or re.search(r"[A-Za-z]", plain)
    return plain + ("/" if is_folder else "") if is_known else ""
