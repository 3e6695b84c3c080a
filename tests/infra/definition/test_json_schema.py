"""The JSON Schema of the definition file: it accepts and refuses the same values as the loader's own tables."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import Draft7Validator

from gpufleet.infra.cli import main
from gpufleet.infra.definition import json_schema
from gpufleet.infra.definition.layers import MODELINE, purpose
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.schema import SECTIONS
from gpufleet.infra.errors import DefinitionError
from gpufleet.job.kind import EXPERIMENTS
from tests.infra.command_files import command_file
from tests.infra.definition import test_command_definition as of_commands
from tests.infra.definition import test_loader_values as of_values
from tests.repository import ROOT
from tests.test_stacks import FIRST, documented

SHARED = json.loads(json_schema.FILE.read_text())
VALIDATOR = Draft7Validator(SHARED)
OWN = json_schema.schema()["definitions"]  # the entries of $defs that are not shared keys


def written_out(part: Any) -> Any:
    """A part of the shipped schema, in which each reference to a shared key is replaced by the key."""
    if isinstance(part, list):
        return [written_out(each) for each in part]
    if not isinstance(part, dict):
        return part
    name = str(part.get("$ref")).removeprefix("#/definitions/")
    is_shared = name in SHARED["definitions"] and name not in OWN
    return written_out(SHARED["definitions"][name]) if is_shared else {key: written_out(part[key]) for key in part}


SCHEMA = written_out({**SHARED, "definitions": {name: SHARED["definitions"][name] for name in OWN}})
EXAMPLES = [*(ROOT / "examples").glob("*.yaml"), ROOT / "examples" / "program" / "training.yaml"]
SHIPPED = sorted([*(ROOT / "stacks").glob("*.yaml"), *EXAMPLES])


class Core(yaml.SafeLoader):
    """YAML 1.2's types, as editors read them: `yes` and a date are text, 3e-4 is a number."""


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
    """The paths at which the schema refuses the file."""
    return [
        ".".join(map(str, error.absolute_path)) + ": " + error.message
        for error in VALIDATOR.iter_errors(yaml.load(text, Loader=Core))
    ]


