"""The adaptive curriculum of kernel-sft: what it acts on, its two trainings side by side, and stops in any of it."""

from __future__ import annotations

import errno
import os
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gpufleet.job.contract.messages import Stop
from gpufleet.job.experiments.dataset.packing import order
from gpufleet.job.experiments.engine import step
from gpufleet.job.experiments.engine.parallel import World
from gpufleet.job.experiments.engine.requests import Requests
from gpufleet.job.experiments.kernel import stages
from gpufleet.job.experiments.kernel.judge import curriculum
from gpufleet.job.experiments.kernel.judge.catalog import BY_NAME, TASKS
from gpufleet.job.experiments.kernel.judge.funnel import digest
from gpufleet.job.experiments.kernel.judge.planted import Candidate
from gpufleet.job.experiments.kernel.judge.verdict import Course
from gpufleet.job.experiments.kernel.run import Kernel
from gpufleet.job.experiments.kernel.spec import AT_ONCE
from gpufleet.job.kind import from_json
from gpufleet.job.ledger import Ledger
from tests.job import kernel_world as kernel
from tests.job import rank_world
from tests.job import train_world as world
from tests.job.train_world import StopAt

pytestmark = [pytest.mark.usefixtures("one_judge"), pytest.mark.xdist_group("kernels")]

STEPS, GENERATED = 8, 4  # of one training of two epochs; two tasks, two candidates
RATES = {"relu": 0.0, "leaky_relu": 0.5}


def make(workdir: Path, mode: str = "compare", **changed: Any) -> Path:
    return kernel.make(workdir, **{"epochs": 2, "data": {"curriculum": mode}, "funnel": {"planted": 0}, **changed})


def losses(workdir: Path, phase: str) -> list[float]:
    return [record["loss"] for record in world.records(workdir) if record["phase"] == phase]


