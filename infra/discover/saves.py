"""What a script saves: under which names, how often, in which of its folders; and what it reads again."""

from __future__ import annotations

import ast
import posixpath
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from gpufleet.infra.discover.reach import Reach, Scope, Site, assignments, called, dotted, walk
from gpufleet.infra.discover.values import Hole, Kind, Parts, Values, loop_range, unit

# A call that writes: its name, what it is of (empty: anything), the position and the keywords of the path, whether the
# path is a folder. What stands in a framework's row is not here.
_SAVES: tuple[tuple[str, str, int, tuple[str, ...], bool], ...] = (
    ("save", r"torch|t|th|xm|paddle|mx", 1, ("f", "path"), False),
    ("save", r"dcp|dist_cp|checkpoint|DCP|torch\.distributed\.checkpoint", 99, ("checkpoint_id",), True),
    ("async_save", r"dcp|dist_cp|checkpoint|DCP", 99, ("checkpoint_id",), True),
    ("save", r"fabric|self\.fabric", 0, ("path",), False),
    ("save_file", "", 1, ("filename",), False),
    ("save_model", "", 0, ("fname", "filename", "output_dir"), False),
    ("save", r"np|numpy|jnp", 0, ("file",), False),
    ("savez", r"np|numpy|jnp", 0, ("file",), False),
    ("savez_compressed", r"np|numpy|jnp", 0, ("file",), False),
    ("dump", r"json|pickle|joblib|cloudpickle|yaml|dill", 1, ("fp", "file", "filename"), False),
    ("save_weights", "", 0, ("filepath",), False),
    ("save_state", "", 0, ("output_dir",), True),
    ("save_pretrained", "", 0, ("save_directory",), True),
    (
        "save",
        r"checkpointer|self\.checkpointer|ckptr|orbax_checkpointer|async_checkpointer|ocp\.\w+\(.*\)",
        0,
        ("directory", "path"),
        True,
    ),
    ("write", "", 99, (), False),
    ("write_bytes", "", 99, (), False),
    ("write_text", "", 99, (), False),
)
_LOADS = (
    "load",
    "load_state",
    "load_state_dict",
    "load_checkpoint",
    "from_pretrained",
    "load_file",
    "restore",
    "load_model",
    "loads",
    "open",
    "read_text",
    "read_bytes",
    "load_weights",
    "glob",
)
_OTHER = re.compile(
    r"best|final|ema|export|onnx|config|arg|vocab|token|sample|metric|result|log|history|stat|readme|summary|hparam|split|embed|pred|loss|plot|cache|\.txt|\.csv|\.ya?ml|\.png|\.html|\.md",
    re.IGNORECASE,
)
_RESUMABLE = re.compile(r"optim|epoch|step|iter|scheduler|\bopt\b", re.IGNORECASE)
_WEIGHTS = re.compile(
    r"\.(pt|pth|ckpt|bin|tar|pkl|pickle|safetensors|npz|msgpack|h5|keras|t7|model|zip|params|npy|json)\b"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class SaveCadence:
    """How often: every `count` steps or epochs, which a setting may say."""

    unit: Kind
    count: int | None
    setting: str = ""
    where: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class CodeSave:
    """One place that saves."""

    parts: Parts  # the whole path
    is_folder: bool
    where: str
    site: Site
    cadence: SaveCadence | None
    is_inside_loop: bool
    holds: str  # what is saved, as written
    score: float = 0.0


@dataclass(frozen=True, slots=True)
class Pattern:
    """A checkpoint's name below a folder, and what says where that is."""

    name: str  # with {step}, {epoch} and *; a folder ends in /
    setting: str = ""  # the setting whose value the folder is, or the path itself where `name` is of its default
    folder: str = ""  # one that the code names itself; "." is its working folder
    in_checkpoints: bool = False  # it asks for $GPUFLEET_CHECKPOINTS
    is_whole_path: bool = False  # the setting is the file's own path


@dataclass(slots=True)
class Saves:
    """All of them, the one that a resume needs first, and what is read."""

    found: list[CodeSave] = field(default_factory=list)
    loads: list[tuple[Parts, Site]] = field(default_factory=list)


def find_saves(reach: Reach, values: Values) -> Saves:
    """What the reached code saves and loads."""
    renames = list(_renames(reach, values))
    found = Saves()
    for site in (through for each in reach.sites for through in _forwarded_calls(reach, each)):
        if called(site.call) in _LOADS:
            place = site.call.args[0] if site.call.args else None
            if place is not None and not (called(site.call) == "open" and _is_written(site.call)):
                found.loads += [(each, site) for each in values.resolve(place, site.scope)]
        for place, is_folder, holds in _written(site, values):
            for inner, at in _by_caller(reach, place, site):
                around = [*((each, site) for each in reversed(site.around) if at is not site), *around_of(reach, at)]
                for parts in values.resolve(inner, at.scope):
                    found.found.append(
                        CodeSave(
                            parts=next((new for old, new in renames if old == parts), parts),
                            is_folder=is_folder,
                            where=site.where,
                            site=at,
                            cadence=_cadence(values, around),
                            is_inside_loop=any(isinstance(each, ast.For | ast.While) for each, _ in around),
                            holds=holds,
                        )
                    )
    found.found = sorted(
        (replace(each, score=_score(each, found, values)) for each in found.found), key=lambda each: -each.score
    )
    return found


def _forwarded_calls(reach: Reach, site: Site) -> Iterator[Site]:
    """The call; where it passes on all that its function is given, as the calls of that function."""
    if not any(isinstance(each, ast.Starred) for each in site.call.args) or not site.scope.functions:
        yield site
        return
    function = site.scope.functions[-1]
    for each in reach.calls_of(function, site.scope) if function.args.vararg else ():
        yield Site(
            ast.Call(func=site.call.func, args=each.call.args, keywords=each.call.keywords, lineno=each.call.lineno),
            each.scope,
            each.around,
        )


def _by_caller(reach: Reach, place: ast.expr, site: Site, depth: int = 0) -> Iterator[tuple[ast.expr, Site]]:
    """The path, and where it is said: by each caller for itself where it is a parameter."""
    function = site.scope.functions[-1] if site.scope.functions else None
    names = [each.arg for each in function.args.args] if function is not None else []
    found = 0
    if function is not None and isinstance(place, ast.Name) and place.id in names and depth < 3:
        is_set = any(name == place.id for name, _ in assignments(walk(function)))
        for each in () if is_set else reach.calls_of(function, site.scope):
            position = names.index(place.id) - (names[0] in ("self", "cls"))
            if (inner := _argument(each.call, position, (place.id,))) is not None and not isinstance(
                inner, ast.Starred
            ):
                found += 1
                yield from _by_caller(reach, inner, each, depth + 1)
    if not found:
        yield place, site


def _written(site: Site, values: Values) -> Iterator[tuple[ast.expr, bool, str]]:
    """Where a call writes, whether that is a folder, and what it writes."""
    call, name = site.call, called(site.call)
    of = dotted(call.func).rpartition(".")[0] or (
        ast.unparse(call.func.value) if isinstance(call.func, ast.Attribute) else ""
    )
    if (
        name == "save_checkpoint"
        and (tag := _argument(call, 1, ("tag",))) is not None
        and (folder := _argument(call, 0, ("save_dir", "ckpt_dir"))) is not None
    ):
        if of and any(each.arg in ("tag", "client_state") for each in call.keywords):  # DeepSpeed's engine
            yield (
                ast.BinOp(
                    left=ast.Call(func=ast.Name(id="Path", ctx=ast.Load()), args=[folder], keywords=[]),
                    op=ast.Div(),
                    right=tag,
                ),
                True,
                of,
            )
        return
    for wanted, receiver, position, keywords, is_folder in _SAVES:
        if name != wanted or (receiver and not re.fullmatch(receiver, of)):
            continue
        if name in ("write_bytes", "write_text") and isinstance(call.func, ast.Attribute):
            yield call.func.value, False, ast.unparse(call)
        elif name == "write" and isinstance(call.func, ast.Attribute):
            if (place := _opened(call.func.value, site, values)) is not None:
                yield place, False, ast.unparse(call)
        elif (place := _argument(call, position, keywords)) is not None:
            if any(isinstance(each, ast.Starred) for each in call.args):
                continue
            opened = _opened(place, site, values)
            yield (opened or place), is_folder, _contents(call, site)
        return
    if (
        name == "save" and of and call.args and not isinstance(call.func, ast.Name)
    ):  # model.save(path), of keras or else
        for parts in values.resolve(call.args[0], site.scope):
            text = "".join(part for part in parts if isinstance(part, str))
            if _WEIGHTS.search(text) or re.search(r"[a-z]", text):
                yield call.args[0], False, of
                return


def _contents(call: ast.Call, site: Site) -> str:
    """What is saved, as its own words or those that its name stands for."""
    first = call.args[0] if call.args else None
    if isinstance(first, ast.Name):
        for function in site.scope.functions:
            for node in walk(function):
                if isinstance(node, ast.Assign) and any(
                    isinstance(t, ast.Name) and t.id == first.id for t in node.targets
                ):
                    return ast.unparse(node.value)[:500]
    return ast.unparse(first)[:500] if first is not None else ""


def _opened(place: ast.expr, site: Site, values: Values) -> ast.expr | None:
    """The path of a file that was opened for writing."""
    if isinstance(place, ast.Call):
        return _path_of_open(place)
    if isinstance(place, ast.Name):
        for node in (*site.around[::-1], *site.scope.functions[::-1]):
            for each in walk(node):
                items = each.items if isinstance(each, ast.With) else []
                pairs = [(item.optional_vars, item.context_expr) for item in items]
                if isinstance(each, ast.Assign):
                    pairs = [(target, each.value) for target in each.targets]
                for target, value in pairs:
                    if isinstance(target, ast.Name) and target.id == place.id and isinstance(value, ast.Call):
                        return _path_of_open(value)
    return None


def _path_of_open(call: ast.Call) -> ast.expr | None:
    if called(call) not in ("open", "GFile", "xopen", "BlobFile") or not _is_written(call):
        return None
    if (isinstance(call.func, ast.Attribute) and not call.args[:1]) or (
        isinstance(call.func, ast.Attribute)
        and isinstance(call.args[0], ast.Constant)
        and str(call.args[0].value) in ("w", "wb")
    ):
        return call.func.value  # Path(...).open("w")
    return call.args[0] if call.args else None


def _is_written(call: ast.Call) -> bool:
    words = [each.value for each in (*call.args, *(k.value for k in call.keywords)) if isinstance(each, ast.Constant)]
    return any(isinstance(each, str) and re.fullmatch(r"[wx]\+?b?\+?", each) for each in words)


def _argument(call: ast.Call, position: int, keywords: tuple[str, ...]) -> ast.expr | None:
    named = next((each.value for each in call.keywords if each.arg in keywords), None)
    return named if named is not None else call.args[position] if position < len(call.args) else None


def _renames(reach: Reach, values: Values) -> Iterator[tuple[Parts, Parts]]:
    """From the name under which something is written to the one that it gets."""
    for site in reach.sites:
        name, of = called(site.call), dotted(site.call.func).rpartition(".")[0]
        pair: list[ast.expr] = []
        if name in ("replace", "rename", "renames", "move") and of in ("os", "shutil", "gfile", "tf.io.gfile"):
            pair = list(site.call.args[:2])
        elif name in ("replace", "rename") and isinstance(site.call.func, ast.Attribute) and len(site.call.args) == 1:
            pair = [site.call.func.value, site.call.args[0]]
        for at, (before, after) in _pairs(reach, site, pair) if len(pair) == 2 else ():
            old, new = values.resolve(before, at.scope), values.resolve(after, at.scope)
            yield from zip(old, new if len(new) >= len(old) else new[:1] * len(old), strict=False)


def _pairs(reach: Reach, site: Site, pair: list[ast.expr], depth: int = 0) -> Iterator[tuple[Site, list[ast.expr]]]:
    """The two names of a rename, as each caller says them where a function of the folder's renames what it is given."""
    function = site.scope.functions[-1] if site.scope.functions else None
    names = [each.arg for each in function.args.args] if function is not None else []
    places = [names.index(each.id) for each in pair if isinstance(each, ast.Name) and each.id in names]
    if function is None or len(places) < 2 or depth > 2:
        yield site, pair
        return
    bound = names[0] in ("self", "cls")
    for each in reach.calls_of(function, site.scope):
        passed = [_argument(each.call, place - bound, (names[place],)) for place in places]
        if (both := [value for value in passed if value is not None]) and len(both) == 2:
            yield from _pairs(reach, each, both, depth + 1)


def around_of(reach: Reach, site: Site, depth: int = 0) -> Iterator[tuple[ast.stmt, Site]]:
    """The statements around a call, innermost first, and around the calls of the function that it is in."""
    for statement in reversed(site.around):
        yield statement, site
    if depth < 5 and site.scope.functions:
        function = site.scope.functions[-1]
        callers = [each for each in reach.calls_of(function, site.scope) if function not in each.scope.functions]
        for each in sorted(callers, key=lambda each: not any(isinstance(s, ast.For | ast.While) for s in each.around))[
            :1
        ]:
            yield from around_of(reach, each, depth + 1)


def _cadence(values: Values, around: list[tuple[ast.stmt, Site]]) -> SaveCadence | None:
    """What stands behind % in the nearest condition; a loop over epochs alone saves with each."""
    irregular = False
    for statement, site in around:
        where = f"{site.scope.file}:{statement.lineno}"
        if isinstance(statement, ast.If):
            for part in walk(statement.test):
                if isinstance(part, ast.BinOp) and isinstance(part.op, ast.Mod):
                    if isinstance(part.left, ast.Constant):
                        continue
                    counted = unit(ast.unparse(part.left).strip("()").split(" ")[0].split("(")[-1]) or _unit_of(
                        values, part.left, site.scope
                    )
                    if counted is None:
                        continue  # of ranks, say
                    if (number := values.number(part.right, site.scope)) is not None:
                        return SaveCadence(unit=counted, count=number, where=where)
                    for each in values.resolve(part.right, site.scope):
                        if len(each) == 1 and isinstance(each[0], str) and each[0].isdigit():
                            return SaveCadence(unit=counted, count=int(each[0]), where=where)
                        if len(each) == 1 and isinstance(each[0], Hole) and each[0].kind == "setting":
                            setting = values.settings.find(each[0].name)
                            return SaveCadence(
                                unit=counted,
                                count=setting.count if setting else None,
                                setting=each[0].name,
                                where=where,
                            )
                    return SaveCadence(unit=counted, count=None, where=where)
            text = ast.unparse(statement.test).lower()
            irregular = irregular or bool(re.search(r"best|<|>|improv|patience|\bin\b", text))
        elif isinstance(statement, ast.For | ast.While):
            kind = loop_unit(values, statement, site.scope)
            if kind == "epoch" and not irregular:
                return SaveCadence(unit="epoch", count=1, where=where)
            if kind is not None:
                return None
    return None


def _unit_of(values: Values, expr: ast.expr, scope: Scope) -> Kind | None:
    kinds = [p.kind for each in values.resolve(expr, scope) for p in each if isinstance(p, Hole)]
    return next((each for each in kinds if each in ("step", "epoch", "batch")), None)


def loop_unit(values: Values, loop: ast.stmt, scope: Scope) -> Kind | None:
    """What a loop counts: steps, epochs, batches; None: nothing that is known."""
    if isinstance(loop, ast.While):
        names = [dotted(node) for node in walk(loop.test) if isinstance(node, ast.Name | ast.Attribute)]
        return next((each for name in names if (each := unit(name)) is not None), None)
    if isinstance(loop, ast.For):
        target = loop.target.elts[0] if isinstance(loop.target, ast.Tuple) and loop.target.elts else loop.target
        kind = unit(dotted(target)) if isinstance(target, ast.Name) else None
        if (
            kind == "step"
            and loop_range(loop) is None
            and isinstance(loop.iter, ast.Call)
            and called(loop.iter) == "enumerate"
        ):
            return "batch"
        return kind or ("step" if loop_range(loop) is not None else None)
    return None


def _score(save: CodeSave, saves: Saves, values: Values) -> float:
    """Higher for what a resume needs: named like a checkpoint, inside a loop, with the optimizer, read again."""
    text = "".join(part if isinstance(part, str) else f"<{part.kind}>" for part in save.parts)
    name = text.rstrip("/").rpartition("/")[2]
    score = 2.0 * save.is_inside_loop + 1.5 * bool(_RESUMABLE.search(save.holds)) + 1.0 * (save.cadence is not None)
    score += 1.5 * ("<step>" in text or "<epoch>" in text) + 1.0 * bool(_WEIGHTS.search(name) or save.is_folder)
    score += 1.0 * bool(re.search(r"ckpt|checkpoint|last|state|latest|resume|snapshot|model", text, re.IGNORECASE))
    score -= 3.0 * bool(_OTHER.search(name)) + 2.0 * (
        called(save.site.call) in ("write", "write_text", "dump", "save_pretrained")
    )
    score += 1.5 * any(load == save.parts for load, _ in saves.loads if load != save.parts[:0])
    if save.cadence is not None and (setting := values.settings.find(save.cadence.setting)) is not None:
        score -= 4.0 * (isinstance(setting.value, int) and setting.value <= 0)  # off, as the script has it
    head = save.parts[0] if save.parts else None
    known = isinstance(head, str) or (isinstance(head, Hole) and head.kind in ("setting", "checkpoints"))
    score += 0.5 * known
    score += 1.0 * (save.site.scope.file == values.entry)
    score -= 2.0 * (not re.search(r"[A-Za-z<]", re.sub(r"<any>", "", text)))
    return score


def pattern(save: CodeSave, values: Values) -> Pattern | None:
    """The checkpoint's name and its folder; None where too little of the path is known."""
    parts, setting, folder, in_checkpoints = list(save.parts), "", "", False
    if not parts:
        return None
    head = parts[0]
    if isinstance(head, Hole) and head.kind == "checkpoints":
        in_checkpoints, parts = True, parts[1:]
    elif isinstance(head, Hole) and head.kind == "setting":
        declared = values.settings.find(head.name)
        default = declared.value if declared is not None else None
        if len(parts) == 1 and not save.is_folder:
            if not isinstance(default, str) or not default:
                return None
            return Pattern(posixpath.basename(default), head.name, is_whole_path=True)
        setting, parts = head.name, parts[1:]
        if parts and isinstance(parts[0], str) and not parts[0].startswith("/"):  # a prefix of names, not a folder
            return None if not isinstance(default, str) else _named([default.rstrip("/"), *parts], save)
    elif isinstance(head, Hole) and head.kind == "any" and len(parts) > 1:
        parts = parts[1:]
        if not (isinstance(parts[0], str) and parts[0].startswith("/")):
            parts.insert(0, head)
    elif isinstance(head, str):
        return _named([_known(each, values) for each in parts], save)
    name = _text([_known(each, values) for each in parts]).lstrip("/")
    found = _cut(name, save.is_folder)
    return Pattern(found, setting, folder, in_checkpoints) if found else None


def _named(parts: list[str | Hole], save: CodeSave) -> Pattern | None:
    """A path that the code names itself: the folders that are plain, and the rest below them."""
    text = posixpath.normpath(_text(parts)) if _text(parts).strip("/*") else ""
    fixed, rest = list[str](), text.split("/")
    while len(rest) > 1 and not re.search(r"[{*]", rest[0]):
        fixed.append(rest.pop(0))
    name = _cut("/".join(rest), save.is_folder)
    return Pattern(name, folder="/".join(fixed) or ".") if name else None


def _known(part: str | Hole, values: Values) -> str | Hole:
    """A setting in the middle of a path as its value, where it has one."""
    if isinstance(part, Hole) and part.kind == "setting":
        setting = values.settings.find(part.name)
        if (
            setting is not None
            and isinstance(setting.value, str | int)
            and not isinstance(setting.value, bool)
            and str(setting.value)
        ):
            return str(setting.value)
    return part


def _text(parts: list[str | Hole]) -> str:
    """As a pattern of names: {step}, {epoch}, and * for what is not known."""
    found = ""
    for part in parts:
        if isinstance(part, str):
            found += part
        elif part.kind in ("step", "epoch"):
            kind = "epoch" if re.search(r"(?<![a-z])ep(och)?[-_=:]?$", found, re.IGNORECASE) else part.kind
            word = f"{{{kind}:{part.form}}}" if part.form else f"{{{kind}}}"
            found += "*" if f"{{{kind}" in found else word
        else:
            found += "*" if not found.endswith("*") else ""
    return re.sub(r"\*{2,}", "*", found)


def _cut(name: str, is_folder: bool) -> str:
    """A pattern whose folder counts is that folder: all files in it are one checkpoint. Empty: too little is known."""
    parts = name.strip("/").split("/")
    for index, part in enumerate(parts[:-1]):
        if "{step" in part or "{epoch" in part:
            return "/".join(parts[: index + 1]) + "/"
    plain = "/".join(parts)
    if not re.search(r"[A-Za-z]", re.sub(r"\{(step|epoch)[^}]*\}|\*", "", plain)) and "{" not in plain:
        return ""
    return plain + ("/" if is_folder else "")
