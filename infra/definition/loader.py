"""Reads, checks and pins definition files. Only here does `stacks/<experiment>.yaml` become a StackDefinition.

Program, commands and tests all load here. Each load validates the whole file: as it is written, with the values of its
`rehearsal`, and with those of each scenario. The loader reports all problems at once.
"""

from __future__ import annotations

import re
from collections import abc
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from gpufleet.infra.definition import layers
from gpufleet.infra.definition.checks import check_account
from gpufleet.infra.definition.model import Account, StackDefinition
from gpufleet.infra.definition.schema import Findings, build, nearest
from gpufleet.infra.definition.yaml_tree import Mapping, Node, Scalar, dump, open_file
from gpufleet.infra.errors import SHOWN, DefinitionError, GpufleetError, Problem, in_order, of_form

if TYPE_CHECKING:
    from gpufleet.infra.catalog import Catalog

STACK_NAME = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")
# Names of what `gpufleet init` writes beside the definitions: the folders of the Pulumi program and of the canary's
# script, and the schema for editors.
PROGRAM, CANARY, SCHEMA = "stacks/program", "stacks/canary", "stacks/definition.schema.json"
TRIALS = ".gpufleet/trials"  # definitions that a campaign or a bake makes; git ignores them
_TOP_KEY = re.compile(rb"(?m)^['\"]?(\w[\w.-]*)['\"]?[ \t]*:")
_SECTIONS = {"run", "job", "fleet", "limits"}  # the sections that every definition must have


def load(
    path: Path,
    *,
    now: datetime,
    rehearsal: bool = False,
    past_deadline: bool = False,
    catalog: Catalog | None = None,
    staged: bool = False,
) -> StackDefinition:
    """The definition in `path`; if `rehearsal`, with the values of this section. A file with stages is refused unless
    the caller says by `staged` that it can handle them. The deadline is compared with `now`, which must have a time
    zone. If `past_deadline`, the deadline may have passed, for a run that is already over. `catalog` has the existing
    types and regions; None stands for the catalog of this project. Raises DefinitionError with every problem of the
    file.
    """
    return load_all(path, now=now, rehearsal=rehearsal, past_deadline=past_deadline, catalog=catalog, staged=staged)[0]


def load_all(
    path: Path,
    *,
    now: datetime,
    rehearsal: bool = False,
    past_deadline: bool = False,
    catalog: Catalog | None = None,
    staged: bool = False,
) -> tuple[StackDefinition, tuple[StackDefinition, ...]]:
    """The result of `load`, and the definition of every scenario, in order. A scenario need not be launchable: its
    types need only be known.
    """
    if now.tzinfo is None:
        raise ValueError("`now` must have a time zone")
    text, tree = open_file(path)
    problems = _name_problems(path)
    plain, wrong = layers.definition(tree, path, text, now, past_deadline, catalog=catalog)
    problems += wrong
    overlay = tree.entries.get("rehearsal")
    merged, sound = plain, None if problems else plain
    # these problems must be fixed first; checks of the rehearsal and the scenarios would report all of them again
    if len(problems) > SHOWN:
        raise DefinitionError(str(path), in_order(problems))
    if overlay is not None:
        problems += layers.overlay_problems(overlay, tree)
    if (laid := layers.rehearsed(tree)) is not tree:
        merged, wrong = layers.definition(laid, path, text, now, past_deadline, catalog=catalog, plain=sound)
        problems += of_form("rehearsal", wrong)
    variants, wrong = layers.variants(tree, path, text, now, catalog, sound)
    problems += wrong
    if problems:
        raise DefinitionError(str(path), in_order(problems))
    chosen = merged if rehearsal else plain
    if chosen.stages and not staged:
        named = ", ".join(stage.run.id for stage in chosen.stages)
        raise GpufleetError(f"{path} has stages, but this takes a single job. Commands with --run take one of {named}")
    return chosen, tuple(variants)


def tagged(definition: StackDefinition, tags: abc.Mapping[str, str]) -> StackDefinition:
    """The definition with `tags` added to those of its `account`. Raises DefinitionError for an invalid tag."""
    merged = {**(definition.account.tags or {}), **tags}
    entries: dict[str, Node] = {
        key: Scalar(path=f"account.tags.{key}", line=0, text=str(value)) for key, value in merged.items()
    }
    tree = Mapping(path="", line=0, entries={"tags": Mapping(path="account.tags", line=0, entries=entries)})
    findings = Findings(tree=Mapping(path="", line=0, entries={"account": tree}))
    account = build(Account, tree, "account", findings, definition.account)
    check_account(account, definition.fleet, findings)
    if findings.problems:
        raise DefinitionError(f"{definition.source}, with the tags that the program adds", findings.problems)
    return replace(definition, account=account)


