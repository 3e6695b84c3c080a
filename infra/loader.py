"""Reads, checks and pins definition files: the one way from `stacks/<experiment>.yaml` to a StackDefinition.

Program, CLI and tests all load through here. Every load validates the file twice, as written and with its `rehearsal`
section laid over it, and reports the problems of both at once; `scenarios` are validated by who asks for them.
"""

from __future__ import annotations

import difflib
import os
import re
import tempfile
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from infra import checks
from infra.boot import user_data
from infra.definition import Interruptions, StackDefinition, Variant
from infra.errors import DefinitionError, GpufleetError, Problem
from infra.run_guard import timer_seconds
from infra.schema import SECTIONS, Findings, build, check_keys
from infra.yaml_tree import Mapping, Node, Scalar, UnreadableError, at, decode, dump, merge, read

if TYPE_CHECKING:
    from infra.catalog import Catalog

STACK_NAME = re.compile(r"[a-z][a-z0-9-]{0,38}[a-z0-9]")
SCENARIO_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")
OVERLAID = (
    "job",
    "fleet",
    "storage",
    "limits",
    "estimate",
)  # what `rehearsal` may lay over; the run's identity is not among them


def load(
    path: Path, *, now: datetime, rehearsal: bool = False, past_deadline: bool = False, scenario: str | None = None
) -> StackDefinition:
    """The definition in `path`, with its `rehearsal` section or one of its scenarios laid over it when asked.

    `now` (aware) is what the deadline is compared with. `past_deadline` accepts one that has passed: for a run that is
    already over. Raises DefinitionError with every problem of the file; GpufleetError for a scenario that is not in it
    or is only there to be priced.
    """
    plain, merged, _ = _loaded(path, now, past_deadline, every_scenario=False)
    if scenario is not None:
        return _scenario(path, scenario, now, past_deadline)
    return merged if rehearsal else plain


def scenarios(path: Path, *, now: datetime) -> tuple[StackDefinition, ...]:
    """The entries of the file's `scenarios` section, in order, each laid over the file. None may be launchable as it
    is. Raises DefinitionError with every problem of the file.
    """
    return _loaded(path, now, True, every_scenario=True)[2]


def _loaded(
    path: Path, now: datetime, past_deadline: bool, *, every_scenario: bool
) -> tuple[StackDefinition, StackDefinition, tuple[StackDefinition, ...]]:
    """(as written, as rehearsed, scenarios). Those are checked only when asked for: they do not change the others."""
    if now.tzinfo is None:
        raise ValueError("now must be aware of its time zone")
    text, tree = _open(path)
    problems = _name_problems(path)
    plain, found = _definition(tree, path, text, now, past_deadline)
    problems += found
    variants: list[StackDefinition] = []
    section = tree.entries.get("scenarios")
    if every_scenario and section is not None:
        variants, found = _scenarios(section, tree, path, text, now)
        problems += found
    overlay = tree.entries.get("rehearsal")
    merged = plain
    if overlay is not None:
        problems += _overlay_problems(overlay)
        merged, found = _definition(_overlaid(tree), path, text, now, past_deadline)
        problems += found
    if problems:
        unique = sorted(dict.fromkeys(problems), key=lambda problem: problem.line or 0)
        raise DefinitionError(str(path), unique)
    return plain, merged, tuple(variants)


def find(name_or_path: str, root: Path) -> Path:
    """`stacks/<name>.yaml` under `root`, or the file at a path. Raises GpufleetError naming the nearest."""
    if name_or_path.endswith((".yaml", ".yml")) or "/" in name_or_path:
        for path in (Path(name_or_path), root / name_or_path):  # the program's working directory is infra/
            if path.is_file():
                return path
        raise GpufleetError(f"there is no file {name_or_path}")
    path = root / "stacks" / f"{name_or_path}.yaml"
    if path.is_file():
        return path
    names = sorted(file.stem for file in (root / "stacks").glob("*.yaml"))
    if not names:
        raise GpufleetError(f"there is no stacks/ folder with definition files in {root}; run this inside the project")
    close = difflib.get_close_matches(name_or_path, names, n=1)
    raise GpufleetError(
        f"there is no stack {name_or_path!r}; stacks/ has {', '.join(names)}."
        + (f" Nearest: {close[0]}." if close else "")
    )


