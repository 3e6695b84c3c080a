"""Stage 1: what a candidate may say."""

from __future__ import annotations

import sys

import pytest

from gpufleet.job.experiments.kernel.judge import planted, rules, source_text
from gpufleet.job.experiments.kernel.judge.catalog import TASKS
from gpufleet.job.experiments.kernel.judge.vocabulary import ACTIVE_DEVICE
from tests.job.kernel_judge import honest


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


HONEST = honest().source


@pytest.mark.parametrize(
    "line",
    [
        "sizes = list(x.shape); sizes.insert(0, 1); sizes.extend([1]); last = sizes.pop(); sizes.reverse()",
        "grids = {'m': 1}; grids.update(n=2); grids.setdefault('k', 3); sizes = [*grids.values(), *grids.keys()]",
        "assert torch.is_floating_point(x) and not torch.is_complex(x) and not x.is_complex()",
        "block = 1 << (x.numel() - 1).bit_length()",
    ],
)
def test_words_on_lists_and_numbers_of_the_calls_own_are_admitted(line: str) -> None:
    assert rules.problem(launcher_with(line)) is None


def replaced(old: str, new: str) -> str:
    """A correct candidate with another text in the place of one."""
    assert old in HONEST
    return HONEST.replace(old, new)


def launcher_with(line: str) -> str:
    """A correct candidate whose launcher begins with this line."""
    first = "    x = x.contiguous()\n"
    return replaced(first, f"{first}    {line}\n")


