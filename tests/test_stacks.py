"""What holds for every definition file in stacks/, and for the page that explains them."""

from __future__ import annotations

import dataclasses
import re
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.model import (
    CapacityBlock,
    Claim,
    Disk,
    Interruptions,
    Keep,
    StackDefinition,
    Variant,
    Vpc,
)
from gpufleet.infra.definition.rules import RULES
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.infra.definition.schema import SECTIONS
from gpufleet.job.experiments.kernel.spec import KernelConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from gpufleet.job.kind import EXPERIMENTS, batch
from gpufleet.job.kind.command import CommandConfig
from gpufleet.job.kind.convert import describe
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
STACKS = [ROOT / "stacks" / f"{name}.yaml" for name in EXPERIMENTS]  # a user's own files are their own affair
PAGE = "\n".join((ROOT / "docs" / name).read_text() for name in ("definition.md", "parameters.md"))


@pytest.fixture(params=STACKS, ids=lambda path: path.stem)
def path(request: pytest.FixtureRequest) -> Path:
    found: Path = request.param
    return found


@pytest.fixture
def stack(path: Path) -> StackDefinition:
    return load(path, now=NOW)


@pytest.fixture
def rehearsed(path: Path) -> StackDefinition:
    return load(path, now=NOW, rehearsal=True)


def test_every_experiment_has_a_stack_of_its_name() -> None:
    for path in STACKS:
        assert load(path, now=NOW).job.experiment == path.stem


def test_it_opens_with_its_purpose_and_its_bound(stack: StackDefinition) -> None:
    assert stack.purpose.startswith(f"{stack.name}: ")
    bound = stack.purpose.partition("Bound: ")[2]
    assert bound, "the opening comment says no bound"
    hours, usd = re.search(r"([0-9.]+) billed hours?", bound), re.search(r"\$([0-9]+(?:\.[0-9]+)?)", bound)
    assert hours is not None
    assert usd is not None
    assert Decimal(hours[1]) == stack.limits.max_hours
    assert Decimal(usd[1]) == stack.limits.max_usd


def test_it_expires_and_is_capped(stack: StackDefinition) -> None:
    assert 0 < stack.limits.max_usd <= 1000
    assert 0 < stack.limits.max_hours <= 72


def test_it_is_tagged_with_an_owner_that_the_user_must_set(stack: StackDefinition) -> None:
    assert stack.run.owner == "you"
    assert stack.run.id == "r1"


def test_every_listed_type_is_on_offer_and_has_a_price(stack: StackDefinition) -> None:
    catalog = load_catalog()
    for name in stack.fleet.instance_types:
        kind = catalog.instances.get(name)
        assert kind is not None
        assert kind.left_ec2 is None
        assert catalog.on_demand(name, stack.fleet.region).amount > 0
        if stack.fleet.capacity == "spot":
            assert catalog.spot(name, stack.fleet.region)


def test_every_phase_fits_every_listed_type(stack: StackDefinition) -> None:
    config = stack.job.parameters
    for name in stack.fleet.instance_types:
        kind = load_catalog().instances.get(name)
        assert kind is not None
        ranks = config.ranks(kind.gpu_count)
        for phase in range(len(config.phases())):
            assert batch.choose_rung(config, kind.gpu_memory_gb, phase, ranks) is not None


def test_the_shipped_file_pins_nothing_that_ages(stack: StackDefinition) -> None:
    assert stack.fleet.ami == "unpinned"
    assert "@" not in stack.job.image
    assert stack.limits.deadline is None


def test_the_disks_need_no_paid_extras(stack: StackDefinition) -> None:
    assert (stack.storage.root.iops, stack.storage.root.throughput_mibps) == (3000, 125)


def test_the_rehearsal_is_the_same_job_on_a_laptop(stack: StackDefinition, rehearsed: StackDefinition) -> None:
    assert rehearsed.job.parameters.device == "cpu"
    assert rehearsed.job.experiment == stack.job.experiment
    assert rehearsed.job.image == stack.job.image
    assert len(rehearsed.job.parameters.phases()) == len(stack.job.parameters.phases())
    assert max(phase.params_total for phase in rehearsed.job.parameters.phases()) < 20_000_000
    assert rehearsed.interruptions.with_notice >= 1
    assert rehearsed.interruptions.without_notice >= 1


def test_a_scenario_of_another_model_starts_from_other_weights(path: Path, stack: StackDefinition) -> None:
    for one in scenarios(path, now=NOW):
        if stack.storage.base_weights is not None:
            its, own = one.job.parameters, stack.job.parameters
            assert isinstance(its, SftConfig | KernelConfig)
            assert isinstance(own, SftConfig | KernelConfig)
            same = its.model == own.model
            assert (one.storage.base_weights == stack.storage.base_weights) is same, one.scenario


def test_the_rehearsals_file_loads_to_the_rehearsal(path: Path, rehearsed: StackDefinition, tmp_path: Path) -> None:
    copy = tmp_path / path.name
    copy.write_text(rehearsal_text(path))
    assert dataclasses.replace(load(copy, now=NOW), source=path) == rehearsed


def documented(section: str) -> dict[str, str]:
    """Key -> value column, of the tables under a heading."""
    _, _, rest = PAGE.partition(f"\n## {section}\n")
    assert rest, section
    rows = re.findall(r"^\| `([a-z0-9_.]+)` \| (.*?) \|", rest.partition("\n## ")[0], flags=re.MULTILINE)
    return dict(rows)


