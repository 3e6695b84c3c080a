"""A bill uses a measurement if there is a valid one, and says on what it is based."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import UTC, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.bill import record, runtime
from gpufleet.infra.bill.bill import Bill
from gpufleet.infra.bill.estimate import price
from gpufleet.infra.bill.table import render
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.cli import main
from gpufleet.infra.definition.model import Disk, Estimate
from gpufleet.infra.evidence import calibration, own_speeds, proofs
from gpufleet.infra.evidence.calibration import RefusedCalibration
from gpufleet.infra.program.plan import make
from gpufleet.infra.program.run_guard import Previous
from gpufleet.job import measured
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.sft.spec import SftConfig
from tests.infra.calibration_world import measurement, place
from tests.infra.commands_world import definition as loaded
from tests.infra.commands_world import project
from tests.infra.cost_definitions import definition, growth
from tests.receipt_tree import place as keep
from tests.receipt_tree import receipt

pytestmark = pytest.mark.usefixtures("everything_known")

CATALOG = load_catalog()
ROOT = Disk(size_gib=100)


def hours(config: GrowthConfig | None = None, estimate: Estimate | None = None, **more: Any) -> runtime.Runtime:
    found = calibration.parse(measurement(config))
    instance = CATALOG.instances["g5.2xlarge"]
    return runtime.hours(config or GrowthConfig(), instance, estimate or Estimate(), ROOT, calibration=found, **more)


def bill(seen: calibration.Calibration | RefusedCalibration | None, **changes: Any) -> Bill:
    return price(definition(**changes), CATALOG, calibrations={} if seen is None else {"g5.2xlarge": seen}, runs=200)


def test_steps_evaluations_saves_and_boundaries_are_as_they_were_measured() -> None:
    config = GrowthConfig(steps_per_phase=1000)
    found = hours(config)
    assert [phase.step_ms for phase in found.phases] == [50.0, 100.0, 150.0]
    evaluations = sum(size.evaluations for size in config.phases()) * 0.5
    assert found.evaluation_s == pytest.approx(evaluations)  # the measurement after the last step includes the samples
    assert found.growth_s == pytest.approx(2 * 30.0)
    assert found.stalls_s == pytest.approx(sum(phase.saves for phase in found.phases) * 0.2)
    steps_s = 1000 * (0.05 + 0.1 + 0.15)
    assert found.work_s == pytest.approx(steps_s + evaluations + 60.0 + found.stalls_s + found.upload_s)


def test_the_end_of_the_run_is_the_measured_one_with_hash_and_upload() -> None:
    measured_end, assumed_end = (
        hours(),
        runtime.hours(GrowthConfig(), CATALOG.instances["g5.2xlarge"], Estimate(), ROOT),
    )
    exports = list(GrowthConfig().sizes().exports.values())
    written = (GrowthConfig().sizes().phase_ends[2] + 2 * exports[-1]) / 1e9
    assert measured_end.upload_s - assumed_end.upload_s == pytest.approx(12.0 - written / runtime.NVME_WRITE_GB_S)


def test_the_measured_end_of_training_is_not_that_of_the_work_after_it() -> None:
    tree = measurement()
    tree["phases"] = [{**tree["phases"][0], "name": "train"}]
    seen = [calibration.parse({**tree, "finish_s": finish_s}) for finish_s in (12.0, None)]
    ends = [
        runtime.hours(SftConfig(), CATALOG.instances["p5.4xlarge"], Estimate(), ROOT, calibration=each).phases[-1]
        for each in seen
    ]
    assert ends[0] == ends[1]  # the merge: five losses and the stored answers


def test_a_save_that_is_waited_for_takes_its_measured_writing_too() -> None:
    config = SftConfig(measures=replace(SftConfig().measures, async_checkpoints=False))
    tree = measurement()
    seen = calibration.parse({**tree, "phases": [{**tree["phases"][0], "name": "train"}]})
    found = runtime.hours(config, CATALOG.instances["p5.4xlarge"], Estimate(), ROOT, calibration=seen)
    assert found.stalls_s == pytest.approx(found.phases[0].saves * (0.2 + 2.0))


def test_what_a_probe_did_not_see_stays_assumed() -> None:
    tree = measurement(finish_s=None)
    tree["phases"] = [{**phase, "save": None, "evaluation_s": None, "boundary_s": None} for phase in tree["phases"]]
    instance = CATALOG.instances["g5.2xlarge"]
    found = runtime.hours(GrowthConfig(), instance, Estimate(), ROOT, calibration=calibration.parse(tree))
    typed = Estimate(step_ms=(Decimal(50), Decimal(100), Decimal(150)))
    assumed = runtime.hours(GrowthConfig(), instance, typed, ROOT)
    assert found.work_s == pytest.approx(assumed.work_s)
    assert (found.calibrated, assumed.calibrated) == (True, False)


def test_set_up_is_a_receipts_or_assumed_but_never_shorter_than_the_trainers_own_start() -> None:
    instance = CATALOG.instances["g5.2xlarge"]

    def setup_s(**changes: Any) -> float:
        seen = calibration.parse(measurement(**changes))
        return runtime.hours(GrowthConfig(), instance, Estimate(), ROOT, calibration=seen).setup_s

    assert setup_s() == 8 * 60
    assert setup_s(start_s=900.0) == 900.0
    assert setup_s(setup_s=333.0) == 333.0
    assert hours(estimate=Estimate(setup_minutes=Decimal(2))).setup_s == 120.0


def test_the_definitions_own_step_times_go_before_a_measurement() -> None:
    found = hours(estimate=Estimate(step_ms=(Decimal(1), Decimal(2), Decimal(3))))
    assert [phase.step_ms for phase in found.phases] == [1.0, 2.0, 3.0]
    assert not found.calibrated


def test_one_nodes_measurement_says_nothing_of_two() -> None:
    assert not hours(nodes=2).calibrated


def test_a_job_on_a_cpu_is_priced_from_its_measurement() -> None:
    config = growth(device="cpu")
    assert hours(config).phases[0].step_ms == 50.0


def test_a_calibrated_bill_cites_its_measurement_and_warns_of_no_speed() -> None:
    found = bill(calibration.parse(measurement()))
    assert found.calibrated
    assert record.to_json(found)["calibrated"] is True
    assert "measured on NVIDIA A10G on 2026-11-21" in record.to_json(found)["basis"]
    assert not any("uncalibrated" in warning for warning in found.warnings)
    assert "Calibrated: measured on NVIDIA A10G on 2026-11-21 (probe of 200 steps" in render(found)


def test_a_refused_measurement_is_named_and_the_bill_is_uncalibrated() -> None:
    found = bill(RefusedCalibration(why="calibrations/x.json no longer counts: job.parameters.model.width was 1, is 2"))
    assert not found.calibrated
    assert found.usd == bill(None).usd
    assert any(warning.startswith("uncalibrated: 50% of the roofline") for warning in found.warnings)
    assert "g5.2xlarge: calibrations/x.json no longer counts: job.parameters.model.width was 1, is 2" in (
        found.warnings
    )


def test_half_the_measured_speed_costs_more() -> None:
    slow = measurement()
    slow["phases"] = [
        {**phase, "step_ms": {key: 2 * value for key, value in phase["step_ms"].items()}} for phase in slow["phases"]
    ]
    usual, slower = bill(calibration.parse(measurement())), bill(calibration.parse(slow))
    assert slower.usd.p50 > usual.usd.p50


def test_the_command_finds_the_measurement_and_says_how_right_earlier_bills_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(tmp_path, monkeypatch)
    root = path.parents[1]
    file = calibration.path_for(root, "small-growth", "NVIDIA A10G")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps(measurement()))
    keep(root, receipt("1.10"))
    assert main(["cost", "small-growth", "--all"]) == 0
    said = capsys.readouterr().out
    assert "Calibrated: measured on NVIDIA A10G" in said
    assert "How right earlier bills were: 1 receipt: median error 10 %, 100 % inside p10-p90." in said
    plan = make(
        root,
        "small-growth",
        now=datetime(2026, 11, 21, tzinfo=UTC),
        previous=Previous(outputs={}),
        preview=True,
    )
    assert plan.bill.calibrated
    file.write_text(json.dumps(replaced(measurement())))
    assert main(["cost", "small-growth", "--all"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "no longer counts: job.parameters.batch.sequences was 3, is 16" in shown


def replaced(tree: dict[str, Any]) -> dict[str, Any]:
    return {**tree, "settings": {**tree["settings"], "batch.sequences": 3}}


def test_a_longer_run_is_priced_in_proportion(tmp_path: Path) -> None:
    place(tmp_path, measurement())
    short, long = definition(config=growth(steps_per_phase=100)), definition(config=growth(steps_per_phase=1000))
    instances = CATALOG.instances
    bills = [
        price(each, CATALOG, calibrations=calibration.find_all(each, instances, tmp_path), runs=200)
        for each in (short, long)
    ]
    steps = [each.chosen.runtime.compute_s for each in bills]
    assert steps[1] == pytest.approx(10 * steps[0])
    assert all(each.calibrated for each in bills)


def test_the_seed_of_a_loaded_definition_leaves_it_calibrated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(tmp_path, monkeypatch)
    wanted = loaded(path)
    config = wanted.job.parameters
    assert isinstance(config, GrowthConfig)
    file = calibration.path_for(path.parents[1], "small-growth", "NVIDIA A10G")
    file.parent.mkdir(parents=True)
    file.write_text(json.dumps({**measurement(config), "code_sha256": measured.code_sha256("tinystories-growth")}))
    other = replace(wanted, job=replace(wanted.job, parameters=replace(config, seed=1)))
    found = calibration.find_all(other, CATALOG.instances, path.parents[1])
    assert isinstance(found["g5.2xlarge"], calibration.Calibration)


def prove(root: Path) -> None:
    """Keeps a canary's file in the project."""
    (root / proofs.FOLDER).mkdir()
    started = {"node.started_s": {"count": 3, "least": 200.0, "median": 222.0, "most": 300.0}}
    tree = {"schema": proofs.SCHEMA, "at": "2026-11-29T16:00:00+00:00", "region": "us-east-2", "embedded": False}
    tree |= {"types": ["g4dn.xlarge"], "figures": started, "assumptions": [], "answers": {}}
    (root / proofs.FOLDER / "2026-11-29-us-east-2.json").write_text(json.dumps(tree))


def test_without_a_receipt_set_up_is_that_of_the_accounts_newest_canary(tmp_path: Path) -> None:
    prove(tmp_path)
    speeds = own_speeds.known(tmp_path, CATALOG.instances, "mine")

    def set_up(kind: str) -> tuple[float, str]:
        found = runtime.hours(GrowthConfig(), CATALOG.instances[kind], Estimate(), ROOT, speeds=speeds)
        return found.setup_s, found.setup_source

    assert set_up("g5.2xlarge") == (222.0, "the canary of 2026-11-29 in us-east-2")
    assert set_up("p5.48xlarge") == (15 * 60, "")


def test_the_bill_says_from_which_canary_its_set_up_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = project(tmp_path, monkeypatch)
    root = path.parents[1]
    monkeypatch.chdir(root)
    source = "of set-up before the first phase (from the canary of 2026-11-29 in us-east-2)"
    for proven in (False, True):
        if proven:
            prove(root)
        assert main(["cost", path.stem, "--all"]) == 0
        assert (source in " ".join(capsys.readouterr().out.split())) is proven
