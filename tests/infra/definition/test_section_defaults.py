"""A key that is written in a section leaves the section's other keys as they are documented."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import yaml

from gpufleet.infra.definition import yaml_tree
from gpufleet.infra.definition.schema import Findings, build
from gpufleet.job.kind import EXPERIMENTS, from_json


def leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from leaves(value, (*path, key))
        elif path:
            yield (*path, key), value


@pytest.mark.parametrize("name", sorted(EXPERIMENTS))
def test_writing_a_default_changes_nothing(name: str) -> None:
    default = EXPERIMENTS[name]()
    written = list(leaves(dataclasses.asdict(default)))
    assert len(written) > 20
    for path, value in written:
        plain = list(value) if isinstance(value, tuple) else value
        tree: Any = plain
        for key in reversed(path):
            tree = {key: tree}
        assert from_json(name, tree) == default, path
        node = yaml_tree.read(yaml.safe_dump(tree))
        findings = Findings(node)
        assert build(type(default), node, "", findings) == default, (path, findings.problems)
