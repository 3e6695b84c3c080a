"""What a rehearsal tells of a command of the user's own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.infra.definition.loader import load, rehearsal_text
from gpufleet.infra.definition.model import StackDefinition
from gpufleet.infra.errors import GpufleetError
from gpufleet.infra.inputs.code import programs
from gpufleet.job.command.places import activated
from gpufleet.job.contract import environment
from gpufleet.job.contract.messages import Observed
from gpufleet.rehearsal import evidence, own, plumbing, rehearse, report
from gpufleet.rehearsal.evidence import Resumption

TEXT = """
run: {id: r1, owner: you}
job:
  image: public.ecr.aws/deep-learning-containers/pytorch:2.13-cu133-amzn2023
  code: {folder: ../mine}
  command: python train.py
  secrets: {TOKEN: ssm:/token}
  checkpoint: {each: ckpt.pt, rewritten: true, every: {steps: 10}, size_gb: 0.1}
  progress: {stdout: 'step (?P<step>[0-9]+)'}
  work: {steps: 100, step_ms: {L40S: 10}}
fleet: {region: us-east-2, zones: [us-east-2a], instance_types: [g6e.2xlarge]}
storage:
  inputs: {text: s3://bucket/text}
  keep: {days: 7}
limits: {max_usd: 5, max_hours: 3}
rehearsal: {python: PYTHON}
"""


def definition(tmp_path: Path, python: str = "''") -> StackDefinition:
    (tmp_path / "project" / "stacks").mkdir(parents=True, exist_ok=True)
    path = tmp_path / "project" / "stacks" / "mine.yaml"
    path.write_text(TEXT.replace("PYTHON", python))
    return load(path, now=datetime.now(UTC), rehearsal=True)


def environment_of(folder: Path) -> Path:
    """A virtual environment, as far as anybody looks."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin" / "python").symlink_to("/bin/sh")
    return folder / "bin"


def refusal(tmp_path: Path, **changed: str) -> str:
    """What a rehearsal says where the script imports what its Python does not have."""
    (tmp_path / "mine").mkdir(exist_ok=True)
    (tmp_path / "mine" / "train.py").write_text("import json\nimport absent_one, absent_two\n")
    (tmp_path / "python").symlink_to(sys.executable)
    file = definition(tmp_path, "../python").source
    text = Path(file).read_text().replace("  inputs: {text: s3://bucket/text}\n", "")
    text = text.replace("{python: ", "{job: {device: cpu}, estimate: {step_ms: [10]}, python: ")
    for old, new in changed.items():
        text = text.replace(f"  {old}:", f"  {new}\n  {old}:", 1)
    Path(file).write_text(text)
    with pytest.raises(GpufleetError) as refused:
        rehearse.rehearse("mine", root=tmp_path / "project", out=print)
    return str(refused.value)


def test_a_module_that_its_python_lacks_is_named_before_anything_is_made(tmp_path: Path) -> None:
    said = refusal(tmp_path)
    assert "absent_one (train.py:2), absent_two (train.py:2)" in said
    assert "-m pip install absent_one absent_two`" in said
    assert "rehearsal: {python: " in said
    assert not (tmp_path / "project" / "rehearsals").exists()


def test_a_module_that_the_set_up_does_not_name_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: object) -> None:
        raise GpufleetError("begun")

    monkeypatch.setattr(rehearse, "_attempt", lambda *_, **__: stopped())
    assert refusal(tmp_path, command="setup: pip install absent_one") == "begun"
    assert "lacks absent_two (train.py:2), and job.setup does not name that package" in capsys.readouterr().out


def test_a_command_has_the_interpreter_of_its_own_folder_unless_the_file_names_another(tmp_path: Path) -> None:
    root = tmp_path / "project"
    assert programs(definition(tmp_path), root) is None
    own_bin, other = environment_of(tmp_path / "mine" / ".venv"), environment_of(tmp_path / "other")
    assert programs(definition(tmp_path), root) == root / ".." / "mine" / ".venv" / "bin"
    assert own_bin.samefile(programs(definition(tmp_path), root) or "")
    assert other.samefile(programs(definition(tmp_path, "../other/bin/python"), root) or "")
    with pytest.raises(GpufleetError, match=r"rehearsal\.python"):
        programs(definition(tmp_path, "../nowhere/bin/python"), root)


