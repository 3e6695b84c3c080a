"""Triton's interpreter, brought nearer to its compiler: what compiles and is right on a GPU is to be right here.

Patched into a process that candidates' processes are forked from, or into one that is new.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
from collections.abc import Callable
from typing import Any

# With a constexpr to the left of a tensor. The compiler asks the tensor; the interpreter would make a constexpr of it.
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge",
    "eq", "ne",
)  # fmt: skip

NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])
METHODS = ("ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt", "sqrt_rn")  # of a block


def install(turn: Callable[[], int]) -> dict[str, Any]:
    """`turn` numbers the calls. What these names mean to a candidate's module: Python's own where no tensor is."""
    tuner, language = importlib.import_module("triton.runtime.autotuner").Autotuner, _language()
    tuner.run = functools.partialmethod(_in_turn, turn)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    executor, rewriter = interpreter.GridExecutor, interpreter.FunctionRewriter
    executor.__init__ = functools.partialmethod(_with_constants, executor.__init__)
    rewriter._transform_ast = functools.partialmethod(_with_logic, rewriter._transform_ast)
    interpreter.__logical__ = _logical  # of a name that no candidate may use; the rewritten find it
    for name in OPERATORS:
        _leave_to_tensors(language.constexpr, f"__{name}__")
    for name in METHODS:  # which it forgets to make its own, as it does the functions
        setattr(language.tensor, name, functools.partialmethod(_function, name))
    return {name: functools.partial(_either, name) for name in ("min", "max")}


def _language() -> Any:
    return importlib.import_module("triton.language")


def _function(block: Any, name: str) -> Any:
    return getattr(_language(), name)(block)


def _in_turn(tuner: Any, turn: Callable[[], int], *args: Any, **kwargs: Any) -> Any:
    """For Autotuner.run where there is no GPU to tune for: each call of the program takes the next configuration, so
    that all are tried, and none is remembered.
    """
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    choice = tuner.prune_configs(kwargs)
    return tuner.fn.run(*args, **kwargs, **choice[turn() % len(choice)].all_kwargs())


def _with_constants(executor: Any, own: Callable[..., None], fn: Any, arg_names: list[str], *rest: Any) -> None:
    """For GridExecutor.__init__, which knows a constant by "tl.constexpr" alone, not by "triton.language.constexpr" nor
    by what was text already; the compiler does.
    """
    own(executor, fn, arg_names, *rest)
    executor.constexprs = [name for name in arg_names if "constexpr" in str(fn.__annotations__.get(name))]


class _Logic(ast.NodeTransformer):
    """`and`, `or` and `not` become calls of _logical."""

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        name = "logical_and" if isinstance(node.op, ast.And) else "logical_or"
        return self._call(name, [ast.Lambda(NO_ARGUMENTS, self.visit(value)) for value in node.values])

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.expr:
        operand = self.visit(node.operand)
        return self._call("__not__", [operand]) if isinstance(node.op, ast.Not) else ast.UnaryOp(node.op, operand)

    def _call(self, name: str, values: list[ast.expr]) -> ast.expr:
        return ast.Call(ast.Name("__logical__", ast.Load()), [ast.Constant(name), *values], [])


def _with_logic(rewriter: Any, own: Callable[..., ast.Module], source: str) -> ast.Module:
    """For FunctionRewriter._transform_ast: of blocks the compiler takes each element, Python the last operand whole."""
    found: ast.Module = _Logic().visit(own(rewriter, source))
    return ast.fix_missing_locations(found)


def _logical(name: str, *operands: Any) -> Any:
    """`and` or `or` as the compiler evaluates it: constants up to the one that decides, tensors all."""
    tensors, tensor = list[Any](), _language().tensor
    if name == "__not__":
        (found,) = operands
        return found.__not__() if isinstance(found, tensor) else not found
    for operand in operands:
        found = operand()
        if isinstance(found, tensor):
            tensors.append(found)
        elif bool(found) is (name == "logical_or"):
            return found
    return functools.reduce(lambda left, right: getattr(left, name)(right), tensors) if tensors else found


def _leave_to_tensors(constexpr: Any, name: str) -> None:
    own, tensor = getattr(constexpr, name), _language().tensor

    def operator(left: Any, right: Any) -> Any:
        return NotImplemented if isinstance(right, tensor) else own(left, right)

    setattr(constexpr, name, operator)


def _either(name: str, *args: Any, **kwargs: Any) -> Any:
    """min or max: of a block's elements where one is given, as the compiler does, not of Python's comparisons."""
    language = _language()
    if not any(isinstance(arg, language.tensor) for arg in args):
        return getattr(builtins, name)(*args, **kwargs)
    return functools.reduce(functools.partial(getattr(language, f"{name}imum"), **kwargs), args)
