"""Finds the code of a folder that a Python file reaches: its statements, and the functions and classes that they name.

The search goes by names and runs nothing: a function counts as reached if reached code names it, a method if reached
code names both its class and the method. The result is more than what really runs, but much less than the folder: for
example, it leaves out a converter that nobody imports.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gpufleet.infra.discover.source import CodeFolder

MOST_UNITS = 1_000  # functions and classes, the nearest first: deep library code does not show how the training works
Function = ast.FunctionDef | ast.AsyncFunctionDef
_DOTTED = re.compile(r"[A-Za-z_]\w{0,60}(\.[A-Za-z_]\w{0,60})+")  # a dotted name, in a text that may name a class
_PASSIVE = re.compile(  # base classes that call only methods that code names
    r"object|Module|(Iterable)?Dataset|ABC|(Int)?Enum|NamedTuple|Protocol|Exception|Optimizer"
)
_ALWAYS = {"__init__", "__call__", "__enter__", "__exit__", "__post_init__", "setup"}
_AROUND = ast.If | ast.For | ast.AsyncFor | ast.While | ast.With


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """The place of an expression: its file, the functions around it (outermost first), and the class around it."""

    file: str
    functions: tuple[Function, ...] = ()
    cls: ast.ClassDef | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """A call, its place, and the statements around it, innermost last."""

    call: ast.Call
    scope: Scope
    around: tuple[ast.stmt, ...]

    @property
    def where(self) -> str:
        return f"{self.scope.file}:{self.call.lineno}"

    @property
    def name(self) -> str:
        """The last part of the called name: `save` for torch.save(...)."""
        return called(self.call)

    def keyword(self, *names: str) -> ast.expr | None:
        """The first argument with one of the `names`; None if there is none."""
        return next((keyword.value for keyword in self.call.keywords if keyword.arg in names), None)

    def argument(self, position: int, *names: str) -> ast.expr | None:
        """The argument with one of the `names`, else the argument at `position`; None if neither is known."""
        if (named := self.keyword(*names)) is not None:
            return named
        there = self.call.args[: position + 1]
        is_there = 0 <= position < len(there) and not any(isinstance(argument, ast.Starred) for argument in there)
        return there[position] if is_there else None


@dataclass(slots=True)
class ModuleNames:
    """The meanings of a module's names."""

    tree: ast.Module
    definitions: dict[str, Function | ast.ClassDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # (module, name in it or empty), by local name
    stars: list[str] = field(default_factory=list)
    assigned: dict[str, list[ast.expr | ast.For]] = field(default_factory=dict)


# a file, and a function or class in it; None means the module itself, or one of its values
Symbol = tuple[str, Function | ast.ClassDef | None]


def called(node: ast.AST | None) -> str:
    """The last part of the name that a call calls; empty for other nodes."""
    return dotted(node.func).rpartition(".")[2] or getattr(node.func, "attr", "") if isinstance(node, ast.Call) else ""


def dotted(node: ast.AST | None) -> str:
    """`a.b.c` for a chain of names; empty for anything else."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def walk(node: ast.AST) -> Iterator[ast.AST]:
    """A node and all nodes below it, in the order of the text."""
    waiting = [node]
    while waiting:
        yield (inner := waiting.pop())
        waiting += list(ast.iter_child_nodes(inner))[::-1]


def assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr | ast.For]]:
    """Yields each assigned name, with its dots, and its value. `a, b = 1, 2` gives two pairs; a loop assigns its first
    name.
    """
    for node in nodes:
        pairs: list[tuple[ast.expr | None, ast.expr | ast.For | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.With):
            pairs = [(opened.optional_vars, opened.context_expr) for opened in node.items]
        elif isinstance(node, ast.For):
            pairs = [(node.target.elts[0] if isinstance(node.target, ast.Tuple) else node.target, node)]
        for target, value in pairs:
            several = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                several = list(zip(target.elts, value.elts, strict=False))
            yield from (
                (name, assigned) for place, assigned in several if assigned is not None and (name := dotted(place))
            )


class Reach:
    """All code of a folder that one started program reaches."""

    def __init__(self, folder: CodeFolder, roots: tuple[str, ...], entry: str, function: str = "") -> None:
        self.folder, self.roots, self.entry = folder, roots, entry
        self.units: list[tuple[ast.AST, Scope]] = []
        self.sites: list[Site] = []  # every call in reached code
        self.by_name: dict[str, list[Site]] = defaultdict(list)
        self.based_on: set[str] = set()  # base classes from outside the folder: the last parts of their names
        self.imported: dict[str, int] = {}  # names from outside the folder, with their distance from the start
        self._modules: dict[str, ModuleNames] = {}
        self._symbols: dict[tuple[str, str], Symbol | None] = {}
        self._seen: set[ast.AST] = set()
        self._attributes: set[str] = set()
        self._waiting: dict[str, list[tuple[Function, Scope]]] = defaultdict(list)  # methods that no code has named yet
        self._queue: deque[tuple[ast.AST, Scope]] = deque()
        self._reach((entry, None))
        for name, node in self.names(entry).definitions.items():
            if name == function or any(
                isinstance(decorator, ast.Call | ast.Attribute) for decorator in node.decorator_list
            ):
                self._reach((entry, node))
        self._follow()

    @property
    def files(self) -> list[str]:
        """The files with reached code; the started file comes first."""
        return list(dict.fromkeys((self.entry, *(scope.file for _, scope in self.units))))

    def reach_dotted(self, text: str) -> None:
        """Counts a class or function as reached if a text names it, such as `src.models.net.Net` in a configuration."""
        self._reach_named(text)
        self._follow()

    def names(self, file: str) -> ModuleNames:
        """The meanings of a file's names; empty if the file cannot be parsed as Python."""
        if file not in self._modules:
            self._modules[file] = _module_names(self.folder.tree(file) or ast.parse(""), file)
        return self._modules[file]

    def symbol(self, file: str, name: str, depth: int = 0) -> Symbol | None:
        """What a name at a module's top level means, followed through imports; None if it is not the folder's code."""
        if (file, name) not in self._symbols:
            self._symbols[file, name] = self._symbol(file, name, depth)
        return self._symbols[file, name]

    def _symbol(self, file: str, name: str, depth: int) -> Symbol | None:
        names = self.names(file)
        if name in names.definitions or depth > 8:
            return (file, names.definitions[name]) if depth <= 8 else None
        is_imported = name in names.imports
        if name in names.assigned and not is_imported:
            return file, None
        for module, there in [names.imports[name]] if is_imported else [(star, name) for star in names.stars]:
            if there and (inner := self.folder.module(f"{module}.{there}", self.roots)):
                return inner, None
            if module_file := self.folder.module(module, self.roots):
                deeper = self.symbol(module_file, there, depth + 1) if there else None
                if deeper is not None or is_imported:
                    return deeper or (module_file, None)
            else:
                self.imported.setdefault(f"{module}.{there}" if is_imported and there else module, len(self.units))
        return None

    def full_name(self, site: Site) -> str:
        """The called name with the module from which it is imported; a name that is not imported stays as written."""
        head, dot, rest = dotted(site.call.func).partition(".")
        module, there = self.names(site.scope.file).imports.get(head, (head, ""))
        return ".".join(filter(None, (module, there))) + dot + rest

    def calls_of(self, function: Function, scope: Scope) -> list[Site]:
        """The calls outside of `function` that may call it; for a method `__init__`, the calls of its class, and for
        `__call__` those of the names of its objects.
        """
        names = {function.name}
        if scope.cls is not None and function.name == "__init__":
            names = {scope.cls.name}
        elif scope.cls is not None and function.name == "__call__":
            names = self._objects[scope.cls.name]
        sites = (site for name in names for site in self.by_name.get(name, ()))
        return [site for site in sites if function not in site.scope.functions]

    @cached_property
    def _objects(self) -> dict[str, set[str]]:
        """The names to which reached code assigns what a call returns, by the called name."""
        objects: dict[str, set[str]] = defaultdict(set)
        for unit, _ in self.units:
            for name, value in assignments(walk(unit)):
                objects[called(value)].add(name.rpartition(".")[2])
        return objects

    def passed(self, function: Function, scope: Scope, name: str) -> Iterator[tuple[ast.expr, Site]]:
        """The arguments that calls of a function give for one of its parameters."""
        names = [parameter.arg for parameter in (*function.args.posonlyargs, *function.args.args)]
        position = names.index(name) - (names[0] in ("self", "cls")) if name in names else 99
        for site in self.calls_of(function, scope):
            if (value := site.argument(position, name)) is not None:
                yield value, site

    def _follow(self) -> None:
        while self._queue and len(self.units) < MOST_UNITS:
            self.units.append(unit := self._queue.popleft())
            self._visit(*unit, ())

    def _visit(self, node: ast.AST, scope: Scope, around: tuple[ast.stmt, ...]) -> None:
        """Visits all nodes below a function; in a module, all nodes except those in its functions and classes."""
        for child in ast.iter_child_nodes(node):
            inner, outer = scope, around
            if isinstance(node, ast.Module) and isinstance(child, Function | ast.ClassDef):
                for decorator in child.decorator_list if isinstance(child, Function) else ():
                    self._visit(decorator, scope, ())
                continue
            if isinstance(child, Function):
                # a function that another defines in its loop runs there
                inner = Scope(scope.file, (*scope.functions, child), scope.cls)
                outer = around if scope.functions else ()
            elif isinstance(child, _AROUND):
                outer = (*around, child)
            self._scan(child, scope)
            if isinstance(child, ast.Call):
                self.sites.append(Site(child, scope, around))
                self.by_name[called(child)].append(self.sites[-1])
            self._visit(child, inner, outer)

    def _scan(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Name) and (symbol := self.symbol(scope.file, node.id)):
            self._reach(symbol)
        elif isinstance(node, ast.Attribute):
            self._attributes.add(node.attr)
            for method, inner in self._waiting.pop(node.attr, ()):
                self._reach_function(method, inner)
            module = self.symbol(scope.file, node.value.id) if isinstance(node.value, ast.Name) else None
            if module is not None and module[1] is None and (symbol := self.symbol(module[0], node.attr)):
                self._reach(symbol)
            elif (chain := dotted(node)).partition(".")[0] in self.names(scope.file).imports:
                self._reach_named(chain)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            self._reach_named(node.value)

    def _reach_named(self, chain: str) -> None:
        """Counts `module.name` as reached, if both belong to the folder."""
        module, _, name = chain.rpartition(".")
        if (file := self.folder.module(module, self.roots)) and (symbol := self.symbol(file, name)):
            self._reach(symbol)

    def _reach(self, symbol: Symbol) -> None:
        file, node = symbol
        tree = self.folder.tree(file)
        if tree is not None and tree not in self._seen:
            self._seen.add(tree)
            self._queue.append((tree, Scope(file)))
        if isinstance(node, ast.ClassDef) and node not in self._seen:
            self._seen.add(node)
            self._reach_class(node, file)
        else:
            self._reach_function(node, Scope(file))

    def _reach_class(self, cls: ast.ClassDef, file: str) -> None:
        """Counts a class's statements and its named methods as reached; all methods if a base class from outside the
        folder may call them.
        """
        named = [base for parent in cls.bases if (base := dotted(parent))]
        bases = [(base.rpartition(".")[2], self.symbol(file, base.partition(".")[0])) for base in named]
        for _, up in bases:
            if up is not None:
                self._reach(up)
        outside = {base for base, up in bases if up is None}
        self.based_on |= outside
        scope = Scope(file, (), cls)
        values = [statement for statement in cls.body if not isinstance(statement, Function)]
        self._queue.append((ast.Module(body=values, type_ignores=[]), scope))
        for statement in cls.body:
            if isinstance(statement, Function):
                if statement.name in self._attributes | _ALWAYS or not all(map(_PASSIVE.fullmatch, outside)):
                    self._reach_function(statement, scope)
                else:
                    self._waiting[statement.name].append((statement, scope))

    def _reach_function(self, node: ast.AST | None, scope: Scope) -> None:
        if isinstance(node, Function) and node not in self._seen:
            self._seen.add(node)
            self._queue.append((node, Scope(scope.file, (*scope.functions, node), scope.cls)))


def _module_names(tree: ast.Module, file: str) -> ModuleNames:
    names = ModuleNames(tree)
    for node in walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                head = alias.name.partition(".")[0]
                names.imports.setdefault(alias.asname or head, (alias.name if alias.asname else head, ""))
        elif isinstance(node, ast.ImportFrom):
            package = file.split("/")[: -node.level] if node.level else []
            module = ".".join([*package, *filter(None, [node.module])])
            names.stars += [module for alias in node.names if alias.name == "*"]
            for alias in node.names:
                names.imports.setdefault(alias.asname or alias.name, (module, alias.name))
    for node in (top := list(_top(tree.body))):
        if isinstance(node, Function | ast.ClassDef):
            names.definitions[node.name] = node
    for name, value in assignments(top):
        names.assigned.setdefault(name, []).append(value)
    return names


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """A module's top-level statements, including those in conditions and loops."""
    for node in body:
        yield node
        if not isinstance(node, Function | ast.ClassDef):
            for name in ("body", "orelse", "finalbody"):
                yield from _top(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _top(handler.body)
