"""Makes Triton's interpreter more like its compiler: a program that compiles and is right on a GPU must be right here.

It changes the process from which the processes of candidates are forked, or the new process of a candidate.
"""

from __future__ import annotations

import ast
import builtins
import functools
import importlib
from collections.abc import Callable
from typing import Any

# Operators with a constexpr to the left of a tensor. The compiler uses the tensor's operator; the interpreter would
# make a constexpr of the result.
OPERATORS = (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "and", "or", "xor", "lshift", "rshift", "lt", "le", "gt", "ge",
    "eq", "ne",
)  # fmt: skip

NO_ARGUMENTS = ast.arguments([], [], None, [], [], None, [])
# Methods of a block.
METHODS = ("ceil", "cos", "erf", "exp", "exp2", "floor", "log", "log2", "rsqrt", "sin", "sqrt", "sqrt_rn")


def install(turn: Callable[[], int]) -> dict[str, Any]:
    """Changes the interpreter. `turn` returns the number of the call. Returns the names that have a different meaning
    in a candidate's module, with this meaning; if no tensor is involved, they act as in Python.
    """
    tuner, language = importlib.import_module("triton.runtime.autotuner").Autotuner, _language()
    tuner.run = functools.partialmethod(_in_turn, turn)
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    executor, rewriter = interpreter.GridExecutor, interpreter.FunctionRewriter
    executor.__init__ = functools.partialmethod(_with_constants, executor.__init__)
    rewriter._transform_ast = functools.partialmethod(_with_logic, rewriter._transform_ast)
    interpreter.__logical__ = _logical  # rewritten code calls this; no candidate may use the name
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
    """Replaces Autotuner.run if there is no GPU to tune for. Each call of the program uses the next configuration and
    keeps none, so that all configurations are tried.
    """
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    choice = tuner.prune_configs(kwargs)
    return tuner.fn.run(*args, **kwargs, **choice[turn() % len(choice)].all_kwargs())


def _with_constants(executor: Any, own: Callable[..., None], fn: Any, arg_names: list[str], *rest: Any) -> None:
    """Replaces GridExecutor.__init__, which recognises a constant only by "tl.constexpr". The compiler also recognises
    "triton.language.constexpr" and annotations that are text.
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
    """Replaces FunctionRewriter._transform_ast: for blocks, the compiler evaluates each element, which Python
    does not.
    """
    tree: ast.Module = _Logic().visit(own(rewriter, source))
    return ast.fix_missing_locations(tree)


def _logical(name: str, *operands: Any) -> Any:
    """`and` or `or` as the compiler evaluates it: constants up to the one that decides, and all tensors."""
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
    """min or max. If the argument is a block, the result is that of its elements, as in the compiler; otherwise that of
    Python's function.
    """
    language = _language()
    if not any(isinstance(arg, language.tensor) for arg in args):
        return getattr(builtins, name)(*args, **kwargs)
    return functools.reduce(functools.partial(getattr(language, f"{name}imum"), **kwargs), args)