def test_each_node_installs_into_an_environment_of_its_own_where_it_has_a_set_up(tmp_path: Path) -> None:
    found, theirs = definition(tmp_path), environment_of(tmp_path / "theirs")
    project = tmp_path / "project"
    programs_of = rehearse._programs_of(found, project, theirs, theirs / "python")
    assert programs_of is not None
    assert programs_of(tmp_path / "i-1") == theirs
    found.source.write_text(found.source.read_text().replace("  command:", "  setup: pip install x\n  command:"))
    found = load(found.source, now=datetime.now(UTC), rehearsal=True)
    programs_of = rehearse._programs_of(found, project, theirs, Path(sys.executable))
    assert programs_of is not None
    for root in (tmp_path / "i-1", tmp_path / "i-2"):
        root.mkdir()
        bin_folder = programs_of(root)
        assert bin_folder.is_relative_to(root)
        assert activated(str(bin_folder)) == {"VIRTUAL_ENV": str(bin_folder.parent)}
    assert activated("/usr/bin") == {}
    assert rehearse._programs_of(found, project, None, None) is None  # in an image, or for a stand-in


def test_a_secret_has_a_value_that_nobody_guesses_and_only_while_it_is_rehearsed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = environment.SECRET + "TOKEN"
    monkeypatch.delenv(name, raising=False)
    with own.secret_values(definition(tmp_path).job.parameters.demands.secrets):
        first = os.environ[name]
        assert len(first) >= 24
    assert name not in os.environ
    monkeypatch.setenv(name, "of the shell")
    with own.secret_values(definition(tmp_path).job.parameters.demands.secrets):
        assert os.environ[name] == "of the shell"
    assert os.environ[name] == "of the shell"


def test_an_input_in_a_bucket_cannot_be_rehearsed_and_is_named(tmp_path: Path) -> None:
    assert list(own.lacking(definition(tmp_path))) == ["storage.inputs.text: a folder with a small part of the data"]


def test_of_the_codes_folder_what_was_shipped_must_stay_and_a_commit_is_no_matter(tmp_path: Path) -> None:
    mine, project = tmp_path / "mine", tmp_path / "project"
    environment_of(mine / ".venv")
    (mine / ".venv" / "pyvenv.cfg").touch()  # which Python itself writes into
    for name in ("train.py", "model.py"):
        (mine / name).write_text("pass\n")
    git = ("git", "-c", "user.name=a", "-c", "user.email=b")
    subprocess.run([*git, "init", "-q"], cwd=tmp_path, check=True)
    (tmp_path / ".gitignore").write_text(".venv\n")
    before = own.listing(definition(tmp_path), project)
    assert sorted(path.name for path in before) == ["model.py", "train.py"]
    (mine / "notes").write_text("x")
    (mine / "train.py").write_text("pass\n")  # as a hook of git's does
    for words in (("add", "-A"), ("commit", "-qm", "all of it"), ("checkout", "-qb", "other")):
        subprocess.run([*git, *words], cwd=tmp_path, check=True)
    kept = own.code_is_untouched(before, project)
    assert (kept.held, kept.figure) == (True, "2 files, untouched")
    (mine / "train.py").write_text("pass # edited\n")
    (mine / "model.py").unlink()
    changed = own.code_is_untouched(before, project)
    assert changed.is_broken
    assert changed.figure.startswith("../mine/model.py (gone), ../mine/train.py changed during the rehearsal")


def test_a_file_that_a_run_lacks_because_git_ignores_it_is_named_with_the_lines_to_write(tmp_path: Path) -> None:
    mine, project = tmp_path / "mine", tmp_path / "project"
    (mine / "data" / "text").mkdir(parents=True)
    for name in ("train.py", "data/text/train.bin", "vocab.json"):
        (mine / name).write_text("pass\n")
    subprocess.run(["git", "init", "-q"], cwd=mine, check=True)
    (mine / ".gitignore").write_text("*.bin\nvocab.json\n")

    def hint(path: str) -> str:
        return own.not_shipped(definition(tmp_path), project, f"FileNotFoundError: No such file: {path!r} at step 0")

    assert "storage: {inputs: {data: ../mine/data/text}}" in hint("data/text/train.bin")
    assert "setup: 'mkdir -p data/text && cp -r {inputs.data}/. data/text'" in hint(
        "/opt/run/user/code/data/text/train.bin"
    )
    assert hint("vocab.json").strip() == (
        "vocab.json is not shipped, because git ignores it, or job.code.exclude names it."
    )
    for absent_or_shipped in ("train.py", "data/text/val.bin", "/data/text/train.bin", "../mine/vocab.json"):
        assert hint(absent_or_shipped) == ""


