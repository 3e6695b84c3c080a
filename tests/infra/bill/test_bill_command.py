"""The bill of a user's own command, from measured or declared steps, from hours, or from the money alone."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from typing import Any

import pytest

from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price, problems
from gpufleet.infra.bill.record import to_json
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import CapacityBlock, Limits, StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.risk import unknown
from gpufleet.job.kind.command import (
    CommandCheckpoint,
    CommandConfig,
    CommandWork,
    Every,
    ExitRules,
    Hours,
    Progress,
    Resume,
    StopRules,
)
from tests.repository import ROOT

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog(ROOT)
FILE = load(ROOT / "stacks" / "tinystories-growth.yaml", now=datetime(2026, 11, 26, tzinfo=UTC))
SCRIPT = CommandConfig(
    command="python train.py --out {checkpoints}",
    resume=Resume(args="--resume"),
    checkpoint=CommandCheckpoint(each=("ckpt.pt",), rewritten=True, every=Every(minutes=10), size_gb=1.5),
    progress=Progress(stdout=(r"iter (?P<step>\d+)",)),
)
STEPS = CommandWork(steps=60_000, step_ms={"A10G": 590.0})


def definition(work: CommandWork = STEPS, **changes: Any) -> StackDefinition:
    """The script on one g5.2xlarge, within 20 USD and 40 hours."""
    limits = Limits(max_usd=changes.pop("max_usd", Decimal(20)), max_hours=changes.pop("max_hours", Decimal(40)))
    fleet = replace(FILE.fleet, capacity=changes.pop("capacity", "spot"))
    parameters = replace(SCRIPT, work=work, **changes)
    job = replace(FILE.job, experiment="command", parameters=parameters)
    return replace(FILE, job=job, fleet=fleet, limits=limits, storage=replace(FILE.storage, dataset=""))


def bill(work: CommandWork = STEPS, **changes: Any) -> Bill:
    return price(definition(work, **changes), CATALOG)


def test_declared_steps_cost_their_time_and_the_range_holds_how_far_that_may_be_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(unknown, "STATED", 0.25)
    found = bill(capacity="on-demand")
    (phase,) = found.chosen.runtime.phases
    assert (phase.steps, phase.step_ms) == (60_000, 590.0)
    uninterrupted = 60_000 * 0.59 / 3600
    assert float(found.chosen.compute.quantity) == pytest.approx(uninterrupted, rel=0.03)  # set-up, saves, the end
    assert float(found.hours.p90 / found.hours.p50) == pytest.approx(1.378, rel=0.03)  # exp(0.25 x 1.2816)
    assert "as declared, not measured" in found.warnings[0]


def test_declared_hours_are_p10_p50_and_p90_of_the_work() -> None:
    hours = CommandWork(hours=Hours(low=4, likely=6, high=10))
    found = bill(hours, capacity="on-demand")
    setup = found.chosen.runtime.setup_s / 3600
    for quantile, declared in ((found.hours.p10, 4), (found.hours.p50, 6), (found.hours.p90, 10)):
        assert float(quantile) - setup == pytest.approx(declared, rel=0.03)
    assert "590" not in render(found)


def test_without_declared_work_the_bill_says_what_the_money_buys() -> None:
    found = bill(CommandWork(), max_usd=Decimal(3), max_hours=Decimal(40), stop=StopRules(saves="true"))
    assert found.buys is not None
    hourly = found.chosen.exposure.usd_h
    assert 0 < found.buys.p10 <= found.buys.p50 <= found.buys.p90 <= Decimal(3 / hourly)
    assert found.usd.p50 <= Decimal(3)
    assert not list(problems(definition(CommandWork(), max_usd=Decimal(3)), found))
    assert "what the money buys" in render(found)
    assert json.loads(json.dumps(to_json(found)))["buys_hours"]["p50"] == str(found.buys.p50)


def test_a_limit_before_the_first_checkpoint_is_refused_also_where_no_work_is_declared() -> None:
    work = CommandWork()
    (problem,) = problems(definition(work, max_usd=Decimal("0.2")), bill(work, max_usd=Decimal("0.2")))
    assert problem.path == "limits.max_usd"
    assert "one interval between checkpoints" in problem.allowed


def test_of_several_nodes_the_first_checkpoint_takes_hours_of_all_and_the_bill_counts_them() -> None:
    one = definition(CommandWork(), capacity="on-demand", max_hours=Decimal("0.1"))
    two = replace(one, fleet=replace(one.fleet, nodes=2, zones=one.fleet.zones[:1]))
    least = [float(problems(each, price(each, CATALOG))[0].allowed.split()[2]) for each in (one, two)]
    assert least[1] == pytest.approx(
        2 * least[0], abs=0.5
    )  # set-up includes the time in which nodes wait for each other
    enough = replace(two, limits=replace(two.limits, max_hours=Decimal(f"{least[1]:.2f}")))
    assert not problems(enough, price(enough, CATALOG))
    long = replace(two, limits=replace(two.limits, max_usd=Decimal(100), max_hours=Decimal(30)))
    found = price(long, CATALOG)
    (row,) = (line for line in render(found).splitlines() if line.startswith("node-hours"))
    assert float(row.split()[2]) == pytest.approx(30, abs=0.5)
    assert found.cap is not None
    assert float(found.cap.at_hours) == pytest.approx(30, abs=0.5)


def test_a_block_before_whose_end_nothing_is_saved_is_what_is_too_short() -> None:
    plain, start = definition(CommandWork(), capacity="block"), datetime(2026, 12, 1, tzinfo=UTC)
    block = CapacityBlock(start=start, end=start + timedelta(minutes=40), fee_usd=Decimal(1))
    short = replace(plain, fleet=replace(plain.fleet, block=block, zones=plain.fleet.zones[:1]))
    (problem,) = problems(short, price(short, CATALOG))
    assert problem.path == "fleet.block.end"
    assert "hours from its start to 30 minutes before it: set-up, one interval" in problem.allowed


def test_who_saves_on_a_notice_loses_less_and_until_that_is_shown_nobody_does() -> None:
    rough = {"estimate": replace(FILE.estimate, hazard_per_hour=Decimal("0.5"))}
    usd = {}
    for saves in ("true", "unknown", "false"):
        each = replace(definition(stop=StopRules(saves=saves)), **rough)  # type: ignore[arg-type]
        usd[saves] = price(each, CATALOG).chosen.needed_hours.mean
    assert usd["true"] < usd["unknown"] == usd["false"]
    assert any("job.stop.saves" in line for line in bill().warnings)
    assert not any("job.stop.saves" in line for line in bill(stop=StopRules(saves="true")).warnings)


@pytest.mark.parametrize(
    ("saves", "why"), [("unknown", "nobody has shown job.stop.saves"), ("false", "job.stop.saves is false")]
)
def test_why_a_notice_saves_nothing_is_said(saves: Any, why: str) -> None:
    assert any(why in each and "one checkpoint interval" in each for each in bill(stop=StopRules(saves=saves)).warnings)


def test_a_rarer_save_makes_an_interruption_dearer() -> None:
    def needed(minutes: float) -> Decimal:
        every = replace(SCRIPT.checkpoint, every=Every(minutes=minutes))
        return bill(checkpoint=every).chosen.needed_hours.mean

    assert needed(5) < needed(30) < needed(120)


def test_a_script_that_saves_nothing_is_priced_to_begin_again() -> None:
    none = CommandCheckpoint(format="none")
    saving, bare = bill(), bill(checkpoint=none)
    assert bare.chosen.needed_usd.mean > 2 * saving.chosen.needed_usd.mean
    assert bare.cadence is None
    assert sum(phase.saves for phase in bare.chosen.runtime.phases) == 0
    assert not [each for each in bare.warnings if "one checkpoint interval" in each]
    endless = definition(CommandWork(), checkpoint=none)
    assert not list(
        problems(endless, price(endless, CATALOG))
    )  # without checkpoints the bill has no time until the first one


def test_epochs_are_priced_as_steps_of_that_length_are() -> None:
    every = CommandCheckpoint(each=("e{epoch}.pt",), every=Every(epochs=1), size_gb=1.5)
    lines = Progress(stdout=(r"epoch (?P<epoch>\d+)",))
    epochs = CommandWork(epochs=10, epoch_minutes={"A10G": 30.0})
    found = bill(epochs, checkpoint=every, progress=lines, capacity="on-demand")
    (phase,) = found.chosen.runtime.phases
    assert (phase.steps, phase.step_ms) == (10, 30 * 60_000)
    assert float(found.chosen.compute.quantity) == pytest.approx(5.0, rel=0.05)
    assert found.chosen.runtime.basis == "job.work.epoch_minutes as declared, not measured"
    elsewhere = replace(epochs, epoch_minutes={"2 x A10G": 15.0}, from_="page")
    (phase,) = bill(elsewhere, checkpoint=every, progress=lines, gpus=1).chosen.runtime.phases
    assert phase.step_ms == 30 * 60_000
    with pytest.raises(DefinitionError, match=r"how long an epoch takes .* job\.work\.epoch_minutes: \{A10G: \.\.\.\}"):
        bill(CommandWork(epochs=10), checkpoint=every, progress=lines)


def test_holding_a_failed_node_is_priced_and_said() -> None:
    found = bill(exit=ExitRules(hold_minutes=30))
    usd = found.chosen.exposure.usd_h / 2
    assert any(f"30 min more, which costs {usd:.2f} USD" in each for each in found.warnings)


def test_memory_is_held_against_the_gpu_only_where_it_is_declared() -> None:
    assert "not predicted" in render(bill())
    assert not list(problems(definition(memory_gb=20.0), bill(memory_gb=20.0)))
    (problem,) = problems(definition(memory_gb=30.0), bill(memory_gb=30.0))
    assert "needs 31.0 GB per GPU, has 24.0" in problem.allowed


@pytest.mark.parametrize(
    ("added", "said"),
    [
        ("--max_steps 5000", "--max_steps 5000"),
        ("--Max-Iters=5000", "--Max-Iters=5000"),
        ("--max_steps 60000", ""),
        ("--max_steps $STEPS --warmup_steps 500 --max_steps_per_epoch 7", ""),
        ("--lr 5.0 --steps 5000.5", ""),
    ],
)
def test_the_command_s_own_count_of_steps_is_held_against_the_bill_s(added: str, said: str) -> None:
    found = [each for each in bill(command=f"{SCRIPT.command} {added}").warnings if "job.work.steps" in each]
    assert [each.startswith(f"job.command has {said} and job.work.steps is 60000") for each in found] == [True] * bool(
        said
    )
