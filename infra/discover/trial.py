"""`gpufleet new --try`: the command runs on this machine's CPU for a minute, in a copy of the folder, and is watched.

Which files appear, grow and are renamed, which lines come, what it does when it is asked to leave, and whether a second
start with what was saved goes on. Every finding carries what was seen.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpufleet.infra.discover.sandbox import Sandbox, TrialRun
from gpufleet.infra.discover.seen import (
    Restored,
    SeenCheckpoint,
    TrialFindings,
    judge_resume,
    learn,
    name_at,
    name_regex,
    steps_told,
    told_at,
    written_again,
)
from gpufleet.job.spec.command import filled

AGAIN_S = 40.0  # for a second start, at most
FIRST_LINES = 3  # of the second start: they tell where it begins


def trial(
    folder: Path, command: str, resume: str, *, workdir: str = "", environment: dict[str, str] | None = None,
    seconds: float = 60.0, say: Callable[[str], None] = lambda text: None,
) -> TrialFindings:  # fmt: skip
    """Runs the command, at most `seconds` for each of two starts. `resume`: what the second one gets beside it, with
    {checkpoint}, {step} and {epoch}; `workdir`: where it starts, in the words of job.workdir. Raises GpufleetError for
    a folder that is too large to copy.
    """
    began = time.monotonic()
    seen = TrialFindings()
    with tempfile.TemporaryDirectory(prefix="gpufleet-try-") as scratch:
        place = Sandbox(Path(scratch).resolve(), folder)
        place.copy()
        first = place.start(command, workdir, environment or {}, seconds, ask=True)
        learn(seen, first)
        if seen.checkpoint is not None:
            restored = _restore(place, seen.checkpoint, first)
            if restored is not None:
                words = filled(resume, restored.values) if resume else ""
                say(f"starting again with {restored.shown}")
                second = place.start(
                    f"{command} {words}".strip(),
                    workdir,
                    environment or {},
                    min(seconds, AGAIN_S),
                    ask=False,
                    until=lambda watch: _is_clear(seen, restored, watch),
                )
                judge_resume(seen, restored, first, second)
    seen.seconds = round(time.monotonic() - began, 1)
    return seen


def _is_clear(seen: TrialFindings, restored: Restored, second: TrialRun) -> bool:
    """Whether the second start has shown enough: some lines that count, or a file that it should not have written."""
    again = seen.checkpoint is not None and written_again(seen.checkpoint, restored, second)
    return bool(again) or len(steps_told(seen, second)) >= FIRST_LINES


def _restore(place: Sandbox, seen: SeenCheckpoint, first: TrialRun) -> Restored | None:
    """Leaves the checkpoint before the last alone, of one that is rewritten what there is. None: there is none."""
    top = place.user["checkpoints"] if seen.where == "checkpoints" else place.code
    base = top / seen.folder if seen.folder not in ("", ".") else top
    pattern = re.compile(name_regex(seen.names[0]))
    numbered = sorted(
        {
            (int(match["n"]), match[0])
            for path in base.rglob("*")
            if (match := pattern.match(path.relative_to(base).as_posix())) and "n" in match.groupdict()
        }
    )
    if seen.rewritten:
        kept = base / seen.names[0]
        at = max((each.at for each in first.writes if each.name.endswith(seen.names[0])), default=0.0)
        number = told_at(first, at)
        if not kept.exists() or number is None:
            return None
        return Restored(
            number=number,
            shown=seen.names[0],
            values=place.values() | {"checkpoint": str(kept), "step": number, "epoch": number},
            at=time.time(),
        )
    if not numbered:
        return None
    number, name = numbered[-2] if len(numbered) > 1 else numbered[0]
    for later, other in numbered:
        if later > number:
            for each in seen.names:
                _remove(base / name_at(each, later, other))
    kept = base / name.rstrip("/")
    return Restored(
        number=number,
        shown=name,
        values=place.values() | {"checkpoint": str(kept), "step": number, "epoch": number},
        at=time.time(),
    )


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
