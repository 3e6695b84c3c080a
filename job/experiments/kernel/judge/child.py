"""A candidate's process, and the server that forks such a process for each candidate.

After `python -m gpufleet.job.experiments.kernel.judge.child FD`:
    serve        imports torch and triton once, computes nothing, forks on request
    compile 90   does the same for processes that compile for sm_90 (compiler.py)
    one JSON     runs one candidate in a fresh process, for GPUs, because CUDA does not survive a fork

The process knows neither the reference nor the expected output nor the task. The process gets a source and tensors, and
answers with tensors; the judge decides whether these are right. The process's reports about itself (`ops`, `alias`) can
only harm the candidate.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import resource
import signal
import socket
import sys
import tempfile
import time
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gpufleet.job.experiments.kernel.judge import compiler, interpreter, sandbox, wire
from gpufleet.job.experiments.kernel.judge.watched import GIVEN, Computes, Fences, Ops, filled, refuse_operators

ENTRY = "kernel_function"
# These modules are imported before the first fork, because otherwise the interpreter would import them in each child.
PRELOADED = ("triton", "triton.compiler.code_generator", "triton.experimental.gluon", "triton.language.extra.libdevice")
BROADCASTS = "torch.fx.experimental.symbolic_shapes"  # for torch.broadcast_shapes; its import inspects frames
# bytes that are read to empty the caches; larger than a core's own caches, and 5 times the 50 MB of an H100's L2
FLUSH_BYTES = {"cpu": 1 << 25, "cuda": 1 << 28}
# Functions that are kept here before a candidate could replace them.
_clock, _cpu, _usage = time.perf_counter, time.process_time, resource.getrusage
_Event: Any = torch.cuda.Event
_hold: Any = torch.cuda._sleep
# about a millisecond, which is many times longer than Python needs to launch the kernels of a call
HOLD_CYCLES = 2_000_000
# A kernel that does nothing; its launch costs Python as much as that of a candidate.
NOTHING = f"""
import triton
import triton.language as tl

@triton.jit
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    pass

def {ENTRY}(x):
    kernel[(1,)](x, x, 1, BLOCK=1024)
