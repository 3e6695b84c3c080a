"""How a call is watched that is checked: what it calls, what it reads that nobody wrote, where it writes.

None of it may be believed to be unseen. A kernel may read what new memory holds, or what lies beyond its own, and so
tell a watched call from a timed one; the judge therefore makes checked calls that are not watched, too. A program may
also tell whether its calls are listed: Python's own objects come to lie elsewhere then, and their text says where. So
what computes and is no word of the rules', an operator above all, is refused in every call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gpufleet.job.experiments.kernel.judge.vocabulary import METHODS, OF_BLOCKS

FROM_NUMBERS = {"empty", "empty_strided", "empty_permuted", "zeros", "full", "device"}  # of no other tensor
WITH_TENSORS = {"to", "view_as", "expand_as", "broadcast_tensors", "new_tensor", "copy_", "set_", "result_type"}
WIDTH = 4096  # elements
# What each byte of a fence holds. Two: who writes one element too many has read it too, and relu(2e8) is 2e8.
GIVEN, MADE = 0x4D, 0xC4
# What Python's syntax and functions call of a tensor: by a sign, or for a number or a text.
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
    """A tensor was computed with; says by which operator or method. Nothing on the way catches it."""


def refuse_operators() -> None:
    """From now on, in this process, operators on tensors raise Computes, and so do methods that the rules take for a
    block's. It costs nothing where none is used. Cannot be undone by a program that the rules allow.
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
    """On both sides of memory that a call may write to; nothing may write to them. Their bytes hold `sign`."""

    def __init__(self, sign: int) -> None:
        self._sign = sign
        self._kept: list[Tensor] = []

    def fenced_copy(self, content: Tensor, shape: Any, stride: Any, offset: int) -> Tensor:
        """A flat tensor's copy within fences, seen with this shape, strides and offset."""
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
    """The names of the torch functions that a candidate calls and, when `fenced`, fences around what they make. Those
    show in the addresses of it, which a candidate may ask for.
    """

    def __init__(self, *, fenced: bool) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.fences = Fences(MADE)
        self._fenced = fenced

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, given = getattr(func, "__name__", "?"), [*args, *(kwargs or {}).values()]
        if not (name == "__getitem__" and len(args) == 2 and _is_view(args[1])):
            self.names.add(name)
        if _reads(name, args, kwargs or {}):
            self.names.add(f"a tensor's number in {name}")
        made = func(*args, **(kwargs or {}))
        if not self._fenced or not isinstance(made, Tensor) or made.is_meta or not made.numel():
            return made
        place = made.untyped_storage().data_ptr()
        if any(isinstance(one, Tensor) and one.untyped_storage().data_ptr() == place for one in given):
            return made
        extent = 1 + sum((size - 1) * stride for size, stride in zip(made.shape, made.stride(), strict=True))
        return self.fences.fenced_copy(made.as_strided((extent,), (1,)), made.shape, made.stride(), 0)


def _reads(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a tensor is given for a number, of a size or to fill with: torch reads it then, and calls nothing that
    would be listed; a program could compute with what it asks for in that way.
    """
    numbers = [*args[name not in FROM_NUMBERS :], *(kwargs[key] for key in kwargs.keys() - {"input", "self", "out"})]
    each = (one for part in numbers for one in (part if isinstance(part, tuple | list) else [part]))
    return name not in WITH_TENSORS and any(isinstance(one, Tensor) for one in each)


def _is_view(index: Any) -> bool:
    """An index that takes a part of a tensor as it is, and computes nothing."""
    if isinstance(index, tuple):
        return all(map(_is_view, index))
    if isinstance(index, slice):
        return all(part is None or type(part) is int for part in (index.start, index.stop, index.step))
    return index is None or index is Ellipsis or type(index) is int


@contextmanager
def filled() -> Iterator[None]:
    """Memory that is made holds NaN, not what somebody left there, which may be right."""
    torch._C._set_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch._C._set_deterministic_algorithms(False)
