"""`--json`: one object of a published schema from every command, also for an error."""

from __future__ import annotations

import argparse
import importlib
import json
import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpufleet.infra import cli, envelope
from gpufleet.infra.commands import run as run_command
from gpufleet.infra.commands import stack
from gpufleet.infra.envelope import Envelope, filled
from gpufleet.rehearsal.cloud import Cloud
from tests.infra.commands_world import declare_fleet, finished
from tests.receipt_tree import receipt
from tests.repository import ROOT

SCHEMA = json.loads(envelope.SCHEMA_FILE.read_text())
OWN = {"compare", "cost", "diff", "prices", "ps", "replay"}


def answered(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the object, which fits the schema. The command printed nothing else."""
    code = cli.main([*words, "--json"])
    said = capsys.readouterr()
    assert said.err == ""
    tree = json.loads(said.out)
    jsonschema.validate(tree, SCHEMA)
    assert tree["exit_code"] == code
    return code, tree


def test_every_command_has_it_but_those_that_serve_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    own = set()
    for name in cli.COMMANDS:
        parser = argparse.ArgumentParser()
        importlib.import_module(f"gpufleet.infra.commands.{name}").arguments(parser)
        if any(action.dest == "json" for action in parser._actions):
            own.add(name)
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        assert ("--json" in capsys.readouterr().out) == (name not in cli.WITHOUT_JSON), name
    assert own == OWN


def test_gpufleet_schema_answers_prints_the_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["schema", "answers"]) == 0
    assert json.loads(capsys.readouterr().out) == SCHEMA
    jsonschema.Draft202012Validator.check_schema(SCHEMA)


def test_answers_of_a_run_s_commands_hold_the_schema(
    cloud: Cloud, path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    declare_fleet(cloud)
    cloud.tick()
    finished(cloud)
    kept = path.parents[1] / "receipts" / "small-growth" / "r1.json"
    kept.parent.mkdir(parents=True)
    kept.write_text(json.dumps(receipt()))
    lines = {each["of"]: each["text"] for each in answered(capsys, "status", "small-growth")[1]["answer"]}
    assert lines["node"].startswith("i-")
    (only,) = answered(capsys, "receipts", "small-growth")[1]["answer"]
    assert only["usd"]["actual"] == "1.1000"
    checks = {each["name"] for each in answered(capsys, "doctor", "small-growth")[1]["answer"]}
    assert "quota" in {name.split()[0] for name in checks}
    code, swept = answered(capsys, "sweep", "small-growth")
    assert (code, {each["kind"] for each in swept["answer"]} >= {"fleet", "bucket"}) == (1, True)
    code, brought = answered(capsys, "results", "small-growth")
    assert (code, brought["answer"]) == (0, None)
    assert any("results.json" in line for line in brought["said"])


def test_each_state_of_a_whole_run_holds_the_schema(path: Path) -> None:
    definition = stack.definition_of(argparse.Namespace(stack="small-growth"))
    whole = run_command.WholeRun(args=argparse.Namespace(), definition=definition, root=path, engine=None)  # type: ignore[arg-type]
    for state in SCHEMA["$defs"]["run"]["properties"]["state"]["enum"]:
        with filled(made := Envelope("run")):
            whole._tell(state)
        jsonschema.validate(json.loads(made.text(0)), SCHEMA)


def test_an_error_is_an_object_too_and_exits_with_2(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    code, tree = answered(capsys, "doctor", "no-such-stack")
    assert (code, tree["answer"]) == (2, None)
    assert "there is no stack 'no-such-stack'" in tree["error"]


def test_escapes_of_others_do_not_cross_it() -> None:
    with filled(made := Envelope("logs")):
        made.out.write("\x1b[31mred\x07")
    assert json.loads(made.text(0))["said"] == [r"\x1b[31mred\x07"]


def test_the_skill_file_names_commands_and_options_that_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = (ROOT / "examples" / "agent" / "SKILL.md").read_text()
    named = re.findall(r"`gpufleet ([a-z]+)([^`]*)`", text)
    assert len(named) > 8
    for name, rest in named:
        with pytest.raises(SystemExit):
            cli.main([name, "--help"])
        said = capsys.readouterr().out
        assert [option for option in re.findall(r"--[a-z]+", rest) if option not in said] == []