@pytest.mark.parametrize(
    ("checkpoint", "left"),
    [
        ("{each: ckpt.pt, rewritten: true, every: {steps: 10}, size_gb: 0.0001}", ["ckpt.pt"]),
        (
            "{format: hf-trainer, every: {steps: 10}, size_gb: 0.0001}",
            ["checkpoint-10/trainer_state.json", "checkpoint-10/weights.bin"],
        ),
        (
            "{format: nanochat, every: {steps: 10}, size_gb: 0.0001}",
            ["meta_10.json", "model_10.pt", "optim_10_rank0.pt"],
        ),
        ("{each: 'step_{step:06d}.pt', every: {steps: 10}, size_gb: 0.0001}", ["step_000010.pt"]),
    ],
)
def test_a_stand_in_writes_what_the_file_declares(tmp_path: Path, checkpoint: str, left: list[str]) -> None:
    found = definition(tmp_path)
    text = found.source.read_text()
    declared = "{each: ckpt.pt, rewritten: true, every: {steps: 10}, size_gb: 0.1}"
    found.source.write_text(text.replace(declared, checkpoint))
    found = load(found.source, now=datetime.now(UTC), rehearsal=True)
    code = tmp_path / "stand-in"
    changed = rehearsal_text(found.source, tmp_path, changed=partial(plumbing.stand_in, found, code))
    laid = tmp_path / "project" / "stacks" / "laid.yaml"
    laid.write_text(changed)
    config = load(laid, now=datetime.now(UTC)).job.parameters
    assert config.device == "cpu"
    assert config.demands.code is not None
    assert Path(config.demands.code.folder) == code
    told = json.loads((code / "told.json").read_text())
    (code / "told.json").write_text(json.dumps({**told, "steps": 10, "every": 10, "pace_s": 0}))
    kept = tmp_path / "kept"
    said = subprocess.run(
        [sys.executable, code / "command.py", kept], capture_output=True, text=True, check=True
    ).stdout
    assert said.splitlines()[-1] == "plumbing step 10"
    assert sorted(path.relative_to(kept).as_posix() for path in kept.rglob("*") if path.is_file()) == left


def after_a_notice(resumed: int, reason: str, *, last: int = 66, signalled: bool = True) -> Resumption:
    return Resumption(
        kind="notice",
        last_step=last,
        resumed_step=resumed,
        started_s=None,
        signalled=signalled,
        reason=reason,
    )


ON_SIGNAL, NOT, USUAL, NEVER = (
    after_a_notice(64, "stop"),  # and had told two more steps while it saved
    after_a_notice(50, "timed"),
    after_a_notice(100, "stop", last=104),
    after_a_notice(50, "timed", signalled=False),
)


@pytest.mark.parametrize(
    ("found", "every", "saved"),
    [
        (ON_SIGNAL, 50, True),
        (NOT, 50, False),
        (USUAL, 50, None),
        (USUAL, None, True),
        (after_a_notice(99, "stop", last=104), 50, None),  # one file, whose step is that of the line before
        (NEVER, 50, None),
        (after_a_notice(0, ""), 50, False),
    ],
)
def test_the_checkpoint_says_whether_it_was_saved_on_the_signal(
    found: Resumption, every: int | None, saved: bool | None
) -> None:
    assert found.saved(every) is saved


@pytest.mark.parametrize(
    ("saves", "found", "held"),
    [
        ("true", ON_SIGNAL, True),
        ("true", NOT, False),
        ("true", USUAL, True),
        ("unknown", NOT, True),
        ("false", NEVER, True),
        ("false", after_a_notice(67, "timed", signalled=False), True),  # its lines count from 0, its checkpoints do not
        ("unknown", after_a_notice(80, "timed"), False),  # of a step that it had not reached
    ],
)
def test_a_notice_breaks_a_promise_only_where_the_file_says_that_the_command_saves(
    tmp_path: Path, saves: str, found: Resumption, held: bool
) -> None:
    mine = definition(tmp_path)
    mine.source.write_text(mine.source.read_text().replace("  secrets:", f"  stop: {{saves: {saves}}}\n  secrets:"))
    mine = load(mine.source, now=datetime.now(UTC), rehearsal=True)
    kept: Any = SimpleNamespace(rehearsal=SimpleNamespace(definition=mine), spans=lambda: [])
    (promise,) = evidence._resumed(kept, found)
    assert promise.held is held
    assert promise.name == "steps repeated after a notice"