def test_the_shipped_file_is_what_the_command_prints_and_a_schema(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema"]) == 0
    assert capsys.readouterr().out == json_schema.FILE.read_text()
    assert json_schema.shared() == SHARED, "write it anew: make schema"
    Draft7Validator.check_schema(SHARED)


def test_a_shared_key_is_what_each_of_its_places_says() -> None:
    assert json.loads(json.dumps(json_schema.schema())) == SCHEMA
    assert len(json.dumps(SHARED)) < 0.75 * len(json.dumps(SCHEMA))


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


# Rules that JSON Schema cannot express, with the reason.
SUMS = "it compares, divides or multiplies the values of two keys"
DAY = "it depends on the day"
YAML = "the editor's YAML has read it as another value: 1e3 as 1000, 010 as 10, and JSON has no .nan"
BEYOND = {
    "less than 25 h and a day": SUMS,
    "heads": SUMS,
    "odd width per head": SUMS,
    "top_k": SUMS,
    "micro": SUMS,
    "IOPS ratio": SUMS,
    "rate": SUMS,
    "past": DAY,
    "too far": DAY,
    "not a number": YAML,
    "1e3": YAML,
    "octal": YAML,
    "octal money": YAML,
}


@pytest.mark.parametrize("case", of_values.REFUSED, ids=[case[5] for case in of_values.REFUSED])
def test_what_the_loader_refuses_is_refused(case: tuple[str, ...]) -> None:
    section, line, *_, why = case
    assert bool(wrong(of_values.changed(section, line))) is (why not in BEYOND)


KEYS = "it looks for a name that another key holds"
OF_COMMANDS_BEYOND = {
    "an input that is not named": KEYS,
    "an input that is not named, in env": KEYS,
    "env and secrets": KEYS,
}


@pytest.mark.parametrize("name", of_commands.MISTAKES)
def test_mistakes_of_a_command_are_refused(name: str, tmp_path: Path) -> None:
    changes, _ = of_commands.MISTAKES[name]
    text = command_file(tmp_path, **changes).read_text()
    assert bool(wrong(text)) is (name not in OF_COMMANDS_BEYOND)


DRAWN = [
    *(
        '""',
        '" "',
        "x",
        "x y",
        "-1",
        "0",
        "1",
        "1.5",
        "1e12",
        "true",
        "null",
        '"1"',
        "2026-13-01T00:00:00Z",
        "../x",
        "/x",
    ),
    *("~/x", "s3://Bucket", '"{nope}"', "hf_" + "a" * 30, "[]", "[x]", "[1, 1]", "[-1]", "{}", "{x: 1}", "{A10G: 0}"),
    "{AWS_X: y}",
]
SECTIONS_OF_A_FILE = [name for name in SECTIONS if name != "job"]


def keys_of(tree: dict[str, Any], prefix: str) -> list[str]:
    """Every key and section of a part of the schema, by its dotted path."""
    found = []
    for key, value in tree.get("properties", {}).items():
        found += [f"{prefix}.{key}", *keys_of(value, f"{prefix}.{key}")]
    return found


def with_value(text: str, path: str, value: str) -> str:
    """The file with one value, in YAML's types, at this path."""
    tree = yaml.load(text, Loader=Core)
    *above, last = path.split(".")
    section = tree
    for key in above:
        section[key] = section[key] if isinstance(section.get(key), dict) else {}
        section = section[key]
    section[last] = "VALUE"
    return json.dumps(tree).replace('"VALUE"', value)


def refused_by_the_loader(text: str, folder: Path) -> bool:
    path = folder / "stacks" / "drawn.yaml"
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    try:
        load(path, now=of_values.NOW)
    except DefinitionError:
        return True
    return False


def unlike(text: str, paths: list[str], folder: Path, values: int) -> list[str]:
    """The values on which loader and schema differ, of `count` random values for each key, quoted numbers left out."""
    assert (wrong(text), refused_by_the_loader(text, folder)) == ([], False)
    found = []
    for path in paths:
        for value in random.Random(path).sample(DRAWN, values):
            drawn = with_value(text, path, value)
            taken, refused = not wrong(drawn), refused_by_the_loader(drawn, folder)
            said = f"{path}: {value} is {'taken' if taken else 'refused'} by the schema alone"
            if taken == refused and value not in STRICTER and said not in DRAWN_BEYOND:
                found.append(said)
    return found


STRICTER = ('"1"', '" "')  # the loader accepts a quoted number, and blanks as empty
DRAWN_BEYOND = [  # SUMS
    "storage.keep.days: 1 is taken by the schema alone",  # here the fleet lives longer
    "job.parameters.towers.model: [1, 1] is taken by the schema alone",  # both towers must end alike
]


@pytest.mark.parametrize("values", [2, pytest.param(len(DRAWN), marks=pytest.mark.slow)])
def test_drawn_values_of_a_command_are_refused_by_loader_and_schema_alike(values: int, tmp_path: Path) -> None:
    paths = [key for name in SECTIONS_OF_A_FILE for key in keys_of(SCHEMA["properties"][name], name)]
    paths += keys_of(SCHEMA["definitions"]["command"], "job")
    assert unlike(command_file(tmp_path).read_text(), paths, tmp_path, values) == []


@pytest.mark.parametrize("values", [1, pytest.param(len(DRAWN), marks=pytest.mark.slow)])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_drawn_values_of_a_ready_made_job_are_too(experiment: str, values: int, tmp_path: Path) -> None:
    text = (ROOT / "stacks" / f"{experiment}.yaml").read_text()
    paths = keys_of(SCHEMA["definitions"][f"parameters of {experiment}"], "job.parameters")
    assert unlike(text, paths, tmp_path, values) == []


@pytest.mark.parametrize("type_", ["p5.4xlarge", "p4de.24xlarge"])
@pytest.mark.parametrize("base", ["bf16", "fp8"])
def test_an_old_gpu_for_a_base_in_fp8_is_refused_by_both(base: str, type_: str, tmp_path: Path) -> None:
    text = (ROOT / "stacks" / "sft-h100.yaml").read_text()
    drawn = with_value(with_value(text, "fleet.instance_types", f"[{type_}]"), "job.parameters.precision.base", base)
    refused = (base, type_) == ("fp8", "p4de.24xlarge")
    assert (bool(wrong(drawn)), refused_by_the_loader(drawn, tmp_path)) == (refused, refused)


# If a pattern is only a condition, no user sees a message.
CONDITIONS = ("if", "not", "contains")


def patterns(tree: Any) -> list[dict[str, Any]]:
    """Every part of a schema with a pattern that a value must match."""
    if isinstance(tree, dict):
        own = [tree] if isinstance(tree.get("pattern"), str) else []
        return own + [found for key, each in tree.items() if key not in CONDITIONS for found in patterns(each)]
    return [found for each in tree for found in patterns(each)] if isinstance(tree, list) else []


def test_an_editor_says_in_words_what_a_pattern_asks_for() -> None:
    assert len(patterns(SCHEMA)) > 50
    assert [each["pattern"] for each in patterns(SCHEMA) if not each.get("patternErrorMessage", "").strip(" .:")] == []


def parts(tree: dict[str, Any], prefix: str) -> dict[str, dict[str, Any]]:
    """Every key of a part of the schema, with the texts that an editor shows."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in tree.get("properties", {}).items():
        found |= {f"{prefix}{key}": value} | parts(value, f"{prefix}{key}.")
    return found


SAID = {name: (SCHEMA["properties"][name], [name]) for name in SECTIONS_OF_A_FILE}
SAID |= {"command": (SCHEMA["definitions"]["command"], ["A command of your own"])}
for name in EXPERIMENTS:
    SAID |= {
        f"parameters of {name}": (
            SCHEMA["definitions"][f"parameters of {name}"],
            ["Keys of several experiments", f"job.parameters of {name}"],
        )
    }


@pytest.mark.parametrize("part", SAID)
def test_hovering_over_a_key_shows_the_page_s_words_its_default_and_an_example(part: str) -> None:
    tree, headings = SAID[part]
    keys, rows = parts(tree, ""), json_schema.Page.read(part, *headings).rows
    for path, key in keys.items():
        value, why = rows.get(path) or rows.get(path.rpartition(".")[2]) or ("", "")
        assert json_schema.plain(why).rstrip(".") in key["description"], path
        assert json_schema.plain(value).rstrip(".") in key["description"], path
        assert len(key["description"]) > 10, path
        if value.startswith("**"):
            assert "(the default)" in key["description"], path
        if "properties" not in key:
            assert Draft7Validator(key).is_valid(*key["examples"]), path


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
    """Every key of a section and of its inner sections, by its dotted path."""
    found: dict[str, dict[str, Any]] = {}
    for key, value in tree["properties"].items():
        whole = "properties" not in value or f"{prefix}{key}" in (
            "code",
            "work.hours",
        )  # the page has these keys in one row
        found |= {f"{prefix}{key}": value} if whole else leaves(value, f"{prefix}{key}.")
    return found


@pytest.mark.parametrize("experiment", [*EXPERIMENTS, "command"])
def test_the_page_has_the_keys_of_the_schema(experiment: str) -> None:
    if experiment == "command":
        keys, rows = leaves(SCHEMA["definitions"]["command"]), documented("A command of your own")
    else:
        keys = leaves(SCHEMA["definitions"][f"parameters of {experiment}"])
        rows = {key: row for key, row in documented("Keys of several experiments").items() if key in keys}
        rows |= documented(f"job.parameters of {experiment}")
    assert set(rows) == set(keys)


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
