"""The table of training frameworks: what each one saves, prints and does on a signal (frameworks.yaml)."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from gpufleet.infra.discover.reach import Reach
from gpufleet.infra.discover.start import StartedProgram
from gpufleet.job.kind.command import FORMATS, FormatName


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Framework:
    """A row of frameworks.yaml, which explains the keys."""

    name: str
    resumes: str
    on_signal: str
    source: str
    version: str
    imports: tuple[str, ...] = ()
    uses: tuple[str, ...] = ()
    programs: tuple[str, ...] = ()
    form: str = ""
    format: FormatName | None = None
    each: tuple[str, ...] = ()
    each_step: tuple[str, ...] = ()
    complete: str = ""
    rewritten: bool = False
    named: bool = False
    folder: str = ""
    inside: str = ""  # the setting that names the folder of the checkpoints themselves
    moved_by: str = ""  # the keyword with which a script puts `folder` elsewhere
    mutes: str = ""  # what prints no line into a pipe, in place of the lines of `progress`
    also: tuple[str, ...] = ()
    out: tuple[str, ...] = ()
    steps: tuple[str, ...] = ()
    epochs: tuple[str, ...] = ()
    every: tuple[str, ...] = ()
    every_epochs: tuple[str, ...] = ()
    work_epochs: int | None = None  # what the framework trains if no setting says it
    every_count: int | None = None
    progress: tuple[str, ...] = ()
    needs: str = ""
    resume: str = ""
    begin_anew: tuple[str, ...] = ()
    counts_tokens: tuple[str, ...] = ()  # empty in a row of `framework_of` if the command counts steps or epochs
    naming: str = ""  # the setting or keyword that names a checkpoint
    resume_setting: str = ""
    restores: tuple[str, ...] = ()  # functions that a script calls if the script itself looks for a checkpoint
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The row's own patterns of printed lines, or else those of its checkpoint format."""
        return self.progress or (FORMATS[self.format].progress if self.format else ())


@cache
def frameworks() -> tuple[Framework, ...]:
    """All rows of frameworks.yaml, in the order in which they are tried."""
    rows: list[dict[str, Any]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    all_rows = []
    for row in rows:
        typed: dict[str, Any] = {key: tuple(value) if isinstance(value, list) else value for key, value in row.items()}
        all_rows.append(Framework(**typed))
    return tuple(all_rows)


def framework_of(reach: Reach | None, start: StartedProgram) -> Framework | None:
    """The first row whose program the command starts, or whose module the reached code imports and uses; None if no row
    fits. If a script only uses a framework, the row comes without the settings and words of the framework's program.
    """
    for row in frameworks():
        if start.program in row.programs or (start.words[:1] and start.program.partition(".")[0] in row.programs):
            command = set(start.words[:1])
            by_tokens = tuple(command & set(row.counts_tokens))
            return replace(row, resume="" if command & set(row.begin_anew) else row.resume, counts_tokens=by_tokens)
    if reach is None:
        return None
    distances = {row: _distance(reach, row) for row in frameworks()}
    near = sorted((far, index, row) for index, (row, far) in enumerate(distances.items()) if far is not None)
    nearest = near[0][2] if near else None
    return replace(nearest, form="", resume="") if nearest is not None and nearest.programs else nearest


def _distance(reach: Reach, row: Framework) -> int | None:
    """The distance from the start at which a used framework is imported; None if the framework is not used."""
    if row.uses and not any(_is_used(reach, row, name) for name in row.uses):
        return None
    distances = [
        far for module, far in reach.imported.items() for name in row.imports if f"{module}.".startswith(f"{name}.")
    ]
    for index, file in enumerate(reach.files):  # the folder may be the framework's own repository
        if file.removeprefix("src/").split("/")[0] in row.imports:
            distances.append(index)
    return min(distances, default=None)


def _is_used(reach: Reach, row: Framework, name: str) -> bool:
    """Whether the code calls a name of the framework or inherits from it. The same name of another package does not
    count: torch.save is not torch.distributed.checkpoint.save.
    """
    module, _, last = name.rpartition(".")
    if module:
        return any(f"{reach.full_name(site)}.".startswith(f"{module}.") for site in reach.by_name.get(last, ()))
    owners = [imported for imported in reach.imported if imported.endswith(f".{name}")]
    is_own = not owners or any(owner.startswith(wanted) for owner in owners for wanted in row.imports)
    return is_own and (name in reach.by_name or name in reach.based_on)
