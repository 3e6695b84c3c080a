"""What a text of the code is made of, without running it: `os.path.join(args.out, f"step{i:05d}.pt")` is the setting
`out`, then `/step`, then a step of five digits, then `.pt`.

Names are followed to what they are set to, parameters to the calls, attributes of self to their class. What cannot be
followed stays a hole.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from gpufleet.infra.discover.reach import Function, Reach, Scope, assignments, called, dotted, walk
from gpufleet.infra.discover.settings import ScriptSettings, literal

Kind = Literal["step", "epoch", "batch", "setting", "checkpoints", "any"]
MOST = 4  # values of one name that are looked at
DEEP = 9

_STEP = re.compile(
    r"(?:^|_)(?:step|steps|iter|iters|iteration|iterations|iter_num|niter|itr|it|update|updates|num_update|num_updates"
    r"|num_timesteps|timesteps?|global_step|kimg|nimg|cur_nimg)(?:$|_(?:num|idx|id|count|i|no|number|str|name|done|completed))"
)
_EPOCH = re.compile(r"(?:^|_)(?:epoch|epochs|ep|epoch_num|epoch_idx|epoch_name|epoch_id)(?:$|_)")
_BATCH = re.compile(r"(?:^|_)(?:batch|batch_idx|batch_id|batch_i|bi|batch_num|n_batch)(?:$|_)")
_PATHS = {
    "join",
    "Path",
    "PurePath",
    "PosixPath",
    "str",
    "joinpath",
    "abspath",
    "realpath",
    "expanduser",
    "fspath",
    "normpath",
    "resolve",
    "absolute",
    "as_posix",
    "expandvars",
    "to_absolute_path",
}


@dataclass(frozen=True, slots=True)
class Hole:
    """A part of a text that only a run knows. `name`: the setting's, or the expression."""

    kind: Kind
    name: str
    form: str = ""  # 05d


Parts = tuple[str | Hole, ...]