def importing(line: str, source: str = HONEST) -> str:
    """A candidate that imports something else, too."""
    return source.replace("import torch\n", f"import torch\n{line}\n")


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("x = torch.relu(x)", "torch.relu"),
        ("x = torch.nn.functional.relu(x)", "torch.nn.functional.relu"),
        ("x = torch.ops.aten.relu(x)", "torch.ops"),
        ("x = torch.Tensor.relu(x)", "torch.Tensor.relu"),
        ("x = torch.Tensor([1.0])", "torch.Tensor, except as a type"),
        ("made = torch.Tensor; x = made([1.0])", "torch.Tensor, except as a type"),
        ("assert isinstance(torch.Tensor([1.0]), torch.Size)", "torch.Tensor, except as a type"),
        ("assert isinstance(x, (lambda: torch.Tensor)())", "torch.Tensor, except as a type"),
        ("assert isinstance(x, (made := torch.Tensor)); x = made([1.0])", "torch.Tensor, except as a type"),
        ("t = torch; x = t.relu(x)", "torch, a module, as a value"),
        ("x = x.relu()", ".relu"),
        ("x = x.exp()", ".exp"),
        ("x = kernel_function.__globals__", "__globals__"),
        ("x = getattr(torch, 'relu')(x)", "the name getattr"),
        ("x = eval('1')", "the name eval"),
        ("x = __import__('os')", "the name __import__"),
        ("open('a', 'w')", "the name open"),
        ("x.data = x", "is changed"),
        ("x = vars([x, x])", "the name vars"),
        ("x = triton.language.core.builtins", "triton.language.core"),
        ("x = tl.math.os", "triton.language.math.os"),
        ("x = triton.runtime.driver", "triton.runtime"),
        ("global n", "Global"),
        ("import os", "Import"),
        ("try:\n        pass\n    except ValueError:\n        return x", "Try"),
        ("with torch.enable_grad():\n        pass", "`with`"),
        ("with torch.no_grad(exec('1')):\n        pass", "`with`"),
        ("with torch.no_grad() as x.data:\n        pass", "a name for"),
        ("with torch.no_grad():\n        exec('1')", "the name exec"),
        ("with torch.inference_mode(exec('1')):\n        pass", "`with`"),
        ("class A:\n        pass", "ClassDef"),
        ("def torch(): pass", "given another meaning"),
        ("def grid(meta):\n        exec('1')", "the name exec"),
        ("def grid(meta=[]):\n        pass", "List at the top, or in a default"),
        ("def grid(*, meta=[]):\n        pass", "List at the top, or in a default"),
        ("def grid(meta) -> exec('1'):\n        pass", "Call in an annotation"),
        ("@exec\n    def grid(meta):\n        pass", "a decorator"),
        ("def grid(meta):\n        inner = 1\n    n = inner", "the name inner"),
        ("def grid(meta):\n        nonlocal x", "Nonlocal"),
        ("def grid(meta):\n        grid.calls = 1", "is changed"),
        ("with torch.cuda.stream(x):\n        pass", "`with`"),
        ("with torch.cuda.device(exec('1')):\n        pass", "the name exec"),
        ("with torch.cuda.device(0):\n        exec('1')", "the name exec"),
        ("with torch.cuda.device(0) as x.data:\n        pass", "`with`"),
        ("x = torch.cuda.device(0)", "torch.cuda"),
        ("x = torch.cuda.get_device_properties(0).name", ".name"),
        ("x = triton.runtime.driver.active.utils", "triton.runtime"),
        ("x = tl.inline_asm_elementwise('')", "inline_asm_elementwise"),
        ("x = tl.extra.cuda.libdevice.core", "libdevice.core"),
        ("x = tl.extra.cuda.utils", "triton.language.extra.cuda.utils"),
        ("torch = 1", "given another meaning"),
        ("[len for len in (1,)]", "given another meaning"),
        ("x = x.tolist()", ".tolist"),
        ("x = x.item()", ".item"),
        ("x = '{0.__class__}'.format(x)", ".format"),
        ("x = (yield)", "Yield"),
        ("y: exec('1') = x", "Call in an annotation"),
        ("y: (lambda: 0)() = x", "in an annotation"),
        ("f = lambda a=[]: a", "List at the top, or in a default"),
        ("[eval for eval in (1,)]; eval('1')", "the name eval"),
        ("f = lambda eval: 0; eval('1')", "the name eval"),
        ("f = lambda a: exec('1')", "the name exec"),
        ("y = [0 for a in exec('1')]", "the name exec"),
        ("y = [0 for a in (1,) for b in exec('1')]", "the name exec"),
        ("y = [0 for a in (1,) if exec('1')]", "the name exec"),
        ("y = f'{exec(1)}'", "the name exec"),
        ("y = type(x)([1.0])", "the name type"),
        ("y = f'{type(x)([1.0])}'", "the name type"),
        ("y = f'{type(x).__dict__}'", "__dict__"),
        ("y = f'{type(*x)}'", "the name type"),
        ("y = f'{type(x, y=1)}'", "the name type"),
        ("y = f'{type(exec(1))}'", "the name exec"),
        ("y = f'{type(x):{exec(1)}}'", "the name exec"),
        ("y = f'{x:{exec(1)}}'", "the name exec"),
        ("if (torch := x) is x:\n        pass", "given another meaning"),
        ("y = (z := exec('1'))", "the name exec"),
        ("y = [(kernel := a) for a in (1,)]", "the name kernel"),
        ("f = lambda: (z := x)", "the name z"),
        ("print(1, file=x)", "print with file"),
        ("print(*x)", "print with more positional arguments"),
        ("print(exec('1'))", "the name exec"),
        ("p = print", "the name print"),
        ("y = {a: a for a in (1,)}", "DictComp"),
        ("y = x @ x; match x:\n        case exec('1'):\n            pass", "syntax"),
        ("if n:\n        match x:\n            case int():\n                pass", "Match"),
        ("f = lambda *a: a", "any number of arguments"),
        ("c = triton.Config({}, pre_hook=triton.cdiv)", "triton.Config with pre_hook"),
        ("c = triton.Config; c({}, pre_hook=triton.cdiv)", "triton.Config"),
        ("c = triton.autotune([], [], {})", "more positional arguments"),
        ("c = triton.autotune(*x)", "more positional arguments"),
        ("c = triton.Config({'B': exec('1')})", "the name exec"),
        ("c = triton.Config(**{})", "triton.Config with **"),
        ("from os import *", "ImportFrom"),
        ("async def f(): pass", "AsyncFunctionDef"),
        ("del x.data", "line 16: del, except of names"),
        ("del x[0]", "line 16: del, except of names"),
        ("del torch", "del of torch"),
        ("y = tl.gather(x, 0, x.to(torch.int64), _semantic=torch)", "torch, a module, as a value"),
        ("y = tl.arange(0, 8, **{'_semantic': torch})", "torch, a module, as a value"),
        ("del kernel", "del of kernel"),
        ("def f():\n        del x", "del of x"),
    ],
)
def test_what_reaches_beyond_a_kernel_is_not(line: str, why: str) -> None:
    found = rules.problem(launcher_with(line))
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("def kernel_function(x)\n    return x", "syntax"),
        ("", "there is no @triton.jit kernel"),
        (replaced("import torch\n", "import torch, numpy\n"), "import of numpy"),
        (replaced("import torch\n", "from torch import relu\n"), "import from torch"),
        (importing("from triton import runtime"), "import from triton"),
        (importing("from triton import jit\nj = jit"), "jit, except in a call"),
        (importing("from triton import jit", launcher_with("other = jit")), "jit, except in a call"),
        (
            importing("from triton import jit", launcher_with("other = jit()(kernel_function)")),
            "triton.jit, except as a decorator",
        ),
        (
            importing("from triton import Config as C", launcher_with("c = C({}, pre_hook=kernel_function)")),
            "triton.Config with pre_hook",
        ),
        (
            importing("from triton import jit")
            .replace("@triton.jit", "@jit")
            .replace("    at = tl", "    '''\ndef kernel(x_ptr):\n    import os\n#'''\n    at = tl"),
            "another line that begins with def",
        ),
        (importing("from math import fsum"), "import from math"),
        (replaced("def kernel_function", "def launch") + "kernel_function = kernel\n", "no function"),
        (replaced("def kernel_function", "def launch") + "kernel_function = 1\n", "no function"),
        (HONEST + "min = 1\n", "given another meaning"),
        (replaced("kernel_function", "other"), "no function kernel_function"),
        (replaced("    kernel[", "    # kernel["), "no kernel is launched"),
        (replaced("@triton.jit", "@torch.compile"), "decorator torch.compile"),
        (HONEST + "torch.relu = None\n", "only names are assigned"),
        (HONEST + "print(1)\n", "Expr at the top"),
        ("x = " + "(" * 5000, "syntax"),
        (replaced("kernel_function(x)", "kernel_function(x: exec('1'))"), "Call in an annotation"),
        (replaced("kernel_function(x):", "kernel_function(x) -> exec('1'):"), "Call in an annotation"),
        (replaced("kernel_function(x)", "kernel_function(x, *a: exec('1'))"), "any number of arguments"),
        (replaced("kernel_function(x)", "kernel_function(x, y=exec('1'))"), "a call at the top, or in a default"),
        (replaced("kernel_function(x)", "kernel_function(x, y=[])"), "List at the top, or in a default"),
        (replaced("n, BLOCK: tl.constexpr", "n, BLOCK: exec('1')"), "Call in an annotation"),
        (replaced("kernel_function(x)", "kernel_function(x: torch.ops)"), "torch.ops"),
        (HONEST + "N: exec('1') = 1\n", "Call in an annotation"),
        (HONEST + "exec: int\nexec('1')\n", "a name without a value"),
        (HONEST + "eval = eval('1')\n", "a call at the top"),
        (HONEST + "eval = 1\n", "given another meaning"),
        (HONEST + "def exec(x):\n    return x\n", "given another meaning"),
        (HONEST + "def kernel(x):\n    return x\n", "given another meaning"),
        (HONEST + "def __getattr__(name):\n    return name\n", "the name __getattr__"),
        (HONEST + "import torch as __builtins__\n", "the name __builtins__"),
        (HONEST + "import torch as len\n", "given another meaning"),
        (HONEST + "import math as tl\n", "given another meaning"),
        (HONEST + "from torch import *\n", "import from torch"),
        (HONEST + "from . import language\n", "import from None"),
        (HONEST + "from .triton import language\n", "import from triton"),
        (HONEST + "class A:\n    x = 1\n", "ClassDef at the top"),
        (HONEST + "calls = []\ndef f(x):\n    calls.append(x)\n", "only decorators may use it"),
        (HONEST + "calls = []\ndef f(x):\n    calls.extend([x])\n", "only decorators may use it"),
        (HONEST + "calls = {}\ndef f(x):\n    calls.setdefault(1, x)\n", "only decorators may use it"),
        (
            replaced("@triton.jit", "S = [1]\n@triton.heuristics({'B': lambda a: S.append(1)})\n@triton.jit"),
            "only decorators may use it",
        ),
        (
            replaced("@triton.jit", "S = [1]\nD = {'B': lambda a: S}\n@triton.heuristics(D)\n@triton.jit"),
            "only decorators may use it",
        ),
        (HONEST + "calls = [1]\ndef f(x):\n    calls[0] = x\n", "only decorators may use it"),
        (HONEST + "calls = [1]\ndef f(x):\n    calls[0] += 1\n", "only decorators may use it"),
        (HONEST + "calls = {1: 2}\ndef f(x):\n    for calls[1] in (x,):\n        pass\n", "only decorators may use it"),
        (HONEST + "calls = [1]\ndef f(x):\n    y = calls[exec('1')]\n", "the name exec"),
        (HONEST + "calls = [1]\nlast = calls[0]\n", "calls is a list or dict of the module"),
        (HONEST + "calls = ([], 1)\n", "List at the top"),
        (HONEST + "one = (two := 1)\n", "the name two"),
        (HONEST + "one = print(1)\n", "a call at the top"),
        (HONEST + "one = 1\ndel one\n", "Delete at the top"),
        (HONEST + "calls = {1}\n", "Set at the top"),
        (replaced("kernel_function(x)", "kernel_function(x, y={1})"), "Set at the top, or in a default"),
        (replaced("def kernel_function", "@torch.no_grad(exec('1'))\ndef kernel_function"), "decorator torch.no_grad"),
        (replaced("@triton.jit", "@torch.no_grad()\n@triton.jit"), "decorator torch.no_grad"),
        (importing("from triton.language.extra import cuda"), "import from triton"),
        (
            replaced("    n = ", "    made = 1\n    g = lambda a, b=made: a\n    n = ") + "made = [1]\n",
            "made is a list or dict of the module, which keeps changes from one call to the next",
        ),
        (HONEST + "calls = enumerate(range(9))\n", "a call at the top"),
        (HONEST + "made = []\ncalls = tuple(made)\n", "made is a list or dict"),
        (HONEST + "f = torch.empty(9)\n", "a call at the top"),
        (HONEST + "f = (1).size()\n", "a call at the top"),
        (replaced("@triton.jit", "@triton.jit(repr=triton.cdiv)"), "triton.jit with repr"),
        (replaced("@triton.jit", "@triton.heuristics({'B': lambda a: exec('1')})\n@triton.jit"), "the name exec"),
    ],
)
def test_a_module_that_is_no_kernel_is_refused(source: str, why: str) -> None:
    found = rules.problem(source)
    assert found is not None
    assert why in found


