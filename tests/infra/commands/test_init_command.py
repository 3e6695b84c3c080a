"""`gpufleet init` makes a project in a repository, whatever other files the repository has."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from gpufleet.infra.cli import main
from gpufleet.infra.definition.loader import load, names_of
from gpufleet.infra.inputs import code
from gpufleet.infra.program import project
from gpufleet.infra.review import workflow
from tests.repository import ROOT

SCRIPT = 'import torch\nfor step in range(9):\n    print(f"step {step} loss {1.0}")\n'
FILES = [
    ".github/workflows/gpufleet-review.yml",
    ".gitignore",
    "Pulumi.yaml",
    "stacks/canary.yaml",
    "stacks/canary/train.py",
    "stacks/definition.schema.json",
    "stacks/program/__main__.py",
]


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A repository with a script, as the current directory; the tools and settings of this machine do not affect it."""
    root = tmp_path / "my-model"
    root.mkdir()
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    (root / "train.py").write_text(SCRIPT)
    monkeypatch.chdir(root)
    return root


def files(root: Path) -> dict[str, str]:
    found = (path for path in root.rglob("*") if path.is_file() and ".git" not in path.relative_to(root).parts)
    return {path.relative_to(root).as_posix(): path.read_text() for path in found}


def test_it_writes_a_project_and_says_each_file(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert sorted(files(repository)) == [*FILES, "train.py"]
    assert [name for name in FILES if name not in said] == []
    assert yaml.safe_load((repository / "Pulumi.yaml").read_text())["name"] == "my-model"
    assert (repository / ".gitignore").read_text().splitlines() == ["/.gpufleet/", "/rehearsals/", "/results/"]
    assert "Next: `gpufleet new NAME --code DIR`" in said


def test_with_a_name_it_writes_a_first_definition_too(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["init", "mine"]) == 0
    text = (repository / "stacks" / "mine.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=definition.schema.json\n")
    assert yaml.safe_load(text)["job"]["code"]["folder"] == "."
    assert "then `gpufleet cost mine` and `gpufleet rehearse mine`" in capsys.readouterr().out
    assert main(["init", "other", "--code", "nowhere"]) == 2
    assert main(["init", "No_Name"]) == 2


def test_the_canarys_script_is_not_taken_for_the_users(repository: Path) -> None:
    main(["init"])
    main(["new", "mine"])
    assert yaml.safe_load((repository / "stacks" / "mine.yaml").read_text())["job"]["command"] == "python train.py"
    mine = load(repository / "stacks" / "mine.yaml", now=datetime.now(UTC))
    shipped = code.read(mine, repository)
    assert shipped is not None
    assert set(shipped.files) == {".gitignore", "train.py"}


def test_outside_of_a_repository_it_writes_nothing_unless_told_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))

    assert main(["init"]) == 2
    assert "is not in a git repository, so nothing was written" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    for answer, written in (("n", False), ("y", True)):
        person = SimpleNamespace(isatty=lambda: True, readline=lambda answer=answer: f"{answer}\n")
        monkeypatch.setattr("sys.stdin", person)
        assert (main(["init"]) == 0) is written
        assert (tmp_path / "Pulumi.yaml").exists() is written
    assert main(["init", "--yes"]) == 0


def test_a_second_time_it_writes_nothing(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["init"])
    before, _ = files(repository), capsys.readouterr()
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert files(repository) == before
    assert "Wrote" not in said
    assert "TrainingRun" not in said
    assert ".gitignore has all lines already" in said


@pytest.mark.parametrize("name", [each for each in FILES if each not in (".gitignore", "stacks/program/__main__.py")])
def test_what_is_there_stays_as_it_is(name: str, repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / name).parent.mkdir(parents=True, exist_ok=True)
    (repository / name).write_text("theirs")
    assert main(["init"]) == 0
    assert (repository / name).read_text() == "theirs"
    assert f"{name} exists already" in capsys.readouterr().out


