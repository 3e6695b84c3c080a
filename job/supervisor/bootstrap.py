"""Installs packages that the image does not have, before they are imported. This module uses the standard
library only.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

JOB = Path(__file__).parents[1]
REQUIREMENTS = "requirements.txt"
MARK = "GPUFLEET_PACKAGES"  # a variable in the environment of a process that has the packages
TRIES = 3


def listed(module: str) -> Path:
    """The requirements file of a job's module: the file beside the module, or the common one."""
    own = JOB.joinpath(*module.split(".")[2:], REQUIREMENTS)
    return own if own.exists() else JOB / REQUIREMENTS


def ensure(folder: Path, requirements: Path) -> None:
    """Installs missing packages into `folder`, then starts this program again with that folder on the path. Raises
    RuntimeError if the installation fails.
    """
    lacking = missing(requirements.read_text())
    if not lacking:
        return
    if os.environ.get(MARK):
        raise RuntimeError(
            f"{', '.join(lacking)}: installed into {os.environ[MARK]}, but Python does not find them there"
        )
    sys.stdout.write(f"installing {', '.join(lacking)}\n")
    sys.stdout.flush()
    install(lacking, folder)
    os.environ[MARK] = str(folder)
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(folder))))
    os.execv(sys.executable, [sys.executable, "-m", "gpufleet.job", *sys.argv[1:]])


def missing(requirements: str, version: Callable[[str], str] = importlib.metadata.version) -> dict[str, str]:
    """The requirements that no installed distribution satisfies, as {name: the requirement's lines}."""
    lacking = {}
    for block in re.split(r"(?<!\\)\n", requirements):
        match = re.match(r"([A-Za-z0-9._-]+)==", block)
        if match:
            try:
                version(match[1])
            except importlib.metadata.PackageNotFoundError:
                lacking[match[1]] = block
    return lacking


def command(listed: Path, folder: Path) -> list[str]:
    """The pip command, with which only files with the pinned hashes are accepted."""
    options = ["--no-deps", "--require-hashes", "--only-binary", ":all:", "--no-cache-dir"]
    quiet = ["--quiet", "--disable-pip-version-check", "--no-input", "--root-user-action", "ignore"]
    target = ["--target", str(folder), "--upgrade", "-r", str(listed)]
    return [sys.executable, "-m", "pip", "install", *options, *quiet, *target]


def install(lacking: dict[str, str], folder: Path) -> None:
    """Installs the packages; raises RuntimeError after three failures."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = folder / "requirements.txt"
    listed.write_text("\n".join(lacking.values()) + "\n")
    for _ in range(TRIES):
        if subprocess.run(command(listed, folder), check=False).returncode == 0:
            return
    raise RuntimeError(f"pip cannot install {', '.join(lacking)}: see above")
