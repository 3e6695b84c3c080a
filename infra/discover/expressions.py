"""Finds the parts of a text in the code without running it: `os.path.join(args.out, f"step{i:05d}.pt")` is the setting
`out`, then `/step`, then a step of five digits, then `.pt`.

The search goes from a name to its values, from a parameter to the calls, and from an attribute of self to its class. A
part that cannot be found this way stays a hole.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

from gpufleet.infra.discover.reach import Function, Reach, Scope, Site, assignments, called, dotted, walk
from gpufleet.infra.discover.settings import ScriptSettings, Setting, environment_key, literal

Kind = Literal["step", "epoch", "batch", "setting", "checkpoints", "any"]
Part = TypeVar("Part")
Piece = str | tuple[ast.expr | None, str]  # a text, or a value with its format
Bound = tuple[ast.expr | ast.For, Scope]  # a name's value, or the loop whose counter the name is; and its place
MOST = 4  # most values of one name that are looked at
DEEP = 11

_UNITS: tuple[tuple[Kind, re.Pattern[str]], ...] = (
    (
        "step",
        re.compile(
            r"(?:^|_)(?:step|iter|iteration|update|timestep)s?(?:$|_(?:num|idx|id|count|i|no|number|str|name|done))"
            r"|(?:^|_)(?:niter|itr|it|(?:iter_|cur_)?n(?:um|img)|num_updates?|num_timesteps|kimg)$"
        ),
    ),
    ("epoch", re.compile(r"(?:^|_)epochs?(?:$|_)|(?:^|_)ep(?:$|_(?:num|idx|id|i|no))")),
    ("batch", re.compile(r"(?:^|_)(?:batch|bi)(?:$|_(?:idx|id|i|num))|n_batch")),
)
_JOIN = {"join", "joinpath", "Path", "PurePath", "PosixPath"}
# Calls that return their first argument, or the object whose method they are, with the same path or number.
_OF_FIRST = {"str", "int", "abspath", "realpath", "expanduser", "fspath", "normpath", "expandvars", "to_absolute_path"}
_OF_OWNER = {"resolve", "absolute", "as_posix", "expanduser", "strip", "rstrip", "lstrip", "lower", "item"}
_OPENS = {"open", "GFile", "xopen", "BlobFile"}
_COUNTS_UP = re.compile(r"increment|unique|outdir")  # functions that put the next free number into a folder's name
_PERCENT = re.compile(r"(%(?:\(\w+\))?[-+ 0#]*\d*(?:\.\d+)?[a-zA-Z])")
_BRACES = re.compile(r"(\{[\w.\[\]]*(?:![rsa])?(?::[^{}]*)?\})")


@dataclass(frozen=True, slots=True)
class Hole:
    """A part of a text that is known only when the script runs. `name`: the name of the setting, or the expression."""

    kind: Kind
    name: str
    form: str = ""  # its format, such as 05d


Parts = tuple[str | Hole, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """A number of steps or epochs, from the code or a setting; `count` is None if the number is not known."""

    unit: Kind = "step"
    count: int | None = None
    where: str = ""
    setting: Setting | None = None

    @classmethod
    def from_setting(cls, setting: Setting, unit: Kind) -> Span:
        return cls(unit=unit, count=setting.count, where=setting.place, setting=setting)


def unit(name: str) -> Kind | None:
    """What a name counts, by the words in it: steps, epochs or batches; None if not known, or if it is a bound."""
    plain = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name.rpartition(".")[2]).lower()
    if re.search(r"(?:^|_)max_|_per_|warmup|accum", plain):
        return None
    return next((kind for kind, pattern in _UNITS if pattern.search(plain)), None)


def pieces(expr: ast.AST | None) -> list[Piece]:
    """The texts and values that an expression joins into a text; empty if the expression joins none."""
    match expr:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.JoinedStr():
            return [piece for part in expr.values for piece in pieces(part)]
        case ast.FormattedValue(value=value, format_spec=form):
            return [(value, "".join(piece for piece in pieces(form) if isinstance(piece, str)))]
        case ast.BinOp(left=ast.Constant(value=str() as text), op=ast.Mod(), right=right):
            return _filled(_PERCENT, text, right.elts if isinstance(right, ast.Tuple) else [right])
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            both = [*(pieces(left) or [(left, "")]), *(pieces(right) or [(right, "")])]
            return both if any(isinstance(piece, str) for piece in both) else []
        case ast.Call(func=ast.Attribute(value=ast.Constant(value=str() as text), attr="format")):
            return braced(text, expr)
        case ast.Call(func=ast.Name(id="str"), args=[only]):
            return pieces(only) or [(only, "")]
    return []


def percented(text: str, values: list[ast.expr]) -> list[Piece]:
    """The pieces of `"%04d: %s" % values`; logging formats in the same way."""
    return _filled(_PERCENT, text, values)


def braced(text: str, call: ast.Call) -> list[Piece]:
    """The pieces of `"{}-{:04d}".format(a, b)`."""
    return _filled(_BRACES, text, call.args, {str(keyword.arg): keyword.value for keyword in call.keywords})


def _filled(
    holes: re.Pattern[str], text: str, values: list[ast.expr], named: dict[str, ast.expr] | None = None
) -> list[Piece]:
    following, parts = iter(values), list[Piece]()
    for index, part in enumerate(holes.split(text)):
        if index % 2 and part[0] == "%":
            parts.append((next(following, None), part[1:]))
        elif index % 2:
            key, _, form = part[1:-1].partition(":")
            plain = re.split(r"[.\[!]", key)[0]
            value = values[int(plain)] if plain.isdigit() and int(plain) < len(values) else (named or {}).get(plain)
            parts.append((value if plain else next(following, None), form))
        elif part:
            parts.append(part.replace("%%", "%") if holes is _PERCENT else part.replace("{{", "{").replace("}}", "}"))
    return parts


def opened(call: ast.Call) -> ast.expr | None:
    """The path of a file that a call opens; None if the call opens none."""
    if called(call) not in _OPENS:
        return None
    if isinstance(call.func, ast.Attribute) and (not call.args or re.fullmatch("[wrax]b?", str(literal(call.args[0])))):
        return call.func.value  # for example Path(...).open("w")
    return call.args[0] if call.args else None


class Values:
    """Follows expressions of the reached code to their parts."""

    def __init__(self, reach: Reach, settings: ScriptSettings) -> None:
        self._reach, self.settings, self.entry = reach, settings, reach.entry
        self._locals: dict[ast.AST, dict[str, list[ast.expr | ast.For]]] = {}
        self._attributes: dict[ast.ClassDef, dict[str, list[Bound]]] = {}
        self._defaults: set[ast.AST] = set()  # values that replace an attribute if it is None
        self._following: set[str] = set()
        self._asked: set[ast.AST] = set()  # conditions that are being looked at
        self._never: dict[tuple[Site, str | None], bool] = {}
        self._bodies: dict[ast.If, set[ast.AST]] = {}

    def resolve(self, expr: ast.AST | None, scope: Scope, depth: int = 0) -> list[Parts]:
        """The texts that an expression may give: at least one, the likeliest first."""
        if expr is None or depth > DEEP:
            return [(Hole("any", ""),)]
        return list(dict.fromkeys(itertools.islice(map(joined, self._resolve(expr, scope, depth)), 3 * MOST)))[:MOST]

    def quantity(self, expr: ast.AST | None, scope: Scope, depth: int = 0) -> tuple[int | None, Setting | None]:
        """The whole number that an expression gives, and the setting that it comes from; each is None if not known."""
        if not isinstance(expr, ast.expr) or depth > DEEP:
            return None, None
        value = literal(expr)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return (int(value) if value == int(value) else None), None
        if isinstance(expr, ast.Subscript):
            for table, there in self._dictionaries(expr.value, scope, depth):
                for key, inner in zip(table.keys, table.values, strict=True):
                    if key is not None and literal(key) == literal(expr.slice):
                        return self.quantity(inner, there, depth + 1)
        if called(expr) in _OF_FIRST and expr.args:  # type: ignore[attr-defined]
            return self.quantity(expr.args[0], scope, depth + 1)  # type: ignore[attr-defined]
        if isinstance(expr, ast.Call) and (read := self.settings.find(environment_key(expr))) is not None:
            return read.count, read
        chain = dotted(expr)
        if (own := self._own_setting(chain, scope)) is not None:
            return own.count, own
        for node, there in self.bound(chain, expr, scope) if chain else ():
            if (quantity := self.quantity(node, there, depth + 1)) != (None, None):
                return quantity
        setting = self.settings.find(_key(expr) or chain) if _key(expr) or chain else None
        return (setting.count if setting is not None else None), setting

    def is_never(self, site: Site, but: str | None = None) -> bool:
        """Whether a condition around a call does not hold as the settings and the code have it. A setting that is empty
        counts as off only if `but` is given, a setting which does not count.
        """
        if not self._asked and (site, but) in self._never:
            return self._never[site, but]
        is_off = any(
            isinstance(statement, ast.If)
            and site.call in self._body(statement)
            and self._is_off(statement.test, site.scope, but)
            for statement in site.around
        )
        return is_off if self._asked else self._never.setdefault((site, but), is_off)

    def never_runs(self, site: Site, but: str | None = None, depth: int = 0) -> bool:
        """Whether the conditions around a call, or those around all calls of its function, do not hold."""
        function = site.scope.functions[-1] if site.scope.functions and depth < 4 else None
        callers = self._reach.calls_of(function, site.scope)[:MOST] if function is not None else []
        ends = (self.never_runs(caller, but, depth + 1) for caller in callers)
        return self.is_never(site, but) or (bool(callers) and all(ends))

    def _body(self, statement: ast.If) -> set[ast.AST]:
        """The nodes of a condition's first branch."""
        if statement not in self._bodies:
            self._bodies[statement] = {node for inner in statement.body for node in walk(inner)}
        return self._bodies[statement]

    def switches(self, site: Site) -> Iterator[Setting]:
        """The options without a value that would have to be given for the conditions around a call to hold."""
        for statement in site.around:
            test = statement.test if isinstance(statement, ast.If) else None
            for way in self.resolve(test, site.scope) if isinstance(test, ast.Name | ast.Attribute) else ():
                setting = self.settings.find(way[0].name) if len(way) == 1 and isinstance(way[0], Hole) else None
                if setting is not None and setting.is_flag and setting.value is False and self.is_never(site):
                    yield setting

    def _is_off(self, test: ast.expr, scope: Scope, but: str | None = None) -> bool:
        if isinstance(test, ast.BoolOp):
            ends = any if isinstance(test.op, ast.And) else all
            return ends(self._is_off(value, scope, but) for value in test.values)
        if test in self._asked:
            return False
        self._asked.add(test)
        ways = self.resolve(test, scope)
        self._asked.discard(test)
        settings = [self.settings.find(way[0].name) if way and isinstance(way[0], Hole) else None for way in ways]
        return all(
            way == ("False",)
            or (
                setting is not None
                and (setting.value is False or (but not in (None, setting.name) and not setting.value))
            )
            for way, setting in zip(ways, settings, strict=False)
        )

    def _dictionaries(self, expr: ast.expr | ast.For, scope: Scope, depth: int) -> Iterator[tuple[ast.Dict, Scope]]:
        """Yields the dictionaries that an expression may give, if the code writes them out."""
        if isinstance(expr, ast.Dict):
            yield expr, scope
        elif depth <= DEEP and (chain := dotted(expr)):
            for node, there in self.bound(chain, expr, scope):
                yield from self._dictionaries(node, there, depth + 1)

    def kinds(self, expr: ast.AST | None, scope: Scope) -> Kind | None:
        """What an expression counts; None if not known."""
        holes = (part for parts in self.resolve(expr, scope) for part in parts if isinstance(part, Hole))
        return next((hole.kind for hole in holes if hole.kind in ("step", "epoch", "batch")), None)

    def _resolve(self, expr: ast.AST, scope: Scope, depth: int) -> Iterator[Parts]:
        hole: Parts = (Hole("any", ast.unparse(expr)[:80]) if not isinstance(expr, ast.For) else Hole("any", ""),)
        if several := pieces(expr):
            yield from self._put_together(several, scope, depth)
            return
        match expr:
            case ast.Constant(value=int() | float() as value):
                yield (str(value),)
            case ast.For():
                yield from self._counted_by(expr, scope, depth)
            case ast.Name() | ast.Attribute() if chain := dotted(expr):
                yield from self._named(chain, expr, scope, depth)
            case ast.Attribute(attr="name" | "parent" | "stem", value=inner) | ast.NamedExpr(value=inner):
                yield from self.resolve(inner, scope, depth + 1)
            case ast.BinOp():
                yield from self._operation(expr, scope, depth)
            case ast.Call():
                yield from self._call(expr, hole, scope, depth)
            case ast.Attribute() | ast.Subscript() if key := _key(expr):
                yield from self._setting_or(key, hole)
            case ast.IfExp(body=one, orelse=two):
                yield from (*self.resolve(one, scope, depth + 1), *self.resolve(two, scope, depth + 1))
            case ast.BoolOp(values=several_values):
                yield from (parts for operand in several_values for parts in self.resolve(operand, scope, depth + 1))
            case _:
                yield hole

    def _put_together(self, several: Iterable[Piece | Hole], scope: Scope, depth: int) -> Iterator[Parts]:
        """Yields the texts that `several` can give when joined, up to a bound."""
        options: list[list[Parts]] = []
        for piece in several:
            if isinstance(piece, str | Hole):
                options.append([(piece.replace("\\", "/") if isinstance(piece, str) else piece,)])
            else:
                options.append([_formatted(parts, piece[1]) for parts in self.resolve(piece[0], scope, depth + 1)])
        for ways in itertools.islice(itertools.product(*options), MOST):
            yield tuple(part for parts in ways for part in parts)

    def _operation(self, expr: ast.BinOp, scope: Scope, depth: int) -> Iterator[Parts]:
        first, second = (self.resolve(operand, scope, depth + 1) for operand in (expr.left, expr.right))
        parts = [part for way in (*first, *second) for part in way]
        counted = next((p for p in parts if isinstance(p, Hole) and p.kind in ("step", "epoch", "batch")), None)
        is_path = any(called(operand) in _JOIN | _OF_FIRST for operand in (expr.left, expr.right))
        is_path = is_path or any(
            re.search(r"[A-Za-z.]", p) if isinstance(p, str) else p.kind == "checkpoints" for p in parts
        )
        if isinstance(expr.op, ast.Div) and is_path:
            yield from ((*one, "/", *two) for one in first for two in second)
        elif isinstance(expr.op, ast.Add) and any(
            isinstance(part, str) and re.search("[A-Za-z]", part) for part in parts
        ):
            yield from ((*one, *two) for one in first for two in second)
        elif isinstance(expr.op, ast.FloorDiv) and literal(expr.right) is None:
            yield (Hole("any", ast.unparse(expr)[:80]),)  # it counts saves, for example
        elif counted is not None:
            yield (counted,)  # for example epoch + 1
        elif isinstance(expr.op, ast.Add):
            yield from ((*one, *two) for one in first for two in second)
        else:
            yield (Hole("any", ast.unparse(expr)[:80]),)

    def _call(self, expr: ast.Call, hole: Parts, scope: Scope, depth: int) -> Iterator[Parts]:
        name, of = called(expr), expr.func.value if isinstance(expr.func, ast.Attribute) else None
        first = expr.args[0] if expr.args else None
        if (path := opened(expr)) is not None:
            yield from self.resolve(path, scope, depth + 1)
        elif name == "format" and of is not None and (first is not None or expr.keywords):
            for text in self.resolve(of, scope, depth + 1):
                parts = [piece for part in text for piece in ([part] if isinstance(part, Hole) else braced(part, expr))]
                yield from self._put_together(parts, scope, depth)
        elif variable := environment_key(expr):
            is_ours = variable == "GPUFLEET_CHECKPOINTS"
            yield (Hole("checkpoints", "") if is_ours else Hole("setting", variable),)
        elif name in _JOIN:
            joined = [of] if of is not None and name == "joinpath" else []
            several = [
                (None, "") if isinstance(argument, ast.Starred) else (argument, "")
                for argument in (*joined, *expr.args)
            ]
            yield from self._put_together([p for piece in several for p in ("/", piece)][1:], scope, depth)
        elif (name in _OF_FIRST and first is not None) or (name in _OF_OWNER | {"zfill"} and of is not None):
            form = f"0{literal(first)}d" if name == "zfill" else ""
            inner = first if name in _OF_FIRST and first is not None else of
            yield from (_formatted(way, form) for way in self.resolve(inner, scope, depth + 1))
        elif name == "get" and isinstance(key := literal(first), str):
            yield from self._setting_or(f"{_key(of)}.{key}".strip("."), hole)
        elif name == "with_suffix" and of is not None:
            yield from ((*way, str(literal(first) or "")) for way in self.resolve(of, scope, depth + 1))
        elif _COUNTS_UP.search(name) and first is not None:
            below = ("/",) if len(expr.args) > 1 else ()  # the next argument is joined to the first one
            yield from ((*way, *below, Hole("any", "*")) for way in self.resolve(first, scope, depth + 1))
        else:
            results = [
                parts
                for function, inner in self._functions(expr, scope)
                for node in walk(function)
                if isinstance(node, ast.Return)
                and not isinstance(node.value, ast.Constant | ast.Tuple | ast.Dict | None)
                for expr_there, there in self._given_back(node.value, function, expr, inner, scope)
                for parts in self.resolve(expr_there, there, depth + 2)
            ]
            yield from results or [(Hole(unit(dotted(expr.func)) or "any", ast.unparse(expr)[:80]),)]

    def _given_back(
        self, value: ast.expr | None, function: Function, call: ast.Call, inner: Scope, outer: Scope
    ) -> Iterator[tuple[ast.expr | None, Scope]]:
        """Yields what a function returns, each with its place; in place of its parameter what this call gives it."""
        ways = [value]
        if isinstance(value, ast.IfExp):  # `default if value is None else value`, or the other way round
            is_none = isinstance(value.test, ast.Compare) and isinstance(value.test.ops[0], ast.Is)
            ways = [value.orelse, value.body] if is_none else [value.body, value.orelse]
        names = [parameter.arg for parameter in function.args.args if parameter.arg not in ("self", "cls")]
        for way in filter(None, ways):
            name = dotted(way)
            argument = Site(call, outer, ()).argument(names.index(name), name) if name in names else None
            yield (argument, outer) if argument is not None else (way, inner)
            setting = self.settings.find(_key(argument)) if _key(argument) else None
            if argument is not None and (self.bound(dotted(argument), argument, outer) or (setting and setting.value)):
                return  # the other way is for a value that is not given

    def _functions(self, expr: ast.Call, scope: Scope) -> Iterator[tuple[Function, Scope]]:
        """Yields the function of the folder that a call calls, if the call names it plainly."""
        owner, _, name = dotted(expr.func).rpartition(".")
        if owner == "self" and scope.cls is not None:
            for node in scope.cls.body:
                if isinstance(node, Function) and node.name == name:
                    yield node, Scope(scope.file, (node,), scope.cls)
            return
        symbol = self._reach.symbol(scope.file, owner or name)
        if owner and symbol is not None:
            symbol = self._reach.symbol(symbol[0], name) if symbol[1] is None else None
        if symbol is not None and isinstance(symbol[1], Function):
            yield symbol[1], Scope(symbol[0], (symbol[1],))

    def _named(self, chain: str, expr: ast.expr, scope: Scope, depth: int) -> Iterator[Parts]:
        counted, bound = unit(chain), self.bound(chain, expr, scope)
        setting = self.settings.find(_key(expr)) if self._defaults.issuperset(node for node, _ in bound) else None
        if counted and not any(pieces(node) for node, _ in bound):
            yield (Hole(counted, chain),)
        elif bound and (setting is None or setting.value is None):
            for node, there in bound[:MOST]:
                yield from self.resolve(node, there, depth + 1)
        elif (own := self._own_setting(chain, scope)) is not None:
            yield (Hole("setting", own.name),)
        else:
            yield from self._setting_or(_key(expr), (Hole("any", chain),))

    def bound(self, chain: str, at: ast.AST, scope: Scope) -> list[Bound]:
        """The values that the name `chain` may have at `at`, the likeliest first. Empty if they are not known, or if a
        setting gives them.
        """
        for count in range(len(scope.functions), 0, -1):
            function, inner = scope.functions[count - 1], Scope(scope.file, scope.functions[:count], scope.cls)
            more = function.args
            is_parameter = chain in (parameter.arg for parameter in (*more.posonlyargs, *more.args, *more.kwonlyargs))
            if values := _set_before(self._local(function).get(chain, []), at, chain, or_after=not is_parameter):
                return [(node, scope) for node in values]
            if is_parameter:
                return self._of_parameter(function, chain, inner)
        head, _, rest = chain.partition(".")
        if head in ("self", "cls"):
            return self._of_class(scope.cls, scope.file, rest)
        symbol = self._reach.symbol(scope.file, head)
        if symbol is None or symbol[1] is not None or self._own_setting(chain, scope) is not None:
            return []
        file, own = symbol[0], self._reach.names(symbol[0]).assigned
        there = self._reach.names(scope.file).imports.get(head, ("", ""))[1] or head
        # an attribute of a value has no known values
        values = own.get(there if not rest else "" if there in own else rest, [])
        is_here = file == scope.file and not scope.functions
        return [(node, Scope(file)) for node in (_set_before(values, at, chain) if is_here else values[:-MOST:-1])]

    def _own_setting(self, name: str, scope: Scope) -> Setting | None:
        """The setting that a name itself stands for: a global or a parameter that the command line sets."""
        setting = self.settings.find(name) if name and "." not in name else None
        is_here = setting is not None and (scope.file == self.entry or setting.where.startswith(f"{scope.file}:"))
        return setting if is_here and setting is not None and setting.form else None

    def _of_parameter(self, function: Function, name: str, scope: Scope) -> list[Bound]:
        """The arguments that calls give for this parameter, or else its default."""
        outer = Scope(scope.file, scope.functions[:-1], scope.cls)
        cls = scope.cls if function in getattr(scope.cls, "body", ()) else None
        if passed := [
            (value, site.scope)
            for value, site in self._reach.passed(function, Scope(scope.file, (), cls), name)
            if not self.is_never(site)
        ]:
            return list(passed)
        if self._own_setting(name, scope) is not None:
            return []
        calls = self._reach.calls_of(function, Scope(scope.file, (), cls))
        passes_all = any(keyword.arg is None for site in calls for keyword in site.call.keywords)
        if passes_all and (anywhere := self._anywhere(name)):
            return anywhere  # in a dictionary that ** passes
        more, arguments = function.args, [*function.args.posonlyargs, *function.args.args]
        pairs = [
            *zip(arguments[::-1], more.defaults[::-1], strict=False),
            *zip(more.kwonlyargs, more.kw_defaults, strict=True),
        ]
        return [(value, outer) for parameter, value in pairs if parameter.arg == name and not _is_none(value)]  # type: ignore[misc]

    def _of_class(self, cls: ast.ClassDef | None, file: str, name: str) -> list[Bound]:
        """The values of an attribute of self, set in the class or a base class."""
        for _ in range(5):
            if cls is None:
                break
            if cls not in self._attributes:
                table = self._attributes[cls] = {}
                for method in cls.body:
                    inner = Scope(file, (method,) if isinstance(method, Function) else (), cls)
                    self._defaults.update(_defaults(method))
                    for key, value in assignments(walk(method)):
                        if not _is_none(value):
                            table.setdefault(key.removeprefix("self."), []).append((value, inner))
                    if isinstance(method, Function) and "property" in map(dotted, method.decorator_list):
                        results = [node.value for node in walk(method) if isinstance(node, ast.Return) and node.value]
                        table.setdefault(method.name, []).extend((returned, inner) for returned in results)
            if values := self._attributes[cls].get(name):
                return values
            ups = (self._reach.symbol(file, dotted(base).partition(".")[0]) for base in cls.bases)
            file, up = next((above for above in ups if above is not None), (file, None))
            cls = up if isinstance(up, ast.ClassDef) else None
        return []

    def _setting_or(self, name: str, hole: Parts) -> Iterator[Parts]:
        """The setting of this name, or else the values that the code gives the name, as in `args.folder = str(...)`."""
        setting = self.settings.find(name) if name else None
        for shorter in (name.partition(".")[2], name.rpartition(".")[2]):
            setting = setting or (self.settings.find(shorter) if shorter else None)
        last = name.rpartition(".")[2]
        values = self._anywhere(last) if setting is None else []
        if 0 < len(values) <= MOST and last not in self._following:
            self._following.add(last)
            yield from [parts for value, there in values for parts in self.resolve(value, there, 3)]
            self._following.discard(last)
        else:
            yield (Hole("setting", setting.name),) if setting is not None else hole

    def _anywhere(self, name: str) -> list[Bound]:
        """The values that attributes of this name get anywhere, except where the settings forbid it."""
        return [
            (value, scope)
            for value, scope, tests in self._set_anywhere.get(name, [])
            if not any(self._is_off(test, scope) for test in tests)
        ]

    @cached_property
    def _set_anywhere(self) -> dict[str, list[tuple[ast.expr | ast.For, Scope, list[ast.expr]]]]:
        values: dict[str, list[tuple[ast.expr | ast.For, Scope, list[ast.expr]]]] = {}
        for node, scope in self._reach.units:
            branches = [(inner.test, self._body(inner)) for inner in walk(node) if isinstance(inner, ast.If)]
            for name, value in assignments(walk(node)):
                if "." in name and not name.startswith("self.") and not isinstance(value, ast.Constant):
                    tests = [test for test, below in branches if value in below]
                    values.setdefault(name.rpartition(".")[2], []).append((value, scope, tests))
        return values

    def _counted_by(self, loop: ast.For, scope: Scope, depth: int) -> Iterator[Parts]:
        """The values of a loop's first name: an element of a list, a step of a range, a batch of an enumeration."""
        listed = [loop.iter, *(node for node, _ in self.bound(dotted(loop.iter), loop.iter, scope))]
        elements = [element for node in listed if isinstance(node, ast.List | ast.Tuple) for element in node.elts]
        appends = self._reach.by_name.get("append", ()) if dotted(loop.iter) and not elements else ()
        elements += [
            site.call.args[0]
            for site in appends
            if dotted(site.call.func) == f"{dotted(loop.iter)}.append" and site.scope.functions == scope.functions
        ]
        yield from (parts for element in elements[:MOST] for parts in self.resolve(element, scope, depth + 1))
        if not elements:
            is_batches = called(loop.iter) in ("enumerate", "tqdm", "log_every")
            yield (Hole("step" if loop_range(loop.iter) else "batch" if is_batches else "any", ""),)

    def _local(self, function: Function) -> dict[str, list[ast.expr | ast.For]]:
        if function not in self._locals:
            table = self._locals[function] = {}
            for name, value in assignments(walk(function)):
                if not _is_none(value):
                    table.setdefault(name, []).append(value)
        return self._locals[function]


