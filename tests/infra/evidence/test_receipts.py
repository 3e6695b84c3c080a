"""Receipts of finished runs: which count, which are damaged, and how right the bills were."""

from __future__ import annotations

import json
from datetime import date
from decimal import Decimal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.account import results
from gpufleet.infra.bill import runtime
from gpufleet.infra.catalog import load_catalog
from gpufleet.infra.cli import main
from gpufleet.infra.commands.receipts import summary, table
from gpufleet.infra.definition.model import Disk, Estimate
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import calibration, own_speeds, receipts
from gpufleet.infra.evidence.observations import observations
from gpufleet.job.contract.receipt import CAUSES
from tests.infra.commands_world import definition, project
from tests.infra.cost_definitions import growth
from tests.receipt_tree import node, place, receipt


def test_the_score_is_median_error_bias_share_inside_and_the_causes(tmp_path: Path) -> None:
    for index, actual in enumerate(("0.90", "1.10", "1.20", "1.40", "1.20")):
        place(tmp_path, receipt(actual, run=f"r{index}"), f"r{index}")
    found = receipts.score(tmp_path)
    assert found is not None
    assert found.runs == 5
    assert found.error_percent == pytest.approx(20.0)
    assert found.bias_percent == pytest.approx(20.0)
    assert found.inside == 0.8
    assert found.by_cause == {"price": 0.0, "runtime": pytest.approx(20.0), "interruptions": 0.0, "other": 0.0}
    assert str(found) == "5 receipts: median error 20 %, 80 % inside p10-p90"


def test_a_run_whose_bill_has_no_range_is_in_the_error_and_not_in_the_share_inside(tmp_path: Path) -> None:
    certain = {"p10": "1.0000", "p90": "1.0000"}  # on demand
    place(tmp_path, receipt("1.10", run="r1", range_usd=certain), "r1")
    found = receipts.score(tmp_path)
    assert str(found) == "1 receipt: median error 10 %"
    assert found is not None
    assert next(summary(found)) == "1 receipt: median error 10 %."
    assert next(reversed(list(table(receipts.read(tmp_path)[0], ())))).endswith("  no range            |o")
    place(tmp_path, receipt("1.20", run="r2"), "r2")
    assert str(receipts.score(tmp_path)) == "2 receipts: median error 15 %, 100 % inside p10-p90"


def test_errors_of_both_signs_cancel_in_the_bias_only(tmp_path: Path) -> None:
    place(tmp_path, receipt("0.90", run="a"), "a")
    place(tmp_path, receipt("1.10", run="b"), "b")
    found = receipts.score(tmp_path)
    assert found is not None
    assert [found.error_percent, found.bias_percent] == pytest.approx([10.0, 0.0])
    assert found.by_cause["runtime"] == pytest.approx(10.0)


def test_without_receipts_there_is_no_score(tmp_path: Path) -> None:
    assert receipts.score(tmp_path) is None


@pytest.mark.parametrize(
    "changes",
    [{"device": "cpu"}, {"rehearsal": True}, *({"reason": each} for each in ("failed", "boot-loop", "deadline"))],
)
def test_rehearsals_and_failed_runs_never_count(tmp_path: Path, changes: dict[str, Any]) -> None:
    place(tmp_path, receipt("9.00", **changes))
    assert receipts.score(tmp_path) is None
    place(tmp_path, receipt("1.10", run="r2"), "r2")
    found = receipts.score(tmp_path)
    assert found is not None
    assert found.runs == 1
    assert found.error_percent == pytest.approx(10.0)


def test_a_run_on_types_without_a_gpu_counts(tmp_path: Path) -> None:
    place(tmp_path, receipt("1.30", device="cpu", rehearsal=False))
    assert receipts.score(tmp_path) is not None


