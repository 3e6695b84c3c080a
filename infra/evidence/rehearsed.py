"""What a stack's rehearsals have shown, as far as a run's bill rests on it: their summary.json, which stays."""

from __future__ import annotations

from pathlib import Path

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job import atomic

FOLDER, SUMMARY = "rehearsals", "summary.json"
SAVES = "saves_on_signal"  # true, false; null: not shown


def saves_doubt(definition: StackDefinition, root: Path) -> str:
    """A warning that no rehearsal here has shown the declared job.stop.saves; empty where the newest that tells has."""
    config = definition.job.parameters
    if config.code_folders() or not config.saves_on_signal:  # ours is known to
        return ""
    found = sorted((root / FOLDER / definition.name).glob(f"*/{SUMMARY}"), key=lambda path: path.stat().st_mtime)
    told = [saves for path in found if (saves := (atomic.read_object(path) or {}).get(SAVES)) is not None]
    if told and told[-1]:
        return ""
    why = "the newest rehearsal saw it save nothing" if told else "no rehearsal here has shown it"
    return (
        f"job.stop.saves is true, and {why}: where the script saves nothing on a signal, each notice costs what it has"
        f" trained since its last checkpoint. `gpufleet rehearse {definition.name}` tells"
    )
