"""Builds definitions from a file's tree: one from the file as it is, one with the values of its `rehearsal`, and one
for each scenario.
"""

from __future__ import annotations

import io
import re
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpufleet.infra.definition import checks, stages
from gpufleet.infra.definition.model import Interruptions, StackDefinition, Variant
from gpufleet.infra.definition.schema import SECTIONS, Findings, build, check_keys, entries_of, job_keys
from gpufleet.infra.definition.yaml_tree import Items, Mapping, Node, Scalar, find_node, merge
from gpufleet.infra.errors import Problem, of_form

if TYPE_CHECKING:
    from gpufleet.infra.catalog import Catalog

# Sections that an overlay may change; the run's identity is not among them.
OVERLAID = ("job", "fleet", "storage", "limits", "goal", "account", "notify", "estimate")
# An editor finds the schema by this text, which a path or an address follows.
MODELINE = "# yaml-language-server: $schema="
MOST_SCENARIOS = 100  # the limit is our own, because each scenario is checked and priced like a whole file
SCENARIO_NAME = re.compile(r"[a-z0-9][a-z0-9.-]{0,39}")


def definition(
    tree: Mapping,
    path: Path,
    text: str,
    now: datetime,
    past_deadline: bool,
    *,
    launchable: bool = True,
    catalog: Catalog | None = None,
    plain: StackDefinition | None = None,
    earlier: stages.Earlier | None = None,
) -> tuple[StackDefinition, list[Problem]]:
    """Returns the tree's definition and its problems. If not `launchable`, its types need only be known. `plain`: the
    definition without the overlay, if it has no problems; its sections are reused where they are equal. `earlier`: for
    a stage, the stages before it. A stage gets only the part of the file's storage that its job takes.
    """
    if stages.STAGES in tree.entries:

        def build_stage(laid: Mapping, names: stages.Earlier) -> tuple[StackDefinition, list[Problem]]:
            return definition(
                laid, path, text, now, past_deadline, launchable=launchable, catalog=catalog, earlier=names
            )

        return stages.staged(tree, build_stage)
    findings = Findings(tree=tree)
    check_keys(tree.entries, [*SECTIONS, "rehearsal", "scenarios", stages.STAGES, stages.RERUN], "", findings)
    parts: dict[str, Any] = {}
    for name, cls in SECTIONS.items():
        node = tree.entries.get(name)
        is_plain = plain is not None and plain.tree is not None and plain.tree.entries.get(name) is node
        parts[name] = getattr(plain, name) if is_plain else build(cls, node, name, findings)
    # a scenario in another market does not use the file's block
    parts["fleet"] = parts["fleet"].bought_as(parts["fleet"].capacity)
    interruptions = build(
        Interruptions, find_node(tree, "rehearsal.interruptions"), "rehearsal.interruptions", findings
    )
    python = find_node(tree, "rehearsal.python")
    built = StackDefinition(
        name=path.stem,
        source=path,
        purpose=purpose(text),
        python=python.text if isinstance(python, Scalar) else "",
        interruptions=interruptions,
        tree=tree,
        **parts,
    )
    if earlier is not None:
        storage = built.storage.taken_by(built.job.parameters)
        built = replace(built, before=earlier.before, taken=earlier.taken, storage=storage)
    if catalog is None:
        # imported here, because `pin` does not need the tables that this import reads
        from gpufleet.infra.catalog import load_catalog

        catalog = load_catalog()
    checks.check(built, findings, now=now, catalog=catalog, past_deadline=past_deadline, launchable=launchable)
    return built, findings.problems


def rehearsed(tree: Mapping) -> Mapping:
    """The tree with the values of `rehearsal`. The section `rehearsal` itself stays, because it has the
    interruptions.
    """
    tree = stages.rehearsed(tree)
    overlay = tree.entries.get("rehearsal")
    return apply_overlay(tree, overlay.entries) if isinstance(overlay, Mapping) else tree


def from_anywhere(tree: Mapping, root: Path) -> Mapping:
    """The tree with full paths of a command's code and inputs, which the file may give relative to `root`."""
    placed: Node = tree
    if isinstance(listed := tree.entries.get(stages.STAGES), Items):
        full = [from_anywhere(item, root) if isinstance(item, Mapping) else item for item in listed.items]
        placed = replace(tree, entries={**tree.entries, stages.STAGES: replace(listed, items=full)})
    inputs = find_node(tree, "storage.inputs")
    names = inputs.entries if isinstance(inputs, Mapping) else {}
    for path in (("job", "code", "folder"), *(("storage", "inputs", name) for name in names)):
        node = find_node(tree, ".".join(path))
        if isinstance(node, Scalar) and not node.text.startswith("s3://"):
            laid: Node = replace(node, text=str((root / node.text).resolve()))
            for key in reversed(path):
                laid = Mapping(path="", line=node.line, entries={key: laid})
            placed = merge(placed, laid)
    assert isinstance(placed, Mapping)
    return placed


