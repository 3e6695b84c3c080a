"""The inputs that candidates are tried on, and what the reference makes of them. Only the judge imports this module."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from job.kernels.catalog import Task

TINY = (17,)
# On a CPU kernels are interpreted, milliseconds per program: just more than one block. On a GPU more than its caches.
FULL = {"cpu": (9, 130), "cuda": (4096, 4099)}
SECOND = {"cpu": (3, 7, 61), "cuda": (3, 1021, 2053)}
LARGE = 1e4
# Absolute per unit of the largest input or 1, and relative. Element-wise fp32 differs by a few ulp (1.2e-7) between
# implementations of exp; half precision rounds once more at the end.
TOLERANCE = {
    torch.float32: (1e-5, 1e-4),
    torch.float16: (1e-3, 1e-2),
    torch.bfloat16: (1e-2, 2e-2),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One input. `tensors` are the arguments in order."""

    name: str
    tensors: tuple[Tensor, ...]


def case(task: Task, seed: int, name: str, device: str = "cpu") -> Case:
    """tiny, random-N, zeros, large, non-contiguous, second-shape, or any other name: FULL with values of its own.

    The tensors are on the CPU, of the size that `device` is tried with.
    """
    digest = hashlib.sha256(f"{seed} {task.name} {name}".encode()).digest()
    random = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
    shape, scale = _shape(name, device), {"zeros": 0.0, "large": LARGE}.get(name, 1.0)
    drawn = [(torch.randn(shape, generator=random) * scale).to(getattr(torch, task.dtype)) for _ in range(task.arity)]
    tensors = tuple(tensor.t() if name == "non-contiguous" else tensor for tensor in drawn)
    return Case(name=name, tensors=tensors)


def layouts(task: Task) -> list[list[dict[str, Any]]]:
    """What a GPU's inputs look like without their numbers, a list of {dtype, shape, stride} for each that differs."""
    found = []
    for name in ("tiny", "random-0", "non-contiguous", "second-shape"):
        tensor = torch.empty(_shape(name, "cuda"), device="meta")
        tensor = tensor.t() if name == "non-contiguous" else tensor
        found.append([{"dtype": task.dtype, "shape": list(tensor.shape), "stride": list(tensor.stride())}] * task.arity)
    return found


def _shape(name: str, device: str) -> tuple[int, ...]:
    """As it is drawn: the non-contiguous one is transposed afterwards."""
    full: tuple[int, ...] = FULL[device]
    return {"tiny": TINY, "second-shape": SECOND[device], "non-contiguous": full[::-1]}.get(name, full)


def cases(task: Task, seed: int, inputs: int, device: str = "cpu", *, adversarial: bool = True) -> Iterator[Case]:
    """The full run's: `inputs` random ones, then zeros, large magnitude, non-contiguous and a second shape."""
    for index in range(inputs):
        yield case(task, seed, f"random-{index}", device)
    if adversarial:
        for name in ("zeros", "large", "non-contiguous", "second-shape"):
            yield case(task, seed, name, device)


def expected(task: Task, given: Case) -> Tensor:
    """The reference's result. Computed by the judge from its own copy, after the candidate has answered."""
    scope = {"torch": torch, **dict(zip(task.arguments, given.tensors, strict=True))}
    result = eval(task.reference, scope)
    assert isinstance(result, Tensor)
    return result


def difference(task: Task, given: Case, shape: tuple[int, ...], dtype: str, content: bytes) -> str | None:
    """Why an output is not the expected one, within the dtype's tolerance; None when it is. NaN equals NaN."""
    wanted = expected(task, given)
    if tuple(shape) != tuple(wanted.shape) or dtype != str(wanted.dtype).removeprefix("torch."):
        return f"{given.name}: {dtype} {list(shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    if len(content) != wanted.numel() * wanted.element_size():
        return f"{given.name}: {len(content)} bytes for {wanted.numel()} elements"
    found = torch.frombuffer(bytearray(content), dtype=wanted.dtype).reshape(wanted.shape).double()
    absolute, relative = TOLERANCE[wanted.dtype]
    scale = max(1.0, *(float(tensor.abs().max()) for tensor in given.tensors))
    near = torch.isclose(found, wanted.double(), atol=absolute * scale, rtol=relative, equal_nan=True)
    if bool(near.all()):
        return None
    return f"{given.name}: {int((~near).sum())} of {near.numel()} elements differ from the reference"