def test_gitignore_gets_the_lines_that_it_has_in_no_form(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (repository / ".gitignore").write_text("*.pt\nrehearsals")
    (repository / "results").mkdir()  # the repository's own file
    assert main(["init"]) == 0
    assert (repository / ".gitignore").read_text() == "*.pt\nrehearsals\n/.gpufleet/\n"
    assert "Added to .gitignore: /.gpufleet/\n" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["Pulumi.yaml", "Pulumi.yml"])
def test_beside_a_pulumi_project_it_names_the_component_and_writes_no_program(
    name: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / name).write_text("name: platform\nruntime: nodejs\n")
    assert main(["init"]) == 0
    said = capsys.readouterr().out
    assert f"{name} exists already, so no Pulumi program is written" in said
    assert "can declare a run by gpufleet.TrainingRun" in said
    assert "in another folder" in said
    assert not (repository / "stacks" / "program").exists()
    assert (repository / "stacks" / "definition.schema.json").exists()


@pytest.mark.parametrize("name", ["infra", "job", "tests", "stacks", "gpufleet", "rehearsal"])
def test_it_works_beside_a_package_of_this_name(name: str, repository: Path) -> None:
    """In an installation Python searches the current folder first, and gpufleet's code after that."""
    (repository / name).mkdir()
    (repository / name / "__init__.py").write_text("raise RuntimeError('somebody else')")
    theirs = "services: {web: {image: x}}\n"
    (repository / name / "mine-too.yaml").write_text(theirs)

    def ran(*words: str) -> str:
        program = "import sys; from gpufleet.infra.cli import main; sys.exit(main(sys.argv[1:]))"
        command, found = [sys.executable, "-P", "-c", program, *words], {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(command, cwd=repository, env=found, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    ran("init", "mine")
    assert "in eight runs of ten" in ran("cost", "mine")
    assert "stops at 0.19 USD" in ran("cost", "canary")
    assert names_of(repository) == ["canary", "mine"]
    assert (repository / name / "mine-too.yaml").read_text() == theirs
    # The engine starts the program with its folder first on the path. The imported code must still be gpufleet's.
    where = "import sys; sys.path[0] = '.'; import gpufleet; print(gpufleet.__file__)"
    told = {**os.environ, "PYTHONPATH": str(ROOT)}
    main_folder = repository / yaml.safe_load((repository / "Pulumi.yaml").read_text())["main"]
    done = subprocess.run([sys.executable, "-c", where], cwd=main_folder, env=told, capture_output=True, text=True)
    assert done.stdout.strip() == str(ROOT / "gpufleet" / "__init__.py")


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("traces/profile.json", '{"traceEvents": []}', "traces/profile.json"),
        ("policy.yaml", "network: {layers: 3}", "policy.yaml"),
    ],
)
def test_files_of_others_that_every_bill_would_read_are_refused_before_anything_is_written(
    name: str, text: str, said: str, repository: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / name).parent.mkdir(exist_ok=True)
    (repository / name).write_text(text)
    before = files(repository)
    assert main(["init", "mine"]) == 2
    told = capsys.readouterr().err
    assert said in told
    assert "in a new folder of the repository" in told
    assert files(repository) == before


