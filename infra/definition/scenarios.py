"""The `scenarios` section of a definition file: variants of the file, which are compared, or of which one is run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from gpufleet.infra.definition.layers import apply_overlay, definition
from gpufleet.infra.definition.loader import load_all
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.definition.schema import nearest
from gpufleet.infra.definition.yaml_tree import Mapping, open_file
from gpufleet.infra.errors import DefinitionError, GpufleetError, in_order, of_form


def scenarios(path: Path, *, now: datetime) -> tuple[StackDefinition, ...]:
    """The definition of every scenario, in order. Raises DefinitionError with every problem of the file."""
    return load_all(path, now=now, past_deadline=True)[1]


def scenario(
    path: Path, name: str, *, now: datetime, past_deadline: bool = False, to_run: bool = True
) -> StackDefinition:
    """One scenario, checked like the file itself. If not `to_run`, the scenario may be one that can only be priced.
    Raises GpufleetError if it does not exist or cannot be run, and DefinitionError if it has problems.
    """
    by_name = {candidate.scenario: candidate for candidate in scenarios(path, now=now)}
    if name not in by_name:
        raise unknown(path, name, by_name)
    variant = by_name[name].variant
    if variant.only_priced:
        if not to_run:
            return by_name[name]
        raise GpufleetError(
            f"{path.name}: scenario {name} {variant.only_priced}: it cannot be run; "
            f"`gpufleet cost {by_name[name].argument} --scenario {name}` prices it"
        )
    text, tree = open_file(path)
    section = tree.entries["scenarios"]  # if there are scenarios, the file has this section
    assert isinstance(section, Mapping)
    entry = section.entries[name]
    entries = entry.entries if isinstance(entry, Mapping) else {}
    judged, problems = definition(apply_overlay(tree, entries), path, text, now, past_deadline)
    if problems:
        raise DefinitionError(str(path), in_order(of_form(f"scenarios.{name}", problems)))
    return replace(judged, scenario=name, variant=variant)


def unknown(path: Path, name: str, known: Iterable[str]) -> GpufleetError:
    """The error for a scenario that the file does not have."""
    names = list(known)
    message = f"{path.name} has no scenario {name!r}; it has {', '.join(names) or 'none'}. {nearest(name, names)}"
    return GpufleetError(message.rstrip())


def chosen(path: Path, variants: tuple[StackDefinition, ...], name: str | None) -> tuple[StackDefinition, ...]:
    """The scenario `name`, or all scenarios if `name` is None. Raises GpufleetError if the scenario does not exist or
    cannot be priced on other types.
    """
    if name is None:
        return variants
    matching = tuple(variant for variant in variants if variant.scenario == name)
    if not matching:
        raise unknown(path, name, (variant.scenario for variant in variants))
    (variant,) = (work.variant for work in matching)
    if variant.reference:
        raise GpufleetError(
            f"scenario {name} {variant.only_priced}, so it is priced on no other type; leave out --scenario to see its "
            "row in the table"
        )
    return matching
