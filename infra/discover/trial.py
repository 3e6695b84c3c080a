"""`gpufleet new --try`: runs the command on this machine's CPU for a minute, in a copy of the folder, and watches it.

It notes which files appear, grow and are renamed, which lines the command prints, what it does on a request to stop,
and whether a second start resumes from the saved checkpoint. Every finding has its evidence.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from gpufleet.infra.discover.sandbox import Sandbox, TrialRun
from gpufleet.infra.discover.seen import SeenCheckpoint, TrialFindings, learn, resume_check, take_verdict
from gpufleet.infra.discover.template import Trial
from gpufleet.job.command.names import FoundCheckpoint, Names, place
from gpufleet.job.kind.command import filled

AGAIN_S = 40.0  # the most seconds for a second start
FIRST_LINES = 3  # lines of the second start: files that it writes meanwhile may still show that the script starts over


def trial(
    folder: Path, trying: Trial, seconds: float = 60.0, say: Callable[[str], None] = lambda text: None
) -> TrialFindings:
    """Runs the command twice, each for at most `seconds`. Raises GpufleetError if the folder is too large to copy."""
    began = time.monotonic()
    seen = TrialFindings()
    with tempfile.TemporaryDirectory(prefix="gpufleet-try-") as scratch:
        sandbox = Sandbox(Path(scratch).resolve(), folder)
        sandbox.copy()
        if why := sandbox.lacking(trying.command):
            seen.problems.append(f"the command was not run: {why}")
            return seen
        first = sandbox.start(trying.command, trying.workdir, trying.environment, seconds, ask=True)
        learn(seen, first, trying.lines)
        if seen.checkpoint is not None:
            _start_again(sandbox, trying, seen, seen.checkpoint, first, min(seconds, AGAIN_S), say)
    seen.seconds = round(time.monotonic() - began, 1)
    return seen


def _start_again(
    sandbox: Sandbox, trying: Trial, seen: TrialFindings, observed: SeenCheckpoint, first: TrialRun, seconds: float,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Finds whether a second start resumes. The second start gets the last checkpoint but one, so that it has to write
    the last one again.
    """
    folder = (sandbox.user["checkpoints"] if observed.top == "checkpoints" else sandbox.code) / observed.folder
    names = Names(observed.config(()))
    there = [candidate for candidate in names.find(folder, sandbox.root) if not names.lacks(candidate)]
    restored = there[-2:][0] if there else None
    if restored is None or (check := resume_check(seen, first, restored)) is None:
        return
    for later in there[there.index(restored) + 1 :]:
        for name in later.places:
            _remove(folder / name)
    before = {candidate.key: candidate for candidate in names.find(folder, sandbox.root)}

    def is_clear(watch: TrialRun) -> bool:
        anew = [
            candidate for candidate in names.find(folder, sandbox.root) if _is_new(candidate, before.get(candidate.key))
        ]
        places = [position for _, position in seen.places(watch)]
        verdict = check.look(anew, next(iter(places), None))
        return verdict == "begins anew" or (verdict == "goes on" and len(places) >= FIRST_LINES)

    say(f"starting again with {place(restored)}")
    checkpoint, number = folder / place(restored), restored.number or 0
    values = sandbox.values() | {"checkpoint": str(checkpoint), "step": number, "epoch": number, **restored.counts}
    command = f"{trying.command} {filled(trying.resume, values)}".strip()
    second = sandbox.start(command, trying.workdir, trying.environment, seconds, ask=False, until=is_clear)
    is_clear(second)
    take_verdict(seen, check, second)


def _is_new(checkpoint: FoundCheckpoint, before: FoundCheckpoint | None) -> bool:
    return before is None or checkpoint.is_anew(before)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
