"""What must not change while the structure does: bills, declared resources, run.json, the node's rights, what a run
leaves in its bucket, exit codes, and what error messages tell.

A change that is meant is written down by `make freeze`; its diff is the review. What differs from run to run (digests,
moments, the user-data) stands there as a word in angle brackets.
"""

from __future__ import annotations

import asyncio
import json
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pulumi
import pytest

from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.scenarios import scenarios
from gpufleet.infra.program.resources.identity import node_statements
from gpufleet.job.kind import EXPERIMENTS
from gpufleet.rehearsal import scratch
from tests import freezing
from tests.infra.declared_world import declare
from tests.job.supervisor_world import Bench, interrupted
from tests.repository import ROOT

FROZEN = Path(__file__).parent / "frozen"

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)
CHANGING = {
    r"\b[0-9a-f]{64}\b": "<sha256>",
    r"\d{4}-\d\d-\d\dT\d\d:\d\d(:\d\d)?(\.\d+)?(Z|\+00:00)?": "<moment>",
    r"04da6b54-80e4-46f7-96ec-b56ff0331ba9": "<unknown>",  # the engine's mark of a value that only `up` gives
    r"(gpufleet-[a-z0-9-]+|[a-z]+-[a-z0-9-]+)-[0-9a-f]{7}\b": r"\1-<random>",
    r'"(versions|cpus|python)": (\{[^}]*\}|"[^"]*"|\d+)': r'"\1": "<machine>"',
    r"resource-archive-[^\"]+|/[^\" ]*/project": "<path>",
}
TEXTS = {stack: (ROOT / "stacks" / f"{stack}.yaml").read_text() for stack in EXPERIMENTS}


@pytest.mark.parametrize("stack", EXPERIMENTS)
def test_every_bill_is_the_same(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scratch.make(tmp_path / "project", {stack: TEXTS[stack]}))
    path = f"stacks/{stack}.yaml"

    def bill(*words: str) -> dict[str, Any]:
        code = main(["cost", path, "--json", *words])
        printed = capsys.readouterr()
        try:
            return {"exit": code, "said": printed.err, **json.loads(printed.out)}
        except ValueError:
            return {"exit": code, "said": printed.err, "printed": printed.out}

    whole = bill()
    found = {"the file": whole}
    for each in scenarios(Path(path), now=NOW):
        one = bill("--scenario", each.scenario)
        found[each.scenario] = {key: value for key, value in one.items() if whole.get(key) != value}
    assert_frozen(f"bill-{stack}", found)


@pytest.mark.parametrize("stack", EXPERIMENTS)
def test_every_resource_and_the_run_file_are_the_same(
    stack: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(scratch.make(tmp_path / "here", {}))
    declared = declare(tmp_path / "project", stack, TEXTS[stack])
    assert declared.result.ok, declared.result.text
    found = sorted(
        ({"type": each["type"], "name": each["name"], "arguments": arguments(each)} for each in declared.resources),
        key=lambda each: (each["type"], each["name"]),
    )
    definition = load(ROOT / "stacks" / f"{stack}.yaml", now=NOW)

    async def rights() -> Any:
        statements = node_statements(definition, "<bucket>", "<log group>", "<schedule>", "<stop role>")
        return json.loads(await pulumi.Output.json_dumps(statements).future() or "")

    assert_frozen(f"resources-{stack}", {"resources": found, "rights of the node": asyncio.run(rights())})


def arguments(resource: dict[str, Any]) -> dict[str, Any]:
    """Of a resource, with JSON inside text opened."""
    found: dict[str, Any] = {}
    for key, value in resource["inputs"].items():
        if key in ("userData", "contentBase64", "source"):
            found[key] = f"<{key}>"
        elif isinstance(value, str) and value[:1] in "[{":
            found[key] = json.loads(value)
            if "archive" in found[key].get("inputs", {}):
                found[key]["inputs"]["archive"]["bytes"] = "<bytes>"
        else:
            found[key] = value
    return found


def test_a_finished_run_leaves_the_same_in_its_bucket(tmp_path: Path) -> None:
    bench = Bench(tmp_path / "whole")
    code = bench.attempt("i-1").run()
    taken = interrupted(tmp_path / "taken")
    second = taken.attempt("i-2").run()
    assert_frozen("bucket", {"uninterrupted": outcome(bench, code), "taken back once": outcome(taken, second)})


def outcome(bench: Bench, code: int) -> dict[str, Any]:
    """The listing of a run's prefix, and the documents that tell how it ended."""
    keys = sorted(entry.key for entry in bench.store.entries(""))
    documents = [key for key in keys if key in ("done.json", "receipt.json") or key.startswith("attempts/")]
    return {"exit": code, "keys": keys, **{key: bench.json(key) for key in documents if key.endswith(".json")}}


BROKEN = {
    "no such stack": None,
    "an unknown key": ("  max_hours: 1\n", "  max_hours: 1\n  budget: 3\n"),
    "a key that is missing": ("  max_usd: 5\n", ""),
    "no number": ("  max_usd: 5\n", "  max_usd: five\n"),
    "an unknown type": ("[g5.xlarge]", "[g5.huge]"),
    "a zone elsewhere": ("us-east-2a,", "us-west-2a,"),
    "a limit below the bill": ("  max_usd: 5\n", "  max_usd: 0.05\n"),
    "an unknown experiment": ("  experiment: two-tower\n", "  experiment: three-tower\n"),
    "an unknown parameter": ("    epochs: 35\n", "    epochs: 35\n    epoch: 3\n"),
    "a parameter out of range": ("    epochs: 35\n", "    epochs: 0\n"),
    "a tab": ("  max_usd: 5\n", "\tmax_usd: 5\n"),
    "too little kept": ("    days: 7\n", "    days: 1\n"),
    "a rehearsal of nothing": ("      epochs: 15\n", "      epochs: many\n"),
}


def test_messages_tell_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(scratch.make(tmp_path / "project", {}))
    found = {}
    for name, change in BROKEN.items():
        if change is not None:
            assert TEXTS["two-tower"].count(change[0]) == 1, name
            Path("stacks/two-tower.yaml").write_text(TEXTS["two-tower"].replace(*change))
        code = main(["cost", "two-tower"])
        found[name] = {"exit": code, "said": capsys.readouterr().err.splitlines()}
    assert_frozen("messages", found)


def lines(found: dict[str, Any]) -> str:
    """JSON with a line for each part of each of its sections: what a review of a change reads."""

    def line(value: Any) -> str:
        return json.dumps(value, sort_keys=True, ensure_ascii=False)

    sections = []
    for name, section in sorted(found.items()):
        if isinstance(section, dict):
            parts = ",\n  ".join(f"{line(key)}: {line(value)}" for key, value in sorted(section.items()))
            sections.append(f"{line(name)}: {{\n  {parts}\n }}")
        else:
            sections.append(f"{line(name)}: [\n  " + ",\n  ".join(map(line, section)) + "\n ]")
    return "{\n " + ",\n ".join(sections) + "\n}\n"


def assert_frozen(name: str, found: Any) -> None:
    """Fails where `found` is not what is frozen under `name`."""
    text = lines(found)
    for pattern, word in CHANGING.items():
        text = re.sub(pattern, word, text)
    freezing.assert_frozen(FROZEN / f"{name}.json", text)
