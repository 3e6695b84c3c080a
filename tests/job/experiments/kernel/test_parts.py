"""kernel-sft in two parts: what one trains another judges, with the figures of one run that does both."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gpufleet.job.experiments.kernel import stages
from gpufleet.job.experiments.kernel.judge import planted
from tests.job import kernel_world as kernel
from tests.job import train_world as world
from tests.job.train_world import StopAt

pytestmark = [pytest.mark.usefixtures("one_judge"), pytest.mark.xdist_group("kernels")]

COMPARE: dict[str, Any] = {"epochs": 2, "data": {"curriculum": "compare"}, "generate": {"candidates": 1}}


def judging(workdir: Path, trained: Path, **changed: Any) -> Path:
    """A work folder of the part `judge`, with what a node takes of the part `train` and nothing else."""
    parameters = kernel.config(part="judge", candidates="first", **changed)
    workdir.mkdir()
    tree = {"schema": 1, "job": {"experiment": "kernel-sft", "parameters": parameters}, "predicted": []}
    (workdir / "run.json").write_text(json.dumps(tree))
    given = workdir / "user" / "inputs" / "first"
    given.mkdir(parents=True)
    for name in kernel.typed(part="judge", candidates="first").demands.takes:
        shutil.copyfile(trained / "final" / name, given / name)
    return workdir


def verdicts(workdir: Path) -> list[tuple[Any, ...]]:
    """The verdicts without what a clock says, in any order: workers judge side by side."""
    keys = ("row", "candidate", "task", "origin", "source_sha256", "stage", "passed")
    return sorted(tuple(line[key] for key in keys) for line in kernel.lines(workdir, "verdicts"))


def figures(workdir: Path) -> dict[str, Any]:
    """The results without what a clock says."""
    found = kernel.results(workdir)
    for row in (found["generated"], *found["curriculum"]["compared"]):
        del row["seconds_per_candidate"], row["untimed"], row["suspicious"]
    del found["measured"], found["funnel"]["measured"]
    return found  # type: ignore[no-any-return]


def half_right(run: Any, model: Any, wanted: Any, salt: str, far: str) -> list[str]:
    """Answers, of which each task's first is right."""
    return [f"no program of {task.name}" if number else planted.source(task) for task, number in wanted]


@pytest.fixture(scope="module", autouse=True)
def answers() -> Iterator[None]:
    """The small model writes no programs, so nothing of it would pass."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "_generate", half_right)
        yield


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = kernel.make(tmp_path_factory.mktemp("parts") / "train", part="train")
    assert world.train(workdir) == 0
    return workdir


def test_the_part_that_trains_leaves_weights_and_candidates_and_judges_nothing(trained: Path) -> None:
    assert {"candidates.jsonl", "training.json", "model.safetensors", "meta.json"} <= {
        path.name for path in (trained / "final").iterdir()
    }
    left = [json.loads(line) for line in (trained / "final" / "candidates.jsonl").read_text().splitlines()]
    written = {line["name"]: line["source"] for line in kernel.lines(trained, "candidates")}
    assert {line["name"]: line["source"] for line in left} == written
    assert len(written) == 4
    assert kernel.lines(trained, "verdicts") == []
    found = kernel.results(trained)
    assert found["statement"].startswith("4 candidates are written and not yet judged")
    assert "generated" not in found
    assert found["weights_sha256"] == kernel.read(trained, "final/meta.json")["files"][0]["sha256"]


@pytest.mark.parametrize(
    "changed", [pytest.param({}, id="one training"), pytest.param(COMPARE, id="two", marks=pytest.mark.slow)]
)
def test_both_parts_come_to_the_verdicts_and_figures_of_one_run(
    trained: Path, tmp_path: Path, changed: dict[str, Any]
) -> None:
    whole = kernel.make(tmp_path / "whole", **changed)
    assert world.train(whole) == 0
    if changed:
        trained = kernel.make(tmp_path / "train", part="train", **changed)
        assert world.train(trained) == 0
    judged = judging(tmp_path / "judge", trained, **changed)
    assert world.train(judged) == 0
    assert verdicts(judged) == verdicts(whole)
    assert figures(judged) == figures(whole)
    assert figures(judged)["generated"]["pass@1"] == (1.0 if changed else 0.5)
    assert not (judged / "final").exists()
    assert not (judged / "ckpt").exists() or not any((judged / "ckpt").iterdir())


def test_a_judge_that_is_stopped_gives_no_verdict_twice(trained: Path, tmp_path: Path) -> None:
    judged = judging(tmp_path / "judge", trained)
    assert world.train(judged, StopAt(judged, 5)) == 75
    before = kernel.lines(judged, "verdicts")
    assert 0 < len(before) < 8
    assert not (judged / "results.json").exists()
    assert world.train(judged) == 0
    after = kernel.lines(judged, "verdicts")
    assert after[: len(before)] == before
    assert len({line["candidate"] for line in after}) == len(after) == 8


def test_a_judge_without_candidates_fails_for_good(trained: Path, tmp_path: Path) -> None:
    judged = judging(tmp_path / "judge", trained)
    (judged / "user/inputs/first/training.json").unlink()
    assert world.train(judged) == 65
    assert "has no training.json: job.parameters.candidates names a stage" in (judged / "fatal.json").read_text()
