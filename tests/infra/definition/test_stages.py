"""`stages` of a definition: each stage is laid over the file, and is its own run in the folder of the whole run."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import DefinitionError, GpufleetError
from tests.infra.shared_files import SHARED
from tests.infra.staged_files import STAGED
from tests.repository import ROOT

NOW = datetime(2026, 11, 30, tzinfo=UTC)


def read(folder: Path, text: str = STAGED, *, rehearsal: bool = False) -> StackDefinition:
    file = folder / "staged.yaml"
    file.write_text(text)
    return load(file, now=NOW, rehearsal=rehearsal, staged=True)


def test_a_stage_has_its_own_job_and_fleet_and_the_file_s_rest(tmp_path: Path) -> None:
    whole = read(tmp_path)
    assert whole.run.id == "r1"
    assert [each.run.id for each in whole.stages] == ["r1/prepare", "r1/train", "r1/judge"]
    prepare, train, judge = whole.stages
    assert (prepare.fleet.instance_types, prepare.fleet.capacity) == (("c7i.xlarge",), "on-demand")
    assert (train.fleet.instance_types, train.fleet.capacity) == (("g5.2xlarge",), "spot")
    assert {each.fleet.region for each in whole.stages} == {"us-east-2"}
    assert {each.limits for each in whole.stages} == {whole.limits}
    assert judge.before == ("prepare", "train")
    assert [each.job.parameters.demands.inputs[0][1] for each in (train, judge)] == ["prepare", "train"]


def test_the_rehearsal_of_a_stage_is_laid_over_it_alone(tmp_path: Path) -> None:
    text = STAGED.replace("  - name: train\n", "  - name: train\n    rehearsal: {job: {command: sleep 1}}\n")
    _, train, judge = read(tmp_path, text, rehearsal=True).stages
    assert (train.job.parameters.demands.inputs, judge.job.parameters.demands.inputs[0][1]) == ((), "train")
    assert read(tmp_path, text).stages[1].job.parameters.demands.inputs[0][1] == "prepare"


def test_a_stage_has_interruptions_of_its_own_and_the_file_s_for_the_rest(tmp_path: Path) -> None:
    text = STAGED.replace("stages:\n", "rehearsal: {interruptions: {seed: 5, with_notice: 2}}\nstages:\n").replace(
        "  - name: train\n", "  - name: train\n    rehearsal: {interruptions: {with_notice: 0}}\n"
    )
    whole = read(tmp_path, text, rehearsal=True)
    drawn = [(each.interruptions.seed, each.interruptions.with_notice) for each in whole.stages]
    assert drawn == [(5, 2), (5, 0), (5, 2)]
    (tmp_path / "scratch").mkdir()
    again = read(tmp_path / "scratch", rehearsal_text(tmp_path / "staged.yaml", tmp_path), rehearsal=True)
    assert [each.interruptions for each in again.stages] == [each.interruptions for each in whole.stages]


def test_a_stage_s_own_code_is_found_from_a_scratch_project(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    text = STAGED.replace("{command: 'python stage.py judge", "{code: {folder: other}, command: 'python stage.py judge")
    read(tmp_path, text)
    (tmp_path / "scratch").mkdir()
    found = read(tmp_path / "scratch", rehearsal_text(tmp_path / "staged.yaml", tmp_path))
    folders = [each.job.parameters.code.folder for each in found.stages]  # type: ignore[attr-defined]
    assert folders == [str(tmp_path / name) for name in ("code", "code", "other")]


def test_a_rerun_begins_with_a_later_stage_and_takes_the_earlier_ones_of_another_run(tmp_path: Path) -> None:
    again = STAGED.replace("id: r1", "id: r2") + "rerun: {run: r1, from: train}\n"
    train, judge = read(tmp_path, again).stages
    assert (train.run.id, train.before, train.left) == ("r2/train", (), {"prepare": "r1/prepare"})
    assert (judge.before, judge.left) == (("train",), {"prepare": "r1/prepare", "train": "r2/train"})
    assert train.next_stage == "judge"


@pytest.mark.parametrize(
    ("rerun", "said"),
    [
        ("{run: r1, from: prepare}", "rerun.from: 'prepare'.*a stage after the first: train, judge"),
        ("{run: R, from: train}", "rerun.run"),
        ("{run: r1, since: train}", "rerun.since"),
    ],
)
def test_a_rerun_of_nothing_is_refused(tmp_path: Path, rerun: str, said: str) -> None:
    with pytest.raises(DefinitionError, match=said):
        read(tmp_path, f"{STAGED}rerun: {rerun}\n")


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("name: train", "name: Train", r"stages\[1\].name"),
        ("name: train", "name: prepare", r"stages\[1\].name: 'prepare'.*each name once"),
        ("inputs.prepare", "inputs.judge", "an earlier stage, which are prepare"),  # the output of a later stage
        ("capacity: on-demand", "capacity: on-demand, nodes: 2, cards: all", r"stages\[0\].fleet.cards.*NAT gateway"),
        (
            "[c7i.xlarge]}",
            "[c7i.xlarge], region: us-east-1, zones: [us-east-1a]}",
            r"stages\[2\].fleet.region.*network",
        ),
        ("capacity: on-demand", "fallback: on-demand", "without fleet.fallback"),
        ("capacity: on-demand", "colour: red", r"stages\[0\].fleet.colour"),
        ("  - name: judge\n", "  - name: judge\n    limits: {max_usd: 3}\n", r"stages\[2\].limits"),
    ],
)
def test_what_a_stage_cannot_be_is_refused_at_its_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert STAGED.count(old) == 1
    with pytest.raises(DefinitionError, match=said):
        read(tmp_path, STAGED.replace(old, new))


PARTS = (ROOT / "stacks" / "kernel-sft-stages.yaml").read_text()


def test_a_stage_is_given_what_its_job_takes_of_the_storage(tmp_path: Path) -> None:
    whole = read(tmp_path, PARTS)
    train, judge = whole.stages
    assert whole.storage == train.storage
    assert (train.storage.dataset, train.storage.base_weights) == ("data/kernelbook", "data/qwen3-8b")
    assert judge.storage == replace(train.storage, dataset="", base_weights=None)
    named = read(tmp_path, STAGED.replace("  keep:", "  inputs: {more: data}\n  keep:"))
    assert {tuple(each.storage.inputs or {}) for each in (named, *named.stages)} == {("more",)}


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("candidates: train", "candidates: trian", "candidates: 'trian'.*an earlier stage, which are train"),
        ("{part: train}", "{}", r"a stage that leaves candidates.jsonl and training.json; train does not"),
        (", candidates: train", "", "job.parameters.candidates: missing.*the name of an earlier stage"),
        ("  dataset: data/kernelbook\n", "", r"storage.dataset"),
    ],
)
def test_a_judge_takes_candidates_of_a_stage_that_leaves_them(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert PARTS.count(old) == 1
    with pytest.raises(DefinitionError, match=said):
        read(tmp_path, PARTS.replace(old, new))


def test_a_caller_that_knows_no_stages_is_refused(tmp_path: Path) -> None:
    read(tmp_path)
    with pytest.raises(GpufleetError, match=r"has stages.* r1/prepare, r1/train, r1/judge"):
        load(tmp_path / "staged.yaml", now=NOW)


def test_stages_that_stay_have_one_fleet_and_limits_of_their_own(tmp_path: Path) -> None:
    whole = read(
        tmp_path, SHARED.replace("limits: {max_usd: 2, max_hours: 2}\n  - name: t2", "estimate: {}\n  - name: t2")
    )
    assert [(part.fleet_of, part.fleet_run) for part in whole.stages] == [
        ("", "r1/t1"),
        ("t1", "r1/t1"),
        ("t1", "r1/t1"),
    ]
    assert [str(part.limits.max_usd) for part in whole.stages] == ["8", "2", "2"]
    assert {part.shared for part in whole.stages} == {whole.limits}
    assert [part.stage for part in whole.with_fleets] == ["t1"]
    assert [part.fleet_of for part in read(tmp_path).stages] == [""] * 3


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "  - name: t3\n    stays: true\n",
            "  - name: t3\n",
            r"stages\[2\].stays: 'none' .* allowed: true in every stage",
        ),
        ("  - name: t1\n", "  - name: t1\n    stays: true\n", r"stages\[0\].stays"),
        ("    stays: true\n", "    stays: false\n", r"stages\[1\].stays: 'false'"),
        (
            "stays: true\n",
            "stays: true\n    fleet: {capacity: on-demand}\n",
            r"stages\[1\].fleet: .*without stays: true",
        ),
        (
            "command: 'python trial.py {checkpoints} {outputs} --x=2'",
            "device: cuda, command: x",
            r"stages\[1\].job: .*t1, whose",
        ),
        ("stages:\n", "rerun: {run: r0, from: t2}\nstages:\n", r"rerun: .*without stays: true"),
    ],
)
def test_stages_on_one_node_differ_only_in_what_a_node_need_not_know(
    tmp_path: Path, old: str, new: str, said: str
) -> None:
    with pytest.raises(DefinitionError, match=said):
        read(tmp_path, SHARED.replace(old, new))


def test_on_one_node_the_file_s_interruptions_come_in_the_second_stage_alone(tmp_path: Path) -> None:
    text = SHARED.replace("stages:\n", "rehearsal: {interruptions: {seed: 5, with_notice: 2}}\nstages:\n").replace(
        "  - name: t3\n", "  - name: t3\n    rehearsal: {interruptions: {without_notice: 0}}\n"
    )
    drawn = [part.interruptions for part in read(tmp_path, text, rehearsal=True).stages]
    assert [(each.seed, each.with_notice, each.without_notice) for each in drawn] == [(5, 0, 0), (5, 2, 1), (5, 2, 0)]


def test_a_stage_with_a_fleet_of_its_own_has_no_limits_of_its_own(tmp_path: Path) -> None:
    text = STAGED.replace("  - name: judge\n", "  - name: judge\n    limits: {max_usd: 1}\n")
    with pytest.raises(DefinitionError, match=r"stages\[2\].limits: .*with stays: true"):
        read(tmp_path, text)
