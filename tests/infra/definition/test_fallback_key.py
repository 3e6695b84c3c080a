"""The definition's `fleet.fallback`: its values, and that a change of the key needs a new run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.program.run_guard import creation_digest
from tests.infra.commands_world import definition, project


@pytest.fixture
def stack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return project(tmp_path, monkeypatch)


def with_fallback(
    stack: Path, *, limits: str = ", deadline: in 10 h", fleet: str = "", more: str = ""
) -> StackDefinition:
    text = stack.read_text().replace("max_hours: 1}", f"max_hours: 1{limits}}}")
    stack.write_text(text.replace("  ami:", f"  fallback: on-demand\n{fleet}  ami:") + more)
    return definition(stack)


def test_it_loads_and_a_change_of_it_takes_a_new_run(stack: Path) -> None:
    assert not definition(stack).fleet.market.stands_by
    found = with_fallback(stack)
    assert found.fleet.market.stands_by == ("on-demand",)
    without = replace(found, fleet=replace(found.fleet, fallback="none"))
    assert creation_digest(found) != creation_digest(without)


def test_what_contradicts_it_is_said_all_at_once(stack: Path) -> None:
    with pytest.raises(DefinitionError) as refused:
        with_fallback(stack, limits="", fleet="  capacity: on-demand\n")
    said = str(refused.value)
    assert "limits.deadline" in said
    assert "write a time, or `in 10 h`" in said
    assert "Write fallback: none beside that capacity" in said


@pytest.mark.parametrize("beats", [300, 301])
def test_a_node_that_beats_seldom_would_not_hear_of_the_hand_over(stack: Path, beats: int) -> None:
    job = "job: {experiment: tinystories-growth, "
    text = stack.read_text()
    assert job in text
    stack.write_text(text.replace(job, f"{job}parameters: {{checkpoint: {{heartbeat_s: {beats}}}}}, "))
    if beats == 300:
        assert with_fallback(stack).fleet.market.stands_by
    else:
        with pytest.raises(DefinitionError, match=r"heartbeat_s.*at most 300"):
            with_fallback(stack)


def test_there_is_no_other_market_to_fall_back_to(stack: Path) -> None:
    with_fallback(stack)
    stack.write_text(stack.read_text().replace("fallback: on-demand", "fallback: reserved"))
    with pytest.raises(DefinitionError, match=r"fleet\.fallback.*none, on-demand"):
        definition(stack)


def test_a_scenario_on_demand_says_that_it_has_none(stack: Path) -> None:
    scenario = "scenarios: {sure: {fleet: {capacity: on-demand%s}}}\n"
    with pytest.raises(DefinitionError, match=r"with scenarios\.sure laid over"):
        with_fallback(stack, more=scenario % "")
    stack.write_text(stack.read_text().replace("capacity: on-demand", "capacity: on-demand, fallback: none"))
    definition(stack)
