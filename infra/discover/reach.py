"""What a Python file runs of its folder: from its own statements to the functions and classes that these name.

Static, by names: a function counts when something that counts names it, a method when its class and its own name are
named. More than what is really run, much less than what the folder holds: a converter that nobody imports is not in it.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property

from gpufleet.infra.discover.source import CodeFolder

MOST_UNITS = 1_000  # nearest first: a library's depths say nothing of the training
Function = ast.FunctionDef | ast.AsyncFunctionDef
_DOTTED = re.compile(r"[A-Za-z_]\w{0,60}(\.[A-Za-z_]\w{0,60})+")  # of a text that may name a class
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# Bases that call nothing of a class but what somebody names.
_PASSIVE = {
    "object",
    "Module",
    "Dataset",
    "IterableDataset",
    "ABC",
    "Enum",
    "IntEnum",
    "NamedTuple",
    "Protocol",
    "Exception",
    "Optimizer",
}
_ALWAYS = {"__init__", "__call__", "__enter__", "__exit__", "__post_init__", "setup"}


@dataclass(frozen=True, eq=False, slots=True)
class Scope:
    """Where an expression stands: its file, and the functions and the class around it, outermost first."""

    file: str
    functions: tuple[Function, ...] = ()
    cls: ast.ClassDef | None = None


@dataclass(frozen=True, eq=False, slots=True)
class Site:
    """A call, where it stands, and the statements around it, innermost last."""

    call: ast.Call
    scope: Scope
    around: tuple[ast.stmt, ...]

    @property
    def where(self) -> str:
        return f"{self.scope.file}:{self.call.lineno}"


@dataclass(slots=True)
class ModuleNames:
    """What a module's names mean."""

    tree: ast.Module
    functions: dict[str, Function] = field(default_factory=dict)
    classes: dict[str, ast.ClassDef] = field(default_factory=dict)
    imports: dict[str, tuple[str, str]] = field(default_factory=dict)  # a name here: module, name there or empty
    stars: list[str] = field(default_factory=list)
    assigned: dict[str, list[ast.expr]] = field(default_factory=dict)


Symbol = tuple[str, Function | ast.ClassDef | None]  # a file, and what of it; None: the module, or a value of it


def called(node: ast.Call) -> str:
    """The last part of what is called: `save` of torch.save(...)."""
    return (
        node.func.attr
        if isinstance(node.func, ast.Attribute)
        else node.func.id
        if isinstance(node.func, ast.Name)
        else ""
    )


def assignments(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, ast.expr]]:
    """Names, with their dots, and what they are set to, one by one of `a, b = 1, 2`."""
    for node in nodes:
        pairs: list[tuple[ast.expr, ast.expr | None]] = []
        if isinstance(node, ast.Assign):
            pairs = [(target, node.value) for target in node.targets]
        elif isinstance(node, ast.AnnAssign | ast.NamedExpr):
            pairs = [(node.target, node.value)]
        elif isinstance(node, ast.With):
            pairs = [(each.optional_vars, each.context_expr) for each in node.items if each.optional_vars]
        for target, value in pairs:
            several = [(target, value)]
            if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
                several = list(zip(target.elts, value.elts, strict=False))
            for name, each in several:
                if each is not None and isinstance(name, ast.Name | ast.Attribute):
                    yield dotted(name), each


def dotted(node: ast.expr) -> str:
    """`a.b.c` of a chain of names; empty for anything else."""
    if isinstance(node, ast.Attribute):
        head = dotted(node.value)
        return f"{head}.{node.attr}" if head else ""
    return node.id if isinstance(node, ast.Name) else ""


def walk(node: ast.AST) -> list[ast.AST]:
    """A node and all below it, in the order in which they are written."""
    found: list[ast.AST] = []
    waiting = [node]
    while waiting:
        each = waiting.pop()
        found.append(each)
        below: list[ast.AST] = []
        for value in each.__dict__.values():
            if isinstance(value, list):
                below += [item for item in value if isinstance(item, ast.AST)]
            elif isinstance(value, ast.AST) and not isinstance(value, ast.expr_context):
                below.append(value)
        waiting += below[::-1]
    return found


