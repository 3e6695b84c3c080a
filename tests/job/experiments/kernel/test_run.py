"""kernel-sft from its first step to results.json: dying anywhere, going on, ranks, the curriculum."""

from __future__ import annotations

import json
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from gpufleet.job.experiments.engine import metrics
from gpufleet.job.experiments.kernel import stages
from gpufleet.job.experiments.kernel.judge import funnel
from gpufleet.job.experiments.kernel.judge.worker import Workers
from gpufleet.job.ledger import Ledger
from tests.job import kernel_world as kernel
from tests.job import rank_world
from tests.job import train_world as world
from tests.job.train_world import StopAt

pytestmark = [pytest.mark.usefixtures("one_judge"), pytest.mark.xdist_group("kernels")]

GENERATED, PLANTED = 4, 4


class Death(BaseException):
    """The process is gone."""


def clockless_verdicts(workdir: Path) -> list[tuple[Any, ...]]:
    """The verdicts without what a clock says."""
    keys = ("row", "candidate", "source_sha256", "stage", "passed")
    return sorted(tuple(line[key] for key in keys) for line in kernel.lines(workdir, "verdicts"))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = kernel.make(tmp_path_factory.mktemp("finished"))
    assert world.train(workdir) == 0
    return workdir


def test_it_leaves_weights_candidates_verdicts_and_a_statement(finished: Path) -> None:
    found = kernel.results(finished)
    assert len(kernel.lines(finished, "candidates")) == GENERATED
    assert len(kernel.lines(finished, "verdicts")) == GENERATED + PLANTED
    assert "4 candidates of 2 tasks: pass@1 0.000, 95 % interval over tasks 0.000 to 0.658" in found["statement"]
    assert "Only 4 optimizer steps on 11 pairs were trained" in found["statement"]
    reached = {stage: number for stage, number in found["stages_reached"].items() if number}
    assert reached == {"1": GENERATED}  # six bytes are no program; what is planted is not counted
    predicted, measured = found["funnel"]["predicted"], found["funnel"]["measured"]
    assert predicted == {"compile_s": 0.0, "judge_s": 0.3}
    assert predicted.keys() <= measured.keys()
    verdicts = kernel.lines(finished, "verdicts")
    judged = [sum(each["seconds"].get(stage, 0.0) for stage in ("tiny", "full", "timing")) for each in verdicts]
    assert measured["judge_s"] == pytest.approx(sum(judged) / len(verdicts))
    assert measured["correct"] == sum(each["stage"] >= 5 for each in verdicts) / len(verdicts) > 0
    meta = kernel.read(finished, "final/meta.json")
    assert meta["files"][0]["sha256"] == found["weights_sha256"]
    weights = load_file(finished / "final" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.bfloat16}
    assert world.export_bytes(finished) == (2 * 28_544, 2 * 28_544)


def test_the_log_says_how_far_the_funnel_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert world.train(kernel.make(tmp_path, generate={"tasks": 6}, funnel={"planted": 0})) == 0
    said = capsys.readouterr().out
    assert "; stage 2 compiles for sm_90\n" in said
    assert "funnel: 10 of 12 judged" in said
    assert "funnel: 12 of 12 judged" in said