@pytest.mark.parametrize(
    "line",
    [
        "def grid(meta):\n        size = meta['BLOCK']\n        return (triton.cdiv(x.numel(), size),)",
        "with torch.cuda.device(x.device):\n        n = 1",
        "assert x.device.type == 'cuda' and x.dtype in {torch.float, torch.half}",
        "n = x.nelement() + math.prod(x.shape) + torch.numel(x)",
        "assert isinstance(x, torch.Tensor) and isinstance(x.shape, (torch.Tensor, torch.Size))",
        "assert x.is_floating_point() and torch.is_tensor(x) and all(size > 0 for size in x.shape)",
        "if x.dim() > 9:\n        raise NotImplementedError(x.dim())",
        "y = x.float().view_as(x)",
        "x = x.detach().ravel()",
        "y, z = x.new_zeros(x.shape), torch.full_like(x, 0.0)",
        "torch.cuda.synchronize()",
        "min, max = -1.0, 1.0",
        "with torch.no_grad():\n        y = x[:1, None]",
        "assert str(x.dtype) == 'torch.float32' and abs(-1) == round(1.2)",
        "x, y = torch.broadcast_tensors(x, x)",
        "assert x.layout == torch.strided and not x.requires_grad and isinstance(x.shape, torch.Size)",
        "n = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count",
        "if (size := x.numel()) > 1:\n        print('of', size, f'{x.shape}', sep=': ', flush=True)",
        "y, z = x.contiguous(), 1\n    del y, z",
        "if x.dim() > 9:\n        raise TypeError(f'{type(x)}, {type(x.shape).__name__!r:>9}')",
        "n = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, reversed(sorted(x.stride()))))",
    ],
)
def test_what_launchers_commonly_ask_is_allowed(line: str) -> None:
    assert rules.problem(launcher_with(line).replace("import torch\n", "import math\nimport torch\n")) is None


