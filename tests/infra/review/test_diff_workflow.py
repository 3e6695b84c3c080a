"""The review workflow: this test runs every `run` step in a clone with two commits, but no `uses` step.

Not run: the installation (it needs the network; what is installed here is this very checkout).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.infra.review import workflow
from gpufleet.infra.review.markdown import marker
from tests.infra import review_world
from tests.infra.review_world import STACK, changed
from tests.repository import ROOT

TEXT = workflow.workflow("llm", workflow.installation(ROOT))
WORKFLOW: dict[Any, Any] = yaml.safe_load(TEXT)
FOLDER = WORKFLOW["defaults"]["run"]["working-directory"]
JOB = WORKFLOW["jobs"]["review"]
STEPS: dict[str, dict[str, Any]] = {step["name"]: step for step in JOB["steps"] if "run" in step}

# Stands for `gh api` as far as the workflow needs it: comments are in a JSON file, and every call is recorded.
GH = f"""#!{sys.executable}
import json, os, pathlib, sys
words = sys.argv[1:]
store = pathlib.Path(os.environ["COMMENTS"])
comments = json.loads(store.read_text())
assert words[0] == "api" and os.environ["GH_TOKEN"] == "token", words
method = words[words.index("--method") + 1] if "--method" in words else "GET"
if method == "GET":
    marker = words[words.index("--jq") + 1].split('startswith("')[1].split('")')[0]
    for comment in comments:
        if comment["login"] == "github-actions[bot]" and comment["body"].startswith(marker):
            print(comment["id"])
else:
    body = pathlib.Path(words[words.index("--field") + 1].removeprefix("body=@")).read_text()
    path = next(word for word in words if word.startswith("repos/"))
    if method == "PATCH":
        next(c for c in comments if str(c["id"]) == path.rsplit("/", 1)[1])["body"] = body
    else:
        assert path == "repos/me/project/issues/7/comments", path
        comments.append({{"id": len(comments) + 1, "login": "github-actions[bot]", "body": body}})
    store.write_text(json.dumps(comments))
