"""Candidates with a known verdict: five kinds for each task. Each kind fails at a different stage, and one passes all
stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from gpufleet.job.experiments.kernel.judge.catalog import ENTRY, TASKS, KernelTask

Kind = Literal["correct", "syntax-error", "wrong-result", "writes-nothing", "small-shapes-only"]
STOPS_AT: dict[str, int] = {  # the stage of the funnel at which each kind stops; 6 means none
    "syntax-error": 1,
    "wrong-result": 3,
    "writes-nothing": 3,
    "small-shapes-only": 4,
    "correct": 6,
}
KINDS: tuple[Kind, ...] = get_args(Kind)
BLOCKS = (1024, 512)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A program to judge. `origin`: generated or planted; `label`: the kind of a planted program."""

    name: str
    task: str
    source: str
    origin: str
    label: str = ""


def source(task: KernelTask, *, block: int = 1024, kind: Kind = "correct", body: str | None = None) -> str:
    """A module with a kernel over flat blocks. `body` replaces the expression."""
    expression = body or task.triton
    if kind == "wrong-result":
        expression = f"({expression}) + 0.05"
    pointers = ", ".join(f"{name}_ptr" for name in task.arguments)
    loads = "".join(f"    {name} = tl.load({name}_ptr + at, mask=inside, other=0.0)\n" for name in task.arguments)
    store = f"tl.store(out_ptr + at, {expression}, mask=inside)"
    blocks = "1" if kind == "small-shapes-only" else f"triton.cdiv(n, {block})"
    colon = "" if kind == "syntax-error" else ":"
    return (
        "import torch\nimport triton\nimport triton.language as tl\n\n\n"
        "@triton.jit\n"
        f"def kernel({pointers}, out_ptr, n, BLOCK: tl.constexpr):\n"
        "    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)\n"
        "    inside = at < n\n"
        f"{loads}"
        f"    {'at + 0' if kind == 'writes-nothing' else store}\n\n\n"
        f"def {ENTRY}({', '.join(task.arguments)}){colon}\n"
        + "".join(f"    {name} = {name}.contiguous()\n" for name in task.arguments)
        + "    out = torch.empty_like(x)\n    n = out.numel()\n"
        f"    kernel[({blocks},)]({', '.join(task.arguments)}, out, n, BLOCK={block})\n"
        "    return out\n"
    )


def candidates(count: int) -> list[Candidate]:
    """The first `count` of the 200 combinations of tasks, kinds and two block sizes. All combinations of one task come
    before those of the next.
    """
    made = [
        Candidate(
            name=f"planted-{task.name}-{kind}-{block}",
            task=task.name,
            source=source(task, block=block, kind=kind),
            origin="planted",
            label=kind,
        )
        for block in BLOCKS
        for kind in KINDS
        for task in TASKS
    ]
    return made[:count]
