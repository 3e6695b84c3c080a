"""The inputs on which candidates are tried, and the reference's results. Only the judge imports this module.

Sizes and values are random, with the judge's seed, which is never passed to a candidate's process.
"""

from __future__ import annotations

import hashlib
import random
import threading
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gpufleet.job.experiments.kernel.judge import wire
from gpufleet.job.experiments.kernel.judge.catalog import KernelTask

Ranges = tuple[tuple[int, int, int], ...]  # lowest, highest and step of each dimension
# On a CPU, kernels are interpreted, which takes milliseconds for each program. So the inputs have little more than one
# block of 1024 elements, and one input has 20 blocks. On a GPU the inputs are larger than its caches, and multiples of
# 16 elements, on which the speed of memory depends. `spread` is a whole number of blocks of up to 8192, for which
# programs often have a branch; `many-blocks` is odd, so it is a multiple of no block.
SHAPES: dict[str, dict[str, Ranges]] = {
    "cpu": {
        "tiny": ((2, 31, 1),),
        "full": ((8, 12, 1), (131, 170, 1)),
        "spread": ((16, 32, 16), (512, 512, 1)),
        "second-shape": ((2, 3, 1), (2, 4, 1), (257, 330, 1)),
        "many-blocks": ((19_457, 20_479, 2),),
        "four": ((2, 3, 1), (2, 3, 1), (3, 5, 1), (7, 13, 1)),
        "one": ((1, 1, 1),),
    },
    "cuda": {
        "tiny": ((2, 31, 1),),
        "full": ((3840, 4352, 16), (3841, 4351, 1)),
        "spread": ((3072, 5120, 1024), (4096, 4096, 1)),
        "second-shape": ((2, 4, 1), (900, 1100, 1), (1900, 2200, 1)),
        "many-blocks": ((20_000_001, 32_000_001, 2),),
        "four": ((2, 3, 1), (2, 3, 1), (30, 60, 1), (900, 1100, 1)),
        "one": ((1, 1, 1),),
    },
}
LARGE = 1e4
# The ranges of magnitudes. Each range has a third of the numbers, whose logarithms are uniform; the square of 1e18 is
# finite.
SPREADS = ((1e-6, 0.1), (0.1, 1e3), (1e3, 1e18))
HUGE = 1e18, 1e37  # magnitudes in float32 at which neither the result nor a term of the result is infinite
SPECIAL = (float("inf"), float("-inf"), float("nan"), 0.0, -0.0)
ADVERSARIAL = ("zeros", "large", "spread", "special", "non-contiguous", "second-shape", "many-blocks", "four", "one")
# All different layouts except "one": Triton treats a size of 1 as a constant, and this layout would need a third of all
# compilations.
LAYOUTS = ("tiny", "random-0", "spread", "non-contiguous", "second-shape", "many-blocks", "four")
# The error allowed per element of the reference's result. The absolute error: ten units in the last place of 1, which
# exp often returns. The relative error: for float32, ten times the error of a fast exp at -80, which is one ulp
# (1.2e-7) per unit of the exponent; for half precision, two units in the last place (2^-10 in float16, 2^-7 in
# bfloat16), because values that are computed in float32 are rounded once.
ABSOLUTE = 1e-6
RELATIVE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# If terms cancel, as in x + 0.3 (y - x), rounding is in proportion to the terms, not to the result. So a result may
# also change as much as when each input moves by this many units in its last place, as a float32.
ROUNDINGS = 4
# Memory for inputs that are kept between candidates. The inputs of a task take 0.4 (float16) to 2.5 GB on a GPU.
CASES_BYTES = 8 << 30


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One input of a task. `tensors`: the arguments in order."""

    name: str
    tensors: tuple[Tensor, ...]


def case(task: KernelTask, seed: int, name: str, device: str = "cpu") -> Case:
    """The inputs of case `name`: `tiny`, one of ADVERSARIAL, or any other name, which means a full shape with normally
    distributed values that depend on the name. The values of `random-1` and so on are scaled by 0.5 to 50.

    The tensors are on the CPU, with the sizes for `device`.
    """
    draw = _draw(seed, task, name)
    generator = torch.Generator().manual_seed(draw.getrandbits(56))
    shape = _shape(task, seed, name, device)
    scale = {"zeros": 0.0, "large": LARGE}.get(name, 1.0)
    if name.startswith("random-") and name != "random-0":
        scale = 0.5 * 100 ** draw.random()
    dtype = getattr(torch, task.dtype)
    tensors = []
    for _ in range(task.arity):
        tensor = torch.randn(shape, generator=generator) * scale
        if name in ("spread", "many-blocks"):
            spread = _spread(tensor.sign(), torch.finfo(dtype).max, generator)
            tensor = spread if name == "spread" else _mixed(tensor, spread, 0.5, generator)
        if name in ("special", "many-blocks"):
            chosen = torch.randint((4 if name == "special" else 40) * len(SPECIAL), shape, generator=generator)
            for which, value in enumerate(SPECIAL):
                tensor[chosen == which] = value
        if name == "large" and torch.finfo(dtype).max > HUGE[1]:
            tensor = _mixed(
                tensor, tensor.sign() * _log_uniform(*HUGE, torch.rand(shape, generator=generator)), 0.25, generator
            )
        tensors.append(tensor.to(dtype))
    if name == "large":
        finite = expected(task, tuple(tensor.double() for tensor in tensors)).abs() < HUGE[1]
        tensors = [tensor.where(finite, tensor.sign()) for tensor in tensors]
    return Case(name=name, tensors=tuple(_laid_out(tensor, number, name) for number, tensor in enumerate(tensors)))


class Cases:
    """The inputs of a task. Candidates do not change them. Each case is made once; the newest cases are kept, up to
    CASES_BYTES.
    """

    def __init__(self, seed: int, device: str) -> None:
        self._seed, self._device = seed, device
        self._kept: dict[tuple[str, str], Case] = {}
        self._lock = threading.Lock()

    def case(self, task: KernelTask, name: str) -> Case:
        """The task's case with this name. The case is made once and kept. Two threads may make the same case at the
        same time.
        """
        key = task.name, name
        drawn = self._kept.get(key) or case(task, self._seed, name, self._device)
        with self._lock:
            self._kept.pop(key, None)
            self._kept[key] = drawn
            while len(self._kept) > 1 and sum(map(_bytes, self._kept.values())) > CASES_BYTES:
                del self._kept[next(iter(self._kept))]
        return drawn


def layouts(task: KernelTask, seed: int) -> list[list[dict[str, Any]]]:
    """The form of a GPU's inputs without their numbers, a list of {dtype, shape, stride} for each of LAYOUTS."""
    forms = []
    for name in LAYOUTS:
        tensor = torch.empty(_shape(task, seed, name, "cuda"), device="meta")
        tensors = [_laid_out(tensor, number, name) for number in range(task.arity)]
        forms.append([{"dtype": task.dtype, "shape": list(one.shape), "stride": list(one.stride())} for one in tensors])
    return forms