def apply_overlay(tree: Mapping, overlay: dict[str, Node]) -> Mapping:
    """The tree in which the overlay's values replace those of the file."""
    entries: dict[str, Node] = dict(tree.entries)
    if nodes := overlay.get("nodes"):  # scenarios of version 0.1.0 wrote fleet.nodes in this form
        fleet = Mapping(path=nodes.path.rpartition(".")[0], line=nodes.line, entries={"nodes": nodes})
        overlay = {**overlay, "fleet": merge(overlay.get("fleet"), fleet)}
    for name in OVERLAID:
        if name in overlay:
            entries[name] = merge(entries.get(name), _laid_over(name, overlay[name], entries.get(name)))
    return replace(tree, entries=entries)


def variants(
    tree: Mapping,
    path: Path,
    text: str,
    now: datetime,
    catalog: Catalog | None = None,
    plain: StackDefinition | None = None,
) -> tuple[list[StackDefinition], list[Problem]]:
    """The tree with the values of each of its `scenarios`, and the problems in the scenarios. `plain`: see
    definition().
    """
    findings = Findings(tree=tree)
    section = entries_of(tree.entries.get("scenarios"), "scenarios", "a section with one entry per scenario", findings)
    if len(section) > MOST_SCENARIOS:
        findings.add("scenarios", f"a section with at most {MOST_SCENARIOS} scenarios", value=f"{len(section)} of them")
        section = {}
    own = [field.name for field in fields(Variant)]
    laid_over, problems = [], []
    for name, entry in section.items():
        where = f"scenarios.{name}"
        if not SCENARIO_NAME.fullmatch(name):
            findings.add(where, "a name of 1 to 40 of a-z, 0-9, dots and hyphens", node=entry)
            continue
        entries = entries_of(entry, where, f"a section with the keys {', '.join([*own, *OVERLAID])}", findings)
        check_keys(entries, [*own, *OVERLAID, "nodes"], where, findings)
        _same_job(entries, tree, where, findings)
        own_entries = Mapping(
            path=where, line=entry.line, entries={key: node for key, node in entries.items() if key in own}
        )
        variant = build(Variant, own_entries, where, findings)
        sections = {key: node for key, node in entries.items() if key in (*OVERLAID, "nodes")}
        laid = apply_overlay(tree, sections)
        merged, variant_problems = definition(
            laid, path, text, now, True, launchable=False, catalog=catalog, plain=plain
        )
        problems += of_form(where, variant_problems)
        own_data = find_node(Mapping(path="", line=entry.line, entries=entries), "job.parameters.data") is not None
        laid_over.append(replace(merged, scenario=name, variant=variant, own_data=own_data))
    return laid_over, findings.problems + problems


def overlay_problems(overlay: Node, under: Mapping) -> list[Problem]:
    """The problems of a `rehearsal` section of the tree `under` that can be seen before the section's values
    are read.
    """
    allowed = [*OVERLAID, "interruptions", "python"]
    findings = Findings(tree=Mapping(path="", line=overlay.line, entries={"rehearsal": overlay}))
    entries = entries_of(overlay, "rehearsal", f"a section with the keys {', '.join(allowed)}", findings)
    check_keys(entries, allowed, "rehearsal", findings)
    _same_job(entries, under, "rehearsal", findings)
    return findings.problems


def purpose(text: str) -> str:
    """The comment block at the beginning of the file, without comment marks and without the line for editors."""
    block = []
    for line in io.StringIO(text.lstrip("\ufeff"), newline=None):
        if not line.startswith("#"):
            break
        if line.startswith(MODELINE):
            continue
        block.append(line.lstrip("#").strip())
    return "\n".join(block)


def _same_job(entries: dict[str, Node], under: Mapping, where: str, findings: Findings) -> None:
    """Reports keys of `job` that an overlay may not change, because they would be ignored."""
    if isinstance(laid := entries.get("job"), Mapping):
        check_keys(laid.entries, job_keys(under.entries.get("job"), laid_over=True), f"{where}.job", findings)


def _laid_over(section: str, overlay: Node, under: Node | None) -> Node:
    """The overlay. Only those keys of its `job` that may change are kept, because a rehearsal or scenario runs the same
    job and image.
    """
    if section != "job" or not isinstance(overlay, Mapping):
        return overlay
    known = job_keys(under, laid_over=True)
    return replace(overlay, entries={key: node for key, node in overlay.entries.items() if key in known})
