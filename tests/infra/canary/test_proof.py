"""A canary's file and page, doctor's words on the newest canary, and README's sentence, which is made from canaries."""

from __future__ import annotations

import json
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.canary import proof
from gpufleet.infra.canary.assumptions import known
from gpufleet.infra.canary.flight import Flight
from gpufleet.infra.canary.observations import FlightFacts
from gpufleet.infra.canary.stacks import AWS
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import own_speeds
from gpufleet.infra.evidence.proofs import FOLDER, newest, read
from tests.repository import ROOT

AT = datetime(2026, 11, 29, 16, 0, tzinfo=UTC)


def made(tmp_path: Path, *, embedded: bool = False) -> dict[str, Any]:
    flight = Flight(
        project=tmp_path,
        scale=AWS,
        client=lambda service: None,
        engine=lambda name: pytest.fail("nothing flies here"),
        environment={},
        by_notice=True,
        say=lambda line: None,
    )
    flight.facts.add("node.started_s", 300.0)
    flight.facts.add("node.started_s", 420.0)
    flight.facts.add("notice.left_s", 31.0)
    flight.facts.add("destroy.left", "fleet fleet-12a34b56-7890-4abc-8def-0123456789ab")
    return proof.make(flight, "us-east-2", AT, why="canary: node i-0123456789abcdef0 hangs", embedded=embedded)


def test_the_file_has_states_figures_and_versions_and_names_nobody(tmp_path: Path) -> None:
    path = proof.write(made(tmp_path), tmp_path / FOLDER)
    assert path.name == "2026-11-29-us-east-2.json"
    text = path.read_text() + path.with_suffix(".md").read_text()
    assert "0123456789ab" not in text
    tree = json.loads(path.read_text())
    by = {each["id"]: each for each in tree["assumptions"]}
    assert set(by) == {each.id for each in known()}
    assert by["notice-left"] == {
        "id": "notice-left",
        "state": "refuted",
        "expected": "within [105, 120]",
        "seen": "31",
    }
    assert (by["node-started"]["state"], by["node-pulled"]["state"]) == ("held", "not met")
    assert tree["figures"]["node.started_s"] == {"count": 2, "least": 300.0, "median": 360.0, "most": 420.0}
    assert tree["versions"].keys() >= {"gpufleet", "boto3", "python"}


def test_the_page_begins_with_what_was_refuted(tmp_path: Path) -> None:
    lines = list(proof.page(made(tmp_path)))
    headings = [line.strip() for line in lines if line.strip().startswith("## ")]
    assert headings[0] == "## Refuted: 2"
    assert any(line.startswith("| notice-left | A node sees a notice two minutes ahead") for line in lines)


def test_doctor_says_how_old_the_newest_is_and_warns_of_an_old_one(tmp_path: Path) -> None:
    assert proof.check(tmp_path, "us-east-2", date(2026, 12, 1)).found.startswith("none has run in us-east-2")
    proof.write(made(tmp_path), tmp_path / FOLDER)
    young = proof.check(tmp_path, "us-east-2", date(2026, 12, 1))
    assert (young.state, young.found[:34]) == ("ok", "the newest of us-east-2 is 2 days ")
    old = proof.check(tmp_path, "us-east-2", date(2027, 12, 1))
    assert (old.state, old.fix) == ("warning", "gpufleet canary --region us-east-2")
    assert proof.check(tmp_path, "eu-west-1", date(2026, 12, 1)).found.startswith("none has run in eu-west-1")


def test_a_file_of_the_embedded_aws_proves_nothing(tmp_path: Path) -> None:
    proof.write(made(tmp_path, embedded=True), tmp_path / FOLDER)
    assert newest(tmp_path) is None
    assert "proves nothing of AWS" in "\n".join(proof.page(made(tmp_path, embedded=True)))


def test_readme_says_what_the_files_say(tmp_path: Path) -> None:
    assert proof.sentence(ROOT) in " ".join((ROOT / "README.md").read_text().split())
    proof.write(made(tmp_path), tmp_path / FOLDER)
    assert proof.sentence(tmp_path).startswith("**A [canary](docs/canary.md) ran on a real AWS account** (2026-11-29,")


def test_a_fact_that_is_no_figure_is_no_figure() -> None:
    facts = FlightFacts()
    facts.add("x", True)
    assert proof._numbers(facts.seen["x"]) == []


@pytest.mark.parametrize("lacks", ["at", "region", "embedded", "figures", "assumptions", "answers", "schema"])
def test_a_damaged_file_is_refused_by_name_and_stops_no_bill(tmp_path: Path, lacks: str) -> None:
    path = proof.write(made(tmp_path), tmp_path / FOLDER)
    tree = json.loads(path.read_text())
    del tree[lacks]
    path.write_text(json.dumps(tree))
    with pytest.raises(GpufleetError, match=rf"us-east-2\.json: .*{lacks}.*; allowed are files of `gpufleet canary`"):
        read(path)
    assert newest(tmp_path) is None
    assert own_speeds.canary_start_ups(tmp_path) == {}


def test_a_file_of_the_first_version_says_no_types_and_moves_no_bill(tmp_path: Path) -> None:
    path = proof.write(made(tmp_path), tmp_path / FOLDER)
    tree = json.loads(path.read_text())
    del tree["types"]
    path.write_text(json.dumps(tree))
    assert newest(tmp_path) is not None
    assert own_speeds.canary_start_ups(tmp_path) == {}