FROM_TRITON = """import torch
from triton import Config, autotune, heuristics, jit

@autotune([Config({'BLOCK': 64})], ['n'])
@heuristics({'C': lambda a: 1})
@jit"""
CONFIGS = "[triton.Config({'BLOCK': size}) for size in (64, 128)]"


@pytest.mark.parametrize(
    "source",
    [
        replaced("@triton.jit", "")
        .replace("import torch\n", "")
        .replace("\n\n\n\ndef kernel", f"\n{FROM_TRITON}\ndef kernel"),
        importing("from triton import cdiv", replaced("triton.cdiv", "cdiv")),
        importing("from math import ceil", replaced("triton.cdiv(n, 1024)", "ceil(n / 1024)")),
        replaced("n, BLOCK", "n, min, max, BLOCK").replace("out, n,", "out, n, 0.0, 1.0,"),
        replaced("def kernel_function", "def launch") + "kernel_function = launch\n",
        importing("SIZES = {torch.float32: 1024}", replaced("BLOCK=1024", "BLOCK=SIZES[x.dtype]")),
        replaced(
            "@triton.jit",
            f"def configs():\n    'Both.'\n    return {CONFIGS}\n@triton.autotune(configs(), [])\n@triton.jit",
        ),
        replaced("@triton.jit", f"@triton.autotune({CONFIGS} + [triton.Config({{'BLOCK': 32}})], [])\n@triton.jit"),
    ],
)
def test_what_modules_commonly_have_is_allowed(source: str) -> None:
    assert rules.problem(source) is None


