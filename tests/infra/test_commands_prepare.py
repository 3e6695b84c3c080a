"""`gpufleet prepare`: the definition's dataset, made where the definition says."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from infra.cli import main
from job.dataset.prepare import read_manifest

ROOT = Path(__file__).parents[2]
STACK = "tinystories-growth"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "stacks").mkdir()
    shutil.copy(ROOT / "stacks" / f"{STACK}.yaml", tmp_path / "stacks")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_rehearsals_dataset_is_made_without_a_network(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["prepare", STACK, "--rehearsal"]) == 0
    manifest = read_manifest(project / "data" / "generated-stories")
    assert manifest.stories["train"] == 1980
    assert "1,980 stories" in capsys.readouterr().out


def test_a_text_of_ones_own_becomes_the_dataset(project: Path) -> None:
    (project / "mine.txt").write_text("\n\n".join(f"Story {n}." for n in range(200)))
    assert main(["prepare", STACK, "mine.txt", "--rehearsal"]) == 0
    assert read_manifest(project / "data" / "generated-stories").tokenizer == "bytes"


def test_a_text_that_is_not_utf8_ends_with_code_2(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "mine.txt").write_bytes(b"\xff\xfe")
    assert main(["prepare", STACK, "mine.txt", "--rehearsal"]) == 2
    assert "gpufleet: mine.txt: not UTF-8" in capsys.readouterr().err


def test_a_dataset_in_s3_is_prepared_already(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = project / "stacks" / f"{STACK}.yaml"
    file.write_text(file.read_text().replace("dataset: data/tinystories", "dataset: s3://bucket/stories"))
    assert main(["prepare", STACK]) == 2
    assert "storage.dataset is s3://bucket/stories" in capsys.readouterr().err