def test_in_a_folder_of_a_monorepo_the_workflow_lies_at_the_top_and_reads_that_folder(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = repository / "services" / "llm"
    folder.mkdir(parents=True)
    monkeypatch.chdir(folder)
    assert main(["init", "mine", "--code", "../.."]) == 0
    assert "Wrote .github/workflows/gpufleet-review-services-llm.yml" in capsys.readouterr().out
    tree = yaml.safe_load((repository / ".github/workflows/gpufleet-review-services-llm.yml").read_text())
    assert tree["defaults"]["run"]["working-directory"] == "services/llm"
    assert {path.partition("/")[0] for path in tree[True]["pull_request"]["paths"]} == {"services"}
    assert yaml.safe_load((folder / "stacks" / "mine.yaml").read_text())["job"]["code"]["folder"] == "../.."
    assert sorted(files(folder)) == sorted([*FILES[1:], "stacks/mine.yaml"])
    monkeypatch.chdir(repository)
    assert main(["init"]) == 0  # a second project of the repository has a workflow of its own
    assert (repository / ".github/workflows/gpufleet-review.yml").exists()


def tool(folder: Path, name: str) -> None:
    folder.mkdir(exist_ok=True)
    (folder / name).write_text("#!/bin/sh\n")
    (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("lock", "on_path", "options"),
    [
        ("uv.lock", True, {"toolchain": "uv"}),
        ("poetry.lock", True, {"toolchain": "poetry"}),
        ("uv.lock", False, {"toolchain": "pip", "virtualenv": "../.venv"}),
        ("", True, {"toolchain": "pip", "virtualenv": "../.venv"}),
    ],
)
def test_the_python_is_that_of_the_lock_file_or_of_the_repository_s_environment(
    lock: str, on_path: bool, options: dict[str, str], repository: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lock:
        (repository / lock).touch()
    for name in ("uv", "poetry"):
        tool(repository.parent / "bin", name)
    monkeypatch.setenv("PATH", str(repository.parent / "bin") if on_path else "")
    monkeypatch.setattr(sys, "prefix", str(repository / ".venv"))
    (repository / "below").mkdir()
    assert project.python_of(repository / "below", repository) == options
    read = yaml.safe_load(project.pulumi_yaml("a", options))["runtime"]
    assert read == {"name": "python", "options": options}


def test_an_environment_of_elsewhere_is_the_python3_of_path_and_it_says_whether_that_has_gpufleet(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert project.python_of(repository, repository) == {"toolchain": "pip"}
    tool(repository.parent / "bin", "python3")
    monkeypatch.setenv("PATH", f"{repository.parent / 'bin'}:{os.environ['PATH']}")
    assert main(["init"]) == 0
    assert f"CHECK: gpufleet is in {sys.prefix}, which has to come first in PATH" in capsys.readouterr().out


def test_the_environment_in_the_folder_is_ignored_by_git(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "prefix", str(repository / "env"))
    assert main(["init"]) == 0
    assert "/env/" in (repository / ".gitignore").read_text().splitlines()
    assert yaml.safe_load((repository / "Pulumi.yaml").read_text())["runtime"]["options"]["virtualenv"] == "env"


WHEEL = "file:///tmp/gpufleet-0.1.0-py3-none-any.whl"
GIT = {"url": "https://example.org/gpufleet", "vcs_info": {"vcs": "git", "commit_id": "abc"}}


@pytest.mark.parametrize(
    ("origin", "install"),
    [
        (None, "gpufleet==1.2"),
        (GIT, '"gpufleet @ git+https://example.org/gpufleet@abc"'),
        ({"url": "https://example.org/a.whl", "archive_info": {}}, '"gpufleet @ https://example.org/a.whl"'),
        ({"url": WHEEL, "archive_info": {}}, f"gpufleet==1.2{workflow.CHECK}"),
        ({"url": ROOT.as_uri(), "dir_info": {"editable": True}}, "-c constraints.txt -e ."),
    ],
)
def test_ci_gets_gpufleet_from_where_it_came(
    origin: dict[str, object] | None, install: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = SimpleNamespace(version="1.2", read_text=lambda name: json.dumps(origin) if origin else None)
    monkeypatch.setattr(workflow, "distribution", lambda name: told)
    assert workflow.installation(ROOT) == install
    steps = yaml.safe_load(workflow.workflow(".", install))["jobs"]["review"]["steps"]
    run = next(step["run"] for step in steps if step.get("name") == "Install gpufleet")
    assert run == f"python -m pip install --quiet {install.removesuffix(workflow.CHECK)}"


def test_from_a_checkout_that_was_not_installed_the_place_is_left_open(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(workflow, "distribution", missing)
    assert workflow.installation(ROOT) == f"gpufleet{workflow.CHECK}"


def test_outside_of_git_the_folder_is_the_repository(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.path.dirname(shutil.which("sh") or ""))  # noqa: PTH120
    assert main(["init", "--yes"]) == 0
    assert sorted(files(tmp_path)) == FILES
