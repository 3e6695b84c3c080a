"""`gpufleet rehearse --all`: every stack in turn, and one table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

from infra.definition.loader import load, project_root, stacks_of
from infra.errors import GpufleetError
from infra.text import table
from rehearsal.rehearse import rehearse
from rehearsal.timeline import say


def rehearse_all(*, root: Path | None = None, out: Callable[[str], None] = say) -> int:
    """Every stack in turn, then one table. 0 when all of them held, 1 otherwise, 130 on Ctrl-C."""
    root = root or project_root(Path.cwd())
    rows, failed = [], False
    for path in (root / "stacks" / f"{name}.yaml" for name in stacks_of(root)):
        began = time.monotonic()
        try:
            code = rehearse(str(path), root=root, out=out)
        except GpufleetError as error:
            out(str(error))
            code = 1
        if code == 130:
            return code
        failed |= bool(code)
        rows.append(_row(root, path, code, time.monotonic() - began))
    out("")
    heads = ("stack", "held", "seconds", "steps", "nodes", "taken away", "lost", "repeated", "validation", "USD")
    for line in table(heads, rows, right=(2, 3, 4, 6, 7, 8, 9)):
        out(line)
    return int(failed)


def _row(root: Path, path: Path, code: int, seconds: float) -> tuple[str, ...]:
    if code:  # the file itself may be what is wrong, so it is not read again
        return (path.stem, "NO", f"{seconds:.0f}", "", "", "", "", "", "", "")
    run = load(path, now=datetime.now(UTC), rehearsal=True).run.id
    found = root / "rehearsals" / path.stem / run / "summary.json"
    told = json.loads(found.read_text(encoding="utf-8"))
    loss = told["val_loss"]
    return (
        path.stem,
        "slow" if told["slow"] else "yes",
        f"{seconds:.0f}",
        str(told["steps"]),
        str(told["nodes"]),
        ", ".join(told["interruptions"]),
        str(told["lost_on_notice"]),
        str(told["repeated_after_loss"]),
        "-" if loss is None else f"{told['validation']} {loss:.4f}",
        str(told["spent_usd"]),
    )
