"""Which measurements a bill may use, and why others do not count."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.definition.model import Job, StackDefinition
from gpufleet.infra.evidence import calibration
from gpufleet.infra.evidence.calibration import Calibration, RefusedCalibration
from gpufleet.job.experiments.growth.spec import GrowthConfig
from gpufleet.job.experiments.kernel.spec import KernelConfig
from tests.infra.calibration_world import find, measurement, place
from tests.infra.cost_definitions import definition, growth
from tests.receipt_tree import receipt

A10G = load_catalog().instances["g5.2xlarge"]


def kernel(root: Path) -> StackDefinition:
    """A job whose node uses all of its GPUs, measured on one."""
    tree = measurement(KernelConfig(), experiment="kernel-sft")  # type: ignore[arg-type]
    place(root, {**tree, "phases": [{**tree["phases"][0], "name": "sft"}]})
    return replace(definition(), job=Job(experiment="kernel-sft", image="i:t", parameters=KernelConfig()))


def refusal(root: Path, wanted: StackDefinition | None = None) -> str:
    found = find(root, wanted)
    assert isinstance(found, RefusedCalibration)
    return found.why


def test_a_measurement_of_this_job_on_this_gpu_counts_and_is_cited(tmp_path: Path) -> None:
    place(tmp_path, measurement())
    found = find(tmp_path)
    assert isinstance(found, Calibration)
    assert [phase.step_ms for phase in found.phases] == [50.0, 100.0, 150.0]
    assert found.start_s == 40.0
    assert found.basis == (
        "measured on NVIDIA A10G on 2026-11-21 (probe of 200 steps, torch 2.13.0; half of the steps within 2.0% of the"
        " median)"
    )
    *most, last = measurement()["phases"]
    place(tmp_path, measurement(phases=[*most, {**last, "step_ms": {"q1": 120, "median": 150, "q3": 180}}]))
    assert (
        "half of the steps within 20.0% of the median" in find(tmp_path).basis
    )  # of the phase in which steps vary most


def test_it_counts_for_every_type_with_that_gpu_and_for_no_other(tmp_path: Path) -> None:
    place(tmp_path, measurement())
    assert isinstance(find(tmp_path, type_="g5.xlarge"), Calibration)
    assert find(tmp_path, type_="g6.xlarge") is None
    assert find(tmp_path, type_="g6e.2xlarge") is None


def test_a_slice_of_a_gpu_is_not_the_gpu(tmp_path: Path) -> None:
    tree = measurement()
    place(tmp_path, {**tree, "device": {**tree["device"], "name": "NVIDIA L4"}})
    assert isinstance(find(tmp_path, type_="g6.xlarge"), Calibration)
    sliced = next(i for i in load_catalog().instances.values() if i.gpu.name == "L4" and i.gpu_share < 1)
    assert calibration.find(definition(), sliced, tmp_path) is None


@pytest.mark.parametrize(
    "config",
    [growth(steps_per_phase=100), growth(seed=9), replace(GrowthConfig(), log=replace(GrowthConfig().log, every=3))],
)
def test_a_longer_run_or_another_seed_is_the_same_speed(tmp_path: Path, config: GrowthConfig) -> None:
    place(tmp_path, measurement())
    assert isinstance(find(tmp_path, definition(config=config)), Calibration)


def test_a_changed_setting_is_refused_by_its_name(tmp_path: Path) -> None:
    place(tmp_path, measurement())
    said = refusal(tmp_path, definition(config=growth(sequences=12)))
    assert "calibrations/tinystories-growth/nvidia-a10g.json no longer counts" in said
    assert "job.parameters.batch.sequences was 16, is 12" in said
    assert "gpufleet calibrate" in said


def test_a_setting_that_did_not_exist_then_is_refused(tmp_path: Path) -> None:
    tree = measurement()
    del tree["settings"]["model.layers"]
    place(tmp_path, tree)
    assert "job.parameters.model.layers was absent, is 7" in refusal(tmp_path)


def test_a_setting_that_is_no_more_is_a_change(tmp_path: Path) -> None:
    place(tmp_path, measurement(settings={**measurement()["settings"], "model.gone": 7}))
    assert "job.parameters.model.gone was 7, is absent" in refusal(tmp_path)


def test_many_changes_are_counted_not_listed(tmp_path: Path) -> None:
    place(tmp_path, measurement(settings={}))
    assert "more" in refusal(tmp_path)


def test_changed_job_code_is_refused(tmp_path: Path) -> None:
    place(tmp_path, measurement(code_sha256="0" * 64))
    folders = "job/experiments/engine, job/experiments/models, job/kind, job/experiments, job/experiments/growth"
    assert f"the code that trains ({folders}) has changed" in refusal(tmp_path)


def test_another_number_of_processes_is_refused(tmp_path: Path) -> None:
    tree = measurement()
    place(tmp_path, {**tree, "device": {**tree["device"], "ranks": 4}})
    assert "measured with 4 processes, g5.2xlarge would run 1" in refusal(tmp_path)
    wanted = kernel(tmp_path)
    assert isinstance(find(tmp_path, wanted), Calibration)
    assert "measured with 1 processes, g5.12xlarge would run 4" in find(tmp_path, wanted, "g5.12xlarge").why


def test_a_phase_that_was_not_reached_is_refused(tmp_path: Path) -> None:
    tree = measurement()
    place(tmp_path, {**tree, "phases": tree["phases"][:2]})
    assert "did not reach phase grown" in refusal(tmp_path)


def test_the_newest_that_counts_is_taken(tmp_path: Path) -> None:
    place(tmp_path, measurement(at="2026-11-20T00:00:00Z", source="old"), "a")
    place(tmp_path, measurement(at="2026-11-22T00:00:00Z", source="new"), "b")
    place(tmp_path, measurement(at="2026-11-23T00:00:00Z", source="of other code", code_sha256="1"), "c")
    found = find(tmp_path)
    assert isinstance(found, Calibration)
    assert found.source == "new"


def test_a_receipt_with_measured_steps_is_a_measurement(tmp_path: Path) -> None:
    tree = measurement(source="receipt of run r7", setup_s=500.0)
    place(tmp_path, receipt(run="r7", measured=tree), "r7", folder="receipts")
    found = find(tmp_path)
    assert isinstance(found, Calibration)
    assert (found.source, found.setup_s) == ("receipt of run r7", 500.0)


def test_a_receipt_without_measured_steps_is_nothing(tmp_path: Path) -> None:
    place(tmp_path, receipt(run="r7", measured=None), "r7", folder="receipts")
    place(tmp_path, "{", "r8", folder="receipts")
    assert find(tmp_path) is None


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        json.dumps({"schema": 9}),
        json.dumps(measurement(phases=[])),
        json.dumps(measurement(phases=[{"name": "dense"}])),
        json.dumps(measurement(settings=None)),
        json.dumps(measurement(device="A10G")),
        json.dumps(measurement(start_s="soon")),
        json.dumps(measurement(at="yesterday")),
        json.dumps(measurement(phases=[*measurement()["phases"], measurement()["phases"][0]])),
        json.dumps(measurement(device={**measurement()["device"], "ranks": math.inf})),
        *(
            json.dumps(
                measurement(phases=[{**measurement()["phases"][0], "step_ms": {"q1": q1, "median": 50, "q3": q3}}])
            )
            for q1, q3 in ((51, 52), (48, 49), (0, 51), (49, math.inf))
        ),
    ],
)
def test_a_damaged_file_is_refused_by_name_and_never_a_crash(tmp_path: Path, content: str) -> None:
    place(tmp_path, content)
    assert "calibrations/tinystories-growth/nvidia-a10g.json is damaged: delete it" in refusal(tmp_path)


def test_a_damaged_file_does_not_hide_a_sound_one(tmp_path: Path) -> None:
    place(tmp_path, "{", "broken")
    place(tmp_path, measurement())
    assert isinstance(find(tmp_path), Calibration)


def test_a_hidden_file_is_no_measurement(tmp_path: Path) -> None:
    place(tmp_path, "Mac OS X", "._nvidia-a10g")
    assert find(tmp_path) is None


def test_a_cpu_measurement_is_for_jobs_on_a_cpu_only(tmp_path: Path) -> None:
    config = growth(device="cpu")
    tree = measurement(config)
    place(tmp_path, {**tree, "device": {"kind": "cpu", "name": "x86_64", "count": 0, "ranks": 1}})
    assert isinstance(find(tmp_path, definition(config=config)), Calibration)
    assert find(tmp_path) is None


def test_types_that_were_never_measured_are_left_out(tmp_path: Path) -> None:
    instances = load_catalog().instances
    wanted = definition(types=("g5.2xlarge", "g6.xlarge", "no.such"))
    assert calibration.find_all(wanted, instances, tmp_path) == {}
    place(tmp_path, measurement())
    assert list(calibration.find_all(wanted, instances, tmp_path)) == ["g5.2xlarge"]


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A10", None),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-16GB", "V100 16GB"),
        ("Tesla V100-SXM2-32GB", "V100 32GB"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB"),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA H100 96GB HBM3", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA H200", "H200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"),
        ("NVIDIA GeForce RTX 4090", None),
        ("", None),
    ],
)
def test_a_drivers_name_leads_to_the_catalogs_gpu(device: str, name: str | None) -> None:
    gpus = {instance.gpu.name for instance in load_catalog().instances.values()}
    assert [gpu for gpu in gpus if calibration.is_gpu(device, gpu)] == ([] if name is None else [name])


def test_phases_without_steps_are_named_as_not_measured(tmp_path: Path) -> None:
    place(tmp_path, measurement())
    assert "not measured" not in find(tmp_path).basis  # every phase of growth has steps
    wanted = kernel(tmp_path)
    assert find(tmp_path, wanted).basis.endswith("; not measured, and assumed: generate, verify)")


def test_a_stage_s_measurement_counts_for_that_stage_alone(tmp_path: Path) -> None:
    place(tmp_path, {**measurement(), "stage": "train"})
    train, judge = (
        replace(definition(), run=replace(definition().run, id=f"r1/{name}")) for name in ("train", "judge")
    )
    assert isinstance(find(tmp_path, train), Calibration)
    assert find(tmp_path, judge) is None
    assert find(tmp_path) is None
    place(tmp_path, measurement())  # of the file before it had stages
    assert isinstance(find(tmp_path, train), Calibration)


def test_a_file_is_named_by_stack_and_device(tmp_path: Path) -> None:
    path = calibration.path_for(tmp_path, "sft-h100", "NVIDIA H100 80GB HBM3")
    assert path.relative_to(tmp_path).as_posix() == "calibrations/sft-h100/nvidia-h100-80gb-hbm3.json"
    assert calibration.path_for(tmp_path, "mine", "NVIDIA L4", "judge").name == "nvidia-l4.judge.json"
