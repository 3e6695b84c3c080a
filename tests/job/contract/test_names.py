"""Each name, exit code and key of the contract stands in one module: everything else imports it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.contract import attempt, bucket, codes, commit, done, environment, inputs, receipt, workdir
from tests.repository import ROOT

OWNERS = (bucket, codes, commit, environment, inputs, workdir)
SOURCES = [path for folder in ("job", "infra", "rehearsal") for path in sorted((ROOT / folder).rglob("*.py"))]
NAMES = {text for owner in OWNERS for name, text in vars(owner).items() if name.isupper() and isinstance(text, str)}
FILES = {name for name in NAMES if "." in name or name.startswith("GPUFLEET_")}
FOLDERS = {name.rstrip("/") for name in NAMES if name.endswith("/")}
FOLDERS |= {workdir.INPUTS, workdir.GRAPHS, workdir.PACKAGES}
KINDS = (codes.TrainerExit, codes.AttemptExit)
CODES = {code for kind in KINDS for name, code in vars(kind).items() if name.isupper()} - {0, 1}


def written_down(source: str) -> Iterator[str]:
    """Where a module writes down what the contract names: a file, a path through a folder of the run, an exit code."""
    tree = ast.parse(source)
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
            parts = set() if " " in node.value else set(node.value.replace("\\", "").split("/"))
            if parts & FILES or (len(parts) > 1 and parts & FOLDERS):
                yield f"line {node.lineno}: {node.value}"
        if isinstance(node, ast.BinOp) and isinstance(node.right, ast.Constant) and node.right.value in FOLDERS:
            yield f"line {node.lineno}: / {node.right.value}"
        if isinstance(node, ast.Compare | ast.Return | ast.Assign | ast.Dict | ast.keyword):
            numbers = [each.value for each in ast.iter_child_nodes(node) if isinstance(each, ast.Constant)]
            if any(type(each) is int and each in CODES for each in numbers) and "code" in ast.unparse(node).lower():
                yield f"line {node.lineno}: {ast.unparse(node)}"


def test_the_contract_names_what_a_run_has() -> None:
    assert {"run.json", "stop.json", "done.json", "metrics.jsonl", "manifest.json", "job.tar.gz"} <= FILES
    assert {"attempts", "heartbeat", "ckpt", "inputs", "final", "boot"} <= FOLDERS
    assert {65, 69, 70, 71, 72, 75, 143} == CODES


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('path = folder / "stop.json"', True),
        ('key = f"{run}/attempts/{name}.json"', True),
        ('path = workdir / "ckpt"', True),
        ("if code == 75: pass", True),
        ('say("the reason is in job.log")', False),
        ('wanted = tree["inputs"]', False),
        ("wait_s = 75", False),
    ],
)
def test_what_counts_as_written_down(source: str, found: bool) -> None:
    assert bool(list(written_down(source))) is found


def test_no_other_module_writes_them_down() -> None:
    own = {Path(str(owner.__file__)).resolve() for owner in OWNERS}
    found = {
        path.relative_to(ROOT).as_posix(): places
        for path in SOURCES
        if path not in own and (places := list(written_down(path.read_text())))
    }
    assert found == {}


DOCUMENTS: tuple[type[Any], ...] = (attempt.Exit, attempt.Hardware, attempt.AttemptRecord, commit.Best, commit.Commit)
DOCUMENTS += (commit.Manifest, commit.Published, commit.Retry, done.Done, receipt.AttemptCost, receipt.Receipt)
# Keys of other documents too.
GENERAL = {"base_weights", "code_sha256", "config_sha256", "free_usd", "gpu_count", "spent_s", "spent_usd", "val_loss"}
KEYS = {each.name for document in DOCUMENTS for each in fields(document) if "_" in each.name} - GENERAL
READS = ("get", "need", "take", "pop", "section", "sections")
KEYS |= {"counted_until", "free_first_hour_usd", "inside_range", "range_usd", "required_files"}


def keys_of(source: str) -> Iterator[str]:
    """Texts by which a module writes or asks for a value of a tree."""
    for node in ast.walk(ast.parse(source)):
        asked: list[ast.expr | None] = []
        if isinstance(node, ast.Subscript):
            asked = [node.slice]
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in READS:
            asked = node.args[:1]  # type: ignore[assignment]
        if isinstance(node, ast.Dict):
            asked = node.keys
        yield from (each.value for each in asked if isinstance(each, ast.Constant) and isinstance(each.value, str))


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('until = tree["counted_until"]', ["counted_until"]),
        ('tree.get("ends_at")', ["ends_at"]),
        ('told = {"manifest_at_boot": None}', ["manifest_at_boot"]),
        ("replace(record, started_s=3)", []),
    ],
)
def test_what_counts_as_asking_by_key(source: str, found: list[str]) -> None:
    assert list(keys_of(source)) == found


def test_no_other_module_writes_or_reads_a_document_by_key() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): keys
        for path in SOURCES
        if "contract" not in path.parts and (keys := KEYS & set(keys_of(path.read_text())))
    }
    assert found == {}


def test_the_owners_share_none() -> None:
    texts = {owner: ast.parse(Path(str(owner.__file__)).read_text()) for owner in OWNERS}
    named = [
        node.value
        for tree in texts.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and node.value in FILES
    ]
    assert sorted(named) == sorted(FILES)