@pytest.mark.parametrize("reason", ["max_usd", "max_hours"])
def test_a_run_stopped_by_its_limit_counts(tmp_path: Path, reason: str) -> None:
    place(tmp_path, receipt("1.30", reason=reason))
    assert receipts.score(tmp_path) is not None


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "it is not JSON"),
        ("{", "it is not JSON"),
        ("[1]", "it is a list, not an object of keys"),
        ("{}", "it has schema None, this code reads 1"),
        (json.dumps(receipt(schema=2)), "it has schema 2, this code reads 1"),
        (json.dumps(receipt(causes={"price": "1"})), "causes.runtime is missing"),
        (json.dumps(receipt(range_usd=None)), "range_usd is None, not an object of keys"),
        (json.dumps(receipt(range_usd={"p10": "low", "p90": "1"})), "range_usd.p10 is 'low', not an amount"),
        (json.dumps(receipt(range_usd={"p10": "NaN", "p90": "1"})), "range_usd.p10 is 'NaN', not an amount"),
        (json.dumps(receipt(usd={"estimate": "0", "actual": "1"})), "its amounts are not numbers of USD"),
        (json.dumps(receipt(lines=[])), "it does not add up"),
        (json.dumps(receipt(causes=dict.fromkeys(CAUSES, "0"))), "it does not add up"),
        (json.dumps(receipt(attempts=[node("i-1", seconds="long")])), "attempts[0].lived_s is 'long', not an amount"),
        (json.dumps(receipt(counted_until="yesterday")), "Invalid isoformat"),
        (json.dumps(receipt(stack="other")), "it belongs to stack other"),
        (json.dumps(receipt()), "it belongs to run r1"),  # otherwise a copied receipt would count twice
        (
            json.dumps(receipt(lines=[{"name": "x", "estimate": "1", "actual": "9E+999999"}])),
            "lines[0].actual is '9E+999999', not an amount",
        ),
        (json.dumps(receipt(usd={"estimate": "1E-400", "actual": "1.10"})), "usd.estimate is '1E-400', not an amount"),
        (json.dumps(receipt(range_usd={"p10": "1.30", "p90": "0.80"})), "its amounts are not numbers of USD"),
        (
            json.dumps(receipt(range_usd={"p10": "0.80", "p90": "1000000001"})),
            "range_usd.p90 is '1000000001', not an amount",
        ),
        (
            json.dumps(receipt(attempts=[node("i-1", seconds="-1")])),
            "attempts[0].lived_s is '-1', less than 0",
        ),
        (
            json.dumps(receipt(attempts=[node("i-1", seconds="60") | {"interrupted": "false"}])),
            "neither true nor false",
        ),
    ],
)
def test_a_damaged_or_foreign_receipt_is_named_and_left_out(tmp_path: Path, content: str, words: str) -> None:
    place(tmp_path, content, "bad")
    place(tmp_path, receipt())
    (tmp_path / "receipts" / "small-growth" / "folder.json").mkdir()
    found, damaged = receipts.read(tmp_path)
    assert [each.run for each in found] == ["r1"]
    assert list(calibration.sound(tmp_path, "small-growth", receipts.FOLDER)) == []
    assert len(damaged) == 2
    assert damaged[0].startswith("receipts/small-growth/bad.json is left out: ")
    assert words in damaged[0]


def test_runs_are_seen_oldest_first_and_one_stack_alone(tmp_path: Path) -> None:
    place(tmp_path, receipt(run="a", counted_until="2026-11-22T00:00:00Z"), "a")
    place(tmp_path, receipt(run="b", counted_until="2026-11-21T00:00:00Z"), "b")
    place(tmp_path, receipt(run="c", stack="two-tower"), "c", stack="two-tower")
    assert [each.run for each in receipts.read(tmp_path)[0]] == ["b", "a", "c"]
    assert [each.run for each in receipts.read(tmp_path, "two-tower")[0]] == ["c"]
    assert [receipts.read(tmp_path, other) for other in ("/etc", "*", "")] == [([], [])] * 3


def test_spot_runs_teach_the_hazard_by_type_and_zone(tmp_path: Path) -> None:
    brief = node("i-4", seconds="60.000", zone="us-east-2c") | {"lived_s": "36.000"}  # a minute is billed
    gone = node("i-5", seconds="0", zone="us-east-2d", interrupted=True)  # this receipt says nothing about an hour
    nowhere = node("i-6", seconds="7200", zone="")
    fallback = node("i-7", seconds="7200") | {"capacity": "on-demand"}  # of a run that went on on demand
    place(tmp_path, receipt(attempts=[*receipt()["attempts"], brief, gone, nowhere, fallback]))
    place(tmp_path, receipt(run="r2", capacity="on-demand"), "r2")
    place(tmp_path, receipt(run="r3", device="cpu"), "r3")
    first, second, third, last = observations(tmp_path)
    assert (first.type, first.zone, first.node_hours, first.interruptions) == ("g5.2xlarge", "us-east-2a", 2.0, 1)
    assert (second.zone, second.node_hours, second.interruptions) == ("us-east-2b", 1.0, 0)
    assert (third.zone, third.node_hours) == ("us-east-2c", 0.01)
    assert (last.zone, last.node_hours) == (None, 2.0)
    assert first.source == "receipt of small-growth r1"
    assert first.as_of == date(2026, 11, 21)


