"""Checks the statements and expressions of a candidate, and what its names and attributes mean in them."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from gpufleet.job.experiments.kernel.judge.vocabulary import (
    ACTIVE_DEVICE,
    ASKED_OF_GPUS,
    BUILTINS,
    LANGUAGE,
    LIBDEVICE,
    LIBDEVICE_AT,
    MATH,
    METHODS,
    MODULES,
    PLAIN_CALLS,
    SHADOWED,
    TORCH,
    TRITON,
)  # fmt: skip

# Calls that are allowed at the top of a module, because such a call runs once, and its result cannot be changed.
TOP_CALLS = {"triton.cdiv", "triton.next_power_of_2", "triton.language.constexpr", "torch.device", ACTIVE_DEVICE,
             "int", "float", "bool", "min", "max", "len", "tuple", *(f"math.{name}" for name in MATH)}  # fmt: skip
STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.If, ast.For, ast.While, ast.Assert, ast.Raise,
    ast.Pass, ast.Break, ast.Continue, ast.Delete,
)  # fmt: skip
# Expressions all of whose parts are checked in the same way. Name, Attribute, Lambda and expressions with names of
# their own are checked separately.
CONSTANTS = (ast.Constant, ast.UnaryOp, ast.BinOp, ast.BoolOp, ast.Compare, ast.IfExp, ast.Tuple, ast.Subscript)
EXPRESSIONS = (
    *CONSTANTS, ast.Call, ast.keyword, ast.Slice, ast.List, ast.Set, ast.Dict, ast.Starred, ast.JoinedStr,
    ast.FormattedValue, ast.NamedExpr,
)  # fmt: skip
WORDS = (
    *((place, LIBDEVICE) for place in LIBDEVICE_AT), ("triton.language.math", LANGUAGE), ("triton.language", LANGUAGE),
    ("math", MATH), ("torch", TORCH), ("triton", TRITON),
)  # fmt: skip
NO_GRADIENTS = ("torch.no_grad", "torch.inference_mode")
WORDLESS = (ast.operator, ast.unaryop, ast.boolop, ast.cmpop, ast.Load, ast.Store)
BINDING = (ast.Call, ast.NamedExpr, ast.Lambda)  # expressions that could give a type to the caller
ANNOTATION = (ast.Name, ast.Attribute, ast.Constant, ast.Subscript, ast.Tuple, ast.BinOp, ast.BitOr, ast.Load)


class Forbidden(Exception):
    def __init__(self, node: ast.AST, reason: str) -> None:
        line = getattr(node, "lineno", None)  # a module has no line
        super().__init__(reason if line is None else f"line {line}: {reason}")


class Expressions:
    """Raises Forbidden at the first construct that is not allowed. Everything that is not named here is forbidden."""

    def __init__(self) -> None:
        self.modules: dict[str, str] = {}  # the modules by their names in the source
        self.top: set[str] = set()  # names that the module defines
        # Names of the module's lists and dicts. Only decorators may use them, because lists and dicts can be changed.
        self.lists: set[str] = set()
        self.scopes: list[set[str]] = []  # names of functions, lambdas and comprehensions, the innermost last
        self.launched: set[str] = set()
        self.methods = METHODS  # methods allowed on objects that are not a module
        # Whether the expression is a type check. Only there is torch.Tensor allowed, because elsewhere it could be
        # called with numbers.
        self.asks = False

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.FunctionDef):
            self._inner(node)
            return
        if isinstance(node, ast.With):
            self._with_statement(node)
            return
        if not isinstance(node, STATEMENTS):
            raise Forbidden(node, f"{type(node).__name__} is not allowed")
        if isinstance(node, ast.Delete) and not all(isinstance(target, ast.Name) for target in node.targets):
            raise Forbidden(node, "del, except of names")
        for name, value in ast.iter_fields(node):
            for part in value if isinstance(value, list) else [value]:
                if name == "annotation":
                    self._annotation(part)
                elif isinstance(part, ast.stmt):
                    self._statement(part)
                elif isinstance(part, ast.expr):
                    self._expression(part)
                elif isinstance(part, ast.AST) and not isinstance(part, WORDLESS):
                    raise Forbidden(node, f"{type(part).__name__} is not allowed")

    def _inner(self, node: ast.FunctionDef) -> None:
        """Checks a function within another one. Each call of the outer function makes it again, so that it keeps
        nothing between calls.
        """
        if node.decorator_list or getattr(node, "type_params", None):
            raise Forbidden(node, "a decorator, or parameters that are types, within a function")
        if node.returns is not None:
            self._annotation(node.returns)
        self._arguments(node.args)
        with self._scope(node, [*argument_names(node.args), *stored(node.body)]):
            for statement in node.body:
                self._statement(statement)

    def _with_statement(self, node: ast.With) -> None:
        """Allows only blocks that choose a GPU or switch gradients off, because another kind of block could choose
        another stream.
        """
        for item in node.items:
            call = item.context_expr
            if self._without_gradients(call):
                if item.optional_vars:
                    raise Forbidden(node, f"a name for {ast.unparse(call)}")
                continue
            if not isinstance(call, ast.Call) or self._full(call.func) != "torch.cuda.device" or item.optional_vars:
                raise Forbidden(node, f"`with` is allowed only for torch.cuda.device, {' and '.join(NO_GRADIENTS)}")
            for part in call_arguments(call):
                self._expression(part)
        for statement in node.body:
            self._statement(statement)

    def _without_gradients(self, node: ast.expr) -> bool:
        """Whether the expression is one of NO_GRADIENTS, called without arguments."""
        return isinstance(node, ast.Call) and not call_arguments(node) and self._full(node.func) in NO_GRADIENTS

    def _annotation(self, node: ast.expr) -> None:
        """Checks an annotation, because Python evaluates it. The annotation may be the name of a type, a union, or
        text.
        """
        for part in ast.walk(node):
            if not isinstance(part, ANNOTATION):
                raise Forbidden(node, f"{type(part).__name__} in an annotation")
        self._type(node)

    def _type(self, node: ast.expr) -> None:
        before, self.asks = self.asks, not any(isinstance(part, BINDING) for part in ast.walk(node))
        self._expression(node)
        self.asks = before

    def _expression(self, node: ast.AST) -> None:
        if isinstance(node, ast.Name):
            self._name(node)
        elif isinstance(node, ast.Attribute):
            self._attribute(node)
        elif isinstance(node, ast.Lambda):
            self._arguments(node.args)
            with self._scope(node, argument_names(node.args)):
                self._expression(node.body)
        elif isinstance(node, ast.ListComp | ast.GeneratorExp):
            self._each(node, self._expression, self._expression)
        elif isinstance(node, ast.FormattedValue) and (of := _of_what_type(node.value)) is not None:
            self._expression(of)
            self._expression(node.format_spec or of)
        elif isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load) and self._is_list(node.value):
            self._expression(node.slice)  # allowed, because the result cannot be changed
        elif isinstance(node, EXPRESSIONS):
            if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
                self.launched.add(node.value.id)  # the result is called at once, or later by another name
            named = node.func if isinstance(node, ast.Call) and self._plain(node) else None
            # a kernel must not be a function that was checked as Python
            if named is not None and self._full(named) == "triton.jit":
                raise Forbidden(node, "triton.jit, except as a decorator")
            types = node.args[1:] if isinstance(node, ast.Call) and self._full(node.func) == "isinstance" else []
            for child in ast.iter_child_nodes(node):
                if child in types:
                    self._type(child)
                elif child is not named:
                    self._expression(child)
        elif not isinstance(node, WORDLESS):
            raise Forbidden(node, f"{type(node).__name__} is not allowed")

    def _is_list(self, node: ast.expr) -> bool:
        """Whether the name is a list or dict of the module."""
        return isinstance(node, ast.Name) and node.id in self.lists and not any(node.id in own for own in self.scopes)

    def _plain(self, node: ast.Call) -> bool:
        """Whether the call is one of PLAIN_CALLS. These functions cannot be renamed by an assignment."""
        most, words = PLAIN_CALLS.get(name := self._full(node.func) or "", (-1, frozenset()))
        if most < 0:
            return False
        odd = [keyword.arg or "**" for keyword in node.keywords if keyword.arg not in words]
        if odd or len(node.args) > most or any(isinstance(part, ast.Starred) for part in node.args):
            raise Forbidden(node, f"{name} with {', '.join(odd) or 'more positional arguments than it may have'}")
        return True

    def _arguments(self, arguments: ast.arguments) -> None:
        if arguments.vararg or arguments.kwarg:
            raise Forbidden(arguments.vararg or arguments.kwarg or arguments, "any number of arguments")
        for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs):
            if argument.annotation is not None:
                self._annotation(argument.annotation)
        for default in (*arguments.defaults, *filter(None, arguments.kw_defaults)):
            self._constant(default)

    @contextmanager
    def _scope(self, node: ast.AST, names: Iterable[str]) -> Iterator[None]:
        """A context in which `names` belong to the inner scope. Outside of it they keep their meaning."""
        own = set(names)
        for name in own:
            self._new(node, name)
        self.scopes.append(own)
        yield
        self.scopes.pop()

    def _new(self, node: ast.AST, name: str) -> None:
        if name.startswith("__"):
            raise Forbidden(node, f"the name {name}")
        own = name in SHADOWED and isinstance(node, ast.FunctionDef)
        if name in self.modules or (name in BUILTINS and not own):
            raise Forbidden(node, f"{name} is given another meaning")

    def _name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Del) and node.id not in self.scopes[-1]:
            raise Forbidden(node, f"del of {node.id}, which is not the function's own")
        if any(node.id in scope for scope in self.scopes):
            return
        if node.id in self.lists:
            raise Forbidden(
                node,
                f"{node.id} is a list or dict of the module, which keeps changes from one call to the next: only "
                "decorators may use it",
            )
        if isinstance(node.ctx, ast.Store) or not (node.id in self.top or node.id in BUILTINS):
            raise Forbidden(node, f"the name {node.id}")
        # this is also refused in front of a method whose name is a word of Triton's language
        if self.modules.get(node.id) in MODULES:
            raise Forbidden(node, f"{node.id}, a module, as a value")
        if self.modules.get(node.id) in PLAIN_CALLS:
            raise Forbidden(node, f"{node.id}, except in a call or as a decorator")

    def _attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise Forbidden(node, f"the attribute {node.attr} is changed")
        full = self._full(node)
        if full in ASKED_OF_GPUS:
            return
        if full == "torch.Tensor" and not self.asks:
            raise Forbidden(node, "torch.Tensor, except as a type: torch.empty makes tensors, and kernels fill them")
        if full is None or full.partition(".")[0] not in MODULES:
            if node.attr not in self.methods:
                raise Forbidden(node, f".{node.attr}")
            self._expression(node.value)
            return
        for module, allowed in WORDS:
            if full.startswith(module + "."):
                rest = full.removeprefix(module + ".").split(".")
                if full not in PLAIN_CALLS and rest[0] in allowed and all(part in METHODS for part in rest[1:]):
                    return
                break
        raise Forbidden(node, full)

    def _full(self, node: ast.AST) -> str | None:
        """The full name of a.b.c with its module; None for another expression."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name):
            return None
        return ".".join((self.modules.get(node.id, node.id if node.id not in MODULES else "?"), *reversed(parts)))

    def _constant(self, node: ast.expr) -> None:
        """Checks that a value at the top of the module, or a default value, is of a kind that cannot be changed."""
        for part in ast.walk(node):
            # refused even if a name of the function hides the list
            if isinstance(part, ast.Name) and part.id in self.lists:
                raise Forbidden(
                    part, f"{part.id} is a list or dict of the module, which keeps changes from one call to the next"
                )
            if isinstance(part, ast.Call) and self._full(part.func) not in TOP_CALLS:
                raise Forbidden(part, "a call at the top, or in a default, that may give what can be changed")
            if isinstance(part, ast.List | ast.Set | ast.Dict | ast.ListComp | ast.GeneratorExp | ast.Lambda):
                raise Forbidden(part, f"{type(part).__name__} at the top, or in a default: it outlives a call")
        self._expression(node)

    def _each(
        self,
        node: ast.ListComp | ast.GeneratorExp,
        element: Callable[[ast.expr], None],
        iterated: Callable[[ast.expr], None],
    ) -> None:
        """Checks a comprehension. Its first iterable belongs to the scope around the comprehension."""
        iterated(node.generators[0].iter)
        with self._scope(node, stored([part.target for part in node.generators])):
            for number, part in enumerate(node.generators):
                self._expression(part.target)
                for inner in part.ifs:
                    self._expression(inner)
                if number:
                    iterated(part.iter)
            element(node.elt)


def _of_what_type(node: ast.expr) -> ast.expr | None:
    """The x in an f-string's type(x) or type(x).__name__. These are allowed only as text, because the type itself could
    be called.
    """
    if isinstance(node, ast.Attribute) and node.attr == "__name__":
        node = node.value
    match node:
        case ast.Call(func=ast.Name(id="type"), args=[one], keywords=[]) if not isinstance(one, ast.Starred):
            return one
    return None


def call_arguments(call: ast.Call) -> list[ast.expr]:
    """The call's arguments, positional and named."""
    return [*call.args, *(keyword.value for keyword in call.keywords)]


def argument_names(arguments: ast.arguments) -> list[str]:
    return [argument.arg for argument in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]


def stored(nodes: Iterable[ast.AST]) -> list[str]:
    """The names that `nodes` define in their own scope, without names that are defined inside of inner functions and
    comprehensions.
    """
    names, pending = [], list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.append(node.id)
        if isinstance(node, ast.FunctionDef):
            names.append(node.name)
        elif not isinstance(node, ast.Lambda | ast.ListComp | ast.GeneratorExp):
            pending.extend(ast.iter_child_nodes(node))
    return names