FIRST, _, _ = PAGE.partition("\n## A first file\n")[2].partition("\n## ")


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_first_file_and_its_table_give_a_file_of_each_experiment_that_nothing_refuses(
    experiment: str, tmp_path: Path
) -> None:
    text = FIRST.partition("```yaml\n")[2].partition("```")[0]
    row = next(line for line in FIRST.splitlines() if f"| `{experiment}` |" in line)
    _, _, weights, example, limits, _ = (cell.strip() for cell in row.removeprefix("|").split("|"))
    type_, capacity = re.findall("`(.*?)`", example)
    usd, hours = limits.split(", ")
    written = {
        "experiment": experiment,
        "instance_types": f"[{type_}]",
        "capacity": capacity,
        "max_usd": usd,
        "max_hours": hours,
    }
    for key, value in written.items():
        text = re.sub(f"(?m)^  {key}: .*", f"  {key}: {value}", text)
    if weights == "leave out":
        text = re.sub("(?m)^  base_weights: .*\n", "", text)
    path = tmp_path / "mine.yaml"
    path.write_text(text)
    definition = load(path, now=NOW)
    assert definition.job.image == load(ROOT / "stacks" / f"{experiment}.yaml", now=NOW).job.image
    assert problems(definition, price(definition, load_catalog(), runs=2000)) == []


def test_the_page_has_the_smallest_type_of_each_gpu_whose_speed_is_known() -> None:
    said = dict(re.findall(r"^\| ([A-Z][\w ]+?) \| ([0-9]+ \|.*?) \|$", FIRST, flags=re.MULTILINE))
    kinds = [k for k in load_catalog().instances.values() if not k.unusable and k.gpu.has_a_roofline("bf16")]
    known = {}
    for gpu in {k.gpu.name: k.gpu for k in kinds if k.gpu.bf16}.values():
        smallest = [
            min(
                (k for k in kinds if k.gpu == gpu and k.gpu_count == count),
                key=lambda k: (k.vcpu, k.type),
                default=None,
            )
            for count in (1, 4, 8)
        ]
        cells = [f"`{k.type}`" if k else "" for k in smallest]
        known[gpu.name] = " | ".join([f"{gpu.memory_gb:g}", *cells]).replace("|  |", "| |").replace("|  |", "| |")
    assert said == known


def fields_of(config: Any, prefix: str = "") -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    """Every leaf of a tree of dataclasses and its default there, by its dotted path."""
    found: dict[str, tuple[dataclasses.Field[Any], Any]] = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            found |= fields_of(value, f"{prefix}{field.name}.")
        else:
            found[prefix + field.name.rstrip("_")] = field, value  # `from` is a word of Python's own
    return found


def test_the_page_explains_every_key_of_every_section_and_no_other() -> None:
    within = {"storage": (Disk, Keep), "account": (Vpc,), "fleet": (CapacityBlock,)}
    nested = {section: {f.name for cls in found for f in dataclasses.fields(cls)} for section, found in within.items()}
    for section, cls in SECTIONS.items():
        keys = {field.name for field in dataclasses.fields(cls)} | nested.get(section, set())
        assert set(documented(section)) == keys
    assert set(documented("scenarios")) == {field.name for field in dataclasses.fields(Variant)}
    assert set(documented("rehearsal")) == {field.name for field in dataclasses.fields(Interruptions)}


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_the_page_explains_every_parameter_with_its_default(experiment: str) -> None:
    fields = fields_of(EXPERIMENTS[experiment]())
    shared = {key: value for key, value in documented("Keys of several experiments").items() if key in fields}
    rows = shared | documented(f"job.parameters of {experiment}")
    assert set(rows) == set(fields)
    for name, (_, default) in fields.items():
        if isinstance(default, int | float) and not isinstance(default, bool):
            written = re.search(r"\*\*([0-9.e-]+)\*\*", rows[name])
            assert written is not None, name
            assert float(written[1]) == default, name


def test_the_page_explains_every_key_of_a_command() -> None:
    assert set(documented("A command of your own")) == set(fields_of(CommandConfig()))


def test_every_key_called_shared_is_of_several_experiments() -> None:
    known = [fields_of(config()) for config in EXPERIMENTS.values()]
    for key in documented("Keys of several experiments"):
        assert sum(key in fields for fields in known) > 1, key


def test_the_page_gives_the_range_that_the_loader_enforces() -> None:
    sections = {cls: name for name, cls in SECTIONS.items()} | {
        CapacityBlock: "fleet",
        Disk: "storage",
        Keep: "storage",
        Interruptions: "rehearsal",
        Variant: "scenarios",
        Claim: "scenarios",
    }
    for (cls, key), rule in RULES.items():
        if rule.maximum is None:
            continue
        said = documented(sections[cls])["claim" if cls is Claim else key]
        spelled = re.search(r"from (\S+) to (\S+)", describe(Decimal, rule))
        assert spelled is not None
        assert f"{spelled[1]} to {spelled[2]}" in said, (key, said)


def test_the_page_gives_the_default_that_the_code_has() -> None:
    nested: list[tuple[str, type[Any]]] = [("storage", Disk), ("storage", Keep), ("rehearsal", Interruptions)]
    nested += [("account", Vpc), ("fleet", CapacityBlock)]
    for section, cls in [*SECTIONS.items(), *nested]:
        for field in dataclasses.fields(cls):
            said = documented(section)[field.name]
            if field.default is dataclasses.MISSING:
                if field.name not in ("parameters",):
                    assert "*required*" in said, (section, field.name)
            elif field.default is None:
                assert said.startswith("**none**"), (section, field.name)
            elif isinstance(field.default, bool | int | str):
                assert str(field.default).lower() in said.replace(",", "").partition(";")[0].lower(), (
                    section,
                    field.name,
                )