"""


class Harness:
    """Loads one candidate, calls it and times it."""

    # the number of the call; the judge chooses the first one, so that the number of a configuration reveals nothing
    turn = 0
    names: Mapping[str, Any] = {}  # names that have a different meaning in an interpreted module than in Python

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.entry: Callable[..., Any] | None = None
        self.given: list[Tensor] = []
        self.inputs: list[Tensor] = []  # the given inputs, with the shifts applied
        self.fences = Fences(GIVEN)  # guard bytes around the inputs
        self.shifts: list[int] = []
        self.ops: Ops | None = None  # the torch functions of the last call, if the judge asked for them
        self.output: Any = None
        self._flush: Tensor | None = None
        self._empty: dict[str, Callable[..., Any]] = {}

    def answer(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """The reply to one message of the judge."""
        act: Callable[..., wire.Message] = getattr(self, f"_{head['do']}")
        return act(head, blobs)

    def _load(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """Loads the text that was judged, not bytes, which could be decoded differently. If `refuses`, no call may
        compute with torch. For listed calls, `ops` is a stricter check.
        """
        Harness.turn = head.get("turn", 0)
        if head.get("refuses"):
            refuse_operators()
        self.entry = _entry("candidate", blobs[0].decode(), Harness.names)
        return {}, []

    def _compile(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """Compiles the launches for the inputs of `calls`."""
        assert self.entry is not None
        problem = compiler.compile_launches(self.entry, head["calls"], head["device"])
        return {"problem": problem}, []

    def _give(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """Reads new inputs. If `as_timed`, they are placed at the addresses of the trials if possible, because other
        addresses would reveal that this is a check.
        """
        tensors = [wire.unpack(spec, blob) for spec, blob in zip(head["inputs"], blobs, strict=True)]
        self.given, self.shifts = (
            [_placed(tensor, self.device, Fences(GIVEN)) for tensor in tensors],
            [0] * len(tensors),
        )
        if head.get("as_timed") and list(map(_layout, tensors)) == list(map(_layout, self.inputs)):
            for tensor, content in zip(self.inputs, self.given, strict=True):
                tensor.copy_(content)
        else:
            self.fences = Fences(GIVEN)
            self.inputs = [_placed(tensor, self.device, self.fences) for tensor in tensors]
        self._sync()
        return {}, []

    def _run(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """Makes new inputs, calls the candidate once with them, and returns the candidate's output. If `as_timed`, the
        candidate cannot see that the call is not timed. The inputs of the timing trials are kept, and used again for
        the next trial.
        """
        before = self.given, self.inputs, self.fences, self.shifts
        self._give(head, blobs)
        with nullcontext() if head.get("as_timed") else filled():
            self._trial(head, [])
        message = self._collect(head, [])
        self.given, self.inputs, self.fences, self.shifts = before
        return message

    def _ready(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """Moves each input in its memory by one of `shifts`, so that a result that was remembered by its address, or by
        what a kernel has read, is wrong. Empties caches on request, and waits for the device. After this, a trial can
        begin.
        """
        self.shifts = head.get("shifts", self.shifts)
        for tensor, content in zip(self.inputs, self._contents(), strict=True):
            tensor.copy_(content)
        if head["flush"]:
            if self._flush is None:
                size = FLUSH_BYTES[self.device.type] // 4
                self._flush = torch.zeros(size, dtype=torch.int32, device=self.device)
            self._flush.add_(1)
        self._sync()
        return {}, []

    def _contents(self) -> list[Tensor]:
        """The contents that the inputs must have."""
        return [tensor.roll(shift) if shift else tensor for tensor, shift in zip(self.given, self.shifts, strict=True)]

    def _trial(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """One timed call, or an `empty` launch. Returns its seconds. On a CPU they are measured by the clock. On a GPU
        they are measured by events on a stream that is held until the call has launched its kernels; otherwise Python's
        time between launches would be included. If `ops`, the answer lists the torch functions that the call uses,
        which takes time.
        """
        call = self._nothing(head["empty"]) if head.get("empty") else self.entry
        Harness.turn += not head.get("empty")
        assert call is not None
        _forget_allocator()
        self.ops = Ops(fenced=head["do"] == "run") if head.get("ops") else None  # all trials use the same addresses
        with self.ops or nullcontext():
            if self.device.type == "cuda":
                start, end = (_Event(enable_timing=True) for _ in range(2))
                _hold(HOLD_CYCLES)
                start.record()
                self.output = call(*self.inputs)
                end.record()
                self._sync()
                return {"seconds": start.elapsed_time(end) / 1000}, []
            started = _clock()
            self.output = call(*self.inputs)
            return {"seconds": _clock() - started}, []

    def _nothing(self, kind: str) -> Callable[..., Any]:
        """Times an empty launch: of a Triton `kernel`, or of an eager `operation` on one element."""
        if not self._empty:
            one = torch.zeros(1, device=self.device)
            launch = _entry("nothing", NOTHING, {})
            self._empty = {"kernel": lambda *_: launch(one), "operation": lambda *_: one.add_(1)}
        return self._empty[kind]

    def _collect(self, head: dict[str, Any], blobs: list[wire.Blob]) -> wire.Message:
        """The output of the last call, and the call's other effects."""
        output = self.output
        reply: dict[str, Any] = {"ops": sorted(self.ops.names)} if self.ops is not None else {}
        if not isinstance(output, Tensor):
            return {**reply, "type": type(output).__name__}, []
        place = output.untyped_storage().data_ptr()
        reply["alias"] = any(place == tensor.untyped_storage().data_ptr() for tensor in self.inputs)
        same = (torch.equal(_bits(a), _bits(b)) for a, b in zip(self._contents(), self.inputs, strict=True))
        reply["changed"] = not all(same)
        if self.fences.broken or (self.ops is not None and self.ops.fences.broken):
            return {"error": "it writes beyond its inputs and its own memory"}, []
        shape, dtype = list(output.shape), str(output.dtype).removeprefix("torch.")
        return {**reply, "shape": shape, "dtype": dtype}, [wire.raw(output)]

    def _sync(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _entry(name: str, text: str, names: Mapping[str, Any]) -> Any:
    """The object that a module defines as ENTRY; `names` replace names of Python in the module."""
    path = Path(f"{name}.py").resolve()
    path.write_text(text, encoding="utf-8", newline="")  # triton reads a kernel's source from its file
    module = types.ModuleType(name)
    module.__file__ = str(path)
    module.__dict__.update(names)
    exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    return module.__dict__[ENTRY]


def _forget_allocator() -> None:
    """Removes an allocator that a call gave Triton: the next call's kernels must not use it."""
    allocation = importlib.import_module("triton.runtime._allocation")
    allocation.set_allocator(allocation.NullAllocator())


def _layout(tensor: Tensor) -> tuple[object, ...]:
    return tensor.dtype, tensor.shape, tensor.stride()


def _bits(tensor: Tensor) -> Tensor:
    """The bits of the tensor. Compared by bits, NaN equals NaN, and 0 differs from -0."""
    return tensor.view(torch.int16 if tensor.element_size() == 2 else torch.int32)


def _placed(tensor: Tensor, device: torch.device, fences: Fences) -> Tensor:
    """A copy on the device with the same strides and gaps. (`clone` would remove the gaps.)"""
    whole = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage()).to(device)
    return fences.fenced_copy(whole, tensor.shape, tensor.stride(), int(tensor.storage_offset()))


