"""The program in an answer, without what it never uses."""

from __future__ import annotations

import ast

import pytest

from gpufleet.job.experiments.kernel.judge import answers, rules
from tests.job.kernel_judge import honest

JITTED = "@triton.jit\ndef kernel():\n    pass\n"


JIT_ALONE = JITTED.replace("triton.", "")


LAUNCHES = "def kernel_function(x):\n    kernel[1,](x)\n"


NAMED = LAUNCHES.replace("kernel_function", "relu") + "kernel_function = relu\n"


ENTRY = "def kernel_function(x):\n    pass"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("import torch", "import torch\n"),
        ("Here it is:\n```python\nimport a\n```\nDone.", "import a\n"),
        ("```\nimport a", "import a\n"),
        ("```py\nimport a\n```\nThat is all.", "import a\n"),
        ("```Python\nimport a\n```\nThat is all.", "import a\n"),
        ("```triton\nimport a\n```", "import a\n"),
        (f"Write ```triton``` so:\n  ```python title=a\n{ENTRY}\n```\n", ENTRY + "\n"),
        (f"```bash\npip install triton\n```\nthen\n```python\n{ENTRY}\n```\n", ENTRY + "\n"),
        (f"```bash\npip install triton\n```\n```python\n{NAMED}```\n", NAMED),
        (f"{ENTRY}\n```\nThat is all.", ENTRY + "\n"),
        (f"~~~python\n{ENTRY}\n~~~\nDone.", ENTRY + "\n"),
        (f"````python\n{ENTRY}\n    '```'\n````\nDone.", ENTRY + "\n    '```'\n"),
        (f"1. So:\n\n   ```python\n   {ENTRY.replace(chr(10), chr(10) + '   ')}\n   ```\n", ENTRY + "\n"),
        (f"<think>\n```\n{ENTRY}\n```\n</think>\n```python\n{JITTED}{LAUNCHES}```\n", JITTED + LAUNCHES),
        (f"<think>\n```\n{JITTED}{ENTRY}\n```\n</think>\n```\n{JITTED}{LAUNCHES}```\n", JITTED + LAUNCHES),
        (f"For\n```\n{ENTRY}\n```\n\n```\n{JIT_ALONE}{LAUNCHES}```\n", JIT_ALONE + LAUNCHES),
        (f"For\n```\n@torch.jit.script\n{ENTRY}\n```\n\n```\n{JITTED}{LAUNCHES}```\n", JITTED + LAUNCHES),
        (f"A kernel:\n```python\n{JITTED}```\nIts entry:\n```\n{LAUNCHES}```\n", f"{JITTED}\n{LAUNCHES}"),
        (f"For\n```\n{ENTRY}\n```\n\n```\n{JITTED}```\n\n```\n{LAUNCHES}```\n", f"{JITTED}\n{LAUNCHES}"),
        (f"Either\n```python\n{ENTRY}\n```\nor\n```\n{ENTRY}1\n```\n", f"{ENTRY}\n"),
    ],
)
def test_the_program_is_what_the_fence_with_the_entry_holds(text: str, found: str) -> None:
    assert answers.program(text) == found


UNUSED = """
from __future__ import annotations
import os, numpy as np
import torch.nn as nn
import torch.nn
from typing import Optional
from torch import Tensor

__all__ = ["kernel_function"]
DEVICE = triton.runtime.driver.active.get_active_torch_device()

class Model(nn.Module):
    def forward(self, x):
        return kernel_function(x)

def test():
    torch.testing.assert_close(kernel_function(torch.randn(4, device=DEVICE)), torch.zeros(4))

if __name__ == "__main__":
    test()
"""


def test_what_a_program_never_uses_is_dropped_before_it_is_judged() -> None:
    source = honest().source
    noted = source.replace("kernel_function(x):", "kernel_function(x: Optional[Tensor]) -> Tensor:")
    noted = noted.replace("    out =", "    out: Tensor =")
    assert rules.problem(noted + UNUSED) is not None
    assert answers.used(noted + UNUSED) == ast.unparse(ast.parse(source)) + "\n"
    assert answers.used(source) == source  # as it was written where there is nothing to drop


def test_what_is_called_after_the_entry_is_dropped_and_before_it_is_not() -> None:
    source = honest().source
    example = (
        "def test():\n    print(kernel_function(1))\n\n\na = torch.randn(4)\ntest()\nkernel_function(a)\n'Done.'\n"
    )
    assert answers.used(source + example) == ast.unparse(ast.parse(source)) + "\n"
    before = source.replace("def kernel_function", "exec('1')\n\n\ndef kernel_function")
    assert answers.used(before) == before
    assert rules.problem(before) is not None


def test_an_example_after_the_entry_is_dropped_though_it_calls_its_tensors_as_the_entry_does() -> None:
    source = honest().source
    example = "x = torch.randn(4)\nout, n = kernel_function(x), x.numel()\nassert torch.equal(out, torch.relu(x))\n"
    assert answers.used(source + example) == ast.unparse(ast.parse(source)) + "\n"


@pytest.mark.parametrize(
    "line",
    [
        "x, OUTER = OUTER, 1",
        "global OUTER; OUTER = [OUTER for OUTER in (1,)]",
        "d = {OUTER: 1 for OUTER in (2,)}, OUTER",
        "f = lambda OUTER=OUTER: OUTER",
        "def f():\n        return OUTER",
    ],
)
def test_a_name_that_the_entry_takes_from_the_module_is_kept_and_its_own_is_not(line: str) -> None:
    source = "OUTER = 1\n" + honest().source.replace("    out = ", f"    {line}\n    out = ")
    own = ast.unparse(ast.parse(source.removeprefix("OUTER = 1\n"))) + "\n"
    assert answers.used(source) == (own if line.startswith("x, OUTER") else source)


@pytest.mark.parametrize(
    "more",
    [
        "if __name__ == '__main__':\n    pass\nelse:\n    torch.relu = None\n",
        "if __name__ != '__main__':\n    torch.relu = None\n",
        "torch.relu = None\n",
        "n, torch.relu = 1, None\n",
        "n = exec('1'), torch.zeros(9)[exec('1')]\nn[0] = 1\n",
        "for n in (1,):\n    pass\n",
        "n += 1\n",
        "from os import *\n",
    ],
)
def test_what_could_do_something_is_not_taken_for_unused(more: str) -> None:
    assert answers.used(honest().source + more) == honest().source + more
    assert rules.problem(honest().source + more) is not None


def test_what_the_entry_comes_to_is_kept() -> None:
    source = honest().source.replace("def kernel_function(x):", "def launch(x):").replace("BLOCK=1024", "BLOCK=SIZE")
    made = source + "SIZE = HALF * 2\nHALF = 512\nOTHER = 1\ndef kernel_function(x):\n    return launch(x)\n"
    assert answers.used(made) == ast.unparse(ast.parse(made.replace("OTHER = 1\n", ""))) + "\n"


@pytest.mark.parametrize("source", ["def kernel_function(", "x = " + "(" * 5000, ENTRY + "\n\0", ENTRY + "\n\ud800"])
def test_a_text_that_cannot_be_read_stays_as_it_is(source: str) -> None:
    assert answers.used(source) == source
