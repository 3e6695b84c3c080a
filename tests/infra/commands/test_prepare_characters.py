"""`gpufleet prepare pretrain-d64` takes a text, or makes the sums of the rehearsal, as the definition says."""

from __future__ import annotations

import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.prepare import prepared
from tests.repository import ROOT

STACK = ROOT / "stacks/pretrain-d64.yaml"


def definition(*, rehearsal: bool = False) -> StackDefinition:
    found = load(STACK, now=datetime(2026, 11, 21, tzinfo=UTC), rehearsal=rehearsal, past_deadline=True)
    return replace(found, storage=replace(found.storage, dataset="data/characters"))


def test_the_rehearsal_makes_its_own_characters(tmp_path: Path) -> None:
    manifest = prepared(definition(rehearsal=True), tmp_path)
    assert manifest.kind == "characters"
    assert manifest.facts["train_characters"] + manifest.facts["validation_characters"] == 200_000
    assert (tmp_path / "data/characters/train.bin").stat().st_size == 64 + 190_000


def test_a_text_with_a_foreign_character_is_refused_with_its_place(tmp_path: Path) -> None:
    text = tmp_path / "numbers.txt"
    text.write_text("12+3\n15\n\n" * 1000 + "4=4\n")
    with pytest.raises(GpufleetError, match=r"'=' at position 9001 \(line 3001, column 2\)"):
        prepared(definition(), tmp_path, text=text)
    assert not (tmp_path / "data/characters").exists()


def test_a_pipe_which_can_be_read_once_is_refused(tmp_path: Path) -> None:
    """After the first read of `prepare STACK <(zcat numbers.gz)` the pipe is empty, and its hash would be wrong."""
    reading, writing = os.pipe()
    os.write(writing, b"12+3\n15\n\n" * 1000)
    os.close(writing)
    with pytest.raises(GpufleetError, match="a pipe or device, but is read more than once: write it to a file"):
        prepared(definition(), tmp_path, text=Path(f"/dev/fd/{reading}"))
    os.close(reading)


def test_without_a_text_it_says_which_command_takes_one(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match="gpufleet prepare STACK TEXT"):
        prepared(definition(), tmp_path)
