"""Availability traces: files in every allowed form, and the hazard of a zone that follows from them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence.traces import read
from tests.infra.traces import stretches
from tests.repository import ROOT


def test_a_trace_shows_its_hazard_and_the_end_of_the_trace_is_no_interruption() -> None:
    seen = stretches((0, 4), (5, 6), (8, 10), hours=10).observation()
    assert (seen.node_hours, seen.interruptions) == (7, 2)


def test_part_of_a_trace_counts_from_its_own_beginning() -> None:
    part = stretches((0, 4), (5, 6), (8, 10), hours=10).part(3, 9)
    assert part.up_from_h.tolist() == [0, 2, 5]
    assert part.up_to_h.tolist() == [1, 3, 6]
    assert part.hours == 6


def written(folder: Path, name: str, text: str) -> Path:
    path = folder / name
    path.write_text(text)
    return path


def test_samples_and_changes_and_the_public_traces_own_form_read_alike(tmp_path: Path) -> None:
    samples = [0, 1, 1, 0, 2, 2]
    about = {"type": "p3.2xlarge", "zone": "us-east-2a", "start": "2023-02-15T00:00:00Z"}
    ours = read(written(tmp_path, "a.json", json.dumps({"gap_s": 1800, "available": samples, **about})))
    theirs = read(written(tmp_path, "b.json", json.dumps({"metadata": {"gap_seconds": 1800}, "data": samples, "x": 1})))
    changes = "# type=p3.2xlarge, zone=us-east-2a, start=2023-02-15\nat_h,available\n0,0\n0.5,1\n1.5,0\n2,2\n3,0\n"
    table = read(written(tmp_path, "c.csv", changes))
    for found in (ours, theirs, table):
        assert found.up_from_h.tolist() == [0.5, 2.0]
        assert found.up_to_h.tolist() == [1.5, 3.0]
        assert found.hours == 3.0
    assert (ours.type, ours.zone, ours.start) == (table.type, table.zone, table.start)
    assert str(ours.start) == "2023-02-15"
    assert theirs.zone is None


def test_the_examples_of_the_documentation_can_be_read(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "risk.md").read_text()
    for kind in ("json", "csv"):
        example = page.partition(f"```{kind}\n")[2].partition("```")[0]
        found = read(written(tmp_path, f"example.{kind}", example))
        assert (found.type, found.zone, str(found.start)) == ("g5.2xlarge", "us-east-2a", "2026-11-01")
        assert found.interruptions == 1


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("a.json", "[1, 0]", "it is a list, not an object"),
        ("a.json", "{", "no trace"),
        ("a.json", '{"available": [1]}', "gap_s is missing"),
        ("a.json", '{"metadata": {}, "data": [1]}', "metadata.gap_seconds is missing"),
        ("a.json", '{"gap_s": 0, "available": [1]}', "gap_s is 0; allowed: seconds above 0"),
        ("a.json", '{"gap_s": 60, "available": []}', "at least one"),
        ("a.json", '{"gap_s": 60, "available": [-1]}', "0 or more"),
        ("a.json", '{"gap_s": 60, "available": [0, 0]}', "no node was available"),
        ("a.json", '{"gap_s": 60, "available": [1], "start": "yesterday"}', "start is 'yesterday'; allowed: a date"),
        ("a.json", '{"gap_s": "60s", "available": [1]}', "gap_s is '60s'; allowed: seconds above 0"),
        ("a.json", '{"gap_s": 60, "available": [1, "x"]}', "available is not a list of numbers"),
        ("two-tower", "", "a trace is a .csv or .json file.*; write STACK after traces"),
        ("a.json", "[" * 100_000, "no trace"),
        ("a.json", '{"gap_s": 1e15, "available": [1]}', "h long; allowed: at most 1000000"),
        ("a.json", f'{{"gap_s": 1{"0" * 400}, "available": [1]}}', r"gap_s is 10+\.\.\.; allowed: seconds above 0"),
        ("a.json", f'{{"gap_s": 60, "available": [1{"0" * 400}]}}', "available is not a list of numbers"),
        ("a.csv", f"at_h,available\n0,{'1' * 200_000}\n1,0\n", "field larger than field limit"),
        ("a.csv", "hour,up\n0,1\n1,0\n", "columns at_h and available"),
        ("a.csv", "at_h,available\n0,1\n", "two rows"),
        ("a.csv", "at_h,available\n1,1\n2,0\n", "begin at 0"),
        ("a.csv", "at_h,available\n0,1\n2,0\n2,1\n", "grow from row to row"),
        ("a.csv", "at_h,available\n0,1\n1,yes\n2,0\n", "row 2 below the names: available is 'yes', not a number"),
        ("a.csv", "at_h,available\n0,1\n1\n2,0\n", "row 2 below the names: available is '', not a number"),
    ],
)
def test_what_is_no_trace_is_refused_by_name_and_reason(tmp_path: Path, name: str, text: str, says: str) -> None:
    path = written(tmp_path, name, text)
    with pytest.raises(GpufleetError, match=says) as refused:
        read(path)
    assert str(path) in str(refused.value)


def test_a_table_saved_by_a_spreadsheet_is_read(tmp_path: Path) -> None:
    assert read(written(tmp_path, "a.csv", "\ufeffat_h,available\n0,1\n5,0\n6,0\n")).node_hours == 5.0


def test_a_missing_file_says_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match=r"none\.json: cannot be read \(No such file or directory\); give a trace"):
        read(tmp_path / "none.json")