def project_root(start: Path) -> Path:
    """The nearest folder at or above `start` that holds `stacks/`; `start` itself when there is none."""
    for folder in (start, *start.parents):
        if (folder / "stacks").is_dir():
            return folder
    return start


def rehearsal_text(path: Path) -> str:
    """The file as a rehearsal sees it, as text: the merged form, with only `interruptions` left of its `rehearsal`."""
    text, tree = _open(path)
    merged = _overlaid(tree)
    overlay = tree.entries.get("rehearsal")
    entries = {name: node for name, node in merged.entries.items() if name != "scenarios"}
    if isinstance(overlay, Mapping) and "interruptions" in overlay.entries:
        entries["rehearsal"] = replace(overlay, entries={"interruptions": overlay.entries["interruptions"]})
    else:
        entries.pop("rehearsal", None)
    heading = "".join(f"# {line}".rstrip() + "\n" for line in _purpose(text).splitlines())
    return heading + "\n" + dump(replace(merged, entries=entries))


def pin(path: Path, *, ami: str, image: str) -> None:
    """Writes the AMI and the image with its digest into the file; every other byte stays. Atomic.

    Raises DefinitionError when the file is not plain enough for that (a folded value, a key that is not there).
    """
    target = path.resolve()
    text, tree = _open(target)
    edits: list[tuple[int, int, str]] = []
    problems: list[Problem] = []
    for where, value, example in (("fleet.ami", ami, "unpinned"), ("job.image", image, "registry/repository:tag")):
        node = at(tree, where)
        if not isinstance(node, Scalar):
            section, _, key = where.partition(".")
            hint = f"Add the line `{key}: {example}` under `{section}:`, then pin again."
            problems.append(Problem(path=where, value="", allowed="a value to replace", hint=hint))
        elif node.style in ("|", ">"):
            hint = f"Write `{where.partition('.')[2]}: {example}` on one line, then pin again."
            problems.append(Problem(path=where, value=node.text.strip(), allowed="one line", hint=hint, line=node.line))
        else:
            quote = node.style or ""
            blank = " " if node.start == node.end and text[node.start - 1 : node.start] == ":" else ""  # `ami:` alone
            edits.append((node.start, node.end, f"{blank}{quote}{value}{quote}"))
    if problems:
        raise DefinitionError(str(path), problems)
    pinned = text
    for start, end, value in sorted(edits, reverse=True):
        pinned = pinned[:start] + value + pinned[end:]
    _, again = _parse(pinned.encode(), path)
    written = [
        node.text if isinstance(node, Scalar) else None for node in (at(again, "fleet.ami"), at(again, "job.image"))
    ]
    assert written == [ami, image], written
    if pinned != text:
        _replace(target, pinned.encode())


def not_ready(definition: StackDefinition, root: Path) -> list[str]:
    """What `pulumi up` needs first, one sentence each. Not errors: the bill and the preview work without."""
    name, sentences = definition.name, []
    if definition.fleet.ami == "unpinned":
        sentences.append(f"fleet.ami is unpinned: run `gpufleet doctor {name} --pin`.")
    if "@sha256:" not in definition.job.image:
        sentences.append(f"job.image has a tag but no digest: run `gpufleet doctor {name} --pin`.")
    dataset = definition.storage.dataset
    if not dataset.startswith("s3://") and (reason := _unprepared(root / dataset)):
        sentences.append(f"storage.dataset, {dataset}, {reason}: run `gpufleet prepare {name}`.")
    weights = definition.storage.base_weights
    if weights and not weights.startswith("s3://"):
        if not (root / weights).is_dir():
            sentences.append(f"storage.base_weights, {weights}, is not there: download the weights into that folder.")
        elif reason := _unlisted(root / weights):
            sentences.append(f"storage.base_weights, {weights}: {reason}.")
    return sentences


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


