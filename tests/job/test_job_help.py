"""`python -m job --help`: what a person who finds it on a node, or tries it here, has to know."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from job.__main__ import main, supervise
from job.supervisor import endings

NODE_SCRIPT = Path(__file__).parents[2] / "infra" / "boot" / "node.sh"


@pytest.fixture
def said(capsys: pytest.CaptureFixture[str]) -> str:
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_names_what_it_reads(said: str) -> None:
    given = set(re.findall(r"GPUFLEET_[A-Z_]+(?==)", NODE_SCRIPT.read_text().partition("docker run")[2]))
    assert len(given) == 5
    assert given <= set(re.findall(r"GPUFLEET_[A-Z_]+", said))
    assert said.startswith("usage: python -m job [-h] RUN_JSON\n")


def test_help_explains_every_exit_code_that_the_node_script_is_given(said: str) -> None:
    explained = set(map(int, re.findall(r"^  (\d+) +\S", said, re.MULTILINE)))
    assert explained == {endings.FINISHED, endings.FAILED, endings.REFUSED, endings.INTERRUPTED}
    assert "any other: a crash" in said


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, r"cannot be read \(No such file or directory\); name the run.json of a run"),
        ("", r"cannot be read \(Is a directory\); name the run.json of a run"),
        ("{", "not JSON .*it is cut or damaged"),
        ("{}", "JSON, but no run config: it has no `schema`"),
        ("[1]", "JSON, but no run config"),
        ('{"schema": 2}', "a run config of schema 2, and this code reads 1"),
    ],
)
def test_what_is_no_run_config_is_told_apart_and_leaves_nothing(
    content: str | None, reason: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "run.json"
    if content == "":
        path.mkdir()
    elif content is not None:
        path.write_text(content)
    before = list(tmp_path.iterdir())
    assert supervise(path) == endings.FAILED
    assert re.search(f"fatal: {re.escape(str(path))}: {reason}", capsys.readouterr().out)
    assert list(tmp_path.iterdir()) == before


def test_without_a_run_config_it_says_what_it_wants(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "required: RUN_JSON" in capsys.readouterr().err
