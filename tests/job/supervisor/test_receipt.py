"""The receipt adds up, says why, grades the bill, and keeps what the run measured of its speed."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job import measured
from gpufleet.job.contract.attempt import AttemptRecord, Beat, Exit, Hardware
from gpufleet.job.contract.done import FINISHED, STOPPED, Done
from gpufleet.job.contract.reading import iso
from gpufleet.job.contract.receipt import Receipt
from gpufleet.job.contract.run import RunFile, load
from gpufleet.job.contract.spent import Attempt
from gpufleet.job.supervisor import receipt
from tests.job import runs

DONE = Done(FINISHED, "", "i-1", "2027-01-15T09:00:00Z")
EXTRAS = Decimal("0.015959")
PAID = {each.name for each in fields(Attempt)}


def attempt(seconds: int, rate: str = "0.36", **changes: Any) -> Attempt:
    hours = Decimal(seconds) / 3600
    compute = (hours * Decimal(rate)).quantize(Decimal("0.0001"))
    paid: dict[str, Any] = {
        "seconds": Decimal(seconds),
        "lived_s": Decimal(seconds),
        "usd": compute + (hours * EXTRAS).quantize(Decimal("0.0001")),
        "compute_usd": compute,
    }
    left: dict[str, Any] = {
        "instance": "i-1",
        "type": "g5.2xlarge",
        "zone": "us-east-2a",
        "launched_at": iso(runs.LAUNCHED),
        "started_s": Decimal(300),
        "rung": 0,
        "exit": Exit(0, "finished"),
    }
    beat = Beat(step=changes.pop("last_step", 3000), step_s=0.5)
    paid |= {name: changes.pop(name) for name in PAID & changes.keys()}
    return Attempt(record=AttemptRecord(**{**left, **changes}), beat=beat, **paid)


def taken(seconds: int) -> Exit:
    """The end of a node that waited so long for AWS to end it."""
    return Exit(75, "notice", True, iso(runs.LAUNCHED), iso(runs.LAUNCHED + seconds))


@pytest.fixture
def run(tmp_path: Path) -> RunFile:
    return load(runs.place(tmp_path, runs.tree()))


def build(run: RunFile, *attempts: Attempt) -> dict[str, Any]:
    return receipt.build(run, attempts, DONE).to_json()


def shown(made: dict[str, Any]) -> str:
    return receipt.text(Receipt.from_json(made))


CASES = {
    "as billed": (attempt(1800),),
    "slow": (attempt(4000),),
    "dear": (attempt(1800, rate="0.72"),),
    "noticed": (
        attempt(900, reclaimed=True, exit=taken(100), last_step=1000),
        attempt(1500, resumed_step=1000),
    ),
    "killed": (attempt(900, exit=None, last_step=1100), attempt(1500, resumed_step=1000)),
    "never began": (attempt(61, started_s=None, last_step=0, exit=Exit(1, "x")), attempt(1800)),
}


@pytest.mark.parametrize("name", CASES)
def test_lines_add_up_to_the_total_and_causes_to_the_difference(run: RunFile, name: str) -> None:
    made = build(run, *CASES[name])
    lines = made["lines"]
    assert sum(Decimal(line["actual"]) for line in lines) == Decimal(made["usd"]["actual"])
    assert sum(Decimal(line["estimate"]) for line in lines) == Decimal(made["usd"]["estimate"])
    difference = Decimal(made["usd"]["actual"]) - Decimal(made["usd"]["estimate"])
    assert Decimal(made["usd"]["difference"]) == difference
    assert sum(map(Decimal, made["causes"].values())) == difference
    assert abs(Decimal(made["causes"]["other"])) <= Decimal("0.0005")  # rounding, nothing hidden


@pytest.mark.parametrize("name", CASES)
def test_what_is_written_is_read(run: RunFile, name: str) -> None:
    made = build(run, *CASES[name])
    assert Receipt.from_json(made).to_json() == made


def test_a_run_as_billed_differs_only_by_the_interruptions_that_did_not_come(run: RunFile) -> None:
    made = build(run, attempt(1800))
    assert made["usd"]["actual"] == "0.1972"
    causes = {name: Decimal(amount) for name, amount in made["causes"].items()}
    assert causes["price"] == 0
    assert causes["interruptions"] == Decimal("-0.0028")
    assert abs(causes["runtime"]) < Decimal("0.0001")
    assert made["error_percent"] == "-1.4"
    assert made["hours"] == {"estimate": "0.5000", "actual": "0.5000"}


def test_a_slow_run_is_runtime(run: RunFile) -> None:
    causes = build(run, attempt(4000))["causes"]
    assert Decimal(causes["runtime"]) == pytest.approx(Decimal("0.2297"), abs=Decimal("0.0002"))
    assert causes["price"] == "0.0000"


def test_a_dear_hour_is_price(run: RunFile) -> None:
    causes = build(run, attempt(1800, rate="0.72"))["causes"]
    assert causes["price"] == "0.1800"


def test_hours_at_the_ceiling_of_an_untold_spot_price_are_said_beside_compute(run: RunFile) -> None:
    made = build(run, attempt(1800, rate="1.212", ceiling_s=Decimal(900)), attempt(1800))
    assert made["lines"][0]["note"] == "0.2500 h at the on-demand price: AWS gave no spot price"
    assert build(run, attempt(1800))["lines"][0]["note"] == ""


def test_an_interruption_is_restart_repeated_steps_and_idling_less_what_was_free(run: RunFile) -> None:
    first, second = CASES["noticed"]
    made = build(run, first, second)
    # 100 s idle + 300 s until the second attempt's first step; no step was repeated
    expected = Decimal(400) / 3600 * (Decimal("0.36") + EXTRAS) - Decimal("0.0900") - Decimal("0.0028")
    assert Decimal(made["causes"]["interruptions"]) == pytest.approx(expected, abs=Decimal("0.0001"))
    assert made["free_first_hour_usd"] == "0.0900"
    assert made["interruptions"] == {"expected": 0.4, "with_notice": 1, "without_notice": 0}


@pytest.mark.parametrize(
    ("reclaimed", "noticed", "said"),
    [
        (True, 1, "the rest is in compute\n"),
        (False, 0, ": notice, because the fleet was changed, deleted or expired\n"),
        (None, 1, "; 1 more counted: the fleet's history did not say that AWS took the node\n"),
    ],
)
def test_a_receipt_says_whose_hand_took_a_node(run: RunFile, reclaimed: bool | None, noticed: int, said: str) -> None:
    exit_ = Exit(75, "notice", notice=True)
    made = build(run, attempt(900, exit=exit_, reclaimed=reclaimed), attempt(1500, resumed_step=1000))
    assert made["interruptions"]["with_notice"] == noticed
    assert made["attempts"][0]["interrupted"] is bool(noticed)  # what teaches later bills' hazard
    assert said in shown(made) + "\n"
    later = build(run, attempt(3600, exit=exit_, reclaimed=reclaimed), attempt(1500, resumed_step=1000))
    assert "more counted" not in shown(later)  # its first hour is over: it is paid, whoever took it


def test_the_minimum_of_a_short_start_is_an_interruptions_cost(run: RunFile) -> None:
    short: dict[str, Any] = {"lived_s": Decimal(20), "started_s": Decimal(5), "last_step": 10}
    made = build(run, attempt(60, exit=None, **short), attempt(60, resumed_step=10, **short))
    # 120 s are billed for 40 s lived; in one piece it would have been 60
    expected = Decimal(5 + 60) / 3600 * (Decimal("0.36") + EXTRAS) - Decimal("0.0028")
    assert Decimal(made["causes"]["interruptions"]) == pytest.approx(expected, abs=Decimal("0.0001"))


def test_a_kill_without_notice_costs_the_steps_it_repeats(run: RunFile) -> None:
    made = build(run, *CASES["killed"])
    expected = Decimal(300 + 50) / 3600 * (Decimal("0.36") + EXTRAS) - Decimal("0.0028")
    assert Decimal(made["causes"]["interruptions"]) == pytest.approx(expected, abs=Decimal("0.0001"))
    assert made["interruptions"]["without_notice"] == 1


def test_steps_are_repeated_whichever_node_repeats_them(run: RunFile) -> None:
    first, _ = CASES["killed"]
    booted = attempt(120, exit=None, started_s=None, last_step=0)  # lost before it knew where to go on
    some = attempt(900, exit=None, resumed_step=1000, last_step=1040)
    for between, booting_s in ((booted, 120 + 300), (some, 300 + 300)):
        resumed = attempt(1500, resumed_step=max(1000, between.last_step))
        expected = Decimal(booting_s + 50) / 3600 * (Decimal("0.36") + EXTRAS) - Decimal("0.0028")
        causes = build(run, first, between, resumed)["causes"]
        assert Decimal(causes["interruptions"]) == pytest.approx(expected, abs=Decimal("0.0001"))


def test_no_more_of_a_node_is_lost_than_it_lived(run: RunFile) -> None:
    """Told to end as it booted: of its 200 s the 100 s of idling are not lost twice."""
    booting = attempt(200, exit=taken(100), started_s=None, last_step=0)
    causes = build(run, attempt(900, exit=None, last_step=1000), booting, attempt(1500, resumed_step=1000))["causes"]
    expected = Decimal(200 + 300) / 3600 * (Decimal("0.36") + EXTRAS) - Decimal("0.0028")
    assert Decimal(causes["interruptions"]) == pytest.approx(expected, abs=Decimal("0.0001"))


@pytest.mark.parametrize(
    ("actual", "grade"),
    [("0.0999", "below p10"), ("0.1", "inside p10-p90"), ("0.4", "inside p10-p90"), ("0.4001", "above p90")],
)
def test_the_bill_is_graded_by_its_own_range(run: RunFile, actual: str, grade: str) -> None:
    made = receipt.build(run, [], DONE)
    assert replace(made, actual=Decimal(actual), p10=Decimal("0.1"), p90=Decimal("0.4")).grade == grade


@pytest.mark.parametrize("bound", ["p10", "p90"])
def test_a_run_that_costs_what_its_range_begins_or_ends_with_is_inside(run: RunFile, bound: str) -> None:
    cost = Decimal("0.1972")
    priced = replace(run.estimate, p10=cost) if bound == "p10" else replace(run.estimate, p90=cost)
    made = build(replace(run, estimate=priced), attempt(1800))
    assert (made["usd"]["actual"], made["grade"], made["inside_range"]) == ("0.1972", "inside p10-p90", True)


def test_a_bill_of_one_figure_has_no_range_to_be_inside_of(run: RunFile) -> None:
    certain = Decimal("0.2000")
    made = build(replace(run, estimate=replace(run.estimate, p10=certain, p50=certain, p90=certain)), attempt(1800))
    assert made["inside_range"] is None
    assert "no range to be inside of ($0.2000 to $0.2000)" in shown(made)


def test_storage_transfer_and_logs_are_what_the_run_has_left(tmp_path: Path) -> None:
    tree = runs.tree()
    lines = [*tree["estimate"]["lines"]]
    for name, item, quantity, price in (
        ("S3 storage", "s3_storage", "3.0", "0.023"),
        ("transfer of results", "transfer_out", "10", "0.09"),
        ("logs", "logs_ingestion", "0.01", "0.5"),
    ):
        line = {"name": name, "kind": "fixed", "item": item, "quantity": quantity, "unit_price": price}
        lines.append({**line, "amount": str(Decimal(quantity) * Decimal(price))})
    tree["estimate"] = {**tree["estimate"], "lines": lines, "kept": {"days": 73}}
    made = receipt.build(
        load(runs.place(tmp_path, tree)),
        [attempt(1800)],
        DONE,
        objects={"ckpt/step_00000100/model.pt": 6 * 10**9, "final/model.pt": 4 * 10**9, "job.log": 10**8},
    )
    found = {line.name: line for line in made.lines if line.note != "as in the bill"}
    inputs = sum(file["bytes"] for file in tree["inputs"]["dataset"]["files"]) / 10**9
    stored = Decimal(f"{(10.1 + inputs) * 73 * 24 / 730:.4f}")  # GB-months
    assert found["S3 storage"].actual == pytest.approx(stored * Decimal("0.023"), abs=Decimal("0.0001"))
    assert found["S3 storage"].note == f"{stored} of 3.0000"
    assert found["transfer of results"].actual == Decimal("0.3690")  # 4.1 GB
    assert found["logs"].actual == Decimal("0.0500")
    assert sum(line.actual for line in made.lines) == made.actual
    assert sum(made.causes.values()) == made.difference


def test_what_aws_reports_later_is_said_to_be_as_in_the_bill(run: RunFile) -> None:
    lines = {line["name"]: line for line in build(run, attempt(1800))["lines"]}
    assert lines["S3 storage"] == {
        "name": "S3 storage",
        "estimate": "0.0092",
        "actual": "0.0092",
        "note": "as in the bill",
    }


def test_the_text_names_error_grade_lines_and_attempts(run: RunFile) -> None:
    killed = attempt(900, instance="i-0", exit=None, last_step=1100)
    said = shown(build(run, killed, CASES["killed"][1]))
    assert "inside p10-p90" in said
    assert "i-0 g5.2xlarge 900.000 s" in said
    assert "gone without notice" in said
    assert "S3 storage" in said
    assert "%)" in said


def metrics(folder: Path) -> None:
    lines = [
        {"phase": name, "step": 100 * index + step, "ts": 1000.0 * index + step, "step_ms": 500.0, "mem_gb": 9.0}
        for index, name in enumerate(("dense", "moe", "grown"))
        for step in range(10, 101, 10)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + '{"torn')


A10G = Hardware(gpu="NVIDIA A10G", gpu_count=4, driver="580.1", versions={"torch": "2.13.0"}, python="3.12.3")
NODE = AttemptRecord(ranks=2, machine=A10G)


def test_what_the_run_measured_is_kept_with_what_it_depends_on(run: RunFile, tmp_path: Path) -> None:
    metrics(tmp_path)
    attempts = [attempt(900, exit=None, started_s=Decimal(300)), attempt(1500, started_s=Decimal(400))]
    found = receipt.measure(run, attempts, tmp_path, NODE, at="2027-01-15T09:00:00Z")
    assert found is not None
    assert [phase["step_ms"]["median"] for phase in found["phases"]] == [500.0, 500.0, 500.0]
    assert found["setup_s"] == 350.0  # launch to first step, the median of both nodes
    assert [found["device"][key] for key in ("name", "count", "ranks")] == ["NVIDIA A10G", 4, 2]
    assert found["settings"] == json.loads(json.dumps(measured.settings("tinystories-growth", asdict(runs.TINY))))
    made = receipt.build(run, attempts, DONE, measurement=found).to_json()
    assert json.loads(json.dumps(made))["measured"] == found
    said = shown(made)
    steps = sum(phase["steps"] for phase in found["phases"])
    share = steps * 0.5 / 2400
    assert f"the steps took {steps / 7200:.4f} of 0.6667 billed node-hours ({share:.0%})" in said
    assert "the steps took" not in shown(
        receipt.build(run, attempts, DONE, measurement={**found, "phases": 5}).to_json()
    )


def test_a_speed_without_a_gpu_bears_the_name_of_its_type(run: RunFile, tmp_path: Path) -> None:
    """A bill takes it for this type and for no other (test_cpu_types.py), and for no GPU."""
    metrics(tmp_path)
    node = replace(NODE, machine=Hardware(cpus=4))
    found = receipt.measure(run, [attempt(900, type="c7i.xlarge")], tmp_path, node, at="2027-01-15T09:00:00Z")
    assert found is not None
    assert found["device"]["name"] == "c7i.xlarge"


def test_a_run_without_metrics_measured_nothing(run: RunFile, tmp_path: Path) -> None:
    assert receipt.measure(run, [attempt(900)], tmp_path, NODE, at="") is None
    assert build(run, attempt(900))["measured"] is None


def test_nodes_of_two_types_are_no_measurement_of_either(run: RunFile, tmp_path: Path) -> None:
    metrics(tmp_path)
    attempts = [attempt(900, type="g6.2xlarge"), attempt(1500)]
    assert receipt.measure(run, attempts, tmp_path, NODE, at="") is None


def test_the_receipt_says_which_nodes_were_interrupted(run: RunFile) -> None:
    noticed = attempt(900, exit=Exit(75, "notice", notice=True))
    crashed = attempt(900, exit=Exit(1, "x"))
    made = build(run, noticed, attempt(900, exit=None), crashed, attempt(1500, exit=None))
    assert [each["interrupted"] for each in made["attempts"]] == [True, True, False, False]
    assert made["interruptions"] == {"expected": 0.4, "with_notice": 1, "without_notice": 1}
    assert (made["capacity"], made["device"]) == ("spot", "cpu")


def test_a_nodes_start_up_and_network_are_written_read_and_said(run: RunFile) -> None:
    by = "41.3 GB/s to the other nodes over AWS Libfabric"
    told = {"between_gb_s": 41.26, "transport": "AWS Libfabric"}
    found = receipt.build(run, [attempt(1800, pulled_s=Decimal("252.0"), preflight=told)], DONE)
    assert found.to_json()["attempts"][0]["pulled_s"] == "252.000"
    assert Receipt.from_json(found.to_json()).attempts[0].pulled_s == Decimal("252.000")
    assert Receipt.from_json(found.to_json()).attempts[0].network == by
    assert f"set-up 5.0 min, image pull 4.2 min, {by}: " in receipt.text(found)
    unknown = receipt.build(run, [attempt(1800)], DONE)
    assert not {"pulled_s", "network"} & unknown.to_json()["attempts"][0].keys()


def test_goals_are_graded_in_the_receipt_and_its_text(tmp_path: Path) -> None:
    goal = {"usd": "0.15", "hours": "2", "val_loss": "0.3"}
    run = load(runs.place(tmp_path, runs.tree(goal=goal)))
    ended = replace(DONE, at=iso(runs.LAUNCHED + 3600))
    wanted = receipt.build(run, [attempt(1800)], ended, results=lambda name: {"val_loss": Decimal("0.5")}.get(name))
    made = wanted.to_json()
    assert Receipt.from_json(made).to_json() == made
    assert [(each["name"], each["reached"], each["met"]) for each in made["goals"]] == [
        ("usd", "0.1972", False),
        ("hours", "1.0000", True),  # from launch to end, not the half that was billed
        ("val_loss", "0.5", False),
    ]
    assert "  goal at most 0.15 USD: missed by 0.0472: 0.1972\n" in receipt.text(wanted)
    stopped = receipt.build(run, [attempt(1800)], replace(ended, reason=STOPPED))
    assert not any(each.met for each in stopped.goals)