def unit(name: str) -> Kind | None:
    """What a name counts by its own words: steps, epochs, batches; None: nothing that is known."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).lower()
    if _EPOCH.search(plain) and not _STEP.search(plain):
        return "epoch"
    if _STEP.search(plain):
        return "step"
    return "batch" if _BATCH.search(plain) else None


class Values:
    """Follows expressions of what is reached to their parts."""

    def __init__(self, reach: Reach, settings: ScriptSettings) -> None:
        self._reach, self.settings, self.entry = reach, settings, reach.entry
        self._locals: dict[ast.AST, dict[str, list[ast.expr]]] = {}
        self._loops: dict[ast.AST, dict[str, ast.For]] = {}
        self._attributes: dict[ast.ClassDef, dict[str, list[tuple[ast.expr, Scope]]]] = {}
        self._following: set[str] = set()

    def resolve(self, expr: ast.expr | None, scope: Scope, depth: int = 0) -> list[Parts]:
        """The texts that an expression may be, at least one, the likeliest first."""
        if expr is None:
            return [(Hole("any", ""),)]
        return list(dict.fromkeys(_joined(each) for each in self._resolve(expr, scope, depth)))[:MOST]

    def number(self, expr: ast.expr | None, scope: Scope) -> int | None:
        """The whole number that an expression is, through names that are set to one; None: it is none, or a setting."""
        value = literal(expr)
        if isinstance(value, int | float) and not isinstance(value, bool) and value == int(value):
            return int(value)
        found: list[ast.expr] = []
        if isinstance(expr, ast.Name):
            setting = self.settings.find(expr.id)
            if setting is not None and setting.form and scope.file == self._reach.entry:
                return None
            for function in reversed(scope.functions):
                found = found or self._local(function).get(expr.id, [])
            names = self._reach.names(scope.file)
            found = found or (names.assigned.get(expr.id, []) if names else [])
        elif isinstance(expr, ast.Attribute) and dotted(expr) == f"self.{expr.attr}":
            found = [value for value, _ in self._of_class(scope, expr.attr)]
        return self.number(found[-1], scope) if found and found[-1] is not expr else None

    def _resolve(self, expr: ast.expr, scope: Scope, depth: int) -> Iterator[Parts]:
        hole: Parts = (Hole("any", ast.unparse(expr)[:80]),)
        if depth > DEEP:
            yield hole
        elif isinstance(expr, ast.Constant):
            yield (str(expr.value).replace("\\", "/"),) if isinstance(expr.value, str | int | float) else hole
        elif isinstance(expr, ast.JoinedStr):
            yield from self._concatenated([self._piece(each, scope, depth) for each in expr.values])
        elif isinstance(expr, ast.BinOp):
            yield from self._operation(expr, scope, depth)
        elif isinstance(expr, ast.Call):
            yield from self._call(expr, scope, depth)
        elif isinstance(expr, ast.Name):
            yield from self._name(expr, scope, depth)
        elif isinstance(expr, ast.Attribute):
            yield from self._attribute(expr, scope, depth)
        elif isinstance(expr, ast.Subscript):
            key = literal(expr.slice)
            if isinstance(key, str):
                yield from self._setting_or(self._chain(expr), hole)
            else:
                yield hole
        elif isinstance(expr, ast.IfExp):
            yield from self._resolve(expr.body, scope, depth + 1)
            yield from self._resolve(expr.orelse, scope, depth + 1)
        elif isinstance(expr, ast.BoolOp):
            for each in expr.values:
                yield from self._resolve(each, scope, depth + 1)
        elif isinstance(expr, ast.NamedExpr):
            yield from self._resolve(expr.value, scope, depth + 1)
        else:
            yield hole

    def _piece(self, part: ast.expr, scope: Scope, depth: int) -> list[Parts]:
        if not isinstance(part, ast.FormattedValue):
            return self.resolve(part, scope, depth + 1)
        form = (
            "".join(str(e.value) for e in part.format_spec.values if isinstance(e, ast.Constant))
            if isinstance(part.format_spec, ast.JoinedStr)
            else ""
        )
        return [_formatted(each, form) for each in self.resolve(part.value, scope, depth + 1)]

    def _concatenated(self, pieces: list[list[Parts]]) -> Iterator[Parts]:
        """Each way to join them, the first ones."""
        found: list[Parts] = [()]
        for options in pieces:
            found = [(*before, *option) for before in found for option in options][:MOST]
        yield from found

    def _operation(self, expr: ast.BinOp, scope: Scope, depth: int) -> Iterator[Parts]:
        if isinstance(expr.op, ast.Mod) and isinstance(expr.left, ast.Constant) and isinstance(expr.left.value, str):
            yield from self._percent(expr.left.value, expr.right, scope, depth)
            return
        left, right = self.resolve(expr.left, scope, depth + 1), self.resolve(expr.right, scope, depth + 1)
        is_path = any(isinstance(each, ast.Call) and called(each) in _PATHS for each in (expr.left, expr.right))
        if isinstance(expr.op, ast.Div) and (is_path or _is_text(left, right)):
            yield from self._concatenated([left, [("/",)], right])
            return
        counted = [
            p for each in (*left, *right) for p in each if isinstance(p, Hole) and p.kind in ("step", "epoch", "batch")
        ]
        if counted:
            if isinstance(expr.op, ast.Add) and any(
                isinstance(p, str) and re.search(r"[A-Za-z/._-]", p) for each in (*left, *right) for p in each
            ):
                yield from self._concatenated([left, right])
            else:
                yield (counted[0],)  # epoch + 1
        elif isinstance(expr.op, ast.Add):
            yield from self._concatenated([left, right])
        else:
            yield (Hole("any", ast.unparse(expr)[:80]),)

    def _percent(self, text: str, values: ast.expr, scope: Scope, depth: int) -> Iterator[Parts]:
        given = list(values.elts) if isinstance(values, ast.Tuple) else [values]
        pieces: list[list[Parts]] = []
        for part in re.split(r"(%(?:\(\w+\))?[-+ 0#]*\d*(?:\.\d+)?[a-zA-Z])", text):
            if match := re.fullmatch(r"%(?:\((\w+)\))?([-+ 0#]*\d*(?:\.\d+)?[a-zA-Z])", part):
                value = given.pop(0) if given else None
                pieces.append([_formatted(each, match[2]) for each in self.resolve(value, scope, depth + 1)])
            elif part:
                pieces.append([(part.replace("%%", "%"),)])
        yield from self._concatenated(pieces)

    def _format(self, text: Parts, call: ast.Call, scope: Scope, depth: int) -> Iterator[Parts]:
        """`"{}-{:04d}".format(a, b)`."""
        keywords = {each.arg: each.value for each in call.keywords}
        positional, pieces = iter(call.args), list[list[Parts]]()
        for chunk in text:
            if isinstance(chunk, Hole):
                pieces.append([(chunk,)])
                continue
            for part in re.split(r"(\{[\w.\[\]]*(?:![rsa])?(?::[^{}]*)?\})", chunk):
                if match := re.fullmatch(r"\{([\w.\[\]]*)(?:![rsa])?(?::([^{}]*))?\}", part):
                    if match[1].isdigit():
                        value = call.args[int(match[1])] if int(match[1]) < len(call.args) else None
                    else:
                        value = (
                            keywords.get(match[1].split(".")[0].split("[")[0]) if match[1] else next(positional, None)
                        )
                    pieces.append([_formatted(each, match[2] or "") for each in self.resolve(value, scope, depth + 1)])
                elif part:
                    pieces.append([(part.replace("{{", "{").replace("}}", "}"),)])
        yield from self._concatenated(pieces)

    def _call(self, expr: ast.Call, scope: Scope, depth: int) -> Iterator[Parts]:
        name, of = called(expr), expr.func.value if isinstance(expr.func, ast.Attribute) else None
        whole = dotted(expr.func)
        if name == "format" and of is not None and (expr.args or expr.keywords):
            for text in self.resolve(of, scope, depth + 1):
                yield from self._format(text, expr, scope, depth)
        elif whole in ("os.getenv", "os.environ.get", "environ.get", "getenv") and expr.args:
            if literal(expr.args[0]) == "GPUFLEET_CHECKPOINTS":
                yield (Hole("checkpoints", ""),)
            elif len(expr.args) > 1:
                yield from self._resolve(expr.args[1], scope, depth + 1)
            else:
                yield (Hole("any", ast.unparse(expr)[:80]),)
        elif name in _PATHS:
            pieces = [
                *(
                    [of]
                    if of is not None and name in ("joinpath", "resolve", "absolute", "as_posix", "expanduser")
                    else []
                ),
                *expr.args,
            ]
            options: list[list[Parts]] = [
                [(Hole("any", "*"),)] if isinstance(each, ast.Starred) else self.resolve(each, scope, depth + 1)
                for each in pieces
            ]
            between: list[list[Parts]] = []
            for option in options:
                between += [[("/",)], option] if between else [option]
            yield from self._concatenated(between) if options else iter([(Hole("any", whole),)])
        elif name in ("rstrip", "lstrip", "strip", "zfill", "lower", "item", "cpu", "upper") and of is not None:
            for each in self.resolve(of, scope, depth + 1):
                form = f"0{literal(expr.args[0])}d" if name == "zfill" and expr.args else ""
                yield _formatted(each, form) if form else each
        elif name == "replace" and of is not None and len(expr.args) == 2:
            old, new = (literal(each) for each in expr.args)
            for each in self.resolve(of, scope, depth + 1):
                yield tuple(
                    part.replace(str(old), str(new)) if isinstance(part, str) else Hole("any", part.name)
                    for part in each
                )
        elif name in ("getcwd", "cwd"):
            yield ("",)
        elif name == "int" and expr.args:
            yield from self._resolve(expr.args[0], scope, depth + 1)
        elif name == "get" and expr.args and isinstance(literal(expr.args[0]), str):
            yield from self._setting_or(
                f"{self._chain(of) if of is not None else ''}.{literal(expr.args[0])}".strip("."),
                (Hole("any", ast.unparse(expr)[:80]),),
            )
        elif name == "with_suffix" and of is not None and expr.args:
            for each in self.resolve(of, scope, depth + 1):
                yield (*each, str(literal(expr.args[0]) or ""))
        elif re.search(r"increment|unique|outdir", name) and expr.args and not isinstance(expr.args[0], ast.Starred):
            for each in self.resolve(expr.args[0], scope, depth + 1):  # a folder that counts up
                yield (*each, Hole("any", "*"))
        else:
            found = False
            for function, inner in self._functions(expr, scope):
                for node in walk(function):
                    if (
                        isinstance(node, ast.Return)
                        and node.value is not None
                        and not isinstance(node.value, ast.Constant | ast.Tuple | ast.Dict)
                    ):
                        found = True
                        yield from self._resolve(node.value, inner, depth + 2)
            if not found:
                yield (Hole(unit(whole) or "any", ast.unparse(expr)[:80]),)

    def _functions(self, expr: ast.Call, scope: Scope) -> Iterator[tuple[Function, Scope]]:
        """The function of the folder that a call is of, where that is plain."""
        if isinstance(expr.func, ast.Name) and (found := self._reach.symbol(scope.file, expr.func.id)):
            if isinstance(found[1], Function):
                yield found[1], Scope(found[0], (found[1],))
        elif (module := dotted(expr.func).rpartition(".")[0]) and (found := self._reach.symbol(scope.file, module)):
            there = self._reach.symbol(found[0], called(expr)) if found[1] is None else None
            if there is not None and isinstance(there[1], Function):
                yield there[1], Scope(there[0], (there[1],))
        elif dotted(expr.func).startswith("self.") and scope.cls is not None:
            for node in scope.cls.body:
                if isinstance(node, Function) and node.name == called(expr):
                    yield node, Scope(scope.file, (node,), scope.cls)

    def _name(self, expr: ast.Name, scope: Scope, depth: int) -> Iterator[Parts]:
        name, counted = expr.id, unit(expr.id)
        for function in reversed(scope.functions):
            if (loop := self._loop(function).get(name)) is not None and not (values := self._local(function).get(name)):
                elements = list(self._elements(loop.iter, function)) if not counted else []
                for each in elements[:MOST]:
                    yield from self._resolve(each, scope, depth + 1)
                if not elements:
                    yield (Hole(counted or _loop_kind(loop), name),)
                return
            if values := self._local(function).get(name):
                if counted and not any(_is_formatted(each) for each in values):
                    yield (Hole(counted, name),)
                    return
                yield from self._assigned(values, expr, scope, depth)
                return
            arguments = [*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs]
            if any(each.arg == name for each in arguments):
                yield from self._parameter(function, name, scope, depth, counted)
                return
        if counted:
            yield (Hole(counted, name),)
            return
        found = self._reach.symbol(scope.file, name)
        names = self._reach.names(found[0]) if found else None
        setting = self.settings.find(name)
        if setting is not None and setting.form and scope.file == self._reach.entry and found and found[1] is None:
            yield (Hole("setting", setting.name),)
        elif names is not None and found is not None and found[1] is None:
            there = self._imported_name(scope.file, name)
            if there not in names.assigned:
                yield (Hole("any", name),)
            elif scope.functions or found[0] != scope.file:
                for each in names.assigned[there][-MOST:][::-1]:
                    yield from self._resolve(each, Scope(found[0]), depth + 1)
            else:
                yield from self._assigned(names.assigned[there], expr, scope, depth)
        else:
            loops = self._loop(names.tree) if (names := self._reach.names(scope.file)) else {}
            yield (Hole(_loop_kind(loops[name]) if name in loops else "any", name),)

    def _assigned(self, values: list[ast.expr], expr: ast.Name, scope: Scope, depth: int) -> Iterator[Parts]:
        """What a name was set to before it is used, the last first, as far as that does not go on from what it was."""
        here = (expr.lineno, expr.col_offset)
        before = [each for each in values if (each.end_lineno or 0, each.end_col_offset or 0) <= here]
        for each in reversed((before or [each for each in values if (each.lineno, each.col_offset) > here])[-MOST:]):
            yield from self._resolve(each, scope, depth + 1)
            if any(isinstance(node, ast.Name) and node.id == expr.id for node in walk(each)):
                return

    def _elements(self, expr: ast.expr, function: ast.AST) -> Iterator[ast.expr]:
        """What a loop goes through, where that is a list that stands in the function."""
        if isinstance(expr, ast.List | ast.Tuple):
            yield from expr.elts
        elif isinstance(expr, ast.Name):
            listed = [each for each in self._local(function).get(expr.id, []) if isinstance(each, ast.List | ast.Tuple)]
            found = [element for each in listed for element in each.elts]
            calls = (node for node in walk(function) if isinstance(node, ast.Call) and node.args)
            yield from found or [call.args[0] for call in calls if dotted(call.func) == f"{expr.id}.append"]

    def _imported_name(self, file: str, name: str) -> str:
        names = self._reach.names(file)
        return names.imports[name][1] or name if names and name in names.imports else name

    def _parameter(
        self, function: Function, name: str, scope: Scope, depth: int, counted: Kind | None
    ) -> Iterator[Parts]:
        """What the calls give for it, else its default."""
        if counted:
            yield (Hole(counted, name),)
            return
        arguments = [*function.args.posonlyargs, *function.args.args]
        names = [each.arg for each in arguments]
        bound = scope.cls is not None and names[:1] in (["self"], ["cls"])
        outer = Scope(scope.file, scope.functions[: scope.functions.index(function)], scope.cls)
        found = 0
        for site in self._reach.calls_of(
            function, Scope(scope.file, (), scope.cls if function in getattr(scope.cls, "body", ()) else None)
        ):
            value = next((each.value for each in site.call.keywords if each.arg == name), None)
            position = names.index(name) - bound if name in names else -1
            if value is None and 0 <= position < len(site.call.args):
                value = site.call.args[position]
            if value is None and any(each.arg is None for each in site.call.keywords):
                for later, there in self._set_anywhere.get(name, [])[:1] if name not in self._following else ():
                    found += 1
                    self._following.add(name)
                    yield from self.resolve(later, there, depth + 3)
                    self._following.discard(name)
            if value is not None and not isinstance(value, ast.Starred) and found < MOST and depth < DEEP:
                found += 1
                yield from self._resolve(value, site.scope, depth + 2)
        if found:
            return
        if (setting := self.settings.find(name)) is not None and setting.form and setting.where.startswith(scope.file):
            yield (Hole("setting", setting.name),)
            return
        defaults = dict(zip(names[::-1], function.args.defaults[::-1], strict=False))
        defaults |= {
            each.arg: value
            for each, value in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True)
            if value
        }
        if name in defaults and not (isinstance(defaults[name], ast.Constant) and defaults[name].value is None):  # type: ignore[attr-defined]
            yield from self._resolve(defaults[name], outer, depth + 1)
        else:
            yield (Hole("any", name),)

    def _attribute(self, expr: ast.Attribute, scope: Scope, depth: int) -> Iterator[Parts]:
        chain = dotted(expr)
        counted = unit(expr.attr)
        hole: Parts = (Hole(counted or "any", chain or ast.unparse(expr)[:80]),)
        if not chain:
            inner = expr.value
            if expr.attr in ("name", "parent", "stem"):
                yield from self._resolve(inner, scope, depth + 1)
            else:
                yield hole
            return
        parts = chain.split(".")
        if parts[0] in ("self", "cls") and len(parts) == 2:
            if counted:
                yield hole
                return
            values = self._of_class(scope, parts[1])
            for value, inner_scope in values[:MOST]:
                yield from self._resolve(value, inner_scope, depth + 1)
            if not values:
                yield from self._setting_or("", hole)
            return
        base = self._reach.symbol(scope.file, parts[0])
        if base is not None and base[1] is None and not any(parts[0] in self._local(f) for f in scope.functions):
            names = self._reach.names(base[0])
            if names and parts[1] in names.assigned and base[0] != scope.file:
                for each in names.assigned[parts[1]][-1:]:
                    yield from self._resolve(each, Scope(base[0]), depth + 1)
                return
        local = [each for function in scope.functions for each in self._local(function).get(chain, [])]
        for each in local[-MOST:]:
            if not counted and isinstance(each, ast.JoinedStr | ast.Call | ast.BinOp | ast.Constant):
                yield from self._resolve(each, scope, depth + 2)
        yield from self._setting_or(
            ".".join(parts[1:]) if parts[0] not in ("self", "cls") else ".".join(parts[2:]), hole
        )

    def _setting_or(self, name: str, hole: Parts) -> Iterator[Parts]:
        setting = self.settings.find(name) if name else None
        if setting is None and "." in name:
            setting = self.settings.find(name.partition(".")[2]) or self.settings.find(name.rpartition(".")[2])
        last = name.rpartition(".")[2]
        values = [] if setting is not None or not last else self._set_anywhere.get(last, [])
        if 0 < len(values) <= MOST and last not in self._following:
            self._following.add(last)
            for value, there in values:
                yield from self.resolve(value, there, 3)
            self._following.discard(last)
        else:
            yield (Hole("setting", setting.name),) if setting is not None else hole

    @cached_property
    def _set_anywhere(self) -> dict[str, list[tuple[ast.expr, Scope]]]:
        """What attributes of settings are set to while it runs: `args.save_dir = str(...)`."""
        found: dict[str, list[tuple[ast.expr, Scope]]] = {}
        for node, scope in self._reach.units:
            for name, value in assignments(walk(node)):
                if "." in name and not name.startswith("self.") and not isinstance(value, ast.Constant):
                    found.setdefault(name.rpartition(".")[2], []).append((value, scope))
        return found

    def _chain(self, expr: ast.expr) -> str:
        """`train.out` of config["train"]["out"], without what holds it."""
        if isinstance(expr, ast.Subscript) and isinstance(key := literal(expr.slice), str):
            return f"{self._chain(expr.value)}.{key}".strip(".")
        if isinstance(expr, ast.Attribute):
            return f"{self._chain(expr.value)}.{expr.attr}".strip(".")
        return ""

    def _of_class(self, scope: Scope, name: str) -> list[tuple[ast.expr, Scope]]:
        """What an attribute of self is set to, in the class or one that it stands on."""
        cls, file, found = scope.cls, scope.file, list[tuple[ast.expr, Scope]]()
        for _ in range(5):
            if cls is None:
                return found
            if cls not in self._attributes:
                table: dict[str, list[tuple[ast.expr, Scope]]] = {}
                for method in cls.body:
                    nodes = walk(method) if isinstance(method, Function) else [method]
                    inner = Scope(file, (method,), cls) if isinstance(method, Function) else Scope(file, (), cls)
                    for key, value in assignments(nodes):
                        if not (isinstance(value, ast.Constant) and value.value is None):
                            table.setdefault(key.removeprefix("self."), []).append((value, inner))
                    if isinstance(method, Function) and any(
                        dotted(each) == "property" for each in method.decorator_list
                    ):
                        for node in walk(method):
                            if isinstance(node, ast.Return) and node.value is not None:
                                table.setdefault(method.name, []).append((node.value, inner))
                self._attributes[cls] = table
            if found := self._attributes[cls].get(name, []):
                return found
            up = next(
                (each for base in cls.bases if (each := self._reach.symbol(file, dotted(base).split(".")[0]))), None
            )
            file, cls = (up[0], up[1]) if up and isinstance(up[1], ast.ClassDef) else (file, None)
        return found

    def _local(self, function: ast.AST) -> dict[str, list[ast.expr]]:
        if function not in self._locals:
            table: dict[str, list[ast.expr]] = {}
            for name, value in assignments(walk(function)):
                if not (isinstance(value, ast.Constant) and value.value is None):
                    table.setdefault(name, []).append(value)
            self._locals[function] = table
        return self._locals[function]

    def _loop(self, function: ast.AST) -> dict[str, ast.For]:
        if function not in self._loops:
            table: dict[str, ast.For] = {}
            for node in walk(function):
                if isinstance(node, ast.For):
                    first = (
                        node.target.elts[0] if isinstance(node.target, ast.Tuple) and node.target.elts else node.target
                    )
                    if isinstance(first, ast.Name):
                        table.setdefault(first.id, node)
            self._loops[function] = table
        return self._loops[function]


def loop_range(loop: ast.For | ast.AsyncFor) -> ast.Call | None:
    """The `range` that a loop goes through, inside of a bar too; None: it goes through something else."""
    calls = [node for node in walk(loop.iter) if isinstance(node, ast.Call)]
    return next((each for each in calls if called(each) in ("range", "trange", "count", "prange") and each.args), None)


def _loop_kind(loop: ast.For) -> Kind:
    """What a loop's own number is: a step of a range, a batch of what is enumerated."""
    if loop_range(loop) is not None:
        return "step"
    return (
        "batch"
        if isinstance(loop.iter, ast.Call) and called(loop.iter) in ("enumerate", "tqdm", "log_every")
        else "any"
    )