def test_the_log_says_how_far_the_generation_is_also_within_a_batch(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in {"AT_ONCE": 2, "SILENT_S": 0.0}.items():
        monkeypatch.setattr(stages, name, value)
    assert world.train(kernel.make(tmp_path, funnel={"planted": 0})) == 0
    said = [
        line.rpartition("sft: ")[2] for line in capsys.readouterr().out.splitlines() if "candidates written" in line
    ]
    within = "tokens of the next 2"
    assert said == [
        *(f"0 of 4 candidates written, {number} of at most 6 {within}" for number in range(1, 6)),
        "2 of 4 candidates written",
        *(f"2 of 4 candidates written, {number} of at most 6 {within}" for number in range(1, 6)),
        "4 of 4 candidates written",
    ]


def test_a_line_within_a_batch_is_said_once_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now, said = [0.0], list[float]()

    def generated(*asked: Any) -> list[list[int]]:
        for _ in range(1500):  # a token takes 0.1 s
            asked[6]()
            now[0] += 0.1
        return []

    session = SimpleNamespace(requests=SimpleNamespace(stop=lambda: None), say=lambda line: said.append(now[0]))
    config = SimpleNamespace(generate=SimpleNamespace(max_tokens=2048, temperature=1.0), seed=1)
    one = SimpleNamespace(session=session, config=config, renderer=SimpleNamespace(end=0))
    monkeypatch.setattr(stages, "generate", generated)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    stages._generate(one, None, [], "", "sft")  # type: ignore[arg-type]
    assert said == pytest.approx([60.0, 120.0], abs=0.3)


def test_a_last_step_of_fewer_rows_is_no_faster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven rows in steps of three."""
    monkeypatch.setattr(metrics, "WARM_UP", 0)
    workdir = kernel.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 4)) == 75
    records = world.records(workdir)
    trained = [record["tok_s"] * record["step_ms"] / 1000 / 1024 for record in records]
    assert trained == pytest.approx([3, 3, 3, 2], rel=1e-3)
    took = metrics.measured(records[2:])["step_ms"]  # of two
    assert took == pytest.approx((records[2]["step_ms"] + records[3]["step_ms"] * 3 / 2) / 2, rel=1e-3)


def test_it_learns(finished: Path) -> None:
    losses = [record["loss"] for record in world.records(finished)]
    assert len(losses) == 4
    assert losses[-1] < losses[0] - 0.1


def test_candidates_are_a_function_of_seed_task_and_number(finished: Path, tmp_path: Path) -> None:
    again = kernel.make(tmp_path, generate={"candidates": 1}, funnel={"planted": 0})
    assert world.train(again) == 0
    one = {line["name"]: line["answer"] for line in kernel.lines(finished, "candidates")}
    two = {line["name"]: line["answer"] for line in kernel.lines(again, "candidates")}
    assert len(set(one.values())) == GENERATED
    assert two.items() <= one.items()  # whatever else was in the batch


def test_a_trainer_that_dies_at_any_result_repeats_none_and_changes_no_verdict(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stages, "AT_ONCE", 2)
    append, workdir = Ledger.append, kernel.make(tmp_path)
    made: list[str] = []

    def dying(self: Ledger, entry: dict[str, Any]) -> None:
        if left[0] == 0:
            with self.path.open("ab") as file:  # torn in the middle of a line
                file.write(json.dumps(entry).encode()[:20])
            raise Death
        left[0] -= 1
        made.append(f"{entry.get('name')} {entry.get('candidate')}")
        append(self, entry)

    monkeypatch.setattr(Ledger, "append", dying)
    for deaths in (1, 6, -1):  # among the candidates, among the verdicts, never
        left, before = [deaths], complete_verdicts(workdir)
        if deaths > 0:
            with pytest.raises(Death):
                world.train(workdir)
        else:
            assert world.train(workdir) == 0
        assert complete_verdicts(workdir)[: len(before)] == before  # nothing that stood there has changed
    assert len(made) == len(set(made)) == 2 * GENERATED + PLANTED  # nothing was done twice
    assert clockless_verdicts(workdir) == clockless_verdicts(finished)
    assert kernel.lines(workdir, "candidates") == kernel.lines(finished, "candidates")


def complete_verdicts(workdir: Path) -> list[str]:
    """Verdicts that were written to their end."""
    path = workdir / "stages" / "verdicts.jsonl"
    content = path.read_text() if path.exists() else ""
    return content[: content.rfind("\n") + 1].splitlines()


@pytest.mark.parametrize("look", [pytest.param(9, marks=pytest.mark.slow), 14])
def test_a_stop_is_heeded_in_every_stage_and_the_run_goes_on(finished: Path, tmp_path: Path, look: int) -> None:
    workdir = kernel.make(tmp_path)
    assert world.train(workdir, StopAt(workdir, look)) == 75
    assert not (workdir / "results.json").exists()
    assert world.train(workdir) == 0
    assert clockless_verdicts(workdir) == clockless_verdicts(finished)


def test_weights_that_a_limit_cuts_short_are_left_as_their_last_step_made_them(finished: Path, tmp_path: Path) -> None:
    workdir, last = kernel.make(tmp_path), kernel.results(finished)["steps"]
    assert world.train(workdir, StopAt(workdir, 3, ends=True)) == 75
    meta = kernel.read(workdir, "final/meta.json")
    assert (meta["phase"], meta["step"], meta["val_loss"]) == ("sft", max(world.committed(workdir)), None)
    assert 0 < meta["step"] < last
    assert world.train(workdir, StopAt(workdir, last - meta["step"] + 1, ends=True)) == 75  # nothing left to train
    assert world.final_hash(workdir) == world.final_hash(finished)
    assert world.train(workdir, StopAt(workdir, 18, ends=True)) == 75  # its candidates are being written
    meta = kernel.read(workdir, "final/meta.json")
    assert meta["val_loss"] is not None


def test_without_its_stages_only_the_final_weights_are_needed_again(finished: Path, tmp_path: Path) -> None:
    workdir = kernel.make(tmp_path)
    (workdir / "stages").mkdir()
    for name in ("candidates", "verdicts"):  # as an earlier attempt on another node left them
        (workdir / "stages" / f"{name}.jsonl").write_bytes((finished / "stages" / f"{name}.jsonl").read_bytes())
    before = kernel.lines(workdir, "verdicts")
    assert world.train(workdir) == 0
    assert kernel.lines(workdir, "verdicts") == before
    assert kernel.results(workdir)["statement"] == kernel.results(finished)["statement"]


def test_candidates_of_other_weights_are_written_again(finished: Path, tmp_path: Path) -> None:
    workdir = kernel.make(tmp_path, funnel={"planted": 0})
    (workdir / "stages").mkdir()
    of_others = [{**line, "weights": "4 9.9", "source": "pass\n"} for line in kernel.lines(finished, "candidates")]
    left = "".join(json.dumps(line) + "\n" for line in of_others)
    (workdir / "stages" / "candidates.jsonl").write_text(left)
    assert world.train(workdir) == 0
    assert kernel.lines(workdir, "candidates") == of_others + kernel.lines(finished, "candidates")
    judged = {line["source_sha256"] for line in kernel.lines(workdir, "verdicts")}
    assert judged == {funnel.digest(line["source"]) for line in kernel.lines(finished, "candidates")}


@pytest.mark.slow  # rank 0 starts servers of its own; the stack's rehearsal has two ranks too
def test_two_ranks_train_share_the_generation_and_judge_once(finished: Path, tmp_path: Path) -> None:
    workdir = kernel.make(tmp_path, gpus=2)
    assert rank_world.train(2, workdir, others=None) == 0
    assert len(kernel.lines(workdir, "candidates")) == len(kernel.lines(workdir, "candidates-1")) == GENERATED // 2
    assert len(kernel.lines(workdir, "verdicts")) == GENERATED + PLANTED
    one, two = ([record["loss"] for record in world.records(folder)] for folder in (finished, workdir))
    assert two == pytest.approx(one, rel=1e-5)
    answers = kernel.lines(workdir, "candidates") + kernel.lines(workdir, "candidates-1")
    assert {line["name"]: line["answer"] for line in answers} == {
        line["name"]: line["answer"] for line in kernel.lines(finished, "candidates")
    }  # each from a whole copy of weights that are trained in shards


def test_a_machine_that_cannot_judge_gives_no_verdict(
    finished: Path, tmp_path: Path, workers: Workers, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = kernel.make(tmp_path)
    (workdir / "stages").mkdir()
    (workdir / "stages" / "candidates.jsonl").write_bytes((finished / "stages" / "candidates.jsonl").read_bytes())
    monkeypatch.setattr(funnel.Judge, "_failure", lambda judge, gpu, contained: "CUDA error 304")
    assert world.train(workdir) == 71
    assert (
        "the funnel: a test kernel that is known to be correct fails on this machine"
        in (workdir / "preflight.json").read_text()
    )
    assert kernel.lines(workdir, "verdicts") == []


def test_another_dataset_than_the_run_configs_is_refused(tmp_path: Path) -> None:
    workdir = kernel.make(tmp_path)
    tree = json.loads((workdir / "run.json").read_text())
    tree["job"]["parameters"]["data"]["row"] = 512
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == 65
    assert "was prepared with row 1024" in (workdir / "fatal.json").read_text()


def test_a_file_of_pairs_needs_base_weights(tmp_path: Path) -> None:
    workdir = kernel.make(tmp_path)
    tree = json.loads((workdir / "run.json").read_text())
    tree["job"]["parameters"]["data"]["source"] = "jsonl"
    (workdir / "run.json").write_text(json.dumps(tree))
    assert world.train(workdir) == 65
    assert "no base weights" in (workdir / "fatal.json").read_text()