def test_traces_of_the_project_teach_the_hazard_too(tmp_path: Path) -> None:
    place(tmp_path, receipt())
    folder = tmp_path / "traces"
    folder.mkdir()
    path = folder / "a.csv"
    path.write_text("# type=g5.2xlarge, zone=us-east-2c\nat_h,available\n0,1\n5,0\n6,1\n10,0\n")
    (folder / "readme.md").write_text("where these come from")
    for hidden in (folder / "._a.csv", tmp_path / "receipts" / "tinystories-growth" / "._r1.json"):  # macOS leaves them
        hidden.parent.mkdir(parents=True, exist_ok=True)
        hidden.write_bytes(b"\x00\x05\x16\x07\xff")
    assert receipts.read(tmp_path)[1] == []
    trace, *runs = observations(tmp_path)
    assert (trace.type, trace.zone, trace.node_hours, trace.interruptions) == ("g5.2xlarge", "us-east-2c", 9.0, 1)
    assert len(runs) == 2
    assert observations(tmp_path, but=[path]) == runs


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("at_h,available\n0,1\n5,0\n", "names no type"),
        ("# type=g5.2xlrage\nat_h,available\n0,1\n5,0\n", r"a\.csv: g5\.2xlrage is not .*; nearest: g5\.2xlarge"),
        ("at_h\n", "needs the columns at_h"),
    ],
)
def test_a_trace_that_teaches_nothing_is_an_error_and_not_ignored(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "traces").mkdir()
    (tmp_path / "traces" / "a.csv").write_text(text)
    with pytest.raises(GpufleetError, match=words):
        observations(tmp_path)


def test_a_receipt_is_kept_by_stack_and_run(tmp_path: Path) -> None:
    content = json.dumps(receipt()).encode()
    path = receipts.keep(content, tmp_path, "small-growth", "r1")
    assert path == tmp_path / "receipts" / "small-growth" / "r1.json"
    assert path.read_bytes() == content


@pytest.mark.parametrize("run", ["r2", "../r1"])
def test_another_runs_receipt_is_not_kept(tmp_path: Path, run: str) -> None:
    with pytest.raises(ValueError, match="r1 of small-growth"):
        receipts.keep(json.dumps(receipt()).encode(), tmp_path, "small-growth", run)


def test_a_name_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be the name of a file"):
        receipts.keep(json.dumps(receipt(run="../r1")).encode(), tmp_path, "small-growth", "../r1")


@pytest.mark.parametrize(
    ("endpoint", "kept"),
    [
        ("https://s3.us-east-2.amazonaws.com", True),
        ("http://127.0.0.1:5000", False),
        ("https://amazonaws.com.example", False),
    ],
)
def test_results_keeps_the_receipt_of_a_run_on_aws_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, kept: bool
) -> None:
    path = project(tmp_path, monkeypatch)
    downloaded = tmp_path / "receipt.json"
    downloaded.write_text(json.dumps(receipt()))
    s3 = SimpleNamespace(meta=SimpleNamespace(endpoint_url=endpoint))
    said = results.keep(definition(path), s3, downloaded, path.parents[1])
    assert (path.parents[1] / "receipts" / "small-growth" / "r1.json").is_file() is kept
    assert ("commit it: receipts/small-growth/r1.json" in said) is kept


def test_results_says_why_a_damaged_receipt_is_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = project(tmp_path, monkeypatch)
    downloaded = tmp_path / "receipt.json"
    downloaded.write_text('{"usd": "0.42"}')
    s3 = SimpleNamespace(meta=SimpleNamespace(endpoint_url="https://s3.us-east-2.amazonaws.com"))
    said = results.keep(definition(path), s3, downloaded, path.parents[1])
    assert said.startswith("The receipt is not kept for later bills: it has schema None")


