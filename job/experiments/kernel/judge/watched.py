"""Watches a checked call: the functions that it calls, its reads of unwritten memory, and its writes outside of its own
memory. A program can probably detect all of this. A kernel may read new memory, or memory beyond its own, and so
distinguish a watched call from a timed one. So the judge also makes checked calls that are not watched. A program may
also detect that its calls are listed: Python's own objects then have other addresses, which the text of these objects
shows. So computations that the rules cannot see in the source, above all by operators, are refused in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpufleet.job.experiments.kernel.judge.vocabulary import METHODS, OF_BLOCKS

# Functions that make a tensor without reading another one.
FROM_NUMBERS = {"empty", "empty_strided", "empty_permuted", "zeros", "full", "device"}
WITH_TENSORS = {"to", "view_as", "expand_as", "broadcast_tensors", "new_tensor", "copy_", "set_", "result_type"}
WIDTH = 4096  # number of elements of guard bytes
# The value of each byte of a fence. There are two values, because a program that writes one element too many has also
# read this element, and relu(2e8) is 2e8.
GIVEN, MADE = 0x4D, 0xC4
# Methods of a tensor that Python's syntax or functions call, for an operator, a number or a text.
BINARY = "add and div floordiv lshift matmul mod mul or pow rshift sub truediv xor"
OTHERS = (
    "lt le eq ne gt ge neg pos abs invert round contains iter reversed setitem bool complex float index int repr str "
    "format array"
)
OPERATORS = (
    *(f"__{kind}{name}__" for kind in ("", "r", "i") for name in BINARY.split()),
    *(f"__{name}__" for name in OTHERS.split()),
)


class Computes(BaseException):
    """The program has computed with a tensor; the message names the operator or method. A candidate's code cannot catch
    this error.
    """


def refuse_operators() -> None:
    """Makes operators on tensors in this process raise Computes, and also methods that the rules take for those of a
    block. This costs nothing unless such a method is used. No program that passes the rules can undo it.
    """
    for name in (*OPERATORS, *(OF_BLOCKS - METHODS)):
        setattr(torch.Tensor, name, _refusing(name))
    own = torch.Tensor.__getitem__

    def __getitem__(tensor: Tensor, index: Any) -> Tensor:  # noqa: N807 - Ops sees this name
        if not _is_view(index):
            raise Computes("__getitem__")
        return own(tensor, index)

    torch.Tensor.__getitem__ = __getitem__  # type: ignore[assignment, method-assign]


def _refusing(name: str) -> Callable[..., Any]:
    def operator(*_: Any, **__: Any) -> Any:
        raise Computes(name)

    return operator


class Fences:
    """Guard bytes on both sides of memory that a call may write; each byte has the value `sign`, and the call must not
    write to them.
    """

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._kept: list[Tensor] = []

    def fenced_copy(self, content: Tensor, shape: Any, stride: Any, offset: int) -> Tensor:
        """A copy of a flat tensor between guard bytes, with this shape, strides and offset."""
        size, width = content.numel(), content.element_size()
        held = torch.full(((size + 2 * WIDTH) * width,), self._sign, dtype=torch.uint8, device=content.device)
        self._kept += [held[: WIDTH * width], held[(WIDTH + size) * width :]]
        whole = held.view(content.dtype)
        whole[WIDTH : WIDTH + size].copy_(content)
        return whole.as_strided(shape, stride, WIDTH + offset)

    @property
    def broken(self) -> bool:
        return any(torch.ne(fence, self._sign).any().item() for fence in self._kept)


class Ops(TorchFunctionMode):
    """The names of the torch functions that a candidate calls and, if `fenced`, guard bytes around the functions'
    results. Guard bytes change a result's addresses, which a candidate may read.
    """

    def __init__(self, *, fenced: bool) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.fences = Fences(MADE)
        self._fenced = fenced

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, arguments = getattr(func, "__name__", "?"), [*args, *(kwargs or {}).values()]
        if not (name == "__getitem__" and len(args) == 2 and _is_view(args[1])):
            self.names.add(name)
        if _reads(name, args, kwargs or {}):
            self.names.add(f"a tensor's number in {name}")
        made = func(*args, **(kwargs or {}))
        if not self._fenced or not isinstance(made, Tensor) or made.is_meta or not made.numel():
            return made
        place = made.untyped_storage().data_ptr()
        if any(isinstance(one, Tensor) and one.untyped_storage().data_ptr() == place for one in arguments):
            return made
        extent = 1 + sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True))
        return self.fences.fenced_copy(made.as_strided((extent,), (1,)), made.shape, made.stride(), 0)


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is passed as a number, for a size or a fill value. torch then reads it without a call that would
    be listed, so a program could compute with it in that way.
    """
    numbers = [*args[name not in FROM_NUMBERS :], *(kwargs[key] for key in kwargs.keys() - {"input", "self", "out"})]
    parts = (one for part in numbers for one in (part if isinstance(part, tuple | list) else [part]))
    return name not in WITH_TENSORS and any(isinstance(one, Tensor) for one in parts)


def _is_view(index: Any) -> bool:
    """Whether an index takes a part of a tensor as it is, without computing."""
    if isinstance(index, tuple):
        return all(map(_is_view, index))
    if isinstance(index, slice):
        return all(part is None or type(part) is int for part in (index.start, index.stop, index.step))
    return index is None or index is Ellipsis or type(index) is int


@contextmanager
def filled() -> Iterator[None]:
    """A context in which new memory contains NaN instead of earlier contents, which could be the right result."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)
