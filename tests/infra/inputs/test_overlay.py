"""On this machine a set-up installs packages into an environment over the user's environment, never into the user's."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs import overlay

TOOL = b"import sys, tiny\nprint(tiny.VERSION, sys.prefix)\n"


def wheel(folder: Path, version: str) -> Path:
    """The package `tiny`, which pip installs without a network."""
    path, info = folder / f"tiny-{version}-py3-none-any.whl", f"tiny-{version}.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("tiny.py", f"VERSION = '{version}'\n")
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", f"tiny.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n")
    return path


def written(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return {str(path): path.read_bytes() for path in files if "__pycache__" not in path.parts}


def test_a_set_up_sees_the_users_packages_and_changes_none_of_them(tmp_path: Path) -> None:
    theirs = tmp_path / "their env"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", theirs], check=True)
    (packages,) = (theirs / "lib").glob("*/site-packages")
    with zipfile.ZipFile(wheel(tmp_path, "1.0")) as archive:
        archive.extractall(packages)
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "mine.py").touch()
    (packages / "__editable__.mine.pth").write_text(f"{tmp_path / 'source'}\n")
    python = os.fsencode(theirs / "bin" / "python")
    heads = {
        "plain": b"#!%s\n" % python,
        "long": b"#!/bin/sh\n'''exec' \"%s\" \"$0\" \"$@\"\n' '''\n" % python,
        "flag": b"#!%s -s\n" % python,
    }
    for name, head in heads.items():
        (theirs / "bin" / name).write_bytes(head + TOOL)
        (theirs / "bin" / name).chmod(0o755)
    (theirs / "pip.conf").write_text("[global]\nno-index = true\n")
    before = written(theirs)

    over = tmp_path / "an overlay"
    programs = overlay.make(theirs / "bin" / "python", over, cache=tmp_path / "cache")

    def run(command: str) -> str:
        path = os.pathsep.join(map(str, (programs, theirs / "bin", "/usr/bin", "/bin")))
        environment = {"PATH": path, "HOME": str(tmp_path), "PYTHONDONTWRITEBYTECODE": "1"}
        done = subprocess.run(["sh", "-ec", command], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    for name in heads:
        assert run(name) == f"1.0 {over}"
    run("python -c 'import mine'")
    assert run("pip config get global.no-index") == "true"
    assert Path(run("pip cache dir")) == tmp_path / "cache"
    run(f"python -m pip install --quiet '{wheel(tmp_path, '2.0')}'")
    assert run("plain") == f"2.0 {over}"
    run(f"pip install --quiet --force-reinstall '{wheel(tmp_path, '3.0')}'")
    assert run("plain") == f"3.0 {over}"
    run("pip uninstall --quiet --yes tiny")
    assert run("plain") == f"1.0 {over}"
    assert written(theirs) == before


def test_an_interpreter_that_makes_no_environment_is_named_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(GpufleetError, match=r"(?s)on top of that of .*/nowhere.*rehearsal.*leaves the set-up out"):
        overlay.make(tmp_path / "nowhere", tmp_path / "over", cache=tmp_path)
