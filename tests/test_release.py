"""What is published, as far as it can be tried without publishing: `make release`, and the hook for pre-commit."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.infra import review_world
from tests.infra.command_files import command_file
from tests.repository import ROOT

FILLED = {"example.org": "example.com", "LicenseRef-not-chosen": "MIT", 'version = "0.1.0"': 'version = "0.2.0"'}
MAKEFILE = "check-dist:\n\tmkdir dist && touch dist/made\nrelease:\n\t@.ci/release '$(VERSION)'\n"


def git(folder: Path, *words: str) -> str:
    done = subprocess.run(["git", *words], cwd=folder, env=review_world.environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """Of a repository that its owner has filled in, with a package that is made at once."""
    origin, folder = tmp_path / "origin", tmp_path / "clone"
    git(tmp_path, "init", "-q", "--bare", str(origin))
    git(tmp_path, "clone", "-q", str(origin), str(folder))
    text = (ROOT / "pyproject.toml").read_text()
    for old, new in FILLED.items():
        assert old in text
        text = text.replace(old, new)
    (folder / ".ci").mkdir()
    (folder / ".ci" / "release").write_bytes((ROOT / ".ci" / "release").read_bytes())
    (folder / ".ci" / "release").chmod(0o755)
    changes = (ROOT / "CHANGELOG.md").read_text().replace("## Unreleased", "## 0.2.0")
    files = {"pyproject.toml": text, "CHANGELOG.md": changes, "LICENSE": "MIT License\n", "Makefile": MAKEFILE}
    for name, content in {**files, ".gitignore": "/dist/\n"}.items():
        (folder / name).write_text(content)
    commit(folder)
    return folder


def commit(folder: Path) -> None:
    git(folder, "add", "-A")
    git(folder, "commit", "-q", "--allow-empty", "-m", "a commit")


def release(folder: Path, version: str = "0.2.0") -> subprocess.CompletedProcess[str]:
    words = ["make", "--no-print-directory", "release", f"VERSION={version}"]
    outside = {
        key: value for key, value in review_world.environment().items() if not key.startswith(("MAKE", "MFLAGS"))
    }
    return subprocess.run(words, cwd=folder, env=outside, capture_output=True, text=True)


def test_a_release_is_a_tag_and_a_package_and_goes_nowhere(clone: Path) -> None:
    done = release(clone)
    assert done.returncode == 0, done.stderr
    assert git(clone, "rev-list", "-n", "1", "v0.2.0") == git(clone, "rev-parse", "HEAD")
    assert (clone / "dist" / "made").exists()
    assert "To publish: git push origin v0.2.0, then twine upload dist/*" in done.stdout
    assert git(clone, "ls-remote", "origin") == ""


@pytest.mark.parametrize(
    ("file", "old", "new", "version", "said"),
    [
        ("LICENSE", "", "", "0.2", "VERSION is '0.2'"),
        ("LICENSE", "", "", "1.0.0", 'Write version = "1.0.0"'),
        ("CHANGELOG.md", "## 0.2.0", "## Unreleased", "0.2.0", "no heading '## 0.2.0'"),
        ("pyproject.toml", "owner@example.com", "owner@example.org", "0.2.0", "still has example.org"),
        ("pyproject.toml", 'license = "MIT"', 'license = "LicenseRef-not-chosen"', "0.2.0", "no licence is chosen"),
        ("LICENSE", "MIT License\n", (ROOT / "LICENSE").read_text(), "0.2.0", "LICENSE holds no licence"),
    ],
)
def test_a_release_that_lacks_something_is_refused_before_anything_is_made(
    clone: Path, file: str, old: str, new: str, version: str, said: str
) -> None:
    text = (clone / file).read_text()
    assert old in text
    (clone / file).write_text(text.replace(old, new))
    commit(clone)
    refused(clone, version, said)


def refused(clone: Path, version: str, said: str) -> None:
    before = git(clone, "tag")
    done = release(clone, version)
    assert done.returncode != 0
    assert said in done.stderr
    assert git(clone, "tag") == before
    assert not (clone / "dist").exists()


def test_a_release_of_changes_that_are_in_no_commit_is_refused(clone: Path) -> None:
    (clone / "more.txt").write_text("more")
    refused(clone, "0.2.0", "in no commit")


def test_a_version_is_released_once(clone: Path) -> None:
    git(clone, "tag", "v0.2.0")
    refused(clone, "0.2.0", "is there already")


def test_only_the_owner_s_block_names_author_licence_and_addresses() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    outside = re.sub(r"(?ms)^# --- The owner fills in.*?^# --- The owner's block ends here", "", text)
    assert outside != text
    assert not re.search(r"(?m)^(authors|maintainers|license|license-files) =|^\[project\.urls\]|://", outside)


(HOOK,) = yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())


def hook(*files: Path) -> subprocess.CompletedProcess[str]:
    """As pre-commit runs it: the entry's words, and the files behind them."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    words = [*shlex.split(HOOK["entry"]), *map(str, files)]
    return subprocess.run(words, env={**os.environ, "PATH": path}, cwd=ROOT, capture_output=True, text=True)


def test_the_hook_refuses_a_commit_for_each_definition_whose_limits_are_too_low(tmp_path: Path) -> None:
    good = command_file(tmp_path, name="good")
    low = command_file(tmp_path, name="low", limits={"max_usd": 0.01, "max_hours": 10})
    wrong = command_file(tmp_path, name="wrong", gpus="many")

    done = hook(good)
    assert (done.returncode, done.stdout) == (0, "")
    done = hook(low, wrong, good)
    assert done.returncode == 1
    assert "limits.max_usd" in done.stderr
    assert "job.gpus" in done.stderr


def test_the_hook_is_for_the_definitions_of_a_project_wherever_it_is() -> None:
    names = (
        "stacks/mine.yaml",
        "llm/stacks/mine.yaml",
        "Pulumi.yaml",
        "stacks/definition.schema.json",
        "stacks/p/x.yaml",
    )
    assert [name for name in names if re.search(HOOK["files"], name)] == ["stacks/mine.yaml", "llm/stacks/mine.yaml"]
