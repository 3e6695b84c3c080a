"""The review as a comment: its bytes are reproducible, it has no time of day, and text from a file cannot break it."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import pytest

from gpufleet.infra.commands import diff
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.review.markdown import marker
from tests.infra import review_world
from tests.infra.review_world import Project, reviewed, run
from tests.repository import ROOT


def test_the_comment_begins_with_its_marker_and_repeats_byte_for_byte(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base, head = project.stack(), project.stack(("steps_per_phase: 1000", "steps_per_phase: 2000"))
    (_, first), (_, second) = run(capsys, base, head), run(capsys, base, head)
    assert first == second
    assert first.startswith(f"{marker()}\n")
    assert first.count(marker()) == 1


def test_no_clock_is_in_the_comment_and_age_is_that_on_the_day_of_head(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    _, out = run(capsys, project.stack(), project.stack(("days: 7", "days: 8")))
    assert "on the day of HEAD, compute is 304 days old" in out  # committed on 2026-11-21, priced on 2026-01-21


def test_a_value_can_neither_break_the_table_nor_call_somebody(
    project: Project, capsys: pytest.CaptureFixture[str]
) -> None:
    base = project.stack()
    evil = 'capacity: "a|b` @team <!-- x --> **bold**"'
    _, out = run(capsys, base, project.stack(("capacity: on-demand", evil)))
    (line,) = [line for line in out.splitlines() if "@team" in line]
    assert line.startswith("- `")
    assert line.endswith("`")
    assert line.count("`") == 2
    assert "a\\|b" in line


def test_it_works_where_the_project_is_a_folder_of_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    project = review_world.enter(tmp_path / "repository", monkeypatch, "training/fleet")
    base, head = project.stack(), project.stack(("days: 7", "days: 30"))
    code, stacks = reviewed(capsys, base, head)
    assert code == 0
    assert stacks["growth"]["steps"][0]["keys"] == ["storage.keep.days"]


@pytest.mark.parametrize("name", ["stacks/linked.yaml", "policy.yaml"])
def test_a_link_is_not_followed_and_head_may_not_have_one(
    project: Project, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    good = project.stack()
    (project.folder / name).symlink_to("/etc/hostname")
    linked = project.commit({})
    with pytest.raises(GpufleetError, match=f"{name} of HEAD is a link"):
        run(capsys, good, linked)
    code, out = run(capsys, linked, good)
    assert code == 0
    assert "linked" not in out


def test_out_writes_the_file_and_keeps_the_exit_code(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    base, head = project.stack(), project.stack(("max_usd: 9.00", "max_usd: 0.05"))
    with pytest.raises(GpufleetError, match="no folder review; make it"):
        run(capsys, base, head, "--out", "review/comment.md")
    (project.folder / "review").mkdir()
    code, out = run(capsys, base, head, "--out", "review/comment.md")
    assert (code, out) == (1, "")
    assert (project.folder / "review" / "comment.md").read_text().startswith(marker())
    assert [path.name for path in (project.folder / "review").iterdir()] == ["comment.md"]


def test_an_out_that_cannot_be_written_is_an_error_and_not_exit_1(project: Project) -> None:
    head = project.stack()
    (project.folder / "folder").mkdir()
    with pytest.raises(GpufleetError, match="--out folder cannot be written"):
        diff.run(argparse.Namespace(base=head, head=head, policy=None, json=False, out=Path("folder")))
    assert not list(project.folder.glob(".folder*"))


def test_the_page_documents_every_key_of_the_json(project: Project, capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs" / "review.md").read_text()
    base, head = project.stack(), project.stack(("max_usd: 9.00", "max_usd: 0.05"))
    _, out = run(capsys, base, head, "--json")
    found = json.loads(out)
    stack = found["stacks"][0]
    for part in (found, found["base"], stack, stack["head"], stack["steps"][0]):
        for key in part:
            assert f"`{key}" in page, key
