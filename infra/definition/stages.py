"""The `stages` of a definition: steps of one run. Each stage is a job on the hardware that it needs.

A stage is a run in the folder of the whole run. Its id is RUN/STAGE, so that everything that applies to a run
(attempts, checkpoints, limits, receipt) applies to a stage. The keys of its entry replace those of the file, as the
keys of a scenario do.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from gpufleet.infra.definition.model import Limits, Run, StackDefinition, Storage
from gpufleet.infra.definition.rules import RULES
from gpufleet.infra.definition.schema import Findings, check_keys, entries_of
from gpufleet.infra.definition.schema import build as build_section
from gpufleet.infra.definition.yaml_tree import Items, Mapping, Node, Scalar, merge, read
from gpufleet.infra.errors import Problem, of_form
from gpufleet.job.kind import JobConfig

STAGES, REHEARSAL, INTERRUPTIONS = "stages", "rehearsal", "interruptions"
LAID = ("job", "fleet", "estimate")  # sections that an entry lays over the file
STAYS, LIMITS = "stays", "limits"
KEYS = ("name", *LAID, REHEARSAL, STAYS, LIMITS)
NAME = re.compile(r"[a-z][a-z0-9_]{0,19}")  # becomes a folder's name, a tag, and {inputs.NAME}
MOST = 8  # our own bound, because each stage has a fleet
MOST_ON_NODE = 24  # with `stays`; our own bound, because the node's rights name each stage's files
UNDISTURBED = "rehearsal: {interruptions: {with_notice: 0, without_notice: 0}}"
RERUN = "rerun"


class Earlier(NamedTuple):
    """The stages before a stage: the names of those in the same run, and the folders (RUN/STAGE) of those that are
    taken from another run.
    """

    before: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


Build = Callable[[Mapping, Earlier], tuple[StackDefinition, list[Problem]]]


def staged(tree: Mapping, build: Build) -> tuple[StackDefinition, list[Problem]]:
    """The definition of a file with `stages`, and its problems. `build` reads the tree of one stage and gets the stages
    before it. If the file has `rerun`, the stages before its `from` belong to another run.

    With `stays`, the stages are trials: they share the first one's fleet, and each begins on the node of the one before
    it, however that one ended. Each has limits of its own, and the file's limits are for all of them together.
    """
    findings, built, problems = Findings(tree=tree), list[StackDefinition](), list[Problem]()
    rest = {key: node for key, node in tree.entries.items() if key not in (STAGES, "scenarios", RERUN)}
    entries = list(_entries(tree, findings))
    on_one_node = _share_a_node([entry for _, entry in entries], tree, findings)
    earlier, begin = _rerun(tree, [entry for _, entry in entries], findings)
    taken: list[str] = []
    names: list[str] = []
    jobs: dict[str, JobConfig] = {}
    for index, (path, entry) in enumerate(entries):
        check_keys(entry, list(KEYS), path, findings)
        name = _name(entry.get("name"), path, [*names, *(folder.partition("/")[2] for folder in taken)], findings)
        own = {key: merge(rest.get(key), entry[key]) for key in (*LAID, LIMITS) if key in entry}
        if isinstance(rehearsal := entry.get(REHEARSAL), Mapping) and INTERRUPTIONS in rehearsal.entries:
            own[REHEARSAL] = merge(rest.get(REHEARSAL), _reduced_to(rehearsal, INTERRUPTIONS))
        elif on_one_node and index != 1:  # the file's interruptions come once, when the node does its second stage
            own[REHEARSAL] = merge(rest.get(REHEARSAL), read(UNDISTURBED).entries[REHEARSAL])
        stage, wrong = build(replace(tree, entries={**rest, **own}), Earlier(tuple(names), tuple(taken)))
        problems += of_form(f"{STAGES}[{index}]", wrong)
        _fleet(stage, built[0] if built else stage, path, findings)
        _takes(stage, jobs, path, findings)
        jobs[name] = stage.job.parameters
        if index < begin:
            taken.append(f"{earlier}/{name}")
            continue
        before, run = tuple(names), replace(stage.run, id=f"{stage.run.id}/{name}")
        names.append(name)
        first = built[0] if built and on_one_node else None
        if first is not None and _of_node(stage) != _of_node(first):
            findings.add(f"{path}.job", f"the image, device and rights of the stage {first.stage}, whose node it uses")
        built.append(replace(stage, run=run, before=before, fleet_of=first.stage if first else ""))
    if not built:
        return build(replace(tree, entries=rest), Earlier())[0], findings.problems
    built = [replace(definition, next_stage=name) for definition, name in zip(built, [*names[1:], ""], strict=True)]
    storage = build_section(Storage, tree.entries.get("storage"), "storage", Findings(tree=tree))
    run = replace(built[0].run, id=built[0].run.id.partition("/")[0])
    limits = built[0].limits
    if on_one_node:
        limits = build_section(Limits, rest.get(LIMITS), LIMITS, findings)
        built = [replace(stage, shared=limits) for stage in built]
    whole = replace(
        built[0], run=run, storage=storage, limits=limits, before=(), taken=(), next_stage="", stages=tuple(built)
    )
    return replace(whole, tree=tree), [*findings.problems, *problems]


def _share_a_node(stages: Sequence[dict[str, Node]], tree: Mapping, findings: Findings) -> bool:
    """Whether the stages share one node: then all but the first have `stays`. Reports keys that do not go together."""
    stay = [isinstance(node := entry.get(STAYS), Scalar) and node.text == "true" for entry in stages]
    for index, entry in enumerate(stages):
        path, node = f"{STAGES}[{index}]", entry.get(STAYS)
        if (any(stay) and stay[index] != bool(index)) or (node is not None and not stay[index]):
            allowed = "true in every stage but the first, or in none"
            findings.add(f"{path}.{STAYS}", allowed, value=node.text if isinstance(node, Scalar) else "none")
        for key, is_wrong in (("fleet", any(stay)), (LIMITS, not any(stay))):
            if key in entry and is_wrong:
                findings.add(f"{path}.{key}", f"only for stages {'without' if any(stay) else 'with'} {STAYS}: true")
    if any(stay) and RERUN in tree.entries:
        findings.add(RERUN, f"only for stages without {STAYS}: true")
    return any(stay)


def _of_node(stage: StackDefinition) -> tuple[object, ...]:
    """What a node gets from its fleet, so that stages on one node must have it in common."""
    job = stage.job.parameters
    return stage.job.images, job.device, job.demands.container_options, job.demands.node_role


def _rerun(tree: Mapping, stages: Sequence[dict[str, Node]], findings: Findings) -> tuple[str, int]:
    """The id of the run whose stages this run uses, and the number of these stages; ("", 0) if the file has no
    `rerun`.
    """
    if RERUN not in tree.entries:
        return "", 0
    entries = entries_of(tree.entries[RERUN], RERUN, "a section with run and from", findings)
    check_keys(entries, ["run", "from"], RERUN, findings)
    run, begin = (node.text if isinstance(node := entries.get(key), Scalar) else "" for key in ("run", "from"))
    names = [node.text if isinstance(node := entry.get("name"), Scalar) else "" for entry in stages]
    if not re.fullmatch(RULES[Run, "id"].pattern, run):
        findings.add(f"{RERUN}.run", "the id of an earlier run of this stack", value=run)
    if begin not in names[1:]:
        findings.add(f"{RERUN}.from", f"a stage after the first: {', '.join(names[1:])}", value=begin)
        return run, 0
    return run, names.index(begin)


def rehearsed(tree: Mapping) -> Mapping:
    """The tree in which the keys of each stage's `rehearsal` have replaced those of the stage."""
    stages = tree.entries.get(STAGES)
    if not isinstance(stages, Items) or not any(REHEARSAL in stage.entries for stage in _sections(stages)):
        return tree
    items = [_rehearsed(stage) if isinstance(stage, Mapping) else stage for stage in stages.items]
    return replace(tree, entries={**tree.entries, STAGES: replace(stages, items=items)})


