"""Stage 1: what a candidate may say."""

from __future__ import annotations

import pytest
from kernel_judge import honest

from job.kernels import planted, rules
from job.kernels.catalog import TASKS


def test_every_correct_planted_kernel_is_allowed() -> None:
    assert [rules.problem(planted.source(task)) for task in TASKS] == [None] * len(TASKS)


def test_what_kernels_commonly_have_is_allowed() -> None:
    source = '''"""A kernel with options."""
import math
import torch
import triton
from triton import language as tl

BLOCK = 1024


@triton.autotune(configs=[triton.Config({"B": 256}, num_warps=4)], key=["n"])
@triton.jit
def scale(x_ptr, out_ptr, n, s, B: tl.constexpr):
    pid = tl.program_id(axis=0)
    for start in range(0, n, B):
        at = start + pid + tl.arange(0, B)
        x = tl.load(x_ptr + at, mask=at < n).to(tl.float32)
        tl.store(out_ptr + at, tl.math.exp2(x) * s, mask=at < n)


def launch(x, out):
    n = x.numel()
    grid = lambda meta: (triton.cdiv(n, meta["B"]),)
    scale[grid](x, out, n, math.pi)


def kernel_function(x):
    if not x.is_contiguous():
        x = x.contiguous()
    assert x.dtype in (torch.float32, torch.float16), f"no {x.dtype}"
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    launch(x, out)
    return out.view(*[size for size in x.shape])
'''
    assert rules.problem(source) is None


def replaced(old: str, new: str) -> str:
    """A correct candidate with another text in the place of one."""
    source = honest().source
    assert old in source
    return source.replace(old, new)


def after(line: str) -> str:
    """A correct candidate whose launcher begins with this line."""
    first = "    x = x.contiguous()\n"
    return replaced(first, f"{first}    {line}\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("x = torch.relu(x)", "torch.relu"),
        ("x = torch.nn.functional.relu(x)", "torch.nn.functional.relu"),
        ("x = torch.ops.aten.relu(x)", "torch.ops"),
        ("x = torch.Tensor.relu(x)", "torch.Tensor.relu"),
        ("t = torch; x = t.relu(x)", ".relu"),
        ("x = x.relu()", ".relu"),
        ("x = kernel_function.__globals__", "__globals__"),
        ("x = getattr(torch, 'relu')(x)", "the name getattr"),
        ("x = eval('1')", "the name eval"),
        ("x = __import__('os')", "the name __import__"),
        ("open('a', 'w')", "the name open"),
        ("x.data = x", "is changed"),
        ("x = sum([x, x])", "the name sum"),
        ("x = triton.language.core.builtins", "triton.language.core"),
        ("x = tl.math.os", "triton.language.math.os"),
        ("x = triton.runtime.driver", "triton.runtime"),
        ("global n", "Global"),
        ("import os", "Import"),
        ("try:\n        pass\n    except ValueError:\n        return x", "Try"),
        ("with torch.no_grad():\n        pass", "With"),
        ("class A:\n        pass", "ClassDef"),
        ("def torch(): pass", "FunctionDef"),
        ("torch = 1", "given another meaning"),
        ("[len for len in (1,)]", "given another meaning"),
        ("x = x.tolist()", ".tolist"),
        ("x = x.item()", ".item"),
        ("x = '{0.__class__}'.format(x)", ".format"),
        ("x = (yield)", "Yield"),
    ],
)
def test_what_reaches_beyond_a_kernel_is_not(line: str, why: str) -> None:
    found = rules.problem(after(line))
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def kernel_function(x)\n    return x", "syntax"),
        ("", "no @triton.jit kernel"),
        (
            replaced("import torch\n", "import torch, numpy\n"),
            "import of numpy",
        ),
        (
            replaced("import torch\n", "from torch import relu\n"),
            "import from torch",
        ),
        (replaced("kernel_function", "other"), "no function kernel_function"),
        (replaced("    kernel[", "    # kernel["), "no kernel is launched"),
        (replaced("@triton.jit", "@torch.compile"), "decorator torch.compile"),
        (honest().source + "torch.relu = None\n", "only names are assigned"),
        (honest().source + "print(1)\n", "Expr at the top"),
        ("x = " + "(" * 5000, "syntax"),
    ],
)
def test_a_module_that_is_no_kernel_is_refused(source: str, why: str) -> None:
    found = rules.problem(source)
    assert found is not None
    assert why in found


def test_operators_on_tensors_are_seen_by_the_run() -> None:
    assert rules.forbidden_ops(["empty_like", "add", "numel", "__rpow__"]) == ["__rpow__", "add"]
