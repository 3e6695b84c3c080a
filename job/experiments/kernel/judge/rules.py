"""Stage 1 of the funnel: checks the syntax and the words of a candidate. The rules list what is allowed, because a list
of what is forbidden would be incomplete. A module may contain imports, constants, `@triton.jit` functions and functions
that launch them; `kernel_function` is the entry. Each kind of node is allowed only in its positions. Each name has one
meaning, the one that Python will find. Only attributes and modules that a kernel needs are allowed: there is no way to
the interpreter, to another module's insides, or to an operation of torch that computes. In the interpreter, kernels are
Python too, so they may do no more than other functions. A module's Python keeps nothing from one call to the next.
(Triton's objects may keep something, such as an autotuner's cache, and a kernel's pointers can reach beyond its
arguments. Rules cannot find this, so the timing checks its trials.) Whether an operator is applied to a tensor cannot
be seen in the source. The run refuses such operators, and `forbidden_ops` checks the list of functions that the run has
used.
"""

from __future__ import annotations

import ast
import builtins
import threading
from collections.abc import Iterable

from gpufleet.job.experiments.kernel.judge import source_text
from gpufleet.job.experiments.kernel.judge.catalog import ENTRY
from gpufleet.job.experiments.kernel.judge.expressions import (
    NO_GRADIENTS,
    Expressions,
    Forbidden,
    argument_names,
    call_arguments,
    stored,
)
from gpufleet.job.experiments.kernel.judge.vocabulary import ALLOWED_OPS, ALONE, METHODS, MODULES, OF_BLOCKS

PYTHONS = frozenset(dir(builtins))  # names that have Python's meaning at the top of a module that does not define them
DECORATORS = ("triton.jit", "triton.autotune", "triton.heuristics")


def problem(source: str) -> str | None:
    """The first forbidden construct, with its line; None if everything is allowed."""
    if (why := source_text.unreadable(source)) is not None:
        return why
    try:
        with _PARSER:
            tree = ast.parse(source)
            _Module(tree, source_text.lines(source))
    except Forbidden as error:
        return str(error)
    except RecursionError:
        return "nested too deeply"
    except (SyntaxError, ValueError, MemoryError) as error:
        return f"syntax: {str(error)[:200]}"
    return None


def forbidden_ops(names: Iterable[str]) -> list[str]:
    """Those of the torch functions `names`, which a run has reported, that compute something."""
    return sorted(name for name in names if name not in ALLOWED_OPS)


# one thread at a time, because CPython 3.11 has a single counter for the depth of the trees of all threads
_PARSER = threading.Lock()