def candidate(dialogue: socket.socket, asked: dict[str, Any], *, namespaces: bool) -> None:
    """Answers messages until the judge closes the connection. Never returns."""
    scratch, device = Path(asked["scratch"]), asked["device"]
    os.closerange(3, dialogue.fileno())  # the candidate needs none of this process's open files
    os.closerange(dialogue.fileno() + 1, 1 << 16)
    isolated = asked["confined"] and sandbox.confine(
        scratch,
        namespaces=namespaces,
        programs=asked["compiles"] or device == "cuda",
        cuda=device == "cuda",
        memory_bytes=asked["memory_bytes"],
    )
    if device == "cuda":
        sandbox.die_with_parent()  # asked again, because the change of user has cancelled the earlier request
    os.chdir(scratch)
    os.environ.update(dict.fromkeys(("TMPDIR", "HOME", "TRITON_HOME", "CUDA_CACHE_PATH"), str(scratch)))
    os.environ["TRITON_CACHE_DIR"] = compiler.CACHE
    tempfile.tempdir = str(scratch)  # imported modules have already read TMPDIR and HOME
    output = os.open(compiler.PRINTED, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(nothing)
    os.close(output)
    torch.set_num_threads(1)  # set before any operation, because the server's thread pool does not exist in a child
    warnings.simplefilter("ignore")
    harness = Harness(torch.device(device))
    wire.send(dialogue, {"isolated": isolated, **_unreachable(harness.device)})
    try:
        while True:
            head, blobs = wire.receive(dialogue)
            try:
                reply, content = harness.answer(head, blobs)
            except Exception as error:  # noqa: BLE001 - whatever a candidate raises is its result
                reply, content = {"error": f"{type(error).__name__}: {str(error)[:300]}"}, []
            except Computes as error:
                reply, content = {"error": f"computes with torch: {error}"}, []
            except BaseException as error:  # noqa: BLE001 - it may not leave, either
                reply, content = {"error": type(error).__name__}, []
            programs_s = sum(_usage(resource.RUSAGE_CHILDREN)[:2])
            wire.send(dialogue, {**reply, "cpu_s": _cpu() + programs_s}, content)
    except wire.Closed:
        pass
    finally:
        os._exit(0)


def _unreachable(device: torch.device) -> dict[str, Any]:
    """An error if nothing can be computed on the device. The device is checked before the first candidate, so that no
    candidate is blamed.
    """
    try:
        for tries_left in (3, 2, 1, 0) if device.type == "cuda" else ():
            try:
                torch.zeros(1, device=device).add_(1).cpu()
                break
            except torch.OutOfMemoryError:  # an earlier process may not have freed all memory yet
                if not tries_left:
                    raise
                time.sleep(5)
    except Exception as error:  # noqa: BLE001 - whatever CUDA says
        return {"error": f"{type(error).__name__}: {str(error)[:300]}"}
    return {}


def _reap(*_: object) -> None:
    """Reaps ended children, so that no zombies stay and the children's CPU time is added to that of this process."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def serve(control: socket.socket, lacks: str | None) -> None:
    """Reports what the machine lacks. Then, for each message {scratch, device, compiles, confined, memory_bytes} with
    one socket, forks a candidate's process and answers with the process's id. The server ends with the judge, and ends
    its children.
    """
    sandbox.adopt_orphans()
    signal.signal(signal.SIGCHLD, _reap)
    gc.collect()
    gc.freeze()
    wire.send(control, {"lacks": lacks, "triton": importlib.import_module("triton").__version__})
    while True:
        content, descriptors = b"", list[int]()
        with suppress(ConnectionResetError):
            content, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not content:  # the judge has ended or was killed; a child that goes on would use a core for ever
            sandbox.end_children()
            return
        asked = json.loads(content)
        pid, namespaces = sandbox.fork() if asked["confined"] else (os.fork(), False)
        if pid == 0:
            # so that one signal reaches the child's whole group; a spawned process has its own group from its start
            os.setsid()
            control.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            candidate(socket.socket(fileno=descriptors[0]), asked, namespaces=namespaces)
        for descriptor in descriptors:
            os.close(descriptor)
        control.sendall(f"{pid}\n".encode())


def main(argv: list[str]) -> None:
    """Runs the command line above."""
    end = socket.socket(fileno=int(argv[0]))
    end.set_inheritable(False)
    for name in PRELOADED:
        importlib.import_module(name)
    if argv[1] != "one":  # only then is there no GPU to wait for; errors of a GPU are reported later
        torch.cuda.synchronize = lambda device=None: None
    if os.environ.get("TRITON_INTERPRET") == "1":
        Harness.names = interpreter.install(lambda: Harness.turn)
    if argv[1] == "serve":
        importlib.import_module(BROADCASTS)
        serve(end, None)
    elif argv[1] == "compile":
        serve(end, compiler.install(int(argv[2])))
    else:
        sandbox.die_with_parent()
        compiler.refuse_foreign_code()
        asked = json.loads(argv[2])
        candidate(end, asked, namespaces=asked["confined"] and sandbox.enter())


if __name__ == "__main__":
    main(sys.argv[1:])
