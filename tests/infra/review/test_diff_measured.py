"""`gpufleet diff` prices each commit with the commit's own measurements and instance types."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import date
from decimal import Decimal

import pytest

from gpufleet.infra.catalog import SHIPPED, files
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.review.markdown import LIMIT, marker
from gpufleet.infra.review.review import review_commits
from gpufleet.infra.risk.hazard import Hazard
from tests.infra.calibration_world import measurement
from tests.infra.review_world import STACK, Project, reviewed, run
from tests.receipt_tree import node, receipt


def calibration(step_ms: float) -> str:
    tree = measurement()
    steps = {"median": step_ms, "q1": step_ms, "q3": step_ms}
    return json.dumps({**tree, "phases": [{**phase, "step_ms": steps} for phase in tree["phases"]]})


def kept_receipt(run_id: str) -> str:
    """The receipt of a spot run whose nodes lived for twelve minutes each."""
    attempt = node("i-1", seconds="720", interrupted=True)
    return json.dumps(receipt("1.0000", run=run_id, stack="growth", attempts=[attempt] * 40))


def test_a_price_that_begins_after_head_s_commit_is_in_no_review_of_it(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    """The day of the review does not matter: the commit is from 2026-11-21."""
    prices, key = files.read(SHIPPED), ("g5.2xlarge", "us-east-2")
    now = replace(prices.on_demand[key], as_of=date(2026, 11, 21))
    prices.on_demand[key] = now
    prices.dated[key] = (replace(now, amount=9 * now.amount, valid_from=date(2026, 11, 22)),)
    files.write(prices, project.folder / "prices", date(2026, 11, 21))
    code, stacks = reviewed(capsys, project.stack(), "HEAD")
    assert (code, Decimal(stacks["growth"]["head"]["p50"]) < 2 * now.amount) == (0, True)


def test_a_new_measurement_is_a_row_of_its_own_and_the_rows_still_sum(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    head = project.commit(
        {
            "stacks/growth.yaml": STACK.replace("days: 7", "days: 30"),
            "calibrations/growth/nvidia-a10g.json": calibration(9_000.0),
        }
    )
    _, stacks = reviewed(capsys, base, head)
    growth = stacks["growth"]
    assert [step["keys"] for step in growth["steps"]] == [["measurements"], ["storage.keep.days"]]
    assert (growth["base"]["calibrated"], growth["head"]["calibrated"]) == (False, True)
    for which in ("p50", "p90"):
        moved = sum(Decimal(step[which]) for step in growth["steps"])
        assert moved == Decimal(growth["head"][which]) - Decimal(growth["base"][which])


def test_a_bound_is_held_against_the_measured_speed(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(capsys, project.stack(), "HEAD")[0] == 0
    head = project.commit({"calibrations/growth/nvidia-a10g.json": calibration(9_000.0)})
    assert run(capsys, head, head)[0] == 1


def test_a_setting_that_takes_the_calibration_away_is_said(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.commit({"stacks/growth.yaml": STACK, "calibrations/growth/nvidia-a10g.json": calibration(200.0)})
    _, out = run(
        capsys, base, project.stack(("steps_per_phase: 1000", "steps_per_phase: 1000\n    batch: {sequences: 8}"))
    )
    assert "**HEAD is uncalibrated.**" in out


def test_a_measurement_of_another_stack_moves_what_the_gpu_is_expected_to_do(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    head = project.commit({"calibrations/other/nvidia-a10g.json": calibration(200.0)})
    _, stacks = reviewed(capsys, base, head)
    growth = stacks["growth"]
    assert [step["keys"] for step in growth["steps"]] == [["measurements"]]
    assert not growth["head"]["calibrated"]


def test_receipts_of_the_commit_teach_its_hazard_and_damaged_ones_are_counted(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack(
        ("capacity: on-demand", "capacity: spot"),
        ("phase: 1000", "phase: 50000"),
        ("max_hours: 6", "max_hours: 100"),
    )
    receipts = {f"receipts/growth/r{index}.json": kept_receipt(f"r{index}") for index in range(3)}
    head = project.commit({**receipts, "receipts/growth/torn.json": "{"})
    _, stacks = reviewed(capsys, base, head)
    (step,) = stacks["growth"]["steps"]
    assert step["keys"] == ["measurements"]
    (stack,) = review_commits(project.folder, base, head).stacks
    old, new = (side.bill.chance for side in (stack.base, stack.head) if side and side.bill)
    assert old == Hazard()
    assert new is not None
    assert new.source == "120 interruptions in 24 node-hours seen"
    assert "- HEAD: damaged receipts, left out: 1" in run(capsys, base, head)[1]


def test_traces_of_a_commit_are_its_own_and_a_broken_one_is_an_error_of_head_only(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = {"calibrations/growth/nvidia-a10g.json": calibration(9_000.0)}
    bad = project.commit({"stacks/growth.yaml": STACK, "traces/a.csv": "at_h\n", **measured})
    rows = "".join(f"{2 * hour},1\n{2 * hour + 1},0\n" for hour in range(500))
    (project.folder / next(iter(measured))).unlink()
    good = project.commit({"traces/a.csv": f"# type=g5.2xlarge\nat_h,available\n{rows}"})
    with pytest.raises(GpufleetError, match=r"^HEAD/traces/a\.csv: no trace"):
        review_commits(project.folder, good, bad)
    code, out = run(capsys, bad, good)
    assert code == 0
    assert "- BASE: its traces cannot be read; HEAD's hazards are used instead" in out
    (step,) = reviewed(capsys, bad, good)[1]["growth"]["steps"]
    assert step["keys"] == ["measurements"]
    assert Decimal(step["p50"]) < 0
    spot = project.stack(("capacity: on-demand", "capacity: spot"))
    (stack,) = review_commits(project.folder, good, spot).stacks
    assert stack.head
    assert stack.head.bill
    assert stack.head.bill.chance
    assert stack.head.bill.chance.source == "499 interruptions in 500 node-hours seen"


def test_a_type_that_only_head_knows_is_priced_at_head_and_unknown_at_base(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    tables: dict[str, str | None] = {f"infra/catalog/{path.name}": path.read_text() for path in SHIPPED.glob("*.csv")}
    project.commit(tables)
    base = project.stack(("instance_types: [g5.2xlarge]", "instance_types: [g99.xlarge]"))
    head = project.commit(
        {
            f"infra/catalog/{name}.csv": str(tables[f"infra/catalog/{name}.csv"]) + row
            for name, row in {
                "instances": "g99.xlarge,8,32,A10G,1,1,450,5,1,5,0,1,4000,us-east-2,,a test,2026-11-21\n",
                "on_demand": "g99.xlarge,us-east-2,1,a test,2026-11-21,verified\n",
            }.items()
        }
    )
    code, stacks = reviewed(capsys, base, head)
    assert code == 0
    assert "g99.xlarge" in stacks["growth"]["base"]["errors"][0]
    assert stacks["growth"]["head"]["errors"] == []


@pytest.mark.parametrize(
    "row", ["g5.2xlarge,8\n", "x,8,32,NoGpu,1,1,0,5,1,1,unknown,,s,2026-01-01\n", "x,,,,,,,,,,,,,\n"]
)
def test_a_broken_row_of_a_commits_types_is_said_and_this_versions_stand_in(
    project: Project, capsys: pytest.CaptureFixture[str], row: str
) -> None:
    tables: dict[str, str | None] = {f"infra/catalog/{path.name}": path.read_text() for path in SHIPPED.glob("*.csv")}
    tables["infra/catalog/instances.csv"] = str(tables["infra/catalog/instances.csv"]) + row
    head = project.commit({**tables, "stacks/growth.yaml": STACK})
    code, out = run(capsys, head, head)
    assert code == 0
    assert "- HEAD: its shipped catalog has another form" in out


@pytest.mark.parametrize("broken_side", ["base", "head"])
def test_a_stack_without_a_bill_is_neither_saved_nor_new_money(
    project: Project, capsys: pytest.CaptureFixture[str], broken_side: str
) -> None:
    good = project.commit({"stacks/growth.yaml": STACK, "stacks/other.yaml": STACK})
    bad = project.commit({"stacks/growth.yaml": "fleet: [\n"})
    _, out = run(capsys, *((bad, good) if broken_side == "base" else (good, bad)))
    assert "## Cost review: 0.00 USD" in out
    assert "without `growth` (no bill to compare)" in out


def test_a_review_longer_than_a_comment_is_cut_at_a_line_and_says_so(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    project.commit({f"stacks/s{index:03}.yaml": STACK for index in range(2)})
    wrong = "".join(f"key{index}: {'x' * 60}\n" for index in range(900))
    base, head = "HEAD", project.stack() and project.commit({"stacks/growth.yaml": STACK + wrong})
    code, out = run(capsys, f"{base}~1", head)
    assert code == 2
    assert out.startswith(marker())
    assert len(out) <= LIMIT
    assert "**A stack of HEAD has no bill.**" in out
    assert "lines are missing.** All of it: `gpufleet diff " in out.splitlines()[-1]
    _, stacks = reviewed(capsys, f"{base}~1", head)
    assert len(stacks["growth"]["head"]["errors"]) >= 900


def test_a_stack_whose_name_is_not_text_is_an_error_in_the_review(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    (project.folder / "stacks").joinpath(b"\xff.yaml".decode("utf-8", "surrogateescape")).write_text(STACK)
    code, _ = run(capsys, base, project.commit({}), "--out", "review.md")
    assert code == 2
    assert "the file's name" in (project.folder / "review.md").read_text(encoding="utf-8")


def test_a_commit_whose_files_git_does_not_have_is_an_error(project: Project) -> None:
    head = project.stack()
    blob = project.git("rev-parse", f"{head}:stacks/growth.yaml").strip()
    (project.root / ".git" / "objects" / blob[:2] / blob[2:]).unlink()
    with pytest.raises(GpufleetError, match="without a filter"):
        review_commits(project.folder, head, head)