def clockless_results(workdir: Path) -> dict[str, Any]:
    """Everything that no clock decides."""
    found = kernel.results(workdir)
    rows = [{**row, "seconds_per_candidate": None} for row in found["curriculum"]["compared"]]
    return {
        "losses": [(record["phase"], record["step"], record["loss"]) for record in world.records(workdir)],
        "curriculum": {**found["curriculum"], "compared": rows},
        "candidates": sorted(line["name"] + line["answer"] for line in kernel.lines(workdir, "candidates")),
        "verdicts": sorted((line["candidate"], line["stage"]) for line in kernel.lines(workdir, "verdicts")),
        "weights": found["weights_sha256"],
    }


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Half of leaky_relu's attempts succeed after the first epoch, whatever was written."""
    workdir = make(tmp_path_factory.mktemp("compared"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stages, "pass_rates", lambda *_: RATES)
        assert world.train(workdir) == 0
    return workdir


def test_both_trainings_start_from_the_same_base_and_part_at_the_first_evaluation(compared: Path) -> None:
    uniform, adaptive = losses(compared, "sft-uniform"), losses(compared, "sft-adaptive")
    assert len(uniform) == len(adaptive) == STEPS
    assert uniform[:4] == adaptive[:4]
    assert all(one != other for one, other in zip(uniform[4:], adaptive[4:], strict=True))


def test_without_the_curriculum_it_is_the_plain_training(compared: Path, tmp_path: Path) -> None:
    plain = make(tmp_path, "off")
    assert world.train(plain) == 0
    assert losses(plain, "sft") == losses(compared, "sft-uniform")
    answers = {line["name"].removeprefix("sft-"): line["answer"] for line in kernel.lines(plain, "candidates")}
    mine = {line["name"]: line["answer"] for line in kernel.lines(compared, "candidates")}
    assert {name: mine[f"sft-uniform-{name}"] for name in answers} == answers


def test_the_table_has_a_row_for_each_over_the_same_tasks(compared: Path) -> None:
    found = kernel.results(compared)
    rows = found["curriculum"]["compared"]
    assert [row["row"] for row in rows] == ["sft-uniform", "sft-adaptive"]
    assert [(row["candidates"], row["tasks"]) for row in rows] == [(GENERATED, 2)] * 2
    assert rows[0]["val_loss"] != rows[1]["val_loss"]
    low, high = rows[1]["minus_first"]["pass@1"]
    assert low == -high < 0  # none of two tasks gained: no certainty
    assert (found["curriculum"]["mode"], found["curriculum"]["evaluations"]) == ("compare", [[STEPS + 4, RATES]])
    assert found["generated"]["candidates"] == GENERATED  # the adaptive ones alone
    assert len(kernel.lines(compared, "verdicts")) == 2 * GENERATED


def test_final_holds_the_adaptive_weights_and_says_so(compared: Path) -> None:
    meta = kernel.read(compared, "final/meta.json")
    assert (meta["phase"], meta["step"]) == ("sft-adaptive", 2 * STEPS)
    assert kernel.results(compared)["final"] == "sft-adaptive"
    assert kernel.results(compared)["weights_sha256"] == meta["files"][0]["sha256"]


class StopOnceExported(Requests):
    """As soon as final/ is whole: how often the funnel looks before, a clock decides."""

    def __init__(self, workdir: Path) -> None:
        super().__init__(workdir)
        self._meta = workdir / "final" / "meta.json"

    def stop(self) -> Stop | None:
        return Stop(reason="test", save=True) if self._meta.exists() else None


# Looks: one before the first step of a phase and one after each, one at its end, one per token (six) of a batch. In
# turn: the uniform training, its candidates, the adaptive one, its pass rates (after the fourth step). None: its
# candidates.
@pytest.mark.parametrize(
    ("look", "place"),
    [
        (4, "stopped after step 4: test"),
        pytest.param(
            12,
            "sft-uniform: generating 4 of 4 candidates, at most 6 tokens each\nstopped while generating: test",
            marks=pytest.mark.slow,
        ),
        pytest.param(18, "stopped after step 10: test", marks=pytest.mark.slow),
        pytest.param(22, "stopped while generating: test\nstep 000012/000016", marks=pytest.mark.slow),
        pytest.param(
            None,
            "sft-adaptive: generating 4 of 4 candidates, at most 6 tokens each\nstopped while generating: test",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_comparison_stopped_anywhere_goes_on_where_it_was(
    look: int | None, place: str, undisturbed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workdir = make(tmp_path)
    capsys.readouterr()
    requests = StopOnceExported(workdir) if look is None else StopAt(workdir, look)
    assert world.train(workdir, requests) == 75
    assert place in capsys.readouterr().out
    steps = [record["step"] for record in world.records(workdir)]
    assert world.committed(workdir)[-1] == steps[-1]  # no step was lost, nor is one repeated
    assert world.train(workdir) == 0
    assert clockless_results(workdir) == clockless_results(undisturbed)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    workdir = make(tmp_path_factory.mktemp("undisturbed"))
    assert world.train(workdir) == 0
    assert kernel.results(workdir)["curriculum"]["evaluations"] == [[STEPS + 4, {"relu": 0.0, "leaky_relu": 0.0}]]
    return workdir


def test_when_nothing_is_half_mastered_the_curriculum_changes_nothing(undisturbed: Path) -> None:
    assert losses(undisturbed, "sft-uniform") == losses(undisturbed, "sft-adaptive")


def test_a_node_lost_in_the_second_training_costs_nothing_of_the_first(undisturbed: Path, tmp_path: Path) -> None:
    workdir = make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 18, save=False)) == 75
    assert world.committed(workdir) == [STEPS]  # as the first training ended, its candidates written
    assert world.train(workdir) == 0
    assert clockless_results(workdir) == clockless_results(undisturbed)


def test_a_limit_met_while_the_model_is_tried_again_leaves_what_was_trained(tmp_path: Path) -> None:
    workdir = make(tmp_path, "on", generate={"candidates": 1})
    assert world.train(workdir, StopAt(workdir, 4)) == 75  # at the first token after step 4: another start tries again
    assert world.train(workdir, StopAt(workdir, 1, ends=True)) == 75  # and meets the limit there
    meta = kernel.read(workdir, "final/meta.json")
    assert meta["step"] == world.committed(workdir)[-1] == 4


def test_lost_candidates_of_weights_that_are_gone_are_an_error(compared: Path, tmp_path: Path) -> None:
    workdir = make(tmp_path)
    assert world.train(workdir, StopAt(workdir, 20)) == 75  # in the adaptive training
    (workdir / "stages" / "candidates.jsonl").unlink()
    assert world.train(workdir) == 65
    assert "4 candidates of sft-uniform are missing" in (workdir / "fatal.json").read_text()


@pytest.mark.slow
def test_on_a_rank_that_stops_within_a_batch_all_stop_and_keep_what_is_finished(tmp_path: Path) -> None:
    """Rank 1 alone sees the stop, at the second token of its second batch; rank 0 generates its share to the end."""
    workdir = make(tmp_path, gpus=2, generate={"candidates": 33})
    assert rank_world.train(2, workdir, others=7) == 75
    assert len(kernel.lines(workdir, "candidates")) == 33
    assert len(kernel.lines(workdir, "candidates-1")) == AT_ONCE
    before = kernel.lines(workdir, "candidates") + kernel.lines(workdir, "candidates-1")
    assert rank_world.train(2, workdir, others=None) == 0
    after = kernel.lines(workdir, "candidates") + kernel.lines(workdir, "candidates-1")
    assert [line for line in before if line not in after] == []
    names = [line["name"] for line in after]
    assert len(names) == len(set(names)) == 2 * 66
    uniform, adaptive = losses(workdir, "sft-uniform"), losses(workdir, "sft-adaptive")
    assert uniform == pytest.approx(adaptive, rel=1e-6)  # nothing was half mastered


def test_the_second_epoch_draws_more_of_what_is_half_mastered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, seen = curriculum.order, list[list[float]]()

    def watched(weight: list[float], *, seed: int, epoch: int, begun: int) -> list[int]:
        seen.append(weight)
        return drawn(weight, seed=seed, epoch=epoch, begun=begun)

    monkeypatch.setattr(curriculum, "order", watched)
    monkeypatch.setattr(stages, "pass_rates", lambda *_: RATES)
    workdir = make(tmp_path, "on", generate={"candidates": 1})
    assert world.train(workdir, StopAt(workdir, 7)) == 75  # after the evaluation
    assert world.train(workdir) == 0
    assert kernel.results(workdir)["curriculum"]["evaluations"] == [[4, RATES]]
    assert len(seen) > 1
    assert all(weight == seen[0] for weight in seen)  # also after the restart
    assert sorted(seen[0]) == [1.0] * 10 + [3.0]  # one of eleven rows holds that task


def test_a_step_that_holds_rows_of_two_epochs_costs_the_second_none_of_its_heavy_ones() -> None:
    """980 rows in steps of 64: of the second epoch 44 were over when the pass rates were known."""
    run = object.__new__(Kernel)
    run.per_step, run.rows, run.config = 64, 980, kernel.typed(epochs=2)
    run.row_tasks = [[frozenset({"relu"} if row % 98 == 0 else ())] for row in range(run.rows)]
    run.progress = {"evaluations": [[116, {"relu": 0.5}]]}
    phase: Any = SimpleNamespace(first=100)  # that before it had no curriculum
    rows = [row for step in range(116, 131) for row in run.step_rows(phase, step).tolist()]
    weight = [3.0 if row % 98 == 0 else 1.0 for row in range(run.rows)]
    assert rows == curriculum.order(weight, seed=run.config.seed, epoch=1, begun=44)
    heavy = [row % 98 == 0 for row in rows]
    assert (len(rows), heavy[0]) == (2 * 980 - 16 * 64, True)  # about 28 are drawn, fewer than were over
    assert heavy == sorted(heavy, reverse=True)
    assert run.step_rows(phase, 115).tolist()[-44:] == order(run.config.seed, 1, 980)[:44].tolist()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # dynamo looks at it
def test_between_epochs_the_model_generates_outside_of_compiled_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where each block has one graph for each shape, and more than eight of them are an error."""
    within = step.compiled
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.setattr(step, "compiled", lambda module, device, **named: within(module, torch.device("cuda"), **named))
    workdir = make(tmp_path, "on", generate={"tasks": 1, "candidates": 1, "max_tokens": 12})

    class StopAfterTheEvaluation(Requests):  # how often the funnel looks before, a clock decides
        def stop(self) -> Stop | None:
            logged = (workdir / "metrics.jsonl").exists() and world.records(workdir)
            return Stop(reason="test", save=True) if logged and logged[-1]["step"] > 4 else None

    assert world.train(workdir, StopAfterTheEvaluation(workdir)) == 75
    assert world.records(workdir)[-1]["step"] > 4


@pytest.mark.parametrize("mode", ["on", "compare"])
def test_a_curriculum_of_one_epoch_is_refused(mode: str) -> None:
    (problem,) = from_json("kernel-sft", kernel.config(data={"curriculum": mode})).problems()
    assert problem[0] == "data.curriculum"
    assert "2 or more" in problem[1]


def test_what_timing_rejects_is_not_mastered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of four tried per task, all right on every input: one of relu's lies about its time."""

    def written(kernel: Any, module: Any, wanted: Any, salt: str, keep: Any, name: str) -> None:
        keep(wanted, ["pass"] * len(wanted))

    class Judge:
        def all(self, sources: list[Candidate], done: Any, check: Any) -> None:
            for one in sources:
                course = Course(one, digest(one.source), stage=5)
                done(course.verdict("its clock" if one.name == "curriculum-relu-0" else None))

    monkeypatch.setattr(stages, "_generate_share", written)
    monkeypatch.setattr(stages, "_judge", lambda *_: nullcontext(Judge()))
    session = SimpleNamespace(world=World(), say=print, workdir=tmp_path)
    made, module = SimpleNamespace(config=kernel.typed(), session=session), SimpleNamespace()
    assert stages.pass_rates(made, module, "4 1.0") == {"relu": 0.75, "leaky_relu": 1.0}  # type: ignore[arg-type]


def test_what_is_tried_before_a_stop_is_neither_written_nor_judged_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight are tried, two at once, each of six tokens: a stop at the ninth token, then one after the third verdict."""
    monkeypatch.setattr(stages, "AT_ONCE", 2)
    workdir = make(tmp_path, "on", generate={"candidates": 1})
    assert world.train(workdir, StopAt(workdir, 4 + 8)) == 75
    written = kernel.lines(workdir, "tried")
    assert len(written) == 2

    class StopOnceJudged(Requests):
        def stop(self) -> Stop | None:
            return Stop(reason="test", save=True) if len(kernel.lines(workdir, "verdicts-tried")) >= 3 else None

    assert world.train(workdir, StopOnceJudged(workdir)) == 75
    assert kernel.lines(workdir, "tried")[:2] == written
    judged = kernel.lines(workdir, "verdicts-tried")
    assert 3 <= len(judged) < 8
    assert world.train(workdir) == 0
    assert len({line["name"] for line in kernel.lines(workdir, "tried")}) == len(kernel.lines(workdir, "tried")) == 8
    again = kernel.lines(workdir, "verdicts-tried")
    assert again[: len(judged)] == judged
    assert len({line["candidate"] for line in again}) == len(again) == 8
    assert kernel.results(workdir)["curriculum"]["evaluations"] == [[4, {"relu": 0.0, "leaky_relu": 0.0}]]


def test_a_disk_that_is_full_when_the_model_is_tried_refuses_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(ledger: Ledger, entry: dict[str, Any]) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Ledger, "append", full)
    assert world.train(make(tmp_path, "on", generate={"candidates": 1})) == 71
    assert "tried.jsonl cannot be written: No space left on device" in capsys.readouterr().out


def refused(workdir: Path) -> str:
    assert world.train(workdir) == 65
    return (workdir / "fatal.json").read_text()


def test_epochs_that_fit_in_one_step_are_refused(tmp_path: Path) -> None:
    assert "make one step of 32" in refused(make(tmp_path, batch={"tokens": 32 * 1024}))


def test_pairs_that_have_nothing_to_do_with_the_tasks_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workdir = make(tmp_path)
    monkeypatch.setattr(curriculum, "TASKS", TASKS[12:])  # none of the pairs asks for the last ones
    assert "no pair can be drawn more often" in refused(workdir)


@pytest.mark.parametrize(
    ("question", "tasks"),
    [
        (BY_NAME["relu_squared"].prompt, {"relu_squared"}),
        (f"<user>\n{BY_NAME['silu'].prompt.strip()}<end>", {"silu"}),
        ("class M(nn.Module):\n    act = nn.ReLU()", {"relu", "relu_squared"}),
        ("return F.softplus(x) + torch.abs(y)", {"softplus", "absolute"}),
        ("F.hardswish(x)", {"hardswish"}),
        ("F.leaky_relu(x)", {"leaky_relu"}),
        ("self.act = nn.LeakyReLU(0.01)  # where it counts", {"leaky_relu"}),
        ("torch.nn.Linear(4, 4)", set()),
    ],
)
def test_a_pair_is_practice_for_the_task_it_asks_for_or_whose_functions_it_names(
    question: str, tasks: set[str]
) -> None:
    assert curriculum.tasks_of(question) == tasks
