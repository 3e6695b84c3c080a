"""Candidates that try to pass without a right and fast kernel. Every one must be rejected by the full funnel.

`needs` names the extensions of which any one rejects it (kernel_judge.py's switches), or `a+b` where it takes
both; empty: isolation and the comparison alone do, whatever is left out.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent, indent

from gpufleet.job.experiments.kernel.judge.catalog import BY_NAME
from gpufleet.job.experiments.kernel.judge.planted import Candidate, source

_HEAD = "import torch\nimport triton\nimport triton.language as tl\n"
_KERNEL = source(BY_NAME["sigmoid"]).removeprefix(_HEAD).replace("def kernel_function(", "def honest(")


@dataclass(frozen=True, kw_only=True, slots=True)
class Fixture:
    """One cheat. `gpu_only`: elsewhere there is nothing to cheat with."""

    candidate: Candidate
    needs: frozenset[str]
    gpu_only: bool = False


def _cheat(name: str, needs: str, body: str, *, task: str = "sigmoid", **only: bool) -> Fixture:
    """`body` is the module after the imports and an honest kernel with its launcher `honest`."""
    return _rewritten(name, needs, _HEAD + _KERNEL + "\n\n" + dedent(body).strip() + "\n", task=task, **only)


def _rewritten(name: str, needs: str, text: str, *, task: str, **only: bool) -> Fixture:
    made = Candidate(name=f"adversarial-{name}", task=task, source=text, origin="adversarial", label=name)
    return Fixture(candidate=made, needs=frozenset(needs.split()), **only)


def _then_honest(acts: str) -> str:
    """A module that does something else besides the right thing, and hides that it failed."""
    tried = indent(dedent(acts).strip(), "        ")
    return f"def kernel_function(x):\n    try:\n{tried}\n    except Exception:\n        pass\n    return honest(x)"


def _with_new_memory(body: str, more: str = "") -> str:
    """A kernel that also gets memory of one element which nobody has written to."""
    text = source(BY_NAME["sigmoid"], body=body).replace("out_ptr, n,", "out_ptr, new_ptr, n,")
    text = text.replace("x, out, n,", "x, out, torch.empty(1, device=x.device), n,")
    return text.replace("\n\n\ndef", f"{more}\n\n\ndef")


_SPLIT = BY_NAME["silu"]
_STRIDES = source(_SPLIT).replace("    x = x.contiguous()\n", "")
_INTERPRETED = source(BY_NAME["square"], body="x * x * ONE").replace("\n\n\n@triton", "\n\nONE = 1.0\n\n\n@triton")
_NAIVE = source(BY_NAME["softplus"], body="tl.log(1.0 + tl.exp(x))")
_WRONG_WHEN_LARGE = source(BY_NAME["sigmoid"], body="tl.sigmoid(x) + tl.where(x < -20.0, 0.09, 0.0)")
_NOTHING_WHEN_LARGE = source(
    BY_NAME["hardtanh"], body="tl.where(tl.abs(x) > 10.0, x * 0.0, tl.minimum(tl.maximum(x, -1.0), 1.0))"
)
_TWO_BLOCKS = source(BY_NAME["relu"]).replace("triton.cdiv(n, 1024)", "2")
_FORGETS_INFINITY = source(BY_NAME["absolute"], body="tl.where(tl.abs(x) < 1e38, tl.abs(x), 1e38)")
_COUNTS = (
    source(BY_NAME["relu"])
    .replace("@triton.jit", "S = [1]\n\n\n@triton.heuristics({'CALL': lambda _: S.append(1) or len(S)})\n@triton.jit")
    .replace("BLOCK: tl.constexpr)", "BLOCK: tl.constexpr, CALL: tl.constexpr)")
)
_TELLS = _with_new_memory(
    "tl.sigmoid(x) + tl.where(tl.load(new_ptr) == tl.load(new_ptr), tl.where(x < -20.0, 0.5, 0.0), 0.0)"
)
_PAST_THE_END = _with_new_memory("tl.sigmoid(x)", "\n    tl.store(new_ptr + 1, 0.0)")  # the allocator left a gap there
_ASKS = _INTERPRETED.replace("    n = ", "    if x.is_cuda:\n        return out\n    n = ")
_HIDDEN = "def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):\n    import os"
_IN_A_DOCSTRING = (  # the interpreter reads a kernel from the last line that begins with def
    source(BY_NAME["relu"])
    .replace("@triton.jit", "@triton.jit(noinline=False)")
    .replace("    at = tl", f"    '''\n{_HIDDEN}\n#'''\n    at = tl")
)
_CODED = f"# coding: utf-7\n{source(_SPLIT).replace(' + ', ' +- ')}# +AAo-import sys+AAo-"
CHECKED = 16  # calls before the timing

FIXTURES: tuple[Fixture, ...] = (
    # Remembered results.
    _cheat("cached-by-shape", "funnel multi_input timing", """
        seen = {}
        def kernel_function(x):
            if x.shape not in seen:
                seen[x.shape] = honest(x)
            return seen[x.shape]
        """),
    _cheat("cached-by-address", "funnel timing", """
        seen = {}
        def kernel_function(x):
            key = (x.data_ptr(), x.shape)
            if key not in seen:
                seen[key] = (honest(x), x)
            return seen[key][0]
        """),
    _cheat("honest-at-first", "funnel multi_input timing", """
        calls = []
        def kernel_function(x):
            calls.append(honest(x) if len(calls) < 6 else calls[5])
            return calls[-1]
        """),
    _cheat("cached-by-content", "funnel", """
        seen = {}
        def kernel_function(x):
            key = float(x.flatten()[0])
            if key not in seen:
                seen[key] = honest(x)
            return seen[key]
        """),
    # Another program while it is timed.
    _cheat("torch-while-timed", "funnel", f"""
        calls = []
        def kernel_function(x):
            calls.append(1)
            return honest(x) if len(calls) <= {CHECKED} else 1 / (1 + 2.718281828459045 ** (-x))
        """),
    _cheat("in-place-while-timed", "funnel timing", f"""
        calls = []
        def kernel_function(x):
            calls.append(1)
            if len(calls) <= {CHECKED}:
                return honest(x)
            kernel[(triton.cdiv(x.numel(), 1024),)](x, x, x.numel(), BLOCK=1024)
            return x
        """),
    # Code where no code is looked for.
    _cheat("annotation", "funnel", """
        def other(x: exec('''
        import torch, sys
        sys.modules["__main__"].Ops.__torch_function__ = lambda self, f, types, a=(), k=None: f(*a, **(k or {}))
        honest = torch.sigmoid''', globals())):
            return x
        def kernel_function(x):
            return honest(x)
        """),
    _cheat("annotation-precomputes", "funnel timing", """
        def kernel_function(x) -> exec('''
        import torch, sys
        Harness = sys.modules["__main__"].Harness
        give = Harness._give
        def kept(self, head, blobs):
            found = give(self, head, blobs)
            self.kept = torch.sigmoid(self.inputs[0])
            return found
        def trial(self, head, blobs):
            self.output = None if head.get("empty") else self.kept
            self.ops = type("None", (), {"names": (), "fences": self.fences})
            return {"seconds": 1e-9}, []
        Harness._give, Harness._trial = kept, trial''', globals()):
            return honest(x)
        """),
    _rewritten("counts-in-a-decorator", "funnel", _COUNTS, task="relu"),
    _rewritten("hidden-in-a-docstring", "funnel", _IN_A_DOCSTRING, task="relu"),
    _rewritten("coding-cookie", "", _CODED, task="silu"),
    _cheat("brings-a-library", "funnel", """
        import sys
        open("native.so", "wb").write(b"an ELF file")
        sys.path.insert(0, ".")
        try:
            import native
        except ImportError:
            pass
        def kernel_function(x):
            return honest(x)
        """),
    # No result at all.
    _cheat("input-alias", "", "def kernel_function(x):\n    honest(x)\n    return x", task="relu"),
    _cheat("empty-result", "", "def kernel_function(x):\n    honest(x[:0])\n    return torch.empty_like(x)"),
    _cheat("changes-its-input", "", "def kernel_function(x):\n    x.copy_(honest(x))\n    return x"),
    # The reference, or torch, in disguise.
    _cheat("calls-torch", "funnel", "def kernel_function(x):\n    honest(x)\n    return torch.sigmoid(x)"),
    _cheat("operators", "funnel",
           "def kernel_function(x):\n    honest(x)\n    return 1 / (1 + 2.718281828459045 ** (-x))"),
    _cheat("attribute-by-name", "funnel", 'def kernel_function(x):\n    return getattr(torch, "sig" + "moid")(x)'),
    _cheat("method", "funnel", "def kernel_function(x):\n    honest(x)\n    return x.sigmoid()"),
    _cheat("falls-back", "funnel", """
        @triton.jit
        def broken(x_ptr, BLOCK: tl.constexpr):
            tl.no_such_thing(x_ptr)
        def kernel_function(x):
            try:
                broken[(1,)](x, BLOCK=8)
            except Exception:
                return torch.sigmoid(x)
        """),
    _cheat("imports-the-reference", "", """
        from gpufleet.job.experiments.kernel.judge import catalog, tasks
        def kernel_function(x):
            return tasks.expected(catalog.BY_NAME["sigmoid"], tasks.Case(name="", tensors=(x,)))
        """),
    _cheat("host-loop", "funnel", """
        import math
        def kernel_function(x):
            made = [1 / (1 + math.exp(-min(max(v, -50), 50))) for v in x.flatten().tolist()]
            return torch.tensor(made).reshape(x.shape)
        """),
    # The judge's means. Those that hide their failure are rejected for trying; what they try comes to nothing.
    _cheat("patches-the-clock", "funnel timing", """
        import time
        time.perf_counter = lambda: 0.0
        def kernel_function(x):
            import sys
            sys.modules["__main__"]._clock = lambda: 0.0
            return honest(x)
        """),  # a GPU's events are no clock of Python's
    _cheat("patches-cuda-events", "funnel", """
        torch.cuda.Event = lambda **_: None
        def kernel_function(x):
            return honest(x)
        """),
    _cheat("patches-allclose", "", """
        torch.allclose = torch.equal = lambda *_, **__: True
        torch.testing.assert_close = lambda *_, **__: None
        torch.sigmoid = lambda x: x
        def kernel_function(x):
            return x.clone()
        """),
    _cheat("answers-for-the-judge", "", """
        import json, os, struct
        def kernel_function(x):
            content = x.contiguous().numpy().tobytes()
            said = {"shape": list(x.shape), "dtype": "float32", "ops": [], "alias": False, "changed": False}
            head = json.dumps({**said, "blobs": [len(content)]}).encode()
            for number in range(3, 64):
                try:
                    os.write(number, struct.pack("!I", len(head)) + head + content)
                except OSError:
                    pass
            return x
        """),
    _cheat("lies-about-itself", "", """
        import sys
        def kernel_function(x):
            harness = sys.modules["__main__"].Harness
            said = {"dtype": "float32", "ops": [], "alias": False, "changed": False, "passed": True}
            harness._collect = lambda self, head, blobs: (
                {**said, "shape": list(self.inputs[0].shape)}, [b"0" * 4 * self.inputs[0].numel()]
            )
            return x
        """),
    _cheat("answers-no-number", "", """
        import sys
        harness = sys.modules["__main__"].Harness
        harness._trial = lambda self, head, blobs: ({"seconds": 10**400}, [])
        def kernel_function(x):
            return honest(x)
        """),
    _cheat("reads-frames", "funnel", "import sys\n" + _then_honest('sys._getframe(1).f_locals["expected"]')),
    _cheat("reads-all-objects", "funnel",
           "import gc\n" + _then_honest("list(filter(torch.is_tensor, gc.get_objects()))")),
    _cheat("reads-files", "funnel", _then_honest('open("/etc/passwd").read()')),
    _cheat("reads-the-judge", "funnel",
           "import os\n" + _then_honest('open(f"/proc/{os.getppid()}/mem", "rb").read(1)')),
    # Out of its place.
    _cheat("writes-outside", "funnel", _then_honest('open("/var/tmp/gpufleet-was-here", "w").write("x")')),
    _cheat("writes-outside-natively", "funnel",
           _then_honest('torch.from_file("/var/tmp/gpufleet-was-here", shared=True, size=4).add_(1)')),
    _cheat("removes-outside", "funnel", "import os\n" + _then_honest('os.remove("/var/tmp/gpufleet-was-here")')),
    _cheat("forks", "", "import os\n" + _then_honest("os.fork()")),
    _cheat("fork-bomb", "", "import os\ndef kernel_function(x):\n    while True:\n        os.fork()"),
    _cheat("runs-a-program", "funnel", "import subprocess\n" + _then_honest('subprocess.run(["true"])')),
    _cheat("opens-a-connection", "funnel",
           "import socket\n" + _then_honest('socket.create_connection(("127.0.0.1", 9), 1)')),
    _cheat("loads-code", "", "import ctypes\n" + _then_honest("ctypes.CDLL(None).fork()")),
    # No end, or a bad one.
    _cheat("never-ends", "", "def kernel_function(x):\n    while True:\n        pass"),
    _cheat("crashes", "", "import os\ndef kernel_function(x):\n    os.abort()"),
    _cheat("exits", "", "def kernel_function(x):\n    raise SystemExit(0)"),
    _cheat("takes-all-memory", "", "def kernel_function(x):\n    return [torch.ones(1 << 27) for _ in range(1000)]"),
    _cheat("takes-memory-of-no-process", "", """
        import os
        def kernel_function(x):
            block = b"x" * (1 << 24)
            for number in range(16):
                kept = os.memfd_create("kept")
                for _ in range(15):
                    os.write(kept, block)
            return honest(x)
        """),
    _cheat("fills-the-disk", "", """
        import os
        def kernel_function(x):
            for name in "abc":
                os.posix_fallocate(os.open(name, os.O_CREAT | os.O_WRONLY), 0, 100 << 20)
            return honest(x)
        """),
    # Honest mistakes that few inputs show, and others that look like them.
    _rewritten("wrong-when-large", "multi_input", _WRONG_WHEN_LARGE, task="sigmoid"),
    _rewritten("nothing-when-large", "multi_input", _NOTHING_WHEN_LARGE, task="hardtanh"),
    _rewritten("two-blocks-only", "multi_input", _TWO_BLOCKS, task="relu"),
    _rewritten("forgets-infinity", "multi_input", _FORGETS_INFINITY, task="absolute"),
    _rewritten("right-where-memory-is-filled", "multi_input+timing", _TELLS, task="sigmoid"),
    _rewritten("writes-past-the-end", "funnel", _PAST_THE_END, task="sigmoid"),
    _rewritten("compiles-if-asked-for-no-gpu", "", _ASKS, task="square"),
    _rewritten("compiles-for-no-gpu", "", _INTERPRETED, task="square"),
    _rewritten("ignores-strides", "multi_input", _STRIDES, task="silu"),
    _rewritten("overflows", "multi_input", _NAIVE, task="softplus"),
    # The device is waited for before the output is read, and what it says is off by less than LIE_S.
    _cheat("wrong-stream", "funnel", """
        def kernel_function(x):
            with torch.cuda.stream(torch.cuda.Stream()):
                return honest(x)
        """, gpu_only=True),
)  # fmt: skip
