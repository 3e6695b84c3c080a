"""The decisions of the program before it declares the first resource."""

from __future__ import annotations

import base64
import json
import shutil
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.pin import pin
from gpufleet.infra.errors import DefinitionError, GpufleetError
from gpufleet.infra.inputs.prepare import prepared
from gpufleet.infra.program.plan import Plan, make
from gpufleet.infra.program.run_guard import Previous
from tests.infra.command_files import in_block
from tests.repository import ROOT

NOW = datetime(2026, 11, 21, 12, 0, tzinfo=UTC)
NAME = "tinystories-growth"
NEW = Previous(outputs={})


@pytest.fixture(scope="module")
def ready(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose definition is pinned and whose dataset is prepared."""
    root = tmp_path_factory.mktemp("ready")
    (root / "stacks").mkdir()
    file = root / "stacks" / f"{NAME}.yaml"
    text = rehearsal_text(ROOT / "stacks" / f"{NAME}.yaml")
    file.write_text(text.replace("stories: 2000", "stories: 100").replace("sequence: 64", "sequence: 16"))
    pin(file, ami="ami-0123456789abcdef0", image="public.ecr.aws/a/b:1@sha256:" + "5" * 64)
    prepared(load(file, now=NOW), root)
    return root


@pytest.fixture
def project(ready: Path, tmp_path: Path) -> Path:
    """A copy of the project, which a test may change."""
    return shutil.copytree(ready, tmp_path / "project")


def edit(root: Path, old: str, new: str) -> None:
    file = root / "stacks" / f"{NAME}.yaml"
    assert file.read_text().count(old) == 1, old
    file.write_text(file.read_text().replace(old, new))


def begun(plan: Plan) -> Previous:
    return Previous(outputs={"run": asdict(plan.verdict.run), "runs": ["r1"]}, fleets=frozenset({"r1"}))


def test_a_pulumi_stack_that_is_not_called_like_a_file_is_told_how_to_name_one(ready: Path) -> None:
    with pytest.raises(GpufleetError, match=f"no stack 'dev'; stacks/ has {NAME}(.|\n)*set definition NAME"):
        make(ready, "dev", now=NOW, previous=NEW, preview=True)


def test_a_ready_definition_has_a_plan_without_warnings(ready: Path) -> None:
    plan = make(ready, NAME, now=NOW, previous=NEW, preview=False)
    assert plan.warnings == ()
    assert plan.cheaper is not None
    assert plan.dataset is not None


def test_the_definition_is_found_by_a_path_in_the_project_too(ready: Path) -> None:
    assert make(ready, f"stacks/{NAME}.yaml", now=NOW, previous=NEW, preview=True).definition.name == NAME


def test_run_json_names_what_the_node_fetches_and_changes_with_its_fleet_s_expiry_alone(ready: Path) -> None:
    plan, again = (make(ready, NAME, now=NOW + timedelta(hours=h), previous=NEW, preview=True) for h in (0, 1))
    assert plan.dataset is not None
    found = json.loads(plan.run_config)["inputs"]
    assert found["archive"]["sha256"] == plan.archive.sha256
    assert {file["name"] for file in found["dataset"]["files"]} == {file.name for file in plan.dataset.files}
    expires, later = (each.verdict.run.valid_until for each in (plan, again))
    assert expires != later
    assert json.loads(plan.run_config)["limits"]["expires"] == expires
    assert plan.run_config.replace(expires, later) == again.run_config
    continued = make(ready, NAME, now=NOW + timedelta(hours=1), previous=begun(plan), preview=True)
    assert continued.run_config == plan.run_config


def test_user_data_holds_the_names_that_aws_gave(ready: Path) -> None:
    plan = make(ready, NAME, now=NOW, previous=NEW, preview=True)
    script = base64.b64decode(plan.user_data("the-bucket", "the-group", "the-schedules/stop")).decode()
    assert "BUCKET=the-bucket\n" in script
    assert "LOG_GROUP=the-group\n" in script
    assert "SCHEDULE=the-schedules/stop\n" in script


def test_the_outputs_are_the_bill_s_own_figures(ready: Path) -> None:
    plan = make(ready, NAME, now=NOW, previous=NEW, preview=True)
    outputs = plan.outputs()
    assert set(outputs["bill"]) == {line.name for line in plan.bill.lines} | {"total"}
    assert outputs["usd"]["p50"] == f"${plan.bill.usd.p50:.2f}"
    numbers = outputs["numbers"]
    assert numbers["usd"]["p90"] == pytest.approx(float(plan.bill.usd.p90), abs=1e-4)
    assert numbers["usd"].keys() == numbers["hours"].keys() == outputs["usd"].keys()
    assert f"${numbers['kept_usd_per_month']:.4f}" == outputs["kept"]["usd_per_month"]


def test_what_is_missing_stops_an_up_and_only_warns_in_a_preview(project: Path) -> None:
    shutil.rmtree(project / "data")
    assert "is not prepared" in make(project, NAME, now=NOW, previous=NEW, preview=True).warnings[0]
    with pytest.raises(GpufleetError, match=r"not ready for up\n  - storage\.dataset"):
        make(project, NAME, now=NOW, previous=NEW, preview=False)


def test_a_dataset_that_is_not_what_it_was_prepared_as_stops_an_up(project: Path) -> None:
    shard = next((project / "data").rglob("train_*.bin"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    make(project, NAME, now=NOW, previous=NEW, preview=True)
    with pytest.raises(GpufleetError, match=shard.name):
        make(project, NAME, now=NOW, previous=NEW, preview=False)


def test_limits_below_the_bill_stop_a_new_run(project: Path) -> None:
    edit(project, "max_usd: 3.00", "max_usd: 0.01")
    with pytest.raises(DefinitionError, match=r"limits.max_usd: '0.01'"):
        make(project, NAME, now=NOW, previous=NEW, preview=True)


def test_a_run_that_has_begun_is_not_stopped_by_new_prices(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    previous = begun(make(project, NAME, now=NOW, previous=NEW, preview=True))
    monkeypatch.setattr(
        "gpufleet.infra.program.plan.problems", lambda definition, bill: ["limits.max_usd is below the new p50"]
    )
    plan = make(project, NAME, now=NOW, previous=previous, preview=False)
    assert plan.verdict.continues
    assert plan.cheaper is None  # a stack stays in its region
    assert plan.warnings == ("limits.max_usd is below the new p50",)


def test_a_deadline_too_near_stops_a_new_run_and_not_one_that_has_begun(project: Path) -> None:
    edit(project, "max_usd: 3.00", "max_usd: 3.00\n  deadline: 2026-11-21T12:03:00Z")
    edit(project, "capacity_wait_minutes: 0.05", "capacity_wait_minutes: 5")
    plan = make(project, NAME, now=NOW, previous=NEW, preview=True)
    assert any("of runs miss limits.deadline" in warning for warning in plan.warnings)
    soon = NOW + timedelta(minutes=2, seconds=50)
    with pytest.raises(DefinitionError, match=r"limits\.deadline: '2026-11-21T12:03:00Z' is not accepted"):
        make(project, NAME, now=soon, previous=NEW, preview=True)
    assert make(project, NAME, now=soon, previous=begun(plan), preview=True).verdict.continues


def test_a_deadline_in_hours_is_a_time_in_run_json_which_a_second_up_does_not_move(project: Path) -> None:
    edit(project, "max_usd: 3.00", "max_usd: 3.00\n  deadline: in 5 h")
    preview, first = (make(project, NAME, now=NOW + timedelta(hours=h), previous=NEW, preview=True) for h in (0, 1))
    again = make(project, NAME, now=NOW + timedelta(hours=4), previous=begun(first), preview=True)
    told = [json.loads(plan.run_config)["limits"]["deadline"] for plan in (preview, first, again)]
    assert told == ["2026-11-21T17:00:00Z", "2026-11-21T18:00:00Z", "2026-11-21T18:00:00Z"]
    assert again.run_config == first.run_config
    assert again.verdict.run.valid_until == first.verdict.run.valid_until == told[1]


def test_up_waits_for_the_block_of_a_later_run_too_and_not_for_that_of_one_that_goes_on(project: Path) -> None:
    edit(project, "[us-east-2a, us-east-2b, us-east-2c]", "[us-east-2a]")
    block = "{reservation: cr-0123456789abcdef0, start: 2026-11-26T11:30:00Z, end: 2026-11-27T11:30:00Z, fee_usd: 1}"
    file = project / "stacks" / f"{NAME}.yaml"
    file.write_text(in_block(file.read_text(), block))
    early = {"now": NOW, "preview": False}  # five days before
    refused = "the block begins at 2026-11-26T11:30:00Z: before that AWS launches nothing into it"
    with pytest.raises(GpufleetError, match=refused):
        make(project, NAME, previous=NEW, **early)  # type: ignore[arg-type]
    plan = make(project, NAME, now=NOW + timedelta(days=5), previous=NEW, preview=False)
    assert make(project, NAME, previous=begun(plan), **early).verdict.run.id == "r1"  # type: ignore[arg-type]
    edit(project, "id: r1", "id: r2")
    with pytest.raises(GpufleetError, match=refused):
        make(project, NAME, previous=begun(plan), **early)  # type: ignore[arg-type]


def test_a_stage_that_judges_gets_a_stage_s_output_and_neither_dataset_nor_weights(tmp_path: Path) -> None:
    (tmp_path / "stacks").mkdir()
    shutil.copy(ROOT / "stacks" / "kernel-sft-stages.yaml", tmp_path / "stacks")
    plan = make(tmp_path, "kernel-sft-stages", now=NOW, previous=NEW, preview=True)
    train, judge = (json.loads(each.run_config)["inputs"] for each in plan.stages)
    assert train.keys() == {"archive", "dataset", "base_weights"}
    assert judge.keys() == {"archive", "folders"}
    assert judge["folders"] == {"train": {"uri": None, "sha256": None, "files": [], "stage": "r1/train"}}
    assert (plan.definition.storage.dataset, plan.definition.storage.base_weights) == (
        "data/kernelbook",
        "data/qwen3-8b",
    )
