"""A project in a git repository, commit by commit, with fixed authors and dates."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.commands import diff

STACK = """# growth: a small run, for reviews.
run:
  id: r1
  owner: you@example.org
job:
  experiment: tinystories-growth
  image: public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023
  parameters:
    steps_per_phase: 1000
fleet:
  region: us-east-2
  zones: [us-east-2a, us-east-2b]
  instance_types: [g5.2xlarge]
  capacity: on-demand
storage:
  dataset: data/tinystories
  keep:
    days: 7
limits:
  max_usd: 9.00
  max_hours: 6
"""


@dataclass
class Project:
    """A repository with the project in its root, or in a folder of it."""

    root: Path
    folder: Path

    def write(self, files: dict[str, str | None]) -> None:
        """Writes files; None removes a file."""
        for name, text in files.items():
            path = self.folder / name
            if text is None:
                path.unlink()
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)

    def commit(self, files: dict[str, str | None]) -> str:
        """Writes files, commits everything, and returns the commit's hash."""
        self.write(files)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "a change")
        return self.git("rev-parse", "HEAD").strip()

    def stack(self, *changes: tuple[str, str], name: str = "growth") -> str:
        """A commit of STACK with these passages replaced; each must be there."""
        return self.commit({f"stacks/{name}.yaml": changed(*changes)})

    def git(self, *words: str) -> str:
        return subprocess.run(
            ["git", *words], cwd=self.root, env=environment(), check=True, capture_output=True, text=True
        ).stdout


def changed(*changes: tuple[str, str]) -> str:
    text = STACK
    for old, new in changes:
        assert text.count(old) == 1, (old, text.count(old))
        text = text.replace(old, new)
    return text


def environment() -> dict[str, str]:
    """The environment in which git has no user's settings, and a fixed time."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    fixed = {
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_CONFIG_SYSTEM": os.devnull,
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@example.org",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@example.org",
        "GIT_AUTHOR_DATE": "2026-11-21T12:00:00Z",
        "GIT_COMMITTER_DATE": "2026-11-21T12:00:00Z",
    }
    return kept | fixed


def make(root: Path, inside: str = "") -> Project:
    """An empty repository."""
    folder = root / inside
    (folder / "stacks").mkdir(parents=True)
    project = Project(root, folder)
    project.git("init", "-q", "-b", "main")
    return project


def enter(root: Path, monkeypatch: pytest.MonkeyPatch, inside: str = "") -> Project:
    """An empty repository with the project's folder as the working directory."""
    project = make(root, inside)
    monkeypatch.chdir(project.folder)
    for name, value in environment().items():
        if name.startswith("GIT_"):
            monkeypatch.setenv(name, value)
    return project


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """The exit code and the output of `gpufleet diff` with these arguments."""
    parser = argparse.ArgumentParser()
    diff.arguments(parser)
    code = diff.run(parser.parse_args(words))
    return code, capsys.readouterr().out


def reviewed(capsys: pytest.CaptureFixture[str], base: str, head: str, *words: str) -> tuple[int, dict[str, Any]]:
    """The exit code of `gpufleet diff --json`, and the stacks in its output by name."""
    code, out = run(capsys, base, head, "--json", *words)
    return code, {stack["stack"]: stack for stack in json.loads(out)["stacks"]}
