"""Triton without a GPU, in its own process: it compiles a launch for a named target, and does not run the launch.

A candidate's entry is called on tensors that have a shape, strides and a CUDA device but no memory (torch's fake ones).
So the candidate's own code decides, as in a real run, which kernels are launched with which types and constants. Triton
keeps its results in CACHE, under a hash of everything that determines a result. A process that later finds the same
files there compiles nothing at its first launch. An autotuned kernel is compiled in all its configurations, but no
configuration is timed. A configuration that a tuner drops because it needs too much memory, or too much for ptxas, may
fail if another configuration compiles.
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

# a folder in the scratch folder, as a relative path, because Triton stores paths, which must be valid in the next
# folder too
CACHE = "cache"
CAPABILITY = (9, 0)  # the compute capability if there is no GPU: that of an H100, which the stack rents
PROCESSORS = 132  # the number of multiprocessors of an H100; programs use it for grids, and rarely for constants
PRINTED = "output.txt"  # in the scratch folder: the candidate's output, and errors that LLVM prints
FOREIGN = {"ptx_options", "ir_override", "extern_libs"}
ADDRESS = 0x7F00_0000_0000  # roughly the range of a GPU's addresses
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
# The most launches of a call that are compiled, because a candidate with one launch per row of a matrix would run out
# of time.
MOST_LAUNCHES = 100
_failed: BaseException | None = None  # the error of the last launch that did not compile
_launched = 0  # launches of this call


class _Enough(BaseException):
    """MOST_LAUNCHES launches were compiled. A candidate's code cannot catch this error."""


class _Target:
    """Replaces a GPU's driver: it only names the target for which Triton compiles."""

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
    """Makes launches in this process, and in processes forked from it, compile for sm_`capability`. Returns what this
    machine lacks for that, after a trial that imports everything that a compilation needs; None if nothing is missing.
    """
    try:
        refuse_foreign_code()
        _triton("runtime").driver.set_active(_Target(capability))
        cuda: Any = torch.cuda  # a program that asks for the GPU's name or size must not fail before its launches
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
            return problem or (None if built else "a trial launch compiled nothing")
    except Exception as error:  # noqa: BLE001 - a compiler of another version or machine may lack anything
        return f"{type(error).__name__}: {str(error)[:200]}"


def refuse_foreign_code() -> None:
    """Makes a launch fail if its options name foreign code, because PTX files and options of ptxas were not checked."""
    jitted = _triton("runtime.jit").JITFunction
    own = jitted._pack_args  # called once for each kernel that is built, with all named arguments of its launch

    def _pack_args(kernel: Any, backend: Any, arguments: dict[str, Any], *rest: Any) -> Any:
        if foreign := sorted(FOREIGN & arguments.keys()):
            raise ValueError(f"a launch with {', '.join(foreign)}")
        return own(kernel, backend, arguments, *rest)

    jitted._pack_args = _pack_args


def compile_launches(entry: Callable[..., Any], calls: Sequence[Sequence[Layout]], device: str = "cuda") -> str | None:
    """Calls `entry` once for each of `calls`. Returns why a launch does not compile, or None. Other errors are ignored
    here, because the inputs have no numbers; a run on real inputs will show them. `device`: the device of the real run,
    because a program may depend on it.
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
    """One of Triton's modules. These have no type hints, and only candidates' processes import them."""
    return importlib.import_module(f"triton.{name}")


def _placeless(layout: Layout, device: str) -> Tensor:
    dtype = getattr(torch, layout["dtype"])
    return torch.empty_strided(layout["shape"], layout["stride"], dtype=dtype, device=device)


def _numberless(tensor: Tensor) -> list[Any]:
    """Replaces FakeTensor.tolist, which first makes a tensor of each element, and takes minutes for millions of
    them.
    """
    raise TypeError("these inputs hold no numbers")


def _address(tensor: Tensor) -> int:
    """Replaces FakeTensor.data_ptr: the result has the width and the alignment of a GPU's addresses, because the
    compiled code depends on them.
    """
    return ADDRESS + int(tensor.storage_offset()) * tensor.element_size()


def _compiling(kernel: Any, grid: Any) -> Callable[..., Any]:
    """Replaces KernelInterface.__getitem__, which is the `kernel[grid]` of a launch."""

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
    """Replaces Autotuner.run."""
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
    """The compiler's message, without the source lines that it repeats."""
    cause: BaseException | None = error
    message = f"{type(error).__name__}: {error}"
    if isinstance(error, RuntimeError) and Path(PRINTED).exists():
        _, _, printed = Path(PRINTED).read_text(errors="replace").partition(": error: ")
        message += f": {printed.partition(chr(10))[0]}"
    while cause is not None:
        if isinstance(cause, _triton("compiler.errors").CompilationError) and cause.error_message:
            message = f"line {getattr(cause.node, 'lineno', '?')} of a kernel: {cause.error_message}"
        cause = cause.__cause__
    return " ".join(message.split())[:400]