def _key(expr: ast.AST | None) -> str:
    """A setting's name without its container: `train.out` for config["train"]["out"] or args.train.out."""
    match expr:
        case ast.Attribute(value=ast.Name(id="self" | "cls")):
            return ""
        case (
            ast.Attribute(value=value, attr=str() as name)
            | ast.Subscript(value=value, slice=ast.Constant(value=str() as name))
        ):
            return f"{_key(value)}.{name}".strip(".")
    return ""


def loop_range(node: ast.expr) -> ast.Call | None:
    """The `range` of a loop, which may be inside a progress bar; None for another loop."""
    calls = (call for call in walk(node) if isinstance(call, ast.Call) and call.args)
    return next((call for call in calls if called(call) in ("range", "trange", "count", "prange")), None)


def _set_before(
    values: list[ast.expr | ast.For], at: ast.AST, chain: str, *, or_after: bool = True
) -> list[ast.expr | ast.For]:
    """The values set before a place, the last one first, back to one that does not use the name's old value. If there
    are none, the values set after the place, as in a loop.
    """
    here = (getattr(at, "lineno", 0), getattr(at, "col_offset", 0))
    ends = [(value.target if isinstance(value, ast.For) else value, value) for value in values]
    earlier = [value for place, value in ends if (place.end_lineno or 0, place.end_col_offset or 0) <= here]
    if not earlier and or_after:
        earlier = [value for place, value in ends if (place.lineno, place.col_offset) > here]
    latest = list[ast.expr | ast.For]()
    for value in earlier[: -MOST - 1 : -1]:
        latest.append(value)
        if isinstance(value, ast.expr) and any(dotted(node) == chain for node in walk(value)):
            break
    return latest


def _defaults(function: ast.AST) -> Iterator[ast.AST]:
    """Yields the values in code such as `if name is None: name = value`."""
    for node in walk(function):
        match node:
            case ast.If(test=ast.Compare(left=left, ops=[ast.Is()], comparators=[ast.Constant(value=None)])):
                yield from (value for name, value in assignments(node.body) if name == dotted(left))


def _is_none(value: ast.AST | None) -> bool:
    return value is None or (isinstance(value, ast.Constant) and value.value is None)


def joined(parts: Iterable[str | Part]) -> tuple[str | Part, ...]:
    """The pattern with neighbouring texts joined to one."""
    merged: list[str | Part] = []
    for part in parts:
        if isinstance(part, str) and merged and isinstance(merged[-1], str):
            merged[-1] += part
        elif part != "":
            merged.append(part)
    return tuple(merged)


def _formatted(parts: Parts, form: str) -> Parts:
    """The parts with the format applied to their numbers."""
    match = re.fullmatch(r"0(\d+)[di]?", form)
    if match and len(parts) == 1 and isinstance(parts[0], Hole):
        return (Hole(parts[0].kind, parts[0].name, f"0{match[1]}d"),)
    return parts
