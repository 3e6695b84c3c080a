"""Under the run's id `pulumi up` refuses a file whose digest is another one. A key that came after the version of a run
changes no digest while it has its default: that version's files are accepted, and its runs go on.
"""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.infra.definition.loader import load
from gpufleet.infra.program.run_guard import DIGESTS, creation_digest
from tests.released.recorded import BEFORE, RECORDS, definition_keys, opened, place
from tests.repository import OF_ONE_JOB, ROOT

NOW = datetime(2026, 11, 27, tzinfo=UTC)
# One of each kind of job. No version before 0.2.0 has run a file with stages.
FILES = [*OF_ONE_JOB, ROOT / "examples" / "nanogpt.yaml"]
SCHEMA = json.loads((ROOT / "gpufleet" / "infra" / "definition" / "definition.schema.json").read_text())
every_record = pytest.mark.parametrize("record", RECORDS, ids=lambda path: path.name)


def version_of(record: Path) -> str:
    return "" if record == BEFORE else record.name


@every_record
def test_every_file_of_its_time_has_the_digest_that_its_runs_recorded(record: Path, tmp_path: Path) -> None:
    place(opened(record / "definitions.tar.gz"), tmp_path)
    version = version_of(record)
    digests = {path.name: creation_digest(load(path, now=NOW), version=version) for path in tmp_path.iterdir()}
    assert digests == json.loads((record / "digests.json").read_text())
    assert version_of(record) in DIGESTS


@every_record
def test_every_key_that_it_did_not_have_says_that_it_came_later(record: Path) -> None:
    known = set(json.loads((record / "keys.json").read_text()))
    sections = {key.partition(".")[0] for key in known}
    for key, field in definition_keys().items():
        above = key.rpartition(".")[0]
        if key not in known and (above in known or above in sections):
            assert field.metadata.get("added", "") > version_of(record), f"{key}: declare it with added_later"


INSTEAD = {"hours"}  # sections that stand in the place of other keys


def referred(schema: dict[str, Any]) -> dict[str, Any]:
    """What the schema's reference leads to, or itself."""
    return SCHEMA["definitions"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def with_defaults(section: dict[str, Any], schema: dict[str, Any], refused: dict[str, Any]) -> dict[str, Any]:
    """The section with every key that it leaves out, at its default; in sections of it that ask for no key, too."""
    whole = dict(section)
    for key, below in referred(schema).get("properties", {}).items():
        below = referred(below)
        inner = whole.get(key, {})
        if refused.get(key) is False or key in INSTEAD:
            continue
        if "default" in below:
            whole.setdefault(key, below["default"])
        elif "properties" in below and isinstance(inner, dict) and (inner or not below.get("required")):
            whole[key] = with_defaults(inner, below, {})
    return whole


@pytest.mark.parametrize("file", FILES, ids=lambda path: path.stem)
def test_no_key_at_its_default_changes_a_digest(file: Path, tmp_path: Path) -> None:
    tree = yaml.safe_load(file.read_text())
    experiment = tree["job"].get("experiment")
    kind = json.dumps({"const": experiment} if experiment else {"required": ["command"]})
    (own,) = (each["then"]["properties"] for each in SCHEMA["allOf"] if kind in json.dumps(each.get("if")))
    whole = dict(tree)
    for name in ("job", "fleet", "storage", "limits", "account", "notify"):
        schema = own["job"] if name == "job" else SCHEMA["properties"][name]
        refused = {} if name == "job" else own.get(name, {}).get("properties", {})
        whole[name] = with_defaults(tree.get(name) or {}, schema, refused)
    assert len(json.dumps(whole)) > len(json.dumps(tree)) + 300
    plain, written = tmp_path / "plain.yaml", tmp_path / "written.yaml"
    plain.write_text(yaml.safe_dump(tree))
    written.write_text(yaml.safe_dump(whole))
    for version in DIGESTS:
        as_written, as_plain = (creation_digest(load(path, now=NOW), version=version) for path in (written, plain))
        assert as_written == as_plain, f"{version}: {written.read_text()}"
