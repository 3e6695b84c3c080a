"""Somebody else's folder contains a repository whose git settings name programs. None of these programs runs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra import cli
from gpufleet.infra.definition.loader import load
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.evidence import measurement
from gpufleet.infra.inputs import code
from gpufleet.infra.review import review
from tests.infra.command_files import command_file


class ForeignRepository:
    """A repository with one commit, and a file that git must read to know whether the file has changed."""

    def __init__(self, root: Path) -> None:
        self.root, self.folder, self.marker = root, root / "mine", root / "RAN"
        self.program = f"touch {self.marker}; false"
        self.folder.mkdir()
        (self.folder / "train.py").write_text("print('step 1 loss 1')\n")
        self.git("init", "-q")
        self.git("add", ".")
        self.git("commit", "-qm", "one")
        (self.folder / "train.py").write_text("print('step 2 loss 1')\n")

    def git(self, *words: str) -> None:
        name = ("-c", "user.name=a", "-c", "user.email=a@b.c")
        subprocess.run(["git", "-C", str(self.folder), *name, *words], check=True, capture_output=True)

    def set(self, *lines: str, file: str = "config") -> None:
        with (self.folder / ".git" / file).open("a") as config:
            config.write("\n".join(lines) + "\n")


def fsmonitor(theirs: ForeignRepository) -> None:
    theirs.set("[core]", f'fsmonitor = "{theirs.program}"')


def included(theirs: ForeignRepository) -> None:
    theirs.set("[include]", "path = more")
    theirs.set("[core]", f'fsmonitor = "{theirs.program}"', file="more")


def of_this_work_tree(theirs: ForeignRepository) -> None:
    theirs.set("[extensions]", "worktreeConfig = true")
    theirs.set("[core]", f'fsmonitor = "{theirs.program}"', file="config.worktree")


def a_filter(theirs: ForeignRepository) -> None:
    theirs.set('[filter "x"]', f'clean = "{theirs.program}"')
    (theirs.folder / ".gitattributes").write_text("*.py filter=x\n")


def a_submodule(theirs: ForeignRepository) -> None:
    inner = ForeignRepository(theirs.folder)
    inner.marker, inner.program = theirs.marker, theirs.program
    fsmonitor(inner)
    theirs.git("-c", "advice.addEmbeddedRepo=false", "add", "mine")
    (theirs.folder / ".gitmodules").write_text('[submodule "mine"]\npath = mine\nurl = ./mine\nignore = none\n')


def a_missing_object(theirs: ForeignRepository) -> None:
    """git fetches the object from the place, and by the program, that the settings name."""
    theirs.set("[core]", "repositoryformatversion = 1", f'sshCommand = "{theirs.program}"')
    theirs.set("[extensions]", "partialClone = origin", '[remote "origin"]', "url = ssh://x/y", "promisor = true")
    for path in (theirs.folder / ".git" / "objects").glob("??/*"):
        path.unlink()


WAYS: list[Callable[[ForeignRepository], None]] = [
    fsmonitor,
    included,
    of_this_work_tree,
    a_filter,
    a_submodule,
    a_missing_object,
]


def looks(theirs: ForeignRepository) -> None:
    """Every function of gpufleet that asks git about a folder."""
    file = command_file(theirs.root / "project", code={"folder": "../mine"})
    with_code = load(file, now=datetime(2026, 11, 21, tzinfo=UTC))
    code.read(with_code, theirs.root / "project")
    measurement._commit(theirs.folder)
    with pytest.raises(GpufleetError):
        review.review_commits(theirs.folder, "HEAD", "HEAD")
    with suppress(GpufleetError):  # the hash of a missing object
        review._uncommitted(theirs.folder, review._commit_hash(theirs.folder, "HEAD"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_no_program_of_its_settings_runs(
    way: Callable[[ForeignRepository], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = ForeignRepository(tmp_path)
    way(theirs)

    looks(theirs)
    monkeypatch.chdir(theirs.folder)
    assert cli.main(["init"]) == 0

    assert not theirs.marker.exists()
    words = ("git", "-C", str(theirs.folder), "status", "--porcelain")
    subprocess.run(words, capture_output=True, check=False, env={**os.environ, "GIT_SSH_VARIANT": "simple"})
    assert theirs.marker.exists(), "git itself runs none here, and this test cannot fail"
