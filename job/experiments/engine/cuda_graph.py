"""The forward and backward passes of a step as one CUDA graph: the host launches the graph once, and not each of its
thousand kernels. This helps because in a small step the GPU waits for the host (bench/results/gpu.md). Only the two
passes are in the graph. Clipping, the optimizer, the learning rates and the log are outside of it, so that checkpoints,
exports and resumes do not depend on graphs. A graph has fixed addresses: the batch of each step is copied into the same
tensors, and the gradients are where the graph writes them.

A graph belongs to one phase's module and to the shapes of one batch. Before a graph is used, its loss and the norms of
its gradients are compared with those of the same batch launched kernel by kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from gpufleet.job.experiments.engine.experiment import Micro

# The number of first steps that are launched kernel by kernel. They compile, plan attention and allocate workspaces,
# which cannot be part of a graph.
LAUNCHED_FIRST = 2
# the largest allowed relative difference between the two results; they may differ because some sums have no fixed order
# on a GPU
SAME = 1e-3


class StepSums(NamedTuple):
    """The result of a step's passes, on the device. A graph overwrites it with the result of the next step."""

    loss: Tensor  # this rank's part of the mean over the global batch's tokens, nats, fp32
    aux: dict[str, Tensor]  # this rank's part of the metric values of `ForwardOutput.aux`


Passes = Callable[[Sequence[Micro]], StepSums]


class Recorder(Protocol):
    """Launches the kernels of a device, or records them."""

    def launch(self, run: Callable[[], StepSums]) -> StepSums:
        """Runs the function now."""

    def record(self, run: Callable[[], StepSums]) -> tuple[Callable[[], None], StepSums]:
        """Records the function's kernels without running them. Returns a function that runs them, and the result, which
        each run overwrites. Raises RuntimeError if a kernel cannot be recorded.
        """


class CudaRecorder:
    """Records CUDA graphs. All kernels run on a separate stream, because gradients are summed on the stream of the
    first backward pass, and the default stream, on which other work waits, cannot be recorded.
    """

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)

    def launch(self, run: Callable[[], StepSums]) -> StepSums:
        waiting = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(waiting)
        with torch.cuda.stream(self._stream):
            sums = run()
        waiting.wait_stream(self._stream)
        return sums

    def record(self, run: Callable[[], StepSums]) -> tuple[Callable[[], None], StepSums]:
        graph = torch.cuda.CUDAGraph()
        # thread_local: the thread that writes checkpoints may use CUDA meanwhile.
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            sums = run()
        return graph.replay, sums


class RecordedPasses:
    """Runs the passes of a phase's steps. From the third step on it uses a graph, and it begins again in the same way
    whenever the batch's shapes change. The passes must not use random numbers or communicate with other ranks.
    """

    def __init__(self, recorder: Recorder, parameters: Sequence[nn.Parameter], say: Callable[[str], None]) -> None:
        self._recorder, self._parameters, self._say = recorder, parameters, say
        self._shapes: Any = None  # shapes of the batch in the buffers
        self._micros: list[Micro] = []  # the buffers with the batch
        self._launched = 0  # number of steps with these shapes
        self._refused = False
        self._replay: Callable[[], None] | None = None
        self._sums: StepSums | None = None
        self._gradients: list[Tensor | None] = []

    @property
    def is_recorded(self) -> bool:
        """Whether the next step of these shapes runs as a graph."""
        return self._replay is not None

    def run(self, passes: Passes, micros: Sequence[Micro]) -> StepSums:
        """The sums of `passes` over `micros`. Before the call, the parameters must have no gradients; after it, they
        have the gradients of this step.
        """
        if (shapes := [_shape(micro) for micro in micros]) != self._shapes:
            self.drop()
            self._shapes, self._launched, self._refused = shapes, 0, False
            self._micros = [_buffer(micro) for micro in micros]
        for buffer, micro in zip(self._micros, micros, strict=True):
            for target, source in zip(buffer.inputs, micro.inputs, strict=True):
                if isinstance(source, Tensor):
                    target.copy_(source)
        if self._replay is not None:
            self._replay()
        else:
            sums = self._recorder.launch(lambda: passes(self._micros))
            self._launched += 1
            if self._launched <= LAUNCHED_FIRST or self._refused or not self._record(passes, sums):
                return sums
        assert self._sums is not None
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            parameter.grad = gradient
        return self._sums

    def drop(self) -> None:
        """Frees the graph with its memory."""
        self._replay = self._sums = None
        self._micros, self._gradients = [], []
        self._shapes = None

    def _record(self, passes: Passes, launched: StepSums) -> bool:
        """Records the passes over the buffers. `launched`: the result of the same batch when it was launched kernel by
        kernel. Returns False if the passes cannot be recorded or give a different result; the gradients are then those
        of the launched passes.
        """
        loss, norms = launched.loss.clone(), self._norms()
        self._take()
        try:
            self._replay, self._sums = self._recorder.record(lambda: passes(self._micros))
            self._gradients = [parameter.grad for parameter in self._parameters]
            self._replay()
            difference = max(_relative(self._sums.loss, loss), _relative(self._norms(), norms))
            problem = "" if difference <= SAME else f"its loss or gradients differ by {difference:.1%}"
        except RuntimeError as error:  # the cause is an operation that waits for the host, or too little memory
            problem = str(error).splitlines()[0]
        if not problem:
            return True
        self._say(f"no CUDA graph, kernels are launched one by one: {problem}")
        self._take()
        self._replay, self._sums, self._gradients, self._refused = None, None, [], True
        self._recorder.launch(lambda: passes(self._micros))
        return False

    def _norms(self) -> Tensor:
        """The norm of each gradient, fp32."""
        gradients = [parameter.grad for parameter in self._parameters if parameter.grad is not None]
        return torch.stack(list(torch._foreach_norm(gradients, 2, dtype=torch.float32)))

    def _take(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None


def _shape(micro: Micro) -> Any:
    """The properties on which a graph's buffers depend."""
    inputs = [
        (argument.shape, argument.stride(), argument.dtype) if isinstance(argument, Tensor) else argument
        for argument in micro.inputs
    ]
    return micro.tokens, inputs


def _buffer(micro: Micro) -> Micro:
    """A copy of the micro-batch with tensors of its own. The copies have the same strides, because compiled code
    depends on strides.
    """

    def own(argument: Any) -> Any:
        if not isinstance(argument, Tensor):
            return argument
        return torch.empty_strided(argument.shape, argument.stride(), dtype=argument.dtype, device=argument.device)

    return micro._replace(inputs=tuple(own(argument) for argument in micro.inputs))


def _relative(actual: Tensor, expected: Tensor) -> float:
    """The largest difference over the largest expected value; infinite if any value is not finite."""
    largest = ((actual.float() - expected.float()).abs().max() / expected.abs().max().clamp(min=1e-30)).item()
    return largest if math.isfinite(largest) else math.inf