"""


@dataclass
class Runner:
    """Runs steps as GitHub does: `bash -e`, expressions filled in, outputs handed on."""

    folder: Path
    clone: Path
    expressions: dict[str, str]

    def run(self, name: str) -> subprocess.CompletedProcess[str]:
        step = STEPS[name]
        output, summary = self.folder / "output", self.folder / "summary"
        script = step["run"]
        assert "${{" not in script, "an expression in a script is an injection: hand it over as an environment variable"
        stated = {key: self.filled(value) for key, value in {**JOB["env"], **step.get("env", {})}.items()}
        fake = self.folder / "bin"
        environment = {
            **review_world.environment(),
            **stated,
            "PATH": os.pathsep.join([str(fake), str(Path(sys.executable).parent), os.environ["PATH"]]),
            "GITHUB_OUTPUT": str(output),
            "GITHUB_STEP_SUMMARY": str(summary),
            "COMMENTS": str(self.folder / "comments.json"),
        }
        command = ["bash", "--noprofile", "--norc", "-eo", "pipefail", "-c", script]
        done = subprocess.run(command, cwd=self.clone / FOLDER, env=environment, capture_output=True, text=True)
        for line in output.read_text().splitlines() if output.exists() else []:
            key, _, value = line.partition("=")
            self.expressions[f"steps.{step['id']}.outputs.{key}"] = value
        output.unlink(missing_ok=True)
        return done

    def filled(self, text: str) -> str:
        return re.sub(r"\$\{\{ (.+?) \}\}", lambda found: self.expressions[found[1]], str(text))

    def comments(self) -> list[dict[str, Any]]:
        return list(json.loads((self.folder / "comments.json").read_text()))


def runner(tmp_path: Path, head: str) -> Runner:
    """A clone of a repository with the project in a folder. main has new commits since the branch `change` began."""
    origin = review_world.make(tmp_path / "origin", FOLDER)
    origin.commit({"stacks/growth.yaml": STACK})
    origin.git("checkout", "-q", "-b", "change")
    changing = origin.commit({"stacks/growth.yaml": head})
    origin.git("checkout", "-q", "main")
    base = origin.commit({"stacks/other.yaml": STACK})
    clone = tmp_path / "clone"
    origin.git("clone", "-q", str(origin.root), str(clone))
    subprocess.run(["git", "checkout", "-q", changing], cwd=clone, check=True, env=review_world.environment())
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "gh").write_text(GH)
    (tmp_path / "bin" / "gh").chmod(0o755)
    (tmp_path / "comments.json").write_text(json.dumps([{"id": 1, "login": "somebody", "body": "hello"}]))
    expressions = {
        "github.event.pull_request.base.sha": base,
        "github.event.pull_request.head.sha": changing,
        "github.event.pull_request.number": "7",
        "github.repository": "me/project",
        "github.token": "token",
    }
    return Runner(tmp_path, clone, expressions)


def test_a_change_that_holds_is_commented_once_and_updated_the_next_time(tmp_path: Path) -> None:
    steps = runner(tmp_path, changed(("days: 7", "days: 30")))
    for _ in range(2):
        for name in ("Review", "Comment", "Hold bounds and rules"):
            done = steps.run(name)
            assert done.returncode == 0, (name, done.stdout, done.stderr)
    somebody, ours = steps.comments()
    assert somebody["body"] == "hello"
    assert ours["body"] == (steps.clone / FOLDER / "review.md").read_text()
    assert ours["body"].startswith(f"{marker(FOLDER)}\n## Cost review of `llm`: ")
    assert marker(FOLDER) not in (marker(), marker("llm/other"))  # another project's comment stays
    assert "`storage.keep.days`" in ours["body"]
    assert "other" not in ours["body"]  # a later change on main is no change of this branch
    assert (tmp_path / "summary").read_text() == ours["body"] * 2


@pytest.mark.parametrize(
    ("head", "code"),
    [(changed(("max_usd: 9.00", "max_usd: 0.05")), 1), (changed(("capacity: on-demand", "capacity: spott")), 2)],
)
def test_a_change_that_does_not_hold_is_commented_and_then_fails(tmp_path: Path, head: str, code: int) -> None:
    steps = runner(tmp_path, head)
    assert steps.run("Review").returncode == 0
    assert steps.run("Comment").returncode == 0
    assert len(steps.comments()) == 2
    held = steps.run("Hold bounds and rules")
    assert held.returncode == code
    assert "The review says no" in held.stderr


def test_without_a_review_nothing_is_commented(tmp_path: Path) -> None:
    steps = runner(tmp_path, STACK)
    steps.expressions["github.event.pull_request.head.sha"] = "f" * 40
    done = steps.run("Review")
    assert done.returncode != 0
    assert not (steps.clone / FOLDER / "review.md").exists()


def test_every_step_is_run_here_or_named_as_not_run() -> None:
    assert set(STEPS) == {"Install gpufleet", "Review", "Comment", "Hold bounds and rules"}
    others = [step["uses"] for step in JOB["steps"] if "run" not in step]
    assert [each.partition("@")[0] for each in others] == ["actions/checkout", "actions/setup-python"]
    assert all(re.fullmatch("[0-9a-f]{40}", each.partition("@")[2]) for each in others)  # a tag may be moved


def test_in_a_clone_of_gpufleet_the_code_is_reviewed_with_the_stacks() -> None:
    own = yaml.safe_load(workflow.workflow(".", "-c constraints.txt -e ."))
    assert {"stacks/**", "infra/**", "job/**"} <= set(own[True]["pull_request"]["paths"])
    assert "infra/**" not in yaml.safe_load(workflow.workflow(".", "gpufleet==1"))[True]["pull_request"]["paths"]


def test_it_asks_for_no_more_rights_than_reading_and_commenting() -> None:
    assert WORKFLOW["permissions"] == {"contents": "read", "pull-requests": "write"}
    assert "secrets." not in TEXT


ACTION = yaml.safe_load((ROOT / "action.yml").read_text())


def test_the_action_has_the_workflow_s_steps() -> None:
    """A step of an action must name its shell, its folder, and the variables of the job that it reads."""
    _, *steps = ACTION["runs"]["steps"]
    assert ACTION["runs"]["steps"][0] == JOB["steps"][1]  # actions/setup-python
    assert [step["name"] for step in steps] == list(STEPS)
    for step in steps[1:]:
        own = STEPS[step["name"]]
        assert {key: step.get(key) for key in ("id", "if", "run")} == {key: own.get(key) for key in ("id", "if", "run")}
        read = {key: value for key, value in JOB["env"].items() if f"${key}" in step["run"]}
        assert step["env"] == read | own.get("env", {})
        assert (step["shell"], step["working-directory"]) == ("bash", "${{ inputs.folder }}")
    assert steps[0]["run"] == STEPS["Install gpufleet"]["run"].replace(workflow.installation(ROOT), '"$GPUFLEET"')
    assert steps[0]["env"] == {"GPUFLEET": "${{ inputs.gpufleet || github.action_path }}"}
    assert set(ACTION["inputs"]) == {"folder", "gpufleet"}
