"""Makes Triton's interpreter more like its compiler: a program that compiles and is right on a GPU must be right here.

It patches a process from which candidates' processes are forked, or a candidate's new process.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
from collections.abc import Callable
from typing import Any

# Operators with a constexpr to the left of a tensor. The compiler asks the tensor; the interpreter would make a
# constexpr of the result.
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge",
    "eq", "ne",
)  # fmt: skip

NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])
# methods of a block
METHODS = ("ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt", "sqrt_rn")


def install(turn: Callable[[], int]) -> dict[str, Any]:
    """Patches the interpreter; `turn` numbers the calls. Returns the meanings of the names that differ in a candidate's
    module; if no tensor is involved, they act as in Python.
    """
    tuner, language = importlib.import_module("triton.runtime.autotuner").Autotuner, _language()
    tuner.run = functools.partialmethod(_in_turn, turn)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    executor, rewriter = interpreter.GridExecutor, interpreter.FunctionRewriter
    executor.__init__ = functools.partialmethod(_with_constants, executor.__init__)
    rewriter._transform_ast = functools.partialmethod(_with_logic, rewriter._transform_ast)
    interpreter.__logical__ = _logical  # a name that no candidate may use; rewritten code calls it
    for name in OPERATORS:
        _leave_to_tensors(language.constexpr, f"__{name}__")
    for name in METHODS:  # Triton's patch wraps the functions, but forgets these methods
        setattr(language.tensor, name, functools.partialmethod(_function, name))
    return {name: functools.partial(_either, name) for name in ("min", "max")}


def _language() -> Any:
    return importlib.import_module("triton.language")


def _function(block: Any, name: str) -> Any:
    return getattr(_language(), name)(block)


def _in_turn(tuner: Any, turn: Callable[[], int], *args: Any, **kwargs: Any) -> Any:
    """Replaces Autotuner.run if there is no GPU to tune for. Each call of the program takes the next configuration and
    remembers none, so that all are tried.
    """
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    choice = tuner.prune_configs(kwargs)
    return tuner.fn.run(*args, **kwargs, **choice[turn() % len(choice)].all_kwargs())


def _with_constants(executor: Any, own: Callable[..., None], fn: Any, arg_names: list[str], *rest: Any) -> None:
    """Replaces GridExecutor.__init__, which recognises a constant only by "tl.constexpr", not by
    "triton.language.constexpr" or a text annotation; the compiler does.
    """
    own(executor, fn, arg_names, *rest)
    executor.constexprs = [name for name in arg_names if "constexpr" in str(fn.__annotations__.get(name))]


class _Logic(ast.NodeTransformer):
    """Turns `and`, `or` and `not` into calls of _logical."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        name = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
        return self._call(name, [ast.Lambda(NO_ARGUMENTS, self.visit(value)) for value in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        return self._call("__not__", [operand]) if isinstance(node.op, ast.Not) else ast.UnaryOp(node.op, operand)

    def _call(self, name: str, values: list[ast.expr]) -> ast.expr:
        return ast.Call(ast.Name("__logical__", ast.Load()), [ast.Constant(name), *values], [])


def _with_logic(rewriter: Any, own: Callable[..., ast.Module], source: str) -> ast.Module:
    """Replaces FunctionRewriter._transform_ast: for blocks the compiler evaluates each element, unlike Python."""
    tree: ast.Module = _Logic().visit(own(rewriter, source))
    return ast.fix_missing_locations(tree)


def _logical(name: str, *operands: Any) -> Any:
    """`and` or `or` as the compiler evaluates it: constants up to the deciding one, and all tensors."""
    tensors, tensor = list[Any](), _language().tensor
    if name == "__not__":
        (evaluated,) = operands
        return evaluated.__not__() if isinstance(evaluated, tensor) else not evaluated
    for operand in operands:
        evaluated = operand()
        if isinstance(evaluated, tensor):
            tensors.append(evaluated)
        elif bool(evaluated) is (name == "logical_or"):
            return evaluated
    return functools.reduce(lambda one, other: getattr(one, name)(other), tensors) if tensors else evaluated


def _leave_to_tensors(constexpr: Any, name: str) -> None:
    own, tensor = getattr(constexpr, name), _language().tensor

    def operator(one: Any, other: Any) -> Any:
        return NotImplemented if isinstance(other, tensor) else own(one, other)

    setattr(constexpr, name, operator)


def _either(name: str, *args: Any, **kwargs: Any) -> Any:
    """min or max: of a block's elements, as in the compiler, if a block is given; else Python's function."""
    language = _language()
    if not any(isinstance(arg, language.tensor) for arg in args):
        return getattr(builtins, name)(*args, **kwargs)
    return functools.reduce(functools.partial(getattr(language, f"{name}imum"), **kwargs), args)
