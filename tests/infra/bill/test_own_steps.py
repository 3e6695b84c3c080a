"""How long a step of a user's own command takes on GPUs that its file does not mention, and how sure that is."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.bill import options
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.options import BillBasis
from gpufleet.infra.bill.own_steps import StepTime
from gpufleet.infra.bill.project import bill_basis, bill_of
from gpufleet.infra.bill.runtime import Runtime
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.compare import ranking
from gpufleet.infra.compare.cheaper import cheaper
from gpufleet.infra.compare.rows import Study
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.evidence.speeds import Speed, SpeedGroup, Speeds
from gpufleet.infra.program.run_guard import creation_digest
from gpufleet.infra.risk.unknown import PAGE, PER_DOUBLING, STATED
from gpufleet.job import measured as measurements
from gpufleet.job.kind.job import changed
from tests.infra.command_files import FLEET, command_file

NOW = datetime(2026, 11, 27, tzinfo=UTC)
CATALOG = load_catalog()
LAUNCHED = "torchrun --nproc-per-node={gpus} train.py"


def definition(tmp_path: Path, types: str, work: dict[str, Any], **job: Any) -> StackDefinition:
    """A command on these types, `p5.48xlarge g6e.xlarge`, in us-east-1."""
    job = {"command": LAUNCHED, **job}
    fleet = {**FLEET, "region": "us-east-1", "zones": ["us-east-1a", "us-east-1b"], "instance_types": types.split()}
    kept = {"format": "hf-trainer", "every": {"minutes": 10}, "size_gb": 1, "same_gpus": job.pop("same_gpus", True)}
    file = command_file(tmp_path, fleet=fleet, work=work, checkpoint=kept, **job)
    return load(file, now=NOW)


def runtime_on(plan: StackDefinition, type_: str, **given: Any) -> Runtime:
    found = options.type_cost(BillBasis(plan, CATALOG, **given), type_).runtime
    assert found is not None
    return found


@pytest.mark.parametrize("same_gpus", [True, False])
@pytest.mark.parametrize(
    ("types", "step_ms", "job", "asked", "times", "speed"),
    [
        ("p5.48xlarge", {"H100": 140}, {}, "p5.4xlarge", 8, "guessed"),  # one card does the work of eight
        ("g6e.2xlarge", {"L40S": 500}, {}, "g6e.48xlarge", 1 / 8, "guessed"),
        ("g6e.2xlarge", {"L40S": 500}, {}, "g6e.16xlarge", 1, "declared"),  # one card as well
        ("p5.4xlarge", {"8 x H100": 140}, {}, "p5.48xlarge", 1, "declared"),  # the key says how many
        ("p5.4xlarge", {"8xH100": 140}, {}, "p5.4xlarge", 8, "guessed"),
        ("g6e.12xlarge", {"L40S": 500}, {"gpus": 2}, "g6e.48xlarge", 1, "declared"),  # two GPUs of any node
        ("p5.48xlarge", {"H100": 140}, {"command": "python train.py"}, "p5.4xlarge", 1, "declared"),  # one GPU of eight
        ("p5.48xlarge", {"8 x H100": 140}, {"command": "python train.py"}, "p5.4xlarge", 8, "guessed"),
        # If several types with that GPU are listed, the first one counts.
        ("g6e.2xlarge", {"L40S": 500, "1 x H100": 300, "8 x H100": 40}, {}, "p5.4xlarge", 300 / 500, "declared"),
    ],
)
def test_a_step_is_of_a_number_of_gpus(
    tmp_path: Path,
    types: str,
    step_ms: dict[str, float],
    job: dict[str, Any],
    asked: str,
    times: float,
    speed: str,
    same_gpus: bool,
) -> None:
    plan = definition(tmp_path, types, {"steps": 20_000, "step_ms": step_ms}, same_gpus=same_gpus, **job)
    found = runtime_on(plan, asked)
    assert found.phases[0].step_ms == pytest.approx(times * next(iter(step_ms.values())))
    assert found.speed == speed


def test_a_run_on_one_gpu_is_billed_for_eight_gpus_work_to_the_digit(tmp_path: Path) -> None:
    """20,000 steps of 140 ms on eight H100s are 20,000 x 8 x 0.14 s = 22,400 s on one, on demand at 6.88 USD an hour.
    The bill adds 15 min of set-up, and saves of 0.1 s + 1 GB / 4 GB/s = 0.35 s, every 10 min and at the end; at the end
    2 GB are written at 1 GB/s, hashed at 1.4 GB/s and uploaded at 1.02 GB/s.
    """
    plan = definition(tmp_path, "p5.4xlarge", {"steps": 20_000, "step_ms": {"8 x H100": 140}})
    plan = replace(
        plan,
        fleet=replace(plan.fleet, capacity="on-demand"),
        limits=replace(plan.limits, max_usd=Decimal(90), max_hours=Decimal(20)),
    )
    steps_s = 22_400.0
    saves_s = (steps_s / 600 + 1) * 0.35
    end_s = 2 / 1 + 2 / 1.4 + 2 / 1.02
    hours = Decimal(f"{(900 + steps_s + saves_s + end_s) / 3600:.6f}")
    found = price(plan, CATALOG)
    assert found.chosen.compute.quantity == hours
    assert found.chosen.compute.amount == (hours * Decimal("6.88")).quantize(Decimal("0.0001"))
    # p90: the declared figure, and on that side nothing for fewer GPUs, which lack no speed; set-up beside it.
    assert found.chosen.runtime.slower == pytest.approx(STATED)
    assert found.chosen.runtime.faster == pytest.approx(math.hypot(STATED, 3 * PER_DOUBLING))


def test_more_gpus_may_gain_less_and_fewer_lose_less(tmp_path: Path) -> None:
    plan = definition(tmp_path, "g6e.12xlarge", {"steps": 20_000, "step_ms": {"L40S": 500}})
    one, eight = runtime_on(plan, "g6e.2xlarge"), runtime_on(plan, "g6e.48xlarge")
    assert (one.faster, one.slower) == pytest.approx((math.hypot(STATED, 2 * PER_DOUBLING), STATED))
    assert (eight.faster, eight.slower) == pytest.approx((STATED, math.hypot(STATED, PER_DOUBLING)))
    assert one.basis == "guessed from job.work.step_ms for 4 x L40S"


def test_another_gpu_is_as_much_faster_as_the_same_code_was_there(tmp_path: Path) -> None:
    """Forty sources reach 0.6 of an L40S's peak and 0.3 of an L4's: half the share, of 121 TFLOPS instead of 362."""
    places = [SpeedGroup(gpu, "from scratch", str(at), several=False) for at in range(40) for gpu in ("L40S", "L4")]
    known = Speeds(Speed(place, 0.6 if place.gpu == "L40S" else 0.3) for place in places)
    plan = definition(tmp_path, "g6e.2xlarge", {"steps": 20_000, "step_ms": {"L40S": 500}})
    found = runtime_on(plan, "g6.xlarge", speeds=known)
    assert found.phases[0].step_ms == pytest.approx(500 * 362 / 121 * 2, rel=0.05)
    _, sigma = known.ratio(*(SpeedGroup(gpu, "", "", several=False) for gpu in ("L40S", "L4")))
    assert (found.faster, found.slower) == pytest.approx([math.hypot(STATED, sigma)] * 2)
    assert sigma > 0.15
    assert found.shared == STATED


def test_a_figure_of_a_page_is_less_sure_than_ones_own(tmp_path: Path) -> None:
    work = {"steps": 20_000, "step_ms": {"L40S": 500}}
    own, same, page = (
        definition(tmp_path, "g6e.2xlarge", {**work, **more}) for more in ({}, {"from": "own"}, {"from": "page"})
    )
    assert [runtime_on(each, "g6e.2xlarge").slower for each in (own, same, page)] == [STATED, STATED, PAGE]
    assert math.exp(0.5244 * PAGE) == pytest.approx(1.25, abs=0.02)  # two in five within a quarter: P(|z| < 0.5244)
    assert "step_ms, a page's," in " ".join(render(price(page, CATALOG)).split())
    assert creation_digest(own) == creation_digest(same) != creation_digest(page)
    with pytest.raises(DefinitionError, match=r"job\.work\.from: 'book' is not accepted; allowed: one of own, page"):
        definition(tmp_path, "g6e.2xlarge", {**work, "from": "book"})


@pytest.mark.parametrize(
    ("name", "nearest"),
    [("A100", "A100 40GB or A100 80GB"), ("h100", "H100"), ("8 x L40", "L40S"), ("4xA10", "A10G")],
)
def test_a_step_on_a_gpu_that_is_none_is_refused(tmp_path: Path, name: str, nearest: str) -> None:
    with pytest.raises(DefinitionError, match=rf"{name}' is not accepted; .* Nearest: {nearest}\."):
        definition(tmp_path, "p5.48xlarge", {"steps": 20_000, "step_ms": {name: 140}})


def test_every_type_whose_gpu_has_a_peak_is_priced_and_says_that_it_is_guessed(tmp_path: Path) -> None:
    plan = definition(tmp_path, "g6e.2xlarge", {"steps": 20_000, "step_ms": {"L40S": 500}})
    rows = ranking.every_option(plan, (plan,), Study(CATALOG), runs=10)
    usable = {name for name, each in CATALOG.instances.items() if not each.unusable and each.gpu.bf16_tflops}
    priced = {row.type for row in rows if row.ranked}
    assert priced >= {name for name in usable if (name, "us-east-1") in CATALOG.on_demand_prices}
    assert len(priced) > 40
    assert {row.basis for row in rows if row.ranked} == {"declared", "guessed"}
    lacking = next(row for row in ranking.with_reasons(rows, None) if row.type == "g4dn.xlarge")
    assert "the catalog has no peak of a T4 to guess from" in lacking.lost


def test_gpus_with_less_memory_than_it_is_known_to_run_on_are_no_advice(tmp_path: Path) -> None:
    plan = definition(tmp_path, "p5.48xlarge", {"steps": 20_000, "step_ms": {"H100": 140}}, same_gpus=False)
    plan = replace(plan, limits=replace(plan.limits, max_usd=Decimal(500), max_hours=Decimal(40)))
    bill = price(plan, CATALOG)
    found = cheaper(plan, bill, Study(CATALOG))
    assert found is not None
    assert {row.type for row in found.rows} <= {"p6-b200.48xlarge", "p5en.48xlarge", "g7e.48xlarge", "p4de.24xlarge"}
    assert options.type_cost(BillBasis(plan, CATALOG), "p5.4xlarge").untried == (
        "whether 1 x 80 GB hold it is not known, 8 x 80 GB do: job.memory_gb would say"
    )
    stated = replace(plan, job=replace(plan.job, parameters=changed(plan.job.parameters, memory_gb=30.0)))
    assert not options.type_cost(BillBasis(stated, CATALOG), "p5.4xlarge").untried


def measure(tmp_path: Path, plan: StackDefinition) -> None:
    """Steps of 600 ms on one L40S."""
    tree = measurements.document(
        experiment="command",
        parameters=asdict(plan.job.parameters),
        device={"kind": "cuda", "name": "NVIDIA L40S", "count": 1, "ranks": 1, "memory_gb": 48.0},
        versions={},
        source="probe of 200 steps",
        at="2026-11-26T18:00:00Z",
        measured=[{"name": "train", "steps": 60, "step_ms": {"median": 600.0, "q1": 594.0, "q3": 606.0}}],
        code="0" * 64,
    )
    path = tmp_path / "calibrations" / "mine" / "nvidia-l40s.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({**tree, "image": None}))


def test_a_measurement_on_another_gpu_goes_before_what_the_file_declares(tmp_path: Path) -> None:
    plan = definition(tmp_path, "g6.2xlarge", {"steps": 20_000, "step_ms": {"L40S": 500}})
    measure(tmp_path, plan)
    bill = bill_of(plan, tmp_path, CATALOG)
    assert bill.chosen.runtime.basis == "guessed from what was measured for 1 x L40S"
    declared = price(plan, CATALOG).chosen.runtime
    assert bill.chosen.runtime.phases[0].step_ms == pytest.approx(1.2 * declared.phases[0].step_ms)
    assert bill.chosen.runtime.slower < declared.slower
    assert bill_basis(plan, tmp_path, CATALOG).calibrations.keys() >= {"g6e.xlarge", "g6e.16xlarge"}


def test_what_steps_took_tells_nothing_of_a_run_that_counts_epochs(tmp_path: Path) -> None:
    plan = definition(tmp_path, "g6e.2xlarge", {"epochs": 10, "epoch_minutes": {"L40S": 30}})
    measure(tmp_path, plan)
    (phase,) = bill_of(plan, tmp_path, CATALOG).chosen.runtime.phases
    assert (phase.steps, phase.step_ms) == (10, 30 * 60_000)


def test_hours_are_of_the_listed_types_and_others_are_guessed_from_them(tmp_path: Path) -> None:
    plan = definition(tmp_path, "g6e.12xlarge", {"hours": {"low": 4, "likely": 6, "high": 10}})
    listed, half, other = (runtime_on(plan, type_) for type_ in ("g6e.12xlarge", "g6e.48xlarge", "g6.12xlarge"))
    assert (listed.speed, half.speed, other.speed) == ("declared", "guessed", "guessed")
    assert half.compute_s == pytest.approx(3 * 3600)
    assert other.compute_s > 2 * listed.compute_s
    assert (listed.faster, listed.slower) == pytest.approx((math.log(6 / 4) / 1.2816, math.log(10 / 6) / 1.2816))
    assert other.slower > half.slower > listed.slower


def test_a_run_of_which_nobody_knows_the_length_buys_the_same_hours_everywhere(tmp_path: Path) -> None:
    plan = definition(tmp_path, "g6e.2xlarge", {})
    assert {runtime_on(plan, type_).phases[0].step_ms for type_ in ("g6e.2xlarge", "g6e.48xlarge", "g6.xlarge")} == {
        1000.0
    }


def test_a_step_of_two_nodes_takes_twice_as_long_on_one(tmp_path: Path) -> None:
    plan = definition(tmp_path, "p5.48xlarge", {"steps": 20_000, "step_ms": {"H100": 70}})
    two = replace(plan, fleet=replace(plan.fleet, nodes=2, zones=plan.fleet.zones[:1]))
    basis = BillBasis(two, CATALOG)
    known = basis.known_steps
    assert [(each.gpus, each.step_ms) for each in known] == [(16, 70.0)]
    assert runtime_on(two, "p5.48xlarge").speed == "declared"
    alone = options.type_cost(basis.with_definition(two.on_nodes(1)), "p5.48xlarge", known=known).runtime
    assert alone is not None
    assert (alone.speed, alone.phases[0].step_ms) == ("guessed", 140.0)


def test_without_a_peak_nothing_follows_for_another_gpu() -> None:
    gpus = {each.gpu.name: each.gpu for each in CATALOG.instances.values()}
    figure = StepTime(gpu=gpus["T4"], gpus=1, step_ms=100, faster=0.1, slower=0.1, shared=0.1, said="it")
    assert figure.carried_over(gpus["L4"], 1, Speeds([])) is None
    assert figure.carried_over(gpus["T4"], 2, Speeds([])) is not None
