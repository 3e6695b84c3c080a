"""The JSON Schema of the definition file: what it accepts and refuses, held against the loader's own tables."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from command_files import command_file
from definition import test_command_definition as of_commands
from definition import test_loader_values as of_values
from jsonschema import Draft7Validator
from repository import ROOT
from test_stacks import FIRST, documented

from gpufleet.infra.cli import main
from gpufleet.infra.definition import json_schema
from gpufleet.infra.definition.layers import MODELINE, purpose
from gpufleet.infra.definition.schema import SECTIONS
from gpufleet.job.spec import EXPERIMENTS

SCHEMA = json.loads(json_schema.FILE.read_text())
VALIDATOR = Draft7Validator(SCHEMA)
EXAMPLES = [*(ROOT / "examples").glob("*.yaml"), ROOT / "examples" / "program" / "training.yaml"]
SHIPPED = sorted([*(ROOT / "stacks").glob("*.yaml"), *EXAMPLES])


class Core(yaml.SafeLoader):
    """YAML 1.2's types, as editors read them: `yes` is text, 3e-4 a number, a date text."""


Core.yaml_implicit_resolvers = {}

for tag, pattern in (
    ("null", r"|~|null|Null|NULL"),
    ("bool", r"true|True|TRUE|false|False|FALSE"),
    ("int", r"[-+]?[0-9]+"),
    ("float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.inf|\.nan"),
):
    Core.add_implicit_resolver(f"tag:yaml.org,2002:{tag}", re.compile(f"^(?:{pattern})$"), None)
Core.add_constructor("tag:yaml.org,2002:int", lambda _, node: int(node.value))


def wrong(text: str) -> list[str]:
    """Where the schema refuses the file."""
    return [
        ".".join(map(str, error.absolute_path)) + ": " + error.message
        for error in VALIDATOR.iter_errors(yaml.load(text, Loader=Core))
    ]


def test_the_shipped_file_is_what_the_command_prints_and_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == json_schema.FILE.read_text(), "write it anew: gpufleet schema > the file"
    Draft7Validator.check_schema(SCHEMA)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_a_shipped_file_is_accepted_and_names_the_schema_in_its_first_line(path: Path) -> None:
    text = path.read_text()
    assert wrong(text) == []
    first = text.splitlines()[0]
    assert first == json_schema.modeline(path.parent, ROOT)
    assert (path.parent / first.removeprefix(MODELINE)).resolve() == json_schema.FILE


def test_what_the_loader_reads_is_accepted() -> None:
    (marks,) = of_values.test_values_mean_what_the_key_says.pytestmark  # type: ignore[attr-defined]
    for case in marks.args[1]:
        section, line, _ = case.values
        assert wrong(of_values.changed(section, line)) == [], line


# What only the loader can tell: it holds between keys, or depends on the day or on what a text means.
BEYOND = {
    "less than 25 h and a day",
    "not a number",
    "the calendar's edge",
    "more than a year",
    "past",
    "too far",
    "1e3",
    "octal",
    "octal money",
    "two of three",
    "heads",
    "odd width per head",
    "top_k",
    "micro",
    "no prompt",
    "another region's zone",
    "no bf16",
    "not in the region",
    "smaller than the AMI",
    "IOPS ratio",
    "rate",
    "root snap",
    "one slash",
    "capital letters",
    "a wildcard of IAM's",
    "absolute path",
    "a line break in a name",
    "a NUL in a name",
    "above the project",
    "the project itself",
    "a phase missing",
    "weights nobody reads",
}


@pytest.mark.parametrize("case", of_values.REFUSED, ids=[case[5] for case in of_values.REFUSED])
def test_what_the_loader_refuses_is_refused(case: tuple[str, ...]) -> None:
    section, line, *_, why = case
    assert bool(wrong(of_values.changed(section, line))) is (why not in BEYOND)


OF_COMMANDS_BEYOND = {
    "checkpoints beside the code",
    "a key in the command",
    "USR1 with torchrun",
    "a request by USR2 with torchrun",
    "each without a step",
    "each out of its folder",
    "no checkpoint",
    "every is missing on spot",
    "no group step",
    "no regular expression",
    "an unknown placeholder",
    "an input that is not named",
    "an input that is not named, in env",
    "a name of the node's",
    "env and secrets",
    "an input at home",
    "code in a bucket",
    "unlike GPUs",
    "more GPUs than there are",
    "more memory than there is",
    "steps and hours",
    "a checkpoint beside none",
    "a save every so many steps where epochs are counted",
    "a save every so many epochs of nobody knows what length",
    "the time of a step where epochs are counted",
    "lines that tell epochs where steps are counted",
    "a folder of the machine's",
}


