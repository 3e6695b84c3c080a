"""A sixth kind of job is three new files and its entry in the registry: nothing else knows any kind by name.

In a copy of the project `tests/sixth` becomes spec.py and run.py of job/experiments/toy/ and stacks/toy.yaml. The kind
is then priced, prepared, rehearsed and receipted like those that are shipped.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.job.kind import JobConfig
from tests.repository import ROOT

NEW = {
    "spec.py": "job/experiments/toy/spec.py",
    "trainer.py": "job/experiments/toy/run.py",
    "toy.yaml": "stacks/toy.yaml",
}
ENTRY = '    "toy": "gpufleet.job.experiments.toy.spec:ToyConfig",\n'
REGISTRY = "CONFIGS = {  # the module and the class of a job's parameters, by the job's name\n"


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sixth") / "project"
    for name in ("infra", "job", "rehearsal"):
        shutil.copytree(ROOT / name, folder / name)  # with what is compiled already
    shutil.copytree(ROOT / "gpufleet", folder / "gpufleet", symlinks=True)
    (folder / "stacks").mkdir()
    for name in ("Pulumi.yaml", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    for name, place in NEW.items():
        (folder / place).parent.mkdir(exist_ok=True)
        shutil.copy(ROOT / "tests" / "sixth" / name, folder / place)
    registry = folder / "job" / "experiments" / "__init__.py"
    text = registry.read_text()
    assert text.count(REGISTRY) == 1
    registry.write_text(text.replace(REGISTRY, REGISTRY + ENTRY))
    return folder


def gpufleet(project: Path, *words: str) -> str:
    """What the command prints. It must end well."""
    code = "import sys; from gpufleet.infra.cli import main; sys.exit(main(sys.argv[1:]))"
    environment = {**os.environ, "PYTHONPATH": str(project)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=project, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_is_priced(project: Path) -> None:
    bill = json.loads(gpufleet(project, "cost", "toy", "--json"))
    assert bill["calibrated"] is False
    assert [phase["phase"] for phase in bill["phases"]] == ["train"]
    assert float(bill["usd"]["p50"]) > 0


def test_it_is_prepared(project: Path) -> None:
    assert re.search(r"^toy: about [\d.]+ USD .* on g5\.2xlarge ", gpufleet(project, "prepare", "toy"), re.MULTILINE)
    manifest = json.loads((project / "data" / "toy" / "dataset.json").read_text())
    assert manifest["kind"] == "windows"
    assert "is prepared already" in gpufleet(project, "prepare", "toy")


@pytest.mark.slow
def test_it_is_rehearsed_and_receipted(project: Path) -> None:
    gpufleet(project, "rehearse", "toy")
    receipt = json.loads((project / "rehearsals" / "toy" / "r1" / "receipt.json").read_text())
    assert receipt["reason"] == "finished"
    assert receipt["measured"]["experiment"] == "toy"
    assert [attempt["last_step"] for attempt in receipt["attempts"]] == [40]
    assert {line["name"] for line in receipt["lines"]} >= {"compute", "root disk", "S3 storage"}


def test_a_kind_answers_35_questions_at_most() -> None:
    parts = [each for each in JobConfig.__mro__ if each.__module__ == JobConfig.__module__]
    asked = {name for part in parts for name in (*vars(part), *vars(part).get("__annotations__", ()))}
    assert len([name for name in asked if not name.startswith("_")]) <= 35
