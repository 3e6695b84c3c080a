"""The table of frameworks: each row reads a sample of its framework's lines and checkpoints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.infra.discover.frameworks import Framework, frameworks
from gpufleet.job.kind.command import FORMATS

SAMPLES: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("frameworks.yaml").read_text())


def test_each_row_has_a_sample_a_source_and_a_way_to_be_known() -> None:
    assert sorted(row.name for row in frameworks()) == sorted(SAMPLES)
    assert {"run", "from source"} <= {sample["how"] for sample in SAMPLES.values()}
    for row in frameworks():
        assert row.source, row.name
        assert row.version, row.name
        assert row.imports or row.programs, row.name


@pytest.mark.parametrize("row", frameworks(), ids=lambda row: row.name)
def test_a_row_reads_what_its_framework_prints(row: Framework) -> None:
    sample = SAMPLES[row.name]
    patterns = row.progress or (FORMATS[row.format].progress if row.format else ())
    told: dict[str, float] = {}
    for line in sample.get("lines", "").splitlines():
        for pattern in patterns:
            if match := re.search(pattern, line):
                told |= {
                    name: float(value.replace(",", ""))
                    for name, value in match.groupdict().items()
                    if value is not None
                }
    assert {name: told.get(name) for name in sample.get("says", {})} == sample.get("says", {})
    assert bool(patterns) == bool(sample.get("lines")), "a pattern without a sample, or a sample that nothing reads"


@pytest.mark.parametrize(
    "row", [row for row in frameworks() if SAMPLES[row.name].get("files")], ids=lambda row: row.name
)
def test_a_row_names_what_its_framework_saves(row: Framework) -> None:
    sample = SAMPLES[row.name]
    names = row.each or FORMATS[row.format or "file"].each
    below = f"{row.folder}/" if row.folder else ""
    found: set[int | str] = set()
    for file in sample["files"]:
        for name in names:
            if match := re.match(pattern_of(below + name), file):
                found.add(int(match["n"]) if "n" in match.groupdict() else match[0].rstrip("/"))
    assert sorted(found, key=str) == sorted(sample.get("counts") or [sample["rewritten"]], key=str)
    complete = row.complete or FORMATS[row.format or "file"].complete
    if complete:
        assert any(file.endswith(f"/{complete}") for file in sample["files"])


def pattern_of(name: str) -> str:
    """The name of a checkpoint as a regular expression, in which the group n is its number."""
    text = ""
    for part in re.split(r"(\{(?:step|epoch)[^}]*\}|\*)", name):
        if part.startswith("{"):
            text += r"\d+" if "epoch" in part and "{step" in name else r"0*(?P<n>\d+)"
        else:
            text += "[^/]*" if part == "*" else re.escape(part)
    return text if name.endswith("/") else text + "$"
