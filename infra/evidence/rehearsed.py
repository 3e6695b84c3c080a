"""Reads those results of a stack's rehearsals that the bill uses, from their summary.json."""

from __future__ import annotations

from pathlib import Path

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.job import atomic

FOLDER, SUMMARY = "rehearsals", "summary.json"
SAVES = "saves_on_signal"  # true or false; null if the rehearsal did not show it


def saves_doubt(definition: StackDefinition, root: Path) -> str:
    """A warning that no rehearsal on this machine has confirmed the declared job.stop.saves; empty if the newest
    rehearsal that tested it confirms it.
    """
    config = definition.job.parameters
    if config.code_folders() or not config.saves_on_signal:  # ready-made jobs always save
        return ""
    summaries = sorted((root / FOLDER / definition.name).glob(f"*/{SUMMARY}"), key=lambda path: path.stat().st_mtime)
    results = [saves for path in summaries if (saves := (atomic.read_object(path) or {}).get(SAVES)) is not None]
    if results and results[-1]:
        return ""
    why = "in the newest rehearsal it saved nothing" if results else "no rehearsal here has shown it"
    return (
        f"job.stop.saves is true, and {why}: if the script saves nothing on a signal, each notice costs what it has"
        f" trained since its last checkpoint. `gpufleet rehearse {definition.name}` checks it"
    )
