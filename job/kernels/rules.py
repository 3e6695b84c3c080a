"""Stage 1: syntax, and what a candidate may say. A list of what is allowed, because one of what is not has holes.

A module holds imports, constants, `@triton.jit` functions and functions that launch them; `kernel_function` is the
entry. Each kind of node is allowed in its positions, each name has one meaning, which is the one that Python will find,
and attributes and modules are those a kernel needs: no way to reach the interpreter, another module's insides, or an
operation of torch that computes. Under the interpreter kernels are Python too, so they have no more rights. A module
has no memory: nothing that outlives a call can be changed, so one call cannot know how many came before it. What an
operator does to a tensor cannot be seen here: `forbidden_ops` is what the run's own list is held to.
"""

from __future__ import annotations

import ast
import builtins
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from job.kernels import source_text
from job.kernels.catalog import ENTRY
from job.kernels.vocabulary import ALLOWED_OPS, BUILTINS, LANGUAGE, MATH, METHODS, MODULES, PLAIN_CALLS, TORCH, TRITON

PYTHONS = frozenset(dir(builtins))  # what a name means at the top of a module before, or where, it is given no meaning
DECORATORS = ("triton.jit", "triton.autotune", "triton.heuristics")
# At the top a call is made once, and gives what cannot be changed.
TOP_CALLS = {"triton.cdiv", "triton.next_power_of_2", "triton.language.constexpr", "int", "float", "bool", "min", "max",
             "len", "tuple", *(f"math.{name}" for name in MATH)}  # fmt: skip
STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.If, ast.For, ast.While, ast.Assert, ast.Raise,
    ast.Pass, ast.Break, ast.Continue,
)  # fmt: skip
# Expressions of which everything that is evaluated is a child to be looked at; Name, Attribute, Lambda and those with
# names of their own are looked at apart.
CONSTANTS = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.Subscript)
EXPRESSIONS = (
    *CONSTANTS, ast.Call, ast.keyword, ast.Slice, ast.List, ast.Dict, ast.Starred, ast.JoinedStr, ast.FormattedValue,
)  # fmt: skip
WORDLESS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load, ast.Store)
ANNOTATION = (ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Tuple, ast.BinOp, ast.BitOr, ast.Load)


def problem(source: str) -> str | None:
    """The first thing that is not allowed, with its line; None when there is none."""
    if (why := source_text.unreadable(source)) is not None:
        return why
    try:
        with _PARSER:
            tree = ast.parse(source)
            _Module(tree, source_text.lines(source))
    except _Forbidden as error:
        return str(error)
    except RecursionError:
        return "nested too deeply"
    except (SyntaxError, ValueError, MemoryError) as error:
        return f"syntax: {str(error)[:200]}"
    return None


def forbidden_ops(names: Iterable[str]) -> list[str]:
    """Torch functions among `names`, as a run reports them, that compute something."""
    return sorted(name for name in names if name not in ALLOWED_OPS)


_PARSER = threading.Lock()  # CPython 3.11 counts the depth of all threads' trees in one place, and trips over it


class _Forbidden(Exception):
    def __init__(self, node: ast.AST, what: str) -> None:
        super().__init__(f"line {getattr(node, 'lineno', '?')}: {what}")