def find(name_or_path: str, root: Path) -> Path:
    """`stacks/<name>.yaml` under `root`, the campaign's trial with this name, or the file at this path. If there is
    none, raises GpufleetError with the nearest name.
    """
    if is_path(name_or_path):
        # the root is tried too, because the program's working directory is infra/
        for path in (Path(name_or_path), root / name_or_path):
            if path.is_file():
                return path
        meant = Path(name_or_path).name.removesuffix(".yaml").removesuffix(".yml")
        there = (root / "stacks" / f"{meant}.yaml").is_file()
        hint = f"; stacks/{meant}.yaml is there: write {meant}" if there else ""
        if Path(name_or_path).is_dir():
            raise GpufleetError(f"{name_or_path} is a folder, but a stack is one file{hint or ': name the file'}")
        raise GpufleetError(f"there is no file {name_or_path}{hint}")
    path = root / "stacks" / f"{name_or_path}.yaml"
    for file in (path, root / TRIALS / path.name):
        if file.is_file():
            return file
    if path.exists():
        raise GpufleetError(f"{path} is a folder or device, but a stack is a file: move it away")
    if path.with_suffix(".yml").is_file():
        raise GpufleetError(f"stacks/{name_or_path}.yml has the wrong ending: rename it to {name_or_path}.yaml")
    names = stacks_of(root)
    message = f"there is no stack {name_or_path!r}; stacks/ has {', '.join(names)}. {nearest(name_or_path, names)}"
    raise GpufleetError(message.rstrip())


def is_path(stack: str) -> bool:
    """Whether `name_or_path` is the path of a file, not the name of a stack."""
    return stack.endswith((".yaml", ".yml")) or "/" in stack


def stacks_of(root: Path) -> list[str]:
    """The names of the stacks in `stacks/`. Raises GpufleetError if there is none."""
    if names := names_of(root):
        return names
    raise GpufleetError(f"there is no stacks/ folder with definition files in {root}; run this inside the project")


def names_of(root: Path) -> list[str]:
    """The names of the stacks in `stacks/`, without hidden files, such as macOS's `._name.yaml`, and files of other
    tools.
    """
    files = (file for file in (root / "stacks").glob("[!.]*.yaml") if file.is_file())
    return sorted(file.stem for file in files if is_definition(file.read_bytes()))


def is_definition(content: bytes) -> bool:
    """Whether a file of `stacks/` is meant as a definition: it has one of the required sections, or no keys at its top
    level. (Another tool may have a folder of this name.)
    """
    keys = {key.decode(errors="replace") for key in _TOP_KEY.findall(content)}
    return not keys or bool(keys & _SECTIONS)


def of_project(root: Path) -> re.Pattern[str]:
    """A pattern for the names, relative to the project `root`, of gpufleet's own files: definitions, and files that its
    commands wrote. These files are not part of the training code, even if it lies in the same folder.
    """
    stacks = "|".join(map(re.escape, names_of(root))) or "(?!)"
    campaigns = "|".join(re.escape(path.stem) for path in (root / "campaigns").glob("*.yaml")) or "(?!)"
    return re.compile(
        rf"(campaigns/({campaigns})(\.yaml$|/)|(receipts|results)/({campaigns})(-[0-9a-z-]+)?/)"
        rf"|(\.gpufleet|rehearsals|prices/\d{{4}}-[\d-]+|{PROGRAM}|{CANARY}|(calibrations|receipts|results)/({stacks}))/"
        rf"|stacks/({stacks})\.yaml$|{re.escape(SCHEMA)}$|traces/[^/]+\.(csv|json)$|policy\.yaml$"
        r"|bakes/ami-[^/]+\.json$|Pulumi(\.[^/]+)?\.yaml$|\.github/workflows/gpufleet-"
    )


def project_root(start: Path) -> Path:
    """The nearest folder at or above `start` that has `stacks/`; `start` itself if there is none."""
    for folder in (start, *start.parents):
        if (folder / "stacks").is_dir():
            return folder
    return start


def rehearsal_text(path: Path, root: Path | None = None, *, changed: Callable[[Mapping], Mapping] | None = None) -> str:
    """The text of the file in its form as a rehearsal: its sections with `rehearsal` merged into them, except
    `interruptions`. `root`: the project to which folders of code and inputs are relative; if given, they get full
    paths. `changed`: a function that changes the merged tree.
    """
    text, tree = open_file(path)
    merged = layers.rehearsed(tree)
    if changed is not None:
        merged = changed(merged)
    overlay = tree.entries.get("rehearsal")
    entries = {name: node for name, node in merged.entries.items() if name != "scenarios"}
    if isinstance(fleet := entries.get("fleet"), Mapping):  # a baked AMI does not exist in the embedded account
        keys = {name: node for name, node in fleet.entries.items() if name != "baked_ami"}
        entries["fleet"] = replace(fleet, entries=keys)
    if isinstance(overlay, Mapping) and "interruptions" in overlay.entries:
        entries["rehearsal"] = replace(overlay, entries={"interruptions": overlay.entries["interruptions"]})
    else:
        entries.pop("rehearsal", None)
    if root is not None:
        entries = dict(layers.from_anywhere(replace(merged, entries=entries), root).entries)
    heading = "".join(f"# {line}".rstrip() + "\n" for line in layers.purpose(text).splitlines())
    return heading + "\n" + dump(replace(merged, entries=entries))


def _name_problems(path: Path) -> list[Problem]:
    if STACK_NAME.fullmatch(path.stem):
        return []
    allowed = "2 to 40 of a-z, 0-9 and inner hyphens, starting with a letter (it names the bucket)"
    return [Problem(path="the file's name", value=path.stem, allowed=allowed)]
