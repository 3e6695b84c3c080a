"""A scratch project: what a user's own checkout would be, in a folder that lives and dies with one embedded AWS.

The program is the same; the definitions, the engine's state and its settings are the scratch's own, and so are its
prices: those of the project from which it is made. Nothing of the user's environment that names AWS or Pulumi gets in.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from infra.catalog import files, project_prices
from rehearsal.engine import write_project


def make(folder: Path, definitions: Mapping[str, str]) -> Path:
    """A project in a new `folder`, with these definition files (text by stack name)."""
    (folder / "stacks").mkdir(parents=True)
    for name, text in definitions.items():
        (folder / "stacks" / f"{name}.yaml").write_text(text, encoding="utf-8")
    for newest in files.folders(project_prices(Path.cwd()))[-1:]:
        shutil.copytree(newest, folder / "prices" / newest.name)
    write_project(folder)
    return folder


def environment(settings: Mapping[str, str]) -> dict[str, str]:
    """The whole environment of a command in the project: the user's, without a word about AWS or Pulumi, and these."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith(("AWS_", "PULUMI_", "GPUFLEET_"))}
    return {**mine, **settings}