class _Module:
    """Walks a module once; raises at the first thing that is not allowed."""

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        self.lines = lines
        self.modules: dict[str, str] = {}  # name in the source -> module
        self.top: set[str] = set()  # names that the module gives a meaning
        self.lists: set[str] = set()  # of those, what could be changed: for decorators alone
        self.scopes: list[set[str]] = []  # names of functions, lambdas and comprehensions, the innermost last
        self.kernels: set[str] = set()
        self.launched: set[str] = set()
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        for function in functions:
            self._name_at_top(function, function.name)
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        for function in functions:
            if any(self._full(decorator) == "triton.jit" for decorator in function.decorator_list):
                self.kernels.add(function.name)
        for node in tree.body:
            self._top(node)
        for function in functions:
            self._function(function)
        if not self.kernels:
            raise _Forbidden(tree, "there is no @triton.jit kernel")
        if ENTRY not in {function.name for function in functions} - self.kernels:
            raise _Forbidden(tree, f"there is no function {ENTRY}")
        if not self.launched & self.kernels:
            raise _Forbidden(tree, "no kernel is launched")

    # The module's own level.

    def _name_at_top(self, node: ast.AST, name: str) -> None:
        """One meaning each, and none of Python's: before it gets ours it would have that."""
        self._new(node, name)
        if name in PYTHONS or name in self.top:
            raise _Forbidden(node, f"{name} is given another meaning")
        self.top.add(name)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        if isinstance(node, ast.ImportFrom) and (node.module, [alias.name for alias in node.names], node.level) != (
            "triton", ["language"], 0
        ):  # fmt: skip
            raise _Forbidden(node, f"import from {node.module}: import the module itself")
        for alias in node.names:
            module = "triton.language" if isinstance(node, ast.ImportFrom) else alias.name
            if module not in MODULES:
                raise _Forbidden(node, f"import of {module}; allowed are {', '.join(MODULES)}")
            whole = alias.asname is None and isinstance(node, ast.Import)
            name = module.split(".")[0] if whole else alias.asname or alias.name
            meant = name if whole else module
            if self.modules.get(name) != meant:
                self._name_at_top(node, name)
                self.modules[name] = meant

    def _top(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if isinstance(node, ast.AnnAssign):
                self._annotation(node.annotation)
            if node.value is None:
                raise _Forbidden(node, "a name without a value")
            if isinstance(node.value, ast.List | ast.Dict | ast.ListComp):
                self._held(node.value)
                self.lists |= {target.id for target in targets if isinstance(target, ast.Name)}
            else:
                self._constant(node.value)
            for target in targets:
                if not isinstance(target, ast.Name):
                    raise _Forbidden(node, "only names are assigned at the top")
                self._name_at_top(target, target.id)
        elif not isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            raise _Forbidden(node, f"{type(node).__name__} at the top: only imports, constants and functions")

    def _constant(self, node: ast.expr) -> None:
        """At the top or a default: a value that cannot be changed."""
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part.id in self.lists:
                raise _Forbidden(part, f"{part.id} can be changed, and outlives a call")
            if isinstance(part, ast.Call) and self._full(part.func) not in TOP_CALLS:
                raise _Forbidden(part, "a call at the top, or in a default, that may give what can be changed")
            if isinstance(part, ast.List | ast.Dict | ast.ListComp | ast.GeneratorExp | ast.Lambda):
                raise _Forbidden(part, f"{type(part).__name__} at the top, or in a default: it outlives a call")
        self._expression(node)

    def _held(self, node: ast.expr) -> None:
        """What a decorator, or a list at the top for one, may hold: nothing that can be changed and that a lambda, a
        kernel or its grid would find again.
        """
        if isinstance(node, ast.List):
            for part in node.elts:
                self._element(part)
        elif isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                self._constant(key or node)
                self._element(value)
        elif isinstance(node, ast.ListComp):
            self._each(node, self._element, self._iterated)
        elif not (isinstance(node, ast.Name) and node.id in self.lists):
            self._element(node)

    def _element(self, node: ast.expr) -> None:
        if isinstance(node, ast.Lambda) and not self.scopes:  # which would be found again
            self._expression(node)
        elif isinstance(node, ast.Call) and self._full(node.func) == "triton.Config":
            self._plain(node)
            for part in (*node.args, *(keyword.value for keyword in node.keywords)):
                pairs = [*part.keys, *part.values] if isinstance(part, ast.Dict) else [part]
                for each in pairs:
                    self._constant(each or node)
        else:
            self._constant(node)

    def _iterated(self, node: ast.expr) -> None:
        if isinstance(node, ast.Call) and self._full(node.func) == "range":
            node = ast.List([*node.args, *(keyword.value for keyword in node.keywords)])
        for part in node.elts if isinstance(node, ast.List) else [node]:
            self._constant(part)

    def _each(
        self,
        node: ast.ListComp | ast.GeneratorExp,
        element: Callable[[ast.expr], None],
        iterated: Callable[[ast.expr], None],
    ) -> None:
        """A comprehension. What the first part goes through is looked at in the scope around it."""
        iterated(node.generators[0].iter)
        with self._scope(node, _stored([part.target for part in node.generators])):
            for number, part in enumerate(node.generators):
                self._expression(part.target)
                for inner in part.ifs:
                    self._expression(inner)
                if number:
                    iterated(part.iter)
            element(node.elt)

    def _function(self, function: ast.FunctionDef) -> None:
        for decorator in function.decorator_list:
            name = self._full(decorator.func if isinstance(decorator, ast.Call) else decorator)
            if name not in DECORATORS:
                raise _Forbidden(function, f"the decorator {name}")
            if isinstance(decorator, ast.Call):
                self._plain(decorator)
                for part in (*decorator.args, *(keyword.value for keyword in decorator.keywords)):
                    self._held(part)
        if getattr(function, "type_params", None):
            raise _Forbidden(function, "parameters that are types")
        if function.name in self.kernels and (why := source_text.misread(function, self.lines)) is not None:
            raise _Forbidden(function, why)
        if function.returns is not None:
            self._annotation(function.returns)
        self._arguments(function.args)
        with self._scope(function, [*_argument_names(function.args), *_stored(function.body)]):
            for statement in function.body:
                self._statement(statement)

    # Statements and expressions. Whatever is not named here is not allowed.

    def _statement(self, node: ast.stmt) -> None:
        if not isinstance(node, STATEMENTS):
            raise _Forbidden(node, f"{type(node).__name__} is not allowed")
        for name, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if name == "annotation":
                    self._annotation(part)
                elif isinstance(part, ast.stmt):
                    self._statement(part)
                elif isinstance(part, ast.expr):
                    self._expression(part)
                elif isinstance(part, ast.AST) and not isinstance(part, WORDLESS):
                    raise _Forbidden(node, f"{type(part).__name__} is not allowed")

    def _annotation(self, node: ast.expr) -> None:
        """Python evaluates it. Names of types, one of several, or text."""
        for part in ast.walk(node):
            if not isinstance(part, ANNOTATION):
                raise _Forbidden(node, f"{type(part).__name__} in an annotation")
        self._expression(node)

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self._name(node)
        elif isinstance(node, ast.Attribute):
            self._attribute(node)
        elif isinstance(node, ast.Lambda):
            self._arguments(node.args)
            with self._scope(node, _argument_names(node.args)):
                self._expression(node.body)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            self._each(node, self._expression, self._expression)
        elif isinstance(node, EXPRESSIONS):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript):
                self.launched |= {node.func.value.id} if isinstance(node.func.value, ast.Name) else set()
            named = node.func if isinstance(node, ast.Call) and self._plain(node) else None
            for child in ast.iter_child_nodes(node):
                if child is not named:
                    self._expression(child)
        elif not isinstance(node, WORDLESS):
            raise _Forbidden(node, f"{type(node).__name__} is not allowed")

    def _plain(self, node: ast.Call) -> bool:
        """Whether it is one of PLAIN_CALLS; elsewhere those have no name."""
        most, words = PLAIN_CALLS.get(name := self._full(node.func) or "", (-1, frozenset()))
        if most < 0:
            return False
        odd = [keyword.arg or "**" for keyword in node.keywords if keyword.arg not in words]
        if odd or len(node.args) > most or any(isinstance(part, ast.Starred) for part in node.args):
            raise _Forbidden(node, f"{name} with {', '.join(odd) or 'more arguments by place than it may have'}")
        return True

    def _arguments(self, arguments: ast.arguments) -> None:
        if arguments.vararg or arguments.kwarg:
            raise _Forbidden(arguments.vararg or arguments.kwarg or arguments, "any number of arguments")
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None:
                self._annotation(argument.annotation)
        for default in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
            self._constant(default)

    @contextmanager
    def _scope(self, node: ast.AST, names: Iterable[str]) -> Iterator[None]:
        """These names are the inner ones' alone: outside they mean what they meant."""
        own = set(names)
        for name in own:
            self._new(node, name)
        self.scopes.append(own)
        yield
        self.scopes.pop()

    def _new(self, node: ast.AST, name: str) -> None:
        if name.startswith("__"):
            raise _Forbidden(node, f"the name {name}")
        if name in self.modules or name in BUILTINS:
            raise _Forbidden(node, f"{name} is given another meaning")

    def _name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Del):
            raise _Forbidden(node, "del is not allowed")
        if any(node.id in scope for scope in self.scopes):
            return
        if node.id in self.lists:
            raise _Forbidden(node, f"{node.id} can be changed, and outlives a call: for decorators alone")
        if isinstance(node.ctx, ast.Store) or not (node.id in self.top or node.id in BUILTINS):
            raise _Forbidden(node, f"the name {node.id}")

    def _attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise _Forbidden(node, f"the attribute {node.attr} is changed")
        full = self._full(node)
        if full is None or full.partition(".")[0] not in MODULES:
            if node.attr not in METHODS:
                raise _Forbidden(node, f".{node.attr}")
            self._expression(node.value)
            return
        for module, allowed in (("triton.language.math", LANGUAGE), ("triton.language", LANGUAGE), ("math", MATH),
                                ("torch", TORCH), ("triton", TRITON)):  # fmt: skip
            if full.startswith(module + "."):
                rest = full.removeprefix(module + ".").split(".")
                if full not in PLAIN_CALLS and rest[0] in allowed and all(part in METHODS for part in rest[1:]):
                    return
                break
        raise _Forbidden(node, full)

    def _full(self, node: ast.AST) -> str | None:
        """a.b.c with its module's whole name; None when it is no such chain of names."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join((self.modules.get(node.id, node.id if node.id not in MODULES else "?"), *reversed(parts)))


def _argument_names(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def _stored(nodes: Iterable[ast.AST]) -> list[str]:
    """The names that these give a meaning where they stand: not those of lambdas and comprehensions inside."""
    found, left = [], list(nodes)
    while left:
        node = left.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.append(node.id)
        if not isinstance(node, ast.Lambda | ast.ListComp | ast.GeneratorExp):
            left.extend(ast.iter_child_nodes(node))
    return found