@pytest.mark.parametrize(
    "source",
    [
        replaced("tl.maximum(x, 0.0)", "tl.maximum(x, 0.0, propagate_nan=tl.PropagateNan.ALL)"),
        replaced("    inside = ", "    default_value = 0.0\n    for _ in tl.range(0, 1):\n        pass\n    inside = "),
        replaced("    inside = ", "    tl.static_print('x')\n    inside = "),
        replaced("tl.maximum(x, 0.0)", "tl.extra.cuda.libdevice.tanh(x)"),
        importing("from triton.language.extra import libdevice", replaced("tl.maximum(x, 0.0)", "libdevice.tanh(x)")),
        importing("from triton.language.extra.cuda.libdevice import tanh", replaced("tl.maximum(x, 0.0)", "tanh(x)")),
        replaced("@triton.jit", "DEVICE = torch.device('cuda')\n\n\n@triton.jit"),
        replaced("@triton.jit", f"DEVICE = {ACTIVE_DEVICE}()\n\n\n@triton.jit"),
        replaced("def kernel_function", "@torch.no_grad()\ndef kernel_function"),
    ],
)
def test_what_kernels_for_gpus_have_is_allowed(source: str) -> None:
    assert rules.problem(source) is None


def test_operators_on_tensors_are_seen_by_the_run() -> None:
    assert rules.forbidden_ops(["empty_like", "add", "numel", "__rpow__"]) == ["__rpow__", "add"]


HIDDEN = """
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    import os
    os.abort()
"""


@pytest.mark.parametrize("decorator", ["@triton.jit()", "@triton.jit(noinline=False)"])
def test_a_kernel_with_arguments_in_its_decorator_is_one(decorator: str) -> None:
    assert rules.problem(replaced("@triton.jit", decorator)) is None
    assert rules.problem(replaced("@triton.jit", '@triton.jit(do_not_specialize=["n"])')) is None
    hidden = replaced("    at = tl", f"    '''{HIDDEN}#'''\n    at = tl").replace("@triton.jit", decorator)
    assert "def" in (rules.problem(hidden) or "")


@pytest.mark.parametrize("made", ["triton.jit()(launch)", "triton.jit(noinline=False)(launch)"])
def test_no_function_becomes_a_kernel_where_it_is_not_looked_at_as_one(made: str) -> None:
    source = replaced("@triton.jit", "def launch(x):\n    return x\n\n\n@triton.jit")
    assert "triton.jit" in (rules.problem(source.replace("    out = ", f"    {made}[(1,)](x)\n    out = ")) or "")


@pytest.mark.parametrize(
    "source",
    [
        replaced("    at = tl", f"    '''{HIDDEN}#'''\n    at = tl"),  # the interpreter reads from the last def
        replaced(
            "@triton.jit", f"@triton.heuristics({{'''{HIDDEN}#''': lambda a: 1}})\n@triton.jit"
        ),  # the compiler, the first
        replaced("def kernel(", "def \\\n kernel("),  # none that the compiler would see
    ],
)
def test_a_kernel_that_triton_would_read_from_another_line_is_refused(source: str) -> None:
    assert "def" in (rules.problem(source) or "")


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("# coding: utf-7\n" + HONEST, "declares an encoding"),
        ("\n# -*- coding=latin-1 -*-\n" + HONEST, "declares an encoding"),
        ("\ufeff" + HONEST, "U+FEFF"),
        (HONEST + "# \0", "U+0000"),
        (HONEST + "# \ud800", "U+D800"),
        (HONEST + "# \rimport os\n", "U+000D"),
        (HONEST + "# \x0c\n", "U+000C"),
        (HONEST + "#" * 16_384, "longer than 16,384 characters"),
    ],
)
def test_a_text_that_python_could_read_otherwise_is_refused(source: str, why: str) -> None:
    assert why in (rules.problem(source) or "")
    assert why in (source_text.unreadable(source) or "")