def _laid_out(tensor: Tensor, number: int, name: str) -> Tensor:
    """The tensor's elements, with different strides for each argument, so that code gives a wrong result if it confuses
    the strides of two arguments, or of an argument and an output. `non-contiguous`: the first is transposed with a gap
    after each element, so that a tensor made like it has other strides; the second is transposed; the third has a gap
    after each row. `second-shape`: three dimensions in another order, the first with gaps, and the second expanded.
    `four`: four dimensions, of which the first's last two are in another order. `many-blocks`: the first has gaps.
    Other names have none.
    """
    if name == "second-shape" and number == 1:
        return tensor[:1, :, :1].clone().expand(tensor.shape)
    if name == "second-shape":
        one, two, three = tensor.shape
        place = tensor.new_zeros(three, one, 2 * two)[:, :, ::2].permute(1, 2, 0)
        if number == 2:
            place = tensor.new_zeros(two, three, one).permute(2, 0, 1)
    elif name == "four" and number == 0:
        place = tensor.new_zeros(*tensor.shape[:2], tensor.shape[3], tensor.shape[2]).transpose(2, 3)
    elif name == "many-blocks" and number == 0:
        place = tensor.new_zeros(2 * len(tensor))[::2]
    elif name != "non-contiguous":
        return tensor
    elif number == 0:
        place = tensor.new_zeros(tensor.shape[1], 2 * tensor.shape[0])[:, ::2].t()
    elif number == 1:
        place = tensor.new_zeros(tensor.shape[1], tensor.shape[0]).t()
    else:
        place = tensor.new_zeros(tensor.shape[0], tensor.shape[1] + 1)[:, :-1]
    return place.copy_(tensor)


