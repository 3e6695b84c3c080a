"""`gpufleet new --try` runs a command in a copy of its folder, and writes its observations into the definition."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from gpufleet.infra import cli
from gpufleet.infra.discover.sandbox import TrialRun, Written
from gpufleet.infra.discover.script import look
from gpufleet.infra.discover.seen import TrialFindings, learn, take_verdict, with_seen
from gpufleet.infra.discover.template import Trial, draft
from gpufleet.infra.discover.trial import trial
from gpufleet.infra.errors import GpufleetError
from tests.infra.discover_cases import script

# This script trains by counting. Its arguments say what it saves, prints and does on a signal.
SCRIPT = """
import json, os, signal, sys, time
said = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
where, step, stopped = said.get("out", "kept"), 0, []
os.makedirs(where, exist_ok=True)
if "from" in said and said.get("resumes", "yes") == "yes":
    step = json.load(open(said["from"]))["step"]
if said.get("handles") == "yes":
    signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
def save():
    name = f"{where}/" + said.get("name", "state-{step:05d}.json").format(step=step, epoch=step // 4)
    with open(name + ".unfinished", "w") as file:
        json.dump({"step": step, "text": "x" * 5000}, file)
    os.replace(name + ".unfinished", name)
while step < 100_000:
    step += 1
    time.sleep(0.02)
    print(said.get("line", "step {step} of 100000, loss {loss:.3f}").format(step=step, loss=9 / step), flush=True)
    if step % 8 == 0:
        save()
    if stopped:
        time.sleep(0.2)  # it takes its time
        save()
        sys.exit(0)
"""
PYTHON = sys.executable


@pytest.fixture
def code(tmp_path: Path) -> Path:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "t.py").write_text(SCRIPT)
    (tmp_path / "code" / "data.txt").write_text("mine")
    return tmp_path / "code"


def tried(code: Path, words: str, resume: str = "from={checkpoint}") -> TrialFindings:
    return trial(code, Trial(command=f"{PYTHON} t.py {words}", resume=resume))


def test_names_lines_interval_signal_and_resume_are_seen(code: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in code.rglob("*")}
    seen = tried(code, "out={checkpoints}")
    assert seen.problems == []
    assert seen.checkpoint is not None
    assert (seen.checkpoint.name, seen.checkpoint.top) == ("state-{step:05d}.json", "checkpoints")
    assert (seen.checkpoint.every, seen.checkpoint.unit, seen.checkpoint.rewritten) == (8, "step", False)
    assert "state-00008.json" in seen.checkpoint.evidence
    assert seen.line is not None
    assert {"step", "loss"} <= seen.line.groups
    assert (seen.goes_on, seen.saves_on_signal) == (True, False)
    assert "it goes on" in seen.resume_evidence
    assert "exit code 143" in seen.signal_evidence
    assert {path: path.stat().st_mtime_ns for path in code.rglob("*")} == before


def test_a_save_on_a_signal_and_a_start_that_begins_anew_are_seen(code: Path) -> None:
    seen = tried(code, "out={checkpoints} handles=yes resumes=no")
    assert seen.saves_on_signal is True
    assert seen.goes_on is False
    assert "it begins anew" in seen.resume_evidence


def test_a_start_that_writes_an_older_file_again_begins_anew_whatever_it_tells(code: Path) -> None:
    seen = tried(code, "out={checkpoints} resumes=no line=working")
    assert seen.line is None
    assert seen.goes_on is False
    assert "the command wrote state-00008.json: it does not resume" in seen.resume_evidence


@pytest.mark.parametrize(
    ("words", "name", "folder", "rewritten"),
    [
        ("name=last.json", "last.json", "kept", True),
        ("out=runs/a name=ep{{epoch}}.json", "ep{epoch}.json", "runs/a", False),
    ],
)
def test_what_lies_below_the_code_is_seen_there(
    code: Path, words: str, name: str, folder: str, rewritten: bool
) -> None:
    seen = tried(code, f"'{words}'" if " " not in words else " ".join(f"'{each}'" for each in words.split()))
    assert seen.checkpoint is not None
    assert (seen.checkpoint.name, seen.checkpoint.folder, seen.checkpoint.rewritten) == (name, folder, rewritten)


def test_a_command_that_fails_says_why(code: Path) -> None:
    seen = trial(code, Trial(command=f"{PYTHON} -c \"raise ValueError('no data')\""))
    assert seen.checkpoint is None
    assert "exit code 1: ValueError: no data" in seen.problems[0]
    assert "the command ended by itself" in trial(code, Trial(command="true")).problems[0]


def test_a_link_to_a_folder_elsewhere_is_named(code: Path, tmp_path: Path) -> None:
    (code / "data").symlink_to(tmp_path)
    with pytest.raises(GpufleetError, match=f"data leads to the folder {tmp_path}"):
        trial(code, Trial(command="true"))


def test_a_folder_too_large_to_copy_is_refused(code: Path) -> None:
    with (code / "huge.bin").open("wb") as file:
        os.truncate(file.fileno(), 600 * 1024 * 1024)
    with pytest.raises(GpufleetError, match="MB, but a trial copies at most 500 MiB"):
        trial(code, Trial(command="true"))


def test_the_file_that_is_written_has_what_was_seen_beside_each_key(
    code: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "project" / "stacks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "project")
    command = f"{PYTHON} t.py out={{checkpoints}}"
    assert cli.main(["new", "mine", "--code", "../code", "--command", command, "--try"]) == 0
    assert "Trying, in a copy of the folder" in capsys.readouterr().out
    text = (tmp_path / "project" / "stacks" / "mine.yaml").read_text()
    job = yaml.safe_load(text)["job"]
    assert job["checkpoint"]["each"] == "state-{step:05d}.json"
    assert job["stop"] == {"signal": "TERM", "saves": False}
    for key in ("each", "saves", "P<step>"):
        (line,) = [each for each in text.splitlines() if f"{key}:" in each or (key == "P<step>" and key in each)][:1]
        assert "in the trial" in line


EPOCH_LINE = r"Train: (?P<epoch>\d+) \[ *(?P<batch>\d+)/(?P<batches>\d+)\]"
KEEP = 'parser.add_argument("--keep", default="model.pt")'
EVERY = 'parser.add_argument("--save_every", type=int, default=50)'
SAVES_EVERY = script("torch.save({}, f'{args.dest}/{step}.pt')", arguments=EVERY).replace("% 50", "% args.save_every")


def watched(names: list[str], *, epochs: int = 3) -> TrialRun:
    """The record of a start that prints epoch and batch in columns, and writes one of the names after each epoch."""
    lines = [(10.0 * e + b, f"Train: {e} [{b:>4}/9]  Loss {e + 9.5:6.2f}") for e in range(epochs) for b in range(1, 10)]
    writes = [Written(name=name, at=10.0 * e + 9.5, began=10.0 * e + 9.5, bytes=9) for e, name in enumerate(names)]
    return TrialRun(lines=lines, writes=writes)


@pytest.mark.parametrize(
    ("names", "epochs", "name", "every"),
    [
        ([f"checkpoints/20261128-0101-net/at-{e}.pt" for e in range(3)], 3, "*/at-{epoch}.pt", 1),
        ([f"checkpoints/1128_010159/at-{e}.pt" for e in range(3)], 3, "*/at-{epoch}.pt", 1),
        ([f"checkpoints/ppo/net_1/at-{e}.pt" for e in range(3)], 3, "ppo/net_*/at-{epoch}.pt", 1),
        (["checkpoints/last.pt"] * 3, 3, "last.pt", 1),
        (["checkpoints/best.pt"] * 3, 30, "best.pt", None),  # not because an evaluation was the best
        (["checkpoints/best.pt"] * 2, 2, "best.pt", None),
        ([f"checkpoints/plot-{e}.pdf" for e in range(3)], 3, None, None),
    ],
)
def test_patterns_that_were_read_tell_which_epoch_a_file_is_of(
    names: list[str], epochs: int, name: str | None, every: int | None
) -> None:
    seen = TrialFindings()
    learn(seen, watched(names, epochs=epochs), [EPOCH_LINE])
    kept = seen.checkpoint
    assert (kept and kept.name, kept and kept.every) == (name, every)
    assert kept is None or kept.unit == "epoch"


@pytest.mark.parametrize(
    ("step_ms", "steps", "every", "told"),
    [(50.0, 600, 100, "[50.0]   # in the trial"), (3000.0, 10, 1, "[3000.0]   # in the trial"),
     (60_000.0, 6, 1, "[60000.0]   # in the trial"), (None, 60, 10, "[500]")],
)  # fmt: skip
def test_a_rehearsal_trains_as_long_as_its_interruptions_need_by_the_steps_that_were_seen(
    tmp_path: Path, step_ms: float | None, steps: int, every: int, told: str
) -> None:
    (tmp_path / "t.py").write_text(SAVES_EVERY)
    found, seen = look(tmp_path, "python t.py"), TrialFindings()
    if step_ms is not None:
        lines = [(step * step_ms / 1000, f"step {step}") for step in range(10, 100, 10)]
        learn(seen, TrialRun(lines=lines), [r"step (?P<step>\d+)"])
        assert seen.took_ms == {"step": pytest.approx(step_ms)}
        trying = Trial(command="", every="save_every")
        with_seen(found, seen, "", trying)
    text = draft("mine", found, folder="../mine", command="python t.py").text
    rehearsal = yaml.safe_load(text)["rehearsal"]
    assert (rehearsal["job"]["work"]["steps"], rehearsal["job"]["checkpoint"]["every"]) == (steps, {"steps": every})
    assert f"--save_every {every} " in rehearsal["job"]["command"] + " "
    assert f"step_ms: {told}" in text


def test_epochs_are_timed_from_where_each_is_told_first() -> None:
    seen = TrialFindings()
    learn(seen, watched([]), [EPOCH_LINE])
    assert seen.took_ms == {"epoch": pytest.approx(10_000)}


def test_numbered_lines_that_come_at_once_are_no_steps() -> None:
    seen = TrialFindings()
    learn(seen, TrialRun(lines=[(row / 100, f"| {row} | net.{row} | 12 K |") for row in range(9)]), [])
    assert seen.line is None
    assert seen.problems[0].startswith("no checkpoint appeared")  # the script did not end by itself


@pytest.mark.parametrize(
    ("lines", "work"),
    [
        (
            [f"Epoch [{epoch}/7], Step [{step}/900], loss 0.5" for epoch in (1, 2) for step in (100, 200)],
            ": 7   # in the trial",
        ),
        ([f"Iteration {step} of 900" for step in (10, 20, 30)], "steps: 900   # in the trial"),
        (["Epoch 1/7", "Step 100/900", "Epoch 2/7", "Step 100/900"], ": 7   # in the trial"),
        (["Epoch 1/7", "Epoch 1/9"], "# work: "),  # of two trainings
        (["Epoch 1/7"], "# work: "),
    ],
)
def test_how_long_it_trains_is_what_its_lines_say(tmp_path: Path, lines: list[str], work: str) -> None:
    (tmp_path / "t.py").write_text("import torch\nwhile True:\n    loss.backward()")
    found, seen = look(tmp_path, "python t.py"), TrialFindings()
    made = draft("mine", found, folder="../mine", command="python t.py")
    assert made.trial is not None
    learn(seen, TrialRun(lines=list(enumerate(lines))), [])
    with_seen(found, seen, made.out, made.trial)
    text = draft("mine", found, folder="../mine", command="python t.py").text
    assert work in text, text


def test_how_long_it_trains_is_what_the_code_says_where_lines_say_another_thing(tmp_path: Path) -> None:
    (tmp_path / "t.py").write_text(SAVES_EVERY)
    found, seen = look(tmp_path, "python t.py"), TrialFindings(output=["Step 1/7", "Step 2/7"])
    made = draft("mine", found, folder="../mine", command="python t.py")
    assert made.trial is not None
    said = found.total
    assert said is not None
    with_seen(found, seen, made.out, made.trial)
    assert found.total == said


@pytest.mark.parametrize(
    ("environment", "requires", "trained"),
    [
        (".venv", "requirements.txt", False),
        ("none", "requirements.txt", True),  # another Python trained
        (".venv", "pyproject.toml", True),  # the folder itself is installed
    ],
)
def test_what_the_script_requires_is_installed_where_an_environment_was_not_seen_to_have_it(
    tmp_path: Path, environment: str, requires: str, trained: bool
) -> None:
    (tmp_path / environment / "bin").mkdir(parents=True)
    (tmp_path / "t.py").write_text(SAVES_EVERY)
    (tmp_path / requires).write_text('[project]\nname = "torch"')
    found, seen = look(tmp_path, "python t.py"), TrialFindings()
    made = draft("mine", found, folder="../mine", command="python t.py")
    assert made.trial is not None
    learn(seen, watched([f"checkpoints/{10 * e}.pt" for e in (1, 2, 3)]) if trained else TrialRun(), [])
    with_seen(found, seen, made.out, made.trial)
    assert found.requirements == requires
    assert 'setup: ""' not in draft("mine", found, folder="../mine", command="python t.py").text


@pytest.mark.parametrize(
    ("code", "said"),
    [(None, "is not shown: no line showed"), (1, "is not shown: a second start ended with exit code 1")],
)
def test_a_second_start_that_shows_nothing_is_said_to_have_failed_where_it_did(code: int | None, said: str) -> None:
    check: Any = SimpleNamespace(verdict="not shown", why="no line showed a step")
    seen = TrialFindings()
    take_verdict(seen, check, TrialRun(code=code))
    assert said in seen.problems[0]


@pytest.mark.parametrize(("word", "group"), [("Epoch", "epoch"), ("ep", "epoch"), ("Episode", "step")])
def test_an_episode_is_no_epoch(word: str, group: str) -> None:
    seen = TrialFindings()
    learn(seen, TrialRun(lines=[(float(count), f"{word} {count}, reward 9.5") for count in range(9)]), [])
    assert seen.line is not None
    assert seen.line.groups == {group}


@pytest.mark.parametrize(
    ("files", "command", "written", "expected"),
    [
        ({"t.py": script("torch.save({'step': step}, 'last.pt')")}, "python t.py",
         "checkpoints/last.pt", ("workdir: '{checkpoints}'", "command: 'python {code}/t.py'")),
        ({"t.py": script("torch.save({'step': step}, args.keep)", arguments=KEEP)}, "python t.py",
         "checkpoints/model.pt", ("--keep {checkpoints}/model.pt'",)),
        ({"sub/t.py": script("torch.save({'step': step}, 'saved/last.pt')")}, "cd sub && python t.py",
         "code/sub/saved/last.pt", ("folder: sub/saved ",)),
        ({"t.py": SAVES_EVERY},
         "python t.py --save_every 200", "checkpoints/{}.pt", ("every: {steps: 200}",)),
        ({"t.py": SAVES_EVERY, "requirements.txt": "torch==1.0", ".venv/bin/python": ""},
         "python t.py", "checkpoints/{}.pt", ('    setup: ""   # in the trial',)),
        ({"data.yaml": "train: images"}, "yolo train data=data.yaml epochs=12",
         "checkpoints/train/weights/last.pt", ("project={checkpoints}", "args: 'model={checkpoint} resume=True'")),
    ],
)  # fmt: skip
def test_what_was_tried_keeps_the_place_and_the_interval_that_were_typed(
    tmp_path: Path, files: dict[str, str], command: str, written: str, expected: tuple[str, ...]
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    found, seen = look(tmp_path, command), TrialFindings()
    made = draft("mine", found, folder="../mine", command=command)
    assert made.trial is not None
    learn(seen, watched([written.format(10 * e) for e in (1, 2, 3)]), made.trial.lines)
    assert seen.checkpoint is not None
    with_seen(found, seen, made.out, made.trial)
    text = draft("mine", found, folder="../mine", command=command).text
    assert [each for each in expected if each not in text] == []


def test_a_script_whose_python_lacks_a_module_is_not_run(code: Path) -> None:
    (code / "t.py").write_text("import absent_one\nopen('ran', 'w')\n")
    seen = trial(code, Trial(command="python t.py", resume=""))
    (why,) = seen.problems
    assert why.startswith("the command was not run: ")
    assert "lacks what the script imports: absent_one (t.py:1)" in why
    assert seen.output == []