class Reach:
    """All that one start runs of a folder."""

    def __init__(self, folder: CodeFolder, roots: tuple[str, ...], entry: str, function: str = "") -> None:
        self.folder, self.roots, self.entry = folder, roots, entry
        self._modules: dict[str, ModuleNames | None] = {}
        self._seen: set[ast.AST] = set()
        self._attributes: set[str] = set()
        self._waiting: dict[str, list[tuple[ast.AST, Scope]]] = defaultdict(list)  # methods that nobody has named yet
        self._symbols: dict[tuple[str, str], Symbol | None] = {}
        self._inside: dict[ast.AST, ModuleNames] = {}
        self._queue: deque[tuple[ast.AST, Scope]] = deque()
        self.units: list[tuple[ast.AST, Scope]] = []
        self.based_on: set[str] = set()  # last parts of the names of bases that are not the folder's
        self.imported: dict[
            str, int
        ] = {}  # names of modules outside of the folder: how far from the start they are used
        self.reach_module(entry)
        names = self.names(entry)
        for name, node in {**names.functions, **names.classes}.items() if names else ():
            if name == function or any(isinstance(each, ast.Call | ast.Attribute) for each in node.decorator_list):
                self._reach((entry, node))
        self._follow()

    @property
    def files(self) -> list[str]:
        """Those of which something counts, the entry first."""
        return list(dict.fromkeys((self.entry, *(scope.file for _, scope in self.units))))

    def reach_module(self, name: str) -> None:
        """Its own statements count."""
        tree = self.folder.tree(name)
        if tree is not None and tree not in self._seen:
            self._seen.add(tree)
            self._queue.append((tree, Scope(name)))

    def reach_dotted(self, text: str) -> None:
        """What a text names, such as `src.models.net.Net` in a configuration."""
        module, _, name = text.rpartition(".")
        if file := self.folder.module(text, self.roots):
            self.reach_module(file)
        elif (file := self.folder.module(module, self.roots)) and (found := self.symbol(file, name)):
            self._reach(found)
        self._follow()

    def widen(self) -> None:
        """Every function of the files that count: for code that calls by names made at run time."""
        for file in self.files:
            if names := self.names(file):
                for node in (*names.functions.values(), *names.classes.values()):
                    self._reach((file, node))
                    if isinstance(node, ast.ClassDef):
                        for each in node.body:
                            self._reach_function(each, Scope(file, (), node))
        self._follow()

    def names(self, file: str) -> ModuleNames | None:
        """What the names of a file mean; None: it is no Python that can be read."""
        if file not in self._modules:
            tree = self.folder.tree(file)
            self._modules[file] = None if tree is None else _module_names(tree, file)
        return self._modules[file]

    def symbol(self, file: str, name: str, depth: int = 0) -> Symbol | None:
        """What a name of a module's top means, through imports; None: nothing of the folder's."""
        if (file, name) not in self._symbols:
            self._symbols[file, name] = self._symbol(file, name, depth)
        return self._symbols[file, name]

    def _symbol(self, file: str, name: str, depth: int) -> Symbol | None:
        names = self.names(file)
        if names is None or depth > 8:
            return None
        if (node := names.functions.get(name) or names.classes.get(name)) is not None:
            return file, node
        if name in names.imports:
            module, there = names.imports[name]
            if there and (found := self.folder.module(f"{module}.{there}", self.roots)):
                return found, None
            found = self.folder.module(module, self.roots)
            if found and there:
                return self.symbol(found, there, depth + 1) or (found, None)
            if not found:
                self.imported.setdefault(f"{module}.{there}" if there else module, len(self.units))
            return (found, None) if found else None
        if name in names.assigned:
            return file, None
        for module in names.stars:
            if found := self.folder.module(module, self.roots):
                if result := self.symbol(found, name, depth + 1):
                    return result
            else:
                self.imported.setdefault(module, len(self.units))
        return None

    @cached_property
    def sites(self) -> list[Site]:
        """Every call of what counts."""
        return [site for node, scope in self.units for site in _sites(node, scope, ())]

    @cached_property
    def by_name(self) -> dict[str, list[Site]]:
        found: dict[str, list[Site]] = defaultdict(list)
        for site in self.sites:
            found[called(site.call)].append(site)
        return found

    def calls_of(self, function: Function, scope: Scope) -> list[Site]:
        """The calls that may be of this function; of a class for its `__init__`."""
        name = scope.cls.name if scope.cls is not None and function.name == "__init__" else function.name
        return self.by_name.get(name, [])

    def _follow(self) -> None:
        while self._queue and len(self.units) < MOST_UNITS:
            node, scope = self._queue.popleft()
            self.units.append((node, scope))
            for each in _own_nodes(node):
                self._scan(each, scope)
        self.__dict__.pop("sites", None)
        self.__dict__.pop("by_name", None)

    def _scan(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if found := self.symbol(scope.file, node.id):
                self._reach(found)
            else:
                self._import_inside(node.id, scope)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            if node.attr not in self._attributes:
                self._attributes.add(node.attr)
                for method, inner in self._waiting.pop(node.attr, ()):
                    self._reach_function(method, inner)
            module = self.symbol(scope.file, node.value.id) if isinstance(node.value, ast.Name) else None
            if module is not None and module[1] is None and (found := self.symbol(module[0], node.attr)):
                self._reach(found)
            elif (chain := dotted(node)) and "." in chain and (names := self.names(scope.file)):
                place, _, name = chain.rpartition(".")
                if place.split(".")[0] in names.imports:
                    self._reach_named(place, name)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and _DOTTED.fullmatch(node.value):
            place, _, name = node.value.rpartition(".")
            self._reach_named(place, name)

    def _reach_named(self, module: str, name: str) -> None:
        """A name of a module, where both are the folder's."""
        file = self.folder.module(module, self.roots)
        if found := self.symbol(file, name) if file else None:
            self._reach(found)

    def _import_inside(self, name: str, scope: Scope) -> None:
        """A name that a function imports itself."""
        for function in scope.functions:
            if function not in self._inside:
                names = self._inside[function] = ModuleNames(ast.Module(body=[], type_ignores=[]))
                for node in walk(function):
                    if isinstance(node, ast.ImportFrom | ast.Import):
                        _add_import(names, node, scope.file)
            if name in self._inside[function].imports:
                module, there = self._inside[function].imports[name]
                if file := self.folder.module(module, self.roots):
                    self._reach((there and self.symbol(file, there)) or (file, None))
                else:
                    self.imported.setdefault(f"{module}.{there}" if there else module, len(self.units))

    def _reach(self, found: Symbol) -> None:
        file, node = found
        self.reach_module(file)
        if isinstance(node, ast.ClassDef):
            if node not in self._seen:
                self._seen.add(node)
                self._reach_class(node, file)
        elif node is not None:
            self._reach_function(node, Scope(file))

    def _reach_class(self, cls: ast.ClassDef, file: str) -> None:
        """Its statements, and of its methods those that are named; all where a base outside of the folder may call
        them.
        """
        bases = [(base, self.symbol(file, base.split(".")[0])) for base in map(dotted, cls.bases) if base]
        for _, up in bases:
            if up is not None:
                self._reach(up)
        self.based_on |= {base.split(".")[-1] for base, up in bases if up is None}
        outside = any(up is None and base.split(".")[-1] not in _PASSIVE for base, up in bases)
        scope = Scope(file, (), cls)
        values = [each for each in cls.body if not isinstance(each, _FUNCTIONS)]
        self._queue.append((ast.Module(body=values, type_ignores=[]), scope))
        for each in cls.body:
            if isinstance(each, _FUNCTIONS):
                if outside or each.name in self._attributes or each.name in _ALWAYS:
                    self._reach_function(each, scope)
                else:
                    self._waiting[each.name].append((each, scope))

    def _reach_function(self, node: ast.AST, scope: Scope) -> None:
        if isinstance(node, _FUNCTIONS) and node not in self._seen:
            self._seen.add(node)
            self._queue.append((node, Scope(scope.file, (*scope.functions, node), scope.cls)))


def _module_names(tree: ast.Module, file: str) -> ModuleNames:
    names = ModuleNames(tree)
    statements = list(_top(tree.body))
    for node in statements:
        if isinstance(node, _FUNCTIONS):
            names.functions[node.name] = node
        elif isinstance(node, ast.ClassDef):
            names.classes[node.name] = node
        elif isinstance(node, ast.Import | ast.ImportFrom):
            _add_import(names, node, file)
    for name, value in assignments(statements):
        names.assigned.setdefault(name, []).append(value)
    return names


def _top(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module's top, in its conditions and loops too."""
    for node in body:
        yield node
        if not isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            for name in ("body", "orelse", "finalbody"):
                yield from _top(getattr(node, name, []))
            for handler in getattr(node, "handlers", []):
                yield from _top(handler.body)


def _add_import(names: ModuleNames, node: ast.Import | ast.ImportFrom, file: str) -> None:
    if isinstance(node, ast.Import):
        for each in node.names:
            names.imports[each.asname or each.name.split(".")[0]] = (
                each.name if each.asname else each.name.split(".")[0],
                "",
            )
        return
    module = node.module or ""
    if node.level:
        package = file.split("/")[: -node.level]
        module = ".".join([*package, *filter(None, [module])])
    for each in node.names:
        if each.name == "*":
            names.stars.append(module)
        else:
            names.imports[each.asname or each.name] = (module, each.name)


def _own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """All below a function; of a module what is not a function's or a class's own, nor for another start of it."""
    if not isinstance(node, ast.Module):
        yield from walk(node)
        return
    for statement in node.body:
        if isinstance(statement, _FUNCTIONS):
            yield from (each for decorator in statement.decorator_list for each in walk(decorator))
        elif not isinstance(statement, ast.ClassDef | ast.Import | ast.ImportFrom):
            yield from walk(statement)


def _sites(node: ast.AST, scope: Scope, around: tuple[ast.stmt, ...]) -> Iterator[Site]:
    """The calls of a unit. A module's functions and classes are units of their own."""
    for child in ast.iter_child_nodes(node):
        inner, outer = scope, around
        if isinstance(child, _FUNCTIONS):
            if isinstance(node, ast.Module):
                continue
            inner, outer = Scope(scope.file, (*scope.functions, child), scope.cls), ()
        elif isinstance(child, ast.ClassDef) and isinstance(node, ast.Module):
            continue
        elif isinstance(child, ast.If | ast.For | ast.AsyncFor | ast.While | ast.With):
            outer = (*around, child)
        if isinstance(child, ast.Call):
            yield Site(child, scope, around)
        yield from _sites(child, inner, outer)