def _bytes(case: Case) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in case.tensors)


def _mixed(ordinary: Tensor, other: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Elements of `ordinary`, of which a share is replaced by elements of `other`."""
    return torch.where(torch.rand(ordinary.shape, generator=generator) < share, other, ordinary)


def _spread(signs: Tensor, most: float, generator: torch.Generator) -> Tensor:
    """Magnitudes as in SPREADS, but none above `most`."""
    chosen, place = (torch.rand(signs.shape, generator=generator) for _ in range(2))
    magnitudes = torch.empty_like(signs)
    for number, (low, high) in enumerate(SPREADS):
        here = (3 * chosen).long() == number
        magnitudes = torch.where(here, _log_uniform(low, min(high, most), place), magnitudes)
    return signs * magnitudes


def _log_uniform(low: float, high: float, place: Tensor) -> Tensor:
    """Random values whose logarithms are uniformly distributed."""
    return low * (high / low) ** place


def _draw(seed: int, task: KernelTask, name: str) -> random.Random:
    return random.Random(hashlib.sha256(f"{seed} {task.name} {name}".encode()).digest())


def _shape(task: KernelTask, seed: int, name: str, device: str) -> tuple[int, ...]:
    kind = name if name in SHAPES[device] else "full"
    draw = _draw(seed, task, f"shape of {kind}")
    return tuple(draw.randrange(low, high + 1, step) for low, high, step in SHAPES[device][kind])


def expected(task: KernelTask, tensors: tuple[Tensor, ...]) -> Tensor:
    """The reference's result, which the judge computes from its own copy, after the candidate has answered."""
    result = eval(task.reference, {"torch": torch, **dict(zip(task.arguments, tensors, strict=True))})
    assert isinstance(result, Tensor)
    return result


def difference(task: KernelTask, drawn: Case, shape: tuple[int, ...], dtype: str, content: wire.Blob) -> str | None:
    """Why an output differs from the expected output beyond the tolerance; None if it is within. Elements that are NaN
    in the reference may have any value: the maximum is not defined for NaN, and inf - inf is no useful comparison.
    """
    wanted = expected(task, drawn.tensors)
    if tuple(shape) != tuple(wanted.shape) or dtype != str(wanted.dtype).removeprefix("torch."):
        return f"{drawn.name}: {dtype} {list(shape)} instead of {wanted.dtype} {list(wanted.shape)}"
    if len(content) != wanted.numel() * wanted.element_size():
        return f"{drawn.name}: {len(content)} bytes for {wanted.numel()} elements"
    output = torch.frombuffer(wire.writable(content), dtype=wanted.dtype).reshape(wanted.shape)
    relative = RELATIVE[wanted.dtype]
    off = ~(torch.isclose(output.float(), wanted.float(), atol=ABSOLUTE, rtol=relative) | wanted.isnan())
    wrong = int(off.sum())
    if wrong:
        error = (output[off].double() - wanted[off].double()).abs()
        allowed = ABSOLUTE + relative * wanted[off].double().abs() + _sway(task, drawn, off)
        wrong -= int(((error <= allowed) & wanted[off].isfinite()).sum())
    return f"{drawn.name}: {wrong} of {off.numel()} elements differ from the reference" if wrong else None


def _sway(task: KernelTask, drawn: Case, at: Tensor) -> Tensor:
    """How much the result changes at these elements if each input changes by ROUNDINGS units in its last place."""
    unit = ROUNDINGS * torch.finfo(torch.float32).eps
    inputs = tuple(tensor[at].double() for tensor in drawn.tensors)
    still, moved = expected(task, inputs), torch.zeros(inputs[0].shape, dtype=torch.float64)
    for number, tensor in enumerate(inputs):
        swayed = (*inputs[:number], tensor * (1 + unit), *inputs[number + 1 :])
        moved += (expected(task, swayed) - still).abs().nan_to_num(nan=0.0, posinf=0.0)
    return moved
