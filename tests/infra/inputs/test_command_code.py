"""Which files of a command's folder are shipped; and none of them is changed."""

from __future__ import annotations

import os
import subprocess
import tarfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError
from gpufleet.infra.inputs import code
from gpufleet.infra.inputs.readiness import code_problems
from tests.infra.command_files import command_file

NOW = datetime(2026, 11, 21, 12, tzinfo=UTC)


def definition(root: Path, **keys: Any) -> StackDefinition:
    return load(command_file(root / "project", code={"folder": "../mine", **keys}), now=NOW)


def mine(root: Path, names: dict[str, str]) -> Path:
    folder = root / "mine"
    for name, text in names.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def git(folder: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b.c"]
    subprocess.run(["git", "-C", str(folder), *identity, *words], check=True, capture_output=True)


def shipped(root: Path, **keys: Any) -> set[str]:
    tree = code.read(definition(root, **keys), root / "project")
    assert tree is not None
    with tarfile.open(code.pack(tree, root / "project").file) as packed:
        return set(packed.getnames())


def state(folder: Path) -> list[tuple[str, int, int]]:
    return sorted((str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in folder.rglob("*"))


def test_in_a_repository_what_git_tracks_or_would_is_shipped_and_nothing_is_written(tmp_path: Path) -> None:
    folder = mine(
        tmp_path, {"train.py": "1", "job/__init__.py": "", "new.py": "2", "big.bin": "3", ".gitignore": "*.bin"}
    )
    git(folder, "init", "-q")
    git(folder, "add", "train.py", "job", ".gitignore")
    git(folder, "commit", "-qm", "one")
    os.utime(folder / "train.py", (1, 1))  # a plain `git status` would refresh the index
    before = state(folder)

    tree = code.read(definition(tmp_path), tmp_path / "project")

    assert tree is not None
    assert shipped(tmp_path) == {"train.py", "job/__init__.py", "new.py", ".gitignore"}
    assert (len(tree.commit or ""), tree.changed) == (40, True)
    git(folder, "add", "new.py")
    git(folder, "commit", "-qm", "two")
    tree = code.read(definition(tmp_path), tmp_path / "project")
    assert tree is not None
    assert not tree.changed
    assert [each for each in state(folder) if "/.git" not in each[0]] == [
        each for each in before if "/.git" not in each[0]
    ]


def test_a_look_at_a_repository_leaves_its_index_as_it_is(tmp_path: Path) -> None:
    folder = mine(tmp_path, {"train.py": "1"})
    git(folder, "init", "-q")
    git(folder, "add", ".")
    git(folder, "commit", "-qm", "one")
    os.utime(folder / "train.py", (1, 1))
    before = state(folder)

    shipped(tmp_path)

    assert state(folder) == before


@pytest.mark.parametrize("there", [{}, {"part/unpacked.py": "2"}])
def test_a_submodule_that_is_not_checked_out_is_a_folder_like_any(tmp_path: Path, there: dict[str, str]) -> None:
    folder = mine(tmp_path, {"train.py": "1", **there})
    (folder / "part").mkdir(exist_ok=True)
    git(folder, "init", "-q")
    git(folder, "update-index", "--add", "--cacheinfo", f"160000,{'1' * 40},part")

    assert shipped(tmp_path) == {"train.py", *there}


def test_without_a_repository_all_is_shipped_but_caches_and_virtual_environments(tmp_path: Path) -> None:
    mine(
        tmp_path, {"train.py": "1", "a/b.py": "2", "__pycache__/x.pyc": "", "venv/pyvenv.cfg": "", "venv/lib/x.py": ""}
    )

    assert shipped(tmp_path) == {"train.py", "a/b.py"}


def test_of_a_repository_a_virtual_environment_that_git_does_not_ignore_is_left_out(tmp_path: Path) -> None:
    folder = mine(tmp_path, {"train.py": "1", ".venv/pyvenv.cfg": "", "a/venv/pyvenv.cfg": "", "a/venv.py": ""})
    (folder / ".venv" / "bin").mkdir()
    (folder / ".venv" / "bin" / "python").symlink_to("/usr/bin/env")  # the link leads out of the folder
    (tmp_path / "shared" / "pyvenv.cfg").parent.mkdir()
    (tmp_path / "shared" / "pyvenv.cfg").write_text("")
    (folder / "venv").symlink_to(tmp_path / "shared")
    git(folder, "init", "-q")

    assert shipped(tmp_path) == {"train.py", "a/venv.py"}


@pytest.mark.parametrize("pattern", ["data", "data/", "data/*", "*.bin", "data/deep"])
def test_a_pattern_leaves_out_a_file_or_a_folder_with_all_below_it(pattern: str, tmp_path: Path) -> None:
    mine(tmp_path, {"train.py": "1", "data/deep/x.bin": "2"})

    assert shipped(tmp_path, exclude=[pattern]) == {"train.py"}


def test_modes_and_links_inside_are_kept(tmp_path: Path) -> None:
    folder = mine(tmp_path, {"run.sh": "#!/bin/sh", "a/b.py": "2"})
    (folder / "run.sh").chmod(0o755)
    (folder / "link.py").symlink_to("a/b.py")
    (folder / "nowhere").symlink_to(tmp_path / "missing")
    tree = code.read(definition(tmp_path), tmp_path / "project")
    assert tree is not None
    with tarfile.open(code.pack(tree, tmp_path / "project").file) as packed:
        packed.extractall(tmp_path / "there", filter="data")

    there = tmp_path / "there"
    assert os.access(there / "run.sh", os.X_OK)
    assert (there / "link.py").readlink() == Path("a/b.py")
    assert not (there / "nowhere").exists()


def test_times_modes_and_order_do_not_change_the_archive(tmp_path: Path) -> None:
    names = {"b.py": "2", "a.py": "1"}
    shas = []
    for index, order in enumerate((sorted(names), sorted(names, reverse=True))):
        folder = mine(tmp_path / str(index), {name: names[name] for name in order})
        (folder / "a.py").chmod(0o600 if index else 0o664)
        os.utime(folder / "b.py", (index, index))
        tree = code.read(definition(tmp_path / str(index)), tmp_path / str(index) / "project")
        assert tree is not None
        shas.append(code.pack(tree, tmp_path / str(index) / "project").sha256)
    assert shas[0] == shas[1]


REFUSED: dict[str, tuple[dict[str, str], dict[str, Any], str]] = {
    "not there": ({}, {}, "line 7, job.code.folder: '../mine' is not accepted; allowed: a folder that exists."),
    "empty": ({".git/x": ""}, {}, "allowed: a folder with files. No file in it would be shipped."),
    "too large": (
        {f"{number}.bin": "x" * (100_000 * number) for number in range(1, 8)},
        {"max_mib": 1},
        "job.code.folder: '2.8 MB' is not accepted; allowed: at most job.code.max_mib, 1 MiB. The largest: 7.bin"
        " (0.7 MB), 6.bin (0.6 MB), 5.bin (0.5 MB), 4.bin (0.4 MB), 3.bin (0.3 MB). Name what the command"
        " does not need under job.code.exclude; data is storage.inputs.",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shipped_is_told_with_its_line(case: str, tmp_path: Path) -> None:
    names, keys, said = REFUSED[case]
    mine(tmp_path, names)
    stack = definition(tmp_path, **keys)

    with pytest.raises(DefinitionError) as refused:
        code.read(stack, tmp_path / "project")

    assert said in str(refused.value)
    assert any(said in str(problem) for problem in code_problems(stack, tmp_path / "project"))


@pytest.mark.parametrize("kind", ["folder", "file", "by way of a link inside"])
def test_what_a_link_out_of_the_folder_leads_to_is_not_shipped_and_is_told(kind: str, tmp_path: Path) -> None:
    folder = mine(tmp_path, {"train.py": "1"})
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "credentials").write_text("key")
    (folder / "data").symlink_to(tmp_path / "home" / ("" if kind == "folder" else "credentials"))
    if kind == "by way of a link inside":
        (folder / "data").rename(folder / "first")
        (folder / "data").symlink_to("first")

    with pytest.raises(DefinitionError, match=rf"data leads to {tmp_path}/home"):
        code.read(definition(tmp_path), tmp_path / "project")
    assert shipped(tmp_path, exclude=["data", "first"]) == {"train.py"}


@pytest.mark.parametrize("kind", ["work tree", "separate"])
def test_a_repository_whose_git_folder_is_elsewhere_is_known(kind: str, tmp_path: Path) -> None:
    first = mine(tmp_path / "first", {"train.py": "1", "big.bin": "2", ".gitignore": "*.bin"})
    git(first, "init", "-q", *([f"--separate-git-dir={tmp_path}/elsewhere"] if kind == "separate" else []))
    git(first, "add", ".")
    git(first, "commit", "-qm", "one")
    if kind == "work tree":
        git(first, "worktree", "add", "-q", "-b", "two", str(tmp_path / "mine"))
        (tmp_path / "mine" / "big.bin").touch()
    else:
        first.rename(tmp_path / "mine")

    tree = code.read(definition(tmp_path), tmp_path / "project")

    assert tree is not None
    assert (set(tree.files), len(tree.commit or ""), tree.changed) == ({"train.py", ".gitignore"}, 40, False)


@pytest.mark.parametrize("inside", ["", "gpu"])
def test_what_lies_in_a_project_for_gpufleet_is_no_code_where_both_are_one_folder(inside: str, tmp_path: Path) -> None:
    repository, root = tmp_path / "repository", tmp_path / "repository" / inside
    code_of_users = {
        "train.py": "1",
        "stacks/compose.yaml": "services: 1\n",
        "results/theirs.csv": "1",
        "a/stacks/b.yaml": "1",
    }
    written = ["Pulumi.yaml", "Pulumi.mine.yaml", "stacks/definition.schema.json", "stacks/program/__main__.py"]
    written += [".gpufleet/x.tar.gz", "rehearsals/mine/r1/a", "results/mine/r1/a", "prices/2026-11-21/spot.csv"]
    written += ["calibrations/mine/gpu.json", "receipts/mine/r1.json", "policy.yaml", "traces/a.csv"]
    file = command_file(root, code={"folder": os.path.relpath(repository, root)})
    for name, text in code_of_users.items():
        (repository / name).parent.mkdir(parents=True, exist_ok=True)
        (repository / name).write_text(text)
    before = code.digest(load(file, now=NOW), root)
    for name in written:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("1")
    tree = code.read(load(file, now=NOW), root)
    assert tree is not None
    assert set(tree.files) == set(code_of_users)
    assert code.digest(load(file, now=NOW), root) == before
