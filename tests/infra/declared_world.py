"""Runs the program for a definition file, without AWS and without the engine, and records the declared resources."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpufleet.rehearsal import scratch
from gpufleet.rehearsal.engine import InProcess, Result
from tests import forked


@dataclass(frozen=True)
class Declared:
    """The result of one preview."""

    result: Result
    resources: list[dict[str, Any]]

    def inputs(self, kind: str) -> list[dict[str, Any]]:
        return [each["inputs"] for each in self.resources if each["type"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        (found,) = self.inputs(kind)
        return found

    @property
    def kinds(self) -> set[str]:
        return {each["type"] for each in self.resources}


def declare(folder: Path, name: str, text: str) -> Declared:
    scratch.make(folder, {name: text})
    runner = InProcess(folder, {}, name, lambda line: None)
    with forked.programs(folder):
        result = runner.preview()
    return Declared(result=result, resources=runner.declared())
