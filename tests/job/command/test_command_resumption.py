"""Whether a start goes on from its checkpoint: scripts of every kind, lost once, and what is then shown of them."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from tests.job.script_world import FakeScript, ScriptWorld, lost_and_started_again

SEED, QUICK, ALL = 43, 40, 200
DOES_NOT = ": it does not resume; if it resumes but counts from the beginning, write job.resume.check: none"
STEPS, EPOCHS, HOURS = {"steps": 60}, {"epochs": 6}, {"hours": {"low": 1, "likely": 2, "high": 3}}
TENTH, EACH, MINUTE = {"steps": 10}, {"epochs": 1}, {"minutes": 1}
Case = tuple[
    FakeScript, dict[str, Any], dict[str, Any], int
]  # a script, job.work, job.checkpoint.every, where it is lost


def world_of(folder: Path, case: Case, **sections: Any) -> ScriptWorld:
    script, work, every, _ = case
    each = list(script.config(work=HOURS).checkpoint.each)
    checkpoint = {"each": each, "rewritten": script.names == "one", "every": every}
    return ScriptWorld(folder, script, script.config(work=work, checkpoint=checkpoint, **sections))


ANEW: dict[str, Case] = {
    "names count epochs and lines steps": (
        FakeScript(names="epoch as step", each=5, resumes=False), STEPS, TENTH, 45),
    "names count epochs, and say so": (FakeScript(names="epoch", each=5, resumes=False), EPOCHS, EACH, 45),
    "epochs counted from 1, one file": (FakeScript(names="one", lines="batch", resumes=False), STEPS, MINUTE, 35),
    "epochs counted from 0, one file": (
        FakeScript(names="one", lines="batch", base=0, resumes=False), STEPS, MINUTE, 35),
    "its first line comes late": (FakeScript(each=25, resumes=False), STEPS, TENTH, 55),
    "its lines come in blocks": (FakeScript(delivery="in blocks", resumes=False), STEPS, TENTH, 45),
    "no line tells a step": (FakeScript(delivery="none", resumes=False), HOURS, MINUTE, 45),
    "it writes other names than before": (
        FakeScript(delivery="none", every=15, shift=4, resumes=False), HOURS, MINUTE, 35),
    "it writes what it was given again": (FakeScript(delivery="none", every=20, resumes=False), HOURS, MINUTE, 25),
    "it writes one file before its first line": (FakeScript(names="one", each=15, resumes=False), STEPS, TENTH, 55),
    "it prunes what it wrote": (FakeScript(delivery="none", keeps=1, resumes=False), HOURS, MINUTE, 45),
}  # fmt: skip


@pytest.mark.parametrize("name", ANEW)
def test_a_start_that_begins_anew_is_refused(tmp_path: Path, name: str) -> None:
    case = ANEW[name]
    world = world_of(tmp_path, case)
    start = lost_and_started_again(world, case[3])
    assert start.restored is not None
    before = world.checkpoints.newest
    assert world.run(start, until=case[3]) is None
    assert start.refusal.endswith(DOES_NOT)
    assert world.checkpoints.newest == before  # nothing of it is taken for the run's


GOES_ON: dict[str, Case] = {
    "names count epochs and lines steps": (FakeScript(names="epoch as step", each=5), STEPS, TENTH, 45),
    "names count epochs, and say so": (FakeScript(names="epoch", each=5), EPOCHS, EACH, 45),
    "epochs counted from 1, one file": (FakeScript(names="one", lines="batch"), STEPS, MINUTE, 35),
    "epochs alone, counted from 0": (FakeScript(names="epoch", lines="epoch", base=0), EPOCHS, EACH, 45),
    "its lines come in blocks": (FakeScript(delivery="in blocks"), STEPS, TENTH, 45),
    "no line tells a step, and it saves every so many": (FakeScript(delivery="none"), STEPS, TENTH, 45),
    "it saves what it was given once more": (FakeScript(saves_again=True), STEPS, TENTH, 45),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_a_start_that_goes_on_is_shown_to_and_finishes(tmp_path: Path, name: str) -> None:
    case = GOES_ON[name]
    world = world_of(tmp_path, case)
    start = lost_and_started_again(world, case[3])
    assert start.restored is not None
    end = world.run(start)
    assert end is not None, start.refusal
    assert world.verdicts[-1] == "goes on"
    assert world.judge(start, end) == "finished"
    steps = [each["step"] for each in world.metrics()]
    assert steps == sorted(steps)
    assert steps[-1] in (6, 60)


NOT_SHOWN: dict[str, tuple[Case, str]] = {
    "one file and no line": (
        (FakeScript(names="one", delivery="none"), HOURS, MINUTE, 45), "no line of this start showed a step"),
    "names alone, saved by the clock": (
        (FakeScript(delivery="none"), HOURS, MINUTE, 45), "no line of this start showed a step"),
    "a checkpoint from before the first line": (
        (FakeScript(names="one", each=25), HOURS, MINUTE, 29), "no line before that checkpoint showed a position"),
    "in the first epoch": (
        (FakeScript(names="one", lines="batch", every=5), HOURS, MINUTE, 8), "may show that too"),
}  # fmt: skip


@pytest.mark.parametrize("name", NOT_SHOWN)
@pytest.mark.parametrize("resumes", [True, False])
def test_what_nothing_shows_is_not_said_and_what_would_show_it_is(tmp_path: Path, name: str, resumes: bool) -> None:
    (script, work, every, lost_at), says = NOT_SHOWN[name]
    script = replace(script, resumes=resumes or script.names == "step")
    world = world_of(tmp_path, (script, work, every, lost_at))
    start = lost_and_started_again(world, lost_at)
    assert start.restored is not None
    assert world.run(start, until=40) is not None
    assert world.verdicts[-1] == "not shown"
    assert says in world.why


def test_after_the_checkpoint_that_has_the_number_0_a_start_is_like_the_first(tmp_path: Path) -> None:
    """--epoch 0, say: a script that begins with the epoch whose checkpoint it reads writes that once more."""
    case = FakeScript(names="epoch", lines="batch", base=0, resumes=False), EPOCHS, EACH, 15
    world = world_of(tmp_path, case)
    start = lost_and_started_again(world, case[3])
    assert start.restored is not None
    assert world.run(start, until=25) is not None, start.refusal
    assert world.verdicts[-1] == "not shown"
    assert "may show that too" in world.why


def test_where_names_count_epochs_steps_go_on_where_they_were(tmp_path: Path) -> None:
    case = GOES_ON["names count epochs and lines steps"]
    world = world_of(tmp_path, case)
    start = lost_and_started_again(world, case[3])
    assert start.restored is not None
    assert start.restored.step == 40
    world.run(start)
    assert world.committed()[-2:] == [50, 60]


def test_what_shows_that_it_begins_anew_counts_whenever_it_comes(tmp_path: Path) -> None:
    """It saves more rarely than before, and prints in blocks: its first checkpoint is the next one by its name."""
    script = FakeScript(resumes=False, each=4)
    world = world_of(tmp_path, (script, STEPS, TENTH, 25))
    start = lost_and_started_again(world, 25)
    assert start.restored is not None
    assert start.restored.step == 20
    world.script = replace(script, every=30, delivery="in blocks")
    assert world.run(start) is None
    assert "goes on" in world.verdicts
    assert start.refusal.endswith("the command began at step 4" + DOES_NOT)


def test_a_start_that_does_nothing_with_what_it_was_given_has_not_finished(tmp_path: Path) -> None:
    world = world_of(tmp_path, case := (FakeScript(does_nothing=True), HOURS, MINUTE, 45))
    start = lost_and_started_again(world, case[3])
    end = world.run(start)
    assert end is not None
    assert world.judge(start, end) == "failed"


def test_what_comes_after_the_last_step_shows_nothing(tmp_path: Path) -> None:
    """It is lost while it evaluates, with lines like those of its steps."""
    world = world_of(tmp_path, (FakeScript(evaluates=20), STEPS, TENTH, 0))
    world.run(world.start())
    start = world.start()
    assert start.restored is not None
    assert start.restored.step == 60
    end = world.run(start)
    assert end is not None, start.refusal
    assert world.judge(start, end) == "finished"


def test_an_epoch_more_than_there_should_be_is_no_matter(tmp_path: Path) -> None:
    script = FakeScript(names="epoch as step", lines="epoch", epochs=7)
    world = world_of(tmp_path, (script, {"epochs": 6}, EACH, 0))
    world.run(world.start(), until=60, code=-1)
    start = world.start()
    end = world.run(start)
    assert end is not None, start.refusal
    assert world.judge(start, end) == "finished"


def test_where_nobody_looks_a_counter_that_begins_anew_loses_no_checkpoint(tmp_path: Path) -> None:
    world = world_of(tmp_path, case := (FakeScript(counts_anew=True), STEPS, TENTH, 35), resume={"check": "none"})
    start = lost_and_started_again(world, case[3])
    assert start.restored is not None
    assert start.restored.step == 30
    end = world.run(start)
    assert end is not None
    assert world.judge(start, end) == "finished"
    assert [step for step in world.committed() if step > 30] == [40, 50, 60]


def test_two_stages_of_one_command_are_warned_of_and_never_refused(tmp_path: Path) -> None:
    command = "python train.py pretrain {checkpoints} && python train.py tune {checkpoints}"
    world = world_of(tmp_path, (FakeScript(resumes=False), {"steps": 90}, TENTH, 45), command=command)
    assert any("trains 2 times" in each for each in world.config.doubts(90))
    start = lost_and_started_again(world, 45)
    assert world.run(start) is not None
    assert world.verdicts[-1] == "not shown"


@dataclass(frozen=True, kw_only=True)
class Combination:
    """A script with its definition, where it is lost, and how its second start ends."""

    script: FakeScript
    sections: dict[str, Any]
    lost_at: int
    code: int  # of the second start
    ends_at: int | None  # None: at its end


def combinations() -> list[Combination]:
    """ALL of them, drawn: the unit of names x the unit of lines x counted from 0 or 1 x lines in blocks, late or none x
    renamed or not x resumes or not x exit codes.
    """
    draw, made = random.Random(SEED), list[Combination]()
    while len(made) < ALL:
        script = FakeScript(
            names=draw.choice(("step", "epoch", "epoch as step", "one")),
            lines=draw.choice(("step", "epoch", "batch")),
            base=draw.choice((0, 1)),
            delivery=draw.choice(("at once", "at once", "in blocks", "late", "none")),
            each=draw.choice((1, 3, 5)),
            renames=draw.random() < 0.5,
            resumes=draw.random() < 0.5,
            saves_again=draw.random() < 0.2,
            keeps=draw.choice((None, None, 1)),
        )
        counts = draw.choice(("steps", "epochs", "both", "nothing"))
        declared: dict[str, dict[str, Any]] = {
            "steps": STEPS,
            "epochs": EPOCHS,
            "both": {**EPOCHS, "steps_per_epoch": 10},
            "nothing": HOURS,
        }
        work = declared[counts]
        if script.lines == "epoch" and counts == "steps":
            work = {"steps": 60, "steps_per_epoch": 10}
        said: dict[str, Any] = {"epochs": 1} if counts in ("epochs", "both") else {"minutes": 1}
        if counts == "steps" and draw.random() < 0.7:
            said = {"steps": 10}
        code = draw.choice((0, 0, 1, 143))
        made.append(
            Combination(
                script=script,
                sections={"work": work, "checkpoint": {"every": said}},
                lost_at=draw.randrange(14, 55),
                code=code,
                ends_at=None if code == 0 else draw.randrange(30, 60),
            )
        )
    return made


def drive(folder: Path, each: Combination) -> tuple[str, str]:
    """What is shown of the second start, and what its end means; empty: it was refused before that."""
    checkpoint = {**each.sections["checkpoint"], "each": [], "rewritten": each.script.names == "one"}
    config = each.script.config(work=each.sections["work"])
    sections = {**each.sections, "checkpoint": {**checkpoint, "each": list(config.checkpoint.each)}}
    world = ScriptWorld(folder, each.script, each.script.config(**sections))
    start = lost_and_started_again(world, each.lost_at)
    if start.restored is None:
        return "nothing restored", ""
    end = world.run(start, until=each.ends_at, code=each.code)
    return world.verdicts[-1], "" if end is None else world.judge(start, end)


def holds(each: Combination, shown: str, verdict: str) -> bool:
    """Whether nothing wrong was said: of one that begins anew never that it goes on, nor the reverse."""
    if shown == "nothing restored":
        return True
    if each.script.resumes:
        if each.script.saves_again and shown == "begins anew":  # no line shows that it has not trained up to there
            return each.script.delivery != "at once"
        means = {0: {"finished"}, 1: {"again"}, 143: {"again"}}[each.code]
        declared_wrongly = each.script.names == "epoch as step" and each.script.delivery == "none"
        return shown != "begins anew" and (verdict in means or declared_wrongly)
    return shown != "goes on" and (shown != "begins anew" or verdict in ("", "failed"))


@pytest.mark.parametrize("number", range(QUICK))
def test_no_drawn_script_is_said_to_do_what_it_does_not(tmp_path: Path, number: int) -> None:
    each = combinations()[number * (ALL // QUICK)]
    shown, verdict = drive(tmp_path, each)
    assert holds(each, shown, verdict), (each, shown, verdict)


@pytest.mark.slow
def test_no_script_of_all_that_are_drawn_is_said_to_do_what_it_does_not(tmp_path: Path) -> None:
    wrong = []
    for number, each in enumerate(combinations()):
        shown, verdict = drive(tmp_path / str(number), each)
        if not holds(each, shown, verdict):
            wrong.append((number, each, shown, verdict))
    assert wrong == []