def _sections(stages: Items) -> list[Mapping]:
    return [stage for stage in stages.items if isinstance(stage, Mapping)]


def _rehearsed(entry: Mapping) -> Mapping:
    laid = entry.entries.get(REHEARSAL)
    if not isinstance(laid, Mapping):
        return entry
    over = {key: merge(entry.entries.get(key), node) for key, node in laid.entries.items() if key != INTERRUPTIONS}
    interruptions = {REHEARSAL: _reduced_to(laid, INTERRUPTIONS)} if INTERRUPTIONS in laid.entries else {}
    rest = {key: node for key, node in entry.entries.items() if key != REHEARSAL}
    return replace(entry, entries={**rest, **over, **interruptions})


def _reduced_to(section: Mapping, key: str) -> Mapping:
    return replace(section, entries={key: section.entries[key]})


def _entries(tree: Mapping, findings: Findings) -> list[tuple[str, dict[str, Node]]]:
    """The path of each stage in the file, and its entries."""
    listed, allowed = tree.entries[STAGES], f"a list of 2 to {MOST} stages, each with {', '.join(KEYS)}"
    items = listed.items if isinstance(listed, Items) else []
    stay = any(isinstance(item, Mapping) and STAYS in item.entries for item in items)
    if not 2 <= len(items) <= (MOST_ON_NODE if stay else MOST):
        allowed = allowed.replace(str(MOST), str(MOST_ON_NODE)) if stay else allowed
        findings.add(STAGES, allowed, value=f"{len(items)} of them" if isinstance(listed, Items) else None)
        return []
    paths = [f"{STAGES}[{index}]" for index in range(len(items))]
    return [
        (path, entries_of(node, path, f"a section with {', '.join(KEYS)}", findings))
        for path, node in zip(paths, items, strict=True)
    ]


def _name(node: Node | None, path: str, names: list[str], findings: Findings) -> str:
    name = node.text if isinstance(node, Scalar) else ""
    if not NAME.fullmatch(name):
        findings.add(f"{path}.name", "1 to 20 of a-z, 0-9 and _, beginning with a letter")
    elif name in names:
        findings.add(f"{path}.name", "each name once", value=name)
    return name


def _takes(one: StackDefinition, earlier: dict[str, JobConfig], path: str, findings: Findings) -> None:
    """Reports each earlier stage that does not write the files which this stage takes from it."""
    config = one.job.parameters
    for key, name in config.demands.inputs:
        if name in earlier and not set(config.demands.takes) <= set(earlier[name].demands.leaves):
            wanted = f"a stage that leaves {' and '.join(config.demands.takes)}; {name} does not"
            findings.add(f"{path}.{config.path}.{key}", wanted, value=name)


def _fleet(one: StackDefinition, first: StackDefinition, path: str, findings: Findings) -> None:
    """Reports settings that are not supported yet for fleets of stages."""
    market, region = one.fleet.market, first.fleet.region
    if one.fleet.region != region:
        findings.add(f"{path}.fleet.region", f"{region}, as all stages have one network", value=one.fleet.region)
    if one.fleet.cards == "all":
        findings.add(f"{path}.fleet.cards", "one: a NAT gateway, which `all` needs, would be billed during every stage")
    if market.stands_by or not market.replaces:
        allowed = "spot or on-demand, without fleet.fallback: the fleet of a stage waits for the stage before it"
        findings.add(f"{path}.fleet.capacity", allowed, value=one.fleet.capacity)
