"""Reads, checks and pins definition files: the one way from `stacks/<experiment>.yaml` to a StackDefinition.

Program, CLI and tests all load through here. Every load validates the whole file, as written, with its `rehearsal`
section laid over it and with each of its `scenarios`, and reports the problems of all at once.
"""

from __future__ import annotations

import difflib
import re
import shlex
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from infra import checks
from infra.boot import user_data
from infra.definition import Interruptions, StackDefinition
from infra.errors import DefinitionError, GpufleetError, Problem, in_order, of_form
from infra.run_guard import timer_seconds
from infra.schema import SECTIONS, Findings, build, check_keys
from infra.yaml_tree import Mapping, Node, Scalar, UnreadableError, at, decode, dump, merge, read

if TYPE_CHECKING:
    from infra.catalog import Catalog

STACK_NAME = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")
# What `rehearsal` may lay over; the run's identity is not among them.
OVERLAID = ("job", "fleet", "storage", "limits", "estimate")


def load(
    path: Path,
    *,
    now: datetime,
    rehearsal: bool = False,
    past_deadline: bool = False,
    catalog: Catalog | None = None,
) -> StackDefinition:
    """The definition in `path`, with its `rehearsal` section laid over it when asked.

    `now` (aware) is what the deadline is compared with. `past_deadline` accepts one that has passed: for a run that is
    already over. `catalog`: the types and regions that there are; None: those known here. Raises DefinitionError with
    every problem of the file.
    """
    if now.tzinfo is None:
        raise ValueError("now must be aware of its time zone")
    text, tree = open_file(path)
    problems = _name_problems(path)
    plain, found = definition(tree, path, text, now, past_deadline, catalog=catalog)
    problems += found
    overlay = tree.entries.get("rehearsal")
    merged = plain
    if overlay is not None:
        problems += _overlay_problems(overlay)
        merged, found = definition(_overlaid(tree), path, text, now, past_deadline, catalog=catalog)
        problems += of_form("rehearsal", found)
    from infra.scenarios import made  # here: it stands on this module

    problems += made(tree, path, text, now, catalog)[1]
    if problems:
        raise DefinitionError(str(path), in_order(problems))
    return merged if rehearsal else plain


def find(name_or_path: str, root: Path) -> Path:
    """`stacks/<name>.yaml` under `root`, or the file at a path. Raises GpufleetError naming the nearest."""
    if name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        for path in (Path(name_or_path), root / name_or_path):  # the program's working directory is infra/
            if path.is_file():
                return path
        meant = Path(name_or_path).name.removesuffix(".yaml").removesuffix(".yml")
        there = (root / "stacks" / f"{meant}.yaml").is_file()
        hint = f"; stacks/{meant}.yaml is there: write {meant}" if there else ""
        raise GpufleetError(f"there is no file {name_or_path}{hint}")
    path = root / "stacks" / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    if path.exists():
        raise GpufleetError(f"{path} is a folder or device, not a file; a stack is one file: move it away")
    names = names_of(root)
    if not names:
        raise GpufleetError(f"there is no stacks/ folder with definition files in {root}; run this inside the project")
    close = difflib.get_close_matches(name_or_path, names, n=1)
    raise GpufleetError(
        f"there is no stack {name_or_path!r}; stacks/ has {', '.join(names)}."
        + (f" Nearest: {close[0]}." if close else "")
    )


def argument_of(source: Path, root: Path) -> str:
    """What a command takes for this file: its name in `stacks/`, else its path."""
    shared = source.resolve() == (root / "stacks" / f"{source.stem}.yaml").resolve()
    return source.stem if shared else shlex.quote(str(source))


def names_of(root: Path) -> list[str]:
    """The stacks of `stacks/`, by name."""
    return sorted(file.stem for file in (root / "stacks").glob("*.yaml") if file.is_file())


def project_root(start: Path) -> Path:
    """The nearest folder at or above `start` that holds `stacks/`; `start` itself when there is none."""
    for folder in (start, *start.parents):
        if (folder / "stacks").is_dir():
            return folder
    return start