def observed(resumes: str, why: str = "because") -> Observed:
    return Observed(lines=9, told=True, restored=40, resumes=resumes, why=why)


@pytest.mark.parametrize(
    ("nodes", "figure", "held", "shown"),
    [
        (["goes on"], "goes on: because", True, True),
        (["not shown", "goes on"], "goes on: because", True, True),
        (["not shown"], "not shown: because", False, False),
        (["not looked at"], "not looked at: because", True, True),
    ],
)
def test_whether_it_goes_on_stands_in_one_of_three_words(
    nodes: list[str], figure: str, held: bool, shown: bool
) -> None:
    promise = own.resumes([observed(each) for each in nodes])
    assert (promise.figure, promise.held, promise.shown) == (figure, held, shown)


def test_what_is_not_shown_is_never_all_that_held() -> None:
    line = report.closing([own.resumes([observed("not shown", "a line would show it")])], 80.0)
    assert line == (
        "NOT SHOWN, after 80 s: goes on from its checkpoint: not shown: a line would show it. Everything else held."
    )


def test_nodes_whose_ranks_nobody_saw_are_not_said_to_train_together() -> None:
    met, unseen = (
        own.trains_together([Observed(), Observed(met="2 ranks")]),
        own.trains_together([Observed(), Observed(lines=9)]),
    )
    assert (met.figure, met.held) == ("2 ranks", True)
    assert not unseen.is_broken
    assert report.closing([unseen], 80.0).startswith(
        "NOT SHOWN, after 80 s: nodes train together: not shown: no process"
    )


UNREAD = ("ep 3 of 9", "ep 4 of 9")


@pytest.mark.parametrize(
    ("seen", "step", "doubts"),
    [
        ({"lines": 5}, 0, []),
        ({"lines": 50, "unread": UNREAD}, 0, []),  # before it trains
        ({"lines": 50, "unread": UNREAD, "checkpoints": 1, "begun": 1}, 0,
         ["no line matched job.progress.stdout, step (?P<step>[0-9]+); the last ones with numbers were:",
          "  | ep 4 of 9"]),
        ({"lines": 50, "unread": UNREAD, "checkpoints": 1, "begun": 1, "told": True}, 0, []),
        ({"lines": 50, "told": True, "elsewhere": "x was written elsewhere"}, 20,
         ["no checkpoint was saved in the declared folder: x was written elsewhere"]),
        ({"lines": 50, "told": True, "elsewhere": "x.json came into {checkpoints}"}, 9, []),  # before its first save
        ({"lines": 50, "told": True}, 29, []),
        ({"lines": 50, "told": True}, 31, ["no checkpoint appeared in {checkpoints} by step 31, but job."]),
        ({"lines": 50, "told": True, "begun": 1}, 31, []),
        ({"begun": 1, "checkpoints": 2}, 0, []),  # its lines may come in blocks
        ({"lines": 50, "told": True, "follows": True}, 31, []),  # rank 0 saves, on another node
        ({"lines": 50, "unread": UNREAD, "checkpoints": 1, "begun": 1, "follows": True}, 0, []),  # and it alone prints
        ({"begun": 1, "checkpoints": 3}, 0, ["3 checkpoints are whole, but their steps are unknown"]),
    ],
)  # fmt: skip
def test_what_will_not_hold_is_said_as_soon_as_that_is_sure(
    tmp_path: Path, seen: dict[str, Any], step: int, doubts: list[str]
) -> None:
    config: Any = definition(tmp_path).job.parameters
    doubt = own.doubts(config)(Observed(**seen), step)
    assert bool(doubt) is bool(doubts)
    assert all(each in doubt for each in doubts)


def test_the_file_is_told_what_was_found_out() -> None:
    assert own.advice([ON_SIGNAL], 50, None) == "it did: write job.stop.saves: true, so that the bill assumes it"
    assert own.advice([ON_SIGNAL, NOT], 50, True).startswith("it did not: write job.stop.saves: false")
    assert own.advice([NOT], 50, None) == "it did not, as the bill assumes"
    assert own.advice([USUAL], 50, False).startswith("not shown: the save may be one")
    in_doubt = replace(NOT, doubt="a.bin does not count: it may be cut")
    assert own.advice([in_doubt], 50, None) == "not shown: a.bin does not count: it may be cut"
    assert own.advice([NEVER], 50, False) == "not shown: no signal was sent, job.stop.saves is false"
