"""Makes a virtual environment on top of the user's own, for packages that a command's set-up installs on this machine.

The new environment sees every package and program of the user's environment, including editable installs. What pip
installs, upgrades or removes affects only the new environment.
"""

from __future__ import annotations

import configparser
import json
import os
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from gpufleet.infra.errors import GpufleetError
from gpufleet.job.command.places import own_environment

_CONFIG = "pip.conf"
_PROGRAMS = "bin"
_DESCRIBE = """
import json, os, site, sys, sysconfig
packages = [*site.getsitepackages(), *([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])]
programs = [os.path.dirname(sys.executable), sysconfig.get_path("scripts")]
print(json.dumps({"prefix": sys.prefix, "packages": packages, "programs": programs}))
"""
_PIP = b"import runpy\n\nrunpy.run_module('pip', run_name='__main__', alter_sys=True)\n"
# The first lines that pip and uv write into a program of a package. The second form is used if the path is too long or
# has a space.
_HEAD = re.compile(
    rb"""\A\#!(?: /bin/sh\n'''exec'[ ](?P<quote>["']?)(?P<long>/[^\n]*?)(?P=quote)[ ]"\$0"[^\n]*\n'[ ]'''
    | (?P<python>/[^\n]*?)([ ]-\w+)? )\n""",
    re.VERBOSE,
)


def make(python: Path, folder: Path, *, cache: Path) -> Path:
    """Makes a new environment in `folder`, on top of that of the interpreter `python`, and returns the folder of its
    programs. `cache` keeps pip's downloads for the next environment. Raises GpufleetError.
    """
    theirs = _describe(python)
    _run(python, "-m", "venv", "--without-pip", str(folder))
    programs = folder / _PROGRAMS
    own = programs / "python"
    # addsitedir is used because it also reads the .pth files in the folder
    line = f"import site; any(map(site.addsitedir, {theirs['packages']!r}))\n"
    (Path(_describe(own)["packages"][0]) / "over.pth").write_text(line, encoding="utf-8")
    _copy_scripts(dict.fromkeys(map(Path, theirs["programs"])), programs)
    for name in ("pip", "pip3"):  # otherwise the shell would find the user's own pip
        _write_script(programs / name, own, _PIP)
    if _run(own, "-c", "import importlib.util as u; print(u.find_spec('pip') is None)").strip() == "True":
        _run(own, "-m", "ensurepip")  # needed because an environment made by uv has no pip
    _configure_pip(Path(theirs["prefix"]), folder, cache)
    return programs


def _describe(python: Path) -> dict[str, Any]:
    description: dict[str, Any] = json.loads(_run(python, "-c", _DESCRIBE))
    return description


def _run(python: Path, *words: str) -> str:
    """Runs `python` and returns its output. Raises GpufleetError if it fails."""
    try:
        done = subprocess.run(
            [str(python), *words], capture_output=True, text=True, env=own_environment(os.environ), check=False
        )
        why = (done.stderr or done.stdout).strip()
    except OSError as error:
        why, done = str(error), None
    if done is None or done.returncode:
        raise GpufleetError(
            f"job.setup gets an environment of its own on top of that of {python}, but `python {words[0]} {words[1]}` "
            f"failed there: {why}\nCorrect that, or write job.setup: '' in the file's `rehearsal` section, which "
            "leaves the set-up out"
        )
    return done.stdout


def _copy_scripts(places: Iterable[Path], programs: Path) -> None:
    """Copies the packages' programs in these folders, for the interpreter in `programs`. Programs of other interpreters
    are still found on the PATH.
    """
    own, folders = programs / "python", {place.resolve() for place in places}
    for file in (file for folder in folders for file in sorted(folder.iterdir())):
        if (programs / file.name).exists() or not file.is_file() or not os.access(file, os.X_OK):
            continue
        with file.open("rb") as opened:
            if opened.read(2) != b"#!":
                continue
        content = file.read_bytes()
        head = _HEAD.match(content)
        named = Path(os.fsdecode((head["python"] or head["long"]) if head else b""))
        if head and named.name.startswith(("python", "pypy")) and named.parent.resolve() in folders:
            _write_script(programs / file.name, own, content[head.end() :])


def _write_script(path: Path, python: Path, body: bytes) -> None:
    """Writes a program for `python`, in a form that allows a path of any length."""
    path.write_bytes(b"#!/bin/sh\n'''exec' \"" + os.fsencode(python) + b'" "$0" "$@"\n\' \'\'\'\n' + body)
    path.chmod(0o755)


def _configure_pip(theirs: Path, folder: Path, cache: Path) -> None:
    """Copies pip's settings from the user's environment, such as a company's index."""
    settings = configparser.RawConfigParser()
    settings.read(theirs / _CONFIG)
    if not settings.has_section("global"):
        settings.add_section("global")
    settings.set("global", "cache-dir", str(cache))
    settings.set("global", "disable-pip-version-check", "true")
    with (folder / _CONFIG).open("w", encoding="utf-8") as file:
        settings.write(file)
