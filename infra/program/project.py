"""Makes the Pulumi project that declares runs, for a user or for a rehearsal: its Pulumi.yaml, and a program of two
lines. The Pulumi.yaml of this repository does the same for `infra/`, and also has the questions that `pulumi new` asks.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path

import yaml

from gpufleet.infra.definition.loader import PROGRAM

PROGRAM_TEXT = '''"""The Pulumi program: the run that a file of stacks/ describes, called like the Pulumi stack."""

import gpufleet

gpufleet.program()
'''
NAMES = ("Pulumi.yaml", "Pulumi.yml", "Pulumi.json")  # files by which the engine finds a project


def pulumi_yaml(name: str, options: Mapping[str, str], main: str = PROGRAM) -> str:
    """The text of Pulumi.yaml. `options`: options of Pulumi's Python runtime, which decide which Python it uses."""
    python = "".join(f"\n    {line}" for line in yaml.safe_dump(dict(options), sort_keys=False).splitlines())
    return f"""\
name: {name}
description: Train on rented AWS GPUs with the bill known before anything exists.
main: {main}
runtime:
  name: python
  options:{python}
options:
  # A run ends its own fleet and AWS expires it: without a look first, up and destroy would act on what is gone.
  refresh: always
config:
  definition:
    type: string
    description: A file of stacks/ without its .yaml, or a path to one. Empty, the one called like the Pulumi stack.
    default: ""
  scenario:
    type: string
    description: A scenario of the definition file. Empty, the file as it is.
    default: ""
"""


def files(folder: Path, name: str, options: Mapping[str, str]) -> dict[Path, str]:
    """Both files of a project in `folder`. The program has its own folder, because Python looks for imports in the
    program's folder first, and a user may have an `infra` or a `gpufleet` in `folder`.
    """
    return {folder / NAMES[0]: pulumi_yaml(name, options), folder / PROGRAM / "__main__.py": PROGRAM_TEXT}


def name_for(folder: Path) -> str:
    """The project's name: the name of the folder, without characters that Pulumi does not accept."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", folder.resolve().name).strip("-.")[:100] or "gpufleet"


def python_of(folder: Path, repository: Path) -> dict[str, str]:
    """The options that make Pulumi use the Python that has gpufleet. This is uv or poetry if its lock file is in
    `folder` or above it. Otherwise it is this environment if it is in the `repository`, and the `python3` on PATH if
    not.
    """
    for place in (folder, *folder.parents):
        for tool in ("uv", "poetry"):
            # the engine needs both the lock file and the tool
            if (place / f"{tool}.lock").is_file() and shutil.which(tool):
                return {"toolchain": tool}
    prefix = Path(sys.prefix).resolve()
    if sys.prefix != sys.base_prefix and prefix.is_relative_to(repository.resolve()):
        return {"toolchain": "pip", "virtualenv": os.path.relpath(prefix, folder.resolve())}
    return {"toolchain": "pip"}