def test_the_command_shows_every_run_and_the_score(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = project(tmp_path, monkeypatch).parents[1]
    place(root, receipt("1.10"))
    place(root, receipt("1.40", run="r2"), "r2")
    place(root, receipt("5.00", run="r3", device="cpu"), "r3")
    place(root, "{", "r4")
    score = (
        "2 receipts: median error 25 %, 50 % inside p10-p90 (target 80 %).\n"
        "Bias: +25.0 %, the median difference of actual from estimated cost.\n"
        "By cause, the median of each in % of the estimate: "
        "price 0.0 %, runtime 25.0 %, interruptions 0.0 %, other 0.0 %.\n"
    )
    assert main(["receipts", "--all"]) == 0
    assert capsys.readouterr().out == (
        f"{score}"
        "stack         run  ended by   estimate  actual    error    price  runtime  interruptions    other  graded\n"
        "------------  ---  ---------  --------  ------  -------  -------  -------  -------------  -------  ---------\n"
        "small-growth  r1   finished     1.0000  1.1000   +10.0%  +0.0000  +0.1000        +0.0000  +0.0000  inside\n"
        "small-growth  r2   finished     1.0000  1.4000   +40.0%  +0.0000  +0.4000        +0.0000  +0.0000  above p90\n"
        "small-growth  r3   rehearsal    1.0000  5.0000  +400.0%  +0.0000  +4.0000        +0.0000  +0.0000  -\n"
    )
    assert main(["receipts"]) == 0
    said = capsys.readouterr()
    assert said.out == (
        f"{score}"
        "stack         run  ended by   estimate  actual    error  graded     0 to 2x the bill\n"
        "------------  ---  ---------  --------  ------  -------  ---------  ---------------------\n"
        "small-growth  r1   finished     1.0000  1.1000   +10.0%  inside             [=|o=]\n"
        "small-growth  r2   finished     1.0000  1.4000   +40.0%  above p90          [=|==]o\n"
        "small-growth  r3   rehearsal    1.0000  5.0000  +400.0%  -\n"
        "Why each differs from its bill: `gpufleet receipts --all`\n"
    )
    assert "receipts/small-growth/r4.json is left out: it is not JSON" in said.err


def test_ten_receipts_are_shown_the_newest_and_the_rest_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = project(tmp_path, monkeypatch).parents[1]
    for number in range(12):
        at = f"2026-11-{number + 1:02}T18:00:00.000Z"
        place(root, receipt("1.10", run=f"r{number}", counted_until=at), f"r{number}")
    assert main(["receipts", "small-growth"]) == 0
    lines = capsys.readouterr().out.splitlines()
    shown = [line.split()[1] for line in lines if line.startswith("small-growth")]
    assert shown == [f"r{number}" for number in range(2, 12)]
    last = "2 earlier ones, and why each differs from its bill: `gpufleet receipts small-growth --all`"
    assert lines[-1] == last


def test_without_a_receipt_the_command_says_where_they_come_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path, monkeypatch)
    assert main(["receipts", "small-growth"]) == 1
    assert "No receipt of small-growth yet: `gpufleet results STACK`" in capsys.readouterr().out


def test_outside_of_a_project_no_receipt_is_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["receipts"]) == 2
    assert f"no stacks/ folder with definition files in {tmp_path}; run this inside" in capsys.readouterr().err


def test_a_name_that_is_no_stacks_is_said_as_other_commands_say_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project(tmp_path, monkeypatch)
    assert main(["receipts", "small-grwth"]) == 2
    assert (
        "there is no stack 'small-grwth'; stacks/ has small-growth. Nearest: small-growth." in capsys.readouterr().err
    )
    place(tmp_path / "project", receipt(stack="gone"), stack="gone")
    assert main(["receipts", "gone"]) == 0  # the stack's file was removed, its runs were not


@pytest.mark.parametrize("stack", ["small-growth", "stacks/small-growth.yaml", "night"])
def test_a_stack_is_named_as_for_every_other_command(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = project(tmp_path, monkeypatch).parents[1]
    place(root, receipt("1.10"))
    (root / "Pulumi.night.yaml").write_text("config:\n  gpufleet:definition: small-growth\n")
    assert main(["receipts", stack]) == 0
    assert "small-growth  r1" in capsys.readouterr().out


def test_later_bills_of_the_stack_take_the_start_up_of_its_newest_nodes(tmp_path: Path) -> None:
    """Start-up times count by family, because a P node takes longer; receipts of rehearsals and other stacks do not."""
    took = [{**node(f"i-{at}", seconds="3600.000"), "started_s": str(200 + at)} for at in range(12)]
    stayed = [{**took[0], "started_s": "20", "older_s": "1800"}] * 12  # of trials on a running node
    place(tmp_path, receipt(attempts=[*took, *stayed, {**took[0], "type": "p5.48xlarge", "started_s": "900"}]))
    place(tmp_path, receipt(run="r2", device="cpu", attempts=[{**took[0], "started_s": "5"}]), "r2")
    place(tmp_path, receipt(stack="other", attempts=[{**took[0], "started_s": "7"}]), stack="other")
    assert own_speeds.start_ups(tmp_path, "small-growth") == {"g": 206.5, "p": 900.0}
    speeds = own_speeds.known(tmp_path, load_catalog().instances, "small-growth")
    types = load_catalog().instances
    for type_, seconds in (("g6.xlarge", 206.5), ("p4d.24xlarge", 900.0)):
        found = runtime.hours(growth(), types[type_], Estimate(), Disk(size_gib=100), speeds=speeds)
        assert (found.setup_s, found.setup_seen) == (seconds, True)
    stated = runtime.hours(
        growth(), types["g6.xlarge"], Estimate(setup_minutes=Decimal(3)), Disk(size_gib=100), speeds=speeds
    )
    assert (stated.setup_s, stated.setup_seen) == (180.0, False)
