"""Chooses the rung of the micro-batch ladder for a phase, by predicted memory, before its first step."""

from __future__ import annotations

from contextlib import suppress

from gpufleet.job.contract.messages import UsedRung
from gpufleet.job.contract.workdir import RUNG
from gpufleet.job.experiments.dataset.prepare import read_manifest
from gpufleet.job.experiments.engine.experiment import Phase, Session
from gpufleet.job.kind import batch
from gpufleet.job.kind.common import Rung


def choose(session: Session, phase: Phase) -> Rung:
    """The requested rung, or the first lower rung that is predicted to fit this GPU. Writes the result to rung.json.
    Raises ValueError if no rung fits.
    """
    config, ranks = session.config.with_facts(read_manifest(session.data).facts), session.world.size
    ladder = config.ladder(ranks)
    index = min(session.rung, len(ladder) - 1)
    if session.device.is_cuda:
        fitting = batch.choose_rung(config, session.device.room_gb, phase.index, ranks)
        if fitting is None:
            raise ValueError(
                f"phase {phase.name} does not fit {session.device.room_gb:.1f} GB at any micro-batch: choose an "
                "instance type with more GPU memory, or a smaller state (precision, method)"
            )
        index = max(index, ladder.index(fitting))
    rung = ladder[index]
    lower = batch.lower_rung(config, rung, phase.index, ranks)
    used = UsedRung(
        phase=phase.name,
        rung=index,
        micro=rung.micro,
        checkpointing=rung.checkpointing,
        lower=None if lower is None else ladder.index(lower),
    )
    if session.world.first_here:
        try:
            used.write(session.workdir)
        except OSError as error:
            with suppress(OSError):
                (session.workdir / RUNG).unlink(missing_ok=True)  # the file may belong to another phase
            session.say(
                "warning: rung.json could not be written; if memory runs out, the next start goes a rung lower:"
                f" {error}"
            )
    return rung