def rehearsal_text(path: Path) -> str:
    """The file as a rehearsal sees it, as text: the merged form, with only `interruptions` left of its `rehearsal`."""
    text, tree = open_file(path)
    merged = _overlaid(tree)
    overlay = tree.entries.get("rehearsal")
    entries = {name: node for name, node in merged.entries.items() if name != "scenarios"}
    if isinstance(overlay, Mapping) and "interruptions" in overlay.entries:
        entries["rehearsal"] = replace(overlay, entries={"interruptions": overlay.entries["interruptions"]})
    else:
        entries.pop("rehearsal", None)
    heading = "".join(f"# {line}".rstrip() + "\n" for line in _purpose(text).splitlines())
    return heading + "\n" + dump(replace(merged, entries=entries))


def not_ready(definition: StackDefinition, root: Path) -> list[str]:
    """What `pulumi up` needs first, one sentence each. Not errors: the bill and the preview work without."""
    name, sentences = argument_of(definition.source, root), []
    if definition.fleet.ami == "unpinned":
        sentences.append(f"fleet.ami is unpinned: run `gpufleet doctor {name} --pin`.")
    if "@sha256:" not in definition.job.image:
        sentences.append(f"job.image has a tag but no digest: run `gpufleet doctor {name} --pin`.")
    dataset = definition.storage.dataset
    if not dataset.startswith("s3://") and (reason := _unprepared(root / dataset)):
        sentences.append(f"storage.dataset, {dataset}, {reason}: run `gpufleet prepare {name}`.")
    elif not dataset.startswith("s3://"):
        from infra.prepared import command, dataset_differs  # here: most callers never have a local dataset

        if reason := dataset_differs(definition, root):
            sentences.append(f"storage.dataset, {dataset}, {reason}: run `{command(definition, name)}`.")
    weights, folder = definition.storage.base_weights, weights_folder(definition, root)
    if folder is not None:
        if not folder.is_dir():
            sentences.append(f"storage.base_weights, {weights}, is not there: download the weights into that folder.")
        elif reason := _unlisted(folder):
            sentences.append(f"storage.base_weights, {weights}: {reason}.")
        else:
            from infra.prepared import weights_differ  # here: most callers have none

            if reason := weights_differ(definition, root):
                sentences.append(
                    f"storage.base_weights, {weights}, are of another model: {reason}. Make job.parameters.model agree,"
                    " or name other weights."
                )
    return sentences


def weights_folder(definition: StackDefinition, root: Path) -> Path | None:
    """None: without base weights, or they are in a bucket."""
    place = definition.storage.base_weights
    return None if place is None or place.startswith("s3://") else root / place


def _unlisted(folder: Path) -> str:
    """Why these weights cannot be declared yet, or nothing."""
    from job.dataset import weights  # here: most callers have none

    try:
        weights.read(folder)
    except ValueError as error:
        return str(error)
    return ""


def _unprepared(folder: Path) -> str:
    """Why the folder is not a prepared dataset, or nothing. Its files are hashed by whoever uploads them, not here."""
    if not (folder / "dataset.json").is_file():
        return "is not prepared"
    from job.dataset.prepare import read_manifest  # here: most callers never have a local dataset

    try:
        manifest = read_manifest(folder)
    except ValueError as error:
        return f"is damaged ({error})"
    for file in manifest.files:
        place = folder / file.name
        if not place.is_file() or place.stat().st_size != file.bytes:
            return f"is incomplete ({file.name})"
    return ""