def _is_formatted(value: ast.expr) -> bool:
    """Whether it is a text that is put together, not a number."""
    is_call = isinstance(value, ast.Call) and called(value) in ("format", "join")
    return (
        is_call or isinstance(value, ast.JoinedStr) or (isinstance(value, ast.BinOp) and isinstance(value.op, ast.Mod))
    )


def _joined(parts: Iterable[str | Hole]) -> Parts:
    """Neighbouring texts as one."""
    found: list[str | Hole] = []
    for each in parts:
        if isinstance(each, str) and found and isinstance(found[-1], str):
            found[-1] += each
        elif each != "":
            found.append(each)
    return tuple(found)


def _formatted(parts: Parts, form: str) -> Parts:
    """What is formatted as a number of digits has them."""
    match = re.fullmatch(r"0(\d+)[di]?", form)
    if match and len(parts) == 1 and isinstance(parts[0], Hole):
        return (Hole(parts[0].kind, parts[0].name, f"0{match[1]}d"),)
    return parts


def _is_text(left: list[Parts], right: list[Parts]) -> bool:
    """Whether `/` joins a path: one side has letters, or is a setting that is no number."""
    return any(isinstance(p, str) and re.search(r"[A-Za-z.]", p) for each in (*left, *right) for p in each) or any(
        isinstance(p, Hole) and p.kind == "checkpoints" for each in left for p in each
    )