class _Module(Expressions):
    """Walks a module once; raises at the first forbidden construct."""

    def __init__(self, tree: ast.Module, lines: list[str]) -> None:
        super().__init__()
        self.lines = lines
        self.kernels: set[str] = set()
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.functions = {function.name: function for function in functions}
        self.entry = ENTRY
        for function in functions:
            self._name_at_top(function, function.name)
        for node in tree.body:
            if isinstance(node, ast.Import | ast.ImportFrom):
                self._import(node)
        for function in functions:
            if any(self._decorator(decorator) == "triton.jit" for decorator in function.decorator_list):
                self.kernels.add(function.name)
        for node in tree.body:
            self._top(node)
        for function in functions:
            self._function(function)
        if not self.kernels:
            raise Forbidden(tree, "there is no @triton.jit kernel")
        if self.entry not in self.functions.keys() - self.kernels:
            raise Forbidden(tree, f"there is no function {ENTRY}")
        if not self.launched & self.kernels:
            raise Forbidden(tree, "no kernel is launched")

    def _name_at_top(self, node: ast.AST, name: str) -> None:
        """Raises an error if the name is already defined, or is a name of Python, because it would have Python's
        meaning before its definition.
        """
        self._new(node, name)
        if name in PYTHONS or name in self.top:
            raise Forbidden(node, f"{name} is given another meaning")
        self.top.add(name)

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            module = f"{node.module}.{alias.name}" if isinstance(node, ast.ImportFrom) else alias.name
            alone = isinstance(node, ast.ImportFrom) and alias.name in ALONE.get(node.module or "", ())
            if isinstance(node, ast.ImportFrom) and (node.level or not (alone or module in MODULES)):
                raise Forbidden(node, f"import from {node.module}: import the module itself")
            if not alone and module not in MODULES:
                raise Forbidden(node, f"import of {module}; allowed are {', '.join(MODULES)}")
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
                raise Forbidden(node, "a name without a value")
            if isinstance(node.value, ast.List | ast.Dict | ast.ListComp):
                self._decorator_value(node.value)
                self.lists |= {target.id for target in targets if isinstance(target, ast.Name)}
            else:
                self._constant(node.value)
            for target in targets:
                if not isinstance(target, ast.Name):
                    raise Forbidden(node, "only names are assigned at the top")
                self._name_at_top(target, target.id)
                if target.id == ENTRY and isinstance(node.value, ast.Name):
                    self.entry = node.value.id
        elif not isinstance(node, ast.FunctionDef | ast.Import | ast.ImportFrom) and not (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ):
            raise Forbidden(node, f"{type(node).__name__} at the top: only imports, constants and functions")

    def _decorator_value(self, node: ast.expr) -> None:
        """Checks a value in a decorator, or in a top-level list for a decorator: it must not be a value that can be
        changed and that a lambda, a kernel or its grid could use again.
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
        elif isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            self._decorator_value(node.left)
            self._decorator_value(node.right)
        elif (made := self._returned_value(node)) is not None:
            self._decorator_value(made)
        elif not (isinstance(node, ast.Name) and node.id in self.lists):
            self._element(node)

    def _returned_value(self, node: ast.expr) -> ast.expr | None:
        """The expression that a call of a function returns, if the function only returns a list."""
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args or node.keywords:
            return None
        function = self.functions.get(node.func.id)
        if function is None or function.decorator_list or ast.unparse(function.args):
            return None
        last = function.body[-1]
        statements = [
            part for part in function.body if not (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
        ]
        return last.value if statements == [last] and isinstance(last, ast.Return) else None

    def _element(self, node: ast.expr) -> None:
        # refused elsewhere, because the lambda could be used again
        if isinstance(node, ast.Lambda) and not self.scopes:
            self._expression(node)
        elif isinstance(node, ast.Call) and self._full(node.func) == "triton.Config":
            self._plain(node)
            for part in call_arguments(node):
                pairs = [*part.keys, *part.values] if isinstance(part, ast.Dict) else [part]
                for inner in pairs:
                    self._constant(inner or node)
        else:
            self._constant(node)

    def _iterated(self, node: ast.expr) -> None:
        if isinstance(node, ast.Call) and self._full(node.func) == "range":
            node = ast.List(call_arguments(node))
        for part in node.elts if isinstance(node, ast.List) else [node]:
            self._constant(part)

    def _decorator(self, node: ast.expr) -> str | None:
        """The decorator's name, with or without arguments."""
        return self._full(node.func if isinstance(node, ast.Call) else node)

    def _function(self, function: ast.FunctionDef) -> None:
        for decorator in function.decorator_list:
            name = self._decorator(decorator)
            bare = name in NO_GRADIENTS and not isinstance(decorator, ast.Call)
            if (bare or self._without_gradients(decorator)) and function.name not in self.kernels:
                continue
            if name not in DECORATORS:
                raise Forbidden(function, f"the decorator {name}")
            if isinstance(decorator, ast.Call):
                self._plain(decorator)
                for part in call_arguments(decorator):
                    self._decorator_value(part)
        if getattr(function, "type_params", None):
            raise Forbidden(function, "parameters that are types")
        if function.name in self.kernels and (why := source_text.misread(function, self.lines)) is not None:
            raise Forbidden(function, why)
        if function.returns is not None:
            self._annotation(function.returns)
        self._arguments(function.args)
        self.methods = METHODS | OF_BLOCKS if function.name in self.kernels else METHODS
        with self._scope(function, [*argument_names(function.args), *stored(function.body)]):
            for statement in function.body:
                self._statement(statement)
