"""Triton without a GPU, in a process of its own: a launch is compiled for a named target, and not made.

A candidate's entry is called on tensors that have a shape, strides and a CUDA device but no memory (torch's fake ones),
so that its own code decides, as in a real run, which kernels are launched with which types and constants. Triton keeps
what it builds in CACHE, by a hash of all that went into it; a process that later finds the same files there compiles
nothing at its first launch.

An autotuned kernel is compiled in all its configurations and timed in none. Those that a tuner drops because they need
too much (of memory, of what ptxas gives) may fail while another one compiles.
"""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

CACHE = "cache"  # in the scratch folder, and relative to it: Triton notes paths, and they must hold in the next one
CAPABILITY = (9, 0)  # where there is no GPU to ask: an H100's, which the stack rents
PROCESSORS = 132  # an H100's; programs make grids of it, seldom constants
PRINTED = "output.txt"  # in the scratch folder: what a candidate's process prints; LLVM says there what is wrong
FOREIGN = {"ptx_options", "ir_override", "extern_libs"}
ADDRESS = 0x7F00_0000_0000  # where a GPU's memory is seen, roughly
Layout = dict[str, Any]  # {dtype, shape, stride} of one argument
_TRIAL = """
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, tl.sigmoid(tl.load(x_ptr + at, mask=at < n)), mask=at < n)

def kernel_function(x):
    kernel[(1,)](x.contiguous(), x.numel(), BLOCK=128)
"""
# Launches in one call: a candidate with a launch for each row of a matrix would run out of time.
MOST_LAUNCHES = 100
_failed: BaseException | None = None  # what the last launch that did not compile has raised
_launched = 0  # by this call


class _Enough(BaseException):
    """MOST_LAUNCHES are compiled. Nothing on the way catches it."""


class _Target:
    """In the place of a GPU's driver: says what to compile for, and can do nothing else."""

    def __init__(self, capability: int) -> None:
        self._target = _triton("backends.compiler").GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cuda", 0)

    def get_current_stream(self, device: int) -> int:
        return 0


def install(capability: int) -> str | None:
    """From now on launches in this process and in those forked from it are compiled for sm_`capability`. What this
    machine lacks for that, after a trial that has also imported all that a compilation needs; None: nothing.
    """
    try:
        refuse_foreign_code()
        _triton("runtime").driver.set_active(_Target(capability))
        cuda: Any = torch.cuda  # who asks which GPU is meant, and how large it is, is to come to its launches
        cuda.device, cuda.current_device = nullcontext, lambda: 0
        cuda.get_device_properties = lambda device=None: SimpleNamespace(multi_processor_count=PROCESSORS)
        _triton("runtime.jit").KernelInterface.__getitem__ = _compiling
        _triton("runtime.autotuner").Autotuner.run = _all_configurations
        fake = importlib.import_module("torch._subclasses").FakeTensor
        fake.tolist, fake.data_ptr = _numberless, _address
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            path, scope = Path(folder, "trial.py"), {"__name__": "trial"}
            path.write_text(_TRIAL)  # triton reads a kernel's source from its file
            exec(compile(_TRIAL, str(path), "exec"), scope)
            entry: Any = scope["kernel_function"]
            problem = compile_launches(entry, [[{"dtype": "float32", "shape": [2], "stride": [1]}]])
            built = any(Path(folder).glob("*/*.cubin"))
            return problem or (None if built else "a trial launch came to nothing")
    except Exception as error:  # noqa: BLE001 - a compiler of another version or machine may lack anything
        return f"{type(error).__name__}: {str(error)[:200]}"


def refuse_foreign_code() -> None:
    """From now on, in this process, a launch with an option that brings code from elsewhere does not compile: what it
    runs is what its kernel says, and nobody has read a file of PTX, or what ptxas is told.
    """
    jitted = _triton("runtime.jit").JITFunction
    own = jitted._pack_args  # comes once for each kernel that is built, with all that its launch was given by name

    def _pack_args(kernel: Any, backend: Any, given: dict[str, Any], *rest: Any) -> Any:
        if found := sorted(FOREIGN & given.keys()):
            raise ValueError(f"a launch with {', '.join(found)}")
        return own(kernel, backend, given, *rest)

    jitted._pack_args = _pack_args


def compile_launches(entry: Callable[..., Any], calls: Sequence[Sequence[Layout]], device: str = "cuda") -> str | None:
    """Calls `entry` once for each of `calls`; why a launch does not compile, or None. Whatever else it raises says
    nothing here: its inputs hold no numbers, and a run on real ones will tell. `device`: where that will be, since a
    program may ask and be another one there.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    global _failed, _launched
    for layouts in calls:
        _failed, _launched = None, 0
        with FakeTensorMode(allow_non_fake_inputs=True):
            inputs = [_placeless(layout, device) for layout in layouts]
            try:
                entry(*inputs)
            except _Enough:
                pass
            except Exception as error:  # noqa: BLE001 - see above
                if error is _failed:
                    return _error_text(error)
    return None


def _triton(name: str) -> Any:
    """One of its modules. It has no types, and is imported by processes for candidates only."""
    return importlib.import_module(f"triton.{name}")


def _placeless(layout: Layout, device: str) -> Tensor:
    dtype = getattr(torch, layout["dtype"])
    return torch.empty_strided(layout["shape"], layout["stride"], dtype=dtype, device=device)


def _numberless(tensor: Tensor) -> list[Any]:
    """For FakeTensor.tolist, which makes a tensor of each element first: minutes, for millions."""
    raise TypeError("these inputs hold no numbers")


def _address(tensor: Tensor) -> int:
    """For FakeTensor.data_ptr: as wide and aligned as addresses on a GPU are, since both decide what is built."""
    return ADDRESS + int(tensor.storage_offset()) * tensor.element_size()


def _compiling(kernel: Any, grid: Any) -> Callable[..., Any]:
    """For KernelInterface.__getitem__, the `kernel[grid]` of a launch."""

    def launch(*args: Any, **kwargs: Any) -> Any:
        global _failed, _launched
        _launched += 1
        if _launched > MOST_LAUNCHES:
            raise _Enough
        try:
            return kernel.run(*args, grid=grid, warmup=True, **kwargs)
        except Exception as error:
            _failed = error
            raise

    return launch


def _all_configurations(tuner: Any, *args: Any, **kwargs: Any) -> Any:
    """For Autotuner.run."""
    errors = _triton("runtime.errors")
    too_much = (errors.OutOfResources, errors.PTXASError, _triton("compiler.errors").CompileTimeAssertionFailure)
    tuner.nargs = dict(zip(tuner.arg_names, args, strict=False))
    compiled, dropped = None, None
    for configuration in tuner.prune_configs(kwargs):
        try:
            compiled = tuner.fn.run(*args, **kwargs, **configuration.all_kwargs())
        except too_much as error:
            dropped = error
    if compiled is None and dropped is not None:
        raise dropped
    return compiled


def _error_text(error: BaseException) -> str:
    """The compiler's words, without the lines of source that it repeats."""
    found: BaseException | None = error
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and Path(PRINTED).exists():
        _, _, printed = Path(PRINTED).read_text(errors="replace").partition(": error: ")
        said += f": {printed.partition(chr(10))[0]}"
    while found is not None:
        if isinstance(found, _triton("compiler.errors").CompilationError) and found.error_message:
            said = f"line {getattr(found.node, 'lineno', '?')} of a kernel: {found.error_message}"
        found = found.__cause__
    return " ".join(said.split())[:400]
