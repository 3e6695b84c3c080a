"""Twenty element-wise tasks, each with the text by which a model is asked for it. tasks.py has the inputs on which
candidates are tried. No torch. A candidate must define `kernel_function`, which takes the tensors in order and returns
a new tensor with the first tensor's shape and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

ENTRY = "kernel_function"


@dataclass(frozen=True, slots=True)
class KernelTask:
    """`reference` is an expression with torch and x, y, z; `triton` is one way to write this expression in a kernel."""

    name: str
    reference: str
    triton: str
    arity: int = 1
    dtype: str = "float32"

    @property
    def arguments(self) -> tuple[str, ...]:
        return ("x", "y", "z")[: self.arity]

    @property
    def reference_source(self) -> str:
        """The reference as a module with the same entry."""
        return f"import torch\n\n\ndef {ENTRY}({', '.join(self.arguments)}):\n    return {self.reference}\n"

    @property
    def prompt(self) -> str:
        return (
            f"Write a Triton kernel and `{ENTRY}` for {self.dtype} tensors that computes:\n{self.reference_source}"
            "Import torch, triton and math alone. Compute in @triton.jit kernels only. Inputs may have any strides.\n"
        )


TASKS: tuple[KernelTask, ...] = (
    KernelTask("relu", "torch.relu(x)", "tl.maximum(x, 0.0)"),
    KernelTask("leaky_relu", "torch.where(x > 0, x, 0.01 * x)", "tl.where(x > 0, x, 0.01 * x)"),
    KernelTask("sigmoid", "torch.sigmoid(x)", "tl.sigmoid(x)"),
    KernelTask("silu", "x * torch.sigmoid(x)", "x * tl.sigmoid(x)"),
    KernelTask("softplus", "torch.nn.functional.softplus(x)", "tl.maximum(x, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(x)))"),
    KernelTask("elu", "torch.nn.functional.elu(x)", "tl.where(x > 0, x, tl.exp(tl.minimum(x, 0.0)) - 1.0)"),
    KernelTask("square", "x * x", "x * x"),
    KernelTask("absolute", "torch.abs(x)", "tl.abs(x)"),
    KernelTask("tanh", "torch.tanh(x)", "2.0 * tl.sigmoid(2.0 * x) - 1.0"),
    KernelTask("hardtanh", "torch.clamp(x, -1, 1)", "tl.minimum(tl.maximum(x, -1.0), 1.0)", dtype="float16"),
    KernelTask("hardswish", "x * torch.clamp(x + 3, 0, 6) / 6", "x * tl.minimum(tl.maximum(x + 3.0, 0.0), 6.0) / 6.0"),
    KernelTask("relu_squared", "torch.relu(x) ** 2", "tl.maximum(x, 0.0) * tl.maximum(x, 0.0)"),
    KernelTask("gelu_sigmoid", "x * torch.sigmoid(1.702 * x)", "x * tl.sigmoid(1.702 * x)"),
    KernelTask("add", "x + y", "x + y", 2),
    KernelTask("multiply", "x * y", "x * y", 2),
    KernelTask("maximum", "torch.maximum(x, y)", "tl.maximum(x, y)", 2, "float16"),
    KernelTask("squared_difference", "(x - y) ** 2", "(x - y) * (x - y)", 2),
    KernelTask("axpy", "2.5 * x + y", "2.5 * x + y", 2),
    KernelTask("addcmul", "x + 0.5 * y * z", "x + 0.5 * y * z", 3),
    KernelTask("lerp", "x + 0.3 * (y - x)", "x + 0.3 * (y - x)", 2),
)
BY_NAME = {task.name: task for task in TASKS}