def definition(
    tree: Mapping,
    path: Path,
    text: str,
    now: datetime,
    past_deadline: bool,
    *,
    launchable: bool = True,
    catalog: Catalog | None = None,
) -> tuple[StackDefinition, list[Problem]]:
    findings = Findings(tree=tree)
    check_keys(tree.entries, [*SECTIONS, "rehearsal", "scenarios"], "", findings)
    parts = {name: build(cls, tree.entries.get(name), name, findings) for name, cls in SECTIONS.items()}
    interruptions = build(Interruptions, at(tree, "rehearsal.interruptions"), "rehearsal.interruptions", findings)
    sections = checks.Sections(**parts)
    known = catalog or _catalog()
    checks.check(sections, findings, now=now, catalog=known, past_deadline=past_deadline, launchable=launchable)
    definition = StackDefinition(
        name=path.stem, source=path, purpose=_purpose(text), interruptions=interruptions, tree=tree, **parts
    )
    _user_data(definition, findings)
    return definition, findings.problems


def _user_data(definition: StackDefinition, findings: Findings) -> None:
    """The node's script must fit EC2's limit with this file's values."""
    if findings.bad & {"run.id", "job.image", "fleet.region", "limits.max_hours"}:
        return
    disk = definition.storage.data
    try:
        user_data.check_size(
            stack=definition.name,
            run_id=definition.run.id,
            region=definition.fleet.region,
            image=definition.job.image,
            timer_seconds=timer_seconds(definition),
            data_volume=None if disk is None else "snapshot" if disk.snapshot else "blank",
        )
    except DefinitionError as error:
        for problem in error.problems:
            findings.add(problem.path, problem.allowed, problem.hint)


def _catalog() -> Catalog:
    from infra.catalog import load_catalog  # here: reading tables costs time that `pin` need not spend

    return load_catalog()


def _overlaid(tree: Mapping) -> Mapping:
    """The tree with the sections of `rehearsal` laid over; `rehearsal` itself stays, for its interruptions."""
    overlay = tree.entries.get("rehearsal")
    return over(tree, overlay.entries) if isinstance(overlay, Mapping) else tree


def over(tree: Mapping, overlay: dict[str, Node]) -> Mapping:
    """The tree with the sections that may be laid over it."""
    entries: dict[str, Node] = dict(tree.entries)
    for name in OVERLAID:
        if name in overlay:
            entries[name] = merge(entries.get(name), _laid_over(name, overlay[name]))
    return replace(tree, entries=entries)


def _laid_over(section: str, overlay: Node) -> Node:
    """Of `job` only the parameters: the rehearsal runs the same experiment in the same image."""
    if section != "job" or not isinstance(overlay, Mapping):
        return overlay
    return replace(overlay, entries={key: node for key, node in overlay.entries.items() if key == "parameters"})


def _overlay_problems(overlay: Node) -> list[Problem]:
    allowed = [*OVERLAID, "interruptions"]
    findings = Findings(tree=Mapping(path="", line=overlay.line, entries={"rehearsal": overlay}))
    if not isinstance(overlay, Mapping):
        if not (isinstance(overlay, Scalar) and overlay.is_null):
            findings.add("rehearsal", "a section with the keys " + ", ".join(allowed))
        return findings.problems
    check_keys(overlay.entries, allowed, "rehearsal", findings)
    job = overlay.entries.get("job")
    if isinstance(job, Mapping):
        check_keys(job.entries, ["parameters"], "rehearsal.job", findings)
    return findings.problems


def _name_problems(path: Path) -> list[Problem]:
    if STACK_NAME.fullmatch(path.stem):
        return []
    allowed = "2 to 40 of a-z, 0-9 and inner hyphens, starting with a letter (it names the bucket)"
    return [Problem(path="the file's name", value=path.stem, allowed=allowed)]


def open_file(path: Path) -> tuple[str, Mapping]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GpufleetError(f"{path} cannot be read: {error.strerror}") from None
    return parse(raw, path)


def parse(raw: bytes, path: Path) -> tuple[str, Mapping]:
    try:
        text = decode(raw)
        return text, read(text)
    except UnreadableError as error:
        raise DefinitionError(str(path), error.problems) from None


def _purpose(text: str) -> str:
    """The comment block that opens the file, without its marks."""
    block = []
    for line in text.lstrip("\ufeff").splitlines():
        if not line.startswith("#"):
            break
        block.append(line.lstrip("#").strip())
    return "\n".join(block)
