"""A rehearsal without the user's script, for a command that needs a GPU. A stand-in prints steps and writes files with
the declared names, sizes and pace. Such a rehearsal tests the definition file, not the script.
"""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import cast

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.yaml_tree import Mapping, merge, read
from gpufleet.job.kind.command import CommandConfig
from gpufleet.rehearsal.standins import command

STEPS, TRAINS_S = 200, 45.0  # steps and seconds of a training; long enough for two interruptions
# bytes of the largest checkpoint that the stand-in writes, because several must fit on a laptop
MOST_BYTES = 200_000_000
LINE = r"plumbing step (?P<step>\d+)"


def stand_in(definition: StackDefinition, folder: Path, tree: Mapping) -> Mapping:
    """A command's definition in which a stand-in replaces the command. The stand-in's code is written into `folder`."""
    config = cast(CommandConfig, definition.job.parameters)
    every, pace_s = config.checkpoint.every, TRAINS_S / STEPS
    settings = {
        "names": config.names,
        "complete": config.complete,
        "bytes": round(min((config.checkpoint.size_gb or 0.01) * 1e9, MOST_BYTES)),
        "steps": STEPS,
        "every": min(every.steps or STEPS, STEPS // 5) if config.saves else STEPS + 1,
        "pace_s": pace_s,
        "saves": config.saves_on_signal is True,
        "signal": config.stop.signal,
    }
    folder.mkdir(parents=True)
    shutil.copy(Path(command.__file__), folder / "command.py")
    (folder / "told.json").write_text(json.dumps(settings), encoding="utf-8")
    job = {
        "code": {"folder": str(folder.resolve())},
        "command": f"python3 command.py {config.checkpoint.folder}",
        "progress": {"stdout": LINE},
        "work": {"steps": STEPS},
        "device": "cpu",
    }
    checkpoint = {"every": {"steps": settings["every"]}} if config.saves else {"format": "none"}
    bare = _drop_keys(tree, "job", "code", "workdir", "setup", "resume", "progress", "work")
    bare = _drop_keys(bare, "job.checkpoint", "every")
    overlay = {"job": {**job, "checkpoint": checkpoint}, "estimate": {"step_ms": [round(pace_s * 1000)]}}
    merged = merge(bare, read(json.dumps(overlay)))
    assert isinstance(merged, Mapping)
    return merged


def _drop_keys(tree: Mapping, path: str, *keys: str) -> Mapping:
    """Removes these keys of the section at `path` from the definition."""
    first, _, rest = path.partition(".")
    section = tree.entries.get(first)
    if not isinstance(section, Mapping):
        return tree
    entries = {key: node for key, node in section.entries.items() if key not in keys}
    changed = _drop_keys(section, rest, *keys) if rest else replace(section, entries=entries)
    return replace(tree, entries={**tree.entries, first: changed})