@pytest.mark.parametrize("name", of_commands.MISTAKES)
def test_mistakes_of_a_command_are_refused(name: str, tmp_path: Path) -> None:
    changes, _ = of_commands.MISTAKES[name]
    text = command_file(tmp_path, **changes).read_text()
    assert bool(wrong(text)) is (name not in OF_COMMANDS_BEYOND)


def patterns(tree: Any) -> list[dict[str, Any]]:
    """Every part of a schema that has a pattern."""
    below = list(tree.values()) if isinstance(tree, dict) else tree if isinstance(tree, list) else []
    own = [tree] if isinstance(tree, dict) and isinstance(tree.get("pattern"), str) else []
    return own + [found for each in below for found in patterns(each)]


def test_an_editor_says_in_words_what_a_pattern_asks_for() -> None:
    assert len(patterns(SCHEMA)) > 50
    assert [each["pattern"] for each in patterns(SCHEMA) if not each.get("patternErrorMessage", "").strip(" .:")] == []


LAID = """
rehearsal: {{{0}}}
scenarios: {{one: {{{0}}}}}
"""


@pytest.mark.parametrize(
    ("laid", "accepted"),
    [
        ("job: {parameters: {model: {width: 64}}}", True),
        ("storage: {data: {iops: 4000}}", True),
        ("fleet: {instance_types: [p5.48xlarge]}", True),
        ("job: {image: registry.example/a:1}", False),
        ("job: {parameters: {model: {widht: 64}}}", False),
        ("run: {id: r2}", False),
        ("limits: {max_usd: a lot}", False),
    ],
)
def test_what_is_laid_over_is_checked_as_the_file_is_but_for_what_is_required(laid: str, accepted: bool) -> None:
    assert (wrong(of_values.MINIMAL + LAID.format(laid)) == []) is accepted


@pytest.mark.parametrize("section", [name for name in SECTIONS if f"{name}:" in of_values.MINIMAL])
def test_a_section_that_is_missing_is_refused(section: str) -> None:
    text = "\n".join(line for line in of_values.MINIMAL.splitlines() if not line.startswith(section))
    assert wrong(text)


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, dict[str, Any]]:
    """Every key of a section and of those in it, by its dotted path."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in tree["properties"].items():
        whole = "properties" not in value or f"{prefix}{key}" in ("code", "work.hours")  # the page says these at once
        found |= {f"{prefix}{key}": value} if whole else leaves(value, f"{prefix}{key}.")
    return found


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, "command"])
def test_the_page_has_the_keys_and_bounds_of_the_schema(experiment: str) -> None:
    if experiment == "command":
        keys, rows = leaves(SCHEMA["definitions"]["command"]), documented("A command of your own")
    else:
        keys = leaves(SCHEMA["definitions"][f"parameters of {experiment}"])
        rows = {key: row for key, row in documented("Keys of several experiments").items() if key in keys}
        rows |= documented(f"job.parameters of {experiment}")
    assert set(rows) == set(keys)
    for key, value in keys.items():
        known: dict[str, float] = next(
            (each for each in value.get("anyOf", [value.get("items", value)]) if "minimum" in each), {}
        )
        for bound in (known.get("minimum"), known.get("maximum")):
            assert bound is None or {f"{bound:,.0f}", f"{bound:g}"} & set(
                re.findall(r"[0-9][0-9.,e-]*(?<!,)", rows[key])
            ), key


@pytest.mark.parametrize("section", [name for name in SECTIONS if name != "job"])
def test_the_page_has_the_keys_of_every_section_of_the_schema(section: str) -> None:
    inner = {key.rpartition(".")[2] for key in leaves(SCHEMA["properties"][section])}
    assert inner | set(SCHEMA["properties"][section]["properties"]) == set(documented(section))


def test_the_first_file_of_the_page_is_accepted() -> None:
    assert wrong(FIRST.partition("```yaml\n")[2].partition("```")[0]) == []


@pytest.mark.parametrize("copy", ["stacks/definition.schema.json", ".venv/lib/site-packages/definition.schema.json"])
def test_a_new_file_names_the_project_s_copy_of_the_schema_and_no_environment_s(
    copy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    project, code = tmp_path / "project", tmp_path / "code"
    for folder in ((project / copy).parent, project / "stacks", code):
        folder.mkdir(parents=True, exist_ok=True)
    (project / copy).write_text(json_schema.text())
    (code / "train.py").write_text("import torch\n")
    monkeypatch.chdir(project)
    assert main(["new", "mine", "--code", str(code)]) == 0
    text = Path("stacks/mine.yaml").read_text()
    assert (text.splitlines()[0] == f"{MODELINE}definition.schema.json") is copy.startswith("stacks/")
    assert (MODELINE in text) is copy.startswith("stacks/")
    assert purpose(text).startswith("mine: train.py")
    assert wrong(text) == []
