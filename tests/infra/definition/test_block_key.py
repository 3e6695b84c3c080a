"""The definition's `fleet.block`: its values, a run's hours in the block, and that a change needs a new run."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import CapacityBlock, StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.inputs.readiness import not_ready
from gpufleet.infra.program.run_guard import creation_digest
from tests.infra.command_files import in_block, several_nodes

NOW = datetime(2026, 11, 26, tzinfo=UTC)


def read(folder: Path, text: str, *, past_deadline: bool = False) -> StackDefinition:
    file = folder / "pretrain-d64.yaml"
    file.write_text(text)
    return load(file, now=NOW, past_deadline=past_deadline)


def problems(folder: Path, text: str) -> dict[str, str]:
    with pytest.raises(DefinitionError) as refused:
        read(folder, text)
    return {each.path: f"{each.allowed} {each.hint}" for each in refused.value.problems}


def test_it_loads_and_a_change_of_it_takes_a_new_run(tmp_path: Path) -> None:
    found = read(tmp_path, in_block(several_nodes("all")))
    assert found.fleet.block == CapacityBlock(
        reservation="cr-0123456789abcdef0",
        start=datetime(2026, 11, 25, 23, tzinfo=UTC),
        end=datetime(2026, 11, 27, 11, 30, tzinfo=UTC),
        fee_usd=Decimal(900),
    )
    other = replace(found.fleet.block, end=found.fleet.block.end + timedelta(days=1))
    assert creation_digest(found) != creation_digest(replace(found, fleet=replace(found.fleet, block=other)))
    assert found.fleet.bought_as("spot").block is None


def test_a_run_in_it_is_due_when_aws_begins_to_end_its_nodes(tmp_path: Path) -> None:
    found, last = read(tmp_path, in_block(several_nodes("all"))), datetime(2026, 11, 27, 11, tzinfo=UTC)
    assert (found.due(NOW), found.expiry(NOW), found.due_by(NOW)) == (last, last, "fleet.block.end")
    assert found.hours_left(NOW) == 35
    assert found.hours_left(datetime(2026, 11, 20, tzinfo=UTC)) == 36  # the run begins with the block
    sooner = replace(found, limits=replace(found.limits, deadline=timedelta(hours=10)))
    assert (sooner.due(NOW), sooner.due_by(NOW)) == (NOW + timedelta(hours=10), "limits.deadline")


def test_what_contradicts_it_is_said_all_at_once(tmp_path: Path) -> None:
    text = in_block(several_nodes("all")).replace("[us-east-2a]", "[us-east-2a, us-east-2b]")
    text = text.replace("  nodes: 2\n  cards: all\n", "  fallback: on-demand\n")
    text = text.replace("limits:\n", "limits:\n  deadline: in 10 h\n")
    found = problems(tmp_path, text)
    assert set(found) == {"fleet.zones", "fleet.fallback"}
    assert found["fleet.zones"].startswith("the block's one")
    assert found["fleet.fallback"].startswith("none where fleet.capacity is block")


@pytest.mark.parametrize(
    ("block", "path", "allowed"),
    [
        (
            "{start: 2026-11-26T11:30:00Z, end: 2026-11-26T12:00:00Z, fee_usd: 1}",
            "end",
            "more than 30 minutes after its start",
        ),
        ("{start: 2026-11-26T11:30:00Z, end: 2027-11-26T12:00:00Z, fee_usd: 1}", "end", "at most 182 days after"),
        (
            "{start: 2026-11-24T11:30:00Z, end: 2026-11-26T00:20:00Z, fee_usd: 1}",
            "end",
            "more than 30 minutes after now",
        ),
        ("{start: in 10 h, end: 2026-11-27T00:20:00Z, fee_usd: 1}", "start", "a time with its zone, such as 2026"),
        ("{start: 2026-11-26T11:30:00Z, end: 2026-11-27T11:30:00Z}", "fee_usd", "a number from 0 to 100,000,000 (USD)"),
        (
            "{reservation: r-1, start: 2026-11-26T11:30:00Z, end: 2026-11-27T11:30:00Z, fee_usd: 1}",
            "reservation",
            "cr-... of the fleet's region",
        ),
    ],
)
def test_what_is_no_block_is_refused_where_it_stands(tmp_path: Path, block: str, path: str, allowed: str) -> None:
    found = problems(tmp_path, in_block(several_nodes("all"), block))
    assert list(found) == [f"fleet.block.{path}"]
    assert allowed in found[f"fleet.block.{path}"]


def test_the_section_is_needed_for_that_capacity_and_counts_for_no_other(tmp_path: Path) -> None:
    alone = several_nodes("all").replace("  capacity: spot\n", "  capacity: block\n")
    assert problems(tmp_path, alone)["fleet.block"].startswith("a section with start, end and fee_usd")
    beside = read(tmp_path, in_block(several_nodes("all")).replace("capacity: block", "capacity: on-demand"))
    assert (beside.fleet.capacity, beside.fleet.block) == ("on-demand", None)


def test_one_that_is_not_bought_is_priced_and_not_ready_for_up(tmp_path: Path) -> None:
    block = "{start: 2026-12-01T11:30:00Z, end: 2026-12-02T11:30:00Z, fee_usd: 900}"
    found = read(tmp_path, in_block(several_nodes("all"), block))
    assert any(each.startswith("fleet.block has no reservation: buy") for each in not_ready(found, tmp_path))


def test_a_run_whose_block_is_over_can_still_be_read(tmp_path: Path) -> None:
    block = "{start: 2026-11-01T11:30:00Z, end: 2026-11-02T11:30:00Z, fee_usd: 900}"
    assert read(tmp_path, in_block(several_nodes("all"), block), past_deadline=True).fleet.block is not None


def test_the_schema_takes_a_moment_and_no_span(tmp_path: Path) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    from gpufleet.infra.definition.json_schema import schema

    checker = jsonschema.Draft7Validator(schema()["properties"]["fleet"]["properties"]["block"])
    good = {"reservation": None, "start": "2026-12-01T11:30:00Z", "end": "2026-12-02T11:30:00Z", "fee_usd": 900}
    assert checker.is_valid(json.loads(json.dumps(good)))
    for bad in ({"start": "in 10 h"}, {"fee_usd": -1}, {"reservation": "r-1"}, {"until": 1}):
        assert not checker.is_valid({**good, **bad}), bad
