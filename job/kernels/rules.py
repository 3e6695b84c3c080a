"""Stage 1: syntax, and what a candidate may say. A list of what is allowed, because one of what is not has holes.

A module holds imports, constants, `@triton.jit` functions and functions that launch them; `kernel_function` is the
entry. Names, attributes and modules are those a kernel needs: no way to reach the interpreter, another module's
insides, or an operation of torch that computes. Under the interpreter kernels are Python too, so they have no more
rights. What an operator does to a tensor cannot be seen here: `FORBIDDEN_OPS` is what the run's own list is held to.
"""

from __future__ import annotations

import ast
import threading
from collections.abc import Iterable

from job.kernels.catalog import ENTRY


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODULES = {"torch": "torch", "triton": "triton", "triton.language": "tl", "math": "math"}
TORCH = _words(
    "empty empty_like empty_strided zeros zeros_like Tensor dtype float16 float32 float64 bfloat16 int8 uint8 int16 "
    "int32 int64 bool strided contiguous_format preserve_format"
)
TRITON = _words("jit autotune heuristics Config cdiv next_power_of_2 language")
MATH = _words("ceil floor log2 sqrt pi e inf")
LANGUAGE = _words(
    "abs advance arange argmax argmin associative_scan assume atomic_add atomic_and atomic_cas atomic_max atomic_min "
    "atomic_or atomic_xchg atomic_xor bfloat16 bitcast block_type broadcast broadcast_to cast cat cdiv ceil clamp "
    "constexpr cos cumprod cumsum debug_barrier device_assert dot dtype erf exp exp2 expand_dims fdiv flip float16 "
    "float32 float64 floor fma full gather histogram int1 int16 int32 int64 int8 interleave join load log log2 "
    "make_block_ptr math max max_constancy max_contiguous maximum min minimum multiple_of num_programs permute "
    "pointer_type program_id ravel reduce reshape rsqrt sigmoid sin softmax sort split sqrt sqrt_rn static_assert "
    "static_range store sum swizzle2d tensor trans uint16 uint32 uint64 uint8 umulhi view where xor_sum zeros "
    "zeros_like div_rn"
)
METHODS = _words(
    "shape size stride numel contiguous is_contiguous dtype device data_ptr element_size ndim dim view reshape is_cuda "
    "new_empty expand t T transpose permute flatten unsqueeze squeeze to clone element_ty itemsize append items get "
    "broadcast_to trans value"
)
BUILTINS = _words(
    "len range min max int float bool tuple list dict isinstance enumerate zip ValueError TypeError RuntimeError "
    "AssertionError True False None"
)
STATEMENTS = (
    ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.Expr, ast.If, ast.For, ast.While, ast.Assert, ast.Raise,
    ast.Pass, ast.Break, ast.Continue,
)  # fmt: skip
EXPRESSIONS = (
    ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Compare, ast.IfExp, ast.Call, ast.keyword, ast.Attribute, ast.Subscript,
    ast.Slice, ast.Name, ast.Constant, ast.Tuple, ast.List, ast.Dict, ast.Lambda, ast.ListComp, ast.GeneratorExp,
    ast.comprehension, ast.Starred, ast.JoinedStr, ast.FormattedValue, ast.arguments, ast.arg, ast.NamedExpr,
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
# What torch functions a run may call: making outputs, looking at a tensor, moving it about. Triton's interpreter adds
# those that wrap memory.
ALLOWED_OPS = METHODS | {
    "empty", "empty_like", "empty_strided", "zeros", "zeros_like", "untyped_storage", "storage_offset", "__get__",
    "is_floating_point", "set_", "copy_", "cpu", "new_tensor", "__len__", "is_pinned", "nbytes", "untyped",
}  # fmt: skip


def problem(source: str) -> str | None:
    """The first thing that is not allowed, with its line; None when there is none."""
    if len(source) > 100_000:
        return "longer than 100,000 characters"
    try:
        with _PARSER:
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        return f"syntax: {str(error)[:200]}"
    try:
        _Module(tree)
    except _Forbidden as error:
        return str(error)
    except RecursionError:
        return "nested too deeply"
    return None


def forbidden_ops(names: Iterable[str]) -> list[str]:
    """Torch functions among `names`, as a run reports them, that compute something."""
    return sorted(str(name) for name in names if name not in ALLOWED_OPS)


_PARSER = threading.Lock()  # CPython 3.11 counts the depth of all threads' trees in one place, and trips over it


class _Forbidden(Exception):
    def __init__(self, node: ast.AST, what: str) -> None:
        super().__init__(f"line {getattr(node, 'lineno', '?')}: {what}")


class _Module:
    """Walks a module once; raises at the first thing that is not allowed."""

    def __init__(self, tree: ast.Module) -> None:
        self.modules: dict[str, str] = {}  # name in the source -> module
        self.kernels: set[str] = set()
        functions = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
        self.known = BUILTINS | {function.name for function in functions}
        for node in tree.body:
            self._top(node)
        for function in functions:
            if any(self._is_jit(decorator) for decorator in function.decorator_list):
                self.kernels.add(function.name)
        for function in functions:
            self._function(function)
        self._entry(tree, functions)

    def _top(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Import):
            for alias in node.names:
                self._import(node, alias.name, alias.asname or alias.name.split(".")[0], bool(alias.asname))
        elif isinstance(node, ast.ImportFrom):
            if (node.module, [alias.name for alias in node.names]) != ("triton", ["language"]):
                raise _Forbidden(node, f"import from {node.module}: import the module itself")
            self.modules[node.names[0].asname or "language"] = "triton.language"
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            for target in targets:
                if not isinstance(target, ast.Name):
                    raise _Forbidden(node, "only names are assigned at the top")
                self._bind(target, target.id)
            if node.value is not None:
                self._expression(node.value)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return
        elif not isinstance(node, ast.FunctionDef):
            raise _Forbidden(node, f"{type(node).__name__} at the top: only imports, constants and functions")

    def _import(self, node: ast.stmt, module: str, name: str, renamed: bool) -> None:
        if module not in MODULES:
            raise _Forbidden(node, f"import of {module}; allowed are {', '.join(MODULES)}")
        self.modules[name] = module if renamed else module.split(".")[0]

    def _bind(self, node: ast.AST, name: str) -> None:
        if name.startswith("_") and name.startswith("__"):
            raise _Forbidden(node, f"the name {name}")
        if name in self.modules or name in BUILTINS:
            raise _Forbidden(node, f"{name} is given another meaning")
        self.known = self.known | {name}

    def _is_jit(self, decorator: ast.expr) -> bool:
        name = _dotted(decorator)
        return name is not None and self._resolved(name) == "triton.jit"

    def _resolved(self, name: str) -> str:
        first, _, rest = name.partition(".")
        return ".".join(filter(None, (self.modules.get(first, first), rest)))

    def _function(self, function: ast.FunctionDef) -> None:
        for decorator in function.decorator_list:
            target = decorator.func if isinstance(decorator, ast.Call) else decorator
            name = self._resolved(_dotted(target) or "?")
            if name not in ("triton.jit", "triton.autotune", "triton.heuristics"):
                raise _Forbidden(function, f"the decorator {name}")
            self._expression(decorator)
        outer = self.known
        for argument in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs):
            self._bind(argument, argument.arg)
        for node in ast.walk(function):
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._bind(node, node.id)
        for part in (*function.args.defaults, *filter(None, function.args.kw_defaults)):
            self._expression(part)
        for statement in function.body:
            for node in ast.walk(statement):
                if isinstance(node, ast.stmt) and not isinstance(node, STATEMENTS):
                    raise _Forbidden(node, f"{type(node).__name__} is not allowed")
            self._expression(statement)
        self.known = outer

    def _expression(self, root: ast.AST) -> None:
        inner = self.known
        for node in ast.walk(root):
            if isinstance(node, ast.Lambda):
                for argument in node.args.args:
                    self._bind(argument, argument.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                self._bind(node, node.id)
        for node in ast.walk(root):
            if isinstance(node, ast.stmt):
                continue
            if not isinstance(node, EXPRESSIONS):
                raise _Forbidden(node, f"{type(node).__name__} is not allowed")
            if isinstance(node, ast.Name):
                self._name(node)
            elif isinstance(node, ast.Attribute):
                self._attribute(node)
        self.known = inner

    def _name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Del):
            raise _Forbidden(node, "del is not allowed")
        if node.id not in self.known and node.id not in self.modules:
            raise _Forbidden(node, f"the name {node.id}")

    def _attribute(self, node: ast.Attribute) -> None:
        if not isinstance(node.ctx, ast.Load):
            raise _Forbidden(node, f"the attribute {node.attr} is changed")
        name = _dotted(node)
        base = name.partition(".")[0] if name is not None else ""
        if name is None or base not in self.modules:
            if node.attr not in METHODS:
                raise _Forbidden(node, f".{node.attr}")
            return
        full = self._resolved(name)
        for module, allowed in (("triton.language.math", LANGUAGE), ("triton.language", LANGUAGE), ("math", MATH),
                                ("torch", TORCH), ("triton", TRITON)):  # fmt: skip
            if full.startswith(module + "."):
                rest = full.removeprefix(module + ".").split(".")
                if rest[0] in allowed and all(part in METHODS for part in rest[1:]):
                    return
                break
        raise _Forbidden(node, full)

    def _entry(self, tree: ast.Module, functions: list[ast.FunctionDef]) -> None:
        if not self.kernels:
            raise _Forbidden(tree, "there is no @triton.jit kernel")
        if ENTRY not in {function.name for function in functions} - self.kernels:
            raise _Forbidden(tree, f"there is no function {ENTRY}")
        if len({function.name for function in functions}) < len(functions):
            raise _Forbidden(tree, "two functions have one name")
        launched = {
            node.func.value.id
            for node in ast.walk(tree)
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
            and isinstance(node.func.value, ast.Name)
        }  # fmt: skip
        if not launched & self.kernels:
            raise _Forbidden(tree, "no kernel is launched")


def _dotted(node: ast.AST) -> str | None:
    """a.b.c, or None when it is no such chain of names."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = _dotted(node.value)
        return None if base is None else f"{base}.{node.attr}"
    return None