def _scenario(path: Path, name: str, now: datetime, past_deadline: bool) -> StackDefinition:
    """One entry of `scenarios` as something to run: judged like the file itself."""
    found = {made.scenario: made for made in scenarios(path, now=now)}
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        raise GpufleetError(
            f"{path.name} has no scenario {name!r}; it has {', '.join(found) or 'none'}."
            + (f" Nearest: {close[0]}." if close else "")
        )
    variant = found[name].variant
    if variant.reference or variant.nodes > 1 or variant.hold_hours is not None:
        why = "ran elsewhere" if variant.reference else "is several nodes" if variant.nodes > 1 else "holds its node"
        raise GpufleetError(f"{path.name}: scenario {name} {why}: it is there for `gpufleet compare`, not to be run")
    text, tree = _open(path)
    section = tree.entries["scenarios"]  # `found` came from it
    assert isinstance(section, Mapping)
    entry = section.entries[name]
    over = entry.entries if isinstance(entry, Mapping) else {}
    definition, problems = _definition(_over(tree, over), path, text, now, past_deadline)
    if problems:
        raise DefinitionError(str(path), problems)
    return replace(definition, scenario=name, variant=variant)


def _scenarios(
    section: Node, tree: Mapping, path: Path, text: str, now: datetime
) -> tuple[list[StackDefinition], list[Problem]]:
    findings = Findings(tree=tree)
    if not isinstance(section, Mapping):
        if not (isinstance(section, Scalar) and section.is_null):
            findings.add("scenarios", "a section with one entry per scenario")
        return [], findings.problems
    own = [field.name for field in fields(Variant)]
    made, problems = [], []
    for name, entry in section.entries.items():
        where = f"scenarios.{name}"
        if not SCENARIO_NAME.fullmatch(name):
            findings.add(where, "a name of 1 to 40 of a-z, 0-9, dots and hyphens", node=entry)
            continue
        entries: dict[str, Node] = {}
        if isinstance(entry, Mapping):
            entries = entry.entries
        elif not (isinstance(entry, Scalar) and entry.is_null):
            findings.add(where, f"a section with the keys {', '.join([*own, *OVERLAID])}", node=entry)
        check_keys(entries, [*own, *OVERLAID], where, findings)
        kept = Mapping(path=where, line=entry.line, entries={key: node for key, node in entries.items() if key in own})
        variant = build(Variant, kept, where, findings)
        over = {key: node for key, node in entries.items() if key in OVERLAID}
        merged, found = _definition(_over(tree, over), path, text, now, True, launchable=False)
        problems += found
        made.append(replace(merged, scenario=name, variant=variant))
    return made, findings.problems + problems


def _definition(
    tree: Mapping, path: Path, text: str, now: datetime, past_deadline: bool, *, launchable: bool = True
) -> tuple[StackDefinition, list[Problem]]:
    findings = Findings(tree=tree)
    check_keys(tree.entries, [*SECTIONS, "rehearsal", "scenarios"], "", findings)
    parts = {name: build(cls, tree.entries.get(name), name, findings) for name, cls in SECTIONS.items()}
    interruptions = build(Interruptions, at(tree, "rehearsal.interruptions"), "rehearsal.interruptions", findings)
    sections = checks.Sections(**parts)
    checks.check(sections, findings, now=now, catalog=_catalog(), past_deadline=past_deadline, launchable=launchable)
    definition = StackDefinition(
        name=path.stem, source=path, purpose=_purpose(text), interruptions=interruptions, **parts
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
    return _over(tree, overlay.entries) if isinstance(overlay, Mapping) else tree


def _over(tree: Mapping, overlay: dict[str, Node]) -> Mapping:
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


def _open(path: Path) -> tuple[str, Mapping]:
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GpufleetError(f"{path} cannot be read: {error.strerror}") from None
    return _parse(raw, path)


def _parse(raw: bytes, path: Path) -> tuple[str, Mapping]:
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


def _replace(path: Path, raw: bytes) -> None:
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(raw)
        Path(name).chmod(path.stat().st_mode)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