def test_ends_of_lines_as_windows_has_them_are_read() -> None:
    assert rules.problem(HONEST.replace("\n", "\r\n")) is None


def test_names_that_python_has_too_may_be_a_functions_own() -> None:
    source = replaced(
        "kernel_function(x):\n", "kernel_function(input: torch.Tensor, eps: 'float' = 1e-6) -> None:\n    x = input\n"
    )
    assert rules.problem(source.replace("    out = ", "    round = [id for id in x.shape]\n    out = ")) is None


def test_a_list_at_the_top_may_serve_a_decorator() -> None:
    configs = "configs = [triton.Config({'BLOCK': size}, num_warps=4) for size in (64, 128)]\n\n\n"
    source = replaced("@triton.jit", f"{configs}@triton.autotune(configs=configs, key=['n'])\n@triton.jit")
    assert rules.problem(source) is None


@pytest.mark.parametrize("unit", ["    a{}=1\n", "    f=lambda b{}:0\n", "    f=[a{0} for a{0} in x.shape]\n"])
def test_twice_the_names_take_twice_the_steps(unit: str) -> None:
    def steps(count: int) -> int:
        source = replaced(
            "    out = torch", "".join(unit.format(number) for number in range(count)) + "    out = torch"
        )
        taken = 0

        def count_one(frame: object, event: str, arg: object) -> None:
            nonlocal taken
            taken += 1

        before = sys.getprofile()
        sys.setprofile(count_one)
        try:
            assert rules.problem(source) is None
        finally:
            sys.setprofile(before)
        return taken

    few, more, most = steps(50), steps(150), steps(350)
    assert most - more == pytest.approx(2 * (more - few), rel=0.05)


@pytest.mark.parametrize(
    "decorator",
    [
        "triton.heuristics({'C': [lambda a: s.append(1) or len(s) for s in [[1]]][0]})",
        "triton.heuristics({'C': (lambda s: lambda a: s.append(1) or len(s))([1])})",
        "triton.heuristics({'C': made([1])})",
        "triton.heuristics({'C': (lambda g: lambda a: min(zip(g, [0])))(enumerate(range(9)))})",
        "triton.heuristics({'C': L[0]})",
        "triton.heuristics({**{}})",
        "triton.heuristics({'C': (s := 1)})",
        "triton.heuristics({exec('1'): 1})",
        "triton.autotune(configs=[triton.Config({'C': 1}, pre_hook=made)], key=[])",
        "triton.autotune(configs=[triton.Config({'C': [1]})], key=[])",
        "triton.autotune(configs=[triton.Config({'C': s}) for s in [[1]]], key=[])",
        "triton.autotune(configs=[triton.Config({'C': s}) for t in [[[1]]] for s in t], key=[])",
        "triton.autotune(configs=[triton.Config({'C': L})], key=[])",
        "triton.autotune(configs=[triton.Config(L)], key=[])",
        "triton.autotune(configs=made([1]), key=[])",
        "triton.autotune(configs=[triton.Config({'C': min(1)}) for min in [made]], key=[])",
        "triton.heuristics(given())",
        "triton.heuristics(held())",
        "triton.heuristics(tuned())",
        "triton.autotune(configs=again(), key=[])",
        "triton.heuristics(early())",
        "triton.heuristics(plain(exec('1')))",
        "triton.heuristics(plain(a=exec('1')))",
        "triton.autotune(configs=[triton.Config({'C': 1})] + L[0], key=[])",
    ],
)
def test_what_a_decorator_holds_is_no_memory_of_a_kernels(decorator: str) -> None:
    before = """
L = [1]
def made(s):
    return lambda a: s.append(1) or len(s)
def given(s=(1, 2)):
    return {'C': lambda a: 1}
def held():
    s = [1]
    return {'C': lambda a: s.append(1) or len(s)}
def tuned():
    return {'C': made([1])}
def again():
    return again()
def early():
    if True:
        return {'C': made([1])}
    return {'C': 1}
def plain():
    return {'C': 1}
"""
    assert rules.problem(replaced("@triton.jit", f"{before}@triton.heuristics(plain())\n@triton.jit")) is None
    assert rules.problem(replaced("@triton.jit", f"{before}@triton.jit")) is None
    assert rules.problem(replaced("@triton.jit", f"{before}@{decorator}\n@triton.jit")) is not None
