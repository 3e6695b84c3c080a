"""`gpufleet diff` over real git repositories."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import pytest

from gpufleet.infra.bill.estimate import price
from gpufleet.infra.catalog import SHIPPED, files, read_catalog
from gpufleet.infra.definition.loader import load
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.review.review import review_commits
from tests.infra.review_world import STACK, Project, changed, reviewed, run
from tests.repository import ROOT

KEY = ("g5.2xlarge", "us-east-2")
NOW = datetime(2026, 11, 21, tzinfo=UTC)


def test_each_changed_setting_has_its_dollars_and_they_sum_to_the_difference(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    head = project.stack(
        ("steps_per_phase: 1000", "steps_per_phase: 2000"),
        ("capacity: on-demand", "capacity: spot"),
        ("days: 7", "days: 30"),
    )
    code, stacks = reviewed(capsys, base, head)
    growth = stacks["growth"]
    assert code == 0
    assert [step["keys"] for step in growth["steps"]] == [
        ["job.parameters.steps_per_phase"],
        ["fleet.capacity"],
        ["storage.keep.days"],
    ]
    assert (growth["steps"][0]["before"], growth["steps"][0]["after"]) == ("1000", "2000")
    effects = [Decimal(step["p50"]) for step in growth["steps"]]
    assert effects[0] > 0 > effects[1]
    assert effects[2] > 0
    for which in ("p50", "p90"):
        moved = sum(Decimal(step[which]) for step in growth["steps"])
        assert moved == Decimal(growth["head"][which]) - Decimal(growth["base"][which])


def test_settings_that_only_hold_together_are_one_step(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    base = project.stack()
    head = project.stack(
        ("region: us-east-2", "region: us-west-2"), ("zones: [us-east-2a, us-east-2b]", "zones: [us-west-2a]")
    )
    _, stacks = reviewed(capsys, base, head)
    (step,) = stacks["growth"]["steps"]
    assert step["keys"] == ["fleet.region", "fleet.zones"]


def test_a_key_that_needs_a_later_one_waits_for_it(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """1250 MiB/s need 5000 IOPS, and the key for IOPS comes later, so the throughput must wait for it."""
    disk = "dataset: data/tinystories\n  root:\n    size_gib: 100\n"
    base = project.stack(("dataset: data/tinystories\n", disk))
    head = project.stack(("dataset: data/tinystories\n", f"{disk}    throughput_mibps: 1250\n    iops: 5000\n"))
    _, stacks = reviewed(capsys, base, head)
    steps = stacks["growth"]["steps"]
    assert [step["keys"] for step in steps] == [["storage.root.iops"], ["storage.root.throughput_mibps"]]


def test_a_section_that_goes_is_taken_out_whole(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    base = project.stack(("limits:", "estimate:\n  hazard_per_hour: 0.5\nlimits:"))
    head = project.stack()
    code, stacks = reviewed(capsys, base, head)
    (step,) = stacks["growth"]["steps"]
    assert code == 0
    assert (step["keys"], step["before"], step["after"]) == (["estimate.hazard_per_hour"], "0.5", "")


@pytest.mark.parametrize("empty", ["estimate:", "estimate: {}"])
def test_a_section_that_was_empty_is_filled_key_by_key_and_emptied_alike(
    project: Project, capsys: pytest.CaptureFixture[str], empty: str
) -> None:
    """If the empty section were removed after its keys were added, the keys would go too; the rows would sum to 0."""
    without = project.stack(("limits:", f"{empty}\nlimits:"))
    filled = project.stack(("limits:", "estimate:\n  efficiency: 0.25\nlimits:"))
    for base, head, sign in ((without, filled, 1), (filled, without, -1)):
        _, stacks = reviewed(capsys, base, head)
        growth = stacks["growth"]
        (step,) = growth["steps"]
        moved = Decimal(growth["head"]["p50"]) - Decimal(growth["base"]["p50"])
        assert step["keys"] == ["estimate.efficiency"]
        assert Decimal(step["p50"]) == moved
        assert moved * sign > 0


def test_new_prices_are_a_row_of_their_own(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    base = project.stack()
    prices = files.read(SHIPPED)
    old, newest = prices.on_demand[KEY], prices.newest
    day = newest + timedelta(days=20)
    dearer = files.Price(amount=old.amount * 2, unit=old.unit, source="x", as_of=day, status="verified")
    prices.on_demand[KEY] = dearer
    files.write(prices, project.folder / "prices", dearer.as_of)
    head = project.stack(("steps_per_phase: 1000", "steps_per_phase: 1100"))
    _, stacks = reviewed(capsys, base, head)
    growth = stacks["growth"]
    first, second = growth["steps"]
    assert first["keys"] == ["prices"]
    was, now_is = f"shipped, {newest}", f"prices/{dearer.as_of}, {dearer.as_of}"
    assert (first["before"], first["after"]) == (was, now_is)
    before = load(project.folder / "stacks" / "growth.yaml", now=NOW)
    before = replace(before, job=replace(before.job, parameters=replace(before.job.parameters, steps_per_phase=1000)))
    compute = next(line for line in price(before, read_catalog(SHIPPED, None)).lines if line.name == "compute")
    moved = Decimal(first["p50"])
    assert float(moved) == pytest.approx(float(compute.amount), rel=0.02)  # only its price was doubled
    assert second["keys"] == ["job.parameters.steps_per_phase"]
    moved = Decimal(first["p50"]) + Decimal(second["p50"])
    assert moved == Decimal(growth["head"]["p50"]) - Decimal(growth["base"]["p50"])


def test_each_side_is_priced_with_its_own_commits_shipped_prices(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = {f"infra/catalog/{path.name}": path.read_text() for path in SHIPPED.glob("*.csv")}
    base = project.commit({"stacks/growth.yaml": STACK, **tables})
    name = "infra/catalog/on_demand.csv"
    cheaper = re.sub(r"(?m)^(g5\.2xlarge,us-east-2[^,]*,)[0-9.]+", r"\g<1>0.5000", tables[name])
    head = project.commit({name: cheaper})
    _, stacks = reviewed(capsys, base, head)
    (step,) = stacks["growth"]["steps"]
    assert step["keys"] == ["prices"]
    assert Decimal(step["p50"]) < 0


def test_shipped_prices_of_another_form_are_replaced_by_this_versions_and_it_says_so(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.commit({"stacks/growth.yaml": STACK, "infra/catalog/spot.csv": "type,region,az1,az2\n"})
    head = project.commit({"infra/catalog/spot.csv": None})
    code, out = run(capsys, base, head)
    assert code == 0
    assert "- BASE: its shipped catalog has another form; this version's is used instead" in out


def test_added_and_removed_stacks_count_whole(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    base = project.commit({"stacks/old.yaml": STACK})
    head = project.commit({"stacks/old.yaml": None, "stacks/new.yaml": STACK})
    code, out = run(capsys, base, head)
    assert code == 0
    assert re.search(r"\| `new` \| added \| [0-9.]+ \|", out)
    assert re.search(r"\| `old` \| removed \| ~~[0-9.]+~~ \|", out)
    assert "## Cost review: 0.00 USD" in out


def test_comments_and_quotes_are_no_change_and_scenarios_and_rehearsal_move_no_dollar(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    head = project.stack(("region: us-east-2", "region: 'us-east-2'  # home"))
    _, out = run(capsys, base, head)
    assert "Unchanged: `growth`." in out
    rehearsed = project.stack(("limits:", "rehearsal:\n  interruptions:\n    seed: 9\nlimits:"))
    _, out = run(capsys, base, rehearsed)
    assert "Changed without an effect on the bill: `rehearsal`." in out


def test_a_deadline_that_has_passed_does_not_fail_a_review(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    head = project.stack(("max_hours: 6", "max_hours: 6\n  deadline: 2026-01-01T00:00:00Z"))
    assert run(capsys, head, head)[0] == 0


def test_a_p90_above_its_bound_is_exit_1(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    """The mark shows the p90 as the limit counts it, with the first hours that AWS does not charge."""
    spot = ("capacity: on-demand", "capacity: spot")
    base = project.stack(spot)
    _, stacks = reviewed(capsys, base, base)
    charged = price(
        load(project.folder / "stacks" / "growth.yaml", now=NOW), read_catalog(SHIPPED, None)
    ).chosen.metered_usd
    finished = Decimal(stacks["growth"]["head"]["p90"])
    assert f"{charged.p50:.2f}" < f"{charged.p90:.2f}" != f"{finished:.2f}"
    between = (charged.p50 + charged.p90) / 2
    head = project.stack(spot, ("max_usd: 9.00", f"max_usd: {between:.2f}"))
    code, out = run(capsys, base, head)
    assert code == 1
    assert f"p90 {charged.p90:.2f} as limits.max_usd counts it passes limits.max_usd {between:.2f}" in out
    assert f"**p90 passes it: {charged.p90:.2f} as limits.max_usd counts it**" in out


def test_a_change_that_its_limits_would_cut_short_has_the_dollars_of_finishing(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    head = project.stack(("steps_per_phase: 1000", "steps_per_phase: 100000"))
    code, stacks = reviewed(capsys, base, head)
    bill = price(load(project.folder / "stacks" / "growth.yaml", now=NOW), read_catalog(SHIPPED, None))
    assert code == 1
    assert bill.usd.p50 < 10 < bill.chosen.needed_usd.p50
    assert stacks["growth"]["head"]["p50"] == str(bill.chosen.needed_usd.p50)
    (step,) = stacks["growth"]["steps"]
    assert Decimal(step["p50"]) == bill.chosen.needed_usd.p50 - Decimal(stacks["growth"]["base"]["p50"])
    _, out = run(capsys, base, head)
    assert f"to {bill.chosen.needed_usd.p50:.2f} USD." in out
    assert f"to {bill.chosen.needed_usd.p50:.2f} (+" in out
    assert "**1 stack of HEAD breaks a bound or a rule.**" in out


def test_a_stack_that_up_would_refuse_is_exit_1_with_its_reason(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    code, out = run(capsys, base, project.stack(("max_usd: 9.00", "max_usd: 0.05")))
    assert code == 1
    assert "limits.max_usd: '0.05' is not accepted" in out


def test_a_policy_in_the_commit_is_held_and_its_change_is_said(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    head = project.commit({"policy.yaml": "spot_only: true\nallowed_types: [g6.*]\n"})
    code, out = run(capsys, base, head)
    assert code == 1
    assert "**breaks `spot_only`**: `capacity is on-demand, allowed is spot`" in out
    assert "**breaks `allowed_types`**" in out
    assert "**policy.yaml itself changes**" in out


def test_a_policy_that_is_not_committed_is_said_to_be_there(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    head = project.stack()
    assert f"- Rules: none: no policy.yaml in `{head[:12]}`. " in run(capsys, head, head)[1]
    project.write({"policy.yaml": "spot_only: true\n"})
    code, out = run(capsys, head, head)
    assert code == 0
    assert f"none: no policy.yaml in `{head[:12]}`, and yours is not committed: commit it, or" in out


def test_what_is_not_committed_is_said_to_be_left_out(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    base = project.stack()
    project.write({"stacks/new.yaml": "run: {id: r1}\n", "train.py": "print(1)\n"})

    assert "- Not in HEAD, since it is not committed: `stacks/new.yaml`.\n" in run(capsys, base, base)[1]

    head = project.commit({"stacks/new.yaml": None, "train.py": None, "stacks/other.yaml": "run: {id: r1}\n"})
    assert "Not in HEAD" not in run(capsys, base, head)[1]
    project.write(
        {"policy.yaml": "spot_only: true\n"}
    )  # the warning is about the working tree, and the review about an earlier commit
    assert "Not in HEAD" not in run(capsys, head, base)[1]


def test_a_policy_given_by_hand_takes_the_place_of_the_commits(
    project: Project, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    head = project.commit({"stacks/growth.yaml": STACK, "policy.yaml": "spot_only: true\n"})
    mine = tmp_path / "mine.yaml"
    mine.write_text("allowed_regions: [us-east-2]\n")
    assert run(capsys, head, head, "--policy", str(mine))[0] == 0


@pytest.mark.parametrize(
    ("broken", "said"),
    [
        (changed(("capacity: on-demand", "capacity: spott")), "fleet.capacity: 'spott' is not accepted"),
        ("fleet: [\n", "YAML"),
        (
            changed(("instance_types: [g5.2xlarge]", "instance_types: [p5.4xlarge]"), ("on-demand", "spot")),
            "no spot price",
        ),
    ],
)
def test_a_head_without_a_bill_is_reported_in_the_markdown_and_is_exit_2(
    project: Project, capsys: pytest.CaptureFixture[str], broken: str, said: str
) -> None:
    base = project.commit({"stacks/growth.yaml": STACK, "stacks/other.yaml": STACK})
    head = project.commit({"stacks/growth.yaml": broken})
    code, out = run(capsys, base, head)
    assert code == 2
    assert "HEAD has no bill:" in out
    assert said in out
    assert "**A stack of HEAD has no bill.**" in out
    assert "Unchanged: `other`." in out
    assert "/tmp" not in out


def test_a_base_that_no_longer_loads_does_not_stop_the_review(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack(("capacity: on-demand", "capacity: spott"))
    code, out = run(capsys, base, project.stack())
    assert code == 0
    assert "BASE has no bill with this version" in out


def test_an_unknown_commit_is_an_error_that_says_how_to_get_it(project: Project) -> None:
    head = project.stack()
    for words in (("nowhere", head), (head, "--output=x")):
        with pytest.raises(GpufleetError, match="fetch-depth: 0"):
            review_commits(project.folder, *words)


def test_beside_the_project_no_review_holds(project: Project) -> None:
    """If the project is a folder of the repository, a check that runs at the top would pass with every change."""
    commit = project.stack()
    (project.root / "docs").mkdir()
    with pytest.raises(GpufleetError, match=r"neither commit has a definition file in stacks/ of .*docs: run this in"):
        review_commits(project.root / "docs", commit, commit)


def test_hidden_files_of_a_commit_are_no_stacks(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    base = project.commit({"stacks/growth.yaml": STACK})
    hidden = ("stacks/._growth.yaml", "traces/._a.csv", "receipts/growth/._r1.json", "calibrations/growth/._a10g.json")
    code, out = run(capsys, base, project.commit(dict.fromkeys(hidden, "Mac OS X")))
    assert code == 0
    assert "._" not in out


def test_somebody_else_s_file_in_stacks_is_no_stack_and_a_broken_definition_is_one(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    head = project.commit({"stacks/compose.yaml": "services: {web: {image: x}}\n", "stacks/torn.yaml": "run: {id: ["})
    code, stacks = reviewed(capsys, base, head)
    assert code == 2
    assert set(stacks) == {"growth", "torn"}


def test_outside_a_repository_and_without_git_that_is_what_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(GpufleetError, match="is a git repository"):
        review_commits(tmp_path, "HEAD", "HEAD")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(GpufleetError, match="git is not installed"):
        review_commits(tmp_path, "HEAD", "HEAD")


def test_a_broken_policy_or_price_file_is_an_error_without_scratch_paths(project: Project) -> None:
    head = project.commit({"stacks/growth.yaml": STACK, "policy.yaml": "spot_onyl: true\n"})
    with pytest.raises(GpufleetError, match=r"^HEAD/policy\.yaml: 1 problem"):
        review_commits(project.folder, head, head)
    bad = project.commit({"policy.yaml": None, "prices/2026-11-21/on_demand.csv": "x\n"})
    with pytest.raises(GpufleetError, match=r"^HEAD/prices/2026-11-21/on_demand\.csv, line 1"):
        review_commits(project.folder, head, bad)


def test_prices_that_a_change_repairs_do_not_stop_its_review(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.commit({"stacks/growth.yaml": STACK, "prices/2026-11-21/on_demand.csv": "x\n"})
    code, out = run(capsys, base, project.commit({"prices/2026-11-21/on_demand.csv": None}))
    assert code == 0
    assert "- BASE: its prices cannot be read; HEAD's are used instead" in out


def test_a_run_in_stages_has_one_bill_and_the_rules_are_held_against_each_stage(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "stacks" / "kernel-sft-stages.yaml").read_text()
    rules = "max_usd_per_hour: 100\nspot_only: true\n"
    base = project.commit({"stacks/parts.yaml": text, "policy.yaml": rules})
    other = text.replace("[g6.2xlarge]", "[p5.4xlarge], capacity: on-demand")
    head = project.commit({"stacks/parts.yaml": other})
    code, stacks = reviewed(capsys, base, head)
    parts = stacks["parts"]
    assert parts["base"]["errors"] == parts["head"]["errors"] == []
    (step,) = parts["steps"]
    assert step["keys"] == ["stages"]
    assert Decimal(step["p50"]) == Decimal(parts["head"]["p50"]) - Decimal(parts["base"]["p50"]) > 3
    assert [each["rule"] for each in parts["policy"]] == ["spot_only"]
    assert code == 1
